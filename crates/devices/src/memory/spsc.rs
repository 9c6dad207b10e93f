//! A single-producer, single-consumer (SPSC) ring between two threads of a process, for frames that one
//! thread received and the other thread processes.
//!
//! The ring is that of a memory device without the device: a frame is copied once, into the ring, and lent
//! from there to the receiving thread. The memory is bounded, belongs to the ring, and may be read by the
//! receiver from `publish` to `release`. The callers wake a receiver that sleeps.

use super::ring::{self, RecordConsumer, RecordProducer};
use arrayvec::ArrayVec;
use ginnel_stack::device::{BURST_FRAMES_MAX, RxBurst, RxChecksum, RxFrame, TxMeta};

/// Bytes after each frame: the sender's tag, and a flag word that says whether the checksum was verified (the
/// ring itself stores only partial checksums).
const TRAILER_BYTES: usize = 8;
const VERIFIED: u32 = 1;

/// A received frame with the tag that its sender attached.
#[derive(Clone, Copy, Debug)]
pub struct TaggedFrame<'a> {
    /// The frame as it was received by the device.
    pub frame: RxFrame<'a>,
    /// Tag of the sender.
    pub tag: u32,
}

/// The frames of one burst.
pub type TaggedBurst<'a> = ArrayVec<TaggedFrame<'a>, BURST_FRAMES_MAX>;

/// The sending end.
pub struct SpscTx {
    ring: RecordProducer,
    has_unpublished: bool,
}

/// The receiving end.
pub struct SpscRx {
    ring: RecordConsumer,
}

/// Creates a ring of `bytes` bytes, rounded up to a power of two. A frame may take at most half of it.
#[must_use]
pub fn spsc_ring(bytes: usize) -> (SpscTx, SpscRx) {
    let (producer, consumer) = ring::ring(bytes, ring::LAP_BYTES_MIN);
    (SpscTx { ring: producer, has_unpublished: false }, SpscRx { ring: consumer })
}

impl SpscTx {
    /// Returns whether a frame of `len` bytes fits now. The receiver can only make more room.
    pub fn has_room(&mut self, len: usize) -> bool {
        self.ring.reserve(len + TRAILER_BYTES).is_some()
    }

    /// Returns whether a frame of `len` bytes leaves a part of the ring free: `limit` gets the bytes that the
    /// ring can hold, and returns those that may be in use together with the frame. An empty ring takes every
    /// frame.
    pub fn has_room_within(&mut self, len: usize, limit: impl Fn(usize) -> usize) -> bool {
        self.ring.has_room_within(len + TRAILER_BYTES, limit)
    }

    /// Copies a frame into the ring. Returns false, and copies nothing, if there is no room.
    pub fn push(&mut self, tag: u32, frame: &RxFrame<'_>) -> bool {
        let RxFrame { bytes, checksum, gso, label } = *frame;
        let len = bytes.len() + TRAILER_BYTES;
        let Some((room, trailer)) =
            self.ring.reserve(len).and_then(|room| room.split_last_chunk_mut::<TRAILER_BYTES>())
        else {
            return false;
        };
        room.copy_from_slice(bytes);
        let (partial_checksum, flags) = match checksum {
            RxChecksum::Partial { start, offset } => (Some((start, offset)), 0),
            RxChecksum::Verified => (None, VERIFIED),
            RxChecksum::Unverified => (None, 0),
        };
        *trailer = (u64::from(flags) << 32 | u64::from(tag)).to_ne_bytes();
        self.ring.commit(len, TxMeta { partial_checksum, gso, label });
        self.has_unpublished = true;
        true
    }

    /// Makes pushed frames visible to the receiver. Returns whether there were new ones.
    pub fn publish(&mut self) -> bool {
        if !core::mem::take(&mut self.has_unpublished) {
            return false;
        }
        // The receiver never arms the ring, so no wake-up is needed here.
        let _ = self.ring.publish();
        true
    }
}

impl SpscRx {
    /// Lends the next frames, up to 64.
    pub fn burst(&mut self) -> TaggedBurst<'_> {
        self.ring.release();
        // A queue has two rings, of which one is usually empty. Moving an empty burst would cost as much as
        // moving a full one.
        if !self.ring.is_waiting() {
            return TaggedBurst::new();
        }
        let mut burst = RxBurst::new();
        self.ring.burst(&mut burst);
        // Every frame has a trailer from its sender.
        burst.into_iter().filter_map(Self::without_trailer).collect()
    }

    fn without_trailer(frame: RxFrame<'_>) -> Option<TaggedFrame<'_>> {
        let (bytes, trailer) = frame.bytes.split_last_chunk::<TRAILER_BYTES>()?;
        let trailer = u64::from_ne_bytes(*trailer);
        let checksum = match frame.checksum {
            RxChecksum::Unverified if (trailer >> 32) as u32 & VERIFIED != 0 => RxChecksum::Verified,
            checksum => checksum,
        };
        // The tag is the lower half of the trailer.
        Some(TaggedFrame { frame: RxFrame { bytes, checksum, ..frame }, tag: trailer as u32 })
    }

    /// Returns the memory of the frames lent last to the sender.
    pub fn release(&mut self) {
        self.ring.release();
    }

    /// Returns whether frames are waiting.
    pub fn is_waiting(&mut self) -> bool {
        self.ring.is_waiting()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_stack::device::{Gso, GsoKind, Label};

    const GSO: Gso = Gso { kind: GsoKind::Tcp4, size: 1400, header_len: 54, ecn: true };

    #[test]
    fn frame_arrives_with_its_metadata() {
        let (mut tx, mut rx) = spsc_ring(4096);
        let partial = RxChecksum::Partial { start: 34, offset: 16 };
        let label = Label::new(Some(77), 5);
        let sent = [
            (1, RxChecksum::Unverified, None, Label::NONE),
            (u32::MAX, RxChecksum::Verified, None, label),
            (3, partial, Some(GSO), Label::NONE),
            (4, RxChecksum::Verified, Some(GSO), label),
        ];
        for (tag, checksum, gso, label) in sent {
            assert!(tx.push(tag, &RxFrame { bytes: &[tag as u8; 60], checksum, gso, label }));
        }
        assert!(!rx.is_waiting(), "unpublished frames are invisible");
        assert!(tx.publish() && !tx.publish());
        assert!(rx.is_waiting());
        let burst = rx.burst();
        let got: Vec<_> =
            burst.iter().map(|c| (c.tag, c.frame.checksum, c.frame.gso, c.frame.label)).collect();
        assert_eq!(got, sent);
        assert!(burst.iter().all(|c| c.frame.bytes == [c.tag as u8; 60]));
    }

    #[test]
    fn full_queue_accepts_again_after_release() {
        let (mut tx, mut rx) = spsc_ring(4096);
        let mut sent = 0;
        while tx.push(sent, &RxFrame::new(&[0; 500])) {
            sent += 1;
        }
        assert!(sent >= 3, "{sent}");
        assert!(!tx.has_room(500));
        tx.publish();
        assert_eq!(rx.burst().len(), sent as usize);
        assert!(!tx.has_room(500), "the frames are still borrowed");
        rx.release();
        assert!(tx.has_room(500));
    }

    /// Sends 500 bytes as long as `may_send` allows. Returns the number of frames.
    fn fill(tx: &mut SpscTx, may_send: impl Fn(&mut SpscTx) -> bool) -> usize {
        (0..).take_while(|tag| may_send(tx) && tx.push(*tag, &RxFrame::new(&[0; 500]))).count()
    }

    /// Takes all frames.
    fn drain(tx: &mut SpscTx, rx: &mut SpscRx) -> usize {
        tx.publish();
        let mut taken = 0;
        while rx.is_waiting() {
            taken += rx.burst().len();
            rx.release();
        }
        taken
    }

    /// Whatever the position in the ring, frames that may fill half of it leave the other half to others, and
    /// they are not refused while the receiver keeps up.
    #[test]
    fn limited_frames_leave_room_in_the_ring() {
        for bytes in [64 << 10, 512 << 10] {
            let (mut tx, mut rx) = spsc_ring(bytes);
            let half = |tx: &mut SpscTx| tx.has_room_within(500, |room| room / 2);
            for round in 0..300 {
                for burst in 0..(round * 7) % 40 {
                    for _ in 0..burst {
                        assert!(half(&mut tx) && tx.push(0, &RxFrame::new(&[0; 500])), "{round}");
                    }
                    assert_eq!(drain(&mut tx, &mut rx), burst);
                }
                let limited = fill(&mut tx, half);
                let others = fill(&mut tx, |_| true);
                assert!(limited >= 40 && others + 2 >= limited, "{round}: {limited} {others}");
                assert_eq!(drain(&mut tx, &mut rx), limited + others);
            }
        }
    }

    /// A frame that exceeds its part of the ring is taken if nothing is in use, so that no sender waits for
    /// ever.
    #[test]
    fn empty_ring_takes_a_limited_frame() {
        let (mut tx, mut rx) = spsc_ring(4096);
        for round in 0..100 {
            assert!(tx.has_room_within(1500, |_| 100), "{round}");
            assert!(tx.push(0, &RxFrame::new(&[0; 1500])), "{round}");
            assert!(!tx.has_room_within(60, |_| 100), "{round}");
            assert_eq!(drain(&mut tx, &mut rx), 1);
        }
    }

    #[test]
    fn frames_to_a_dropped_receiver_are_discarded() {
        let (mut tx, rx) = spsc_ring(4096);
        drop(rx);
        for tag in 0..1000 {
            assert!(tx.push(tag, &RxFrame::new(&[0; 500])), "{tag}");
            tx.publish();
        }
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p ginnel-devices --lib memory::`.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::thread;

    /// In every interleaving, the receiver sees each frame whole, with its tag and its checksum state, and
    /// the sender does not overwrite a frame that is lent.
    #[test]
    fn frames_cross_threads_in_order() {
        loom::model(|| {
            let (mut tx, mut rx) = spsc_ring(256);
            let sender = thread::spawn(move || {
                let mut sent = Vec::new();
                for tag in 1..=3 {
                    if tx.push(
                        tag,
                        &RxFrame { checksum: RxChecksum::Verified, ..RxFrame::new(&[tag as u8; 40]) },
                    ) {
                        sent.push(tag);
                    }
                    tx.publish();
                }
                sent
            });
            let mut received = Vec::new();
            for _ in 0..2 {
                for frame in rx.burst() {
                    assert_eq!(frame.frame.bytes, [frame.tag as u8; 40]);
                    assert_eq!(frame.frame.checksum, RxChecksum::Verified);
                    received.push(frame.tag);
                }
                rx.release();
            }
            let sent = sender.join().expect("no panic");
            received.extend(rx.burst().iter().map(|frame| frame.tag));
            assert_eq!(received, sent);
        });
    }
}
