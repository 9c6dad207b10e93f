//! Integer options, stored only for sockets on which a program has set them.

use super::filter::FilterCopy;
use super::table::{self, AcceptedValues, IntFormat, OptionKind, OptionRow};
use super::{BoolOption, OptionValue, SocketOptionState, StackOption};
use crate::file::UdpSendState;
use crate::flow_labels::{LABEL_MASK as FLOW_LABEL_MASK, MANAGER};
use crate::sockaddr::Family;
use core::ffi::c_int;
use ginnel::broker::codec::Codec;
use ginnel::socket_filter::check_program;
use ginnel::{FlowLabel, PmtuDiscovery, UdpOptions, priority};
use rustix::io::Errno;
use std::sync::Arc;

/// Values that differ from the defaults, and programs. Sockets of one listener share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct IntOptions(Option<Arc<RareOptions>>);

#[derive(Clone, Debug, Default)]
struct RareOptions {
    /// Values by the name of their option.
    values: Vec<(&'static str, c_int)>,
    filter: FilterCopy,
    /// The program that the program has set for the sockets that share the address.
    group_program: Option<Arc<[u8]>>,
}

impl IntOptions {
    /// Returns the value of an option, if it was set.
    pub fn get(&self, linux_name: &'static str) -> Option<c_int> {
        self.0.as_ref()?.values.iter().find(|(of, _)| *of == linux_name).map(|(_, value)| *value)
    }

    pub fn set(&mut self, linux_name: &'static str, value: c_int) {
        let values = &mut Arc::make_mut(self.0.get_or_insert_default()).values;
        match values.iter_mut().find(|(of, _)| *of == linux_name) {
            Some((_, old)) => *old = value,
            None => values.push((linux_name, value)),
        }
    }

    /// Returns the filter, if there is one.
    pub fn filter(&self) -> Option<&FilterCopy> {
        self.0.as_ref().map(|options| &options.filter).filter(|filter| !filter.is_none())
    }

    pub fn set_filter(&mut self, filter: FilterCopy) {
        if !filter.is_none() || self.filter().is_some() {
            Arc::make_mut(self.0.get_or_insert_default()).filter = filter;
        }
    }

    /// Returns the program for the group of the socket, if this process has set one.
    pub fn group_program(&self) -> Option<&Arc<[u8]>> {
        self.0.as_ref()?.group_program.as_ref()
    }

    pub fn set_group_program(&mut self, program: Option<Arc<[u8]>>) {
        if program.is_some() || self.group_program().is_some() {
            Arc::make_mut(self.0.get_or_insert_default()).group_program = program;
        }
    }
}

impl Codec for IntOptions {
    fn encode(&self, out: &mut Vec<u8>) {
        let values = self.0.iter().flat_map(|options| options.values.iter());
        let named: Vec<(Vec<u8>, c_int)> =
            values.map(|(linux_name, value)| (linux_name.as_bytes().to_vec(), *value)).collect();
        named.encode(out);
        self.0.as_ref().map_or_else(FilterCopy::default, |options| options.filter.clone()).encode(out);
        self.group_program().map(|program| program.to_vec()).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let mut values = Self::default();
        for (linux_name, value) in <Vec<(Vec<u8>, c_int)>>::decode(from)? {
            values.set(
                table::OPTIONS.iter().find(|row| row.linux_name.as_bytes() == linux_name)?.linux_name,
                value,
            );
        }
        values.set_filter(Codec::decode(from)?);
        let program = <Option<Vec<u8>>>::decode(from)?;
        let is_valid = |code: &Vec<u8>| code.is_empty() || check_program(code).is_ok();
        values.set_group_program(program.filter(is_valid).map(Arc::from));
        Some(values)
    }
}

/// Returns the error for an option of another protocol (`do_ip_getsockopt`, `ipv6_getsockopt`).
pub(super) fn wrong_protocol_errno(family: Family) -> Errno {
    match family {
        Family::V4 => Errno::OPNOTSUPP,
        Family::V6 => Errno::NOPROTOOPT,
    }
}

impl SocketOptionState {
    /// Returns the stored value of an option.
    pub(crate) fn stored_int(&self, linux_name: &'static str) -> Option<c_int> {
        self.ints.get(linux_name)
    }

    /// Stores the value of an option.
    pub(crate) fn store_int(&mut self, linux_name: &'static str, value: c_int) {
        self.ints.set(linux_name, value);
    }

    fn number(&self, row: &OptionRow, default: c_int) -> c_int {
        self.ints.get(row.linux_name).unwrap_or(default)
    }

    /// Sets an option that has no field of its own.
    ///
    /// # Errors
    /// `ENOPROTOOPT` if the option is refused or does not exist, and the kernel's errors for values that it
    /// does not accept.
    pub(super) fn set_int(
        &mut self,
        family: Family,
        level: c_int,
        name: c_int,
        value: &[u8],
    ) -> Result<(), Errno> {
        // Linux checks the length before the option on these levels.
        let checks_length_first = matches!(level, libc::SOL_SOCKET | libc::IPPROTO_TCP | libc::IPPROTO_UDP);
        let unknown = if checks_length_first && value.len() < 4 { Errno::INVAL } else { Errno::NOPROTOOPT };
        let row = table::find(family, level, name).ok_or(unknown)?;
        match row.kind {
            OptionKind::Dedicated => Err(unknown),
            OptionKind::Refused => Err(Errno::NOPROTOOPT),
            OptionKind::Fixed { format, set, .. } => format.read(value).and(set),
            OptionKind::Int { format, accepts, default } => {
                let value = accepts.apply(format.read(value)?, self.number(row, default), default)?;
                // Linux stores 0, too.
                let value = if row.linux_name == "TCP_THIN_DUPACK" { 0 } else { value };
                self.ints.set(row.linux_name, value);
                match row.linux_name {
                    "TCP_NOTSENT_LOWAT" => self.mark_set(StackOption::NotsentLowat),
                    "IP_MTU_DISCOVER" => self.mark_set(StackOption::MayFragment),
                    "IPV6_AUTOFLOWLABEL" => self.mark_set(StackOption::FlowLabel),
                    _ => {}
                }
                Ok(())
            }
        }
    }

    /// Returns an option that has no field of its own.
    ///
    /// # Errors
    /// `ENOPROTOOPT`, and the kernel's errors for options that cannot be read.
    pub(super) fn get_int(&self, family: Family, level: c_int, name: c_int) -> Result<OptionValue, Errno> {
        let Some(row) = table::find(family, level, name) else {
            let known =
                matches!(level, libc::SOL_SOCKET | libc::IPPROTO_IP | libc::IPPROTO_TCP | libc::IPPROTO_UDP);
            return Err(if known { Errno::NOPROTOOPT } else { wrong_protocol_errno(family) });
        };
        match row.kind {
            OptionKind::Dedicated | OptionKind::Refused => Err(Errno::NOPROTOOPT),
            OptionKind::Fixed { get, .. } => get.map(OptionValue::int),
            OptionKind::Int { default, .. } => Ok(OptionValue::int(self.number(row, default))),
        }
    }

    /// Returns whether an option of the table is set to a value other than 0.
    pub fn is_on(&self, linux_name: &'static str) -> bool {
        self.ints.get(linux_name).is_some_and(|value| value != 0)
    }

    /// Returns the options of a UDP socket for the engine.
    pub fn udp_options(&self, family: Family) -> UdpOptions {
        let (tos, ttl) = match family {
            Family::V4 => (self.tos, self.ttl),
            Family::V6 => (self.tclass, self.unicast_hops),
        };
        UdpOptions {
            reuse_address: self.flag(BoolOption::ReuseAddress),
            reuse_port: self.flag(BoolOption::ReusePort),
            uid: self.user,
            broadcast: self.flag(BoolOption::Broadcast),
            v6only: family == Family::V6 && self.is_v6_only(),
            rcvbuf: Some(self.recv_buffer),
            hop_limit: u8::try_from(ttl).ok(),
            tos,
            flow_label: self.flow_label(),
            priority: self.link_priority(),
            recverr_v4: self.is_on("IP_RECVERR"),
            recverr_v6: family == Family::V6 && self.is_on("IPV6_RECVERR"),
            pmtu_discovery: self.pmtu_discovery(family),
            gro: self.is_on("UDP_GRO"),
            multicast_v4: self.multicast.options(true),
            multicast_v6: self.multicast.options(false),
        }
    }

    /// Returns the flow information of the peer, and whether the socket reflects labels, as it is stored.
    pub fn stored_flow_info(&self) -> u32 {
        self.ints.get(MANAGER).map_or(0, c_int::cast_unsigned)
    }

    /// Stores what [`stored_flow_info`](Self::stored_flow_info) returns.
    pub fn store_flow_info(&mut self, stored: u32) {
        self.ints.set(MANAGER, stored.cast_signed());
        self.mark_set(StackOption::FlowLabel);
    }

    /// Returns the flow label of packets for which the program has none.
    pub fn automatic_flow_label(&self) -> FlowLabel {
        if self.ints.get("IPV6_AUTOFLOWLABEL") == Some(0) { FlowLabel::Fixed(0) } else { FlowLabel::Auto }
    }

    /// Returns the flow label of the socket's packets.
    pub fn flow_label(&self) -> FlowLabel {
        match (self.stored_flow_info() & FLOW_LABEL_MASK, self.stored_flow_info() >> 30) {
            (0, 0) => self.automatic_flow_label(),
            (0, _) => FlowLabel::Reflect,
            (label, _) => FlowLabel::Fixed(label),
        }
    }

    /// Returns the hop limit, if it is set, and the type of service of packets over this version of IP.
    pub fn ip_fields(&self, v4: bool) -> (Option<u8>, u8) {
        let (tos, hops) = if v4 { (self.tos, self.ttl) } else { (self.tclass, self.unicast_hops) };
        (u8::try_from(hops).ok(), tos)
    }

    /// Copies options that concern each datagram to the state of a UDP socket.
    pub fn apply_to_udp_send(&self, family: Family, udp_send: &mut UdpSendState) {
        udp_send.refuses_too_long = matches!(
            self.pmtu_discovery(family),
            PmtuDiscovery::Do | PmtuDiscovery::Probe | PmtuDiscovery::Interface
        );
        udp_send.tx_stamps.is_on = self.timestamps.tx_flags() != 0;
        udp_send.update_checks();
        udp_send.corking = self.is_on("UDP_CORK");
        udp_send.has_peek_offset = self.peek_offset().is_some();
        // Cannot truncate: larger values are not accepted.
        udp_send.gso_size = self.ints.get("UDP_SEGMENT").map_or(0, |bytes| bytes as u16);
    }

    /// Returns how datagrams that exceed the path MTU are treated. On an IPv6 socket this holds for IPv4,
    /// too.
    fn pmtu_discovery(&self, family: Family) -> PmtuDiscovery {
        let name = match family {
            Family::V4 => "IP_MTU_DISCOVER",
            Family::V6 => "IPV6_MTU_DISCOVER",
        };
        match self.ints.get(name) {
            Some(0) => PmtuDiscovery::Dont,
            Some(2) => PmtuDiscovery::Do,
            Some(3) => PmtuDiscovery::Probe,
            Some(4) => PmtuDiscovery::Interface,
            Some(5) => PmtuDiscovery::Omit,
            _ if family == Family::V6 && self.is_on("IPV6_DONTFRAG") => PmtuDiscovery::Do,
            _ => PmtuDiscovery::Want,
        }
    }

    /// Returns the length of a listener's queue of Fast Open connections (`TCP_FASTOPEN`).
    pub(super) fn fastopen_queue(&self) -> u32 {
        self.ints.get("TCP_FASTOPEN").unwrap_or(0).unsigned_abs()
    }

    /// Returns whether packets of a connection over IPv4 are sent without DF (`ip_dont_fragment`).
    pub(super) fn may_fragment(&self) -> bool {
        !matches!(self.ints.get("IP_MTU_DISCOVER"), None | Some(1 | 2))
    }

    /// Returns the offset at which `MSG_PEEK` reads, if one is set (`SO_PEEK_OFF`).
    pub fn peek_offset(&self) -> Option<usize> {
        self.ints.get("SO_PEEK_OFF").and_then(|offset| usize::try_from(offset).ok())
    }

    /// Moves the offset after bytes were peeked at or consumed (`sk_peek_offset_fwd`, `sk_peek_offset_bwd`).
    pub fn move_peek_offset(&mut self, forward: bool, bytes: usize) {
        if let Some(offset) = self.peek_offset() {
            let moved = if forward { offset.saturating_add(bytes) } else { offset.saturating_sub(bytes) };
            self.ints.set("SO_PEEK_OFF", c_int::try_from(moved).unwrap_or(c_int::MAX));
        }
    }

    /// Returns how many unsent bytes stop writes (`TCP_NOTSENT_LOWAT`).
    pub fn notsent_lowat(&self) -> Option<u32> {
        // 0 selects the system's default (`tcp_notsent_lowat`), which is unlimited unless an administrator
        // changes it.
        let bytes = self.ints.get("TCP_NOTSENT_LOWAT")?.cast_unsigned();
        Some(bytes).filter(|bytes| !matches!(*bytes, 0 | u32::MAX))
    }

    /// Sets the type of service or traffic class; an IPv6 socket has both. The type of service also sets the
    /// priority (`__ip_sock_set_tos`).
    pub(super) fn set_tos(&mut self, level: c_int, value: &[u8], datagrams: bool) -> Result<(), Errno> {
        if level == libc::IPPROTO_IP {
            // TCP sets the ECN bits itself.
            let tos = IntFormat::IntOrByteOrNone.read(value)? as u8 & if datagrams { 0xff } else { 0xfc };
            if tos != self.tos {
                self.tos = tos;
                self.set_priority(priority::of_tos(tos).into());
            }
        } else {
            let tclass = IntFormat::Int.read(value)?;
            // As for IPv4.
            self.tclass = match AcceptedValues::TosClass(0, 255).apply(tclass, 0, 0)? {
                masked if datagrams && tclass >= 0 => masked as u8 | tclass as u8 & 3,
                masked => masked as u8,
            };
        }
        self.mark_set(StackOption::Tos);
        Ok(())
    }

    /// Sets the time to live or hop limit; an IPv6 socket has both. -1 selects the stack's default.
    pub(super) fn set_ttl(&mut self, level: c_int, value: &[u8]) -> Result<(), Errno> {
        if level == libc::IPPROTO_IP {
            self.ttl =
                AcceptedValues::OrDefault(1, 255).apply(IntFormat::IntOrByteOrNone.read(value)?, 0, -1)?
                    as i16;
        } else {
            self.unicast_hops =
                AcceptedValues::OrDefault(0, 255).apply(IntFormat::Int.read(value)?, 0, -1)? as i16;
        }
        self.mark_set(StackOption::HopLimit);
        Ok(())
    }
}
