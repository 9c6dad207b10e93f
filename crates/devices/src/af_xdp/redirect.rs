//! The redirect program: which frames of an interface go to the stack's sockets, and which to the kernel as before.
//!
//! What is anybody's business (a neighbour's broadcast, an answer to an address that stack and kernel share) goes to the kernel, and to the stack as a
//! copy: see [`super::neighbours`].

use super::assembler::{Assembler, AssemblyError, If, Instruction, Label, Op, Reg, Width};
use Reg::{R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10};
use Width::{Byte, Double, Half, Word};
use core::net::IpAddr;
use std::os::fd::RawFd;

/// What `XDP` programs return.
pub(super) const XDP_DROP: i32 = 1;
pub(super) const XDP_PASS: i32 = 2;
const XDP_REDIRECT: i32 = 4;

const HELPER_MAP_LOOKUP: i32 = 1;
const HELPER_REDIRECT_MAP: i32 = 51;

/// Bytes of [`key`].
pub(super) const KEY_BYTES: usize = 20;
/// Bytes of the ports of TCP as bits, then those of UDP.
pub(super) const PORT_BYTES: usize = 2 * UDP_PORTS_AT as usize;
/// Where those of UDP begin.
pub(super) const UDP_PORTS_AT: u16 = 8192;
/// All of an address is the stack's.
pub(super) const WHOLE: u32 = 1;
/// Of an address only some ports are the stack's.
pub(super) const PORTS: u32 = 2;

/// Where the key lies in the program's stack.
const KEY_AT: i16 = -24;
/// Extension headers of IPv6 that are looked behind.
const EXTENSIONS_MAX: usize = 3;

/// The maps that the program reads, by descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maps {
    /// Sockets by queue.
    pub(super) sockets: RawFd,
    /// [`WHOLE`] or [`PORTS`] by [`key`].
    pub(super) addresses: RawFd,
    /// [`PORT_BYTES`].
    pub(super) ports: RawFd,
    /// One counter: frames for the stack that came on a queue without a socket.
    pub(super) missed: RawFd,
}

/// An address in a VLAN (0 is none), as the program looks it up.
pub(super) fn key(address: IpAddr, vlan: u16) -> [u8; KEY_BYTES] {
    let address = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut key = [0; KEY_BYTES];
    key[..16].copy_from_slice(&address.octets());
    key[16..].copy_from_slice(&u32::from(vlan).to_ne_bytes());
    key
}

/// The program for an interface that is the stack's alone. What comes on queues without a socket is the kernel's.
pub(super) fn everything(maps: Maps) -> Result<Vec<Instruction>, AssemblyError> {
    let mut a = Assembler::default();
    a.load(Word, R2, R1, RX_QUEUE_INDEX_AT);
    a.map(R1, maps.sockets);
    a.mov(R3, XDP_PASS);
    a.call(HELPER_REDIRECT_MAP);
    a.exit();
    a.finish()
}

/// Offsets in `struct xdp_md`.
const DATA_AT: i16 = 0;
const DATA_END_AT: i16 = 4;
const RX_QUEUE_INDEX_AT: i16 = 16;

/// A number of 16 bits in network order, as a load of 16 bits sees it.
const fn be16(value: u16) -> i32 {
    value.to_be() as i32
}

/// The program for an interface that the stack shares with the kernel.
pub(super) fn shared(maps: Maps) -> Result<Vec<Instruction>, AssemblyError> {
    let mut a = Assembler::default();
    let places = Places { take: a.label(), pass: a.label(), tcp: a.label(), udp: a.label(), port: a.label() };
    let mut program = Program { a, maps, places };
    program.ethernet();
    program.ports();
    program.verdicts();
    program.a.finish()
}

/// Labels that several parts jump to.
#[derive(Clone, Copy)]
struct Places {
    /// The frame is the stack's.
    take: Label,
    /// The frame is the kernel's.
    pass: Label,
    /// `R9` is at a TCP header.
    tcp: Label,
    /// `R9` is at a UDP header.
    udp: Label,
    /// `R4` is a port in network order, `R3` where its protocol's ports begin.
    port: Label,
}

/// `R6` is the context, `R7` the start of the frame, `R8` its end, `R9` the header at hand.
struct Program {
    a: Assembler,
    maps: Maps,
    places: Places,
}

impl Program {
    fn ethernet(&mut self) {
        let (tag, untagged) = (self.a.label(), self.a.label());
        let (v4, v6, arp) = (self.a.label(), self.a.label(), self.a.label());
        let a = &mut self.a;
        a.mov(R6, R1);
        a.load(Word, R7, R6, DATA_AT);
        a.load(Word, R8, R6, DATA_END_AT);
        a.mov(R9, R7);
        self.advance(14, 0);
        let a = &mut self.a;
        a.load(Half, R3, R7, 12);
        a.mov(R4, 0);
        a.jump_if(If::Equal, R3, be16(0x8100), tag);
        a.jump_if(If::NotEqual, R3, be16(0x88a8), untagged);
        a.place(tag);
        self.advance(4, 0);
        let a = &mut self.a;
        a.load(Half, R4, R7, 14);
        a.be16_to_host(R4);
        a.op(Op::And, R4, 0xfff);
        a.load(Half, R3, R7, 16);
        a.place(untagged);
        a.store(Word, R10, KEY_AT + 16, R4);
        a.jump_if(If::Equal, R3, be16(0x0800), v4);
        a.jump_if(If::Equal, R3, be16(0x86dd), v6);
        a.jump_if(If::Equal, R3, be16(0x0806), arp);
        a.jump(self.places.pass);
        self.a.place(arp);
        self.arp();
        self.a.place(v4);
        self.v4();
        self.a.place(v6);
        self.v6();
    }

    /// Moves `R9` forward by `bytes`, all of which and `more` behind them are in the frame; else the frame is the kernel's.
    fn advance(&mut self, bytes: i32, more: i32) {
        self.a.op(Op::Add, R9, bytes);
        self.need(more);
    }

    /// So many bytes from `R9` on are in the frame; else it is the kernel's.
    fn need(&mut self, bytes: i32) {
        self.a.mov(R2, R9);
        self.a.op(Op::Add, R2, bytes);
        self.a.jump_if(If::Greater, R2, R8, self.places.pass);
    }

    /// Makes the key of the IPv4 address at `R9 + offset`.
    fn v4_key(&mut self, offset: i16) {
        self.a.store(Double, R10, KEY_AT, 0);
        self.a.store(Word, R10, KEY_AT + 8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
        self.a.load(Word, R3, R9, offset);
        self.a.store(Word, R10, KEY_AT + 12, R3);
    }

    /// Makes the key of the IPv6 address at `R9 + offset`.
    fn v6_key(&mut self, offset: i16) {
        for half in [0, 8] {
            self.a.load(Double, R3, R9, offset + half);
            self.a.store(Double, R10, KEY_AT + half, R3);
        }
    }

    /// `R0` is the address of what the key stands for, or 0.
    fn look_up(&mut self) {
        self.a.map(R1, self.maps.addresses);
        self.a.mov(R2, R10);
        self.a.op(Op::Add, R2, i32::from(KEY_AT));
        self.a.call(HELPER_MAP_LOOKUP);
    }

    /// The frame is about the address of the key: it is the stack's if all of the address is.
    fn about(&mut self) {
        self.look_up();
        self.a.jump_if(If::Equal, R0, 0, self.places.pass);
        self.a.load(Word, R1, R0, 0);
        self.a.jump_if(If::Equal, R1, WHOLE as i32, self.places.take);
        self.a.jump(self.places.pass);
    }

    /// RFC 826: requests and answers alike are about the target's address.
    fn arp(&mut self) {
        self.need(28);
        for (offset, value) in [(0, 1), (2, 0x0800), (4, 0x0604)] {
            self.a.load(Half, R3, R9, offset);
            self.a.jump_if(If::NotEqual, R3, be16(value), self.places.pass);
        }
        self.v4_key(24);
        self.about();
    }

    /// `R5` is the protocol and `R9` behind the IPv4 header at `R9`.
    fn behind_v4_header(&mut self) {
        self.a.load(Byte, R5, R9, 9);
        self.a.load(Byte, R4, R9, 0);
        self.a.op(Op::And, R4, 0x0f);
        self.a.op(Op::ShiftLeft, R4, 2);
        self.a.jump_if(If::Less, R4, 20, self.places.pass);
        self.a.op(Op::Add, R9, R4);
    }

    fn v4(&mut self) {
        self.need(20);
        self.v4_key(16);
        self.look_up();
        self.a.jump_if(If::Equal, R0, 0, self.places.pass);
        self.a.load(Word, R1, R0, 0);
        self.a.jump_if(If::Equal, R1, WHOLE as i32, self.places.take);
        // Only the first fragment has ports: of a shared address all fragments are the kernel's.
        self.a.load(Half, R3, R9, 6);
        self.a.op(Op::And, R3, be16(0x3fff));
        self.a.jump_if(If::NotEqual, R3, 0, self.places.pass);
        self.behind_v4_header();
        self.a.jump_if(If::Equal, R5, 6, self.places.tcp);
        self.a.jump_if(If::Equal, R5, 17, self.places.udp);
        self.a.jump_if(If::NotEqual, R5, 1, self.places.pass);
        // An ICMP error is the stack's if it quotes what came from one of its ports.
        self.need(8);
        let quote = self.a.label();
        self.a.load(Byte, R3, R9, 0);
        for kind in [3, 11, 12] {
            self.a.jump_if(If::Equal, R3, kind, quote);
        }
        self.a.jump(self.places.pass);
        self.a.place(quote);
        self.advance(8, 20);
        self.a.load(Half, R3, R9, 6);
        self.a.op(Op::And, R3, be16(0x1fff));
        self.a.jump_if(If::NotEqual, R3, 0, self.places.pass);
        self.behind_v4_header();
        self.quoted_port();
    }

    /// `R9` is at the transport header of a quote, `R5` is its protocol.
    fn quoted_port(&mut self) {
        self.need(4);
        self.a.load(Half, R4, R9, 0);
        self.a.mov(R3, 0);
        self.a.jump_if(If::Equal, R5, 6, self.places.port);
        self.a.jump_if(If::NotEqual, R5, 17, self.places.pass);
        self.a.mov(R3, i32::from(UDP_PORTS_AT));
        self.a.jump(self.places.port);
    }

    fn v6(&mut self) {
        let (known, target) = (self.a.label(), self.a.label());
        self.need(40);
        self.v6_key(24);
        self.look_up();
        self.a.jump_if(If::NotEqual, R0, 0, known);
        // Neighbour solicitations come to a group, advertisements may; they are about their target.
        self.a.load(Byte, R3, R9, 6);
        self.a.jump_if(If::NotEqual, R3, 58, self.places.pass);
        self.need(64);
        self.a.load(Byte, R3, R9, 40);
        self.a.jump_if(If::Equal, R3, 135, target);
        self.a.jump_if(If::NotEqual, R3, 136, self.places.pass);
        self.a.place(target);
        self.v6_key(48);
        self.about();

        self.a.place(known);
        self.a.load(Word, R1, R0, 0);
        self.a.jump_if(If::Equal, R1, WHOLE as i32, self.places.take);
        let icmp = self.a.label();
        self.a.load(Byte, R5, R9, 6);
        self.a.op(Op::Add, R9, 40);
        for _ in 0..EXTENSIONS_MAX {
            let (extension, protocol) = (self.a.label(), self.a.label());
            // Hop-by-hop options, routing, destination options. Fragments are the kernel's, as with IPv4.
            for header in [0, 43, 60] {
                self.a.jump_if(If::Equal, R5, header, extension);
            }
            self.a.jump(protocol);
            self.a.place(extension);
            self.need(8);
            self.a.load(Byte, R5, R9, 0);
            self.a.load(Byte, R4, R9, 1);
            self.a.op(Op::Add, R4, 1);
            self.a.op(Op::ShiftLeft, R4, 3);
            self.a.op(Op::Add, R9, R4);
            self.a.place(protocol);
        }
        self.a.jump_if(If::Equal, R5, 6, self.places.tcp);
        self.a.jump_if(If::Equal, R5, 17, self.places.udp);
        self.a.jump_if(If::Equal, R5, 58, icmp);
        self.a.jump(self.places.pass);
        self.a.place(icmp);
        self.need(8);
        self.a.load(Byte, R3, R9, 0);
        self.a.jump_if(If::Equal, R3, 0, self.places.pass);
        self.a.jump_if(If::Greater, R3, 4, self.places.pass);
        self.advance(8, 40);
        self.a.load(Byte, R5, R9, 6);
        self.a.op(Op::Add, R9, 40);
        self.quoted_port();
    }

    /// The frame is the stack's if its port is.
    fn ports(&mut self) {
        let destination = self.a.label();
        self.a.place(self.places.tcp);
        self.need(4);
        self.a.mov(R3, 0);
        self.a.jump(destination);
        self.a.place(self.places.udp);
        self.need(4);
        self.a.mov(R3, i32::from(UDP_PORTS_AT));
        self.a.place(destination);
        self.a.load(Half, R4, R9, 2);
        self.a.place(self.places.port);
        self.a.be16_to_host(R4);
        self.a.op(Op::And, R4, 0xffff);
        self.a.mov(R5, R4);
        self.a.op(Op::ShiftRight, R5, 3);
        self.a.op(Op::Add, R3, R5);
        self.a.map_value(R2, self.maps.ports, 0);
        self.a.op(Op::Add, R2, R3);
        self.a.load(Byte, R2, R2, 0);
        self.a.op(Op::And, R4, 7);
        self.a.op(Op::ShiftRight, R2, R4);
        self.a.op(Op::And, R2, 1);
        self.a.jump_if(If::Equal, R2, 0, self.places.pass);
    }

    /// Falls through to here if the frame is the stack's.
    fn verdicts(&mut self) {
        let a = &mut self.a;
        let redirected = a.label();
        a.place(self.places.take);
        a.load(Word, R2, R6, RX_QUEUE_INDEX_AT);
        a.map(R1, self.maps.sockets);
        a.mov(R3, XDP_DROP);
        a.call(HELPER_REDIRECT_MAP);
        a.jump_if(If::Equal, R0, XDP_REDIRECT, redirected);
        // Nobody takes it there. The kernel must not have it: it would reset the stack's connections.
        a.map_value(R1, self.maps.missed, 0);
        a.mov(R2, 1);
        a.atomic_add(R1, 0, R2);
        a.mov(R0, XDP_DROP);
        a.place(redirected);
        a.exit();
        a.place(self.places.pass);
        a.mov(R0, XDP_PASS);
        a.exit();
    }
}
