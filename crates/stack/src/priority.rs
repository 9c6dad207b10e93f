//! Order of packets: the eight priorities of IEEE 802.1Q, as sockets have them on Linux (`SO_PRIORITY`) and
//! as [`Label`] carries them.
//!
//! Their order is the one that 802.1Q recommends if each has a traffic class of its own (Table 8-5): 0, the
//! default, is best effort, and only 1, background, comes after it; 2 to 7 come before, the highest first.
//! Selection is strict (§8.6.8.1): a higher priority is never delayed by a lower one.

use crate::device::{Label, RxBurst};

/// Number of priorities, and of the classes in which they are processed.
pub(crate) const CLASSES: usize = Label::PRIORITY_MAX as usize + 1;

/// The class of best effort.
const BEST_EFFORT: u8 = 1;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{BURST_FRAMES_MAX, RxFrame};

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
