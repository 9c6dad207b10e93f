//! The engine of the monitor: packets with their times go in, counters and latencies come out. It makes no
//! system call and reads no clock.

use crate::connection::{Connection, Matching, flag};
use crate::counters::MonitorCounters;
use crate::distribution::Distribution;
use crate::flow_table::{FlowKey, FlowTable, KeyV4, KeyV6, NONE, Tracking};
use crate::frame::{ACK, Addresses, Frame, LinkType, RST, SYN, TcpSegment};
use crate::framing::{REQUEST, RESPONSE};
use crate::ordering::Arrival;
use crate::outstanding::OutstandingRequests;
use crate::rules::{PortRule, Rules};
use crate::streams::StreamPool;
use arrayvec::ArrayVec;
use core::time::Duration;
use ginnel_stack::time::Instant;

/// Packets that are examined together, so that their memory accesses overlap.
pub const BURST_PACKETS_MAX: usize = 32;
/// Connections that are examined for idleness when one is added.
const SWEPT_PER_CONNECTION: usize = 2;
/// Connections that are examined for idleness if there is no room for another one.
const SWEPT_IF_FULL: usize = 16;

/// Parameters of the engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Protocols by port.
    pub rules: Vec<PortRule>,
    /// Most connections that are tracked. A connection over IPv4 takes at most 64 bytes while no request is
    /// outstanding.
    // limit: tracked connections of a monitor
    pub connections_max: usize,
    /// Most requests that may be outstanding, 16 bytes each. A connection with a request beyond that is given
    /// up.
    // limit: outstanding requests of a monitor
    pub outstanding_max: usize,
    /// Most bytes of segments that wait for earlier ones.
    // limit: early bytes of a monitor
    pub early_bytes_max: usize,
    /// Most bytes of buffers for heads of messages that were seen in part.
    // limit: partial heads of a monitor
    pub head_bytes_max: usize,
    /// A connection without packets for this time is forgotten as other connections begin.
    pub idle_timeout: Duration,
    /// Key of the hash of addresses and ports. It should be random if the traffic is not trusted.
    pub seed: u64,
}

impl EngineConfig {
    /// Creates the usual configuration for these rules.
    #[must_use]
    pub fn new(rules: Vec<PortRule>) -> Self {
        Self {
            rules,
            connections_max: 16_000_000,
            outstanding_max: 16_000_000,
            early_bytes_max: 64 << 20,
            head_bytes_max: 64 << 20,
            idle_timeout: Duration::from_secs(3600),
            seed: 0,
        }
    }
}

/// Follows all connections of the monitored ports.
#[derive(Debug)]
pub struct Engine {
    v4: FlowTable<KeyV4>,
    v6: FlowTable<KeyV6>,
    matching: Matching,
    connections_max: usize,
    idle_seconds: u32,
}

/// A segment of a monitored port.
struct Located<'a, K> {
    key: K,
    hash: u64,
    rule: u8,
    arrival: Arrival<'a>,
}

/// A segment that was parsed and whose connection is being prefetched.
enum Prepared<'a> {
    V4(Located<'a, KeyV4>),
    V6(Located<'a, KeyV6>),
}

impl Engine {
    /// Creates an engine without connections.
    ///
    /// # Errors
    /// Names the rule that cannot be used, and why.
    pub fn new(config: &EngineConfig) -> Result<Self, String> {
        Ok(Self {
            v4: FlowTable::new(config.seed),
            v6: FlowTable::new(config.seed),
            matching: Matching {
                rules: Rules::new(&config.rules)?,
                outstanding: OutstandingRequests::new(config.outstanding_max),
                streams: StreamPool::new(config.early_bytes_max, config.head_bytes_max),
                counters: MonitorCounters::default(),
                latencies: [Distribution::default(), Distribution::default()],
            },
            // Indexes have 32 bits, and one value has another meaning.
            connections_max: config.connections_max.min(NONE as usize - 1),
            idle_seconds: u32::try_from(config.idle_timeout.as_secs()).unwrap_or(u32::MAX),
        })
    }

    /// Examines a packet that was captured at `now`.
    pub fn process(&mut self, now: Instant, link: LinkType, packet: &[u8]) {
        if let Some(prepared) = self.prepare(now, link, packet) {
            self.track_prepared(&prepared);
        }
    }

    /// Examines packets in their order. Equals calls of [`Engine::process`], but the accesses to the
    /// connections of [`BURST_PACKETS_MAX`] packets overlap.
    pub fn process_burst<'a>(
        &mut self,
        link: LinkType,
        packets: impl IntoIterator<Item = (Instant, &'a [u8])>,
    ) {
        let mut packets = packets.into_iter();
        loop {
            let mut burst = ArrayVec::<Prepared<'_>, BURST_PACKETS_MAX>::new();
            let mut is_last = true;
            for (now, packet) in packets.by_ref() {
                if let Some(prepared) = self.prepare(now, link, packet) {
                    burst.push(prepared);
                    if burst.is_full() {
                        is_last = false;
                        break;
                    }
                }
            }
            for prepared in &burst {
                match prepared {
                    Prepared::V4(located) => self.v4.prefetch_flow(located.hash),
                    Prepared::V6(located) => self.v6.prefetch_flow(located.hash),
                }
            }
            burst.iter().for_each(|prepared| self.track_prepared(prepared));
            if is_last {
                return;
            }
        }
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> &MonitorCounters {
        &self.matching.counters
    }

    /// Returns the number of connections that are tracked.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.v4.len() + self.v6.len()
    }

    /// Returns the number of requests that wait for their responses.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.matching.outstanding.len()
    }

    /// Returns the latencies since the last call of [`Engine::swap_latencies`], of low and of high priority.
    #[must_use]
    pub fn latencies(&self) -> &[Distribution; 2] {
        &self.matching.latencies
    }

    /// Exchanges the latencies since the last call, of low and of high priority, for `empty`, which must have
    /// none.
    pub fn swap_latencies(&mut self, empty: &mut [Distribution; 2]) {
        core::mem::swap(&mut self.matching.latencies, empty);
    }

    /// Ends all connections: requests that still wait become unanswered.
    pub fn finish(&mut self) {
        finish(&mut self.v4, &mut self.matching);
        finish(&mut self.v6, &mut self.matching);
    }

    /// Parses a packet, and prefetches the place of its connection in the index.
    #[inline]
    fn prepare<'a>(&mut self, now: Instant, link: LinkType, packet: &'a [u8]) -> Option<Prepared<'a>> {
        let counters = &mut self.matching.counters;
        counters.packets += 1;
        counters.bytes += packet.len() as u64;
        let segment = match Frame::parse(link, packet) {
            Frame::Tcp(segment) => segment,
            Frame::Other => {
                counters.other_packets += 1;
                return None;
            }
            Frame::Malformed => {
                counters.malformed_packets += 1;
                return None;
            }
        };
        let Some((direction, rule)) = self.direction(&segment) else {
            self.matching.counters.unmonitored_packets += 1;
            return None;
        };
        let TcpSegment { addresses, source_port, destination_port, seq, ack, flags, payload, payload_len } =
            segment;
        let arrival = Arrival { now, direction, seq, ack, flags, bytes: payload, len: payload_len };
        let is_response = direction == RESPONSE;
        let ports = [source_port, destination_port];
        let ports = if is_response { [ports[1], ports[0]] } else { ports };
        Some(match addresses {
            Addresses::V4 { source, destination } => {
                let ends = if is_response { [destination, source] } else { [source, destination] };
                let key = KeyV4(ends[0], ends[1], ports);
                let hash = self.v4.hash(&key);
                self.v4.prefetch_place(hash);
                Prepared::V4(Located { key, hash, rule, arrival })
            }
            Addresses::V6 { source, destination } => {
                let ends = if is_response { [destination, source] } else { [source, destination] };
                let key = KeyV6(words(ends[0]), words(ends[1]), ports);
                let hash = self.v6.hash(&key);
                self.v6.prefetch_place(hash);
                Prepared::V6(Located { key, hash, rule, arrival })
            }
        })
    }

    /// Returns direction and rule of a segment, or `None` if neither port has a rule.
    #[inline]
    fn direction(&self, segment: &TcpSegment<'_>) -> Option<(usize, u8)> {
        let rules = &self.matching.rules;
        let (source, destination) =
            (rules.of_port(segment.source_port), rules.of_port(segment.destination_port));
        match (source, destination) {
            (None, None) => None,
            (None, Some(rule)) => Some((REQUEST, rule)),
            (Some(rule), None) => Some((RESPONSE, rule)),
            (Some(of_source), Some(of_destination)) => {
                // The side that sends SYN without ACK is the client. Otherwise the lower end is the server,
                // unless the connection is known with its sides.
                let is_request = match segment.flags & (SYN | ACK) {
                    SYN => true,
                    flags if flags == SYN | ACK => false,
                    _ => self.is_known_request(segment),
                };
                Some(if is_request { (REQUEST, of_destination) } else { (RESPONSE, of_source) })
            }
        }
    }

    /// Returns whether the source of a segment is the client of a known connection, or else its higher end.
    #[cold]
    fn is_known_request(&self, segment: &TcpSegment<'_>) -> bool {
        let ports = [segment.source_port, segment.destination_port];
        let swapped = [ports[1], ports[0]];
        match segment.addresses {
            Addresses::V4 { source, destination } => {
                let known = |key: KeyV4| self.v4.find(self.v4.hash(&key), &key).is_some();
                known(KeyV4(source, destination, ports))
                    || !known(KeyV4(destination, source, swapped))
                        && (ports[0], source) > (ports[1], destination)
            }
            Addresses::V6 { source, destination } => {
                let known = |key: KeyV6| self.v6.find(self.v6.hash(&key), &key).is_some();
                known(KeyV6(words(source), words(destination), ports))
                    || !known(KeyV6(words(destination), words(source), swapped))
                        && (ports[0], source) > (ports[1], destination)
            }
        }
    }

    #[inline]
    fn track_prepared(&mut self, prepared: &Prepared<'_>) {
        let Self { v4, v6, matching, connections_max, idle_seconds } = self;
        match prepared {
            Prepared::V4(located) => {
                let room = connections_max.saturating_sub(v6.len());
                track(v4, matching, located, room, *idle_seconds);
            }
            Prepared::V6(located) => {
                let room = connections_max.saturating_sub(v4.len());
                track(v6, matching, located, room, *idle_seconds);
            }
        }
    }
}

/// Returns the words of an IPv6 address.
fn words(address: u128) -> [u32; 4] {
    // Each cast takes 32 of the 128 bits.
    [96, 64, 32, 0].map(|shift| (address >> shift) as u32)
}

/// Finds or adds the connection of a segment, and lets it handle the segment.
#[inline]
fn track<K: FlowKey>(
    table: &mut FlowTable<K>,
    matching: &mut Matching,
    located: &Located<'_, K>,
    connections_max: usize,
    idle_seconds: u32,
) {
    let Located { key, hash, rule, arrival } = located;
    let index = match table.find(*hash, key) {
        Some(index) => index,
        None => match add(table, matching, located, connections_max, idle_seconds) {
            Some(index) => index,
            None => return,
        },
    };
    let tracking = &mut table.get_mut(index).tracking;
    tracking.seen = seconds(arrival.now);
    debug_assert_eq!(tracking.rule, *rule);
    let mut connection = Connection { tracking, matching };
    let has_ended = arrival.flags & RST != 0 || connection.receive(arrival);
    if has_ended {
        connection.end();
        matching.counters.connections_ended += 1;
        table.remove(index);
    }
}

/// Returns the seconds of an instant. They are compared modulo 2^32.
fn seconds(at: Instant) -> u32 {
    (at.as_nanos() / 1_000_000_000) as u32
}

/// Adds the connection of a segment. Returns `None` if the segment begins nothing, or there is no room.
#[cold]
fn add<K: FlowKey>(
    table: &mut FlowTable<K>,
    matching: &mut Matching,
    located: &Located<'_, K>,
    connections_max: usize,
    idle_seconds: u32,
) -> Option<u32> {
    let Located { key, hash, rule, ref arrival } = *located;
    let is_syn = arrival.flags & SYN != 0;
    if arrival.flags & RST != 0 || arrival.len == 0 && !is_syn {
        matching.counters.stray_packets += 1;
        return None;
    }
    let is_full = table.len() >= connections_max;
    let sweeps = if is_full { SWEPT_IF_FULL } else { SWEPT_PER_CONNECTION };
    for _ in 0..sweeps {
        let Some(index) = table.next_to_examine() else { continue };
        let tracking = &mut table.get_mut(index).tracking;
        let idle = seconds(arrival.now).wrapping_sub(tracking.seen);
        // Half of the range is the past, so that packets in a slightly wrong order do no harm.
        if idle >= idle_seconds && idle < 1 << 31 {
            Connection { tracking, matching }.end();
            matching.counters.connections_idle += 1;
            table.remove(index);
        }
    }
    if table.len() >= connections_max {
        matching.counters.untracked_packets += 1;
        return None;
    }
    matching.counters.connections_seen += 1;
    let flags = if is_syn {
        0
    } else {
        matching.counters.connections_midstream += 1;
        flag::LOST[REQUEST] | flag::LOST[RESPONSE] | flag::MIDSTREAM
    };
    let tracking = Tracking { rule, flags, outstanding: NONE, streams: NONE, ..Tracking::default() };
    Some(table.add(hash, key, tracking))
}

fn finish<K: FlowKey>(table: &mut FlowTable<K>, matching: &mut Matching) {
    for index in table.all() {
        Connection { tracking: &mut table.get_mut(index).tracking, matching }.end();
        table.remove(index);
    }
}

#[cfg(test)]
mod tests;
