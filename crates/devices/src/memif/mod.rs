//! memif: a packet interface between two processes over shared memory. Implements version 2.0 of the
//! protocol, like DPDK's net_memif, libmemif and VPP.
//!
//! The client allocates the memory and passes it over a control socket; descriptor rings in it state which
//! buffers hold frames. The shared memory is not trusted: indices, offsets and lengths are read once and
//! checked, and frames are copied once before they are processed. A peer that violates the protocol loses its
//! connection, without any other effect. Rationale: `docs/adr/0008-memif.md`.
//!
//! A separate thread listens or connects; it interacts with the halves of the device only when a connection
//! comes up or goes down. While no peer is connected, the device receives nothing, and drops and counts
//! frames to send.

mod config;
mod control;
mod control_channel;
mod extension;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handshake;
mod message;
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

/// Bytes by which a frame can exceed the MTU: an Ethernet header with a VLAN tag.
const LINK_HEADER_BYTES_MAX: usize = 18;
/// Bytes of the largest frame: a super-frame with a VLAN tag.
const FRAME_BYTES_MAX: usize = GSO_BYTES_MAX + 4;
/// Bytes of the largest frame with the header of the extension.
const FRAME_WITH_HEADER_BYTES_MAX: usize = HEADER_BYTES + FRAME_BYTES_MAX;

/// Counters of all queues.
#[derive(Debug, Default)]
pub struct MemifStats {
    /// Connections that were established.
    pub connections: AtomicU64,
    /// Peers that were rejected: without permission, after an invalid message, or when their handshake took
    /// too long.
    pub refused: AtomicU64,
    /// Connections that were closed because the peer violated the ring protocol.
    pub violations: AtomicU64,
    /// Received frames that were empty, too long, incomplete, or contradicted their header.
    pub rx_malformed: AtomicU64,
    /// Frames dropped because no peer was connected, the peer violated the ring protocol, segments of a
    /// super-frame did not fit into the ring, or the metadata contradicted the frame.
    pub tx_dropped: AtomicU64,
}

fn increment(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// An open memif device.
pub struct Memif {
    /// One device for each queue. The interface is closed when the last of them is dropped.
    pub queues: Vec<Device>,
    /// Counters of all queues.
    pub stats: Arc<MemifStats>,
    /// State of the link.
    pub link: LinkState,
    wakers: Vec<Arc<Waker>>,
}

impl Memif {
    /// Joins all queues into one device, for a single shard whose peer has several queues. The device sends
    /// on the first queue.
    ///
    /// # Errors
    /// The process has no descriptor left for the epoll set.
    pub fn into_single_device(self) -> io::Result<Device> {
        joined::join(self.queues, self.wakers.iter().map(|waker| waker.fd().as_fd()))
    }
}

/// Tells whether a peer is connected.
#[derive(Clone, Debug)]
pub struct LinkState(Arc<MemifShared>);

impl LinkState {
    /// Returns whether a peer is connected.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.0.up.load(Ordering::Acquire)
    }

    /// Waits until the link is up or down, for at most `longest`. Returns whether it reached that state.
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

/// State that the control thread shares with the halves.
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

/// Stops the control thread when the last half is dropped.
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
            // The thread never waits for a peer. A panic of it was reported when it occurred.
            let _ = thread.join();
        }
    }
}

/// Opens a memif device. A server is listening when this function returns; a client tries to connect to its
/// server from now on, also after each disconnection.
///
/// # Errors
/// `InvalidInput` for a value outside its range. For the listening socket, the error of the kernel:
/// `AddrInUse` if another server listens, `AlreadyExists` if the file is no socket. Otherwise the
/// process has no descriptor or thread left.
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

/// Creates the queues and the control thread's state, without listening socket and thread.
fn build_queues(
    config: &MemifConfig,
    shared: &Arc<MemifShared>,
    guard: &Arc<ControlThreadGuard>,
    signaller: impl Fn() -> io::Result<Arc<Signaller>>,
) -> io::Result<(Vec<Device>, ControlThread)> {
    let slots = (0..config.queues)
        .map(|_| {
            let (waker, signaller) = (Arc::new(Waker::new()?), signaller()?);
            Ok(QueueSlots { rx: RingSlot::new(), tx: RingSlot::new(), waker, signaller })
        })
        .collect::<io::Result<Vec<_>>>()?;
    let (capabilities, stats) = (capabilities(config), &shared.stats);
    let queues = slots
        .iter()
        .enumerate()
        .map(|(number, queue)| {
            let mut rx = MemifRx::new(queue.rx.clone(), queue.waker.clone(), stats.clone(), guard.clone());
            rx.reports_stats = number == 0;
            let tx = MemifTx::new(queue.tx.clone(), capabilities, stats.clone(), guard.clone());
            Device { rx: Box::new(rx), tx: Box::new(tx) }
        })
        .collect();
    Ok((queues, ControlThread { config: Arc::new(config.clone()), shared: shared.clone(), queues: slots }))
}

/// Returns the capabilities. They do not depend on the peer: offloads that a peer does not support are
/// performed in software.
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
