//! Clients of the service: connections that live long, each with a request every 50 ms, and new connections
//! one after another.

use crate::network::{HOSTS, Network};
use ginnel_testkit::interop::Namespace;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Number of connections that live long.
const CONNECTIONS: usize = 60;
/// Number of threads that open new connections.
const NEWCOMERS: usize = 4;
/// Time between two requests of a connection, and between two new connections of a thread.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time after which a new connection has failed.
const NEWCOMER_TIMEOUT: Duration = Duration::from_millis(200);
/// No state is waited for longer.
const TIMEOUT: Duration = Duration::from_secs(60);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The end of a connection that had lived long.
pub struct End {
    /// The host that served the connection.
    pub host: usize,
    pub reason: String,
}

/// A connection that lives long, and is opened again when it ends.
#[derive(Default)]
struct Client {
    /// The host that serves the connection; 0 while there is none.
    host: AtomicUsize,
    answers: AtomicU64,
}

/// The state that the threads of the load share.
struct Shared {
    is_done: AtomicBool,
    clients: Vec<Client>,
    ends: Mutex<Vec<End>>,
    last_failure: Mutex<Option<Instant>>,
    /// When a new connection that the host served was begun last; by the number of the host.
    newcomers: Mutex<[Option<Instant>; HOSTS + 1]>,
}

/// The running clients. Dropping the value ends them.
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts the clients and waits until each connection has been answered.
    pub fn start(network: &Network) -> Self {
        let shared = Arc::new(Shared {
            is_done: AtomicBool::new(false),
            clients: (0..CONNECTIONS).map(|_| Client::default()).collect(),
            ends: Mutex::default(),
            last_failure: Mutex::default(),
            newcomers: Mutex::default(),
        });
        let threads = (0..CONNECTIONS + NEWCOMERS)
            .map(|number| {
                let shared = Arc::clone(&shared);
                spawn_in(&network.client, move || match shared.clients.get(number) {
                    Some(client) => serve_client(&shared, client),
                    None => open_connections(&shared),
                })
            })
            .collect();
        let load = Self { shared, threads };
        load.wait_until_all_answered();
        load
    }

    /// Returns the number of connections that a host serves.
    pub fn connections_of(&self, host: usize) -> usize {
        self.shared.clients.iter().filter(|client| client.host.load(Relaxed) == host).count()
    }

    /// Waits until each connection has got ten more answers.
    #[track_caller]
    pub fn wait_until_all_answered(&self) {
        let answers = |client: &Client| client.answers.load(Relaxed);
        let before: Vec<u64> = self.shared.clients.iter().map(answers).collect();
        self.wait_until("all connections are answered", |load| {
            load.shared.clients.iter().zip(&before).all(|(client, before)| answers(client) >= before + 10)
        });
    }

    /// Waits for a state.
    #[track_caller]
    pub fn wait_until(&self, what: &str, so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !so(self) {
            assert!(Instant::now() < deadline, "{what}: not in time");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Takes the ends of connections since the last call.
    pub fn take_ends(&self) -> Vec<End> {
        std::mem::take(&mut *lock(&self.shared.ends))
    }

    /// Returns when the last new connection failed, if one has failed since `since`.
    pub fn last_failure_since(&self, since: Instant) -> Option<Instant> {
        lock(&self.shared.last_failure).filter(|failure| *failure >= since)
    }

    /// Returns whether a host has served a connection that was begun after `since`.
    pub fn new_connection_since(&self, host: usize, since: Instant) -> bool {
        lock(&self.shared.newcomers)[host].is_some_and(|begun| begun > since)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.is_done.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Runs `work` on a new thread in the namespace.
fn spawn_in(namespace: &Namespace, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let spawn = || {
        // A thread inherits the namespace of the thread that starts it.
        Ok(thread::spawn(work))
    };
    namespace.run(spawn).unwrap()
}

/// Connects to the service. `timeout` limits this and each request.
fn connect(timeout: Duration) -> io::Result<TcpStream> {
    let service = SocketAddr::from(([203, 0, 113, 10], 80));
    let stream = TcpStream::connect_timeout(&service, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Sends a request and returns the number of the host that answered.
fn request(stream: &mut TcpStream) -> io::Result<usize> {
    stream.write_all(b"GET / HTTP/1.1\r\nHost: service\r\n\r\n")?;
    let mut answer = String::new();
    let mut buffer = [0; 512];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => answer += &String::from_utf8_lossy(&buffer[..len]),
        }
        if let Some((_, body)) = answer.split_once("\r\n\r\nhost")
            && let Some(number) = body.strip_suffix('\n')
        {
            return number.parse().map_err(|_| io::Error::other(answer));
        }
    }
}

/// Keeps a connection, and opens it again when it ends.
fn serve_client(shared: &Shared, client: &Client) {
    while !shared.is_done.load(Relaxed) {
        let Ok(mut stream) = connect(NEWCOMER_TIMEOUT) else { continue };
        // Only the first answer has a short limit: a connection that has lived waits until it ends.
        let mut answer = request(&mut stream);
        let _ = stream.set_read_timeout(Some(TIMEOUT));
        while let Ok(host) = answer {
            client.host.store(host, Relaxed);
            client.answers.fetch_add(1, Relaxed);
            if shared.is_done.load(Relaxed) {
                return;
            }
            thread::sleep(INTERVAL);
            answer = request(&mut stream);
        }
        let host = client.host.swap(0, Relaxed);
        if let (Err(error), 1..) = (answer, host) {
            lock(&shared.ends).push(End { host, reason: error.to_string() });
        }
    }
}

/// Opens one connection after another, with a request each.
fn open_connections(shared: &Shared) {
    while !shared.is_done.load(Relaxed) {
        let begun = Instant::now();
        match connect(NEWCOMER_TIMEOUT).and_then(|mut stream| request(&mut stream)) {
            Ok(host) => lock(&shared.newcomers)[host] = Some(begun),
            Err(_) => *lock(&shared.last_failure) = Some(begun),
        }
        thread::sleep(INTERVAL);
    }
}
