//! Extension of the protocol between two ends that are both Ginnel: a header in front of each frame, with the
//! sender's metadata.
//!
//! The server announces features in unused bytes of HELLO, and the client selects from them in unused bytes
//! of INIT; other implementations neither read nor write these bytes. The length of the first descriptor of a
//! frame includes the header, and `private_hdr_size` of each ring states the length of the header.

use crate::tap::vnet;
use ginnel_stack::device::{Label, RxFrame, TxMeta};
use ginnel_stack::steering::toeplitz;

/// Marks an announcement.
const MAGIC: [u8; 8] = *b"GINNELX1";
const FRAME_HEADERS: u32 = 1;
/// Labels contain flow hashes of the function whose check value follows the feature flags.
const FLOW_HASH: u32 = 2;

/// Bytes of the header in front of each frame: the virtio-net header (10), two zero bytes, and the frame's
/// label (4), which is zero if the frame has none.
pub(super) const HEADER_BYTES: usize = 16;
/// Offset of the label.
const LABEL_AT: usize = 12;

/// Features that an end announces or selects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Features {
    /// True if frames have headers, so that partial checksums and super-frames pass, and frames have
    /// priorities.
    pub(super) frame_headers: bool,
    /// The hash function of flow labels, identified by its value for a known flow ([`toeplitz::KEY_CHECK`]).
    /// Ends with different functions do not exchange hashes.
    pub(super) hash: Option<u32>,
}

impl Features {
    /// All features of this version.
    pub(super) const ALL: Self = Self { frame_headers: true, hash: Some(toeplitz::KEY_CHECK) };

    /// Encodes an announcement. It is all zeros if there is nothing to announce, like the bytes of other
    /// implementations.
    pub(super) fn encode(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        if self.frame_headers {
            bytes[..8].copy_from_slice(&MAGIC);
            let flags = FRAME_HEADERS | self.hash.map_or(0, |_| FLOW_HASH);
            bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
            bytes[12..].copy_from_slice(&self.hash.unwrap_or_default().to_ne_bytes());
        }
        bytes
    }

    /// Decodes an announcement. Ignores unknown features.
    pub(super) fn decode(bytes: [u8; 16]) -> Self {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if bytes[..8] != MAGIC || word(8) & FRAME_HEADERS == 0 {
            return Self::default();
        }
        Self { frame_headers: true, hash: (word(8) & FLOW_HASH != 0).then(|| word(12)) }
    }

    /// Returns the features that both ends have.
    pub(super) fn intersect(self, other: Self) -> Self {
        let frame_headers = self.frame_headers && other.frame_headers;
        Self { frame_headers, hash: self.hash.filter(|_| frame_headers && self.hash == other.hash) }
    }

    /// Returns the number of bytes in front of each frame.
    pub(super) fn header_bytes(self) -> usize {
        if self.frame_headers { HEADER_BYTES } else { 0 }
    }
}

/// Returns the header of a frame to send. `has_flow_hash` says that both ends use one hash function, so that
/// the hash of the label is included.
pub(super) fn encode(meta: TxMeta, has_flow_hash: bool) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    let label = if has_flow_hash { meta.label } else { meta.label.without_hash() };
    header[..vnet::LEN].copy_from_slice(&vnet::encode(meta));
    header[LABEL_AT..].copy_from_slice(&label.bits().to_ne_bytes());
    header
}

/// Decodes the header of a frame. Returns `None` if the header contradicts the frame.
pub(super) fn decode<'a>(
    header: &[u8; HEADER_BYTES],
    frame: &'a [u8],
    has_flow_hash: bool,
) -> Option<RxFrame<'a>> {
    let (vnet, label) = (header.first_chunk()?, header.last_chunk()?);
    let (checksum, gso) = vnet::decode(vnet, frame).ok()?;
    let label = Label::from_bits(u32::from_ne_bytes(*label));
    let label = if has_flow_hash { label } else { label.without_hash() };
    Some(RxFrame { bytes: frame, checksum, gso, label })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_stack::device::RxChecksum;

    const BOTH: Features = Features::ALL;
    /// Announcement of a version without flow hashes.
    const HEADERS: Features = Features { frame_headers: true, hash: None };

    #[test]
    fn peer_without_the_extension_sees_zeros() {
        assert_eq!(Features::default().encode(), [0; 16]);
        assert_eq!(Features::decode([0; 16]), Features::default());
        assert_eq!(Features::decode([0xff; 16]), Features::default());
        assert_eq!(Features::decode(BOTH.encode()), BOTH);
    }

    #[test]
    fn features_of_later_versions_are_ignored() {
        let mut bytes = HEADERS.encode();
        // Sets all bits but the two known flags.
        bytes[8..].fill(0xff);
        bytes[8] = 0xfd;
        assert_eq!(Features::decode(bytes), HEADERS);
        bytes[8] = 0xfe;
        assert_eq!(Features::decode(bytes), Features::default());
    }

    #[test]
    fn only_common_features_are_used() {
        assert_eq!(BOTH.intersect(Features::default()), Features::default());
        assert_eq!(BOTH.intersect(BOTH).header_bytes(), HEADER_BYTES);
    }

    #[test]
    fn different_hash_functions_disable_the_hash() {
        let other = Features { hash: Some(7), ..BOTH };
        assert_eq!(Features::decode(other.encode()), other);
        assert_eq!(BOTH.intersect(BOTH), BOTH);
        for end in [other, HEADERS] {
            assert_eq!(Features::decode(end.encode()), end);
            assert_eq!((BOTH.intersect(end), end.intersect(BOTH)), (HEADERS, HEADERS));
        }
        let without_headers = Features { frame_headers: false, ..BOTH };
        assert_eq!(without_headers.intersect(BOTH), Features::default());
        let meta = TxMeta { label: Label::new(Some(77), 5), ..TxMeta::NONE };
        for (sender_hashes, receiver_hashes) in [(true, false), (false, true), (false, false)] {
            let header = encode(meta, sender_hashes);
            let label = decode(&header, &[0; 60], receiver_hashes).expect("valid header").label;
            assert_eq!(label, Label::new(None, 5), "the priority is always encoded");
        }
    }

    #[test]
    fn headers_round_trip_or_are_refused() {
        for label in [Label::NONE, Label::new(None, 7), Label::new(Some(0), 0), Label::new(Some(u32::MAX), 3)]
        {
            let meta = TxMeta { partial_checksum: Some((34, 16)), label, ..TxMeta::NONE };
            let header = encode(meta, true);
            let frame = decode(&header, &[0; 60], true).expect("valid header");
            assert_eq!(frame.checksum, RxChecksum::Partial { start: 34, offset: 16 });
            assert_eq!((frame.gso, frame.label), (None, label));
            assert!(decode(&header, &[0; 51], true).is_none());
        }
    }

    /// A version without labels sends zeros in this field, and ignores it.
    #[test]
    fn header_without_label_has_no_label() {
        assert_eq!(encode(TxMeta::NONE, true), [0; HEADER_BYTES]);
        assert_eq!(decode(&[0; HEADER_BYTES], &[0; 60], true).expect("valid header").label, Label::NONE);
    }
}
