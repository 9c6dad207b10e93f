//! Makes the socket calls of scripts on the Linux kernel.

use super::sys;
use crate::script::ast::IpVersion;
use crate::script::calls::{CallResult, Fd, Op, OptionValue};
use crate::script::flow::SERVER_PORT;
use crate::script::names::{Errno, PollEvents, ShutdownHow, SocketIoctl};
use crate::script::wire::addresses;
use core::net::SocketAddr;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

/// Receives the result of a blocking call.
type OnReturn = Box<dyn FnOnce(CallResult) + Send>;

/// Sockets by the script's descriptors. The thread of a blocking call holds a second reference.
type SocketTable = BTreeMap<Fd, Arc<OwnedFd>>;

/// The sockets of a script. They are non-blocking except during a call that the script gives a time range.
pub struct KernelSockets {
    defaults: SocketDefaults,
    table: Arc<Mutex<SocketTable>>,
}

/// Properties of every socket of a run.
#[derive(Clone)]
struct SocketDefaults {
    ip: IpVersion,
    congestion_control: String,
}

impl Drop for KernelSockets {
    fn drop(&mut self) {
        // Threads in a blocking call must leave it before namespace and device can disappear.
        for socket in lock(&self.table).values() {
            let _ = rustix::net::shutdown(socket.as_fd(), Shutdown::Both);
        }
    }
}

fn lock(table: &Mutex<SocketTable>) -> std::sync::MutexGuard<'_, SocketTable> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

fn call_result<T: TryInto<i64>>(result: io::Result<T>) -> CallResult {
    match result {
        Ok(value) => CallResult::value(value.try_into().unwrap_or(i64::MAX)),
        Err(e) => CallResult::error(Errno(e.raw_os_error().unwrap_or(0))),
    }
}

fn unit_result<E: Into<io::Error>>(result: Result<(), E>) -> CallResult {
    call_result(result.map(|()| 0i64).map_err(Into::into))
}

impl KernelSockets {
    /// Creates an empty descriptor table.
    pub fn new(ip: IpVersion, congestion_control: &str) -> Self {
        let defaults = SocketDefaults { ip, congestion_control: congestion_control.into() };
        Self { defaults, table: Arc::default() }
    }

    /// Makes a call without blocking.
    pub fn call(&mut self, op: &Op, new_fd: Option<Fd>, data: &[u8]) -> CallResult {
        call(&self.defaults, &self.table, op, new_fd, data)
    }

    /// Makes a call that may block, on a thread of its own.
    pub fn call_blocking(&mut self, op: &Op, new_fd: Option<Fd>, data: &[u8], finish: OnReturn) {
        let (defaults, table) = (self.defaults.clone(), Arc::clone(&self.table));
        let (op, data) = (op.clone(), data.to_vec());
        let work = move || {
            // At normal priority, the time of return would depend on the load of the machine.
            let _ = sys::raise_priority();
            let mut socket = op.fd().and_then(|fd| lock(&table).get(&fd).cloned());
            let set_blocking = |socket: &Option<Arc<OwnedFd>>, blocking: bool| {
                if let Some(socket) = socket {
                    let _ = rustix::io::ioctl_fionbio(socket.as_fd(), !blocking);
                }
            };
            set_blocking(&socket, true);
            if let Op::Close { .. } = op {
                // Only the `close` of the last reference lingers.
                socket = None;
            }
            let result = call(&defaults, &table, &op, new_fd, &data);
            set_blocking(&socket, false);
            finish(result);
        };
        // If the thread cannot be started, the call never returns, which the runner reports.
        let _ = std::thread::Builder::new().stack_size(256 * 1024).spawn(work);
    }

    /// Reads `struct tcp_info` as far as this kernel fills it.
    pub fn tcp_info(&self, fd: Fd) -> io::Result<Vec<u8>> {
        let Some(socket) = lock(&self.table).get(&fd).cloned() else {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        };
        let mut bytes = vec![0; 512];
        let len = sys::socket_option(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
        bytes.truncate(len);
        Ok(bytes)
    }
}

fn call(
    defaults: &SocketDefaults,
    table: &Mutex<SocketTable>,
    op: &Op,
    new_fd: Option<Fd>,
    data: &[u8],
) -> CallResult {
    let bad_descriptor = || CallResult::error(Errno(libc::EBADF));
    let insert = |socket: OwnedFd| {
        if let Some(fd) = new_fd {
            lock(table).insert(fd, Arc::new(socket));
        }
        CallResult::value(new_fd.map_or(0, Into::into))
    };
    let find = |fd: &Fd| lock(table).get(fd).cloned();
    if let Op::Socket = op {
        let family = if defaults.ip == IpVersion::V4 { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        return match rustix::net::socket_with(family, SocketType::STREAM, flags, None) {
            Ok(socket) => match sys::set_socket_option(
                socket.as_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_CONGESTION,
                defaults.congestion_control.as_bytes(),
            ) {
                Ok(()) => insert(socket),
                Err(e) => call_result::<i64>(Err(e)),
            },
            Err(e) => call_result::<i64>(Err(e.into())),
        };
    }
    if let Op::Poll { entries, timeout_ms } = op {
        let sockets: Option<Vec<_>> = entries.iter().map(|e| find(&e.fd)).collect();
        let Some(sockets) = sockets else { return bad_descriptor() };
        let with_socket = entries.iter().zip(&sockets);
        let mut fds: Vec<_> = with_socket
            .map(|(e, s)| libc::pollfd { fd: s.as_raw_fd(), events: e.events.0, revents: 0 })
            .collect();
        let mut result = call_result(sys::poll(&mut fds, *timeout_ms));
        result.revents = fds.iter().map(|f| PollEvents(f.revents)).collect();
        return result;
    }
    if let Op::Close { fd } = op {
        let Some(socket) = lock(table).remove(fd) else { return bad_descriptor() };
        return match Arc::try_unwrap(socket) {
            Ok(socket) => unit_result(sys::close(socket)),
            // A blocking call still uses the socket; it is closed when that call returns.
            Err(_) => CallResult::value(0),
        };
    }
    let Some(socket) = op.fd().as_ref().and_then(find) else { return bad_descriptor() };
    match op {
        Op::Accept { .. } => {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(socket.as_fd(), flags) {
                Ok(accepted) => insert(accepted),
                Err(e) => call_result::<i64>(Err(e.into())),
            }
        }
        _ => call_on(defaults.ip, &socket, op, data),
    }
}

fn call_on(ip: IpVersion, socket: &OwnedFd, op: &Op, data: &[u8]) -> CallResult {
    let (local, remote) = addresses(ip);
    let fd = socket.as_fd();
    match op {
        Op::Bind { port, .. } => {
            unit_result(rustix::net::bind(fd, &SocketAddr::new(local, port.unwrap_or(SERVER_PORT))))
        }
        Op::Listen { backlog, .. } => unit_result(rustix::net::listen(fd, *backlog)),
        Op::Connect { .. } => unit_result(rustix::net::connect(fd, &SocketAddr::new(remote, SERVER_PORT))),
        Op::Receive { len, flags, .. } => {
            let mut buffer = vec![0; *len];
            let got = sys::receive(fd, &mut buffer, flags.0);
            buffer.truncate(*got.as_ref().unwrap_or(&0));
            CallResult { data: buffer, ..call_result(got) }
        }
        Op::Send { flags, .. } => call_result(sys::send(fd, data, flags.0)),
        Op::SendTo { flags, .. } => {
            let to = SocketAddr::new(remote, SERVER_PORT);
            let flags = rustix::net::SendFlags::from_bits_retain(flags.0 as u32 | libc::MSG_NOSIGNAL as u32);
            call_result(rustix::net::sendto(fd, data, flags, &to).map_err(Into::into))
        }
        Op::SendMessage { parts, flags, .. } => {
            let mut rest = data;
            let parts: Vec<_> = parts
                .iter()
                .map(|len| {
                    let (part, after) = rest.split_at(*len);
                    rest = after;
                    io::IoSlice::new(part)
                })
                .collect();
            let flags = rustix::net::SendFlags::from_bits_retain(flags.0 as u32 | libc::MSG_NOSIGNAL as u32);
            let mut control = rustix::net::SendAncillaryBuffer::default();
            call_result(rustix::net::sendmsg(fd, &parts, &mut control, flags).map_err(Into::into))
        }
        Op::Disconnect { .. } => unit_result(rustix::net::connect_unspec(fd)),
        Op::Shutdown { how, .. } => unit_result(rustix::net::shutdown(
            fd,
            match how {
                ShutdownHow::Read => Shutdown::Read,
                ShutdownHow::Write => Shutdown::Write,
                ShutdownHow::Both => Shutdown::Both,
            },
        )),
        Op::SetOption { option, value, .. } => {
            let bytes = match value {
                OptionValue::Int(value) => value.to_ne_bytes().to_vec(),
                OptionValue::Linger { on, seconds } => [on.to_ne_bytes(), seconds.to_ne_bytes()].concat(),
                OptionValue::Text(text) => text.as_bytes().to_vec(),
            };
            unit_result(sys::set_socket_option(fd, option.level_number, option.number, &bytes))
        }
        Op::GetOption { option, .. } => {
            let mut bytes = [0; 4];
            let result = sys::socket_option(fd, option.level_number, option.number, &mut bytes);
            let detail = result.is_ok().then(|| i32::from_ne_bytes(bytes).into());
            CallResult { detail, ..call_result(result.map(|_| 0i64)) }
        }
        Op::Ioctl { query, .. } => {
            let code = match query {
                SocketIoctl::Unread => libc::FIONREAD,
                SocketIoctl::Unacknowledged => libc::TIOCOUTQ,
                SocketIoctl::Unsent => SIOCOUTQNSD,
                SocketIoctl::AtMark => SIOCATMARK,
            };
            let result = sys::ioctl_int(fd, code);
            let detail = result.as_ref().ok().map(|v| i64::from(*v));
            CallResult { detail, ..call_result(result.map(|_| 0i64)) }
        }
        Op::Fcntl { .. } | Op::Socket | Op::Poll { .. } | Op::Close { .. } | Op::Accept { .. } => {
            CallResult::value(0)
        }
    }
}

/// From `linux/sockios.h`.
const SIOCOUTQNSD: libc::Ioctl = 0x894b;
/// From `asm-generic/sockios.h`.
const SIOCATMARK: libc::Ioctl = 0x8905;
