//! The ring of a mirror: frames arrive, or are counted as lost, whatever a reader writes into the ring.

use super::*;
use proptest::prelude::*;

/// Time that the clock of these tests adds to that of the turn.
const LATER: core::time::Duration = core::time::Duration::from_nanos(7);

fn pair(bytes: usize, snaplen: usize) -> (MirrorWriter, MirrorReader) {
    let (writer, file) = create(bytes, snaplen, |now| now + LATER).expect("memory");
    (writer, MirrorReader::open(&file).expect("a ring"))
}

/// Reads all published frames.
fn read_all(reader: &mut MirrorReader) -> Vec<(MirroredFrame, Vec<u8>)> {
    let end = reader.written().unwrap();
    let mut all = Vec::new();
    loop {
        let mut bytes = Vec::new();
        let Some(frame) = reader.read(end, &mut bytes).unwrap() else { break };
        all.push((frame, bytes));
    }
    reader.release();
    all
}

#[test]
fn frames_arrive_with_time_and_metadata() {
    let (mut writer, mut reader) = pair(0, 100);
    let gso = Gso { kind: GsoKind::Tcp6, size: 1400, header_len: 74, ecn: true };
    let super_frame = TxMeta { partial_checksum: Some((54, 16)), gso: Some(gso), ..TxMeta::NONE };
    writer.put(&[1; 60], TxMeta::NONE);
    writer.put(&[2; 3000], super_frame);
    assert_eq!(read_all(&mut reader), [], "the burst has not ended");
    writer.end_burst(Instant::from_millis(5));
    writer.put(&[3; 100], TxMeta::NONE);
    writer.end_burst(Instant::from_millis(6));
    let frame = |at, frame_len, copied_len, meta| MirroredFrame {
        at: Instant::from_millis(at) + LATER,
        frame_len,
        copied_len,
        meta,
    };
    let expected = [
        (frame(5, 60, 60, TxMeta::NONE), vec![1; 60]),
        (frame(5, 3000, 100, super_frame), vec![2; 100]),
        (frame(6, 100, 100, TxMeta::NONE), vec![3; 100]),
    ];
    assert_eq!(read_all(&mut reader), expected);
}

// limit: bytes in the ring of a mirror
#[test]
fn full_ring_loses_frames_and_counts_them() {
    let (mut writer, mut reader) = pair(RING_BYTES_MIN, 2000);
    for number in 0..100u8 {
        writer.put(&[number; 1000], TxMeta::NONE);
        writer.end_burst(Instant::ZERO);
    }
    let seen = read_all(&mut reader);
    assert_eq!(seen.len() as u64 + reader.lost(), 100);
    assert!(seen.len() > 50 && reader.lost() > 0, "{}", seen.len());
    assert!(seen.iter().zip(0..).all(|((_, bytes), number)| *bytes == [number; 1000]));
    // Service resumes.
    writer.put(&[200; 1000], TxMeta::NONE);
    writer.end_burst(Instant::ZERO);
    assert_eq!(read_all(&mut reader)[0].1, [200; 1000]);
    writer.put(&vec![0; 2 * RING_BYTES_MIN], TxMeta::NONE);
    writer.end_burst(Instant::ZERO);
    assert_eq!(read_all(&mut reader).len(), 1, "only the beginning is copied");
}

/// Returns a frame whose record has `len` bytes.
fn frame_of_record(len: usize) -> Vec<u8> {
    vec![5; len - HEADER_BYTES]
}

#[test]
fn one_burst_fills_the_ring_exactly() {
    let (mut writer, mut reader) = pair(RING_BYTES_MIN, usize::MAX);
    // Each burst is a lap.
    for step in 0..5 {
        let frames = RING_BYTES_MIN / 4096;
        for number in 0..frames {
            // The record of the burst is in the ring, too.
            let len = if number == 0 { 4096 - HEADER_BYTES } else { 4096 };
            writer.put(&frame_of_record(len), TxMeta::NONE);
        }
        writer.put(&[6; 20], TxMeta::NONE);
        writer.end_burst(Instant::from_millis(step));
        assert_eq!(reader.lost(), step + 1, "the last frame finds no room");
        let seen = read_all(&mut reader);
        assert_eq!(seen.len(), frames);
        assert!(seen.iter().all(|(frame, _)| frame.at == Instant::from_millis(step) + LATER));
    }
}

#[test]
fn burst_continues_in_the_next_lap() {
    let (mut writer, mut reader) = pair(RING_BYTES_MIN, usize::MAX);
    // Leaves room at the end of the lap for `left` bytes, in which the record of a burst fits or not.
    for left in [0, 16, 32, 48, 1008, 1024, 1040] {
        let used = writer.next() as usize % RING_BYTES_MIN;
        let used = if used == 0 { HEADER_BYTES } else { used };
        writer.put(&frame_of_record(RING_BYTES_MIN - used - left), TxMeta::NONE);
        writer.end_burst(Instant::ZERO);
        assert_eq!(read_all(&mut reader).len(), 1, "{left}");
        writer.end_burst(Instant::from_millis(1));
        assert_eq!(read_all(&mut reader), [], "{left}: the burst has no frames");
        for number in 0..3 {
            writer.put(&[number; 1000], TxMeta::NONE);
        }
        writer.end_burst(Instant::from_millis(2));
        let seen = read_all(&mut reader);
        assert_eq!(seen.len(), 3, "{left}");
        for ((frame, bytes), number) in seen.iter().zip(0..) {
            assert_eq!(
                (frame.at, &bytes[..]),
                (Instant::from_millis(2) + LATER, &[number; 1000][..]),
                "{left}"
            );
        }
        // The next lap is used up to its end again.
        let used = writer.next() as usize % RING_BYTES_MIN;
        assert!(used <= 3 * 1024 + 2 * HEADER_BYTES, "{left}: {used}");
    }
    assert_eq!(reader.lost(), 0);
}

#[test]
fn received_frames_arrive_as_sent_ones() {
    let gso = Gso { kind: GsoKind::Tcp4, size: 500, header_len: 54, ecn: false };
    let frames = [20, 32, 64, 100, 300, 512, 513, 1500, 3000].map(|len| vec![len as u8; len]);
    for snaplen in [10, 32, 96, 400, 1 << 16] {
        let (mut writer, mut reader) = pair(0, snaplen);
        let mut burst = Vec::new();
        for bytes in &frames {
            let checksum = RxChecksum::Partial { start: 34, offset: 16 };
            burst.push(RxFrame::new(bytes));
            burst.push(RxFrame { checksum: RxChecksum::Verified, ..RxFrame::new(bytes) });
            burst.push(RxFrame { checksum, ..RxFrame::new(bytes) });
            burst.push(RxFrame { checksum, gso: Some(gso), ..RxFrame::new(bytes) });
        }
        writer.put_received(&burst);
        writer.end_burst(Instant::ZERO);
        let received = read_all(&mut reader);
        burst.iter().for_each(|frame| writer.put(frame.bytes, meta_of(frame)));
        writer.end_burst(Instant::ZERO);
        assert_eq!(received, read_all(&mut reader), "{snaplen}");
        assert_eq!(received.len(), burst.len());
        for ((seen, copy), frame) in received.iter().zip(&burst) {
            assert_eq!((seen.frame_len, seen.meta), (frame.bytes.len(), meta_of(frame)), "{snaplen}");
            assert_eq!(copy, &frame.bytes[..frame.bytes.len().min(snaplen)], "{snaplen}");
        }
    }
}

/// Sends a burst with a frame of 1000 bytes. Returns whether it was written.
fn put_burst(writer: &mut MirrorWriter) -> bool {
    let lost = writer.lost;
    writer.put(&[1; 1000], TxMeta::NONE);
    writer.end_burst(Instant::ZERO);
    writer.lost == lost
}

/// Returns the position of the writer that it has published.
fn tail(writer: &MirrorWriter) -> u64 {
    writer.records.control::<TAIL_AT>().load(Relaxed)
}

/// Lets the writer look at the reader at the next frame, as if there were no room left.
fn close_window(writer: &mut MirrorWriter) {
    let at = RECORDS_AT + (writer.burst - writer.lap) as usize;
    writer.records.set_window(at, at);
}

/// Lets the reader continue after everything that was written.
fn begin_anew(reader: &mut MirrorReader) {
    reader.head = reader.region.u64(TAIL_AT).load(Acquire);
    reader.time = None;
    reader.release();
}

/// Returns a position that a reader claims to have.
type ClaimedHead = fn(&MirrorWriter) -> u64;

#[test]
fn a_reader_that_writes_nonsense_harms_only_itself() {
    let (mut writer, mut reader) = pair(RING_BYTES_MIN, 2000);
    assert!((0..10).all(|_| put_burst(&mut writer)));
    assert_eq!(read_all(&mut reader).len(), 10);
    assert_eq!(writer.head, 0, "the reader is looked at only if there is no room");
    close_window(&mut writer);
    assert!(put_burst(&mut writer));
    // A position that a reader could have is accepted, even if no record begins there.
    let claims: [(ClaimedHead, bool); 9] = [
        (|writer| tail(writer) - 8, true),
        (|writer| tail(writer) - 1, true),
        (|writer| tail(writer) - 1000, true),
        (|writer| writer.head - 1, false),
        (|_| 0, false),
        (|writer| tail(writer) + 16, false),
        (|writer| tail(writer) + RING_BYTES_MIN as u64, false),
        (|_| 1 << 40, false),
        (|_| u64::MAX, false),
    ];
    for (number, (claimed_head, is_written)) in claims.into_iter().enumerate() {
        let head = claimed_head(&writer);
        reader.region.u64(HEAD_AT).store(head, Release);
        close_window(&mut writer);
        assert_eq!(put_burst(&mut writer), is_written, "{number}: {head}");
    }
    begin_anew(&mut reader);
    close_window(&mut writer);
    assert!(put_burst(&mut writer));
    assert_eq!(read_all(&mut reader)[0].1, [1; 1000]);
}

#[test]
fn a_corrupt_ring_is_an_error() {
    let (mut writer, mut reader) = pair(RING_BYTES_MIN, 2000);
    writer.put(&[0; 100], TxMeta::NONE);
    writer.end_burst(Instant::ZERO);
    let frame_at = RECORDS_AT + HEADER_BYTES;
    let lies = [
        (TAIL_AT, 1 << 40),
        (RECORDS_AT, u64::MAX),
        (RECORDS_AT, 99),
        // More bytes are missing than the frame has; the record is longer than what was written.
        (frame_at, 100 | 101 << MISSING_AT),
        (frame_at, LEN_MASK << MISSING_AT),
        (frame_at, 1000),
        (frame_at, LEN_MASK),
    ];
    for (at, value) in lies {
        let before = reader.region.u64(at).load(Relaxed);
        reader.region.u64(at).store(value, Relaxed);
        let result = reader.written().and_then(|end| reader.read(end, &mut Vec::new()));
        assert!(result.is_err(), "{at}");
        reader.region.u64(at).store(before, Relaxed);
    }
    assert_eq!(read_all(&mut reader).len(), 1);
    assert!(
        MirrorReader::open(&rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap())
            .is_err()
    );
}

proptest! {
    #[test]
    fn nonsense_of_a_reader_stays_in_the_ring(
        steps in proptest::collection::vec((0usize..3000, 0u8..8, any::<bool>(), any::<u64>()), 1..300)
    ) {
        let (mut writer, mut reader) = pair(RING_BYTES_MIN, 1500);
        let mut written = 0;
        for (len, kind, ends_burst, number) in steps {
            let published = reader.region.u64(TAIL_AT).load(Acquire);
            let near = number % 4096;
            // Most of these are accepted, so that the writer goes through the ring several times.
            let head = match kind {
                0 => number,
                1 => tail(&writer) + near,
                2 => writer.head.saturating_sub(near),
                3 => writer.head + near,
                4 => tail(&writer).saturating_sub(near),
                5 => published + near,
                _ => published,
            };
            reader.region.u64(HEAD_AT).store(head, Release);
            let lost = writer.lost;
            writer.put(&vec![7; len], TxMeta::NONE);
            prop_assert!(writer.lost - lost <= 1);
            written += 1 - (writer.lost - lost);
            let at = writer.records.next() - RECORDS_AT;
            prop_assert!(at <= writer.bytes && at.is_multiple_of(HEADER_BYTES));
            prop_assert!(writer.head <= writer.burst && writer.burst <= writer.next());
            if ends_burst {
                writer.end_burst(Instant::ZERO);
            }
        }
        let lost = writer.lost;
        writer.end_burst(Instant::ZERO);
        begin_anew(&mut reader);
        writer.put(&[9; 100], TxMeta::NONE);
        writer.end_burst(Instant::ZERO);
        prop_assert_eq!(writer.lost, lost, "{} frames were written", written);
        let seen = read_all(&mut reader);
        prop_assert_eq!((seen.len(), &seen[0].1[..]), (1, &[9; 100][..]));
    }

    #[test]
    fn frames_keep_their_order(steps in proptest::collection::vec((0usize..3000, 0u8..4), 1..300)) {
        let (mut writer, mut reader) = pair(RING_BYTES_MIN, 1500);
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for (number, (len, action)) in steps.into_iter().enumerate() {
            let frame = vec![number as u8; len];
            let lost = writer.lost;
            writer.put(&frame, TxMeta::NONE);
            if writer.lost == lost {
                sent.push((len, frame[..len.min(1500)].to_vec()));
            }
            if action > 0 {
                writer.end_burst(Instant::ZERO);
            }
            if action == 3 {
                received.extend(read_all(&mut reader).into_iter().map(|(frame, bytes)| (frame.frame_len, bytes)));
            }
        }
        writer.end_burst(Instant::ZERO);
        received.extend(read_all(&mut reader).into_iter().map(|(frame, bytes)| (frame.frame_len, bytes)));
        prop_assert_eq!(received, sent);
    }
}
