//! The shard of the calling thread, on which all calls act: that of the callback that is running, or the one
//! that the thread has entered (`ginnel_enter`).
#![allow(unsafe_code)] // the context of a callback, whose lifetime the compiler cannot follow through C

use crate::event_queue::EventQueue;
use crate::failure::Failure;
use core::cell::{Cell, RefCell};
use core::ptr::NonNull;
use ginnel::{Context, Instant, Shard, StopFlag, clock};
use rustix::io::Errno;

const NO_SHARD: Failure = Failure::new(
    Errno::PERM,
    "this thread has no shard: call this in a callback, or between ginnel_enter and ginnel_leave",
);

const HAS_SHARD: Failure = Failure::new(Errno::BUSY, "this thread has a shard already");

/// A shard that a thread has entered.
pub struct Entered {
    pub shard: Shard<EventQueue>,
    pub stop: Option<StopFlag>,
}

thread_local! {
    /// The context of the callback that is running. Taken while a call uses it, so that a function that the
    /// call itself calls back (such as that of `ginnel_send_fill`) does not get it, too.
    static CALLBACK: Cell<Option<NonNull<Context<'static>>>> = const { Cell::new(None) };
    /// The shard that the thread has entered. Taken while a call uses it, as above.
    static ENTERED: RefCell<Option<Box<Entered>>> = const { RefCell::new(None) };
    /// True while a call uses the context or the shard, so that both look absent.
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
}

/// A call that uses the context or the shard of its thread.
struct Call;

impl Call {
    fn begin() -> Self {
        IN_CALL.set(true);
        Self
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        IN_CALL.set(false);
    }
}

/// Restores the context of an outer callback.
struct Restore(Option<NonNull<Context<'static>>>);

impl Drop for Restore {
    fn drop(&mut self) {
        CALLBACK.set(self.0);
    }
}

/// Calls `callback`, during which calls of this thread act on `cx`.
pub fn during_callback<R>(cx: &mut Context<'_>, callback: impl FnOnce() -> R) -> R {
    let _outer = Restore(CALLBACK.replace(Some(NonNull::from(cx).cast())));
    callback()
}

/// Calls `act` with the context of the calling thread's shard.
///
/// # Errors
/// `EPERM` if the thread has no shard, or if another call of this thread uses it; or the error of `act`.
pub fn with_context<R>(act: impl FnOnce(&mut Context<'_>) -> Result<R, Failure>) -> Result<R, Failure> {
    if let Some(mut cx) = CALLBACK.take() {
        let (_call, _restore) = (Call::begin(), Restore(Some(cx)));
        // SAFETY: `during_callback` has borrowed the context of this thread and does not use it before the
        // callback has returned, when it resets the pointer. Nobody else has the pointer while it is taken.
        return act(unsafe { cx.as_mut() });
    }
    if IN_CALL.get() {
        return Err(NO_SHARD);
    }
    with_shard(|entered| {
        let now = clock_of(&entered.shard);
        entered.shard.with(now, |_, cx| act(cx))
    })
}

/// Returns whether a callback of this thread is running, and no call of it uses the context.
pub fn is_callback() -> bool {
    CALLBACK.get().is_some()
}

/// Returns the time for a call: the shard's clock never goes back.
fn clock_of(shard: &Shard<EventQueue>) -> Instant {
    clock::now().max(shard.now())
}

/// Calls `act` with the shard that the thread has entered. If `act` panics, the shard is gone.
///
/// # Errors
/// `EPERM` if there is none, or if another call of this thread uses it; or the error of `act`.
pub fn with_shard<R>(act: impl FnOnce(&mut Entered) -> Result<R, Failure>) -> Result<R, Failure> {
    let mut entered = take().ok_or(NO_SHARD)?;
    let _call = Call::begin();
    let result = act(&mut entered);
    ENTERED.set(Some(entered));
    result
}

/// Calls `act` with the events of the shard that the thread has entered. Returns `None` if there is none.
pub fn with_events<R>(act: impl FnOnce(&mut EventQueue) -> Option<R>) -> Option<R> {
    if is_callback() {
        return None;
    }
    ENTERED.with_borrow_mut(|entered| act(entered.as_mut()?.shard.handler_mut()))
}

/// Takes the shard that the thread has entered.
pub fn take() -> Option<Box<Entered>> {
    ENTERED.try_with(RefCell::take).ok().flatten()
}

/// Gives a shard to the calling thread.
///
/// # Errors
/// `EBUSY`, with the shard, if the thread has a shard already.
pub fn enter(entered: Box<Entered>) -> Result<(), (Failure, Box<Entered>)> {
    if CALLBACK.get().is_some() {
        return Err((HAS_SHARD, entered));
    }
    match check_free() {
        Ok(()) => {
            ENTERED.set(Some(entered));
            Ok(())
        }
        Err(failure) => Err((failure, entered)),
    }
}

/// Checks that the thread has entered no shard, and that no call of it uses one.
///
/// # Errors
/// `EBUSY` otherwise.
pub fn check_free() -> Result<(), Failure> {
    let is_free = !IN_CALL.get() && ENTERED.with_borrow(Option::is_none);
    if is_free { Ok(()) } else { Err(HAS_SHARD) }
}

/// Checks that no callback is running. Callbacks get received data as arguments and must not ask for it.
///
/// # Errors
/// `EOPNOTSUPP` if one is running.
pub fn check_loop() -> Result<(), Failure> {
    let failure = Failure::new(Errno::OPNOTSUPP, "callbacks are given what arrives: this is for a loop");
    if is_callback() { Err(failure) } else { Ok(()) }
}
