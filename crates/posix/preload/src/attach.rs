//! Attachment of the program to its stack, which `GINNEL_STACK` names, either directly or as the number of an
//! inherited descriptor.
#![allow(unsafe_code)] // runs before main

use crate::{inherit, real};
use core::ffi::{c_int, c_uint};
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use ginnel_posix_ops::{ExecGuard, ListenSpawn, Ops, OpsConfig, not_attached, write_at_once};
use runtime::Error;
use runtime::broker::{Attachment, Refusal, UnattachedProcess};
use runtime::internal_fd::InternalFd;
use runtime::resource_limit::resource_limit;
use rustix::fd::{FromRawFd, OwnedFd};
use rustix::fs::{Access, access, stat};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{Resource, geteuid};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Names the stack: the path of a control socket, or `fd:N`.
pub const STACK_VARIABLE: &str = "GINNEL_STACK";
/// Action if the stack cannot be reached: `fail`, the default, or `kernel`.
const ON_MISSING_VARIABLE: &str = "GINNEL_ON_MISSING";
/// Says whether listeners on the unspecified address also accept connections from the kernel: `auto`, the
/// default, or `off`.
const KERNEL_LISTEN_VARIABLE: &str = "GINNEL_KERNEL_LISTEN";
/// From which shard a worker's listener prefers to accept: `auto`, the default, `bound` or `off`.
const LISTEN_SPAWN_VARIABLE: &str = "GINNEL_LISTEN_SPAWN";
/// Variables that the library reads and passes on to programs that this one starts.
pub const VARIABLES: [&str; 4] =
    [STACK_VARIABLE, ON_MISSING_VARIABLE, KERNEL_LISTEN_VARIABLE, LISTEN_SPAWN_VARIABLE];
/// File name of the library.
pub const LIBRARY: &str = "libginnel.so";
/// How long to wait for the addresses of a stack that has just started: duplicate address detection comes
/// first (RFC 4862 §5.4).
const READY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of proxy descriptors in the pool.
const PROXY_POOL_MAX: usize = 256;
/// Divisor of `RLIMIT_NOFILE` that limits the pool.
const PROXY_POOL_FRACTION: u64 = 8;
/// Exit status of a program whose stack cannot be reached.
const EXIT_NO_STACK: c_int = 125;

static OPS: AtomicPtr<Ops> = AtomicPtr::new(core::ptr::null_mut());

/// Returns the operations, if the program is attached.
#[inline]
pub fn ops() -> Option<&'static Ops> {
    // SAFETY: null, or leaked by `publish` and never freed.
    unsafe { OPS.load(Ordering::Acquire).as_ref() }
}

/// The program has a stack and has not used it yet.
static IS_PENDING: AtomicBool = AtomicBool::new(false);
/// The control connection by which the program will attach, and the name of the stack.
static PENDING: Mutex<Option<(UnattachedProcess, String)>> = Mutex::new(None);

/// A stack that this program cannot use. Programs that use no network need none: the shell of a session, a
/// compiler that a server starts. So the cause is reported only when the program makes a network socket.
struct UnusableStack {
    stack: String,
    cause: String,
    /// The error of each network socket.
    error: Errno,
    is_reported: bool,
}

static REFUSAL: Mutex<Option<UnusableStack>> = Mutex::new(None);
static IS_REFUSED: AtomicBool = AtomicBool::new(false);

/// Returns whether the program will use a stack if it uses any network.
#[inline]
pub fn is_on_a_stack() -> bool {
    ops().is_some() || IS_PENDING.load(Ordering::Acquire)
}

/// Returns the operations for a call that may be the first to need them, attaching the program if necessary.
/// Most programs that a shell starts never need them, and take no client slot. Returns `None` if the program
/// uses the kernel's network.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`: a later call may succeed.
#[inline]
pub fn ops_or_attach() -> Result<Option<&'static Ops>, Errno> {
    match ops() {
        None if IS_PENDING.load(Ordering::Acquire) => attach_now(),
        ops => Ok(ops),
    }
}

/// As [`ops_or_attach`], for a call that can do without the stack.
#[inline]
pub fn ops_or_attach_quietly() -> Option<&'static Ops> {
    ops_or_attach().ok().flatten()
}

/// As [`ops_or_attach`], for a call that makes a network socket: reports why the program has no stack.
///
/// # Errors
/// As [`ops_or_attach`]; `EACCES` if the user must not use the stack, `ENETDOWN` if it cannot be reached.
#[inline]
pub fn ops_for_new_socket() -> Result<Option<&'static Ops>, Errno> {
    let ops = ops_or_attach()?;
    if ops.is_none() && IS_REFUSED.load(Ordering::Acquire) {
        report_refusal()?;
    }
    Ok(ops)
}

/// Reports a refusal, once.
///
/// # Errors
/// The error of each network socket that the program makes, unless it uses the kernel's network instead.
#[cold]
fn report_refusal() -> Result<(), Errno> {
    let _signals_blocked = SignalsBlocked::new();
    let mut refusal = REFUSAL.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(UnusableStack { stack, cause, error, is_reported }) = &mut *refusal else { return Ok(()) };
    let goes_on = if *is_reported { uses_kernel_instead() } else { report_missing_stack(stack, cause) };
    *is_reported = true;
    if goes_on {
        IS_REFUSED.store(false, Ordering::Release);
        return Ok(());
    }
    Err(*error)
}

fn pending() -> MutexGuard<'static, Option<(UnattachedProcess, String)>> {
    // No code panics while it holds the lock.
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Publishes for `ginnel check` why the program has no stack.
fn publish_cause(stack: &str, cause: &str) {
    not_attached::publish(&format!("cannot attach to {stack}: {cause}"));
}

/// Postpones the report of a refusal until the program makes a network socket.
fn set_refused(stack: &str, cause: &str, error: Errno) {
    publish_cause(stack, cause);
    let known = UnusableStack { stack: stack.to_owned(), cause: cause.to_owned(), error, is_reported: false };
    *REFUSAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
    IS_REFUSED.store(true, Ordering::Release);
}

/// Why the program could not be attached.
struct AttachError {
    cause: String,
    errno: Errno,
    /// A later call may succeed.
    is_temporary: bool,
}

impl From<Error> for AttachError {
    fn from(error: Error) -> Self {
        let errno = match &error {
            Error::Unreachable(_, why) if why.io_error().kind() == ErrorKind::PermissionDenied => {
                Errno::ACCESS
            }
            Error::Unreachable(_, why) => shortage_or_netdown(why.io_error()),
            Error::Io(_, io) => shortage_or_netdown(io),
            _ => Errno::NETDOWN,
        };
        let is_temporary = is_shortage(&errno) || matches!(error, Error::Refused(Refusal::Restarting(_)));
        Self { cause: cause_of(&error), errno, is_temporary }
    }
}

/// Returns why a stack does not admit a process, for a line that names the stack already.
pub fn cause_of(error: &Error) -> String {
    match error {
        Error::Unreachable(_, why) => why.to_string(),
        Error::Refused(why) => why.to_string(),
        error => error.to_string(),
    }
}

/// Returns the error of a call that needs the stack: that of the system call if a later call may succeed.
fn shortage_or_netdown(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).filter(is_shortage).unwrap_or(Errno::NETDOWN)
}

/// Returns whether an error may be over at the next attempt.
fn is_shortage(error: &Errno) -> bool {
    [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS].contains(error)
}

/// Attaches the program. Without descriptors or memory, or while the shards are being started again, the
/// program stays unattached, and the next call tries again.
#[cold]
fn attach_now() -> Result<Option<&'static Ops>, Errno> {
    let _signals_blocked = SignalsBlocked::new();
    let mut pending = pending();
    let Some((unattached, stack)) = pending.take() else { return Ok(ops()) };
    let attached = {
        // The stack limits how many unattached processes wait, and may have closed this one's connection, so
        // the program connects anew. If its user may not connect, the first error tells more.
        let process = unattached.attach().or_else(|first| {
            // A stack that does not answer will not answer the second time.
            if matches!(&first, Error::Io(_, error) if error.kind() == ErrorKind::TimedOut) {
                return Err(first);
            }
            Attachment::connect(Path::new(&stack), "").map_err(|second| match &second {
                Error::Unreachable(_, why) if why.io_error().kind() == ErrorKind::PermissionDenied => first,
                _ => second,
            })
        });
        process.map_err(AttachError::from).and_then(attach_process)
    };
    if let Err(AttachError { errno, is_temporary: true, cause }) = &attached
        && (is_shortage(errno) || !uses_kernel_instead())
    {
        static IS_OUTAGE_REPORTED: AtomicBool = AtomicBool::new(false);
        if !is_shortage(errno) && !IS_OUTAGE_REPORTED.swap(true, Ordering::Relaxed) {
            report_missing_stack(&stack, cause);
        }
        *pending = Some((unattached, stack));
        return Err(*errno);
    }
    Ops::unregister_internal(unattached.connection_fd());
    drop(unattached);
    match attached {
        Ok(ops) => publish(ops),
        Err(AttachError { cause, errno, .. }) => set_refused(&stack, &cause, errno),
    }
    IS_PENDING.store(false, Ordering::Release);
    Ok(ops())
}

/// Runs before `main`, where the program may give up its privileges or change its root directory.
#[unsafe(link_section = ".init_array")]
#[used]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    // `vfork` needs the handlers without a stack, too.
    crate::fork::register_atfork();
    let Some(stack) = std::env::var_os(STACK_VARIABLE) else { return };
    let stack = match stack.into_string() {
        Ok(stack) => stack,
        Err(stack) => return report_at_start(&stack.to_string_lossy(), "its path is not UTF-8"),
    };
    inherit::save_environment();
    let [sockets, connection] = [inherit::INHERITED_SOCKETS_VARIABLE, inherit::INHERITED_CONNECTION_VARIABLE]
        .map(|name| {
            let value = std::env::var(name).ok();
            // SAFETY: before `main` there are no other threads. The numbers mean nothing to children of this
            // program.
            unsafe { std::env::remove_var(name) };
            value
        });
    if let Some(ops) = sockets.as_deref().and_then(inherit_ops) {
        return publish(ops);
    }
    let result = match stack.strip_prefix("fd:") {
        None => connection
            .as_deref()
            .and_then(|number| resume_pending(&stack, number))
            .map_or_else(|| connect_pending(&stack), Ok),
        Some(number) => attach_fd(&stack, number).map(publish),
    };
    match result {
        Ok(()) => {}
        Err(error) if access(&*stack, Access::WRITE_OK) == Err(Errno::ACCESS) => {
            set_refused(&stack, &error.cause, Errno::ACCESS);
        }
        Err(error) => report_at_start(&stack, &error.cause),
    }
}

/// Reports why the stack cannot be reached. Returns if the program goes on with the kernel's network.
fn report_at_start(stack: &str, cause: &str) {
    publish_cause(stack, cause);
    if !report_missing_stack(stack, cause) {
        // SAFETY: ends the process before `main`. It must not use another network.
        unsafe { libc::_exit(EXIT_NO_STACK) };
    }
}

fn publish(ops: Ops) {
    ops.wait_until_ready(READY_TIMEOUT);
    OPS.store(Box::into_raw(Box::new(ops)), Ordering::Release);
}

/// Blocks all signals in this thread while it lives: a handler that makes a socket would wait for the thread
/// that it has interrupted.
pub struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    /// Blocks the signals.
    pub fn new() -> Self {
        // SAFETY: an all-zero set is valid, and both sets live through the calls.
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
        // SAFETY: the mask that was in force before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, core::ptr::null_mut()) };
    }
}

/// Keeps other threads from attaching while it lives: a child would inherit a lock that is held by a thread
/// which does not exist in it.
pub struct AttachLock {
    // Fields are dropped in this order.
    _pending: MutexGuard<'static, Option<(UnattachedProcess, String)>>,
    _signals_blocked: SignalsBlocked,
}

/// Waits until no thread is attaching. Returns `None` if the program is attached or has no stack.
pub fn block_attach() -> Option<AttachLock> {
    if ops().is_some() || !IS_PENDING.load(Ordering::Acquire) {
        return None;
    }
    let signals_blocked = SignalsBlocked::new();
    let attach_lock = AttachLock { _pending: pending(), _signals_blocked: signals_blocked };
    ops().is_none().then_some(attach_lock)
}

/// Must be called before the program replaces the descriptor of a number: an internal descriptor moves to
/// another number.
///
/// # Errors
/// `EBUSY`, `EMFILE`.
pub fn relocate_fd(number: c_int) -> Result<(), Errno> {
    if !Ops::is_internal(number) {
        return Ok(());
    }
    if ops().is_none() {
        let _signals_blocked = SignalsBlocked::new();
        if let Some((unattached, _)) = &*pending()
            && let Some(other) = unattached.relocate_from(number)?
        {
            Ops::renumber_internal(number, other);
        }
    }
    ops().map_or(Ok(()), |ops| ops.relocate_fd(number))
}

/// Returns whether a program without a stack uses the kernel's network (`GINNEL_ON_MISSING`).
fn uses_kernel_instead() -> bool {
    std::env::var(ON_MISSING_VARIABLE).is_ok_and(|policy| policy == "kernel")
}

/// Reports that the stack cannot be reached. Returns whether the program goes on with the kernel's network.
fn report_missing_stack(stack: &str, cause: &str) -> bool {
    let on_kernel = uses_kernel_instead();
    let end = if on_kernel { "; this program goes on with the kernel's network" } else { "" };
    write_stderr(&["ginnel: cannot attach to the stack ", stack, ": ", cause, end]);
    on_kernel
}

fn connect_pending(stack: &str) -> Result<(), AttachError> {
    set_pending(UnattachedProcess::connect(Path::new(stack))?, stack);
    Ok(())
}

fn set_pending(unattached: UnattachedProcess, stack: &str) {
    Ops::register_internal(unattached.connection_fd());
    *pending() = Some((unattached, stack.into()));
    IS_PENDING.store(true, Ordering::Release);
}

/// Uses the control connection that the previous program has left. Returns `None` if that connection is
/// closed or was not the library's.
fn resume_pending(stack: &str, number: &str) -> Option<()> {
    set_pending(UnattachedProcess::from_connection(inherited_fd(number)?).ok()?, stack);
    Some(())
}

/// Takes a descriptor that the previous program has left to the library.
fn inherited_fd(number: &str) -> Option<OwnedFd> {
    let number: c_int = number.parse().ok().filter(|number| *number > 2)?;
    // SAFETY: only asks whether the descriptor is open.
    let open = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    // SAFETY: the previous program has left the descriptor to the library, and no other code knows of it.
    open.then(|| unsafe { OwnedFd::from_raw_fd(number) })
}

/// Returns whether an executed program may connect to the stack. That this one may is not enough: it may lose
/// its capabilities.
fn can_successor_connect(stack: &str) -> bool {
    let user = geteuid().as_raw();
    // An inherited connection serves one program alone.
    stack.starts_with("fd:") || stat(stack).is_ok_and(|metadata| user == 0 || user == metadata.st_uid)
}

/// Returns a control connection for the next program, if that program may be unable to connect: this one has
/// given up privileges or changed its root directory since it attached. The descriptor is not close-on-exec.
pub fn leave_connection(exec_guard: Option<&ExecGuard<'_>>) -> Option<InternalFd> {
    if !is_on_a_stack() || inherit::stack().is_none_or(can_successor_connect) {
        return None;
    }
    let connection = match exec_guard {
        Some(exec_guard) => exec_guard.new_connection().ok()?,
        None => {
            let _signals_blocked = SignalsBlocked::new();
            pending().as_ref()?.0.successor_connection().ok()?
        }
    };
    fcntl_setfd(&connection, FdFlags::empty()).ok()?;
    Some(connection)
}

fn attach_fd(stack: &str, number: &str) -> Result<Ops, AttachError> {
    let number: c_int = number.parse().map_err(|_| AttachError {
        cause: format!("{stack}: not a number"),
        errno: Errno::NETDOWN,
        is_temporary: false,
    })?;
    // SAFETY: the parent has left the descriptor to this program.
    attach_process(Attachment::from_connection(unsafe { OwnedFd::from_raw_fd(number) })?)
}

fn attach_process(process: Attachment) -> Result<Ops, AttachError> {
    let config = config(&process);
    Ops::from_process(process, config).map_err(|errno| AttachError {
        cause: errno.to_string(),
        errno,
        is_temporary: is_shortage(&errno),
    })
}

/// Returns the operations with the sockets that the previous program has left. Returns `None` if the
/// connection is closed or was not the library's.
fn inherit_ops(inherited: &str) -> Option<Ops> {
    let (connection, table) = inherited.split_once(':')?;
    Ops::from_inheritance(inherited_fd(connection)?, inherited_fd(table)?, config).ok()
}

fn config(process: &Attachment) -> OpsConfig {
    let stack_info = process.stack_info();
    OpsConfig {
        is_stack_address: if stack_info.loopback { |_| true } else { |address| !address.is_loopback() },
        unprivileged_port_start: stack_info.unprivileged_port_start,
        congestion_control: stack_info.congestion_control,
        listen_spawn: match std::env::var(LISTEN_SPAWN_VARIABLE).as_deref() {
            Ok("off" | "0") => ListenSpawn::Off,
            Ok("bound" | "1") => ListenSpawn::Bound,
            _ => ListenSpawn::Auto,
        },
        kernel_listen: std::env::var(KERNEL_LISTEN_VARIABLE).map_or(true, |value| value != "off"),
        proxy_pool_max: proxy_pool_max(),
        stack: std::env::var(STACK_VARIABLE).unwrap_or_default(),
        ..OpsConfig::default()
    }
}

/// Returns the size of the pool. Pooled descriptors count towards `RLIMIT_NOFILE`, so a program with a low
/// limit keeps few.
fn proxy_pool_max() -> usize {
    let limit = resource_limit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / PROXY_POOL_FRACTION).unwrap_or(usize::MAX).min(PROXY_POOL_MAX)
}

/// Leaves all calls to the kernel from now on.
pub fn detach() {
    OPS.store(core::ptr::null_mut(), Ordering::Release);
}

/// Writes a line to standard error.
fn write_stderr(parts: &[&str]) {
    let mut line = parts.concat();
    line.push('\n');
    write_at_once(&line);
}

/// Calls `close_range` of libc for all but internal descriptors.
///
/// # Safety
/// As libc's function.
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
