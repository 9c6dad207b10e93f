//! memif: a packet interface between two processes, in shared memory. Speaks version 2.0 of the protocol, as DPDK's net_memif, libmemif and VPP do.
//!
//! The client makes the memory and offers it over a socket; rings of descriptors in it say which buffers hold frames. Nothing in that memory is
//! trusted: indices, places and lengths are read once and checked, frames are copied once and only the copy is looked at.
//! A peer that breaks the rules loses the connection, and nothing else happens. Why it is done like this: `docs/adr/0008-memif.md`.
//!
//! A thread of its own listens or connects; the halves of the device meet it only when a connection comes or goes. While nobody is connected, nothing is
//! received and what is sent is dropped and counted.

mod config;
mod control;
mod control_channel;
mod extension;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handshake;
mod message;
mod region;
mod ring;
mod ring_slot;
mod rx;
mod signal;
mod socket;
mod tx;

pub use config::{MemifConfig, QUEUES_MAX, Role, SocketName};

use crate::joined;
use crate::offload::GSO_BYTES_MAX;
use control::{ControlThread, QueueSlots};
use extension::HEADER_BYTES;
use ginnel_stack::device::{Capabilities, Device};
use ring_slot::{EventFd, RingSlot, Waker};
use rx::MemifRx;
use signal::Signaller;
use socket::MemifListener;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tx::MemifTx;

/// Bytes that a frame can be longer than the MTU: an Ethernet header with a VLAN tag.
const LINK_HEADER_BYTES_MAX: usize = 18;
/// Bytes of the largest frame: a super-frame with a VLAN tag.
const FRAME_BYTES_MAX: usize = GSO_BYTES_MAX + 4;
/// The same with the extension's header in front.
const FRAME_WITH_HEADER_BYTES_MAX: usize = HEADER_BYTES + FRAME_BYTES_MAX;

/// What happened that nobody could be told. Shared by all queues.
#[derive(Debug, Default)]
pub struct MemifStats {
    /// Connections that came up.
    pub connections: AtomicU64,
    /// Peers that were sent away, or not let in, because of what they said.
    pub refused: AtomicU64,
    /// Connections that were broken off because of what the peer wrote into a ring.
    pub violations: AtomicU64,
    /// Frames that were empty, too long, not whole, or contradicted their header.
    pub rx_malformed: AtomicU64,
    /// Frames dropped because nobody was connected, or a super-frame's segments did not fit.
    pub tx_dropped: AtomicU64,
}

fn increment(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// An open memif device.
pub struct Memif {
    /// One device for each queue. The interface is closed when the last of them is dropped.
    pub queues: Vec<Device>,
    /// Shared by all queues.
    pub stats: Arc<MemifStats>,
    /// Whether somebody is connected.
    pub link: LinkState,
    wakers: Vec<Arc<Waker>>,
}

impl Memif {
    /// All queues as one device, which sends on the first: for a shard that is alone with a peer that has several.
    ///
    /// # Errors
    /// No descriptors.
    pub fn into_single_device(self) -> io::Result<Device> {
        joined::join(self.queues, self.wakers.iter().map(|waker| waker.fd().as_fd()))
    }
}

/// Tells whether a peer is connected.
#[derive(Clone, Debug)]
pub struct LinkState(Arc<MemifShared>);

impl LinkState {
    /// Whether a peer is connected now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.0.up.load(Ordering::Acquire)
    }

    /// Waits until the link is up or down, at most so long. Whether it became so.
    pub fn wait_for(&self, up: bool, longest: Duration) -> bool {
        let deadline = Instant::now() + longest;
        while self.is_up() != up {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

/// What the control thread shares with the rest.
#[derive(Debug)]
struct MemifShared {
    up: AtomicBool,
    stop: AtomicBool,
    /// Wakes the control thread.
    event: Arc<EventFd>,
    stats: Arc<MemifStats>,
}

impl MemifShared {
    fn new() -> io::Result<Self> {
        Ok(Self {
            up: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            event: Arc::new(EventFd::new()?),
            stats: Arc::default(),
        })
    }
}

/// Ends the control thread when the last half is gone.
#[derive(Debug)]
struct ControlThreadGuard {
    shared: Arc<MemifShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for ControlThreadGuard {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.event.signal();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It waits for nobody. If it panicked, that was reported when it did.
            let _ = thread.join();
        }
    }
}

/// Opens a memif device. As server it listens when this returns; as client it looks for its server from now on, until it finds it, and again
/// when it is gone.
///
/// # Errors
/// `InvalidInput` for a value outside its range; what the kernel answered to the listening socket: `AddrInUse` if there is a server already,
/// `AlreadyExists` if the file is something else; no descriptors, no thread.
pub fn open(config: &MemifConfig) -> io::Result<Memif> {
    config.validate().map_err(|problem| io::Error::new(io::ErrorKind::InvalidInput, problem))?;
    let listener = match config.role {
        Role::Server => Some(MemifListener::bind(&config.socket).map_err(|error| {
            io::Error::new(error.kind(), format!("memif socket {}: {error}", config.socket))
        })?),
        Role::Client => None,
    };
    let shared = Arc::new(MemifShared::new()?);
    let guard = Arc::new(ControlThreadGuard { shared: shared.clone(), thread: Mutex::new(None) });
    let (queues, control) = build_queues(config, &shared, &guard, || Ok(Arc::new(Signaller::new()?)))?;
    let wakers = control.queues.iter().map(|queue| queue.waker.clone()).collect();
    let thread =
        thread::Builder::new().name(format!("memif{}", config.id)).spawn(move || match listener {
            Some(listener) => control.run_server(listener),
            None => control.run_client(),
        })?;
    *guard.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    Ok(Memif { queues, stats: shared.stats.clone(), link: LinkState(shared), wakers })
}

/// All that a device consists of, but its listening socket and its thread.
fn build_queues(
    config: &MemifConfig,
    shared: &Arc<MemifShared>,
    guard: &Arc<ControlThreadGuard>,
    signaller: impl Fn() -> io::Result<Arc<Signaller>>,
) -> io::Result<(Vec<Device>, ControlThread)> {
    let ports = (0..config.queues)
        .map(|_| {
            let (waker, signaller) = (Arc::new(Waker::new()?), signaller()?);
            Ok(QueueSlots { rx: RingSlot::new(), tx: RingSlot::new(), waker, signaller })
        })
        .collect::<io::Result<Vec<_>>>()?;
    let (capabilities, stats) = (capabilities(config), &shared.stats);
    let queues = ports
        .iter()
        .enumerate()
        .map(|(number, queue)| {
            let mut rx = MemifRx::new(queue.rx.clone(), queue.waker.clone(), stats.clone(), guard.clone());
            rx.reports_stats = number == 0;
            let tx = MemifTx::new(queue.tx.clone(), capabilities, stats.clone(), guard.clone());
            Device { rx: Box::new(rx), tx: Box::new(tx) }
        })
        .collect();
    Ok((queues, ControlThread { config: Arc::new(config.clone()), shared: shared.clone(), queues: ports }))
}

/// They stay the same whoever is connected: what a peer cannot take is done here.
fn capabilities(config: &MemifConfig) -> Capabilities {
    Capabilities {
        mac: config.mac_address(),
        mtu: config.mtu,
        tx_checksum: config.offload,
        gso_bytes_max: if config.offload { GSO_BYTES_MAX } else { 0 },
        uso: config.offload,
        labels: config.offload,
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
