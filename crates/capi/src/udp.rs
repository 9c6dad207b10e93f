//! UDP sockets of the calling thread's shard.
#![allow(unsafe_code)] // functions that C calls

use crate::current::{check_loop, with_context};
use crate::failure::{Failure, call, call_bytes};
use crate::handles::UdpSocketHandle;
use crate::{address, memory};
use core::ffi::{c_int, c_void};
use core::net::SocketAddr;
use ginnel::{Datagram, UdpOptions, UdpSendParams};
use libc::{sockaddr, sockaddr_storage, socklen_t};
use rustix::io::Errno;

/// `GINNEL_UDP_REUSE_PORT`.
pub const REUSE_PORT: u32 = 1;
/// `GINNEL_UDP_V6_ONLY`.
pub const V6_ONLY: u32 = 1 << 1;
/// `GINNEL_UDP_BROADCAST`.
pub const BROADCAST: u32 = 1 << 2;
/// `GINNEL_UDP_REUSE_ADDRESS`.
pub const REUSE_ADDRESS: u32 = 1 << 3;
const ALL: u32 = (REUSE_ADDRESS << 1) - 1;

/// `struct ginnel_datagram`.
#[repr(C)]
pub struct CDatagram {
    pub from: sockaddr_storage,
    pub to: sockaddr_storage,
    pub len: usize,
    pub tos: u8,
    pub hop_limit: u8,
    pub reserved: [u8; 6],
}

impl From<&Datagram> for CDatagram {
    fn from(datagram: &Datagram) -> Self {
        Self {
            from: address::storage(datagram.from),
            to: address::storage(SocketAddr::new(datagram.to, 0)),
            len: datagram.len,
            tos: datagram.tos,
            hop_limit: datagram.hop_limit,
            reserved: [0; 6],
        }
    }
}

/// Opens a UDP socket.
///
/// # Safety
/// `len` bytes at `local` are readable; `out` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_bind(
    local: *const sockaddr,
    len: socklen_t,
    flags: u32,
    out: *mut UdpSocketHandle,
) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let (local, out) = unsafe { (address::read(local, len)?, memory::object_mut(out)?) };
        if flags & !ALL != 0 {
            return Err(Failure::new(Errno::INVAL, "an unknown flag"));
        }
        let options = UdpOptions {
            reuse_port: flags & REUSE_PORT != 0,
            reuse_address: flags & REUSE_ADDRESS != 0,
            v6only: flags & V6_ONLY != 0,
            broadcast: flags & BROADCAST != 0,
            ..UdpOptions::default()
        };
        *out = with_context(|cx| Ok(cx.udp_bind(local, options)?))?.into();
        Ok(0)
    })
}

/// Connects a UDP socket to a peer.
///
/// # Safety
/// `len` bytes at `remote` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_connect(
    socket: UdpSocketHandle,
    remote: *const sockaddr,
    len: socklen_t,
) -> c_int {
    call(|| {
        let socket = socket.get()?;
        // SAFETY: as the caller says.
        let remote = unsafe { address::read(remote, len) }?;
        with_context(|cx| Ok(cx.udp_connect(socket, remote)?))?;
        Ok(0)
    })
}

/// Sends a datagram. `source`, whose port does not matter, and `remote` may be null.
///
/// # Safety
/// `data_len` bytes at `data` are readable; `remote` is null or points to `remote_len` readable bytes, and
/// `source` is null or points to `source_len` readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_send(
    socket: UdpSocketHandle,
    data: *const c_void,
    data_len: usize,
    remote: *const sockaddr,
    remote_len: socklen_t,
    source: *const sockaddr,
    source_len: socklen_t,
) -> c_int {
    call(|| {
        let socket = socket.get()?;
        // SAFETY: as the caller says.
        let data = unsafe { memory::bytes(data, data_len) }?;
        // SAFETY: as the caller says.
        let to = unsafe { address::read_optional(remote, remote_len) }?;
        // SAFETY: as the caller says.
        let source = unsafe { address::read_optional(source, source_len) }?.map(|address| address.ip());
        let params = UdpSendParams { to, source, ..UdpSendParams::default() };
        with_context(|cx| Ok(cx.udp_send_with(socket, &params, data)?))?;
        Ok(0)
    })
}

/// Receives a datagram, cut off at the length of the buffer. Returns how many bytes were written.
///
/// # Safety
/// `len` bytes at `buffer` are writable; `datagram` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_recv(
    socket: UdpSocketHandle,
    buffer: *mut c_void,
    len: usize,
    datagram: *mut CDatagram,
) -> isize {
    call_bytes(|| {
        check_loop()?;
        let socket = socket.get()?;
        // SAFETY: as the caller says.
        let buffer = unsafe { memory::bytes_mut(buffer, len) }?;
        memory::check_optional(datagram)?;
        let received = with_context(|cx| Ok(cx.udp_recv(socket, buffer)?))?;
        if !datagram.is_null() {
            // SAFETY: as the caller says.
            unsafe { memory::write(datagram, CDatagram::from(&received)) }?;
        }
        Ok(received.len.min(len))
    })
}

/// Reads the local address of a UDP socket.
///
/// # Safety
/// `address` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_local(socket: UdpSocketHandle, address: *mut sockaddr_storage) -> c_int {
    call(|| {
        let socket = socket.get()?;
        let local = with_context(|cx| Ok(cx.udp_local(socket)?))?;
        // SAFETY: as the caller says.
        unsafe { memory::write(address, address::storage(local)) }?;
        Ok(0)
    })
}

/// Closes a UDP socket.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_udp_close(socket: UdpSocketHandle) -> c_int {
    call(|| {
        let socket = socket.get()?;
        with_context(|cx| Ok(cx.udp_close(socket)?))?;
        Ok(0)
    })
}
