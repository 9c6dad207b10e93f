//! The library as a backend of scripts: each call and each packet goes through its interface, in real time.
#![allow(unsafe_code)] // calls functions as C does

use core::ffi::c_void;
use core::time::Duration;
use ginnel_testkit::script::assertion::Info;
use ginnel_testkit::script::ast::{IpVersion, Script, Target};
use ginnel_testkit::script::backend::{Backend, FinishedCall, SentPacket};
use ginnel_testkit::script::calls::{CallResult, Fd, Op, OptionValue};
use ginnel_testkit::script::flow::SERVER_PORT;
use ginnel_testkit::script::ginnel::FIXED;
use ginnel_testkit::script::kernel::tcp_info;
use ginnel_testkit::script::names::{Errno, PollEvents, ShutdownHow, SocketIoctl};
use ginnel_testkit::script::wire::addresses;
use packetdrill_ginnel::{PacketdrillInterface, packetdrill_interface_init};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Delay with which this process may observe events, because other threads run.
const SCHEDULING: Duration = Duration::from_millis(8);

/// The interface, shared by all threads of a run.
struct Interface(PacketdrillInterface);

// SAFETY: the library allows concurrent calls of several threads (docs/packetdrill.md), and the interface is
// not modified.
unsafe impl Send for Interface {}
// SAFETY: as above.
unsafe impl Sync for Interface {}

/// Calls a function of the interface.
macro_rules! call {
    ($interface:expr, $name:ident $(, $argument:expr)*) => {
        // SAFETY: the pointers are valid for the lengths that are passed, and the interface has not been
        // freed.
        unsafe { ($interface.0.$name)($interface.0.userdata $(, $argument)*) }
    };
}

impl Interface {
    fn start(flags: &str) -> Result<Self, String> {
        let flags = CString::new(flags).map_err(|error| error.to_string())?;
        let mut interface = core::mem::MaybeUninit::<PacketdrillInterface>::uninit();
        // SAFETY: `flags` is a C string, and `interface` has room for the interface.
        let result = unsafe { packetdrill_interface_init(flags.as_ptr(), interface.as_mut_ptr()) };
        match result {
            // SAFETY: the function initialised it.
            0 => Ok(Self(unsafe { interface.assume_init() })),
            _ => Err(format!("no stack with {flags:?}")),
        }
    }

    fn now(&self) -> Duration {
        let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
        assert_eq!(call!(self, gettimeofday, &raw mut time, core::ptr::null_mut()), 0);
        Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000)
    }

    fn receive(&self) -> Option<(Duration, Vec<u8>)> {
        let mut packet = vec![0u8; 1 << 16];
        let (mut len, mut micros) = (packet.len(), 0);
        let buffer = packet.as_mut_ptr().cast();
        if call!(self, netdev_receive, buffer, &raw mut len, &raw mut micros) != 0 {
            return None;
        }
        packet.truncate(len);
        Some((Duration::from_micros(micros as u64), packet))
    }

    fn option(&self, fd: Fd, level: i32, name: i32, len: usize) -> Result<Vec<u8>, Errno> {
        let mut value = vec![0u8; len];
        let mut len = len as u32;
        let result = call!(self, getsockopt, fd, level, name, value.as_mut_ptr().cast(), &raw mut len);
        value.truncate(len as usize);
        if result == 0 { Ok(value) } else { Err(last_error()) }
    }

    fn set_blocking(&self, fd: Fd, blocking: bool) {
        let mut on = i32::from(!blocking);
        // A descriptor that was closed meanwhile blocks no thread.
        let _ = call!(self, ioctl, fd, libc::FIONBIO, (&raw mut on).cast());
    }
}

fn last_error() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

fn call_result(value: i64) -> CallResult {
    if value < 0 { CallResult::error(last_error()) } else { CallResult::value(value) }
}

/// Maps descriptors of the script to those of the library.
type DescriptorTable = Arc<Mutex<BTreeMap<Fd, Fd>>>;

/// A run of a script.
pub struct LibraryBackend {
    interface: Arc<Interface>,
    start: Duration,
    local: IpAddr,
    remote: IpAddr,
    table: DescriptorTable,
    packets: Receiver<SentPacket>,
    receiver: Option<JoinHandle<()>>,
    is_stopping: Arc<AtomicBool>,
    callers: Vec<JoinHandle<()>>,
    report: Sender<FinishedCall>,
    done: Receiver<FinishedCall>,
}

impl LibraryBackend {
    /// Starts a stack with the settings of the script.
    pub fn new(script: &Script, target: Target) -> Result<Self, String> {
        let (local, remote) = addresses(target.ip);
        let mut flags = format!("proc=off,slack=0,local={local},mtu={}", script.directives.mtu);
        for (name, value) in &script.directives.sysctls {
            // The stack always behaves like this.
            let short = name.trim_start_matches("net.ipv4.tcp_");
            if short != "tw_reuse" && FIXED.iter().all(|(fixed, _)| *fixed != short) {
                flags += &format!(",{name}={}", value.replace(' ', ":"));
            }
        }
        let interface = Arc::new(Interface::start(&flags)?);
        let start = interface.now();
        let (sender, packets) = mpsc::channel();
        let is_stopping = Arc::new(AtomicBool::new(false));
        let receiver = {
            let (interface, is_stopping) = (interface.clone(), is_stopping.clone());
            std::thread::spawn(move || {
                while let Some((at, packet)) = interface.receive() {
                    if is_stopping.load(Ordering::SeqCst) {
                        return;
                    }
                    // The receiver of the channel is dropped only after the script has failed.
                    let _ = sender.send(SentPacket { at: at.saturating_sub(start), packet });
                }
            })
        };
        let (report, done) = mpsc::channel();
        Ok(Self {
            interface,
            start,
            local,
            remote,
            table: DescriptorTable::default(),
            packets,
            receiver: Some(receiver),
            is_stopping,
            callers: Vec::new(),
            report,
            done,
        })
    }

    fn caller(&self) -> Caller {
        Caller {
            interface: self.interface.clone(),
            table: self.table.clone(),
            local: self.local,
            remote: self.remote,
        }
    }
}

impl Drop for LibraryBackend {
    fn drop(&mut self) {
        let fds: Vec<Fd> =
            self.table.lock().unwrap_or_else(PoisonError::into_inner).values().copied().collect();
        for fd in fds {
            // Ends calls that are blocked on the descriptor.
            let _ = call!(self.interface, shutdown, fd, libc::SHUT_RDWR);
        }
        for caller in self.callers.drain(..) {
            let _ = caller.join();
        }
        // Wakes the thread that waits for packets: the stack answers a segment without a connection.
        self.is_stopping.store(true, Ordering::SeqCst);
        let packet = closed_port_syn(self.local, self.remote);
        let _ = call!(self.interface, netdev_send, packet.as_ptr().cast(), packet.len());
        if let Some(receiver) = self.receiver.take() {
            let _ = receiver.join();
        }
        // SAFETY: no other thread uses the interface any more.
        unsafe { (self.interface.0.free)(self.interface.0.userdata) };
    }
}

/// Returns a SYN to a port without a listener.
fn closed_port_syn(local: IpAddr, remote: IpAddr) -> Vec<u8> {
    let mut tcp = [0u8; 20];
    tcp[..4].copy_from_slice(&[0x27, 0x0f, 0, 1]);
    (tcp[12], tcp[13]) = (5 << 4, 2);
    let sum = |bytes: &[u8]| -> u32 {
        bytes.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(*two.get(1).unwrap_or(&0))).sum()
    };
    let folded = |mut sum: u32| {
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (!(sum as u16)).to_be_bytes()
    };
    let bytes = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let addresses = [bytes(remote), bytes(local)].concat();
    let check = folded(sum(&addresses) + sum(&tcp) + 6 + tcp.len() as u32);
    tcp[16..18].copy_from_slice(&check);
    let mut header = match local {
        IpAddr::V4(_) => vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0],
        IpAddr::V6(_) => vec![0x60, 0, 0, 0, 0, 20, 6, 64],
    };
    header.extend(addresses);
    if local.is_ipv4() {
        let check = folded(sum(&header));
        header[10..12].copy_from_slice(&check);
    }
    [&header[..], &tcp].concat()
}

impl Backend for LibraryBackend {
    fn now(&mut self) -> Duration {
        self.interface.now() - self.start
    }

    fn wait(&mut self, until: Duration) -> Option<SentPacket> {
        let left = until.saturating_sub(self.now());
        self.packets.recv_timeout(left).ok()
    }

    fn inject(&mut self, packet: &[u8]) {
        // A malformed packet is rejected, where the kernel would drop it.
        let _ = call!(self.interface, netdev_send, packet.as_ptr().cast(), packet.len());
    }

    fn call(&mut self, op: &Op, new_fd: Option<Fd>, data: &[u8]) -> CallResult {
        self.caller().call(op, new_fd, data)
    }

    fn call_blocking(&mut self, call_id: usize, op: &Op, new_fd: Option<Fd>, data: &[u8]) {
        let (caller, report, start) = (self.caller(), self.report.clone(), self.start);
        let (op, data) = (op.clone(), data.to_vec());
        self.callers.push(std::thread::spawn(move || {
            let fd = op.fd().and_then(|fd| caller.find(fd));
            if let Some(fd) = fd {
                caller.interface.set_blocking(fd, true);
            }
            let returned = caller.call(&op, new_fd, &data);
            let at = caller.interface.now() - start;
            if let (Some(fd), false) = (fd, matches!(op, Op::Close { .. })) {
                caller.interface.set_blocking(fd, false);
            }
            // The receiver of the channel is dropped only after the script has failed.
            let _ = report.send(FinishedCall { call_id, at, returned });
        }));
    }

    fn take_finished_call(&mut self) -> Option<FinishedCall> {
        self.done.try_recv().ok()
    }

    fn info(&mut self, fd: Fd) -> Result<Info, String> {
        let fd = self.caller().find(fd).ok_or("no such descriptor")?;
        let bytes = self.interface.option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, 512);
        bytes.map(|bytes| tcp_info::parse(&bytes)).map_err(|error| format!("getsockopt TCP_INFO: {error}"))
    }

    fn timer_slack(&self, _: Duration) -> Duration {
        SCHEDULING
    }

    fn settle_time(&self) -> Duration {
        Duration::from_millis(2)
    }
}

/// Makes calls, on any thread.
struct Caller {
    interface: Arc<Interface>,
    table: DescriptorTable,
    local: IpAddr,
    remote: IpAddr,
}

impl Caller {
    fn find(&self, fd: Fd) -> Option<Fd> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).get(&fd).copied()
    }

    fn register(&self, fd: Fd, new_fd: Option<Fd>) -> CallResult {
        if fd < 0 {
            return CallResult::error(last_error());
        }
        if let Some(new_fd) = new_fd {
            self.table.lock().unwrap_or_else(PoisonError::into_inner).insert(new_fd, fd);
        }
        CallResult::value(new_fd.map_or(0, Into::into))
    }

    fn call(&self, op: &Op, new_fd: Option<Fd>, data: &[u8]) -> CallResult {
        let i = &self.interface;
        if let Op::Socket = op {
            let domain = if self.local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
            return self
                .register(call!(i, socket, domain, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0), new_fd);
        }
        if let Op::Poll { entries, timeout_ms } = op {
            let entry = |fd: Fd, events: PollEvents| libc::pollfd { fd, events: events.0, revents: 0 };
            let fds: Option<Vec<_>> =
                entries.iter().map(|e| Some(entry(self.find(e.fd)?, e.events))).collect();
            let Some(mut fds) = fds else { return CallResult::error(Errno(libc::EBADF)) };
            let count = call!(i, poll, fds.as_mut_ptr(), fds.len() as libc::nfds_t, *timeout_ms);
            let revents = fds.iter().map(|fd| PollEvents(fd.revents)).collect();
            return CallResult { revents, ..call_result(count.into()) };
        }
        let Some(fd) = op.fd().and_then(|fd| self.find(fd)) else {
            return CallResult::error(Errno(libc::EBADF));
        };
        match op {
            Op::Accept { .. } => {
                let accepted = call!(i, accept, fd, core::ptr::null_mut(), core::ptr::null_mut());
                if accepted >= 0 {
                    i.set_blocking(accepted, false);
                }
                self.register(accepted, new_fd)
            }
            Op::Bind { port, .. } => {
                let (name, len) = socket_address(SocketAddr::new(self.local, port.unwrap_or(SERVER_PORT)));
                call_result(call!(i, bind, fd, name.as_ptr().cast(), len).into())
            }
            Op::Connect { .. } => {
                let (name, len) = socket_address(SocketAddr::new(self.remote, SERVER_PORT));
                call_result(call!(i, connect, fd, name.as_ptr().cast(), len).into())
            }
            Op::Listen { backlog, .. } => call_result(call!(i, listen, fd, *backlog).into()),
            Op::Receive { len, flags, .. } => {
                let mut buffer = vec![0u8; *len];
                let count = match flags.0 {
                    0 => call!(i, read, fd, buffer.as_mut_ptr().cast(), *len),
                    flags => call!(i, recv, fd, buffer.as_mut_ptr().cast(), *len, flags),
                };
                buffer.truncate(usize::try_from(count).unwrap_or(0));
                CallResult { data: buffer, ..call_result(count as i64) }
            }
            Op::Send { flags, .. } => {
                let flags = flags.0 | libc::MSG_NOSIGNAL;
                call_result(call!(i, send, fd, data.as_ptr().cast(), data.len(), flags) as i64)
            }
            Op::SendTo { flags, .. } => {
                let (name, len) = socket_address(SocketAddr::new(self.remote, SERVER_PORT));
                let (flags, bytes) = (flags.0 | libc::MSG_NOSIGNAL, data.as_ptr().cast());
                call_result(call!(i, sendto, fd, bytes, data.len(), flags, name.as_ptr().cast(), len) as i64)
            }
            Op::SendMessage { parts, flags, .. } => {
                let mut rest = data;
                let mut parts: Vec<libc::iovec> = parts
                    .iter()
                    .map(|len| {
                        let (part, after) = rest.split_at(*len);
                        rest = after;
                        libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: *len }
                    })
                    .collect();
                // SAFETY: zeros are a valid message without parts, name and control data.
                let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
                (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len());
                call_result(call!(i, sendmsg, fd, &raw const message, flags.0 | libc::MSG_NOSIGNAL) as i64)
            }
            Op::Disconnect { .. } => {
                let name = [0u8; 16];
                call_result(call!(i, connect, fd, name.as_ptr().cast(), name.len() as u32).into())
            }
            Op::Shutdown { how, .. } => {
                let how = match how {
                    ShutdownHow::Read => libc::SHUT_RD,
                    ShutdownHow::Write => libc::SHUT_WR,
                    ShutdownHow::Both => libc::SHUT_RDWR,
                };
                call_result(call!(i, shutdown, fd, how).into())
            }
            Op::Close { fd: number } => {
                self.table.lock().unwrap_or_else(PoisonError::into_inner).remove(number);
                call_result(call!(i, close, fd).into())
            }
            Op::SetOption { option, value, .. } => {
                let bytes = match value {
                    OptionValue::Int(value) => value.to_ne_bytes().to_vec(),
                    OptionValue::Linger { on, seconds } => [on.to_ne_bytes(), seconds.to_ne_bytes()].concat(),
                    OptionValue::Text(text) => text.as_bytes().to_vec(),
                };
                let value = bytes.as_ptr().cast::<c_void>();
                let len = bytes.len() as u32;
                call_result(call!(i, setsockopt, fd, option.level_number, option.number, value, len).into())
            }
            Op::GetOption { option, .. } => match i.option(fd, option.level_number, option.number, 4) {
                Ok(value) => {
                    let detail = value.try_into().map(i32::from_ne_bytes).ok().map(Into::into);
                    CallResult { detail, ..CallResult::value(0) }
                }
                Err(error) => CallResult::error(error),
            },
            Op::Ioctl { query, .. } => {
                let request = match query {
                    SocketIoctl::Unread => libc::FIONREAD,
                    SocketIoctl::Unacknowledged => libc::TIOCOUTQ,
                    SocketIoctl::Unsent => SIOCOUTQNSD,
                    SocketIoctl::AtMark => SIOCATMARK,
                };
                let mut value: i32 = 0;
                let result = call!(i, ioctl, fd, request, (&raw mut value).cast());
                CallResult { detail: (result == 0).then_some(value.into()), ..call_result(result.into()) }
            }
            Op::Fcntl { .. } => {
                call_result(call!(i, fcntl, fd, libc::F_SETFL, libc::O_NONBLOCK.into()).into())
            }
            Op::Socket | Op::Poll { .. } => unreachable!("Socket and Poll return above"),
        }
    }
}

/// From `linux/sockios.h`.
const SIOCOUTQNSD: libc::c_ulong = 0x894b;
/// From `asm-generic/sockios.h`.
const SIOCATMARK: libc::c_ulong = 0x8905;

/// Returns an address as `struct sockaddr`, with its length.
fn socket_address(address: SocketAddr) -> (Vec<u8>, u32) {
    let family = |family: i32| (family as u16).to_ne_bytes().to_vec();
    let port = address.port().to_be_bytes();
    let bytes = match address {
        SocketAddr::V4(v4) => [&family(libc::AF_INET)[..], &port, &v4.ip().octets(), &[0; 8]].concat(),
        SocketAddr::V6(v6) => {
            [&family(libc::AF_INET6)[..], &port, &[0; 4], &v6.ip().octets(), &[0; 4]].concat()
        }
    };
    let len = bytes.len() as u32;
    (bytes, len)
}

/// Returns the name of an IP version.
pub fn ip_name(ip: IpVersion) -> &'static str {
    if ip == IpVersion::V4 { "IPv4" } else { "IPv6" }
}
