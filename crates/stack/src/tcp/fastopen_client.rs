//! TCP Fast Open, client (RFC 7413 §4.2.1): the first SYN carries data and the cookie that the peer has given
//! before, or requests a cookie. Every later SYN is a regular one.
//!
//! With a cookie the SYN is deferred until data are queued. Data of the SYN stay in the retransmission queue:
//! if SYN+ACK does not acknowledge them, they are sent again with the acknowledgement.

use super::Tcp;
use super::ack::snd_una_update;
use super::active::SlowPathFlags;
use super::conn::{Flags, NONE, Tcb};
use super::emit::TxSegment;
use super::fastopen_cookies::{AddressPair, CookieCache, RequestForm, StoreResult};
use super::input::{Segment, SegmentHeader};
use super::listen::{SYNACK_AMBIGUOUS, take_handshake_rtt};
use super::profile::ProfileId;
use super::recovery;
use super::rtx_queue::{Delivery, EndKind};
use super::state::State;
use crate::handle::Conn;
use crate::ip::{Network, TxError};
use crate::options::{CaState, FastOpenFailure};
use crate::steering::{ControlUpdate, FastOpenPeer};
use crate::time::Instant;
use crate::wire::tcp::{FastOpenCookie, SeqNumber, TcpFlags, TcpOptions};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Bits of `tcp.fastopen` (`net.ipv4.tcp_fastopen`).
const CLIENT_ENABLED: u32 = 1;
const CLIENT_WITHOUT_COOKIE: u32 = 4;

/// Bytes that options may take at most. The SYN leaves that much room, for options that middleboxes add
/// (`MAX_TCP_OPTION_SPACE`).
const OPTION_SPACE: u16 = 40;

/// Time in ms after which the timer of a deferred SYN is set again: that timer has nothing to do, and so it
/// is far away.
const DEFERRED_TIMER_MS: u32 = 24 * 3600 * 1000;

/// Doublings of the pause after black holes, at most.
const PAUSE_DOUBLINGS_MAX: u32 = 6;

/// Records of TCP Fast Open on a connection. Its profile has them, because few connections do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct FastOpenState {
    /// The SYN that was sent had the option (`syn_fastopen`).
    pub is_offered: bool,
    /// The option was the experimental one (`syn_fastopen_exp`).
    pub is_experimental: bool,
    /// The SYN that was sent had data (`syn_data`).
    pub has_syn_data: bool,
    /// Data of a SYN were acknowledged (`syn_data_acked`, `TCPI_OPT_SYN_DATA`).
    pub is_syn_data_acked: bool,
    /// The socket sends data without a cookie (`TCP_FASTOPEN_NO_COOKIE`).
    pub no_cookie: bool,
    /// Data that arrive on the connection show that there is no black hole any more (`syn_fastopen_ch`).
    pub ends_pause: bool,
    /// Why the connection was not opened fast.
    pub failure: FastOpenFailure,
}

impl FastOpenState {
    /// Returns whether a SYN with data or with the option was sent from here.
    pub fn is_begun(&self) -> bool {
        self.is_offered || self.has_syn_data
    }
}

/// Client state of all connections.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct FastOpenClient {
    cookies: CookieCache,
    /// How often fast open was paused since the last success (`tfo_active_disable_times`).
    pauses: u32,
    /// When fast open was paused last (`tfo_active_disable_stamp`).
    paused_at: Instant,
}

impl FastOpenClient {
    /// Takes over what another process knew.
    pub fn restore(&mut self, image: Self) {
        self.cookies.restore(image.cookies);
        (self.pauses, self.paused_at) = (image.pauses, image.paused_at);
    }

    pub fn new(cookies_max: u32) -> Self {
        Self { cookies: CookieCache::new(cookies_max), pauses: 0, paused_at: Instant::ZERO }
    }

    /// Returns until when fast open is paused after black holes; `None` if there were none since the last
    /// success. The pause doubles with each one.
    fn paused_until(&self, timeout_seconds: u32) -> Option<Instant> {
        let doublings = self.pauses.checked_sub(1)?.min(PAUSE_DOUBLINGS_MAX);
        Some(self.paused_at + Duration::from_secs(u64::from(timeout_seconds) << doublings))
    }
}

/// The parts that the first SYN may carry (`tcp_fastopen_cookie_check`).
struct FirstSyn {
    /// The option, which requests a cookie if it is empty.
    option: Option<FastOpenCookie>,
    /// Bytes of data; `None` if they are not sent before SYN+ACK.
    data_max: Option<u16>,
    ends_pause: bool,
}

impl Tcp {
    /// Returns whether TCP Fast Open is enabled for clients.
    pub fn can_open_fast(&self) -> bool {
        self.config.fastopen & CLIENT_ENABLED != 0
    }

    /// Prepares the SYN of a new connection that is opened fast: defers it if it may carry data, and sends it
    /// otherwise, with a request for a cookie (`tcp_fastopen_defer_connect`).
    #[cold]
    pub(super) fn begin_fastopen(&mut self, net: &mut Network, idx: u32, no_cookie: bool) {
        if !self.can_open_fast() {
            return;
        }
        self.update_fastopen(idx, |state| state.no_cookie = no_cookie);
        let active = self.ensure_active(idx);
        if self.first_syn(idx).data_max.is_none() {
            self.send_first_syn(net, idx);
            return;
        }
        self.active[active].slow_path.set(SlowPathFlags::SYN_DEFERRED);
        self.conns[idx].flags.clear(Flags::SYN_PENDING);
        self.defer_syn_timer(idx);
    }

    /// Moves the timer of a deferred SYN away.
    fn defer_syn_timer(&mut self, idx: u32) {
        self.conns[idx].last_rx = self.now_ms().wrapping_add(DEFERRED_TIMER_MS);
    }

    pub(super) fn is_syn_deferred(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        c.state == State::SynSent
            && c.active != NONE
            && self.active[c.active].slow_path.has(SlowPathFlags::SYN_DEFERRED)
    }

    /// Processes the timer of a deferred SYN. Returns whether the SYN is deferred.
    #[cold]
    pub(super) fn skips_deferred_syn(&mut self, idx: u32) -> bool {
        let is_deferred = self.is_syn_deferred(idx);
        if is_deferred {
            self.defer_syn_timer(idx);
        }
        is_deferred
    }

    /// Returns how many bytes a deferred SYN takes; `None` if the SYN of the connection is not deferred.
    pub fn syn_data_max(&self, conn: Conn) -> Option<u16> {
        let idx = self.index(conn).filter(|idx| self.is_syn_deferred(*idx))?;
        self.first_syn(idx).data_max
    }

    /// Sends a deferred SYN with what is queued, even if that is nothing.
    pub fn send_deferred_syn(&mut self, net: &mut Network, conn: Conn) {
        if let Some(idx) = self.index(conn).filter(|idx| self.is_syn_deferred(*idx)) {
            self.send_first_syn(net, idx);
            self.rearm(idx);
        }
    }

    /// Sends a deferred SYN if there is something to send.
    #[cold]
    pub(super) fn output_syn_sent(&mut self, net: &mut Network, idx: u32) {
        if self.is_syn_deferred(idx) {
            let c = &self.conns[idx];
            if c.has(Flags::FIN_QUEUED) || !self.active[c.active].send.is_empty() {
                self.send_first_syn(net, idx);
            }
        }
    }

    fn address_pair(&self, idx: u32) -> AddressPair {
        let key = self.key(idx);
        (key.local.ip(), key.remote.ip())
    }

    /// Decides what the first SYN may carry.
    fn first_syn(&self, idx: u32) -> FirstSyn {
        let c = &self.conns[idx];
        let profile = self.profiles.get(c.profile);
        let known = self.fastopen_client.cookies.get(&self.address_pair(idx));
        let timeout = self.config.fastopen_blackhole_timeout_seconds;
        let paused_until = match timeout {
            0 => None,
            timeout => self.fastopen_client.paused_until(timeout),
        };
        if paused_until.is_some_and(|until| self.now < until) {
            return FirstSyn { option: None, data_max: None, ends_pause: false };
        }
        let ends_pause = paused_until.is_some();
        let mss = match known.map_or(0, |known| known.mss) {
            0 => self.advmss(idx),
            mss => mss,
        };
        let mss = if profile.mss == 0 { mss } else { mss.min(profile.mss) };
        let mss = mss.min(c.pmtu.saturating_sub(c.header_bytes())).max(48);
        let data_max = Some(mss - OPTION_SPACE);
        if self.config.fastopen & CLIENT_WITHOUT_COOKIE != 0 || profile.fastopen.no_cookie {
            return FirstSyn { option: None, data_max, ends_pause };
        }
        if let Some(cookie) = known.and_then(|known| known.cookie.clone()) {
            return FirstSyn { option: Some(cookie), data_max, ends_pause };
        }
        let is_experimental = known.is_some_and(|known| known.request_form == RequestForm::Experimental);
        FirstSyn { option: Some(FastOpenCookie::new(&[], is_experimental)), data_max: None, ends_pause }
    }

    /// Sends the first SYN, with data and a cookie or with a request for a cookie (`tcp_send_syn_data`). If
    /// that fails, a regular SYN follows.
    fn send_first_syn(&mut self, net: &mut Network, idx: u32) {
        let FirstSyn { option, data_max, ends_pause } = self.first_syn(idx);
        let (now, now_ms) = (self.now, self.now_ms());
        let active = self.ensure_active(idx);
        let b = &mut self.active[active];
        b.slow_path.take(SlowPathFlags::SYN_DEFERRED);
        let queued = u32::try_from(b.send.len()).unwrap_or(u32::MAX);
        let len = data_max.map_or(0, |max| queued.min(max.into()));
        let c = &mut self.conns[idx];
        c.last_rx = now_ms;
        c.flags.set(Flags::SYN_PENDING);
        let segment = TxSegment { seq: c.snd_una, len, flags: syn_flags(c), gso_size: None, ect: false };
        let is_recorded = self.update_fastopen(idx, |state| {
            state.is_offered = option.is_some();
            state.is_experimental = option.as_ref().is_some_and(|option| option.is_experimental);
            state.has_syn_data = len > 0;
            state.ends_pause = ends_pause;
            if data_max.is_none() && option.is_some() {
                state.failure = FastOpenFailure::CookieUnavailable;
            }
        });
        if !is_recorded {
            return self.want_transmit(idx);
        }
        if let Err(error) = self.emit_syn_with(net, idx, &segment, option.as_ref()) {
            self.update_fastopen(idx, |state| (state.is_offered, state.has_syn_data) = (false, false));
            if error == TxError::Full {
                self.stats.device_full += 1;
                self.want_transmit(idx);
            }
            return;
        }
        let c = &mut self.conns[idx];
        c.flags.clear(Flags::SYN_PENDING | Flags::ACK_NOW);
        c.min_rtt = now.as_micros() as u32;
        if len > 0 {
            let start = c.snd_nxt;
            c.snd_nxt += len;
            let b = &mut self.active[active];
            b.rtx_queue.push(start, c.snd_nxt, now, 1, EndKind::Push);
            b.chrono.start_busy(now);
            self.stats.bytes_out += u64::from(len);
        }
    }

    /// Completes the handshake of a connection whose SYN had data or the option, with a SYN+ACK that
    /// acknowledges the SYN and perhaps data (`tcp_rcv_fastopen_synack`).
    #[cold]
    pub(super) fn on_fastopen_syn_ack(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        let now_us = self.now.as_micros() as u32;
        let active = self.ensure_active(idx);
        let c = &mut self.conns[idx];
        let is_retransmitted = c.retries > 0 || self.active[active].total_retrans > 0;
        take_handshake_rtt(c, self.profiles.get(c.profile), now_us);
        let advanced = self.acknowledge_syn_data(idx, seg.header.ack);
        let is_lost = !self.active[active].rtx_queue.is_empty();
        let peer = self.fastopen_peer(idx, seg, is_retransmitted);
        if self.store_fastopen_peer(&peer) {
            net.broadcast_update(ControlUpdate::FastOpenPeer(peer));
        }
        let had_syn_data = self.profile(idx).fastopen.has_syn_data;
        self.stats.fastopen_active += u64::from(had_syn_data && !is_lost);
        self.stats.fastopen_active_failures += u64::from(is_lost);
        self.update_fastopen(idx, |state| {
            state.is_syn_data_acked = had_syn_data && !is_lost;
            if is_lost {
                state.failure = match is_retransmitted {
                    true => FastOpenFailure::SynRetransmitted,
                    false => FastOpenFailure::DataNotAcked,
                };
            }
        });
        self.establish_active(idx);
        if is_lost {
            let (c, b) = (&self.conns[idx], &mut self.active[active]);
            b.rtx_queue.mark_all_lost(false);
            recovery::simple_retransmit(c, b);
            self.set_retransmit_timer(idx, true, None);
        }
        self.ack_now(idx);
        self.after_ack(idx, advanced);
        if !is_lost && (!seg.payload.is_empty() || seg.header.flags.contains(TcpFlags::FIN)) {
            self.take_syn_ack_data(net, idx, seg);
        }
    }

    /// Processes the acknowledgement of a SYN with data or the option, and perhaps of its data. Returns
    /// whether data were acknowledged.
    pub(super) fn acknowledge_syn_data(&mut self, idx: u32, ack: SeqNumber) -> bool {
        let active = self.ensure_active(idx);
        let (c, b) = (&mut self.conns[idx], &mut self.active[active]);
        c.snd_una += 1;
        let advanced = ack.gt(c.snd_una);
        if advanced {
            let bytes = snd_una_update(c, b, ack);
            b.send.discard_front(&mut self.chunks, &mut self.sources, bytes.into());
            if c.has(Flags::ACK_EVENTS) {
                b.acked_bytes = b.acked_bytes.saturating_add(bytes);
            }
            let (mss, sack) = (c.mss(), c.has(Flags::SACK));
            b.rtx_queue.clean_acked(c.snd_una, mss, sack, c.snd_una, &mut Delivery::default());
        }
        b.max_window = b.max_window.max(c.snd_wnd);
        b.rtx_queue.resegment(c.mss());
        if b.rtx_queue.is_empty() {
            b.recovery.ca_state = CaState::Open;
        }
        advanced
    }

    /// Takes data and FIN of a SYN+ACK (`tcp_fastopen_add_skb`).
    fn take_syn_ack_data(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        self.update_fastopen(idx, |state| state.is_syn_data_acked = true);
        let header = SegmentHeader {
            seq: seg.header.seq + 1,
            flags: TcpFlags(seg.header.flags.0 & !TcpFlags::SYN.0),
            ..seg.header
        };
        self.on_payload(net, idx, &Segment { header, ..*seg }, None);
    }

    /// Returns what a SYN+ACK tells about its sender.
    fn fastopen_peer(&self, idx: u32, seg: &Segment<'_>, is_retransmitted: bool) -> FastOpenPeer {
        let state = self.profile(idx).fastopen;
        let options = TcpOptions::parse(seg.options);
        // An unsolicited cookie is ignored.
        let offered = options.fastopen.filter(|_| state.is_offered);
        let is_unanswered = offered.is_none() && state.is_offered && !is_retransmitted && !state.has_syn_data;
        let (local, remote) = self.address_pair(idx);
        let mut cookie = ([0; 16], 0);
        if let Some(offered) = &offered {
            cookie.0[..offered.bytes.len()].copy_from_slice(&offered.bytes);
            // Cannot truncate: a cookie has at most 16 bytes.
            cookie.1 = offered.bytes.len() as u8;
        }
        FastOpenPeer {
            local,
            remote,
            mss: options.mss.unwrap_or(0),
            cookie,
            is_experimental: offered.is_some_and(|offered| offered.is_experimental),
            unanswered: u8::from(is_unanswered) << u8::from(state.is_experimental),
        }
    }

    /// Stores what a SYN+ACK, which another shard may have received, has told about its sender. Returns
    /// whether that is new.
    pub fn store_fastopen_peer(&mut self, peer: &FastOpenPeer) -> bool {
        let bytes = peer.cookie();
        let cookie = (!bytes.is_empty()).then(|| FastOpenCookie::new(bytes, peer.is_experimental));
        let form = RequestForm::after(peer.unanswered);
        let stored = self.fastopen_client.cookies.store((peer.local, peer.remote), peer.mss, cookie, form);
        self.stats.fastopen_cookies_evicted += u64::from(stored == StoreResult::Evicted);
        stored != StoreResult::Unchanged
    }

    /// Returns whether a SYN with data was sent and not acknowledged.
    #[cold]
    pub(super) fn has_syn_data_in_flight(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        c.state == State::SynSent && c.active != NONE && !self.active[c.active].rtx_queue.is_empty()
    }

    /// Sends a regular SYN at once after the path has reported that the SYN with data is too large
    /// (`tcp_simple_retransmit`).
    #[cold]
    pub(super) fn on_syn_too_large(&mut self, idx: u32) {
        if !self.has_syn_data_in_flight(idx) {
            return;
        }
        let c = &mut self.conns[idx];
        c.flags.set(Flags::SYN_PENDING);
        c.rttvar |= SYNACK_AMBIGUOUS;
        self.active[c.active].total_retrans += 1;
        self.stats.retransmitted += 1;
        self.want_transmit(idx);
    }

    /// Pauses fast open if a middlebox seems to drop the segments of a connection that was opened fast: after
    /// its third consecutive time-out, or when it is given up before
    /// (`tcp_fastopen_active_detect_blackhole`). `timeouts` are those before the current one.
    #[cold]
    pub(super) fn detect_fastopen_black_hole(&mut self, idx: u32, timeouts: u8, is_given_up: bool) {
        let state = self.profile(idx).fastopen;
        let is_fast = state.is_begun() || state.is_syn_data_acked;
        if is_fast && (timeouts == 2 || timeouts < 2 && is_given_up) {
            self.pause_fastopen();
            self.stats.fastopen_active_failures += 1;
        }
    }

    fn pause_fastopen(&mut self) {
        if self.config.fastopen_blackhole_timeout_seconds > 0 {
            self.fastopen_client.paused_at = self.now;
            self.fastopen_client.pauses = self.fastopen_client.pauses.saturating_add(1);
            self.stats.fastopen_black_holes += 1;
        }
    }

    /// Judges a connection that ends: if FIN arrived and none of the data before it, a middlebox drops data
    /// of connections that are opened fast. If data arrived, it does so no longer
    /// (`tcp_fastopen_active_disable_ofo_check`).
    #[cold]
    pub(super) fn on_fastopen_end(&mut self, idx: u32) {
        let c = &self.conns[idx];
        let state = self.profiles.get(c.profile).fastopen;
        if !state.is_offered {
            return;
        }
        if c.has(Flags::ATO_SET) {
            let (local, remote) = self.address_pair(idx);
            if state.ends_pause && local != remote && !remote.is_loopback() {
                self.fastopen_client.pauses = 0;
            }
        } else if c.active != NONE {
            let b = &self.active[c.active];
            if b.ooo_fin_seq.is_some() && b.recv.range_count() == 0 {
                self.pause_fastopen();
            }
        }
    }

    /// Changes what is recorded about fast open on a connection. Returns false if there are too many
    /// profiles: then nothing is recorded.
    pub(super) fn update_fastopen(&mut self, idx: u32, change: impl FnOnce(&mut FastOpenState)) -> bool {
        let mut profile = *self.profile(idx);
        change(&mut profile.fastopen);
        let Some(profile) = self.profiles.intern(profile) else { return false };
        let old: ProfileId = core::mem::replace(&mut self.conns[idx].profile, profile);
        self.profiles.release(old);
        true
    }
}

/// Returns the flags of the first SYN (RFC 3168 §6.1.1).
fn syn_flags(c: &Tcb) -> TcpFlags {
    match c.has(Flags::ECN) {
        true => TcpFlags::SYN | TcpFlags::ECE | TcpFlags::CWR,
        false => TcpFlags::SYN,
    }
}
