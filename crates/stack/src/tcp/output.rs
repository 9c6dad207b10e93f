//! Sends segments. Each turn processes the transmit list. For each connection, it sends in this order: SYN,
//! lost segments, new data as far as the windows admit them, FIN, and a pure acknowledgement if no other
//! segment carried it.

use super::Tcp;
use super::active::{MsgMore, RetransmitTimer, SlowPathFlags, TailLossProbe};
use super::burst::Burst;
use super::chrono::ChronoType;
use super::config::CongestionControl;
use super::conn::{Flags, NONE};
use super::emit::{SACK_BLOCK_BYTES, SACK_FIXED_BYTES, TxSegment, max_sack_blocks};
use super::recovery;
use super::rtt;
use super::rtx_queue::{EndKind, RtxEntry};
use super::state::State;
use crate::events::Event;
use crate::ip::{Network, TxError};
use crate::wire::tcp::TcpFlags;

/// Largest payload of a super-frame in bytes: what an IPv4 packet can carry, less headers.
const GSO_PAYLOAD_MAX: u32 = 65_535 - 120;

/// How much may be sent now.
pub(super) struct SendQuota {
    /// Bytes queued after `snd_nxt`.
    pub unsent: u32,
    /// Bytes after `snd_nxt` that the peer's window admits.
    pub window: u32,
    /// Segments that the congestion window admits.
    pub cwnd_quota: u32,
    /// Payload bytes of a full-sized segment.
    pub mss: u32,
}

impl Tcp {
    /// Processes the transmit list. Connections for which the device has no room stay on the list.
    pub fn transmit(&mut self, net: &mut Network) {
        self.release_deferred_acks();
        let mut round = self.tx_list.begin();
        while let Some(idx) = self.tx_list.next(&mut round) {
            if let Some(class) = round.class() {
                self.begin_class(net, class);
            }
            if !self.conns[idx].has(Flags::TX_LISTED) {
                // The connection ended while it was on the list.
                continue;
            }
            self.conns[idx].flags.clear(Flags::TX_LISTED);
            let result = match self.send_single_segment(net, idx) {
                Ok(true) => continue,
                Ok(false) => self.output(net, idx),
                Err(error) => Err(error),
            };
            match result {
                Ok(()) => {}
                Err(TxError::Full) => {
                    self.stats.device_full += 1;
                    self.want_transmit_refused(net, idx);
                }
                Err(_) => self.arm_retry_timer(idx),
            }
            self.rearm(idx);
            if result == Err(TxError::Full) && net.port_count() == 1 {
                break;
            }
        }
        if round.class().is_some() {
            self.end_classes(net);
        }
        self.drop_sent_deferred_acks();
    }

    /// Arms a timer after a transmission has failed for lack of a route, because nothing else would try
    /// again.
    fn arm_retry_timer(&mut self, idx: u32) {
        let now = self.now;
        let c = &self.conns[idx];
        if c.active == NONE || !c.state.is_synchronized() {
            return;
        }
        let b = &mut self.active[c.active];
        let fin_waits = c.has_unacked_fin() && !b.fin_sent;
        if b.timer_kind == RetransmitTimer::Off && (!b.send.is_empty() || fin_waits) {
            let rto = rtt::rto(c, self.profiles.get(c.profile), b.backoff);
            let kind = if b.rtx_queue.is_empty() { RetransmitTimer::Persist } else { RetransmitTimer::Rto };
            b.set_timer(kind, now + rto);
        }
    }

    /// Sends what one connection has to send.
    pub(super) fn output(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        if self.conns[idx].has(Flags::SYN_PENDING) {
            return self.send_syn(net, idx);
        }
        let c = &self.conns[idx];
        if !c.state.is_synchronized() {
            if c.state == State::SynReceived && c.has(Flags::ACK_NOW) {
                return self.send_ack(net, idx);
            }
            self.output_syn_sent(net, idx);
            return Ok(());
        }
        if c.active != NONE {
            if !net.hop_is_current(&c.hop) {
                // The new route may have a smaller MTU, which must be known before segments are cut.
                self.reroute(net, idx)?;
            }
            self.cwnd_restart(idx);
            let before = self.conns[idx].snd_nxt;
            let b = &self.active[self.conns[idx].active];
            // Usually nothing is lost and nothing is probed for.
            let is_usual = b.slow_path == SlowPathFlags::NONE && b.rtx_queue.lost_out == 0;
            if b.slow_path.has(SlowPathFlags::OWN_OUTPUT) {
                self.output_own(net, idx)?;
            } else if (is_usual || self.xmit_retransmit_queue::<false>(net, idx)?) && self.may_send_new(idx) {
                self.send_new::<false>(net, idx)?;
            }
            let c = &self.conns[idx];
            if c.snd_nxt != before && self.active[c.active].slow_path.has(SlowPathFlags::NOTSENT_LOWAT) {
                self.report_notsent_lowat(idx);
            }
        }
        if self.conns[idx].has(Flags::ACK_NOW) {
            self.send_ack(net, idx)?;
        }
        Ok(())
    }

    /// Returns false if [`Tcp::send_new`] has neither data nor FIN to send, and no timer of window probes to
    /// stop: data have arrived that the application has not answered yet.
    #[inline(always)]
    fn may_send_new(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        !b.send.is_empty() || c.has(Flags::FIN_QUEUED) || b.timer_kind == RetransmitTimer::Persist
    }

    /// Sends the data of a connection that is paced, or for which F-RTO asks for new data.
    #[cold]
    #[inline(never)]
    fn output_own(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        if self.active[self.conns[idx].active].slow_path.has(SlowPathFlags::PACED) {
            return self.output_paced(net, idx);
        }
        if self.send_frto_new_data::<false>(net, idx)? || self.xmit_retransmit_queue::<false>(net, idx)? {
            self.send_new::<false>(net, idx)?;
        }
        Ok(())
    }

    /// Reports `Writable` after data were sent, if few enough bytes are unsent (`__sk_stream_memory_free`).
    #[cold]
    fn report_notsent_lowat(&mut self, idx: u32) {
        let conn = self.conns.handle(idx);
        let low = u64::from(self.profile(idx).notsent_lowat);
        if 2 * u64::from(self.notsent(conn)) < low && !self.conns[idx].has(Flags::ORPHAN) {
            self.events.push_back(Event::Writable { conn });
        }
    }

    /// Sends a SYN, or a SYN+ACK that could not be sent at once.
    #[inline(never)]
    fn send_syn(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let c = &self.conns[idx];
        let mut flags = TcpFlags::SYN;
        let passive = c.state == State::SynReceived;
        if passive {
            flags |= TcpFlags::ACK;
            if c.has(Flags::ECN) {
                flags |= TcpFlags::ECE;
            }
        } else if c.has(Flags::ECN) && c.retries == 0 {
            // RFC 3168 §6.1.1. After a loss the SYN is sent without ECN, for middleboxes that drop such SYNs
            // (§6.1.1.1).
            flags |= TcpFlags::ECE | TcpFlags::CWR;
        }
        let segment = TxSegment { seq: c.snd_una, len: 0, flags, gso_size: None, ect: false };
        let (now_us, now_ms) = (self.now.as_micros() as u32, self.now_ms());
        // A passive connection has neither queued nor duplicate data, so its SYN+ACK has no exceptional
        // options.
        let plain = passive && !c.has(Flags::V6 | Flags::MTU_LOCKED | Flags::ACTIVE_OPEN);
        let sent = if plain { self.emit_syn_ack(net, idx, &segment) } else { Ok(false) };
        let result = match sent {
            Ok(true) => Ok(()),
            Ok(false) => self.emit(net, idx, &segment),
            Err(error) => Err(error),
        };
        let c = &mut self.conns[idx];
        if let Err(error) = result {
            if error != TxError::Full {
                // The segment counts as lost on the path: the next attempt follows after a time-out and not
                // at once.
                c.last_rx = now_ms;
            }
            return Err(error);
        }
        c.flags.clear(Flags::SYN_PENDING | Flags::ACK_NOW);
        if c.retries == 0 {
            c.min_rtt = now_us;
        }
        c.last_rx = now_ms;
        Ok(())
    }

    /// Sends the SYN+ACK of a connection that was created just now.
    #[inline(always)]
    pub(super) fn send_first_syn_ack(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let now_us = self.now.as_micros() as u32;
        let c = &self.conns[idx];
        if c.has(Flags::V6 | Flags::MTU_LOCKED) {
            return self.send_syn(net, idx);
        }
        let ecn = if c.has(Flags::ECN) { TcpFlags::ECE } else { TcpFlags::NONE };
        let flags = TcpFlags::SYN | TcpFlags::ACK | ecn;
        let segment = TxSegment { seq: c.snd_una, len: 0, flags, gso_size: None, ect: false };
        if !self.emit_syn_ack(net, idx, &segment)? {
            return self.send_syn(net, idx);
        }
        let c = &mut self.conns[idx];
        c.flags.clear(Flags::SYN_PENDING);
        c.min_rtt = now_us;
        Ok(())
    }

    /// Restarts slow start after an idle time as Linux does (RFC 5681 §4.1; `tcp_cwnd_restart`): the window
    /// is halved for each time-out without a transmission, down to the initial window.
    fn cwnd_restart(&mut self, idx: u32) {
        let now = self.now;
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        b.max_window = b.max_window.max(c.snd_wnd);
        if !b.rtx_queue.is_empty() || b.send.is_empty() {
            return;
        }
        if !self.config.slow_start_after_idle {
            return;
        }
        let rto = rtt::rto_us(c, self.profiles.get(c.profile), 0);
        let mut idle = now.micros_since(b.lsndtime);
        if idle <= rto || b.congestion.kind() == CongestionControl::Bbr {
            // BBR sends at the bandwidth that it knows.
            return;
        }
        let restart = self.config.initial_window_segments.min(c.cwnd);
        c.ssthresh = c.ssthresh.max((c.cwnd >> 1) + (c.cwnd >> 2));
        while idle > rto && c.cwnd > restart {
            idle -= rto;
            c.cwnd >>= 1;
        }
        c.cwnd = c.cwnd.max(restart);
        b.lsndtime = now;
        b.congestion.on_idle();
    }

    /// Sends new data before lost data, regardless of Nagle's algorithm (RFC 5682 §2.1, step 2b). Returns
    /// false if F-RTO does not ask for it, or there is no room.
    pub(super) fn send_frto_new_data<const PACED: bool>(
        &mut self,
        net: &mut Network,
        idx: u32,
    ) -> Result<bool, TxError> {
        let active = self.conns[idx].active;
        if !self.active[active].slow_path.has(SlowPathFlags::FRTO_NEW_DATA) {
            return Ok(false);
        }
        self.active[active].nagle_push = true;
        let result = self.send_new::<PACED>(net, idx);
        let (c, b) = (&self.conns[idx], &mut self.active[active]);
        b.nagle_push = false;
        result?;
        let sent = c.snd_nxt.gt(b.recovery.high_seq);
        // A paced connection may have to wait before it sends them.
        let waits = PACED && b.rate.as_deref().is_some_and(|rate| rate.pacer.is_waiting);
        if !sent && !waits {
            recovery::end_frto(b);
        }
        Ok(sent)
    }

    /// Retransmits lost segments as far as the congestion window admits them and, if the connection is
    /// `PACED`, its rate. Returns false if new data have to wait.
    pub(super) fn xmit_retransmit_queue<const PACED: bool>(
        &mut self,
        net: &mut Network,
        idx: u32,
    ) -> Result<bool, TxError> {
        let mut before = None;
        loop {
            let c = &self.conns[idx];
            let sent = &self.active[c.active].rtx_queue;
            if sent.lost_out == 0 || sent.in_flight() >= c.cwnd {
                break;
            }
            let mut room = c.cwnd - sent.in_flight();
            if PACED {
                let (mss, active, window_end) = (c.mss(), c.active, c.snd_una + c.snd_wnd);
                if self.active[active].rtx_queue.next_lost(mss, u32::MAX, window_end).is_none() {
                    // What is lost is in flight again.
                    break;
                }
                room = room.min(self.pacing_allowance(idx));
                if room == 0 {
                    return Ok(false);
                }
            }
            let c = &self.conns[idx];
            if self.active[c.active].mtu.probe.is_some() {
                self.forget_mtu_probe(idx);
            }
            let c = &self.conns[idx];
            let (mss, active, window_end) = (c.mss(), c.active, c.snd_una + c.snd_wnd);
            let bytes_max = self.gso_payload_max(net, idx, mss, room);
            let sent = &mut self.active[active].rtx_queue;
            let Some(lost) = sent.next_lost(mss, bytes_max, window_end) else { break };
            let first = sent.front().is_some_and(|s| s.seq == lost.seq);
            // The segment is sent together with the previous one again, as it was before.
            let pushes = lost.end_kind == EndKind::Packet && before == Some(lost.seq);
            before = (lost.end_kind == EndKind::Segment).then_some(lost.end_seq);
            self.retransmit_entry(net, idx, &lost, pushes)?;
            let c = &self.conns[idx];
            let b = &self.active[c.active];
            if first && !matches!(b.timer_kind, RetransmitTimer::ReoTimeout | RetransmitTimer::SynAck) {
                let rto = rtt::rto(c, self.profiles.get(c.profile), b.backoff);
                let at = self.clamp_rto_to_user_timeout(idx, rto);
                self.active[active].set_timer(RetransmitTimer::Rto, at);
            }
        }
        if self.active[self.conns[idx].active].slow_path == SlowPathFlags::NONE {
            return Ok(true);
        }
        self.send_probes(net, idx)
    }

    /// Sends a tail loss probe or a probe for a larger path MTU. Returns false if new data have to wait.
    #[cold]
    fn send_probes(&mut self, net: &mut Network, idx: u32) -> Result<bool, TxError> {
        let b = &mut self.active[self.conns[idx].active];
        if b.slow_path.take(SlowPathFlags::LOSS_PROBE) && b.rtx_queue.lost_out == 0 {
            self.send_loss_probe(net, idx)?;
        }
        if self.active[self.conns[idx].active].slow_path.has(SlowPathFlags::MTU_SEARCH) {
            return self.search_mtu(net, idx);
        }
        Ok(true)
    }

    /// Retransmits one entry of the retransmission queue, with PSH if it `pushes` or had PSH as the end of
    /// all queued data.
    fn retransmit_entry(
        &mut self,
        net: &mut Network,
        idx: u32,
        sent: &RtxEntry,
        pushes: bool,
    ) -> Result<(), TxError> {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let queued_end = c.snd_una + b.send.len() as u32;
        let payload_end = sent.end_seq.min(queued_end);
        let len = (payload_end - sent.seq).max(0) as u32;
        let mut flags = TcpFlags::ACK;
        if sent.end_seq.gt(queued_end) {
            flags |= TcpFlags::FIN;
        }
        if len > 0 && payload_end == queued_end || pushes || sent.end_kind == EndKind::Push {
            flags |= TcpFlags::PSH;
        }
        let mss = c.mss();
        let gso_size = (len > mss).then_some(mss as u16);
        let segment = TxSegment { seq: sent.seq, len, flags, gso_size, ect: false };
        self.emit(net, idx, &segment)?;
        let now = self.now;
        let our_ts = self.now_ms().wrapping_add(self.conns[idx].ts_offset);
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        b.rtx_queue.on_retransmitted(sent.seq, now);
        b.recovery.on_retransmit(sent.segments.into(), our_ts);
        b.recovery.on_sent(sent.segments.into());
        b.total_retrans += u32::from(sent.segments);
        b.retransmit_since.get_or_insert(now);
        self.stats.retransmitted += u64::from(sent.segments);
        Ok(())
    }

    /// Sends a tail loss probe: one new segment if there is one and the window admits it, otherwise the last
    /// segment again (RFC 8985 §7.3).
    fn send_loss_probe(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let allowance = self.send_quota(idx);
        let mss = allowance.mss;
        // New data serve as a probe only if the window has room for a whole segment (`tcp_snd_wnd_test`).
        let len = allowance.unsent.min(mss);
        let len = if len > allowance.window { 0 } else { len };
        if len > 0 && self.waits_for_departure(idx) {
            // No probe is sent, as on Linux: at the departure the data leave if the window has room.
            return Ok(());
        }
        if len > 0 {
            let last = len == allowance.unsent;
            let ends = if last { EndKind::Push } else { EndKind::Segment };
            self.send_segment(net, idx, len, last, ends, mss)?;
            self.stats.tail_probes += 1;
            let c = &self.conns[idx];
            self.active[c.active].tlp = Some(TailLossProbe { end_seq: c.snd_nxt, is_retrans: false });
        } else {
            self.forget_mtu_probe(idx);
            let c = &self.conns[idx];
            let window_end = c.snd_una + c.snd_wnd;
            let sent = &mut self.active[c.active].rtx_queue;
            if let Some(tail) = sent.tail(mss, window_end) {
                self.retransmit_entry(net, idx, &tail, false)?;
                self.stats.tail_probes += 1;
                let c = &self.conns[idx];
                self.active[c.active].tlp = Some(TailLossProbe { end_seq: c.snd_nxt, is_retrans: true });
            }
        }
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        let rto = rtt::rto(c, self.profiles.get(c.profile), b.backoff);
        b.set_timer(RetransmitTimer::Rto, self.now + rto);
        Ok(())
    }

    /// Returns what windows and queue allow to be sent.
    pub(super) fn send_quota(&self, idx: u32) -> SendQuota {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let queued_end = c.snd_una + b.send.len() as u32;
        let unsent = (queued_end - c.snd_nxt).max(0) as u32;
        let window_end = c.snd_una + c.snd_wnd;
        let window = (window_end - c.snd_nxt).max(0) as u32;
        let segments = c.cwnd.saturating_sub(b.rtx_queue.in_flight());
        // Segments do not exceed half of the largest window that the peer has offered (RFC 9293 §3.8.6.2.1):
        // into a tiny window a full-sized segment would never fit.
        let half = if b.max_window > 536 { b.max_window / 2 } else { b.max_window };
        let mss = if half > 0 { c.mss().min(half.max(28)) } else { c.mss() };
        // SACK blocks on data segments reduce their payload (RFC 6691 §2).
        let mss = mss.min(c.mss() - self.sack_bytes_on_data(idx));
        SendQuota { unsent, window, cwnd_quota: segments, mss }
    }

    /// Returns the bytes of the SACK option on a data segment; 0 on tiny segments.
    fn sack_bytes_on_data(&self, idx: u32) -> u32 {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let blocks = usize::from(b.dsack.is_some()) + b.sack_block_count(c.rcv_nxt);
        if blocks == 0 || !c.has(Flags::SACK) {
            return 0;
        }
        let bytes = SACK_FIXED_BYTES + SACK_BLOCK_BYTES * blocks.min(max_sack_blocks(c)) as u32;
        if bytes * 4 <= c.mss() { bytes } else { 0 }
    }

    /// Sends new data, and FIN after them. A `PACED` connection sends only what its rate admits.
    pub(super) fn send_new<const PACED: bool>(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let mut burst = Burst::default();
        loop {
            let mut a = self.send_quota(idx);
            if a.unsent == 0 {
                return self.send_fin(net, idx, &a);
            }
            if a.cwnd_quota == 0 {
                self.cwnd_validate(idx, true);
                let now = self.now;
                self.active[self.conns[idx].active].chrono.start_busy(now);
                return Ok(());
            }
            if PACED {
                a.cwnd_quota = a.cwnd_quota.min(self.pacing_allowance(idx));
                if a.cwnd_quota == 0 {
                    return Ok(());
                }
            }
            let mut max_bytes = a.unsent.min(a.window);
            let has_marks = self.active[self.conns[idx].active].slow_path.has(SlowPathFlags::RECORD_MARKS);
            let record_end = if has_marks { self.bytes_to_record_end(idx, &a, burst.begins()) } else { None };
            max_bytes = max_bytes.min(record_end.unwrap_or(max_bytes));
            if max_bytes > a.mss {
                max_bytes = max_bytes.min(self.gso_payload_max(net, idx, a.mss, a.cwnd_quota));
            }
            let is_forced = self.active[self.conns[idx].active].nagle_push;
            let Some(len) = self.size_to_send(idx, &a, max_bytes, record_end == Some(max_bytes)) else {
                self.cwnd_validate(idx, false);
                self.arm_held_data_timer(idx, &a);
                return Ok(());
            };
            let last = len == a.unsent;
            // A probe of a window that is too small for a full-sized segment must not wait for more data.
            let ends = match last {
                _ if has_marks && self.pushes_within(idx, len) => {
                    burst = Burst::default();
                    EndKind::Push
                }
                true if self.active[self.conns[idx].active].msg_more != MsgMore::Released => EndKind::Push,
                false if is_forced && len < a.mss || burst.pushes(self, idx, &a, len) => EndKind::Packet,
                _ => EndKind::Segment,
            };
            self.send_segment(net, idx, len, last, ends, a.mss)?;
            let c = &self.conns[idx];
            let b = &mut self.active[c.active];
            if last && b.msg_more == MsgMore::Released {
                b.msg_more = MsgMore::Expected;
            }
            if len == a.unsent && c.has(Flags::FIN_QUEUED) == self.active[c.active].fin_sent {
                self.chrono_sndbuf_limited(idx);
                return Ok(());
            }
        }
    }

    /// Returns how many of `max_bytes` bytes are sent now; `None` if they wait (Nagle, cork, window).
    /// `ends_record`: the data after them belong to another record.
    #[inline(always)]
    fn size_to_send(&mut self, idx: u32, a: &SendQuota, max_bytes: u32, ends_record: bool) -> Option<u32> {
        let partial = max_bytes % a.mss;
        if partial == 0 {
            return (max_bytes > 0).then_some(max_bytes);
        }
        let full_segments = max_bytes - partial;
        let last = max_bytes == a.unsent;
        if ends_record && (!last || self.is_released_after(idx, max_bytes)) {
            return Some(max_bytes);
        }
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        if last {
            let corked = c.has(Flags::CORK) || b.msg_more == MsgMore::Expected;
            // Minshall: a small segment is held back only while another small segment is unacknowledged.
            let nagle = !c.has(Flags::NODELAY) && !b.rtx_queue.is_empty() && b.snd_sml.is_some();
            let urgent = b.snd_up.is_some();
            if urgent || c.has(Flags::FIN_QUEUED) || b.nagle_push || !(corked || nagle) {
                b.nagle_push = false;
                return Some(max_bytes);
            }
        } else if b.nagle_push && full_segments == 0 {
            // A probe into a window that is open, but not for a full-sized segment. The window does not open
            // further, so the peer's buffer has become smaller, and its former size no longer tells which
            // segments are worth sending.
            b.nagle_push = false;
            b.max_window = c.snd_wnd;
            return Some(max_bytes);
        } else if max_bytes < a.window {
            // Limited by the congestion window or the size of a super-frame: only full-sized segments are
            // sent.
            return (full_segments > 0).then_some(full_segments);
        }
        (full_segments > 0).then_some(full_segments)
    }

    /// Arms a timer that sends data which are held back.
    fn arm_held_data_timer(&mut self, idx: u32, a: &SendQuota) {
        let now = self.now;
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        let fits = a.unsent <= a.window;
        if !fits {
            b.chrono.set(ChronoType::RwndLimited, now);
        }
        if (c.has(Flags::CORK) || b.msg_more == MsgMore::Expected) && fits {
            if b.rtx_queue.is_empty() {
                // As on Linux, the timer of window probes releases the data (`tcp_check_probe_timer`).
                let longest = rtt::probe_timeout(c, self.profiles.get(c.profile), 0);
                b.cork_deadline.get_or_insert(now + longest);
            }
            // Otherwise an acknowledgement or a tail loss probe follows first (`tcp_check_probe_timer`).
            return;
        }
        if b.rtx_queue.is_empty() && b.timer_kind == RetransmitTimer::Off {
            // RFC 9293 §3.8.6.1: without a timer a lost window update would stop both sides forever.
            let after = rtt::probe_timeout(c, self.profiles.get(c.profile), b.backoff);
            b.set_timer(RetransmitTimer::Persist, now + after);
        }
    }

    #[inline(always)]
    fn send_fin(&mut self, net: &mut Network, idx: u32, a: &SendQuota) -> Result<(), TxError> {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        if b.timer_kind == RetransmitTimer::Persist && !c.has(Flags::FIN_QUEUED) {
            self.active[c.active].stop_timer();
            return Ok(());
        }
        let fin_seq = c.snd_una + b.send.len() as u32;
        if !c.has(Flags::FIN_QUEUED)
            || c.snd_nxt != fin_seq
            || !matches!(c.state, State::FinWait1 | State::LastAck | State::Closing)
        {
            return Ok(());
        }
        if c.snd_una == c.snd_nxt && b.fin_sent {
            return Ok(());
        }
        if a.window == 0 {
            self.arm_held_data_timer(idx, a);
            return Ok(());
        }
        self.send_segment(net, idx, 0, true, EndKind::Segment, a.mss)
    }

    /// Sends `len` new bytes from `snd_nxt` on in segments of `mss` bytes, with FIN if they are the last
    /// ones, and with PSH on the last segment unless `ends` is [`EndKind::Segment`].
    pub(super) fn send_segment(
        &mut self,
        net: &mut Network,
        idx: u32,
        len: u32,
        last: bool,
        ends: EndKind,
        mss: u32,
    ) -> Result<(), TxError> {
        let now = self.now;
        let mut flags = TcpFlags::ACK;
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let window_end = c.snd_una + c.snd_wnd;
        let fin = last && c.has(Flags::FIN_QUEUED) && (c.snd_nxt + len).lt(window_end);
        if fin {
            flags |= TcpFlags::FIN;
        }
        if ends != EndKind::Segment {
            flags |= TcpFlags::PSH;
        }
        if c.has(Flags::ECN_CWR) && len > 0 {
            flags |= TcpFlags::CWR;
        }
        let gso_size = (len > mss).then_some(mss as u16);
        let segments = len.div_ceil(mss).max(1) as u16;
        let was_empty = b.rtx_queue.is_empty();
        let segment = TxSegment { seq: c.snd_nxt, len, flags, gso_size, ect: c.has(Flags::ECN) && len > 0 };
        self.emit(net, idx, &segment)?;
        self.stats.bytes_out += u64::from(len);
        let now_ms = self.now_ms();
        let delay = self.config.delayed_ack_ms;
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        let start = c.snd_nxt;
        let end = start + (len + u32::from(fin));
        if flags.contains(TcpFlags::CWR) {
            c.flags.clear(Flags::ECN_CWR);
        }
        if b.timer_kind == RetransmitTimer::Persist {
            // The window has opened: the backoff of window probes ends.
            b.backoff = 0;
            b.retransmit_since = None;
        }
        b.rtx_queue.push(start, end, now, segments, ends);
        b.recovery.on_sent(segments.into());
        b.fin_sent |= fin;
        c.snd_nxt = end;
        if !len.is_multiple_of(mss) {
            b.snd_sml = Some(end);
        }
        b.lsndtime = now;
        b.chrono.start_busy(now);
        b.idle_since = None;
        b.cork_deadline = None;
        if c.has(Flags::ATO_SET) && now_ms.wrapping_sub(c.last_rx) < delay {
            c.flags.set(Flags::PINGPONG);
        }
        let restart = was_empty
            || b.timer_kind == RetransmitTimer::LossProbe
            || b.timer_kind == RetransmitTimer::Persist;
        let limited = b.rtx_queue.in_flight() >= c.cwnd;
        self.cwnd_validate(idx, limited);
        self.set_retransmit_timer(idx, restart, None);
        Ok(())
    }

    /// Validates the congestion window (RFC 7661, as Linux does): records how much of the window was used
    /// during the last round.
    fn cwnd_validate(&mut self, idx: u32, limited: bool) {
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        let out = b.rtx_queue.packets_out;
        if c.snd_una.ge(b.cwnd_usage_seq) || limited || !b.is_cwnd_limited && out > b.max_packets_out {
            b.is_cwnd_limited = limited;
            b.max_packets_out = out;
            b.cwnd_usage_seq = c.snd_nxt;
        }
    }

    /// Returns the payload bytes of the largest frame or super-frame for `segments` segments.
    fn gso_payload_max(&self, net: &Network, idx: u32, mss: u32, segments: u32) -> u32 {
        let c = &self.conns[idx];
        let urgent = c.active != NONE && self.active[c.active].snd_up.is_some();
        let max = net.capabilities(c.hop.link()).map_or(0, |caps| caps.gso_bytes_max);
        if max == 0 || urgent {
            return mss;
        }
        // 40 bytes of TCP options, and 18 of an Ethernet header with a VLAN tag.
        let headers = u32::from(c.header_bytes()) + 40 + 18;
        let room = (max as u32).saturating_sub(headers).min(GSO_PAYLOAD_MAX) / mss;
        room.clamp(1, segments.max(1)) * mss
    }
}
