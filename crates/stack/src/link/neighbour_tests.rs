use super::*;
use core::net::Ipv4Addr;

const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 9]);
const OTHER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 8]);
const REACHABLE: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);

fn address(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn new(last: u8, state: NeighbourState) -> NewNeighbour {
    NewNeighbour {
        link: LinkId(0),
        address: address(last),
        header: [0; LINK_HEADER_MAX],
        header_len: 14,
        state,
    }
}

fn config() -> NetworkConfig {
    NetworkConfig { neighbours_max: 16, neighbour_pending_bytes: 2048, ..NetworkConfig::default() }
}

fn table() -> NeighbourTable {
    NeighbourTable::new(&config(), KeyedHash::new(&[1; 32]))
}

fn frame(len: usize) -> PendingFrame {
    PendingFrame { bytes: vec![0; len].into(), meta: TxMeta::default() }
}

fn reply(mac: MacAddr) -> NeighbourUpdate {
    NeighbourUpdate { mac: Some(mac), solicited: true, overrides: true, makes_stale: false }
}

/// Returns a neighbour that answered at time zero.
fn reachable() -> (NeighbourTable, u32) {
    let mut table = table();
    let (slot, _) = table.insert(new(1, NeighbourState::Unresolved)).unwrap();
    let neighbour = table.neighbour_mut(slot).unwrap();
    assert_eq!(neighbour.on_send(Instant::ZERO, &config()), SendDecision::QueueAndSolicit);
    assert_eq!(neighbour.update(Instant::ZERO, reply(MAC), REACHABLE), NeighbourUpdateOutcome::Resolved);
    (table, slot)
}

#[test]
fn neighbour_fails_after_three_unanswered_solicitations() {
    let mut table = table();
    let (slot, _) = table.insert(new(1, NeighbourState::Unresolved)).unwrap();
    let neighbour = table.neighbour_mut(slot).unwrap();
    for _ in 0..2 {
        assert_eq!(neighbour.on_send(Instant::ZERO, &config()), SendDecision::QueueAndSolicit);
        assert_eq!(neighbour.on_send(Instant::ZERO, &config()), SendDecision::Queue);
        assert_eq!(neighbour.on_timer(Instant::ZERO, &config()), NeighbourTimerAction::SolicitMulticast);
        assert_eq!(neighbour.on_timer(Instant::ZERO, &config()), NeighbourTimerAction::SolicitMulticast);
        assert_eq!(neighbour.on_timer(Instant::ZERO, &config()), NeighbourTimerAction::Fail);
        assert_eq!(neighbour.state, NeighbourState::Failed);
    }
}

#[test]
fn unanswered_probes_make_a_neighbour_failed() {
    let (mut table, slot) = reachable();
    let neighbour = table.neighbour_mut(slot).unwrap();
    assert_eq!(neighbour.on_send(Instant::from_millis(29_999), &config()), SendDecision::Send);
    let now = Instant::ZERO + REACHABLE;
    assert_eq!(neighbour.on_send(now, &config()), SendDecision::SendThenProbe(5 * SECOND));
    assert_eq!(neighbour.on_send(now, &config()), SendDecision::Send);
    for _ in 0..3 {
        assert_eq!(neighbour.on_timer(now, &config()), NeighbourTimerAction::SolicitUnicast);
    }
    assert_eq!(neighbour.on_timer(now, &config()), NeighbourTimerAction::Fail);
    assert_eq!(neighbour.state, NeighbourState::Failed);
}

#[test]
fn transport_confirmation_avoids_the_probe() {
    let (mut table, slot) = reachable();
    let neighbour = table.neighbour_mut(slot).unwrap();
    let now = Instant::ZERO + REACHABLE;
    neighbour.on_send(now, &config());
    neighbour.confirm(now + SECOND, REACHABLE);
    assert_eq!(neighbour.on_timer(now + 5 * SECOND, &config()), NeighbourTimerAction::None);
    assert_eq!(neighbour.state, NeighbourState::Reachable);
}

#[test]
fn refused_update_makes_neighbour_stale_in_ndp_only() {
    let (mut table, slot) = reachable();
    let neighbour = table.neighbour_mut(slot).unwrap();
    let update = NeighbourUpdate { overrides: false, ..reply(OTHER_MAC) };
    assert_eq!(neighbour.update(Instant::ZERO, update, REACHABLE), NeighbourUpdateOutcome::Refused);
    assert_eq!((neighbour.mac(), neighbour.state), (MAC, NeighbourState::Reachable));
    let update = NeighbourUpdate { makes_stale: true, ..update };
    assert_eq!(neighbour.update(Instant::ZERO, update, REACHABLE), NeighbourUpdateOutcome::Refused);
    assert_eq!((neighbour.mac(), neighbour.state), (MAC, NeighbourState::Stale));
}

#[test]
fn unsolicited_update_moves_neighbour_to_stale() {
    let (mut table, slot) = reachable();
    let neighbour = table.neighbour_mut(slot).unwrap();
    let update = NeighbourUpdate { solicited: false, ..reply(MAC) };
    assert_eq!(neighbour.update(Instant::ZERO, update, REACHABLE), NeighbourUpdateOutcome::Unchanged);
    assert_eq!(neighbour.state, NeighbourState::Reachable);
    let update = NeighbourUpdate { solicited: false, ..reply(OTHER_MAC) };
    assert_eq!(neighbour.update(Instant::ZERO, update, REACHABLE), NeighbourUpdateOutcome::Moved);
    assert_eq!((neighbour.mac(), neighbour.state), (OTHER_MAC, NeighbourState::Stale));
}

#[test]
fn lock_time_starts_at_last_mac_change() {
    let (mut table, slot) = reachable();
    let neighbour = table.neighbour_mut(slot).unwrap();
    assert!(neighbour.is_locked(Instant::from_millis(999), SECOND));
    neighbour.update(Instant::from_millis(999), reply(MAC), REACHABLE);
    assert!(!neighbour.is_locked(Instant::from_millis(1_000), SECOND));
}

#[test]
fn permanent_neighbour_is_never_changed_or_evicted() {
    let mut table = table();
    let (slot, _) = table.insert(new(0, NeighbourState::Permanent)).unwrap();
    let neighbour = table.neighbour_mut(slot).unwrap();
    assert_eq!(neighbour.update(Instant::ZERO, reply(MAC), REACHABLE), NeighbourUpdateOutcome::Refused);
    assert_eq!(neighbour.on_send(Instant::MAX, &config()), SendDecision::Send);
    assert_eq!(neighbour.on_timer(Instant::MAX, &config()), NeighbourTimerAction::None);
    for last in 1..100 {
        let (new_slot, _) = table.insert(new(last, NeighbourState::Unresolved)).unwrap();
        assert_ne!(new_slot, slot);
    }
    assert_eq!(table.find(LinkId(0), address(0)), Some(slot));
}

#[test]
fn eviction_invalidates_references_to_unused_neighbours() {
    let mut table = table();
    for last in 0..16 {
        table.insert(new(last, NeighbourState::Unresolved)).unwrap();
    }
    let old: Vec<_> = (0..16).map(|slot| table.reference(slot)).collect();
    // The first search clears every mark; afterwards only recently used neighbours are spared.
    table.insert(new(16, NeighbourState::Unresolved)).unwrap();
    table.neighbour_mut(1).unwrap().referenced = true;
    let (slot, evicted) = table.insert(new(17, NeighbourState::Unresolved)).unwrap();
    assert_eq!((slot, evicted.unwrap().slot), (2, 2));
    assert!(table.resolve(old[1]).is_some());
    assert!(table.resolve(old[2]).is_none() && !table.is_current(old[0]));
    assert_eq!(table.find(LinkId(0), address(2)), None);
    assert_eq!(table.find(LinkId(0), address(17)), Some(2));
}

#[test]
fn full_table_of_permanent_neighbours_rejects_more() {
    let mut table = table();
    for last in 0..16 {
        table.insert(new(last, NeighbourState::Permanent)).unwrap();
    }
    assert_eq!(table.insert(new(16, NeighbourState::Unresolved)).unwrap_err(), NoRoom);
}

#[test]
fn victim_search_skips_permanent_neighbours() {
    let config = NetworkConfig { neighbours_max: 2_000, ..config() };
    let address = |number: u32| IpAddr::from((0x0a00_0000 + number).to_be_bytes());
    let add = |table: &mut NeighbourTable, number, state| {
        table.insert(NewNeighbour { address: address(number), ..new(0, state) })
    };
    for dynamic in [0, 1, 10, 1_999] {
        let mut table = NeighbourTable::new(&config, KeyedHash::new(&[1; 32]));
        for number in 0..2_000 {
            // The first slot belongs to a permanent neighbour, which the search must skip.
            let state =
                if number < 2_000 - dynamic { NeighbourState::Permanent } else { NeighbourState::Unresolved };
            add(&mut table, number, state).unwrap();
        }
        assert_eq!(table.permanent_slots_left(), dynamic as usize);
        for number in 0..3_000 {
            let added = add(&mut table, 10_000 + number, NeighbourState::Unresolved);
            assert_eq!(added.is_ok(), dynamic > 0);
        }
        // One step for each mark that was ever set, and one for each eviction.
        let most = if dynamic > 0 { u64::from(dynamic) + 2 * 3_000 } else { 0 };
        assert!(
            table.victim_search_steps <= most,
            "{} steps with {dynamic} evictable neighbours",
            table.victim_search_steps
        );
    }
}

#[test]
fn permanent_neighbours_replace_others_one_by_one() {
    let mut table = table();
    for last in 0..16 {
        table.insert(new(last, NeighbourState::Unresolved)).unwrap();
    }
    for last in 100..116 {
        table.insert(new(last, NeighbourState::Permanent)).unwrap();
        // Between two insertions other neighbours are added and evicted.
        for other in 0..40 {
            let address = Ipv4Addr::new(10, 1, last, other).into();
            let added = table.insert(NewNeighbour { address, ..new(0, NeighbourState::Unresolved) });
            assert_eq!(added.is_ok(), last < 115);
        }
        let here = (100..=last).filter(|&last| table.find(LinkId(0), address(last)).is_some()).count();
        assert_eq!((here, table.permanent_slots_left()), (usize::from(last) - 99, 115 - usize::from(last)));
    }
}

#[test]
fn pending_packets_are_limited_per_neighbour_and_total() {
    let mut table = NeighbourTable {
        pending_bytes_max: 3000,
        ..NeighbourTable::new(&config(), KeyedHash::new(&[1; 32]))
    };
    let (first, _) = table.insert(new(1, NeighbourState::Unresolved)).unwrap();
    let (second, _) = table.insert(new(2, NeighbourState::Unresolved)).unwrap();
    assert_eq!(table.push_pending(first, frame(1000)), Ok(0));
    assert_eq!(table.push_pending(first, frame(1001)), Ok(0));
    assert_eq!(table.push_pending(first, frame(1000)), Ok(1));
    assert_eq!(table.push_pending(second, frame(1000)), Err(NoRoom));
    assert_eq!(table.push_pending(second, frame(999)), Ok(0));
    assert_eq!(table.push_pending(second, frame(4000)), Err(NoRoom));
    let frames = table.take_pending(first);
    assert_eq!(frames.len(), 2);
    assert_eq!(table.pending_bytes, 0);
    table.requeue_pending(first, frames);
    assert_eq!(table.pending_bytes, 2001);
}
