//! How connections end.

use super::Tcp;
use super::ack::AckOutcome;
use super::conn::{Flags, NONE, SlotState};
use super::demux::TIME_WAIT_BIT;
use super::input::Segment;
use super::state::State;
use super::time_wait::TimeWait;
use crate::device::RxBurst;
use crate::events::CloseReason;
use crate::handle::Conn;
use crate::ip::Network;
use crate::prefetch::prefetch;
use crate::wire::tcp::{SeqNumber, TcpFlags};

impl Tcp {
    /// Processes the acknowledgement of the local FIN.
    pub fn on_fin_acknowledged(&mut self, net: &mut Network, idx: u32) -> AckOutcome {
        match self.conns[idx].state {
            State::FinWait1 => {
                self.conns[idx].state = State::FinWait2;
                if self.conns[idx].has(Flags::ORPHAN) {
                    self.start_fin_timeout(idx);
                }
                AckOutcome::Accepted
            }
            State::Closing => {
                if self.conns[idx].has(Flags::ACK_NOW | Flags::ACK_DELAYED) {
                    self.send_ack_at_once(net, idx);
                }
                self.enter_time_wait(idx);
                AckOutcome::Gone
            }
            State::LastAck => {
                self.remove_flow(idx);
                self.finish_when_read(idx);
                AckOutcome::Gone
            }
            _ => AckOutcome::Accepted,
        }
    }

    /// Finishes a connection that is closed in both directions and was removed from the flow table: at once,
    /// or when the owner has read everything.
    #[inline(always)]
    fn finish_when_read(&mut self, idx: u32) {
        let c = &self.conns[idx];
        if c.has(Flags::ORPHAN) || !c.has(Flags::ACCEPTED) || self.unread(idx) == 0 {
            self.finish(idx, CloseReason::Normal);
            return;
        }
        self.wheel.cancel(&mut self.conns, idx);
        if let Some((_, b)) = self.tcb_and_active(idx) {
            b.stop_timer();
            b.cork_deadline = None;
        }
        let c = &mut self.conns[idx];
        c.state = State::Closed;
        c.slot_state = SlotState::Unread;
    }

    /// Starts the time that the peer has to send its FIN after the application has closed the socket (Linux's
    /// `tcp_fin_timeout`).
    pub fn start_fin_timeout(&mut self, idx: u32) {
        let ms = u32::from(self.profile(idx).fin_timeout_seconds) * 1000;
        let deadline = self.now_ms().wrapping_add(ms);
        // The receive window of an orphan does not grow, so its field stores the deadline.
        self.conns[idx].rcv_grow_seq = SeqNumber(deadline);
    }

    /// Moves a connection to TIME-WAIT. A small entry keeps its addresses in use; the connection itself ends
    /// here.
    pub fn enter_time_wait(&mut self, idx: u32) {
        let hash = self.secrets.flow_hash(&self.key(idx));
        self.enter_time_wait_hashed(idx, hash);
    }

    /// Moves a connection with a known flow hash to TIME-WAIT.
    pub fn enter_time_wait_hashed(&mut self, idx: u32, hash: u32) {
        while self.time_wait.is_full() {
            let Some(oldest) = self.time_wait.oldest() else { break };
            self.end_time_wait(oldest);
            self.stats.time_wait_overflows += 1;
        }
        let mut remote_ip = self.conns[idx].remote_ip;
        if self.conns[idx].has(Flags::V6) {
            let key = self.key(idx);
            (remote_ip, ..) = self.addresses.store(&key);
        }
        let c = &self.conns[idx];
        let sharing = self.profiles.port_sharing(c.profile, c.has(Flags::ACTIVE_OPEN));
        let service = if c.profile.is_usual() {
            (0, 0)
        } else {
            let profile = self.profiles.get(c.profile);
            (profile.priority, profile.tos)
        };
        let entry = TimeWait::from_tcb(c, remote_ip, service, sharing);
        let index = self.time_wait.insert(entry, self.now_ms());
        let replaced = self.flows.replace(hash, idx, index | TIME_WAIT_BIT);
        debug_assert!(replaced, "a live connection is not in the flow table");
        self.finish_when_read(idx);
    }

    /// Removes an entry in TIME-WAIT.
    pub fn end_time_wait(&mut self, index: u32) {
        let entry = self.time_wait.get(index);
        let (v6, remote_ip) = (entry.v6(), entry.remote_ip);
        self.port_use.remove(entry.local_port, entry.port_sharing_bits());
        let hash = self.time_wait_hash(entry);
        self.flows.remove(hash, index | TIME_WAIT_BIT);
        self.addresses.release(v6, remote_ip);
        self.time_wait.remove(index);
        if self.exceeds_cache() {
            self.prefetch_oldest_time_wait();
        }
    }

    /// Prefetches the entries that expire next: they were created long ago, so they are in no cache. An entry
    /// is prefetched several removals before its own, because several may follow each other at once.
    #[inline(always)]
    fn prefetch_oldest_time_wait(&self) {
        let after = |entry| self.time_wait.next_expiring(entry);
        let oldest = self.time_wait.oldest().map(|oldest| self.time_wait.get(oldest));
        let Some(ahead) = oldest.and_then(after).and_then(after) else { return };
        self.flows.prefetch(self.time_wait_hash(ahead));
        if let Some(next) = after(ahead) {
            prefetch(next);
        }
    }

    #[inline(always)]
    fn time_wait_hash(&self, entry: &TimeWait) -> u32 {
        let key = entry.key(&self.addresses);
        if entry.v6() { self.secrets.flow_hash(&key) } else { self.secrets.flow_hash_v4(&key) }
    }

    /// Processes a segment for a connection in TIME-WAIT (RFC 9293 §3.10.7.4, RFC 6191).
    pub fn input_time_wait(&mut self, net: &mut Network, index: u32, seg: &Segment<'_>, burst: &RxBurst<'_>) {
        let entry = *self.time_wait.get(index);
        let timestamps = if entry.timestamps() { seg.timestamps() } else { None };
        let old_timestamp = timestamps.is_some_and(|ts| (ts.tsval.wrapping_sub(entry.ts_recent) as i32) < 0);
        let flags = seg.header.flags;
        let rst = flags.contains(TcpFlags::RST);
        let syn = flags.contains(TcpFlags::SYN);
        if !old_timestamp && seg.header.seq == entry.rcv_nxt && (seg.seq_len() == 0 || rst) {
            if rst {
                // Linux's default; RFC 1337 would ignore the RST.
                self.end_time_wait(index);
            } else {
                self.restart_time_wait(index, timestamps.map(|ts| ts.tsval));
            }
            return;
        }
        let newer_timestamp =
            timestamps.is_some_and(|ts| (ts.tsval.wrapping_sub(entry.ts_recent) as i32) > 0);
        let reusable = seg.header.seq.gt(entry.rcv_nxt) || newer_timestamp;
        if syn
            && !rst
            && !flags.contains(TcpFlags::ACK)
            && !old_timestamp
            && reusable
            && let Some(listener) = self.listeners.find(seg.key.local, seg.key.local_port, seg.hash)
        {
            self.reuse_time_wait(net, index, &entry, seg, burst, listener);
            return;
        }
        if rst {
            return;
        }
        if old_timestamp {
            self.stats.paws_rejected += 1;
        }
        let now_ms = self.now_ms();
        if old_timestamp || flags.contains(TcpFlags::ACK) {
            // A retransmitted FIN restarts the lifetime of 2 MSL.
            self.time_wait.restart(index, now_ms);
        }
        let interval = self.config.invalid_ack_interval_ms;
        let limited = seg.payload.is_empty() && now_ms.wrapping_sub(entry.last_oow_ack_time) < interval;
        if !limited || flags.contains(TcpFlags::FIN) {
            self.time_wait.get_mut(index).last_oow_ack_time = now_ms;
            self.send_time_wait_ack(net, &entry, seg);
        }
    }

    fn restart_time_wait(&mut self, index: u32, ts: Option<u32>) {
        self.time_wait.restart(index, self.now_ms());
        if let Some(value) = ts {
            self.time_wait.get_mut(index).ts_recent = value;
        }
    }

    /// Creates a connection with the addresses of an old one. This is safe, because its sequence numbers or
    /// timestamps are beyond those of the old one (RFC 6191, RFC 1122 §4.2.2.13).
    fn reuse_time_wait(
        &mut self,
        net: &mut Network,
        index: u32,
        entry: &TimeWait,
        seg: &Segment<'_>,
        burst: &RxBurst<'_>,
        listener: u32,
    ) {
        let truncated;
        let mut listener = listener;
        let seg = if self.listeners.is_guarded(listener) {
            listener = self.select_listener(net, listener, seg, burst);
            let Some(kept) = self.guard_listener(net, listener, seg, burst) else { return };
            truncated = seg.truncated(kept);
            &truncated
        } else {
            seg
        };
        // Beyond every sequence number that the old connection could have sent.
        let sequence = entry.snd_nxt + (65_535 + 2);
        if self.on_syn(net, listener, seg, burst, Some(sequence)) {
            self.end_time_wait(index);
            self.stats.time_wait_reused += 1;
        }
    }

    /// Ends a connection with RST (RFC 9293 §3.10.5).
    pub fn abort(&mut self, net: &mut Network, idx: u32) {
        let sends_rst = match self.conns[idx].state {
            State::Closed | State::Listen | State::SynSent | State::TimeWait => false,
            State::Closing | State::LastAck => !self.everything_acknowledged(idx),
            _ => true,
        };
        if self.conns[idx].slot_state == SlotState::Unread {
            self.conns[idx].flags.set(Flags::ORPHAN);
            self.finish(idx, CloseReason::Aborted);
            return;
        }
        if self.conns[idx].state == State::SynSent {
            // Linux has sent the SYN when its data were written: a server that accepts TCP Fast Open reads
            // them.
            self.output_syn_sent(net, idx);
        }
        if sends_rst {
            if self.conns[idx].has(Flags::TX_LISTED) {
                // Data that were written before are sent before the RST, as far as the windows admit them.
                // Linux has sent them when they were written, and applications rely on that: they answer, and
                // then reset the connection to avoid TIME-WAIT. Data that cannot be sent are lost.
                let _ = self.output(net, idx);
            }
            self.send_active_reset(net, idx);
        }
        self.destroy(idx, CloseReason::Aborted);
    }

    /// Ends a connection on behalf of an administrator (`tcp_abort`). RST is sent in the states of
    /// `tcp_need_reset`. A half-open connection of a listener is a request socket of Linux, which is dropped.
    /// Returns false if the connection has ended already.
    pub fn destroy_conn(&mut self, net: &mut Network, conn: Conn) -> bool {
        let Some(idx) = self.index(conn).filter(|idx| self.conns[*idx].state != State::Closed) else {
            return false;
        };
        let c = &self.conns[idx];
        let sends_rst = match c.state {
            State::SynReceived => c.has(Flags::ACTIVE_OPEN),
            state => {
                matches!(state, State::Established | State::CloseWait | State::FinWait1 | State::FinWait2)
            }
        };
        if sends_rst {
            self.send_active_reset(net, idx);
        }
        self.destroy(idx, CloseReason::Destroyed);
        true
    }

    fn everything_acknowledged(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        c.snd_una == c.snd_nxt && (c.active == NONE || self.active[c.active].send.is_empty())
    }
}
