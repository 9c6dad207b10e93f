//! Checks of sleeping and waking.
#![allow(unsafe_code)] // a queue names its descriptor by number

use super::{Fixture, TIMEOUT, TestFrame, WINDOW, receive, send, sleep, wait};
use ginnel_stack::device::Device;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Calls `body` with the descriptor of a queue that the caller keeps alive during the call.
pub(super) fn with_borrowed<T>(fd: RawFd, body: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
    // SAFETY: the caller obtained the number from a queue that lives until this function returns.
    body(unsafe { BorrowedFd::borrow_raw(fd) })
}

pub(super) fn a_frame_wakes_the_receiver(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    for number in 0..20 {
        assert!(send(&mut *fixture.left.tx, &TestFrame::plain(capabilities, number, 100)));
        fixture.left.tx.flush(fixture.clock.now());
        let deadline = fixture.clock.now() + TIMEOUT;
        while receive(&mut *fixture.right.rx, fixture.clock).is_empty() {
            assert!(fixture.clock.now() < deadline, "a frame sent before the sleep is missing");
            wait(&mut *fixture.left.tx, &mut *fixture.right.rx, fixture.clock);
        }
        // The receiver sleeps first, then the frame is sent.
        if !fixture.right.rx.arm() {
            continue;
        }
        assert!(send(&mut *fixture.left.tx, &TestFrame::plain(capabilities, number, 100)));
        fixture.left.tx.flush(fixture.clock.now());
        while receive(&mut *fixture.right.rx, fixture.clock).is_empty() {
            assert!(fixture.clock.now() < deadline, "a frame sent during the sleep is missing");
            wait(&mut *fixture.left.tx, &mut *fixture.right.rx, fixture.clock);
        }
    }
}

/// The receiver sleeps whenever it may. After a lost wake-up it would sleep until its timeout, because the
/// sender waits for it.
pub(super) fn no_wake_up_is_lost_between_two_threads(fixture: &mut Fixture) {
    const FRAMES: u32 = 3000;
    let (spare_left, spare_right) = crate::memory::pair(Default::default());
    let mut left = std::mem::replace(&mut fixture.left, spare_left);
    let mut right = std::mem::replace(&mut fixture.right, spare_right);
    let clock = fixture.clock;
    let received = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let capabilities = left.tx.capabilities();
            let mut random = crate::random::Random::new(7);
            let mut sent = 0;
            let deadline = clock.now() + 3 * TIMEOUT;
            while sent < FRAMES && clock.now() < deadline {
                left.tx.flush(clock.now());
                if sent - received.load(Ordering::Relaxed) >= WINDOW as u32 / 4 {
                    std::thread::yield_now();
                    continue;
                }
                for _ in 0..=random.below(3) {
                    if send(&mut *left.tx, &TestFrame::plain(capabilities, sent, 100)) {
                        sent += 1;
                    }
                }
                left.tx.flush(clock.now());
                match random.below(4) {
                    0 => std::thread::sleep(Duration::from_micros(random.below(100))),
                    1 => (0..random.below(2000)).for_each(|_| std::hint::spin_loop()),
                    2 => std::thread::yield_now(),
                    _ => {}
                }
            }
            while received.load(Ordering::Relaxed) < FRAMES && clock.now() < deadline {
                std::thread::yield_now();
                left.tx.flush(clock.now());
            }
        });
        receive_asleep(&mut right, clock, &received, FRAMES);
    });
    let total = received.load(Ordering::Relaxed);
    assert!(total >= FRAMES, "{total} of {FRAMES} frames arrived before a sleep timed out");
}

fn receive_asleep(device: &mut Device, clock: super::TestClock, received: &AtomicU32, frames: u32) {
    let mut total = 0;
    while total < frames {
        let burst = receive(&mut *device.rx, clock);
        total += burst.len() as u32;
        received.store(total, Ordering::Relaxed);
        if !burst.is_empty() || !device.rx.arm() {
            continue;
        }
        let until = device.rx.next_deadline();
        let longest = until.map_or(TIMEOUT, |until| until - clock.now());
        if !sleep(device.rx.wake_fd(), longest) && until.is_none() {
            return;
        }
    }
}
