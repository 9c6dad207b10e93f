//! Membership of UDP sockets in multicast groups.
#![allow(unsafe_code)] // functions that C calls

use crate::current::with_context;
use crate::failure::{Failure, call};
use crate::handles::UdpSocketHandle;
use crate::udp_options::link;
use crate::{address, memory};
use core::ffi::{c_int, c_uint};
use core::net::IpAddr;
use ginnel::{FilterMode, SourceFilter};
use libc::{sockaddr, sockaddr_storage, socklen_t};
use rustix::io::Errno;

/// `GINNEL_SOURCES_EXCLUDE`.
pub const EXCLUDE: u32 = 0;
/// `GINNEL_SOURCES_INCLUDE`.
pub const INCLUDE: u32 = 1;

const NO_LINK: Failure = Failure::new(Errno::NODEV, "no link by which the group is reached");
const UNKNOWN_LINK: Failure = Failure::new(Errno::INVAL, "a number above that of any link");

/// Returns the filter of a mode and sources; `None` if it lets no source pass, which is no membership.
fn filter(mode: c_uint, sources: Vec<IpAddr>) -> Result<Option<SourceFilter>, Failure> {
    let mode = match mode {
        EXCLUDE => FilterMode::Exclude,
        INCLUDE => FilterMode::Include,
        _ => return Err(Failure::new(Errno::INVAL, "an unknown mode of a source filter")),
    };
    let filter = SourceFilter::new(mode, sources);
    Ok((!filter.is_none()).then_some(filter))
}

/// Sets the sources of a group that a UDP socket receives on a link. Link 0 is the one by which the group is
/// reached.
///
/// # Safety
/// `group_len` bytes at `group` are readable, and `count` structures at `sources`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_udp_set_membership(
    socket: UdpSocketHandle,
    link_number: c_uint,
    group: *const sockaddr,
    group_len: socklen_t,
    mode: c_uint,
    sources: *const sockaddr_storage,
    count: usize,
) -> c_int {
    call(|| {
        let socket = socket.get()?;
        // SAFETY: as the caller says.
        let group = unsafe { address::read(group, group_len) }?.ip();
        let link_number = u16::try_from(link_number).map_err(|_| UNKNOWN_LINK)?;
        // SAFETY: as the caller says.
        let sources = unsafe { memory::objects(sources, count) }?;
        let sources = sources.iter().map(|source| {
            let len = size_of::<sockaddr_storage>() as socklen_t;
            // SAFETY: the reference is to as many bytes.
            let source = unsafe { address::read(core::ptr::from_ref(source).cast(), len) };
            source.map(|source| source.ip())
        });
        let filter = filter(mode, sources.collect::<Result<_, _>>()?)?;
        with_context(|cx| {
            let link = link(link_number).or_else(|| cx.link_of_group(group)).ok_or(NO_LINK)?;
            Ok(cx.udp_set_membership(socket, link, group, filter)?)
        })?;
        Ok(0)
    })
}
