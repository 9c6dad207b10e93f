//! Addresses as `struct sockaddr`.
#![allow(unsafe_code)] // structures of C

use crate::failure::Failure;
use crate::memory;
use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use rustix::io::Errno;

/// Returns the address at `address`, of `AF_INET` or `AF_INET6`.
///
/// # Safety
/// `len` bytes at `address` are readable.
pub unsafe fn read(address: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Failure> {
    const SHORT: Failure = Failure::new(Errno::INVAL, "an address that is too short");
    let len = len as usize;
    // SAFETY: as the caller says.
    let bytes = unsafe { memory::bytes(address.cast(), len) }?;
    let family = bytes.first_chunk().map(|family| libc::sa_family_t::from_ne_bytes(*family)).ok_or(SHORT)?;
    match i32::from(family) {
        libc::AF_INET if len >= size_of::<sockaddr_in>() => {
            // SAFETY: the structure has plain fields, and `bytes` has at least its length.
            let v4: sockaddr_in = unsafe { bytes.as_ptr().cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
            // SAFETY: as above.
            let v6: sockaddr_in6 = unsafe { bytes.as_ptr().cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            Ok(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, v6.sin6_scope_id).into())
        }
        libc::AF_INET | libc::AF_INET6 => Err(SHORT),
        _ => Err(Failure::new(Errno::AFNOSUPPORT, "an address that is neither AF_INET nor AF_INET6")),
    }
}

/// As [`read`], `None` for a null pointer.
///
/// # Safety
/// As of [`read`].
pub unsafe fn read_optional(address: *const sockaddr, len: socklen_t) -> Result<Option<SocketAddr>, Failure> {
    if address.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller says.
    unsafe { read(address, len) }.map(Some)
}

/// Returns a structure of C without an address.
pub fn none() -> sockaddr_storage {
    // SAFETY: all bytes may be 0.
    unsafe { core::mem::zeroed() }
}

/// Converts an address to a structure of C.
pub fn storage(address: SocketAddr) -> sockaddr_storage {
    let mut storage = none();
    match address {
        SocketAddr::V4(v4) => {
            let out = (&raw mut storage).cast::<sockaddr_in>();
            // SAFETY: `sockaddr_storage` has room and alignment for each kind of address.
            let out = unsafe { &mut *out };
            out.sin_family = libc::AF_INET as libc::sa_family_t;
            out.sin_port = v4.port().to_be();
            out.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
        }
        SocketAddr::V6(v6) => {
            let out = (&raw mut storage).cast::<sockaddr_in6>();
            // SAFETY: as above.
            let out = unsafe { &mut *out };
            out.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            out.sin6_port = v6.port().to_be();
            out.sin6_addr.s6_addr = v6.ip().octets();
            out.sin6_scope_id = v6.scope_id();
        }
    }
    storage
}
