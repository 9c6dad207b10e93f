//! The hooks: functions that replace libc's.
#![allow(unsafe_code)] // functions that C calls

use crate::program_memory::elements;
use crate::real;
use core::ffi::{c_int, c_uint, c_ulong};
use ginnel_kernel_lane as lane;
use libc::{
    epoll_event, fd_set, id_t, idtype_t, nfds_t, pid_t, pollfd, rusage, siginfo_t, sigset_t, size_t,
    sockaddr, socklen_t, timespec, timeval,
};
use std::sync::Once;

#[unsafe(no_mangle)]
unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    static FORK_HANDLERS: Once = Once::new();
    let is_new = lane::listening_begins(fd);
    if is_new {
        // SAFETY: the functions are valid as long as the program runs, because the library is never unloaded.
        FORK_HANDLERS.call_once(|| unsafe {
            libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
        });
    }
    // SAFETY: the program's arguments, unchanged.
    let result = unsafe { real::listen(fd, backlog) };
    if result == 0 {
        lane::listening(fd, backlog, is_new);
    } else if is_new {
        lane::listening_failed(fd);
    }
    result
}

unsafe extern "C" fn prepare() {
    lane::before_fork();
}

unsafe extern "C" fn parent() {
    lane::after_fork_parent();
}

unsafe extern "C" fn child() {
    lane::after_fork_child();
}

/// Accepts a connection that was left in another worker's socket, if there is one; otherwise calls `accept`
/// with `fd`.
fn accept_with(fd: c_int, accept: impl Fn(c_int) -> c_int) -> c_int {
    if !lane::is_listener(fd) {
        return accept(fd);
    }
    lane::use_listener(fd);
    if let Some(accepted) = lane::accept_waiting(fd, &accept) {
        return accepted;
    }
    let result = accept(fd);
    if result >= 0 {
        lane::accepted(fd);
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the program's arguments, or another listener.
    accept_with(fd, |fd| unsafe { real::accept(fd, address, len) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    // SAFETY: the program's arguments, or another listener.
    accept_with(fd, |fd| unsafe { real::accept4(fd, address, len, flags) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    if fd >= 0 && lane::memory_in(fd.cast_unsigned(), fd.cast_unsigned()).is_some() {
        // The program has not opened this descriptor.
        return fail(libc::EBADF);
    }
    lane::closes(fd);
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::close(fd) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: the program's arguments.
    let close = |first, last| unsafe { real::close_range(first, last, flags) };
    let result = match lane::memory_in(first, last).map(c_int::cast_unsigned) {
        None => close(first, last),
        // No descriptor has this number: the kernel only checks the flags.
        Some(_) if first == last => close(c_uint::MAX, c_uint::MAX),
        Some(kept) if kept == first => close(kept + 1, last),
        Some(kept) if kept == last => close(first, kept - 1),
        Some(kept) => match close(first, kept - 1) {
            0 => close(kept + 1, last),
            failed => failed,
        },
    };
    if result == 0 && flags & libc::CLOSE_RANGE_CLOEXEC.cast_signed() == 0 {
        lane::closed_range(first, last);
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    let from = first.max(0).cast_unsigned();
    // The system call itself, since libc may lack its function as well as `closefrom`.
    // SAFETY: the program's argument, or numbers around the one that stays open.
    let close =
        |first: c_uint, last: c_uint| unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0;
    let kept = lane::memory_in(from, c_uint::MAX).map(c_int::cast_unsigned);
    let next = kept.map_or(from, |kept| kept + 1);
    if !close(next, c_uint::MAX) {
        // Kernels before 5.9 do not have the call. SAFETY: as above.
        unsafe { real::closefrom(next.cast_signed()) };
    }
    if let Some(kept) = kept.filter(|kept| *kept > from)
        && !close(from, kept - 1)
    {
        // SAFETY: as above.
        (from..kept).for_each(|fd| _ = unsafe { real::close(fd.cast_signed()) });
    }
    lane::closed_range(from, c_uint::MAX);
}

/// Sets `errno` and returns -1.
fn fail(errno: c_int) -> c_int {
    // SAFETY: the address of this thread's variable.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Calls `dup2` or `dup3` and returns its result. Before the call, the lane moves the descriptor of its
/// memory if it has the number `to`. After a call that has replaced `to`, the lane forgets a listener of this
/// number.
fn duplicated(fd: c_int, to: c_int, duplicate: impl Fn() -> c_int) -> c_int {
    let is_replaced = fd != to && lane::replaces(to);
    let result = duplicate();
    if is_replaced {
        lane::replaced(to, result < 0);
    }
    if result >= 0 && fd != to {
        lane::closes(to);
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    duplicated(fd, to, || unsafe { real::dup2(fd, to) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    duplicated(fd, to, || unsafe { real::dup3(fd, to, flags) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    if !lane::is_listener(fd) {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::epoll_ctl(set, op, fd, event) };
    }
    if op == libc::EPOLL_CTL_ADD {
        lane::use_listener(fd);
    }
    // SAFETY: the program's arguments, unchanged.
    let result = unsafe { real::epoll_ctl(set, op, fd, event) };
    if result == 0 {
        // SAFETY: the kernel has read the event.
        let event = (op != libc::EPOLL_CTL_DEL).then(|| unsafe { event.read_unaligned() });
        lane::epoll_changed(set, fd, event.map(|event| (event.events, event.u64)));
    }
    result
}

/// Prepares the listeners among the descriptors of a call of `poll`. Nothing is read if the process has no
/// unused listener.
fn use_polled(fds: *const pollfd, count: nfds_t) {
    // SAFETY: any bytes are an element.
    let polled = unsafe { elements(fds, count as usize) };
    lane::use_all_in(polled.map(|element| element.fd));
}

/// Prepares the listeners in the read set of a call of `select`. Nothing is read if the process has no unused
/// listener.
fn use_selected(count: c_int, read: *const fd_set) {
    if read.is_null() {
        return;
    }
    let bits = c_ulong::BITS.cast_signed();
    let count = count.clamp(0, libc::FD_SETSIZE as c_int);
    // SAFETY: any bytes are a number.
    let words = unsafe { elements(read.cast::<c_ulong>(), ((count + bits - 1) / bits) as usize) };
    let fds = words.zip((0..).step_by(bits as usize)).flat_map(|(word, first)| {
        (0..bits).filter(move |bit| word >> bit & 1 != 0).map(move |bit| first + bit)
    });
    lane::use_all_in(fds.filter(|fd| *fd < count));
}

/// Defines hooks that prepare listeners and then call libc's function.
macro_rules! waiting {
    ($(
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) = $prepare:ident($first:ident, $second:ident);
    )*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            $prepare($first, $second);
            // SAFETY: the program's arguments, unchanged.
            unsafe { real::$name($($argument),*) }
        }
    )* };
}

waiting! {
    fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) = use_polled(fds, count);
    fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) = use_polled(fds, count);
    fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t)
        = use_polled(fds, count);
    fn __ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t,
    ) = use_polled(fds, count);
    fn select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval,
    ) = use_selected(count, read);
    fn pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t,
    ) = use_selected(count, read);
}

/// Tells the lane if `wait` has returned a child that has ended. Returns `pid`, the result of `wait`.
///
/// # Safety
/// `status` must be null or valid.
unsafe fn reaped(pid: pid_t, status: *const c_int) -> pid_t {
    if pid <= 0 {
        return pid;
    }
    // A child that was stopped or continued still runs. Without a status, the kernel says whether it does:
    // another error than `ESRCH` means that it runs as another user.
    let has_ended = if status.is_null() {
        let _errno = lane::ErrnoGuard::new();
        // SAFETY: sends nothing, and reads libc's variable of this thread.
        unsafe { libc::kill(pid, 0) != 0 && *libc::__errno_location() == libc::ESRCH }
    } else {
        // SAFETY: the caller's promise.
        unsafe { libc::WIFEXITED(*status) || libc::WIFSIGNALED(*status) }
    };
    if has_ended {
        lane::child_reaped();
    }
    pid
}

#[unsafe(no_mangle)]
unsafe extern "C" fn wait(status: *mut c_int) -> pid_t {
    // SAFETY: the program's arguments, unchanged.
    unsafe { reaped(real::wait(status), status) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn waitpid(pid: pid_t, status: *mut c_int, options: c_int) -> pid_t {
    // SAFETY: the program's arguments, unchanged.
    unsafe { reaped(real::waitpid(pid, status, options), status) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn wait3(status: *mut c_int, options: c_int, usage: *mut rusage) -> pid_t {
    // SAFETY: the program's arguments, unchanged.
    unsafe { reaped(real::wait3(status, options, usage), status) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn wait4(pid: pid_t, status: *mut c_int, options: c_int, usage: *mut rusage) -> pid_t {
    // SAFETY: the program's arguments, unchanged.
    unsafe { reaped(real::wait4(pid, status, options, usage), status) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn waitid(kind: idtype_t, id: id_t, info: *mut siginfo_t, options: c_int) -> c_int {
    // SAFETY: plain data, valid when all-zero.
    let mut own: siginfo_t = unsafe { core::mem::zeroed() };
    // The kernel takes a null pointer, too.
    let info = if info.is_null() { &raw mut own } else { info };
    // SAFETY: the program's arguments, or a structure of this function.
    let result = unsafe { real::waitid(kind, id, info, options) };
    if result == 0 && options & libc::WNOWAIT == 0 {
        // SAFETY: the kernel has filled the structure.
        let (pid, code) = unsafe { ((*info).si_pid(), (*info).si_code) };
        if pid > 0 && matches!(code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED) {
            lane::child_reaped();
        }
    }
    result
}
