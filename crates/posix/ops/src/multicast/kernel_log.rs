//! Memberships on interfaces of the kernel, of a socket that may still become a kernel socket: the options by
//! which the kernel socket gets them.

use super::request::{MembershipAction, MembershipRequest};
use crate::options::Setting;
use core::ffi::c_int;
use ginnel::FilterMode;
use rustix::io::Errno;

/// Largest number of options that are kept for the kernel socket. Each attempt to change a membership repeats
/// them.
// limit: options of a UDP socket for a later kernel socket
const SETTINGS_MAX: usize = 256;

/// Returns `log` with a change of a membership: what the change undoes is left out.
///
/// # Errors
/// `ENOBUFS` if the options become too many.
pub(super) fn with_membership(
    log: &[Setting],
    (level, name): (c_int, c_int),
    value: &[u8],
    request: &MembershipRequest,
) -> Result<Vec<Setting>, Errno> {
    let mut changed = log.to_vec();
    if !undo(&mut changed, request) {
        changed.push((level, name, value.into()));
    }
    if changed.len() > SETTINGS_MAX && changed.len() > log.len() { Err(Errno::NOBUFS) } else { Ok(changed) }
}

/// Returns what an option does to the membership that `request` changes; `None` if it is about another one.
fn action_on(request: &MembershipRequest, (level, name, value): &Setting) -> Option<MembershipAction> {
    let found = MembershipRequest::read(*level, *name, value).ok()??;
    let is_same = found.group == request.group && found.interface == request.interface;
    is_same.then_some(found.action)
}

/// Returns whether an action can make a socket a member of a group.
fn is_joining(action: &MembershipAction) -> bool {
    matches!(action, MembershipAction::Join | MembershipAction::Source { joins: true, .. })
}

/// Removes the options that a change makes superfluous. Returns whether the change is superfluous then, too.
fn undo(log: &mut Vec<Setting>, request: &MembershipRequest) -> bool {
    match &request.action {
        MembershipAction::Join => false,
        MembershipAction::Leave => remove_all(log, request),
        MembershipAction::Filter { mode: FilterMode::Include, sources } if sources.is_empty() => {
            remove_all(log, request)
        }
        MembershipAction::Filter { .. } => {
            log.retain(|entry| action_on(request, entry).is_none_or(|action| is_joining(&action)));
            false
        }
        MembershipAction::Source { add: true, .. } => false,
        MembershipAction::Source { source, mode, add: false, .. } => {
            let is_listing = |action: &MembershipAction| {
                matches!(action, MembershipAction::Source { source: of, mode: to, add: true, .. }
                    if (of, to) == (source, mode))
            };
            // Without its last source the socket leaves, even if it has joined without sources.
            let has_joined =
                log.iter().any(|entry| action_on(request, entry) == Some(MembershipAction::Join));
            if has_joined && *mode == FilterMode::Include {
                return false;
            }
            // A whole filter lists the sources anew.
            let last = log.iter().enumerate().rev().find_map(|(at, entry)| {
                let action = action_on(request, entry)?;
                (is_listing(&action) || matches!(action, MembershipAction::Filter { .. }))
                    .then_some((at, is_listing(&action)))
            });
            if let Some((at, true)) = last {
                log.remove(at);
                return true;
            }
            false
        }
    }
}

/// Removes all options about a membership. Returns whether that of joining was among them; otherwise the
/// program has named the interface in another way.
fn remove_all(log: &mut Vec<Setting>, request: &MembershipRequest) -> bool {
    let mut has_joined = false;
    log.retain(|entry| match action_on(request, entry) {
        Some(action) => {
            has_joined |= is_joining(&action);
            false
        }
        None => true,
    });
    has_joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::multicast::request::IP_MSFILTER;
    use libc::{
        IP_ADD_MEMBERSHIP, IP_ADD_SOURCE_MEMBERSHIP, IP_BLOCK_SOURCE, IP_DROP_MEMBERSHIP,
        IP_DROP_SOURCE_MEMBERSHIP, IP_MULTICAST_TTL, IP_UNBLOCK_SOURCE, IPPROTO_IP,
    };

    fn change(log: &mut Vec<Setting>, name: c_int, value: &[u8]) -> Result<usize, Errno> {
        let request = MembershipRequest::read(IPPROTO_IP, name, value).unwrap().unwrap();
        *log = with_membership(log, (IPPROTO_IP, name), value, &request)?;
        Ok(log.len())
    }

    /// Returns `struct ip_mreq`, or `struct ip_mreq_source` with a source.
    fn mreq(group: u8, source: Option<u8>) -> Vec<u8> {
        let mut value = vec![239, 1, 2, group, 127, 0, 0, 1];
        value.extend(source.iter().flat_map(|last| [10, 0, 0, *last]));
        value
    }

    fn filter(group: u8, mode: u8, sources: &[u8]) -> Vec<u8> {
        let mut value = mreq(group, None);
        value.extend(u32::from(mode).to_ne_bytes());
        value.extend((sources.len() as u32).to_ne_bytes());
        sources.iter().for_each(|last| value.extend([10, 0, 0, *last]));
        value
    }

    #[test]
    fn leaving_removes_the_options_of_the_group() {
        let mut log: Vec<Setting> = vec![(IPPROTO_IP, IP_MULTICAST_TTL, vec![9].into_boxed_slice())];
        assert_eq!(change(&mut log, IP_ADD_MEMBERSHIP, &mreq(1, None)), Ok(2));
        assert_eq!(change(&mut log, IP_ADD_MEMBERSHIP, &mreq(2, None)), Ok(3));
        assert_eq!(change(&mut log, IP_BLOCK_SOURCE, &mreq(1, Some(7))), Ok(4));
        assert_eq!(change(&mut log, IP_DROP_MEMBERSHIP, &mreq(1, None)), Ok(2));
        assert_eq!((log[0].1, &log[1].2[..]), (IP_MULTICAST_TTL, &mreq(2, None)[..]));
        // Any interface: the option is kept, because the kernel must look for the membership.
        let anywhere = [239, 1, 2, 2, 0, 0, 0, 0];
        assert_eq!(change(&mut log, IP_DROP_MEMBERSHIP, &anywhere), Ok(3));
    }

    #[test]
    fn sources_and_filters_replace_earlier_ones() {
        let mut log = Vec::new();
        assert_eq!(change(&mut log, IP_ADD_SOURCE_MEMBERSHIP, &mreq(1, Some(7))), Ok(1));
        assert_eq!(change(&mut log, IP_ADD_SOURCE_MEMBERSHIP, &mreq(1, Some(8))), Ok(2));
        assert_eq!(change(&mut log, IP_DROP_SOURCE_MEMBERSHIP, &mreq(1, Some(7))), Ok(1));
        assert_eq!(change(&mut log, IP_DROP_SOURCE_MEMBERSHIP, &mreq(1, Some(8))), Ok(0), "left");
        change(&mut log, IP_ADD_MEMBERSHIP, &mreq(1, None)).unwrap();
        change(&mut log, IP_ADD_SOURCE_MEMBERSHIP, &mreq(1, Some(7))).unwrap();
        assert_eq!(change(&mut log, IP_DROP_SOURCE_MEMBERSHIP, &mreq(1, Some(7))), Ok(3), "leaves");
        assert_eq!(change(&mut log, IP_DROP_MEMBERSHIP, &mreq(1, None)), Ok(0));
        change(&mut log, IP_ADD_MEMBERSHIP, &mreq(1, None)).unwrap();
        for last in 0..100 {
            assert_eq!(change(&mut log, IP_BLOCK_SOURCE, &mreq(1, Some(last))), Ok(2));
            assert_eq!(change(&mut log, IP_UNBLOCK_SOURCE, &mreq(1, Some(last))), Ok(1));
        }
        for last in 0..100 {
            assert_eq!(change(&mut log, IP_MSFILTER, &filter(1, 0, &[last])), Ok(2));
        }
        assert_eq!(change(&mut log, IP_UNBLOCK_SOURCE, &mreq(1, Some(99))), Ok(3), "in the filter");
        assert_eq!(change(&mut log, IP_MSFILTER, &filter(1, 1, &[])), Ok(0), "an empty filter leaves");
    }

    // limit: options of a UDP socket for a later kernel socket
    #[test]
    fn options_are_limited() {
        let mut log = Vec::new();
        for number in 0..256u32 {
            let group = [&[239, 9][..], &(number as u16).to_be_bytes(), &[127, 0, 0, 1]].concat();
            change(&mut log, IP_ADD_MEMBERSHIP, &group).unwrap();
        }
        assert_eq!(change(&mut log, IP_ADD_MEMBERSHIP, &mreq(1, None)), Err(Errno::NOBUFS));
        assert_eq!(change(&mut log, IP_DROP_MEMBERSHIP, &[239, 9, 0, 7, 127, 0, 0, 1]), Ok(255));
        assert_eq!(change(&mut log, IP_ADD_MEMBERSHIP, &mreq(1, None)), Ok(256));
    }
}
