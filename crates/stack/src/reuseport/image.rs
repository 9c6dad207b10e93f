//! Groups of sockets in an image of a stack.

use super::{GroupKey, ReuseportGroup, ReuseportGroups};
use crate::socket_filter::SocketFilter;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A group: its key, its members in order, and its program.
#[derive(Serialize, Deserialize)]
#[serde(rename = "ReuseportGroup")]
pub(crate) struct GroupImage {
    key: GroupKey,
    members: Vec<u32>,
    program: Option<Vec<u8>>,
}

impl ReuseportGroups {
    /// Returns the image.
    pub(crate) fn image(&self) -> Vec<GroupImage> {
        let group = |(key, group): (&GroupKey, &ReuseportGroup)| GroupImage {
            key: *key,
            members: group.members.clone(),
            program: group.program.as_ref().map(|program| program.saved()),
        };
        self.groups.iter().map(group).collect()
    }

    /// Takes over the groups of an image. `make` makes the programs again, and `group_of` returns the group
    /// that a member must have; there are `members` sockets with groups.
    ///
    /// # Errors
    /// A program was not made, or the image is malformed.
    pub(crate) fn restore(
        &mut self,
        image: Vec<GroupImage>,
        mut make: impl FnMut(&[u8]) -> Option<Arc<dyn SocketFilter>>,
        group_of: impl Fn(u32) -> Option<GroupKey>,
        members: usize,
    ) -> Result<(), &'static str> {
        let mut all = Vec::new();
        for GroupImage { key, members, program } in image {
            if members.is_empty() || members.iter().any(|member| group_of(*member) != Some(key)) {
                return Err("a group of sockets that share an address has a wrong member");
            }
            let program = match program {
                Some(saved) => Some(make(&saved).ok_or("the program of a group was not made again")?),
                None => None,
            };
            self.programs += usize::from(program.is_some());
            all.extend_from_slice(&members);
            if self.groups.insert(key, ReuseportGroup { members, program }).is_some() {
                return Err("two groups of sockets share an address");
            }
        }
        all.sort_unstable();
        all.dedup();
        let count: usize = self.groups.values().map(|group| group.members.len()).sum();
        if all.len() == members && count == members {
            Ok(())
        } else {
            Err("a socket is in no group of its address, or twice in it")
        }
    }
}
