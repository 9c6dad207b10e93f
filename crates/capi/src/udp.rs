//! UDP sockets of the calling thread's shard.
#![allow(unsafe_code)] // functions that C calls

use crate::current::{check_loop, with_context};
use crate::failure::{Failure, call, call_bytes};
use crate::handles::UdpSocketHandle;
use crate::udp_options::CUdpOptions;
use crate::{address, memory};
use core::ffi::{c_int, c_void};
use core::net::SocketAddr;
use ginnel::{Datagram, UdpSendParams};
use libc::{sockaddr, sockaddr_storage, socklen_t};
use rustix::io::Errno;

/// `struct ginnel_datagram`.
#[repr(C)]
pub struct CDatagram {
    pub from: sockaddr_storage,
    pub to: sockaddr_storage,
    pub len: usize,
    pub tos: u8,
    pub hop_limit: u8,
    pub gso_size: u16,
    pub reserved: [u8; 4],
}

impl From<&Datagram> for CDatagram {
    fn from(datagram: &Datagram) -> Self {
        Self {
            from: address::storage(datagram.from),
            to: address::storage(SocketAddr::new(datagram.to, 0)),
            len: datagram.len,
            tos: datagram.tos,
            hop_limit: datagram.hop_limit,
            gso_size: datagram.gso_size,
            reserved: [0; 4],
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
        let options = CUdpOptions { flags, ..CUdpOptions::default() }.get()?;
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

/// Replaces the options of a UDP socket.
///
/// # Safety
/// `options` is null or points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_set_options(
    socket: UdpSocketHandle,
    options: *const CUdpOptions,
) -> c_int {
    call(|| {
        let socket = socket.get()?;
        // SAFETY: as the caller says.
        let options = unsafe { memory::object(options) }?.get()?;
        with_context(|cx| Ok(cx.udp_set_options(socket, options)?))?;
        Ok(0)
    })
}

/// Addresses of a call that sends, as C passes them.
struct SendAddresses {
    remote: *const sockaddr,
    remote_len: socklen_t,
    source: *const sockaddr,
    source_len: socklen_t,
}

/// Sends a datagram, or several of `gso_size` bytes unless that is 0.
///
/// # Safety
/// `len` bytes at `data` are readable. Each address is null or points to as many readable bytes as its length
/// says.
unsafe fn send(
    socket: UdpSocketHandle,
    data: *const c_void,
    len: usize,
    gso_size: u16,
    addresses: &SendAddresses,
) -> Result<c_int, Failure> {
    let socket = socket.get()?;
    // SAFETY: as the caller says.
    let data = unsafe { memory::bytes(data, len) }?;
    // SAFETY: as the caller says.
    let to = unsafe { address::read_optional(addresses.remote, addresses.remote_len) }?;
    // SAFETY: as the caller says.
    let source = unsafe { address::read_optional(addresses.source, addresses.source_len) }?;
    let source = source.map(|address| address.ip());
    let params = UdpSendParams { to, source, gso_size, ..UdpSendParams::default() };
    with_context(|cx| Ok(cx.udp_send_with(socket, &params, data)?))?;
    Ok(0)
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
    let addresses = SendAddresses { remote, remote_len, source, source_len };
    // SAFETY: as the caller says.
    call(|| unsafe { send(socket, data, data_len, 0, &addresses) })
}

/// Sends the datagrams that are concatenated in `data`, each of `segment_len` bytes, the last of which may be
/// shorter. `EINVAL` if that is 0, or more than a datagram can have.
///
/// # Safety
/// As of [`ginnel_udp_send`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_send_segments(
    socket: UdpSocketHandle,
    data: *const c_void,
    data_len: usize,
    segment_len: usize,
    remote: *const sockaddr,
    remote_len: socklen_t,
    source: *const sockaddr,
    source_len: socklen_t,
) -> c_int {
    let addresses = SendAddresses { remote, remote_len, source, source_len };
    call(|| {
        let gso_size = u16::try_from(segment_len).ok().filter(|len| *len > 0);
        let gso_size = gso_size.ok_or(Failure::new(Errno::INVAL, "no length that a datagram can have"))?;
        // SAFETY: as the caller says.
        unsafe { send(socket, data, data_len, gso_size, &addresses) }
    })
}

/// Returns the largest number of bytes of an IP packet that reaches the connected peer without fragmentation.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_udp_path_mtu(socket: UdpSocketHandle) -> c_int {
    call(|| {
        let socket = socket.get()?;
        with_context(|cx| Ok(cx.udp_path_mtu(socket)?.into()))
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
