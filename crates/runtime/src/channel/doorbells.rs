//! A ring of doorbells from one side of the channel to the other: each entry is the number of a socket that
//! needs attention.
//!
//! Each socket has a flag that says that it is in the ring. A socket is therefore in the ring at most once,
//! and a ring with as many slots as there are sockets never overflows. The notifier does not read the queue's
//! head, and neither side ever waits for the other.
//!
//! The receiving side clears a socket's flag before it looks at the socket. Whatever the notifier did before
//! it notified is either seen by that look, or the notifier finds the flag clear and enters the socket again.

use super::sync::{AtomicU8, AtomicU32, Ordering, fence};

/// Reason of a notification: the socket has something to process.
pub(crate) const NOTIFIED: u8 = 1;
/// Reason of a notification: the client no longer owns the socket.
pub(crate) const RELEASED: u8 = 2;

/// Sleep state: the receiving side runs and checks its queue.
const AWAKE: u32 = 0;
/// Sleep state: the receiving side sleeps, or is about to sleep, and a notification has to wake it.
const ASLEEP: u32 = 1;
/// Sleep state: the receiving side yielded the CPU that both sides share. The other side wakes it when it
/// goes to sleep itself, not before.
const YIELDED: u32 = 2;

/// Keeps what one side writes apart from what the other side writes. Two cache lines, because the
/// adjacent-line prefetcher fetches pairs.
#[repr(align(128))]
pub(super) struct CachePadded<T>(pub T);

/// State that both sides of a ring share, besides its slots and flags.
pub(super) struct DoorbellWords {
    /// Number of entries ever pushed, modulo 2^32. Written by the notifier.
    tail: CachePadded<AtomicU32>,
    /// [`AWAKE`], [`ASLEEP`] or [`YIELDED`]. Written by the receiving side, and by the notifier that wakes
    /// it.
    sleep_state: CachePadded<AtomicU32>,
}

impl DoorbellWords {
    #[cfg(test)]
    fn new() -> Self {
        Self { tail: CachePadded(AtomicU32::new(0)), sleep_state: CachePadded(AtomicU32::new(0)) }
    }
}

impl DoorbellWords {
    /// Returns whether the receiving side sleeps, yielded, or is about to. The answer may be outdated at
    /// once.
    pub fn is_asleep(&self) -> bool {
        self.sleep_state.0.load(Ordering::Relaxed) != AWAKE
    }
}

/// A ring in shared memory. The length of `slots` is a power of two and at least the length of `flags`.
#[derive(Clone, Copy)]
pub(super) struct Doorbells<'a> {
    pub words: &'a DoorbellWords,
    pub slots: &'a [AtomicU32],
    /// One flag for each socket: the pending reasons, or 0 if the socket is not in the ring.
    pub flags: &'a [AtomicU8],
}

/// The notifying side of a ring: its private state.
#[derive(Debug)]
pub(crate) struct Notifier {
    tail: u32,
    /// Nothing was pushed since the notifier last checked whether the receiving side sleeps.
    is_quiet: bool,
}

/// The receiving side of a ring: its private state.
#[derive(Debug)]
pub(crate) struct NotifyQueue {
    head: u32,
}

/// Result of [`NotifyQueue::try_yield`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum YieldOutcome {
    /// The CPU is left to the other side.
    Yielded,
    /// The other side sleeps, so notifications wake this side as usual.
    Declined,
    /// A notification is pending: this side must not sleep.
    Notified,
}

/// The notifier corrupted the ring: its tail claims more entries than the ring has slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CorruptRing;

impl Doorbells<'_> {
    /// Creates the notifying side of a ring to which nothing was pushed since it was cleared. Only one may
    /// exist at a time.
    pub fn notifier(self) -> Notifier {
        Notifier { tail: self.words.tail.0.load(Ordering::Relaxed), is_quiet: true }
    }

    /// Creates the receiving side of a ring. Entries pushed before are skipped. Only one may exist at a time.
    pub fn notify_queue(self) -> NotifyQueue {
        NotifyQueue { head: self.words.tail.0.load(Ordering::Relaxed) }
    }

    /// Creates the receiving side of a cleared ring to which entries may have been pushed since. Those
    /// entries are received.
    pub fn notify_queue_from_start(self) -> NotifyQueue {
        NotifyQueue { head: 0 }
    }

    /// Returns whether the receiving side has to be woken. A notifier calls this once after each batch.
    #[inline]
    pub fn needs_wakeup(self) -> bool {
        // Pairs with the fence in `before_sleep`: either the receiving side sees the entry, or this side sees
        // it asleep.
        fence(Ordering::SeqCst);
        let asleep = &self.words.sleep_state.0;
        asleep.load(Ordering::Relaxed) == ASLEEP && asleep.swap(AWAKE, Ordering::Relaxed) != AWAKE
    }

    /// Returns whether a receiving side that yielded to this side has to be woken. This side calls it when it
    /// goes to sleep, after [`NotifyQueue::before_sleep`].
    #[inline]
    pub fn ends_yield(self) -> bool {
        // `before_sleep` has issued a fence, which pairs with the one in `try_yield`.
        let asleep = &self.words.sleep_state.0;
        asleep.load(Ordering::Relaxed) == YIELDED && asleep.swap(AWAKE, Ordering::Relaxed) != AWAKE
    }

    /// Resets the ring. Neither side may exist.
    pub fn clear(self) {
        self.words.tail.0.store(0, Ordering::Relaxed);
        self.words.sleep_state.0.store(AWAKE, Ordering::Relaxed);
        for flag in self.flags {
            flag.store(0, Ordering::Relaxed);
        }
    }
}

impl Notifier {
    /// Pushes a socket with reasons, a bit mask. The receiving side that pops the entry sees everything done
    /// before this call.
    #[inline]
    pub fn notify(&mut self, doorbells: Doorbells<'_>, socket: u32, reasons: u8) {
        let before = doorbells.flags[socket as usize].fetch_or(reasons, Ordering::AcqRel);
        if before == 0 {
            let slot = self.tail as usize & (doorbells.slots.len() - 1);
            doorbells.slots[slot].store(socket, Ordering::Relaxed);
            self.tail = self.tail.wrapping_add(1);
            doorbells.words.tail.0.store(self.tail, Ordering::Release);
        }
        self.is_quiet = false;
    }

    /// Returns whether the receiving side has to be woken. False if nothing was pushed since the last call.
    /// Call this once after each batch.
    #[inline]
    pub fn needs_wakeup(&mut self, doorbells: Doorbells<'_>) -> bool {
        !core::mem::replace(&mut self.is_quiet, true) && doorbells.needs_wakeup()
    }
}

impl NotifyQueue {
    /// Pops the next socket and the reasons why it was pushed; `None` if the queue is empty. The socket's
    /// number is not validated.
    ///
    /// # Errors
    /// Returns an error if the ring is corrupt. The queue then resumes at the tail, and entries are lost.
    #[inline]
    pub fn pop(&mut self, doorbells: Doorbells<'_>) -> Result<Option<(u32, u8)>, CorruptRing> {
        let tail = doorbells.words.tail.0.load(Ordering::Acquire);
        let waiting = tail.wrapping_sub(self.head) as usize;
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > doorbells.slots.len() {
            self.head = tail;
            return Err(CorruptRing);
        }
        let slot = self.head as usize & (doorbells.slots.len() - 1);
        let socket = doorbells.slots[slot].load(Ordering::Relaxed);
        self.head = self.head.wrapping_add(1);
        // A plain store would not do: the swap must see what was done before the last notification even if
        // that one found the flag set.
        let reasons = doorbells.flags.get(socket as usize).map_or(0, |flag| flag.swap(0, Ordering::AcqRel));
        Ok(Some((socket, reasons)))
    }

    /// Makes notifications wake this side from now on. Returns false if an entry is pending: this side must
    /// not sleep then.
    pub fn before_sleep(&mut self, doorbells: Doorbells<'_>) -> bool {
        doorbells.words.sleep_state.0.store(ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        doorbells.words.tail.0.load(Ordering::Relaxed) == self.head
    }

    /// Yields to the other side, whose ring is `other`, after [`before_sleep`](Self::before_sleep) returned
    /// true. If this succeeds, notifications do not wake this side until the other side goes to sleep.
    pub fn try_yield(&mut self, doorbells: Doorbells<'_>, other: Doorbells<'_>) -> YieldOutcome {
        if other.words.is_asleep() {
            return YieldOutcome::Declined;
        }
        let asleep = &doorbells.words.sleep_state.0;
        if asleep.compare_exchange(ASLEEP, YIELDED, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            // The notifier woke this side meanwhile, so this side will not sleep for long.
            return YieldOutcome::Declined;
        }
        // Either this side sees that the other side has fallen asleep, or the other side sees that it has to
        // wake this one.
        fence(Ordering::SeqCst);
        if !other.words.is_asleep() {
            return YieldOutcome::Yielded;
        }
        let _ = asleep.compare_exchange(YIELDED, ASLEEP, Ordering::Relaxed, Ordering::Relaxed);
        // A notification pushed meanwhile woke nobody. Pairs with the fence in `needs_wakeup`.
        fence(Ordering::SeqCst);
        if doorbells.words.tail.0.load(Ordering::Relaxed) == self.head {
            YieldOutcome::Declined
        } else {
            YieldOutcome::Notified
        }
    }

    /// Returns the number of entries ever pushed, modulo 2^32: a change shows that the other side has done
    /// something.
    pub fn notified_count(&self, doorbells: Doorbells<'_>) -> u32 {
        doorbells.words.tail.0.load(Ordering::Relaxed)
    }

    /// Makes notifications stop waking this side. Returns whether this side was woken.
    pub fn after_sleep(&mut self, doorbells: Doorbells<'_>) -> bool {
        doorbells.words.sleep_state.0.swap(AWAKE, Ordering::Relaxed) == AWAKE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring for `sockets` sockets. The models also have a position for each socket, which notifications
    /// announce.
    struct Memory {
        words: DoorbellWords,
        slots: Vec<AtomicU32>,
        flags: Vec<AtomicU8>,
        #[cfg(loom)]
        positions: Vec<AtomicU32>,
    }

    impl Memory {
        fn new(sockets: usize) -> Self {
            Self {
                words: DoorbellWords::new(),
                slots: (0..sockets.next_power_of_two()).map(|_| AtomicU32::new(0)).collect(),
                flags: (0..sockets).map(|_| AtomicU8::new(0)).collect(),
                #[cfg(loom)]
                positions: (0..sockets).map(|_| AtomicU32::new(0)).collect(),
            }
        }

        fn bells(&self) -> Doorbells<'_> {
            Doorbells { words: &self.words, slots: &self.slots, flags: &self.flags }
        }
    }

    #[cfg(not(loom))]
    mod sequential {
        use super::*;

        #[test]
        fn socket_is_in_the_ring_at_most_once() {
            let memory = Memory::new(3);
            let (mut notifier, mut queue) = (memory.bells().notifier(), memory.bells().notify_queue());
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
            memory.words.tail.0.store(77, Ordering::Relaxed);
            memory.bells().clear();
            let mut notifier = memory.bells().notifier();
            notifier.notify(memory.bells(), 1, NOTIFIED);
            let mut queue = memory.bells().notify_queue_from_start();
            notifier.notify(memory.bells(), 1, RELEASED);
            assert_eq!(queue.pop(memory.bells()), Ok(Some((1, NOTIFIED | RELEASED))));
            assert_eq!(queue.pop(memory.bells()), Ok(None));
            notifier.notify(memory.bells(), 1, NOTIFIED);
            assert_eq!(queue.pop(memory.bells()), Ok(Some((1, NOTIFIED))));
        }

        #[test]
        fn all_sockets_fit_and_positions_may_wrap() {
            let memory = Memory::new(4);
            memory.words.tail.0.store(u32::MAX - 5, Ordering::Relaxed);
            let (mut notifier, mut queue) = (memory.bells().notifier(), memory.bells().notify_queue());
            for _ in 0..5 {
                (0..4).for_each(|socket| notifier.notify(memory.bells(), socket, NOTIFIED));
                (0..4).for_each(|socket| assert_eq!(queue.pop(memory.bells()), Ok(Some((socket, NOTIFIED)))));
                assert_eq!(queue.pop(memory.bells()), Ok(None));
            }
        }

        #[test]
        fn corrupt_ring_is_reported_once() {
            let memory = Memory::new(4);
            let mut queue = memory.bells().notify_queue();
            memory.words.tail.0.store(77, Ordering::Relaxed);
            assert_eq!(queue.pop(memory.bells()), Err(CorruptRing));
            assert_eq!(queue.pop(memory.bells()), Ok(None));
            memory.slots[77 & 3].store(12_345, Ordering::Relaxed);
            memory.words.tail.0.store(78, Ordering::Relaxed);
            assert_eq!(queue.pop(memory.bells()), Ok(Some((12_345, 0))), "the caller validates the number");
        }

        #[test]
        fn yielded_side_is_woken_when_other_sleeps() {
            let (up, down) = (Memory::new(2), Memory::new(2));
            let (mut notifier, mut queue) = (up.bells().notifier(), up.bells().notify_queue());
            let mut other = down.bells().notify_queue();
            assert!(queue.before_sleep(up.bells()));
            assert_eq!(queue.try_yield(up.bells(), down.bells()), YieldOutcome::Yielded);
            notifier.notify(up.bells(), 1, NOTIFIED);
            assert!(!notifier.needs_wakeup(up.bells()), "the other side has the CPU");
            assert!(other.before_sleep(down.bells()));
            assert!(up.bells().ends_yield());
            assert!(!up.bells().ends_yield(), "only once");
            assert!(queue.after_sleep(up.bells()));
            assert_eq!(queue.pop(up.bells()), Ok(Some((1, NOTIFIED))));
            assert!(queue.before_sleep(up.bells()));
            assert_eq!(
                queue.try_yield(up.bells(), down.bells()),
                YieldOutcome::Declined,
                "the other side sleeps"
            );
            assert!(!up.bells().ends_yield(), "this side did not yield");
            notifier.notify(up.bells(), 1, NOTIFIED);
            assert!(notifier.needs_wakeup(up.bells()));
        }

        #[test]
        fn sleeper_is_woken_once() {
            let memory = Memory::new(2);
            let (mut notifier, mut queue) = (memory.bells().notifier(), memory.bells().notify_queue());
            notifier.notify(memory.bells(), 0, NOTIFIED);
            assert!(!notifier.needs_wakeup(memory.bells()), "the receiver is awake");
            assert!(!queue.before_sleep(memory.bells()), "an entry is pending");
            assert!(!queue.after_sleep(memory.bells()));
            while queue.pop(memory.bells()) != Ok(None) {}
            assert!(queue.before_sleep(memory.bells()));
            assert!(!notifier.needs_wakeup(memory.bells()), "nothing was pushed");
            notifier.notify(memory.bells(), 1, NOTIFIED);
            notifier.notify(memory.bells(), 0, NOTIFIED);
            assert!(notifier.needs_wakeup(memory.bells()));
            notifier.notify(memory.bells(), 1, NOTIFIED);
            assert!(!notifier.needs_wakeup(memory.bells()), "the receiver was woken already");
            assert!(queue.after_sleep(memory.bells()));
        }
    }

    #[cfg(loom)]
    mod model {
        use super::*;
        use std::sync::Arc;

        /// Work that is done before a notification is seen by the receiver of that notification or of a later
        /// one.
        #[test]
        fn no_notification_is_missed() {
            loom::model(|| {
                let memory = Arc::new(Memory::new(2));
                // Both sides are created here: a thread's own load of the tail would hide the other thread's
                // store from the checker.
                let (mut notifier, mut queue) = (memory.bells().notifier(), memory.bells().notify_queue());
                let notifier = {
                    let memory = memory.clone();
                    loom::thread::spawn(move || {
                        for (socket, position) in [(0, 1), (1, 1), (0, 2)] {
                            memory.positions[socket as usize].store(position, Ordering::Relaxed);
                            notifier.notify(memory.bells(), socket, NOTIFIED);
                        }
                    })
                };
                let mut seen = [0; 2];
                let mut drain = |queue: &mut NotifyQueue| {
                    while let Some((socket, _)) = queue.pop(memory.bells()).expect("nobody breaks it") {
                        seen[socket as usize] = memory.positions[socket as usize].load(Ordering::Relaxed);
                    }
                };
                drain(&mut queue);
                notifier.join().unwrap();
                drain(&mut queue);
                assert_eq!(seen, [2, 1]);
            });
        }

        /// A receiver that goes to sleep is woken, or has seen the entry before.
        #[test]
        fn no_sleep_with_a_pending_notification() {
            loom::model(|| {
                let memory = Arc::new(Memory::new(1));
                let (mut notifier, mut queue) = (memory.bells().notifier(), memory.bells().notify_queue());
                let notifier = {
                    let memory = memory.clone();
                    loom::thread::spawn(move || {
                        notifier.notify(memory.bells(), 0, NOTIFIED);
                        notifier.needs_wakeup(memory.bells())
                    })
                };
                let sleeps = queue.before_sleep(memory.bells());
                let woken = notifier.join().unwrap();
                assert!(!sleeps || woken, "the receiver sleeps and was not woken");
            });
        }

        /// For each notification the stack reads once how much was written, takes all of it
        /// (`Domain::forward`), and goes to sleep without looking again: bytes written meanwhile have a
        /// notification of their own, or wake the stack.
        #[test]
        fn one_read_per_notification_suffices_before_sleep() {
            loom::model(|| {
                let memory = Arc::new(Memory::new(1));
                let (mut notifier, mut queue) = (memory.bells().notifier(), memory.bells().notify_queue());
                let writer = {
                    let memory = memory.clone();
                    loom::thread::spawn(move || {
                        for written in 1..=2 {
                            memory.positions[0].store(written, Ordering::Release);
                            notifier.notify(memory.bells(), 0, NOTIFIED);
                        }
                        // Once only: the checker does not keep a single modification order of a word that two
                        // threads write, so a second check could read the value that the first one left.
                        notifier.needs_wakeup(memory.bells())
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
                    if queue.before_sleep(memory.bells()) {
                        break taken;
                    }
                    queue.after_sleep(memory.bells());
                };
                let woken = writer.join().unwrap();
                assert!(woken || taken == 2, "the receiver sleeps, was not woken, and took {taken} of 2");
                queue.after_sleep(memory.bells());
                assert_eq!(drain(&mut queue), 2);
            });
        }

        /// If several threads push one after the other and check concurrently, exactly one of them wakes the
        /// receiver.
        #[test]
        fn exactly_one_notifier_wakes_the_receiver() {
            loom::model(|| {
                let memory = Arc::new(Memory::new(2));
                let (notifier, mut queue) = (memory.bells().notifier(), memory.bells().notify_queue());
                let notifier = Arc::new(loom::sync::Mutex::new(notifier));
                let ring = |socket| {
                    let (memory, notifier) = (memory.clone(), notifier.clone());
                    move || {
                        notifier.lock().unwrap().notify(memory.bells(), socket, NOTIFIED);
                        memory.bells().needs_wakeup()
                    }
                };
                let (first, second) = (loom::thread::spawn(ring(0)), ring(1));
                let sleeps = queue.before_sleep(memory.bells());
                let woken = [second(), first.join().unwrap()];
                assert!(!sleeps || woken.contains(&true), "the receiver sleeps and was not woken");
                assert_ne!(woken, [true; 2], "the receiver was woken twice");
            });
        }

        /// Two sides that yield to each other do not both sleep while an entry is pending.
        #[test]
        fn mutual_yield_loses_no_wakeup() {
            loom::model(|| {
                let (up, down) = (Arc::new(Memory::new(1)), Arc::new(Memory::new(1)));
                let (mut notifier, mut queue) = (up.bells().notifier(), up.bells().notify_queue());
                let mut other = down.bells().notify_queue();
                let other = {
                    let (up, down) = (up.clone(), down.clone());
                    loom::thread::spawn(move || {
                        notifier.notify(up.bells(), 0, NOTIFIED);
                        let woken = notifier.needs_wakeup(up.bells());
                        assert!(other.before_sleep(down.bells()), "nothing is pushed");
                        woken | up.bells().ends_yield()
                    })
                };
                let sleeps = queue.before_sleep(up.bells())
                    && queue.try_yield(up.bells(), down.bells()) != YieldOutcome::Notified;
                let woken = other.join().unwrap();
                assert!(!sleeps || woken, "the receiver sleeps and was not woken");
            });
        }
    }
}
