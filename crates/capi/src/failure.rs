//! Failures of calls: an error number for the caller, and a text that `ginnel_error` returns.
#![allow(unsafe_code)] // functions that C calls

use core::any::Any;
use core::cell::RefCell;
use core::ffi::{c_char, c_int};
use core::fmt::Display;
use ginnel::{
    CloseReason, ConnectError, Error, ListenError, OptionError, RecvError, SendError, Stale, UdpError,
};
use rustix::io::Errno;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a call failed.
#[derive(Debug)]
pub struct Failure {
    errno: Errno,
    text: Text,
}

/// Description of a failure. Frequent failures have a fixed text, which allocates nothing.
#[derive(Debug)]
enum Text {
    Fixed(&'static str),
    Owned(String),
}

impl Failure {
    /// Creates a failure with a fixed text.
    pub const fn new(errno: Errno, text: &'static str) -> Self {
        Self { errno, text: Text::Fixed(text) }
    }

    /// Creates a failure whose text names the object concerned.
    pub fn about(errno: Errno, text: impl Display) -> Self {
        Self { errno, text: Text::Owned(text.to_string()) }
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self { errno, text: Text::Owned(errno.to_string()) }
    }
}

macro_rules! failures {
    ($($error:ty { $($variant:pat => $errno:ident,)* })*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::about(match error { $($variant => Errno::$errno,)* }, error)
            }
        })*
    };
}

failures! {
    ListenError {
        ListenError::AddressInUse => ADDRINUSE,
        ListenError::AddressNotAvailable => ADDRNOTAVAIL,
        ListenError::TooMany => NFILE,
        ListenError::InvalidOption => INVAL,
    }
    ConnectError {
        ConnectError::PortsExhausted | ConnectError::AddressNotAvailable => ADDRNOTAVAIL,
        ConnectError::AddressInUse => ADDRINUSE,
        ConnectError::NetUnreachable => NETUNREACH,
        ConnectError::TooMany => NFILE,
        ConnectError::InvalidAddress | ConnectError::InvalidOption => INVAL,
    }
    OptionError {
        OptionError::Stale => BADF,
        OptionError::Invalid => INVAL,
        OptionError::TooMany => NOBUFS,
    }
}

/// All texts are fixed: a program meets these failures in its usual course, which must not allocate.
impl From<SendError> for Failure {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Stale => STALE,
            SendError::Closed => Self::new(Errno::PIPE, "the write side is closed"),
            SendError::InvalidSource => Self::new(Errno::INVAL, "no such source or range"),
            SendError::Full => Self::new(Errno::AGAIN, "the send buffer is full"),
            SendError::TooLong => Self::new(Errno::MSGSIZE, "the message exceeds the send buffer"),
        }
    }
}

impl From<RecvError> for Failure {
    fn from(error: RecvError) -> Self {
        match error {
            RecvError::Stale => STALE,
            RecvError::WouldBlock => Self::new(Errno::AGAIN, "nothing to read yet"),
        }
    }
}

impl From<Stale> for Failure {
    fn from(_: Stale) -> Self {
        STALE
    }
}

impl From<UdpError> for Failure {
    fn from(error: UdpError) -> Self {
        match error {
            UdpError::WouldBlock => Self::new(Errno::AGAIN, "no datagram yet"),
            error => Self::about(ginnel::errno::udp(error), error),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::about(errno_of(&error), error)
    }
}

/// The failure of a call with a handle that has outlived its object: a connection, a listener, a socket, a
/// timer, a watched descriptor or a source.
pub const STALE: Failure = Failure::new(Errno::BADF, "stale handle");

fn errno_of(error: &Error) -> Errno {
    match error {
        Error::Config(_) => Errno::INVAL,
        Error::Listen(_, e) => Failure::from(*e).errno,
        Error::Connect(_, e) => Failure::from(*e).errno,
        Error::Udp(_, e) => ginnel::errno::udp(*e),
        Error::Reserve(..) => Errno::ADDRINUSE,
        Error::Filter(e) => ginnel::errno::filter(*e),
        Error::Send(e) => Failure::from(*e).errno,
        Error::Io(_, e) => ginnel::errno::of_io(e),
        Error::DevicesLost(_) => Errno::NODEV,
        Error::Shard(_, e) => errno_of(e),
        Error::Panicked(_) => Errno::NOTRECOVERABLE,
        Error::Refused(_) => Errno::ACCESS,
        Error::Unreachable(..) | Error::StackGone => Errno::NETDOWN,
        Error::Application(_) => Errno::CANCELED,
    }
}

/// Returns the error number with which a connection ended; 0 if it was closed by both sides, and `ECANCELED`
/// if this side ended it.
pub fn of_close(reason: CloseReason) -> c_int {
    match reason {
        CloseReason::Normal => 0,
        reason => ginnel::errno::of_close(reason).unwrap_or(Errno::CANCELED).raw_os_error(),
    }
}

/// The text of the calling thread's last failure.
struct LastError {
    text: Text,
    /// The text as C reads it; written by `ginnel_error`.
    shown: CString,
}

thread_local! {
    static LAST: RefCell<LastError> =
        RefCell::new(LastError { text: Text::Fixed(""), shown: CString::default() });
}

fn remember(text: Text) {
    // Fails only while the thread ends, when nobody asks for the text any more.
    let _ = LAST.try_with(|last| last.borrow_mut().text = text);
}

/// Calls the body of a function of the interface. Returns its value, or the negative error number. A panic of
/// the library becomes `ENOTRECOVERABLE`.
pub fn call(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return value,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            Failure::about(Errno::NOTRECOVERABLE, format!("the stack panicked: {}", text_of(&*panic)))
        }
    };
    let errno = failure.errno.raw_os_error();
    remember(failure.text);
    -errno
}

/// Calls the body as [`call`] does, for functions that return a number of bytes.
pub fn call_bytes(body: impl FnOnce() -> Result<usize, Failure>) -> isize {
    let mut bytes = 0;
    let result = call(|| {
        bytes = body()?;
        Ok(0)
    });
    // A buffer has at most `isize::MAX` bytes.
    if result < 0 { result as isize } else { bytes as isize }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// Returns the text of the calling thread's last failure. It is valid until the thread's next call of this
/// function.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_error() -> *const c_char {
    let text = LAST.try_with(|last| {
        let last = &mut *last.borrow_mut();
        let text = match &last.text {
            Text::Fixed(text) => text,
            Text::Owned(text) => text.as_str(),
        };
        last.shown = CString::new(text.replace('\0', " ")).unwrap_or_default();
        last.shown.as_ptr()
    });
    text.unwrap_or(c"".as_ptr())
}

/// Returns the version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
