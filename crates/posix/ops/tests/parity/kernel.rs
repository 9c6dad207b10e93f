//! The kernel: the system calls themselves.
#![allow(unsafe_code)] // system calls

use crate::sys::{EPIOCGPARAMS, EPIOCSPARAMS, Fd, Message, SIOCGSTAMP, Sys};
use core::ffi::{c_int, c_uint, c_ulong};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use ginnel_posix_ops::OptionValue;
use rustix::io::Errno;

pub const ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2))];

/// The loopback address of IPv6, of which there is only one.
pub const ADDRESSES_V6: [IpAddr; 2] = [IpAddr::V6(Ipv6Addr::LOCALHOST); 2];

pub struct Kernel;

fn result(value: isize) -> Result<usize, Errno> {
    usize::try_from(value).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap())
}

fn unit_result(value: c_int) -> Result<(), Errno> {
    result(value as isize).map(|_| ())
}

fn fd_result(value: c_int) -> Result<Fd, Errno> {
    result(value as isize).map(|value| value as Fd)
}

/// Returns a message of these buffers, without address and control messages.
fn message(list: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero bytes are an empty message.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = list.len();
    message
}

/// Returns the length of a tick of the kernel's timers (`CONFIG_HZ`).
pub fn tick() -> Duration {
    let tick = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse);
    Duration::from_nanos(tick.tv_nsec.try_into().unwrap())
}

impl Kernel {
    /// `fcntl(F_GETFD)`.
    pub fn fd_flags(&self, fd: Fd) -> Result<c_int, Errno> {
        // SAFETY: no memory is passed.
        fd_result(unsafe { libc::fcntl(fd, libc::F_GETFD) })
    }

    /// Makes `to` a copy of a descriptor.
    pub fn dup_to(&self, fd: Fd, to: Fd) -> Result<(), Errno> {
        // SAFETY: no pointers.
        unit_result(unsafe { libc::dup2(fd, to) }.min(0))
    }

    /// `fcntl(F_SETFD)`.
    pub fn set_fd_flags(&self, fd: Fd, flags: c_int) -> Result<(), Errno> {
        // SAFETY: no memory is passed.
        unit_result(unsafe { libc::fcntl(fd, libc::F_SETFD, flags) })
    }
}

/// Returns what a program finds in a buffer for `space` instructions if `ask` returns the value of
/// `SO_GET_FILTER`.
pub fn written_filter(
    space: usize,
    ask: impl FnOnce(usize) -> Result<OptionValue, Errno>,
) -> Result<(usize, Vec<u8>), Errno> {
    let mut code = vec![0; 8 * space];
    let mut len = space as u32;
    // SAFETY: the buffer has room for as many instructions as the length says.
    unsafe {
        ginnel_posix_ops::ffi::write_option(code.as_mut_ptr().cast(), &raw mut len, |space| {
            ask(space.unwrap_or_default())
        })
    }?;
    code.truncate(8 * len as usize);
    Ok((len as usize, code))
}

impl Sys for Kernel {
    fn socket(&self, domain: c_int, kind: c_int) -> Result<Fd, Errno> {
        // SAFETY: no memory is passed.
        fd_result(unsafe { libc::socket(domain, kind, 0) })
    }

    fn bind(&self, fd: Fd, address: &[u8]) -> Result<(), Errno> {
        // SAFETY: the address has the length that is passed.
        unit_result(unsafe { libc::bind(fd, address.as_ptr().cast(), address.len() as u32) })
    }

    fn listen(&self, fd: Fd, backlog: c_int) -> Result<(), Errno> {
        // SAFETY: no memory is passed.
        unit_result(unsafe { libc::listen(fd, backlog) })
    }

    fn accept4(&self, fd: Fd, flags: c_int) -> Result<Fd, Errno> {
        // SAFETY: no address is asked for.
        fd_result(unsafe { libc::accept4(fd, core::ptr::null_mut(), core::ptr::null_mut(), flags) })
    }

    fn connect(&self, fd: Fd, address: &[u8]) -> Result<(), Errno> {
        // SAFETY: the address has the length that is passed.
        unit_result(unsafe { libc::connect(fd, address.as_ptr().cast(), address.len() as u32) })
    }

    fn send(&self, fd: Fd, bytes: &[u8], flags: c_int) -> Result<usize, Errno> {
        // SAFETY: the buffer has the length that is passed.
        result(unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), flags) })
    }

    fn recv(&self, fd: Fd, len_max: usize, flags: c_int) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; len_max];
        // SAFETY: the buffer has the length that is passed.
        let count = result(unsafe { libc::recv(fd, bytes.as_mut_ptr().cast(), len_max, flags) })?;
        bytes.truncate(count);
        Ok(bytes)
    }

    fn sendv(&self, fd: Fd, parts: &[&[u8]], flags: c_int) -> Result<usize, Errno> {
        let mut list: Vec<libc::iovec> = parts
            .iter()
            .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() })
            .collect();
        let message = message(&mut list);
        // SAFETY: the buffers have the lengths that are passed, and are only read.
        result(unsafe { libc::sendmsg(fd, &raw const message, flags) })
    }

    fn recvv(&self, fd: Fd, lengths: &[usize], flags: c_int) -> Result<Vec<u8>, Errno> {
        let mut parts: Vec<Vec<u8>> = lengths.iter().map(|length| vec![0; *length]).collect();
        let mut list: Vec<libc::iovec> = parts
            .iter_mut()
            .map(|part| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() })
            .collect();
        let mut message = message(&mut list);
        // SAFETY: the buffers have the lengths that are passed, and outlive the call.
        let count = result(unsafe { libc::recvmsg(fd, &raw mut message, flags) })?;
        let mut bytes = parts.concat();
        bytes.truncate(count);
        Ok(bytes)
    }

    fn send_to(
        &self,
        fd: Fd,
        bytes: &[u8],
        to: Option<&[u8]>,
        control: &[u8],
        flags: c_int,
    ) -> Result<usize, Errno> {
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: all-zero bytes are an empty message; everything that it refers to outlives the call, and is
        // only read.
        result(unsafe {
            let mut message: libc::msghdr = core::mem::zeroed();
            if let Some(to) = to {
                message.msg_name = to.as_ptr().cast_mut().cast();
                message.msg_namelen = to.len() as u32;
            }
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.as_ptr().cast_mut().cast();
            message.msg_controllen = control.len();
            libc::sendmsg(fd, &raw const message, flags)
        })
    }

    fn recv_from(
        &self,
        fd: Fd,
        len_max: usize,
        control_capacity: usize,
        flags: c_int,
    ) -> Result<Message, Errno> {
        let (mut bytes, mut from, mut control) =
            (vec![0; len_max], vec![0u8; 128], vec![0u8; control_capacity]);
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len_max };
        // SAFETY: all-zero bytes are an empty message; everything that it refers to outlives the call, and
        // has the length that is passed.
        let (count, message) = unsafe {
            let mut message: libc::msghdr = core::mem::zeroed();
            message.msg_name = from.as_mut_ptr().cast();
            message.msg_namelen = from.len() as u32;
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = control.len();
            (result(libc::recvmsg(fd, &raw mut message, flags))?, message)
        };
        bytes.truncate(count.min(len_max));
        from.truncate(message.msg_namelen as usize);
        control.truncate(message.msg_controllen);
        Ok(Message { count, bytes, from, control, flags: message.msg_flags })
    }

    fn send_many(
        &self,
        fd: Fd,
        messages: &[(&[u8], Option<&[u8]>)],
        flags: c_int,
    ) -> Result<Vec<usize>, Errno> {
        let mut parts: Vec<libc::iovec> = messages
            .iter()
            .map(|(bytes, _)| libc::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            })
            .collect();
        let headers = parts.iter_mut().zip(messages).map(|(part, (_, to))| {
            let mut header = message(core::slice::from_mut(part));
            if let Some(to) = to {
                header.msg_name = to.as_ptr().cast_mut().cast();
                header.msg_namelen = to.len() as u32;
            }
            libc::mmsghdr { msg_hdr: header, msg_len: 0 }
        });
        let mut list: Vec<libc::mmsghdr> = headers.collect();
        // SAFETY: the list has the length that is passed, and everything that it refers to outlives the call.
        let count = unsafe { libc::sendmmsg(fd, list.as_mut_ptr(), list.len() as c_uint, flags) };
        Ok(list[..result(count as isize)?].iter().map(|sent| sent.msg_len as usize).collect())
    }

    fn recv_many(
        &self,
        fd: Fd,
        count: usize,
        len_max: usize,
        flags: c_int,
        timeout: Option<Duration>,
    ) -> Result<Vec<Vec<u8>>, Errno> {
        let mut bytes = vec![vec![0u8; len_max]; count];
        let mut parts: Vec<libc::iovec> = bytes
            .iter_mut()
            .map(|bytes| libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len_max })
            .collect();
        let headers = parts.iter_mut().map(|part| message(core::slice::from_mut(part)));
        let mut list: Vec<libc::mmsghdr> =
            headers.map(|msg_hdr| libc::mmsghdr { msg_hdr, msg_len: 0 }).collect();
        let mut time = timeout.map(|time| libc::timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        });
        let time = time.as_mut().map_or(core::ptr::null_mut(), core::ptr::from_mut);
        // SAFETY: the list has the length that is passed, and everything that it refers to outlives the call.
        let received = unsafe { libc::recvmmsg(fd, list.as_mut_ptr(), count as c_uint, flags, time) };
        let received = result(received as isize)?;
        Ok(bytes
            .into_iter()
            .zip(&list[..received])
            .map(|(bytes, got)| bytes[..got.msg_len as usize].into())
            .collect())
    }

    fn shutdown(&self, fd: Fd, how: c_int) -> Result<(), Errno> {
        // SAFETY: no memory is passed.
        unit_result(unsafe { libc::shutdown(fd, how) })
    }

    fn close(&self, fd: Fd) -> Result<(), Errno> {
        // SAFETY: the case owns the descriptor.
        unit_result(unsafe { libc::close(fd) })
    }

    fn dup(&self, fd: Fd) -> Result<Fd, Errno> {
        // SAFETY: no memory is passed.
        fd_result(unsafe { libc::dup(fd) })
    }

    fn dup_above(&self, fd: Fd, least: Fd) -> Result<Fd, Errno> {
        // SAFETY: no memory is passed.
        fd_result(unsafe { libc::fcntl(fd, libc::F_DUPFD, least) })
    }

    fn fionbio(&self, fd: Fd, on: bool) -> Result<(), Errno> {
        let mut on = c_int::from(on);
        // SAFETY: the kernel reads one integer.
        unit_result(unsafe { libc::ioctl(fd, libc::FIONBIO, &raw mut on) })
    }

    fn ppoll(
        &self,
        fds: &mut [libc::pollfd],
        timeout: Option<Duration>,
        mask: &[c_int],
    ) -> Result<usize, Errno> {
        let time = timeout.map(|time| libc::timespec {
            tv_sec: time.as_secs().cast_signed(),
            tv_nsec: time.subsec_nanos().into(),
        });
        let (time, mask) = (time.as_ref().map_or(core::ptr::null(), core::ptr::from_ref), set_of(mask));
        // SAFETY: the list has the length that is passed; time and mask outlive the call.
        result(unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, time, &raw const mask) }
            as isize)
    }

    fn sendfile(&self, to: Fd, from: Fd, offset: Option<&mut i64>, count: usize) -> Result<usize, Errno> {
        let offset = offset.map_or(core::ptr::null_mut(), core::ptr::from_mut);
        // SAFETY: the kernel writes one integer, unless the pointer is null.
        result(unsafe { libc::sendfile(to, from, offset, count) })
    }

    fn set_nonblocking(&self, fd: Fd, on: bool) -> Result<(), Errno> {
        // SAFETY: no memory is passed.
        unit_result(unsafe { libc::fcntl(fd, libc::F_SETFL, if on { libc::O_NONBLOCK } else { 0 }) })
    }

    fn setsockopt(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
        // SAFETY: the value has the length that is passed.
        unit_result(unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), value.len() as u32) })
    }

    fn getsockopt_into(
        &self,
        fd: Fd,
        level: c_int,
        name: c_int,
        capacity: usize,
    ) -> Result<Vec<u8>, (Errno, usize)> {
        let mut value = vec![0; capacity];
        let mut len = value.len() as u32;
        // SAFETY: the buffer has the length that is passed.
        unit_result(unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut len) })
            .map_err(|error| (error, len as usize))?;
        value.truncate(len as usize);
        Ok(value)
    }

    fn attached_filter(&self, fd: Fd, space: usize) -> Result<(usize, Vec<u8>), Errno> {
        let mut code = vec![0; 8 * space];
        let mut len = space as u32;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_GET_FILTER);
        // SAFETY: the buffer has room for as many instructions as the length says.
        unit_result(unsafe { libc::getsockopt(fd, level, name, code.as_mut_ptr().cast(), &raw mut len) })?;
        code.truncate(8 * len as usize);
        Ok((len as usize, code))
    }

    fn source_filter(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<Vec<u8>, Errno> {
        let mut value = value.to_vec();
        let mut len = value.len() as u32;
        // SAFETY: the buffer has the length that is passed.
        unit_result(unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut len) })?;
        value.truncate(len as usize);
        Ok(value)
    }

    fn getsockname(&self, fd: Fd) -> Result<Vec<u8>, Errno> {
        let mut value = vec![0; 128];
        let mut len = value.len() as u32;
        // SAFETY: the buffer has the length that is passed.
        unit_result(unsafe { libc::getsockname(fd, value.as_mut_ptr().cast(), &raw mut len) })?;
        value.truncate(len as usize);
        Ok(value)
    }

    fn getpeername(&self, fd: Fd) -> Result<Vec<u8>, Errno> {
        let mut value = vec![0; 128];
        let mut len = value.len() as u32;
        // SAFETY: the buffer has the length that is passed.
        unit_result(unsafe { libc::getpeername(fd, value.as_mut_ptr().cast(), &raw mut len) })?;
        value.truncate(len as usize);
        Ok(value)
    }

    fn query(&self, fd: Fd, request: c_ulong) -> Result<c_int, Errno> {
        let mut count: c_int = 0;
        // SAFETY: the kernel writes one integer.
        unit_result(unsafe { libc::ioctl(fd, request, &raw mut count) })?;
        Ok(count)
    }

    fn arrival(&self, fd: Fd) -> Result<bool, Errno> {
        let mut time = [0i64; 2];
        // SAFETY: the kernel writes a `struct timeval`.
        unit_result(unsafe { libc::ioctl(fd, SIOCGSTAMP, time.as_mut_ptr()) })?;
        Ok(time[0] != 0)
    }

    fn epoll_params(&self, fd: Fd) -> Result<[u8; 8], Errno> {
        let mut params = [0; 8];
        // SAFETY: the kernel writes a `struct epoll_params`, which has eight bytes.
        unit_result(unsafe { libc::ioctl(fd, EPIOCGPARAMS, params.as_mut_ptr()) })?;
        Ok(params)
    }

    fn set_epoll_params(&self, fd: Fd, params: [u8; 8]) -> Result<(), Errno> {
        // SAFETY: the kernel reads a `struct epoll_params`, which has eight bytes.
        unit_result(unsafe { libc::ioctl(fd, EPIOCSPARAMS, params.as_ptr()) })
    }

    fn owner(&self, fd: Fd) -> Result<c_int, Errno> {
        // SAFETY: no memory is passed.
        fd_result(unsafe { libc::fcntl(fd, libc::F_GETOWN) })
    }

    fn set_owner(&self, fd: Fd, owner: c_int) -> Result<(), Errno> {
        // SAFETY: no memory is passed.
        unit_result(unsafe { libc::fcntl(fd, libc::F_SETOWN, owner) })
    }

    fn poll(&self, fds: &mut [libc::pollfd], timeout_ms: c_int) -> Result<usize, Errno> {
        // SAFETY: the list has the length that is passed.
        result(unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) } as isize)
    }

    fn select(&self, sets: &[Vec<Fd>; 3]) -> Result<(usize, [Vec<Fd>; 3]), Errno> {
        select_with(sets, None)
    }

    fn pselect(&self, sets: &[Vec<Fd>; 3], mask: &[c_int]) -> Result<(usize, [Vec<Fd>; 3]), Errno> {
        select_with(sets, Some(set_of(mask)))
    }

    fn epoll_create(&self) -> Result<Fd, Errno> {
        // SAFETY: no memory is passed.
        fd_result(unsafe { libc::epoll_create1(0) })
    }

    fn epoll_ctl(&self, set: Fd, op: c_int, fd: Fd, events: u32, data: u64) -> Result<(), Errno> {
        let mut event = libc::epoll_event { events, u64: data };
        // SAFETY: the event outlives the call.
        unit_result(unsafe { libc::epoll_ctl(set, op, fd, &raw mut event) })
    }

    fn epoll_wait(&self, set: Fd, len_max: usize, timeout_ms: c_int) -> Result<Vec<(u32, u64)>, Errno> {
        let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; len_max];
        // SAFETY: the list has the length that is passed.
        let count = unsafe { libc::epoll_wait(set, events.as_mut_ptr(), len_max as c_int, timeout_ms) };
        let count = result(count as isize)?;
        Ok(events[..count].iter().map(|event| (event.events, event.u64)).collect())
    }

    fn splice(&self, from: Fd, to: Fd, len: usize, flags: c_uint) -> Result<usize, Errno> {
        let none = core::ptr::null_mut();
        // SAFETY: no offsets are passed.
        result(unsafe { libc::splice(from, none, to, none, len, flags) })
    }
}

/// Returns a set of these signals.
pub fn set_of(signals: &[c_int]) -> libc::sigset_t {
    // SAFETY: all-zero bytes are a valid `sigset_t`, which is initialised here.
    unsafe {
        let mut set: libc::sigset_t = core::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Calls `select`, or `pselect` if there is a mask.
fn select_with(sets: &[Vec<Fd>; 3], mask: Option<libc::sigset_t>) -> Result<(usize, [Vec<Fd>; 3]), Errno> {
    let mut bits = sets.each_ref().map(|fds| {
        // SAFETY: all-zero bytes are an empty set.
        let mut set: libc::fd_set = unsafe { core::mem::zeroed() };
        for fd in fds {
            assert!(usize::try_from(*fd).is_ok_and(|fd| fd < libc::FD_SETSIZE));
            // SAFETY: the number is below the size of the set.
            unsafe { libc::FD_SET(*fd, &raw mut set) };
        }
        set
    });
    let fd_end = sets.iter().flatten().max().map_or(0, |fd| fd + 1);
    let [read, write, except] = &mut bits;
    let count = match mask {
        None => {
            let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
            // SAFETY: the sets and the time outlive the call.
            unsafe { libc::select(fd_end, read, write, except, &raw mut time) }
        }
        Some(mask) => {
            let time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the sets, the time and the mask outlive the call.
            unsafe { libc::pselect(fd_end, read, write, except, &raw const time, &raw const mask) }
        }
    };
    let count = result(count as isize)?;
    // SAFETY: the numbers are those checked above.
    let has = |set: usize, fd: &&Fd| unsafe { libc::FD_ISSET(**fd, &raw const bits[set]) };
    let ready = [0, 1, 2].map(|set| sets[set].iter().filter(|fd| has(set, fd)).copied().collect());
    Ok((count, ready))
}

/// Action of a signal.
#[derive(Clone, Copy)]
pub enum Handler {
    None,
    Restarts,
    Interrupts,
}

static HANDLER_RUNS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: c_int) {
    HANDLER_RUNS.fetch_add(1, Ordering::SeqCst);
}

/// Returns how often handlers ran.
pub fn handler_runs() -> usize {
    HANDLER_RUNS.load(Ordering::SeqCst)
}

/// Sets the action of a signal.
pub fn set_handler(signal: c_int, handler: Handler) {
    // SAFETY: all-zero bytes are a valid action, the default one; the handler only counts.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        match handler {
            Handler::None => action.sa_sigaction = libc::SIG_IGN,
            Handler::Restarts | Handler::Interrupts => {
                action.sa_sigaction = count as extern "C" fn(c_int) as libc::sighandler_t;
            }
        }
        if matches!(handler, Handler::Restarts) {
            action.sa_flags = libc::SA_RESTART;
        }
        assert_eq!(libc::sigaction(signal, &raw const action, core::ptr::null_mut()), 0);
    }
}

/// Sets the handler of a signal.
pub fn set_handler_function(signal: c_int, function: extern "C" fn(c_int)) {
    // SAFETY: all-zero bytes are a valid action; the case is about the effects of the function.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = function as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(signal, &raw const action, core::ptr::null_mut()), 0);
    }
}

/// Returns the thread id of this thread.
pub fn this_thread() -> c_int {
    // SAFETY: no preconditions.
    unsafe { libc::gettid() }
}

/// Sends a signal to a thread, if it still exists.
pub fn interrupt(thread: c_int, signal: c_int) {
    // SAFETY: no memory is passed.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal) };
}

/// Calls `act` without the capabilities to administer networks, which this thread regains afterwards if it
/// had them.
pub fn without_network_capabilities<R>(act: impl FnOnce() -> R) -> R {
    // `struct __user_cap_header_struct` of version 3 for the calling thread, and the two `struct
    // __user_cap_data_struct`, of which the first is used: effective, permitted, inheritable.
    let mut header = [0x2008_0522u32, 0];
    let mut sets = [0u32; 6];
    // SAFETY: both have the size of version 3, and the kernel writes nothing else.
    let got = unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) };
    assert_eq!(got, 0, "capget");
    let mut set = |effective: u32| {
        let mut sets = sets;
        sets[0] = effective;
        // SAFETY: as above; the kernel only reads.
        let set = unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_ptr()) };
        assert_eq!(set, 0, "capset");
    };
    const NET_ADMIN_AND_RAW: u32 = 3 << 12;
    set(sets[0] & !NET_ADMIN_AND_RAW);
    let result = act();
    set(sets[0]);
    result
}
