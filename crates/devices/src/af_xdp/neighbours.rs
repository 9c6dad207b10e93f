//! ARP and neighbour discovery messages that stack and kernel both must receive: broadcasts, and messages
//! about an address that they share. A frame can be redirected to one receiver only, so the redirect program
//! leaves these messages to the kernel, and a packet socket copies them for the stack. The ring of the socket
//! is read without a system call.
//!
//! The socket also joins the solicited-node multicast groups of the stack's IPv6 addresses. And it reports
//! when the interface goes down or is deleted, for which an AF_XDP socket does not wake a sleeper.
#![allow(unsafe_code)] // options that no crate names, and a ring in shared memory

use super::umem::Mapping;
use core::net::{IpAddr, Ipv6Addr};
use ginnel_stack::device::{RxBurst, RxFrame};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::ffi::c_int;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

/// Slots of the ring, which suffice because neighbour messages are rare.
const SLOTS: usize = 64;
/// Bytes of a slot. ARP and neighbour discovery messages are far shorter.
const SLOT_BYTES: usize = 2048;
/// Bytes reserved in front of a frame for its VLAN tag.
const TAG_BYTES: usize = 4;

/// A protocol that no frame has: an EtherType below 1,536 is a length.
const UNUSED_PROTOCOL: u16 = 0x05fe;

const PACKET_VERSION: c_int = 10;
const PACKET_RESERVE: c_int = 12;
const TPACKET_V2: c_int = 1;
const STATUS_KERNEL: u32 = 0;
const STATUS_USER: u32 = 1;
const STATUS_VLAN_VALID: u32 = 1 << 4;
const STATUS_VLAN_TPID_VALID: u32 = 1 << 6;

/// Returns one instruction of a classic BPF filter.
const fn classic_insn(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Accepts ARP, and ICMPv6 of types 135 (neighbour solicitation) and 136 (advertisement). The kernel has
/// removed VLAN tags before it runs the filter.
const FILTER: [libc::sock_filter; 10] = [
    classic_insn(0x28, 0, 0, 12),       // ldh [12]
    classic_insn(0x15, 7, 0, 0x0806),   // jeq #ARP, accept
    classic_insn(0x15, 0, 5, 0x86dd),   // jeq #IPv6, go on, drop
    classic_insn(0x30, 0, 0, 20),       // ldb [20]
    classic_insn(0x15, 0, 3, 58),       // jeq #ICMPv6, go on, drop
    classic_insn(0x30, 0, 0, 54),       // ldb [54]
    classic_insn(0x35, 0, 1, 135),      // jge #135, go on, drop
    classic_insn(0x25, 0, 1, 136),      // jgt #136, drop, accept
    classic_insn(0x06, 0, 0, 0),        // drop
    classic_insn(0x06, 0, 0, u32::MAX), // accept
];

/// A packet socket that receives copies of neighbour messages.
pub(super) struct NeighbourSocket {
    fd: OwnedFd,
    ring: Mapping,
    /// Slot that is read next.
    next: usize,
    /// Number of slots before `next` whose frames are lent.
    lent: usize,
}

impl NeighbourSocket {
    /// Opens a socket at an interface, and joins the solicited-node groups of the IPv6 addresses in
    /// `addresses`.
    pub(super) fn open(interface: u32, addresses: &[(IpAddr, u16)]) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Without a protocol, the socket receives nothing before the filter is attached.
        let fd = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        let mut filter = FILTER;
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        let packet = libc::SOL_PACKET;
        set_option(fd.as_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)?;
        set_option(fd.as_fd(), packet, PACKET_VERSION, &TPACKET_V2)?;
        set_option(fd.as_fd(), packet, PACKET_RESERVE, &(TAG_BYTES as c_int))?;
        set_option(fd.as_fd(), packet, libc::PACKET_IGNORE_OUTGOING, &1)?;
        let ring = libc::tpacket_req {
            tp_block_size: (SLOTS * SLOT_BYTES) as u32,
            tp_block_nr: 1,
            tp_frame_size: SLOT_BYTES as u32,
            tp_frame_nr: SLOTS as u32,
        };
        set_option(fd.as_fd(), packet, libc::PACKET_RX_RING, &ring)?;
        let ring = Mapping::map_fd(&fd, 0, SLOTS * SLOT_BYTES)?;
        for (address, _) in addresses {
            if let IpAddr::V6(address) = address {
                let group = libc::packet_mreq {
                    mr_ifindex: interface as c_int,
                    mr_type: libc::PACKET_MR_MULTICAST as u16,
                    mr_alen: 6,
                    mr_address: solicited_node_mac(*address),
                };
                set_option(fd.as_fd(), packet, libc::PACKET_ADD_MEMBERSHIP, &group)?;
            }
        }
        bind(fd.as_fd(), interface, libc::ETH_P_ALL as u16)?;
        Ok(Self { fd, ring, next: 0, lent: 0 })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Appends the frames received to `burst`. They remain valid until the next call.
    pub(super) fn receive<'a>(&'a mut self, burst: &mut RxBurst<'a>) {
        for distance in 1..=self.lent {
            self.status((self.next + SLOTS - distance) % SLOTS).store(STATUS_KERNEL, Ordering::Release);
        }
        self.lent = 0;
        let first = self.next;
        while self.lent < burst.remaining_capacity()
            && self.lent < SLOTS
            && self.status(self.next).load(Ordering::Acquire) & STATUS_USER != 0
        {
            self.restore_vlan_tag(self.next);
            self.next = (self.next + 1) % SLOTS;
            self.lent += 1;
        }
        let this = &*self;
        for offset in 0..this.lent {
            if let Some(bytes) = this.frame((first + offset) % SLOTS) {
                burst.push(RxFrame::new(bytes));
            }
        }
    }

    fn status(&self, slot: usize) -> &AtomicU32 {
        let at = self.ring.at(slot * SLOT_BYTES, 4).cast::<AtomicU32>();
        // SAFETY: inside the ring, which `self` keeps mapped, and aligned, because slots start at multiples
        // of 2,048 bytes of a page; the kernel changes the status as one word.
        unsafe { at.as_ref() }
    }

    fn header(&self, slot: usize) -> libc::tpacket2_hdr {
        let at = self.ring.at(slot * SLOT_BYTES, size_of::<libc::tpacket2_hdr>());
        // SAFETY: inside the ring; the kernel wrote the header before it passed the slot to the program, and
        // does not write to it meanwhile.
        unsafe { at.cast::<libc::tpacket2_hdr>().read() }
    }

    /// Returns offset and length of the frame in a slot, if the frame is inside its slot with room for a tag
    /// in front.
    fn frame_range(&self, slot: usize) -> Option<(usize, usize)> {
        let header = self.header(slot);
        let (start, len) = (usize::from(header.tp_mac), header.tp_snaplen as usize);
        let inside = start >= size_of::<libc::tpacket2_hdr>() + TAG_BYTES && start + len <= SLOT_BYTES;
        (inside && len >= 14).then_some((slot * SLOT_BYTES + start, len))
    }

    /// Restores the VLAN tag that the kernel has removed from the frame.
    fn restore_vlan_tag(&mut self, slot: usize) {
        let header = self.header(slot);
        let Some((start, _)) = self.frame_range(slot).filter(|_| header.tp_status & STATUS_VLAN_VALID != 0)
        else {
            return;
        };
        let has_tpid = header.tp_status & STATUS_VLAN_TPID_VALID != 0;
        let tag =
            [if has_tpid { header.tp_vlan_tpid } else { 0x8100 }, header.tp_vlan_tci].map(u16::to_be_bytes);
        let at = self.ring.at(start - TAG_BYTES, 12 + TAG_BYTES);
        // SAFETY: `frame_range` found the frame, of at least 14 bytes, and the room in front of it inside the
        // slot, which belongs to the program until its status changes; `&mut self` proves that no frame is
        // lent.
        let bytes = unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), 12 + TAG_BYTES) };
        bytes.copy_within(TAG_BYTES..TAG_BYTES + 12, 0);
        bytes[12..16].copy_from_slice(tag.as_flattened());
    }

    fn frame(&self, slot: usize) -> Option<&[u8]> {
        let (start, len) = self.frame_range(slot)?;
        let tag = if self.header(slot).tp_status & STATUS_VLAN_VALID != 0 { TAG_BYTES } else { 0 };
        let at = self.ring.at(start - tag, len + tag);
        // SAFETY: inside the slot, as `frame_range` found. The kernel writes there only after `receive`,
        // which takes `&mut self`, returned the slot.
        Some(unsafe { std::slice::from_raw_parts(at.as_ptr(), len + tag) })
    }
}

/// Returns the Ethernet address (RFC 2464 §7) of the solicited-node group (RFC 4291 §2.7.1).
fn solicited_node_mac(address: Ipv6Addr) -> [u8; 8] {
    let octets = address.octets();
    [0x33, 0x33, 0xff, octets[13], octets[14], octets[15], 0, 0]
}

/// Sets a socket option. `T` must be the type of the option.
fn set_option<T>(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of a value that outlives the call, and the filter that
    // one of the values points to, which also does.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Opens a socket that receives nothing and has an error when the interface goes down or is deleted.
pub(super) fn open_link_watch(interface: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    bind(fd.as_fd(), interface, UNUSED_PROTOCOL)?;
    Ok(fd)
}

/// Binds a packet socket to a protocol and an interface.
fn bind(fd: BorrowedFd<'_>, interface: u32, protocol: u16) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol.to_be(),
        sll_ifindex: interface as c_int,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: the kernel reads a `sockaddr_ll` of this length.
    let result = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
