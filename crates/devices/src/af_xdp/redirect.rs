//! The redirect program: decides which frames of an interface go to the stack's sockets, and which to the
//! kernel.
//!
//! Messages that both need (broadcasts of neighbours, replies to an address that stack and kernel share) go
//! to the kernel, and to the stack as a copy: see [`super::neighbours`].

use super::assembler::{AluOp, Assembler, AssemblyError, Instruction, JumpCondition, JumpLabel, Reg, Width};
use Reg::{R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10};
use Width::{Byte, Double, Half, Word};
use core::net::IpAddr;
use std::os::fd::RawFd;

/// Results of XDP programs.
pub(super) const XDP_DROP: i32 = 1;
pub(super) const XDP_PASS: i32 = 2;
const XDP_REDIRECT: i32 = 4;

const HELPER_MAP_LOOKUP: i32 = 1;
const HELPER_REDIRECT_MAP: i32 = 51;

/// Bytes of [`key`].
pub(super) const KEY_BYTES: usize = 20;
/// Bytes of the port map: one bit for each TCP port, then one bit for each UDP port.
pub(super) const PORT_BYTES: usize = 2 * UDP_PORTS_AT as usize;
/// Offset of the bits of the UDP ports.
pub(super) const UDP_PORTS_AT: u16 = 8192;
/// Map value of an address whose frames are all redirected.
pub(super) const SCOPE_ADDRESS: u32 = 1;
/// Map value of an address whose frames are redirected only for some ports.
pub(super) const SCOPE_PORTS: u32 = 2;

/// Offset of the lookup key from the frame pointer of the program.
const KEY_AT: i16 = -24;
/// Maximum number of IPv6 extension headers that the program skips.
const EXTENSION_HEADERS_MAX: usize = 3;

/// Descriptors of the maps that the program reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maps {
    /// AF_XDP sockets by queue.
    pub(super) sockets: RawFd,
    /// [`SCOPE_ADDRESS`] or [`SCOPE_PORTS`] by [`key`].
    pub(super) addresses: RawFd,
    /// Bits of the redirected ports ([`PORT_BYTES`]).
    pub(super) ports: RawFd,
    /// Counter of frames for the stack that arrived on a queue without a socket.
    pub(super) drops_without_socket: RawFd,
}

/// Returns the lookup key of an address in a VLAN (0 for none).
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

/// Returns the program for an interface that the stack uses alone. Frames on queues without a socket go to
/// the kernel.
pub(super) fn redirect_all(maps: Maps) -> Result<Vec<Instruction>, AssemblyError> {
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

/// Returns a 16-bit number in network byte order as a 16-bit load reads it.
const fn be16(value: u16) -> i32 {
    value.to_be() as i32
}

/// Returns the program for an interface that the stack shares with the kernel.
pub(super) fn redirect_selected(maps: Maps) -> Result<Vec<Instruction>, AssemblyError> {
    let mut a = Assembler::default();
    let labels = CommonLabels {
        redirect: a.label(),
        pass: a.label(),
        tcp: a.label(),
        udp: a.label(),
        port: a.label(),
    };
    let mut program = Program { assembler: a, maps, labels };
    program.parse_ethernet();
    program.match_port();
    program.emit_verdicts();
    program.assembler.finish()
}

/// Labels that several parts of the program jump to.
#[derive(Clone, Copy)]
struct CommonLabels {
    /// The frame is redirected.
    redirect: JumpLabel,
    /// The frame goes to the kernel.
    pass: JumpLabel,
    /// `R9` points to a TCP header.
    tcp: JumpLabel,
    /// `R9` points to a UDP header.
    udp: JumpLabel,
    /// `R4` is a port in network byte order, `R3` the offset of its protocol in the port map.
    port: JumpLabel,
}

/// `R6` is the context, `R7` the start of the frame, `R8` its end, `R9` the current header.
struct Program {
    assembler: Assembler,
    maps: Maps,
    labels: CommonLabels,
}

impl Program {
    fn parse_ethernet(&mut self) {
        let (tag, untagged) = (self.assembler.label(), self.assembler.label());
        let (v4, v6, arp) = (self.assembler.label(), self.assembler.label(), self.assembler.label());
        let a = &mut self.assembler;
        a.mov(R6, R1);
        a.load(Word, R7, R6, DATA_AT);
        a.load(Word, R8, R6, DATA_END_AT);
        a.mov(R9, R7);
        self.advance(14, 0);
        let a = &mut self.assembler;
        a.load(Half, R3, R7, 12);
        a.mov(R4, 0);
        a.jump_if(JumpCondition::Equal, R3, be16(0x8100), tag);
        a.jump_if(JumpCondition::NotEqual, R3, be16(0x88a8), untagged);
        a.bind(tag);
        self.advance(4, 0);
        let a = &mut self.assembler;
        a.load(Half, R4, R7, 14);
        a.be16_to_host(R4);
        a.alu(AluOp::And, R4, 0xfff);
        a.load(Half, R3, R7, 16);
        a.bind(untagged);
        a.store(Word, R10, KEY_AT + 16, R4);
        a.jump_if(JumpCondition::Equal, R3, be16(0x0800), v4);
        a.jump_if(JumpCondition::Equal, R3, be16(0x86dd), v6);
        a.jump_if(JumpCondition::Equal, R3, be16(0x0806), arp);
        a.jump(self.labels.pass);
        self.assembler.bind(arp);
        self.parse_arp();
        self.assembler.bind(v4);
        self.parse_v4();
        self.assembler.bind(v6);
        self.parse_v6();
    }

    /// Moves `R9` forward by `bytes`. The frame goes to the kernel unless it contains these bytes and `more`
    /// bytes after them.
    fn advance(&mut self, bytes: i32, more: i32) {
        self.assembler.alu(AluOp::Add, R9, bytes);
        self.require(more);
    }

    /// The frame goes to the kernel unless it contains `bytes` bytes from `R9` on.
    fn require(&mut self, bytes: i32) {
        self.assembler.mov(R2, R9);
        self.assembler.alu(AluOp::Add, R2, bytes);
        self.assembler.jump_if(JumpCondition::Greater, R2, R8, self.labels.pass);
    }

    /// Stores the key of the IPv4 address at `R9 + offset`.
    fn v4_key(&mut self, offset: i16) {
        self.assembler.store(Double, R10, KEY_AT, 0);
        self.assembler.store(Word, R10, KEY_AT + 8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
        self.assembler.load(Word, R3, R9, offset);
        self.assembler.store(Word, R10, KEY_AT + 12, R3);
    }

    /// Stores the key of the IPv6 address at `R9 + offset`.
    fn v6_key(&mut self, offset: i16) {
        for half in [0, 8] {
            self.assembler.load(Double, R3, R9, offset + half);
            self.assembler.store(Double, R10, KEY_AT + half, R3);
        }
    }

    /// Looks up the key. `R0` is the address of its value, or 0.
    fn lookup_address(&mut self) {
        self.assembler.map(R1, self.maps.addresses);
        self.assembler.mov(R2, R10);
        self.assembler.alu(AluOp::Add, R2, i32::from(KEY_AT));
        self.assembler.call(HELPER_MAP_LOOKUP);
    }

    /// Redirects the frame if all frames of the address in the key are redirected; otherwise the frame goes
    /// to the kernel.
    fn redirect_if_scope_address(&mut self) {
        self.lookup_address();
        self.assembler.jump_if(JumpCondition::Equal, R0, 0, self.labels.pass);
        self.assembler.load(Word, R1, R0, 0);
        self.assembler.jump_if(JumpCondition::Equal, R1, SCOPE_ADDRESS as i32, self.labels.redirect);
        self.assembler.jump(self.labels.pass);
    }

    /// Decides by the target address of ARP requests and replies (RFC 826).
    fn parse_arp(&mut self) {
        self.require(28);
        for (offset, value) in [(0, 1), (2, 0x0800), (4, 0x0604)] {
            self.assembler.load(Half, R3, R9, offset);
            self.assembler.jump_if(JumpCondition::NotEqual, R3, be16(value), self.labels.pass);
        }
        self.v4_key(24);
        self.redirect_if_scope_address();
    }

    /// Sets `R5` to the protocol of the IPv4 header at `R9`, and moves `R9` past that header.
    fn skip_v4_header(&mut self) {
        self.assembler.load(Byte, R5, R9, 9);
        self.assembler.load(Byte, R4, R9, 0);
        self.assembler.alu(AluOp::And, R4, 0x0f);
        self.assembler.alu(AluOp::ShiftLeft, R4, 2);
        self.assembler.jump_if(JumpCondition::Less, R4, 20, self.labels.pass);
        self.assembler.alu(AluOp::Add, R9, R4);
    }

    fn parse_v4(&mut self) {
        self.require(20);
        self.v4_key(16);
        self.lookup_address();
        self.assembler.jump_if(JumpCondition::Equal, R0, 0, self.labels.pass);
        self.assembler.load(Word, R1, R0, 0);
        self.assembler.jump_if(JumpCondition::Equal, R1, SCOPE_ADDRESS as i32, self.labels.redirect);
        // Only the first fragment has ports, so all fragments to a shared address go to the kernel.
        self.assembler.load(Half, R3, R9, 6);
        self.assembler.alu(AluOp::And, R3, be16(0x3fff));
        self.assembler.jump_if(JumpCondition::NotEqual, R3, 0, self.labels.pass);
        self.skip_v4_header();
        self.assembler.jump_if(JumpCondition::Equal, R5, 6, self.labels.tcp);
        self.assembler.jump_if(JumpCondition::Equal, R5, 17, self.labels.udp);
        self.assembler.jump_if(JumpCondition::NotEqual, R5, 1, self.labels.pass);
        // An ICMP error is redirected if it quotes a packet from one of the stack's ports.
        self.require(8);
        let quote = self.assembler.label();
        self.assembler.load(Byte, R3, R9, 0);
        for kind in [3, 11, 12] {
            self.assembler.jump_if(JumpCondition::Equal, R3, kind, quote);
        }
        self.assembler.jump(self.labels.pass);
        self.assembler.bind(quote);
        self.advance(8, 20);
        self.assembler.load(Half, R3, R9, 6);
        self.assembler.alu(AluOp::And, R3, be16(0x1fff));
        self.assembler.jump_if(JumpCondition::NotEqual, R3, 0, self.labels.pass);
        self.skip_v4_header();
        self.match_quoted_port();
    }

    /// Decides by the source port of a quoted packet: `R9` points to its transport header, `R5` is its
    /// protocol.
    fn match_quoted_port(&mut self) {
        self.require(4);
        self.assembler.load(Half, R4, R9, 0);
        self.assembler.mov(R3, 0);
        self.assembler.jump_if(JumpCondition::Equal, R5, 6, self.labels.port);
        self.assembler.jump_if(JumpCondition::NotEqual, R5, 17, self.labels.pass);
        self.assembler.mov(R3, i32::from(UDP_PORTS_AT));
        self.assembler.jump(self.labels.port);
    }

    fn parse_v6(&mut self) {
        let (known, target) = (self.assembler.label(), self.assembler.label());
        self.require(40);
        self.v6_key(24);
        self.lookup_address();
        self.assembler.jump_if(JumpCondition::NotEqual, R0, 0, known);
        // Neighbour solicitations, and some advertisements, go to a multicast group; the target address in
        // them decides.
        self.assembler.load(Byte, R3, R9, 6);
        self.assembler.jump_if(JumpCondition::NotEqual, R3, 58, self.labels.pass);
        self.require(64);
        self.assembler.load(Byte, R3, R9, 40);
        self.assembler.jump_if(JumpCondition::Equal, R3, 135, target);
        self.assembler.jump_if(JumpCondition::NotEqual, R3, 136, self.labels.pass);
        self.assembler.bind(target);
        self.v6_key(48);
        self.redirect_if_scope_address();

        self.assembler.bind(known);
        self.assembler.load(Word, R1, R0, 0);
        self.assembler.jump_if(JumpCondition::Equal, R1, SCOPE_ADDRESS as i32, self.labels.redirect);
        let icmp = self.assembler.label();
        self.assembler.load(Byte, R5, R9, 6);
        self.assembler.alu(AluOp::Add, R9, 40);
        for _ in 0..EXTENSION_HEADERS_MAX {
            let (extension, protocol) = (self.assembler.label(), self.assembler.label());
            // Skips hop-by-hop options, routing header and destination options. Fragments go to the kernel,
            // as with IPv4.
            for header in [0, 43, 60] {
                self.assembler.jump_if(JumpCondition::Equal, R5, header, extension);
            }
            self.assembler.jump(protocol);
            self.assembler.bind(extension);
            self.require(8);
            self.assembler.load(Byte, R5, R9, 0);
            self.assembler.load(Byte, R4, R9, 1);
            self.assembler.alu(AluOp::Add, R4, 1);
            self.assembler.alu(AluOp::ShiftLeft, R4, 3);
            self.assembler.alu(AluOp::Add, R9, R4);
            self.assembler.bind(protocol);
        }
        self.assembler.jump_if(JumpCondition::Equal, R5, 6, self.labels.tcp);
        self.assembler.jump_if(JumpCondition::Equal, R5, 17, self.labels.udp);
        self.assembler.jump_if(JumpCondition::Equal, R5, 58, icmp);
        self.assembler.jump(self.labels.pass);
        self.assembler.bind(icmp);
        self.require(8);
        self.assembler.load(Byte, R3, R9, 0);
        self.assembler.jump_if(JumpCondition::Equal, R3, 0, self.labels.pass);
        self.assembler.jump_if(JumpCondition::Greater, R3, 4, self.labels.pass);
        self.advance(8, 40);
        self.assembler.load(Byte, R5, R9, 6);
        self.assembler.alu(AluOp::Add, R9, 40);
        self.match_quoted_port();
    }

    /// Redirects the frame if its port is redirected.
    fn match_port(&mut self) {
        let destination = self.assembler.label();
        self.assembler.bind(self.labels.tcp);
        self.require(4);
        self.assembler.mov(R3, 0);
        self.assembler.jump(destination);
        self.assembler.bind(self.labels.udp);
        self.require(4);
        self.assembler.mov(R3, i32::from(UDP_PORTS_AT));
        self.assembler.bind(destination);
        self.assembler.load(Half, R4, R9, 2);
        self.assembler.bind(self.labels.port);
        self.assembler.be16_to_host(R4);
        self.assembler.alu(AluOp::And, R4, 0xffff);
        self.assembler.mov(R5, R4);
        self.assembler.alu(AluOp::ShiftRight, R5, 3);
        self.assembler.alu(AluOp::Add, R3, R5);
        self.assembler.map_value(R2, self.maps.ports, 0);
        self.assembler.alu(AluOp::Add, R2, R3);
        self.assembler.load(Byte, R2, R2, 0);
        self.assembler.alu(AluOp::And, R4, 7);
        self.assembler.alu(AluOp::ShiftRight, R2, R4);
        self.assembler.alu(AluOp::And, R2, 1);
        self.assembler.jump_if(JumpCondition::Equal, R2, 0, self.labels.pass);
    }

    /// Ends the program. Control falls through to the label `redirect` if the frame is for the stack.
    fn emit_verdicts(&mut self) {
        let a = &mut self.assembler;
        let redirected = a.label();
        a.bind(self.labels.redirect);
        a.load(Word, R2, R6, RX_QUEUE_INDEX_AT);
        a.map(R1, self.maps.sockets);
        a.mov(R3, XDP_DROP);
        a.call(HELPER_REDIRECT_MAP);
        a.jump_if(JumpCondition::Equal, R0, XDP_REDIRECT, redirected);
        // No socket is bound to the queue. The frame must not go to the kernel, which would reset the stack's
        // connections.
        a.map_value(R1, self.maps.drops_without_socket, 0);
        a.mov(R2, 1);
        a.atomic_add(R1, 0, R2);
        a.mov(R0, XDP_DROP);
        a.bind(redirected);
        a.exit();
        a.bind(self.labels.pass);
        a.mov(R0, XDP_PASS);
        a.exit();
    }
}
