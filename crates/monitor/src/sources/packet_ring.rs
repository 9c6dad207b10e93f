//! The ring that a packet socket shares with the kernel (`TPACKET_V3`): the kernel fills a block with
//! packets, passes it on, and gets it back.
#![allow(unsafe_code)] // options that no crate names, and a ring in shared memory

use super::TimedPacket;
use arrayvec::ArrayVec;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use ginnel_stack::time::Instant;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::{CString, c_int, c_uint};
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// Bytes of a block; a packet may take a whole one.
const BLOCK_BYTES: usize = 1 << 20;
/// Number of blocks.
const BLOCKS: usize = 32;
/// Bytes of a frame, a unit that this version of the ring only checks.
const FRAME_BYTES: usize = 1 << 11;
/// After this time the kernel passes on a block that is not full.
pub(super) const RETIRE_MS: u32 = 10;
/// Packets that are passed on together.
const PACKETS_MAX: usize = 64;
/// The type of packets that this machine sends.
const PACKET_OUTGOING: u8 = 4;

/// Gets the packets of a block with their times.
type BlockVisitor<'a> = dyn FnMut(&[TimedPacket<'_>]) + 'a;

/// A packet socket and its ring.
pub(super) struct PacketRing {
    fd: OwnedFd,
    base: NonNull<u8>,
    /// The block that the kernel passes on next.
    block: usize,
    hardware_type: u16,
}

// SAFETY: the mapping belongs to this value alone.
unsafe impl Send for PacketRing {}

impl PacketRing {
    pub(super) fn open(name: &str) -> io::Result<Self> {
        let c_name = CString::new(name).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: the argument is a C string.
        let index = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        // Without a protocol, the socket gets no packets until it is bound.
        // SAFETY: the call has no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was opened above, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        set_option(&fd, libc::PACKET_VERSION, &libc::tpacket_versions::TPACKET_V3)?;
        let request = libc::tpacket_req3 {
            tp_block_size: BLOCK_BYTES as c_uint,
            tp_block_nr: BLOCKS as c_uint,
            tp_frame_size: FRAME_BYTES as c_uint,
            tp_frame_nr: (BLOCK_BYTES / FRAME_BYTES * BLOCKS) as c_uint,
            tp_retire_blk_tov: RETIRE_MS,
            tp_sizeof_priv: 0,
            tp_feature_req_word: 0,
        };
        set_option(&fd, libc::PACKET_RX_RING, &request)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which is unmapped when the value is dropped.
        let base = unsafe {
            mmap(core::ptr::null_mut(), BLOCK_BYTES * BLOCKS, protection, MapFlags::SHARED, &fd, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        let mut ring = Self { fd, base, block: 0, hardware_type: 0 };
        ring.bind(index)?;
        Ok(ring)
    }

    fn bind(&mut self, index: c_uint) -> io::Result<()> {
        // SAFETY: all zero is a valid address.
        let mut address: libc::sockaddr_ll = unsafe { core::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        // In network byte order.
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as c_int;
        let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the pointer and the length are those of an address.
        if unsafe { libc::bind(self.fd.as_raw_fd(), (&raw const address).cast(), len) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above; the kernel writes at most `len` bytes.
        if unsafe { libc::getsockname(self.fd.as_raw_fd(), (&raw mut address).cast(), &raw mut len) } < 0 {
            return Err(io::Error::last_os_error());
        }
        self.hardware_type = address.sll_hatype;
        let membership = libc::packet_mreq {
            mr_ifindex: index as c_int,
            mr_type: libc::PACKET_MR_PROMISC as u16,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        set_option(&self.fd, libc::PACKET_ADD_MEMBERSHIP, &membership)
    }

    pub(super) fn hardware_type(&self) -> u16 {
        self.hardware_type
    }

    /// Passes the packets of the next block to `visit`, with `without_sent` only those that this machine has
    /// received. Returns false if the kernel still fills the block.
    pub(super) fn read_block(
        &mut self,
        without_sent: bool,
        visit: &mut BlockVisitor<'_>,
    ) -> io::Result<bool> {
        // SAFETY: the block lies in the mapping, and is aligned to a page.
        let block = unsafe { self.base.add(self.block * BLOCK_BYTES) };
        let status_at =
            offset_of!(libc::tpacket_block_desc, hdr) + offset_of!(libc::tpacket_hdr_v1, block_status);
        // SAFETY: the kernel and this process access the status as an atomic word, at an aligned address.
        let status = unsafe { &*block.add(status_at).cast::<AtomicU32>().as_ptr() };
        if status.load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
            return Ok(false);
        }
        // SAFETY: the kernel does not write to the block until the status says that it may.
        let bytes = unsafe { core::slice::from_raw_parts(block.as_ptr(), BLOCK_BYTES) };
        read_packets(bytes, without_sent, visit);
        status.store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.block = (self.block + 1) % BLOCKS;
        Ok(true)
    }

    /// Waits until the kernel passes on a block.
    pub(super) fn wait(&self, timeout: Duration) -> io::Result<()> {
        let timeout =
            Timespec::try_from(timeout).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            // The interface is gone, or down. Until its error is taken, `poll` does not wait.
            Ok(_) if fds[0].revents().contains(PollFlags::ERR) => {
                Ok(rustix::net::sockopt::socket_error(&self.fd)??)
            }
            Err(rustix::io::Errno::INTR) | Ok(_) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns how many packets the kernel has dropped since the last call.
    pub(super) fn take_drops(&self) -> u64 {
        let mut stats = libc::tpacket_stats_v3 { tp_packets: 0, tp_drops: 0, tp_freeze_q_cnt: 0 };
        let mut len = size_of::<libc::tpacket_stats_v3>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes.
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut stats).cast(),
                &raw mut len,
            )
        };
        if result < 0 { 0 } else { stats.tp_drops.into() }
    }
}

impl Drop for PacketRing {
    fn drop(&mut self) {
        // SAFETY: `open` mapped this address with this length, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), BLOCK_BYTES * BLOCKS) };
    }
}

fn set_option<T>(fd: &OwnedFd, option: c_int, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: pointer and length are those of a value, which the kernel reads.
    let result = unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_PACKET, option, core::ptr::from_ref(value).cast(), len)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Finds the packets of a block. Every offset is checked.
fn read_packets(block: &[u8], without_sent: bool, visit: &mut BlockVisitor<'_>) {
    let head = offset_of!(libc::tpacket_block_desc, hdr);
    let count = word(block, head + offset_of!(libc::tpacket_hdr_v1, num_pkts)).unwrap_or(0);
    let first = word(block, head + offset_of!(libc::tpacket_hdr_v1, offset_to_first_pkt)).unwrap_or(0);
    let mut at = first as usize;
    let mut packets = ArrayVec::<TimedPacket<'_>, PACKETS_MAX>::new();
    for _ in 0..count {
        let Some((time, bytes, kind, next)) = read_packet(block, at) else { break };
        if !(without_sent && kind == PACKET_OUTGOING) {
            packets.push((time, bytes));
            if packets.is_full() {
                visit(&packets);
                packets.clear();
            }
        }
        if next == 0 {
            break;
        }
        at += next;
    }
    if !packets.is_empty() {
        visit(&packets);
    }
}

/// Returns time, bytes and type of the packet at `at`, and the distance of the next one.
fn read_packet(block: &[u8], at: usize) -> Option<(Instant, &[u8], u8, usize)> {
    let field = |offset: usize| word(block, at.checked_add(offset)?);
    let next = field(offset_of!(libc::tpacket3_hdr, tp_next_offset))? as usize;
    let seconds = u64::from(field(offset_of!(libc::tpacket3_hdr, tp_sec))?);
    let nanos = u64::from(field(offset_of!(libc::tpacket3_hdr, tp_nsec))?);
    let captured = field(offset_of!(libc::tpacket3_hdr, tp_snaplen))? as usize;
    let mac_at = at + offset_of!(libc::tpacket3_hdr, tp_mac);
    let mac = usize::from(u16::from_ne_bytes(*block.get(mac_at..)?.first_chunk()?));
    let address = at + size_of::<libc::tpacket3_hdr>().next_multiple_of(libc::TPACKET_ALIGNMENT);
    let kind = *block.get(address + offset_of!(libc::sockaddr_ll, sll_pkttype))?;
    let bytes = block.get(at + mac..)?.get(..captured)?;
    Some((Instant::from_nanos(seconds * 1_000_000_000 + nanos), bytes, kind, next))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}
