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
mod hooks;
mod instance;
mod interface;
mod so_flags;
// The module is shared with the preloaded library, which accesses the program's memory in the same way.
mod got;
#[expect(dead_code, reason = "that library has more calls")]
#[path = "../../preload/src/hooks/user_memory.rs"]
mod memory;
mod network;
mod session;
mod sysctls;
mod tunnel;

pub use interface::{PacketdrillInterface, packetdrill_interface_init};
