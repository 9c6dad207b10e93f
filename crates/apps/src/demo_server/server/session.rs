//! The state of a client's connection and of the backend's connection that belongs to it.

use crate::httpd::body::BodyReader;
use crate::httpd::head::Scanner;

/// Largest capacity with which a buffer stays with its slot when a session ends.
const RETAINED_BYTES_MAX: usize = 4 << 10;

/// The part of a request that the client sends next.
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestState {
    /// The head of a request.
    Head(Scanner),
    /// The body of a request.
    Body(BodyReader),
    /// Nothing until the response is complete: bytes of further requests stay unread.
    Answering,
    /// Nothing more: bytes are dropped.
    Ended,
}

/// The part of a response that the backend sends next.
#[derive(Clone, Copy, Debug)]
pub(super) enum ResponseState {
    /// Nothing.
    Idle,
    /// The head of a response.
    Head,
    /// The body of a response with a known end.
    Body(BodyReader),
    /// The body of a response that ends with the connection.
    UntilClose,
}

/// The connection to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackendConn<C> {
    None,
    Connecting(C),
    Connected(C),
}

impl<C: Copy> BackendConn<C> {
    pub(super) fn conn(&self) -> Option<C> {
        match self {
            Self::None => None,
            Self::Connecting(conn) | Self::Connected(conn) => Some(*conn),
        }
    }
}

/// A session: a slot of the server's table.
#[derive(Debug)]
pub(super) struct ClientSession<C> {
    /// `None` if the slot is free.
    pub(super) client: Option<C>,
    pub(super) backend: BackendConn<C>,
    pub(super) request: RequestState,
    pub(super) response: ResponseState,
    /// The parts of heads that have arrived.
    pub(super) request_head: Vec<u8>,
    pub(super) response_head: Vec<u8>,
    /// Bytes that the connections have not accepted yet.
    pub(super) client_out: Vec<u8>,
    pub(super) backend_out: Vec<u8>,
    /// Time of the clock in whole seconds, from which on a session without activity is reset.
    pub(super) deadline: u32,
    /// True if the connection may stay open after the response to the current request.
    pub(super) keep_alive: bool,
    /// True if the current request is HEAD.
    pub(super) to_head: bool,
    /// True if the current request is of HTTP/1.0, whose clients do not know interim responses.
    pub(super) is_http10: bool,
    /// True if the backend closes the connection after its response.
    pub(super) backend_closes: bool,
    /// True if the client has sent FIN.
    pub(super) has_client_ended: bool,
    /// True if bytes of the client are unread, so that `close` would reset the connection.
    pub(super) has_unread: bool,
    /// True if bytes may still arrive that nobody wants.
    pub(super) must_drain: bool,
    /// True if the connection to the client ends once `client_out` is empty.
    pub(super) is_closing: bool,
    /// True if FIN was sent to the client.
    pub(super) is_shut: bool,
    /// True if the sweep has an entry for the slot.
    pub(super) in_sweep: bool,
}

impl<C> ClientSession<C> {
    pub(super) const fn vacant() -> Self {
        Self {
            client: None,
            backend: BackendConn::None,
            request: RequestState::Head(Scanner::NEW),
            response: ResponseState::Idle,
            request_head: Vec::new(),
            response_head: Vec::new(),
            client_out: Vec::new(),
            backend_out: Vec::new(),
            deadline: 0,
            keep_alive: false,
            to_head: false,
            is_http10: false,
            backend_closes: false,
            has_client_ended: false,
            has_unread: false,
            must_drain: false,
            is_closing: false,
            is_shut: false,
            in_sweep: false,
        }
    }

    /// Makes the slot vacant. Small buffers keep their memory for the slot's next session.
    pub(super) fn reset(&mut self) {
        let empty = |buffer: &mut Vec<u8>| {
            let mut buffer = core::mem::take(buffer);
            buffer.clear();
            buffer.shrink_to(RETAINED_BYTES_MAX);
            buffer
        };
        *self = Self {
            request_head: empty(&mut self.request_head),
            response_head: empty(&mut self.response_head),
            client_out: empty(&mut self.client_out),
            backend_out: empty(&mut self.backend_out),
            in_sweep: self.in_sweep,
            ..Self::vacant()
        };
    }
}
