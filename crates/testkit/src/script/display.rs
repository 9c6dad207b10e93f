//! Formats packets in the syntax of scripts.

use super::ast::{Ecn, Flags, Icmp, IcmpKind, MssValue, Packet, PacketBody, Segment, TcpOpt, TsValue};
use core::fmt;

impl fmt::Display for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("-");
        }
        let set = Self::LETTERS.iter().filter(|(_, bit)| self.has(*bit));
        set.map(|(letter, _)| letter).try_for_each(|letter| write!(f, "{letter}"))
    }
}

impl fmt::Display for TsValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(n) => write!(f, "{n}"),
            Self::Last => f.write_str("last"),
            Self::Any => f.write_str("*"),
        }
    }
}

impl fmt::Display for TcpOpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eol => f.write_str("eol"),
            Self::Nop => f.write_str("nop"),
            Self::Mss(None) => f.write_str("mss *"),
            Self::Mss(Some(MssValue::Link)) => f.write_str("mss MSS"),
            Self::Mss(Some(MssValue::Number(n))) => write!(f, "mss {n}"),
            Self::Wscale(None) => f.write_str("wscale *"),
            Self::Wscale(Some(n)) => write!(f, "wscale {n}"),
            Self::SackOk => f.write_str("sackOK"),
            Self::Sack(blocks) => {
                f.write_str("sack")?;
                blocks.iter().try_for_each(|(left, right)| write!(f, " {left}:{right}"))
            }
            Self::Ts { val, ecr } => write!(f, "TS val {val} ecr {ecr}"),
            Self::Raw(bytes) => {
                f.write_str("hex ")?;
                bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
            }
        }
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ecn {
            None | Some(Ecn::NotEct) => {}
            Some(Ecn::Ect0) => f.write_str("[ect0] ")?,
            Some(Ecn::Ect1) => f.write_str("[ect1] ")?,
            Some(Ecn::Ce) => f.write_str("[ce] ")?,
            Some(Ecn::AnyEct) => f.write_str("[ect] ")?,
        }
        match self.dont_fragment {
            None | Some(true) => {}
            Some(false) => f.write_str("[nodf] ")?,
        }
        if self.bad_checksum {
            f.write_str("[badcsum] ")?;
        }
        if let Some(data_offset) = self.data_offset {
            write!(f, "[doff {data_offset}] ")?;
        }
        write!(f, "{} {}:{}({})", self.flags, self.seq, self.seq.wrapping_add(self.len), self.len)?;
        if let Some(ack) = self.ack {
            write!(f, " ack {ack}")?;
        }
        if let Some(window) = self.window {
            write!(f, " win {window}")?;
        }
        if let Some(urgent) = self.urgent {
            write!(f, " urg {urgent}")?;
        }
        match &self.options {
            None => f.write_str(" <...>"),
            Some(options) if options.is_empty() => Ok(()),
            Some(options) => {
                let texts: Vec<_> = options.iter().map(ToString::to_string).collect();
                write!(f, " <{}>", texts.join(","))
            }
        }
    }
}

impl fmt::Display for Icmp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = IcmpKind::NAMES.iter().find(|(_, kind)| *kind == self.kind).map_or("?", |(name, _)| name);
        f.write_str("icmp ")?;
        if self.ttl != 64 {
            write!(f, "[ttl {}] ", self.ttl)?;
        }
        write!(f, "{name} ")?;
        if self.mtu != 0 {
            write!(f, "mtu {} ", self.mtu)?;
        }
        f.write_str("[")?;
        if self.quoted_ttl != 64 {
            write!(f, "[ttl {}] ", self.quoted_ttl)?;
        }
        write!(f, "{} {}:{}({})]", self.flags, self.seq, self.seq.wrapping_add(self.len), self.len)
    }
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.flow != 1 {
            write!(f, "{}", self.flow)?;
        }
        match &self.body {
            PacketBody::Tcp(segment) => write!(f, " {segment}"),
            PacketBody::Icmp(icmp) => write!(f, " {icmp}"),
        }
    }
}
