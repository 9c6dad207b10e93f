//! The runtime directory, which has a directory for each running stack of a user, by name.
//!
//! ```text
//!   /run/ginnel                  for root; else $XDG_RUNTIME_DIR/ginnel, else /tmp/ginnel-UID; $GINNEL_RUN_DIR instead, if it is set
//!     .lock                      locked briefly to create, remove or list directories
//!     web/                       the stack named "web"
//!       lock                     locked by the stack's process as long as it lives (flock); has its process id
//!       ready                    exists once the stack serves programs
//!       restarts                 how often the shards were started again
//!       stats, inspect, …        files and sockets for other processes
//!     .doctor/                   what "ginnel doctor --fix" has changed, for --undo
//!     .logs/                     the logs, which outlive their stacks
//!       web.log, web.log.1       the log of the stack named "web"
//! ```
//!
//! Only the user has access. If nobody holds the lock of a directory, its process was killed; any process
//! that finds the directory removes it.

pub mod logs;
pub mod restarts;

use crate::broker::owner_of;
use core::fmt;
use core::time::Duration;
use rustix::fs::{Access, Mode, OFlags, access, fstat, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Name of the file that exists once a stack serves programs.
pub const READY: &str = "ready";

/// Length of the longest name of a stack in bytes: the path of a socket in its directory must fit into the
/// 108 bytes of `sun_path`.
pub const NAME_BYTES_MAX: usize = 48;

/// How long to wait for the common lock, which is held only to create, remove or list directories.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// The directory of a stack of this process. Dropping the value removes it.
#[derive(Debug)]
pub struct RunDir {
    base: PathBuf,
    path: PathBuf,
    name: String,
    /// Locked as long as the process lives. `None` for a child of the process that has created the directory.
    lock: Option<File>,
}

/// A running stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningStack {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
    /// Its process id.
    pub pid: u32,
}

/// Why there is no directory. Formats as one line.
#[derive(Debug)]
pub enum RunDirError {
    /// The name is not a valid name of a stack.
    Name(String),
    /// A stack of this name runs already, in the process with this id.
    NameInUse(String, u32),
    /// No stack of this name runs in this runtime directory; these do.
    NotRunning(PathBuf, String, Vec<String>),
    /// The stack of this name was killed, as the process with this id. Its directory has been removed.
    Dead(String, u32),
    /// No stack runs in this runtime directory.
    NoneRunning(PathBuf),
    /// Several stacks run, and no name was given.
    Ambiguous(Vec<String>),
    /// The directory cannot be trusted.
    Unsafe(PathBuf, &'static str),
    /// The runtime directory cannot be made.
    Base(PathBuf, io::Error),
    /// A system call failed.
    Io(PathBuf, io::Error),
}

impl fmt::Display for RunDirError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(
                f,
                "{name:?} is not a valid stack name: it must be 1 to {NAME_BYTES_MAX} letters, digits, \".\", \"_\" and \"-\", and begin with a letter or digit"
            ),
            Self::NameInUse(name, pid) => {
                write!(f, "a stack named \"{name}\" runs already, as process {pid}")
            }
            Self::NotRunning(base, name, others) if others.is_empty() => {
                write!(
                    f,
                    "no stack named \"{name}\" runs, nor any other of this user ({} has none)",
                    base.display()
                )?;
                fmt_hidden_stacks(f, base)
            }
            Self::NotRunning(base, name, others) => {
                write!(f, "no stack named \"{name}\" runs; there are: {}", others.join(", "))?;
                fmt_hidden_stacks(f, base)
            }
            Self::Dead(name, pid) => write!(
                f,
                "the stack \"{name}\" is dead: its process {pid} was killed or crashed (see \"ginnel log {name}\"); its directory is removed now"
            ),
            Self::NoneRunning(base) => {
                write!(f, "no stack of this user runs ({} has none)", base.display())?;
                fmt_hidden_stacks(f, base)
            }
            Self::Ambiguous(names) => write!(f, "several stacks run, name one: {}", names.join(", ")),
            Self::Unsafe(path, problem) => write!(f, "{}: {problem}", path.display()),
            Self::Base(path, e) => write!(
                f,
                "the runtime directory {} cannot be made: {e}: set GINNEL_RUN_DIR to a directory that this user may write",
                path.display()
            ),
            Self::Io(path, e) if e.kind() == ErrorKind::PermissionDenied => match owner_of(path) {
                Some(uid) if uid != geteuid().as_raw() => write!(
                    f,
                    "{}: {e}: it belongs to user {uid}, whose stacks are only for that user and root",
                    path.display()
                ),
                _ => write!(f, "{}: {e}", path.display()),
            },
            Self::Io(path, e) => write!(f, "{}: {e}", path.display()),
        }
    }
}

/// Says that root may have further stacks, if this user is not root.
fn fmt_hidden_stacks(f: &mut fmt::Formatter<'_>, base: &Path) -> fmt::Result {
    if !geteuid().is_root() && base != Path::new(ROOT_BASE) && fs::symlink_metadata(ROOT_BASE).is_ok() {
        return f.write_str("; stacks of root are visible to root only");
    }
    Ok(())
}

impl std::error::Error for RunDirError {}

impl From<RunDirError> for crate::Error {
    fn from(e: RunDirError) -> Self {
        match e {
            RunDirError::Io(path, e) => Self::io(path.display().to_string(), e),
            e => Self::application(e.to_string()),
        }
    }
}

/// Runtime directory of root.
const ROOT_BASE: &str = "/run/ginnel";

/// Returns the runtime directory of this user.
pub fn base() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(configured) = absolute("GINNEL_RUN_DIR") {
        return configured;
    }
    let uid = geteuid();
    // Root of a user namespace may not write there, and is another user outside of it.
    if uid.is_root() && access("/run", Access::WRITE_OK).is_ok() {
        return ROOT_BASE.into();
    }
    let user_dir = absolute("XDG_RUNTIME_DIR").map(|path| path.join("ginnel"));
    user_dir.unwrap_or_else(|| format!("/tmp/ginnel-{}", uid.as_raw()).into())
}

/// Returns whether `name` is a valid name of a stack.
pub fn is_valid_name(name: &str) -> bool {
    let first = name.bytes().next();
    first.is_some_and(|b| b.is_ascii_alphanumeric())
        && name.len() <= NAME_BYTES_MAX
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

/// Returns the running stacks by name. Removes directories of dead processes.
///
/// # Errors
/// The directory cannot be read or trusted.
pub fn running() -> Result<Vec<RunningStack>, RunDirError> {
    running_in(&base())
}

/// Returns the stack of this name, or the only running stack.
///
/// # Errors
/// No such stack runs, or several run and no name was given.
pub fn find(name: Option<&str>) -> Result<RunningStack, RunDirError> {
    find_in(&base(), name)
}

/// Returns the folder `name` of the runtime directory, which outlives all stacks, and creates it if
/// necessary. No stack can have its name, which begins with a dot.
///
/// # Errors
/// The runtime directory cannot be written or trusted.
pub fn folder(name: &str) -> Result<PathBuf, RunDirError> {
    let base = base();
    let path = base.join(name);
    for directory in [&base, &path] {
        match create_private_dir(directory) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => {
                return Err(RunDirError::Io(directory.clone(), e));
            }
            _ => check_trusted(directory, false)?,
        }
    }
    Ok(path)
}

/// As [`running`], below `base`.
pub fn running_in(base: &Path) -> Result<Vec<RunningStack>, RunDirError> {
    Ok(list(base)?.running)
}

/// As [`sweep`], if `base` exists and can be trusted.
fn list(base: &Path) -> Result<SweptStacks, RunDirError> {
    match check_trusted(base, geteuid().is_root()) {
        Err(RunDirError::Io(_, e)) if e.kind() == ErrorKind::NotFound => {
            return Ok(SweptStacks::default());
        }
        checked => checked?,
    }
    let _guard = lock_base(base)?;
    sweep(base)
}

/// Returns the stack that has the directory `path`, in the runtime directory of any user, or `None` if no
/// process owns the directory.
///
/// # Errors
/// The directory cannot be read.
pub fn stack_at(path: &Path) -> Result<Option<RunningStack>, RunDirError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match owner(path)? {
        Owner::Alive(pid) => Ok(Some(RunningStack { name, path: path.into(), pid })),
        Owner::Dead(_) => Ok(None),
    }
}

/// The stacks of a runtime directory by name.
#[derive(Default)]
struct SweptStacks {
    running: Vec<RunningStack>,
    /// Names of the stacks that were killed, and the ids that their processes had. Their directories have
    /// been removed.
    dead: Vec<(String, u32)>,
}

/// Returns the stacks whose process lives, and removes the directories of others. The caller holds the common
/// lock.
fn sweep(base: &Path) -> Result<SweptStacks, RunDirError> {
    let mut found = SweptStacks::default();
    let io_error = |e| RunDirError::Io(base.into(), e);
    for entry in fs::read_dir(base).map_err(io_error)? {
        let entry = entry.map_err(io_error)?;
        let Some(name) = entry.file_name().to_str().filter(|name| is_valid_name(name)).map(String::from)
        else {
            continue;
        };
        let path = entry.path();
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        match owner(&path)? {
            Owner::Alive(pid) => found.running.push(RunningStack { name, path, pid }),
            Owner::Dead(pid) => {
                fs::remove_dir_all(&path).map_err(|e| RunDirError::Io(path, e))?;
                logs::record_death(base, &name, pid);
                if pid != 0 {
                    found.dead.push((name, pid));
                }
            }
        }
    }
    found.running.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// As [`find`], below `base`.
pub fn find_in(base: &Path, name: Option<&str>) -> Result<RunningStack, RunDirError> {
    let SweptStacks { running: mut all, mut dead } = list(base)?;
    let names = |all: &[RunningStack]| all.iter().map(|running| running.name.clone()).collect();
    dead.retain(|(known, _)| name.is_none_or(|name| name == known));
    match (name, all.len()) {
        (Some(name), _) => match all.iter().position(|running| running.name == name) {
            Some(at) => Ok(all.swap_remove(at)),
            None => Err(match dead.pop() {
                Some((name, pid)) => RunDirError::Dead(name, pid),
                None => RunDirError::NotRunning(base.into(), name.into(), names(&all)),
            }),
        },
        (None, 0) if !dead.is_empty() => {
            let (name, pid) = dead.remove(0);
            Err(RunDirError::Dead(name, pid))
        }
        (None, 0) => Err(RunDirError::NoneRunning(base.into())),
        (None, 1) => Ok(all.swap_remove(0)),
        (None, _) => Err(RunDirError::Ambiguous(names(&all))),
    }
}

impl RunDir {
    /// Creates an empty directory for the stack `name`. Removes directories of stacks that were killed.
    ///
    /// # Errors
    /// A stack of this name runs; the runtime directory cannot be written or trusted.
    pub fn create(name: &str) -> Result<Self, RunDirError> {
        Self::create_in(&base(), name)
    }

    /// As [`RunDir::create`], below `base`.
    pub fn create_in(base: &Path, name: &str) -> Result<Self, RunDirError> {
        if !is_valid_name(name) {
            return Err(RunDirError::Name(name.into()));
        }
        match create_private_dir(base) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(RunDirError::Base(base.into(), e)),
            _ => check_trusted(base, false)?,
        }
        let _guard = lock_base(base)?;
        // Removes what killed stacks have left. A failure does not prevent this stack from running.
        let _ = sweep(base);
        let path = base.join(name);
        let io_error = |e| RunDirError::Io(path.clone(), e);
        if let Err(e) = create_private_dir(&path) {
            if e.kind() != ErrorKind::AlreadyExists {
                return Err(io_error(e));
            }
            check_trusted(&path, false)?;
            let pid = match owner(&path)? {
                Owner::Alive(pid) => return Err(RunDirError::NameInUse(name.into(), pid)),
                Owner::Dead(pid) => pid,
            };
            fs::remove_dir_all(&path).and_then(|()| create_private_dir(&path)).map_err(io_error)?;
            logs::record_death(base, name, pid);
        }
        let lock =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path.join(LOCK));
        let mut lock = lock.map_err(io_error)?;
        lock.try_lock().map_err(|e| io_error(e.into()))?;
        lock.write_all(format!("{}\n", std::process::id()).as_bytes()).map_err(io_error)?;
        Ok(Self { base: base.into(), path, name: name.into(), lock: Some(lock) })
    }

    /// Returns the directory `path` of a stack, for a child of the process that has created the directory and
    /// removes it.
    pub(crate) fn of_parent(path: &Path) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let base = path.parent().unwrap_or(path).to_owned();
        Self { base, path: path.to_owned(), name, lock: None }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name of the stack.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let Some(lock) = &self.lock else { return };
        // Under the common lock: others see either the complete directory with its lock held, or none.
        let _guard = lock_base(&self.base);
        // If that fails, the directory is stale from now on, and the next process that lists the stacks
        // removes it.
        let _ = fs::remove_dir_all(&self.path);
        let _ = lock.unlock();
    }
}

/// Name of the file that the living process locks.
const LOCK: &str = "lock";

fn create_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}

/// Why a directory cannot be trusted, and the way out.
const NO_DIRECTORY: &str =
    "is not a directory, or is a symbolic link: remove it, or set GINNEL_RUN_DIR to another directory";
const OF_ANOTHER_USER: &str = "belongs to another user: set GINNEL_RUN_DIR to a directory of this user";
const WRITABLE_BY_OTHERS: &str =
    "is writable by others than its owner: chmod go-w, or set GINNEL_RUN_DIR to another directory";

/// Checks that `path` is a directory and not a symbolic link, that it belongs to this user (unless
/// `any_owner`, for root), and that nobody else can write to it.
fn check_trusted(path: &Path, any_owner: bool) -> Result<(), RunDirError> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let opened = open(path, flags, Mode::empty()).map_err(|e| match e {
        Errno::NOTDIR | Errno::LOOP => RunDirError::Unsafe(path.into(), NO_DIRECTORY),
        e => RunDirError::Io(path.into(), e.into()),
    })?;
    let stat = fstat(&opened).map_err(|e| RunDirError::Io(path.into(), e.into()))?;
    if stat.st_uid != geteuid().as_raw() && !any_owner {
        return Err(RunDirError::Unsafe(path.into(), OF_ANOTHER_USER));
    }
    if stat.st_mode & 0o022 != 0 {
        return Err(RunDirError::Unsafe(path.into(), WRITABLE_BY_OTHERS));
    }
    Ok(())
}

/// Takes the common lock; dropping the file releases it.
fn lock_base(base: &Path) -> Result<File, RunDirError> {
    let path = base.join(".lock");
    let io_error = |e| RunDirError::Io(path.clone(), e);
    let no_follow = OFlags::NOFOLLOW.bits() as i32;
    let file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(no_follow)
        .open(&path);
    let file = file.map_err(io_error)?;
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if started.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(e) => return Err(io_error(e.into())),
        }
    }
}

/// The process that created a stack's directory, by its id; 0 is an unknown one.
enum Owner {
    /// A living process.
    Alive(u32),
    /// A process that is gone.
    Dead(u32),
}

/// Returns the process that owns a stack's directory. The caller holds the common lock, unless it accepts
/// that a stack that begins or ends at this moment counts as dead.
fn owner(path: &Path) -> Result<Owner, RunDirError> {
    let path = path.join(LOCK);
    let io_error = |e| RunDirError::Io(path.clone(), e);
    let no_follow = OFlags::NOFOLLOW.bits() as i32;
    let file = match OpenOptions::new().read(true).custom_flags(no_follow).open(&path) {
        // The process was killed before it created the file, or while it removed the directory.
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Owner::Dead(0)),
        file => file.map_err(io_error)?,
    };
    let is_alive = match file.try_lock_shared() {
        Ok(()) => false,
        Err(TryLockError::WouldBlock) => true,
        Err(e) => return Err(io_error(e.into())),
    };
    let mut text = String::new();
    (&file).take(32).read_to_string(&mut text).map_err(io_error)?;
    let pid = text.trim().parse().unwrap_or(0);
    Ok(if is_alive { Owner::Alive(pid) } else { Owner::Dead(pid) })
}

#[cfg(all(test, not(loom)))]
mod tests;
