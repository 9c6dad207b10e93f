//! `libpacketdrill_ginnel.so`: a stack with the interface by which packetdrill tests shared libraries
//! (`--so_filename`; docs/packetdrill.md).
//!
//! ```text
//!   packetdrill                              this library
//!   ┌───────────────────────┐   socket …    ┌──────────────────────────┐
//!   │ system calls          │──────────────►│ calls      Ops           │
//!   │                       │               │              │ channel   │
//!   │                       │               │            Shard, a thread│
//!   │                       │  netdev_send  │              │ device    │
//!   │ packets in and out    │──────────────►│ network    tunnel        │
//!   └───────────────────────┘◄──────────────└──────────────────────────┘
//!                              netdev_receive
//! ```

mod bytes;
mod calls;
mod clock;
mod got;
mod hooks;
mod instance;
mod interface;
mod network;
mod session;
mod so_flags;
mod sysctls;
mod tunnel;

pub use interface::{PacketdrillInterface, packetdrill_interface_init};
