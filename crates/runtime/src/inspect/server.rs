//! The thread that answers requests of other processes.

use super::line::{self, FIELDS};
use super::mirror::MIRROR;
use super::routes::{self, ListedRoute, RouteAnswer, RouteChange};
use super::stage_request::{self, STAGES};
use super::visible_pids::VisiblePids;
use super::{SILENCE, answering, list, mirror};
use crate::broker::{AttachedProcess, AttachedQuery};
use crate::command::Commander;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;
use ginnel_devices::peer_credentials::peer_credentials;
use ginnel_stack::stack::SocketHandle;
use rustix::process::{Pid, geteuid};
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// File name of the socket in the stack's directory.
pub(crate) const SOCKET: &str = "inspect";
/// File name of the socket that answers for the attached processes, if the shards run in another process than
/// the broker.
pub(crate) const PROCESSES_SOCKET: &str = "inspect-processes";

/// Request for the sockets, with the version of the answer.
const LIST: &str = "list 1";
/// Request to close sockets, with the version of the lines that follow: shard, `sk`, local address and peer
/// of a socket, separated by tabs; `.` is the last line. The answer has a line for each: 1 if the socket was
/// closed, 0 if it did not exist any more.
const KILL: &str = "kill 1";
/// Request for the attached processes, with the version of the answer.
const PROCESSES: &str = "processes 1";

/// Request for the routes, with the version of the answer: a line for each route, and `.`.
const ROUTES: &str = "routes 1";
/// Request to change the routes, with the version of the line that follows. The answer is `.`.
const CHANGE_ROUTES: &str = "change-routes 1";
/// Request for the shards, with the version of the answer: a line for each shard with its label, a tab, and 1
/// if it answers, otherwise 0; then `.`.
const ANSWERING: &str = "answering 1";
/// Bytes of the longest list of shards.
const SHARDS_BYTES_MAX: u64 = 1 << 14;
/// Bytes of the longest list of routes.
const ROUTES_BYTES_MAX: u64 = 64 << 20;

/// Bytes of the longest line of a request to close sockets, of its answer, and of a change of routes.
pub(super) const KILL_LINE_BYTES_MAX: u64 = 512;

/// Clients that are served at a time, each by a thread of its own.
const CLIENTS_MAX: usize = 8;

/// Bytes that are buffered for a client before more chunks are requested.
const BUFFER_BYTES: usize = 64 << 10;

/// Bytes of the longest list of processes.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// How long a client that is refused may take to send its request.
const REFUSAL_READ_TIMEOUT: Duration = Duration::from_millis(100);

/// How long a client may take to send its request, or to read.
pub(super) const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Labels and command senders of the shards.
type ShardList = Mutex<Vec<(String, Commander)>>;

/// The thread, and the shards that it lists.
#[derive(Debug)]
pub(crate) struct InspectServer {
    path: PathBuf,
    state: Arc<ServerState>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct ServerState {
    shards: ShardList,
    /// Set if the stack has a broker.
    attached: Mutex<Option<Arc<AttachedQuery>>>,
    /// The directory in which changed routes are saved; locked while they are changed.
    routes: Mutex<Option<PathBuf>>,
    clients: AtomicUsize,
    is_closing: AtomicBool,
    /// True while a monitor observes the stack, or connections are sampled.
    is_mirrored: AtomicBool,
}

impl InspectServer {
    /// Opens the socket in the directory of a stack.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        Self::open_at(dir.join(SOCKET))
    }

    /// Opens the socket that answers for the attached processes alone.
    pub(crate) fn open_for_processes(dir: &Path) -> io::Result<Self> {
        Self::open_at(dir.join(PROCESSES_SOCKET))
    }

    fn open_at(path: PathBuf) -> io::Result<Self> {
        let listener = UnixListener::bind(&path)?;
        let state = Arc::new(ServerState {
            routes: Mutex::new(path.parent().map(Path::to_owned)),
            ..ServerState::default()
        });
        let thread = {
            let state = state.clone();
            thread::Builder::new().name(SOCKET.into()).spawn(move || serve(&listener, &state))?
        };
        Ok(Self { path, state, thread: Some(thread) })
    }

    /// Adds a shard.
    pub(crate) fn register(&self, label: &str, shard: Commander) {
        let mut shards = self.state.shards.lock().unwrap_or_else(PoisonError::into_inner);
        shards.push((label.into(), shard));
    }

    /// Sets the broker.
    pub(crate) fn set_broker(&self, query: AttachedQuery) {
        *self.state.attached.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(query));
    }
}

impl Drop for InspectServer {
    fn drop(&mut self) {
        self.state.is_closing.store(true, Ordering::Relaxed);
        // Wakes the thread from accept(2). If no connection is possible, the thread is left to the end of the
        // process.
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
            // No descriptor is left; some may be free again soon.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if state.clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            state.clients.fetch_sub(1, Ordering::Relaxed);
            refuse(client);
            continue;
        }
        let thread_state = state.clone();
        let result = thread::Builder::new().name("inspect-client".into()).spawn(move || {
            // Fails if the client is gone or does not read.
            let _ = answer(&client, &thread_state);
            // Must precede the end of the connection: a client that sees the end may send its next request.
            thread_state.clients.fetch_sub(1, Ordering::Relaxed);
            drop(client);
        });
        if result.is_err() {
            state.clients.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Tells a client that it cannot be served. Does not block for long, because the answer fits into the
/// socket's buffer.
fn refuse(mut client: UnixStream) {
    let _ = client.set_read_timeout(Some(REFUSAL_READ_TIMEOUT));
    // If the request stayed unread, the client would get `ECONNRESET` after the answer.
    let _ = client.read(&mut [0; 64]);
    let _ = writeln!(client, "!\t{CLIENTS_MAX} other clients are being served");
}

fn answer(mut client: &UnixStream, state: &ServerState) -> io::Result<()> {
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let mut request = String::new();
    let mut lines = BufReader::new(client);
    lines.by_ref().take(64).read_line(&mut request)?;
    match request.trim_end() {
        LIST => {}
        PROCESSES => return client.write_all(format_processes(state).as_bytes()),
        KILL => return kill(client, lines, state),
        ROUTES => return list_routes(client, state),
        ANSWERING => return list_answering(client, state),
        CHANGE_ROUTES => return change_routes(client, lines, state),
        request if request.starts_with(MIRROR) => {
            let shards = state.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
            return mirror::serve(client, &request[MIRROR.len()..], &shards, &state.is_mirrored);
        }
        request if request.starts_with(STAGES) => {
            if let Some(refusal) = refusal_of_user(client, "sample connections")? {
                return client.write_all(refusal.as_bytes());
            }
            let shards = state.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
            return stage_request::serve(
                (client, lines),
                &request[STAGES.len()..],
                &shards,
                &state.is_mirrored,
            );
        }
        _ => {
            let known = [LIST, PROCESSES, KILL, ROUTES, CHANGE_ROUTES, ANSWERING].join("\", \"");
            return writeln!(client, "!\tthe requests are \"{known}\"");
        }
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

/// Returns the refusal of a client that is neither the stack's user nor root.
fn refusal_of_user(client: &UnixStream, action: &str) -> io::Result<Option<String>> {
    let (own_uid, uid) = (geteuid().as_raw(), peer_credentials(client)?.uid);
    let is_allowed = uid == own_uid || uid == 0;
    Ok((!is_allowed).then(|| format!("!\tonly user {own_uid} and root may {action} of this stack\n")))
}

fn list_answering(mut client: &UnixStream, state: &ServerState) -> io::Result<()> {
    let shards = state.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let lines = shards.iter().zip(answering(&shards));
    let text: String =
        lines.map(|((label, _), answers)| format!("{label}\t{}\n", u8::from(answers))).collect();
    client.write_all((text + ".\n").as_bytes())
}

/// Returns the labels of the shards of the stack with this directory, each with true if the shard answers
/// within a second.
///
/// # Errors
/// `TimedOut` if the process of the shards does not answer, because it is stopped or overloaded. Otherwise
/// the stack does not run, serves too many other clients, or is of a version that does not tell.
pub fn answering_shards(dir: &Path) -> io::Result<Vec<(String, bool)>> {
    let mut client = UnixStream::connect(dir.join(SOCKET))?;
    client.set_read_timeout(Some(2 * SILENCE))?;
    writeln!(client, "{ANSWERING}")?;
    let mut text = String::new();
    let read = client.take(SHARDS_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => e,
    })?;
    let parse = |line: &str| {
        let (label, answers) = line.split_once('\t')?;
        Some((label.to_owned(), answers == "1"))
    };
    let lines = text.strip_suffix(".\n").and_then(|text| text.lines().map(parse).collect());
    lines.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, text.trim_end().to_owned()))
}

fn list_routes(mut client: &UnixStream, state: &ServerState) -> io::Result<()> {
    let shards = state.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match routes::request(&shards, None) {
        Err(problem) => writeln!(client, "!\t{problem}"),
        Ok(RouteAnswer { routes, .. }) => {
            let text: String = routes.iter().map(|route| format!("{route}\n")).collect();
            client.write_all((text + ".\n").as_bytes())
        }
    }
}

/// Changes the routes as the client's line says, and saves them for the next process of the shards.
fn change_routes(
    mut client: &UnixStream,
    mut lines: BufReader<&UnixStream>,
    state: &ServerState,
) -> io::Result<()> {
    if let Some(refusal) = refusal_of_user(client, "change routes")? {
        return client.write_all(refusal.as_bytes());
    }
    let mut line = String::new();
    lines.by_ref().take(KILL_LINE_BYTES_MAX).read_line(&mut line)?;
    let Ok(change) = line.trim_end_matches('\n').parse::<RouteChange>() else {
        return writeln!(client, "!\tmalformed line: {:?}", line.trim_end());
    };
    let shards = state.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
    // One change at a time, so that what is saved is the last one.
    let saved = state.routes.lock().unwrap_or_else(PoisonError::into_inner);
    match routes::request(&shards, Some(&change)) {
        Err(problem) => writeln!(client, "!\t{problem}"),
        Ok(RouteAnswer { routes: present, unchanged }) => {
            if let Some(directory) = saved.as_deref()
                && let Err(error) = routes::save(directory, &present)
            {
                let at = directory.display();
                return writeln!(client, "!\tchanged, but lost at the next restart: {at}: {error}");
            }
            if !unchanged.is_empty() {
                let shards = unchanged.join("; ");
                return writeln!(
                    client,
                    "!\tchanged, but not on all shards (repeat it with \"replace\"): {shards}"
                );
            }
            client.write_all(b".\n")
        }
    }
}

/// A connection to a stack for its routes. Each method is one request.
#[derive(Debug)]
pub struct RouteClient(BufReader<UnixStream>);

impl RouteClient {
    /// Connects to the stack with this directory.
    ///
    /// # Errors
    /// The stack does not accept the connection.
    pub fn connect(dir: &Path) -> io::Result<Self> {
        let client = UnixStream::connect(dir.join(SOCKET))?;
        client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        Ok(Self(BufReader::new(client)))
    }

    /// Returns all routes, those of IPv4 first, longest prefixes first.
    ///
    /// # Errors
    /// The stack does not answer, or its answer is malformed.
    pub fn list(mut self) -> io::Result<Vec<ListedRoute>> {
        writeln!(self.0.get_mut(), "{ROUTES}")?;
        let malformed =
            |line: &str| io::Error::new(io::ErrorKind::InvalidData, format!("malformed answer: {line:?}"));
        let text = self.answer()?;
        text.lines().map(|line| line.parse().map_err(|()| malformed(line))).collect()
    }

    /// Changes the routes. Connections use the new ones at once.
    ///
    /// # Errors
    /// The stack refuses the change, or does not answer.
    pub fn change(mut self, change: &RouteChange) -> io::Result<()> {
        // Fails after a refusal, which the answer tells.
        let _ = writeln!(self.0.get_mut(), "{CHANGE_ROUTES}\n{change}");
        self.answer().map(drop)
    }

    /// Returns the answer without its last line.
    fn answer(&mut self) -> io::Result<String> {
        let mut text = String::new();
        self.0.by_ref().take(ROUTES_BYTES_MAX).read_to_string(&mut text).map_err(explain_timeout)?;
        if let Some(problem) = text.strip_prefix("!\t") {
            return Err(io::Error::other(problem.trim_end().to_owned()));
        }
        let end = || io::Error::from(io::ErrorKind::UnexpectedEof);
        text.strip_suffix(".\n").map(str::to_owned).ok_or_else(end)
    }
}

/// Closes the sockets that the client names.
fn kill(mut client: &UnixStream, mut lines: BufReader<&UnixStream>, state: &ServerState) -> io::Result<()> {
    if let Some(refusal) = refusal_of_user(client, "close sockets")? {
        return client.write_all(refusal.as_bytes());
    }
    let shards = state.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut line = String::new();
    loop {
        line.clear();
        lines.by_ref().take(KILL_LINE_BYTES_MAX).read_line(&mut line)?;
        if line == ".\n" {
            return client.write_all(b".\n");
        }
        let Some((label, handle, ends)) = parse_kill(&line) else {
            return writeln!(client, "!\tmalformed line: {:?}", line.trim_end());
        };
        let Some((_, shard)) = shards.iter().find(|(known, _)| known == label) else {
            return writeln!(client, "!\tthere is no shard {label:?}");
        };
        match super::destroy(shard, vec![(handle, ends)]) {
            Ok(closed) => writeln!(client, "{}", u8::from(closed.first() == Some(&true)))?,
            Err(problem) => return writeln!(client, "!\tshard {label} {problem}"),
        }
    }
}

/// Parses a line of the requests [`KILL`] and [`STAGES`].
pub(super) fn parse_kill(line: &str) -> Option<(&str, SocketHandle, [SocketAddr; 2])> {
    let mut cells = line.strip_suffix('\n')?.split('\t');
    let label = cells.next()?;
    let handle = line::parse_handle(cells.next()?)?;
    let ends = [cells.next()?.parse().ok()?, cells.next()?.parse().ok()?];
    cells.next().is_none().then_some((label, handle, ends))
}

/// A connection to a stack for closing sockets. Dropping it ends the request.
#[derive(Debug)]
pub struct SocketCloser(BufReader<UnixStream>);

impl SocketCloser {
    /// Connects to the stack with this directory.
    ///
    /// # Errors
    /// The stack does not accept the connection.
    pub fn connect(dir: &Path) -> io::Result<Self> {
        let mut client = UnixStream::connect(dir.join(SOCKET))?;
        client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        writeln!(client, "{KILL}")?;
        Ok(Self(BufReader::new(client)))
    }

    /// Closes a socket, which the fields `shard`, `sk`, `local` and `peer` of a listing name. The program
    /// gets `ECONNABORTED`, and the peer of a connection RST. Returns false if the socket does not exist any
    /// more.
    ///
    /// # Errors
    /// The stack refuses the request, or does not answer.
    pub fn close(
        &mut self,
        shard: &str,
        handle: &str,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> io::Result<bool> {
        // Fails after a refusal, which the next line tells.
        let sent = writeln!(self.0.get_mut(), "{shard}\t{handle}\t{local}\t{peer}");
        let mut line = String::new();
        self.0.by_ref().take(KILL_LINE_BYTES_MAX).read_line(&mut line).map_err(explain_timeout)?;
        match line.trim_end() {
            "1" => Ok(true),
            "0" => Ok(false),
            "" => Err(sent.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into())),
            other => Err(io::Error::other(other.strip_prefix("!\t").unwrap_or(other).to_owned())),
        }
    }
}

/// Writes a line for each attached process.
fn format_processes(state: &ServerState) -> String {
    let mut text = String::new();
    let query = state.attached.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for AttachedProcess { pid, since_ms } in query.iter().flat_map(|query| query.fetch()) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{pid}\t{since_ms}");
    }
    text.push_str(".\n");
    text
}

/// Connects to the process that owns the stack with this directory.
fn connect_to_owner(dir: &Path) -> io::Result<UnixStream> {
    match UnixStream::connect(dir.join(PROCESSES_SOCKET)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => UnixStream::connect(dir.join(SOCKET)),
        connected => connected,
    }
}

/// Returns the process that owns the stack with this directory, by its id in the PID namespace of the caller.
/// Returns `None` if the process is not visible there. The file that the stack has written has the number in
/// the namespace of the stack.
///
/// # Errors
/// No process accepts connections.
pub fn owner_pid(dir: &Path) -> io::Result<Option<Pid>> {
    Ok(peer_credentials(connect_to_owner(dir)?)?.pid)
}

/// Returns the processes that are attached to the stack with this directory, in the order of their admission.
/// Their ids are those in the PID namespace of the caller, 0 for those that are not visible there.
///
/// # Errors
/// The stack does not answer, or its answer is malformed.
pub fn list_processes(dir: &Path) -> io::Result<Vec<AttachedProcess>> {
    let mut client = connect_to_owner(dir)?;
    let owner = peer_credentials(&client)?.pid;
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    writeln!(client, "{PROCESSES}")?;
    let mut text = String::new();
    client.take(ANSWER_BYTES_MAX).read_to_string(&mut text).map_err(explain_timeout)?;
    let malformed =
        || io::Error::new(io::ErrorKind::InvalidData, format!("malformed answer: {:?}", text.trim_end()));
    let lines = text.strip_suffix(".\n").ok_or_else(malformed)?.lines();
    let parse = |line: &str| {
        let (pid, since_ms) = line.split_once('\t')?;
        Some(AttachedProcess { pid: pid.parse().ok()?, since_ms: since_ms.parse().ok()? })
    };
    let mut processes =
        lines.map(|line| parse(line).ok_or_else(malformed)).collect::<io::Result<Vec<_>>>()?;
    let pids = VisiblePids::of_stack(owner);
    processes.iter_mut().for_each(|process| process.pid = pids.translate(process.pid));
    Ok(processes)
}

/// Replaces the error of a read that timed out, which is that of a non-blocking socket.
pub fn explain_timeout(error: io::Error) -> io::Error {
    if error.kind() != io::ErrorKind::WouldBlock {
        return error;
    }
    let seconds = CLIENT_TIMEOUT.as_secs();
    let text = format!("no answer within {seconds} s: the stack's process is stopped or overloaded");
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// Requests the sockets of the stack with this directory. The first line of the answer has the names of the
/// fields. A line that begins with `!` is an error, and the last line is `.`.
///
/// # Errors
/// The stack does not accept the connection.
pub fn list_sockets(dir: &Path) -> io::Result<UnixStream> {
    let mut client = UnixStream::connect(dir.join(SOCKET))?;
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    writeln!(client, "{LIST}")?;
    Ok(client)
}
