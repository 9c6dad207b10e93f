//! Behaviour of TCP on whole stacks, by subject.

mod buffers;
mod closing;
mod common;
mod default_buffers;
mod handshake;
mod idle;
mod listeners;
mod messages;
mod retransmission;
mod unordered;
mod urgent;
mod validation;
mod zero_window;
