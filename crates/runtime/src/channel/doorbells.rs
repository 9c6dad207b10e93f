//! A ring of doorbells from one side of the channel to the other: "look at this socket".
//!
//! Each socket has a flag in the ring that it is rung, so it stands in the ring at most once, and a ring with as many places as there are
//! sockets is never full. The ringer does not look at how far the listener came, and nobody waits.
//!
//! The listener clears the flag before it looks at the socket. So whatever the ringer did before it rang is either seen by that look, or finds
//! the flag clear and rings again.

use super::sync::{AtomicU8, AtomicU32, Ordering, fence};

/// There is something to do for the socket.
pub(crate) const NOTIFIED: u8 = 1;
/// The client holds the socket no longer.
pub(crate) const RELEASED: u8 = 2;

/// The listener is at work, and looks at its bells.
const AWAKE: u32 = 0;
/// It sleeps, or is about to: a bell wakes it.
const ASLEEP: u32 = 1;
/// It has left the CPU that both are on to the other side, for a short time: that side wakes it when it goes to sleep itself, and not before.
const YIELDED: u32 = 2;

/// Keeps what one side writes away from what the other writes: two lines, because the prefetcher fetches pairs.
#[repr(align(128))]
pub(super) struct CachePadded<T>(pub T);

/// What both sides of a ring share, besides its places and flags.
pub(super) struct DoorbellWords {
    /// How many were ever rung. Written by the ringer.
    tail: CachePadded<AtomicU32>,
    /// [`AWAKE`], [`ASLEEP`] or [`GAVE_WAY`]. The listener's, but for those who wake it.
    sleep_state: CachePadded<AtomicU32>,
}

impl DoorbellWords {
    #[cfg(test)]
    fn new() -> Self {
        Self { tail: CachePadded(AtomicU32::new(0)), sleep_state: CachePadded(AtomicU32::new(0)) }
    }
}

impl DoorbellWords {
    /// Whether the listener sleeps, or is about to. True only for a moment.
    pub fn is_asleep(&self) -> bool {
        self.sleep_state.0.load(Ordering::Relaxed) != AWAKE
    }
}

/// A ring in shared memory. `places` is a power of two and at least as long as `flags`.
#[derive(Clone, Copy)]
pub(super) struct Doorbells<'a> {
    pub words: &'a DoorbellWords,
    pub slots: &'a [AtomicU32],
    /// One for each socket.
    pub flags: &'a [AtomicU8],
}

/// The side that rings: what it alone knows.
#[derive(Debug)]
pub(crate) struct Notifier {
    tail: u32,
    /// Something was rung since the last look whether the listener sleeps.
    is_quiet: bool,
}

/// The side that listens: what it alone knows.
#[derive(Debug)]
pub(crate) struct NotifyQueue {
    head: u32,
}

/// What came of giving way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum YieldOutcome {
    /// The other side has its turn.
    Yielded,
    /// It sleeps, so its bells wake as ever.
    Declined,
    /// A bell waits: do not sleep.
    Notified,
}

/// A ring that its ringer broke: it says that there are more bells than places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CorruptRing;

impl Doorbells<'_> {
    /// The ringing side of a ring in which nothing was rung since it was cleared. There must be one at a time.
    pub fn notifier(self) -> Notifier {
        Notifier { tail: self.words.tail.0.load(Ordering::Relaxed), is_quiet: true }
    }

    /// The listening side, likewise.
    pub fn notify_queue(self) -> NotifyQueue {
        NotifyQueue { head: self.words.tail.0.load(Ordering::Relaxed) }
    }

    /// The listening side of a ring in which something may have been rung since it was cleared, which it hears of.
    pub fn notify_queue_from_start(self) -> NotifyQueue {
        NotifyQueue { head: 0 }
    }

    /// To be asked once after a batch by whoever has rung: whether the listener has to be woken.
    #[inline]
    pub fn needs_wakeup(self) -> bool {
        // Pairs with the fence in `before_sleep`: either the listener sees the bell, or this sees it asleep.
        fence(Ordering::SeqCst);
        let asleep = &self.words.sleep_state.0;
        asleep.load(Ordering::Relaxed) == ASLEEP && asleep.swap(AWAKE, Ordering::Relaxed) != AWAKE
    }

    /// To be asked when this side goes to sleep, after it has said so ([`Answerer::before_sleep`]): whether a listener that has given way to it must
    /// be woken.
    #[inline]
    pub fn ends_yield(self) -> bool {
        // That said so with a fence, which pairs with the one in `gives_way`.
        let asleep = &self.words.sleep_state.0;
        asleep.load(Ordering::Relaxed) == YIELDED && asleep.swap(AWAKE, Ordering::Relaxed) != AWAKE
    }

    /// Back to the initial state, when neither side exists.
    pub fn clear(self) {
        self.words.tail.0.store(0, Ordering::Relaxed);
        self.words.sleep_state.0.store(AWAKE, Ordering::Relaxed);
        for flag in self.flags {
            flag.store(0, Ordering::Relaxed);
        }
    }
}

impl Notifier {
    /// Rings for a socket. What was done before is seen by whoever answers.
    #[inline]
    pub fn notify(&mut self, bells: Doorbells<'_>, socket: u32, why: u8) {
        let before = bells.flags[socket as usize].fetch_or(why, Ordering::AcqRel);
        if before == 0 {
            let place = self.tail as usize & (bells.slots.len() - 1);
            bells.slots[place].store(socket, Ordering::Relaxed);
            self.tail = self.tail.wrapping_add(1);
            bells.words.tail.0.store(self.tail, Ordering::Release);
        }
        self.is_quiet = false;
    }

    /// To be asked once after a batch: whether the listener has to be woken. It need not if nothing was rung since.
    #[inline]
    pub fn needs_wakeup(&mut self, bells: Doorbells<'_>) -> bool {
        !core::mem::replace(&mut self.is_quiet, true) && bells.needs_wakeup()
    }
}

impl NotifyQueue {
    /// The next socket and why it was rung for; `None` if nobody rang. The socket's number is not checked.
    ///
    /// # Errors
    /// The ring says what cannot be. It begins anew, and bells are lost.
    #[inline]
    pub fn pop(&mut self, bells: Doorbells<'_>) -> Result<Option<(u32, u8)>, CorruptRing> {
        let tail = bells.words.tail.0.load(Ordering::Acquire);
        let waiting = tail.wrapping_sub(self.head) as usize;
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > bells.slots.len() {
            self.head = tail;
            return Err(CorruptRing);
        }
        let place = self.head as usize & (bells.slots.len() - 1);
        let socket = bells.slots[place].load(Ordering::Relaxed);
        self.head = self.head.wrapping_add(1);
        // Not a mere store: it must see what was done before the last bell, also if that found the flag set.
        let why = bells.flags.get(socket as usize).map_or(0, |flag| flag.swap(0, Ordering::AcqRel));
        Ok(Some((socket, why)))
    }

    /// From now on a bell wakes. False if one waits already: do not sleep.
    pub fn before_sleep(&mut self, bells: Doorbells<'_>) -> bool {
        bells.words.sleep_state.0.store(ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        bells.words.tail.0.load(Ordering::Relaxed) == self.head
    }

    /// After [`before_sleep`](Self::before_sleep) has said yes: bells need not wake before the other side, whose bells are `theirs`, goes to sleep itself.
    pub fn try_yield(&mut self, bells: Doorbells<'_>, theirs: Doorbells<'_>) -> YieldOutcome {
        if theirs.words.is_asleep() {
            return YieldOutcome::Declined;
        }
        let asleep = &bells.words.sleep_state.0;
        if asleep.compare_exchange(ASLEEP, YIELDED, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            // It was woken meanwhile, and will not sleep long.
            return YieldOutcome::Declined;
        }
        // Either this sees that the other side has fallen asleep since, or that one sees that it has to wake.
        fence(Ordering::SeqCst);
        if !theirs.words.is_asleep() {
            return YieldOutcome::Yielded;
        }
        let _ = asleep.compare_exchange(YIELDED, ASLEEP, Ordering::Relaxed, Ordering::Relaxed);
        // What was rung meanwhile woke nobody. Pairs with the fence of `must_wake`.
        fence(Ordering::SeqCst);
        if bells.words.tail.0.load(Ordering::Relaxed) == self.head {
            YieldOutcome::Declined
        } else {
            YieldOutcome::Notified
        }
    }

    /// How many bells have been rung, modulo 2^32: to see whether the other side has done anything since.
    pub fn notified_count(&self, bells: Doorbells<'_>) -> u32 {
        bells.words.tail.0.load(Ordering::Relaxed)
    }

    /// Bells wake no more. Whether somebody did.
    pub fn after_sleep(&mut self, bells: Doorbells<'_>) -> bool {
        bells.words.sleep_state.0.swap(AWAKE, Ordering::Relaxed) == AWAKE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring for `sockets`, and a position for each of them: what bells announce.
    struct Memory {
        words: DoorbellWords,
        places: Vec<AtomicU32>,
        flags: Vec<AtomicU8>,
        #[cfg(loom)]
        positions: Vec<AtomicU32>,
    }

    impl Memory {
        fn new(sockets: usize) -> Self {
            Self {
                words: DoorbellWords::new(),
                places: (0..sockets.next_power_of_two()).map(|_| AtomicU32::new(0)).collect(),
                flags: (0..sockets).map(|_| AtomicU8::new(0)).collect(),
                #[cfg(loom)]
                positions: (0..sockets).map(|_| AtomicU32::new(0)).collect(),
            }
        }

        fn bells(&self) -> Doorbells<'_> {
            Doorbells { words: &self.words, slots: &self.places, flags: &self.flags }
        }
    }

    #[cfg(not(loom))]
    mod sequential {
        use super::*;

        #[test]
        fn a_socket_stands_in_the_ring_once_however_often_it_is_rung() {
            let memory = Memory::new(3);
            let (mut ringer, mut answerer) = (memory.bells().notifier(), memory.bells().notify_queue());
            for _ in 0..100 {
                ringer.notify(memory.bells(), 2, NOTIFIED);
                ringer.notify(memory.bells(), 0, NOTIFIED);
            }
            ringer.notify(memory.bells(), 2, RELEASED);
            assert_eq!(answerer.pop(memory.bells()), Ok(Some((2, NOTIFIED | RELEASED))));
            ringer.notify(memory.bells(), 2, NOTIFIED);
            assert_eq!(answerer.pop(memory.bells()), Ok(Some((0, NOTIFIED))));
            assert_eq!(answerer.pop(memory.bells()), Ok(Some((2, NOTIFIED))));
            assert_eq!(answerer.pop(memory.bells()), Ok(None));
        }

        #[test]
        fn what_was_rung_before_anybody_listened_is_answered_and_is_not_the_last() {
            let memory = Memory::new(3);
            memory.words.tail.0.store(77, Ordering::Relaxed);
            memory.bells().clear();
            let mut ringer = memory.bells().notifier();
            ringer.notify(memory.bells(), 1, NOTIFIED);
            let mut answerer = memory.bells().notify_queue_from_start();
            ringer.notify(memory.bells(), 1, RELEASED);
            assert_eq!(answerer.pop(memory.bells()), Ok(Some((1, NOTIFIED | RELEASED))));
            assert_eq!(answerer.pop(memory.bells()), Ok(None));
            ringer.notify(memory.bells(), 1, NOTIFIED);
            assert_eq!(answerer.pop(memory.bells()), Ok(Some((1, NOTIFIED))));
        }

        #[test]
        fn all_sockets_fit_and_numbers_that_wrap_do_no_harm() {
            let memory = Memory::new(4);
            memory.words.tail.0.store(u32::MAX - 5, Ordering::Relaxed);
            let (mut ringer, mut answerer) = (memory.bells().notifier(), memory.bells().notify_queue());
            for _ in 0..5 {
                (0..4).for_each(|socket| ringer.notify(memory.bells(), socket, NOTIFIED));
                (0..4).for_each(|socket| {
                    assert_eq!(answerer.pop(memory.bells()), Ok(Some((socket, NOTIFIED))))
                });
                assert_eq!(answerer.pop(memory.bells()), Ok(None));
            }
        }

        #[test]
        fn a_broken_ring_is_an_error_once_and_goes_on() {
            let memory = Memory::new(4);
            let mut answerer = memory.bells().notify_queue();
            memory.words.tail.0.store(77, Ordering::Relaxed);
            assert_eq!(answerer.pop(memory.bells()), Err(CorruptRing));
            assert_eq!(answerer.pop(memory.bells()), Ok(None));
            memory.places[77 & 3].store(12_345, Ordering::Relaxed);
            memory.words.tail.0.store(78, Ordering::Relaxed);
            assert_eq!(
                answerer.pop(memory.bells()),
                Ok(Some((12_345, 0))),
                "whoever takes it checks the number"
            );
        }

        #[test]
        fn a_listener_that_gave_way_is_woken_when_the_other_side_sleeps() {
            let (up, down) = (Memory::new(2), Memory::new(2));
            let (mut ringer, mut answerer) = (up.bells().notifier(), up.bells().notify_queue());
            let mut other = down.bells().notify_queue();
            assert!(answerer.before_sleep(up.bells()));
            assert_eq!(answerer.try_yield(up.bells(), down.bells()), YieldOutcome::Yielded);
            ringer.notify(up.bells(), 1, NOTIFIED);
            assert!(!ringer.needs_wakeup(up.bells()), "it is the other side's turn");
            assert!(other.before_sleep(down.bells()));
            assert!(up.bells().ends_yield());
            assert!(!up.bells().ends_yield(), "once");
            assert!(answerer.after_sleep(up.bells()));
            assert_eq!(answerer.pop(up.bells()), Ok(Some((1, NOTIFIED))));
            assert!(answerer.before_sleep(up.bells()));
            assert_eq!(
                answerer.try_yield(up.bells(), down.bells()),
                YieldOutcome::Declined,
                "the other side sleeps"
            );
            assert!(!up.bells().ends_yield(), "it had no turn");
            ringer.notify(up.bells(), 1, NOTIFIED);
            assert!(ringer.needs_wakeup(up.bells()));
        }

        #[test]
        fn whoever_rings_a_sleeper_wakes_it_once() {
            let memory = Memory::new(2);
            let (mut ringer, mut answerer) = (memory.bells().notifier(), memory.bells().notify_queue());
            ringer.notify(memory.bells(), 0, NOTIFIED);
            assert!(!ringer.needs_wakeup(memory.bells()), "it is awake");
            assert!(!answerer.before_sleep(memory.bells()), "a bell waits");
            assert!(!answerer.after_sleep(memory.bells()));
            while answerer.pop(memory.bells()) != Ok(None) {}
            assert!(answerer.before_sleep(memory.bells()));
            assert!(!ringer.needs_wakeup(memory.bells()), "nothing was rung");
            ringer.notify(memory.bells(), 1, NOTIFIED);
            ringer.notify(memory.bells(), 0, NOTIFIED);
            assert!(ringer.needs_wakeup(memory.bells()));
            ringer.notify(memory.bells(), 1, NOTIFIED);
            assert!(!ringer.needs_wakeup(memory.bells()), "it was woken already");
            assert!(answerer.after_sleep(memory.bells()));
        }
    }

    #[cfg(loom)]
    mod model {
        use super::*;
        use std::sync::Arc;

        /// Whatever is done before a bell is seen by an answer to it or to a later one.
        #[test]
        fn nothing_that_was_rung_for_is_missed() {
            loom::model(|| {
                let memory = Arc::new(Memory::new(2));
                // Both here: a thread's own load of the tail would hide the other's from the checker.
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
                let mut answer = |queue: &mut NotifyQueue| {
                    while let Some((socket, _)) = queue.pop(memory.bells()).expect("nobody breaks it") {
                        seen[socket as usize] = memory.positions[socket as usize].load(Ordering::Relaxed);
                    }
                };
                answer(&mut queue);
                notifier.join().unwrap();
                answer(&mut queue);
                assert_eq!(seen, [2, 1]);
            });
        }

        /// A listener that goes to sleep is woken, or saw the bell before it did.
        #[test]
        fn no_bell_is_slept_through() {
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
                assert!(!sleeps || woken, "it sleeps and nobody woke it");
            });
        }

        /// The stack looks once behind each bell how much was written, takes all of it (`Domain::forward`), and goes to sleep without another look: whatever was written meanwhile has a bell of
        /// its own, or wakes it.
        #[test]
        fn one_look_behind_each_bell_is_enough_before_a_sleep() {
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
                        // Once: the checker knows no one order of what two threads write to a word, and would let the second look see what the first has left there.
                        notifier.needs_wakeup(memory.bells())
                    })
                };
                let mut taken = 0;
                let mut answer = |queue: &mut NotifyQueue| {
                    while queue.pop(memory.bells()).expect("nobody breaks it").is_some() {
                        taken = memory.positions[0].load(Ordering::Acquire);
                    }
                    taken
                };
                let taken = loop {
                    let taken = answer(&mut queue);
                    if queue.before_sleep(memory.bells()) {
                        break taken;
                    }
                    queue.after_sleep(memory.bells());
                };
                let woken = writer.join().unwrap();
                assert!(woken || taken == 2, "it sleeps, nobody woke it, and {taken} of 2 were taken");
                queue.after_sleep(memory.bells());
                assert_eq!(answer(&mut queue), 2);
            });
        }

        /// Of threads that ring by turns, and ask without the other's leave, one wakes the listener, and only one.
        #[test]
        fn of_those_who_ring_together_one_wakes() {
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
                assert!(!sleeps || woken.contains(&true), "it sleeps and nobody woke it");
                assert_ne!(woken, [true; 2], "it was woken twice");
            });
        }

        /// Two that give way to each other do not both sleep on what was rung.
        #[test]
        fn nobody_sleeps_through_the_end_of_a_turn() {
            loom::model(|| {
                let (up, down) = (Arc::new(Memory::new(1)), Arc::new(Memory::new(1)));
                let (mut notifier, mut queue) = (up.bells().notifier(), up.bells().notify_queue());
                let mut other = down.bells().notify_queue();
                let theirs = {
                    let (up, down) = (up.clone(), down.clone());
                    loom::thread::spawn(move || {
                        notifier.notify(up.bells(), 0, NOTIFIED);
                        let woken = notifier.needs_wakeup(up.bells());
                        assert!(other.before_sleep(down.bells()), "nobody rings it");
                        woken | up.bells().ends_yield()
                    })
                };
                let sleeps = queue.before_sleep(up.bells())
                    && queue.try_yield(up.bells(), down.bells()) != YieldOutcome::Notified;
                let woken = theirs.join().unwrap();
                assert!(!sleeps || woken, "it sleeps and nobody woke it");
            });
        }
    }
}
