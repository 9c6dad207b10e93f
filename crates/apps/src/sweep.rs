//! Coarse timeouts for many connections.
//!
//! A server re-arms a timeout with every request. That costs one store into the connection's own record. The
//! sweep holds at most one 4-byte entry per slot of the connection table and checks each slot at least once
//! per *period*. The end of a connection does not remove the entry. It names the slot and not the connection,
//! so the slot's next connection inherits it.
//!
//! A second stands for the caller's unit of time: the load generator sweeps in ticks of 100 ms.

/// Longest period in seconds. A slot with a longer timeout is checked more than once.
const PERIOD_MAX: u32 = 60;

/// The slots to check in each second.
#[derive(Debug)]
pub struct Sweep {
    /// A list of slots for each second of the period, indexed by second modulo the number of lists.
    seconds: Box<[Vec<u32>]>,
    /// Next second to sweep.
    next: u32,
}

impl Sweep {
    /// Creates a sweep for timeouts of at least `timeout_min` seconds: a slot whose deadline is set at least
    /// `timeout_min` seconds ahead is checked no later than in the second of its deadline. `second` is the
    /// current second.
    pub fn new(timeout_min: u32, second: u32) -> Self {
        let period = timeout_min.clamp(1, PERIOD_MAX);
        Self { seconds: (0..=period).map(|_| Vec::new()).collect(), next: second }
    }

    const fn period(&self) -> u32 {
        self.seconds.len() as u32 - 1
    }

    /// Enters a slot that has no entry. The slot is due in second `deadline`, or after one period if
    /// `deadline` is later.
    pub fn enter(&mut self, slot: u32, deadline: u32) {
        let due = deadline.clamp(self.next, self.next.saturating_add(self.period()));
        let list = due as usize % self.seconds.len();
        self.seconds[list].push(slot);
    }

    /// Removes a slot that is due by `second` and returns it. The caller checks the slot and enters it again
    /// if it has a connection.
    pub fn take_due(&mut self, second: u32) -> Option<u32> {
        while self.next <= second {
            let list = self.next as usize % self.seconds.len();
            match self.seconds[list].pop() {
                Some(slot) => return Some(slot),
                None => self.next += 1,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(sweep: &mut Sweep, second: u32) -> Vec<u32> {
        let mut slots: Vec<u32> = core::iter::from_fn(|| sweep.take_due(second)).collect();
        slots.sort_unstable();
        slots
    }

    #[test]
    fn a_slot_is_due_in_its_second() {
        let mut sweep = Sweep::new(10, 100);
        sweep.enter(1, 105);
        sweep.enter(2, 103);
        sweep.enter(3, 105);
        assert!(due(&mut sweep, 102).is_empty());
        assert_eq!(due(&mut sweep, 104), [2]);
        assert_eq!(due(&mut sweep, 105), [1, 3]);
        assert!(due(&mut sweep, 1_000).is_empty());
    }

    #[test]
    fn a_distant_deadline_is_checked_every_period() {
        let mut sweep = Sweep::new(10, 0);
        sweep.enter(7, 35);
        let mut looks = Vec::new();
        for second in 0..=35 {
            while let Some(slot) = sweep.take_due(second) {
                looks.push(second);
                if second < 35 {
                    sweep.enter(slot, 35);
                }
            }
        }
        assert_eq!(looks, [10, 20, 30, 35]);
    }

    #[test]
    fn a_past_deadline_is_due_at_once() {
        let mut sweep = Sweep::new(5, 50);
        sweep.enter(1, 3);
        assert_eq!(due(&mut sweep, 50), [1]);
    }

    #[test]
    fn after_a_long_pause_every_slot_is_checked() {
        let mut sweep = Sweep::new(5, 0);
        (0..6).for_each(|i| sweep.enter(i, i));
        assert_eq!(due(&mut sweep, 10_000), [0, 1, 2, 3, 4, 5]);
        sweep.enter(9, 10_003);
        assert!(due(&mut sweep, 10_002).is_empty());
        assert_eq!(due(&mut sweep, 10_003), [9]);
    }
}
