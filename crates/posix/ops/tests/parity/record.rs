//! Records which calls a case makes on the stack, with which flags, and on what kind of object.

use crate::kernel::Kernel;
use crate::sys::{Fd, Message, SIOCATMARK, SIOCOUTQNSD, Sys};
use core::ffi::{c_int, c_uint, c_ulong};
use core::time::Duration;
use ginnel_posix_ops::table;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;

/// Calls with the kinds of their objects, and the flags and similar arguments seen. Sorted, so that the order
/// is always the same.
pub type Calls = BTreeMap<(String, String), BTreeSet<String>>;

/// The record of a case. Both hosts write to it, because both use descriptors of one process.
#[derive(Default)]
pub struct Record {
    calls: Mutex<Calls>,
    kinds: Mutex<HashMap<Fd, &'static str>>,
}

impl Record {
    /// Closes the descriptors that a case has left open; those of a stack are the kernel's once it has ended.
    /// Returns the calls.
    pub fn close_all(self) -> Calls {
        for fd in self.kinds.into_inner().unwrap().into_keys() {
            Kernel.close(fd).unwrap();
        }
        self.calls.into_inner().unwrap()
    }

    /// Returns the kind of a descriptor, by the call that created it.
    fn kind(&self, fd: Fd) -> &'static str {
        self.kinds.lock().unwrap().get(&fd).copied().unwrap_or("others")
    }

    /// Records the kind of a new descriptor.
    fn note_fd(&self, fd: Result<Fd, Errno>, kind: &'static str) -> Result<Fd, Errno> {
        if let Ok(fd) = fd {
            self.kinds.lock().unwrap().insert(fd, kind);
        }
        fd
    }

    fn note(&self, call: &str, on: &str, flags: impl IntoIterator<Item = String>) {
        let mut calls = self.calls.lock().unwrap();
        calls.entry((call.into(), on.into())).or_default().extend(flags);
    }
}

/// A host that records its calls. Calls have the names of the kernel's functions.
pub struct Recorded<'a> {
    pub host: &'a dyn Sys,
    pub record: &'a Record,
}

impl Recorded<'_> {
    fn note(&self, call: &str, fd: Fd, flags: impl IntoIterator<Item = String>) {
        self.record.note(call, self.record.kind(fd), flags);
    }

    fn note_sets(&self, call: &str, sets: &[Vec<Fd>; 3]) {
        for (name, set) in ["readfds", "writefds", "exceptfds"].into_iter().zip(sets) {
            for fd in set {
                self.note(call, *fd, [name.to_owned()]);
            }
        }
    }
}

/// Pairs of constants and their names.
macro_rules! named {
    ($($name:ident)*) => { &[$((libc::$name as i64, stringify!($name))),*] };
}

type Names = &'static [(i64, &'static str)];

const MESSAGE_FLAGS: Names = named!(MSG_OOB MSG_PEEK MSG_DONTROUTE MSG_CTRUNC MSG_TRUNC MSG_DONTWAIT MSG_EOR
    MSG_WAITALL MSG_CONFIRM MSG_ERRQUEUE MSG_NOSIGNAL MSG_MORE MSG_WAITFORONE
    MSG_ZEROCOPY MSG_FASTOPEN MSG_CMSG_CLOEXEC);
const SOCKET_FLAGS: Names = named!(SOCK_NONBLOCK SOCK_CLOEXEC);
const FAMILIES: Names = named!(AF_UNSPEC AF_UNIX AF_INET AF_INET6);
const SHUTDOWN_DIRECTIONS: Names = named!(SHUT_RD SHUT_WR SHUT_RDWR);
const POLL_EVENTS: Names = named!(POLLIN POLLPRI POLLOUT POLLERR POLLHUP POLLNVAL POLLRDNORM POLLRDBAND POLLWRNORM POLLWRBAND POLLRDHUP);
const EPOLL_EVENTS: Names = named!(EPOLLIN EPOLLPRI EPOLLOUT EPOLLERR EPOLLHUP EPOLLRDNORM EPOLLRDBAND EPOLLWRNORM
    EPOLLWRBAND EPOLLRDHUP EPOLLEXCLUSIVE EPOLLWAKEUP EPOLLONESHOT EPOLLET);
const EPOLL_OPS: Names = named!(EPOLL_CTL_ADD EPOLL_CTL_MOD EPOLL_CTL_DEL);
const SPLICE_FLAGS: Names = named!(SPLICE_F_MOVE SPLICE_F_NONBLOCK SPLICE_F_MORE SPLICE_F_GIFT);

/// Returns the names of the bits that are set, and the number of bits without a name.
fn bits(value: u32, names: Names) -> Vec<String> {
    let mut rest = value;
    let mut set = Vec::new();
    for (bits, name) in names {
        // The highest bit of an `i32` constant is its sign.
        let bits = *bits as u32;
        if rest & bits == bits {
            rest &= !bits;
            set.push((*name).to_owned());
        }
    }
    if rest != 0 {
        set.push(format!("{rest:#x}"));
    }
    set
}

fn message_flags(flags: c_int) -> Vec<String> {
    bits(flags.cast_unsigned(), MESSAGE_FLAGS)
}

/// Returns the name of a number.
fn name_of(value: c_int, names: Names) -> String {
    let known = names.iter().find(|(number, _)| *number == i64::from(value));
    known.map_or_else(|| value.to_string(), |(_, name)| (*name).to_owned())
}

/// Control messages of sockets that have no option's number and meaning.
const SOCKET_CONTROLS: Names = named!(SCM_RIGHTS SCM_CREDENTIALS SCM_TXTIME);

/// Returns the name of a control message.
fn control(level: c_int, kind: c_int) -> String {
    let own = SOCKET_CONTROLS.iter().find(|(number, _)| *number == i64::from(kind));
    own.filter(|_| level == libc::SOL_SOCKET)
        .map_or_else(|| option(level, kind), |(_, name)| (*name).to_owned())
}

/// Returns the name of an option, or of the control message with its number.
fn option(level: c_int, name: c_int) -> String {
    let row = table::OPTIONS.iter().find(|row| row.level == level && row.name == name);
    row.map_or_else(|| format!("{level}:{name}"), |row| row.linux_name.to_owned())
}

fn family(address: &[u8]) -> Option<String> {
    let family = address.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))?;
    Some(name_of(family.into(), FAMILIES))
}

/// Returns the names of complete control messages.
fn controls(mut bytes: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    while let Some((header, _)) = bytes.split_first_chunk::<16>() {
        let word =
            |at: usize| i32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let length = word(0) as usize;
        if length < header.len() || length > bytes.len() {
            break;
        }
        names.push(control(word(8), word(12)));
        bytes = bytes.get(length.next_multiple_of(8)..).unwrap_or_default();
    }
    names
}

impl Sys for Recorded<'_> {
    fn socket(&self, domain: c_int, kind: c_int) -> Result<Fd, Errno> {
        let extra = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let on = match kind & !extra {
            libc::SOCK_STREAM => "TCP",
            libc::SOCK_DGRAM => "UDP",
            _ => "others",
        };
        let flags = bits((kind & extra).cast_unsigned(), SOCKET_FLAGS);
        self.record.note("socket", on, flags.into_iter().chain([name_of(domain, FAMILIES)]));
        self.record.note_fd(self.host.socket(domain, kind), on)
    }

    fn bind(&self, fd: Fd, address: &[u8]) -> Result<(), Errno> {
        self.note("bind", fd, family(address));
        self.host.bind(fd, address)
    }

    fn listen(&self, fd: Fd, backlog: c_int) -> Result<(), Errno> {
        self.note("listen", fd, []);
        self.host.listen(fd, backlog)
    }

    fn accept4(&self, fd: Fd, flags: c_int) -> Result<Fd, Errno> {
        self.note("accept4", fd, bits(flags.cast_unsigned(), SOCKET_FLAGS));
        self.record.note_fd(self.host.accept4(fd, flags), "TCP")
    }

    fn connect(&self, fd: Fd, address: &[u8]) -> Result<(), Errno> {
        self.note("connect", fd, family(address));
        self.host.connect(fd, address)
    }

    fn send(&self, fd: Fd, bytes: &[u8], flags: c_int) -> Result<usize, Errno> {
        self.note("send", fd, message_flags(flags));
        self.host.send(fd, bytes, flags)
    }

    fn recv(&self, fd: Fd, len_max: usize, flags: c_int) -> Result<Vec<u8>, Errno> {
        self.note("recv", fd, message_flags(flags));
        self.host.recv(fd, len_max, flags)
    }

    fn sendv(&self, fd: Fd, parts: &[&[u8]], flags: c_int) -> Result<usize, Errno> {
        self.note("sendmsg", fd, message_flags(flags));
        self.host.sendv(fd, parts, flags)
    }

    fn recvv(&self, fd: Fd, lengths: &[usize], flags: c_int) -> Result<Vec<u8>, Errno> {
        self.note("recvmsg", fd, message_flags(flags));
        self.host.recvv(fd, lengths, flags)
    }

    fn send_to(
        &self,
        fd: Fd,
        bytes: &[u8],
        to: Option<&[u8]>,
        control: &[u8],
        flags: c_int,
    ) -> Result<usize, Errno> {
        let address = to.and_then(family);
        self.note("sendmsg", fd, message_flags(flags).into_iter().chain(address).chain(controls(control)));
        self.host.send_to(fd, bytes, to, control, flags)
    }

    fn recv_from(
        &self,
        fd: Fd,
        len_max: usize,
        control_capacity: usize,
        flags: c_int,
    ) -> Result<Message, Errno> {
        self.note("recvmsg", fd, message_flags(flags));
        let message = self.host.recv_from(fd, len_max, control_capacity, flags)?;
        self.note("recvmsg", fd, controls(&message.control));
        Ok(message)
    }

    fn send_many(&self, fd: Fd, list: &[(&[u8], Option<&[u8]>)], flags: c_int) -> Result<Vec<usize>, Errno> {
        let addresses = list.iter().filter_map(|(_, to)| to.and_then(family));
        self.note("sendmmsg", fd, message_flags(flags).into_iter().chain(addresses));
        self.host.send_many(fd, list, flags)
    }

    fn recv_many(
        &self,
        fd: Fd,
        count: usize,
        len_max: usize,
        flags: c_int,
        timeout: Option<Duration>,
    ) -> Result<Vec<Vec<u8>>, Errno> {
        let limit = timeout.map(|_| "timeout".to_owned());
        self.note("recvmmsg", fd, message_flags(flags).into_iter().chain(limit));
        self.host.recv_many(fd, count, len_max, flags, timeout)
    }

    fn shutdown(&self, fd: Fd, how: c_int) -> Result<(), Errno> {
        self.note("shutdown", fd, [name_of(how, SHUTDOWN_DIRECTIONS)]);
        self.host.shutdown(fd, how)
    }

    fn close(&self, fd: Fd) -> Result<(), Errno> {
        self.note("close", fd, []);
        // Before another descriptor may get the number.
        self.record.kinds.lock().unwrap().remove(&fd);
        self.host.close(fd)
    }

    fn dup(&self, fd: Fd) -> Result<Fd, Errno> {
        self.note("dup", fd, []);
        self.record.note_fd(self.host.dup(fd), self.record.kind(fd))
    }

    fn dup_above(&self, fd: Fd, lowest: Fd) -> Result<Fd, Errno> {
        self.note("fcntl", fd, ["F_DUPFD".to_owned()]);
        self.record.note_fd(self.host.dup_above(fd, lowest), self.record.kind(fd))
    }

    fn fionbio(&self, fd: Fd, on: bool) -> Result<(), Errno> {
        self.note("ioctl", fd, ["FIONBIO".to_owned()]);
        self.host.fionbio(fd, on)
    }

    fn ppoll(
        &self,
        fds: &mut [libc::pollfd],
        timeout: Option<Duration>,
        mask: &[c_int],
    ) -> Result<usize, Errno> {
        for entry in fds.iter() {
            self.note("ppoll", entry.fd, bits(entry.events.cast_unsigned().into(), POLL_EVENTS));
        }
        self.host.ppoll(fds, timeout, mask)
    }

    fn pselect(&self, sets: &[Vec<Fd>; 3], mask: &[c_int]) -> Result<(usize, [Vec<Fd>; 3]), Errno> {
        self.note_sets("pselect", sets);
        self.host.pselect(sets, mask)
    }

    fn sendfile(&self, to: Fd, from: Fd, offset: Option<&mut i64>, count: usize) -> Result<usize, Errno> {
        let ends = format!("{}→{}", self.record.kind(from), self.record.kind(to));
        self.record.note("sendfile", &ends, offset.is_some().then(|| "offset".to_owned()));
        self.host.sendfile(to, from, offset, count)
    }

    fn set_nonblocking(&self, fd: Fd, on: bool) -> Result<(), Errno> {
        let flags = ["F_SETFL", "O_NONBLOCK"].into_iter().take(1 + usize::from(on));
        self.note("fcntl", fd, flags.map(str::to_owned));
        self.host.set_nonblocking(fd, on)
    }

    fn setsockopt(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
        self.note("setsockopt", fd, [option(level, name)]);
        self.host.setsockopt(fd, level, name, value)
    }

    fn getsockopt_into(
        &self,
        fd: Fd,
        level: c_int,
        name: c_int,
        capacity: usize,
    ) -> Result<Vec<u8>, (Errno, usize)> {
        self.note("getsockopt", fd, [option(level, name)]);
        self.host.getsockopt_into(fd, level, name, capacity)
    }

    fn attached_filter(&self, fd: Fd, space: usize) -> Result<(usize, Vec<u8>), Errno> {
        self.note("getsockopt", fd, [option(libc::SOL_SOCKET, libc::SO_GET_FILTER)]);
        self.host.attached_filter(fd, space)
    }

    fn source_filter(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<Vec<u8>, Errno> {
        self.note("getsockopt", fd, [option(level, name)]);
        self.host.source_filter(fd, level, name, value)
    }

    fn getsockname(&self, fd: Fd) -> Result<Vec<u8>, Errno> {
        self.note("getsockname", fd, []);
        self.host.getsockname(fd)
    }

    fn getpeername(&self, fd: Fd) -> Result<Vec<u8>, Errno> {
        self.note("getpeername", fd, []);
        self.host.getpeername(fd)
    }

    fn query(&self, fd: Fd, request: c_ulong) -> Result<c_int, Errno> {
        let name = match request {
            libc::FIONREAD => "FIONREAD",
            libc::TIOCOUTQ => "SIOCOUTQ",
            SIOCATMARK => "SIOCATMARK",
            SIOCOUTQNSD => "SIOCOUTQNSD",
            _ => "another request",
        };
        self.note("ioctl", fd, [name.to_owned()]);
        self.host.query(fd, request)
    }

    fn arrival(&self, fd: Fd) -> Result<bool, Errno> {
        self.note("ioctl", fd, ["SIOCGSTAMP".to_owned()]);
        self.host.arrival(fd)
    }

    fn epoll_params(&self, fd: Fd) -> Result<[u8; 8], Errno> {
        self.note("ioctl", fd, ["EPIOCGPARAMS".to_owned()]);
        self.host.epoll_params(fd)
    }

    fn set_epoll_params(&self, fd: Fd, params: [u8; 8]) -> Result<(), Errno> {
        self.note("ioctl", fd, ["EPIOCSPARAMS".to_owned()]);
        self.host.set_epoll_params(fd, params)
    }

    fn owner(&self, fd: Fd) -> Result<c_int, Errno> {
        self.note("fcntl", fd, ["F_GETOWN".to_owned()]);
        self.host.owner(fd)
    }

    fn set_owner(&self, fd: Fd, owner: c_int) -> Result<(), Errno> {
        self.note("fcntl", fd, ["F_SETOWN".to_owned()]);
        self.host.set_owner(fd, owner)
    }

    fn poll(&self, fds: &mut [libc::pollfd], timeout_ms: c_int) -> Result<usize, Errno> {
        for entry in fds.iter() {
            self.note("poll", entry.fd, bits(entry.events.cast_unsigned().into(), POLL_EVENTS));
        }
        self.host.poll(fds, timeout_ms)
    }

    fn select(&self, sets: &[Vec<Fd>; 3]) -> Result<(usize, [Vec<Fd>; 3]), Errno> {
        self.note_sets("select", sets);
        self.host.select(sets)
    }

    fn epoll_create(&self) -> Result<Fd, Errno> {
        self.record.note("epoll_create1", "epoll", []);
        self.record.note_fd(self.host.epoll_create(), "epoll")
    }

    fn epoll_ctl(&self, set: Fd, op: c_int, fd: Fd, events: u32, data: u64) -> Result<(), Errno> {
        // The events argument is ignored when an entry is removed.
        let used_events = if op == libc::EPOLL_CTL_DEL { 0 } else { events };
        self.note(
            "epoll_ctl",
            fd,
            bits(used_events, EPOLL_EVENTS).into_iter().chain([name_of(op, EPOLL_OPS)]),
        );
        self.host.epoll_ctl(set, op, fd, events, data)
    }

    fn epoll_wait(&self, set: Fd, len_max: usize, timeout_ms: c_int) -> Result<Vec<(u32, u64)>, Errno> {
        self.note("epoll_wait", set, []);
        self.host.epoll_wait(set, len_max, timeout_ms)
    }

    fn handlers_changed(&self) {
        self.host.handlers_changed();
    }

    fn splice(&self, from: Fd, to: Fd, len: usize, flags: c_uint) -> Result<usize, Errno> {
        let ends = format!("{}→{}", self.record.kind(from), self.record.kind(to));
        self.record.note("splice", &ends, bits(flags, SPLICE_FLAGS));
        self.host.splice(from, to, len, flags)
    }

    fn catch_up(&self) {
        self.host.catch_up();
    }
}
