//! What a script says, parsed: directives, events with their times, packets and calls.

use super::assertion::Assertion;
use super::calls::Call;
use core::fmt;
use core::time::Duration;
use std::path::PathBuf;

/// Which stack a script runs against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BackendKind {
    /// The Linux kernel, in real time.
    Kernel,
    /// Ginnel's engine, in virtual time.
    Ginnel,
}

impl BackendKind {
    /// Name in directives, blocks and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Ginnel => "ginnel",
        }
    }
}

/// IP version of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl IpVersion {
    /// Name in directives, blocks and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
        }
    }

    /// Bytes of the IP and TCP headers without options: what an MTU and the largest segment differ by.
    pub const fn header_bytes(self) -> u32 {
        match self {
            Self::V4 => 40,
            Self::V6 => 60,
        }
    }
}

/// One run of a script: against which stack, over which IP version.
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

/// A place where the two stacks may differ, as the script declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Which stack departs from what the RFC (or the other stack) does.
    pub backend: BackendKind,
    /// What it does, and the section that decides.
    pub reason: String,
}

/// The comment directives at the head of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directives {
    /// IP versions to run over (`// ip: v4|v6|both`).
    pub ip: Vec<IpVersion>,
    /// Sysctls without `net.` prefix stripped, in order (`// sysctl: net.ipv4.tcp_sack=0`).
    pub sysctls: Vec<(String, String)>,
    /// Declared differences (`// differs: kernel …`).
    pub differs: Vec<Difference>,
    /// The only backend that can run it (`// only: kernel reason`).
    pub only: Option<Difference>,
    /// How far the time of a packet may be off (`// tolerance: 4ms`).
    pub tolerance: Duration,
    /// Our link's MTU (`// mtu: 1500`).
    pub mtu: u32,
    /// Added to the remote side's script sequence numbers on the wire (`// isn: 0xfffffff0`).
    pub remote_isn: u32,
    /// Whether bytes are checked against the pattern (`// payload: any` turns it off).
    pub check_payload: bool,
}

/// The sysctl that chooses the congestion control.
pub const CONGESTION_CONTROL: &str = "net.ipv4.tcp_congestion_control";

impl Directives {
    /// The congestion control of the run, in Linux's name.
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
        }
    }
}

/// A parsed script.
#[derive(Clone, Debug)]
pub struct Script {
    /// Where it was read from.
    pub path: PathBuf,
    /// The first comment line: what the script shows, with the RFC section.
    pub summary: String,
    /// Directives.
    pub directives: Directives,
    /// Events and conditional blocks, in order.
    pub items: Vec<Item>,
}

/// An event or a block that only some runs contain.
#[derive(Clone, Debug)]
pub enum Item {
    /// An event of every run.
    Event(Event),
    /// `@kernel { … }`, `@v4 { … }`, …
    Block(Condition, Vec<Item>),
}

/// When a block belongs to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Only against this stack.
    Backend(BackendKind),
    /// Only over this IP version.
    Ip(IpVersion),
}

impl Condition {
    /// Whether a run satisfies it.
    pub fn holds(self, target: Target) -> bool {
        match self {
            Self::Backend(backend) => backend == target.backend,
            Self::Ip(ip) => ip == target.ip,
        }
    }
}

impl Script {
    /// The events of one run, blocks resolved.
    pub fn events(&self, target: Target) -> Vec<Event> {
        let mut events = Vec::new();
        collect(&self.items, target, &mut events);
        events
    }

    /// The runs the script asks for.
    pub fn targets(&self) -> Vec<Target> {
        let backends = [BackendKind::Kernel, BackendKind::Ginnel];
        let wanted = |b: &BackendKind| self.directives.only.as_ref().is_none_or(|only| only.backend == *b);
        let backends: Vec<_> = backends.into_iter().filter(wanted).collect();
        let with_ip =
            |ip: &IpVersion| backends.iter().map(|&backend| Target { backend, ip: *ip }).collect::<Vec<_>>();
        self.directives.ip.iter().flat_map(with_ip).collect()
    }

    /// A lower bound of the time a run takes, from the times the script states.
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

/// When an event happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// `+0.1` or `+0.1~+0.2`: after the event before it.
    Relative {
        /// Earliest.
        from: Duration,
        /// Latest, if it is a range.
        to: Option<Duration>,
    },
    /// `0.1` or `0.1~0.2`: since the start of the script.
    Absolute {
        /// Earliest.
        from: Duration,
        /// Latest, if it is a range.
        to: Option<Duration>,
    },
    /// `*`: whenever it comes.
    Any,
}

/// One line of a script.
#[derive(Clone, Debug)]
pub struct Event {
    /// Line in the file, from 1.
    pub line: u32,
    /// When.
    pub time: Time,
    /// When a blocking call returns (`+0...+0.3 connect(…)`), measured like `time`.
    pub until: Option<Duration>,
    /// What.
    pub kind: EventKind,
}

/// What an event is.
#[derive(Clone, Debug)]
pub enum EventKind {
    /// `<`: the script sends this packet to the stack.
    Inbound(Packet),
    /// `>`: the stack must send this packet.
    Outbound(Packet),
    /// The application calls.
    Call(Call),
    /// `%{ … }%`.
    Assert(Assertion),
}

/// A packet as written in a script.
#[derive(Clone, Debug, PartialEq)]
pub struct Packet {
    /// Which of the script's connections, from 1 (`<2 S …`).
    pub flow: u16,
    /// What it carries.
    pub body: PacketBody,
}

/// What a packet carries.
#[derive(Clone, Debug, PartialEq)]
pub enum PacketBody {
    /// A TCP segment.
    Tcp(Segment),
    /// An ICMP error about a segment of ours.
    Icmp(Icmp),
}

/// A TCP segment as written in a script. For an outbound one, `None` means "anything".
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Segment {
    /// `[ect0]`, `[noecn]`, …
    pub ecn: Option<Ecn>,
    /// `[ttl 5]`.
    pub ttl: Option<u8>,
    /// `[badcsum]`: the checksum is wrong on purpose (inbound only).
    pub bad_checksum: bool,
    /// `[doff 4]`: this data offset instead of the right one (inbound only).
    pub data_offset: Option<u8>,
    /// Flag bits as in the header.
    pub flags: Flags,
    /// Relative sequence number.
    pub seq: u32,
    /// Payload bytes.
    pub len: u32,
    /// Relative acknowledgement number; present exactly if the ACK flag is.
    pub ack: Option<u32>,
    /// Window as in the header, not scaled.
    pub window: Option<u16>,
    /// Urgent pointer.
    pub urgent: Option<u16>,
    /// Options in order; `None` is `<...>`.
    pub options: Option<Vec<TcpOpt>>,
}

/// TCP flags, header bits 4 to 15 low to high.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u16);

impl Flags {
    /// No more data from sender.
    pub const FIN: Self = Self(0x01);
    /// Synchronize.
    pub const SYN: Self = Self(0x02);
    /// Reset.
    pub const RST: Self = Self(0x04);
    /// Push.
    pub const PSH: Self = Self(0x08);
    /// Acknowledgement number is valid.
    pub const ACK: Self = Self(0x10);
    /// Urgent pointer is valid.
    pub const URG: Self = Self(0x20);
    /// ECN echo.
    pub const ECE: Self = Self(0x40);
    /// Congestion window reduced.
    pub const CWR: Self = Self(0x80);
    /// Accurate ECN.
    pub const AE: Self = Self(0x100);

    /// All bits of `other` are set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Sets the bits of `other`.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Letters in the order scripts use, with the bit of each.
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
    /// ECT(0) or ECT(1): outbound only.
    AnyEct,
}

/// One TCP option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TcpOpt {
    /// End of options.
    Eol,
    /// Padding.
    Nop,
    /// Largest segment; `None` is `mss *`.
    Mss(Option<MssValue>),
    /// Window shift; `None` is `wscale *`.
    Wscale(Option<u8>),
    /// SACK permitted.
    SackOk,
    /// SACK blocks, relative to the acknowledged direction.
    Sack(Vec<(u32, u32)>),
    /// Timestamps.
    Ts {
        /// Value.
        val: TsValue,
        /// Echo.
        ecr: TsValue,
    },
    /// `hex 1e02`: bytes as they are, kind and length included.
    Raw(Vec<u8>),
}

/// A value of the MSS option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MssValue {
    /// This number.
    Number(u16),
    /// `MSS`: the link's MTU without IP and TCP headers of this run's IP version.
    Link,
}

/// A timestamp in a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TsValue {
    /// This number: on the stack's clock relative to its first timestamp on the flow, on the remote side's as it is.
    Number(u32),
    /// `last`: inbound `ecr` repeats the newest value the stack sent, minus nothing.
    Last,
    /// `*`: outbound only, anything.
    Any,
}

/// An ICMP error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Icmp {
    /// What it says.
    pub kind: IcmpKind,
    /// Next-hop MTU for `frag_needed`.
    pub mtu: u32,
    /// Flags of the quoted segment.
    pub flags: Flags,
    /// Relative sequence number of the quoted segment.
    pub seq: u32,
    /// Payload bytes of the quoted segment.
    pub len: u32,
    /// Hop limit of the message.
    pub ttl: u8,
    /// Hop limit that the segment had left when it was quoted.
    pub quoted_ttl: u8,
}

/// Kinds of ICMP errors, named for IPv4; over IPv6 each becomes its counterpart there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpKind {
    /// Network unreachable; no route to destination.
    NetUnreachable,
    /// Host unreachable; address unreachable.
    HostUnreachable,
    /// Protocol unreachable; parameter problem, unrecognized next header.
    ProtocolUnreachable,
    /// Port unreachable.
    PortUnreachable,
    /// Fragmentation needed; packet too big.
    FragNeeded,
    /// Source route failed (IPv4); reject route to destination (IPv6).
    SourceRouteFailed,
    /// Communication administratively prohibited.
    AdminProhibited,
    /// Hop limit exceeded in transit.
    TtlExceeded,
    /// Fragment reassembly time exceeded.
    ReassemblyTimeExceeded,
    /// Source quench (IPv4 only).
    SourceQuench,
    /// Parameter problem, erroneous header field.
    ParameterProblem,
}

impl IcmpKind {
    /// Every kind with its words in a script.
    pub const NAMES: [(&'static str, Self); 11] = [
        ("unreachable net_unreachable", Self::NetUnreachable),
        ("unreachable host_unreachable", Self::HostUnreachable),
        ("unreachable protocol_unreachable", Self::ProtocolUnreachable),
        ("unreachable port_unreachable", Self::PortUnreachable),
        ("unreachable frag_needed", Self::FragNeeded),
        ("unreachable source_route_failed", Self::SourceRouteFailed),
        ("unreachable admin_prohibited", Self::AdminProhibited),
        ("time_exceeded ttl", Self::TtlExceeded),
        ("time_exceeded reassembly", Self::ReassemblyTimeExceeded),
        ("source_quench", Self::SourceQuench),
        ("parameter_problem", Self::ParameterProblem),
    ];
}
