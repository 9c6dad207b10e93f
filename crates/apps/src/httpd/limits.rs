//! What the server grants a client.

use super::head::Limits;

/// How long a connection may stay in a phase, in whole seconds ≥ 1.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// From the first byte of a request, or from the start of the connection, to the end of the head. Then 408.
    pub head: u32,
    /// Between two requests. Then the connection is closed.
    pub idle: u32,
    /// Without a byte of a request's body. Then 408.
    pub body: u32,
    /// Without room for a byte of the response. Then the connection is reset.
    pub send: u32,
    /// For the client to close after us, while what it sends is dropped.
    pub linger: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { head: 10, idle: 60, body: 30, send: 60, linger: 5 }
    }
}

/// How the server behaves.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Limits on requests.
    pub limits: Limits,
    /// Time-outs.
    pub timeouts: Timeouts,
    /// Keep connections open when the client wants it.
    pub keep_alive: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { limits: Limits::default(), timeouts: Timeouts::default(), keep_alive: true }
    }
}
