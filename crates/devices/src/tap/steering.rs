//! A BPF program that makes the kernel deliver each frame to the queue of the shard that owns it
//! (`TUNSETSTEERINGEBPF`). Without the program, the kernel delivers the packets of a flow to the queue on
//! which the flow was sent last, so that the first packets, and those after a change, arrive elsewhere.
//!
//! The shard is the low seven bits of the Toeplitz hash, modulo the number of shards. The hash is linear:
//! each of the seven bits is the parity of the input under a mask. Frames without such a hash go to the first
//! queue.

use super::ioctl;
use crate::af_xdp::assembler::{AluOp, Assembler, AssemblyError, Instruction, JumpCondition, Reg, Width};
use crate::af_xdp::bpf;
use ginnel_stack::steering::INDIRECTION_ENTRIES;
use ginnel_stack::steering::toeplitz::{KEY, Toeplitz};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use std::io;
use std::net::Ipv6Addr;

/// Bits of the hash that count.
const HASH_BITS: u32 = INDIRECTION_ENTRIES.trailing_zeros();
/// Words of the input: two IPv6 addresses and the ports. An IPv4 flow has the addresses in the first two.
const WORDS: usize = 9;
/// Index of the word with the ports: of an IPv4 flow, and of an IPv6 flow.
const PORTS_V4: usize = 2;
const PORTS_V6: usize = 8;

const ETHERTYPE_AT: i32 = 12;
const VLAN: i32 = 0x8100;
const IPV4: i32 = 0x0800;
const IPV6: i32 = 0x86dd;
const TCP: i32 = 6;
const UDP: i32 = 17;
const FRAGMENT_V6: i32 = 44;

/// Makes the kernel distribute the frames of a device over its `queues` queues, in the order in which they
/// were opened.
///
/// # Errors
/// The kernel's error: `PermissionDenied` without `CAP_BPF`, unless the system permits programs to all users.
pub(super) fn steer(fd: &OwnedFd, queues: usize) -> io::Result<()> {
    let code = program(queues as i32).map_err(|e| io::Error::other(e.to_string()))?;
    let program = bpf::load_socket_filter(&code, "ginnel_steer").map_err(|(error, log)| {
        let error = io::Error::from(error);
        if log.is_empty() { error } else { io::Error::new(error.kind(), format!("{error}: {log}")) }
    })?;
    ioctl::set_steering(fd, program.as_fd().as_raw_fd()).map_err(io::Error::from)
}

/// Returns the mask of each word of the input for each bit of the hash.
fn masks() -> [[u32; WORDS]; HASH_BITS as usize] {
    let toeplitz = Toeplitz::new(&KEY);
    let mut masks = [[0; WORDS]; HASH_BITS as usize];
    for at in 0..32 * WORDS {
        let mut input = [0; 4 * WORDS];
        input[at / 8] = 0x80 >> (at % 8);
        let address = |from: usize| {
            let mut octets = [0; 16];
            octets.copy_from_slice(&input[from..from + 16]);
            Ipv6Addr::from(octets).into()
        };
        let port = |from: usize| u16::from_be_bytes([input[from], input[from + 1]]);
        let hash = toeplitz.hash(address(0), address(16), Some((port(32), port(34))));
        for (bit, mask) in masks.iter_mut().enumerate() {
            mask[at / 32] |= (hash >> bit & 1) << (31 - at % 32);
        }
    }
    masks
}

/// Returns the program for this number of queues.
fn program(queues: i32) -> Result<Vec<Instruction>, AssemblyError> {
    use Reg::{R0, R1, R6, R7, R8, R9, R10};
    let masks = masks();
    let mut a = Assembler::default();
    let [untagged, v4, v6, v4_ports, v4_hash, v6_ports, v6_hash, other] = [(); 8].map(|()| a.label());
    // Loads from packets need the context in R6, and end the program with 0 beyond the end of a packet.
    a.mov(R6, R1);
    // R8 is the start of the IP header, R7 the ports.
    a.mov(R8, 14);
    a.mov(R7, 0);
    a.load_packet(Width::Half, ETHERTYPE_AT);
    a.jump_if(JumpCondition::NotEqual, R0, VLAN, untagged);
    a.mov(R8, 18);
    a.load_packet(Width::Half, ETHERTYPE_AT + 4);
    a.bind(untagged);
    a.jump_if(JumpCondition::Equal, R0, IPV4, v4);
    a.jump_if(JumpCondition::Equal, R0, IPV6, v6);
    a.jump(other);

    a.bind(v4);
    // A fragment: the hash of the addresses.
    a.load_packet_at(Width::Half, R8, 6);
    a.alu(AluOp::And, R0, 0x3fff);
    a.jump_if(JumpCondition::NotEqual, R0, 0, v4_hash);
    a.load_packet_at(Width::Byte, R8, 9);
    a.jump_if(JumpCondition::Equal, R0, TCP, v4_ports);
    a.jump_if(JumpCondition::NotEqual, R0, UDP, other);
    a.bind(v4_ports);
    a.load_packet_at(Width::Byte, R8, 0);
    a.alu(AluOp::And, R0, 15);
    a.alu(AluOp::ShiftLeft, R0, 2);
    a.mov(R9, R0);
    a.alu(AluOp::Add, R9, R8);
    a.load_packet_at(Width::Word, R9, 0);
    a.mov(R7, R0);
    a.bind(v4_hash);
    for word in 0..2 {
        a.load_packet_at(Width::Word, R8, 12 + 4 * word);
        a.store(Width::Word, R10, stack_offset(word as usize), R0);
    }
    a.store(Width::Word, R10, stack_offset(PORTS_V4), R7);
    emit_hash(&mut a, &masks, PORTS_V4 + 1, queues);

    a.bind(v6);
    a.load_packet_at(Width::Byte, R8, 6);
    a.jump_if(JumpCondition::Equal, R0, FRAGMENT_V6, v6_hash);
    a.jump_if(JumpCondition::Equal, R0, TCP, v6_ports);
    a.jump_if(JumpCondition::NotEqual, R0, UDP, other);
    a.bind(v6_ports);
    a.load_packet_at(Width::Word, R8, 40);
    a.mov(R7, R0);
    a.bind(v6_hash);
    for word in 0..PORTS_V6 as i32 {
        a.load_packet_at(Width::Word, R8, 8 + 4 * word);
        a.store(Width::Word, R10, stack_offset(word as usize), R0);
    }
    a.store(Width::Word, R10, stack_offset(PORTS_V6), R7);
    emit_hash(&mut a, &masks, PORTS_V6 + 1, queues);

    a.bind(other);
    a.mov(R0, 0);
    a.exit();
    a.finish()
}

/// Returns where a word of the input is, relative to the frame pointer.
const fn stack_offset(word: usize) -> i16 {
    -4 * (word as i16 + 1)
}

/// Computes the hash of the first `words` words on the stack, and returns its queue.
fn emit_hash(a: &mut Assembler, masks: &[[u32; WORDS]; HASH_BITS as usize], words: usize, queues: i32) {
    use Reg::{R0, R1, R2, R10};
    a.mov(R0, 0);
    for (bit, masks) in masks.iter().enumerate() {
        a.mov(R1, 0);
        for (word, mask) in masks[..words].iter().enumerate() {
            a.load(Width::Word, R2, R10, stack_offset(word));
            // The mask is extended by its sign, but the loaded word has no more than 32 bits.
            a.alu(AluOp::And, R2, mask.cast_signed());
            a.alu(AluOp::Xor, R1, R2);
        }
        // The parity of R1.
        for shift in [16, 8, 4, 2, 1] {
            a.mov(R2, R1);
            a.alu(AluOp::ShiftRight, R2, shift);
            a.alu(AluOp::Xor, R1, R2);
        }
        a.alu(AluOp::And, R1, 1);
        a.alu(AluOp::ShiftLeft, R1, bit as i32);
        a.alu(AluOp::Xor, R0, R1);
    }
    a.alu(AluOp::Modulo, R0, queues);
    a.exit();
}
