//! The error queues of UDP sockets.
#![allow(unsafe_code)] // functions that C calls

use crate::current::with_context;
use crate::failure::{Failure, call_bytes};
use crate::handles::UdpSocketHandle;
use crate::{address, memory};
use core::ffi::c_void;
use core::net::SocketAddr;
use ginnel::{UdpError, UdpExtendedError};
use libc::sockaddr_storage;
use rustix::io::Errno;

/// `struct ginnel_udp_error`.
#[repr(C)]
pub struct CUdpError {
    pub destination: sockaddr_storage,
    pub offender: sockaddr_storage,
    pub len: usize,
    pub error: i32,
    pub next_error: i32,
    pub info: u32,
    pub extensions: i32,
    pub icmp_type: u8,
    pub icmp_code: u8,
    pub has_more: u8,
    pub extensions_invalid: u8,
    pub reserved: [u8; 4],
}

impl From<&UdpExtendedError> for CUdpError {
    fn from(entry: &UdpExtendedError) -> Self {
        let number = |error| ginnel::errno::udp(error).raw_os_error();
        Self {
            destination: address::storage(entry.destination),
            offender: entry
                .offender
                .map_or_else(address::none, |offender| address::storage(SocketAddr::new(offender, 0))),
            len: entry.payload_len,
            error: number(entry.error),
            next_error: entry.next_error.map_or(0, number),
            info: entry.info,
            extensions: entry.extensions.map_or(-1, |extensions| extensions.offset.into()),
            icmp_type: entry.icmp_type,
            icmp_code: entry.icmp_code,
            has_more: entry.has_more.into(),
            extensions_invalid: entry.extensions.is_some_and(|extensions| extensions.is_invalid).into(),
            reserved: [0; 4],
        }
    }
}

/// Takes the oldest entry of a socket's error queue. Returns how many bytes of the datagram were written.
///
/// # Safety
/// `len` bytes at `buffer` are writable; `error` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_recv_error(
    socket: UdpSocketHandle,
    buffer: *mut c_void,
    len: usize,
    error: *mut CUdpError,
) -> isize {
    call_bytes(|| {
        let socket = socket.get()?;
        // SAFETY: as the caller says.
        let buffer = unsafe { memory::bytes_mut(buffer, len) }?;
        memory::check(error)?;
        let entry = with_context(|cx| {
            cx.udp_take_report(socket, buffer).map_err(|e| match e {
                UdpError::WouldBlock => Failure::new(Errno::AGAIN, "no error in the queue"),
                e => e.into(),
            })
        })?;
        // SAFETY: as the caller says.
        unsafe { memory::write(error, CUdpError::from(&entry)) }?;
        Ok(entry.payload_len.min(len))
    })
}
