//! Capture filters: a small subset of tcpdump's language.
//!
//! ```text
//! expression = term { "or" term }
//! term       = factor { "and" factor }
//! factor     = "not" factor | "(" expression ")" | primitive
//! primitive  = protocol [ [ dir ] "port" number ]
//!            | [ dir ] "port" number | [ dir ] "host" address | [ dir ] "net" address "/" length
//! protocol   = "ip" | "ip6" | "arp" | "icmp" | "icmp6" | "tcp" | "udp"
//! dir        = "src" | "dst"
//! ```
//!
//! `port` applies to TCP and UDP; of a fragmented packet, only the first fragment has ports. `host` and `net`
//! also apply to ARP. The filter skips one VLAN tag.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Maximum length of an expression in bytes, which also bounds the nesting depth.
const BYTES_MAX: usize = 1024;
/// Maximum number of IPv6 extension headers that are skipped.
const EXTENSIONS_MAX: usize = 8;

/// A compiled expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    expression: Expression,
}

/// Error in an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterError {
    /// Byte offset of the error in the expression.
    pub at: usize,
    /// Kind of the error.
    pub kind: FilterErrorKind,
}

/// Kinds of errors in an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FilterErrorKind {
    /// A word other than the valid ones.
    Unexpected {
        /// The word; empty at the end of the expression.
        found: String,
        /// The valid words at this position.
        expected: &'static str,
    },
    /// The word is not an IP address.
    BadAddress(String),
    /// The word is not a number from 0 to 65535.
    BadPort(String),
    /// The word is not an address with a prefix length.
    BadNetwork(String),
    /// The expression is longer than 1024 bytes.
    TooLong,
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}: ", self.at)?;
        match &self.kind {
            FilterErrorKind::Unexpected { found, expected } if found.is_empty() => {
                write!(f, "expected {expected}, but the expression ends")
            }
            FilterErrorKind::Unexpected { found, expected } => {
                write!(f, "expected {expected}, found {found:?}")
            }
            FilterErrorKind::BadAddress(word) => write!(f, "{word:?} is not an IP address"),
            FilterErrorKind::BadPort(word) => write!(f, "{word:?} is not a port from 0 to 65535"),
            FilterErrorKind::BadNetwork(word) => write!(f, "{word:?} is not a network like 10.0.0.0/8"),
            FilterErrorKind::TooLong => write!(f, "longer than {BYTES_MAX} bytes"),
        }
    }
}

impl std::error::Error for FilterError {}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Expression {
    Or(Vec<Expression>),
    And(Vec<Expression>),
    Not(Box<Expression>),
    Protocol(Protocol),
    Host(DirQualifier, IpAddr),
    Net(DirQualifier, IpAddr, u8),
    Port(DirQualifier, u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Ip,
    Ip6,
    Arp,
    /// A number of a protocol above IP, and the IP version that it belongs to (`None`: both).
    Transport(u8, Option<IpVersion>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IpVersion {
    Four,
    Six,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirQualifier {
    Source,
    Destination,
    Either,
}

const ETHERTYPE_IP: u16 = 0x0800;
const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_IP6: u16 = 0x86dd;
const TCP: u8 = 6;
const UDP: u8 = 17;

impl FromStr for Filter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Self, FilterError> {
        Self::parse(text)
    }
}

impl Filter {
    /// Compiles an expression.
    ///
    /// # Errors
    /// Gives the position of the error and the words that are valid there.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        if text.len() > BYTES_MAX {
            return Err(FilterError { at: BYTES_MAX, kind: FilterErrorKind::TooLong });
        }
        let mut parser = Parser { text, at: 0 };
        let expression = parser.expression()?;
        match parser.peek() {
            "" => Ok(Self { expression }),
            _ => Err(parser.unexpected("and, or")),
        }
    }

    /// Returns whether the filter accepts the frame, which may consist of any bytes.
    #[must_use]
    pub fn matches(&self, frame: &[u8]) -> bool {
        self.expression.matches(&PacketFields::of(frame))
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn skip_blanks(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
    }

    /// Returns the next word or parenthesis; empty at the end.
    fn peek(&mut self) -> &'a str {
        self.skip_blanks();
        let rest = &self.text[self.at..];
        let parenthesis = |c: char| c == '(' || c == ')';
        match rest.find(|c: char| parenthesis(c) || c.is_whitespace()) {
            Some(0) => &rest[..1],
            Some(end) => &rest[..end],
            None => rest,
        }
    }

    fn next(&mut self) -> &'a str {
        let word = self.peek();
        self.at += word.len();
        word
    }

    fn accept_word(&mut self, word: &str) -> bool {
        let found = self.peek() == word;
        if found {
            self.at += word.len();
        }
        found
    }

    fn unexpected(&mut self, expected: &'static str) -> FilterError {
        let found = self.peek().to_string();
        FilterError { at: self.at, kind: FilterErrorKind::Unexpected { found, expected } }
    }

    /// Parses an argument.
    fn argument<T>(
        &mut self,
        parse: impl Fn(&str) -> Option<T>,
        error: impl Fn(String) -> FilterErrorKind,
    ) -> Result<T, FilterError> {
        let word = self.peek();
        let value = parse(word).ok_or_else(|| FilterError { at: self.at, kind: error(word.to_string()) })?;
        self.next();
        Ok(value)
    }

    fn expression(&mut self) -> Result<Expression, FilterError> {
        let mut terms = vec![self.term()?];
        while self.accept_word("or") {
            terms.push(self.term()?);
        }
        Ok(if terms.len() == 1 { terms.remove(0) } else { Expression::Or(terms) })
    }

    fn term(&mut self) -> Result<Expression, FilterError> {
        let mut factors = vec![self.factor()?];
        while self.accept_word("and") {
            factors.push(self.factor()?);
        }
        Ok(if factors.len() == 1 { factors.remove(0) } else { Expression::And(factors) })
    }

    fn factor(&mut self) -> Result<Expression, FilterError> {
        if self.accept_word("not") {
            return Ok(Expression::Not(Box::new(self.factor()?)));
        }
        if self.accept_word("(") {
            let expression = self.expression()?;
            return if self.accept_word(")") { Ok(expression) } else { Err(self.unexpected("and, or, )")) };
        }
        self.primitive()
    }

    fn primitive(&mut self) -> Result<Expression, FilterError> {
        let Some(protocol) = protocol_named(self.peek()) else { return self.qualified_primitive() };
        self.next();
        let protocol = Expression::Protocol(protocol);
        // `tcp port 80` and `tcp src port 80` need no `and`.
        if ["src", "dst", "port"].contains(&self.peek()) {
            let side = self.dir_qualifier();
            if !self.accept_word("port") {
                return Err(self.unexpected("port"));
            }
            return Ok(Expression::And(vec![protocol, Expression::Port(side, self.port()?)]));
        }
        Ok(protocol)
    }

    fn qualified_primitive(&mut self) -> Result<Expression, FilterError> {
        let side = self.dir_qualifier();
        if self.accept_word("port") {
            return Ok(Expression::Port(side, self.port()?));
        }
        if self.accept_word("host") {
            let host = self.argument(|word| word.parse().ok(), FilterErrorKind::BadAddress)?;
            return Ok(Expression::Host(side, host));
        }
        if self.accept_word("net") {
            let (address, length) = self.argument(parse_network, FilterErrorKind::BadNetwork)?;
            return Ok(Expression::Net(side, address, length));
        }
        Err(self.unexpected(if side == DirQualifier::Either {
            "not, (, src, dst, host, net, port, ip, ip6, arp, icmp, icmp6, tcp, udp"
        } else {
            "host, net, port"
        }))
    }

    fn dir_qualifier(&mut self) -> DirQualifier {
        match self.peek() {
            "src" => {
                self.next();
                DirQualifier::Source
            }
            "dst" => {
                self.next();
                DirQualifier::Destination
            }
            _ => DirQualifier::Either,
        }
    }

    fn port(&mut self) -> Result<u16, FilterError> {
        self.argument(|word| word.parse().ok(), FilterErrorKind::BadPort)
    }
}

fn protocol_named(word: &str) -> Option<Protocol> {
    Some(match word {
        "ip" => Protocol::Ip,
        "ip6" => Protocol::Ip6,
        "arp" => Protocol::Arp,
        "icmp" => Protocol::Transport(1, Some(IpVersion::Four)),
        "icmp6" => Protocol::Transport(58, Some(IpVersion::Six)),
        "tcp" => Protocol::Transport(TCP, None),
        "udp" => Protocol::Transport(UDP, None),
        _ => return None,
    })
}

fn parse_network(word: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = word.split_once('/')?;
    let (address, length): (IpAddr, u8) = (address.parse().ok()?, length.parse().ok()?);
    (length <= if address.is_ipv4() { 32 } else { 128 }).then_some((address, length))
}

impl Expression {
    fn matches(&self, fields: &PacketFields) -> bool {
        let on_side = |side: &DirQualifier, source: bool, destination: bool| match side {
            DirQualifier::Source => source,
            DirQualifier::Destination => destination,
            DirQualifier::Either => source || destination,
        };
        match self {
            Self::Or(terms) => terms.iter().any(|term| term.matches(fields)),
            Self::And(factors) => factors.iter().all(|factor| factor.matches(fields)),
            Self::Not(factor) => !factor.matches(fields),
            Self::Protocol(protocol) => protocol.matches(fields),
            Self::Host(side, host) => {
                on_side(side, fields.source == Some(*host), fields.destination == Some(*host))
            }
            Self::Net(side, net, length) => {
                let inside =
                    |address: Option<IpAddr>| address.is_some_and(|a| is_same_network(a, *net, *length));
                on_side(side, inside(fields.source), inside(fields.destination))
            }
            Self::Port(side, port) => {
                let ports = fields.ports.map(|(source, destination)| (source == *port, destination == *port));
                ports.is_some_and(|(source, destination)| on_side(side, source, destination))
            }
        }
    }
}

impl Protocol {
    fn matches(self, fields: &PacketFields) -> bool {
        match self {
            Self::Ip => fields.ethertype == ETHERTYPE_IP,
            Self::Ip6 => fields.ethertype == ETHERTYPE_IP6,
            Self::Arp => fields.ethertype == ETHERTYPE_ARP,
            Self::Transport(number, version) => {
                let version = match version {
                    None => true,
                    Some(IpVersion::Four) => fields.ethertype == ETHERTYPE_IP,
                    Some(IpVersion::Six) => fields.ethertype == ETHERTYPE_IP6,
                };
                version && fields.protocol == Some(number)
            }
        }
    }
}

fn is_same_network(a: IpAddr, b: IpAddr, length: u8) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= length.into(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= length.into(),
        _ => false,
    }
}

/// Fields of a frame that expressions refer to. They are parsed leniently, because a malformed frame is
/// especially worth capturing.
#[derive(Debug, Default)]
struct PacketFields {
    ethertype: u16,
    source: Option<IpAddr>,
    destination: Option<IpAddr>,
    protocol: Option<u8>,
    ports: Option<(u16, u16)>,
}

impl PacketFields {
    fn of(frame: &[u8]) -> Self {
        let mut fields = Self::default();
        let Some(mut ethertype) = be16(frame, 12) else { return fields };
        let mut at = 14;
        if ethertype == ETHERTYPE_VLAN {
            (ethertype, at) = (be16(frame, 16).unwrap_or(0), 18);
        }
        fields.ethertype = ethertype;
        let packet = frame.get(at..).unwrap_or_default();
        match ethertype {
            ETHERTYPE_IP => fields.read_ip(packet),
            ETHERTYPE_IP6 => fields.read_ip6(packet),
            ETHERTYPE_ARP => {
                (fields.source, fields.destination) = (address4(packet, 14), address4(packet, 24));
            }
            _ => {}
        }
        fields
    }

    fn read_ip(&mut self, packet: &[u8]) {
        (self.source, self.destination) = (address4(packet, 12), address4(packet, 16));
        self.protocol = packet.get(9).copied();
        let first_fragment = be16(packet, 6).is_some_and(|field| field & 0x1fff == 0);
        if first_fragment {
            self.read_ports(packet, usize::from(packet[0] & 0xf) * 4);
        }
    }

    fn read_ip6(&mut self, packet: &[u8]) {
        (self.source, self.destination) = (address6(packet, 8), address6(packet, 24));
        let (mut next, mut at) = (packet.get(6).copied(), 40);
        for _ in 0..EXTENSIONS_MAX {
            let Some(extension @ (0 | 43 | 44 | 51 | 60)) = next else { break };
            let length = packet.get(at + 1).copied().map_or(0, usize::from);
            next = packet.get(at).copied();
            match extension {
                44 if be16(packet, at + 2).is_none_or(|field| field & 0xfff8 != 0) => {
                    self.protocol = next;
                    return;
                }
                44 => at += 8,
                51 => at += (length + 2) * 4,
                _ => at += (length + 1) * 8,
            }
        }
        self.protocol = next;
        self.read_ports(packet, at);
    }

    fn read_ports(&mut self, packet: &[u8], at: usize) {
        if matches!(self.protocol, Some(TCP | UDP)) {
            self.ports = be16(packet, at).zip(be16(packet, at + 2));
        }
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.first_chunk().map(|bytes| u16::from_be_bytes(*bytes))
}

fn address4(bytes: &[u8], at: usize) -> Option<IpAddr> {
    bytes.get(at..at + 4)?.first_chunk::<4>().map(|bytes| Ipv4Addr::from(*bytes).into())
}

fn address6(bytes: &[u8], at: usize) -> Option<IpAddr> {
    bytes.get(at..at + 16)?.first_chunk::<16>().map(|bytes| Ipv6Addr::from(*bytes).into())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tcp4(source: [u8; 4], destination: [u8; 4], ports: (u16, u16)) -> Vec<u8> {
        let mut frame = vec![0; 54];
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[23] = TCP;
        frame[26..30].copy_from_slice(&source);
        frame[30..34].copy_from_slice(&destination);
        frame[34..36].copy_from_slice(&ports.0.to_be_bytes());
        frame[36..38].copy_from_slice(&ports.1.to_be_bytes());
        frame
    }

    /// Returns a UDP packet with a hop-by-hop header.
    fn udp6(ports: (u16, u16)) -> Vec<u8> {
        let mut frame = vec![0; 14 + 40 + 8 + 8];
        frame[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
        frame[22..38].copy_from_slice(&"fd00::1".parse::<Ipv6Addr>().unwrap().octets());
        frame[38..54].copy_from_slice(&"fd00::2".parse::<Ipv6Addr>().unwrap().octets());
        frame[54] = UDP;
        frame[62..64].copy_from_slice(&ports.0.to_be_bytes());
        frame[64..66].copy_from_slice(&ports.1.to_be_bytes());
        frame
    }

    fn matches(filter: &str, frame: &[u8]) -> bool {
        Filter::parse(filter).unwrap_or_else(|e| panic!("{filter}: {e}")).matches(frame)
    }

    #[test]
    fn primitives_and_operators_select_frames() {
        let frame = tcp4([10, 0, 0, 1], [10, 0, 0, 2], (5000, 80));
        for filter in [
            "tcp",
            "ip",
            "not udp",
            "port 80",
            "tcp port 80",
            "tcp dst port 80",
            "dst port 80",
            "src port 5000",
            "host 10.0.0.1",
            "host 10.0.0.2",
            "src host 10.0.0.1",
            "dst host 10.0.0.2",
            "net 10.0.0.0/8",
            "tcp port 80 and host 10.0.0.1",
            "udp or tcp",
            "not (udp or arp)",
            "not not tcp",
            "udp and port 1 or tcp",
            "tcp and (port 1 or port 80)",
            " ( tcp )and(port 80) ",
            "net 0.0.0.0/0",
        ] {
            assert!(matches(filter, &frame), "{filter}");
        }
        for filter in [
            "udp",
            "ip6",
            "arp",
            "icmp",
            "icmp6",
            "src port 80",
            "udp port 80",
            "host 10.0.0.3",
            "not tcp",
            "src host 10.0.0.2",
            "net 10.0.1.0/24",
            "net ::/0",
            "tcp and udp",
            "tcp and (port 1 or port 2)",
            "host ::1",
        ] {
            assert!(!matches(filter, &frame), "{filter}");
        }
    }

    #[test]
    fn ports_after_extension_headers_are_found() {
        assert!(matches("udp dst port 53 and src host fd00::1 and net fd00::/16", &udp6((9, 53))));
        let mut tagged = tcp4([10, 0, 0, 1], [10, 0, 0, 2], (5000, 80));
        tagged.splice(12..12, [0x81, 0, 0, 7]);
        assert!(matches("tcp port 80 and host 10.0.0.2", &tagged));
    }

    #[test]
    fn later_fragments_have_no_ports() {
        let mut frame = tcp4([10, 0, 0, 1], [10, 0, 0, 2], (5000, 80));
        frame[21] = 1;
        assert!(!matches("port 80", &frame));
        assert!(matches("tcp", &frame));
        let mut frame = udp6((9, 53));
        frame[20] = 44;
        assert!(matches("udp port 53", &frame));
        frame[57] = 8;
        assert!(!matches("udp port 53", &frame));
        assert!(matches("udp", &frame));
    }

    #[test]
    fn arp_matches_hosts() {
        let mut frame = vec![0; 42];
        frame[12..14].copy_from_slice(&[8, 6]);
        frame[28..32].copy_from_slice(&[10, 0, 0, 1]);
        frame[38..42].copy_from_slice(&[10, 0, 0, 2]);
        assert!(matches("arp and src host 10.0.0.1 and dst host 10.0.0.2", &frame));
        assert!(!matches("ip or port 0", &frame));
    }

    #[test]
    fn errors_name_the_position() {
        let message = |text: &str| Filter::parse(text).expect_err(text).to_string();
        assert_eq!(message("tcp port http"), "at byte 9: \"http\" is not a port from 0 to 65535");
        assert_eq!(message("port 65536"), "at byte 5: \"65536\" is not a port from 0 to 65535");
        assert_eq!(message("host example"), "at byte 5: \"example\" is not an IP address");
        assert_eq!(message("net 10.0.0.0/33"), "at byte 4: \"10.0.0.0/33\" is not a network like 10.0.0.0/8");
        assert_eq!(message("tcp udp"), "at byte 4: expected and, or, found \"udp\"");
        assert_eq!(message("(tcp"), "at byte 4: expected and, or, ), but the expression ends");
        assert_eq!(message("src tcp"), "at byte 4: expected host, net, port, found \"tcp\"");
        assert_eq!(message("tcp src host 1.2.3.4"), "at byte 8: expected port, found \"host\"");
        assert!(message("").starts_with("at byte 0: expected not, ("));
        assert!(message("tcp and").starts_with("at byte 7: expected not"));
        assert_eq!(message(&"(".repeat(2000)), "at byte 1024: longer than 1024 bytes");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
        #[test]
        fn random_filters_and_frames_do_not_panic(text in "(\\(|\\)| |not|tcp|port|80|and|or|host|::1|é){0,30}", frame: Vec<u8>) {
            if let Ok(filter) = Filter::parse(&text) {
                let _ = filter.matches(&frame);
            }
            for ethertype in [ETHERTYPE_IP, ETHERTYPE_IP6, ETHERTYPE_ARP, ETHERTYPE_VLAN] {
                let mut frame = [&[0; 12], &ethertype.to_be_bytes()[..], &frame].concat();
                let _ = PacketFields::of(&frame);
                frame.truncate(15);
                let _ = PacketFields::of(&frame);
            }
        }
    }
}
