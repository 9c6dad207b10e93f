//! Listeners and connections of the calling thread's shard.
#![allow(unsafe_code)] // functions that C calls

use crate::current::{check_loop, with_context, with_events};
use crate::failure::{Failure, call, call_bytes};
use crate::handles::{ConnHandle, ListenerHandle, SourceHandle};
use crate::options::{CListenOptions, CSocketOptions, option};
use crate::sources::source_id;
use crate::{address, memory};
use core::ffi::{c_int, c_void};
use core::net::SocketAddr;
use ginnel::ConnectOptions;
use libc::{sockaddr, sockaddr_storage, socklen_t};
use rustix::io::Errno;

/// `ginnel_fill`: writes bytes to send. The arguments are `arg`, the offset of the first byte in what the
/// call sends, the room, and its length in bytes.
pub type Fill = unsafe extern "C" fn(*mut c_void, usize, *mut u8, usize);

/// `struct ginnel_info`.
#[repr(C)]
pub struct CInfo {
    pub local: sockaddr_storage,
    pub remote: sockaddr_storage,
    pub rtt_ns: u64,
    pub rttvar_ns: u64,
    pub min_rtt_ns: u64,
    pub send_queued: u32,
    pub recv_queued: u32,
    pub unsent: u32,
    pub mss: u32,
    pub congestion_window: u32,
    pub unacked_segments: u32,
    pub retransmits: u32,
    pub state: u32,
}

/// Returns the options of the caller, or the default.
///
/// # Safety
/// `options` is null or points to a structure.
unsafe fn socket_options(options: *const CSocketOptions) -> Result<CSocketOptions, Failure> {
    if options.is_null() {
        return Ok(CSocketOptions::default());
    }
    // SAFETY: as the caller says.
    unsafe { memory::object(options) }.copied()
}

/// Listens on an address.
///
/// # Safety
/// `len` bytes at `address` are readable; `options` is null or points to a structure, `out` to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_listen(
    address: *const sockaddr,
    len: socklen_t,
    options: *const CSocketOptions,
    out: *mut ListenerHandle,
) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let (local, options) = unsafe { (address::read(address, len)?, socket_options(options)?) };
        let options = options.listen()?;
        // SAFETY: as the caller says.
        let out = unsafe { memory::object_mut(out) }?;
        *out = with_context(|cx| Ok(cx.listen(local, options)?))?.into();
        Ok(0)
    })
}

/// Listens on an address, with the options that only listeners have.
///
/// # Safety
/// `len` bytes at `address` are readable; `options` is null or points to a structure of the size that it
/// states, `out` to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_listen_with(
    address: *const sockaddr,
    len: socklen_t,
    options: *const CListenOptions,
    out: *mut ListenerHandle,
) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let local = unsafe { address::read(address, len) }?;
        // SAFETY: as the caller says. All fields are numbers.
        let options = unsafe { memory::sized(options, CListenOptions::LEAST, "ginnel_listen_options") }?;
        let options = options.listen()?;
        // SAFETY: as the caller says.
        let out = unsafe { memory::object_mut(out) }?;
        *out = with_context(|cx| Ok(cx.listen(local, options)?))?.into();
        Ok(0)
    })
}

/// Stops listening.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_unlisten(listener: ListenerHandle) -> c_int {
    call(|| {
        let listener = listener.get()?;
        with_context(|cx| Ok(cx.unlisten(listener)?))?;
        Ok(0)
    })
}

/// Takes a connection from the accept queue.
///
/// # Safety
/// `out` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_accept(listener: ListenerHandle, out: *mut ConnHandle) -> c_int {
    call(|| {
        check_loop()?;
        let listener = listener.get()?;
        // SAFETY: as the caller says.
        let out = unsafe { memory::object_mut(out) }?;
        let conn = with_context(|cx| Ok(cx.accept(listener)))?;
        *out = conn.ok_or(Failure::new(Errno::AGAIN, "no connection to accept yet"))?.into();
        Ok(0)
    })
}

/// Returns the address of the peer, and the options of a connection to it.
///
/// # Safety
/// `remote_len` bytes at `remote` are readable; `local` is null or points to `local_len` readable bytes;
/// `options` is null or points to a structure.
unsafe fn connect_options(
    remote: *const sockaddr,
    remote_len: socklen_t,
    local: *const sockaddr,
    local_len: socklen_t,
    options: *const CSocketOptions,
) -> Result<(SocketAddr, ConnectOptions), Failure> {
    // SAFETY: as the caller says.
    let remote = unsafe { address::read(remote, remote_len) }?;
    // SAFETY: as the caller says.
    let mut options = unsafe { socket_options(options) }?.connect()?;
    // SAFETY: as the caller says.
    options.local = unsafe { address::read_optional(local, local_len) }?;
    Ok((remote, options))
}

/// Opens a connection.
///
/// # Safety
/// `remote_len` bytes at `remote` are readable; `local` is null or points to `local_len` readable bytes;
/// `options` is null or points to a structure, `out` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_connect(
    remote: *const sockaddr,
    remote_len: socklen_t,
    local: *const sockaddr,
    local_len: socklen_t,
    options: *const CSocketOptions,
    out: *mut ConnHandle,
) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let (remote, options) = unsafe { connect_options(remote, remote_len, local, local_len, options) }?;
        // SAFETY: as the caller says.
        let out = unsafe { memory::object_mut(out) }?;
        *out = with_context(|cx| Ok(cx.connect(remote, options)?))?.into();
        Ok(0)
    })
}

/// Opens a connection fast (RFC 7413). Returns the number of bytes of `data` that were queued.
///
/// # Safety
/// As of [`ginnel_connect`], and `len` bytes at `data` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_connect_with_data(
    remote: *const sockaddr,
    remote_len: socklen_t,
    local: *const sockaddr,
    local_len: socklen_t,
    options: *const CSocketOptions,
    data: *const c_void,
    len: usize,
    out: *mut ConnHandle,
) -> isize {
    call_bytes(|| {
        // SAFETY: as the caller says.
        let (remote, options) = unsafe { connect_options(remote, remote_len, local, local_len, options) }?;
        // SAFETY: as the caller says.
        let (data, out) = unsafe { (memory::bytes(data, len)?, memory::object_mut(out)?) };
        let (conn, queued) = with_context(|cx| Ok(cx.connect_with_data(remote, options, data)?))?;
        *out = conn.into();
        Ok(queued)
    })
}

/// Queues a copy of bytes. Returns the number of bytes queued.
///
/// # Safety
/// `len` bytes at `data` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_send(conn: ConnHandle, data: *const c_void, len: usize) -> isize {
    call_bytes(|| {
        let conn = conn.get()?;
        // SAFETY: as the caller says.
        let data = unsafe { memory::bytes(data, len) }?;
        with_context(|cx| Ok(cx.send(conn, data)?))
    })
}

/// Queues bytes that `fill` writes into the send buffer. Returns the number of bytes queued.
///
/// # Safety
/// `fill` is null or writes all bytes that it is asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_send_fill(
    conn: ConnHandle,
    len: usize,
    fill: Option<Fill>,
    argument: *mut c_void,
) -> isize {
    call_bytes(|| {
        let conn = conn.get()?;
        let fill = fill.ok_or(Failure::new(Errno::FAULT, "no function that writes the bytes"))?;
        with_context(|cx| {
            Ok(cx.send_with(conn, len, false, |offset, out| {
                // SAFETY: the function writes to the slice only, as the caller says.
                unsafe { fill(argument, offset, out.as_mut_ptr(), out.len()) }
            })?)
        })
    })
}

/// Queues a copy of bytes, the last of which is urgent. Returns the number of bytes queued.
///
/// # Safety
/// `len` bytes at `data` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_send_urgent(conn: ConnHandle, data: *const c_void, len: usize) -> isize {
    call_bytes(|| {
        let conn = conn.get()?;
        // SAFETY: as the caller says.
        let data = unsafe { memory::bytes(data, len) }?;
        with_context(|cx| Ok(cx.send_urgent(conn, data)?))
    })
}

/// Takes the urgent byte out of band, and returns it.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_recv_urgent(conn: ConnHandle) -> c_int {
    call(|| {
        let conn = conn.get()?;
        with_context(|cx| Ok(cx.recv_urgent(conn)?.into()))
    })
}

/// Queues a message with a priority.
///
/// # Safety
/// `len` bytes at `data` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_send_message(
    conn: ConnHandle,
    data: *const c_void,
    len: usize,
    priority: u8,
) -> c_int {
    call(|| {
        let conn = conn.get()?;
        // SAFETY: as the caller says.
        let data = unsafe { memory::bytes(data, len) }?;
        with_context(|cx| Ok(cx.send_message(conn, data, priority)?))?;
        Ok(0)
    })
}

/// Queues bytes of a source without copying them.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_send_source(conn: ConnHandle, source: SourceHandle, offset: u64, len: u64) -> c_int {
    call(|| {
        let conn = conn.get()?;
        with_context(|cx| Ok(cx.send_source(conn, source_id(source), offset, len)?))?;
        Ok(0)
    })
}

/// Receives bytes. Returns their number; 0 at the end of the stream.
///
/// # Safety
/// `len` bytes at `buffer` are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_recv(conn: ConnHandle, buffer: *mut c_void, len: usize) -> isize {
    call_bytes(|| {
        check_loop()?;
        // SAFETY: as the caller says.
        let buffer = unsafe { memory::bytes_mut(buffer, len) }?;
        if let Some(received) = with_events(|events| events.recv_late(conn, buffer)) {
            return Ok(received?);
        }
        let conn = conn.get()?;
        with_context(|cx| Ok(cx.recv(conn, buffer)?))
    })
}

/// Lends received bytes where they are, from `offset` bytes after the first unread one on. Returns how many
/// are contiguous in memory; 0 at the end of the stream.
///
/// The pointer is to the receive buffer. What the header forbids while the bytes are used, nothing but calls
/// of this thread does: they free or replace the bytes.
///
/// # Safety
/// `data` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_peek(conn: ConnHandle, offset: usize, data: *mut *const u8) -> isize {
    call_bytes(|| {
        check_loop()?;
        // SAFETY: as the caller says.
        unsafe { memory::write(data, core::ptr::null()) }?;
        let parts = |bytes: &[u8]| (bytes.as_ptr(), bytes.len());
        let late = with_events(|events| Some(events.peek_late(conn, offset)?.map(parts)));
        let (first, len) = match late {
            Some(lent) => lent?,
            None => {
                let conn = conn.get()?;
                with_context(|cx| {
                    let lent = parts(cx.peek(conn, offset)?);
                    if lent.1 == 0 {
                        // An urgent byte may be the last one: it is passed, as by `ginnel_recv`.
                        cx.consume(conn, 0)?;
                    }
                    Ok(lent)
                })?
            }
        };
        if len > 0 {
            // SAFETY: as the caller says.
            unsafe { memory::write(data, first) }?;
        }
        Ok(len)
    })
}

/// Consumes bytes that `ginnel_peek` lends; `EINVAL` if there are fewer.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_consume(conn: ConnHandle, count: usize) -> c_int {
    call(|| {
        check_loop()?;
        let is_possible = match with_events(|events| events.consume_late(conn, count)) {
            Some(is_possible) => is_possible,
            None => {
                let conn = conn.get()?;
                // With 0 bytes, an urgent byte is not passed.
                with_context(|cx| {
                    Ok(if count == 0 { cx.state(conn).map(|_| true)? } else { cx.consume(conn, count)? })
                })?
            }
        };
        if is_possible { Ok(0) } else { Err(Failure::new(Errno::INVAL, "more bytes than can be received")) }
    })
}

/// Receives bytes that arrived ahead of missing ones. Returns their number.
///
/// # Safety
/// `len` bytes at `buffer` are writable; `ahead` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_recv_unordered(
    conn: ConnHandle,
    buffer: *mut c_void,
    len: usize,
    ahead: *mut usize,
) -> isize {
    call_bytes(|| {
        check_loop()?;
        let conn = conn.get()?;
        // SAFETY: as the caller says.
        let (buffer, ahead) = unsafe { (memory::bytes_mut(buffer, len)?, memory::object_mut(ahead)?) };
        let taken = with_context(|cx| Ok(cx.recv_unordered(conn, buffer)?))?;
        let taken = taken.ok_or(Failure::new(Errno::AGAIN, "nothing to receive early"))?;
        *ahead = taken.ahead;
        Ok(taken.len)
    })
}

/// Returns the number of bytes that can be received.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_unread(conn: ConnHandle) -> isize {
    call_bytes(|| {
        if let Some(count) = with_events(|events| events.unread_late(conn)) {
            return Ok(count);
        }
        let conn = conn.get()?;
        with_context(|cx| {
            cx.state(conn)?;
            Ok(cx.unread(conn))
        })
    })
}

/// Delivers again the bytes that the callback `data` has not taken.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_resume(conn: ConnHandle) -> c_int {
    call(|| {
        let conn = conn.get()?;
        with_context(|cx| {
            cx.state(conn)?;
            cx.resume_reading(conn);
            Ok(0)
        })
    })
}

/// Sends FIN after what is queued.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_shutdown(conn: ConnHandle) -> c_int {
    call(|| {
        let conn = conn.get()?;
        with_context(|cx| Ok(cx.shutdown_write(conn)?))?;
        Ok(0)
    })
}

/// Ends a connection that only waits until its bytes are received. Returns false for others.
fn end_late(conn: ConnHandle) -> bool {
    with_events(|events| Some(events.close_late(conn))).unwrap_or(false)
}

/// Closes both directions.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_conn_close(conn: ConnHandle) -> c_int {
    call(|| {
        if end_late(conn) {
            return Ok(0);
        }
        let conn = conn.get()?;
        with_context(|cx| Ok(cx.close(conn)?))?;
        Ok(0)
    })
}

/// Ends a connection with RST.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_conn_abort(conn: ConnHandle) -> c_int {
    call(|| {
        if end_late(conn) {
            return Ok(0);
        }
        let conn = conn.get()?;
        with_context(|cx| Ok(cx.abort(conn)?))?;
        Ok(0)
    })
}

/// Sets an option of a connection.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_conn_set_option(conn: ConnHandle, number: c_int, value: i64) -> c_int {
    call(|| {
        let conn = conn.get()?;
        let option = option(number, value)?;
        with_context(|cx| Ok(cx.set_option(conn, option)?))?;
        Ok(0)
    })
}

/// Copies the headers of the SYN that began a connection, which are discarded then. Returns their length. If
/// it is more than `len`, nothing is copied, and they are kept.
///
/// # Safety
/// `len` bytes at `buffer` are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_conn_saved_syn(conn: ConnHandle, buffer: *mut c_void, len: usize) -> isize {
    call_bytes(|| {
        let conn = conn.get()?;
        // SAFETY: as the caller says.
        let buffer = unsafe { memory::bytes_mut(buffer, len) }?;
        let headers = with_context(|cx| {
            cx.state(conn)?;
            Ok(cx.saved_syn(conn, len))
        })?;
        if let Some(room) = buffer.get_mut(..headers.len()) {
            room.copy_from_slice(&headers);
        }
        Ok(headers.len())
    })
}

/// Stores a number with a connection.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_conn_set_token(conn: ConnHandle, token: u32) -> c_int {
    call(|| {
        let conn = conn.get()?;
        with_context(|cx| Ok(cx.set_token(conn, token)?))?;
        Ok(0)
    })
}

/// Reads the number that was stored with a connection.
///
/// # Safety
/// `token` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_conn_token(conn: ConnHandle, token: *mut u32) -> c_int {
    call(|| {
        let conn = conn.get()?;
        let value = with_context(|cx| Ok(cx.token(conn)?))?;
        // SAFETY: as the caller says.
        unsafe { memory::write(token, value) }?;
        Ok(0)
    })
}

/// Describes a connection.
///
/// # Safety
/// `info` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_conn_info(conn: ConnHandle, info: *mut CInfo) -> c_int {
    call(|| {
        let conn = conn.get()?;
        let known = with_context(|cx| Ok(cx.info(conn)?))?;
        let nanos = |time: core::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let described = CInfo {
            local: address::storage(known.local),
            remote: address::storage(known.remote),
            rtt_ns: nanos(known.rtt),
            rttvar_ns: nanos(known.rttvar),
            min_rtt_ns: nanos(known.min_rtt),
            send_queued: known.send_queued,
            recv_queued: known.recv_queued,
            unsent: known.notsent_bytes,
            mss: known.snd_mss,
            congestion_window: known.snd_cwnd,
            unacked_segments: known.unacked,
            retransmits: known.total_retrans,
            state: known.state.linux_number().into(),
        };
        // SAFETY: as the caller says.
        unsafe { memory::write(info, described) }?;
        Ok(0)
    })
}
