//! Packet scripts: packets on the wire and socket calls of the application, with times, in one readable text.
//!
//! The syntax follows packetdrill's (`docs/scripts.md` describes it). Every script runs against the Linux
//! kernel in real time, in a network namespace of its own, and against Ginnel's engine in virtual time. A
//! script is written from the RFCs and validated by the kernel, never from Ginnel's own output.

pub mod assertion;
pub mod ast;
pub mod backend;
pub mod calls;
mod display;
pub mod flow;
pub mod ginnel;
pub mod kernel;
pub mod names;
pub mod parser;
pub mod report;
pub mod runner;
pub mod scanner;
pub mod suite;
pub mod wire;
