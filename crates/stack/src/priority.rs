//! Order of packets: the eight priorities of IEEE 802.1Q, as sockets have them on Linux (`SO_PRIORITY`) and
//! as [`Label`] carries them.
//!
//! Their order is the one that 802.1Q recommends if each has a traffic class of its own (Table 8-5): 0, the
//! default, is best effort, and only 1, background, comes after it; 2 to 7 come before, the highest first.
//! Selection is strict (§8.6.8.1): a higher priority is never delayed by a lower one.

mod class_limits;
mod classed_queue;
mod numbers;

pub use class_limits::ClassLimits;
pub use classed_queue::{ClassedQueue, QueueClass};
pub use numbers::PrioritizedNumbers;

use crate::device::{Label, RxBurst};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// False only in the build with which the bench `priority-off-cost` compares
/// (`--cfg ginnel_without_priorities`): what classes need in the usual path of a packet is left out there.
pub const COMPILED: bool = !cfg!(ginnel_without_priorities);

/// Number of priorities, and of the classes in which they are processed.
pub const CLASSES: usize = Label::PRIORITY_MAX as usize + 1;

/// The class of best effort, the default priority.
pub const BEST_EFFORT: u8 = 1;

/// Returns the class of a priority: the higher, the earlier. Values above the highest priority are treated as
/// the highest.
#[must_use]
pub const fn class(priority: u8) -> u8 {
    match priority {
        0 => BEST_EFFORT,
        1 => 0,
        2..=Label::PRIORITY_MAX => priority,
        _ => Label::PRIORITY_MAX,
    }
}

/// Returns the priority of a class, the inverse of [`class`].
#[must_use]
pub const fn of_class(class: u8) -> u8 {
    match class {
        BEST_EFFORT => 0,
        0 => 1,
        2..=Label::PRIORITY_MAX => class,
        _ => Label::PRIORITY_MAX,
    }
}

/// Returns the priority that Linux derives from a type of service (`rt_tos2priority`), which looks at the
/// four bits of RFC 1349.
#[must_use]
pub const fn of_tos(tos: u8) -> u8 {
    match tos >> 3 & 3 {
        0 => 0,
        // "Maximize throughput" (TC_PRIO_BULK).
        1 => 2,
        // "Minimize delay" (TC_PRIO_INTERACTIVE).
        2 => 6,
        // Both (TC_PRIO_INTERACTIVE_BULK).
        _ => 4,
    }
}

/// Sorts the frames of a burst into the order in which they are processed: by class, and within a class in
/// the order of arrival. Must be called if a frame has a priority other than 0.
#[cold]
pub fn sort(burst: &mut RxBurst<'_>) {
    // Index of the next frame of each class, the highest class first.
    let mut next = [0; CLASSES];
    for frame in burst.iter() {
        next[usize::from(class(frame.label.priority()))] += 1;
    }
    let mut before = 0;
    for index in next.iter_mut().rev() {
        (*index, before) = (before, before + *index);
    }
    let arrived = burst.clone();
    for frame in arrived {
        let index = &mut next[usize::from(class(frame.label.priority()))];
        burst[*index] = frame;
        *index += 1;
    }
}

/// A set of classes: bit `c` stands for class `c`.
pub type ClassSet = u8;

/// Chooses the class whose work is done next: the highest one with work, except that the classes below a
/// class with work get a minimum share together, and among themselves likewise.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClassScheduler {
    /// Units of lower classes for each unit of a class, in parts of [`UNIT`].
    lower_units: u64,
    /// For each class, what its work owes to the classes below it, in parts of [`UNIT`].
    owed: [u64; CLASSES],
}

/// One unit of work, in the fixed-point numbers of [`ClassScheduler`].
const UNIT: u64 = 1 << 16;

/// Largest debt of a class, so that lower classes never take many units at a time.
const OWED_MAX: u64 = 64 * UNIT;

impl ClassScheduler {
    /// Creates a scheduler in which the classes below a class with work get `lower_share_percent` of the
    /// work: 0 to 50.
    #[must_use]
    pub const fn new(lower_share_percent: u32) -> Self {
        let share = if lower_share_percent > 50 { 50 } else { lower_share_percent as u64 };
        Self { lower_units: (share * UNIT).div_ceil(100 - share), owed: [0; CLASSES] }
    }

    /// Returns the class whose turn it is among the classes with work; `None` if the set is empty.
    #[must_use]
    pub fn pick(&self, with_work: ClassSet) -> Option<u8> {
        let mut candidates = with_work;
        loop {
            let highest = candidates.checked_ilog2()? as u8;
            let lower = candidates & !(1 << highest);
            if lower == 0 || self.owed[usize::from(highest)] < UNIT {
                return Some(highest);
            }
            candidates = lower;
        }
    }

    /// Returns how many units of work of the picked class may be done before the next pick.
    #[must_use]
    pub fn units(&self, class: u8, with_work: ClassSet) -> usize {
        let higher = (usize::from(class) + 1..CLASSES).filter(|higher| with_work >> higher & 1 != 0);
        let owed = higher.map(|higher| self.owed[higher] / UNIT).min().unwrap_or(u64::MAX);
        // The debt of this class stays below its bound.
        let has_lower_work = with_work & ((1 << class) - 1) as ClassSet != 0;
        let bound = if has_lower_work { OWED_MAX / self.lower_units.max(1) } else { u64::MAX };
        usize::try_from(owed.min(bound).max(1)).unwrap_or(usize::MAX)
    }

    /// Accounts for `units` of work of a class, where `with_work` are the classes with work. The class owes a
    /// share to the lower classes with work, and higher classes have paid a part of what they owed.
    pub fn charge(&mut self, class: u8, with_work: ClassSet, units: usize) {
        let class = usize::from(class);
        let paid = (units as u64).saturating_mul(UNIT);
        for owed in &mut self.owed[class + 1..] {
            *owed = owed.saturating_sub(paid);
        }
        let has_lower_work = with_work & ((1 << class) - 1) as ClassSet != 0;
        let owed = &mut self.owed[class];
        let due = (units as u64).saturating_mul(self.lower_units);
        *owed = if has_lower_work { owed.saturating_add(due).min(OWED_MAX) } else { 0 };
    }
}

/// A queue for each class, except that the queue of the current class is the caller's: code that works on
/// that queue knows nothing of classes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ClassQueues<T> {
    /// Queues of the other classes. The entry of the current class is empty.
    waiting: [VecDeque<T>; CLASSES],
    current: u8,
}

impl<T> Default for ClassQueues<T> {
    fn default() -> Self {
        Self { waiting: core::array::from_fn(|_| VecDeque::new()), current: BEST_EFFORT }
    }
}

impl<T> ClassQueues<T> {
    /// Exchanges the queue of the current class, which is `queue`, for that of another class.
    pub fn select(&mut self, queue: &mut VecDeque<T>, class: u8) {
        if class != self.current {
            core::mem::swap(queue, &mut self.waiting[usize::from(self.current)]);
            core::mem::swap(queue, &mut self.waiting[usize::from(class)]);
            self.current = class;
        }
    }

    /// Returns the current class.
    #[inline(always)]
    pub const fn current(&self) -> u8 {
        if COMPILED { self.current } else { BEST_EFFORT }
    }

    /// Returns the classes with entries, where `queue` is the queue of the current class.
    pub fn with_entries(&self, queue: &VecDeque<T>) -> ClassSet {
        let others = self.waiting.iter().enumerate().filter(|(_, waiting)| !waiting.is_empty());
        others.fold(ClassSet::from(!queue.is_empty()) << self.current, |set, (class, _)| set | 1 << class)
    }

    /// Removes the entries of the other classes for which `keep` returns false.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        self.waiting.iter_mut().for_each(|waiting| waiting.retain(&mut keep));
    }

    /// Returns whether the queues, which were read from an image, have their places: there is a current
    /// class, and its entry is empty.
    pub fn is_valid(&self) -> bool {
        self.waiting.get(usize::from(self.current)).is_some_and(VecDeque::is_empty)
    }

    /// Iterates over the entries of the other classes.
    pub fn others(&self) -> impl Iterator<Item = &T> {
        self.waiting.iter().flatten()
    }

    /// Returns whether another class than the current one has entries.
    pub fn others_wait(&self) -> bool {
        COMPILED && self.waiting.iter().any(|waiting| !waiting.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{BURST_FRAMES_MAX, RxFrame};

    /// Returns how many of `picks` units each class gets if all classes of the set always have work.
    fn shares(percent: u32, with_work: ClassSet, picks: u32) -> [u32; CLASSES] {
        let mut scheduler = ClassScheduler::new(percent);
        let mut got = [0; CLASSES];
        for _ in 0..picks {
            let class = scheduler.pick(with_work).unwrap();
            scheduler.charge(class, with_work, 1);
            got[usize::from(class)] += 1;
        }
        got
    }

    #[test]
    fn lower_classes_get_their_share() {
        assert_eq!(shares(5, 0b1000_0010, 1000), [0, 50, 0, 0, 0, 0, 0, 950]);
        assert_eq!(shares(50, 0b1000_0010, 1000), [0, 500, 0, 0, 0, 0, 0, 500]);
        // The lowest class gets 10 % of the 10 % of both lower classes.
        let [lowest, middle, .., highest] = shares(10, 0b1000_0011, 10_000);
        assert!(highest.abs_diff(9000) < 10 && middle.abs_diff(900) < 10 && lowest.abs_diff(100) < 10);
        assert_eq!(shares(5, 0b0100_0000, 100)[6], 100);
        assert_eq!(ClassScheduler::new(5).pick(0), None);
    }

    /// Without work below, a class owes nothing later.
    #[test]
    fn share_is_not_saved_up() {
        let mut scheduler = ClassScheduler::new(50);
        scheduler.charge(7, 0b1000_0000, 1_000_000);
        assert_eq!(scheduler.pick(0b1000_0010), Some(7));
        // A large unit of work is paid back within a bound.
        scheduler.charge(7, 0b1000_0010, 1_000_000);
        let mut low = 0;
        while scheduler.pick(0b1000_0010) == Some(1) {
            scheduler.charge(1, 0b1000_0010, 1);
            low += 1;
        }
        assert!((1..=64).contains(&low), "{low}");
    }

    /// IEEE 802.1Q-2018, Table 8-5, eight traffic classes, and the names of Table I-2.
    #[test]
    fn order_is_that_of_802_1q() {
        let table = [
            (0, 1), // Best effort
            (1, 0), // Background
            (2, 2), // Excellent effort
            (3, 3), // Critical applications
            (4, 4), // Video
            (5, 5), // Voice
            (6, 6), // Internetwork control
            (7, 7), // Network control
        ];
        for (priority, expected) in table {
            assert_eq!(class(priority), expected, "{priority}");
            assert_eq!(of_class(expected), priority);
            assert!(usize::from(class(priority)) < CLASSES);
        }
        assert_eq!(class(u8::MAX), 7);
    }

    /// Linux's `ip_tos2prio`, by the four bits of the type of service.
    #[test]
    fn tos_maps_to_priority_as_on_linux() {
        let table = [0, 0, 0, 0, 2, 2, 2, 2, 6, 6, 6, 6, 4, 4, 4, 4];
        for tos in 0..=u8::MAX {
            assert_eq!(of_tos(tos), table[usize::from(tos >> 1 & 15)], "{tos:#x}");
        }
    }

    /// Every frame is kept, and no frame overtakes another one of its class.
    #[test]
    fn sort_is_stable_within_a_class() {
        let numbers: Vec<[u8; 1]> = (0..BURST_FRAMES_MAX as u8).map(|number| [number]).collect();
        for step in 0..200u32 {
            // A priority for each frame without a pattern, for all frames or few of them.
            let priority = |number: u8| (u32::from(number) * 7 + step).wrapping_mul(0x9e37_79b9) >> 29 & step;
            let label = |number: u8| Label::new(Some(step), priority(number) as u8);
            let len = (step as usize * 5) % (BURST_FRAMES_MAX + 1);
            let mut burst: RxBurst<'_> = numbers[..len]
                .iter()
                .map(|bytes| RxFrame { label: label(bytes[0]), ..RxFrame::new(bytes) })
                .collect();
            let mut expected: Vec<u8> = (0..len as u8).collect();
            expected.sort_by_key(|number| core::cmp::Reverse(class(label(*number).priority())));
            sort(&mut burst);
            let got: Vec<u8> = burst.iter().map(|frame| frame.bytes[0]).collect();
            assert_eq!(got, expected, "{step}");
            assert!(burst.iter().all(|frame| frame.label == label(frame.bytes[0])));
        }
    }
}
