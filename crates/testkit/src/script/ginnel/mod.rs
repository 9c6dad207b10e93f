//! Runs scripts against Ginnel's engine in virtual time: between two events only the engine's own deadlines
//! expire.

mod config;
mod sockets;

use super::assertion::Info;
use super::ast::{Directives, Target};
use super::backend::{Backend, FinishedCall, SentPacket};
use super::calls::{CallResult, Fd, Op};
use super::wire::{addresses, headers_of_merged};
pub use config::FIXED;
use core::time::Duration;
use ginnel_stack::device::{Capabilities, Gso, GsoKind, RxBurst, RxFrame, TxMeta, TxQueue};
use ginnel_stack::handle::PortId;
use ginnel_stack::link::LinkConfig;
use ginnel_stack::stack::Stack;
use ginnel_stack::time::Instant;
use ginnel_stack::wire::MacAddr;
use sockets::{CallProgress, EngineSockets};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

const LOCAL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const REMOTE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const ETHERNET_BYTES: usize = 14;

/// Start time of the engine's clock; not zero, so that deadlines before the start are representable.
const CLOCK_START: Duration = Duration::from_secs(1000);

/// Consecutive turns at an unchanged deadline after which the engine is considered stuck.
const IDLE_TURNS_MAX: u32 = 10_000;

/// Frames that the engine has sent and the backend has not fetched.
type SentFrames = Arc<Mutex<VecDeque<Vec<u8>>>>;

/// The transmit queue of the link: stores the frames.
struct RecordingTx {
    mtu: usize,
    buffer: Vec<u8>,
    sent: SentFrames,
}

impl TxQueue for RecordingTx {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            mac: LOCAL_MAC,
            mtu: self.mtu,
            tx_checksum: false,
            gso_bytes_max: 0,
            uso: false,
            labels: false,
        }
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.buffer.resize(len, 0xee);
        Some(&mut self.buffer[..])
    }

    fn commit(&mut self, len: usize, _meta: TxMeta) {
        let frame = self.buffer[..len].to_vec();
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).push_back(frame);
    }

    fn flush(&mut self, _now: Instant) {}
}

/// A blocking call that has not returned.
struct BlockedCall {
    call_id: usize,
    op: Op,
    new_fd: Option<Fd>,
    /// Bytes that the call has not sent yet.
    data: Vec<u8>,
    /// Number of bytes that the call has sent.
    sent: usize,
    /// Time at which the call times out.
    limit: Option<Duration>,
}

/// Runs scripts against the engine.
pub struct GinnelBackend {
    stack: Stack,
    port: PortId,
    /// Payload bytes of the segments of which an inbound packet was merged (`// gso`).
    gso: Option<u16>,
    now: Duration,
    sent: SentFrames,
    queue: VecDeque<SentPacket>,
    sockets: EngineSockets,
    blocked: Vec<BlockedCall>,
    finished: VecDeque<FinishedCall>,
}

impl GinnelBackend {
    /// Creates a stack with one link.
    ///
    /// # Errors
    /// A message about an invalid configuration.
    pub fn new(target: Target, directives: &Directives) -> Result<Self, String> {
        let config = config::from_directives(directives)?;
        // A fixed seed makes all runs equal.
        let mut stack =
            Stack::new(config, [7; 32], Instant::ZERO + CLOCK_START).map_err(|e| e.to_string())?;
        let sent = SentFrames::default();
        let mtu = directives.mtu as usize;
        let port = stack.add_port(Box::new(RecordingTx { mtu, buffer: Vec::new(), sent: Arc::clone(&sent) }));
        let (local, remote) = addresses(target.ip);
        let prefix = if local.is_ipv4() { 24 } else { 64 };
        let link = LinkConfig {
            name: "script0".into(),
            addresses: vec![(local, prefix)],
            static_neighbours: vec![(remote, MacAddr(REMOTE_MAC))],
            ..LinkConfig::default()
        };
        stack.add_link(port, &link).map_err(|e| e.to_string())?;
        let mut ginnel = Self {
            stack,
            port,
            gso: directives.gso,
            now: Duration::ZERO,
            sent,
            queue: VecDeque::new(),
            sockets: EngineSockets::new(local, remote),
            blocked: Vec::new(),
            finished: VecDeque::new(),
        };
        ginnel.turn(None);
        Ok(ginnel)
    }

    fn instant(&self) -> Instant {
        Instant::ZERO + CLOCK_START + self.now
    }

    /// Returns how a device describes a frame that it merged of segments (`// gso`).
    fn merged(&self, frame: &[u8]) -> Option<Gso> {
        let size = self.gso?;
        let packet = frame.get(ETHERNET_BYTES..)?;
        let headers = headers_of_merged(packet, size)?;
        let kind = if packet[0] >> 4 == 4 { GsoKind::Tcp4 } else { GsoKind::Tcp6 };
        Some(Gso { kind, size, header_len: headers + ETHERNET_BYTES as u16, ecn: false })
    }

    /// Runs one turn of a shard, with at most one received frame.
    fn turn(&mut self, frame: Option<&[u8]>) {
        let now = self.instant();
        if let Some(bytes) = frame {
            let mut burst = RxBurst::new();
            burst.push(RxFrame { gso: self.merged(bytes), ..RxFrame::new(bytes) });
            self.stack.receive(now, self.port, &burst);
            self.sockets.take_events(&mut self.stack);
            self.stack.finish_burst(&burst);
        }
        self.stack.advance(now);
        self.stack.transmit(now);
        self.sockets.take_events(&mut self.stack);
        self.retry_blocked_calls();
        self.stack.transmit(now);
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        for frame in sent.drain(..) {
            self.queue.push_back(SentPacket {
                at: self.now,
                packet: frame[ETHERNET_BYTES.min(frame.len())..].to_vec(),
            });
        }
        drop(sent);
        self.stack.check_invariants();
    }

    /// Retries all blocking calls.
    fn retry_blocked_calls(&mut self) {
        let now = self.instant();
        for blocked in core::mem::take(&mut self.blocked) {
            let expired = blocked.limit.is_some_and(|limit| limit <= self.now);
            let step = self.sockets.retry_blocking(
                &mut self.stack,
                now,
                &blocked.op,
                blocked.new_fd,
                &blocked.data,
                expired,
            );
            match step {
                CallProgress::Done(returned) => self.finish_or_continue(blocked, returned),
                CallProgress::Wait => self.blocked.push(blocked),
            }
        }
    }

    /// Ends a blocking call, unless it is a send that has sent only a part of its bytes: that call continues.
    fn finish_or_continue(&mut self, mut blocked: BlockedCall, mut returned: CallResult) {
        let sends = matches!(blocked.op, Op::Send { .. } | Op::SendTo { .. } | Op::SendMessage { .. });
        if let (true, Ok(sent)) = (sends, usize::try_from(returned.value)) {
            blocked.sent += sent;
            blocked.data.drain(..sent);
            if !blocked.data.is_empty() {
                self.blocked.push(blocked);
                return;
            }
            returned.value = blocked.sent as i64;
        }
        self.finished.push_back(FinishedCall { call_id: blocked.call_id, at: self.now, returned });
    }

    fn next_deadline(&self) -> Option<Duration> {
        let nanos = |at: Instant| Duration::from_nanos(at.as_nanos()).saturating_sub(CLOCK_START);
        let limits = self.blocked.iter().filter_map(|b| b.limit);
        limits.chain(self.stack.next_deadline().map(nanos)).min()
    }
}

impl Backend for GinnelBackend {
    fn now(&mut self) -> Duration {
        self.now
    }

    fn wait(&mut self, until: Duration) -> Option<SentPacket> {
        let mut idle_turns = 0;
        loop {
            if let Some(sent) = self.queue.pop_front() {
                return Some(sent);
            }
            match self.next_deadline() {
                Some(deadline) if deadline <= until => {
                    idle_turns = if deadline > self.now { 0 } else { idle_turns + 1 };
                    assert!(
                        idle_turns < IDLE_TURNS_MAX,
                        "the engine's deadline does not move from {deadline:?}"
                    );
                    self.now = self.now.max(deadline);
                    self.turn(None);
                }
                _ => {
                    self.now = self.now.max(until);
                    return None;
                }
            }
        }
    }

    fn inject(&mut self, packet: &[u8]) {
        let ethertype: u16 = if packet.first().is_some_and(|b| b >> 4 == 4) { 0x0800 } else { 0x86dd };
        let frame = [&LOCAL_MAC[..], &REMOTE_MAC[..], &ethertype.to_be_bytes(), packet].concat();
        self.turn(Some(&frame));
    }

    fn call(&mut self, op: &Op, new_fd: Option<Fd>, data: &[u8]) -> CallResult {
        let now = self.instant();
        self.stack.set_now(now);
        let returned = self.sockets.call(&mut self.stack, now, op, new_fd, data);
        self.turn(None);
        returned
    }

    fn call_blocking(&mut self, call_id: usize, op: &Op, new_fd: Option<Fd>, data: &[u8]) {
        let now = self.instant();
        let limit = self.sockets.time_limit(op).map(|limit| self.now + limit);
        let blocked = BlockedCall { call_id, op: op.clone(), new_fd, data: data.to_vec(), sent: 0, limit };
        match self.sockets.start_blocking(&mut self.stack, now, op, new_fd, data) {
            CallProgress::Done(returned) => self.finish_or_continue(blocked, returned),
            CallProgress::Wait => self.blocked.push(blocked),
        }
        self.turn(None);
    }

    fn take_finished_call(&mut self) -> Option<FinishedCall> {
        self.finished.pop_front()
    }

    fn info(&mut self, fd: Fd) -> Result<Info, String> {
        // The engine measures times up to now.
        let now = self.instant();
        self.stack.set_now(now);
        self.sockets.info(&self.stack, fd)
    }

    fn timer_slack(&self, _after: Duration) -> Duration {
        Duration::ZERO
    }

    fn settle_time(&self) -> Duration {
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::script::ast::BackendKind;
    use crate::script::parser::parse;
    use crate::script::runner;
    use std::path::Path;

    /// Returns whether the first of four segments is retransmitted `after_ms` milliseconds after the fourth
    /// was acknowledged by SACK.
    fn is_retransmitted(slack_ms: u32, after_ms: u32) -> bool {
        let text = format!(
            "// RFC 8985 §6.2
// ip: v4
// sysctl: ginnel.reordering_slack_ms={slack_ms}
+0 socket(..., SOCK_STREAM, IPPROTO_TCP) = 3
+0 bind(3, ..., ...) = 0
+0 listen(3, 1) = 0
+0 < S 0:0(0) win 32792 <mss 1000,sackOK,nop,nop,nop,wscale 7>
+0 > S. 0:0(0) ack 1 <...>
+0.1 < . 1:1(0) ack 1 win 257
+0 accept(3, ..., ...) = 4
+0 write(4, ..., 4000) = 4000
+0 > . 1:1001(1000) ack 1
+0 > P. 1001:2001(1000) ack 1
+0 > . 2001:3001(1000) ack 1
+0 > P. 3001:4001(1000) ack 1
+0.1 < . 1:1(0) ack 1 win 257 <nop,nop,sack 3001:4001>
+0.{after_ms:03} > . 1:1001(1000) ack 1
+0.1 < . 1:1(0) ack 4001 win 257
"
        );
        let script = parse(Path::new("slack.pkt"), &text).map_err(|_| "the script is not one").unwrap();
        let target = script.targets().into_iter().find(|t| t.backend == BackendKind::Ginnel).unwrap();
        let mut backend = GinnelBackend::new(target, &script.directives).unwrap();
        runner::run(&script, target, &mut backend).is_ok()
    }

    #[test]
    fn reordering_slack_delays_fast_retransmit() {
        assert!(is_retransmitted(0, 25));
        assert!(is_retransmitted(12, 37) && !is_retransmitted(12, 25));
        assert!(is_retransmitted(200, 225), "the maximum");
    }
}
