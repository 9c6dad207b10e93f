//! TCP Fast Open, server (RFC 7413): a SYN with a valid cookie creates a connection at once. Its data can be
//! read and answered before the peer acknowledges the SYN+ACK.
//!
//! Such a connection is in ESTABLISHED or a later state here, with `snd_una` after the SYN. Until the
//! acknowledgement arrives, [`SlowPathFlags::FASTOPEN`] is set, SYN-RECEIVED is reported as on Linux, and the
//! only timer of transmissions is that of the SYN+ACK, as in Linux's `tcp_fastopen_synack_timer`.

use super::active::{RetransmitTimer, SlowPathFlags};
use super::conn::{Flags, NONE, Tcb};
use super::emit::TxSegment;
use super::input::{Segment, SegmentHeader};
use super::listen::{self, SYNACK_AMBIGUOUS, take_handshake_rtt};
use super::secrets::Secrets;
use super::{Tcp, recovery};
use crate::device::RxBurst;
use crate::events::CloseReason;
use crate::handle::Listener;
use crate::ip::{Network, TxError};
use crate::time::Instant;
use crate::wire::tcp::{FastOpenCookie, SeqNumber, TcpFlags, TcpOptions};
use core::hash::Hasher;
use core::net::IpAddr;
use core::time::Duration;
use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher24;
use std::collections::VecDeque;

/// Time for which a connection that was reset before its handshake was complete counts as pending (RFC 7413
/// §5.1: a defence against spoofed requests).
const RESET_PENALTY: Duration = Duration::from_secs(60);

/// Bits of `tcp.fastopen` (`net.ipv4.tcp_fastopen`).
const SERVER_ENABLED: u32 = 2;
const SERVER_COOKIE_NOT_REQUIRED: u32 = 0x200;
const SERVER_WITHOUT_OPTION: u32 = 0x400;

/// A key, as the words that SipHash takes.
pub type FastOpenKey = (u64, u64);

/// The key of the cookies that are sent and accepted, and one of cookies that are accepted, too.
pub type FastOpenKeys = (Option<FastOpenKey>, Option<FastOpenKey>);

/// The requests of a listener: connections whose handshake is not complete.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct FastOpenQueue {
    /// Connections whose handshake is not complete, and those that were reset recently.
    pub(super) len: u32,
    /// When the connections that were reset no longer count, in order.
    pub(super) resets: VecDeque<Instant>,
}

impl FastOpenQueue {
    /// Returns whether another request fits, at most `max` at a time (`tcp_fastopen_queue_check`).
    fn has_room(&mut self, max: u32, now: Instant) -> bool {
        if self.len < max {
            return true;
        }
        let expires = self.resets.pop_front_if(|at| *at <= now).is_some();
        self.len -= u32::from(expires);
        expires
    }
}

/// Says how a SYN with data or with a cookie option is answered.
pub(super) enum FastOpenReply {
    /// A SYN+ACK without the option.
    None,
    /// A SYN+ACK with a cookie.
    Cookie(FastOpenCookie),
    /// A connection, and a SYN+ACK with a cookie if the peer has one of an old key.
    Accept(Option<FastOpenCookie>),
}

/// Returns the cookie of a peer's address (`__tcp_fastopen_cookie_gen_cipher`).
fn cookie_of((k0, k1): FastOpenKey, remote: IpAddr, local: IpAddr) -> [u8; 8] {
    let mut hasher = SipHasher24::new_with_keys(k0, k1);
    for address in [remote, local] {
        match address {
            IpAddr::V4(address) => hasher.write(&address.octets()),
            IpAddr::V6(address) => hasher.write(&address.octets()),
        }
    }
    hasher.finish().to_le_bytes()
}

/// Parses keys as `net.ipv4.tcp_fastopen_key` has them: four hexadecimal words with `-` between them, and
/// perhaps a second key after a comma, whose cookies are accepted, too.
pub(crate) fn parse_keys(text: &str) -> Option<FastOpenKeys> {
    let key = |text: &str| {
        let mut words = text.split('-').map(|word| {
            let is_hex = !word.is_empty() && word.len() <= 8 && word.bytes().all(|b| b.is_ascii_hexdigit());
            u64::from_str_radix(word, 16).ok().filter(|_| is_hex)
        });
        let mut next = || words.next().flatten();
        let key = (next()? | next()? << 32, next()? | next()? << 32);
        words.next().is_none().then_some(key)
    };
    match text.split_once(',') {
        Some((first, second)) => Some((Some(key(first)?), Some(key(second)?))),
        None => Some((Some(key(text)?), None)),
    }
}

/// Returns a key for `tcp.fastopen_key` that follows from the seed of a stack.
pub fn key_of_seed(seed: &[u8; 32]) -> String {
    let (first, second) = Secrets::fastopen_key(seed);
    let (low, high) = (|word: u64| word as u32, |word: u64| word >> 32);
    format!("{:x}-{:x}-{:x}-{:x}", low(first), high(first), low(second), high(second))
}

impl Tcp {
    /// Decides about a SYN with data or with a cookie option (`tcp_try_fastopen`; RFC 7413 §4.1.2, §4.2.2).
    #[cold]
    pub(super) fn try_fastopen(
        &mut self,
        listener: u32,
        seg: &Segment<'_>,
        options: &TcpOptions,
    ) -> FastOpenReply {
        let offered = options.fastopen.as_ref();
        self.stats.fastopen_cookie_requests += u64::from(offered.is_some_and(|c| c.bytes.is_empty()));
        let bits = self.config.fastopen;
        if bits & SERVER_ENABLED == 0 || offered.is_none() && seg.payload.is_empty() {
            return FastOpenReply::None;
        }
        let now = self.now;
        let (queue, socket, backlog) = self.listeners.fastopen_queue(listener);
        let max = match socket.fastopen_queue {
            0 if bits & SERVER_WITHOUT_OPTION != 0 => backlog,
            max => max,
        };
        if max == 0 {
            return FastOpenReply::None;
        }
        if !queue.has_room(max, now) {
            self.stats.fastopen_overflows += 1;
            return FastOpenReply::None;
        }
        if bits & SERVER_COOKIE_NOT_REQUIRED != 0 || socket.fastopen_no_cookie {
            return FastOpenReply::Accept(None);
        }
        let Some(offered) = offered else { return FastOpenReply::None };
        let keys = if socket.fastopen_keys.0.is_some() { socket.fastopen_keys } else { self.fastopen_keys };
        let (remote, local) = (seg.key.remote.ip(), seg.key.local.ip());
        let cookie = |key: Option<FastOpenKey>| key.map(|key| cookie_of(key, remote, local));
        let valid = |bytes: [u8; 8]| FastOpenCookie::new(&bytes, offered.is_experimental);
        let (Some(first), second) = (cookie(keys.0), cookie(keys.1)) else { return FastOpenReply::None };
        match offered.bytes[..] {
            [] => FastOpenReply::Cookie(valid(first)),
            ref bytes if *bytes == first => FastOpenReply::Accept(None),
            ref bytes if second.is_some_and(|second| *bytes == second) => {
                self.stats.fastopen_alternate_keys += 1;
                FastOpenReply::Accept(Some(valid(first)))
            }
            _ => {
                self.stats.fastopen_failures += 1;
                FastOpenReply::Cookie(valid(first))
            }
        }
    }

    /// Completes a passive open before the peer has acknowledged the SYN+ACK: takes the data of the SYN, and
    /// sends the SYN+ACK (`tcp_fastopen_create_child`). The accept queue has room.
    #[cold]
    pub(super) fn open_fast(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        burst: &RxBurst<'_>,
        cookie: Option<&FastOpenCookie>,
    ) {
        let listener = self.conns[idx].token;
        let established = self.establish_passive(idx);
        debug_assert!(established, "the accept queue is full");
        let c = &mut self.conns[idx];
        c.flags.clear(Flags::SYN_PENDING);
        // Keeps header prediction away from the acknowledgement that completes the handshake.
        c.flags.set(Flags::TS_RECENT_OLD);
        c.snd_una = c.snd_nxt;
        let active = self.ensure_active(idx);
        let b = &mut self.active[active];
        b.lsndtime = self.now;
        b.slow_path.set(SlowPathFlags::FASTOPEN);
        b.fastopen_listener = Some(self.listeners.on_fastopen_begin(listener));
        self.fastopen_pending += 1;
        self.stats.fastopen_accepts += 1;
        let header = SegmentHeader {
            seq: seg.header.seq + 1,
            ack: self.conns[idx].snd_una,
            flags: TcpFlags(seg.header.flags.0 & !TcpFlags::SYN.0) | TcpFlags::ACK,
            ..seg.header
        };
        let after_syn = Segment { header, ..*seg };
        let window = self.conns[idx].rcv_wnd();
        self.on_payload(net, idx, &after_syn, Some(burst));
        if !seg.payload.is_empty() {
            self.update_fastopen(idx, |state| state.is_syn_data_acked = true);
        }
        let c = &mut self.conns[idx];
        c.rcv_edge = c.rcv_nxt + window;
        self.send_fastopen_syn_ack(net, idx, cookie);
        self.arm_fastopen_timer(idx);
    }

    /// Sends the first SYN+ACK of a half-open connection, with a cookie that the peer requested.
    ///
    /// # Errors
    /// The device has no room, or the next hop cannot be reached.
    #[cold]
    pub(super) fn send_syn_ack_with_cookie(
        &mut self,
        net: &mut Network,
        idx: u32,
        cookie: &FastOpenCookie,
    ) -> Result<(), TxError> {
        let (now_us, now_ms) = (self.now.as_micros() as u32, self.now_ms());
        let c = &mut self.conns[idx];
        (c.min_rtt, c.last_rx) = (now_us, now_ms);
        let segment = syn_ack(c, c.snd_una);
        self.emit_syn_with(net, idx, &segment, Some(cookie))?;
        self.conns[idx].flags.clear(Flags::SYN_PENDING | Flags::ACK_NOW);
        Ok(())
    }

    /// Sends the SYN+ACK of a connection whose handshake is not complete. One for which the device has no
    /// room is lost.
    fn send_fastopen_syn_ack(&mut self, net: &mut Network, idx: u32, cookie: Option<&FastOpenCookie>) {
        let (now_us, now_ms) = (self.now.as_micros() as u32, self.now_ms());
        let c = &mut self.conns[idx];
        if c.retries == 0 {
            c.min_rtt = now_us;
        }
        c.last_rx = now_ms;
        let segment = syn_ack(c, c.snd_una - 1);
        if self.emit_syn_with(net, idx, &segment, cookie) == Err(TxError::Full) {
            self.stats.device_full += 1;
        }
    }

    fn arm_fastopen_timer(&mut self, idx: u32) {
        let (now, c) = (self.now, &self.conns[idx]);
        let profile = self.profiles.get(c.profile);
        let rto_us = (profile.rto_initial_us() << c.retries.min(20)).min(profile.rto_max_us());
        let (active, at) = (c.active, now.after_micros(rto_us));
        self.active[active].set_timer(RetransmitTimer::SynAck, at);
        self.arm(idx, at);
    }

    /// Processes the timer of the SYN+ACK (`tcp_fastopen_synack_timer`). Returns false if the connection has
    /// ended.
    #[cold]
    pub(super) fn on_fastopen_timeout(&mut self, net: &mut Network, idx: u32) -> bool {
        // One more than usual: the connection may be in use already.
        if self.conns[idx].retries > self.config.synack_retries {
            self.destroy(idx, CloseReason::TimedOut);
            return false;
        }
        self.stats.timeouts += 1;
        self.stats.retransmitted += 1;
        self.conns[idx].retries += 1;
        self.send_fastopen_syn_ack(net, idx, None);
        self.arm_fastopen_timer(idx);
        true
    }

    /// Returns whether the handshake of a connection that was opened fast is not complete.
    pub(super) fn is_fastopen_pending(&self, idx: u32) -> bool {
        let active = self.conns[idx].active;
        active != NONE && self.active[active].slow_path.has(SlowPathFlags::FASTOPEN)
    }

    /// Sends the SYN+ACK again if a segment is the repeated SYN of a connection that was opened fast. Returns
    /// whether it is.
    #[cold]
    pub(super) fn answer_repeated_fastopen(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
    ) -> bool {
        let c = &mut self.conns[idx];
        let flags = seg.header.flags;
        let is_repeated = seg.header.seq == c.snd_wl1 && !flags.intersects(TcpFlags::ACK | TcpFlags::RST);
        if !is_repeated || !self.is_fastopen_pending(idx) {
            return false;
        }
        self.conns[idx].rttvar |= SYNACK_AMBIGUOUS;
        self.stats.retransmitted += 1;
        self.send_fastopen_syn_ack(net, idx, None);
        true
    }

    /// Completes the handshake if the connection was opened fast. Returns false if the segment must not be
    /// processed further.
    #[cold]
    pub(super) fn complete_fastopen(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) -> bool {
        if !self.is_fastopen_pending(idx) {
            return true;
        }
        let c = &self.conns[idx];
        if seg.header.ack.lt(c.snd_una) || seg.header.ack.gt(c.snd_nxt) {
            self.send_reset(net, seg);
            return false;
        }
        self.end_fastopen(idx, false);
        let (now_us, frto) = (self.now.as_micros() as u32, self.config.frto);
        let c = &mut self.conns[idx];
        c.flags.clear(Flags::TS_RECENT_OLD);
        let has_timed_out = c.retries > 1;
        take_handshake_rtt(c, self.profiles.get(c.profile), now_us);
        c.snd_wnd = u32::from(seg.header.window) << c.snd_wscale();
        c.snd_wl1 = seg.header.seq;
        let Some((c, b)) = self.tcb_and_active(idx) else { return true };
        b.stop_timer();
        b.max_window = b.max_window.max(c.snd_wnd);
        if has_timed_out && !b.rtx_queue.is_empty() {
            recovery::enter_loss(c, b, frto);
        }
        self.set_retransmit_timer(idx, true, None);
        self.want_transmit(idx);
        true
    }

    /// Ends the request of a connection that was opened fast, if it is pending. `is_reset`: the peer has
    /// reset the connection (`reqsk_fastopen_remove`).
    #[cold]
    pub(super) fn end_fastopen(&mut self, idx: u32, is_reset: bool) {
        if !self.is_fastopen_pending(idx) {
            return;
        }
        let is_accepted = self.conns[idx].has(Flags::ACCEPTED);
        let expiry = (is_reset && is_accepted).then(|| self.now + RESET_PENALTY);
        let b = &mut self.active[self.conns[idx].active];
        b.slow_path.take(SlowPathFlags::FASTOPEN);
        let listener = b.fastopen_listener.take();
        self.fastopen_pending -= 1;
        if let Some(listener) = listener {
            self.listeners.on_fastopen_end(listener, expiry);
        }
    }
}

/// Returns a SYN+ACK with this sequence number.
fn syn_ack(c: &Tcb, seq: SeqNumber) -> TxSegment {
    let ecn = if c.has(Flags::ECN) { TcpFlags::ECE } else { TcpFlags(0) };
    TxSegment { seq, len: 0, flags: TcpFlags::SYN | TcpFlags::ACK | ecn, gso_size: None, ect: false }
}

impl listen::ListenTable {
    /// Accounts for a connection of a listener that was opened fast. Returns the listener.
    fn on_fastopen_begin(&mut self, index: u32) -> Listener {
        self.fastopen_queue(index).0.len += 1;
        self.handle(index)
    }

    /// Accounts for a connection that was opened fast and whose handshake has ended; with `expiry`, it counts
    /// until then.
    fn on_fastopen_end(&mut self, listener: Listener, expiry: Option<Instant>) {
        let Some(index) = self.index(listener) else { return };
        let queue = self.fastopen_queue(index).0;
        match expiry {
            Some(at) => queue.resets.push_back(at),
            None => queue.len -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_parsed_as_in_the_sysctl() {
        let key = (0x9a9b_9c9d_0a0b_0c0d, 0x0000_0002_0000_0001);
        assert_eq!(parse_keys("0a0b0c0d-9a9b9c9d-1-2"), Some((Some(key), None)));
        assert_eq!(parse_keys("0a0b0c0d-9a9b9c9d-1-2,0-0-0-0"), Some((Some(key), Some((0, 0)))));
        for bad in ["", "1-2-3", "1-2-3-4-5", "1-2-3-x", "1-2-3-4,", "123456789-2-3-4", "+1-2-3-4"] {
            assert_eq!(parse_keys(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn keys_of_seeds_can_be_configured() {
        for seed in [[0; 32], [7; 32], core::array::from_fn(|i| i as u8)] {
            let key = parse_keys(&key_of_seed(&seed)).unwrap().0;
            assert_eq!(key, Some(Secrets::fastopen_key(&seed)));
        }
    }

    // limit: TCP_FASTOPEN of a listener
    #[test]
    fn queue_is_full_until_a_reset_expires() {
        let mut queue = FastOpenQueue { len: 2, resets: VecDeque::from([Instant::from_millis(10)]) };
        assert!(queue.has_room(3, Instant::from_millis(0)));
        assert!(!queue.has_room(2, Instant::from_millis(9)));
        assert!(queue.has_room(2, Instant::from_millis(10)));
        assert_eq!((queue.len, queue.resets.len()), (1, 0));
    }
}
