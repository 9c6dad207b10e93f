//! Socket calls of POSIX and Linux on Ginnel's stack: what a program sees that was written for the kernel.
//!
//! One value, [`Ops`], serves one process: all its threads, all its descriptors. Each call does what the system call of its name does, with the same
//! results and the same `errno`; what differs stands in `docs/posix.md`. Calls about descriptors that are not the stack's are the caller's to make:
//! [`Ops::owns`] tells.
//!
//! ```text
//!   the program's threads
//!     │ send, recv, accept4, epoll_wait, poll …
//!     ▼
//!   Ops        fd_table   one load: is this descriptor ours?
//!     │
//!     ▼  one lock
//!   Lane       files      open file descriptions, which dup and fork share
//!     │        readiness  how things stand, as poll would say
//!     │        wake       who is told when that changes: epoll sets, sleeping threads
//!     ▼
//!   Client     the channel to the shard
//! ```

mod channels;
mod cleanup;
mod connect;
mod datagram;
mod description;
mod descriptor;
pub mod descriptor_report;
mod epoll;
mod exec;
mod fd_passing;
mod fd_table;
mod file;
mod fork;
pub mod interfaces;
mod ioctl;
mod kernel_socket;
mod lifetime;
mod listen;
mod lock;
mod mmsg;
mod options;
mod poll;
mod process;
mod readiness;
mod relocate_fd;
mod sandbox;
mod scratch;
mod sendfile;
mod signal;
pub mod signal_handlers;
mod sleep;
mod sockaddr;
mod sockname;
mod splice;
mod stream;
mod syscall;
mod urgent;
mod wait_queue;
mod wait_set;

pub use channels::ListenSpawn;
pub use datagram::{ControlMessages, ReceivedMessage, SendArgs};
pub use descriptor::ExecGuard;
pub use epoll::EpollEvent;
pub use exec::Inheritance;
pub use fd_passing::PassedFd;
pub use fork::ForkGuard;
pub use lock::SignalDeferred;
pub use options::{OptionValue, table};
pub use sleep::Timeout;
pub use sockaddr::{Family, SockaddrBytes};

use channels::Channels;
use core::net::IpAddr;
use core::time::Duration;
use fd_table::{FdTable, FileId};
use ginnel::broker::Attachment;
use ginnel::channel::Client;
use process::ProcessState;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// How often it is looked whether a stack that has just begun can be used.
const READY_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How the operations behave.
pub struct OpsConfig {
    /// How long a call that has to wait looks for news before it sleeps in the kernel.
    pub spin: Duration,
    /// Whether an address is for the stack, if the stack can reach it. Sockets for others become the kernel's.
    pub is_stack_address: fn(IpAddr) -> bool,
    /// Listeners on all addresses take connections that come by the kernel, too.
    pub kernel_listen: bool,
    /// `bind` to a lower port needs `CAP_NET_BIND_SERVICE`.
    pub unprivileged_port_start: u16,
    /// Of several shards, which a process takes connections from first.
    pub listen_spawn: ListenSpawn,
    /// Descriptors of closed sockets that are kept for the next ones. A program that needs the lowest number free (POSIX) wants 0.
    pub proxy_pool_max: usize,
    /// Writes are bounded by send buffers to the byte, as far as the kernel's accounting can be told from payload: what a connection begins with (the second number of `tcp_wmem`), and what it may grow to.
    /// The stack is asked for each write. Without it writes are bounded by what the channel and the engine's buffer hold.
    pub send_buffer: Option<[u32; 2]>,
}

impl Default for OpsConfig {
    fn default() -> Self {
        Self {
            spin: Duration::from_micros(20),
            is_stack_address: |_| true,
            kernel_listen: false,
            unprivileged_port_start: 0,
            listen_spawn: ListenSpawn::Off,
            proxy_pool_max: 0,
            send_buffer: None,
        }
    }
}

/// The socket calls of one process.
pub struct Ops {
    fds: FdTable,
    lock: lock::ProcessLock,
    signals: signal::HandlerCache,
    config: OpsConfig,
}

impl Ops {
    /// Socket calls through a channel.
    ///
    /// # Errors
    /// No descriptors.
    pub fn new(client: Client, config: OpsConfig) -> Result<Self, Errno> {
        Self::from_clients(vec![client], config)
    }

    fn from_clients(clients: Vec<Client>, config: OpsConfig) -> Result<Self, Errno> {
        let channels = Channels::new(clients).ok_or(Errno::OPNOTSUPP)?;
        let mut lane = ProcessState::new(channels)?;
        lane.send_buffer = config.send_buffer;
        let (lane, signals) = (lock::ProcessLock::new(lane), signal::HandlerCache::default());
        Ok(Self { fds: FdTable::new(), lock: lane, signals, config })
    }

    /// Socket calls of a process that came through the door of a stack in another one.
    ///
    /// # Errors
    /// No descriptors.
    pub fn from_process(mut process: Attachment, config: OpsConfig) -> Result<Self, Errno> {
        let config_spawn = config.listen_spawn;
        let clients: Vec<Client> = core::iter::from_fn(|| process.take_client()).collect();
        let ops = Self::from_clients(clients, config)?;
        let mut lane = ops.lock()?;
        lane.client.internal_fds().chain([process.connection_fd()]).for_each(descriptor::register_internal);
        lane.client.set_listen_spawn(config_spawn, process.stack_info().shard_cpus.clone());
        lane.attachment = Some(process);
        ops.note_connection_fd(&lane);
        lane.start_report(ops.fds.len());
        drop(lane);
        Ok(ops)
    }

    /// Waits until the addresses of the stack can be used, or this time is over.
    pub fn wait_until_ready(&self, within: Duration) {
        let until = std::time::Instant::now() + within;
        while !self.lock_or_panic().client.is_ready() && std::time::Instant::now() < until {
            std::thread::sleep(READY_POLL_INTERVAL);
        }
    }

    /// Whether a descriptor is the stack's.
    #[inline]
    pub fn owns(&self, fd: RawFd) -> bool {
        self.fds.get(fd).is_some()
    }

    /// Whether operations are to be asked about a descriptor: it is one of ours, or was until the program closed it, or is the library's own. Then they say `EBADF`, though the number is open.
    #[inline]
    pub fn handles(&self, fd: RawFd) -> bool {
        self.owns(fd) || descriptor::is_internal(fd)
    }

    /// The program is about to change, or has changed, what it does about signals (`sigaction`).
    pub fn invalidate_handlers(&self) {
        self.signals.invalidate();
    }

    /// Begins the book anew, with all descriptors that are ours.
    pub(crate) fn rebuild_report(&self, lane: &mut ProcessState) {
        lane.start_report(self.fds.len());
        for fd in self.fds.range(0, RawFd::MAX) {
            if let Some(file) = self.fds.get(fd) {
                lane.report_fd(fd, file);
            }
        }
    }

    /// A descriptor is the library's own, though there are no operations yet.
    pub fn register_internal(fd: RawFd) {
        descriptor::register_internal(fd);
    }

    /// It is closed.
    pub fn unregister_internal(fd: RawFd) {
        descriptor::unregister_internal(fd);
    }

    /// It has another number.
    pub fn renumber_internal(from: RawFd, to: RawFd) {
        descriptor::renumber_internal(from, to);
    }

    /// The program closed one of its own descriptors: what it opens next may have this number.
    #[inline]
    pub fn note_freed(fd: RawFd) {
        descriptor::note_freed(fd);
    }

    /// Whether a descriptor is the library's own, of which the program knows nothing.
    pub fn is_internal(fd: RawFd) -> bool {
        descriptor::is_internal(fd)
    }

    /// The first of the library's own descriptors from `from` to `last`.
    pub fn next_internal(from: RawFd, last: RawFd) -> Option<RawFd> {
        descriptor::next_internal(from, last)
    }

    /// The open file description of a descriptor, as it is now.
    #[inline]
    fn file_of(&self, lane: &mut ProcessState, fd: RawFd) -> Result<FileId, Errno> {
        let file = self.fds.get(fd).ok_or(Errno::BADF)?;
        lane.sync_shared(file);
        Ok(file)
    }
}
