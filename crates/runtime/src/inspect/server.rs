//! The thread that other processes ask.

use super::line::{self, FIELDS};
use super::list;
use crate::broker::{AttachedProcess, AttachedQuery};
use crate::command::Commander;
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
const PROCESSES: &str = "users 1";

/// Askers at a time: each has a thread.
const CLIENTS_MAX: usize = 8;

/// Bytes that wait for an asker before the shards are asked for more.
const BUFFER_BYTES: usize = 64 << 10;

/// Bytes of a list of processes at the most: more than there can be.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// One that is refused has so long to have asked.
const REFUSAL_READ_TIMEOUT: Duration = Duration::from_millis(100);

/// An asker that says nothing, or takes nothing, for so long is sent away.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// What the shards are called, and how to ask them.
type ShardList = Mutex<Vec<(String, Commander)>>;

/// The thread, and where its shards are registered.
#[derive(Debug)]
pub(crate) struct InspectServer {
    path: PathBuf,
    state: Arc<ServerState>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct ServerState {
    shards: ShardList,
    /// Of the stack's door, if it has one.
    attached: Mutex<Option<Arc<AttachedQuery>>>,
    clients: AtomicUsize,
    is_closing: core::sync::atomic::AtomicBool,
}

impl InspectServer {
    /// Opens the socket in the directory of a stack.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join(SOCKET);
        let listener = UnixListener::bind(&path)?;
        let state = Arc::<ServerState>::default();
        let thread = {
            let state = state.clone();
            thread::Builder::new().name(SOCKET.into()).spawn(move || serve(&listener, &state))?
        };
        Ok(Self { path, state, thread: Some(thread) })
    }

    /// A shard that may be asked from now on.
    pub(crate) fn register(&self, label: &str, shard: Commander) {
        let mut shards = self.state.shards.lock().unwrap_or_else(PoisonError::into_inner);
        shards.push((label.into(), shard));
    }

    /// The door of the stack is open.
    pub(crate) fn set_broker(&self, query: AttachedQuery) {
        *self.state.attached.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(query));
    }
}

impl Drop for InspectServer {
    fn drop(&mut self) {
        self.state.is_closing.store(true, Ordering::Relaxed);
        // That is what the thread waits for. If nobody can connect any more it is left to the end of the process.
        if UnixStream::connect(&self.path).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &UnixListener, state: &Arc<ServerState>) {
    for client in listener.incoming() {
        if state.is_closing.load(Ordering::Relaxed) {
            return;
        }
        let Ok(client) = client else {
            // No descriptors: some may be free again soon.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if state.clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            state.clients.fetch_sub(1, Ordering::Relaxed);
            refuse(client);
            continue;
        }
        let thread_state = state.clone();
        let result = thread::Builder::new().name("asker".into()).spawn(move || {
            // Whoever asked may have gone, or not taken the answer.
            let _ = answer(&client, &thread_state);
            // Before the asker hears that this is the end, and asks again.
            thread_state.clients.fetch_sub(1, Ordering::Relaxed);
            drop(client);
        });
        if result.is_err() {
            state.clients.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Tells somebody that there is no room, without waiting long: the answer fits into the socket's buffer.
fn refuse(mut client: UnixStream) {
    let _ = client.set_read_timeout(Some(REFUSAL_READ_TIMEOUT));
    // With the question unread the asker would see an error before the answer.
    let _ = client.read(&mut [0; 64]);
    let _ = writeln!(client, "!\t{CLIENTS_MAX} others are asking already");
}

fn answer(mut client: &UnixStream, state: &ServerState) -> io::Result<()> {
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let mut request = String::new();
    BufReader::new(client.take(64)).read_line(&mut request)?;
    match request.trim_end() {
        LIST => {}
        PROCESSES => return client.write_all(format_processes(state).as_bytes()),
        _ => return writeln!(client, "!\tthis stack understands \"{LIST}\" and \"{PROCESSES}\""),
    }
    let shards = state.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut text = format!("{FIELDS}\n");
    for (label, shard) in &shards {
        let mut write_error = None;
        let result = list(shard, |socket| {
            // Writing to a string cannot fail.
            let _ = line::write(&mut text, label, socket);
            if text.len() < BUFFER_BYTES {
                return true;
            }
            let written = client.write_all(text.as_bytes());
            text.clear();
            write_error = written.err();
            write_error.is_none()
        });
        if let Some(e) = write_error {
            return Err(e);
        }
        if let Err(problem) = result {
            let _ = writeln!(text, "!\tshard {label} {problem}");
        }
    }
    text.push_str(".\n");
    client.write_all(text.as_bytes())
}

/// A line for each process that is attached.
fn format_processes(state: &ServerState) -> String {
    let mut text = String::new();
    let query = state.attached.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for AttachedProcess { pid, since_ms } in query.iter().flat_map(|roll| roll.fetch()) {
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
pub fn list_processes(dir: &Path) -> io::Result<Vec<AttachedProcess>> {
    let mut client = UnixStream::connect(dir.join(SOCKET))?;
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    writeln!(client, "{PROCESSES}")?;
    let mut text = String::new();
    client.take(ANSWER_BYTES_MAX).read_to_string(&mut text)?;
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, format!("said {:?}", text.trim_end()));
    let lines = text.strip_suffix(".\n").ok_or_else(malformed)?.lines();
    let user = |line: &str| {
        let (pid, since_ms) = line.split_once('\t')?;
        Some(AttachedProcess { pid: pid.parse().ok()?, since_ms: since_ms.parse().ok()? })
    };
    lines.map(|line| user(line).ok_or_else(malformed)).collect()
}

/// Asks the stack whose directory this is. The answer begins with a line of names; `!` begins a line that is a problem, and `.` alone is the end.
///
/// # Errors
/// Nobody answers there.
pub fn list_sockets(dir: &Path) -> io::Result<UnixStream> {
    let mut client = UnixStream::connect(dir.join(SOCKET))?;
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    writeln!(client, "{LIST}")?;
    Ok(client)
}
