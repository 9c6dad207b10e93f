//! The network layer for IPv4 and IPv6: links, addresses, routes, neighbours, reassembly and path MTU.
//!
//! ```text
//! frame ─► parse ─► Tcp / Udp ───────────────► transport
//!             └──► Other ─► input ─► ARP, NDP, ICMP, fragments ─► errors and packets for the transport
//!
//! transport ─► route ─► NextHop (cached) ─► begin ─► seal ─► commit ─► device
//! ```

pub mod config;
mod datagram;
mod destination_cache;
pub(crate) mod entropy;
mod flow_label;
mod fragment_store;
pub(crate) mod image;
mod input;
mod label;
mod links;
pub(crate) mod local;
mod loop_back;
mod multi_shard;
mod output;
mod parse;
pub mod path_mtu;
mod reassembly;
pub(crate) mod route;
mod route_changes;
mod routing;
pub(crate) mod rx_fast_path;
pub mod stats;
pub(crate) mod timers;
mod tx_fast_path;

pub use config::NetworkConfig;
pub use flow_label::{FLOW_LABEL_MAX, FlowLabel};
pub use input::{InputResult, Reassembled};
pub use links::LinkView;
pub use output::{IpHeader, PayloadSum, SealedPacket, TxChecksum, TxError, TxPacket};
pub(crate) use parse::{Ipv4Packet, Ipv6Packet, Ipv6ParameterProblem};
pub use parse::{L4, OtherFrame, ParsedFrame};
pub use route::{RouteConfig, RouteOrigin};
pub use route_changes::{RouteFilter, RouteView};
pub use routing::{NextHop, Route, RouteError};
pub use stats::{DropReason, DropStats, NetworkStats};
pub(crate) use tx_fast_path::{SealedTcpV4, TcpV4Headers, TcpV4Lengths};

use crate::device::{Capabilities, TxClass, TxQueue};
use crate::error::ConfigError;
use crate::handle::{LinkId, PortId};
use crate::icmp::error::TransportError;
use crate::icmp::rate_limit::IcmpRateLimiter;
use crate::ip::destination_cache::DestinationCache;
use crate::ip::entropy::{Entropy, KeyedHash};
use crate::ip::flow_label::FlowLabelHash;
use crate::ip::local::LocalAddresses;
use crate::ip::loop_back::LoopedBack;
use crate::ip::path_mtu::PathMtuCache;
use crate::ip::reassembly::Reassembly;
use crate::ip::route::RouteTable;
use crate::ip::timers::{NetworkTimer, NetworkTimers};
use crate::link::groups::ShardGroups;
use crate::link::neighbour::NeighbourTable;
use crate::link::{Link, TxPort};
use crate::steering::toeplitz::Toeplitz;
use crate::steering::{ControlUpdate, Steering};
use crate::time::Instant;
use core::time::Duration;
use std::collections::VecDeque;

/// The network layer of one shard.
pub struct Network {
    pub(crate) config: NetworkConfig,
    pub(crate) stats: NetworkStats,
    drops: DropStats,
    pub(crate) entropy: Entropy,
    pub(crate) hash: KeyedHash,
    flow_label_hash: FlowLabelHash,
    pub(crate) ports: Vec<TxPort>,
    /// True if devices refuse frames by their class.
    pub(crate) refuses_by_class: bool,
    pub(crate) links: Vec<Link>,
    /// The loopback link, if there is one.
    loopback: Option<LinkId>,
    pub(crate) local: LocalAddresses,
    pub(crate) neighbours: NeighbourTable,
    pub(crate) routes: RouteTable,
    pub(crate) path_mtu: PathMtuCache,
    destination_cache: DestinationCache,
    reassembly: Reassembly,
    pub(crate) icmp_limit: IcmpRateLimiter,
    pub(crate) timers: NetworkTimers,
    /// A counter that is incremented with every change of links, addresses and routes. A hop of another epoch
    /// is stale.
    pub(crate) epoch: u16,
    /// Buffer in which packets for unresolved neighbours are built. It grows to the longest such packet.
    scratch: Vec<u8>,
    /// Buffer in which datagrams are built before they are fragmented. It grows to the longest such datagram.
    fragmentation_buffer: Vec<u8>,
    /// Neighbours whose pending packets a full device refused.
    pub(crate) backlog: Vec<u32>,
    errors: VecDeque<(TransportError, Box<[u8]>)>,
    /// The UDP payload, as far as it is known, of the datagram that the last error was about.
    quoted_payload: Vec<u8>,
    /// Counters from which the identifications of fragmentable IPv4 packets are taken.
    ident_counters: Box<[u16; output::IDENT_COUNTERS]>,
    /// Set if this is one of several shards.
    pub(crate) steering: Option<Box<Steering>>,
    /// Updates that await being broadcast to the other shards.
    pub(crate) control_updates: VecDeque<ControlUpdate>,
    /// The hop that was last confirmed to be reachable in the present burst.
    last_confirmed: NextHop,
    /// Frames of the present burst that a wrong flow hash brought to this shard: one bit for each.
    pub(crate) misrouted: u64,
    /// The groups of all shards.
    pub(crate) shard_groups: ShardGroups,
    /// Datagrams of this shard to groups, for members on other shards.
    pub(crate) looped_back: LoopedBack,
    /// Set if any device carries labels.
    flow_hasher: Option<Toeplitz>,
    /// True if the devices compute the hashes of received frames, so that no sender can make a wrong one.
    trusts_hashes: bool,
}

impl Network {
    /// Creates a network layer without links. All its random numbers are derived from `seed`.
    ///
    /// # Errors
    /// If a key of the configuration is out of range.
    pub fn new(config: NetworkConfig, seed: &[u8; 32]) -> Result<Self, ConfigError> {
        config.validate()?;
        let hash = KeyedHash::new(seed);
        let path_mtu = PathMtuCache::new(
            config.path_mtu_entries as usize,
            Duration::from_secs(config.path_mtu_seconds.into()),
            config.path_mtu_floor_bytes,
        );
        let icmp_limit = IcmpRateLimiter::new(
            config.icmp_errors_per_second,
            config.icmp_errors_burst,
            Duration::from_millis(config.icmp_error_interval_ms.into()),
            hash,
        );
        let mut entropy = Entropy::new(seed);
        let mut idents = Box::new([0; output::IDENT_COUNTERS]);
        idents.fill_with(|| entropy.next_u64() as u16);
        Ok(Self {
            stats: NetworkStats::default(),
            drops: DropStats::default(),
            entropy,
            hash,
            flow_label_hash: FlowLabelHash::new(hash),
            ports: Vec::new(),
            refuses_by_class: false,
            links: Vec::new(),
            loopback: None,
            local: LocalAddresses::new(),
            neighbours: NeighbourTable::new(&config, hash),
            routes: RouteTable::default(),
            path_mtu,
            destination_cache: DestinationCache::new(),
            reassembly: Reassembly::new(config.fragment_bytes as usize, hash),
            icmp_limit,
            timers: NetworkTimers::default(),
            // Not 0, so that a default hop is stale.
            epoch: 1,
            last_confirmed: NextHop::default(),
            scratch: Vec::new(),
            fragmentation_buffer: Vec::new(),
            backlog: Vec::new(),
            errors: VecDeque::new(),
            quoted_payload: Vec::new(),
            ident_counters: idents,
            steering: None,
            control_updates: VecDeque::new(),
            misrouted: 0,
            shard_groups: ShardGroups::default(),
            looped_back: LoopedBack::default(),
            flow_hasher: None,
            trusts_hashes: false,
            config,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &NetworkConfig {
        &self.config
    }

    /// Returns the event counters.
    pub fn stats(&self) -> NetworkStats {
        let mut stats = self.stats.clone();
        for port in &self.ports {
            stats.tx_frames += port.tx_frames - port.relayed_frames;
            stats.tx_bytes += port.tx_bytes - port.relayed_bytes;
        }
        stats
    }

    /// Returns the counters of dropped frames by reason.
    pub fn drops(&self) -> &DropStats {
        &self.drops
    }

    /// Counts a received frame. This is separate from [`Network::parse`], which has no side effects.
    #[inline]
    pub fn count_received(&mut self, parsed: &ParsedFrame<'_>) {
        match parsed {
            ParsedFrame::Tcp(_) => self.stats.rx_tcp += 1,
            ParsedFrame::Udp(_) => self.stats.rx_udp += 1,
            ParsedFrame::Other(_) => self.stats.rx_other += 1,
            ParsedFrame::Drop(reason) => self.count_drop(*reason),
        }
    }

    /// Counts a dropped frame.
    #[cold]
    pub(crate) fn count_drop(&mut self, reason: DropReason) {
        self.stats.rx_dropped += 1;
        self.drops.count(reason);
    }

    /// Returns whether an address is local.
    pub fn is_local(&self, address: core::net::IpAddr) -> bool {
        self.local.link_of(address).is_some()
    }

    /// Returns whether a link is the loopback link.
    #[inline(always)]
    pub(crate) fn is_loopback(&self, link: LinkId) -> bool {
        self.loopback == Some(link)
    }

    /// Returns the bytes charged for fragments awaiting reassembly: now, and their peak.
    pub(crate) fn reassembly_bytes(&self) -> (usize, usize) {
        self.reassembly.memory_charged()
    }

    /// Returns the number of frames and bytes given to a device. Bytes include Ethernet headers; a
    /// super-frame counts as one frame. Frames that another shard sends for this one count there.
    pub fn tx_counters(&self, port: PortId) -> (u64, u64) {
        if self.steering.as_ref().is_some_and(|steering| !steering.serves_device(port)) {
            return (0, 0);
        }
        self.ports.get(usize::from(port.0)).map_or((0, 0), |port| (port.tx_frames, port.tx_bytes))
    }

    /// Returns the number of devices.
    pub fn port_count(&self) -> usize {
        self.ports.len()
    }

    /// Returns the number of the port of a hop; 0 if the hop's link does not exist.
    pub(crate) fn port_of(&self, hop: &NextHop) -> usize {
        self.links.get(usize::from(hop.link)).map_or(0, |link| usize::from(link.port.0))
    }

    /// Returns the number of frames that were given to the device of a port.
    pub(crate) fn frames_sent(&self, port: usize) -> u64 {
        self.ports.get(port).map_or(0, |port| port.tx_frames)
    }

    /// Returns the capabilities of a link: those of its device, with the MTU of the link.
    pub fn capabilities(&self, link: LinkId) -> Option<Capabilities> {
        let link = self.links.get(usize::from(link.0))?;
        let device = self.port(link.port).capabilities;
        // The total length of an IP packet is at most 65,535 bytes, even if the device accepts longer frames.
        let longest = usize::from(u16::MAX) + link.header_len();
        Some(Capabilities {
            mtu: link.mtu.into(),
            gso_bytes_max: device.gso_bytes_max.min(longest),
            ..device
        })
    }

    /// Flushes all committed frames to the devices.
    pub fn flush(&mut self, now: Instant) {
        for port in &mut self.ports {
            if core::mem::take(&mut port.dirty) || port.tx.next_deadline().is_some_and(|at| at <= now) {
                port.tx.flush(now);
            }
        }
    }

    /// Sets the class of priority of the frames that are sent from now on: [`TxQueue::select_class`].
    ///
    /// [`TxQueue::select_class`]: crate::device::TxQueue::select_class
    #[cold]
    pub(crate) fn select_tx_class(&mut self, class: Option<TxClass>) {
        self.ports.iter_mut().for_each(|port| port.tx.select_class(class));
    }

    /// Returns when [`Network::run_timers`] and [`Network::flush`] must be called again, even if no frame
    /// arrives before.
    pub fn next_deadline(&self) -> Option<Instant> {
        let timers = self.timers.next_deadline();
        self.ports.iter().fold(timers, |at, port| Instant::earliest([at, port.tx.next_deadline()]))
    }

    /// Runs all timers that are due.
    pub fn run_timers(&mut self, now: Instant) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                NetworkTimer::Neighbour(slot) => self.on_neighbour_timer(now, slot),
                NetworkTimer::DadStart(link, address) => {
                    self.on_dad_start(now, link, address);
                }
                NetworkTimer::Dad(link, address) => self.on_dad_timer(now, link, address),
                NetworkTimer::Lifetimes(link) => self.on_lifetimes(now, link),
                NetworkTimer::RouterSolicitation(link) => self.on_router_solicitation(now, link),
                NetworkTimer::StateChange(link, is_v4) => self.on_group_state_change(now, link, is_v4),
                NetworkTimer::QueryResponse(link, is_v4) => self.on_query_response(now, link, is_v4),
                NetworkTimer::Reassembly => self.on_reassembly_timeout(now),
                NetworkTimer::Backlog => self.retry_backlog(now),
            }
        }
    }

    /// Takes the next error about a transmitted packet that no ICMP message reported: its neighbour could not
    /// be resolved.
    pub fn next_error(&mut self) -> Option<TransportError> {
        let (error, payload) = self.errors.pop_front()?;
        self.set_quoted_payload(&payload);
        Some(error)
    }

    /// Queues an error. `known` is the UDP payload, as far as it is known, of the datagram that the error is
    /// about.
    pub(crate) fn push_error(&mut self, error: TransportError, payload: &[u8]) {
        if self.errors.len() < self.config.errors_max as usize {
            self.errors.push_back((error, payload.into()));
        } else {
            self.stats.errors_overflow += 1;
        }
    }

    /// Returns the UDP payload, as far as it is known, of the datagram that the last error was about.
    pub(crate) fn quoted_payload(&self) -> &[u8] {
        &self.quoted_payload
    }

    pub(crate) fn set_quoted_payload(&mut self, payload: &[u8]) {
        self.quoted_payload.clear();
        self.quoted_payload.extend_from_slice(payload);
    }

    pub(crate) fn link(&self, link: LinkId) -> &Link {
        &self.links[usize::from(link.0)]
    }

    pub(crate) fn link_mut(&mut self, link: LinkId) -> &mut Link {
        &mut self.links[usize::from(link.0)]
    }

    pub(crate) fn port(&self, port: PortId) -> &TxPort {
        &self.ports[usize::from(port.0)]
    }

    /// Makes every cached hop stale.
    pub(crate) fn bump_epoch(&mut self) {
        // 0 is the epoch of a default hop.
        self.epoch = self.epoch.checked_add(1).unwrap_or(1);
    }

    /// Adds a device and returns its number.
    ///
    /// # Panics
    /// If there are 65,536 devices already.
    pub fn add_port(&mut self, tx: Box<dyn TxQueue + Send>) -> PortId {
        let id = u16::try_from(self.ports.len()).expect("there are at most 65,536 devices");
        self.ports.push(TxPort::new(tx));
        if self.port(PortId(id)).capabilities.labels {
            self.enable_labels();
        }
        PortId(id)
    }

    /// See [`crate::stack::Stack::replace_tx`].
    pub(crate) fn replace_tx(
        &mut self,
        port: PortId,
        replace: impl FnOnce(Box<dyn TxQueue + Send>) -> Option<Box<dyn TxQueue + Send>>,
    ) {
        if let Some(port) = self.ports.get_mut(usize::from(port.0)) {
            port.replace_tx(replace);
        }
    }
}

#[cfg(test)]
mod loopback_tests;
#[cfg(test)]
pub(crate) mod testbench;
