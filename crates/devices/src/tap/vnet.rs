//! The virtio-net header in front of each frame (Virtual I/O Device 1.2 §5.1.6, without `num_buffers`), in
//! host byte order, which is the default of TAP devices.

use ginnel_stack::device::{Gso, GsoKind, RxChecksum, TxMeta};
use ginnel_stack::wire::gso::headers_len;

/// Length of the header in bytes.
pub(crate) const LEN: usize = 10;

const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;

const GSO_NONE: u8 = 0;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// The header contradicts its frame, or requests an offload that was not negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MalformedHeader;

/// Returns the header for a frame to send.
pub(crate) fn encode(meta: TxMeta) -> [u8; LEN] {
    let mut out = [0; LEN];
    if let Some((start, offset)) = meta.partial_checksum {
        out[0] = NEEDS_CSUM;
        out[6..8].copy_from_slice(&start.to_ne_bytes());
        out[8..10].copy_from_slice(&offset.to_ne_bytes());
    }
    if let Some(gso) = meta.gso {
        out[1] = match gso.kind {
            GsoKind::Tcp4 => GSO_TCP4,
            GsoKind::Tcp6 => GSO_TCP6,
            GsoKind::Udp => GSO_UDP_L4,
        } | if gso.ecn { GSO_ECN } else { 0 };
        out[2..4].copy_from_slice(&gso.header_len.to_ne_bytes());
        out[4..6].copy_from_slice(&gso.size.to_ne_bytes());
    }
    out
}

/// Returns the checksum state and segmentation that the header states for its frame.
pub(crate) fn decode(header: &[u8; LEN], frame: &[u8]) -> Result<(RxChecksum, Option<Gso>), MalformedHeader> {
    let field = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let checksum = if header[0] & NEEDS_CSUM != 0 {
        let (start, offset) = (field(6), field(8));
        if usize::from(start) + usize::from(offset) + 2 > frame.len() {
            return Err(MalformedHeader);
        }
        RxChecksum::Partial { start, offset }
    } else if header[0] & DATA_VALID != 0 {
        RxChecksum::Verified
    } else {
        RxChecksum::Unverified
    };
    let kind = match header[1] & !GSO_ECN {
        GSO_NONE => return Ok((checksum, None)),
        GSO_TCP4 => GsoKind::Tcp4,
        GSO_TCP6 => GsoKind::Tcp6,
        GSO_UDP_L4 => GsoKind::Udp,
        _ => return Err(MalformedHeader),
    };
    // The header's own `hdr_len` is a hint about the memory layout on the other side, not the length of the
    // headers.
    let header_len = headers_len(frame, kind).map_err(|_| MalformedHeader)?;
    let size = field(4);
    if size == 0 {
        return Err(MalformedHeader);
    }
    // Linux marks super-frames as partial whenever it made them itself; a super-frame that it merged from
    // verified segments counts as verified.
    let checksum = if checksum == RxChecksum::Unverified { RxChecksum::Verified } else { checksum };
    Ok((checksum, Some(Gso { kind, size, header_len, ecn: header[1] & GSO_ECN != 0 })))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns Ethernet, IPv4 and TCP headers with 12 bytes of options, and 100 bytes of payload.
    fn frame() -> Vec<u8> {
        let mut frame = vec![0; 166];
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[16..18].copy_from_slice(&152u16.to_be_bytes());
        frame[23] = 6;
        frame[46] = 0x80;
        frame
    }

    #[test]
    fn encoding_round_trips() {
        let gso = Gso { kind: GsoKind::Tcp4, size: 40, header_len: 66, ecn: true };
        let header = encode(TxMeta { partial_checksum: Some((34, 16)), gso: Some(gso), ..TxMeta::NONE });
        let partial = RxChecksum::Partial { start: 34, offset: 16 };
        assert_eq!(decode(&header, &frame()), Ok((partial, Some(gso))));
        assert_eq!(decode(&encode(TxMeta::default()), &frame()), Ok((RxChecksum::Unverified, None)));
    }

    #[test]
    fn header_length_is_read_from_the_frame() {
        let gso = Gso { kind: GsoKind::Tcp4, size: 40, header_len: 66, ecn: false };
        let hint = Gso { header_len: 128, ..gso };
        let header = encode(TxMeta { partial_checksum: Some((34, 16)), gso: Some(hint), ..TxMeta::NONE });
        assert_eq!(decode(&header, &frame()).unwrap().1, Some(gso));
    }

    #[test]
    fn data_valid_flag_marks_verified_frames() {
        assert_eq!(
            decode(&[DATA_VALID, 0, 0, 0, 0, 0, 0, 0, 0, 0], &frame()),
            Ok((RxChecksum::Verified, None))
        );
    }

    #[test]
    fn invalid_headers_are_refused() {
        let partial = |start: u16, offset: u16| {
            encode(TxMeta { partial_checksum: Some((start, offset)), ..TxMeta::NONE })
        };
        assert!(decode(&partial(150, 14), &frame()).is_ok());
        assert_eq!(decode(&partial(150, 15), &frame()), Err(MalformedHeader));
        assert_eq!(decode(&partial(65_535, 65_535), &frame()), Err(MalformedHeader));
        let super_frame = |kind: u8, size: u16| {
            let mut header = partial(34, 16);
            header[1] = kind;
            header[4..6].copy_from_slice(&size.to_ne_bytes());
            header
        };
        assert!(decode(&super_frame(GSO_TCP4, 40), &frame()).is_ok());
        assert_eq!(decode(&super_frame(GSO_TCP4, 0), &frame()), Err(MalformedHeader), "no segment size");
        assert_eq!(decode(&super_frame(3, 40), &frame()), Err(MalformedHeader), "UFO was not negotiated");
        assert_eq!(
            decode(&super_frame(GSO_TCP4, 40), &frame()[..50]),
            Err(MalformedHeader),
            "headers cut off"
        );
    }
}
