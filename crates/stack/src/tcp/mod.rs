//! TCP (RFC 9293).

pub mod config;
pub mod recv_buffer;
pub mod send_buffer;
pub mod source;
pub mod state;
