//! Options that are numbers, kept for each socket that was told one.

use super::table::{self, Kind, Reads, Row, Takes};
use super::{Flag, OptionValue, Options, Told};
use crate::file::Outbox;
use crate::note::Note;
use crate::sockaddr::Family;
use core::ffi::c_int;
use ginnel::{PathMtu, UdpOptions, priority};
use rustix::io::Errno;
use std::sync::Arc;

/// Values that differ from the first ones, by the row of the table. Sockets of one listener share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Words(Option<Arc<Vec<(&'static str, c_int)>>>);

impl Words {
    /// The value of an option, if it was set.
    pub fn get(&self, text: &'static str) -> Option<c_int> {
        self.0.as_ref()?.iter().find(|(of, _)| *of == text).map(|(_, value)| *value)
    }

    pub fn set(&mut self, text: &'static str, value: c_int) {
        let words = Arc::make_mut(self.0.get_or_insert_default());
        match words.iter_mut().find(|(of, _)| *of == text) {
            Some((_, old)) => *old = value,
            None => words.push((text, value)),
        }
    }
}

impl Note for Words {
    fn put(&self, out: &mut Vec<u8>) {
        let words = self.0.iter().flat_map(|words| words.iter());
        let named: Vec<(Vec<u8>, c_int)> =
            words.map(|(text, value)| (text.as_bytes().to_vec(), *value)).collect();
        named.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let mut words = Self::default();
        for (text, value) in <Vec<(Vec<u8>, c_int)>>::get(from)? {
            words.set(table::OPTIONS.iter().find(|row| row.text.as_bytes() == text)?.text, value);
        }
        Some(words)
    }
}

/// What is said to who asks for another protocol's option (`do_ip_getsockopt`, `ipv6_getsockopt`).
pub(super) fn foreign(family: Family) -> Errno {
    match family {
        Family::V4 => Errno::OPNOTSUPP,
        Family::V6 => Errno::NOPROTOOPT,
    }
}

impl Options {
    fn number(&self, row: &Row, first: c_int) -> c_int {
        self.words.get(row.text).unwrap_or(first)
    }

    /// Sets an option that has no place of its own.
    ///
    /// # Errors
    /// `ENOPROTOOPT` for those that are refused or do not exist, and the kernel's for values that are not taken.
    pub(super) fn set_word(
        &mut self,
        family: Family,
        level: c_int,
        name: c_int,
        value: &[u8],
    ) -> Result<(), Errno> {
        // These look at the length before they look at the option.
        let early = matches!(level, libc::SOL_SOCKET | libc::IPPROTO_TCP | libc::IPPROTO_UDP);
        let unknown = if early && value.len() < 4 { Errno::INVAL } else { Errno::NOPROTOOPT };
        let row = table::find(family, level, name).ok_or(unknown)?;
        match row.kind {
            Kind::Own => Err(unknown),
            Kind::Refused => Err(Errno::NOPROTOOPT),
            Kind::Fixed { reads, set, .. } => reads.read(value).and(set),
            Kind::Number { reads, takes, first } => {
                let value = takes.take(reads.read(value)?, self.number(row, first), first)?;
                // It has no effect there either.
                let value = if row.text == "TCP_THIN_DUPACK" { 0 } else { value };
                self.words.set(row.text, value);
                if row.text == "TCP_NOTSENT_LOWAT" {
                    self.note(Told::NotSentLowWater);
                }
                Ok(())
            }
        }
    }

    /// Asks for such an option.
    ///
    /// # Errors
    /// `ENOPROTOOPT`, and what the kernel says of those that cannot be asked for.
    pub(super) fn get_word(&self, family: Family, level: c_int, name: c_int) -> Result<OptionValue, Errno> {
        let Some(row) = table::find(family, level, name) else {
            let known =
                matches!(level, libc::SOL_SOCKET | libc::IPPROTO_IP | libc::IPPROTO_TCP | libc::IPPROTO_UDP);
            return Err(if known { Errno::NOPROTOOPT } else { foreign(family) });
        };
        match row.kind {
            Kind::Own | Kind::Refused => Err(Errno::NOPROTOOPT),
            Kind::Fixed { get, .. } => get.map(OptionValue::int),
            Kind::Number { first, .. } => Ok(OptionValue::int(self.number(row, first))),
        }
    }

    /// Whether an option of the table is set.
    pub fn is_on(&self, text: &'static str) -> bool {
        self.words.get(text).is_some_and(|value| value != 0)
    }

    /// What the engine is told of a UDP socket.
    pub fn of_datagrams(&self, family: Family) -> UdpOptions {
        let (class, hops) = match family {
            Family::V4 => (self.class, self.hops),
            Family::V6 => (self.class_v6, self.hops_v6),
        };
        UdpOptions {
            reuse_address: self.flag(Flag::ReuseAddress),
            reuse_port: self.flag(Flag::ReusePort),
            user: self.user,
            broadcast: self.flag(Flag::Broadcast),
            only_v6: family == Family::V6 && self.is_v6_only(),
            receive_bytes: None,
            hop_limit: u8::try_from(hops).ok(),
            tos: class,
            priority: self.link_priority(),
            reports_v4: self.is_on("IP_RECVERR"),
            reports_v6: family == Family::V6 && self.is_on("IPV6_RECVERR"),
            path_mtu: self.path_mtu(family),
            coalesces: self.is_on("UDP_GRO"),
        }
    }

    /// What a UDP socket's side here has to know.
    pub fn for_outbox(&self, family: Family, outbox: &mut Outbox) {
        outbox.refuses_long =
            matches!(self.path_mtu(family), PathMtu::Do | PathMtu::Probe | PathMtu::Interface);
        outbox.corks = self.is_on("UDP_CORK");
        // Cannot truncate: larger values are not taken.
        outbox.piece = self.words.get("UDP_SEGMENT").map_or(0, |bytes| bytes as u16);
    }

    /// What becomes of datagrams that are too long; of an IPv6 socket also of those over IPv4.
    fn path_mtu(&self, family: Family) -> PathMtu {
        let name = match family {
            Family::V4 => "IP_MTU_DISCOVER",
            Family::V6 => "IPV6_MTU_DISCOVER",
        };
        match self.words.get(name) {
            Some(0) => PathMtu::Ignore,
            Some(2) => PathMtu::Do,
            Some(3) => PathMtu::Probe,
            Some(4) => PathMtu::Interface,
            Some(5) => PathMtu::Omit,
            _ if family == Family::V6 && self.is_on("IPV6_DONTFRAG") => PathMtu::Do,
            _ => PathMtu::Want,
        }
    }

    /// Where `MSG_PEEK` reads, if it does not from the beginning (`SO_PEEK_OFF`).
    pub fn peek_offset(&self) -> Option<usize> {
        self.words.get("SO_PEEK_OFF").and_then(|offset| usize::try_from(offset).ok())
    }

    /// So much was peeked at, or taken (`sk_peek_offset_fwd`, `sk_peek_offset_bwd`).
    pub fn move_peek_offset(&mut self, forward: bool, bytes: usize) {
        if let Some(offset) = self.peek_offset() {
            let moved = if forward { offset.saturating_add(bytes) } else { offset.saturating_sub(bytes) };
            self.words.set("SO_PEEK_OFF", c_int::try_from(moved).unwrap_or(c_int::MAX));
        }
    }

    /// With how many bytes that were not sent nothing more is taken (`TCP_NOTSENT_LOWAT`).
    pub fn not_sent_low_water(&self) -> Option<u32> {
        // 0 is what the kernel is set to for all (`tcp_notsent_lowat`), which is as many as there can be unless somebody changes it.
        let bytes = self.words.get("TCP_NOTSENT_LOWAT")?.cast_unsigned();
        Some(bytes).filter(|bytes| !matches!(*bytes, 0 | u32::MAX))
    }

    /// The type of service, or traffic class; of an IPv6 socket each family has its own. With the former comes a priority (`__ip_sock_set_tos`).
    pub(super) fn set_class(&mut self, level: c_int, value: &[u8], datagrams: bool) -> Result<(), Errno> {
        if level == libc::IPPROTO_IP {
            // Bits of ECN are TCP's own.
            let class = Reads::Byte.read(value)? as u8 & if datagrams { 0xff } else { 0xfc };
            if class != self.class {
                self.class = class;
                self.set_priority(priority::of_tos(class).into());
            }
        } else {
            self.class_v6 = Takes::Class(0, 255).take(Reads::Four.read(value)?, 0, 0)? as u8;
        }
        self.note(Told::Class);
        Ok(())
    }

    /// Time to live, or hop limit, likewise; -1 is the stack's.
    pub(super) fn set_hops(&mut self, level: c_int, value: &[u8]) -> Result<(), Errno> {
        if level == libc::IPPROTO_IP {
            self.hops = Takes::OrDefault(1, 255).take(Reads::Byte.read(value)?, 0, -1)? as i16;
        } else {
            self.hops_v6 = Takes::OrDefault(0, 255).take(Reads::Four.read(value)?, 0, -1)? as i16;
        }
        self.note(Told::HopLimit);
        Ok(())
    }
}
