//! Applications as a table of C functions (`struct ginnel_callbacks`), which the shards' threads call.
#![allow(unsafe_code)] // functions of C

use crate::config::CConfig;
use crate::current::{check_free, during_callback};
use crate::event_queue::{FD_READABLE, FD_WRITABLE};
use crate::failure::{Failure, call, of_close};
use crate::handles::{ConnHandle, ListenerHandle, UdpSocketHandle};
use crate::memory;
use crate::udp::CDatagram;
use core::any::Any;
use core::ffi::{c_int, c_uint, c_void};
use ginnel::{
    CloseReason, Conn, Context, Datagram, Error, Handler, Listener, Readiness, StopFlag, UdpError, UdpHandle,
    UnorderedBytes, UrgentData,
};
use rustix::io::Errno;

/// `struct ginnel_callbacks`. All functions but `data` may be null.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Callbacks {
    pub size: usize,
    pub create: Option<unsafe extern "C" fn(*mut c_void, c_uint) -> *mut c_void>,
    pub start: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    pub accepted: Option<unsafe extern "C" fn(*mut c_void, ConnHandle, ListenerHandle)>,
    pub connected: Option<unsafe extern "C" fn(*mut c_void, ConnHandle)>,
    pub data: Option<unsafe extern "C" fn(*mut c_void, ConnHandle, *const u8, usize) -> usize>,
    pub unordered: Option<unsafe extern "C" fn(*mut c_void, ConnHandle, usize, *const u8, usize)>,
    pub writable: Option<unsafe extern "C" fn(*mut c_void, ConnHandle)>,
    pub acked: Option<unsafe extern "C" fn(*mut c_void, ConnHandle, u32)>,
    pub peer_closed: Option<unsafe extern "C" fn(*mut c_void, ConnHandle)>,
    pub closed: Option<unsafe extern "C" fn(*mut c_void, ConnHandle, c_int)>,
    pub datagram:
        Option<unsafe extern "C" fn(*mut c_void, UdpSocketHandle, *const CDatagram, *const u8, usize)>,
    pub datagram_error: Option<unsafe extern "C" fn(*mut c_void, UdpSocketHandle, c_int)>,
    pub timer: Option<unsafe extern "C" fn(*mut c_void, u64)>,
    pub fd_ready: Option<unsafe extern "C" fn(*mut c_void, u64, u32)>,
    pub command: Option<unsafe extern "C" fn(*mut c_void, u64)>,
    pub destroyed: Option<unsafe extern "C" fn(*mut c_void, ListenerHandle)>,
    pub stopping: Option<unsafe extern "C" fn(*mut c_void)>,
    pub ended: Option<unsafe extern "C" fn(*mut c_void)>,
    pub urgent: Option<unsafe extern "C" fn(*mut c_void, ConnHandle, i32, c_int)>,
}

/// Returns the callbacks of a program, which may know fewer than this library.
///
/// # Safety
/// `callbacks` is null or points to a structure of as many bytes as its first field says.
unsafe fn read(callbacks: *const Callbacks) -> Result<Callbacks, Failure> {
    const LEAST: usize = core::mem::offset_of!(Callbacks, unordered);
    // SAFETY: as the caller says. A function pointer of all zeros is `None`.
    let all = unsafe { memory::sized(callbacks, LEAST, "ginnel_callbacks") }?;
    if all.data.is_none() {
        return Err(Failure::new(Errno::INVAL, "callbacks without data"));
    }
    Ok(all)
}

/// Functions and argument with which the shards' threads create their applications.
struct Program {
    callbacks: Callbacks,
    argument: *mut c_void,
}

// SAFETY: the header says that `create` is called on the threads of the shards with this argument.
unsafe impl Sync for Program {}

/// The application of one shard.
struct Application {
    callbacks: Callbacks,
    user: *mut c_void,
}

/// Calls a function of the program, if the program has it. Meanwhile, calls of this library act on the shard.
macro_rules! callback {
    ($self:ident, $cx:ident, $name:ident $(, $argument:expr)*) => {
        if let Some(function) = $self.callbacks.$name {
            // SAFETY: the program gave this function for these arguments, and pointers are valid during the
            // call.
            during_callback($cx, || unsafe { function($self.user $(, $argument)*) });
        }
    };
}

impl Program {
    fn create(&self, index: usize) -> Application {
        let user = match self.callbacks.create {
            // SAFETY: the program gave this function for this argument. There are at most 4,096 applications.
            Some(create) => unsafe { create(self.argument, index as c_uint) },
            None => self.argument,
        };
        Application { callbacks: self.callbacks, user }
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        if let Some(ended) = self.callbacks.ended {
            // SAFETY: as in `callback!`; this is the last call.
            unsafe { ended(self.user) };
        }
    }
}

impl Handler for Application {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let Some(start) = self.callbacks.start else { return Ok(()) };
        // SAFETY: as in `callback!`.
        match during_callback(cx, || unsafe { start(self.user) }) {
            0.. => Ok(()),
            error => Err(Error::io("start", std::io::Error::from_raw_os_error(error.saturating_neg()))),
        }
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, listener: Listener) {
        callback!(self, cx, accepted, conn.into(), listener.into());
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        callback!(self, cx, connected, conn.into());
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let Some(function) = self.callbacks.data else { return data.len() };
        // SAFETY: as in `callback!`.
        let call = || unsafe { function(self.user, conn.into(), data.as_ptr(), data.len()) };
        during_callback(cx, call)
    }

    fn unordered(&mut self, cx: &mut Context<'_>, conn: Conn, bytes: UnorderedBytes, data: &[u8]) {
        callback!(self, cx, unordered, conn.into(), bytes.ahead, data.as_ptr(), data.len());
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        callback!(self, cx, writable, conn.into());
    }

    fn acked(&mut self, cx: &mut Context<'_>, conn: Conn, bytes: u32) {
        callback!(self, cx, acked, conn.into(), bytes);
    }

    fn urgent(&mut self, cx: &mut Context<'_>, conn: Conn, urgent: UrgentData) {
        let byte = urgent.byte.map_or(-1, c_int::from);
        callback!(self, cx, urgent, conn.into(), urgent.unread_before, byte);
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if self.callbacks.peer_closed.is_none() {
            // Only a stale handle can be refused.
            let _ = cx.close(conn);
        }
        callback!(self, cx, peer_closed, conn.into());
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        callback!(self, cx, closed, conn.into(), of_close(reason));
    }

    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        if self.callbacks.datagram.is_none() {
            return;
        }
        let described = CDatagram::from(datagram);
        callback!(self, cx, datagram, socket.into(), &raw const described, data.as_ptr(), data.len());
    }

    fn datagram_error(&mut self, cx: &mut Context<'_>, socket: UdpHandle, error: UdpError) {
        callback!(self, cx, datagram_error, socket.into(), ginnel::errno::udp(error).raw_os_error());
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        callback!(self, cx, timer, token);
    }

    fn kernel_ready(&mut self, cx: &mut Context<'_>, token: u64, readiness: Readiness) {
        let readable = if readiness.readable { FD_READABLE } else { 0 };
        let writable = if readiness.writable { FD_WRITABLE } else { 0 };
        callback!(self, cx, fd_ready, token, readable | writable);
    }

    fn command(&mut self, cx: &mut Context<'_>, command: Box<dyn Any + Send>) {
        if let Ok(token) = command.downcast::<u64>() {
            callback!(self, cx, command, *token);
        }
    }

    fn listener_destroyed(&mut self, cx: &mut Context<'_>, listener: Listener) {
        callback!(self, cx, destroyed, listener.into());
    }

    fn stopping(&mut self, cx: &mut Context<'_>) {
        if self.callbacks.stopping.is_none() {
            cx.stop();
        }
        callback!(self, cx, stopping);
    }
}

/// Runs a stack until it ends: a single shard on this thread, several on threads of their own. Returns 0 or
/// the negative error number.
///
/// # Safety
/// `config` and `stop` are null or objects of this library, `stop` also while this runs. `callbacks` points
/// to a structure of the size that it states, whose functions can be called with their arguments on any
/// thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_run(
    config: *const CConfig,
    callbacks: *const Callbacks,
    argument: *mut c_void,
    stop: *const StopFlag,
) -> c_int {
    call(|| {
        check_free()?;
        // SAFETY: as the caller says.
        let (config, callbacks) = unsafe { (memory::object(config)?, read(callbacks)?) };
        let stop = match stop.is_null() {
            true => StopFlag::new().map_err(|e| Failure::about(ginnel::errno::of_io(&e), e))?,
            // SAFETY: as the caller says.
            false => unsafe { memory::object(stop) }?.clone(),
        };
        let program = Program { callbacks, argument };
        let program = &program;
        config.shards()?.open()?.run(&stop, |index| Ok(program.create(index)), |_, _| ())?;
        Ok(0)
    })
}
