//! Calls on sockets and descriptors. Calls on descriptors that do not belong to the stack, like those of
//! pipes, go to the kernel.
#![allow(unsafe_code)] // functions that C calls

use crate::instance::Instance;
use crate::session::Session;
use core::ffi::{c_int, c_long, c_ulong, c_void};
use ginnel_posix_ops::ffi::{self, IntoC, UserAddress};
use ginnel_posix_ops::{EpollEvent, Ops, Timeout};
use libc::{epoll_event, nfds_t, pollfd, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;

/// Maximum number of descriptors of one `poll`.
const POLLED_MAX: usize = 1 << 20;
// Requests of `ioctl`, from `asm-generic/sockios.h` and `linux/sockios.h`.
const SIOCATMARK: c_ulong = 0x8905;
const SIOCOUTQNSD: c_ulong = 0x894b;

/// Returns the session that `userdata` points to.
///
/// # Errors
/// `ENODEV` if `userdata` is null, because the flags were invalid.
///
/// # Safety
/// `userdata` belongs to an interface that was initialised and not freed.
pub unsafe fn session<'a>(userdata: *mut c_void) -> Result<&'a Session, Errno> {
    // SAFETY: null, or the caller's promise.
    unsafe { userdata.cast::<Session>().as_ref() }.ok_or(Errno::NODEV)
}

/// Returns the stack, which counts as used from now on.
///
/// # Errors
/// `ENODEV` if there is no session, or the stack could not start.
///
/// # Safety
/// As for [`session`].
pub unsafe fn instance<'a>(userdata: *mut c_void) -> Result<&'a Instance, Errno> {
    // SAFETY: the caller's promise.
    unsafe { session(userdata) }?.instance()
}

/// Returns the stack if the descriptor belongs to it, `Ok(None)` if it belongs to the kernel.
///
/// # Safety
/// As for [`session`].
unsafe fn owner<'a>(userdata: *mut c_void, fd: c_int) -> Result<Option<&'a Instance>, Errno> {
    // SAFETY: the caller's promise.
    let instance = unsafe { instance(userdata) }?;
    Ok(instance.ops.owns(fd).then_some(instance))
}

/// Converts a result of libc.
pub fn libc_size_result(result: ssize_t) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| last_error())
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn libc_int_result(result: c_int) -> Result<c_int, Errno> {
    if result < 0 { Err(last_error()) } else { Ok(result) }
}

/// # Safety
/// `userdata` belongs to the interface, no function of it runs, and none is called afterwards.
pub unsafe extern "C" fn free(userdata: *mut c_void) {
    if !userdata.is_null() {
        // SAFETY: `userdata` came from a box, and the caller's promise.
        drop(unsafe { Box::from_raw(userdata.cast::<Session>()) });
    }
}

/// # Safety
/// `userdata` belongs to the interface.
pub unsafe extern "C" fn socket(userdata: *mut c_void, domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { instance(userdata) }.and_then(|instance| instance.ops.socket(domain, kind, protocol)).into_c()
}

/// Returns bytes of the caller.
///
/// # Safety
/// `pointer` must be null or readable for `len` bytes.
pub unsafe fn bytes_of<'a>(pointer: *const c_void, len: usize) -> Result<&'a [u8], Errno> {
    if len == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { core::slice::from_raw_parts(pointer.cast(), len) })
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn bind(
    userdata: *mut c_void,
    fd: c_int,
    address: *const sockaddr,
    len: socklen_t,
) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { instance(userdata) }
        .and_then(|i| i.ops.bind(fd, UserAddress::read(address, len)?.bytes()))
        .into_c()
}

/// # Safety
/// `userdata` belongs to the interface.
pub unsafe extern "C" fn listen(userdata: *mut c_void, fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { instance(userdata) }.and_then(|i| i.settle(i.ops.listen(fd, backlog))).into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn accept(
    userdata: *mut c_void,
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's promise.
    let accepted = unsafe { instance(userdata) }.and_then(|instance| {
        let (new, peer) = instance.settle(instance.ops.accept4(fd, 0))?;
        // SAFETY: the buffer has the length that the caller states.
        unsafe { ffi::write_address(&peer, address, len) }.map(|()| new)
    });
    accepted.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn connect(
    userdata: *mut c_void,
    fd: c_int,
    address: *const sockaddr,
    len: socklen_t,
) -> c_int {
    // SAFETY: the caller's promises.
    unsafe {
        instance(userdata)
            .and_then(|i| i.settle(i.ops.connect(fd, UserAddress::read(address, len)?.bytes())))
            .into_c()
    }
}

/// # Safety
/// As libc's, with the interface's `userdata`; commands without an argument ignore it.
pub unsafe extern "C" fn fcntl(userdata: *mut c_void, fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the arguments are passed on unchanged.
    let call_libc = || libc_int_result(unsafe { libc::fcntl(fd, command, argument) });
    // SAFETY: the caller's promise.
    let result =
        unsafe { owner(userdata, fd) }.and_then(|owner| match (owner.map(|owner| &owner.ops), command) {
            (Some(ops), libc::F_GETFL) => {
                let flag = |on| libc::O_RDWR | if on { libc::O_NONBLOCK } else { 0 };
                ops.is_nonblocking(fd).map(|on| flag(on.unwrap_or(false)))
            }
            (Some(ops), libc::F_SETFL) => {
                ops.set_nonblocking(fd, argument as c_int & libc::O_NONBLOCK != 0).map(|_| 0)
            }
            (Some(ops), libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) => {
                let copy = call_libc()?;
                ops.dup(fd, copy).map(|()| copy).inspect_err(|_| {
                    // SAFETY: the descriptor was created above.
                    unsafe { libc::close(copy) };
                })
            }
            // Flags of the descriptor itself are those of its proxy descriptor.
            _ => call_libc(),
        });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`; requests without an argument ignore it.
pub unsafe extern "C" fn ioctl(
    userdata: *mut c_void,
    fd: c_int,
    request: c_ulong,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: the arguments are passed on unchanged.
    let call_libc = || libc_int_result(unsafe { libc::ioctl(fd, request, argument) });
    // SAFETY: the argument of these requests points to an integer.
    let number = || unsafe { argument.cast::<c_int>().as_mut() }.ok_or(Errno::FAULT);
    // SAFETY: the caller's promise.
    let result =
        unsafe { owner(userdata, fd) }.and_then(|owner| match (owner.map(|owner| &owner.ops), request) {
            (Some(ops), libc::FIONREAD) => ops.siocinq(fd).and_then(|value| {
                *number()? = value;
                Ok(0)
            }),
            (Some(ops), libc::TIOCOUTQ) => ops.siocoutq(fd).and_then(|value| {
                *number()? = value;
                Ok(0)
            }),
            (Some(ops), SIOCOUTQNSD) => ops.siocoutqnsd(fd).and_then(|value| {
                *number()? = value;
                Ok(0)
            }),
            (Some(ops), SIOCATMARK) => ops.is_at_mark(fd).and_then(|value| {
                *number()? = value.into();
                Ok(0)
            }),
            (Some(ops), libc::FIONBIO) => ops.set_nonblocking(fd, *number()? != 0).map(|_| 0),
            (Some(_), libc::FIOCLEX | libc::FIONCLEX) | (None, _) => call_libc(),
            (Some(_), _) => Err(Errno::NOTTY),
        });
    result.into_c()
}

/// # Safety
/// `userdata` belongs to the interface.
pub unsafe extern "C" fn close(userdata: *mut c_void, fd: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { owner(userdata, fd) }.and_then(|owner| match owner {
        Some(instance) => instance.settle(instance.ops.close(fd)),
        None if Ops::is_internal(fd) => Err(Errno::BADF),
        // SAFETY: the arguments are passed on unchanged.
        None => libc_int_result(unsafe { libc::close(fd) }).map(|_| ()),
    });
    result.into_c()
}

/// # Safety
/// `userdata` belongs to the interface.
pub unsafe extern "C" fn shutdown(userdata: *mut c_void, fd: c_int, how: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { instance(userdata) }.and_then(|i| i.settle(i.ops.shutdown(fd, how))).into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn getsockopt(
    userdata: *mut c_void,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { instance(userdata) }.and_then(|instance| {
        // SAFETY: the buffer has the length that the caller states.
        unsafe {
            ffi::write_option(value, len, |space| match space {
                Some(space) => instance.ops.getsockopt(fd, level, name, space),
                None => instance.ops.getsockopt_without_length(fd, level, name),
            })
        }
    });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn setsockopt(
    userdata: *mut c_void,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { instance(userdata) }.and_then(|instance| {
        if len.cast_signed() < 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the value has the length that the caller states.
        let value = unsafe { bytes_of(value, len as usize) }?;
        instance.settle(instance.ops.setsockopt(fd, level, name, value))
    });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn poll(
    userdata: *mut c_void,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { instance(userdata) }.and_then(|instance| {
        let count = usize::try_from(count).ok().filter(|count| *count <= POLLED_MAX).ok_or(Errno::INVAL)?;
        let fds = match (count, fds.is_null()) {
            (0, _) => &mut [],
            (_, true) => return Err(Errno::FAULT),
            // SAFETY: the list has the length that the caller states.
            (_, false) => unsafe { core::slice::from_raw_parts_mut(fds, count) },
        };
        instance.ops.poll(fds, Timeout::from_millis(timeout), None)
    });
    result.map(|count| count as c_int).into_c()
}

/// # Safety
/// `userdata` belongs to the interface.
pub unsafe extern "C" fn epoll_create(userdata: *mut c_void, size: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { instance(userdata) }.and_then(|instance| match size {
        ..=0 => Err(Errno::INVAL),
        _ => instance.ops.epoll_create1(0),
    });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn epoll_ctl(
    userdata: *mut c_void,
    set: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { instance(userdata) }.and_then(|instance| {
        if event.is_null() && op != libc::EPOLL_CTL_DEL {
            return Err(Errno::FAULT);
        }
        // SAFETY: not null, and the caller's promise.
        let event = (!event.is_null()).then(|| unsafe { event.read_unaligned() });
        let event = event.map(|event| EpollEvent { events: event.events, data: event.u64 });
        instance.ops.epoll_ctl(set, op, fd, event)
    });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn epoll_wait(
    userdata: *mut c_void,
    set: c_int,
    events: *mut epoll_event,
    events_max: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { instance(userdata) }.and_then(|instance| {
        let events_max = usize::try_from(events_max).unwrap_or(0);
        instance.ops.epoll_wait_with(set, events_max, Timeout::from_millis(timeout), None, |at, event| {
            if events.is_null() {
                return Err(Errno::FAULT);
            }
            let event = epoll_event { events: event.events, u64: event.data };
            // SAFETY: the list has room for the maximum number of events that was passed.
            unsafe { events.add(at).write_unaligned(event) };
            Ok(())
        })
    });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn pipe(userdata: *mut c_void, ends: *mut c_int) -> c_int {
    // SAFETY: the caller's promises; a pipe belongs to the kernel.
    unsafe { instance(userdata).and_then(|_| libc_int_result(libc::pipe(ends))) }.into_c()
}
