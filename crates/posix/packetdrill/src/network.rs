//! Functions by which packetdrill plays the role of the network, and its clock. They return 0, or -1 with
//! `errno`.
#![allow(unsafe_code)] // functions that C calls

use crate::calls::{bytes_of, instance, session};
use core::ffi::{c_int, c_longlong, c_void};
use core::time::Duration;
use ginnel_posix_ops::ffi::IntoC;
use libc::{size_t, timeval, timezone, useconds_t};
use rustix::io::Errno;

/// Passes an IP packet to the stack.
///
/// # Safety
/// `userdata` belongs to an interface, and the packet has `len` bytes.
pub unsafe extern "C" fn netdev_send(userdata: *mut c_void, packet: *const c_void, len: size_t) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { instance(userdata) }
        .and_then(|instance| instance.tunnel.send(unsafe { bytes_of(packet, len) }?))
        .into_c()
}

/// Waits for the next IP packet of the stack, and stores its bytes, its length, and the time at which it left
/// in microseconds since 1970. Fails with `EMSGSIZE` if the buffer is too small; the packet is then lost.
///
/// # Safety
/// `userdata` belongs to an interface, the buffer has `*len` bytes, and `len` and `time` are writable.
pub unsafe extern "C" fn netdev_receive(
    userdata: *mut c_void,
    buffer: *mut c_void,
    len: *mut size_t,
    time: *mut c_longlong,
) -> c_int {
    // SAFETY: the caller's promises.
    let (session, len, time) = unsafe { (session(userdata), len.as_mut(), time.as_mut()) };
    let result = session.and_then(|session| {
        let (len, time) = (len.ok_or(Errno::FAULT)?, time.ok_or(Errno::FAULT)?);
        let buffer = match buffer.is_null() {
            true => return Err(Errno::FAULT),
            // SAFETY: the buffer has the length that the caller states.
            false => unsafe { core::slice::from_raw_parts_mut(buffer.cast::<u8>(), *len) },
        };
        *len = 0;
        let packet = session.tunnel.receive();
        let filled = buffer.get_mut(..packet.bytes.len()).ok_or(Errno::MSGSIZE)?;
        filled.copy_from_slice(&packet.bytes);
        *len = packet.bytes.len();
        *time = packet.at.as_micros() as c_longlong;
        Ok(())
    });
    result.into_c()
}

/// Sleeps for `time` microseconds.
///
/// # Safety
/// `userdata` belongs to an interface.
pub unsafe extern "C" fn usleep(userdata: *mut c_void, time: useconds_t) -> c_int {
    // SAFETY: the caller's promise.
    let session = unsafe { session(userdata) };
    session.map(|_| std::thread::sleep(Duration::from_micros(time.into()))).into_c()
}

/// Stores the time of the session's clock. The first call starts a stack.
///
/// # Safety
/// `userdata` belongs to an interface, and `time` is null or writable.
pub unsafe extern "C" fn gettimeofday(userdata: *mut c_void, time: *mut timeval, _: *mut timezone) -> c_int {
    // SAFETY: the caller's promises.
    let (session, time) = unsafe { (session(userdata), time.as_mut()) };
    session
        .map(|session| {
            session.start_if_unstarted();
            let now = session.clock.now();
            if let Some(time) = time {
                time.tv_sec = now.as_secs() as libc::time_t;
                time.tv_usec = now.subsec_micros().into();
            }
        })
        .into_c()
}
