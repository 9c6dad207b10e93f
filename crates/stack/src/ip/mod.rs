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
mod destinations;
pub(crate) mod entropy;
mod fragment_store;
mod input;
mod label;
mod links;
pub(crate) mod local;
mod output;
mod parse;
pub mod path_mtu;
mod plain;
mod reassembly;
pub(crate) mod route;
mod routing;
mod shared;
pub mod stats;
pub(crate) mod timers;
pub(crate) mod usual;

pub use config::NetworkConfig;
pub use input::{Input, Reassembled};
pub use links::LinkView;
pub use output::{Checksum, IpHeader, PacketOut, Sealed, Summing, TxError};
pub use parse::{L4, Other, Parsed};
pub(crate) use parse::{Packet4, Packet6, Problem6};
pub(crate) use plain::{Lengths, PlainSealed, TcpV4};
pub use route::RouteConfig;
pub use routing::{Hop, Route, RouteError};
pub use stats::{DropReason, DropStats, NetworkStats};

use crate::device::{Capabilities, TxQueue};
use crate::error::ConfigError;
use crate::handle::{LinkId, PortId};
use crate::icmp::error::TransportError;
use crate::icmp::limit::Limiter;
use crate::ip::destinations::Destinations;
use crate::ip::entropy::{Entropy, KeyedHash};
use crate::ip::local::LocalAddresses;
use crate::ip::path_mtu::PathMtuCache;
use crate::ip::reassembly::Reassembly;
use crate::ip::route::RouteTable;
use crate::ip::timers::{Timer, Timers};
use crate::link::neighbour::NeighbourTable;
use crate::link::{Link, Port};
use crate::steering::toeplitz::Toeplitz;
use crate::steering::{News, Steering};
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
    pub(crate) ports: Vec<Port>,
    pub(crate) links: Vec<Link>,
    /// The way to ourselves, if there is one.
    loopback: Option<LinkId>,
    pub(crate) local: LocalAddresses,
    pub(crate) neighbours: NeighbourTable,
    pub(crate) routes: RouteTable,
    pub(crate) path_mtu: PathMtuCache,
    destinations: Destinations,
    reassembly: Reassembly,
    pub(crate) icmp_limit: Limiter,
    pub(crate) timers: Timers,
    /// Changes with every change of links, addresses and routes, which makes cached hops stale.
    pub(crate) epoch: u16,
    /// Where packets are built that wait for a neighbour, since they do not go into the device's room. Grows to the longest once.
    scratch: Vec<u8>,
    /// The same for datagrams that are to be cut into fragments.
    datagram: Vec<u8>,
    /// Neighbours whose waiting packets a full device refused.
    pub(crate) backlog: Vec<u32>,
    errors: VecDeque<(TransportError, Box<[u8]>)>,
    /// What the datagram said that the last error was about, as far as it is known.
    quoted: Vec<u8>,
    /// Identifications of IPv4 packets that may be fragmented.
    idents: Box<[u16; output::IDENTS]>,
    /// Set if this is one of several shards.
    pub(crate) steering: Option<Box<Steering>>,
    /// What the other shards must be told.
    pub(crate) news: VecDeque<News>,
    /// The way to the neighbour that was confirmed last in the present burst.
    confirmed: Hop,
    /// Frames of the present burst, a bit each, that a wrong hash of their sender's kept on this shard.
    pub(crate) misdirected: u64,
    /// Set if a device carries labels.
    labeller: Option<Toeplitz>,
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
        let icmp_limit = Limiter::new(
            config.icmp_errors_per_second,
            config.icmp_errors_burst,
            Duration::from_millis(config.icmp_error_interval_ms.into()),
            hash,
        );
        let mut entropy = Entropy::new(seed);
        let mut idents = Box::new([0; output::IDENTS]);
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
            destinations: Destinations::new(),
            reassembly: Reassembly::new(config.fragment_bytes as usize, hash),
            icmp_limit,
            timers: Timers::default(),
            // Not 0, so that a default hop is stale.
            epoch: 1,
            confirmed: Hop::default(),
            scratch: Vec::new(),
            datagram: Vec::new(),
            backlog: Vec::new(),
            errors: VecDeque::new(),
            quoted: Vec::new(),
            idents,
            steering: None,
            news: VecDeque::new(),
            misdirected: 0,
            labeller: None,
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
    pub fn account(&mut self, parsed: &Parsed<'_>) {
        match parsed {
            Parsed::Tcp(_) => self.stats.rx_tcp += 1,
            Parsed::Udp(_) => self.stats.rx_udp += 1,
            Parsed::Other(_) => self.stats.rx_other += 1,
            Parsed::Drop(reason) => self.count_drop(*reason),
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
    pub(crate) fn is_loop(&self, link: LinkId) -> bool {
        self.loopback == Some(link)
    }

    /// Bytes charged for fragments that wait for their rest, and the most that ever were.
    pub(crate) fn reassembly_bytes(&self) -> (usize, usize) {
        self.reassembly.charged()
    }

    /// Frames and bytes that were given to a device, Ethernet headers included; a super-frame is one frame.
    pub fn sent(&self, port: PortId) -> (u64, u64) {
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
    pub fn timers(&mut self, now: Instant) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Neighbour(slot) => self.on_neighbour_timer(now, slot),
                Timer::DuplicateCheckStart(link, address) => {
                    self.on_duplicate_check_start(now, link, address);
                }
                Timer::DuplicateCheck(link, address) => self.on_duplicate_check(now, link, address),
                Timer::Lifetimes(link) => self.on_lifetimes(now, link),
                Timer::RouterSolicitation(link) => self.on_router_solicitation(now, link),
                Timer::ListenerReport(link) => self.on_listener_report(now, link),
                Timer::Reassembly => self.on_reassembly_timeout(now),
                Timer::Backlog => self.retry_backlog(now),
            }
        }
    }

    /// The next error about a packet of ours that no ICMP message brought: its neighbour did not answer.
    pub fn poll_errors(&mut self) -> Option<TransportError> {
        let (error, known) = self.errors.pop_front()?;
        self.note_quoted(&known);
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
    pub(crate) fn quoted(&self) -> &[u8] {
        &self.quoted
    }

    pub(crate) fn note_quoted(&mut self, known: &[u8]) {
        self.quoted.clear();
        self.quoted.extend_from_slice(known);
    }

    pub(crate) fn link(&self, link: LinkId) -> &Link {
        &self.links[usize::from(link.0)]
    }

    pub(crate) fn link_mut(&mut self, link: LinkId) -> &mut Link {
        &mut self.links[usize::from(link.0)]
    }

    pub(crate) fn port(&self, port: PortId) -> &Port {
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
        self.ports.push(Port::new(tx));
        if self.port(PortId(id)).capabilities.labels {
            self.make_labels();
        }
        PortId(id)
    }
}

#[cfg(test)]
mod loop_tests;
#[cfg(test)]
pub(crate) mod testbench;
