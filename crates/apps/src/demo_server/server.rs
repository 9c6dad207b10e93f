//! The server: sessions, and what the events of their connections mean.

mod answer;
mod relay;
mod session;

use super::counters::WorkerCounters;
use super::options::DemoServerOptions;
use crate::httpd::body::BodyReader;
use crate::httpd::head::{self, HEADERS_MAX, Limits, Method, Scanner, Version};
use crate::sweep::Sweep;
use core::fmt;
use core::mem::MaybeUninit;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::Instant;
use session::{BackendConn, ClientSession, RequestState, ResponseState};
use std::sync::Arc;

/// Time after which a session without activity is reset.
const IDLE: Duration = Duration::from_secs(60);
/// Time that a client has to close its side after the last response.
const LINGER: Duration = Duration::from_secs(5);

/// A function that writes the lines of `--debug`.
pub type Trace = Arc<dyn Fn(fmt::Arguments<'_>) + Send + Sync>;

/// The connections of a worker, whatever the stack. Calls for a connection that has ended have no effect; its
/// end is, or will be, reported.
pub trait StackConnections<C> {
    /// Opens a connection. Its events carry `token`. Returns `None` if the stack refuses at once.
    fn connect(&mut self, to: SocketAddr, token: u32) -> Option<C>;
    /// Sends bytes, and returns how many were accepted. If that is not all, `writable` follows.
    fn send(&mut self, conn: C, bytes: &[u8]) -> usize;
    /// Sends FIN after the accepted bytes.
    fn finish(&mut self, conn: C);
    /// Closes a connection after the accepted bytes.
    fn close(&mut self, conn: C);
    /// Resets a connection.
    fn abort(&mut self, conn: C);
    /// Delivers again the bytes that were not consumed.
    fn resume_reading(&mut self, conn: C);
}

/// The server of one worker. `C` is the stack's handle of a connection: it never stands for a later one.
pub struct DemoCore<C> {
    sessions: Vec<ClientSession<C>>,
    /// Vacant slots.
    vacant: Vec<u32>,
    sweep: Sweep,
    second: u32,
    keepalive: bool,
    backends: Vec<SocketAddr>,
    next_backend: usize,
    counters: Arc<WorkerCounters>,
    trace: Option<Trace>,
}

impl<C: Copy + PartialEq + fmt::Debug> DemoCore<C> {
    /// Creates the server of worker `worker`. `trace` gets the lines of `--debug`.
    pub fn new(
        options: &DemoServerOptions,
        worker: usize,
        counters: Arc<WorkerCounters>,
        trace: Option<Trace>,
        now: Instant,
    ) -> Self {
        let second = second_of(now);
        Self {
            sessions: Vec::new(),
            vacant: Vec::new(),
            sweep: Sweep::new(LINGER.as_secs() as u32, second),
            second,
            keepalive: options.keepalive,
            backends: options.backend.clone(),
            // Workers begin with different backends, so that few clients are spread, too.
            next_backend: worker,
            counters,
            trace,
        }
    }

    fn trace(&self, line: fmt::Arguments<'_>) {
        if let Some(trace) = &self.trace {
            trace(line);
        }
    }

    /// Takes a new connection of a client, and returns the token of its events.
    pub fn accepted(&mut self, conn: C) -> u32 {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.sessions.push(ClientSession::vacant());
            // There are fewer connections than 2^31.
            (self.sessions.len() - 1) as u32
        });
        let deadline = self.second + IDLE.as_secs() as u32;
        let session = &mut self.sessions[slot as usize];
        (session.client, session.deadline) = (Some(conn), deadline);
        if !core::mem::replace(&mut session.in_sweep, true) {
            self.sweep.enter(slot, deadline);
        }
        self.counters.connections.add(1);
        self.counters.open.add(1);
        self.trace(format_args!("accepted {conn:?}"));
        slot << 1
    }

    /// Returns the session of an event, and whether the event is the backend's. `None` if the session has
    /// ended, or the connection does not belong to it any more.
    fn session_of(&self, token: u32, conn: C) -> Option<(usize, bool)> {
        let (slot, is_backend) = ((token >> 1) as usize, token & 1 != 0);
        let session = self.sessions.get(slot)?;
        let current = if is_backend { session.backend.conn() } else { session.client };
        (current == Some(conn)).then_some((slot, is_backend))
    }

    /// A connection to a backend is established.
    pub fn connected(&mut self, token: u32, conn: C, net: &mut impl StackConnections<C>) {
        let Some((slot, true)) = self.session_of(token, conn) else { return };
        self.touch(slot);
        self.sessions[slot].backend = BackendConn::Connected(conn);
        self.flush_backend(slot, net);
        self.end_turn(slot, net);
    }

    /// Bytes arrived; returns how many were consumed. The rest must be delivered again.
    pub fn data(&mut self, token: u32, conn: C, bytes: &[u8], net: &mut impl StackConnections<C>) -> usize {
        let Some((slot, is_backend)) = self.session_of(token, conn) else { return bytes.len() };
        self.touch(slot);
        let used =
            if is_backend { self.backend_data(slot, bytes, net) } else { self.client_data(slot, bytes, net) };
        self.end_turn(slot, net);
        used
    }

    /// A connection accepts bytes again.
    pub fn writable(&mut self, token: u32, conn: C, net: &mut impl StackConnections<C>) {
        let Some((slot, is_backend)) = self.session_of(token, conn) else { return };
        self.touch(slot);
        if is_backend {
            self.flush_backend(slot, net);
        } else {
            self.flush_client(slot, net);
        }
        self.end_turn(slot, net);
    }

    /// The peer sent FIN, and all its bytes were consumed.
    pub fn peer_closed(&mut self, token: u32, conn: C, net: &mut impl StackConnections<C>) {
        let Some((slot, is_backend)) = self.session_of(token, conn) else { return };
        let session = &mut self.sessions[slot];
        if is_backend {
            match session.response {
                ResponseState::Idle => self.drop_backend(slot, net),
                ResponseState::UntilClose => self.response_complete(slot, net),
                _ => self.backend_failed(slot, net),
            }
        } else {
            session.has_client_ended = true;
            (session.has_unread, session.must_drain) = (false, false);
            match session.request {
                // The response is still sent.
                RequestState::Answering => {}
                // What is left of a response is still sent.
                RequestState::Ended | RequestState::Head(_) if !session.client_out.is_empty() => {
                    session.is_closing = true;
                }
                _ => self.end_client(slot, net),
            }
        }
        self.end_turn(slot, net);
    }

    /// A connection has ended, or could not be opened.
    pub fn closed(&mut self, token: u32, conn: C, net: &mut impl StackConnections<C>) {
        let Some((slot, is_backend)) = self.session_of(token, conn) else { return };
        if is_backend {
            let was_idle = matches!(self.sessions[slot].response, ResponseState::Idle);
            self.sessions[slot].backend = BackendConn::None;
            if !was_idle {
                self.backend_failed(slot, net);
            }
            self.end_turn(slot, net);
        } else {
            self.sessions[slot].client = None;
            self.release(slot, net);
        }
    }

    /// Resets sessions without activity. Must be called about once a second.
    pub fn tick(&mut self, now: Instant, net: &mut impl StackConnections<C>) {
        self.second = second_of(now);
        while let Some(slot) = self.sweep.take_due(self.second) {
            let index = slot as usize;
            if let Some(client) = self.sessions[index].client
                && self.sessions[index].deadline <= self.second
            {
                self.counters.timeouts.add(1);
                self.trace(format_args!("timeout of {client:?}"));
                net.abort(client);
                self.sessions[index].client = None;
                self.release(index, net);
            }
            let session = &mut self.sessions[index];
            session.in_sweep = session.client.is_some();
            if session.in_sweep {
                self.sweep.enter(slot, session.deadline);
            }
        }
    }

    fn touch(&mut self, slot: usize) {
        if !self.sessions[slot].is_shut {
            self.sessions[slot].deadline = self.second + IDLE.as_secs() as u32;
        }
    }

    /// Consumes bytes of a client.
    fn client_data(&mut self, slot: usize, bytes: &[u8], net: &mut impl StackConnections<C>) -> usize {
        let mut used = 0;
        loop {
            let session = &mut self.sessions[slot];
            let rest = &bytes[used..];
            session.has_unread = !rest.is_empty();
            if session.client.is_none() {
                return bytes.len();
            }
            match session.request {
                RequestState::Ended => return bytes.len(),
                RequestState::Answering => return used,
                _ if rest.is_empty() => return used,
                // The client has to read responses first.
                RequestState::Head(_) if !session.client_out.is_empty() => return used,
                RequestState::Head(scanner) => used += self.request_head(slot, scanner, rest, net),
                RequestState::Body(reader) => match self.request_body(slot, reader, rest, net) {
                    0 => return used,
                    n => used += n,
                },
            }
        }
    }

    /// Consumes bytes of a request's head, at least one.
    fn request_head(
        &mut self,
        slot: usize,
        mut scanner: Scanner,
        bytes: &[u8],
        net: &mut impl StackConnections<C>,
    ) -> usize {
        let session = &mut self.sessions[slot];
        session.to_head = false;
        let mut head = core::mem::take(&mut session.request_head);
        let before = head.len();
        let whole = if before == 0 {
            bytes
        } else {
            head.extend_from_slice(bytes);
            &head
        };
        let used = match scanner.find_end(whole, &Limits::default()) {
            Err(status) => {
                self.refuse(slot, status.line(), net);
                bytes.len()
            }
            Ok(Some(end)) => {
                self.begin_request(slot, &whole[..end], net);
                end - before
            }
            Ok(None) => {
                session.request = RequestState::Head(scanner);
                if before == 0 {
                    head.extend_from_slice(bytes);
                }
                session.request_head = head;
                return bytes.len();
            }
        };
        head.clear();
        self.sessions[slot].request_head = head;
        used
    }

    /// Begins with a request whose head has arrived.
    fn begin_request(&mut self, slot: usize, bytes: &[u8], net: &mut impl StackConnections<C>) {
        let mut buffer = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        let parsed = head::parse(bytes, &mut buffer).and_then(|request| {
            let reader = BodyReader::new(request.body, u64::MAX)?;
            Ok((request, reader))
        });
        let (request, reader) = match parsed {
            Ok(parsed) => parsed,
            Err(status) => return self.refuse(slot, status.line(), net),
        };
        self.counters.requests.add(1);
        let session = &mut self.sessions[slot];
        session.keep_alive = self.keepalive && request.keep_alive;
        session.to_head = request.method == Method::Head;
        session.is_http10 = request.version == Version::Http10;
        let is_complete = reader.is_done();
        session.request = if is_complete { RequestState::Answering } else { RequestState::Body(reader) };
        if !self.backends.is_empty() {
            return self.relay_request(slot, bytes, net);
        }
        if is_complete {
            self.answer(slot, net);
        } else if request.expects_continue {
            session.client_out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
            self.send_to_client(slot, net);
        }
    }

    /// Consumes bytes of a request's body; 0 if the backend cannot take any now.
    fn request_body(
        &mut self,
        slot: usize,
        mut reader: BodyReader,
        bytes: &[u8],
        net: &mut impl StackConnections<C>,
    ) -> usize {
        let session = &mut self.sessions[slot];
        let read = if self.backends.is_empty() {
            reader.read(bytes)
        } else {
            match session.backend {
                BackendConn::Connected(backend) if session.backend_out.is_empty() => {
                    relay::send_body(&mut reader, bytes, backend, net)
                }
                _ => return 0,
            }
        };
        let Ok(used) = read else {
            if self.is_within_response(slot) {
                self.abort_client(slot, net);
            } else {
                self.refuse(slot, "400 Bad Request", net);
            }
            return bytes.len();
        };
        if !reader.is_done() {
            session.request = RequestState::Body(reader);
            return used;
        }
        session.request = RequestState::Answering;
        if self.backends.is_empty() {
            self.answer(slot, net);
        }
        used
    }

    /// Sends what the client has not accepted yet.
    fn send_to_client(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        let session = &mut self.sessions[slot];
        if let Some(client) = session.client {
            flush(&mut session.client_out, client, net);
        }
    }

    /// Sends what the client has not accepted yet. Once it is empty, more can be read.
    fn flush_client(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        let session = &mut self.sessions[slot];
        let Some(client) = session.client else { return };
        if flush(&mut session.client_out, client, net) {
            if let BackendConn::Connected(backend) = session.backend {
                net.resume_reading(backend);
            }
            if matches!(session.request, RequestState::Head(_)) {
                net.resume_reading(client);
            }
        }
    }

    /// Sends what the backend has not accepted yet. Once it is empty, more of a body can be read.
    fn flush_backend(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        let session = &mut self.sessions[slot];
        let BackendConn::Connected(backend) = session.backend else { return };
        if flush(&mut session.backend_out, backend, net)
            && let (RequestState::Body(_), Some(client)) = (session.request, session.client)
        {
            net.resume_reading(client);
        }
    }

    /// Ends the connection of a client at once.
    fn end_client(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        if let Some(client) = self.sessions[slot].client.take() {
            net.close(client);
            self.release(slot, net);
        }
    }

    /// Closes the connection to the backend.
    fn drop_backend(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        let session = &mut self.sessions[slot];
        if let Some(backend) = session.backend.conn() {
            self.trace(format_args!("closes {backend:?}"));
            // In the middle of a response, FIN would let the backend send the rest.
            match self.sessions[slot].response {
                ResponseState::Idle => net.close(backend),
                _ => net.abort(backend),
            }
        }
        let session = &mut self.sessions[slot];
        (session.backend, session.response) = (BackendConn::None, ResponseState::Idle);
        session.backend_out.clear();
        session.response_head.clear();
    }

    /// Closes the connection to the client if it has to end and has accepted all bytes.
    fn end_turn(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        let session = &mut self.sessions[slot];
        let Some(client) = session.client.filter(|_| session.is_closing && session.client_out.is_empty())
        else {
            return;
        };
        if !session.has_unread && !session.must_drain && !session.is_shut {
            self.end_client(slot, net);
        } else if !session.is_shut {
            // A close with unread bytes would be a reset, which could overtake the response.
            session.is_shut = true;
            session.deadline = self.second + LINGER.as_secs() as u32;
            net.finish(client);
            net.resume_reading(client);
        }
    }

    /// Makes a slot vacant whose client has gone.
    fn release(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        self.drop_backend(slot, net);
        self.counters.open.decrement();
        self.trace(format_args!("session {slot} has ended"));
        self.sessions[slot].reset();
        self.vacant.push(slot as u32);
    }
}

/// Sends `out` and returns true if it is empty then.
fn flush<C>(out: &mut Vec<u8>, conn: C, net: &mut impl StackConnections<C>) -> bool {
    if !out.is_empty() {
        let sent = net.send(conn, out);
        out.drain(..sent);
    }
    out.is_empty()
}

/// Returns the second of a time.
const fn second_of(now: Instant) -> u32 {
    (now.as_nanos() / 1_000_000_000) as u32
}

#[cfg(test)]
mod tests;
