//! A server and the client taking turns on one thread, in a time of their own: the same steps in every run, to be counted or profiled.

use crate::client::{Client, ClientConfig};
use crate::server::Server;
use core::time::Duration;
use ginnel_stack::device::Device;
use ginnel_stack::time::Instant;

/// How much time passes in a turn of both.
pub const TICK: Duration = Duration::from_millis(1);

/// A server and its client.
pub struct SingleThread<S> {
    server: S,
    client: Client,
    now: Instant,
}

/// When a run begins; a server is made at this time.
pub const START: Instant = Instant::from_millis(1_000_000);

impl<S: Server> SingleThread<S> {
    /// A client for a server that was made at [`START`] on the other end of the cable.
    pub fn new(server: S, client_end: Device, client: &ClientConfig) -> Self {
        Self::with_client(server, Client::new(client_end, client))
    }

    /// The same with a client that is there already.
    pub fn with_client(server: S, client: Client) -> Self {
        Self { server, client, now: START }
    }

    /// Goes on until the client has done `count` more.
    ///
    /// # Panics
    /// If there is no progress.
    pub fn run(&mut self, count: u64) {
        let wanted = self.client.counts().done + count;
        let patience = self.now + Duration::from_secs(600);
        while self.client.counts().done < wanted {
            assert!(self.now < patience, "no progress: {:?}", self.client.counts());
            server_turn(&mut self.server, self.now);
            self.client.turn(self.now);
            self.now += TICK;
        }
    }

    /// Lets time pass for the server alone.
    pub fn idle_for(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            server_turn(&mut self.server, self.now);
            self.now += TICK;
        }
    }

    /// The server.
    pub fn server(&self) -> &S {
        &self.server
    }
}

/// Valgrind counts what happens in here; it finds the function by its name.
#[inline(never)]
pub fn server_turn<S: Server>(server: &mut S, now: Instant) {
    // Something to do after the call: otherwise it becomes a jump, and valgrind does not see where the function ends.
    std::hint::black_box(server.turn(now));
}
