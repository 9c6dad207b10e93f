//! Handles, which an application stores instead of references. Each contains a slot and the generation of its
//! occupant, so that a handle that outlives its connection is an error and never another connection.

use serde::{Deserialize, Serialize};

/// A TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Conn {
    index: u32,
    generation: u32,
}

impl Conn {
    /// Returns the handle of a slot and its generation.
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// Returns the slot: dense from 0, reused after a close, suitable as an index into the application's own
    /// state.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// Returns the number of occupants that the slot had before this one (wraps).
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// A listening TCP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Listener {
    index: u32,
    generation: u32,
}

impl Listener {
    /// Returns the handle of a slot and its generation.
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// Returns the slot: dense from 0, reused after the listener is closed.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// Returns the number of occupants that the slot had before this one (wraps).
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// A device of the stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortId(pub u16);

/// A link: a device, or one VLAN of it, with its addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LinkId(pub u16);

/// A UDP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UdpHandle {
    /// The slot.
    pub(crate) index: u32,
    /// The generation of the slot.
    pub(crate) generation: u32,
}

impl UdpHandle {
    /// Returns the handle of a slot and its generation.
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// Returns the slot, which is below `udp_sockets_max`.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// Returns the number of occupants that the slot had before this one (wraps).
    pub const fn generation(self) -> u32 {
        self.generation
    }
}
