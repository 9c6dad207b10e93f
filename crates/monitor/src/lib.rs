//! A passive latency monitor: it sees both directions of the traffic of servers, matches each response to its
//! request, and reports latencies by priority.
//!
//! ```text
//! sources/      packets with their times: capture files, an interface, a running stack
//! frame         finds the TCP segment in a packet
//! engine        finds the connection of a segment (flow_table)
//! ordering      orders the segments of a connection (streams)
//! connection    finds the messages of a connection (framing), and matches responses to outstanding requests
//! session       closes intervals, and adds them up
//! report, cdf, picture   show the measurements of an interval or of a run
//! recording     reads what clients have sent, for "ginnel load replay"
//! ```

pub mod cdf;
mod connection;
pub mod counters;
pub mod distribution;
pub mod engine;
mod flow_table;
pub mod frame;
mod framing;
mod ordering;
mod outstanding;
pub mod picture;
pub mod recording;
pub mod report;
pub mod rules;
pub mod scripted;
pub mod session;
pub mod sources;
mod streams;
