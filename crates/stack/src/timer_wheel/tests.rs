use super::*;

const TICK: u64 = 1 << TICK_SHIFT;

struct Nodes(Vec<TimerNode>);

impl TimerStore for Nodes {
    fn timer_node(&mut self, id: u32) -> &mut TimerNode {
        &mut self.0[id as usize]
    }
}

fn nodes(count: usize) -> Nodes {
    Nodes(vec![TimerNode::default(); count])
}

fn ticks(ticks: u64) -> Instant {
    Instant::from_nanos(ticks * TICK)
}

/// Everything due at `now`; asks again while the wheel says that it has more to do.
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

#[test]
fn fires_at_the_next_tick_and_never_before() {
    let mut store = nodes(1);
    let mut wheel = TimerWheel::new(Instant::ZERO);
    wheel.schedule(&mut store, 0, Instant::from_nanos(10 * TICK + 1));
    assert_eq!(wheel.pop_expired(&mut store, Instant::from_nanos(11 * TICK - 1)), None);
    assert!(store.0[0].is_armed());
    assert_eq!(wheel.pop_expired(&mut store, ticks(11)), Some(0));
    assert!(!wheel.is_armed(&store.0[0]));
    assert_eq!((wheel.len(), wheel.next_deadline()), (0, None));
}

#[test]
fn cancelled_timers_leave_the_list_wherever_they_stand() {
    for cancelled in 0..3u32 {
        let mut store = nodes(3);
        let mut wheel = TimerWheel::new(ticks(5));
        for id in 0..3 {
            wheel.schedule(&mut store, id, ticks(1000));
        }
        assert!(wheel.cancel(&mut store, cancelled));
        assert!(!wheel.cancel(&mut store, cancelled));
        let rest: Vec<u32> = (0..3).filter(|&id| id != cancelled).collect();
        assert_eq!(pop_all(&mut wheel, &mut store, ticks(1000)), rest);
    }
}
