//! Hooks that create, bind, connect and query sockets.
#![allow(unsafe_code)] // functions that C calls

use super::stack_ops;
use crate::{attach, inherit, real};
use core::ffi::{c_int, c_void};
use ginnel_posix_ops::ffi::{self, IntoC, UserAddress};
use ginnel_posix_ops::flow_labels::{FLOWLABEL_MGR, LABEL_AT, REQUEST_BYTES};
use ginnel_posix_ops::{Ops, SignalDeferred, is_source_filter, user_memory};
use libc::{sockaddr, socklen_t};
use rustix::io::Errno;

/// Upper limit of the length of an option's value, in bytes.
const OPTION_BYTES_MAX: usize = 512;
/// Bytes of a `struct group_filter` with the most sources that can be configured.
const GROUP_FILTER_BYTES_MAX: usize = 144 + 1024 * 128;

#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if Ops::supports_socket(domain, kind, protocol) {
        match attach::ops_for_new_socket() {
            Ok(Some(ops)) => return ops.socket(domain, kind, protocol).into_c(),
            Ok(None) => {}
            Err(error) => return Err::<c_int, _>(error).into_c(),
        }
    }
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::socket(domain, kind, protocol) }
}

hook! {
    fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int = |ops| {
        UserAddress::read(address, len).and_then(|address| {
            let bound = ops.bind(fd, address.bytes());
            bound.inspect_err(|error| explain_bind(ops, fd, *error, address.bytes()))
        })
    };
    fn listen(fd: c_int, backlog: c_int) -> c_int = |ops| {
        let listens = ops.listen(fd, backlog);
        listens.inspect_err(|error| {
            if let Ok(address) = ops.getsockname(fd) {
                explain_bind(ops, fd, *error, address.bytes());
            }
        })
    };
    fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int = |ops| {
        ops.accept4(fd, flags).and_then(|(accepted, peer)| {
            // SAFETY: the program's buffer and its length.
            let written = unsafe { ffi::write_address(&peer, address, len) };
            if written.is_err() {
                // As on Linux, the connection is lost.
                let _ = ops.close(accepted);
            }
            written.map(|()| accepted)
        })
    };
    fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int = |ops| {
        UserAddress::read(address, len).and_then(|address| ops.connect(fd, address.bytes()))
    };
    fn shutdown(fd: c_int, how: c_int) -> c_int = |ops| ops.shutdown(fd, how);
    fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = |ops| {
        // SAFETY: the program's buffer and its length.
        ops.getsockname(fd).and_then(|name| unsafe { ffi::write_value(name.bytes(), address.cast(), len) })
    };
    fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = |ops| {
        // SAFETY: the program's buffer and its length.
        ops.getpeername(fd).and_then(|name| unsafe { ffi::write_value(name.bytes(), address.cast(), len) })
    };
    fn getsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t,
    ) -> c_int = |ops| {
        if is_source_filter(level, name)
            // SAFETY: the program's buffer and its length.
            && let Some(result) = unsafe { source_filter(ops, fd, level, name, value, len) }
        {
            return result.into_c();
        }
        if (level, name) == (libc::IPPROTO_IPV6, FLOWLABEL_MGR) {
            return (*SignalDeferred::new(|| {
                let mut request = [0; REQUEST_BYTES];
                // SAFETY: the program's buffer and its length.
                unsafe {
                    ffi::write_option(value, len, |space| {
                        let space = space.ok_or(Errno::INVAL)?;
                        let request = &mut request[..space.min(REQUEST_BYTES)];
                        user_memory::read_bytes(value.cast(), request)?;
                        ops.flow_label(fd, request)
                    })
                }
            }))
            .into_c();
        }
        // Allocates the value, so signals are deferred.
        *SignalDeferred::new(|| {
            // SAFETY: the program's buffer and its length.
            unsafe {
                ffi::write_option(value, len, |space| match space {
                    Some(space) => ops.getsockopt(fd, level, name, space),
                    None => ops.getsockopt_without_length(fd, level, name),
                })
            }
        })
    };
    fn setsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t,
    ) -> c_int = |ops| {
        // Only source filters are longer. The kernel reads only what the option needs.
        let mut copy = [0; OPTION_BYTES_MAX];
        match usize::try_from(len.cast_signed()) {
            Err(_) => Err(Errno::INVAL),
            // Allocates the copy, so signals are deferred.
            Ok(len) if len > OPTION_BYTES_MAX && is_source_filter(level, name) => *SignalDeferred::new(|| {
                let mut copy = vec![0; len.min(GROUP_FILTER_BYTES_MAX)];
                user_memory::read_bytes(value.cast(), &mut copy)?;
                ops.setsockopt(fd, level, name, &copy)
            }),
            Ok(len) if (level, name) == (libc::IPPROTO_IPV6, FLOWLABEL_MGR) => *SignalDeferred::new(|| {
                let copy = &mut copy[..len.min(OPTION_BYTES_MAX)];
                user_memory::read_bytes(value.cast(), copy)?;
                let asked = copy.get(LABEL_AT).map(<[u8]>::to_vec);
                ops.manage_flow_label(fd, copy)?;
                if let Some(label) = copy.get(LABEL_AT).filter(|label| asked.as_deref() != Some(*label)) {
                    // SAFETY: the program's buffer, in which Linux changes the label, too. It ignores faults.
                    let _ = unsafe { user_memory::write_list(value.cast::<u8>().cast_mut().add(LABEL_AT.start), label) };
                }
                Ok(())
            }),
            Ok(len) => {
                let copy = &mut copy[..len.min(OPTION_BYTES_MAX)];
                match user_memory::read_bytes(value.cast(), copy) {
                    // A null pointer is the number 0 (`do_ipv6_setsockopt`).
                    Err(_) if value.is_null() && level == libc::IPPROTO_IPV6 => {
                        ops.setsockopt(fd, level, name, &copy[..copy.len().min(size_of::<c_int>())])
                    }
                    Err(error) => Err(ops.check_option(fd, level, name).err().unwrap_or(error)),
                    Ok(()) => ops.setsockopt(fd, level, name, copy),
                }
            }
        }
    };
}

/// Reads a source filter, of a group that the program's buffer names. Returns `None` if the socket has no
/// groups.
///
/// # Safety
/// The pointers must be the arguments of a call that writes to them.
unsafe fn source_filter(
    ops: &Ops,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> Option<Result<(), Errno>> {
    let read = || {
        // SAFETY: any bytes are a length.
        let len = unsafe { user_memory::read(len) }?;
        let len = usize::try_from(len.cast_signed()).map_err(|_| Errno::INVAL)?;
        let mut copy = vec![0; len.min(GROUP_FILTER_BYTES_MAX)];
        user_memory::read_bytes(value.cast(), &mut copy)?;
        ops.source_filter(fd, level, name, &copy)
    };
    let found = &*SignalDeferred::new(read);
    match found {
        Err(error) => Some(Err(*error)),
        Ok(None) => None,
        // SAFETY: the caller's promise.
        Ok(Some(filter)) => Some(unsafe { ffi::write_value(filter, value, len) }),
    }
}

/// Explains why the kernel refuses an address, if a program on another stack is the reason.
#[cold]
fn explain_bind(ops: &Ops, fd: c_int, error: Errno, address: &[u8]) {
    if error == Errno::ADDRINUSE
        && let Some(stack) = inherit::stack()
    {
        // Allocates.
        SignalDeferred::new(|| ops.explain_address_in_use(fd, address, stack));
    }
}

alias! {
    fn __socket = socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn __connect = connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    unsafe { accept4(fd, address, len, 0) }
}

/// Ports that old protocols take for a sign of privilege (bindresvport(3)).
const RESERVED_PORTS: core::ops::RangeInclusive<u16> = 600..=1023;

#[unsafe(no_mangle)]
unsafe extern "C" fn bindresvport(fd: c_int, address: *mut libc::sockaddr_in) -> c_int {
    if stack_ops(fd).is_none() {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::bindresvport(fd, address) };
    }
    // SAFETY: the program's address is null or an IPv4 address, as libc's function requires.
    let given = unsafe { address.as_mut() };
    // SAFETY: an all-zero address is valid.
    let mut own: libc::sockaddr_in = unsafe { core::mem::zeroed() };
    own.sin_family = libc::AF_INET as libc::sa_family_t;
    let target = given.unwrap_or(&mut own);
    for port in RESERVED_PORTS.rev() {
        target.sin_port = port.to_be();
        let target: *const libc::sockaddr_in = target;
        // SAFETY: the address has this length.
        let result = unsafe { bind(fd, target.cast(), size_of::<libc::sockaddr_in>() as socklen_t) };
        // SAFETY: libc's variable of this thread.
        if result == 0 || unsafe { *libc::__errno_location() } != libc::EADDRINUSE {
            return result;
        }
    }
    Err::<(), _>(Errno::ADDRINUSE).into_c()
}
