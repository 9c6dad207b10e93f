//! How the program finds its stack: `GINNEL_STACK` names it, or the number of a descriptor that leads to it.
#![allow(unsafe_code)] // runs before main, and writes to the terminal without libc's streams

use crate::{inherit, real};
use core::ffi::{c_int, c_uint};
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use ginnel_posix_ops::{ExecGuard, ListenSpawn, Ops, OpsConfig};
use runtime::Error;
use runtime::broker::{Attachment, UnattachedProcess};
use runtime::internal_fd::InternalFd;
use rustix::fd::{FromRawFd, OwnedFd};
use rustix::fs::{Access, access, stat};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{Resource, geteuid, getrlimit};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Names the stack: a path of a control socket, or `fd:N`.
pub const STACK_VARIABLE: &str = "GINNEL_STACK";
/// What to do without one: `fail`, the default, or `kernel`.
const ON_MISSING_VARIABLE: &str = "GINNEL_ON_MISSING";
/// Whether listeners on all addresses take connections of the kernel, too: `auto`, the default, or `off`.
const KERNEL_LISTEN_VARIABLE: &str = "GINNEL_KERNEL_LISTEN";
/// Which shard a worker's listener takes from first: `auto`, the default, `bound` or `off`.
const LISTEN_SPAWN_VARIABLE: &str = "GINNEL_LISTEN_SPAWN";
/// What the library reads, and hands on to the programs that this one starts.
pub const VARIABLES: [&str; 4] =
    [STACK_VARIABLE, ON_MISSING_VARIABLE, KERNEL_LISTEN_VARIABLE, LISTEN_SPAWN_VARIABLE];
/// Name of the library.
pub const LIBRARY: &str = "libginnel.so";
/// Addresses are checked before they are used (RFC 4862 §5.4); a stack that has just begun is waited for, but not longer than this.
const READY_TIMEOUT: Duration = Duration::from_secs(5);
/// Placeholders of closed sockets that are kept for the next, at the most.
const PROXY_POOL_MAX: usize = 256;
/// One of so many that the process may have.
const PROXY_POOL_FRACTION: u64 = 8;
/// Exit status of a program that was to run on a stack and has none.
const EXIT_NO_STACK: c_int = 125;

static OPS: AtomicPtr<Ops> = AtomicPtr::new(core::ptr::null_mut());

/// The operations, once the program is attached.
#[inline]
pub fn ops() -> Option<&'static Ops> {
    // SAFETY: null, or leaked by `attach`, and never taken back.
    unsafe { OPS.load(Ordering::Acquire).as_ref() }
}

/// The program is on a stack, and has had no use for it yet.
static IS_PENDING: AtomicBool = AtomicBool::new(false);
/// How it comes in then.
static PENDING: Mutex<Option<(UnattachedProcess, String)>> = Mutex::new(None);

/// The stack is there, and not for the user that this program runs as: the shell of a session, a compiler that a server starts. Most such programs use no network, so it is said when
/// one does. Its name, and the cause.
static REFUSAL: Mutex<Option<(String, String)>> = Mutex::new(None);
static IS_REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether the program is to use a stack, if it uses any network.
#[inline]
pub fn is_on_a_stack() -> bool {
    ops().is_some() || IS_PENDING.load(Ordering::Acquire)
}

/// The operations, for a call that may be the first that needs them: most programs that a shell starts have no use for them, and take no place.
#[inline]
pub fn ops_or_attach() -> Option<&'static Ops> {
    ops().or_else(|| if IS_PENDING.load(Ordering::Acquire) { attach_now(handle_missing_stack) } else { None })
}

/// The same for a call that can do without: the program learns that there is no stack when it makes its first socket.
#[inline]
pub fn ops_or_attach_quietly() -> Option<&'static Ops> {
    ops().or_else(|| if IS_PENDING.load(Ordering::Acquire) { attach_now(set_refused) } else { None })
}

/// The same for a call that makes a socket of the network's.
#[inline]
pub fn ops_for_new_socket() -> Option<&'static Ops> {
    let ops = ops_or_attach();
    if ops.is_none() && IS_REFUSED.load(Ordering::Acquire) {
        report_refusal();
    }
    ops
}

#[cold]
fn report_refusal() {
    let _undisturbed = SignalsBlocked::new();
    IS_REFUSED.store(false, Ordering::Release);
    if let Some((stack, cause)) = REFUSAL.lock().unwrap_or_else(PoisonError::into_inner).take() {
        handle_missing_stack(&stack, &cause);
    }
}

fn pending() -> MutexGuard<'static, Option<(UnattachedProcess, String)>> {
    // Nothing panics while it is locked.
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whoever makes a socket of the network's is told.
fn set_refused(stack: &str, cause: &str) {
    let known = (stack.to_owned(), cause.to_owned());
    *REFUSAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
    IS_REFUSED.store(true, Ordering::Release);
}

/// `refused` says what is to be done where nobody opens.
#[cold]
fn attach_now(refused: fn(&str, &str)) -> Option<&'static Ops> {
    let _undisturbed = SignalsBlocked::new();
    let mut way_in = pending();
    let Some((guest, stack)) = way_in.take() else { return ops() };
    // As many as may be are waiting, and this one was turned away. To another user's program the door says nothing more.
    let process = guest.attach().or_else(|first| {
        Attachment::connect(Path::new(&stack), "").map_err(|second| match &second {
            Error::Io(_, error) if error.kind() == ErrorKind::PermissionDenied => first,
            _ => second,
        })
    });
    Ops::unregister_internal(guest.connection_fd());
    drop(guest);
    match process.map_err(|error| error.to_string()).and_then(attach_process) {
        Ok(ops) => publish(ops),
        Err(cause) => refused(&stack, &cause),
    }
    IS_PENDING.store(false, Ordering::Release);
    ops()
}

/// Before `main`, as the program may give up its rights or its root directory there.
#[unsafe(link_section = ".init_array")]
#[used]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    let Ok(stack) = std::env::var(STACK_VARIABLE) else { return };
    inherit::save_environment();
    crate::fork::register_atfork();
    let [left, follows] =
        [inherit::INHERITED_SOCKETS_VARIABLE, inherit::INHERITED_CONNECTION_VARIABLE].map(|name| {
            let value = std::env::var(name).ok();
            // SAFETY: before `main` there are no other threads. The numbers mean nothing to programs that come of this one.
            unsafe { std::env::remove_var(name) };
            value
        });
    if let Some(ops) = left.as_deref().and_then(inherit_ops) {
        return publish(ops);
    }
    let begun = match stack.strip_prefix("fd:") {
        None => follows
            .as_deref()
            .and_then(|number| resume_pending(&stack, number))
            .map_or_else(|| connect_pending(&stack), Ok),
        Some(number) => attach_fd(&stack, number).map(publish),
    };
    match begun {
        Ok(()) => {}
        Err(cause) if access(&*stack, Access::WRITE_OK) == Err(Errno::ACCESS) => {
            set_refused(&stack, &cause);
        }
        Err(cause) => handle_missing_stack(&stack, &cause),
    }
}

fn publish(ops: Ops) {
    ops.wait_until_ready(READY_TIMEOUT);
    OPS.store(Box::into_raw(Box::new(ops)), Ordering::Release);
}

/// No handler of a signal runs in this thread as long as this lives: one that makes a socket would wait for the thread that it has interrupted.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> Self {
        // SAFETY: all zero is a set, and both live through the calls.
        unsafe {
            let (mut all, mut before) = (core::mem::zeroed(), core::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set that was there before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, core::ptr::null_mut()) };
    }
}

/// Nobody is on the way in, and nobody begins, as long as this lives: a child would find the door locked by a thread that it has not.
pub struct AttachLock {
    // In this order they go.
    _way_in: MutexGuard<'static, Option<(UnattachedProcess, String)>>,
    _undisturbed: SignalsBlocked,
}

/// Waits until whoever is on the way in is inside. `None` if nobody is going to.
pub fn block_attach() -> Option<AttachLock> {
    if ops().is_some() || !IS_PENDING.load(Ordering::Acquire) {
        return None;
    }
    let undisturbed = SignalsBlocked::new();
    let still = AttachLock { _way_in: pending(), _undisturbed: undisturbed };
    ops().is_none().then_some(still)
}

/// To be called before something of the program's is put under a number: what stands there goes elsewhere, if it is the library's.
///
/// # Errors
/// `EBUSY`, `EMFILE`.
pub fn relocate_fd(number: c_int) -> Result<(), Errno> {
    if !Ops::is_internal(number) {
        return Ok(());
    }
    if ops().is_none() {
        let _undisturbed = SignalsBlocked::new();
        if let Some((guest, _)) = &*pending()
            && let Some(other) = guest.relocate_from(number)?
        {
            Ops::renumber_internal(number, other);
        }
    }
    ops().map_or(Ok(()), |ops| ops.relocate_fd(number))
}

/// What was chosen for a program whose stack is not there.
fn handle_missing_stack(stack: &str, cause: &str) {
    let on_kernel = std::env::var(ON_MISSING_VARIABLE).is_ok_and(|policy| policy == "kernel");
    let end = if on_kernel { "; it goes on with the kernel's network" } else { "" };
    write_stderr(&["ginnel: this program was to run on the stack ", stack, ", but: ", cause, end]);
    if !on_kernel {
        // SAFETY: ends the process, which is not to have another network.
        unsafe { libc::_exit(EXIT_NO_STACK) };
    }
}

fn connect_pending(stack: &str) -> Result<(), String> {
    set_pending(UnattachedProcess::connect(Path::new(stack)).map_err(|error| error.to_string())?, stack);
    Ok(())
}

fn set_pending(guest: UnattachedProcess, stack: &str) {
    Ops::register_internal(guest.connection_fd());
    *pending() = Some((guest, stack.into()));
    IS_PENDING.store(true, Ordering::Release);
}

/// The program before left a way in. `None`: it is gone, or none of ours.
fn resume_pending(stack: &str, number: &str) -> Option<()> {
    set_pending(UnattachedProcess::from_connection(inherited_fd(number)?).ok()?, stack);
    Some(())
}

/// A descriptor that the program before left to this library.
fn inherited_fd(number: &str) -> Option<OwnedFd> {
    let number: c_int = number.parse().ok().filter(|number| *number > 2)?;
    // SAFETY: only asks whether it is open.
    let open = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    // SAFETY: the program before left the descriptor to this library, and nobody else knows of it.
    open.then(|| unsafe { OwnedFd::from_raw_fd(number) })
}

/// Whether a program that this one becomes may open the door. That this one may does not say so: capabilities may end when it does.
fn can_successor_connect(stack: &str) -> bool {
    let user = geteuid().as_raw();
    // What was handed in leads in one program alone.
    stack.starts_with("fd:") || stat(stack).is_ok_and(|door| user == 0 || user == door.st_uid)
}

/// A way in for the next program, if that could not open the door: this one has given up rights since it came in, or sees other files. Not close-on-exec.
pub fn leave_connection(execing: Option<&ExecGuard<'_>>) -> Option<InternalFd> {
    if !is_on_a_stack() || inherit::stack().is_none_or(can_successor_connect) {
        return None;
    }
    let way = match execing {
        Some(execing) => execing.new_connection().ok()?,
        None => {
            let _undisturbed = SignalsBlocked::new();
            pending().as_ref()?.0.successor_connection().ok()?
        }
    };
    fcntl_setfd(&way, FdFlags::empty()).ok()?;
    Some(way)
}

fn attach_fd(stack: &str, number: &str) -> Result<Ops, String> {
    let number: c_int = number.parse().map_err(|_| format!("{stack}: not a number"))?;
    // SAFETY: whoever started this program left the descriptor to it.
    let process = Attachment::from_connection(unsafe { OwnedFd::from_raw_fd(number) });
    attach_process(process.map_err(|error| error.to_string())?)
}

fn attach_process(process: Attachment) -> Result<Ops, String> {
    let config = config(&process);
    Ops::from_process(process, config).map_err(|error| error.to_string())
}

/// What the program before left. `None`: it is gone, or none of ours.
fn inherit_ops(left: &str) -> Option<Ops> {
    let (line, table) = left.split_once(':')?;
    Ops::from_inheritance(inherited_fd(line)?, inherited_fd(table)?, config).ok()
}

fn config(process: &Attachment) -> OpsConfig {
    let terms = process.stack_info();
    OpsConfig {
        is_stack_address: if terms.loopback { |_| true } else { |address| !address.is_loopback() },
        unprivileged_port_start: terms.unprivileged_port_start,
        listen_spawn: match std::env::var(LISTEN_SPAWN_VARIABLE).as_deref() {
            Ok("off" | "0") => ListenSpawn::Off,
            Ok("bound" | "1") => ListenSpawn::Bound,
            _ => ListenSpawn::Auto,
        },
        kernel_listen: std::env::var(KERNEL_LISTEN_VARIABLE).map_or(true, |value| value != "off"),
        proxy_pool_max: proxy_pool_max(),
        ..OpsConfig::default()
    }
}

/// They count among those that the process may have open: one with a low limit needs them for itself.
fn proxy_pool_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / PROXY_POOL_FRACTION).unwrap_or(usize::MAX).min(PROXY_POOL_MAX)
}

/// From now on everything is the kernel's.
pub fn detach() {
    OPS.store(core::ptr::null_mut(), Ordering::Release);
}

/// One line to the terminal, past libc, whose `write` is ours.
pub fn write_stderr(parts: &[&str]) {
    let mut line = parts.concat();
    line.push('\n');
    // SAFETY: the program's standard error, which is open or not.
    let terminal = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(terminal, line.as_bytes());
}

/// Ends the program with a line that says why.
pub fn fail(parts: &[&str]) -> ! {
    write_stderr(&[&["ginnel: "], parts].concat());
    // SAFETY: ends the process.
    unsafe { libc::_exit(EXIT_NO_STACK) }
}

/// `close_range`, but for the library's own descriptors.
///
/// # Safety
/// As libc's.
pub unsafe fn close_range_except_internal(first: c_uint, last: c_uint, flags: c_int) -> c_int {
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
