//! Several queues as one device, for a single shard whose peer has several queues.

use ginnel_stack::device::{Device, RxBurst, RxQueue};
use ginnel_stack::time::Instant;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::io;

/// Joins the queues into a device that receives from all of them and sends on the first. Each of `wakers`
/// must be readable whenever the wake descriptor of its queue is, and stay open as long as the queue lives.
///
/// Panics if there is no queue.
pub(crate) fn join<'a>(
    mut queues: Vec<Device>,
    wakers: impl IntoIterator<Item = BorrowedFd<'a>>,
) -> io::Result<Device> {
    if queues.len() == 1 {
        return Ok(queues.remove(0));
    }
    let epoll_fd = epoll::create(CreateFlags::CLOEXEC)?;
    for waker in wakers {
        epoll::add(&epoll_fd, waker, EventData::new_u64(0), EventFlags::IN)?;
    }
    let tx = queues.remove(0);
    let mut rx = vec![tx.rx];
    rx.extend(queues.into_iter().map(|queue| queue.rx));
    Ok(Device { rx: Box::new(JoinedRx { queues: rx, next_queue: 0, epoll: epoll_fd }), tx: tx.tx })
}

struct JoinedRx {
    queues: Vec<Box<dyn RxQueue + Send>>,
    /// Queue that the next burst starts with.
    next_queue: usize,
    epoll: OwnedFd,
}

impl RxQueue for JoinedRx {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        let (later, first) = self.queues.split_at_mut(self.next_queue);
        self.next_queue = (self.next_queue + 1) % (later.len() + first.len());
        for queue in first.iter_mut().chain(later) {
            if !burst.is_full() {
                queue.rx_burst(now, burst);
            }
        }
    }

    fn arm(&mut self) -> bool {
        self.queues.iter_mut().all(|queue| queue.arm())
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.epoll.as_raw_fd())
    }

    fn computes_hashes(&self) -> bool {
        self.queues.iter().all(|queue| queue.computes_hashes())
    }

    /// The queues belong to one interface.
    fn is_gone(&self) -> bool {
        self.queues.iter().any(|queue| queue.is_gone())
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        let Some((first, others)) = self.queues.split_first() else { return };
        first.counters(&mut |name, count| {
            let mut sum = count;
            let mut add = |other: &str, count| sum += if other == name { count } else { 0 };
            others.iter().for_each(|queue| queue.counters(&mut add));
            report(name, sum);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::conformance;
    use crate::memory::{MemoryConfig, RssMode, multi_queue, pair};

    #[test]
    fn joined_queues_have_hashes_of_their_origin() {
        let with_computed_hashes =
            || multi_queue(&MemoryConfig::default(), 1, RssMode::DeliveredHash).1.remove(0);
        conformance::check_hash_origin(|device| {
            join(vec![device, with_computed_hashes()], []).expect("an epoll descriptor")
        });
        let (sender_computes, _peer) = pair(MemoryConfig::default());
        let joined = join(vec![with_computed_hashes(), sender_computes], []).expect("an epoll descriptor");
        assert!(!joined.rx.computes_hashes(), "a hash of the second queue may be wrong");
    }
}
