//! Ginnel's own programs: `echo`, `httpd`, `demo-server`, `iot`, `load`, `corpus`. All but `corpus`, which
//! only writes files, are also examples of the native API.
//!
//! Their protocol logic does no I/O: bytes and the time go in, bytes and deadlines come out. Thin adapters
//! connect it to a Ginnel shard (a [`ginnel::Handler`]) or, for `demo-server` and `load`, to the kernel's
//! sockets. So the logic is tested with tables and random input without a network, and one client measures
//! both stacks.

pub mod corpus;
pub mod date;
pub mod demo_server;
pub mod echo;
pub mod httpd;
pub mod iot;
pub mod load;
pub mod resp;
pub mod sweep;
pub mod units;

use ginnel::{Error, Handler, ShardStats};

/// Runs a program's handler on a stack, which the implementor builds from options or a configuration.
pub trait RunHandler {
    /// Runs `handler` until it stops its shard or a signal ends it, and returns the shard's counters.
    fn run_handler<H: Handler + Send + 'static>(self, handler: H) -> Result<ShardStats, Error>;
}
