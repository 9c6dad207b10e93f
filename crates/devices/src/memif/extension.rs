//! What two ends that are both Ginnel agree on beyond the protocol: a header in front of each frame, with what the sender knows about it.
//!
//! The server announces what it can in unused bytes of HELLO, the client chooses from that in unused bytes of INIT; other
//! implementations neither look there nor write there. The header is counted in the length of the first descriptor, and its own
//! length stands in the `private_hdr_size` of each ring.

use crate::tap::vnet;
use ginnel_stack::device::{Label, RxFrame, TxMeta};

/// Marks the announcement.
const MAGIC: [u8; 8] = *b"GINNELX1";
const FRAME_HEADERS: u32 = 1;

/// Bytes of the header in front of each frame: the header of virtio-net (10), two zeros, and the frame's label (4), which is zero if there is none.
pub(super) const HEADER_BYTES: usize = 16;
/// Where the label is.
const LABEL_AT: usize = 12;

/// What is announced or chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Features {
    /// Frames have headers, so checksums may be partial and super-frames whole.
    pub(super) frame_headers: bool,
}

impl Features {
    /// All zeros if there is nothing to announce, as a peer that knows nothing of it has them.
    pub(super) fn announce(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        if self.frame_headers {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..12].copy_from_slice(&FRAME_HEADERS.to_ne_bytes());
        }
        bytes
    }

    /// Features that are not known here are not seen.
    pub(super) fn announced(bytes: [u8; 16]) -> Self {
        let flags = u32::from_ne_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        Self { frame_headers: bytes[..8] == MAGIC && flags & FRAME_HEADERS != 0 }
    }

    /// What both can do.
    pub(super) fn and(self, other: Self) -> Self {
        Self { frame_headers: self.frame_headers && other.frame_headers }
    }

    /// Bytes in front of each frame.
    pub(super) fn header_bytes(self) -> usize {
        if self.frame_headers { HEADER_BYTES } else { 0 }
    }
}

/// The header of a frame that is sent.
pub(super) fn encode(meta: TxMeta) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..vnet::LEN].copy_from_slice(&vnet::encode(meta));
    header[LABEL_AT..].copy_from_slice(&meta.label.bits().to_ne_bytes());
    header
}

/// What the header says about the frame behind it, if it does not contradict it.
pub(super) fn decode<'a>(header: &[u8; HEADER_BYTES], frame: &'a [u8]) -> Option<RxFrame<'a>> {
    let (vnet, label) = (header.first_chunk()?, header.last_chunk()?);
    let (checksum, gso) = vnet::decode(vnet, frame).ok()?;
    let label = Label::from_bits(u32::from_ne_bytes(*label));
    Some(RxFrame { bytes: frame, checksum, gso, label })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_stack::device::RxChecksum;

    const BOTH: Features = Features { frame_headers: true };

    #[test]
    fn a_peer_that_knows_nothing_of_it_sees_zeros_and_announces_nothing() {
        assert_eq!(Features::default().announce(), [0; 16]);
        assert_eq!(Features::announced([0; 16]), Features::default());
        assert_eq!(Features::announced([0xff; 16]), Features::default());
        assert_eq!(Features::announced(BOTH.announce()), BOTH);
    }

    #[test]
    fn features_of_later_versions_are_ignored() {
        let mut bytes = BOTH.announce();
        bytes[9..].fill(0xff);
        assert_eq!(Features::announced(bytes), BOTH);
        bytes[8] = 0xfe;
        assert_eq!(Features::announced(bytes), Features::default());
    }

    #[test]
    fn only_what_both_can_do_is_done() {
        assert_eq!(BOTH.and(Features::default()), Features::default());
        assert_eq!(BOTH.and(BOTH).header_bytes(), HEADER_BYTES);
    }

    #[test]
    fn what_is_encoded_is_decoded_and_contradictions_are_refused() {
        for label in [Label::NONE, Label::new(None, 7), Label::new(Some(0), 0), Label::new(Some(u32::MAX), 3)]
        {
            let meta = TxMeta { partial_checksum: Some((34, 16)), label, ..TxMeta::NONE };
            let header = encode(meta);
            let frame = decode(&header, &[0; 60]).expect("it is valid");
            assert_eq!(frame.checksum, RxChecksum::Partial { start: 34, offset: 16 });
            assert_eq!((frame.gso, frame.label), (None, label));
            assert!(decode(&header, &[0; 51]).is_none());
        }
    }

    /// An end of before labels sends zeros there, and sees none.
    #[test]
    fn a_header_without_a_label_has_none() {
        assert_eq!(encode(TxMeta::NONE), [0; HEADER_BYTES]);
        assert_eq!(decode(&[0; HEADER_BYTES], &[0; 60]).expect("it is valid").label, Label::NONE);
    }
}
