//! `getsockopt` of source filters, whose value names the group (`ip_mc_msfget`, `ip_mc_gsfget`,
//! `ip6_mc_msfget`).

use super::InterfaceSide;
use super::request::{self, IP_MSFILTER, InterfaceRef, MCAST_MSFILTER};
use crate::Ops;
use crate::sockaddr::{self, Family};
use core::ffi::c_int;
use core::net::{IpAddr, SocketAddr};
use ginnel::FilterMode;
use libc::{IPPROTO_IP, IPPROTO_IPV6};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Returns whether an option is the source filter of a group. `getsockopt` reads its value, too, which names
/// the group.
pub fn is_source_filter(level: c_int, name: c_int) -> bool {
    matches!((level, name), (IPPROTO_IP, IP_MSFILTER) | (IPPROTO_IP | IPPROTO_IPV6, MCAST_MSFILTER))
}

impl Ops {
    /// Implements `getsockopt` for the options of [`is_source_filter`]. `value` is what the program passes.
    /// Returns what replaces it, or `None` if the socket does not have the option: it is no UDP socket, or is
    /// one of IPv4 and the level is IPv6.
    ///
    /// # Errors
    /// `EINVAL` for a short value or an address that is no group, `EADDRNOTAVAIL` without membership on a
    /// link of the stack, `ENODEV` if `IP_MSFILTER` names no such link, and the errors of all calls.
    pub fn source_filter(
        &self,
        fd: RawFd,
        level: c_int,
        name: c_int,
        value: &[u8],
    ) -> Result<Option<Vec<u8>>, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let (v4, family) = (level == IPPROTO_IP, socket.family);
        if !socket.is_udp || !v4 && family == Family::V4 {
            return Ok(None);
        }
        let is_short = name == IP_MSFILTER;
        let header = if is_short { request::IP_MSFILTER_BYTES } else { request::GROUP_FILTER_BYTES };
        if value.len() < header {
            return Err(Errno::INVAL);
        }
        let group = if is_short {
            Some(request::address_v4(value, 0).into())
        } else {
            request::storage(value, 8, v4)
        };
        let group: IpAddr = group.filter(IpAddr::is_multicast).ok_or(Errno::INVAL)?;
        let interface = if is_short {
            InterfaceRef { index: 0, address: request::address_v4(value, 4) }
        } else {
            InterfaceRef::by_index(request::number(value, 0))
        };
        let missing = if is_short { Errno::NODEV } else { Errno::ADDRNOTAVAIL };
        let InterfaceSide::Stack(link) = state.side_of(interface, Some(group), false, missing)? else {
            return Err(missing);
        };
        let multicast = &state.files.socket(file)?.options.multicast;
        let membership = multicast.memberships().find(|entry| entry.group == group && entry.link == link);
        let (mode, sources) = membership.ok_or(Errno::ADDRNOTAVAIL)?.mode_and_sources();
        let number_at = header - 4;
        let room = request::number(value, number_at) as usize;
        let mode: u32 = if mode == FilterMode::Include { 1 } else { 0 };
        let mut out = value[..header].to_vec();
        out[header - 8..number_at].copy_from_slice(&mode.to_ne_bytes());
        // Cannot truncate: the limits are lower.
        out[number_at..].copy_from_slice(&(sources.len() as u32).to_ne_bytes());
        for source in sources.iter().take(room) {
            match source {
                IpAddr::V4(v4) if is_short => out.extend(v4.octets()),
                _ => {
                    let family = if source.is_ipv4() { Family::V4 } else { Family::V6 };
                    let end = out.len() + request::STORAGE_BYTES;
                    out.extend(sockaddr::encode(SocketAddr::new(*source, 0), family).bytes());
                    out.resize(end, 0);
                }
            }
        }
        Ok(Some(out))
    }
}
