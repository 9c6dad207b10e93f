//! Socket calls of POSIX and Linux on Ginnel's stack, for programs that were written for the kernel's
//! sockets.
//!
//! One value, [`Ops`], serves one process with all its threads and descriptors. Each method does what the
//! system call of its name does, with the same results and the same `errno`; `docs/posix.md` lists the
//! differences. The caller makes the system calls on descriptors that do not belong to the stack;
//! [`Ops::owns`] tells them apart.
//!
//! ```text
//!   the program's threads
//!     │ send, recv, accept4, epoll_wait, poll …
//!     ▼
//!   Ops           fd_table    one load: does this descriptor belong to the stack?
//!     │
//!     ▼  one lock
//!   ProcessState  files       open file descriptions, which dup and fork share
//!     │           readiness   what poll would report about a description
//!     │           wait_queue  epoll sets and sleeping threads to wake when that changes
//!     ▼
//!   Client        the channel to the shard
//! ```

mod channels;
mod cleanup;
mod connect;
mod datagram;
mod departures;
mod description;
mod descriptor;
pub mod descriptor_report;
mod epoll;
mod exec;
mod fastopen;
pub mod fault_mask;
pub mod fault_signals;
mod fd_passing;
mod fd_table;
pub mod ffi;
mod file;
pub mod flow_labels;
mod fork;
pub mod interfaces;
mod ioctl;
mod isolation;
mod kernel_socket;
mod lifetime;
mod listen;
mod local_delivery;
mod lock;
mod mmsg;
mod multicast;
pub mod not_attached;
mod options;
mod owned_mutex;
mod poll;
mod port_conflict;
mod process;
mod readiness;
mod relocate_fd;
mod restart;
mod sandbox;
mod scratch;
pub mod seccomp_filter;
mod sendfile;
mod signal;
pub mod signal_handlers;
mod sleep;
mod sockaddr;
mod socket_cmsgs;
mod sockname;
mod splice;
mod stack_end;
mod standard_error;
mod stream;
mod syscall;
mod tx_stamps;
pub mod unordered;
mod unserved_peers;
mod urgent;
pub mod user_memory;
mod wait_queue;
mod wait_set;
mod zerocopy;

pub use channels::ListenSpawn;
pub use datagram::{ControlMessages, ReceivedMessage, SendArgs};
pub use descriptor::ExecGuard;
pub use epoll::EpollEvent;
pub use exec::Inheritance;
pub use fd_passing::PassedFd;
pub use fork::ForkGuard;
pub use lock::{OtherCalls, SignalDeferred};
pub use multicast::is_source_filter;
pub use options::{OptionValue, table};
pub use sleep::Timeout;
pub use sockaddr::{Family, SockaddrBytes};
pub use standard_error::{write_at_once, write_line};
pub use user_memory::{UserSlice, UserSliceMut};

use channels::Channels;
use core::net::IpAddr;
use core::time::Duration;
use fd_table::{FdTable, FileId};
use ginnel::CongestionControl;
use ginnel::broker::Attachment;
use ginnel::channel::Client;
use process::ProcessState;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Interval at which [`Ops::wait_until_ready`] checks whether the addresses of the stack can be used.
const READY_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Configuration of [`Ops`].
pub struct OpsConfig {
    /// How long a call that has to wait polls the channel before it sleeps in the kernel.
    pub spin: Duration,
    /// Returns whether the stack may serve an address, provided that it has a route there. Sockets for other
    /// addresses become kernel sockets.
    pub is_stack_address: fn(IpAddr) -> bool,
    /// Listeners on the unspecified address also accept connections that arrive at the kernel.
    pub kernel_listen: bool,
    /// `bind` to a port below this one needs `CAP_NET_BIND_SERVICE`.
    pub unprivileged_port_start: u16,
    /// The algorithm that `TCP_CONGESTION` returns for a socket that has chosen none and has no connection.
    pub congestion_control: CongestionControl,
    /// The shard from which a listener of this process prefers to take connections.
    pub listen_spawn: ListenSpawn,
    /// How many proxy descriptors of closed sockets stay open for the next sockets. 0 gives each new socket
    /// the lowest free number, as POSIX demands.
    pub proxy_pool_max: usize,
    /// Limits writes by the send buffer to the byte, as far as the kernel's accounting follows from the
    /// payload: the initial size (the second number of `tcp_wmem`) and the maximum. Each write then asks the
    /// stack. `None` limits writes only by what the channel and the engine's buffer hold.
    pub send_buffer: Option<[u32; 2]>,
    /// The control socket of the stack, for `ginnel check`; empty if it is unknown.
    pub stack: String,
}

impl Default for OpsConfig {
    fn default() -> Self {
        Self {
            spin: Duration::from_micros(20),
            is_stack_address: |_| true,
            kernel_listen: false,
            unprivileged_port_start: 0,
            congestion_control: CongestionControl::default(),
            listen_spawn: ListenSpawn::Off,
            proxy_pool_max: 0,
            send_buffer: None,
            stack: String::new(),
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
    /// Returns the socket calls on one channel.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub fn new(client: Client, config: OpsConfig) -> Result<Self, Errno> {
        Self::from_clients(vec![client], config)
    }

    fn from_clients(clients: Vec<Client>, config: OpsConfig) -> Result<Self, Errno> {
        fault_signals::install();
        let channels = Channels::new(clients).ok_or(Errno::OPNOTSUPP)?;
        let mut state = ProcessState::new(channels)?;
        state.send_buffer = config.send_buffer;
        let (state, signals) = (lock::ProcessLock::new(state), signal::HandlerCache::default());
        Ok(Self { fds: FdTable::new(), lock: state, signals, config })
    }

    /// Returns the socket calls of a process that is attached to a stack in another process.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`; `EOPNOTSUPP` if the attachment has no client, or more clients than a stack can
    /// have shards.
    pub fn from_process(mut attachment: Attachment, config: OpsConfig) -> Result<Self, Errno> {
        standard_error::remember_standard_error();
        let listen_spawn = config.listen_spawn;
        let clients: Vec<Client> = core::iter::from_fn(|| attachment.take_client()).collect();
        let ops = Self::from_clients(clients, config)?;
        let mut state = ops.lock()?;
        state
            .client
            .internal_fds()
            .chain([attachment.connection_fd()])
            .for_each(descriptor::register_internal);
        state.client.set_listen_spawn(listen_spawn, attachment.stack_info().shard_cpus.clone());
        state.attachment = Some(attachment);
        state.start_report(ops.fds.len(), &ops.config.stack);
        ops.note_internal_fds(&state);
        drop(state);
        Ok(ops)
    }

    /// Waits until the addresses of the stack can be used, but no longer than `timeout`.
    pub fn wait_until_ready(&self, timeout: Duration) {
        let deadline = std::time::Instant::now() + timeout;
        while !self.lock_or_panic().client.is_ready() && std::time::Instant::now() < deadline {
            std::thread::sleep(READY_POLL_INTERVAL);
        }
    }

    /// Returns whether a descriptor belongs to the stack.
    #[inline]
    pub fn owns(&self, fd: RawFd) -> bool {
        self.fds.get(fd).is_some()
    }

    /// Returns whether [`Ops`] must answer for a descriptor: it belongs to the stack, belonged to it until
    /// the program closed it, or is internal to the library. In the last two cases the methods return
    /// `EBADF`, although the number is open.
    #[inline]
    pub fn handles(&self, fd: RawFd) -> bool {
        self.owns(fd) || descriptor::is_internal(fd)
    }

    /// Must be called before or after the program changes a signal disposition (`sigaction`).
    pub fn invalidate_handlers(&self) {
        self.signals.invalidate();
    }

    /// Starts a new descriptor report that lists all descriptors of the stack.
    pub(crate) fn rebuild_report(&self, state: &mut ProcessState) {
        state.start_report(self.fds.len(), &self.config.stack);
        for fd in self.fds.range(0, RawFd::MAX) {
            if let Some(file) = self.fds.get(fd) {
                state.report_fd(fd, file);
            }
        }
    }

    /// Marks a descriptor as internal to the library, for callers that have no [`Ops`] yet.
    pub fn register_internal(fd: RawFd) {
        descriptor::register_internal(fd);
    }

    /// Unmarks an internal descriptor that was closed.
    pub fn unregister_internal(fd: RawFd) {
        descriptor::unregister_internal(fd);
    }

    /// Moves the mark of an internal descriptor to its new number.
    pub fn renumber_internal(from: RawFd, to: RawFd) {
        descriptor::renumber_internal(from, to);
    }

    /// Must be called after the program has closed a descriptor of its own: the next proxy descriptor may get
    /// that number.
    #[inline]
    pub fn note_freed(fd: RawFd) {
        descriptor::note_freed(fd);
    }

    /// Returns whether a descriptor is internal to the library and hidden from the program.
    pub fn is_internal(fd: RawFd) -> bool {
        descriptor::is_internal(fd)
    }

    /// Returns the first internal descriptor from `from` to `last`.
    pub fn next_internal(from: RawFd, last: RawFd) -> Option<RawFd> {
        descriptor::next_internal(from, last)
    }

    /// Returns the open file description of a descriptor, after applying what other processes changed in it.
    #[inline]
    fn file_of(&self, state: &mut ProcessState, fd: RawFd) -> Result<FileId, Errno> {
        let file = self.fds.get(fd).ok_or(Errno::BADF)?;
        state.sync_shared(file);
        Ok(file)
    }
}
