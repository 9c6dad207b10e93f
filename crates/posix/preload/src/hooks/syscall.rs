//! `syscall`: system calls by number, which name descriptors too.
#![allow(unsafe_code)] // functions that C calls

use super::{ToC, ours};
use crate::{attach, real};
use core::ffi::{c_int, c_long, c_void};
use rustix::io::Errno;

unsafe extern "C" {
    fn accept4(fd: c_int, address: *mut c_void, len: *mut c_void, flags: c_int) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn close_range(first: u32, last: u32, flags: c_int) -> c_int;
    fn epoll_create1(flags: c_int) -> c_int;
    fn epoll_pwait2(
        set: c_int,
        events: *mut c_void,
        most: c_int,
        timeout: *const c_void,
        mask: *const c_void,
    ) -> c_int;
    fn read(fd: c_int, bytes: *mut c_void, len: usize) -> isize;
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn write(fd: c_int, bytes: *const c_void, len: usize) -> isize;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let fd = a as c_int;
    // SAFETY: the program's arguments are what the call of this number wants.
    unsafe {
        match number {
            // A ring would take descriptors past these hooks: programs that find none use the calls.
            libc::SYS_io_uring_setup if attach::ops().is_some() => super::fails(Errno::NOSYS, -1),
            libc::SYS_socket => socket(fd, b as c_int, c as c_int).to_c(),
            libc::SYS_epoll_create1 => epoll_create1(fd).to_c(),
            libc::SYS_close_range => close_range(a as u32, b as u32, c as c_int).to_c(),
            libc::SYS_close if ours(fd).is_some() => close(fd).to_c(),
            libc::SYS_read if ours(fd).is_some() => read(fd, b as *mut c_void, c as usize) as c_long,
            libc::SYS_write if ours(fd).is_some() => write(fd, b as *const c_void, c as usize) as c_long,
            libc::SYS_accept4 if ours(fd).is_some() => {
                accept4(fd, b as *mut c_void, c as *mut c_void, d as c_int).to_c()
            }
            libc::SYS_epoll_pwait2 if ours(fd).is_some() => {
                epoll_pwait2(fd, b as *mut c_void, c as c_int, d as *const c_void, e as *const c_void).to_c()
            }
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}
