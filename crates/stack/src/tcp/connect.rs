//! Active open, and ICMP errors about connections.

use super::Tcp;
use super::conn::{Flags, NONE};
use super::demux::{self, FlowEntry, FlowKey};
use super::mtu_search::MtuSearchState;
use super::profile::ProfileId;
use super::rtx_queue::RtxEntry;
use super::soft_errors::{ends_request, icmp_close_reason};
use super::state::State;
use crate::error::ConnectError;
use crate::events::CloseReason;
use crate::handle::Conn;
use crate::icmp::error::{IcmpErrorKind, TransportError};
use crate::ip::{Network, RouteError, TxError};
use crate::options::ConnectOptions;
use crate::steering::Steering;
use crate::tcp::config::EcnMode;
use crate::wire::tcp::SeqNumber;
use core::net::{IpAddr, SocketAddr};

impl Tcp {
    /// Opens a connection. SYN is sent by the next `transmit`.
    pub fn connect(
        &mut self,
        net: &mut Network,
        remote: SocketAddr,
        options: &ConnectOptions,
    ) -> Result<Conn, ConnectError> {
        let source = options.local.map(|a| a.ip()).filter(|ip| !ip.is_unspecified());
        if remote.port() == 0 || options.local.is_some_and(|l| l.is_ipv4() != remote.is_ipv4()) {
            return Err(ConnectError::InvalidAddress);
        }
        // Checked before the lookup of the route, which creates an entry for the neighbour.
        if !net.serves_connection(self.now, remote.ip(), source) {
            return Err(ConnectError::AddressNotAvailable);
        }
        let route = net.route(self.now, remote.ip(), source).map_err(|e| match e {
            RouteError::SourceNotLocal => ConnectError::AddressNotAvailable,
            RouteError::InvalidDestination => ConnectError::InvalidAddress,
            RouteError::NeighboursExhausted => ConnectError::TooMany,
            RouteError::NetUnreachable | RouteError::OwnAddress => ConnectError::NetUnreachable,
        })?;
        let profile = self.profiles.intern_options(&self.config, &options.socket);
        let profile = profile.ok_or(ConnectError::InvalidOption)?;
        if profile != ProfileId::DEFAULT {
            self.note_profile(profile);
        }
        let port = options.local.map_or(0, |l| l.port());
        let opened = self
            .choose_key(net.steering(), remote, route.src, port, options.is_ephemeral_port)
            .and_then(|(key, hash, reused)| {
                let Some(idx) = self.insert_connection(&key, hash, profile) else {
                    self.stats.connects_refused += 1;
                    return Err(ConnectError::TooMany);
                };
                if let Some(index) = reused {
                    self.end_time_wait(index);
                    self.stats.time_wait_reused += 1;
                }
                Ok((idx, key))
            });
        // `insert_connection` has taken its own reference to the profile.
        self.profiles.release(profile);
        let (idx, key) = opened?;
        let iss = SeqNumber(self.secrets.initial_sequence(&key, self.now));
        let ts_offset = self.secrets.timestamp_offset(key.local, key.remote);
        let c = &mut self.conns[idx];
        c.state = State::SynSent;
        c.hop = route.hop;
        c.pmtu = route.mtu;
        c.flags.assign(Flags::MTU_LOCKED, route.mtu_locked);
        c.ts_offset = ts_offset;
        c.snd_una = iss;
        c.snd_nxt = iss + 1;
        c.peer_mss = u16::MAX;
        c.flags |= Flags::ACTIVE_OPEN | Flags::ACCEPTED | Flags::SYN_PENDING;
        c.flags.assign(Flags::ECN, self.config.ecn == EcnMode::Active);
        c.flags |= Flags::from_options(&options.socket);
        self.init_windows(idx);
        self.stats.active_opens += 1;
        self.want_transmit(idx);
        if options.socket.fastopen_connect {
            self.begin_fastopen(net, idx, options.socket.fastopen_no_cookie);
        }
        Ok(self.conns.handle(idx))
    }

    /// Checks that `port` is free towards `remote` or, if it is 0, chooses a free port (RFC 6056 §3.3.3: an
    /// offset keyed by the destination, then ascending). Returns the flow key, its hash and the TIME-WAIT
    /// entry that the new connection replaces. `is_ephemeral`: `port` was not requested by the application.
    ///
    /// With several shards each opens only connections whose packets are routed to itself.
    fn choose_key(
        &mut self,
        steering: Option<&Steering>,
        remote: SocketAddr,
        local: IpAddr,
        port: u16,
        is_ephemeral: bool,
    ) -> Result<(FlowKey, u32, Option<u32>), ConnectError> {
        let is_routed_here =
            |port| steering.is_none_or(|steering| steering.owns_flow(remote, SocketAddr::new(local, port)));
        if port != 0 && !is_routed_here(port) {
            return Err(ConnectError::AddressNotAvailable);
        }
        let home_ports = match steering.filter(|_| port == 0) {
            None => None,
            // This shard does not serve the device of the address.
            Some(steering) => {
                Some(steering.home_ports(remote, local).ok_or(ConnectError::AddressNotAvailable)?)
            }
        };
        let (remote_port, remote, local) = (remote.port(), remote.ip().into(), local.into());
        let key = |local_port| FlowKey { remote, local, remote_port, local_port };
        if port != 0 {
            let key = key(port);
            let hash = self.secrets.flow_hash(&key);
            let reused = self.check_port_free(&key, hash, is_ephemeral)?;
            return Ok((key, hash, reused));
        }
        let first = u32::from(self.config.local_port_first);
        let count = u32::from(self.config.local_port_last) - first + 1;
        let offset = self.secrets.port_offset(local, remote, remote_port);
        let mut tried = 0;
        while tried < count {
            let at = offset.wrapping_add(self.next_port) % count;
            let (from, last) = ((first + at) as u16, self.config.local_port_last);
            // Without a port up to the last one, the search goes on with the first one.
            let next = home_ports.as_ref().map_or(Some(from), |home_ports| home_ports.next(from, last));
            let passed = next.map_or(count - at, |port| u32::from(port - from) + 1);
            self.next_port = self.next_port.wrapping_add(passed);
            tried += passed;
            let Some(port) = next.filter(|port| tried <= count && !self.listeners.has_port(*port)) else {
                continue;
            };
            let key = key(port);
            let hash = self.secrets.flow_hash(&key);
            if let Ok(reused) = self.check_port_free(&key, hash, true) {
                return Ok((key, hash, reused));
            }
        }
        self.stats.ports_exhausted += 1;
        Err(ConnectError::PortsExhausted)
    }

    /// Checks that the addresses are free. Returns the TIME-WAIT entry that has to be replaced, if any. An
    /// entry can be replaced if timestamps distinguish old segments from new ones (RFC 6191; Linux's
    /// `tcp_twsk_unique`): at once if the application requested the port, after `time_wait_reuse_ms` if the
    /// port was chosen for it (`is_ephemeral`).
    fn check_port_free(
        &self,
        key: &FlowKey,
        hash: u32,
        is_ephemeral: bool,
    ) -> Result<Option<u32>, ConnectError> {
        match demux::lookup_flow(&self.flows, &self.conns, &self.time_wait, &self.addresses, hash, key) {
            None => Ok(None),
            Some(FlowEntry::Connection(_)) => Err(ConnectError::AddressInUse),
            Some(FlowEntry::TimeWait(index)) => {
                let age_ms = self.time_wait.age_ms(index, self.now_ms());
                let reusable = self.time_wait.get(index).timestamps()
                    && self.config.timestamps
                    && (!is_ephemeral || age_ms > self.config.time_wait_reuse_ms);
                if reusable { Ok(Some(index)) } else { Err(ConnectError::AddressInUse) }
            }
        }
    }

    /// Processes an ICMP error about a segment that was sent, or a neighbour that does not answer.
    pub fn on_icmp_error(&mut self, net: &mut Network, error: &TransportError) {
        let key = FlowKey {
            remote: error.remote.ip().into(),
            local: error.local.ip().into(),
            remote_port: error.remote.port(),
            local_port: error.local.port(),
        };
        if key.remote.is_v4() != error.remote.is_ipv4() || key.local.is_v4() != error.local.is_ipv4() {
            // A mapped address in a quoted IPv6 header: the packet was not sent from here.
            return;
        }
        let hash = self.secrets.flow_hash(&key);
        let found =
            demux::lookup_flow(&self.flows, &self.conns, &self.time_wait, &self.addresses, hash, &key);
        let Some(FlowEntry::Connection(idx)) = found else { return };
        let profile = self.conns[idx].profile;
        if self.is_gtsm_used && self.is_below_min_hop_limit(profile, key.remote.is_v4(), error.hop_limit) {
            return;
        }
        let c = &self.conns[idx];
        // RFC 5927 §4.1: only errors about segments in flight are processed.
        let in_flight = error.seq.is_some_and(|s| SeqNumber(s).ge(c.snd_una) && SeqNumber(s).lt(c.snd_nxt));
        if !in_flight {
            self.stats.icmp_ignored += 1;
            return;
        }
        if matches!(error.kind, IcmpErrorKind::PacketTooBig { .. }) {
            let is_affected = c.state.is_synchronized() || self.has_syn_data_in_flight(idx);
            if net.accept_path_mtu(self.now, error).is_some() && is_affected {
                // The route has been updated, and says whether packets have to be fragmented.
                let _ = self.reroute(net, idx);
                self.on_syn_too_large(idx);
                self.rearm(idx);
            }
            return;
        }
        let opening = matches!(c.state, State::SynSent | State::SynReceived);
        if opening && c.has(Flags::ACTIVE_OPEN) {
            // Linux ends an attempt to connect at the first error.
            self.destroy(idx, icmp_close_reason(error));
        } else if opening && ends_request(error) {
            // No application knows the connection yet (`tcp_req_err`).
            self.destroy(idx, icmp_close_reason(error));
        } else {
            // RFC 5461 and RFC 1122 §4.2.3.9: the error may be transient. It is the close reason if the
            // connection times out.
            self.conns[idx].flags.set(Flags::SOFT_ERROR);
            let reason = icmp_close_reason(error);
            self.soft_errors.record(idx, self.conns[idx].generation, reason);
        }
    }

    /// Returns why a connection ends that was given up (`sk_err_soft`).
    #[cold]
    pub(super) fn time_out_reason(&self, idx: u32) -> CloseReason {
        let c = &self.conns[idx];
        if c.has(Flags::SOFT_ERROR) { self.soft_errors.get(idx, c.generation) } else { CloseReason::TimedOut }
    }

    /// Looks up the route again, after routes or addresses have changed.
    pub fn reroute(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        self.stats.reroutes += 1;
        let key = self.key(idx);
        match net.route(self.now, key.remote.ip(), Some(key.local.ip())) {
            Ok(route) => {
                let c = &mut self.conns[idx];
                c.hop = route.hop;
                let may_fragment = route.mtu_locked || self.profiles.get(c.profile).may_fragment;
                c.flags.assign(Flags::MTU_LOCKED, may_fragment);
                if route.mtu < c.pmtu {
                    self.mtu_reduced(idx, route.mtu);
                } else if c.mtu_search() == MtuSearchState::Off {
                    c.pmtu = route.mtu;
                }
                self.bound_mtu_search(idx, route.mtu);
                Ok(())
            }
            Err(_) => Err(TxError::Unreachable),
        }
    }

    /// Applies a smaller path MTU (RFC 1191, RFC 8201): segments that are too large are retransmitted in
    /// smaller ones.
    pub fn mtu_reduced(&mut self, idx: u32, mtu: u16) {
        let c = &mut self.conns[idx];
        if mtu >= c.pmtu {
            return;
        }
        let old = c.mss();
        c.pmtu = mtu;
        let mss = c.mss();
        if c.active == NONE || mss >= old {
            return;
        }
        let b = &mut self.active[c.active];
        b.rtx_queue.mark_oversized_lost(old, mss);
        b.rtx_queue.resegment(mss);
        let oversized = b.rtx_queue.iter().any(|s: &RtxEntry| s.has(super::rtx_queue::LOST));
        if oversized {
            super::recovery::simple_retransmit(c, b);
            self.want_transmit(idx);
        }
    }
}
