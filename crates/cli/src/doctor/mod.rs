//! The knowledge of `ginnel doctor`: facts about a machine and an interface, what follows from them for a
//! stack, and how to change it.
//!
//! ```text
//! description  the facts, which can be recorded in a file
//! read         reads them on this machine
//! plan         which CPUs the shards get
//! drivers      facts about drivers
//! examine      the findings: interface_findings, queue_findings, offload_findings, machine_findings
//! setting      reads and writes one setting of the machine
//! undo         applies changes, and records how to undo them
//! configuration  a configuration file for the machine
//! show         findings as text and JSON
//! ```

pub mod configuration;
pub mod cpu_mask;
pub mod description;
pub mod drivers;
mod examine;
mod interface_findings;
mod machine_findings;
mod offload_findings;
pub mod plan;
mod queue_findings;
pub mod read;
pub mod setting;
pub mod show;
pub mod undo;

pub use examine::{Finding, Level, examine};
