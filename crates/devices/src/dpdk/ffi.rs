//! The functions and structures of `shim.c`.
#![allow(unsafe_code)] // calls C

use core::ffi::{CStr, c_char, c_int, c_void};
use rustix::io::Errno;

/// Frames that one call receives or sends.
pub(super) const BURST_MAX: usize = 64;

/// Properties of a port.
#[repr(C)]
#[derive(Clone, Debug, Default)]
pub(super) struct PortInfo {
    pub mac: [u8; 6],
    pub mtu: u16,
    pub mtu_min: u16,
    pub mtu_max: u16,
    pub rx_queues_max: u16,
    pub tx_queues_max: u16,
    pub table_entries: u16,
    pub key_bytes: u8,
    pub tx_segments_max: u16,
    pub rx_offloads: u64,
    pub tx_offloads: u64,
    pub hash_types: u64,
    pub driver: [u8; 32],
}

impl PortInfo {
    /// Returns the name of the driver.
    pub fn driver(&self) -> String {
        let end = self.driver.iter().position(|&byte| byte == 0).unwrap_or(self.driver.len());
        String::from_utf8_lossy(&self.driver[..end]).into_owned()
    }
}

/// Configuration of a port.
#[repr(C)]
#[derive(Clone, Debug)]
pub(super) struct PortOptions {
    pub queues: u16,
    pub mtu: u16,
    pub rx_ring: u16,
    pub tx_ring: u16,
    pub frame_bytes: u16,
    pub buffers: u32,
    pub is_umem: u8,
    pub sets_mtu: u8,
    pub sets_multicast: u8,
    pub sets_mac: u8,
    pub mac: [u8; 6],
    pub rx_offloads: u64,
    pub tx_offloads: u64,
    pub hash_types: u64,
    pub key: [u8; 40],
    pub generation: u32,
}

/// A received frame in its buffer, which the process owns until it frees it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RxEntry {
    pub mbuf: *mut c_void,
    pub data: *const u8,
    pub len: u32,
    pub hash: u32,
    pub flags: u32,
}

/// Flags of [`RxEntry`].
pub(super) const RX_HAS_HASH: u32 = 1;
pub(super) const RX_CHECKSUM_GOOD: u32 = 2;
pub(super) const RX_CHECKSUM_NONE: u32 = 4;

/// A buffer for a frame to send, or for a part of one.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct TxEntry {
    pub mbuf: *mut c_void,
    pub data: *mut u8,
    pub room: u32,
    pub len: u32,
    pub flags: u16,
    pub l2_len: u16,
    pub l3_len: u16,
    pub l4_len: u16,
    pub segment_bytes: u16,
}

/// Flags of [`TxEntry`].
pub(super) const TX_CONTINUES: u16 = 1;
pub(super) const TX_CHECKSUM: u16 = 2;
pub(super) const TX_IS_UDP: u16 = 4;
pub(super) const TX_IS_V6: u16 = 8;
pub(super) const TX_SUPER_FRAME: u16 = 16;
pub(super) const TX_IP_CHECKSUM: u16 = 32;

/// A pool of buffers.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool(pub *mut c_void);

impl Pool {
    /// No pool.
    pub const NONE: Self = Self(core::ptr::null_mut());
}

// SAFETY: pools of DPDK may be used by all threads.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

/// Counters that the driver keeps.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PortStats {
    pub missed: u64,
    pub rx_errors: u64,
    pub no_buffer: u64,
    pub tx_errors: u64,
}

pub(super) type LogSink = extern "C" fn(*const c_char, usize);
pub(super) type EventSink = extern "C" fn(u16, c_int);

unsafe extern "C" {
    fn ginnel_dpdk_start(argc: c_int, argv: *mut *mut c_char, sink: LogSink) -> c_int;
    fn ginnel_dpdk_register_thread() -> c_int;
    fn ginnel_dpdk_unregister_thread();
    fn ginnel_dpdk_probe(
        bus: *const c_char,
        name: *const c_char,
        arguments: *const c_char,
        port: *mut u16,
    ) -> c_int;
    fn ginnel_dpdk_adjust_rings(port: u16, rx_ring: *mut u16, tx_ring: *mut u16) -> c_int;
    fn ginnel_dpdk_port_count() -> u16;
    fn ginnel_dpdk_info(port: u16, out: *mut PortInfo) -> c_int;
    fn ginnel_dpdk_open(
        port: u16,
        options: *const PortOptions,
        pools: *mut Pool,
        step: *mut *const c_char,
    ) -> c_int;
    fn ginnel_dpdk_is_up(port: u16) -> c_int;
    fn ginnel_dpdk_stats(port: u16, out: *mut PortStats) -> c_int;
    fn ginnel_dpdk_watch(port: u16, sink: EventSink) -> c_int;
    fn ginnel_dpdk_close(port: u16, pools: *mut Pool, queues: u16);
    fn ginnel_dpdk_set_table(port: u16, entries: u16, queues: u16) -> c_int;
    fn ginnel_dpdk_get_table(port: u16, out: *mut u16, entries: u16) -> c_int;
    fn ginnel_dpdk_set_key(port: u16, key: *const u8, key_bytes: u8, hash_types: u64) -> c_int;
    fn ginnel_dpdk_get_key(port: u16, out: *mut u8, hash_types: *mut u64) -> c_int;
    /// Frees the buffers of at most 64 entries.
    pub(super) fn ginnel_dpdk_free_rx(entries: *mut RxEntry, count: u32);
    /// Receives into 64 entries, and returns how many it filled.
    pub(super) fn ginnel_dpdk_receive(port: u16, queue: u16, entries: *mut RxEntry, dropped: *mut u64)
    -> u32;
    /// Fills entries with empty buffers, and returns how many.
    pub(super) fn ginnel_dpdk_allocate(pool: Pool, entries: *mut TxEntry, count: u32) -> u32;
    /// Asks the driver for buffers of frames that it has sent.
    pub(super) fn ginnel_dpdk_reclaim(port: u16, queue: u16);
    /// Frees the buffers of entries.
    pub(super) fn ginnel_dpdk_free_tx(entries: *mut TxEntry, count: u32);
    /// Sends the frames of entries, and returns how many entries the port took. Sets `is_refused` to 1 if the
    /// port can never send the frame that follows.
    pub(super) fn ginnel_dpdk_send(
        port: u16,
        queue: u16,
        entries: *mut TxEntry,
        count: u32,
        is_refused: *mut u32,
    ) -> u32;
}

/// Converts a result of DPDK: 0, or a negative errno. Some drivers return -1 for any error.
fn check(result: c_int) -> Result<(), Errno> {
    if result == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(result.saturating_neg().max(1))) }
}

/// Starts EAL with these arguments, the first of which is the name of the program. EAL keeps the strings.
pub(super) fn start(arguments: Vec<&'static CStr>, sink: LogSink) -> Result<(), Errno> {
    let mut argv: Vec<*mut c_char> = arguments.iter().map(|text| text.as_ptr().cast_mut()).collect();
    argv.push(core::ptr::null_mut());
    let argv = Box::leak(argv.into_boxed_slice());
    // SAFETY: the array and the strings live forever. EAL reorders the array, and does not write to strings.
    check(unsafe { ginnel_dpdk_start(arguments.len() as c_int, argv.as_mut_ptr(), sink) })
}

/// Registers the calling thread with EAL.
pub(super) fn register_thread() -> Result<(), Errno> {
    // SAFETY: EAL was started before a port was opened, and threads register when they use a port.
    check(unsafe { ginnel_dpdk_register_thread() })
}

/// Ends the registration of the calling thread.
pub(super) fn unregister_thread() {
    // SAFETY: the thread was registered.
    unsafe { ginnel_dpdk_unregister_thread() }
}

/// Finds or creates a device of a bus, and returns its first port. `arguments` begins with the name.
pub(super) fn probe(bus: &CStr, name: &CStr, arguments: &CStr) -> Result<u16, Errno> {
    let mut port = 0;
    // SAFETY: the strings and the number outlive the call.
    check(unsafe { ginnel_dpdk_probe(bus.as_ptr(), name.as_ptr(), arguments.as_ptr(), &mut port) })
        .map(|()| port)
}

/// Returns the sizes of the receive ring and the transmit ring that the port has if `ring` is wanted.
pub(super) fn rings(port: u16, ring: u16) -> Result<(u16, u16), Errno> {
    let (mut rx, mut tx) = (ring, ring);
    // SAFETY: the function checks the number of the port, and the sizes outlive the call.
    check(unsafe { ginnel_dpdk_adjust_rings(port, &mut rx, &mut tx) }).map(|()| (rx, tx))
}

/// Returns the number of ports.
pub(super) fn port_count() -> u16 {
    // SAFETY: the function has no requirements.
    unsafe { ginnel_dpdk_port_count() }
}

/// Returns the properties of a port.
pub(super) fn info(port: u16) -> Result<PortInfo, Errno> {
    let mut out = PortInfo::default();
    // SAFETY: the structure outlives the call.
    check(unsafe { ginnel_dpdk_info(port, &mut out) }).map(|()| out)
}

/// Configures and starts a port. `pools` has an entry for each queue. The error has the step that failed.
pub(super) fn open(
    port: u16,
    options: &PortOptions,
    pools: &mut [Pool],
) -> Result<(), (&'static str, Errno)> {
    assert_eq!(pools.len(), usize::from(options.queues), "a pool for each queue");
    let mut step = core::ptr::null();
    // SAFETY: the structures outlive the call, and there is room for the pools.
    let result = unsafe { ginnel_dpdk_open(port, options, pools.as_mut_ptr(), &mut step) };
    check(result).map_err(|error| {
        // SAFETY: the steps are string literals of the shim, and one was set before anything could fail.
        let step = unsafe { CStr::from_ptr(step) };
        (step.to_str().unwrap_or_default(), error)
    })
}

/// Returns whether the link of a port is up.
pub(super) fn is_up(port: u16) -> Result<bool, Errno> {
    // SAFETY: the function checks the number.
    match unsafe { ginnel_dpdk_is_up(port) } {
        error @ ..0 => Err(Errno::from_raw_os_error(error.saturating_neg())),
        is_up => Ok(is_up != 0),
    }
}

/// Returns the counters of a port.
pub(super) fn stats(port: u16) -> Result<PortStats, Errno> {
    let mut out = PortStats::default();
    // SAFETY: the structure outlives the call.
    check(unsafe { ginnel_dpdk_stats(port, &mut out) }).map(|()| out)
}

/// Calls `sink` when the link of the port changes or the device is removed.
pub(super) fn watch(port: u16, sink: EventSink) -> Result<(), Errno> {
    // SAFETY: the function lives forever.
    check(unsafe { ginnel_dpdk_watch(port, sink) })
}

/// Stops and removes a port, and frees its pools. No buffer of the pools may be in use by this process.
pub(super) fn close(port: u16, pools: &mut [Pool]) {
    // SAFETY: the pools are those of the port, or null; each is freed once, because the caller owns them.
    unsafe { ginnel_dpdk_close(port, pools.as_mut_ptr(), pools.len() as u16) }
}

/// Sets the indirection table: entry e names queue e % 128 % `queues`.
pub(super) fn set_table(port: u16, entries: u16, queues: u16) -> Result<(), Errno> {
    // SAFETY: the function checks the numbers.
    check(unsafe { ginnel_dpdk_set_table(port, entries, queues) })
}

/// Reads the indirection table.
pub(super) fn table(port: u16, entries: u16) -> Result<Vec<u16>, Errno> {
    let mut out = vec![0; entries.into()];
    // SAFETY: there is room for the entries.
    check(unsafe { ginnel_dpdk_get_table(port, out.as_mut_ptr(), entries) }).map(|()| out)
}

/// Sets the RSS key.
pub(super) fn set_key(port: u16, key: &[u8; 40], key_bytes: u8, hash_types: u64) -> Result<(), Errno> {
    // SAFETY: the key outlives the call.
    check(unsafe { ginnel_dpdk_set_key(port, key.as_ptr(), key_bytes, hash_types) })
}

/// Reads the first 40 bytes of the RSS key, and the types of packets that are hashed.
pub(super) fn key(port: u16) -> Result<([u8; 40], u64), Errno> {
    let (mut key, mut hash_types) = ([0; 40], 0);
    // SAFETY: there is room for the key.
    check(unsafe { ginnel_dpdk_get_key(port, key.as_mut_ptr(), &mut hash_types) }).map(|()| (key, hash_types))
}
