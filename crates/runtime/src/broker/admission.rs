//! Who must make room, and for whom there is some: one user's processes keep no other's out, nor do those of many users that one person is.
//!
//! The stack's own user, and root, are at home. Others come behind somebody inside, and may be many: who makes a user namespace is as many users as subuid(5) gives, 65,536 numbers in a row.

use std::collections::BTreeMap;

/// A user, as far as places at the door go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerUser {
    pub uid: u32,
    /// It is the stack's own user, or root.
    pub is_privileged: bool,
}

impl PeerUser {
    /// Those who may be one person: users of the system and people have the lower numbers, and each is somebody; above that all in a row of 65,536 are one. A range of somebody's may stand in
    /// two such rows.
    fn uid_range(self) -> u64 {
        let (row, offset) = (u64::from(self.uid >> 16), u64::from(self.uid & 0xffff));
        if row == 0 { offset } else { row << 16 }
    }
}

/// What comes most often. Of equals the highest, so that root and users of the system are the last to go.
fn most_frequent<T: Ord>(all: impl Iterator<Item = T>) -> Option<T> {
    let mut counts = BTreeMap::<T, usize>::new();
    for item in all {
        *counts.entry(item).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(item, _)| item)
}

/// Whose place is given to one more, where these are there, of whom there may be `max`: that of somebody who is not at home, if those have more than half; of the party that has most, and of it of the
/// user who has most. Of its own there are enough. `None`: there are fewer.
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

/// Whether one more of a user fits, where there may be `max` of all users: a user has no more than it leaves free, and no more has a party. So one alone gets half of them, a second one half of the
/// rest, and the next finds some, too. Those who are not at home share half of the places so, whoever and however many they are.
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

    /// Of a person, in a namespace or not.
    fn unprivileged_user(user: u32) -> PeerUser {
        PeerUser { uid: user, is_privileged: false }
    }

    const PRIVILEGED: PeerUser = PeerUser { uid: 1000, is_privileged: true };

    #[test]
    fn whoever_has_most_makes_room() {
        let of =
            |users: &[u32], max| pick_user_to_evict(users.iter().map(|user| unprivileged_user(*user)), max);
        assert_eq!((of(&[], 0), of(&[3], 2), of(&[3], 1)), (None, None, Some(3)));
        assert_eq!((of(&[3, 7, 7, 5], 4), of(&[7, 3, 7, 3], 4)), (Some(7), Some(7)));
        // One person is many users, each with one.
        assert_eq!(of(&[3, 3, 100_000, 100_001, 100_002], 5), Some(100_002));
        assert_eq!(of(&[3, 3, 3, 100_000, 100_001], 5), Some(3));
    }

    // limit: connections to the broker before their first message
    #[test]
    fn who_is_at_home_makes_room_only_where_most_are() {
        let with = |at_home: usize, unprivileged: u32, max| {
            // Each is a party of its own.
            let unprivileged = (1..=unprivileged).map(|row| unprivileged_user(row << 16));
            pick_user_to_evict(core::iter::repeat_n(PRIVILEGED, at_home).chain(unprivileged), max)
        };
        assert_eq!(with(4, 4, 8), Some(1000));
        assert_eq!(with(3, 5, 8), Some(5 << 16));
        assert_eq!(with(8, 0, 8), Some(1000));
        assert_eq!(with(0, 8, 8), Some(8 << 16));
        assert_eq!(with(3, 4, 8), None);
    }

    // limit: unattached processes
    #[test]
    fn nobody_takes_what_the_next_one_needs() {
        let mut admitted = Vec::new();
        for (user, gets) in [(1, 64), (2, 32), (3, 16), (4, 8), (5, 4), (6, 2), (7, 1), (8, 1), (9, 0)] {
            let applicant = PeerUser { uid: user, is_privileged: true };
            while is_admitted(applicant, admitted.iter().copied(), 128) {
                admitted.push(applicant);
            }
            assert_eq!(admitted.iter().filter(|item| **item == applicant).count(), gets, "user {user}");
        }
        // Who goes makes room for any.
        admitted.retain(|applicant| applicant.uid != 1);
        assert!(is_admitted(PeerUser { uid: 8, is_privileged: true }, admitted.iter().copied(), 128));
        assert!(!is_admitted(
            PeerUser { uid: 1, is_privileged: true },
            admitted.iter().copied(),
            admitted.len()
        ));
    }

    #[test]
    fn many_users_have_no_more_than_one_where_they_may_be_one_person() {
        let mut admitted = Vec::new();
        // A range that stands in two rows; then everybody else.
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
        // Whatever others do, half is for those at home.
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
