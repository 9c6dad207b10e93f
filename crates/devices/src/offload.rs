//! What devices without offloads lack, done in software: segmentation and checksums.

use ginnel_stack::device::{
    Capabilities, ETHERNET_HEADER_BYTES, Gso, GsoKind, RxChecksum, RxFrame, TxMeta, TxQueue,
};
use ginnel_stack::wire::WireError;
use ginnel_stack::wire::segment::{complete_checksum, segment};

/// Largest super-frame in bytes that devices here take: the largest IP packet behind an Ethernet header.
pub const GSO_BYTES_MAX: usize = 65_535 + ETHERNET_HEADER_BYTES;

/// What the sender of a frame would have asked of a device, so that the next device can be asked for the same.
#[must_use]
pub fn meta_of(frame: &RxFrame<'_>) -> TxMeta {
    let partial_checksum = match frame.checksum {
        RxChecksum::Partial { start, offset } => Some((start, offset)),
        RxChecksum::Unverified | RxChecksum::Verified => None,
    };
    TxMeta { partial_checksum, gso: frame.gso }
}

/// Makes wire frames: super-frames are cut and partial checksums completed.
pub struct WireFrames {
    /// Room for one frame.
    scratch: Vec<u8>,
}

impl Default for WireFrames {
    fn default() -> Self {
        Self::new()
    }
}

impl WireFrames {
    /// Allocates nothing before it is needed.
    #[must_use]
    pub const fn new() -> Self {
        Self { scratch: Vec::new() }
    }

    /// Calls `each` with every wire frame that the frame stands for.
    ///
    /// # Errors
    /// If `meta` contradicts the frame; then `each` was not called.
    pub fn of(&mut self, frame: &[u8], meta: TxMeta, mut each: impl FnMut(&[u8])) -> Result<(), WireError> {
        let Some((start, offset)) = meta.partial_checksum.filter(|_| meta.gso.is_none()) else {
            let Some(gso) = meta.gso else {
                each(frame);
                return Ok(());
            };
            return segment(frame, gso, self.room(frame.len()), each).map(drop);
        };
        let room = &mut self.room(frame.len())[..frame.len()];
        room.copy_from_slice(frame);
        complete_checksum(room, start.into(), offset.into())?;
        each(room);
        Ok(())
    }

    fn room(&mut self, len: usize) -> &mut [u8] {
        if self.scratch.len() < len {
            self.scratch.resize(len, 0);
        }
        &mut self.scratch
    }
}

/// Sends copies of frames that came from one device through another, whatever either can do.
#[derive(Default)]
pub struct Forwarder {
    wire: WireFrames,
}

impl Forwarder {
    /// Sends a frame without flush, as it is where the device can take it, otherwise as wire frames. Returns how many frames were
    /// refused: by a full queue, because they are longer than the device takes, or because `meta` contradicts them.
    pub fn send(&mut self, frame: &[u8], meta: TxMeta, tx: &mut (impl TxQueue + ?Sized)) -> u64 {
        let capabilities = tx.capabilities();
        if takes(&capabilities, frame.len(), meta) {
            return u64::from(!put(tx, frame, meta));
        }
        let mut refused = 0;
        let result = self.wire.of(frame, meta, |segment| {
            refused += u64::from(!put(tx, segment, TxMeta::default()));
        });
        refused + u64::from(result.is_err())
    }
}

fn takes(capabilities: &Capabilities, len: usize, meta: TxMeta) -> bool {
    let gso = |gso: Gso| len <= capabilities.gso_bytes_max && (gso.kind != GsoKind::Udp || capabilities.uso);
    (meta.partial_checksum.is_none() || capabilities.tx_checksum) && meta.gso.is_none_or(gso)
}

/// Room for a frame, an Ethernet header and a VLAN tag is all a device has to lend for what is no super-frame.
fn put(tx: &mut (impl TxQueue + ?Sized), frame: &[u8], meta: TxMeta) -> bool {
    let capabilities = tx.capabilities();
    if frame.len() > capabilities.mtu + 18 && meta.gso.is_none() {
        return false;
    }
    let Some(room) = tx.reserve(frame.len()) else { return false };
    room.copy_from_slice(frame);
    tx.commit(frame.len(), meta);
    true
}
