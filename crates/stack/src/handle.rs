//! Handles: what an application holds instead of a reference. Each names a slot and the generation of the slot's tenant, so a handle
//! that outlived its connection is an error and never another connection.

/// A TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Conn {
    index: u32,
    generation: u32,
}

impl Conn {
    /// The handle of a slot and its generation.
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// The slot: dense from 0, reused after a close. Good as an index into the application's own state.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// How often the slot had a tenant before this one (wraps).
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// A listening TCP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Listener {
    index: u32,
    generation: u32,
}

impl Listener {
    /// The handle of a slot and its generation.
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// The slot: dense from 0, reused after the listener is closed.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// How often the slot had a tenant before this one (wraps).
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// A device that was added to the stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

/// A link: a device, perhaps one VLAN of it, with its addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u16);

/// A UDP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UdpHandle {
    /// The slot.
    pub(crate) index: u32,
    /// Its generation.
    pub(crate) generation: u32,
}

impl UdpHandle {
    /// A handle for a slot and its tenant.
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// Number of the slot, below `udp_sockets_max`.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// How often the slot had a tenant before this one (wraps).
    pub const fn generation(self) -> u32 {
        self.generation
    }
}
