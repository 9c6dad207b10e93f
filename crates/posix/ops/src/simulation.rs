//! A simulated clock for the calls of one thread. A call that waits lets the simulation run the stacks and
//! advance the clock instead of sleeping, so a test sees every time-out without waiting for it.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

/// The stacks that the calls of this thread use, and their clock.
pub trait Simulation {
    /// Returns the simulated time. It never runs backwards.
    fn now(&self) -> Instant;

    /// Runs the stacks. If none of them has work to do, advances the clock to their next timer or to
    /// `deadline`, whichever comes first. Panics if there is neither, because the call would wait forever.
    fn run(&self, deadline: Option<Instant>);
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<dyn Simulation>>> = const { RefCell::new(None) };
}

/// Lets the simulation replace the clock and the sleep of this thread's calls, until the guard is dropped.
pub fn enter(simulation: Rc<dyn Simulation>) -> SimulationGuard {
    SimulationGuard { previous: CURRENT.replace(Some(simulation)) }
}

/// Ends a simulation when it is dropped.
pub struct SimulationGuard {
    previous: Option<Rc<dyn Simulation>>,
}

impl Drop for SimulationGuard {
    fn drop(&mut self) {
        CURRENT.set(self.previous.take());
    }
}

/// Returns the simulation of this thread, if there is one.
pub(crate) fn current() -> Option<Rc<dyn Simulation>> {
    CURRENT.with_borrow(Option::clone)
}

/// Returns the time: of this thread's simulation, or of the monotonic clock.
pub(crate) fn now() -> Instant {
    CURRENT
        .with_borrow(|simulation| simulation.as_ref().map(|simulation| simulation.now()))
        .unwrap_or_else(Instant::now)
}
