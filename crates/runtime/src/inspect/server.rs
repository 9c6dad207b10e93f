//! The thread that other processes ask.

use super::line::{self, FIELDS};
use super::list;
use crate::command::Commander;
use crate::door::{Roll, User};
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Name of the socket in the stack's directory.
pub(crate) const SOCKET: &str = "inspect";

/// What is asked, and the version of the answer.
const LIST: &str = "list 1";
/// The same about the processes that are attached.
const USERS: &str = "users 1";

/// Askers at a time: each has a thread.
const ASKERS_MAX: usize = 8;

/// Bytes that wait for an asker before the shards are asked for more.
const BUFFER_BYTES: usize = 64 << 10;

/// Bytes of a list of processes at the most: more than there can be.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// One that is refused has so long to have asked.
const REFUSED_WITHIN: Duration = Duration::from_millis(100);

/// An asker that says nothing, or takes nothing, for so long is sent away.
const ASKERS_PATIENCE: Duration = Duration::from_secs(10);

/// What the shards are called, and how to ask them.
type Shards = Mutex<Vec<(String, Commander)>>;

/// The thread, and where its shards are registered.
#[derive(Debug)]
pub(crate) struct Office {
    path: PathBuf,
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    shards: Shards,
    /// Of the stack's door, if it has one.
    roll: Mutex<Option<Arc<Roll>>>,
    askers: AtomicUsize,
    closes: core::sync::atomic::AtomicBool,
}

impl Office {
    /// Opens the socket in the directory of a stack.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join(SOCKET);
        let listener = UnixListener::bind(&path)?;
        let shared = Arc::<Shared>::default();
        let thread = {
            let shared = shared.clone();
            thread::Builder::new().name(SOCKET.into()).spawn(move || serve(&listener, &shared))?
        };
        Ok(Self { path, shared, thread: Some(thread) })
    }

    /// A shard that may be asked from now on.
    pub(crate) fn register(&self, label: &str, shard: Commander) {
        let mut shards = self.shared.shards.lock().unwrap_or_else(PoisonError::into_inner);
        shards.push((label.into(), shard));
    }

    /// The door of the stack is open.
    pub(crate) fn introduce(&self, roll: Roll) {
        *self.shared.roll.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(roll));
    }
}

impl Drop for Office {
    fn drop(&mut self) {
        self.shared.closes.store(true, Ordering::Relaxed);
        // That is what the thread waits for. If nobody can connect any more it is left to the end of the process.
        if UnixStream::connect(&self.path).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &UnixListener, shared: &Arc<Shared>) {
    for asker in listener.incoming() {
        if shared.closes.load(Ordering::Relaxed) {
            return;
        }
        let Ok(asker) = asker else {
            // No descriptors: some may be free again soon.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if shared.askers.fetch_add(1, Ordering::Relaxed) >= ASKERS_MAX {
            shared.askers.fetch_sub(1, Ordering::Relaxed);
            refuse(asker);
            continue;
        }
        let own = shared.clone();
        let spawned = thread::Builder::new().name("asker".into()).spawn(move || {
            // Whoever asked may have gone, or not taken the answer.
            let _ = answer(&asker, &own);
            // Before the asker hears that this is the end, and asks again.
            own.askers.fetch_sub(1, Ordering::Relaxed);
            drop(asker);
        });
        if spawned.is_err() {
            shared.askers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Tells somebody that there is no room, without waiting long: the answer fits into the socket's buffer.
fn refuse(mut asker: UnixStream) {
    let _ = asker.set_read_timeout(Some(REFUSED_WITHIN));
    // With the question unread the asker would see an error before the answer.
    let _ = asker.read(&mut [0; 64]);
    let _ = writeln!(asker, "!\t{ASKERS_MAX} others are asking already");
}

fn answer(mut asker: &UnixStream, shared: &Shared) -> io::Result<()> {
    asker.set_read_timeout(Some(ASKERS_PATIENCE))?;
    asker.set_write_timeout(Some(ASKERS_PATIENCE))?;
    let mut question = String::new();
    BufReader::new(asker.take(64)).read_line(&mut question)?;
    match question.trim_end() {
        LIST => {}
        USERS => return asker.write_all(users_of(shared).as_bytes()),
        _ => return writeln!(asker, "!\tthis stack understands \"{LIST}\" and \"{USERS}\""),
    }
    let shards = shared.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut text = format!("{FIELDS}\n");
    for (label, shard) in &shards {
        let mut gone = None;
        let listed = list(shard, |socket| {
            // Writing to a string cannot fail.
            let _ = line::write(&mut text, label, socket);
            if text.len() < BUFFER_BYTES {
                return true;
            }
            let written = asker.write_all(text.as_bytes());
            text.clear();
            gone = written.err();
            gone.is_none()
        });
        if let Some(e) = gone {
            return Err(e);
        }
        if let Err(problem) = listed {
            let _ = writeln!(text, "!\tshard {label} {problem}");
        }
    }
    text.push_str(".\n");
    asker.write_all(text.as_bytes())
}

/// A line for each process that is attached.
fn users_of(shared: &Shared) -> String {
    let mut text = String::new();
    let roll = shared.roll.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for User { pid, since_ms } in roll.iter().flat_map(|roll| roll.call()) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{pid}\t{since_ms}");
    }
    text.push_str(".\n");
    text
}

/// The processes that are attached to the stack whose directory this is, in the order in which they came.
///
/// # Errors
/// Nobody answers there, or says something else.
pub fn users(dir: &Path) -> io::Result<Vec<User>> {
    let mut asker = UnixStream::connect(dir.join(SOCKET))?;
    asker.set_read_timeout(Some(ASKERS_PATIENCE))?;
    writeln!(asker, "{USERS}")?;
    let mut text = String::new();
    asker.take(ANSWER_BYTES_MAX).read_to_string(&mut text)?;
    let garbled = || io::Error::new(io::ErrorKind::InvalidData, format!("said {:?}", text.trim_end()));
    let lines = text.strip_suffix(".\n").ok_or_else(garbled)?.lines();
    let user = |line: &str| {
        let (pid, since_ms) = line.split_once('\t')?;
        Some(User { pid: pid.parse().ok()?, since_ms: since_ms.parse().ok()? })
    };
    lines.map(|line| user(line).ok_or_else(garbled)).collect()
}

/// Asks the stack whose directory this is. The answer begins with a line of names; `!` begins a line that is a problem, and `.` alone is the end.
///
/// # Errors
/// Nobody answers there.
pub fn ask(dir: &Path) -> io::Result<UnixStream> {
    let mut asker = UnixStream::connect(dir.join(SOCKET))?;
    asker.set_read_timeout(Some(ASKERS_PATIENCE))?;
    writeln!(asker, "{LIST}")?;
    Ok(asker)
}
