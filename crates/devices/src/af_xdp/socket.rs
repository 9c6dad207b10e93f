//! An AF_XDP socket on one queue: its options, its rings, and the system calls that wake the kernel.
#![allow(unsafe_code)] // options that no crate names

use super::config::CopyMode;
use super::rings::{ConsumerRing, ProducerRing, XdpDescriptor, mapping_bytes};
use super::umem::{self, Mapping, RxChunks, TxChunks};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING,
    XDP_UMEM_PGOFF_FILL_RING, XdpOptionsFlags, XdpStatistics, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::ffi::c_int;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// `XDP_MAX_TX_SKB_BUDGET`: maximum number of frames that one call sends in copy mode; 32 by default.
const XDP_MAX_TX_SKB_BUDGET: c_int = 9;

/// Maximum time for which a queue stays busy after its last socket was closed.
const BIND_BUSY_MAX: Duration = Duration::from_millis(500);

/// Options of one socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct XdpSocketOptions {
    /// Index of the interface.
    pub(super) interface: u32,
    pub(super) queue: u16,
    /// Descriptors of each ring.
    pub(super) ring: u32,
    /// Bytes of a UMEM chunk.
    pub(super) chunk: usize,
    pub(super) mode: CopyMode,
    pub(super) need_wakeup: bool,
    /// True if frames may span several chunks.
    pub(super) multi_buffer: bool,
    /// Microseconds and packet budget of busy polling, if it is enabled.
    pub(super) busy_poll: Option<(u32, u16)>,
}

/// A bound socket.
#[derive(Debug)]
pub(super) struct XdpSocket {
    fd: OwnedFd,
    /// True if the socket is in copy mode: the kernel sends frames only in system calls of this process.
    pub(super) is_copy_mode: bool,
    /// True if system calls are needed only if the ring's flag requests them.
    pub(super) need_wakeup: bool,
    pub(super) busy_poll: bool,
    /// The memory that the kernel reads and writes.
    _memory: Arc<Mapping>,
}

/// A socket with its rings and chunks.
pub(super) struct XdpSocketParts {
    pub(super) socket: Arc<XdpSocket>,
    pub(super) rx: RxRings,
    pub(super) tx: TxRings,
}

/// The rings and chunks of the receiving half.
pub(super) struct RxRings {
    pub(super) ring: ConsumerRing<XdpDescriptor>,
    pub(super) fill: ProducerRing<u64>,
    pub(super) chunks: RxChunks,
}

/// The rings and chunks of the sending half.
pub(super) struct TxRings {
    pub(super) ring: ProducerRing<XdpDescriptor>,
    pub(super) completion: ConsumerRing<u64>,
    pub(super) chunks: TxChunks,
}

/// Opens a socket and binds it to its queue. The error names the step that failed.
pub(super) fn open(options: &XdpSocketOptions) -> Result<XdpSocketParts, (SetupStep, io::Error)> {
    let at = |step: SetupStep| move |error: Errno| (step, io::Error::from(error));
    let fd = rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)
        .map_err(at(SetupStep::Open))?;
    let ring = options.ring;
    let (memory, rx_chunks, tx_chunks) = umem::create(options.chunk, ring as usize, ring as usize)
        .map_err(|error| (SetupStep::Memory, error))?;
    let registration = XdpUmemReg {
        addr: memory.at(0, memory.len()).as_ptr() as u64,
        len: memory.len() as u64,
        chunk_size: options.chunk as u32,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    sockopt::set_xdp_umem_reg(&fd, registration).map_err(at(SetupStep::Memory))?;
    sockopt::set_xdp_umem_fill_ring_size(&fd, ring).map_err(at(SetupStep::Rings))?;
    sockopt::set_xdp_umem_completion_ring_size(&fd, ring).map_err(at(SetupStep::Rings))?;
    sockopt::set_xdp_rx_ring_size(&fd, ring).map_err(at(SetupStep::Rings))?;
    sockopt::set_xdp_tx_ring_size(&fd, ring).map_err(at(SetupStep::Rings))?;
    let offsets = sockopt::xdp_mmap_offsets(&fd).map_err(at(SetupStep::Rings))?;
    let map = |place: u64, len: usize| {
        Mapping::map_fd(&fd, place, len).map(Arc::new).map_err(|error| (SetupStep::Rings, error))
    };
    let rx = map(XDP_PGOFF_RX_RING, mapping_bytes::<XdpDescriptor>(&offsets.rx, ring))?;
    let tx = map(XDP_PGOFF_TX_RING, mapping_bytes::<XdpDescriptor>(&offsets.tx, ring))?;
    let fill = map(XDP_UMEM_PGOFF_FILL_RING, mapping_bytes::<u64>(&offsets.fr, ring))?;
    let completion = map(XDP_UMEM_PGOFF_COMPLETION_RING, mapping_bytes::<u64>(&offsets.cr, ring))?;

    let mut fill = ProducerRing::<u64>::new(fill, &offsets.fr, ring);
    for address in rx_chunks.addresses() {
        // The ring has an entry for each chunk.
        let _ = fill.push(address);
    }
    fill.publish();

    // All chunks may be in flight at once as socket buffers, each with the kernel's own overhead.
    let under_way = ring as usize * (options.chunk + 1024) * 2;
    let send_buffer = c_int::try_from(under_way).unwrap_or(c_int::MAX);
    set_option(fd.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, send_buffer)
        .map_err(at(SetupStep::Options))?;
    // This option exists since Linux 6.17; without it, `flush` makes several calls.
    let _ = set_option(fd.as_fd(), libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, ring as c_int);
    if let Some((microseconds, budget)) = options.busy_poll {
        for (name, value) in [
            (libc::SO_PREFER_BUSY_POLL, 1),
            (libc::SO_BUSY_POLL, microseconds as c_int),
            (libc::SO_BUSY_POLL_BUDGET, c_int::from(budget)),
        ] {
            set_option(fd.as_fd(), libc::SOL_SOCKET, name, value).map_err(at(SetupStep::BusyPoll))?;
        }
    }

    let mut flags = match options.mode {
        CopyMode::Auto => SocketAddrXdpFlags::empty(),
        CopyMode::Copy => SocketAddrXdpFlags::XDP_COPY,
        CopyMode::ZeroCopy => SocketAddrXdpFlags::XDP_ZEROCOPY,
    };
    flags.set(SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP, options.need_wakeup);
    flags.set(SocketAddrXdpFlags::XDP_USE_SG, options.multi_buffer);
    let address = SocketAddrXdp::new(flags, options.interface, options.queue.into());
    // The kernel releases a queue a little after its socket was closed, so a program that is restarted at
    // once would find its own queue busy.
    let deadline = Instant::now() + BIND_BUSY_MAX;
    while let Err(error) = rustix::net::bind(&fd, &address) {
        if error != Errno::BUSY || Instant::now() > deadline {
            return Err(at(SetupStep::Bind)(error));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let copies = !sockopt::xdp_options(&fd)
        .map_err(at(SetupStep::Bind))?
        .contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY);
    let socket = XdpSocket {
        fd,
        is_copy_mode: copies,
        need_wakeup: options.need_wakeup,
        busy_poll: options.busy_poll.is_some(),
        _memory: memory,
    };
    Ok(XdpSocketParts {
        socket: Arc::new(socket),
        rx: RxRings { ring: ConsumerRing::new(rx, &offsets.rx, ring), fill, chunks: rx_chunks },
        tx: TxRings {
            ring: ProducerRing::new(tx, &offsets.tx, ring),
            completion: ConsumerRing::new(completion, &offsets.cr, ring),
            chunks: tx_chunks,
        },
    })
}

/// Step of opening a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SetupStep {
    Open,
    Memory,
    Rings,
    Options,
    BusyPoll,
    Bind,
}

impl XdpSocket {
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Makes the kernel send the descriptors in the TX ring.
    pub(super) fn kick_tx(&self) -> Result<(), Errno> {
        rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT).map(drop)
    }

    /// Makes the kernel read the fill ring, and the driver receive.
    pub(super) fn kick_rx(&self) {
        // Errors are ignored: they mean that the interface is down or that no frame was waiting.
        let _ = rustix::net::recv(&self.fd, &mut [0u8; 0], RecvFlags::DONTWAIT);
    }

    /// Returns and clears the pending error: ENETDOWN when the interface was deleted.
    pub(super) fn take_error(&self) -> Option<Errno> {
        match sockopt::socket_error(&self.fd) {
            Ok(Err(error)) => Some(error),
            _ => None,
        }
    }

    /// Returns the kernel's counters.
    pub(super) fn statistics(&self) -> io::Result<XdpStatistics> {
        Ok(sockopt::xdp_statistics(&self.fd)?)
    }
}

/// Sets an option with an integer value.
fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> Result<(), Errno> {
    // SAFETY: the kernel reads `size_of::<c_int>()` bytes of an integer that outlives the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
    if result == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL))
}

#[cfg(all(test, not(loom)))]
impl XdpSocket {
    /// Creates a value around a descriptor that is no AF_XDP socket; its calls have no effect.
    pub(super) fn of(fd: OwnedFd) -> Arc<Self> {
        let memory = Arc::new(Mapping::anonymous(4096).expect("memory"));
        Arc::new(Self { fd, is_copy_mode: true, need_wakeup: true, busy_poll: true, _memory: memory })
    }
}
