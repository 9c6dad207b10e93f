//! Groups of sockets that share an address (`SO_REUSEPORT`), and the programs that select the member of a
//! group for a packet (`SO_ATTACH_REUSEPORT_CBPF`), as in Linux's `sock_reuseport.c`.

pub(crate) mod image;

use crate::error::GroupError;
use crate::socket_filter::{FilteredPacket, SocketFilter};
use core::net::SocketAddr;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Identifies a group by what its members have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct GroupKey {
    /// The address that they are bound to.
    pub local: SocketAddr,
    /// True if they leave IPv4 to others.
    pub v6_only: bool,
    /// The user who owns them.
    pub uid: u32,
}

/// A group.
#[derive(Debug, Default)]
struct ReuseportGroup {
    /// The members in the order in which they joined, except that the last one takes the place of one that
    /// leaves (`reuseport_detach_sock`).
    members: Vec<u32>,
    program: Option<Arc<dyn SocketFilter>>,
}

/// The groups of a shard's listeners, or of its UDP sockets. Members are slots of their table.
#[derive(Debug, Default)]
pub(crate) struct ReuseportGroups {
    groups: BTreeMap<GroupKey, ReuseportGroup>,
    /// The number of groups with a program.
    programs: usize,
}

impl ReuseportGroups {
    /// Adds a member to a group. Returns whether the group has a program.
    pub fn join(&mut self, key: GroupKey, member: u32) -> bool {
        let group = self.groups.entry(key).or_default();
        group.members.push(member);
        group.program.is_some()
    }

    /// Removes a member from a group. A group without members loses its program.
    pub fn leave(&mut self, key: &GroupKey, member: u32) {
        let Some(group) = self.groups.get_mut(key) else { return };
        if let Some(at) = group.members.iter().position(|other| *other == member) {
            group.members.swap_remove(at);
        }
        if group.members.is_empty()
            && let Some(group) = self.groups.remove(key)
        {
            self.programs -= usize::from(group.program.is_some());
        }
    }

    /// Returns whether any group has a program.
    #[inline(always)]
    pub fn has_programs(&self) -> bool {
        self.programs > 0
    }

    /// Returns whether a group has a program.
    pub fn has_program(&self, key: &GroupKey) -> bool {
        self.groups.get(key).is_some_and(|group| group.program.is_some())
    }

    /// Returns the members of a group.
    pub fn members(&self, key: &GroupKey) -> &[u32] {
        self.groups.get(key).map_or(&[], |group| &group.members)
    }

    /// Sets the program of a group; `None` removes it. With `is_first` the group may have one member only.
    ///
    /// # Errors
    /// There is no such group, the group has no program to remove, or more members than one.
    pub fn set_program(
        &mut self,
        key: &GroupKey,
        program: Option<Arc<dyn SocketFilter>>,
        is_first: bool,
    ) -> Result<(), GroupError> {
        let group = self.groups.get_mut(key).ok_or(GroupError::NotInGroup)?;
        if is_first && group.members.len() > 1 {
            return Err(GroupError::InUse);
        }
        if program.is_none() && group.program.is_none() {
            return Err(GroupError::NoProgram);
        }
        self.programs += usize::from(program.is_some());
        self.programs -= usize::from(group.program.is_some());
        group.program = program;
        Ok(())
    }

    /// Returns the member that the program of a group selects for a packet. `None` if there is no program, or
    /// if the group has no member with the index that the program returns (`run_bpf_filter`).
    pub fn select(&self, key: &GroupKey, packet: &FilteredPacket<'_>) -> Option<u32> {
        let group = self.groups.get(key)?;
        let index = group.program.as_ref()?.run(packet);
        group.members.get(index as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the first byte of the packet.
    #[derive(Debug)]
    struct FirstByte;

    impl SocketFilter for FirstByte {
        fn run(&self, packet: &FilteredPacket<'_>) -> u32 {
            packet.bytes[0].into()
        }

        fn code(&self) -> &[u8] {
            &[]
        }
    }

    #[test]
    fn programs_select_members_in_the_order_of_linux() {
        let key = |port: u16| GroupKey { local: ([0; 4], port).into(), v6_only: false, uid: 0 };
        let mut groups = ReuseportGroups::default();
        let program = || Some(Arc::new(FirstByte) as Arc<dyn SocketFilter>);
        assert_eq!(groups.set_program(&key(1), program(), true), Err(GroupError::NotInGroup));
        assert!(!groups.join(key(1), 10));
        assert_eq!(groups.set_program(&key(1), None, false), Err(GroupError::NoProgram));
        assert_eq!(groups.set_program(&key(1), program(), true), Ok(()));
        assert!(
            [11, 12, 13].map(|member| groups.join(key(1), member)).iter().all(|has_program| *has_program)
        );
        assert_eq!(groups.set_program(&key(1), program(), true), Err(GroupError::InUse));
        assert_eq!(groups.set_program(&key(1), program(), false), Ok(()));
        assert!(!groups.join(key(2), 20));
        let select = |groups: &ReuseportGroups, port: u16| {
            [0, 1, 2, 3, 4].map(|byte| {
                let packet = FilteredPacket {
                    bytes: &[byte],
                    header_len: 0,
                    network: &[],
                    frame: &[],
                    destination: [0; 4].into(),
                    is_broadcast: false,
                    link: crate::handle::LinkId(0),
                    is_loopback: true,
                };
                groups.select(&key(port), &packet)
            })
        };
        assert_eq!(select(&groups, 1), [Some(10), Some(11), Some(12), Some(13), None]);
        assert_eq!(select(&groups, 2), [None; 5]);
        groups.leave(&key(1), 11);
        assert_eq!(select(&groups, 1), [Some(10), Some(13), Some(12), None, None]);
        assert_eq!((groups.members(&key(1)), groups.members(&key(3))), (&[10, 13, 12][..], &[][..]));
        [10, 12].iter().for_each(|member| groups.leave(&key(1), *member));
        assert!(groups.has_programs());
        groups.leave(&key(1), 13);
        assert!(!groups.has_programs() && !groups.join(key(1), 14));
        assert_eq!(groups.set_program(&key(1), program(), true), Ok(()));
        assert_eq!(groups.set_program(&key(1), None, false), Ok(()));
        assert!(!groups.has_programs());
    }
}
