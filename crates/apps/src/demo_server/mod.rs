//! `ginnel demo-server`: answers each HTTP request with a fixed page, or relays requests to other servers:
//! Fastsocket's demo server.
//!
//! ```text
//!               ┌─► handler (a shard of Ginnel)
//! server ◄──────┤                                  head (what is changed in a relayed head)
//!   │  sessions └─► kernel (epoll, one thread for each worker)
//!   └─► counters (of one worker; the printing thread reads them)
//! ```
//!
//! The server does no I/O and does not know on which stack it runs, so two runs differ in nothing but the
//! stack. A session is a client's connection and, in a proxy, the connection to a backend that belongs to
//! it. A proxy frames both directions (RFC 9112 §6): it knows where a response ends, so that connections can
//! be kept open, and rewrites the fields that belong to one hop (RFC 9110 §7.6.1).

pub mod counters;
mod handler;
mod head;
pub mod kernel;
pub mod options;
pub mod server;

pub use handler::DemoServer;
pub use options::DemoServerOptions;
