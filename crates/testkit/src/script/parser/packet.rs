//! Parses packets: `S. 0:0(0) ack 1 win 65535 <mss 1460>` and `icmp unreachable frag_needed mtu 1200
//! [1:1001(1000)]`.

use crate::script::ast::{
    Ecn, Flags, Icmp, IcmpKind, MssValue, Packet, PacketBody, Segment, TcpOpt, TsValue,
};
use crate::script::scanner::{ParseResult, Scanner};

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the script to the stack.
    Inbound,
    /// From the stack.
    Outbound,
}

/// Parses the text after `<` or `>`.
pub fn parse(s: &mut Scanner<'_>, direction: Direction) -> ParseResult<Packet> {
    // The flow number follows the arrow without a space.
    let flow = if s.peek_here().is_some_and(|c| c.is_ascii_digit()) { s.number_as()? } else { 1 };
    if flow == 0 {
        return s.error("flows are numbered from 1");
    }
    let body = if s.take_word("icmp") {
        if direction == Direction::Outbound {
            return s.error("a TCP stack sends no ICMP errors; only inbound ones are supported");
        }
        PacketBody::Icmp(icmp(s)?)
    } else {
        PacketBody::Tcp(segment(s, direction)?)
    };
    Ok(Packet { flow, body })
}

fn segment(s: &mut Scanner<'_>, direction: Direction) -> ParseResult<Segment> {
    let mut segment = Segment::default();
    while s.take("[") {
        modifier(s, direction, &mut segment)?;
        s.expect("]")?;
    }
    segment.flags = flags(s)?;
    (segment.seq, segment.len) = sequence(s)?;
    let mut options = None;
    loop {
        if s.take_word("ack") {
            segment.ack = Some(s.number_as()?);
        } else if s.take_word("win") {
            if !(direction == Direction::Outbound && s.take("*")) {
                segment.window = Some(s.number_as()?);
            }
        } else if s.take_word("urg") {
            segment.urgent = Some(s.number_as()?);
        } else if s.take("<...>") {
            if direction == Direction::Inbound {
                return s.error("`<...>` is for outbound packets");
            }
            break;
        } else if s.take("<") {
            options = Some(tcp_options(s, direction)?);
            break;
        } else {
            options = Some(Vec::new());
            break;
        }
    }
    segment.options = options;
    if segment.flags.has(Flags::ACK) != segment.ack.is_some() {
        return s.error("flag `.` and `ack N` require each other");
    }
    Ok(segment)
}

fn modifier(s: &mut Scanner<'_>, direction: Direction, segment: &mut Segment) -> ParseResult<()> {
    match s.identifier()? {
        "noecn" => segment.ecn = Some(Ecn::NotEct),
        "ect0" => segment.ecn = Some(Ecn::Ect0),
        "ect1" => segment.ecn = Some(Ecn::Ect1),
        "ce" => segment.ecn = Some(Ecn::Ce),
        "ect" if direction == Direction::Outbound => segment.ecn = Some(Ecn::AnyEct),
        "df" if direction == Direction::Outbound => segment.dont_fragment = Some(true),
        "nodf" if direction == Direction::Outbound => segment.dont_fragment = Some(false),
        "ttl" => segment.ttl = Some(s.number_as()?),
        "badcsum" if direction == Direction::Inbound => segment.bad_checksum = true,
        "doff" if direction == Direction::Inbound => segment.data_offset = Some(s.number_as()?),
        other => return s.error(format!("unknown `[{other}]`")),
    }
    Ok(())
}

fn flags(s: &mut Scanner<'_>) -> ParseResult<Flags> {
    let text = s.take_while(|c| c == '.' || c == '-' || c.is_ascii_uppercase());
    if text.is_empty() {
        return s.expected("TCP flags such as `S.` or `P.` (`-` for none)");
    }
    let mut flags = Flags::default();
    for letter in text.chars().filter(|_| text != "-") {
        match Flags::LETTERS.iter().find(|(c, _)| *c == letter) {
            Some((_, bit)) if !flags.has(*bit) => flags = flags.with(*bit),
            _ => return s.error(format!("`{letter}` in `{text}` is not a TCP flag or is repeated")),
        }
    }
    Ok(flags)
}

/// Parses `first:end(length)`. Returns the first number and the length.
fn sequence(s: &mut Scanner<'_>) -> ParseResult<(u32, u32)> {
    let first: u32 = s.number_as()?;
    s.expect(":")?;
    let end: u32 = s.number_as()?;
    s.expect("(")?;
    let len: u32 = s.number_as()?;
    s.expect(")")?;
    if end.wrapping_sub(first) != len {
        return s.error(format!("{first}:{end} is {} bytes, not {len}", end.wrapping_sub(first)));
    }
    if len > 65_000 {
        return s.error("a packet holds at most 65,000 bytes of payload");
    }
    Ok((first, len))
}

fn tcp_options(s: &mut Scanner<'_>, direction: Direction) -> ParseResult<Vec<TcpOpt>> {
    let mut options = Vec::new();
    if s.take(">") {
        return Ok(options);
    }
    loop {
        options.push(tcp_option(s, direction)?);
        if s.take(">") {
            return Ok(options);
        }
        s.expect(",")?;
    }
}

fn tcp_option(s: &mut Scanner<'_>, direction: Direction) -> ParseResult<TcpOpt> {
    let outbound = direction == Direction::Outbound;
    Ok(match s.identifier()? {
        "nop" => TcpOpt::Nop,
        "eol" => TcpOpt::Eol,
        "sackOK" => TcpOpt::SackOk,
        "mss" if outbound && s.take("*") => TcpOpt::Mss(None),
        "mss" if s.take_word("MSS") => TcpOpt::Mss(Some(MssValue::Link)),
        "mss" => TcpOpt::Mss(Some(MssValue::Number(s.number_as()?))),
        "wscale" if outbound && s.take("*") => TcpOpt::Wscale(None),
        "wscale" => TcpOpt::Wscale(Some(s.number_as()?)),
        "TS" => {
            s.expect("val")?;
            let val = timestamp(s, direction)?;
            s.expect("ecr")?;
            let ecr = timestamp(s, direction)?;
            TcpOpt::Ts { val, ecr }
        }
        "sack" => {
            let mut blocks = Vec::new();
            while s.at_digit() {
                let left = s.number_as()?;
                s.expect(":")?;
                blocks.push((left, s.number_as()?));
            }
            TcpOpt::Sack(blocks)
        }
        "hex" => TcpOpt::Raw(hex(s)?),
        // RFC 7413 §4.1.1: without a cookie, the option requests one.
        "FO" if s.looking_at(",") || s.looking_at(">") => TcpOpt::Raw(vec![FASTOPEN, 2]),
        "FO" => with_kind(FASTOPEN, &hex(s)?),
        "md5" => with_kind(MD5_SIGNATURE, &hex(s)?),
        other => return s.error(format!("unknown TCP option `{other}`")),
    })
}

/// Kind of the TCP Fast Open cookie (RFC 7413 §4.1.1).
const FASTOPEN: u8 = 34;
/// Kind of the MD5 signature (RFC 2385 §3.0).
const MD5_SIGNATURE: u8 = 19;

fn with_kind(kind: u8, value: &[u8]) -> TcpOpt {
    TcpOpt::Raw([&[kind, value.len() as u8 + 2], value].concat())
}

fn timestamp(s: &mut Scanner<'_>, direction: Direction) -> ParseResult<TsValue> {
    if direction == Direction::Outbound && s.take("*") {
        return Ok(TsValue::Any);
    }
    if direction == Direction::Inbound && s.take_word("last") {
        return Ok(TsValue::Last);
    }
    Ok(TsValue::Number(s.number_as()?))
}

fn hex(s: &mut Scanner<'_>) -> ParseResult<Vec<u8>> {
    let text = s.take_while(|c| c.is_ascii_hexdigit());
    let digit = |c: u8| (c as char).to_digit(16).unwrap_or(0) as u8;
    if text.is_empty() || !text.len().is_multiple_of(2) {
        return s.error("expected pairs of hexadecimal digits");
    }
    Ok(text.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect())
}

/// Parses an optional `[ttl 5]`; the default is 64.
fn hop_limit(s: &mut Scanner<'_>) -> ParseResult<u8> {
    if !s.take("[ttl ") {
        return Ok(64);
    }
    let ttl = s.number_as()?;
    s.expect("]")?;
    Ok(ttl)
}

fn icmp(s: &mut Scanner<'_>) -> ParseResult<Icmp> {
    let ttl = hop_limit(s)?;
    let mut name = s.identifier()?.to_string();
    if name == "unreachable" || name == "time_exceeded" {
        name = format!("{name} {}", s.identifier()?);
    }
    let Some((_, kind)) = IcmpKind::NAMES.iter().find(|(n, _)| *n == name) else {
        return s.error(format!("unknown ICMP error `{name}`"));
    };
    let mtu = if s.take_word("mtu") { s.number_as()? } else { 0 };
    s.expect("[")?;
    let quoted_ttl = hop_limit(s)?;
    let flags = if s.at_digit() { Flags::ACK } else { flags(s)? };
    let (seq, len) = sequence(s)?;
    s.expect("]")?;
    Ok(Icmp { kind: *kind, mtu, flags, seq, len, ttl, quoted_ttl })
}
