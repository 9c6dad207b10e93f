use super::*;
use proptest::prelude::*;

const TICK: u64 = 1 << TICK_SHIFT;

/// Counts how often the wheel accesses a node, which is what costs time.
struct Nodes {
    nodes: Vec<TimerNode>,
    accesses: usize,
}

impl TimerStore for Nodes {
    fn timer_node(&mut self, id: u32) -> &mut TimerNode {
        self.accesses += 1;
        &mut self.nodes[id as usize]
    }
}

fn nodes(count: usize) -> Nodes {
    Nodes { nodes: vec![TimerNode::default(); count], accesses: 0 }
}

fn ticks(ticks: u64) -> Instant {
    Instant::from_nanos(ticks.saturating_mul(TICK))
}

/// Returns all timers that are due at `now`; calls again while the wheel has more work to do.
fn pop_all(wheel: &mut TimerWheel, store: &mut Nodes, now: Instant) -> Vec<u32> {
    let mut popped = Vec::new();
    loop {
        while let Some(id) = wheel.pop_expired(store, now) {
            popped.push(id);
        }
        if wheel.next_deadline().is_none_or(|next| next > now) {
            return popped;
        }
    }
}

/// Checks that every list is linked in both directions and has the nodes of its slot, and that together the
/// lists have all armed nodes.
fn check_lists(wheel: &TimerWheel, store: &Nodes) {
    let mut linked = 0;
    for (number, slot) in wheel.slots.iter().enumerate() {
        let mark = SLOT_MARK | number as u32;
        let (mut link, mut prev) = (slot.first, mark);
        while link != 0 && link & SLOT_MARK == 0 {
            let node = &store.nodes[link as usize - 1];
            assert_eq!(node.prev, prev);
            (prev, link) = (link, node.next);
            linked += 1;
        }
        assert!(link == mark && slot.last == prev || slot.first == 0 && slot.last == 0);
        let occupied =
            wheel.occupied[number / RING_SLOTS as usize] >> (number % RING_SLOTS as usize) & 1 == 1;
        assert_eq!(occupied, slot.first != 0);
    }
    assert_eq!(linked, wheel.len());
    assert_eq!(linked, store.nodes.iter().filter(|node| node.is_armed()).count());
}

#[test]
fn timer_fires_at_next_tick_never_before() {
    let mut store = nodes(1);
    let mut wheel = TimerWheel::new(Instant::ZERO);
    wheel.schedule(&mut store, 0, Instant::from_nanos(10 * TICK + 1));
    assert_eq!(wheel.pop_expired(&mut store, Instant::from_nanos(11 * TICK - 1)), None);
    assert!(store.nodes[0].is_armed());
    assert_eq!(wheel.pop_expired(&mut store, ticks(11)), Some(0));
    assert!(!wheel.is_armed(&store.nodes[0]));
    assert_eq!((wheel.len(), wheel.next_deadline()), (0, None));
}

#[test]
fn cancelled_timers_leave_list_at_any_position() {
    for cancelled in 0..3u32 {
        let mut store = nodes(3);
        let mut wheel = TimerWheel::new(ticks(5));
        for id in 0..3 {
            wheel.schedule(&mut store, id, ticks(1000));
        }
        assert!(wheel.cancel(&mut store, cancelled));
        assert!(!wheel.cancel(&mut store, cancelled));
        check_lists(&wheel, &store);
        let rest: Vec<u32> = (0..3).filter(|&id| id != cancelled).collect();
        assert_eq!(pop_all(&mut wheel, &mut store, ticks(1000)), rest);
    }
}

#[test]
fn rearmed_timer_is_last_in_its_tick() {
    let mut store = nodes(2);
    let mut wheel = TimerWheel::new(Instant::ZERO);
    wheel.schedule(&mut store, 0, ticks(9));
    wheel.schedule(&mut store, 1, ticks(9));
    wheel.schedule(&mut store, 0, ticks(9));
    assert_eq!(wheel.len(), 2);
    assert_eq!(pop_all(&mut wheel, &mut store, ticks(9)), [1, 0]);
}

#[test]
fn order_within_tick_is_independent_of_distance() {
    // One timer is armed for one tick at every step of an approach that crosses windows of all levels.
    for target in [64, 4096, 4097, 1 << 18, (1 << 24) + 63, (1 << 30) - 1, 1 << 30, (1 << 36) + (1 << 30)] {
        let mut store = nodes(200);
        let mut wheel = TimerWheel::new(Instant::ZERO);
        let mut armed = 0;
        let mut remaining: u64 = target;
        while remaining > 1 && armed < 200 {
            assert_eq!(wheel.pop_expired(&mut store, ticks(target - remaining)), None);
            wheel.schedule(&mut store, armed, ticks(target));
            armed += 1;
            remaining -= remaining.div_ceil(5);
        }
        assert_eq!(pop_all(&mut wheel, &mut store, ticks(target - 1)), []);
        assert_eq!(pop_all(&mut wheel, &mut store, ticks(target)), (0..armed).collect::<Vec<_>>());
    }
}

#[test]
fn rearming_for_now_does_not_loop_forever() {
    let mut store = nodes(1);
    let mut wheel = TimerWheel::new(ticks(3));
    let now = ticks(7);
    wheel.schedule(&mut store, 0, ticks(1));
    let mut fired = 0;
    while let Some(id) = wheel.pop_expired(&mut store, now) {
        wheel.schedule(&mut store, id, now);
        fired += 1;
    }
    assert_eq!(fired, 2, "once when it was due, once at `now`");
    assert_eq!(wheel.next_deadline(), Some(ticks(8)));
}

#[test]
fn a_long_sleep_fires_everything_in_order() {
    let mut store = nodes(400);
    let mut wheel = TimerWheel::new(ticks(123));
    let deadline = |id: u32| 124 + u64::from(id).pow(4);
    for id in (0..400).rev() {
        wheel.schedule(&mut store, id, ticks(deadline(id)));
    }
    assert_eq!(pop_all(&mut wheel, &mut store, ticks(deadline(399))), (0..400).collect::<Vec<_>>());
}

#[test]
fn two_months_are_within_the_horizon() {
    // The longest user time-out is 2^32 ms.
    let far = Instant::ZERO + Duration::from_millis(u64::from(u32::MAX));
    assert!(HORIZON > Duration::from_millis(u64::from(u32::MAX)));
    let mut store = nodes(1);
    let mut wheel = TimerWheel::new(Instant::ZERO);
    wheel.schedule(&mut store, 0, far);
    while let Some(next) = wheel.next_deadline()
        && next < far
    {
        assert_eq!(wheel.pop_expired(&mut store, next), None);
    }
    assert_eq!(wheel.pop_expired(&mut store, far + Duration::from_nanos(TICK)), Some(0));
}

#[test]
fn timer_beyond_horizon_fires_at_horizon() {
    let mut store = nodes(1);
    let mut wheel = TimerWheel::new(ticks(5));
    wheel.schedule(&mut store, 0, Instant::MAX);
    assert_eq!(pop_all(&mut wheel, &mut store, ticks(5) + HORIZON), []);
    assert_eq!(pop_all(&mut wheel, &mut store, ticks(5 + (RING_SLOTS << 30))), [0]);
}

#[test]
fn largest_deadline_does_not_overflow() {
    let mut store = nodes(1);
    let mut wheel = TimerWheel::new(Instant::MAX);
    wheel.schedule(&mut store, 0, Instant::MAX);
    assert_eq!(wheel.next_deadline(), Some(Instant::MAX));
    assert_eq!(wheel.pop_expired(&mut store, Instant::MAX), None);
    assert!(wheel.cancel(&mut store, 0));
}

#[test]
fn cascading_ahead_spreads_work_of_crowded_slot() {
    // 50,000 timers that share a slot of level 2 are fired tick by tick.
    const COUNT: u32 = 50_000;
    let mut store = nodes(COUNT as usize);
    let mut wheel = TimerWheel::new(Instant::ZERO);
    let deadline = |id: u32| 8192 + u64::from(id) * 7919 % 4096;
    for id in 0..COUNT {
        wheel.schedule(&mut store, id, ticks(deadline(id)));
    }
    let mut fired = 0;
    for tick in 1..8192 + 4096 {
        loop {
            store.accesses = 0;
            let popped = wheel.pop_expired(&mut store, ticks(tick));
            // A move accesses the node at most three times, and both neighbours of the old and the new
            // position.
            assert!(store.accesses <= 7 * (AHEAD_MOVES_MAX as usize + 1), "{} at {tick}", store.accesses);
            let Some(id) = popped else { break };
            assert_eq!(deadline(id), tick);
            fired += 1;
        }
    }
    assert_eq!(fired, COUNT);
}

#[test]
fn timers_for_cascaded_slot_go_to_lower_level() {
    let mut store = nodes(1);
    let mut wheel = TimerWheel::new(Instant::ZERO);
    assert_eq!(wheel.pop_expired(&mut store, ticks(4090)), None);
    wheel.schedule(&mut store, 0, ticks(4100));
    assert_ne!(wheel.occupied[0], 0, "a window of level 2 begins in between");
    assert_eq!(wheel.next_deadline(), Some(ticks(4100)));
}

#[test]
fn call_is_bounded_after_long_sleep() {
    const COUNT: u32 = 20_000;
    let mut store = nodes(COUNT as usize);
    let mut wheel = TimerWheel::new(Instant::ZERO);
    for id in 0..COUNT {
        wheel.schedule(&mut store, id, ticks((3 << 24) + u64::from(id % 100)));
    }
    let now = ticks(4 << 24);
    let (mut fired, mut calls_without) = (0, 0);
    while fired < COUNT {
        store.accesses = 0;
        match wheel.pop_expired(&mut store, now) {
            Some(_) => fired += 1,
            None => {
                calls_without += 1;
                assert!(wheel.next_deadline().unwrap() <= now);
            }
        }
        assert!(store.accesses <= 7 * FORCED_MOVES_MAX as usize);
    }
    assert!(calls_without >= 10, "the work was split up");
}

#[test]
#[ignore = "minutes, and 1.3 GB; part of `make suites`"]
fn calls_are_bounded_with_hundred_million_timers() {
    // Like keepalive timers of connections that arrived at a steady rate: spread over two hours, a tenth of
    // them cancelled.
    const COUNT: u32 = 100_000_000;
    const TWO_HOURS: u64 = 7_200 * 1_000_000_000 / TICK;
    let mut store = nodes(COUNT as usize);
    let mut wheel = TimerWheel::new(Instant::ZERO);
    let deadline = |id: u32| 1 + u64::from(id) * 48_271 % u64::from(COUNT) * TWO_HOURS / u64::from(COUNT);
    let mut most = 0;
    for id in 0..COUNT {
        store.accesses = 0;
        wheel.schedule(&mut store, id, ticks(deadline(id)));
        most = most.max(store.accesses);
    }
    for id in (0..COUNT).step_by(10) {
        store.accesses = 0;
        assert!(wheel.cancel(&mut store, id));
        most = most.max(store.accesses);
    }
    assert!(most <= 7, "{most} nodes were looked at to arm or cancel one");
    let (mut fired, mut all, mut most) = (0, 0, 0);
    for tick in 1..=TWO_HOURS {
        loop {
            store.accesses = 0;
            let popped = wheel.pop_expired(&mut store, ticks(tick));
            (all, most) = (all + store.accesses, most.max(store.accesses));
            match popped {
                Some(id) => assert_eq!(deadline(id), tick),
                // More timers may be due than one call cascades.
                None if wheel.next_deadline().is_some_and(|next| next <= ticks(tick)) => continue,
                None => break,
            }
            fired += 1;
        }
    }
    assert_eq!(fired, COUNT - COUNT / 10);
    assert!(most <= 7 * (FORCED_MOVES_MAX + AHEAD_MOVES_MAX) as usize, "{most} nodes in one call");
    // Each timer moves down at most five times, and fires.
    assert!(all <= 7 * 6 * fired as usize, "{all} nodes for {fired} timers");
    println!("{most} nodes in one call at most, {:.1} per timer", all as f64 / f64::from(fired));
}

#[derive(Clone, Debug)]
enum Step {
    Schedule {
        id: u32,
        after: u64,
    },
    Cancel {
        id: u32,
    },
    /// Lets this much time pass and pops the timers that are due, at most `most`.
    Pass {
        nanos: u64,
        most: usize,
    },
    SleepUntilNextDeadline,
}

/// Generates nanoseconds of every order of magnitude, from zero to beyond the horizon.
fn span(bits_max: u32) -> impl Strategy<Value = u64> {
    (0..bits_max, any::<u64>()).prop_map(|(bits, random)| random & ((1 << bits) - 1))
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..40u32, span(55)).prop_map(|(id, after)| Step::Schedule { id, after }),
        2 => (0..40u32).prop_map(|id| Step::Cancel { id }),
        2 => (span(54), 0..50usize).prop_map(|(nanos, most)| Step::Pass { nanos, most }),
        4 => (span(25), Just(usize::MAX)).prop_map(|(nanos, most)| Step::Pass { nanos, most }),
        2 => Just(Step::SleepUntilNextDeadline),
    ];
    proptest::collection::vec(step, 1..200)
}

/// A sorted list with the behaviour that the wheel promises.
#[derive(Default)]
struct Oracle {
    /// Tick, number of the call that armed it, id.
    armed: Vec<(u64, u64, u32)>,
    calls: u64,
}

impl Oracle {
    fn cancel(&mut self, id: u32) -> bool {
        let before = self.armed.len();
        self.armed.retain(|timer| timer.2 != id);
        self.armed.len() < before
    }

    fn schedule(&mut self, id: u32, tick: u64) {
        self.cancel(id);
        self.calls += 1;
        self.armed.push((tick, self.calls, id));
        self.armed.sort_unstable();
    }

    fn pop(&mut self, now: u64) -> Option<u32> {
        let due = self.armed.first().is_some_and(|timer| timer.0 <= now);
        due.then(|| self.armed.remove(0).2)
    }
}

proptest! {
    #[test]
    fn agrees_with_a_sorted_list(
        start in span(50),
        steps in steps(),
        // Small numbers of moves test calls that leave work for the next one.
        forced in prop_oneof![1..5u32, Just(FORCED_MOVES_MAX)],
        ahead in prop_oneof![1..3u32, Just(AHEAD_MOVES_MAX)],
    ) {
        let mut now = Instant::from_nanos(start);
        let mut store = nodes(40);
        let mut wheel = TimerWheel::new(now);
        (wheel.forced_moves_max, wheel.ahead_moves_max) = (forced, ahead);
        let mut oracle = Oracle::default();
        for step in steps {
            match step {
                Step::Schedule { id, after } => {
                    let at = now + Duration::from_nanos(after);
                    let horizon = (((wheel.current >> 30) + RING_SLOTS) << 30) - 1;
                    let tick = at.as_nanos().div_ceil(TICK).clamp(wheel.current + 1, horizon);
                    wheel.schedule(&mut store, id, at);
                    oracle.schedule(id, tick);
                }
                Step::Cancel { id } => prop_assert_eq!(wheel.cancel(&mut store, id), oracle.cancel(id)),
                Step::Pass { nanos, most } => {
                    now += Duration::from_nanos(nanos);
                    for _ in 0..most {
                        let popped = wheel.pop_expired(&mut store, now);
                        if popped.is_some() || wheel.next_deadline().is_none_or(|next| next > now) {
                            prop_assert_eq!(popped, oracle.pop(now.as_nanos() / TICK));
                        }
                        if popped.is_none() {
                            break;
                        }
                    }
                }
                Step::SleepUntilNextDeadline => {
                    let Some(next) = wheel.next_deadline() else { continue };
                    prop_assert!(next.as_nanos() <= oracle.armed[0].0 * TICK);
                    now = now.max(next);
                    for id in pop_all(&mut wheel, &mut store, now) {
                        prop_assert_eq!(Some(id), oracle.pop(now.as_nanos() / TICK));
                    }
                    prop_assert!(wheel.next_deadline().is_none_or(|later| later > now), "no progress");
                }
            }
            prop_assert_eq!(wheel.len(), oracle.armed.len());
            let next = wheel.next_deadline().map(|next| next.as_nanos() / TICK);
            let earliest = oracle.armed.first().map(|timer| timer.0);
            prop_assert!(next.is_some() == earliest.is_some() && next <= earliest);
        }
        check_lists(&wheel, &store);
        let rest = pop_all(&mut wheel, &mut store, Instant::MAX);
        prop_assert_eq!(rest, oracle.armed.iter().map(|timer| timer.2).collect::<Vec<_>>());
    }

    #[test]
    fn timers_of_one_tick_keep_order_across_calls(
        forced in 1..4u32,
        ahead in 1..3u32,
        target in prop_oneof![60..70u64, 4090..4200u64, 8190..8200u64],
        advances in proptest::collection::vec((0..4u32, 0..400u64), 10..60),
    ) {
        let mut store = nodes(200);
        let mut wheel = TimerWheel::new(Instant::ZERO);
        (wheel.forced_moves_max, wheel.ahead_moves_max) = (forced, ahead);
        let (mut armed, mut tick) = (0, 0);
        for (count, advance) in advances {
            for _ in 0..count.min(200 - armed) {
                wheel.schedule(&mut store, armed, ticks(target));
                armed += 1;
            }
            tick = (tick + advance).min(target - 1);
            // One call, which may leave work.
            prop_assert_eq!(wheel.pop_expired(&mut store, ticks(tick)), None);
        }
        check_lists(&wheel, &store);
        prop_assert_eq!(pop_all(&mut wheel, &mut store, ticks(target)), (0..armed).collect::<Vec<_>>());
    }

    #[test]
    fn order_is_independent_of_call_times(
        deadlines in proptest::collection::vec(span(40), 1..60),
        pauses in proptest::collection::vec(span(36), 0..60),
    ) {
        let run = |pauses: &[u64]| {
            let mut store = nodes(deadlines.len());
            let mut wheel = TimerWheel::new(Instant::ZERO);
            for (id, &at) in deadlines.iter().enumerate() {
                wheel.schedule(&mut store, id as u32, Instant::from_nanos(at));
            }
            let mut order = Vec::new();
            let mut now = Instant::ZERO;
            for &pause in pauses {
                now += Duration::from_nanos(pause);
                order.extend(pop_all(&mut wheel, &mut store, now));
            }
            order.extend(pop_all(&mut wheel, &mut store, Instant::from_nanos(1 << 41)));
            order
        };
        prop_assert_eq!(run(&pauses), run(&[]));
    }
}
