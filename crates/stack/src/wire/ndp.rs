//! Neighbour discovery for IPv6 (RFC 4861): solicitations and advertisements of neighbours and routers.

use super::{MacAddr, WireError, array, be16, be32, header_bytes, icmpv6};
use arrayvec::ArrayVec;
use core::net::Ipv6Addr;

/// ICMPv6 type of a router solicitation.
pub const ROUTER_SOLICITATION: u8 = 133;
/// ICMPv6 type of a router advertisement.
pub const ROUTER_ADVERTISEMENT: u8 = 134;
/// ICMPv6 type of a neighbour solicitation.
pub const NEIGHBOUR_SOLICITATION: u8 = 135;
/// ICMPv6 type of a neighbour advertisement.
pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// ICMPv6 type of a redirect.
pub const REDIRECT: u8 = 137;

/// Hop limit of every message, which proves that it was sent on this link (RFC 4861 §3.1).
pub const HOP_LIMIT: u8 = 255;

/// Largest number of prefixes parsed from one router advertisement; further ones are ignored.
pub const PREFIXES_MAX: usize = 8;

/// Length in bytes of the longest message that [`NdpMessage::emit`] writes: a router advertisement with all
/// options.
pub const MESSAGE_LEN_MAX: usize = 16 + 8 + 8 + PREFIXES_MAX * 32;

const SOURCE_LINK_LAYER_ADDRESS: u8 = 1;
const TARGET_LINK_LAYER_ADDRESS: u8 = 2;
const PREFIX_INFORMATION: u8 = 3;
const MTU: u8 = 5;
const NONCE: u8 = 14;

/// Returns the solicited-node group of an address (RFC 4291 §2.7.1), which every host with that address
/// joins.
pub const fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let low = address.to_bits() & 0x00ff_ffff;
    Ipv6Addr::from_bits(0xff02_0000_0000_0000_0000_0001_ff00_0000 | low)
}

/// A prefix in a router advertisement (RFC 4861 §4.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixInfo {
    /// The prefix. Bits beyond its length are unspecified.
    pub prefix: Ipv6Addr,
    /// Length of the prefix in bits: 0 … 128.
    pub prefix_len: u8,
    /// True if its addresses are on the link.
    pub on_link: bool,
    /// True if addresses may be formed from it (RFC 4862).
    pub autonomous: bool,
    /// Valid lifetime in seconds; `u32::MAX` is infinity.
    pub valid_lifetime_s: u32,
    /// Preferred lifetime of addresses formed from it, in seconds; `u32::MAX` is infinity.
    pub preferred_lifetime_s: u32,
}

/// A router advertisement (RFC 4861 §4.2).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouterAdvertisement {
    /// Hop limit for transmitted packets; 0 if unspecified.
    pub hop_limit: u8,
    /// True if addresses are available by DHCPv6.
    pub managed: bool,
    /// True if other configuration is available by DHCPv6.
    pub other: bool,
    /// Lifetime as a default router, in seconds; 0 if the router is not a default router.
    pub router_lifetime_s: u16,
    /// Reachable time of neighbours in milliseconds; 0 if unspecified.
    pub reachable_time_ms: u32,
    /// Time between solicitations in milliseconds; 0 if unspecified.
    pub retrans_timer_ms: u32,
    /// The router's Ethernet address.
    pub source_mac: Option<MacAddr>,
    /// MTU of the link in bytes, unchecked.
    pub mtu: Option<u32>,
    /// Prefixes, at most [`PREFIXES_MAX`].
    pub prefixes: ArrayVec<PrefixInfo, PREFIXES_MAX>,
}

/// A neighbour discovery message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // messages are short-lived and rare, and nothing here allocates
pub enum NdpMessage {
    /// Asks for routers.
    RouterSolicitation {
        /// The sender's Ethernet address.
        source_mac: Option<MacAddr>,
    },
    /// Announces a router.
    RouterAdvertisement(RouterAdvertisement),
    /// Asks for the Ethernet address of the target.
    NeighbourSolicitation {
        /// The target address.
        target: Ipv6Addr,
        /// The sender's Ethernet address; absent in duplicate address detection.
        source_mac: Option<MacAddr>,
        /// Identifies the sender's own solicitation if the network loops it back (RFC 7527).
        nonce: Option<[u8; 6]>,
    },
    /// Announces the Ethernet address of the target.
    NeighbourAdvertisement {
        /// The target address.
        target: Ipv6Addr,
        /// True if the sender is a router.
        router: bool,
        /// True if the message answers a solicitation.
        solicited: bool,
        /// True if it overrides an existing entry.
        overrides: bool,
        /// The target's Ethernet address.
        target_mac: Option<MacAddr>,
    },
}

/// The options of a message that are evaluated.
#[derive(Default)]
struct NdpOptions {
    source_mac: Option<MacAddr>,
    target_mac: Option<MacAddr>,
    mtu: Option<u32>,
    nonce: Option<[u8; 6]>,
    prefixes: ArrayVec<PrefixInfo, PREFIXES_MAX>,
}

impl NdpOptions {
    /// Parses options. Unknown options, and known options with an unexpected length, are skipped (RFC 4861
    /// §6.1.2, §7.1.1).
    fn parse(mut bytes: &[u8]) -> Result<Self, WireError> {
        let mut options = Self::default();
        while !bytes.is_empty() {
            let &[kind, units] = header_bytes::<2>(bytes)?;
            // RFC 4861 §4.6: the length is given in units of 8 bytes; 0 makes the whole message invalid.
            if units == 0 {
                return Err(WireError::BadLength);
            }
            let (option, rest) =
                bytes.split_at_checked(usize::from(units) * 8).ok_or(WireError::Truncated)?;
            options.read(kind, option);
            bytes = rest;
        }
        Ok(options)
    }

    fn read(&mut self, kind: u8, option: &[u8]) {
        if let Ok(option) = <&[u8; 8]>::try_from(option) {
            match kind {
                SOURCE_LINK_LAYER_ADDRESS => self.source_mac = Some(MacAddr(array(option, 2))),
                TARGET_LINK_LAYER_ADDRESS => self.target_mac = Some(MacAddr(array(option, 2))),
                MTU => self.mtu = Some(be32(option, 4)),
                NONCE => self.nonce = Some(array(option, 2)),
                _ => {}
            }
        } else if let (PREFIX_INFORMATION, Ok(option)) = (kind, <&[u8; 32]>::try_from(option)) {
            let prefix = PrefixInfo {
                prefix: Ipv6Addr::from_octets(array(option, 16)),
                prefix_len: option[2],
                on_link: option[3] & 0x80 != 0,
                autonomous: option[3] & 0x40 != 0,
                valid_lifetime_s: be32(option, 4),
                preferred_lifetime_s: be32(option, 8),
            };
            if prefix.prefix_len <= 128 && !self.prefixes.is_full() {
                self.prefixes.push(prefix);
            }
        }
    }
}

impl NdpMessage {
    /// Parses a message whose checksum has been verified, and makes all checks of RFC 4861 §6.1 and §7.1.
    /// `src`, `dst` and `hop_limit` are those of its packet.
    ///
    /// # Errors
    /// `BadValue` if the message must be ignored, `Truncated`, `BadLength`; `Unsupported` for redirects and
    /// for messages other than neighbour discovery.
    pub fn parse(message: &[u8], src: Ipv6Addr, dst: Ipv6Addr, hop_limit: u8) -> Result<Self, WireError> {
        let bytes = header_bytes::<8>(message)?;
        if hop_limit != HOP_LIMIT || bytes[1] != 0 {
            return Err(WireError::BadValue);
        }
        match bytes[0] {
            ROUTER_SOLICITATION => Self::parse_router_solicitation(message, src),
            ROUTER_ADVERTISEMENT => Self::parse_router_advertisement(message, src),
            NEIGHBOUR_SOLICITATION => Self::parse_neighbour_solicitation(message, src, dst),
            NEIGHBOUR_ADVERTISEMENT => Self::parse_neighbour_advertisement(message, dst),
            _ => Err(WireError::Unsupported),
        }
    }

    fn parse_router_solicitation(message: &[u8], src: Ipv6Addr) -> Result<Self, WireError> {
        let options = NdpOptions::parse(&message[8..])?;
        // RFC 4861 §6.1.1: a host without an address must not announce its link-layer address.
        if src.is_unspecified() && options.source_mac.is_some() {
            return Err(WireError::BadValue);
        }
        Ok(Self::RouterSolicitation { source_mac: options.source_mac })
    }

    fn parse_router_advertisement(message: &[u8], src: Ipv6Addr) -> Result<Self, WireError> {
        let bytes = header_bytes::<16>(message)?;
        let options = NdpOptions::parse(&message[16..])?;
        // RFC 4861 §6.1.2: routers use their link-local address.
        if !src.is_unicast_link_local() {
            return Err(WireError::BadValue);
        }
        Ok(Self::RouterAdvertisement(RouterAdvertisement {
            hop_limit: bytes[4],
            managed: bytes[5] & 0x80 != 0,
            other: bytes[5] & 0x40 != 0,
            router_lifetime_s: be16(bytes, 6),
            reachable_time_ms: be32(bytes, 8),
            retrans_timer_ms: be32(bytes, 12),
            source_mac: options.source_mac,
            mtu: options.mtu,
            prefixes: options.prefixes,
        }))
    }

    fn parse_neighbour_solicitation(message: &[u8], src: Ipv6Addr, dst: Ipv6Addr) -> Result<Self, WireError> {
        let bytes = header_bytes::<24>(message)?;
        let options = NdpOptions::parse(&message[24..])?;
        let target = Ipv6Addr::from_octets(array(bytes, 8));
        // RFC 4861 §7.1.1: duplicate address detection is sent to the solicited-node group and contains no
        // link-layer address.
        let detection_ok = dst == solicited_node(target) && options.source_mac.is_none();
        if target.is_multicast() || (src.is_unspecified() && !detection_ok) {
            return Err(WireError::BadValue);
        }
        Ok(Self::NeighbourSolicitation { target, source_mac: options.source_mac, nonce: options.nonce })
    }

    fn parse_neighbour_advertisement(message: &[u8], dst: Ipv6Addr) -> Result<Self, WireError> {
        let bytes = header_bytes::<24>(message)?;
        let options = NdpOptions::parse(&message[24..])?;
        let target = Ipv6Addr::from_octets(array(bytes, 8));
        let solicited = bytes[4] & 0x40 != 0;
        // RFC 4861 §7.1.2: an advertisement to a group cannot answer a solicitation.
        if target.is_multicast() || (dst.is_multicast() && solicited) {
            return Err(WireError::BadValue);
        }
        Ok(Self::NeighbourAdvertisement {
            target,
            router: bytes[4] & 0x80 != 0,
            solicited,
            overrides: bytes[4] & 0x20 != 0,
            target_mac: options.target_mac,
        })
    }

    /// Writes the message with its checksum, for a packet with these addresses, and returns its length. The
    /// packet must have hop limit [`HOP_LIMIT`].
    ///
    /// # Panics
    /// If `out` is too short; [`MESSAGE_LEN_MAX`] bytes are always sufficient.
    pub fn emit(&self, src: Ipv6Addr, dst: Ipv6Addr, out: &mut [u8]) -> usize {
        let mut writer = NdpWriter { out: &mut *out, len: 0 };
        match self {
            Self::RouterSolicitation { source_mac } => {
                writer.put(&[ROUTER_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
                writer.link_layer_address(SOURCE_LINK_LAYER_ADDRESS, *source_mac);
            }
            Self::RouterAdvertisement(router) => writer.router_advertisement(router),
            Self::NeighbourSolicitation { target, source_mac, nonce } => {
                writer.put(&[NEIGHBOUR_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
                writer.put(&target.octets());
                writer.link_layer_address(SOURCE_LINK_LAYER_ADDRESS, *source_mac);
                writer.link_layer_address(NONCE, nonce.map(MacAddr));
            }
            Self::NeighbourAdvertisement { target, router, solicited, overrides, target_mac } => {
                let flags = u8::from(*router) << 7 | u8::from(*solicited) << 6 | u8::from(*overrides) << 5;
                writer.put(&[NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0]);
                writer.put(&target.octets());
                writer.link_layer_address(TARGET_LINK_LAYER_ADDRESS, *target_mac);
            }
        }
        let len = writer.len;
        icmpv6::complete_checksum(src, dst, &mut out[..len]);
        len
    }
}

/// Appends the parts of a message to a buffer.
struct NdpWriter<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl NdpWriter<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// Appends an option of 8 bytes with a value of 6 bytes, if there is a value.
    fn link_layer_address(&mut self, kind: u8, address: Option<MacAddr>) {
        if let Some(MacAddr(address)) = address {
            self.put(&[kind, 1]);
            self.put(&address);
        }
    }

    fn router_advertisement(&mut self, router: &RouterAdvertisement) {
        let flags = u8::from(router.managed) << 7 | u8::from(router.other) << 6;
        self.put(&[ROUTER_ADVERTISEMENT, 0, 0, 0, router.hop_limit, flags]);
        self.put(&router.router_lifetime_s.to_be_bytes());
        self.put(&router.reachable_time_ms.to_be_bytes());
        self.put(&router.retrans_timer_ms.to_be_bytes());
        self.link_layer_address(SOURCE_LINK_LAYER_ADDRESS, router.source_mac);
        if let Some(mtu) = router.mtu {
            self.put(&[MTU, 1, 0, 0]);
            self.put(&mtu.to_be_bytes());
        }
        for prefix in &router.prefixes {
            let flags = u8::from(prefix.on_link) << 7 | u8::from(prefix.autonomous) << 6;
            self.put(&[PREFIX_INFORMATION, 4, prefix.prefix_len, flags]);
            self.put(&prefix.valid_lifetime_s.to_be_bytes());
            self.put(&prefix.preferred_lifetime_s.to_be_bytes());
            self.put(&[0; 4]);
            self.put(&prefix.prefix.octets());
        }
    }
}

#[cfg(test)]
mod tests;
