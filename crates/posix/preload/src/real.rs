//! The functions of libc that the hooks replace, looked up once each.
#![allow(unsafe_code)] // functions by name

use core::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use ginnel_next_symbol::real;
use libc::{
    epoll_event, fd_set, ifaddrs, iovec, mmsghdr, mode_t, msghdr, nfds_t, off_t, pid_t, pollfd, rlimit,
    sigset_t, size_t, sockaddr, sockaddr_in, socklen_t, ssize_t, timespec, timeval,
};

real! {
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    fn listen(fd: c_int, backlog: c_int) -> c_int;
    fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    fn shutdown(fd: c_int, how: c_int) -> c_int;
    fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    fn send(fd: c_int, bytes: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    fn sendto(fd: c_int, bytes: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t) -> ssize_t;
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    fn recv(fd: c_int, bytes: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    fn recvfrom(fd: c_int, bytes: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t) -> ssize_t;
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    fn __recv_chk(fd: c_int, bytes: *mut c_void, len: size_t, room: size_t, flags: c_int) -> ssize_t;
    fn __recvfrom_chk(fd: c_int, bytes: *mut c_void, len: size_t, room: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t) -> ssize_t;
    fn read(fd: c_int, bytes: *mut c_void, len: size_t) -> ssize_t;
    fn __read_chk(fd: c_int, bytes: *mut c_void, len: size_t, room: size_t) -> ssize_t;
    fn write(fd: c_int, bytes: *const c_void, len: size_t) -> ssize_t;
    fn readv(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t;
    fn writev(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t;
    fn sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn splice(from: c_int, from_offset: *mut i64, to: c_int, to_offset: *mut i64, len: size_t, flags: c_uint) -> ssize_t;
    fn close(fd: c_int) -> c_int;
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    fn dup(fd: c_int) -> c_int;
    fn dup2(fd: c_int, to: c_int) -> c_int;
    fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    fn fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int;
    fn ioctl(fd: c_int, request: libc::c_ulong, argument: *mut c_void) -> c_int;
    fn getifaddrs(list: *mut *mut ifaddrs) -> c_int;
    fn freeifaddrs(list: *mut ifaddrs) -> ();
    fn if_nameindex() -> *mut libc::if_nameindex;
    fn if_nametoindex(name: *const c_char) -> c_uint;
    fn if_indextoname(index: c_uint, name: *mut c_char) -> *mut c_char;
    fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int;
    fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    fn __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t) -> c_int;
    fn select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int;
    fn pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    fn epoll_create(size: c_int) -> c_int;
    fn epoll_create1(flags: c_int) -> c_int;
    fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int;
    fn setrlimit(resource: c_int, limit: *const rlimit) -> c_int;
    fn prlimit(pid: pid_t, resource: c_int, limit: *const rlimit, old: *mut rlimit) -> c_int;
    fn epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    fn epoll_wait(set: c_int, events: *mut epoll_event, most: c_int, timeout: c_int) -> c_int;
    fn epoll_pwait(set: c_int, events: *mut epoll_event, most: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    fn epoll_pwait2(set: c_int, events: *mut epoll_event, most: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    fn sigaction(signal: c_int, action: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    fn signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    fn __sysv_signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    fn sigset(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    fn sigprocmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int;
    fn pthread_sigmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int;
    fn sighold(signal: c_int) -> c_int;
    fn sigblock(mask: c_int) -> c_int;
    fn sigsetmask(mask: c_int) -> c_int;
    fn siginterrupt(signal: c_int, on: c_int) -> c_int;
    fn bindresvport(fd: c_int, address: *mut sockaddr_in) -> c_int;
    fn preadv2(fd: c_int, buffers: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn pwritev2(fd: c_int, buffers: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn execve(path: *const c_char, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn execvpe(file: *const c_char, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn fexecve(fd: c_int, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn execveat(folder: c_int, path: *const c_char, argv: *const *mut c_char, envp: *const *mut c_char, flags: c_int) -> c_int;
    fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const libc::posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const libc::posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn posix_spawn_file_actions_init(list: *mut c_void) -> c_int;
    fn posix_spawn_file_actions_destroy(list: *mut c_void) -> c_int;
    fn posix_spawn_file_actions_addclose(list: *mut c_void, fd: c_int) -> c_int;
    fn posix_spawn_file_actions_adddup2(list: *mut c_void, from: c_int, to: c_int) -> c_int;
    fn posix_spawn_file_actions_addopen(list: *mut c_void, fd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    fn posix_spawn_file_actions_addclosefrom_np(list: *mut c_void, first: c_int) -> c_int;
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
}
