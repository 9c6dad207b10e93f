//! The kernel's end of the connections: threads with blocking sockets that follow a plan.

use crate::case::{Case, Client};
use crate::plan::{Ended, Finish, Info, Outcome, Plan};
use crate::stream::{Stream, Verifier};
use ginnel_testkit::interop::{Namespace, kernel_info, reset_on_close};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

/// Bytes that fit any send buffer, so that a thread that has not begun to read cannot block on them forever.
const SMALL: u64 = 16 << 10;
const BUFFER: usize = 256 << 10;
const STACK: usize = 128 << 10;

/// The kernel's end; clones share their state.
#[derive(Clone)]
pub struct KernelEnd {
    shared: Arc<Shared>,
}

struct Shared {
    plan: Plan,
    outgoing: Stream,
    incoming: Stream,
    report: Sender<Outcome>,
    /// Time-out of every blocking call.
    limit: Duration,
    /// Open sockets, for descriptions and to be shut down at the end of the case. The references do not keep
    /// a socket open.
    open: Mutex<Vec<Weak<TcpStream>>>,
    listener: Mutex<Option<TcpListener>>,
}

impl KernelEnd {
    pub fn new(case: &Case, report: Sender<Outcome>) -> Self {
        let (outgoing, incoming) = match case.client == Client::Ginnel {
            true => (Stream::Response, Stream::Request),
            false => (Stream::Request, Stream::Response),
        };
        let (open, listener) = (Mutex::default(), Mutex::default());
        let Case { kernel: plan, limit, .. } = *case;
        Self { shared: Arc::new(Shared { plan, outgoing, incoming, report, limit, open, listener }) }
    }

    /// Accepts connections until [`KernelEnd::stop`].
    pub fn serve(&self, namespace: &Namespace, address: SocketAddr) -> io::Result<()> {
        let listener = namespace.run(|| TcpListener::bind(address))?;
        // std's backlog is smaller than the bursts of connections that tests open.
        rustix::net::listen(&listener, 4096)?;
        *self.shared.listener.lock().expect("no panic while held") = Some(listener.try_clone()?);
        let end = self.clone();
        let accept = move || {
            while let Ok((stream, _)) = listener.accept() {
                let end = end.clone();
                let converse = move || end.shared.run_connection(stream);
                if let Err(e) = thread::Builder::new().stack_size(STACK).spawn(converse) {
                    eprintln!("interop: a thread for a connection: {e}");
                }
            }
        };
        thread::Builder::new().stack_size(STACK).spawn(accept).map(drop)
    }

    /// Opens `count` connections, `parallel` at a time.
    pub fn connect(
        &self,
        namespace: &Arc<Namespace>,
        to: SocketAddr,
        count: usize,
        parallel: usize,
    ) -> io::Result<()> {
        let opened = Arc::new(AtomicUsize::new(0));
        for _ in 0..parallel.min(count) {
            let (end, namespace, opened) = (self.clone(), namespace.clone(), opened.clone());
            let work = move || {
                if let Err(e) = namespace.enter() {
                    return eprintln!("interop: entering the namespace: {e}");
                }
                drop(namespace);
                while opened.fetch_add(1, Ordering::Relaxed) < count {
                    match TcpStream::connect(to) {
                        Ok(stream) => end.shared.run_connection(stream),
                        Err(e) => end.shared.failed(&e),
                    }
                }
            };
            thread::Builder::new().stack_size(STACK).spawn(work)?;
        }
        Ok(())
    }

    /// Describes up to eight open connections by their `tcp_info`.
    pub fn describe(&self) -> String {
        let open = self.shared.open.lock().expect("no panic while held");
        let streams: Vec<_> = open.iter().filter_map(Weak::upgrade).collect();
        let mut text = format!("  {} connections open\n", streams.len());
        for stream in streams.iter().take(8) {
            let ends = (stream.local_addr().ok(), stream.peer_addr().ok());
            text += &format!("  {ends:?} {}\n", info(stream).text);
        }
        text
    }

    /// Shuts all sockets down, so that all threads end.
    pub fn stop(&self) {
        if let Some(listener) = self.shared.listener.lock().expect("no panic while held").take() {
            // Wakes `accept`.
            let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
        }
        for stream in self.shared.open.lock().expect("no panic while held").iter().filter_map(Weak::upgrade) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Progress of the plan on one connection.
struct PlanRun<'a> {
    shared: &'a Shared,
    stream: &'a TcpStream,
    incoming: Verifier,
    paused: bool,
}

impl Shared {
    fn failed(&self, error: &io::Error) {
        let outcome = Outcome {
            sent: 0,
            received: 0,
            digest: Verifier::new(self.incoming).digest(),
            mismatch: None,
            ended: ended(error),
            info: Info::default(),
        };
        let _ = self.report.send(outcome);
    }

    fn run_connection(&self, stream: TcpStream) {
        let stream = Arc::new(stream);
        {
            let mut open = self.open.lock().expect("no panic while held");
            if open.len() == open.capacity() {
                open.retain(|stream| stream.strong_count() > 0);
            }
            open.push(Arc::downgrade(&stream));
        }
        let outcome = self.follow_plan(&stream).unwrap_or_else(|e| {
            eprintln!("interop: setting up a socket: {e}");
            panic!("a socket of the kernel cannot be set up")
        });
        drop(stream);
        let _ = self.report.send(outcome);
    }

    fn follow_plan(&self, stream: &TcpStream) -> io::Result<Outcome> {
        stream.set_read_timeout(Some(self.limit))?;
        stream.set_write_timeout(Some(self.limit))?;
        let mut talk =
            PlanRun { shared: self, stream, incoming: Verifier::new(self.incoming), paused: false };
        let sent = AtomicU64::new(0);
        let result = talk.follow_plan(&sent);
        let info = info(stream);
        let ended = match (result, self.plan.finish) {
            (Ok(()), Finish::Fin) => Ended::Fin,
            (Ok(()), Finish::Close) => Ended::Closed,
            (Ok(()), Finish::Reset) => {
                reset_on_close(stream)?;
                Ended::Aborted
            }
            (Err(e), _) => ended(&e),
        };
        Ok(Outcome {
            sent: sent.into_inner(),
            received: talk.incoming.received(),
            mismatch: talk.incoming.mismatch(),
            digest: talk.incoming.digest(),
            ended,
            info,
        })
    }

    fn send_all(&self, mut stream: &TcpStream, sent: &AtomicU64) -> io::Result<()> {
        let mut offset = 0;
        while offset < self.plan.send {
            let piece = self.outgoing.piece(offset, (self.plan.send - offset).min(BUFFER as u64));
            match stream.write(piece) {
                Ok(taken) => offset += taken as u64,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            sent.store(offset, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Sends FIN. After a reset the socket is not connected any more, and reading returns the error.
fn send_fin(stream: &TcpStream) -> io::Result<()> {
    stream
        .shutdown(Shutdown::Write)
        .or_else(|e| if e.kind() == ErrorKind::NotConnected { Ok(()) } else { Err(e) })
}

impl PlanRun<'_> {
    fn follow_plan(&mut self, sent: &AtomicU64) -> io::Result<()> {
        let (shared, stream, plan) = (self.shared, self.stream, self.shared.plan);
        if plan.answer_after_fin {
            self.read(u64::MAX)?;
            shared.send_all(stream, sent)?;
            return send_fin(stream);
        }
        // Without a condition to wait for, both directions proceed concurrently until their ends.
        let independent = plan.finish == Finish::Fin && plan.finish_after == 0;
        let write = || {
            shared.send_all(stream, sent)?;
            if independent { send_fin(stream) } else { Ok(()) }
        };
        let until = if independent { u64::MAX } else { plan.finish_after };
        if plan.send <= SMALL {
            write()?;
            self.read(until)?;
        } else {
            thread::scope(|scope| {
                let writer = scope.spawn(write);
                let read = self.read(until);
                // Either direction may detect a reset first; the error is the result.
                writer.join().expect("the writer does not panic").and(read)
            })?;
        }
        if plan.finish == Finish::Fin && !independent {
            send_fin(stream)?;
            self.read(u64::MAX)?;
        }
        Ok(())
    }

    /// Reads until FIN, or until `until` bytes have been received.
    fn read(&mut self, until: u64) -> io::Result<()> {
        let mut stream = self.stream;
        let mut buffer = vec![0; BUFFER];
        while self.incoming.received() < until {
            let mut bytes_left = BUFFER as u64;
            if let Some(pause) = self.shared.plan.pause.filter(|_| !self.paused) {
                bytes_left = bytes_left.min(pause.after - self.incoming.received());
                if bytes_left == 0 {
                    self.paused = true;
                    thread::sleep(pause.time);
                    continue;
                }
            }
            match stream.read(&mut buffer[..bytes_left.min(until - self.incoming.received()) as usize]) {
                Ok(0) => return Ok(()),
                Ok(count) => self.incoming.take(&buffer[..count]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

fn ended(error: &io::Error) -> Ended {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Ended::Reset,
        ErrorKind::ConnectionRefused => Ended::Refused,
        ErrorKind::TimedOut => Ended::TimedOut,
        ErrorKind::WouldBlock => Ended::Otherwise("a call of the kernel's socket blocked too long"),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Ended::Otherwise("unreachable"),
        _ => Ended::Otherwise("another error of the kernel's socket"),
    }
}

/// Returns the kernel's view of a connection.
fn info(stream: &TcpStream) -> Info {
    let Ok(fields) = kernel_info(stream) else { return Info::default() };
    let field = |name: &str| fields.get(name).copied().unwrap_or(0);
    let option = |bit: i64| field("tcpi_options") & bit != 0;
    let mut text = String::new();
    for (name, value) in fields.iter().filter(|(_, value)| **value != 0) {
        text += &format!("{} {value} ", name.trim_start_matches("tcpi_"));
    }
    Info {
        timestamps: option(1),
        sack: option(2),
        window_scaling: option(4),
        ecn: option(8),
        retransmits: field("tcpi_total_retrans") as u32,
        path_mtu: field("tcpi_pmtu") as u32,
        segment_bytes: field("tcpi_snd_mss") as u32,
        text,
    }
}
