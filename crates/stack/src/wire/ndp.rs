//! Neighbour discovery for IPv6 (RFC 4861): solicitations and advertisements of neighbours and routers.

use super::{MacAddr, WireError, array, be16, be32, head, icmpv6};
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

/// Hop limit of every message: proof that it was sent on this link (RFC 4861 §3.1).
pub const HOP_LIMIT: u8 = 255;

/// Prefixes read from one router advertisement; more of them are not looked at.
pub const PREFIXES_MAX: usize = 8;

/// Longest message that [`Message::emit`] writes: a router advertisement with everything in it.
pub const MESSAGE_LEN_MAX: usize = 16 + 8 + 8 + PREFIXES_MAX * 32;

const SOURCE_LINK_LAYER_ADDRESS: u8 = 1;
const TARGET_LINK_LAYER_ADDRESS: u8 = 2;
const PREFIX_INFORMATION: u8 = 3;
const MTU: u8 = 5;
const NONCE: u8 = 14;

/// The group that every owner of `address` joins (RFC 4291 §2.7.1).
pub const fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let low = address.to_bits() & 0x00ff_ffff;
    Ipv6Addr::from_bits(0xff02_0000_0000_0000_0000_0001_ff00_0000 | low)
}

/// A prefix that a router advertises (RFC 4861 §4.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixInfo {
    /// The prefix; bits beyond its length are as they came.
    pub prefix: Ipv6Addr,
    /// Bits of the prefix: 0 … 128.
    pub prefix_len: u8,
    /// Its addresses are on the link.
    pub on_link: bool,
    /// Addresses may be made from it (RFC 4862).
    pub autonomous: bool,
    /// How long it holds, in seconds; `u32::MAX` is forever.
    pub valid_lifetime_s: u32,
    /// How long addresses made from it are preferred, in seconds; `u32::MAX` is forever.
    pub preferred_lifetime_s: u32,
}

/// A router advertisement (RFC 4861 §4.2).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouterAdvertisement {
    /// Hop limit to send with, 0 if the router does not say.
    pub hop_limit: u8,
    /// Addresses come from DHCPv6.
    pub managed: bool,
    /// Other configuration comes from DHCPv6.
    pub other: bool,
    /// How long it is a default router, in seconds; 0 if it is none.
    pub router_lifetime_s: u16,
    /// How long a neighbour counts as reachable, in milliseconds, 0 if the router does not say.
    pub reachable_time_ms: u32,
    /// Time between solicitations, in milliseconds, 0 if the router does not say.
    pub retrans_timer_ms: u32,
    /// The router's Ethernet address.
    pub source_mac: Option<MacAddr>,
    /// MTU of the link, in bytes, as it came: not checked against anything.
    pub mtu: Option<u32>,
    /// Prefixes, at most [`PREFIXES_MAX`].
    pub prefixes: ArrayVec<PrefixInfo, PREFIXES_MAX>,
}

/// A neighbour discovery message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // messages are short-lived and rare, and nothing here allocates
pub enum NdpMessage {
    /// Which routers are there?
    RouterSolicitation {
        /// The sender's Ethernet address.
        source_mac: Option<MacAddr>,
    },
    /// A router presents itself.
    RouterAdvertisement(RouterAdvertisement),
    /// Who has the target address?
    NeighbourSolicitation {
        /// The address asked for.
        target: Ipv6Addr,
        /// The sender's Ethernet address. Never there in duplicate address detection.
        source_mac: Option<MacAddr>,
        /// By which a sender knows its own solicitation when the network loops it back (RFC 7527).
        nonce: Option<[u8; 6]>,
    },
    /// Somebody has the target address.
    NeighbourAdvertisement {
        /// The address.
        target: Ipv6Addr,
        /// The sender is a router.
        router: bool,
        /// In answer to a solicitation.
        solicited: bool,
        /// Replaces what is known.
        overrides: bool,
        /// The owner's Ethernet address.
        target_mac: Option<MacAddr>,
    },
}

/// What the options of a message hold, as far as we look.
#[derive(Default)]
struct NdpOptions {
    source_mac: Option<MacAddr>,
    target_mac: Option<MacAddr>,
    mtu: Option<u32>,
    nonce: Option<[u8; 6]>,
    prefixes: ArrayVec<PrefixInfo, PREFIXES_MAX>,
}

impl NdpOptions {
    /// Reads options. Unknown ones, and known ones of another length than theirs, are skipped (RFC 4861 §6.1.2, §7.1.1).
    fn parse(mut bytes: &[u8]) -> Result<Self, WireError> {
        let mut options = Self::default();
        while !bytes.is_empty() {
            let &[kind, units] = head::<2>(bytes)?;
            // RFC 4861 §4.6: the length counts units of 8 bytes; 0 makes the whole message invalid.
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
    /// Reads a message whose checksum was verified, with all the checks of RFC 4861 §6.1 and §7.1. `src`, `dst` and
    /// `hop_limit` are of its packet.
    ///
    /// # Errors
    /// `BadValue` if it must be ignored, `Truncated`, `BadLength`; `Unsupported` for redirects and what is not neighbour discovery.
    pub fn parse(message: &[u8], src: Ipv6Addr, dst: Ipv6Addr, hop_limit: u8) -> Result<Self, WireError> {
        let bytes = head::<8>(message)?;
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
        // RFC 4861 §6.1.1: who has no address yet must not announce one.
        if src.is_unspecified() && options.source_mac.is_some() {
            return Err(WireError::BadValue);
        }
        Ok(Self::RouterSolicitation { source_mac: options.source_mac })
    }

    fn parse_router_advertisement(message: &[u8], src: Ipv6Addr) -> Result<Self, WireError> {
        let bytes = head::<16>(message)?;
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
        let bytes = head::<24>(message)?;
        let options = NdpOptions::parse(&message[24..])?;
        let target = Ipv6Addr::from_octets(array(bytes, 8));
        // RFC 4861 §7.1.1: duplicate address detection goes to the target's group and announces no address.
        let detection_ok = dst == solicited_node(target) && options.source_mac.is_none();
        if target.is_multicast() || (src.is_unspecified() && !detection_ok) {
            return Err(WireError::BadValue);
        }
        Ok(Self::NeighbourSolicitation { target, source_mac: options.source_mac, nonce: options.nonce })
    }

    fn parse_neighbour_advertisement(message: &[u8], dst: Ipv6Addr) -> Result<Self, WireError> {
        let bytes = head::<24>(message)?;
        let options = NdpOptions::parse(&message[24..])?;
        let target = Ipv6Addr::from_octets(array(bytes, 8));
        let solicited = bytes[4] & 0x40 != 0;
        // RFC 4861 §7.1.2: what goes to a group answers nobody.
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

    /// Writes the message with its checksum for a packet between these addresses and returns its length. The packet has
    /// hop limit [`HOP_LIMIT`].
    ///
    /// # Panics
    /// If `out` is too short; [`MESSAGE_LEN_MAX`] is always enough.
    pub fn emit(&self, src: Ipv6Addr, dst: Ipv6Addr, out: &mut [u8]) -> usize {
        let mut writer = NdpWriter { out: &mut *out, len: 0 };
        match self {
            Self::RouterSolicitation { source_mac: source } => {
                writer.put(&[ROUTER_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
                writer.link_layer_address(SOURCE_LINK_LAYER_ADDRESS, *source);
            }
            Self::RouterAdvertisement(router) => writer.router_advertisement(router),
            Self::NeighbourSolicitation { target, source_mac: source, nonce } => {
                writer.put(&[NEIGHBOUR_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
                writer.put(&target.octets());
                writer.link_layer_address(SOURCE_LINK_LAYER_ADDRESS, *source);
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

/// Appends the parts of a message.
struct NdpWriter<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl NdpWriter<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// An option of 8 bytes, 6 of them its value.
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
