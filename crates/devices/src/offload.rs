//! Segmentation and checksums in software, for devices without these offloads.

use ginnel_stack::device::{
    Capabilities, ETHERNET_HEADER_BYTES, Gso, GsoKind, RxChecksum, RxFrame, TxMeta, TxQueue,
};
use ginnel_stack::wire::WireError;
use ginnel_stack::wire::gso::{complete_checksum, segment};

/// Size in bytes of the largest super-frame that devices accept: an Ethernet header and the largest IP
/// packet.
pub const GSO_BYTES_MAX: usize = 65_535 + ETHERNET_HEADER_BYTES;

/// Returns the transmit metadata that requests the offloads which the sender of `frame` left to its device,
/// so that the frame can be forwarded unchanged.
#[must_use]
pub fn meta_of(frame: &RxFrame<'_>) -> TxMeta {
    let partial_checksum = match frame.checksum {
        RxChecksum::Partial { start, offset } => Some((start, offset)),
        RxChecksum::Unverified | RxChecksum::Verified => None,
    };
    TxMeta { partial_checksum, gso: frame.gso, label: frame.label }
}

/// Converts frames to wire frames: segments super-frames and completes partial checksums.
pub struct WireFrames {
    /// Buffer for one frame.
    scratch: Vec<u8>,
}

impl Default for WireFrames {
    fn default() -> Self {
        Self::new()
    }
}

impl WireFrames {
    /// Creates a converter. Allocates no memory until a frame needs it.
    #[must_use]
    pub const fn new() -> Self {
        Self { scratch: Vec::new() }
    }

    /// Calls `each` with every wire frame that `frame` stands for.
    ///
    /// # Errors
    /// Returns an error if `meta` contradicts the frame; `each` has not been called then.
    pub fn for_each(
        &mut self,
        frame: &[u8],
        meta: TxMeta,
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), WireError> {
        let Some((start, offset)) = meta.partial_checksum.filter(|_| meta.gso.is_none()) else {
            let Some(gso) = meta.gso else {
                each(frame);
                return Ok(());
            };
            return segment(frame, gso, self.scratch_mut(frame.len()), each).map(drop);
        };
        let room = &mut self.scratch_mut(frame.len())[..frame.len()];
        room.copy_from_slice(frame);
        complete_checksum(room, start.into(), offset.into())?;
        each(room);
        Ok(())
    }

    fn scratch_mut(&mut self, len: usize) -> &mut [u8] {
        if self.scratch.len() < len {
            self.scratch.resize(len, 0);
        }
        &mut self.scratch
    }
}

/// Forwards copies of frames that one device received through another device, whatever offloads either has.
#[derive(Default)]
pub struct Forwarder {
    wire: WireFrames,
}

impl Forwarder {
    /// Queues a frame without flush: unchanged if the device supports the offloads, otherwise as wire frames.
    /// Returns the number of frames that were not queued because the queue is full, because they are longer
    /// than the device accepts, or because `meta` contradicts them.
    pub fn send(&mut self, frame: &[u8], meta: TxMeta, tx: &mut (impl TxQueue + ?Sized)) -> u64 {
        let capabilities = tx.capabilities();
        if can_take(&capabilities, frame.len(), meta) {
            return u64::from(!send_copy(tx, frame, meta));
        }
        let mut refused = 0;
        let result = self.wire.for_each(frame, meta, |segment| {
            refused += u64::from(!send_copy(tx, segment, TxMeta { label: meta.label, ..TxMeta::NONE }));
        });
        refused + u64::from(result.is_err())
    }
}

fn can_take(capabilities: &Capabilities, len: usize, meta: TxMeta) -> bool {
    // A super-frame that was merged from verified segments has a complete checksum, which a device cannot
    // segment.
    let gso = |gso: Gso| {
        meta.partial_checksum.is_some()
            && len <= capabilities.gso_bytes_max
            && (gso.kind != GsoKind::Udp || capabilities.uso)
    };
    (meta.partial_checksum.is_none() || capabilities.tx_checksum) && meta.gso.is_none_or(gso)
}

/// Queues one frame. A device only has to reserve space for the MTU, an Ethernet header and a VLAN tag,
/// unless the frame is a super-frame.
fn send_copy(tx: &mut (impl TxQueue + ?Sized), frame: &[u8], meta: TxMeta) -> bool {
    let capabilities = tx.capabilities();
    if frame.len() > capabilities.mtu + 18 && meta.gso.is_none() {
        return false;
    }
    let Some(room) = tx.reserve(frame.len()) else { return false };
    room.copy_from_slice(frame);
    tx.commit(frame.len(), meta);
    true
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::{MemoryConfig, pair};
    use ginnel_stack::device::{Device, RxBurst};
    use ginnel_stack::time::Instant;
    use ginnel_stack::wire::checksum::{Sum, pseudo_v4};

    /// Returns a TCP segment from 10.0.0.1 to 10.0.0.2 with `payload` bytes; its checksum field holds the
    /// pseudo-header sum.
    fn tcp(payload: usize) -> Vec<u8> {
        let mut frame = vec![0; 54 + payload];
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[16..18].copy_from_slice(&(40 + payload as u16).to_be_bytes());
        frame[22..24].copy_from_slice(&[64, 6]);
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[46] = 0x50;
        frame[50..52].copy_from_slice(&pseudo(20 + payload).fold().to_be_bytes());
        frame
    }

    fn pseudo(len: usize) -> Sum {
        pseudo_v4([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 6, len)
    }

    fn is_complete(frame: &[u8]) -> bool {
        pseudo(frame.len() - 34).add(Sum::of(&frame[34..])).is_valid()
    }

    const PARTIAL: TxMeta = TxMeta { partial_checksum: Some((34, 16)), ..TxMeta::NONE };
    const GSO: Gso = Gso { kind: GsoKind::Tcp4, size: 1000, header_len: 54, ecn: false };
    const SUPER: TxMeta = TxMeta { gso: Some(GSO), ..PARTIAL };

    fn wire(frame: &[u8], meta: TxMeta) -> Result<Vec<Vec<u8>>, WireError> {
        let mut frames = Vec::new();
        WireFrames::new().for_each(frame, meta, |frame| frames.push(frame.to_vec())).map(|()| frames)
    }

    #[test]
    fn complete_frame_is_unchanged() {
        assert_eq!(wire(&[1, 2, 3], TxMeta::default()), Ok(vec![vec![1, 2, 3]]));
    }

    #[test]
    fn partial_checksums_and_super_frames_are_completed() {
        let frames = wire(&tcp(500), PARTIAL).expect("valid");
        assert_eq!(frames.len(), 1);
        assert!(is_complete(&frames[0]));
        let frames = wire(&tcp(2500), SUPER).expect("valid");
        assert_eq!(frames.iter().map(Vec::len).collect::<Vec<_>>(), [1054, 1054, 554]);
        assert!(frames.iter().all(|frame| is_complete(frame)));
    }

    #[test]
    fn inconsistent_metadata_is_refused() {
        assert!(wire(&tcp(5)[..40], PARTIAL).is_err());
        assert!(wire(&tcp(5), TxMeta { gso: Some(Gso { kind: GsoKind::Udp, ..GSO }), ..PARTIAL }).is_err());
    }

    /// Returns how many frames were refused, and for each frame that arrives its length and whether it is
    /// unchanged.
    fn forwarded(config: MemoryConfig, frame: &[u8], meta: TxMeta) -> (u64, Vec<(usize, bool)>) {
        let (mut near, mut far): (Device, Device) = pair(config);
        let refused = Forwarder::default().send(frame, meta, &mut *near.tx);
        near.tx.flush(Instant::ZERO);
        let mut burst = RxBurst::new();
        far.rx.rx_burst(Instant::ZERO, &mut burst);
        (refused, burst.iter().map(|f| (f.bytes.len(), meta_of(f) == meta && f.bytes == frame)).collect())
    }

    #[test]
    fn supported_offloads_pass_unchanged() {
        let able = MemoryConfig::default;
        assert_eq!(forwarded(able(), &tcp(2500), SUPER), (0, vec![(2554, true)]));
        assert_eq!(forwarded(able(), &tcp(500), PARTIAL), (0, vec![(554, true)]));
        let cut = vec![(1054, false), (1054, false), (554, false)];
        assert_eq!(forwarded(able().without_offloads(), &tcp(2500), SUPER), (0, cut.clone()));
        assert_eq!(
            forwarded(MemoryConfig { gso_bytes_max: 2553, ..able() }, &tcp(2500), SUPER),
            (0, cut.clone())
        );
        let merged = TxMeta { gso: Some(GSO), ..TxMeta::NONE };
        assert_eq!(forwarded(able(), &tcp(2500), merged), (0, cut));
        assert_eq!(forwarded(able().without_offloads(), &tcp(500), PARTIAL), (0, vec![(554, false)]));
    }

    #[test]
    fn frame_above_the_device_limits_is_refused() {
        let small = MemoryConfig { mtu: 900, ..MemoryConfig::default() }.without_offloads();
        assert_eq!(forwarded(small.clone(), &tcp(2500), SUPER), (2, vec![(554, false)]));
        assert_eq!(forwarded(small.clone(), &tcp(1000), TxMeta::default()), (1, vec![]));
        assert_eq!(forwarded(small, &tcp(1000)[..40], PARTIAL), (1, vec![]));
    }
}
