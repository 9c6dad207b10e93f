//! The network layer: links, addresses, routes, neighbours, fragments and path MTU, for IPv4 and IPv6.
//!
//! ```text
//! frame ─► parse ─► Tcp / Udp ─────────────► the transport
//!             └──► Other ─► input ─► ARP, NDP, ICMP, fragments ─► errors and reassembled packets for the transport
//!
//! transport ─► route ─► Hop (kept) ─► begin ─► seal ─► commit ─► device
//! ```

pub mod config;
mod datagram;
mod destination_cache;
pub(crate) mod entropy;
mod fragment_store;
mod input;
mod label;
mod links;
pub(crate) mod local;
mod multi_shard;
mod output;
mod parse;
pub mod path_mtu;
mod reassembly;
pub(crate) mod route;
mod routing;
pub(crate) mod rx_fast_path;
pub mod stats;
pub(crate) mod timers;
mod tx_fast_path;

pub use config::NetworkConfig;
pub use input::{InputResult, Reassembled};
pub use links::LinkView;
pub use output::{IpHeader, PayloadSum, SealedPacket, TxChecksum, TxError, TxPacket};
pub(crate) use parse::{Ipv4Packet, Ipv6Packet, Ipv6ParameterProblem};
pub use parse::{L4, OtherFrame, ParsedFrame};
pub use route::RouteConfig;
pub use routing::{NextHop, Route, RouteError};
pub use stats::{DropReason, DropStats, NetworkStats};
pub(crate) use tx_fast_path::{SealedTcpV4, TcpV4Headers, TcpV4Lengths};

use crate::device::{Capabilities, TxQueue};
use crate::error::ConfigError;
use crate::handle::{LinkId, PortId};
use crate::icmp::error::TransportError;
use crate::icmp::rate_limit::IcmpRateLimiter;
use crate::ip::destination_cache::DestinationCache;
use crate::ip::entropy::{Entropy, KeyedHash};
use crate::ip::local::LocalAddresses;
use crate::ip::path_mtu::PathMtuCache;
use crate::ip::reassembly::Reassembly;
use crate::ip::route::RouteTable;
use crate::ip::timers::{NetworkTimer, NetworkTimers};
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
    pub(crate) ports: Vec<TxPort>,
    pub(crate) links: Vec<Link>,
    /// The way to ourselves, if there is one.
    loopback: Option<LinkId>,
    pub(crate) local: LocalAddresses,
    pub(crate) neighbours: NeighbourTable,
    pub(crate) routes: RouteTable,
    pub(crate) path_mtu: PathMtuCache,
    destination_cache: DestinationCache,
    reassembly: Reassembly,
    pub(crate) icmp_limit: IcmpRateLimiter,
    pub(crate) timers: NetworkTimers,
    /// Changes with every change of links, addresses and routes, which makes cached hops stale.
    pub(crate) epoch: u16,
    /// Where packets are built that wait for a neighbour, since they do not go into the device's room. Grows to the longest once.
    scratch: Vec<u8>,
    /// The same for datagrams that are to be cut into fragments.
    fragmentation_buffer: Vec<u8>,
    /// Neighbours whose waiting packets a full device refused.
    pub(crate) backlog: Vec<u32>,
    errors: VecDeque<(TransportError, Box<[u8]>)>,
    /// What the datagram said that the last error was about, as far as it is known.
    quoted_payload: Vec<u8>,
    /// Identifications of IPv4 packets that may be fragmented.
    ident_counters: Box<[u16; output::IDENT_COUNTERS]>,
    /// Set if this is one of several shards.
    pub(crate) steering: Option<Box<Steering>>,
    /// What the other shards must be told.
    pub(crate) control_updates: VecDeque<ControlUpdate>,
    /// The way to the neighbour that was confirmed last in the present burst.
    last_confirmed: NextHop,
    /// Frames of the present burst, a bit each, that a wrong hash of their sender's kept on this shard.
    pub(crate) misrouted: u64,
    /// Set if a device carries labels.
    flow_hasher: Option<Toeplitz>,
}

impl Network {
    /// A network layer without links. Everything unpredictable in it follows from `seed`.
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
            ports: Vec::new(),
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
            flow_hasher: None,
            config,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &NetworkConfig {
        &self.config
    }

    /// Counters of events.
    pub fn stats(&self) -> &NetworkStats {
        &self.stats
    }

    /// Counters of dropped frames by reason.
    pub fn drops(&self) -> &DropStats {
        &self.drops
    }

    /// Counts a received frame. Separate from [`Network::parse`], which changes nothing.
    #[inline]
    pub fn count_received(&mut self, parsed: &ParsedFrame<'_>) {
        match parsed {
            ParsedFrame::Tcp(_) => self.stats.rx_tcp += 1,
            ParsedFrame::Udp(_) => self.stats.rx_udp += 1,
            ParsedFrame::Other(_) => self.stats.rx_other += 1,
            ParsedFrame::Drop(reason) => self.count_drop(*reason),
        }
    }

    /// Counts a frame that is dropped.
    #[cold]
    pub(crate) fn count_drop(&mut self, reason: DropReason) {
        self.stats.rx_dropped += 1;
        self.drops.count(reason);
    }

    /// Whether an address is one of this stack's.
    pub fn is_local(&self, address: core::net::IpAddr) -> bool {
        self.local.link_of(address).is_some()
    }

    /// Whether a link is the way to ourselves.
    #[inline(always)]
    pub(crate) fn is_loopback(&self, link: LinkId) -> bool {
        self.loopback == Some(link)
    }

    /// Bytes charged for fragments that wait for their rest, and the most that ever were.
    pub(crate) fn reassembly_bytes(&self) -> (usize, usize) {
        self.reassembly.memory_charged()
    }

    /// Frames and bytes that were given to a device, Ethernet headers included; a super-frame is one frame.
    pub fn tx_counters(&self, port: PortId) -> (u64, u64) {
        self.ports.get(usize::from(port.0)).map_or((0, 0), |port| (port.tx_frames, port.tx_bytes))
    }

    /// Number of devices.
    pub fn port_count(&self) -> usize {
        self.ports.len()
    }

    /// What a link can do: the device's capabilities with the link's own MTU.
    pub fn capabilities(&self, link: LinkId) -> Option<Capabilities> {
        let link = self.links.get(usize::from(link.0))?;
        let device = self.port(link.port).capabilities;
        // An IP packet's length field ends at 65,535, however large a frame the device takes.
        let longest = usize::from(u16::MAX) + link.header_len();
        Some(Capabilities {
            mtu: link.mtu.into(),
            gso_bytes_max: device.gso_bytes_max.min(longest),
            ..device
        })
    }

    /// Hands everything that was committed to the devices.
    pub fn flush(&mut self, now: Instant) {
        for port in &mut self.ports {
            if core::mem::take(&mut port.dirty) || port.tx.next_deadline().is_some_and(|at| at <= now) {
                port.tx.flush(now);
            }
        }
    }

    /// When [`Network::timers`] and [`Network::flush`] must be called again, if no frame comes before.
    pub fn next_deadline(&self) -> Option<Instant> {
        let devices = self.ports.iter().filter_map(|port| port.tx.next_deadline());
        devices.chain(self.timers.next_deadline()).min()
    }

    /// Does everything that is due.
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
                NetworkTimer::ListenerReport(link) => self.on_listener_report(now, link),
                NetworkTimer::Reassembly => self.on_reassembly_timeout(now),
                NetworkTimer::Backlog => self.retry_backlog(now),
            }
        }
    }

    /// The next error about a packet of ours that no ICMP message brought: its neighbour did not answer.
    pub fn next_error(&mut self) -> Option<TransportError> {
        let (error, known) = self.errors.pop_front()?;
        self.set_quoted_payload(&known);
        Some(error)
    }

    /// `known` is what the datagram said that the error is about, as far as it is known.
    pub(crate) fn push_error(&mut self, error: TransportError, known: &[u8]) {
        if self.errors.len() < self.config.errors_max as usize {
            self.errors.push_back((error, known.into()));
        } else {
            self.stats.errors_overflow += 1;
        }
    }

    /// What the datagram said that the last error was about, as far as it is known.
    pub(crate) fn quoted_payload(&self) -> &[u8] {
        &self.quoted_payload
    }

    pub(crate) fn set_quoted_payload(&mut self, known: &[u8]) {
        self.quoted_payload.clear();
        self.quoted_payload.extend_from_slice(known);
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
        // 0 is what a default hop has.
        self.epoch = self.epoch.checked_add(1).unwrap_or(1);
    }

    /// Adds a device.
    ///
    /// # Panics
    /// If there are 65,535 already.
    pub fn add_port(&mut self, tx: Box<dyn TxQueue + Send>) -> PortId {
        let id = u16::try_from(self.ports.len()).expect("at most 65,535 devices");
        self.ports.push(TxPort::new(tx));
        if self.port(PortId(id)).capabilities.labels {
            self.enable_labels();
        }
        PortId(id)
    }
}

#[cfg(test)]
mod loopback_tests;
#[cfg(test)]
pub(crate) mod testbench;
