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

/// A queue whose room cannot be read.
struct UnreadableTx(Box<dyn TxQueue + Send>);

impl TxQueue for UnreadableTx {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.0.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.0.commit(len, meta);
    }

    fn flush(&mut self, now: Instant) {
        self.0.flush(now);
    }
}

#[test]
fn device_without_readable_room_is_mirrored() {
    let (left, mut right) = pair(MemoryConfig::default());
    let left = Device { rx: left.rx, tx: Box::new(UnreadableTx(left.tx)) };
    let (mut left, [_, mut sent]) = mirrored(left, 0);
    send(&mut left, &[1; 60]);
    assert_eq!((receive(&mut right), copies(&mut sent)), (vec![vec![1; 60]], vec![vec![1; 60]]));
    let left = left.tx.remove_layer().expect("a layer");
    assert!(!left.can_read_reserved() && left.remove_layer().is_none(), "both layers are removed");
}
