//! Syntax tree of a script: directives, events with their times, packets and calls.

use super::assertion::Assertion;
use super::calls::Call;
use core::fmt;
use core::time::Duration;
use std::path::PathBuf;

/// The stack that a script runs against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BackendKind {
    /// The Linux kernel, in real time.
    Kernel,
    /// Ginnel's engine, in virtual time.
    Ginnel,
}

impl BackendKind {
    /// Returns the name in directives, in blocks and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Ginnel => "ginnel",
        }
    }
}

/// IP version of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl IpVersion {
    /// Returns the name in directives, in blocks and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
        }
    }

    /// Returns the bytes of IP and TCP header without options: the difference between MTU and MSS.
    pub const fn header_bytes(self) -> u32 {
        match self {
            Self::V4 => 40,
            Self::V6 => 60,
        }
    }
}

/// One run of a script: the stack and the IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// The stack.
    pub backend: BackendKind,
    /// The IP version.
    pub ip: IpVersion,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.backend.name(), self.ip.name())
    }
}

/// A declared difference between the two stacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The stack that departs from the RFC, or from the other stack.
    pub backend: BackendKind,
    /// Behaviour of that stack, with the RFC section that decides.
    pub reason: String,
}

/// Comment directives at the head of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directives {
    /// IP versions of the runs (`// ip: v4|v6|both`).
    pub ip: Vec<IpVersion>,
    /// Sysctls by full name with their values, in order (`// sysctl: net.ipv4.tcp_sack=0`).
    pub sysctls: Vec<(String, String)>,
    /// Declared differences (`// differs: kernel …`).
    pub differs: Vec<Difference>,
    /// The only stack that can run the script (`// only: kernel reason`).
    pub only: Option<Difference>,
    /// Tolerated deviation of a packet's time (`// tolerance: 4ms`).
    pub tolerance: Duration,
    /// MTU of the stack's link in bytes (`// mtu: 1500`).
    pub mtu: u32,
    /// Offset from the script's sequence numbers of the remote side to those on the wire (`// isn:
    /// 0xfffffff0`).
    pub remote_isn: u32,
    /// True if payload is compared with the expected pattern (`// payload: any` disables this).
    pub check_payload: bool,
    /// True if packets after the last expected one are unexpected (`// rest: any` disables this).
    pub check_rest: bool,
    /// True if PSH is compared (`// push: any` disables this).
    pub check_push: bool,
    /// Payload bytes of the segments of which the device merged an inbound packet with more payload (`// gso:
    /// 1000`); `None` if the device merges no segments.
    pub gso: Option<u16>,
}

/// Name of the sysctl that selects the congestion control.
pub const CONGESTION_CONTROL: &str = "net.ipv4.tcp_congestion_control";

impl Directives {
    /// Returns the congestion control of the run by its Linux name.
    pub fn congestion_control(&self) -> &str {
        let found = self.sysctls.iter().find(|(name, _)| name == CONGESTION_CONTROL);
        found.map_or("cubic", |(_, value)| value)
    }
}

impl Default for Directives {
    fn default() -> Self {
        Self {
            ip: vec![IpVersion::V4, IpVersion::V6],
            sysctls: Vec::new(),
            differs: Vec::new(),
            only: None,
            tolerance: Duration::from_millis(4),
            mtu: 1500,
            remote_isn: 0x3b9a_ca00,
            check_payload: true,
            check_rest: true,
            check_push: true,
            gso: None,
        }
    }
}

/// A parsed script.
#[derive(Clone, Debug)]
pub struct Script {
    /// Path of the file.
    pub path: PathBuf,
    /// First comment line: the behaviour that the script shows, with the RFC section.
    pub summary: String,
    /// The directives.
    pub directives: Directives,
    /// Events and conditional blocks, in order.
    pub items: Vec<Item>,
}

/// An event, or a block that only some runs contain.
#[derive(Clone, Debug)]
pub enum Item {
    /// An event of every run.
    Event(Event),
    /// `@kernel { … }`, `@v4 { … }`, …
    Block(Condition, Vec<Item>),
}

/// Condition of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The block belongs to runs against this stack.
    Backend(BackendKind),
    /// The block belongs to runs over this IP version.
    Ip(IpVersion),
}

impl Condition {
    /// Returns whether a run satisfies the condition.
    pub fn holds(self, target: Target) -> bool {
        match self {
            Self::Backend(backend) => backend == target.backend,
            Self::Ip(ip) => ip == target.ip,
        }
    }
}

impl Script {
    /// Returns the events of one run, with blocks resolved.
    pub fn events(&self, target: Target) -> Vec<Event> {
        let mut events = Vec::new();
        collect(&self.items, target, &mut events);
        events
    }

    /// Returns the runs that the directives select.
    pub fn targets(&self) -> Vec<Target> {
        let backends = [BackendKind::Kernel, BackendKind::Ginnel];
        let runs_on = |b: &BackendKind| self.directives.only.as_ref().is_none_or(|only| only.backend == *b);
        let backends: Vec<_> = backends.into_iter().filter(runs_on).collect();
        let with_ip =
            |ip: &IpVersion| backends.iter().map(|&backend| Target { backend, ip: *ip }).collect::<Vec<_>>();
        self.directives.ip.iter().flat_map(with_ip).collect()
    }

    /// Returns a lower bound of the duration of a run, computed from the times in the script.
    pub fn nominal_duration(&self, target: Target) -> Duration {
        self.events(target).iter().fold(Duration::ZERO, |now, event| match event.time {
            Time::Relative { from, .. } => now + from,
            Time::Absolute { from, .. } => from.max(now),
            Time::Any => now,
        })
    }
}

fn collect(items: &[Item], target: Target, into: &mut Vec<Event>) {
    for item in items {
        match item {
            Item::Event(event) => into.push(event.clone()),
            Item::Block(condition, inner) if condition.holds(target) => collect(inner, target, into),
            Item::Block(..) => {}
        }
    }
}

/// Time of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// `+0.1` or `+0.1~+0.2`: relative to the preceding event.
    Relative {
        /// Earliest time.
        from: Duration,
        /// Latest time of a range.
        to: Option<Duration>,
    },
    /// `0.1` or `0.1~0.2`: relative to the start of the script.
    Absolute {
        /// Earliest time.
        from: Duration,
        /// Latest time of a range.
        to: Option<Duration>,
    },
    /// `*`: any time.
    Any,
}

/// One event of a script.
#[derive(Clone, Debug)]
pub struct Event {
    /// Line in the file, from 1.
    pub line: u32,
    /// Time of the event.
    pub time: Time,
    /// Time at which a blocking call returns (`+0...+0.3 connect(…)`), with the same origin as `time`.
    pub until: Option<Duration>,
    /// The action.
    pub kind: EventKind,
}

/// Action of an event.
#[derive(Clone, Debug)]
pub enum EventKind {
    /// `<`: the script sends this packet to the stack.
    Inbound(Packet),
    /// `>`: the stack must send this packet.
    Outbound(Packet),
    /// The application makes this socket call.
    Call(Call),
    /// `%{ … }%`: an assertion.
    Assert(Assertion),
}

/// A packet as a script writes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Packet {
    /// Number of the connection, from 1 (`<2 S …`).
    pub flow: u16,
    /// Contents of the packet.
    pub body: PacketBody,
}

/// Contents of a packet.
#[derive(Clone, Debug, PartialEq)]
pub enum PacketBody {
    /// A TCP segment.
    Tcp(Segment),
    /// An ICMP error about a segment of the stack.
    Icmp(Icmp),
}

/// A TCP segment as a script writes it. In an expected outbound segment, `None` matches any value, except in
/// `ack` and `urgent`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Segment {
    /// ECN field: `[ect0]`, `[noecn]`, …
    pub ecn: Option<Ecn>,
    /// TTL or hop limit: `[ttl 5]`.
    pub ttl: Option<u8>,
    /// DF over IPv4: `[df]`, `[nodf]` (outbound only).
    pub dont_fragment: Option<bool>,
    /// `[badcsum]`: the checksum is wrong (inbound only).
    pub bad_checksum: bool,
    /// `[doff 4]`: overrides the data offset (inbound only).
    pub data_offset: Option<u8>,
    /// The flags.
    pub flags: Flags,
    /// Relative sequence number.
    pub seq: u32,
    /// Length of the payload in bytes.
    pub len: u32,
    /// Relative acknowledgement number; present exactly if flag ACK is set.
    pub ack: Option<u32>,
    /// Window field of the header, unscaled. Inbound, `None` repeats the flow's last window.
    pub window: Option<u16>,
    /// Urgent pointer. Outbound, `None` expects that flag URG is clear.
    pub urgent: Option<u16>,
    /// Options in order; `None` is `<...>`.
    pub options: Option<Vec<TcpOpt>>,
}

/// TCP flags: the low nine bits of header bytes 12 and 13.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u16);

impl Flags {
    /// FIN.
    pub const FIN: Self = Self(0x01);
    /// SYN.
    pub const SYN: Self = Self(0x02);
    /// RST.
    pub const RST: Self = Self(0x04);
    /// PSH.
    pub const PSH: Self = Self(0x08);
    /// ACK.
    pub const ACK: Self = Self(0x10);
    /// URG.
    pub const URG: Self = Self(0x20);
    /// ECE (RFC 3168).
    pub const ECE: Self = Self(0x40);
    /// CWR (RFC 3168).
    pub const CWR: Self = Self(0x80);
    /// AE: accurate ECN.
    pub const AE: Self = Self(0x100);

    /// Returns whether all bits of `other` are set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union with `other`.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Letter of each flag, in the order of the script syntax.
    pub const LETTERS: [(char, Self); 9] = [
        ('S', Self::SYN),
        ('F', Self::FIN),
        ('R', Self::RST),
        ('P', Self::PSH),
        ('.', Self::ACK),
        ('U', Self::URG),
        ('E', Self::ECE),
        ('W', Self::CWR),
        ('A', Self::AE),
    ];
}

/// ECN field of the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ecn {
    /// Not ECN-capable.
    NotEct,
    /// ECT(1).
    Ect1,
    /// ECT(0).
    Ect0,
    /// Congestion experienced.
    Ce,
    /// ECT(0) or ECT(1) (outbound only).
    AnyEct,
}

/// A TCP option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TcpOpt {
    /// End of option list.
    Eol,
    /// No operation.
    Nop,
    /// Maximum segment size; `None` is `mss *`.
    Mss(Option<MssValue>),
    /// Window scale; `None` is `wscale *`.
    Wscale(Option<u8>),
    /// SACK permitted.
    SackOk,
    /// SACK blocks, in relative sequence numbers of the acknowledged direction.
    Sack(Vec<(u32, u32)>),
    /// Timestamps.
    Ts {
        /// TSval.
        val: TsValue,
        /// TSecr.
        ecr: TsValue,
    },
    /// `hex 1e02`: raw bytes, including kind and length.
    Raw(Vec<u8>),
}

/// Value of the MSS option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MssValue {
    /// A literal value.
    Number(u16),
    /// `MSS`: the MTU of the link minus IP and TCP header of this run's IP version.
    Link,
}

/// Timestamp value in a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TsValue {
    /// A literal value. Timestamps of the stack are relative to its first timestamp of the flow; those of the
    /// remote side are literal.
    Number(u32),
    /// `last` (inbound TSecr only): the latest TSval of the stack.
    Last,
    /// `*` (outbound only): any value.
    Any,
}

/// An ICMP error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Icmp {
    /// Type and code.
    pub kind: IcmpKind,
    /// Next-hop MTU of `frag_needed`.
    pub mtu: u32,
    /// Flags of the quoted segment.
    pub flags: Flags,
    /// Relative sequence number of the quoted segment.
    pub seq: u32,
    /// Payload length of the quoted segment in bytes.
    pub len: u32,
    /// TTL or hop limit of the ICMP packet.
    pub ttl: u8,
    /// TTL or hop limit of the quoted segment.
    pub quoted_ttl: u8,
}

/// Kinds of ICMP errors, named as in IPv4. Over IPv6 each becomes its ICMPv6 counterpart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpKind {
    /// Network unreachable; ICMPv6: no route to destination.
    NetUnreachable,
    /// Host unreachable; ICMPv6: address unreachable.
    HostUnreachable,
    /// Protocol unreachable; ICMPv6: parameter problem, unrecognized next header.
    ProtocolUnreachable,
    /// Port unreachable.
    PortUnreachable,
    /// Fragmentation needed; ICMPv6: packet too big.
    FragNeeded,
    /// Source route failed; ICMPv6: reject route to destination.
    SourceRouteFailed,
    /// Destination network unknown; ICMPv6: no route to destination.
    NetUnknown,
    /// Destination host unknown; ICMPv6: address unreachable.
    HostUnknown,
    /// Source host isolated; ICMPv6: address unreachable.
    SourceHostIsolated,
    /// Communication administratively prohibited.
    AdminProhibited,
    /// Hop limit exceeded in transit.
    TtlExceeded,
    /// Fragment reassembly time exceeded.
    ReassemblyTimeExceeded,
    /// Source quench (ICMPv4 only).
    SourceQuench,
    /// Parameter problem: erroneous header field.
    ParameterProblem,
}

impl IcmpKind {
    /// All kinds with their names in scripts.
    pub const NAMES: [(&'static str, Self); 14] = [
        ("unreachable net_unreachable", Self::NetUnreachable),
        ("unreachable host_unreachable", Self::HostUnreachable),
        ("unreachable protocol_unreachable", Self::ProtocolUnreachable),
        ("unreachable port_unreachable", Self::PortUnreachable),
        ("unreachable frag_needed", Self::FragNeeded),
        ("unreachable source_route_failed", Self::SourceRouteFailed),
        ("unreachable net_unknown", Self::NetUnknown),
        ("unreachable host_unknown", Self::HostUnknown),
        ("unreachable source_host_isolated", Self::SourceHostIsolated),
        ("unreachable admin_prohibited", Self::AdminProhibited),
        ("time_exceeded ttl", Self::TtlExceeded),
        ("time_exceeded reassembly", Self::ReassemblyTimeExceeded),
        ("source_quench", Self::SourceQuench),
        ("parameter_problem", Self::ParameterProblem),
    ];
}
