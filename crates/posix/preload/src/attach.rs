//! How the program finds its stack: `GINNEL_STACK` names it, or the number of a descriptor that leads to it.
#![allow(unsafe_code)] // runs before main, and writes to the terminal without libc's streams

use crate::{heritage, real};
use core::ffi::{c_int, c_uint};
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use ginnel_posix_ops::{Execing, ListenSpawn, Ops, OpsConfig};
use runtime::Error;
use runtime::door::{Guest, Process};
use runtime::own_fd::OwnFd;
use rustix::fd::{FromRawFd, OwnedFd};
use rustix::fs::{Access, access, stat};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{Resource, geteuid, getrlimit};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Names the stack: a path of a control socket, or `fd:N`.
pub const STACK: &str = "GINNEL_STACK";
/// What to do without one: `fail`, the default, or `kernel`.
const ON_MISSING: &str = "GINNEL_ON_MISSING";
/// Whether listeners on all addresses take connections of the kernel, too: `auto`, the default, or `off`.
const KERNEL_LISTEN: &str = "GINNEL_KERNEL_LISTEN";
/// Which shard a worker's listener takes from first: `auto`, the default, `bound` or `off`.
const LISTEN_SPAWN: &str = "GINNEL_LISTEN_SPAWN";
/// What the library reads, and hands on to the programs that this one starts.
pub const VARIABLES: [&str; 4] = [STACK, ON_MISSING, KERNEL_LISTEN, LISTEN_SPAWN];
/// Name of the library.
pub const LIBRARY: &str = "libginnel.so";
/// Addresses are checked before they are used (RFC 4862 §5.4); a stack that has just begun is waited for, but not longer than this.
const READY_WITHIN: Duration = Duration::from_secs(5);
/// Placeholders of closed sockets that are kept for the next, at the most.
const DESCRIPTORS_KEPT: usize = 256;
/// One of so many that the process may have.
const KEPT_PART: u64 = 8;
/// Exit status of a program that was to run on a stack and has none.
const NO_STACK: c_int = 125;

static OPS: AtomicPtr<Ops> = AtomicPtr::new(core::ptr::null_mut());

/// The operations, once the program is attached.
#[inline]
pub fn ops() -> Option<&'static Ops> {
    // SAFETY: null, or leaked by `attach`, and never taken back.
    unsafe { OPS.load(Ordering::Acquire).as_ref() }
}

/// The program is on a stack, and has had no use for it yet.
static WAITS: AtomicBool = AtomicBool::new(false);
/// How it comes in then.
static WAY_IN: Mutex<Option<(Guest, String)>> = Mutex::new(None);

/// The stack is there, and not for the user that this program runs as: the shell of a session, a compiler that a server starts. Most such programs use no network, so it is said when
/// one does. Its name, and the cause.
static TURNED_AWAY: Mutex<Option<(String, String)>> = Mutex::new(None);
static IS_TURNED_AWAY: AtomicBool = AtomicBool::new(false);

/// Whether the program is to use a stack, if it uses any network.
#[inline]
pub fn is_on_a_stack() -> bool {
    ops().is_some() || WAITS.load(Ordering::Acquire)
}

/// The operations, for a call that may be the first that needs them: most programs that a shell starts have no use for them, and take no place.
#[inline]
pub fn needed() -> Option<&'static Ops> {
    ops().or_else(|| if WAITS.load(Ordering::Acquire) { come_in(missing) } else { None })
}

/// The same for a call that can do without: the program learns that there is no stack when it makes its first socket.
#[inline]
pub fn wanted() -> Option<&'static Ops> {
    ops().or_else(|| if WAITS.load(Ordering::Acquire) { come_in(turned_away) } else { None })
}

/// The same for a call that makes a socket of the network's.
#[inline]
pub fn needed_for_network() -> Option<&'static Ops> {
    let ops = needed();
    if ops.is_none() && IS_TURNED_AWAY.load(Ordering::Acquire) {
        stay_away();
    }
    ops
}

#[cold]
fn stay_away() {
    let _undisturbed = Undisturbed::begin();
    IS_TURNED_AWAY.store(false, Ordering::Release);
    if let Some((stack, cause)) = TURNED_AWAY.lock().unwrap_or_else(PoisonError::into_inner).take() {
        missing(&stack, &cause);
    }
}

fn way_in() -> MutexGuard<'static, Option<(Guest, String)>> {
    // Nothing panics while it is locked.
    WAY_IN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whoever makes a socket of the network's is told.
fn turned_away(stack: &str, cause: &str) {
    let known = (stack.to_owned(), cause.to_owned());
    *TURNED_AWAY.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
    IS_TURNED_AWAY.store(true, Ordering::Release);
}

/// `refused` says what is to be done where nobody opens.
#[cold]
fn come_in(refused: fn(&str, &str)) -> Option<&'static Ops> {
    let _undisturbed = Undisturbed::begin();
    let mut way_in = way_in();
    let Some((guest, stack)) = way_in.take() else { return ops() };
    // As many as may be are waiting, and this one was turned away. To another user's program the door says nothing more.
    let process = guest.enter().or_else(|first| {
        Process::connect(Path::new(&stack), "").map_err(|second| match &second {
            Error::Io(_, error) if error.kind() == ErrorKind::PermissionDenied => first,
            _ => second,
        })
    });
    Ops::forget_internal(guest.line());
    drop(guest);
    match process.map_err(|error| error.to_string()).and_then(begin) {
        Ok(ops) => use_from_now_on(ops),
        Err(cause) => refused(&stack, &cause),
    }
    WAITS.store(false, Ordering::Release);
    ops()
}

/// Before `main`, as the program may give up its rights or its root directory there.
#[unsafe(link_section = ".init_array")]
#[used]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    let Ok(stack) = std::env::var(STACK) else { return };
    heritage::remember();
    crate::process::watch_forks();
    let [left, follows] = [heritage::HEIR, heritage::FOLLOWS].map(|name| {
        let value = std::env::var(name).ok();
        // SAFETY: before `main` there are no other threads. The numbers mean nothing to programs that come of this one.
        unsafe { std::env::remove_var(name) };
        value
    });
    if let Some(ops) = left.as_deref().and_then(resume) {
        return use_from_now_on(ops);
    }
    let begun = match stack.strip_prefix("fd:") {
        None => follows
            .as_deref()
            .and_then(|number| follow(&stack, number))
            .map_or_else(|| wait_at_the_door(&stack), Ok),
        Some(number) => over(&stack, number).map(use_from_now_on),
    };
    match begun {
        Ok(()) => {}
        Err(cause) if access(&*stack, Access::WRITE_OK) == Err(Errno::ACCESS) => {
            turned_away(&stack, &cause);
        }
        Err(cause) => missing(&stack, &cause),
    }
}

fn use_from_now_on(ops: Ops) {
    ops.wait_until_ready(READY_WITHIN);
    OPS.store(Box::into_raw(Box::new(ops)), Ordering::Release);
}

/// No handler of a signal runs in this thread as long as this lives: one that makes a socket would wait for the thread that it has interrupted.
struct Undisturbed(libc::sigset_t);

impl Undisturbed {
    fn begin() -> Self {
        // SAFETY: all zero is a set, and both live through the calls.
        unsafe {
            let (mut all, mut before) = (core::mem::zeroed(), core::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        // SAFETY: the set that was there before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, core::ptr::null_mut()) };
    }
}

/// Nobody is on the way in, and nobody begins, as long as this lives: a child would find the door locked by a thread that it has not.
pub struct Still {
    // In this order they go.
    _way_in: MutexGuard<'static, Option<(Guest, String)>>,
    _undisturbed: Undisturbed,
}

/// Waits until whoever is on the way in is inside. `None` if nobody is going to.
pub fn hold_still() -> Option<Still> {
    if ops().is_some() || !WAITS.load(Ordering::Acquire) {
        return None;
    }
    let undisturbed = Undisturbed::begin();
    let still = Still { _way_in: way_in(), _undisturbed: undisturbed };
    ops().is_none().then_some(still)
}

/// To be called before something of the program's is put under a number: what stands there goes elsewhere, if it is the library's.
///
/// # Errors
/// `EBUSY`, `EMFILE`.
pub fn make_way(number: c_int) -> Result<(), Errno> {
    if !Ops::is_internal(number) {
        return Ok(());
    }
    if ops().is_none() {
        let _undisturbed = Undisturbed::begin();
        if let Some((guest, _)) = &*way_in()
            && let Some(other) = guest.make_way(number)?
        {
            Ops::moved_internal(number, other);
        }
    }
    ops().map_or(Ok(()), |ops| ops.make_way(number))
}

/// What was chosen for a program whose stack is not there.
fn missing(stack: &str, cause: &str) {
    let on_kernel = std::env::var(ON_MISSING).is_ok_and(|policy| policy == "kernel");
    let end = if on_kernel { "; it goes on with the kernel's network" } else { "" };
    say(&["ginnel: this program was to run on the stack ", stack, ", but: ", cause, end]);
    if !on_kernel {
        // SAFETY: ends the process, which is not to have another network.
        unsafe { libc::_exit(NO_STACK) };
    }
}

fn wait_at_the_door(stack: &str) -> Result<(), String> {
    wait_with(Guest::come(Path::new(stack)).map_err(|error| error.to_string())?, stack);
    Ok(())
}

fn wait_with(guest: Guest, stack: &str) {
    Ops::keep_internal(guest.line());
    *way_in() = Some((guest, stack.into()));
    WAITS.store(true, Ordering::Release);
}

/// The program before left a way in. `None`: it is gone, or none of ours.
fn follow(stack: &str, number: &str) -> Option<()> {
    wait_with(Guest::over(inherited(number)?).ok()?, stack);
    Some(())
}

/// A descriptor that the program before left to this library.
fn inherited(number: &str) -> Option<OwnedFd> {
    let number: c_int = number.parse().ok().filter(|number| *number > 2)?;
    // SAFETY: only asks whether it is open.
    let open = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    // SAFETY: the program before left the descriptor to this library, and nobody else knows of it.
    open.then(|| unsafe { OwnedFd::from_raw_fd(number) })
}

/// Whether a program that this one becomes may open the door. That this one may does not say so: capabilities may end when it does.
fn opens_to_the_next(stack: &str) -> bool {
    let user = geteuid().as_raw();
    // What was handed in leads in one program alone.
    stack.starts_with("fd:") || stat(stack).is_ok_and(|door| user == 0 || user == door.st_uid)
}

/// A way in for the next program, if that could not open the door: this one has given up rights since it came in, or sees other files. Not close-on-exec.
pub fn leave_way(execing: Option<&Execing<'_>>) -> Option<OwnFd> {
    if !is_on_a_stack() || heritage::stack().is_none_or(opens_to_the_next) {
        return None;
    }
    let way = match execing {
        Some(execing) => execing.way().ok()?,
        None => {
            let _undisturbed = Undisturbed::begin();
            way_in().as_ref()?.0.followed().ok()?
        }
    };
    fcntl_setfd(&way, FdFlags::empty()).ok()?;
    Some(way)
}

fn over(stack: &str, number: &str) -> Result<Ops, String> {
    let number: c_int = number.parse().map_err(|_| format!("{stack}: not a number"))?;
    // SAFETY: whoever started this program left the descriptor to it.
    let process = Process::over(unsafe { OwnedFd::from_raw_fd(number) });
    begin(process.map_err(|error| error.to_string())?)
}

fn begin(process: Process) -> Result<Ops, String> {
    let config = config(&process);
    Ops::over(process, config).map_err(|error| error.to_string())
}

/// What the program before left. `None`: it is gone, or none of ours.
fn resume(left: &str) -> Option<Ops> {
    let (line, table) = left.split_once(':')?;
    Ops::resume(inherited(line)?, inherited(table)?, config).ok()
}

fn config(process: &Process) -> OpsConfig {
    let terms = process.terms();
    OpsConfig {
        takes: if terms.loopback { |_| true } else { |address| !address.is_loopback() },
        unprivileged_port_start: terms.unprivileged_port_start,
        listen_spawn: match std::env::var(LISTEN_SPAWN).as_deref() {
            Ok("off" | "0") => ListenSpawn::Off,
            Ok("bound" | "1") => ListenSpawn::Bound,
            _ => ListenSpawn::Auto,
        },
        kernel_listen: std::env::var(KERNEL_LISTEN).map_or(true, |value| value != "off"),
        descriptors_kept: descriptors_kept(),
        ..OpsConfig::default()
    }
}

/// They count among those that the process may have open: one with a low limit needs them for itself.
fn descriptors_kept() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / KEPT_PART).unwrap_or(usize::MAX).min(DESCRIPTORS_KEPT)
}

/// From now on everything is the kernel's.
pub fn detach() {
    OPS.store(core::ptr::null_mut(), Ordering::Release);
}

/// One line to the terminal, past libc, whose `write` is ours.
pub fn say(parts: &[&str]) {
    let mut line = parts.concat();
    line.push('\n');
    // SAFETY: the program's standard error, which is open or not.
    let terminal = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(terminal, line.as_bytes());
}

/// Ends the program with a line that says why.
pub fn fail(parts: &[&str]) -> ! {
    say(&[&["ginnel: "], parts].concat());
    // SAFETY: ends the process.
    unsafe { libc::_exit(NO_STACK) }
}

/// `close_range`, but for the library's own descriptors.
///
/// # Safety
/// As libc's.
pub unsafe fn close_range_but_own(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut from = first;
    let limit = |number: c_uint| c_int::try_from(number).unwrap_or(c_int::MAX);
    while let Some(own) = Ops::next_internal(limit(from), limit(last)) {
        let own = own.unsigned_abs();
        if own > from {
            // SAFETY: the caller's promise.
            let result = unsafe { real::close_range(from, own - 1, flags) };
            if result != 0 {
                return result;
            }
        }
        if own == last {
            return 0;
        }
        from = own + 1;
    }
    // SAFETY: the caller's promise.
    unsafe { real::close_range(from, last, flags) }
}
