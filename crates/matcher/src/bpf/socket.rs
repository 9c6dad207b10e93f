//! Programs of sockets (`SO_ATTACH_FILTER`): the checks of Linux's `bpf_check_classic`, and what such
//! programs can load besides the bytes of the packet.

use super::{BadProgram, Instruction, Program, RawInstruction};

/// Bytes of an encoded instruction (`struct sock_filter`).
const INSTRUCTION_BYTES: usize = 8;
/// First offset of the properties of a packet (`SKF_AD_OFF`).
const PROPERTIES: u32 = 0xffff_f000;
/// Offset of the network header (`SKF_NET_OFF`).
const NETWORK_HEADER: i32 = -0x10_0000;
/// Offset of the link-layer header (`SKF_LL_OFF`).
const LINK_HEADER: i32 = -0x20_0000;
/// Bytes of the header of a netlink attribute (`NLA_HDRLEN`).
const ATTRIBUTE_HEADER_BYTES: usize = 4;

/// A property of a packet (`SKF_AD_…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Property {
    Protocol,
    PacketType,
    InterfaceIndex,
    /// Offset of the netlink attribute of type X, from offset A of the packet on.
    Attribute,
    /// Offset of the netlink attribute of type X within the attribute at offset A.
    NestedAttribute,
    HardwareType,
    /// A XOR X.
    XorX,
    PayloadOffset,
    Random,
    Cpu,
    VlanProtocol,
    /// A property that packets on a stack do not have; its value is 0.
    Absent,
}

impl Property {
    /// Returns the property at an offset from [`PROPERTIES`].
    const fn at(offset: u32) -> Option<Self> {
        Some(match offset {
            0 => Self::Protocol,
            4 => Self::PacketType,
            8 => Self::InterfaceIndex,
            12 => Self::Attribute,
            16 => Self::NestedAttribute,
            28 => Self::HardwareType,
            36 => Self::Cpu,
            40 => Self::XorX,
            52 => Self::PayloadOffset,
            56 => Self::Random,
            60 => Self::VlanProtocol,
            // Mark, queue, hash, and both properties of a VLAN tag.
            20 | 24 | 32 | 44 | 48 => Self::Absent,
            _ => return None,
        })
    }
}

/// A packet as the program of a socket sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketPacket<'a> {
    /// The segment or datagram from its TCP or UDP header on: what loads without a negative offset read.
    pub bytes: &'a [u8],
    /// The packet from its IP header on.
    pub network: &'a [u8],
    /// The frame from its link-layer header on; empty if the packet was not received in one frame.
    pub link: &'a [u8],
    /// Protocol of the network layer, as in the header of an Ethernet frame.
    pub ethertype: u16,
    /// 0 for a packet to this host, 1 for a broadcast, 2 for a multicast packet (`PACKET_HOST` …).
    pub packet_type: u8,
    /// Index of the interface on which the packet arrived.
    pub interface: u32,
    /// Type of that interface (`ARPHRD_…`).
    pub hardware_type: u16,
    /// Offset of the payload in `bytes`.
    pub payload_offset: u32,
    /// The seed of the random numbers that the program loads.
    pub random: u32,
    /// The CPU on which the program runs.
    pub cpu: u32,
}

/// A program of a socket. A run executes each instruction once at most, and visits a bounded number of
/// attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketProgram {
    program: Program,
}

impl SocketProgram {
    /// Verifies a program.
    ///
    /// # Errors
    /// The first instruction that Linux does not accept, or the errors of [`Program::verify`].
    pub fn verify(raw: &[RawInstruction]) -> Result<Self, BadProgram> {
        let Program { mut instructions } = Program::verify(raw)?;
        for ((at, raw_instruction), instruction) in raw.iter().enumerate().zip(&mut instructions) {
            if let Instruction::Load { indexed: false, .. } = instruction
                && let Some(offset) = raw_instruction.k.checked_sub(PROPERTIES)
            {
                let property = Property::at(offset).ok_or(BadProgram::UnknownProperty(at))?;
                *instruction = Instruction::LoadProperty(property);
            }
        }
        check_memory(&instructions)?;
        Ok(Self { program: Program { instructions } })
    }

    /// Verifies a program whose instructions are encoded as `struct sock_filter`, in the byte order of this
    /// machine. Returns `None` if the length is not that of whole instructions.
    ///
    /// # Errors
    /// As [`SocketProgram::verify`].
    pub fn decode(code: &[u8]) -> Option<Result<Self, BadProgram>> {
        let (instructions, rest) = code.as_chunks::<INSTRUCTION_BYTES>();
        if !rest.is_empty() {
            return None;
        }
        let raw: Vec<RawInstruction> = instructions
            .iter()
            .map(|&[c0, c1, jt, jf, k0, k1, k2, k3]| RawInstruction {
                code: u16::from_ne_bytes([c0, c1]),
                jt,
                jf,
                k: u32::from_ne_bytes([k0, k1, k2, k3]),
            })
            .collect();
        Some(Self::verify(&raw))
    }

    /// Runs the program. Returns how many bytes of the packet to keep; 0 drops the packet.
    #[must_use]
    pub fn run(&self, packet: &SocketPacket<'_>) -> u32 {
        self.run_counted(packet).0
    }

    /// As [`SocketProgram::run`]. Returns also an upper bound of the steps: executed instructions plus
    /// visited attributes.
    #[must_use]
    pub fn run_counted(&self, packet: &SocketPacket<'_>) -> (u32, usize) {
        self.program.run_on_socket(packet)
    }

    /// Returns whether the program loads the number of the CPU.
    pub fn loads_cpu(&self) -> bool {
        self.program.instructions.contains(&Instruction::LoadProperty(Property::Cpu))
    }

    /// Returns whether the program loads random numbers.
    pub fn loads_random(&self) -> bool {
        self.program.instructions.contains(&Instruction::LoadProperty(Property::Random))
    }

    /// Returns the bytes of memory of the instructions.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(&*self.program.instructions)
    }
}

/// Checks that no way through a program reads a word of memory before it was written
/// (`check_load_and_stores`).
fn check_memory(instructions: &[Instruction]) -> Result<(), BadProgram> {
    // For each instruction, the words that are written on all jumps to it.
    let mut masks = vec![u16::MAX; instructions.len()];
    let mut written = 0_u16;
    for (at, instruction) in instructions.iter().enumerate() {
        written &= masks[at];
        match *instruction {
            Instruction::Store(k) | Instruction::StoreX(k) => written |= 1 << k,
            Instruction::LoadMemory(k) | Instruction::LoadXMemory(k) if written & 1 << k == 0 => {
                return Err(BadProgram::UnwrittenMemory(at));
            }
            Instruction::Jump(skip) => {
                masks[at + 1 + skip as usize] &= written;
                written = u16::MAX;
            }
            Instruction::Branch { jt, jf, .. } => {
                masks[at + 1 + usize::from(jt)] &= written;
                masks[at + 1 + usize::from(jf)] &= written;
                written = u16::MAX;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The headers and properties that a program of a socket can load besides the bytes of the packet.
pub(super) struct SocketMachine<'a> {
    packet: SocketPacket<'a>,
    /// Attributes that were visited.
    visits: usize,
}

/// Most attributes that the searches of one run may visit together.
// limit: attributes that a filter searches in a packet
pub const ATTRIBUTE_VISITS_MAX: usize = 4096;

impl<'a> SocketMachine<'a> {
    pub fn new(packet: &SocketPacket<'a>) -> Self {
        Self { packet: *packet, visits: 0 }
    }

    /// Returns how many attributes were visited.
    pub fn visits(&self) -> usize {
        self.visits
    }

    /// Returns the next random number (a step of SplitMix, with 32 bits).
    fn next_random(&mut self) -> u32 {
        self.packet.random = self.packet.random.wrapping_add(0x9e37_79b9);
        let mixed = (self.packet.random ^ self.packet.random >> 16).wrapping_mul(0x21f0_aaad);
        let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x735a_2d97);
        mixed ^ mixed >> 15
    }

    /// Loads `size` bytes at an offset at which [`SocketPacket::bytes`] has none: a negative offset loads
    /// from the headers. Returns `None` if the bytes do not exist.
    #[cold]
    pub fn load(&self, offset: i32, size: u8) -> Option<u32> {
        let (bytes, from) = if offset >= 0 {
            // The sum of X and the offset has wrapped around.
            (self.packet.bytes, 0)
        } else if offset >= NETWORK_HEADER {
            (self.packet.network, NETWORK_HEADER)
        } else if offset >= LINK_HEADER {
            (self.packet.link, LINK_HEADER)
        } else {
            return None;
        };
        let start = usize::try_from(offset.checked_sub(from)?).ok()?;
        let bytes = bytes.get(start..)?.get(..size.into())?;
        Some(bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)))
    }

    /// Returns a property of the packet; `None` drops the packet, because the searches of the run have
    /// visited too many attributes.
    pub fn property(&mut self, property: Property, a: u32, x: u32) -> Option<u32> {
        let packet = self.packet;
        Some(match property {
            Property::Protocol => packet.ethertype.into(),
            Property::PacketType => packet.packet_type.into(),
            Property::InterfaceIndex => packet.interface,
            Property::HardwareType => packet.hardware_type.into(),
            Property::XorX => a ^ x,
            Property::PayloadOffset => packet.payload_offset,
            Property::Random => self.next_random(),
            Property::Cpu => packet.cpu,
            Property::VlanProtocol | Property::Absent => 0,
            Property::Attribute => {
                let bytes = packet.bytes;
                match bytes.get(a as usize..).filter(|rest| rest.len() >= ATTRIBUTE_HEADER_BYTES) {
                    Some(rest) => self.find_attribute(rest, a, x)?,
                    None => 0,
                }
            }
            Property::NestedAttribute => {
                let bytes = packet.bytes;
                let within = bytes.get(a as usize..).and_then(|rest| {
                    let len = usize::from(attribute_header(rest)?.0);
                    rest.get(ATTRIBUTE_HEADER_BYTES..len)
                });
                match within {
                    Some(within) => self.find_attribute(within, a + ATTRIBUTE_HEADER_BYTES as u32, x)?,
                    None => 0,
                }
            }
        })
    }

    /// Searches for an attribute of type `wanted` in `attributes`, which begin at offset `at` of the packet.
    /// Returns its offset in the packet, 0 without one, and `None` if too many attributes were visited.
    fn find_attribute(&mut self, mut attributes: &[u8], mut at: u32, wanted: u32) -> Option<u32> {
        // `nla_find`: a malformed attribute ends the search.
        while let Some((len, kind)) = attribute_header(attributes)
            && usize::from(len) >= ATTRIBUTE_HEADER_BYTES
            && usize::from(len) <= attributes.len()
        {
            if u32::from(kind & ATTRIBUTE_TYPE_MASK) == wanted {
                return Some(at);
            }
            let step = usize::from(len).next_multiple_of(4);
            if self.visits == ATTRIBUTE_VISITS_MAX {
                return None;
            }
            self.visits += 1;
            at += step as u32;
            attributes = attributes.get(step..).unwrap_or_default();
        }
        Some(0)
    }
}

/// Bits of an attribute's type (`NLA_TYPE_MASK`).
const ATTRIBUTE_TYPE_MASK: u16 = 0x3fff;

/// Returns the length and the type of the attribute at the front.
fn attribute_header(bytes: &[u8]) -> Option<(u16, u16)> {
    let [l0, l1, t0, t1] = *bytes.first_chunk()?;
    Some((u16::from_ne_bytes([l0, l1]), u16::from_ne_bytes([t0, t1])))
}

#[cfg(test)]
mod tests;
