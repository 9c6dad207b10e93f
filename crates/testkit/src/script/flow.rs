//! Translates between a script's relative numbers and those on the wire, per connection.

use super::ast::{Flags, MssValue, Segment, TcpOpt, TsValue};
use super::wire::WireSegment;
use core::time::Duration;

/// The port that scripts' servers listen on, on either side.
pub const SERVER_PORT: u16 = 8080;
/// Flow n of a script comes from this port plus n, unless the stack opens it.
pub const CLIENT_PORT_BASE: u16 = 40_000;

/// One connection of a script.
#[derive(Clone, Debug)]
pub struct Flow {
    /// The stack's port; 0 until an active open told it.
    pub local_port: u16,
    /// The script's port.
    pub remote_port: u16,
    /// Added to script numbers of the stack's direction. Learnt from its SYN.
    local_isn: Option<u32>,
    /// The stack's next SYN is of a new connection, so its number is to be learnt.
    expects_new_isn: bool,
    /// Script number of the stack's last SYN: data starts one behind it.
    local_syn: u32,
    /// Added to script numbers of the remote direction.
    remote_isn: u32,
    /// Script number of the last SYN the script sent.
    remote_syn: u32,
    /// The stack's first timestamp: script value, wire value, and when it came.
    timestamp_base: Option<(u32, u32)>,
    /// The stack's newest timestamp on the wire.
    last_timestamp: u32,
    /// Window of the script's last packet.
    last_window: u16,
}

impl Flow {
    /// A connection that the script opens: its SYN goes to [`SERVER_PORT`].
    pub fn passive(number: u16, remote_isn: u32) -> Self {
        Self::new(SERVER_PORT, CLIENT_PORT_BASE.wrapping_add(number), remote_isn)
    }

    /// A connection that the stack opens, with this SYN of its.
    pub fn active(local_port: u16, remote_port: u16, remote_isn: u32) -> Self {
        Self::new(local_port, remote_port, remote_isn)
    }

    fn new(local_port: u16, remote_port: u16, remote_isn: u32) -> Self {
        Self {
            local_port,
            remote_port,
            local_isn: None,
            expects_new_isn: true,
            local_syn: 0,
            remote_isn,
            remote_syn: 0,
            timestamp_base: None,
            last_timestamp: 0,
            last_window: u16::MAX,
        }
    }

    /// Whether a segment of the stack belongs to this flow.
    pub fn matches(&self, segment: &WireSegment) -> bool {
        self.local_port == segment.src_port && self.remote_port == segment.dst_port
    }

    /// The wire number of a script's number in the stack's direction.
    pub fn local_seq(&self, script: u32) -> u32 {
        script.wrapping_add(self.local_isn.unwrap_or(0))
    }

    /// The application opened a connection: the stack's next SYN has a number of its own.
    pub fn expect_new_connection(&mut self) {
        self.expects_new_isn = true;
    }

    /// Before a segment of the stack is compared with `expected`: learns what it is the first to tell.
    pub fn learn(&mut self, expected: &Segment, actual: &WireSegment) {
        if actual.flags.has(Flags::RST) {
            self.expects_new_isn = true;
        }
        if actual.flags.has(Flags::SYN) && expected.flags.has(Flags::SYN) && self.expects_new_isn {
            self.local_isn = Some(actual.seq.wrapping_sub(expected.seq));
            self.local_syn = expected.seq;
            self.expects_new_isn = false;
            self.timestamp_base = None;
        }
        let Some((value, _)) = timestamps(&actual.options) else { return };
        self.last_timestamp = value;
        let script = expected.options.as_deref().and_then(timestamps_of_script);
        if let (None, Some(TsValue::Number(script))) = (self.timestamp_base, script) {
            self.timestamp_base = Some((script, value));
        }
    }

    /// A segment of the stack in script numbers.
    pub fn to_script(&self, wire: &WireSegment) -> Segment {
        let relative_ts = |n: u32| match self.timestamp_base {
            Some((script, base)) => n.wrapping_sub(base).wrapping_add(script),
            None => n,
        };
        let from_remote = |n: u32| n.wrapping_sub(self.remote_isn);
        let options = wire.options.iter().map(|option| match option {
            TcpOpt::Sack(blocks) => {
                TcpOpt::Sack(blocks.iter().map(|(l, r)| (from_remote(*l), from_remote(*r))).collect())
            }
            TcpOpt::Ts { val: TsValue::Number(val), ecr } => {
                TcpOpt::Ts { val: TsValue::Number(relative_ts(*val)), ecr: *ecr }
            }
            other => other.clone(),
        });
        let has_ack = wire.flags.has(Flags::ACK);
        Segment {
            ecn: Some(wire.ecn),
            ttl: Some(wire.ttl),
            flags: wire.flags,
            seq: wire.seq.wrapping_sub(self.local_isn.unwrap_or(0)),
            len: wire.payload.len() as u32,
            ack: has_ack.then(|| from_remote(wire.ack)),
            window: Some(wire.window),
            urgent: wire.flags.has(Flags::URG).then_some(wire.urgent),
            options: Some(options.collect()),
            ..Segment::default()
        }
    }

    /// The wire form of a segment that the script sends.
    pub fn to_wire(&mut self, script: &Segment) -> WireSegment {
        let has = |flag| script.flags.has(flag);
        // A SYN repeated must be answered with the same number, one behind a reset or with another number need not.
        if has(Flags::RST) || has(Flags::SYN) && script.seq != self.remote_syn {
            self.expects_new_isn = true;
        }
        if has(Flags::SYN) {
            self.remote_syn = script.seq;
        }
        self.last_window = script.window.unwrap_or(self.last_window);
        let seq = script.seq.wrapping_add(self.remote_isn);
        let options = script.options.iter().flatten().map(|option| match option {
            TcpOpt::Sack(blocks) => {
                TcpOpt::Sack(blocks.iter().map(|(l, r)| (self.local_seq(*l), self.local_seq(*r))).collect())
            }
            TcpOpt::Ts { val, ecr } => TcpOpt::Ts { val: *val, ecr: TsValue::Number(self.echo(*ecr)) },
            other => other.clone(),
        });
        let first = script.seq.wrapping_sub(self.remote_syn).wrapping_sub(u32::from(!has(Flags::SYN)));
        WireSegment {
            ecn: script.ecn.unwrap_or(super::ast::Ecn::NotEct),
            ttl: script.ttl.unwrap_or(64),
            src_port: self.remote_port,
            dst_port: self.local_port,
            seq,
            ack: script.ack.map_or(0, |ack| self.local_seq(ack)),
            flags: script.flags,
            window: self.last_window,
            urgent: script.urgent.unwrap_or(0),
            options: options.collect(),
            payload: (0..script.len).map(|i| remote_byte(first.wrapping_add(i).into())).collect(),
        }
    }

    fn echo(&self, value: TsValue) -> u32 {
        match (value, self.timestamp_base) {
            (TsValue::Number(n), Some((script, base))) if n != 0 => n.wrapping_sub(script).wrapping_add(base),
            (TsValue::Number(n), _) => n,
            (TsValue::Last | TsValue::Any, _) => self.last_timestamp,
        }
    }

    /// The payload that a segment of the stack with this script number must carry.
    pub fn expected_payload(&self, seq: u32, len: usize, syn: bool) -> Vec<u8> {
        let first = seq.wrapping_sub(self.local_syn).wrapping_sub(u32::from(!syn));
        (0..len as u32).map(|i| local_byte(first.wrapping_add(i).into())).collect()
    }
}

/// Value and echo of the timestamp option.
pub fn timestamps(options: &[TcpOpt]) -> Option<(u32, u32)> {
    options.iter().find_map(|o| match o {
        TcpOpt::Ts { val: TsValue::Number(val), ecr: TsValue::Number(ecr) } => Some((*val, *ecr)),
        _ => None,
    })
}

fn timestamps_of_script(options: &[TcpOpt]) -> Option<TsValue> {
    options.iter().find_map(|o| if let TcpOpt::Ts { val, .. } = o { Some(*val) } else { None })
}

/// Byte of the remote side's stream at this offset. The period is odd and no divisor of usual segment sizes, so a shifted,
/// repeated or swapped piece shows.
pub fn remote_byte(offset: u64) -> u8 {
    (offset % 251) as u8
}

/// Byte of the application's stream at this offset.
pub fn local_byte(offset: u64) -> u8 {
    (offset % 241) as u8 ^ 0xa5
}

/// Whether an expected option list fits the actual one: same options in the same order; `*` fits anything, the
/// timestamp value may differ by `timestamp_slack`.
pub fn options_match(expected: &[TcpOpt], actual: &[TcpOpt], mss: u16, timestamp_slack: Duration) -> bool {
    let fits = |pair: (&TcpOpt, &TcpOpt)| match pair {
        (TcpOpt::Mss(None), TcpOpt::Mss(_)) | (TcpOpt::Wscale(None), TcpOpt::Wscale(_)) => true,
        (TcpOpt::Mss(Some(MssValue::Link)), TcpOpt::Mss(Some(MssValue::Number(n)))) => *n == mss,
        (TcpOpt::Ts { val, ecr }, TcpOpt::Ts { val: actual_val, ecr: actual_ecr }) => {
            timestamp_matches(*val, *actual_val, timestamp_slack)
                && timestamp_matches(*ecr, *actual_ecr, Duration::ZERO)
        }
        (expected, actual) => expected == actual,
    };
    expected.len() == actual.len() && expected.iter().zip(actual).all(fits)
}

fn timestamp_matches(expected: TsValue, actual: TsValue, slack: Duration) -> bool {
    match (expected, actual) {
        (TsValue::Number(expected), TsValue::Number(actual)) => {
            let apart = actual.wrapping_sub(expected) as i32;
            u128::from(apart.unsigned_abs()) <= slack.as_millis()
        }
        _ => true,
    }
}
