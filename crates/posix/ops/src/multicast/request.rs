//! The structures that programs pass about groups: `struct ip_mreqn`, `struct group_source_req` and others.

use crate::interfaces::FIRST_INDEX;
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ginnel::FilterMode;
use libc::{IPPROTO_IP, IPPROTO_IPV6};
use rustix::io::Errno;

// Options for which libc has no names, of both levels (`linux/in.h`).
pub(super) const IP_MSFILTER: c_int = 41;
const MCAST_JOIN_GROUP: c_int = 42;
const MCAST_BLOCK_SOURCE: c_int = 43;
const MCAST_UNBLOCK_SOURCE: c_int = 44;
const MCAST_LEAVE_GROUP: c_int = 45;
const MCAST_JOIN_SOURCE_GROUP: c_int = 46;
const MCAST_LEAVE_SOURCE_GROUP: c_int = 47;
pub(super) const MCAST_MSFILTER: c_int = 48;

/// Bytes of `struct sockaddr_storage`, `struct group_req`, `struct group_source_req`, and of `struct
/// group_filter` and `struct ip_msfilter` without sources.
pub(super) const STORAGE_BYTES: usize = 128;
const GROUP_REQ_BYTES: usize = 136;
const GROUP_SOURCE_REQ_BYTES: usize = 264;
pub(super) const GROUP_FILTER_BYTES: usize = 144;
pub(super) const IP_MSFILTER_BYTES: usize = 16;
/// More sources than any limit allows.
const SOURCES_MAX: u32 = 0x1ff_ffff;

/// An interface as a program names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InterfaceRef {
    /// Its index, or 0.
    pub(super) index: u32,
    /// One of its addresses, or 0.0.0.0. The index is more important.
    pub(super) address: Ipv4Addr,
}

impl InterfaceRef {
    pub(super) const fn by_index(index: u32) -> Self {
        Self { index, address: Ipv4Addr::UNSPECIFIED }
    }

    /// Returns whether no interface is named.
    pub(super) fn is_any(self) -> bool {
        self.index == 0 && self.address.is_unspecified()
    }

    /// Returns the index, given the number of the link that the address belongs to.
    pub(super) fn index_of(self, link: u16) -> u32 {
        if self.index == 0 { FIRST_INDEX + u32::from(link) } else { self.index }
    }
}

/// A change of a membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MembershipRequest {
    pub(super) group: IpAddr,
    pub(super) interface: InterfaceRef,
    pub(super) action: MembershipAction,
}

/// Names what changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MembershipAction {
    Join,
    Leave,
    /// A source is listed or no longer listed.
    Source {
        source: IpAddr,
        /// The filter mode that the list belongs to.
        mode: FilterMode,
        add: bool,
        /// True if the call first joins the group.
        joins: bool,
    },
    /// The whole filter is replaced.
    Filter {
        mode: FilterMode,
        sources: Vec<IpAddr>,
    },
}

pub(super) fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |bytes| u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
}

pub(super) fn address_v4(bytes: &[u8], at: usize) -> Ipv4Addr {
    bytes.get(at..at + 4).map_or(Ipv4Addr::UNSPECIFIED, |bytes| {
        Ipv4Addr::from(<[u8; 4]>::try_from(bytes).expect("four bytes"))
    })
}

fn address_v6(bytes: &[u8], at: usize) -> Ipv6Addr {
    bytes.get(at..at + 16).map_or(Ipv6Addr::UNSPECIFIED, |bytes| {
        Ipv6Addr::from(<[u8; 16]>::try_from(bytes).expect("sixteen bytes"))
    })
}

/// Reads a `struct sockaddr_storage` of the family. Returns `None` if it is of another family.
pub(super) fn storage(bytes: &[u8], at: usize, v4: bool) -> Option<IpAddr> {
    let family = bytes.get(at..at + 2).map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]))?;
    match (v4, c_int::from(family)) {
        (true, libc::AF_INET) => Some(address_v4(bytes, at + 4).into()),
        (false, libc::AF_INET6) => Some(address_v6(bytes, at + 8).into()),
        _ => None,
    }
}

fn mode(number: u32) -> Result<FilterMode, Errno> {
    match number {
        // `MCAST_EXCLUDE`, `MCAST_INCLUDE`.
        0 => Ok(FilterMode::Exclude),
        1 => Ok(FilterMode::Include),
        _ => Err(Errno::INVAL),
    }
}

/// Reads the value of `IP_MULTICAST_IF`: a `struct in_addr`, `struct ip_mreq` or `struct ip_mreqn`.
pub(super) fn interface_v4(value: &[u8]) -> Result<InterfaceRef, Errno> {
    match value.len() {
        0..4 => Err(Errno::INVAL),
        4..8 => Ok(InterfaceRef { index: 0, address: address_v4(value, 0) }),
        8..12 => Ok(InterfaceRef { index: 0, address: address_v4(value, 4) }),
        _ => Ok(InterfaceRef { index: number(value, 8), address: address_v4(value, 4) }),
    }
}

/// Reads the value of `IPV6_MULTICAST_IF`: an index.
pub(super) fn interface_v6(value: &[u8]) -> Result<InterfaceRef, Errno> {
    if value.len() < 4 { Err(Errno::INVAL) } else { Ok(InterfaceRef::by_index(number(value, 0))) }
}

impl MembershipRequest {
    /// Returns the error if the interface does not exist (`ip_mc_leave_group`, `ipv6_sock_mc_drop`: leaving
    /// looks for the membership nevertheless).
    pub(super) fn no_device(&self) -> Errno {
        let looks_further =
            self.action == MembershipAction::Leave && (self.group.is_ipv6() || !self.interface.is_any());
        if looks_further { Errno::ADDRNOTAVAIL } else { Errno::NODEV }
    }

    /// Reads the value of an option; returns `None` if the option is not about membership.
    ///
    /// # Errors
    /// `EINVAL`, `EADDRNOTAVAIL` and `ENOBUFS` as Linux, in its order.
    pub(super) fn read(level: c_int, name: c_int, value: &[u8]) -> Result<Option<Self>, Errno> {
        let v4 = level == IPPROTO_IP;
        let at_least = |bytes| if value.len() < bytes { Err(Errno::INVAL) } else { Ok(()) };
        let source = |source, mode, add, joins| MembershipAction::Source { source, mode, add, joins };
        let (include, exclude) = (FilterMode::Include, FilterMode::Exclude);
        let request = match (level, name) {
            (IPPROTO_IP, libc::IP_ADD_MEMBERSHIP | libc::IP_DROP_MEMBERSHIP) => {
                at_least(8)?;
                let index = if value.len() >= 12 { number(value, 8) } else { 0 };
                let interface = InterfaceRef { index, address: address_v4(value, 4) };
                let action = if name == libc::IP_ADD_MEMBERSHIP {
                    MembershipAction::Join
                } else {
                    MembershipAction::Leave
                };
                Self { group: address_v4(value, 0).into(), interface, action }
            }
            (IPPROTO_IP, 37..=40) => {
                // `struct ip_mreq_source`.
                if value.len() != 12 {
                    return Err(Errno::INVAL);
                }
                let of = address_v4(value, 8).into();
                let action = match name {
                    libc::IP_BLOCK_SOURCE => source(of, exclude, true, false),
                    libc::IP_UNBLOCK_SOURCE => source(of, exclude, false, false),
                    libc::IP_ADD_SOURCE_MEMBERSHIP => source(of, include, true, true),
                    _ => source(of, include, false, false),
                };
                let interface = InterfaceRef { index: 0, address: address_v4(value, 4) };
                Self { group: address_v4(value, 0).into(), interface, action }
            }
            (IPPROTO_IP, IP_MSFILTER) => {
                at_least(IP_MSFILTER_BYTES)?;
                let count = checked_count(number(value, 12))?;
                at_least(IP_MSFILTER_BYTES + 4 * count)?;
                let group = address_v4(value, 0);
                if !group.is_multicast() {
                    return Err(Errno::INVAL);
                }
                let sources = (0..count).map(|at| address_v4(value, IP_MSFILTER_BYTES + 4 * at).into());
                let action =
                    MembershipAction::Filter { mode: mode(number(value, 8))?, sources: sources.collect() };
                let interface = InterfaceRef { index: 0, address: address_v4(value, 4) };
                Self { group: group.into(), interface, action }
            }
            (IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP | libc::IPV6_DROP_MEMBERSHIP) => {
                at_least(20)?;
                let action = if name == libc::IPV6_ADD_MEMBERSHIP {
                    MembershipAction::Join
                } else {
                    MembershipAction::Leave
                };
                let interface = InterfaceRef::by_index(number(value, 16));
                Self { group: address_v6(value, 0).into(), interface, action }
            }
            (_, MCAST_JOIN_GROUP | MCAST_LEAVE_GROUP) => {
                at_least(GROUP_REQ_BYTES)?;
                let wrong_family = if v4 { Errno::INVAL } else { Errno::ADDRNOTAVAIL };
                let group = storage(value, 8, v4).ok_or(wrong_family)?;
                let action =
                    if name == MCAST_JOIN_GROUP { MembershipAction::Join } else { MembershipAction::Leave };
                Self { group, interface: InterfaceRef::by_index(number(value, 0)), action }
            }
            (_, MCAST_BLOCK_SOURCE..=MCAST_LEAVE_SOURCE_GROUP) => {
                at_least(GROUP_SOURCE_REQ_BYTES)?;
                let group = storage(value, 8, v4).ok_or(Errno::ADDRNOTAVAIL)?;
                let of = storage(value, 8 + STORAGE_BYTES, v4).ok_or(Errno::ADDRNOTAVAIL)?;
                let action = match name {
                    MCAST_BLOCK_SOURCE => source(of, exclude, true, false),
                    MCAST_UNBLOCK_SOURCE => source(of, exclude, false, false),
                    MCAST_JOIN_SOURCE_GROUP => source(of, include, true, true),
                    _ => source(of, include, false, false),
                };
                Self { group, interface: InterfaceRef::by_index(number(value, 0)), action }
            }
            (_, MCAST_MSFILTER) => {
                at_least(GROUP_FILTER_BYTES)?;
                let count = checked_count(number(value, 140))?;
                at_least(GROUP_FILTER_BYTES + STORAGE_BYTES * count)?;
                let group = storage(value, 8, v4).filter(IpAddr::is_multicast).ok_or(Errno::INVAL)?;
                let sources =
                    (0..count).map(|at| storage(value, GROUP_FILTER_BYTES + STORAGE_BYTES * at, v4));
                let sources = sources.collect::<Option<_>>().ok_or(Errno::INVAL)?;
                let action = MembershipAction::Filter { mode: mode(number(value, 136))?, sources };
                Self { group, interface: InterfaceRef::by_index(number(value, 0)), action }
            }
            _ => return Ok(None),
        };
        Ok(Some(request))
    }
}

/// Checks the number of sources of a filter against what no limit allows.
fn checked_count(count: u32) -> Result<usize, Errno> {
    if count >= SOURCES_MAX { Err(Errno::NOBUFS) } else { Ok(count as usize) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_read_with_their_lengths() {
        let read = |level, name, value: &[u8]| MembershipRequest::read(level, name, value);
        let mreq = [239, 1, 2, 3, 10, 0, 0, 1];
        let joined = read(IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &mreq).unwrap().unwrap();
        assert_eq!(joined.interface, InterfaceRef { index: 0, address: [10, 0, 0, 1].into() });
        assert_eq!((joined.group, joined.action), ([239, 1, 2, 3].into(), MembershipAction::Join));
        assert_eq!(read(IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &mreq[..7]), Err(Errno::INVAL));
        assert_eq!(read(IPPROTO_IP, libc::IP_ADD_SOURCE_MEMBERSHIP, &[0; 13]), Err(Errno::INVAL));
        assert_eq!(read(IPPROTO_IP, MCAST_JOIN_GROUP, &[0; 136]), Err(Errno::INVAL));
        assert_eq!(read(IPPROTO_IPV6, MCAST_JOIN_GROUP, &[0; 136]), Err(Errno::ADDRNOTAVAIL));
        let mut filter = [0; 20];
        filter[..4].copy_from_slice(&[239, 1, 2, 3]);
        filter[12..16].copy_from_slice(&2u32.to_ne_bytes());
        assert_eq!(read(IPPROTO_IP, IP_MSFILTER, &filter), Err(Errno::INVAL), "two sources need 24 bytes");
        filter[12..16].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(read(IPPROTO_IP, IP_MSFILTER, &filter), Err(Errno::NOBUFS));
        assert_eq!(read(IPPROTO_IP, libc::IP_MULTICAST_TTL, &[1]), Ok(None));
    }
}
