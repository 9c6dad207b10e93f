//! Limits and timeouts that the server applies to clients.

use super::head::Limits;

/// Longest time that a connection may stay in a phase, in whole seconds, at least 1.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Time to receive a request's head, from its first byte. Then 408. A new connection on which no byte
    /// arrives for this time is closed.
    pub head: u32,
    /// Time between two requests. Then the connection is closed.
    pub idle: u32,
    /// Time without receiving a byte of a request's body. Then 408.
    pub body: u32,
    /// Time without free send buffer for a byte of the response. Then the connection is reset.
    pub send: u32,
    /// Time for the client to close after the server closed. Data that the client sends are dropped.
    pub linger: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { head: 10, idle: 60, body: 30, send: 60, linger: 5 }
    }
}

/// Options of the server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Limits on requests.
    pub limits: Limits,
    /// Timeouts.
    pub timeouts: Timeouts,
    /// Keep a connection open if the client asks for it.
    pub keep_alive: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { limits: Limits::default(), timeouts: Timeouts::default(), keep_alive: true }
    }
}
