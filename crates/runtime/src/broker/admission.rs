//! Admission limits per user: decides which user loses a connection to the broker, and which user is
//! admitted. No user can keep the processes of another user out, even if one person owns many users.
//!
//! Users other than the stack's own and root are unprivileged. They reach the broker through a process that
//! is attached already, and one person may own many of them: the creator of a user namespace gets all users
//! of a range of subuid(5), 65,536 consecutive numbers.

use std::collections::BTreeMap;

/// Limits of the connections and of the unattached processes that a broker has at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdmissionLimits {
    /// Connections without a first message. At the limit, the oldest one of the user that has most of them is
    /// closed.
    pub pending_max: usize,
    /// Unattached processes of all users. A user may have no more of them than it leaves free, so a single
    /// user gets half; all unprivileged users together get half.
    pub unattached_max: usize,
}

impl Default for AdmissionLimits {
    fn default() -> Self {
        // limit: connections to the broker before their first message
        // limit: unattached processes
        Self { pending_max: 1024, unattached_max: 16_384 }
    }
}

impl AdmissionLimits {
    /// Divisor of the descriptor limit: an unattached process takes two descriptors, and all of them may take
    /// no more than half of the descriptors of this process.
    const DESCRIPTOR_LIMIT_DIVISOR: u64 = 4;

    /// Returns how many unattached processes may connect if this process may have `descriptors` descriptors
    /// (`None`: any number).
    pub fn unattached(&self, descriptors: Option<u64>) -> usize {
        let share = descriptors.map_or(u64::MAX, |limit| limit / Self::DESCRIPTOR_LIMIT_DIVISOR);
        usize::try_from(share).map_or(self.unattached_max, |share| share.min(self.unattached_max))
    }
}

/// A user with a connection to the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerUser {
    pub uid: u32,
    /// True for the stack's own user and for root.
    pub is_privileged: bool,
}

impl PeerUser {
    /// Returns the range of users that may belong to one person. Below 65,536 (system users and people) each
    /// user is a range of its own; above, each aligned block of 65,536 users is one range. A range of
    /// subuid(5) may overlap two blocks.
    fn uid_range(self) -> u64 {
        let (row, offset) = (u64::from(self.uid >> 16), u64::from(self.uid & 0xffff));
        if row == 0 { offset } else { row << 16 }
    }
}

/// Returns the most frequent item. Of equally frequent ones the highest, so that root and system users are
/// picked last.
fn most_frequent<T: Ord>(all: impl Iterator<Item = T>) -> Option<T> {
    let mut counts = BTreeMap::<T, usize>::new();
    for item in all {
        *counts.entry(item).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(item, _)| item)
}

/// Picks the user that loses a connection to admit another; `None` if there are fewer than `max` connections.
/// The candidates are the unprivileged users if these have more than half of `max`, and otherwise all users.
/// Of the candidates, the range with the most connections is picked, and of that range the user with the
/// most. The caller evicts the oldest connection of the user.
pub(super) fn pick_user_to_evict(all: impl Iterator<Item = PeerUser> + Clone, max: usize) -> Option<u32> {
    if all.clone().count() < max {
        return None;
    }
    let unprivileged = all.clone().filter(|applicant| !applicant.is_privileged).count();
    let candidates = all.filter(|applicant| unprivileged <= max / 2 || !applicant.is_privileged);
    let range = most_frequent(candidates.clone().map(PeerUser::uid_range));
    most_frequent(
        candidates.filter(|applicant| Some(applicant.uid_range()) == range).map(|applicant| applicant.uid),
    )
}

/// Returns whether one more entry of `applicant` is admitted below `max` entries of all users. A user, and a
/// range of users, may have no more entries than it leaves free: the first user gets half of `max`, the
/// second half of the rest, and so on. All unprivileged users together share half of `max` in this way.
pub(super) fn is_admitted(applicant: PeerUser, all: impl Iterator<Item = PeerUser>, max: usize) -> bool {
    let (mut same_uid, mut same_range, mut unprivileged, mut count) = (0, 0, 0, 0);
    for item in all {
        count += 1;
        unprivileged += usize::from(!item.is_privileged);
        same_uid += usize::from(item.uid == applicant.uid);
        same_range += usize::from(item.uid_range() == applicant.uid_range());
    }
    if applicant.is_privileged {
        return same_uid < max.saturating_sub(count);
    }
    same_uid.max(same_range) < (max / 2).saturating_sub(unprivileged) && count < max
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An unprivileged user, in a user namespace or not.
    fn unprivileged_user(user: u32) -> PeerUser {
        PeerUser { uid: user, is_privileged: false }
    }

    const PRIVILEGED: PeerUser = PeerUser { uid: 1000, is_privileged: true };

    #[test]
    fn user_with_most_connections_is_evicted() {
        let of =
            |users: &[u32], max| pick_user_to_evict(users.iter().map(|user| unprivileged_user(*user)), max);
        assert_eq!((of(&[], 0), of(&[3], 2), of(&[3], 1)), (None, None, Some(3)));
        assert_eq!((of(&[3, 7, 7, 5], 4), of(&[7, 3, 7, 3], 4)), (Some(7), Some(7)));
        // One person owns several users with one connection each.
        assert_eq!(of(&[3, 3, 100_000, 100_001, 100_002], 5), Some(100_002));
        assert_eq!(of(&[3, 3, 3, 100_000, 100_001], 5), Some(3));
    }

    // limit: connections to the broker before their first message
    #[test]
    fn privileged_user_is_evicted_only_if_unprivileged_are_few() {
        let with = |privileged: usize, unprivileged: u32, max| {
            // Each user is in a range of its own.
            let unprivileged = (1..=unprivileged).map(|row| unprivileged_user(row << 16));
            pick_user_to_evict(core::iter::repeat_n(PRIVILEGED, privileged).chain(unprivileged), max)
        };
        assert_eq!(with(4, 4, 8), Some(1000));
        assert_eq!(with(3, 5, 8), Some(5 << 16));
        assert_eq!(with(8, 0, 8), Some(1000));
        assert_eq!(with(0, 8, 8), Some(8 << 16));
        assert_eq!(with(3, 4, 8), None);
    }

    // limit: unattached processes
    #[test]
    fn every_user_leaves_room_for_the_next() {
        let mut admitted = Vec::new();
        for (user, gets) in [(1, 64), (2, 32), (3, 16), (4, 8), (5, 4), (6, 2), (7, 1), (8, 1), (9, 0)] {
            let applicant = PeerUser { uid: user, is_privileged: true };
            while is_admitted(applicant, admitted.iter().copied(), 128) {
                admitted.push(applicant);
            }
            assert_eq!(admitted.iter().filter(|item| **item == applicant).count(), gets, "user {user}");
        }
        // An entry that is removed makes room for any user.
        admitted.retain(|applicant| applicant.uid != 1);
        assert!(is_admitted(PeerUser { uid: 8, is_privileged: true }, admitted.iter().copied(), 128));
        assert!(!is_admitted(
            PeerUser { uid: 1, is_privileged: true },
            admitted.iter().copied(),
            admitted.len()
        ));
    }

    #[test]
    fn a_range_of_users_counts_as_one() {
        let mut admitted = Vec::new();
        // A range that overlaps two blocks; then users of all blocks.
        let range = 100_000..165_536;
        for applicant in range.clone().map(unprivileged_user) {
            if is_admitted(applicant, admitted.iter().copied(), 128) {
                admitted.push(applicant);
            }
        }
        assert_eq!(admitted.len(), 32 + 16);
        for user in [1001, 1002] {
            assert!(is_admitted(unprivileged_user(user), admitted.iter().copied(), 128));
        }
        // Unprivileged users never get more than half.
        let all = (0..u32::MAX >> 16).map(|row| unprivileged_user(row << 16 | 7));
        for applicant in all {
            while is_admitted(applicant, admitted.iter().copied(), 128) {
                admitted.push(applicant);
            }
        }
        assert_eq!(admitted.len(), 64);
        while is_admitted(PRIVILEGED, admitted.iter().copied(), 128) {
            admitted.push(PRIVILEGED);
        }
        assert_eq!(admitted.len(), 64 + 32);
    }
}
