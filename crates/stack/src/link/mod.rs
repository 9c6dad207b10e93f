//! Links: a device, or one VLAN of a device, with its addresses. The submodules implement neighbours (ARP,
//! NDP), address autoconfiguration and multicast group membership.

mod arp;
mod autoconf;
mod control;
pub(crate) mod groups;
pub(crate) mod ndp;
pub mod neighbour;
mod resolve;

pub use groups::ShardGroup;

use crate::device::{Capabilities, PayloadPiece, TxMeta, TxQueue};
use crate::error::ConfigError;
use crate::handle::{LinkId, PortId};
use crate::ip::NetworkConfig;
use crate::ip::path_mtu::IPV6_MTU_MIN;
use crate::ip::route::same_network;
use crate::link::groups::GroupTable;
use crate::link::neighbour::LINK_HEADER_MAX;
use crate::time::Instant;
use crate::wire::MacAddr;
use crate::wire::ethernet::{self, EtherType, VlanTag};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;

/// Smallest MTU of an IPv4 link in bytes (RFC 791 §3.2).
pub const IPV4_MTU_MIN: u16 = 68;

/// The all-hosts group (RFC 1112 §4).
pub(crate) const ALL_HOSTS_V4: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 1);
/// The all-nodes group (RFC 4291 §2.7.1).
pub(crate) const ALL_NODES_V6: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// The configuration of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkConfig {
    /// Name for listings and for routes in a configuration file.
    pub name: String,
    /// Addresses with their prefix lengths. The first of each family is the preferred source address.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Networks whose addresses are all local, with their prefix lengths: packets to them are accepted and
    /// sockets may bind them, as with Linux's `local` routes. ARP requests for these addresses are answered,
    /// neighbour solicitations are not, and none of them is selected as a source address.
    pub local_networks: Vec<(IpAddr, u8)>,
    /// MTU in bytes: 68 … the device's MTU; `None` uses the device's. Below 1,280 IPv6 is disabled on the
    /// link, and it cannot have IPv6 addresses.
    pub mtu: Option<usize>,
    /// The 802.1Q VLAN of the link: 1 … 4,094. `None` for untagged frames.
    pub vlan: Option<u16>,
    /// True if routers are solicited, and addresses and routes are formed from their advertisements (RFC
    /// 4861, RFC 4862).
    pub accept_ra: bool,
    /// Neighbours that are never solicited and never evicted.
    pub static_neighbours: Vec<(IpAddr, MacAddr)>,
    /// True if this is the loopback link, whose frames come back to this host. Packets to local addresses of
    /// any link take it, and no others do. It may have addresses in 127.0.0.0/8 and ::1; other links may not.
    /// At most one link is the loopback link.
    pub loopback: bool,
    /// True if the device passes packets to groups to the kernel of this host: sockets cannot join groups on
    /// the link.
    pub kernel_has_groups: bool,
}

/// The state of an address in duplicate address detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddressState {
    /// Duplicate address detection is in progress (RFC 4862 §5.4): the address is not used yet.
    Tentative {
        /// Number of solicitations sent so far.
        probes: u8,
    },
    /// The address is in use.
    Valid,
    /// Another host has the address: it is not used.
    Duplicate,
}

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address.
    pub address: IpAddr,
    /// Length of its network prefix in bits.
    pub prefix: u8,
    /// Its state.
    pub state: AddressState,
    /// True if it was formed from a router advertisement.
    pub autoconfigured: bool,
    /// Until this time it is preferred as a source address; afterwards it is deprecated (RFC 4862 §5.5.4).
    pub preferred_until: Instant,
    /// Until this time it is valid; afterwards it is removed.
    pub valid_until: Instant,
}

impl InterfaceAddress {
    /// Creates an address with infinite lifetimes.
    pub(crate) const fn permanent(address: IpAddr, prefix: u8, state: AddressState) -> Self {
        Self {
            address,
            prefix,
            state,
            autoconfigured: false,
            preferred_until: Instant::MAX,
            valid_until: Instant::MAX,
        }
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.state == AddressState::Valid
    }
}

/// A device that accepts no frames.
struct NoTx(Capabilities);

impl TxQueue for NoTx {
    fn capabilities(&self) -> Capabilities {
        self.0
    }

    fn reserve(&mut self, _: usize) -> Option<&mut [u8]> {
        None
    }

    fn commit(&mut self, _: usize, _: TxMeta) {}

    fn flush(&mut self, _: Instant) {}
}

/// The transmit half of a device, and the links on the device.
pub(crate) struct TxPort {
    pub tx: Box<dyn TxQueue + Send>,
    pub capabilities: Capabilities,
    /// True if the device accepts payloads in pieces.
    pub can_gather: bool,
    /// The link of untagged frames.
    pub untagged: Option<LinkId>,
    /// The links of tagged frames, sorted by VLAN.
    pub tagged: Vec<(u16, LinkId)>,
    /// True if frames have been committed since the last flush.
    pub dirty: bool,
    /// Frames and bytes sent.
    pub tx_frames: u64,
    pub tx_bytes: u64,
    /// The part of them that other shards have made.
    pub relayed_frames: u64,
    pub relayed_bytes: u64,
}

impl TxPort {
    pub(crate) fn new(mut tx: Box<dyn TxQueue + Send>) -> Self {
        let (capabilities, can_gather) = (tx.capabilities(), tx.gather().is_some());
        Self {
            tx,
            capabilities,
            can_gather,
            untagged: None,
            tagged: Vec::new(),
            dirty: false,
            tx_frames: 0,
            tx_bytes: 0,
            relayed_frames: 0,
            relayed_bytes: 0,
        }
    }

    /// Replaces the device: see [`crate::stack::Stack::replace_tx`].
    pub(crate) fn replace_tx(
        &mut self,
        replace: impl FnOnce(Box<dyn TxQueue + Send>) -> Option<Box<dyn TxQueue + Send>>,
    ) {
        let tx = core::mem::replace(&mut self.tx, Box::new(NoTx(self.capabilities)));
        if let Some(mut tx) = replace(tx) {
            self.can_gather = tx.gather().is_some();
            self.tx = tx;
        } else {
            self.can_gather = false;
        }
    }

    /// Returns the link that a frame belongs to. VLAN 0 only carries a priority (IEEE 802.1Q).
    #[inline]
    pub(crate) fn link_of(&self, vlan: Option<VlanTag>) -> Option<LinkId> {
        match vlan {
            None | Some(VlanTag { vid: 0, .. }) => self.untagged,
            Some(VlanTag { vid, .. }) => {
                let at = self.tagged.binary_search_by_key(&vid, |&(key, _)| key).ok()?;
                Some(self.tagged[at].1)
            }
        }
    }

    /// Sends the first `len` bytes of the buffer reserved last, and counts them.
    #[inline]
    pub(crate) fn commit(&mut self, len: usize, meta: TxMeta) {
        self.tx.commit(len, meta);
        self.count(len);
    }

    /// Sends the first `len` bytes of the buffer reserved last, which the network layer of another shard has
    /// made and counted.
    pub(crate) fn commit_relayed(&mut self, len: usize) {
        self.tx.commit(len, TxMeta::default());
        self.count(len);
        self.relayed_frames += 1;
        self.relayed_bytes += len as u64;
    }

    /// Sends a frame that consists of the first `head` bytes of the reserved buffer and of `pieces`, `len`
    /// bytes in total. [`TxPort::can_gather`] must be true.
    pub(crate) fn commit_gathered(
        &mut self,
        head: usize,
        len: usize,
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
        meta: TxMeta,
    ) {
        if let Some(gather) = self.tx.gather() {
            gather.commit_gathered(head, pieces, meta);
            self.count(len);
        }
    }

    #[inline(always)]
    fn count(&mut self, len: usize) {
        self.dirty = true;
        self.tx_frames += 1;
        self.tx_bytes += len as u64;
    }

    /// Returns the length of the largest frame that the device accepts, in bytes.
    pub(crate) fn frame_bytes_max(&self) -> usize {
        (self.capabilities.mtu + LINK_HEADER_MAX).max(self.capabilities.gso_bytes_max)
    }
}

/// The state of a link.
#[derive(Debug)]
pub(crate) struct Link {
    pub name: String,
    pub port: PortId,
    pub vlan: Option<u16>,
    pub mac: MacAddr,
    /// Bytes of the largest IP packet.
    pub mtu: u16,
    /// The MTU for IPv6, which a router may lower.
    pub mtu_v6: u16,
    /// True if IPv6 is enabled.
    pub ipv6: bool,
    pub accept_ra: bool,
    /// True if this is the loopback link.
    pub loopback: bool,
    /// True if the kernel receives the packets to groups.
    pub kernel_has_groups: bool,
    pub addresses: Vec<InterfaceAddress>,
    /// Broadcast addresses of the IPv4 networks, sorted.
    broadcasts: Vec<Ipv4Addr>,
    /// The multicast groups that this host has joined.
    pub groups: GroupTable,
    /// How long a neighbour counts as reachable after an answer (ReachableTime of RFC 4861).
    pub reachable_time: Duration,
    /// Time between solicitations (RetransTimer of RFC 4861).
    pub retrans_timer: Duration,
    /// Hop limit of ICMP and UDP packets: the configured one, or the one that a router advertised.
    pub hop_limit: u8,
    /// Router solicitations still to be sent.
    pub router_solicitations_left: u8,
    /// The nonce in this host's duplicate address detection solicitations (RFC 7527).
    pub dad_nonce: [u8; 6],
    /// The reachable time that routers advertise, in milliseconds; 0 if none does.
    pub advertised_reachable_time_ms: u32,
}

impl Link {
    /// Checks a configuration against the device and creates the link.
    pub(crate) fn new(
        config: &LinkConfig,
        port: PortId,
        device: &Capabilities,
        network: &NetworkConfig,
        reachable: Duration,
    ) -> Result<Self, ConfigError> {
        let key = |suffix: &str| format!("link.{}.{suffix}", config.name);
        let mtu = config.mtu.unwrap_or(device.mtu);
        let mtu = match u16::try_from(mtu) {
            Ok(mtu) if mtu >= IPV4_MTU_MIN && usize::from(mtu) <= device.mtu => mtu,
            _ => {
                let problem = format!("{mtu} is outside {IPV4_MTU_MIN} to the device's {}", device.mtu);
                return Err(ConfigError::new(key("mtu"), problem));
            }
        };
        if let Some(vlan) = config.vlan
            && !(1..=4094).contains(&vlan)
        {
            return Err(ConfigError::new(key("vlan"), format!("{vlan} is outside 1 to 4094")));
        }
        for &(address, prefix) in &config.addresses {
            check_address(address, prefix, config.loopback)
                .map_err(|problem| ConfigError::new(key("addresses"), problem))?;
        }
        for (at, &(address, mac)) in config.static_neighbours.iter().enumerate() {
            if config.static_neighbours[..at].iter().any(|&(earlier, _)| earlier == address) {
                let problem = format!("{address} is configured twice");
                return Err(ConfigError::new(key("static_neighbours"), problem));
            }
            if !mac.is_unicast() || address.is_multicast() || address.is_unspecified() {
                let problem = format!("{address} at {mac} cannot be a neighbour");
                return Err(ConfigError::new(key("static_neighbours"), problem));
            }
        }
        let has_ipv6 = config.addresses.iter().any(|(address, _)| address.is_ipv6());
        if has_ipv6 && mtu < IPV6_MTU_MIN {
            let problem = format!("{mtu} is below the minimum of {IPV6_MTU_MIN} for IPv6 (RFC 8200 §5)");
            return Err(ConfigError::new(key("mtu"), problem));
        }
        Ok(Self {
            name: config.name.clone(),
            port,
            vlan: config.vlan,
            mac: MacAddr(device.mac),
            mtu,
            mtu_v6: mtu,
            ipv6: mtu >= IPV6_MTU_MIN && (has_ipv6 || config.accept_ra || config.loopback),
            accept_ra: config.accept_ra && !config.loopback,
            loopback: config.loopback,
            kernel_has_groups: config.kernel_has_groups,
            addresses: Vec::new(),
            broadcasts: Vec::new(),
            groups: GroupTable::default(),
            reachable_time: reachable,
            retrans_timer: network.retransmit_interval(),
            hop_limit: network.hop_limit,
            router_solicitations_left: network.router_solicitations,
            dad_nonce: [0; 6],
            advertised_reachable_time_ms: 0,
        })
    }

    /// Returns the MTU for the address family of `family`: bytes of the largest IP packet.
    pub(crate) fn mtu_for(&self, family: IpAddr) -> u16 {
        if family.is_ipv4() { self.mtu } else { self.mtu_v6 }
    }

    /// Returns the length of the link header in bytes.
    pub(crate) fn header_len(&self) -> usize {
        if self.vlan.is_some() { ethernet::Header::LEN_TAGGED } else { ethernet::Header::LEN }
    }

    /// Returns the header of a frame sent on this link.
    pub(crate) fn header(&self, dst: MacAddr, ethertype: EtherType) -> ethernet::Header {
        let vlan = self.vlan.map(|vid| VlanTag { pcp: 0, dei: false, vid });
        ethernet::Header::new(dst, self.mac, vlan, ethertype)
    }

    /// Returns the header of a frame as bytes, and its length.
    pub(crate) fn header_bytes(&self, dst: MacAddr, ethertype: EtherType) -> ([u8; LINK_HEADER_MAX], u8) {
        let mut bytes = [0; LINK_HEADER_MAX];
        let len = self.header(dst, ethertype).emit(&mut bytes);
        (bytes, len as u8)
    }

    /// Returns whether `address` is a broadcast address of this link: 255.255.255.255 or that of one of its
    /// networks.
    #[inline(always)]
    pub(crate) fn is_broadcast(&self, address: Ipv4Addr) -> bool {
        match self.broadcasts.as_slice() {
            // Most links have one network.
            [only] => *only == address || address.is_broadcast(),
            _ => self.is_broadcast_slow(address),
        }
    }

    /// Returns the subnet broadcast address if the link has exactly one. 255.255.255.255 is not counted.
    pub(crate) fn sole_broadcast(&self) -> Option<Ipv4Addr> {
        if let [only] = *self.broadcasts { Some(only) } else { None }
    }

    #[inline(never)]
    fn is_broadcast_slow(&self, address: Ipv4Addr) -> bool {
        address.is_broadcast() || self.broadcasts.binary_search(&address).is_ok()
    }

    /// Adds an address. Returns false if the link has it already.
    pub(crate) fn add_address(&mut self, address: InterfaceAddress) -> bool {
        if self.address(address.address).is_some() {
            return false;
        }
        if let IpAddr::V4(own) = address.address
            && let Some(broadcast) = subnet_broadcast(own, address.prefix)
            && let Err(at) = self.broadcasts.binary_search(&broadcast)
        {
            self.broadcasts.insert(at, broadcast);
        }
        self.addresses.push(address);
        true
    }

    /// Returns the entry of an address of this link.
    pub(crate) fn address(&self, address: IpAddr) -> Option<&InterfaceAddress> {
        self.addresses.iter().find(|entry| entry.address == address)
    }

    pub(crate) fn address_mut(&mut self, address: IpAddr) -> Option<&mut InterfaceAddress> {
        self.addresses.iter_mut().find(|entry| entry.address == address)
    }

    /// Returns the link-local address, if it is valid.
    pub(crate) fn link_local(&self) -> Option<Ipv6Addr> {
        self.addresses.iter().filter(|entry| entry.is_valid()).find_map(|entry| match entry.address {
            IpAddr::V6(address) if address.is_unicast_link_local() => Some(address),
            _ => None,
        })
    }

    /// Returns the IPv4 source address for packets to `peer`: the first whose network contains it, otherwise
    /// the first.
    pub(crate) fn source_v4(&self, peer: Ipv4Addr) -> Option<Ipv4Addr> {
        let ipv4 = || {
            self.addresses.iter().filter_map(|entry| match entry.address {
                IpAddr::V4(address) if entry.is_valid() => Some((address, entry.prefix)),
                _ => None,
            })
        };
        ipv4()
            .find(|&(address, prefix)| same_network(address.into(), peer.into(), prefix))
            .or_else(|| ipv4().next())
            .map(|(address, _)| address)
    }
}

/// Returns the broadcast address of a network; /31 and /32 have none (RFC 3021).
pub(crate) fn subnet_broadcast(address: Ipv4Addr, prefix: u8) -> Option<Ipv4Addr> {
    let host_bits = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
    (prefix < 31).then(|| Ipv4Addr::from_bits(address.to_bits() | host_bits))
}

/// Returns whether an address is that of a single host.
pub(crate) fn is_unicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            !address.is_unspecified()
                && !address.is_multicast()
                && !address.is_broadcast()
                && !address.is_loopback()
                && address.octets()[0] != 0
        }
        IpAddr::V6(address) => {
            !address.is_unspecified()
                && !address.is_multicast()
                && !address.is_loopback()
                && address.to_ipv4_mapped().is_none()
        }
    }
}

fn check_address(address: IpAddr, prefix: u8, loopback: bool) -> Result<(), String> {
    let bits = if address.is_ipv4() { 32 } else { 128 };
    if prefix > bits {
        return Err(format!("{address}/{prefix}: a prefix has at most {bits} bits"));
    }
    if !(is_unicast(address) || loopback && address.is_loopback()) {
        return Err(format!("{address} is not a unicast address"));
    }
    if let IpAddr::V4(own) = address
        && subnet_broadcast(own, prefix) == Some(own)
    {
        return Err(format!("{address}/{prefix} is the broadcast address of its network"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Capabilities = Capabilities {
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        tx_checksum: false,
        gso_bytes_max: 0,
        uso: false,
        labels: false,
    };

    fn link(config: &LinkConfig) -> Result<Link, ConfigError> {
        Link::new(config, PortId(0), &DEVICE, &NetworkConfig::default(), Duration::ZERO)
    }

    #[test]
    fn invalid_configurations_are_rejected_with_their_key() {
        let base = LinkConfig { name: "lan".into(), ..LinkConfig::default() };
        let key = |config: LinkConfig| link(&config).unwrap_err().key;
        assert_eq!(key(LinkConfig { mtu: Some(1501), ..base.clone() }), "link.lan.mtu");
        assert_eq!(key(LinkConfig { mtu: Some(67), ..base.clone() }), "link.lan.mtu");
        let addresses = vec![("fd00::1".parse().unwrap(), 64)];
        assert_eq!(key(LinkConfig { mtu: Some(1279), addresses, ..base.clone() }), "link.lan.mtu");
        assert_eq!(key(LinkConfig { vlan: Some(4095), ..base.clone() }), "link.lan.vlan");
        for address in
            ["224.0.0.1", "0.0.0.0", "127.0.0.1", "10.0.0.255", "255.255.255.255", "::1", "ff02::1"]
        {
            let addresses = vec![(address.parse().unwrap(), 24)];
            assert_eq!(key(LinkConfig { addresses, ..base.clone() }), "link.lan.addresses", "{address}");
        }
        let addresses = vec![("10.0.0.1".parse().unwrap(), 33)];
        assert_eq!(key(LinkConfig { addresses, ..base.clone() }), "link.lan.addresses");
        let twice = vec![("10.0.0.2".parse().unwrap(), MacAddr([2; 6])); 2];
        assert_eq!(
            key(LinkConfig { static_neighbours: twice, ..base.clone() }),
            "link.lan.static_neighbours"
        );
        let static_neighbours = vec![("10.0.0.2".parse().unwrap(), MacAddr::BROADCAST)];
        assert_eq!(key(LinkConfig { static_neighbours, ..base }), "link.lan.static_neighbours");
    }

    #[test]
    fn mtu_below_1280_disables_ipv6_despite_accept_ra() {
        let config = LinkConfig { accept_ra: true, mtu: Some(1279), ..LinkConfig::default() };
        assert!(!link(&config).unwrap().ipv6);
        assert!(link(&LinkConfig { mtu: Some(1280), ..config }).unwrap().ipv6);
    }

    #[test]
    fn subnet_broadcast_depends_on_the_prefix() {
        assert_eq!(subnet_broadcast(Ipv4Addr::new(10, 1, 2, 3), 8), Some(Ipv4Addr::new(10, 255, 255, 255)));
        assert_eq!(subnet_broadcast(Ipv4Addr::new(10, 1, 2, 3), 30), Some(Ipv4Addr::new(10, 1, 2, 3)));
        assert_eq!(subnet_broadcast(Ipv4Addr::new(10, 1, 2, 3), 31), None);
        assert_eq!(subnet_broadcast(Ipv4Addr::new(10, 1, 2, 3), 32), None);
        assert_eq!(subnet_broadcast(Ipv4Addr::new(10, 1, 2, 3), 0), Some(Ipv4Addr::BROADCAST));
    }
}
