//! Translates between the relative numbers of a script and those on the wire, for each connection.

use super::ast::{Flags, MssValue, Segment, TcpOpt, TsValue};
use super::wire::WireSegment;
use core::time::Duration;

/// Port of the server, whichever side it is on.
pub const SERVER_PORT: u16 = 8080;
/// The remote port of flow n is this value plus n, unless the stack opens the connection.
pub const CLIENT_PORT_BASE: u16 = 40_000;

/// A connection of a script.
#[derive(Clone, Debug)]
pub struct Flow {
    /// Port of the stack.
    pub local_port: u16,
    /// Port of the remote side, which the script plays.
    pub remote_port: u16,
    /// Offset from script numbers of the stack's direction to wire numbers. Learnt from the stack's SYN.
    local_isn: Option<u32>,
    /// True if the next SYN of the stack starts a new connection, so that its number is learnt.
    expects_new_isn: bool,
    /// Script number of the stack's last SYN; data starts at the following number.
    local_syn: u32,
    /// Offset from script numbers of the remote direction to wire numbers.
    remote_isn: u32,
    /// Script number of the last SYN that the script sent.
    remote_syn: u32,
    /// First timestamp of the stack: script value and wire value.
    timestamp_base: Option<(u32, u32)>,
    /// Latest timestamp of the stack on the wire.
    last_timestamp: u32,
    /// Window field of the script's last packet.
    last_window: u16,
}

impl Flow {
    /// Creates a connection that the script opens: its SYN goes to [`SERVER_PORT`].
    pub fn passive(number: u16, remote_isn: u32) -> Self {
        Self::new(SERVER_PORT, CLIENT_PORT_BASE.wrapping_add(number), remote_isn)
    }

    /// Creates a connection that the stack opened from `local_port`.
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

    /// Returns whether a segment of the stack belongs to this flow.
    pub fn matches(&self, segment: &WireSegment) -> bool {
        self.local_port == segment.src_port && self.remote_port == segment.dst_port
    }

    /// Converts a script number of the stack's direction to a wire number.
    pub fn local_seq(&self, script: u32) -> u32 {
        script.wrapping_add(self.local_isn.unwrap_or(0))
    }

    /// Notes that the application opened a connection: the stack's next SYN has a new sequence number.
    pub fn expect_new_connection(&mut self) {
        self.expects_new_isn = true;
    }

    /// Learns the initial sequence number and the timestamp base from a segment of the stack, before the
    /// segment is compared with `expected`.
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

    /// Converts a segment of the stack to script numbers.
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
            dont_fragment: wire.dont_fragment,
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

    /// Converts a segment that the script sends to its wire form.
    pub fn to_wire(&mut self, script: &Segment) -> WireSegment {
        let has = |flag| script.flags.has(flag);
        // A repeated SYN must be answered with the same sequence number; a SYN with another number, or a SYN
        // after a reset, need not.
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
            dont_fragment: None,
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

    /// Returns the payload that a segment of the stack must carry at this script number.
    pub fn expected_payload(&self, seq: u32, len: usize, syn: bool) -> Vec<u8> {
        let first = seq.wrapping_sub(self.local_syn).wrapping_sub(u32::from(!syn));
        (0..len as u32).map(|i| local_byte(first.wrapping_add(i).into())).collect()
    }
}

/// Returns TSval and TSecr of the timestamps option.
pub fn timestamps(options: &[TcpOpt]) -> Option<(u32, u32)> {
    options.iter().find_map(|o| match o {
        TcpOpt::Ts { val: TsValue::Number(val), ecr: TsValue::Number(ecr) } => Some((*val, *ecr)),
        _ => None,
    })
}

fn timestamps_of_script(options: &[TcpOpt]) -> Option<TsValue> {
    options.iter().find_map(|o| if let TcpOpt::Ts { val, .. } = o { Some(*val) } else { None })
}

/// Returns the byte of the remote side's stream at this offset. The period is odd and divides no common
/// segment size, so a shifted, repeated or swapped segment is detected.
pub fn remote_byte(offset: u64) -> u8 {
    (offset % 251) as u8
}

/// Returns the byte of the application's stream at this offset.
pub fn local_byte(offset: u64) -> u8 {
    (offset % 241) as u8 ^ 0xa5
}

/// Returns whether the actual options match the expected ones: the same options in the same order. `*`
/// matches any value; a TSval may differ by `timestamp_slack`.
pub fn options_match(expected: &[TcpOpt], actual: &[TcpOpt], mss: u16, timestamp_slack: Duration) -> bool {
    let matches = |pair: (&TcpOpt, &TcpOpt)| match pair {
        (TcpOpt::Mss(None), TcpOpt::Mss(_)) | (TcpOpt::Wscale(None), TcpOpt::Wscale(_)) => true,
        (TcpOpt::Mss(Some(MssValue::Link)), TcpOpt::Mss(Some(MssValue::Number(n)))) => *n == mss,
        (TcpOpt::Ts { val, ecr }, TcpOpt::Ts { val: actual_val, ecr: actual_ecr }) => {
            timestamp_matches(*val, *actual_val, timestamp_slack)
                && timestamp_matches(*ecr, *actual_ecr, Duration::ZERO)
        }
        (expected, actual) => expected == actual,
    };
    expected.len() == actual.len() && expected.iter().zip(actual).all(matches)
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
