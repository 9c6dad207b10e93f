//! `ginnel iot`: a server for many devices that send heartbeats and, rarely, urgent requests. It executes
//! GET, SET and GET on Redis for each message, and answers requests only. Its wire format is that of QStack's
//! `iotepserver`.
//!
//! [`pipeline`] decides, without I/O, which message goes to Redis next, and finds what became of it;
//! `link.rs` connects it to a server, and [`handler`] to the clients.

pub mod cluster;
pub mod counters;
pub mod handler;
mod link;
pub mod message;
pub mod options;
pub mod pipeline;

pub use handler::Iot;
pub use options::{IotOptions, RedisAddress};
