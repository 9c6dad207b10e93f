use super::*;
use crate::conformance::{self, Guarantees};
use crate::memory::{MemoryConfig, pair};
use ring::MirrorReader;

/// Wraps a device, and returns the readers of both directions.
fn mirrored(device: Device, ring_bytes: usize) -> (Device, [MirrorReader; 2]) {
    let [received, sent] = [0; 2].map(|_| ring::create(ring_bytes, 2000, |now| now).expect("memory"));
    let readers = [&received.1, &sent.1].map(|file| MirrorReader::open(file).expect("a ring"));
    (wrap(device, received.0, sent.0), readers)
}

fn send(device: &mut Device, frame: &[u8]) {
    device.tx.reserve(frame.len()).expect("room").copy_from_slice(frame);
    device.tx.commit(frame.len(), TxMeta::default());
    device.tx.flush(Instant::ZERO);
}

fn receive(device: &mut Device) -> Vec<Vec<u8>> {
    let mut burst = RxBurst::new();
    device.rx.rx_burst(Instant::ZERO, &mut burst);
    burst.iter().map(|frame| frame.bytes.to_vec()).collect()
}

fn copies(reader: &mut MirrorReader) -> Vec<Vec<u8>> {
    let end = reader.written().unwrap();
    let mut frames = Vec::new();
    loop {
        let mut bytes = Vec::new();
        if reader.read(end, &mut bytes).unwrap().is_none() {
            return frames;
        }
        frames.push(bytes);
    }
}

#[test]
fn mirrored_device_conforms() {
    let guarantees = Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };
    let mut readers = Vec::new();
    conformance::run("mirror", guarantees, &mut || {
        let (left, right) = pair(MemoryConfig::default());
        // Rings that are never read must not affect the traffic.
        let (left, rings) = mirrored(left, 0);
        readers.extend(rings);
        (left, right)
    });
}

#[test]
fn mirrored_device_has_hashes_of_its_origin() {
    conformance::check_hash_origin(|device| mirrored(device, 0).0);
}

#[test]
fn both_directions_are_mirrored() {
    let (left, mut right) = pair(MemoryConfig::default());
    let (mut left, [mut received, mut sent]) = mirrored(left, 0);
    send(&mut left, &[1; 60]);
    send(&mut right, &[2; 70]);
    assert_eq!(receive(&mut left), [vec![2; 70]]);
    assert_eq!(receive(&mut right), [vec![1; 60]]);
    assert_eq!((copies(&mut received), copies(&mut sent)), (vec![vec![2; 70]], vec![vec![1; 60]]));
}

#[test]
fn layers_can_be_removed() {
    let (left, mut right) = pair(MemoryConfig::default());
    let (left, [mut received, mut sent]) = mirrored(left, 0);
    let mut left =
        Device { rx: left.rx.remove_layer().expect("a layer"), tx: left.tx.remove_layer().expect("a layer") };
    send(&mut left, &[1; 60]);
    send(&mut right, &[2; 70]);
    assert_eq!(receive(&mut left), [vec![2; 70]]);
    assert_eq!(receive(&mut right), [vec![1; 60]]);
    assert!(copies(&mut received).is_empty() && copies(&mut sent).is_empty());
    assert!(left.rx.remove_layer().is_none() && left.tx.remove_layer().is_none());
}

/// Puts layers around a device that do not use wide vectors.
fn mirrored_without_vectors(device: Device) -> (Device, [MirrorReader; 2]) {
    let [received, sent] = [0; 2].map(|_| ring::create(1 << 20, 2000, |now| now).expect("memory"));
    let readers = [&received.1, &sent.1].map(|file| MirrorReader::open(file).expect("a ring"));
    let rx = Box::new(MirrorRx::<_, false> { inner: device.rx, sink: received.0 });
    (Device { rx, tx: Box::new(MirrorTx::<_, false>::new(device.tx, sent.0)) }, readers)
}

#[test]
fn frames_are_mirrored_with_and_without_vectors() {
    for with_vectors in [true, false] {
        let (left, mut right) = pair(MemoryConfig::default());
        let (mut left, [mut received, mut sent]) = match with_vectors {
            true => mirrored(left, 1 << 20),
            false => mirrored_without_vectors(left),
        };
        let frames: Vec<Vec<u8>> = (40..600).map(|len| vec![len as u8; len]).collect();
        for frame in &frames {
            send(&mut left, frame);
            send(&mut right, frame);
            assert_eq!((receive(&mut left), receive(&mut right)), (vec![frame.clone()], vec![frame.clone()]));
        }
        assert!(copies(&mut received) == frames && copies(&mut sent) == frames, "{with_vectors}");
    }
}

/// A queue that takes back its room at every call. It has room for frames of up to 1500 bytes, and panics if
/// it is asked for `usize::MAX`.
struct ChangingTx(Vec<u8>);

impl TxQueue for ChangingTx {
    fn capabilities(&self) -> Capabilities {
        let (mac, mtu) = ([2, 0, 0, 0, 0, 1], 1500);
        Capabilities { mac, mtu, tx_checksum: true, gso_bytes_max: 0, uso: false, labels: false }
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.0 = Vec::new();
        assert!(len < usize::MAX, "the queue panics");
        self.0 = vec![0; if len <= 1500 { len } else { return None }];
        Some(&mut self.0)
    }

    fn commit(&mut self, _: usize, _: TxMeta) {
        self.0 = Vec::new();
    }

    fn has_backlog(&mut self, _: usize) -> bool {
        self.0 = Vec::new();
        false
    }

    fn select_class(&mut self, _: Option<TxClass>) {
        self.0 = Vec::new();
    }

    fn flush(&mut self, _: Instant) {
        self.0 = Vec::new();
    }
}

#[test]
fn room_is_not_read_after_another_call() {
    let calls: [fn(&mut dyn TxQueue); 8] = [
        |tx| tx.commit(60, TxMeta::NONE),
        |tx| tx.flush(Instant::ZERO),
        |tx| tx.select_class(None),
        |tx| _ = tx.has_backlog(1),
        |tx| _ = tx.next_deadline(),
        |tx| _ = tx.reserve(59),
        |tx| assert!(tx.reserve(1501).is_none()),
        |tx| {
            let reserve = std::panic::AssertUnwindSafe(|| _ = tx.reserve(usize::MAX));
            assert!(std::panic::catch_unwind(reserve).is_err());
        },
    ];
    let (ring, file) = ring::create(0, 2000, |now| now).expect("memory");
    let mut reader = MirrorReader::open(&file).expect("a ring");
    let mut tx = wrap_tx(Box::new(ChangingTx(Vec::new())), ring);
    for (number, call) in calls.into_iter().enumerate() {
        tx.reserve(60).expect("room").fill(1);
        call(&mut *tx);
        tx.commit(60, TxMeta::NONE);
        tx.flush(Instant::ZERO);
        let expected = if number == 0 { vec![vec![1; 60]] } else { vec![] };
        assert_eq!(copies(&mut reader), expected, "{number}");
    }
}
