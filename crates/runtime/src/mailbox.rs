//! Mailboxes between shards. For each ordered pair there are two lanes, one for frames that belong to the other and one for what all must know;
//! both are bounded and have one writer and one reader.
//!
//! * **Frames** are copied once, into the lane's own memory, because the device wants its frames back at the end of the turn. The receiver
//!   processes them where they lie. A full lane drops them, and the sender counts that.
//! * **What all must know** is never lost. What comes from the wire (ARP, neighbour and router discovery) is taken only if there is room to tell
//!   everybody, as if the wire had lost it otherwise. What the stack itself finds out is kept as [`News`] until there is room, the latest
//!   about each thing; there are only so many things.

use crate::bell::Bell;
use ginnel_devices::memory::lane::{LaneRx, LaneTx, lane};
use ginnel_stack::device::RxFrame;
use ginnel_stack::handle::PortId;
use ginnel_stack::steering::News;
use std::collections::VecDeque;
use std::sync::Arc;

/// Tag of what is no frame.
pub(crate) const NEWS: u32 = u32::MAX;
/// News that wait for room at the most: as many path MTUs as a stack remembers by default, and addresses. Beyond it the oldest path MTU goes.
const NEWS_MAX: usize = 8192;

/// What one shard writes to another.
pub(crate) struct Outbox {
    frames: LaneTx,
    told: LaneTx,
    news: VecDeque<News>,
    bell: Arc<Bell>,
}

/// What one shard reads from another.
pub(crate) struct Inbox {
    pub(crate) frames: LaneRx,
    pub(crate) told: LaneRx,
}

/// The two ends of a mailbox. `bell` wakes the reader.
pub(crate) fn mailbox(frames_bytes: usize, told_bytes: usize, bell: Arc<Bell>) -> (Outbox, Inbox) {
    let ((frames, frames_rx), (told, told_rx)) = (lane(frames_bytes), lane(told_bytes));
    (Outbox { frames, told, news: VecDeque::new(), bell }, Inbox { frames: frames_rx, told: told_rx })
}

impl Outbox {
    /// Sends a frame that belongs to the other. False, and it is lost, if the mailbox is full.
    pub(crate) fn send(&mut self, port: PortId, frame: &RxFrame<'_>) -> bool {
        self.frames.push(port.0.into(), frame)
    }

    /// Whether a frame of `len` bytes can be told. Nothing overtakes news.
    pub(crate) fn can_tell(&mut self, len: usize) -> bool {
        self.news.is_empty() && self.told.has_room(len)
    }

    /// Tells a frame, for which there is room.
    pub(crate) fn tell(&mut self, port: PortId, frame: &RxFrame<'_>) {
        let told = self.told.push(port.0.into(), frame);
        debug_assert!(told, "told without asking for room");
    }

    /// Tells news, now or when there is room.
    pub(crate) fn tell_news(&mut self, news: News) {
        self.news.retain(|earlier| !earlier.is_superseded_by(&news));
        if self.news.len() >= NEWS_MAX
            && let Some(oldest) = self.news.iter().position(|news| matches!(news, News::PathMtu { .. }))
        {
            self.news.remove(oldest);
        }
        self.news.push_back(news);
    }

    /// Shows the other what is new, and wakes it if it sleeps.
    pub(crate) fn publish(&mut self) {
        while let Some(news) = self.news.front() {
            if !self.told.push(NEWS, &RxFrame::new(&news.encode())) {
                break;
            }
            self.news.pop_front();
        }
        // Both, whatever the first says.
        if self.frames.publish() | self.told.publish() {
            self.bell.ring();
        }
    }

    /// True if news wait for room: come back soon.
    pub(crate) fn is_behind(&self) -> bool {
        !self.news.is_empty()
    }

    /// Wakes the other, for something that is not in the mailbox.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }
}

impl Inbox {
    /// Whether something waits.
    pub(crate) fn is_waiting(&mut self) -> bool {
        self.frames.is_waiting() || self.told.is_waiting()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::net::IpAddr;

    fn path_mtu(last: u8, mtu: u16) -> News {
        News::PathMtu { destination: IpAddr::from([10, 0, 0, last]), mtu }
    }

    fn heard(inbox: &mut Inbox) -> Vec<News> {
        let news = inbox.told.burst().iter().filter_map(|c| News::decode(c.frame.bytes)).collect();
        inbox.told.release();
        news
    }

    /// The receiver does not read for a while: nothing of what all must know is lost, and the latest about each thing arrives.
    #[test]
    fn news_that_find_the_mailbox_full_arrive_when_there_is_room() {
        let (mut out, mut inbox) = mailbox(4096, 4096, Arc::new(Bell::new().unwrap()));
        for last in 0..200 {
            out.tell_news(path_mtu(last, 1400));
            out.publish();
        }
        assert!(out.is_behind() && !out.can_tell(60), "nothing overtakes what waits");
        out.tell_news(path_mtu(199, 1300));
        let mut all = Vec::new();
        while out.is_behind() || inbox.is_waiting() {
            all.extend(heard(&mut inbox));
            out.publish();
        }
        let expected: Vec<News> =
            (0..199).map(|last| path_mtu(last, 1400)).chain([path_mtu(199, 1300)]).collect();
        assert_eq!(all, expected);
        assert!(out.can_tell(60));
    }

    /// How often the bell was rung: what its counter in the kernel says.
    fn rings(bell: &Bell) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(bell.wake().as_fd(), &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    #[test]
    fn a_sleeper_is_woken_once_for_all_that_waits_and_nobody_who_is_awake() {
        let bell = Arc::new(Bell::new().unwrap());
        let ((mut one, mut from_one), (mut other, _from_other)) =
            (mailbox(4096, 4096, bell.clone()), mailbox(4096, 4096, bell.clone()));
        let frame = RxFrame::new(&[7; 60]);
        let send = |out: &mut Outbox| {
            assert!(out.send(PortId(0), &frame));
            out.publish();
        };
        send(&mut one);
        assert_eq!(rings(&bell), 0, "it is awake");
        bell.before_sleep();
        assert!(from_one.is_waiting(), "so it does not sleep");
        bell.after_sleep(false);
        from_one.frames.burst();
        from_one.frames.release();
        bell.before_sleep();
        assert!(!from_one.is_waiting());
        one.publish();
        assert_eq!(rings(&bell), 0, "there is nothing new");
        (0..10).for_each(|_| send(&mut one));
        send(&mut other);
        one.tell_news(path_mtu(1, 1400));
        one.publish();
        assert_eq!(rings(&bell), 1);
        bell.after_sleep(false);
        send(&mut one);
        assert_eq!(rings(&bell), 0, "it is awake again");
    }

    #[test]
    fn news_that_wait_have_a_bound() {
        let (mut out, _inbox) = mailbox(4096, 4096, Arc::new(Bell::new().unwrap()));
        for n in 0..20_000u32 {
            out.tell_news(News::PathMtu { destination: IpAddr::from(n.to_be_bytes()), mtu: 1400 });
        }
        assert_eq!(out.news.len(), NEWS_MAX);
    }
}
