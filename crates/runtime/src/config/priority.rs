//! The `[priority]` table.

use super::within;
use ginnel_matcher::{
    Condition, Expression, FLOW_CACHE_ENTRIES_MAX, FLOW_CACHE_ENTRIES_MIN, HexBytes, Network, PayloadTest,
    Ports, Protocol, RULES_MAX, Rule, Side, TooManyRules,
};
use ginnel_stack::device::Label;
use ginnel_stack::error::ConfigError;
use ginnel_stack::priority::ClassLimits;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// Largest value of the length fields of IPv4 and IPv6. That of IPv4 counts the IP header, too.
const IP_LEN_MAX: u32 = 65_535;
const IPV4_HEADER_BYTES: u32 = 20;
const TCP_HEADER_BYTES: u32 = 20;
const UDP_HEADER_BYTES: u32 = 8;

/// Keys of the `[priority]` table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PriorityConfig {
    /// Keep received frames in a queue for each priority when more arrive than are processed, and process
    /// them, their events and the tasks that they wake by priority. Without that, priorities only order the
    /// frames of a burst. Default: true if there are rules, or if the program has a function for priorities.
    pub enabled: Option<bool>,
    /// Part of the work that lower priorities get at least while a higher priority has work, in percent: 1 to
    /// 50. Default 5.
    pub lower_share_percent: u32,
    /// Received frames of one priority that may wait: 64 to 1,048,576. Further frames are dropped and
    /// counted, except for SYN, FIN, RST, segments without payload and what is neither TCP nor UDP: these may
    /// be twice as many, and beyond that they are processed without waiting. Default 16,384.
    pub queue_frames: u32,
    /// Bytes of the queue of one priority: 262,144 to 1,073,741,824. Memory is used as far as the queue is.
    /// Default 8 MiB.
    pub queue_bytes: u32,
    /// Part of each limit that datagrams and frames of all priorities share which is kept for higher
    /// priorities, in percent: 0 to 90. These limits are the receive queues of UDP sockets, singly and
    /// together, and the queues between shards. Priority 1 leaves all of the part free, 0 leaves six sevenths
    /// of it, 2 five sevenths, and so on; 7 may fill the whole. Default 25.
    pub reserve_percent: u32,
    /// Frames of the usual priority that may wait in a device which can tell what waits (memory, memif,
    /// AF_XDP, DPDK in front of the port, and links with faults), so that urgent ones find few in front of
    /// them: 1 to 65,536. A frame in several buffers counts as that many. Further TCP segments and datagrams
    /// wait in their sockets. Priority 1 has the same limit, 2 twice as many frames, 3 three times, and so
    /// on; 7 has none. Default 64.
    pub transmit_backlog_frames: u32,
    /// While the application works, received frames are looked at after this time, in microseconds, between
    /// two calls of a handler or two tasks: 10 to 100,000. Default 200.
    pub check_interval_us: u32,
    /// Flows for which each queue of a device remembers what the rules say, 64 bytes each: 16 to 1,048,576,
    /// rounded up to a power of two. Received frames and, on devices that carry labels, sent ones have as
    /// many each. Unused without rules. Default 4,096.
    pub flow_cache_entries: u32,
    /// Rules, of which the first that matches a frame gives the frame its priority.
    pub rules: Vec<PriorityRule>,
}

/// Keys of a `[[priority.rules]]` table. All conditions must hold.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PriorityRule {
    /// Priority of the frames that match: 0 to 7. 7 is the most urgent; 1, background, is below 0, the usual
    /// one. A rule requires it.
    pub priority: u8,
    /// Networks or addresses of the sender, of which one must match: `["10.0.0.0/8", "fd00::7"]`. Default:
    /// any.
    #[serde(default, deserialize_with = "non_empty")]
    pub source: Vec<Network>,
    /// As `source`, for the receiver. Default: any.
    #[serde(default, deserialize_with = "non_empty")]
    pub destination: Vec<Network>,
    /// As `source`, for the sender or the receiver. Default: any.
    #[serde(default, deserialize_with = "non_empty")]
    pub address: Vec<Network>,
    /// Ports of the sender: `80`, `"80,8000-8010"` or `[80, "8000-8010"]`. Default: any.
    #[serde(default)]
    pub source_ports: Option<Ports>,
    /// As `source_ports`, for the receiver. Default: any.
    #[serde(default)]
    pub destination_ports: Option<Ports>,
    /// As `source_ports`, for the sender or the receiver. Default: any.
    #[serde(default)]
    pub ports: Option<Ports>,
    /// `tcp` or `udp`. Default: any.
    #[serde(default)]
    pub protocol: Option<Protocol>,
    /// Differentiated services code points, of which one must match: `[46, 34]`. Each is 0 to 63. Default:
    /// any.
    #[serde(default, deserialize_with = "non_empty")]
    pub dscp: Vec<u8>,
    /// Smallest payload of TCP or UDP in bytes: 0 to 65,527. Default: any.
    #[serde(default)]
    pub payload_bytes_min: Option<u32>,
    /// Largest payload of TCP or UDP in bytes, not below `payload_bytes_min`: 0 to 65,535. Default: any.
    #[serde(default)]
    pub payload_bytes_max: Option<u32>,
    /// Bytes that the payload must have. Default: any.
    #[serde(default)]
    pub payload: Option<PayloadRule>,
    /// An expression in tcpdump's language, in place of all other conditions:
    /// `"tcp[((tcp[12]&0xf0)>>2)+6] = 2"`. Requires libpcap (on Debian: libpcap0.8). Default: none.
    #[serde(default)]
    pub expression: Option<Expression>,
}

/// Keys of a `[priority.rules.payload]` table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PayloadRule {
    /// Position of the first byte, counted from the start of the payload of TCP or UDP: 0 to 65,526. Default
    /// 0.
    #[serde(default)]
    pub offset_bytes: u32,
    /// Value of the bytes after `mask` was applied, 1 to 32 bytes in hexadecimal digits: `"02"` or
    /// `"47 45 54 20"`. The table requires it.
    pub value: HexBytes,
    /// Bits that are compared, as many bytes as `value`. Default: all.
    #[serde(default)]
    pub mask: Option<HexBytes>,
}

impl Default for PriorityConfig {
    fn default() -> Self {
        Self {
            enabled: None,
            lower_share_percent: 5,
            queue_frames: 16_384,
            queue_bytes: 8 << 20,
            reserve_percent: 25,
            transmit_backlog_frames: 64,
            check_interval_us: 200,
            flow_cache_entries: 4096,
            rules: Vec::new(),
        }
    }
}

impl PriorityConfig {
    /// Validates ranges and combinations.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        within("priority.lower_share_percent", self.lower_share_percent, 1..=50)?;
        within("priority.queue_frames", self.queue_frames, 64..=1 << 20)?;
        within("priority.queue_bytes", self.queue_bytes, 256 << 10..=1 << 30)?;
        within("priority.reserve_percent", self.reserve_percent, 0..=90)?;
        within("priority.transmit_backlog_frames", self.transmit_backlog_frames, 1..=65_536)?;
        within("priority.check_interval_us", self.check_interval_us, 10..=100_000)?;
        // Cannot truncate.
        let entries = FLOW_CACHE_ENTRIES_MIN as u32..=FLOW_CACHE_ENTRIES_MAX as u32;
        within("priority.flow_cache_entries", self.flow_cache_entries, entries)?;
        if self.rules.len() > RULES_MAX {
            return Err(ConfigError::new("priority.rules", TooManyRules(self.rules.len()).to_string()));
        }
        self.matcher_rules().map(|_| ())
    }

    /// Returns whether frames wait in queues by priority. `has_function`: the program has a function for
    /// priorities.
    pub(crate) fn is_enabled(&self, has_function: bool) -> bool {
        self.enabled.unwrap_or(has_function || !self.rules.is_empty())
    }

    /// Returns the limits of classes, if frames wait in queues by priority.
    pub(crate) fn class_limits(&self, has_function: bool) -> Option<ClassLimits> {
        self.is_enabled(has_function).then(|| ClassLimits::new(self.reserve_percent))
    }

    /// Returns the rules as the matcher takes them.
    ///
    /// # Errors
    /// The first key that is not valid.
    pub(crate) fn matcher_rules(&self) -> Result<Vec<Rule<u8>>, ConfigError> {
        let rule = |(i, rule): (usize, &PriorityRule)| {
            rule.matcher_rule().map_err(|(name, problem)| {
                let dot = if name.is_empty() { "" } else { "." };
                ConfigError::new(format!("priority.rules[{i}]{dot}{name}"), problem)
            })
        };
        self.rules.iter().enumerate().map(rule).collect()
    }
}

impl PriorityRule {
    /// Creates a rule from an expression.
    #[must_use]
    pub fn from_expression(priority: u8, expression: Expression) -> Self {
        Self {
            priority,
            source: Vec::new(),
            destination: Vec::new(),
            address: Vec::new(),
            source_ports: None,
            destination_ports: None,
            ports: None,
            protocol: None,
            dscp: Vec::new(),
            payload_bytes_min: None,
            payload_bytes_max: None,
            payload: None,
            expression: Some(expression),
        }
    }

    /// Returns the rule as the matcher takes it. The error has a key, or none for the rule itself, and its
    /// problem.
    fn matcher_rule(&self) -> Result<Rule<u8>, (String, String)> {
        let priorities = 0..=Label::PRIORITY_MAX;
        let problem = |e: ConfigError| (e.key, e.problem);
        within("priority", self.priority, priorities).map_err(problem)?;
        let mut conditions = Vec::new();
        let mut address = |side, networks: &Vec<Network>| {
            if !networks.is_empty() {
                conditions.push(Condition::Address(side, networks.clone()));
            }
        };
        address(Side::Source, &self.source);
        address(Side::Destination, &self.destination);
        address(Side::Either, &self.address);
        let ports = [
            (Side::Source, &self.source_ports),
            (Side::Destination, &self.destination_ports),
            (Side::Either, &self.ports),
        ];
        conditions.extend(
            ports.into_iter().filter_map(|(side, ports)| Some(Condition::Port(side, ports.clone()?))),
        );
        conditions.extend(self.protocol.map(Condition::Protocol));
        for (i, &dscp) in self.dscp.iter().enumerate() {
            within(format!("dscp[{i}]"), dscp, 0..=63).map_err(problem)?;
        }
        if !self.dscp.is_empty() {
            conditions.push(Condition::Dscp(self.dscp.clone()));
        }
        let is_v4_only = self.check_families().map_err(problem)?;
        conditions.extend(self.payload_len().map_err(problem)?);
        if let Some(payload) = &self.payload {
            conditions
                .push(payload.condition().map_err(|(key, problem)| (format!("payload.{key}"), problem))?);
        }
        self.check_payload_end(is_v4_only).map_err(problem)?;
        match &self.expression {
            Some(_) if !conditions.is_empty() => {
                let problem = "cannot be combined with other conditions: state them in the expression";
                return Err(("expression".into(), problem.into()));
            }
            Some(expression) => conditions.push(Condition::Expression(expression.clone())),
            None if conditions.is_empty() => {
                let problem = "has no condition: add a key such as `ports`, or an `expression`";
                return Err((String::new(), problem.into()));
            }
            None => {}
        }
        Ok(Rule { conditions, action: self.priority })
    }

    /// Returns whether the addresses match IPv4 packets only. It is an error if they match no packet, because
    /// both addresses of a packet have one family.
    fn check_families(&self) -> Result<bool, ConfigError> {
        let [mut has_v4, mut has_v6] = [true; 2];
        let keys = [("source", &self.source), ("destination", &self.destination), ("address", &self.address)];
        for (name, networks) in keys.into_iter().filter(|(_, networks)| !networks.is_empty()) {
            has_v4 &= networks.iter().any(Network::is_ipv4);
            has_v6 &= !networks.iter().all(Network::is_ipv4);
            if !has_v4 && !has_v6 {
                let problem = "never matches: the rule's addresses are of IPv4 and IPv6, a packet's are not";
                return Err(ConfigError::new(name, problem));
            }
        }
        Ok(!has_v6)
    }

    /// Checks that a packet can have as many bytes of payload as the rule looks at.
    fn check_payload_end(&self, is_v4_only: bool) -> Result<(), ConfigError> {
        let ip = if is_v4_only { IPV4_HEADER_BYTES } else { 0 };
        let transport = match self.protocol {
            Some(Protocol::Tcp) => TCP_HEADER_BYTES,
            Some(Protocol::Udp) | None => UDP_HEADER_BYTES,
        };
        let possible = IP_LEN_MAX - ip - transport;
        if let Some(min) = self.payload_bytes_min.filter(|min| *min > possible) {
            let problem = format!("never matches: {min} bytes, but a packet has at most {possible}");
            return Err(ConfigError::new("payload_bytes_min", problem));
        }
        let Some(payload) = &self.payload else { return Ok(()) };
        let possible = possible.min(self.payload_bytes_max.unwrap_or(u32::MAX));
        let end = payload.offset_bytes as usize + payload.value.0.len();
        if end > possible as usize {
            let key = if payload.offset_bytes > 0 { "payload.offset_bytes" } else { "payload.value" };
            let problem = format!("never matches: the bytes end at {end}, but the payload at {possible}");
            return Err(ConfigError::new(key, problem));
        }
        Ok(())
    }

    fn payload_len(&self) -> Result<Option<Condition>, ConfigError> {
        let (min, max) = (self.payload_bytes_min, self.payload_bytes_max);
        within("payload_bytes_min", min.unwrap_or_default(), 0..=65_527)?;
        within("payload_bytes_max", max.unwrap_or_default(), 0..=65_535)?;
        let range = min.unwrap_or(0)..=max.unwrap_or(u32::MAX);
        if range.is_empty() {
            return Err(ConfigError::new("payload_bytes_max", "is below payload_bytes_min"));
        }
        Ok((min.is_some() || max.is_some()).then_some(Condition::PayloadBytes(range)))
    }
}

/// Reads a list with at least one element.
fn non_empty<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    let list = Vec::deserialize(deserializer)?;
    if list.is_empty() { Err(D::Error::custom("is empty, so that nothing matches")) } else { Ok(list) }
}

impl PayloadRule {
    fn condition(&self) -> Result<Condition, (String, String)> {
        within("offset_bytes", self.offset_bytes, 0..=65_526).map_err(|e| (e.key, e.problem))?;
        let mask = self.mask.as_ref().map(|mask| &mask.0[..]);
        // Cannot truncate: it was checked.
        let test = PayloadTest::new(self.offset_bytes as u16, &self.value.0, mask);
        test.map(Condition::Payload).map_err(|(key, problem)| (key.into(), problem))
    }
}
