//! SYN-SENT (RFC 9293 §3.10.7.3).

use super::Tcp;
use super::conn::{Flags, NONE};
use super::input::Segment;
use super::listen::{apply_peer_options, take_handshake_rtt};
use super::state::State;
use crate::events::{CloseReason, Event};
use crate::ip::Network;
use crate::wire::tcp::{TcpFlags, TcpOptions};

impl Tcp {
    /// Processes a segment for a connection in SYN-SENT.
    pub fn input_syn_sent(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        let flags = seg.header.flags;
        let c = &self.conns[idx];
        let ack = flags.contains(TcpFlags::ACK);
        // First: the ACK must acknowledge the SYN.
        if ack && (seg.header.ack.le(c.snd_una) || seg.header.ack.gt(c.snd_nxt)) {
            self.send_reset(net, seg);
            return;
        }
        let options = TcpOptions::parse(seg.options);
        if ack && !self.echoes_syn(idx, &options) {
            self.stats.paws_active_rejected += 1;
            self.send_reset(net, seg);
            return;
        }
        // Second: RST is accepted only with an acceptable ACK (RFC 5961 §3.2).
        if flags.contains(TcpFlags::RST) {
            if ack {
                self.destroy(idx, CloseReason::Refused);
            }
            return;
        }
        // Fourth: a segment without SYN is ignored. (The third step concerns security compartments.)
        if !flags.contains(TcpFlags::SYN) {
            return;
        }
        self.take_syn(idx, seg, &options);
        if ack {
            if !self.conns[idx].profile.is_usual() && self.profile(idx).fastopen.is_begun() {
                return self.on_fastopen_syn_ack(net, idx, seg);
            }
            let now_us = self.now.as_micros() as u32;
            let c = &mut self.conns[idx];
            take_handshake_rtt(c, self.profiles.get(c.profile), now_us);
            c.snd_una = seg.header.ack;
            self.establish_active(idx);
            self.ack_now(idx);
        } else {
            // Simultaneous open (RFC 9293 §3.5, figure 8).
            let c = &mut self.conns[idx];
            c.state = State::SynReceived;
            c.retries = 0;
            c.flags.set(Flags::SYN_PENDING);
            self.want_transmit(idx);
        }
    }

    /// Returns whether the timestamp that a segment echoes can be that of the SYN, or there is none (RFC 7323
    /// §3.2; Linux, `PAWSActiveRejected`). A millisecond is a tolerance for rounding.
    fn echoes_syn(&self, idx: u32, options: &TcpOptions) -> bool {
        let c = &self.conns[idx];
        let echoed = options.timestamps.filter(|timestamps| timestamps.tsecr != 0);
        let Some(echoed) = echoed.filter(|_| self.config.timestamps) else { return true };
        let age_us = (self.now.as_micros() as u32).wrapping_sub(c.min_rtt);
        let now = self.now_ms().wrapping_add(c.ts_offset);
        now.wrapping_sub(echoed.tsecr) <= age_us / 1000 + 1
    }

    /// Takes the sequence number, window, options and ECN flags of the peer's SYN.
    fn take_syn(&mut self, idx: u32, seg: &Segment<'_>, options: &TcpOptions) {
        let flags = seg.header.flags;
        let now_ms = self.now_ms();
        let c = &mut self.conns[idx];
        c.rcv_nxt = seg.header.seq + 1;
        c.rcv_wup = c.rcv_nxt;
        c.snd_wnd = seg.header.window.into();
        c.snd_wl1 = seg.header.seq;
        c.last_rx = now_ms;
        // The SYN requested ECN with ECE and CWR; the answer accepts with ECE alone (RFC 3168 §6.1.1).
        let is_accepted = if flags.contains(TcpFlags::ACK) {
            flags.contains(TcpFlags::ECE) && !flags.contains(TcpFlags::CWR)
        } else {
            flags.contains(TcpFlags::ECE | TcpFlags::CWR)
        };
        let ecn = c.has(Flags::ECN) && is_accepted;
        c.flags.assign(Flags::ECN, ecn);
        apply_peer_options(c, &self.config, options);
        let announced_scale = c.wscale & 0xf0;
        self.init_windows(idx);
        let c = &mut self.conns[idx];
        // The shift is what the SYN announced, even if the buffer size was changed since.
        c.wscale = if c.has(Flags::WSCALE) { c.wscale & 15 | announced_scale } else { 0 };
    }

    /// Completes an active open. Data that the application has queued in the meantime may be sent.
    pub fn establish_active(&mut self, idx: u32) {
        let c = &mut self.conns[idx];
        c.state = State::Established;
        c.flags.clear(Flags::SYN_PENDING);
        if c.has(Flags::FIN_QUEUED) {
            c.state = State::FinWait1;
        }
        let orphan = c.has(Flags::ORPHAN);
        if c.active != NONE {
            let (una, nxt) = (c.snd_una, c.snd_nxt);
            let b = &mut self.active[c.active];
            b.recovery.high_seq = una;
            b.cwnd_usage_seq = nxt;
            b.lsndtime = self.now;
            if !b.rtx_queue.is_empty() {
                // The SYN had data.
                self.set_retransmit_timer(idx, true, None);
            }
            self.want_transmit(idx);
        }
        if !orphan {
            self.conns[idx].flags.set(Flags::CONNECTED_QUEUED);
            let conn = self.conns.handle(idx);
            self.events.push_back(Event::Connected { conn });
        }
    }

    /// Completes a simultaneous open with the peer's SYN+ACK.
    pub fn finish_simultaneous_open(&mut self, idx: u32, seg: &Segment<'_>) {
        let now_us = self.now.as_micros() as u32;
        let c = &mut self.conns[idx];
        take_handshake_rtt(c, self.profiles.get(c.profile), now_us);
        c.snd_wnd = seg.header.window.into();
        let had_syn_data = c.snd_nxt != c.snd_una + 1;
        let advanced = if had_syn_data {
            self.acknowledge_syn_data(idx, seg.header.ack)
        } else {
            c.snd_una += 1;
            false
        };
        self.establish_active(idx);
        self.ack_now(idx);
        if had_syn_data {
            self.after_ack(idx, advanced);
        }
    }
}
