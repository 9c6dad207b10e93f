//! `ginnel httpd`: a server of static files.
//!
//! ```text
//! bytes ─► server (phases of a connection) ─► head (fields of a request) ─► response_plan ─► path ─► site
//!             │       ▲                                                          │
//!             │       └── body, exchange (input or output in several parts)      ├─► conditional, range
//!             └─► transport (a shard's context)  ◄── response ◄─────────────────┘
//! ```
//!
//! A connection takes 20 bytes. A connection in the middle of a request or a response also borrows a record
//! from a pool. A request for a loaded file allocates nothing.
//!
//! Loaded files keep the contents that they had at the start of the program. Files beyond the memory budget
//! are read when they are requested, in blocks of 64 KiB and without waiting for the disk: if a block is not
//! in the page cache, the kernel is asked to read it, and the server tries again every millisecond. So the
//! other connections of the shard wait only while the free send buffer of one connection is filled by
//! copying.

pub mod body;
pub mod clock;
pub mod conditional;
pub mod exchange;
mod handler;
pub mod head;
pub mod limits;
mod options;
pub mod path;
pub mod range;
mod request_cache;
pub mod response;
mod response_plan;
pub mod server;
pub mod site;
pub mod status;
pub mod types;

pub use handler::Httpd;
pub use options::HttpdOptions;
