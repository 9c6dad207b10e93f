//! Multicast groups of UDP sockets: which side, the stack or the kernel, an interface belongs to, and what
//! `setsockopt` does there.
//!
//! An interface that a program names by its index or address is the stack's link or the kernel's. Without a
//! name, a group belongs to the stack if the stack has a route or link for it. The memberships on the stack
//! are kept here and by the stack, those on the kernel's interfaces by the kernel.

mod kernel_log;
mod membership;
mod request;
mod source_filter;

use crate::Ops;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::interfaces::FIRST_INDEX;
use crate::lock::LockGuard;
use crate::options::OptionValue;
use crate::options::table::{AcceptedValues, IntFormat};
use crate::process::ProcessState;
use crate::sockaddr::Family;
use crate::{kernel_socket, syscall};
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr};
use ginnel::broker::codec::Codec;
use ginnel::{LinkId, MulticastOptions, SourceFilter};
use libc::{IPPROTO_IP, IPPROTO_IPV6};
use membership::{MembershipEntry, Memberships};
use request::{InterfaceRef, MembershipRequest};
use rustix::io::Errno;
pub use source_filter::is_source_filter;
use std::sync::{Arc, LazyLock};

/// Options for which libc has no names.
const IP_MULTICAST_ALL: c_int = 49;
const IPV6_MULTICAST_ALL: c_int = 29;

/// The multicast options and memberships of a socket, IPv4 before IPv6; `None` if all are the defaults.
#[derive(Clone, Debug, Default)]
pub(crate) struct MulticastState(Option<Arc<[FamilyState; 2]>>);

/// The options of one address family.
#[derive(Clone, Debug)]
struct FamilyState {
    /// The interface by which datagrams leave.
    interface: Option<OutInterface>,
    /// The address that named the interface, or 0.0.0.0 (`mc_addr`).
    address: Ipv4Addr,
    hop_limit: u8,
    loops: bool,
    /// The socket also receives groups that only other sockets have joined.
    all: bool,
    memberships: Memberships,
}

/// The interface by which datagrams to groups leave.
#[derive(Clone, Copy, Debug)]
struct OutInterface {
    index: u32,
    /// The number of the stack's link; `None` for an interface of the kernel.
    link: Option<u16>,
}

ginnel::codec_struct!(FamilyState { interface, address, hop_limit, loops, all, memberships });
ginnel::codec_struct!(OutInterface { index, link });

impl Codec for MulticastState {
    fn encode(&self, out: &mut Vec<u8>) {
        let states: Vec<FamilyState> = self.0.iter().flat_map(|states| states.iter().cloned()).collect();
        states.encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let states = <Vec<FamilyState>>::decode(from)?;
        match <[FamilyState; 2]>::try_from(states) {
            Ok(states) => Some(Self(Some(Arc::new(states)))),
            Err(states) => states.is_empty().then_some(Self(None)),
        }
    }
}

impl Default for FamilyState {
    fn default() -> Self {
        Self {
            interface: None,
            address: Ipv4Addr::UNSPECIFIED,
            hop_limit: 1,
            loops: true,
            all: true,
            memberships: Memberships::default(),
        }
    }
}

/// The state of a new IPv6 socket: Linux initializes its `IP_MULTICAST_ALL` with 0.
static NEW_V6: LazyLock<Arc<[FamilyState; 2]>> = LazyLock::new(|| {
    let v4 = FamilyState { all: false, ..FamilyState::default() };
    Arc::new([v4, FamilyState::default()])
});

impl MulticastState {
    /// Returns the state of a new UDP socket.
    pub fn new(family: Family) -> Self {
        Self((family == Family::V6).then(|| Arc::clone(&NEW_V6)))
    }

    fn family(&self, v4: bool) -> Option<&FamilyState> {
        self.0.as_ref().map(|states| &states[usize::from(!v4)])
    }

    fn family_mut(&mut self, v4: bool) -> &mut FamilyState {
        &mut Arc::make_mut(self.0.get_or_insert_default())[usize::from(!v4)]
    }

    /// Returns the options in the form that the stack takes.
    pub fn options(&self, v4: bool) -> MulticastOptions {
        let Some(state) = self.family(v4) else { return MulticastOptions::default() };
        MulticastOptions {
            link: state.interface.and_then(|interface| interface.link).map(LinkId),
            source: Some(state.address).filter(|address| !address.is_unspecified()),
            hop_limit: Some(state.hop_limit).filter(|hop_limit| *hop_limit != 1),
            no_loop: !state.loops,
            members_only: !state.all,
        }
    }

    /// Returns whether datagrams to `to` leave by the stack; `None` if no option says so.
    pub fn leaves_by_stack(&self, to: IpAddr) -> Option<bool> {
        if !to.is_multicast() {
            return None;
        }
        self.family(to.is_ipv4())?.interface.map(|interface| interface.link.is_some())
    }

    /// Returns whether the socket has joined groups on links of the stack.
    pub fn has_memberships(&self) -> bool {
        self.memberships().next().is_some()
    }

    fn memberships(&self) -> impl Iterator<Item = &MembershipEntry> {
        self.0.iter().flat_map(|states| states.iter()).flat_map(|state| state.memberships.entries())
    }

    /// Returns the value of an option; `None` if it is not one of a single number.
    pub fn value(&self, family: Family, level: c_int, name: c_int) -> Option<OptionValue> {
        let default = FamilyState::default();
        let state = self.family(level == IPPROTO_IP).unwrap_or(&default);
        let number = |value: u32| Some(OptionValue::int(value.cast_signed()));
        match (level, name) {
            (IPPROTO_IP, libc::IP_MULTICAST_IF) => {
                Some(OptionValue::truncatable(state.address.octets().to_vec()))
            }
            (IPPROTO_IP, libc::IP_MULTICAST_TTL) => number(state.hop_limit.into()),
            (IPPROTO_IP, libc::IP_MULTICAST_LOOP) => number(state.loops.into()),
            (IPPROTO_IP, IP_MULTICAST_ALL) => number(state.all.into()),
            _ if family == Family::V4 => None,
            (IPPROTO_IPV6, libc::IPV6_MULTICAST_IF) => {
                number(state.interface.map_or(0, |interface| interface.index))
            }
            (IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS) => number(state.hop_limit.into()),
            (IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP) => number(state.loops.into()),
            (IPPROTO_IPV6, IPV6_MULTICAST_ALL) => number(state.all.into()),
            _ => None,
        }
    }
}

/// The side that an interface belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InterfaceSide {
    /// The stack: the number of the link.
    Stack(u16),
    Kernel,
}

/// Returns whether an option of a UDP socket is about multicast: `IP_MULTICAST_*`, `IPV6_MULTICAST_*`,
/// options that change memberships or source filters, and `MCAST_*`.
pub(crate) fn is_option(family: Family, level: c_int, name: c_int) -> bool {
    match level {
        IPPROTO_IP => matches!(name, 32..=IP_MULTICAST_ALL),
        IPPROTO_IPV6 if family == Family::V6 => matches!(name, 17..=21 | IPV6_MULTICAST_ALL | 42..=48),
        _ => false,
    }
}

impl Ops {
    /// Implements `setsockopt` for the options of [`is_option`].
    ///
    /// # Errors
    /// As Linux: `EINVAL`, `EADDRINUSE`, `EADDRNOTAVAIL`, `ENODEV`, `ENOBUFS`, `ENOMEM`.
    pub(crate) fn set_multicast(
        &self,
        mut state: LockGuard<'_>,
        file: FileId,
        (level, name): (c_int, c_int),
        value: &[u8],
    ) -> Result<(), Errno> {
        let v4 = level == IPPROTO_IP;
        match (level, name) {
            (IPPROTO_IP, libc::IP_MULTICAST_IF) | (IPPROTO_IPV6, libc::IPV6_MULTICAST_IF) => {
                let interface =
                    if v4 { request::interface_v4(value)? } else { request::interface_v6(value)? };
                let missing = if v4 { Errno::ADDRNOTAVAIL } else { Errno::NODEV };
                let selected = if interface.is_any() {
                    None
                } else {
                    let side = state.side_of(interface, None, self.config.kernel_listen, missing)?;
                    let (index, link) = match side {
                        InterfaceSide::Kernel => {
                            self.set_on_kernel(&mut state, file, (level, name), value, None, missing)?;
                            (interface.index, None)
                        }
                        InterfaceSide::Stack(link) => (interface.index_of(link), Some(link)),
                    };
                    Some(OutInterface { index, link })
                };
                if selected.is_none_or(|interface| interface.link.is_some()) {
                    state.forget_setting(file, level, name);
                    if let (Some(kernel_fd), None) = (state.kernel_fd(file), selected) {
                        let _ = syscall::setsockopt(kernel_fd, level, name, value);
                    }
                }
                let family = state.files.socket(file)?.options.multicast.family_mut(v4);
                (family.interface, family.address) = (selected, interface.address);
            }
            _ if let Some(request) = MembershipRequest::read(level, name, value)? => loop {
                let restarts = state.restarts;
                let changed = self.change_membership(&mut state, file, (level, name), value, &request);
                if !state.is_request_lost(restarts, &changed) {
                    break changed?;
                }
            },
            _ => {
                state.files.socket(file)?.options.multicast.set_number(level, name, value)?;
                state.remember_setting(file, level, name, value);
                if let Some(kernel_fd) = state.kernel_fd(file) {
                    let _ = syscall::setsockopt(kernel_fd, level, name, value);
                }
            }
        }
        let applied = state.apply_datagram_options(file);
        state.publish_shared(file);
        applied
    }

    /// Changes a membership of a socket, on the side of the interface.
    fn change_membership(
        &self,
        state: &mut LockGuard<'_>,
        file: FileId,
        (level, name): (c_int, c_int),
        value: &[u8],
        request: &MembershipRequest,
    ) -> Result<(), Errno> {
        let v4 = request.group.is_ipv4();
        if !request.group.is_multicast() {
            // `ip_mc_leave_group` just looks for the membership.
            let is_looked_for = v4 && request.action == request::MembershipAction::Leave;
            return Err(if is_looked_for { Errno::ADDRNOTAVAIL } else { Errno::INVAL });
        }
        let memberships = &state.files.socket(file)?.options.multicast;
        let joined_anywhere = memberships.memberships().find(|entry| entry.group == request.group);
        // `ipv6_sock_mc_join` and `ipv6_sock_mc_drop` compare no interface if none is named.
        let known = joined_anywhere.filter(|_| !v4 && request.interface.is_any()).map(|entry| entry.link);
        let side = match known {
            Some(link) => InterfaceSide::Stack(link),
            None => state.side_of(
                request.interface,
                Some(request.group),
                self.config.kernel_listen,
                request.no_device(),
            )?,
        };
        let InterfaceSide::Stack(link) = side else {
            return self.set_on_kernel(state, file, (level, name), value, Some(request), request.no_device());
        };
        let (_, limits) = state.client.link_of_group(request.group).map_err(|_| Errno::NETDOWN)?;
        let mut family = state.files.socket(file)?.options.multicast.family(v4).cloned().unwrap_or_default();
        let filter = family.memberships.change(link, request, &limits)?;
        if !state.can_publish(file, |options| *options.multicast.family_mut(v4) = family.clone()) {
            return Err(Errno::NOBUFS);
        }
        if let SocketRole::Udp(udp) = state.files.socket(file)?.role {
            let set = state.client.udp_set_membership(udp.conn, link, request.group, filter);
            set.map_err(|error| state.udp_request_error(error))?;
        }
        *state.files.socket(file)?.options.multicast.family_mut(v4) = family;
        Ok(())
    }

    /// Sets an option about an interface of the kernel on the socket's kernel side, or on the kernel socket
    /// that it may still become. `request` is the change that the option makes to a membership; `None` for an
    /// option that has one value.
    ///
    /// # Errors
    /// As the kernel; `ENOBUFS` if too many options are kept for the kernel socket; `missing` if the socket
    /// is bound and has no kernel side, because the interface does not exist for it.
    fn set_on_kernel(
        &self,
        state: &mut LockGuard<'_>,
        file: FileId,
        (level, name): (c_int, c_int),
        value: &[u8],
        request: Option<&MembershipRequest>,
        missing: Errno,
    ) -> Result<(), Errno> {
        if let Some(kernel_fd) = state.kernel_fd(file) {
            return syscall::setsockopt(kernel_fd, level, name, value);
        }
        let socket = state.files.socket(file)?;
        if matches!(socket.role, SocketRole::Udp(_)) {
            return Err(missing);
        }
        let log = socket.options.settings_log();
        let changed = request
            .map(|request| kernel_log::with_membership(log, (level, name), value, request))
            .transpose()?;
        kernel_socket::try_datagram_option(socket.family, log, level, name, value)?;
        match changed {
            Some(changed) => socket.options.set_settings_log(changed),
            None => state.remember_setting(file, level, name, value),
        }
        Ok(())
    }
}

impl MulticastState {
    /// Sets an option that is a number.
    fn set_number(&mut self, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
        let v4 = level == IPPROTO_IP;
        let read = |format: IntFormat, accepts: AcceptedValues| accepts.apply(format.read(value)?, 0, 1);
        let byte = AcceptedValues::OrDefault(0, 255);
        let flag = AcceptedValues::Within(0, 1);
        match (level, name) {
            (IPPROTO_IP, libc::IP_MULTICAST_TTL) => {
                self.family_mut(v4).hop_limit = read(IntFormat::IntOrByte, byte)? as u8;
            }
            (IPPROTO_IP, libc::IP_MULTICAST_LOOP) => {
                self.family_mut(v4).loops = read(IntFormat::IntOrByte, AcceptedValues::Flag)? != 0;
            }
            (IPPROTO_IP, IP_MULTICAST_ALL) => {
                self.family_mut(v4).all = read(IntFormat::IntOrByte, flag)? != 0;
            }
            (IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS) => {
                self.family_mut(v4).hop_limit = read(IntFormat::Int, byte)? as u8;
            }
            (IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP) => {
                self.family_mut(v4).loops = read(IntFormat::Int, flag)? != 0;
            }
            (IPPROTO_IPV6, IPV6_MULTICAST_ALL) => {
                self.family_mut(v4).all = read(IntFormat::Int, AcceptedValues::Flag)? != 0;
            }
            _ => return Err(Errno::NOPROTOOPT),
        }
        Ok(())
    }
}

impl ProcessState {
    /// Returns the side of an interface. If the program names no interface, chooses it by the group.
    ///
    /// # Errors
    /// `missing` if the stack has no link for the interface and the kernel serves no sockets, `ENETDOWN` if
    /// the stack is gone.
    fn side_of(
        &mut self,
        interface: InterfaceRef,
        group: Option<IpAddr>,
        has_kernel: bool,
        missing: Errno,
    ) -> Result<InterfaceSide, Errno> {
        let gone = |_| Errno::NETDOWN;
        let link = if interface.index != 0 || !interface.address.is_unspecified() {
            let links = self.client.links().map_err(gone)?;
            let named = links.iter().position(|link| {
                let number = interface.index.checked_sub(FIRST_INDEX).map(|number| number as usize);
                // The kernel's loopback is the program's if the stack's has no addresses.
                match (interface.index, link.loopback) {
                    (_, true) if link.addresses.is_empty() => false,
                    (0, true) if interface.address.is_loopback() => true,
                    (0, _) => {
                        link.addresses.iter().any(|(address, _)| *address == IpAddr::V4(interface.address))
                    }
                    (index, true) => index == 1,
                    (_, false) => number.and_then(|number| links.get(number)) == Some(link),
                }
            });
            // The kernel receives the groups of some links.
            named.filter(|named| links[*named].multicast)
        } else {
            let (link, _) = self.client.link_of_group(group.ok_or(missing)?).map_err(gone)?;
            link.map(usize::from)
        };
        match link.and_then(|link| u16::try_from(link).ok()) {
            Some(link) => Ok(InterfaceSide::Stack(link)),
            None if has_kernel => Ok(InterfaceSide::Kernel),
            None => Err(missing),
        }
    }

    /// Sends the stack all memberships of a socket that has just been opened.
    ///
    /// # Errors
    /// The errors of the stack.
    pub(crate) fn apply_memberships(&mut self, file: FileId) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let SocketRole::Udp(udp) = socket.role else { return Ok(()) };
        let multicast = socket.options.multicast.clone();
        for MembershipEntry { link, group, .. } in multicast.memberships() {
            let filter =
                multicast.family(group.is_ipv4()).and_then(|state| state.memberships.filter(*link, *group));
            let set = self.client.udp_set_membership(udp.conn, *link, *group, filter);
            set.map_err(|error| self.udp_request_error(error))?;
        }
        Ok(())
    }
}

/// A source filter that the stack applies; `None` if the socket is not a member of the group.
type StackFilter = Option<SourceFilter>;
