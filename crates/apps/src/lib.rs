//! Ginnel's own programs, each also an example of the native API: `echo`, `httpd`, `load http`, `corpus`.
//!
//! The protocol logic of each is free of I/O: bytes and the time go in, bytes and deadlines come out. Thin adapters tie it to
//! a Ginnel shard (a [`ginnel::Handler`]) or, for the load generator, to the sockets of the kernel. So the same code is tested by tables and by
//! random input without any network, and the two stacks are compared with the same client.

pub mod corpus;
pub mod date;
pub mod echo;
pub mod httpd;
pub mod load;
pub mod sweep;
pub mod units;

use ginnel::{Error, Handler, ShardStats};

/// Whoever starts a program has a stack for it: it turns options or a configuration into a shard and runs the program there.
pub trait RunHandler {
    /// Runs `handler` until it stops its shard or the user wants it to end, and returns what the shard counted.
    fn run_handler<H: Handler + Send + 'static>(self, handler: H) -> Result<ShardStats, Error>;
}
