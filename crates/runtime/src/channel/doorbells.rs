//! A ring of doorbells from one side of the channel to the other: each entry is the number of a socket that
//! needs attention, or of a listener.
//!
//! Each number has a flag that is set while the number is pending, so that the number is in the ring at most
//! once. A ring has fewer slots than there are numbers. If it is full, a number is not pushed: only its flag
//! is set, and a word records the overflow. The receiving side then scans all flags. Neither side ever waits
//! for the other.
//!
//! If `[priority]` is in use, the flag of a socket in a ring to a client has a bit for each priority class of
//! the socket's pending events. The client empties the ring, and scans all flags after an overflow, before it
//! chooses the next socket. So events of a high class overtake the others, and the ring itself needs no
//! order.
//!
//! The receiving side clears a number's flag before it processes the socket. So it either sees everything
//! that the notifier did before a notification, or the notifier finds the flag clear and pushes the number
//! again.

use super::sleep_state::CachePadded;
use super::sync::{AtomicU8, AtomicU32, Ordering};
use ginnel_stack::priority::{self, BEST_EFFORT, CLASSES};
use serde::{Deserialize, Serialize};

/// Reason of a notification: the socket has something to process.
pub(crate) const NOTIFIED: u8 = 1;
/// Reason of a notification that a client sends to the stack: the client no longer owns the socket. The stack
/// notifies clients with other reasons: [`reasons_of_class`].
pub(crate) const RELEASED: u8 = 2;

/// Returns the reasons with which the stack notifies a client of an event of this priority class if
/// `[priority]` is in use: the bit of the class's priority. Best effort has the bit of the class below, too,
/// and so differs from a plain [`NOTIFIED`]: the first notification tells the client whether events have
/// classes.
pub(crate) const fn reasons_of_class(class: u8) -> u8 {
    1 << priority::of_class(class) | if class == BEST_EFFORT { 1 << priority::of_class(0) } else { 0 }
}

/// Returns the highest priority class in these reasons. Without reasons, as for an entry whose number a scan
/// has popped before, it returns best effort.
pub(crate) fn highest_class(reasons: u8) -> u8 {
    let classes = (0..CLASSES as u8).rev();
    classes.into_iter().find(|class| reasons >> priority::of_class(*class) & 1 != 0).unwrap_or(BEST_EFFORT)
}

/// Number of flags that one call of [`NotifyQueue::pop`] scans after an overflow.
const FLAGS_PER_POP: usize = 4096;

/// Words that the notifier writes.
#[repr(C)]
struct NotifierWords {
    /// Number of entries ever pushed, modulo 2^32.
    tail: AtomicU32,
    /// Nonzero if a number's flag was set and the number was not pushed. The receiving side clears it.
    has_overflowed: AtomicU32,
}

/// State that both sides of a ring share, besides its slots and flags.
#[repr(C)]
pub(super) struct DoorbellWords {
    notifier: CachePadded<NotifierWords>,
    /// Number of entries ever popped, modulo 2^32. Written by the receiving side.
    head: CachePadded<AtomicU32>,
}

impl DoorbellWords {
    #[cfg(test)]
    fn new() -> Self {
        let word = || AtomicU32::new(0);
        let notifier = NotifierWords { tail: word(), has_overflowed: word() };
        Self { notifier: CachePadded(notifier), head: CachePadded(word()) }
    }

    #[inline]
    fn tail(&self) -> &AtomicU32 {
        &self.notifier.0.tail
    }

    #[inline]
    fn has_overflowed(&self) -> &AtomicU32 {
        &self.notifier.0.has_overflowed
    }
}

/// A ring in shared memory. The number of slots is a power of two.
#[derive(Clone, Copy)]
pub(super) struct Doorbells<'a> {
    pub words: &'a DoorbellWords,
    pub slots: &'a [AtomicU32],
    /// One flag for each number: the pending reasons, or 0 if the number is not pending.
    pub flags: &'a [AtomicU8],
}

/// The notifying side of a ring: its private state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Notifier {
    #[serde(skip)]
    tail: u32,
    /// The queue's head when it was last read.
    #[serde(skip)]
    head: u32,
    /// True if nobody was notified since [`Notifier::take_notified`].
    #[serde(skip)]
    is_quiet: bool,
    /// Number of times that the ring became full. Until the receiving side begins a scan, a full ring is
    /// counted once.
    overflows: u64,
}

/// The receiving side of a ring: its private state. The default is the state of a fresh ring, to which
/// entries may have been pushed already.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct NotifyQueue {
    #[serde(skip)]
    head: u32,
    /// The next flag of the scan after an overflow, or [`SCAN_DONE`]; `None` without a scan.
    scan: Option<u32>,
    /// Scans that were begun.
    overflows: u64,
}

/// All flags were scanned after an overflow. The next [`NotifyQueue::pop`] reports the end of the scan.
const SCAN_DONE: u32 = u32::MAX;

/// The notifier corrupted the ring: its tail claims more entries than the ring has slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CorruptRing;

impl Doorbells<'_> {
    /// Creates the notifying side of a ring. Only one may exist at a time.
    pub fn notifier(self) -> Notifier {
        let tail = self.words.tail().load(Ordering::Relaxed);
        Notifier { tail, head: self.words.head.0.load(Ordering::Relaxed), is_quiet: true, overflows: 0 }
    }
}

impl Notifier {
    /// Continues as the notifying side of a ring from the positions that its words have, and makes the
    /// receiving side scan all flags: it may have popped more than this side knows of.
    pub fn resume(&mut self, doorbells: Doorbells<'_>) {
        *self = Self { overflows: self.overflows, ..doorbells.notifier() };
        self.notify_all(doorbells);
    }

    /// Pushes a number with reasons, a bit mask. The receiving side that pops the entry sees everything done
    /// before this call.
    #[inline]
    pub fn notify(&mut self, doorbells: Doorbells<'_>, number: u32, reasons: u8) {
        let before = doorbells.flags[number as usize].fetch_or(reasons, Ordering::AcqRel);
        if before == 0 {
            if self.tail.wrapping_sub(self.head) as usize >= doorbells.slots.len()
                && !self.has_free_slot(doorbells)
            {
                self.set_overflowed(doorbells);
            } else {
                let slot = self.tail as usize & (doorbells.slots.len() - 1);
                doorbells.slots[slot].store(number, Ordering::Relaxed);
                self.tail = self.tail.wrapping_add(1);
                doorbells.words.tail().store(self.tail, Ordering::Release);
            }
        }
        self.is_quiet = false;
    }

    /// Makes the receiving side scan all flags.
    #[cold]
    fn set_overflowed(&mut self, doorbells: Doorbells<'_>) {
        self.overflows += u64::from(doorbells.words.has_overflowed().swap(1, Ordering::AcqRel) == 0);
    }

    /// Returns how often the ring became full.
    pub fn overflows(&self) -> u64 {
        self.overflows
    }

    /// Makes the receiving side scan all flags, as after an overflow.
    #[cold]
    pub fn notify_all(&mut self, doorbells: Doorbells<'_>) {
        doorbells.words.has_overflowed().store(1, Ordering::Release);
        self.is_quiet = false;
    }

    /// Reads the queue's head, and returns whether the ring has a free slot. An impossible head counts as a
    /// full ring.
    #[cold]
    fn has_free_slot(&mut self, doorbells: Doorbells<'_>) -> bool {
        // Pairs with the store in `pop`: the slot was read before.
        self.head = doorbells.words.head.0.load(Ordering::Acquire);
        (self.tail.wrapping_sub(self.head) as usize) < doorbells.slots.len()
    }

    /// Returns whether nothing was pushed since the last call of [`take_notified`](Self::take_notified).
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.is_quiet
    }

    /// Returns whether something was pushed since the last call.
    #[inline]
    pub fn take_notified(&mut self) -> bool {
        !core::mem::replace(&mut self.is_quiet, true)
    }
}

impl NotifyQueue {
    /// Continues as the receiving side of a ring from the position that its words have.
    pub fn resume(&mut self, doorbells: Doorbells<'_>) {
        self.head = doorbells.words.head.0.load(Ordering::Relaxed);
    }

    /// Pops the next number and the reasons why it was pushed; `None` if the queue is empty, unless it
    /// [is scanning](Self::is_scanning). The number is not validated.
    ///
    /// # Errors
    /// Returns an error if the ring is corrupt. The queue then resumes at the tail, and entries are lost.
    #[inline]
    pub fn pop(&mut self, doorbells: Doorbells<'_>) -> Result<Option<(u32, u8)>, CorruptRing> {
        let tail = doorbells.words.tail().load(Ordering::Acquire);
        let waiting = tail.wrapping_sub(self.head) as usize;
        if waiting == 0 {
            if self.scan.is_none() && doorbells.words.has_overflowed().load(Ordering::Relaxed) == 0 {
                return Ok(None);
            }
            return Ok(self.pop_flagged(doorbells));
        }
        if waiting > doorbells.slots.len() {
            self.head = tail;
            doorbells.words.head.0.store(tail, Ordering::Release);
            return Err(CorruptRing);
        }
        let slot = self.head as usize & (doorbells.slots.len() - 1);
        let number = doorbells.slots[slot].load(Ordering::Relaxed);
        self.head = self.head.wrapping_add(1);
        doorbells.words.head.0.store(self.head, Ordering::Release);
        // A plain store would not do: the swap must see what was done before the last notification even if
        // that one found the flag set.
        let reasons = doorbells.flags.get(number as usize).map_or(0, |flag| flag.swap(0, Ordering::AcqRel));
        Ok(Some((number, reasons)))
    }

    /// Pops the next number whose flag is set, after an overflow. A number that is also in the ring is popped
    /// from there later, without reasons.
    #[cold]
    fn pop_flagged(&mut self, doorbells: Doorbells<'_>) -> Option<(u32, u8)> {
        if self.scan.is_none() {
            // A flag that is set after this belongs to a number in the ring, or another overflow follows.
            if doorbells.words.has_overflowed().swap(0, Ordering::AcqRel) == 0 {
                return None;
            }
            self.begin_scan();
        }
        if self.scan == Some(SCAN_DONE) {
            let has_overflowed = doorbells.words.has_overflowed();
            let again = has_overflowed.load(Ordering::Relaxed) != 0;
            self.scan = None;
            if again && has_overflowed.swap(0, Ordering::AcqRel) != 0 {
                self.begin_scan();
            }
            return None;
        }
        let from = self.scan.unwrap_or(0) as usize;
        let end = doorbells.flags.len().min(from + FLAGS_PER_POP);
        for number in from..end {
            let flag = &doorbells.flags[number];
            if flag.load(Ordering::Relaxed) != 0 {
                // Cannot truncate: numbers have 32 bits.
                self.scan = Some(number as u32 + 1);
                return Some((number as u32, flag.swap(0, Ordering::AcqRel)));
            }
        }
        self.scan = Some(if end < doorbells.flags.len() { end as u32 } else { SCAN_DONE });
        None
    }

    fn begin_scan(&mut self) {
        self.scan = Some(0);
        self.overflows += 1;
    }

    /// Returns how often the other side found the ring full.
    pub fn overflows(&self) -> u64 {
        self.overflows
    }

    /// Returns whether a scan is in progress: [`pop`](Self::pop) has to be called again.
    #[inline]
    pub fn is_scanning(&self) -> bool {
        self.scan.is_some()
    }

    /// Returns whether nothing is pending.
    #[inline]
    pub fn is_empty(&self, doorbells: Doorbells<'_>) -> bool {
        self.scan.is_none()
            && doorbells.words.has_overflowed().load(Ordering::Relaxed) == 0
            && doorbells.words.tail().load(Ordering::Relaxed) == self.head
    }

    /// Returns the number of entries ever pushed, modulo 2^32: a change shows that the other side has done
    /// something.
    pub fn notified_count(&self, doorbells: Doorbells<'_>) -> u32 {
        doorbells.words.tail().load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sleep_state::SleepState;
    use super::*;
    #[cfg(loom)]
    use crate::channel::sync::fence;

    /// A ring for `numbers` sockets. The models also have a position for each socket, which notifications
    /// announce.
    struct Memory {
        words: DoorbellWords,
        slots: Vec<AtomicU32>,
        flags: Vec<AtomicU8>,
        /// Of the receiving side.
        sleep: SleepState,
        #[cfg(loom)]
        positions: Vec<AtomicU32>,
    }

    impl Memory {
        fn new(numbers: usize) -> Self {
            Self::with_slots(numbers, numbers.next_power_of_two())
        }

        fn with_slots(numbers: usize, slots: usize) -> Self {
            Self {
                words: DoorbellWords::new(),
                slots: (0..slots).map(|_| AtomicU32::new(0)).collect(),
                flags: (0..numbers).map(|_| AtomicU8::new(0)).collect(),
                sleep: SleepState::new(),
                #[cfg(loom)]
                positions: (0..numbers).map(|_| AtomicU32::new(0)).collect(),
            }
        }

        fn bells(&self) -> Doorbells<'_> {
            Doorbells { words: &self.words, slots: &self.slots, flags: &self.flags }
        }

        fn notifier(&self) -> Notifier {
            self.bells().notifier()
        }

        /// Claims the wake-up of the receiving side, as the stack does after each batch.
        #[cfg(loom)]
        fn claim_wakeup(&self) -> bool {
            fence(Ordering::SeqCst);
            self.sleep.claim_wakeup()
        }

        /// Goes to sleep as a client does. Returns whether it may.
        fn before_sleep(&self, queue: &NotifyQueue) -> bool {
            self.sleep.begin_sleep();
            queue.is_empty(self.bells())
        }
    }

    #[cfg(not(loom))]
    mod sequential {
        use super::*;

        /// Pops until the queue is empty.
        fn drain(queue: &mut NotifyQueue, memory: &Memory) -> Vec<(u32, u8)> {
            let mut all = Vec::new();
            while !queue.is_empty(memory.bells()) {
                all.extend(queue.pop(memory.bells()).expect("nobody breaks it"));
            }
            assert_eq!(queue.pop(memory.bells()), Ok(None));
            all
        }

        #[test]
        fn socket_is_in_the_ring_at_most_once() {
            let memory = Memory::new(3);
            let (mut notifier, mut queue) = (memory.notifier(), NotifyQueue::default());
            for _ in 0..100 {
                notifier.notify(memory.bells(), 2, NOTIFIED);
                notifier.notify(memory.bells(), 0, NOTIFIED);
            }
            notifier.notify(memory.bells(), 2, RELEASED);
            assert_eq!(queue.pop(memory.bells()), Ok(Some((2, NOTIFIED | RELEASED))));
            notifier.notify(memory.bells(), 2, NOTIFIED);
            assert_eq!(queue.pop(memory.bells()), Ok(Some((0, NOTIFIED))));
            assert_eq!(queue.pop(memory.bells()), Ok(Some((2, NOTIFIED))));
            assert_eq!(queue.pop(memory.bells()), Ok(None));
        }

        #[test]
        fn notifications_before_listening_are_received() {
            let memory = Memory::new(3);
            let mut notifier = memory.notifier();
            notifier.notify(memory.bells(), 1, NOTIFIED);
            let mut queue = NotifyQueue::default();
            notifier.notify(memory.bells(), 1, RELEASED);
            assert_eq!(drain(&mut queue, &memory), [(1, NOTIFIED | RELEASED)]);
            notifier.notify(memory.bells(), 1, NOTIFIED);
            assert_eq!(drain(&mut queue, &memory), [(1, NOTIFIED)]);
        }

        #[test]
        fn receiver_is_told_to_look_at_everything() {
            let memory = Memory::new(3);
            let (mut notifier, mut queue) = (memory.notifier(), NotifyQueue::default());
            notifier.take_notified();
            notifier.notify_all(memory.bells());
            assert!(notifier.take_notified() && !queue.is_empty(memory.bells()));
            // It sees that a look at all flags is over even if none of them is set.
            assert_eq!((queue.pop(memory.bells()), queue.is_scanning()), (Ok(None), true));
            assert_eq!((queue.pop(memory.bells()), queue.is_scanning()), (Ok(None), false));
            assert!(queue.is_empty(memory.bells()));
            notifier.notify(memory.bells(), 2, NOTIFIED);
            notifier.notify_all(memory.bells());
            assert_eq!(drain(&mut queue, &memory), [(2, NOTIFIED)]);
        }

        #[test]
        fn positions_may_wrap() {
            let memory = Memory::new(4);
            for word in [memory.words.tail(), &memory.words.head.0] {
                word.store(u32::MAX - 5, Ordering::Relaxed);
            }
            let mut queue = NotifyQueue { head: u32::MAX - 5, scan: None, ..NotifyQueue::default() };
            let mut notifier = memory.notifier();
            for _ in 0..5 {
                (0..4).for_each(|socket| notifier.notify(memory.bells(), socket, NOTIFIED));
                (0..4).for_each(|socket| assert_eq!(queue.pop(memory.bells()), Ok(Some((socket, NOTIFIED)))));
                assert_eq!(queue.pop(memory.bells()), Ok(None));
            }
        }

        #[test]
        fn full_ring_overflows_into_the_flags() {
            let sockets = 3 * FLAGS_PER_POP as u32;
            let memory = Memory::with_slots(sockets as usize, 2);
            let (mut notifier, mut queue) = (memory.notifier(), NotifyQueue::default());
            for _ in 0..3 {
                for socket in [9, 5, sockets - 1, 7, 0] {
                    notifier.notify(memory.bells(), socket, NOTIFIED);
                    notifier.notify(memory.bells(), socket, RELEASED);
                }
                assert!(notifier.take_notified() && !queue.is_empty(memory.bells()));
                let both = NOTIFIED | RELEASED;
                let all = [(9, both), (5, both), (0, both), (7, both), (sockets - 1, both)];
                assert_eq!(drain(&mut queue, &memory), all);
            }
            // There is room in the ring again.
            notifier.notify(memory.bells(), 8, NOTIFIED);
            assert_eq!(memory.words.has_overflowed().load(Ordering::Relaxed), 0);
            assert_eq!(drain(&mut queue, &memory), [(8, NOTIFIED)]);
        }

        #[test]
        fn numbers_pushed_during_the_look_at_flags_are_received() {
            let memory = Memory::with_slots(8, 1);
            let (mut notifier, mut queue) = (memory.notifier(), NotifyQueue::default());
            (0..8).for_each(|socket| notifier.notify(memory.bells(), socket, NOTIFIED));
            let mut all = Vec::new();
            for round in 0..8 {
                all.extend(queue.pop(memory.bells()).unwrap());
                if round == 4 {
                    // Once into the ring, and once into the flags that were looked at already.
                    (0..2).for_each(|socket| notifier.notify(memory.bells(), socket, NOTIFIED));
                }
            }
            all.extend(drain(&mut queue, &memory));
            let count = |socket| all.iter().filter(|(number, _)| *number == socket).count();
            assert_eq!([count(0), count(1), count(7)], [2, 2, 1], "{all:?}");
        }

        #[test]
        fn corrupt_ring_is_reported_once() {
            let memory = Memory::new(4);
            let mut queue = NotifyQueue::default();
            memory.words.tail().store(77, Ordering::Relaxed);
            assert_eq!(queue.pop(memory.bells()), Err(CorruptRing));
            assert_eq!(queue.pop(memory.bells()), Ok(None));
            memory.slots[77 & 3].store(12_345, Ordering::Relaxed);
            memory.words.tail().store(78, Ordering::Relaxed);
            assert_eq!(queue.pop(memory.bells()), Ok(Some((12_345, 0))), "the caller validates the number");
            // A head that cannot be is a full ring to the notifier.
            let mut notifier = Notifier { tail: 90, head: 86, is_quiet: true, overflows: 0 };
            memory.words.head.0.store(5000, Ordering::Relaxed);
            notifier.notify(memory.bells(), 3, NOTIFIED);
            assert_eq!(memory.words.has_overflowed().load(Ordering::Relaxed), 1);
        }

        #[test]
        fn sleeper_is_woken_once() {
            let memory = Memory::new(2);
            let (mut notifier, mut queue) = (memory.notifier(), NotifyQueue::default());
            notifier.notify(memory.bells(), 0, NOTIFIED);
            assert!(notifier.take_notified() && !memory.sleep.claim_wakeup(), "the receiver is awake");
            assert!(!memory.before_sleep(&queue), "an entry is pending");
            assert!(!memory.sleep.end_sleep());
            drain(&mut queue, &memory);
            assert!(memory.before_sleep(&queue));
            assert!(!notifier.take_notified(), "nothing was pushed");
            notifier.notify(memory.bells(), 1, NOTIFIED);
            notifier.notify(memory.bells(), 0, NOTIFIED);
            assert!(notifier.take_notified() && memory.sleep.claim_wakeup());
            notifier.notify(memory.bells(), 1, NOTIFIED);
            assert!(!memory.sleep.claim_wakeup(), "the receiver was woken already");
            assert!(memory.sleep.end_sleep());
        }
    }

    #[cfg(loom)]
    mod model {
        use super::*;
        use std::sync::Arc;

        /// Announces `pushes`, pairs of a socket and its new position, from another thread. `drain` is called
        /// before and after they are all announced, and must have seen `last`.
        fn check_announced(memory: Memory, pushes: &'static [(u32, u32)], last: [u32; 2]) {
            let memory = Arc::new(memory);
            // Created here: a thread's own load of the tail would hide the other thread's store from the
            // checker.
            let mut notifier = memory.notifier();
            let thread = {
                let memory = memory.clone();
                loom::thread::spawn(move || {
                    for (socket, position) in pushes {
                        memory.positions[*socket as usize].store(*position, Ordering::Relaxed);
                        notifier.notify(memory.bells(), *socket, NOTIFIED);
                    }
                })
            };
            let (mut queue, mut seen) = (NotifyQueue::default(), [0; 2]);
            let mut drain = |queue: &mut NotifyQueue| {
                while !queue.is_empty(memory.bells()) {
                    if let Some((socket, _)) = queue.pop(memory.bells()).expect("nobody breaks it") {
                        seen[socket as usize] = memory.positions[socket as usize].load(Ordering::Relaxed);
                    }
                }
            };
            drain(&mut queue);
            thread.join().unwrap();
            drain(&mut queue);
            assert_eq!(seen, last);
        }

        /// Work that is done before a notification is seen by the receiver of that notification or of a later
        /// one.
        #[test]
        fn no_notification_is_missed() {
            loom::model(|| check_announced(Memory::new(2), &[(0, 1), (1, 1), (0, 2)], [2, 1]));
        }

        /// As above, for a ring that is full after the first notification.
        #[test]
        fn no_notification_is_missed_by_overflow() {
            loom::model(|| check_announced(Memory::with_slots(2, 1), &[(0, 1), (1, 1), (0, 2)], [2, 1]));
        }

        /// A receiver that goes to sleep is woken, or has seen the entry before.
        #[test]
        fn no_sleep_with_a_pending_notification() {
            for slots in [1, 2] {
                loom::model(move || {
                    let memory = Arc::new(Memory::with_slots(2, slots));
                    let (mut notifier, queue) = (memory.notifier(), NotifyQueue::default());
                    if slots == 1 {
                        // The ring is full, and the queue has this entry before it.
                        memory.flags[1].store(NOTIFIED, Ordering::Relaxed);
                        notifier.tail = notifier.tail.wrapping_add(1);
                        memory.words.head.0.store(0, Ordering::Relaxed);
                    }
                    let thread = {
                        let memory = memory.clone();
                        loom::thread::spawn(move || {
                            notifier.notify(memory.bells(), 0, NOTIFIED);
                            memory.claim_wakeup()
                        })
                    };
                    let sleeps = memory.before_sleep(&queue);
                    let woken = thread.join().unwrap();
                    assert!(!sleeps || woken, "the receiver sleeps and was not woken");
                });
            }
        }

        /// For each notification the stack reads once how much was written, takes all of it
        /// (`Domain::forward`), and goes to sleep without looking again: bytes written meanwhile have a
        /// notification of their own, or wake the stack.
        #[test]
        fn one_read_per_notification_suffices_before_sleep() {
            loom::model(|| {
                let memory = Arc::new(Memory::new(1));
                let (mut notifier, mut queue) = (memory.notifier(), NotifyQueue::default());
                let writer = {
                    let memory = memory.clone();
                    loom::thread::spawn(move || {
                        for written in 1..=2 {
                            memory.positions[0].store(written, Ordering::Release);
                            notifier.notify(memory.bells(), 0, NOTIFIED);
                        }
                        // Once only: the checker does not keep a single modification order of a word that two
                        // threads write, so a second check could read the value that the first one left.
                        memory.claim_wakeup()
                    })
                };
                let mut taken = 0;
                let mut drain = |queue: &mut NotifyQueue| {
                    while queue.pop(memory.bells()).expect("nobody breaks it").is_some() {
                        taken = memory.positions[0].load(Ordering::Acquire);
                    }
                    taken
                };
                let taken = loop {
                    let taken = drain(&mut queue);
                    if memory.before_sleep(&queue) {
                        break taken;
                    }
                    memory.sleep.end_sleep();
                };
                let woken = writer.join().unwrap();
                assert!(woken || taken == 2, "the receiver sleeps, was not woken, and took {taken} of 2");
                memory.sleep.end_sleep();
                assert_eq!(drain(&mut queue), 2);
            });
        }

        /// If several threads push one after the other and check concurrently, exactly one of them wakes the
        /// receiver.
        #[test]
        fn exactly_one_notifier_wakes_the_receiver() {
            loom::model(|| {
                let memory = Arc::new(Memory::new(2));
                let (notifier, queue) = (memory.notifier(), NotifyQueue::default());
                let notifier = Arc::new(loom::sync::Mutex::new(notifier));
                let ring = |socket| {
                    let (memory, notifier) = (memory.clone(), notifier.clone());
                    move || {
                        notifier.lock().unwrap().notify(memory.bells(), socket, NOTIFIED);
                        memory.claim_wakeup()
                    }
                };
                let (first, second) = (loom::thread::spawn(ring(0)), ring(1));
                let sleeps = memory.before_sleep(&queue);
                let woken = [second(), first.join().unwrap()];
                assert!(!sleeps || woken.contains(&true), "the receiver sleeps and was not woken");
                assert_ne!(woken, [true; 2], "the receiver was woken twice");
            });
        }
    }
}
