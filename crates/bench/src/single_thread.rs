//! Runs a server and the client in turns on one thread, in simulated time, so that every run has the same
//! steps and can be counted or profiled.

use crate::client::{Client, ClientConfig};
use crate::server::Server;
use core::time::Duration;
use ginnel_stack::device::Device;
use ginnel_stack::time::Instant;

/// Simulated time per turn.
pub const TICK: Duration = Duration::from_millis(1);

/// A server and its client.
pub struct SingleThread<S> {
    server: S,
    client: Client,
    now: Instant,
}

/// Start of the simulated time; the server must be created with this time.
pub const START: Instant = Instant::from_millis(1_000_000);

impl<S: Server> SingleThread<S> {
    /// Creates the client for a server that was created with [`START`] on the other end of the cable.
    pub fn new(server: S, client_end: Device, client: &ClientConfig) -> Self {
        Self::with_client(server, Client::new(client_end, client))
    }

    /// Joins a server and an existing client.
    pub fn with_client(server: S, client: Client) -> Self {
        Self { server, client, now: START }
    }

    /// Runs until the client has completed `count` more connections or requests.
    ///
    /// # Panics
    /// If there is no progress for ten minutes of simulated time.
    pub fn run(&mut self, count: u64) {
        let wanted = self.client.counts().done + count;
        let deadline = self.now + Duration::from_secs(600);
        while self.client.counts().done < wanted {
            assert!(self.now < deadline, "no progress: {:?}", self.client.counts());
            server_turn(&mut self.server, self.now);
            self.client.turn(self.now);
            self.now += TICK;
        }
    }

    /// Runs the server alone for `time`.
    pub fn idle_for(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            server_turn(&mut self.server, self.now);
            self.now += TICK;
        }
    }

    /// Returns the server.
    pub fn server(&self) -> &S {
        &self.server
    }
}

/// valgrind counts the instructions within this function, which it finds by its name.
#[inline(never)]
pub fn server_turn<S: Server>(server: &mut S, now: Instant) {
    // The call must not be in tail position: a jump in its place would hide the end of the function from
    // valgrind.
    std::hint::black_box(server.turn(now));
}
