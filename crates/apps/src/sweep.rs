//! Coarse time-outs for very many connections.
//!
//! A server re-arms a time-out with every request, which must cost nothing: here it is one store into the connection's own record. The
//! sweep holds at most one 4-byte entry per slot of the connection table and looks at each slot at least once per
//! *period*. An entry is never removed; it names the slot, not the connection, so the slot's next tenant inherits it.

/// The longest period in seconds: a longer time-out is looked at more than once.
const PERIOD_MAX: u32 = 60;

/// Which slots are to be looked at in which second.
#[derive(Debug)]
pub struct Sweep {
    /// One list per second of the period, by second modulo the number of lists.
    seconds: Box<[Vec<u32>]>,
    /// The next second to be swept.
    next: u32,
}

impl Sweep {
    /// A sweep for time-outs of at least `timeout_min` seconds: a connection whose deadline is set at least so far ahead is always
    /// looked at before the deadline or in its second. `second` is the current one.
    pub fn new(timeout_min: u32, second: u32) -> Self {
        let period = timeout_min.clamp(1, PERIOD_MAX);
        Self { seconds: (0..=period).map(|_| Vec::new()).collect(), next: second }
    }

    const fn period(&self) -> u32 {
        self.seconds.len() as u32 - 1
    }

    /// Enters a slot that has no entry; it is looked at in second `deadline`, or earlier if that is farther away than a period.
    pub fn enter(&mut self, slot: u32, deadline: u32) {
        let due = deadline.clamp(self.next, self.next.saturating_add(self.period()));
        let list = due as usize % self.seconds.len();
        self.seconds[list].push(slot);
    }

    /// Takes out a slot that is due at `second`. The caller looks at it and enters it again unless it has no connection.
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
    fn a_slot_comes_in_its_second() {
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
    fn a_distant_deadline_is_looked_at_each_period() {
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
    fn a_deadline_in_the_past_is_looked_at_in_the_next_sweep() {
        let mut sweep = Sweep::new(5, 50);
        sweep.enter(1, 3);
        assert_eq!(due(&mut sweep, 50), [1]);
    }

    #[test]
    fn after_a_long_pause_everything_is_looked_at_once() {
        let mut sweep = Sweep::new(5, 0);
        (0..6).for_each(|i| sweep.enter(i, i));
        assert_eq!(due(&mut sweep, 10_000), [0, 1, 2, 3, 4, 5]);
        sweep.enter(9, 10_003);
        assert!(due(&mut sweep, 10_002).is_empty());
        assert_eq!(due(&mut sweep, 10_003), [9]);
    }
}
