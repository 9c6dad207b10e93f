//! Options of UDP sockets, as C passes them.

use crate::failure::Failure;
use crate::options::nonzero;
use core::net::Ipv4Addr;
use ginnel::{LinkId, MulticastOptions, PmtuDiscovery, UdpOptions, priority};
use rustix::io::Errno;

const OUT_OF_RANGE: Failure = Failure::new(Errno::INVAL, "an option of a UDP socket is out of range");

/// `GINNEL_UDP_REUSE_PORT`.
pub const REUSE_PORT: u32 = 1;
/// `GINNEL_UDP_V6_ONLY`.
pub const V6_ONLY: u32 = 1 << 1;
/// `GINNEL_UDP_BROADCAST`.
pub const BROADCAST: u32 = 1 << 2;
/// `GINNEL_UDP_REUSE_ADDRESS`.
pub const REUSE_ADDRESS: u32 = 1 << 3;
/// `GINNEL_UDP_GRO`.
pub const GRO: u32 = 1 << 4;
/// `GINNEL_UDP_RECVERR_V4`.
pub const RECVERR_V4: u32 = 1 << 5;
/// `GINNEL_UDP_RECVERR_V6`.
pub const RECVERR_V6: u32 = 1 << 6;
const ALL: u32 = (RECVERR_V6 << 1) - 1;

/// `GINNEL_MULTICAST_NO_LOOP`.
pub const NO_LOOP: u8 = 1;
/// `GINNEL_MULTICAST_MEMBERS_ONLY`.
pub const MEMBERS_ONLY: u8 = 1 << 1;
/// `GINNEL_MULTICAST_THIS_HOST`.
pub const THIS_HOST: u8 = 1 << 2;
const ALL_MULTICAST: u8 = (THIS_HOST << 1) - 1;

/// `struct ginnel_multicast_options`. Numbers that are 0 leave the default.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CMulticastOptions {
    /// An IPv4 address in network byte order.
    pub source: u32,
    pub link: u16,
    pub hop_limit: u8,
    pub flags: u8,
}

/// Returns the link with a number of C, which counts from 1; `None` for 0.
pub fn link(number: u16) -> Option<LinkId> {
    number.checked_sub(1).map(LinkId)
}

impl CMulticastOptions {
    /// Returns the options of a family.
    ///
    /// # Errors
    /// `EINVAL` if flags are unknown or contradict the hop limit.
    fn get(&self) -> Result<MulticastOptions, Failure> {
        let has = |flag| self.flags & flag != 0;
        if has(!ALL_MULTICAST) || has(THIS_HOST) && self.hop_limit != 0 {
            return Err(OUT_OF_RANGE);
        }
        Ok(MulticastOptions {
            link: link(self.link),
            source: nonzero(self.source).map(|source| Ipv4Addr::from(u32::from_be(source))),
            hop_limit: if has(THIS_HOST) { Some(0) } else { nonzero(self.hop_limit) },
            no_loop: has(NO_LOOP),
            members_only: has(MEMBERS_ONLY),
        })
    }
}

/// `struct ginnel_udp_options`. Numbers that are 0 leave the default.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CUdpOptions {
    pub flags: u32,
    pub recv_buffer_bytes: u32,
    pub priority: u8,
    pub tos: u8,
    pub hop_limit: u8,
    pub pmtu_discovery: u8,
    pub reserved: [u8; 4],
    pub multicast_v4: CMulticastOptions,
    pub multicast_v6: CMulticastOptions,
}

/// Returns the mode with the number `GINNEL_PMTU_…` of `ginnel.h`.
pub fn pmtu_discovery(number: u8) -> Option<PmtuDiscovery> {
    Some(match number {
        0 => PmtuDiscovery::Want,
        1 => PmtuDiscovery::Dont,
        2 => PmtuDiscovery::Do,
        3 => PmtuDiscovery::Probe,
        4 => PmtuDiscovery::Interface,
        5 => PmtuDiscovery::Omit,
        _ => return None,
    })
}

impl CUdpOptions {
    /// Returns the options of a socket.
    ///
    /// # Errors
    /// `EINVAL` if flags are unknown, a number is out of range, or reserved bytes are not 0.
    pub fn get(&self) -> Result<UdpOptions, Failure> {
        let has = |flag| self.flags & flag != 0;
        if has(!ALL)
            || self.reserved != [0; 4]
            || self.multicast_v6.source != 0
            || usize::from(self.priority) >= priority::CLASSES
        {
            return Err(OUT_OF_RANGE);
        }
        Ok(UdpOptions {
            reuse_port: has(REUSE_PORT),
            reuse_address: has(REUSE_ADDRESS),
            v6only: has(V6_ONLY),
            broadcast: has(BROADCAST),
            gro: has(GRO),
            recverr_v4: has(RECVERR_V4),
            recverr_v6: has(RECVERR_V6),
            rcvbuf: nonzero(self.recv_buffer_bytes),
            hop_limit: nonzero(self.hop_limit),
            tos: self.tos,
            priority: self.priority,
            pmtu_discovery: pmtu_discovery(self.pmtu_discovery).ok_or(OUT_OF_RANGE)?,
            multicast_v4: self.multicast_v4.get()?,
            multicast_v6: self.multicast_v6.get()?,
            ..UdpOptions::default()
        })
    }
}
