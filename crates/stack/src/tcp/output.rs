//! Segments leave. Each turn works off the transmit list. For each connection: SYN, what was lost, what is new as far as the windows go, FIN,
//! and an acknowledgement by itself if nothing else carried it.

use super::Tcp;
use super::burst::Burst;
use super::busy::{Extras, More, RetransmitTimer};
use super::chrono::Waits;
use super::conn::{Flags, NONE};
use super::emit::{SACK_BLOCK_BYTES, SACK_FIXED_BYTES, Segment, max_sack_blocks};
use super::rtt;
use super::sent_queue::{Ends, Sent};
use super::state::State;
use crate::events::Event;
use crate::ip::{Network, TxError};
use crate::wire::tcp::TcpFlags;
use core::time::Duration;

/// How long a cork holds a partial segment (Linux, tcp(7)).
const CORK_MAX: Duration = Duration::from_millis(200);

/// Payload of a super-frame at the most: what an IPv4 packet can carry less headers.
const SUPER_PAYLOAD_MAX: u32 = 65_535 - 120;

/// What may be sent now.
pub(super) struct Allowance {
    /// Bytes queued behind `snd_nxt`.
    pub unsent: u32,
    /// Of those, the peer's window takes.
    pub window: u32,
    /// Segments the congestion window takes.
    pub segments: u32,
    /// Bytes of a full one.
    pub mss: u32,
}

impl Tcp {
    /// Works off the transmit list. Connections for which the device has no room stay on it.
    pub fn transmit(&mut self, net: &mut Network) {
        self.release_held_acks();
        let mut round = self.tx_list.begin();
        while let Some(idx) = self.tx_list.next(&mut round) {
            if !self.conns[idx].has(Flags::TX_LISTED) {
                // Its connection went while it was on the list.
                continue;
            }
            self.conns[idx].flags.clear(Flags::TX_LISTED);
            let result = match self.send_message(net, idx) {
                Ok(true) => continue,
                Ok(false) => self.output(net, idx),
                Err(error) => Err(error),
            };
            match result {
                Ok(()) => {}
                Err(TxError::Full) => {
                    self.stats.device_full += 1;
                    self.want_transmit(idx);
                }
                Err(_) => self.try_later(idx),
            }
            self.rearm(idx);
            if result == Err(TxError::Full) && net.port_count() == 1 {
                break;
            }
        }
        self.forget_sent_acks();
    }

    /// There is no way out now: without a timer nothing would ever try again.
    fn try_later(&mut self, idx: u32) {
        let now = self.now;
        let c = &self.conns[idx];
        if c.busy == NONE || !c.state.is_synchronized() {
            return;
        }
        let b = &mut self.busy[c.busy];
        let fin_waits = c.owes_fin() && !b.fin_sent;
        if b.timer_kind == RetransmitTimer::Off && (!b.send.is_empty() || fin_waits) {
            let rto = rtt::rto(c, self.profiles.get(c.profile), b.backoff);
            let kind = if b.sent.is_empty() { RetransmitTimer::Persist } else { RetransmitTimer::Rto };
            b.set_timer(kind, now + rto);
        }
    }

    /// Sends what one connection has to send.
    pub(super) fn output(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        if self.conns[idx].has(Flags::SYN_PENDING) {
            return self.send_syn_later(net, idx);
        }
        let c = &self.conns[idx];
        if !c.state.is_synchronized() {
            let answer = c.state == State::SynReceived && c.has(Flags::ACK_NOW);
            return if answer { self.send_ack(net, idx) } else { Ok(()) };
        }
        if c.busy != NONE {
            if !net.hop_is_current(&c.hop) {
                // The new way may take less: that must be known before segments are cut.
                self.reroute(net, idx)?;
            }
            self.restart_after_idle(idx);
            let before = self.conns[idx].snd_nxt;
            if self.send_new_first(net, idx)? || self.send_lost(net, idx)? {
                self.send_new(net, idx)?;
            }
            let c = &self.conns[idx];
            if c.snd_nxt != before && self.busy[c.busy].extras.has(Extras::LOW_WATER) {
                self.report_low_water(idx);
            }
        }
        if self.conns[idx].has(Flags::ACK_NOW) {
            self.send_ack(net, idx)?;
        }
        Ok(())
    }

    /// Something has left: tells the owner if little enough is left (`__sk_stream_memory_free`).
    #[cold]
    fn report_low_water(&mut self, idx: u32) {
        let conn = self.conns.handle(idx);
        let low = u64::from(self.profile(idx).not_sent_low_water);
        if 2 * u64::from(self.not_sent(conn)) < low && !self.conns[idx].has(Flags::ORPHAN) {
            self.events.push_back(Event::Writable { conn });
        }
    }

    /// SYN, or a SYN+ACK that did not leave at once.
    #[inline(never)]
    fn send_syn_later(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        self.send_syn(net, idx)
    }

    /// SYN or SYN+ACK.
    #[inline(always)]
    pub fn send_syn(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let c = &self.conns[idx];
        let mut flags = TcpFlags::SYN;
        let passive = c.state == State::SynReceived;
        if passive {
            flags |= TcpFlags::ACK;
            if c.has(Flags::ECN) {
                flags |= TcpFlags::ECE;
            }
        } else if c.has(Flags::ECN) && c.retries == 0 {
            // RFC 3168 §6.1.1; after a loss without it, for middleboxes that drop such SYNs (§6.1.1.1).
            flags |= TcpFlags::ECE | TcpFlags::CWR;
        }
        let segment = Segment { seq: c.snd_una, len: 0, flags, gso_size: None, ect: false };
        let (now_us, now_ms) = (self.now.as_micros() as u32, self.now_ms());
        // In a connection that somebody asks for nothing is queued and nothing came twice, so that its SYN+ACK is plain.
        let plain = passive && !c.has(Flags::V6 | Flags::MTU_LOCKED | Flags::ACTIVE);
        let sent = if plain { self.emit_syn_ack(net, idx, &segment) } else { Ok(false) };
        let result = match sent {
            Ok(true) => Ok(()),
            Ok(false) => self.emit(net, idx, &segment),
            Err(error) => Err(error),
        };
        let c = &mut self.conns[idx];
        if let Err(error) = result {
            if error != TxError::Full {
                // It counts as lost on the way: the next attempt comes after a time-out and not at once.
                c.last_rx = now_ms;
            }
            return Err(error);
        }
        c.flags.clear(Flags::SYN_PENDING | Flags::ACK_NOW);
        c.snd_nxt = c.snd_una + 1;
        if c.retries == 0 {
            c.min_rtt = now_us;
        }
        c.last_rx = now_ms;
        Ok(())
    }

    /// Linux's slow start after idle (RFC 5681 §4.1): the window halves for each time-out without sending, down to the initial one.
    fn restart_after_idle(&mut self, idx: u32) {
        let now = self.now;
        let c = &mut self.conns[idx];
        let b = &mut self.busy[c.busy];
        b.window_max = b.window_max.max(c.snd_wnd);
        if !b.sent.is_empty() || b.send.is_empty() {
            return;
        }
        if !self.config.slow_start_after_idle {
            return;
        }
        let rto = rtt::rto_us(c, self.profiles.get(c.profile), 0);
        let mut idle = now.micros_since(b.last_sent);
        if idle <= rto {
            return;
        }
        let restart = self.config.initial_window_segments.min(c.cwnd);
        c.ssthresh = c.ssthresh.max((c.cwnd >> 1) + (c.cwnd >> 2));
        while idle > rto && c.cwnd > restart {
            idle -= rto;
            c.cwnd >>= 1;
        }
        c.cwnd = c.cwnd.max(restart);
        b.last_sent = now;
        b.congestion.on_idle();
    }

    /// RFC 5682 §2.1, step 2b: new data instead of what is lost, whatever Nagle's algorithm says. False if there is no reason to, or no room.
    fn send_new_first(&mut self, net: &mut Network, idx: u32) -> Result<bool, TxError> {
        let busy = self.conns[idx].busy;
        if !self.busy[busy].recovery.sends_new_first() {
            return Ok(false);
        }
        self.busy[busy].force = true;
        let result = self.send_new(net, idx);
        let (c, b) = (&self.conns[idx], &mut self.busy[busy]);
        b.force = false;
        result?;
        let sent = c.snd_nxt.gt(b.recovery.high_seq);
        if !sent {
            b.recovery.end_frto();
        }
        Ok(sent)
    }

    /// Retransmits what is lost, as far as the congestion window goes. False if new data have to wait.
    fn send_lost(&mut self, net: &mut Network, idx: u32) -> Result<bool, TxError> {
        let mut before = None;
        loop {
            let c = &self.conns[idx];
            let sent = &self.busy[c.busy].sent;
            if sent.lost_out == 0 || sent.in_flight() >= c.cwnd {
                break;
            }
            let room = c.cwnd - sent.in_flight();
            if self.busy[c.busy].mtu.probe.is_some() {
                self.forget_mtu_probe(idx);
            }
            let c = &self.conns[idx];
            let (mss, busy, window_end) = (c.mss(), c.busy, c.snd_una + c.snd_wnd);
            let bytes_max = self.super_payload(net, idx, mss, room);
            let sent = &mut self.busy[busy].sent;
            let Some(lost) = sent.next_lost(mss, bytes_max, window_end) else { break };
            let first = sent.front().is_some_and(|s| s.start == lost.start);
            // It leaves with the one before it as it did before.
            let pushes = lost.ends == Ends::Packet && before == Some(lost.start);
            before = (lost.ends == Ends::Segment).then_some(lost.end);
            self.resend(net, idx, &lost, pushes)?;
            let c = &self.conns[idx];
            let b = &self.busy[c.busy];
            if first && b.timer_kind != RetransmitTimer::Reorder {
                let rto = rtt::rto(c, self.profiles.get(c.profile), b.backoff);
                let at = self.no_later_than_user_timeout(idx, rto);
                self.busy[busy].set_timer(RetransmitTimer::Rto, at);
            }
        }
        if self.busy[self.conns[idx].busy].extras == Extras::NONE {
            return Ok(true);
        }
        self.send_extras(net, idx)
    }

    /// Probes: for a lost tail, and for a larger path MTU. False if new data have to wait.
    #[cold]
    fn send_extras(&mut self, net: &mut Network, idx: u32) -> Result<bool, TxError> {
        let b = &mut self.busy[self.conns[idx].busy];
        if b.extras.take(Extras::TAIL_PROBE) && b.sent.lost_out == 0 {
            self.send_tail_probe(net, idx)?;
        }
        if self.busy[self.conns[idx].busy].extras.has(Extras::MTU_SEARCH) {
            return self.search_mtu(net, idx);
        }
        Ok(true)
    }

    /// Sends one entry of the retransmission queue again, with PSH if it pushes or did so for all that was queued.
    fn resend(&mut self, net: &mut Network, idx: u32, sent: &Sent, pushes: bool) -> Result<(), TxError> {
        let c = &self.conns[idx];
        let b = &self.busy[c.busy];
        let queued_end = c.snd_una + b.send.len() as u32;
        let payload_end = sent.end.min(queued_end);
        let len = (payload_end - sent.start).max(0) as u32;
        let mut flags = TcpFlags::ACK;
        if sent.end.gt(queued_end) {
            flags |= TcpFlags::FIN;
        }
        if len > 0 && payload_end == queued_end || pushes || sent.ends == Ends::Message {
            flags |= TcpFlags::PSH;
        }
        let mss = c.mss();
        let gso_size = (len > mss).then_some(mss as u16);
        let segment = Segment { seq: sent.start, len, flags, gso_size, ect: false };
        self.emit(net, idx, &segment)?;
        let now = self.now;
        let our_ts = self.now_ms().wrapping_add(self.conns[idx].ts_offset);
        let c = &self.conns[idx];
        let b = &mut self.busy[c.busy];
        b.sent.on_retransmitted(sent.start, now);
        b.recovery.on_retransmit(sent.segments.into(), our_ts);
        b.recovery.on_sent(sent.segments.into());
        b.total_retrans += u32::from(sent.segments);
        b.trouble_since.get_or_insert(now);
        self.stats.retransmitted += u64::from(sent.segments);
        Ok(())
    }

    /// RFC 8985 §7.3: one new segment if there is one and the window takes it, otherwise the last one again.
    fn send_tail_probe(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let allowance = self.allowance(idx);
        let mss = allowance.mss;
        let len = allowance.unsent.min(allowance.window).min(mss);
        self.stats.tail_probes += 1;
        if len > 0 {
            let last = len == allowance.unsent;
            let ends = if last { Ends::Message } else { Ends::Segment };
            self.send_one(net, idx, len, last, ends, mss)?;
            let c = &self.conns[idx];
            self.busy[c.busy].probe_end = Some((c.snd_nxt, false));
        } else {
            self.forget_mtu_probe(idx);
            let c = &self.conns[idx];
            let Some(tail) = self.busy[c.busy].sent.tail(mss) else { return Ok(()) };
            self.resend(net, idx, &tail, false)?;
            let c = &self.conns[idx];
            self.busy[c.busy].probe_end = Some((c.snd_nxt, true));
        }
        let c = &self.conns[idx];
        let b = &mut self.busy[c.busy];
        let rto = rtt::rto(c, self.profiles.get(c.profile), b.backoff);
        b.set_timer(RetransmitTimer::Rto, self.now + rto);
        Ok(())
    }

    /// What windows and queue allow.
    pub(super) fn allowance(&self, idx: u32) -> Allowance {
        let c = &self.conns[idx];
        let b = &self.busy[c.busy];
        let queued_end = c.snd_una + b.send.len() as u32;
        let unsent = (queued_end - c.snd_nxt).max(0) as u32;
        let window_end = c.snd_una + c.snd_wnd;
        let window = (window_end - c.snd_nxt).max(0) as u32;
        let segments = c.cwnd.saturating_sub(b.sent.in_flight());
        // Never more than half of the largest window the peer had (RFC 9293 §3.8.6.2.1): with a tiny window a full segment would never fit.
        let half = if b.window_max > 536 { b.window_max / 2 } else { b.window_max };
        let mss = if half > 0 { c.mss().min(half.max(28)) } else { c.mss() };
        // SACK blocks that ride on data take their room from it (RFC 6691 §2).
        let mss = mss.min(c.mss() - self.sack_bytes_on_data(idx));
        Allowance { unsent, window, segments, mss }
    }

    /// Bytes of the SACK option that a data segment carries now. None on tiny segments.
    fn sack_bytes_on_data(&self, idx: u32) -> u32 {
        let c = &self.conns[idx];
        let b = &self.busy[c.busy];
        let blocks = usize::from(b.dsack.is_some()) + b.recv.range_count();
        if blocks == 0 || !c.has(Flags::SACK) {
            return 0;
        }
        let bytes = SACK_FIXED_BYTES + SACK_BLOCK_BYTES * blocks.min(max_sack_blocks(c)) as u32;
        if bytes * 4 <= c.mss() { bytes } else { 0 }
    }

    /// Sends new data, and FIN after them.
    fn send_new(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let mut burst = Burst::default();
        loop {
            let a = self.allowance(idx);
            if a.unsent == 0 {
                return self.send_fin(net, idx, &a);
            }
            if a.segments == 0 {
                self.note_usage(idx, true);
                let now = self.now;
                self.busy[self.conns[idx].busy].chrono.run(now);
                return Ok(());
            }
            let mut most = a.unsent.min(a.window);
            let has_cuts = self.busy[self.conns[idx].busy].extras.has(Extras::CUTS);
            let record = if has_cuts { self.record_bytes(idx, &a, burst.begins()) } else { None };
            most = most.min(record.unwrap_or(most));
            if most > a.mss {
                most = most.min(self.super_payload(net, idx, a.mss, a.segments));
            }
            let probes = self.busy[self.conns[idx].busy].force;
            let Some(len) = self.size_to_send(idx, &a, most, record == Some(most)) else {
                self.note_usage(idx, false);
                self.hold(idx, &a);
                return Ok(());
            };
            let last = len == a.unsent;
            // A probe of a window that is too small for a whole segment is not to wait for more.
            let ends = match last {
                _ if has_cuts && self.pushes_within(idx, len) => {
                    burst = Burst::default();
                    Ends::Message
                }
                true if self.busy[self.conns[idx].busy].more != More::Late => Ends::Message,
                false if probes && len < a.mss || burst.pushes(self, idx, &a, len) => Ends::Packet,
                _ => Ends::Segment,
            };
            self.send_one(net, idx, len, last, ends, a.mss)?;
            let c = &self.conns[idx];
            let b = &mut self.busy[c.busy];
            if last && b.more == More::Late {
                b.more = More::Expected;
            }
            if len == a.unsent && c.has(Flags::FIN_QUEUED) == self.busy[c.busy].fin_sent {
                self.note_room(idx);
                return Ok(());
            }
        }
    }

    /// How much of `most` bytes leaves now; `None` if it waits (Nagle, cork, window). `ends_record`: what follows them is of another record.
    fn size_to_send(&mut self, idx: u32, a: &Allowance, most: u32, ends_record: bool) -> Option<u32> {
        let c = &self.conns[idx];
        let b = &mut self.busy[c.busy];
        let partial = most % a.mss;
        if partial == 0 {
            return (most > 0).then_some(most);
        }
        let whole = most - partial;
        let last = most == a.unsent;
        let urgent = b.urgent_out.is_some();
        if ends_record && !last {
            return Some(most);
        }
        if last {
            let corked = c.has(Flags::CORK) || b.more == More::Expected;
            // Minshall: hold a small segment only while another small one is not acknowledged.
            let nagle = !c.has(Flags::NODELAY) && !b.sent.is_empty() && b.small_end.is_some();
            if urgent || c.has(Flags::FIN_QUEUED) || b.force || !(corked || nagle) {
                b.force = false;
                return Some(most);
            }
        } else if b.force && whole == 0 {
            // A probe into a window that is open, but not for a whole segment. It opens no further, so the peer's buffer is smaller than it was: what it was is no
            // measure any more of what is worth sending.
            b.force = false;
            b.window_max = c.snd_wnd;
            return Some(most);
        } else if most < a.window {
            // Limited by the congestion window or the size of a super-frame: whole segments.
            return (whole > 0).then_some(whole);
        }
        (whole > 0).then_some(whole)
    }

    /// Data wait: sees to it that something will make them leave.
    fn hold(&mut self, idx: u32, a: &Allowance) {
        let now = self.now;
        let c = &self.conns[idx];
        let b = &mut self.busy[c.busy];
        let fits = a.unsent <= a.window;
        if !fits {
            b.chrono.set(Waits::Window, now);
        }
        if (c.has(Flags::CORK) || b.more == More::Expected) && fits {
            b.cork_at.get_or_insert(now + CORK_MAX);
            return;
        }
        if b.sent.is_empty() && b.timer_kind == RetransmitTimer::Off {
            // RFC 9293 §3.8.6.1: without a timer a lost window update would stop both ends for ever.
            let rto = rtt::rto(c, self.profiles.get(c.profile), b.backoff);
            b.set_timer(RetransmitTimer::Persist, now + rto);
        }
    }

    fn send_fin(&mut self, net: &mut Network, idx: u32, a: &Allowance) -> Result<(), TxError> {
        let c = &self.conns[idx];
        let b = &self.busy[c.busy];
        if b.timer_kind == RetransmitTimer::Persist && !c.has(Flags::FIN_QUEUED) {
            self.busy[c.busy].stop_timer();
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
            self.hold(idx, a);
            return Ok(());
        }
        self.send_one(net, idx, 0, true, Ends::Segment, a.mss)
    }

    /// Sends `len` new bytes from `snd_nxt` on in segments of `mss`, with FIN if they are the last, and PSH on the last segment unless it is the end of no more than that.
    pub(super) fn send_one(
        &mut self,
        net: &mut Network,
        idx: u32,
        len: u32,
        last: bool,
        ends: Ends,
        mss: u32,
    ) -> Result<(), TxError> {
        let now = self.now;
        let mut flags = TcpFlags::ACK;
        let c = &self.conns[idx];
        let b = &self.busy[c.busy];
        let window_end = c.snd_una + c.snd_wnd;
        let fin = last && c.has(Flags::FIN_QUEUED) && (c.snd_nxt + len).lt(window_end);
        if fin {
            flags |= TcpFlags::FIN;
        }
        if ends != Ends::Segment {
            flags |= TcpFlags::PSH;
        }
        if c.has(Flags::ECN_CWR) && len > 0 {
            flags |= TcpFlags::CWR;
        }
        let gso_size = (len > mss).then_some(mss as u16);
        let segments = len.div_ceil(mss).max(1) as u16;
        let was_empty = b.sent.is_empty();
        let segment = Segment { seq: c.snd_nxt, len, flags, gso_size, ect: c.has(Flags::ECN) && len > 0 };
        self.emit(net, idx, &segment)?;
        self.stats.bytes_out += u64::from(len);
        let now_ms = self.now_ms();
        let delay = self.config.delayed_ack_ms;
        let c = &mut self.conns[idx];
        let b = &mut self.busy[c.busy];
        let start = c.snd_nxt;
        let end = start + (len + u32::from(fin));
        if flags.contains(TcpFlags::CWR) {
            c.flags.clear(Flags::ECN_CWR);
        }
        if b.timer_kind == RetransmitTimer::Persist {
            // The window opened: what its closing has lengthened is short again.
            b.backoff = 0;
            b.trouble_since = None;
        }
        b.sent.push(start, end, now, segments, ends);
        b.recovery.on_sent(segments.into());
        b.fin_sent |= fin;
        c.snd_nxt = end;
        if !len.is_multiple_of(mss) {
            b.small_end = Some(end);
        }
        b.last_sent = now;
        b.chrono.run(now);
        b.idle_since = None;
        b.cork_at = None;
        if c.has(Flags::ATO_SET) && now_ms.wrapping_sub(c.last_rx) < delay {
            c.flags.set(Flags::PINGPONG);
        }
        let restart =
            was_empty || b.timer_kind == RetransmitTimer::Probe || b.timer_kind == RetransmitTimer::Persist;
        let limited = b.sent.in_flight() >= c.cwnd;
        self.note_usage(idx, limited);
        self.set_retransmit_timer(idx, restart, None);
        Ok(())
    }

    /// Congestion window validation (RFC 7661 in Linux's form): how much of the window was used during the last round.
    fn note_usage(&mut self, idx: u32, limited: bool) {
        let c = &self.conns[idx];
        let b = &mut self.busy[c.busy];
        let out = b.sent.packets_out;
        if c.snd_una.ge(b.usage_end) || limited || !b.cwnd_limited && out > b.flight_max {
            b.cwnd_limited = limited;
            b.flight_max = out;
            b.usage_end = c.snd_nxt;
        }
    }

    /// Payload bytes of the largest (super-)frame for `segments` segments.
    fn super_payload(&self, net: &Network, idx: u32, mss: u32, segments: u32) -> u32 {
        let c = &self.conns[idx];
        let urgent = c.busy != NONE && self.busy[c.busy].urgent_out.is_some();
        let max = net.capabilities(c.hop.link()).map_or(0, |caps| caps.gso_bytes_max);
        if max == 0 || urgent {
            return mss;
        }
        let headers = u32::from(c.header_bytes()) + 40 + 18;
        let room = (max as u32).saturating_sub(headers).min(SUPER_PAYLOAD_MAX) / mss;
        room.clamp(1, segments.max(1)) * mss
    }
}
