//! `ginnel httpd`: a server of static files.
//!
//! ```text
//! bytes ─► server (phases of a connection) ─► head (where a request ends, what it asks) ─► answer ─► path ─► site
//!             │       ▲                                                                       │
//!             │       └── body, busy (what comes or goes in pieces)                           ├─► conditional, range
//!             └─► transport (here: a shard's context)  ◄── response ◄────────────────────────┘
//! ```
//!
//! Memory per connection is 20 bytes; one in the middle of something borrows a record from a pool. A request for a loaded file
//! allocates nothing.
//!
//! The content of loaded files is that of the start of the program. Files beyond the memory budget are read when they are asked for, in pieces of 64 KiB
//! and without waiting for the disk: a piece that is not in the page cache is asked for and looked for again each millisecond, so what a
//! shard's other connections wait for is the copying of one connection's free send buffer.

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
pub use options::Options;
