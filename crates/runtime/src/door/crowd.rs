//! Who must make room, and for whom there is some: one user's processes keep no other's out, nor do those of many users that one person is.
//!
//! The stack's own user, and root, are at home. Others come behind somebody inside, and may be many: who makes a user namespace is as many users as subuid(5) gives, 65,536 numbers in a row.

use std::collections::BTreeMap;

/// A user, as far as places at the door go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Comer {
    pub user: u32,
    /// It is the stack's own user, or root.
    pub at_home: bool,
}

impl Comer {
    /// Those who may be one person: users of the system and people have the lower numbers, and each is somebody; above that all in a row of 65,536 are one. A range of somebody's may stand in
    /// two such rows.
    fn party(self) -> u64 {
        let (rows, within) = (u64::from(self.user >> 16), u64::from(self.user & 0xffff));
        if rows == 0 { within } else { rows << 16 }
    }
}

/// What comes most often. Of equals the highest, so that root and users of the system are the last to go.
fn most<T: Ord>(all: impl Iterator<Item = T>) -> Option<T> {
    let mut counts = BTreeMap::<T, usize>::new();
    for one in all {
        *counts.entry(one).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(one, _)| one)
}

/// Whose place is given to one more, where these are there, of whom there may be `max`: that of somebody who is not at home, if those have more than half; of the party that has most, and of it of the
/// user who has most. Of its own there are enough. `None`: there are fewer.
pub(super) fn who_makes_room(all: impl Iterator<Item = Comer> + Clone, max: usize) -> Option<u32> {
    if all.clone().count() < max {
        return None;
    }
    let others = all.clone().filter(|comer| !comer.at_home).count();
    let able = all.filter(|comer| others <= max / 2 || !comer.at_home);
    let party = most(able.clone().map(Comer::party));
    most(able.filter(|comer| Some(comer.party()) == party).map(|comer| comer.user))
}

/// Whether one more of a user fits, where there may be `max` of all users: a user has no more than it leaves free, and no more has a party. So one alone gets half of them, a second one half of the
/// rest, and the next finds some, too. Those who are not at home share half of the places so, whoever and however many they are.
pub(super) fn has_room(comer: Comer, all: impl Iterator<Item = Comer>, max: usize) -> bool {
    let (mut its, mut its_partys, mut others, mut count) = (0, 0, 0, 0);
    for one in all {
        count += 1;
        others += usize::from(!one.at_home);
        its += usize::from(one.user == comer.user);
        its_partys += usize::from(one.party() == comer.party());
    }
    if comer.at_home {
        return its < max.saturating_sub(count);
    }
    its.max(its_partys) < (max / 2).saturating_sub(others) && count < max
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a person, in a namespace or not.
    fn other(user: u32) -> Comer {
        Comer { user, at_home: false }
    }

    const HOME: Comer = Comer { user: 1000, at_home: true };

    #[test]
    fn whoever_has_most_makes_room() {
        let of = |users: &[u32], max| who_makes_room(users.iter().map(|user| other(*user)), max);
        assert_eq!((of(&[], 0), of(&[3], 2), of(&[3], 1)), (None, None, Some(3)));
        assert_eq!((of(&[3, 7, 7, 5], 4), of(&[7, 3, 7, 3], 4)), (Some(7), Some(7)));
        // One person is many users, each with one.
        assert_eq!(of(&[3, 3, 100_000, 100_001, 100_002], 5), Some(100_002));
        assert_eq!(of(&[3, 3, 3, 100_000, 100_001], 5), Some(3));
    }

    // limit: connections to the broker before their first message
    #[test]
    fn who_is_at_home_makes_room_only_where_most_are() {
        let with = |at_home: usize, others: u32, max| {
            // Each is a party of its own.
            let others = (1..=others).map(|row| other(row << 16));
            who_makes_room(core::iter::repeat_n(HOME, at_home).chain(others), max)
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
        let mut there = Vec::new();
        for (user, gets) in [(1, 64), (2, 32), (3, 16), (4, 8), (5, 4), (6, 2), (7, 1), (8, 1), (9, 0)] {
            let comer = Comer { user, at_home: true };
            while has_room(comer, there.iter().copied(), 128) {
                there.push(comer);
            }
            assert_eq!(there.iter().filter(|one| **one == comer).count(), gets, "user {user}");
        }
        // Who goes makes room for any.
        there.retain(|comer| comer.user != 1);
        assert!(has_room(Comer { user: 8, at_home: true }, there.iter().copied(), 128));
        assert!(!has_room(Comer { user: 1, at_home: true }, there.iter().copied(), there.len()));
    }

    #[test]
    fn many_users_have_no_more_than_one_where_they_may_be_one_person() {
        let mut there = Vec::new();
        // A range that stands in two rows; then everybody else.
        let range = 100_000..165_536;
        for comer in range.clone().map(other) {
            if has_room(comer, there.iter().copied(), 128) {
                there.push(comer);
            }
        }
        assert_eq!(there.len(), 32 + 16);
        for user in [1001, 1002] {
            assert!(has_room(other(user), there.iter().copied(), 128));
        }
        // Whatever others do, half is for those at home.
        let all = (0..u32::MAX >> 16).map(|row| other(row << 16 | 7));
        for comer in all {
            while has_room(comer, there.iter().copied(), 128) {
                there.push(comer);
            }
        }
        assert_eq!(there.len(), 64);
        while has_room(HOME, there.iter().copied(), 128) {
            there.push(HOME);
        }
        assert_eq!(there.len(), 64 + 32);
    }
}
