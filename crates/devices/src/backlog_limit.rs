//! Limits how many frames of low priority wait in a device, so that urgent frames find few in front of them:
//! what a device has taken is not reordered any more. The others wait in the engine's connections, where
//! urgent ones precede them.

use ginnel_stack::device::{Capabilities, GatherTx, Label, PayloadPiece, TxClass, TxMeta, TxQueue};
use ginnel_stack::time::Instant;

/// Limits the frames that wait in a device. While `frames` frames wait, no frames of class 1 (best effort) or
/// class 0 are accepted; class 2 is refused while twice as many wait, class 3 three times, and so on.
/// The highest class, and frames of which no class is known ([`TxQueue::select_class`]), are accepted as long
/// as the device has room.
///
/// Frames of which no class is known could keep the backlog above the bounds of connections forever. So for
/// each of them that is accepted while `frames` frames wait, one frame of a connection is accepted above its
/// bound, the most urgent first. Datagrams are sent first whenever the device has room, and could shut out
/// connections, too. So each datagram below the highest class also lets one frame of a connection pass.
/// Datagrams of the highest class precede all connections below that class.
///
/// The device must be able to tell what waits ([`TxQueue::has_backlog`]).
#[must_use]
pub fn wrap_tx(inner: Box<dyn TxQueue + Send>, frames: usize) -> Box<dyn TxQueue + Send> {
    Box::new(LimitedTx { inner, frames, bound: Some(frames), class: None, credit: 0, credit_after_commit: 0 })
}

struct LimitedTx {
    inner: Box<dyn TxQueue + Send>,
    frames: usize,
    /// Backlog at which frames of the current class are refused; `frames` if no class is known. `None` for
    /// the highest class.
    bound: Option<usize>,
    class: Option<TxClass>,
    /// Number of frames of connections that may still be accepted above their bound, at most `frames`: one
    /// for each datagram below the highest class, and for each frame without a class that was accepted while
    /// `frames` frames waited. Set to 0 when a frame without a class, or of a connection of best effort or
    /// below, finds fewer frames waiting.
    credit: usize,
    /// `credit` after the frame whose room was reserved last. Room that is not committed costs no credit.
    credit_after_commit: usize,
}

impl TxQueue for LimitedTx {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.credit_after_commit = self.credit;
        let Some(bound) = self.bound else { return self.inner.reserve(len) };
        let has_backlog = self.inner.has_backlog(bound);
        let is_refused = match self.class {
            None => false,
            Some(TxClass::Connections(_)) => self.credit == 0,
            Some(TxClass::Datagrams(_)) => true,
        };
        if has_backlog && is_refused {
            return None;
        }
        let room = self.inner.reserve(len)?;
        let one_more = self.frames.min(self.credit + 1);
        self.credit_after_commit = match (self.class, has_backlog) {
            (Some(TxClass::Datagrams(_)), _) | (None, true) => one_more,
            (Some(TxClass::Connections(_)), true) => self.credit - 1,
            (_, false) if bound == self.frames => 0,
            (_, false) => self.credit,
        };
        Some(room)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.credit = self.credit_after_commit;
        self.inner.commit(len, meta);
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.inner.has_backlog(frames)
    }

    fn select_class(&mut self, class: Option<TxClass>) {
        self.bound = match class {
            Some(TxClass::Connections(Label::PRIORITY_MAX..) | TxClass::Datagrams(Label::PRIORITY_MAX..)) => {
                None
            }
            Some(TxClass::Connections(class) | TxClass::Datagrams(class)) => {
                Some(self.frames * usize::from(class.max(1)))
            }
            None => Some(self.frames),
        };
        self.class = class;
        self.inner.select_class(class);
    }

    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        if self.inner.gather().is_some() { Some(self) } else { None }
    }

    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }
}

impl GatherTx for LimitedTx {
    fn commit_gathered(
        &mut self,
        head: usize,
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
        meta: TxMeta,
    ) {
        self.credit = self.credit_after_commit;
        if let Some(gather) = self.inner.gather() {
            gather.commit_gathered(head, pieces, meta);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::conformance::{self, Guarantees};
    use crate::faults::{self, LinkSpec};
    use crate::memory::{MemoryConfig, pair};
    use ginnel_stack::device::{Device, Gso, GsoKind, RxBurst};
    use ginnel_stack::priority::BEST_EFFORT;

    /// Frames wait in the link until it is flushed, at least, so the limit is reached again and again.
    #[test]
    fn limited_device_conforms() {
        let guarantees = Guarantees { back_pressure: false, uncut_super_frame_bytes: 0, labels: false };
        let link = LinkSpec::parse("delay=100us rate=5gbit limit=100000000").expect("valid");
        conformance::run("backlog limit", guarantees, &mut || {
            let (left, right) = pair(MemoryConfig::default());
            let left = faults::wrap(left, &link, 1);
            (Device { rx: left.rx, tx: wrap_tx(left.tx, 8) }, right)
        });
    }

    fn send(tx: &mut Box<dyn TxQueue + Send>, class: Option<u8>, most: usize) -> usize {
        send_with(tx, class.map(TxClass::Connections), most, TxMeta::NONE, 1000)
    }

    fn send_datagrams(tx: &mut Box<dyn TxQueue + Send>, class: u8, most: usize) -> usize {
        send_with(tx, Some(TxClass::Datagrams(class)), most, TxMeta::NONE, 1000)
    }

    /// Sends frames of a class until one is refused, `most` at most. Returns their number.
    fn send_with(
        tx: &mut Box<dyn TxQueue + Send>,
        class: Option<TxClass>,
        most: usize,
        meta: TxMeta,
        len: usize,
    ) -> usize {
        tx.select_class(class);
        let sent = (0..most).take_while(|_| {
            let Some(room) = tx.reserve(len) else { return false };
            room.fill(0);
            tx.commit(len, meta);
            true
        });
        let sent = sent.count();
        tx.select_class(None);
        sent
    }

    /// Returns a link on which a frame of 1000 bytes takes a millisecond, and its other end. If that is
    /// dropped, only the link has a backlog.
    fn slow_link(delay: &str) -> (Box<dyn TxQueue + Send>, Device) {
        let (left, right) = pair(MemoryConfig::default());
        let slow = LinkSpec::parse(&format!("rate=8mbit {delay}")).expect("valid");
        (faults::wrap(left, &slow, 1).tx, right)
    }

    /// Returns a slow link with a limit.
    fn limited_link(delay: &str, frames: usize) -> (Box<dyn TxQueue + Send>, Device) {
        let (tx, right) = slow_link(delay);
        (wrap_tx(tx, frames), right)
    }

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    // limit: priority.transmit_backlog_frames
    #[test]
    fn classes_are_refused_by_what_waits() {
        let (mut tx, _) = limited_link("", 10);
        assert!(tx.has_backlog(0), "the link can tell what waits");
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 10);
        tx.flush(at(0));
        assert_eq!(send(&mut tx, Some(0), 100), 0);
        assert_eq!([2, 2, 6].map(|class| send(&mut tx, Some(class), 100)), [10, 0, 40]);
        assert_eq!(send(&mut tx, Some(7), 40), 40);
        tx.flush(at(0));
        // 100 frames wait; when 95 of them have been sent, five more may wait.
        tx.flush(at(90));
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 0);
        tx.flush(at(95));
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 5);
        assert_eq!(send(&mut tx, None, 20), 20);
    }

    /// Frames without a class keep the backlog above all bounds here.
    #[test]
    fn frames_without_a_class_do_not_shut_out_the_others() {
        let (mut tx, _) = limited_link("", 10);
        assert_eq!(send(&mut tx, None, 100), 100);
        tx.flush(at(0));
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 10, "the credit is limited");
        for now in 1..=50 {
            tx.flush(at(now));
            assert_eq!(send(&mut tx, None, 2), 2);
            // Urgent frames come first.
            let sent = [6, BEST_EFFORT].map(|class| send(&mut tx, Some(class), 1));
            assert_eq!(sent, [1, 1], "{now}");
            assert_eq!(send(&mut tx, Some(6), 10), 0, "{now}");
        }
        // 260 frames wait. No credit remains from frames that found no backlog, or from earlier ones.
        assert_eq!(send(&mut tx, None, 5), 5);
        tx.flush(at(306));
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 1);
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 0);
    }

    /// A socket writes datagrams without a break, in front of each round of the connections.
    #[test]
    fn datagrams_wait_and_do_not_shut_out_connections() {
        let (mut tx, _) = limited_link("", 10);
        assert_eq!(send_datagrams(&mut tx, BEST_EFFORT, 100), 10);
        assert_eq!([2, 6].map(|class| send_datagrams(&mut tx, class, 100)), [10, 40]);
        assert_eq!(send_datagrams(&mut tx, 7, 40), 40);
        let (mut tx, _) = limited_link("", 10);
        let mut sent = [0, 0];
        for now in 0..100 {
            tx.flush(at(now));
            sent[0] += send_datagrams(&mut tx, BEST_EFFORT, 100);
            sent[1] += send(&mut tx, Some(BEST_EFFORT), 100);
            let waiting = sent[0] + sent[1] - now as usize;
            assert!(waiting <= 20, "{now}: {waiting} frames wait");
        }
        assert!(sent[1] >= 40 && sent[0] >= 40, "{sent:?}");
        // Connections that find room have no credit left.
        assert_eq!(send_datagrams(&mut tx, BEST_EFFORT, 100), 0);
        tx.flush(at(109));
        assert_eq!(send_datagrams(&mut tx, BEST_EFFORT, 4), 4);
        tx.flush(at(111));
        assert!(send(&mut tx, Some(BEST_EFFORT), 100) <= 10);
    }

    /// Credit of these datagrams would let frames of lower classes leave before their sender's next ones.
    #[test]
    fn datagrams_of_the_highest_class_earn_no_credit() {
        let (mut tx, _) = limited_link("", 10);
        assert_eq!(send_datagrams(&mut tx, 7, 40), 40);
        assert_eq!([6, BEST_EFFORT].map(|class| send(&mut tx, Some(class), 100)), [20, 0]);
        assert_eq!(send(&mut tx, Some(7), 40), 40);
    }

    #[test]
    fn reserved_room_without_commit_changes_no_credit() {
        let drop_room = |tx: &mut Box<dyn TxQueue + Send>, class: TxClass| {
            tx.select_class(Some(class));
            for _ in 0..5 {
                assert!(tx.reserve(1000).is_some(), "{class:?}");
            }
            tx.select_class(None);
        };
        let (mut tx, _) = limited_link("", 10);
        drop_room(&mut tx, TxClass::Datagrams(BEST_EFFORT));
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 10, "no credit from room that was dropped");
        assert_eq!(send(&mut tx, None, 3), 3);
        drop_room(&mut tx, TxClass::Connections(BEST_EFFORT));
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 3, "all credit is left");
    }

    /// A device with a fixed backlog that takes payloads in pieces.
    struct Gathering {
        room: Vec<u8>,
        backlog: usize,
    }

    impl TxQueue for Gathering {
        fn capabilities(&self) -> Capabilities {
            let (mac, mtu) = ([0; 6], 1500);
            Capabilities { mac, mtu, tx_checksum: false, gso_bytes_max: 0, uso: false, labels: false }
        }
        fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
            self.room.get_mut(..len)
        }
        fn commit(&mut self, _: usize, _: TxMeta) {}
        fn has_backlog(&mut self, frames: usize) -> bool {
            self.backlog >= frames
        }
        fn gather(&mut self) -> Option<&mut dyn GatherTx> {
            Some(self)
        }
        fn flush(&mut self, _: Instant) {}
    }

    impl GatherTx for Gathering {
        fn commit_gathered(
            &mut self,
            _: usize,
            pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
            _: TxMeta,
        ) {
            assert_eq!(pieces.count(), 1);
        }
    }

    #[test]
    fn gathered_frames_use_up_credit() {
        let mut tx = wrap_tx(Box::new(Gathering { room: vec![0; 1000], backlog: 10 }), 10);
        assert_eq!(send(&mut tx, None, 2), 2);
        tx.select_class(Some(TxClass::Connections(BEST_EFFORT)));
        for is_accepted in [true, true, false] {
            assert_eq!(tx.reserve(100).is_some(), is_accepted);
            if is_accepted {
                let mut pieces = [PayloadPiece::Private(&[0; 46])].into_iter();
                tx.gather().expect("the device gathers").commit_gathered(54, &mut pieces, TxMeta::NONE);
            }
        }
    }

    /// Refused frames are tried again, but the device is flushed only when it has taken frames, or asks for
    /// it.
    #[test]
    fn delayed_link_ends_a_backlog_when_frames_have_left() {
        let (mut tx, mut right) = limited_link("delay=500ms", 10);
        let mut sent = 0;
        for now in 0..1000 {
            let taken = send(&mut tx, Some(BEST_EFFORT), 100);
            sent += taken;
            if taken > 0 || tx.next_deadline().is_some_and(|deadline| deadline <= at(now)) {
                tx.flush(at(now));
            }
            right.rx.rx_burst(at(now), &mut RxBurst::new());
        }
        assert!((950..=1010).contains(&sent), "{sent} of 1000 frames");
        // A caller that does not ask for the backlog is not woken for it.
        let (mut unlimited, _) = slow_link("delay=500ms");
        assert_eq!(send(&mut unlimited, None, 20), 20);
        unlimited.flush(at(0));
        assert_eq!(unlimited.next_deadline(), Some(at(501)));
    }

    #[test]
    fn super_frame_counts_as_its_segments() {
        let gso = Gso { kind: GsoKind::Tcp4, size: 1446, header_len: 54, ecn: false };
        let meta = TxMeta { gso: Some(gso), ..TxMeta::NONE };
        let connections = |class| Some(TxClass::Connections(class));
        let (mut tx, _) = limited_link("", 64);
        assert_eq!(send_with(&mut tx, connections(BEST_EFFORT), 100, meta, 54 + 40 * 1446), 2);
        assert_eq!(send_with(&mut tx, connections(2), 100, meta, 54 + 40 * 1446), 2);
        assert_eq!(send_with(&mut tx, connections(3), 100, meta, 54 + 16 * 1446), 2);
        assert_eq!(send(&mut tx, Some(3), 100), 0);
    }
}
