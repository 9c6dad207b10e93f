//! Offloads of ports: which are used, and where the headers of a frame are.

use super::ffi::{PortInfo, TX_CHECKSUM, TX_IP_CHECKSUM, TX_IS_UDP, TX_IS_V6, TX_SUPER_FRAME, TxEntry};
use crate::offload::GSO_BYTES_MAX;
use ginnel_stack::device::{ETHERNET_HEADER_BYTES, Gso, GsoKind, TxMeta};

/// Offloads by the numbers of their bits (`RTE_ETH_RX_OFFLOAD_…`, `RTE_ETH_TX_OFFLOAD_…`).
const RX_UDP: u64 = 1 << 2;
const RX_TCP: u64 = 1 << 3;
const RX_HASH: u64 = 1 << 19;
const TX_IPV4: u64 = 1 << 1;
const TX_UDP: u64 = 1 << 2;
const TX_TCP: u64 = 1 << 3;
const TX_SEGMENTATION: u64 = 1 << 5;
const TX_SEVERAL_BUFFERS: u64 = 1 << 15;

/// Offsets of the checksum in TCP and UDP headers.
const TCP_CHECKSUM_AT: u16 = 16;
const UDP_CHECKSUM_AT: u16 = 6;

/// The offloads of a port that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offloads {
    /// Bits that the port is configured with.
    pub rx: u64,
    pub tx: u64,
    /// Largest super-frame in bytes that the port segments; 0 if it segments none.
    pub super_frame_bytes: usize,
    segmentation: Segmentation,
}

/// Super-frames that a port cuts correctly; others are cut here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segmentation {
    ipv6: bool,
    /// The flag CWR stays in the first segment only.
    ecn: bool,
    segments_max: usize,
    /// Smallest and largest payload of a segment in bytes.
    segment_bytes_min: u16,
    segment_bytes_max: u16,
    /// Largest frame that a segment becomes, in bytes.
    frame_bytes_max: usize,
}

impl Segmentation {
    /// Returns the abilities of a driver at this MTU. That of `net_tap` is a library for IPv4 without CWR. It
    /// refuses super-frames of more than 64 segments, and segments whose frames are longer than the MTU of
    /// their packets. Adapters have bounds for the payload of a segment; those of Intel's iavf are the
    /// narrowest of common drivers.
    fn of(driver: &str, mtu: usize) -> Self {
        match driver {
            "net_tap" => Self {
                ipv6: false,
                ecn: false,
                segments_max: 64,
                segment_bytes_min: 1,
                segment_bytes_max: u16::MAX,
                frame_bytes_max: mtu,
            },
            _ => Self {
                ipv6: true,
                ecn: true,
                segments_max: usize::MAX,
                segment_bytes_min: 256,
                segment_bytes_max: 9668,
                frame_bytes_max: usize::MAX,
            },
        }
    }
}

impl Offloads {
    /// Chooses among the offloads of a port with this MTU; a buffer holds `buffer_bytes` of a frame.
    pub fn choose(info: &PortInfo, is_wanted: bool, buffer_bytes: usize, mtu: usize) -> Self {
        let segmentation = Segmentation::of(&info.driver(), mtu);
        let has = |bits: u64| info.tx_offloads & bits == bits;
        let hash = info.rx_offloads & RX_HASH;
        if !is_wanted || !has(TX_TCP | TX_UDP) {
            let rx = if is_wanted { info.rx_offloads & (RX_TCP | RX_UDP) } else { 0 };
            return Self { rx: rx | hash, tx: 0, super_frame_bytes: 0, segmentation };
        }
        let rx = info.rx_offloads & (RX_TCP | RX_UDP) | hash;
        let (mut tx, mut super_frame_bytes) = (TX_TCP | TX_UDP, 0);
        if has(TX_SEGMENTATION | TX_SEVERAL_BUFFERS) {
            tx |= TX_SEGMENTATION | TX_SEVERAL_BUFFERS | info.tx_offloads & TX_IPV4;
            let buffers = match info.tx_segments_max {
                0 => usize::MAX,
                buffers => buffers.into(),
            };
            super_frame_bytes = GSO_BYTES_MAX.min(buffers.saturating_mul(buffer_bytes));
        }
        Self { rx, tx, super_frame_bytes, segmentation }
    }

    /// Returns the bits for receiving of a port that does not hash.
    pub fn rx_without_hash(&self) -> u64 {
        self.rx & !RX_HASH
    }

    /// Returns whether the port completes checksums.
    pub fn has_checksum(&self) -> bool {
        self.tx & TX_TCP != 0
    }

    /// Returns whether the port completes the checksums of IPv4 headers.
    pub fn has_ip_checksum(&self) -> bool {
        self.tx & TX_IPV4 != 0
    }

    /// Returns whether the port cuts a super-frame of `len` bytes.
    pub fn cuts(&self, gso: Gso, len: usize) -> bool {
        let payload = len.saturating_sub(gso.header_len.into());
        let sizes = self.segmentation.segment_bytes_min..=self.segmentation.segment_bytes_max;
        sizes.contains(&gso.size)
            && len <= self.super_frame_bytes
            && match gso.kind {
                GsoKind::Tcp4 => true,
                GsoKind::Tcp6 => self.segmentation.ipv6,
                GsoKind::Udp => false,
            }
            && (self.segmentation.ecn || !gso.ecn)
            && usize::from(gso.size) + usize::from(gso.header_len) <= self.segmentation.frame_bytes_max
            && payload.div_ceil(usize::from(gso.size).max(1)) <= self.segmentation.segments_max
    }
}

/// Where the headers of a frame are whose checksum the port completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Headers {
    is_udp: bool,
    is_v6: bool,
    l2_len: u16,
    l3_len: u16,
    l4_len: u16,
}

impl Headers {
    /// Finds the headers of a frame whose checksum starts at `start` and is stored at `start + offset`.
    /// Returns `None` if they are not those of TCP or UDP over IP.
    pub fn of(frame: &[u8], (start, offset): (u16, u16)) -> Option<Self> {
        let is_tagged = frame.get(12..14)? == [0x81, 0x00];
        let l2_len = ETHERNET_HEADER_BYTES as u16 + if is_tagged { 4 } else { 0 };
        let is_v6 = match frame.get(usize::from(l2_len) - 2..usize::from(l2_len))? {
            [0x08, 0x00] => false,
            [0x86, 0xdd] => true,
            _ => return None,
        };
        let (is_udp, l4_len) = match offset {
            UDP_CHECKSUM_AT => (true, 8),
            TCP_CHECKSUM_AT => (false, u16::from(*frame.get(usize::from(start) + 12)? >> 4) * 4),
            _ => return None,
        };
        let l3_len = start.checked_sub(l2_len)?;
        // A buffer has nine bits for the length of the IP header.
        let fits = l3_len < 512 && l4_len >= 8 && usize::from(start) + usize::from(l4_len) <= frame.len();
        fits.then_some(Self { is_udp, is_v6, l2_len, l3_len, l4_len })
    }

    /// Asks the port, which has these offloads, to complete the checksum of the frame that begins in this
    /// buffer, and to cut the frame if `gso` is set.
    pub fn describe(self, offloads: &Offloads, gso: Option<Gso>, entry: &mut TxEntry) {
        entry.flags |= TX_CHECKSUM;
        entry.flags |= if self.is_udp { TX_IS_UDP } else { 0 };
        entry.flags |= if self.is_v6 { TX_IS_V6 } else { 0 };
        (entry.l2_len, entry.l3_len, entry.l4_len) = (self.l2_len, self.l3_len, self.l4_len);
        if let Some(gso) = gso {
            entry.flags |= TX_SUPER_FRAME;
            // Without this offload, the header keeps the checksum that the stack computed.
            entry.flags |= if offloads.has_ip_checksum() { TX_IP_CHECKSUM } else { 0 };
            entry.segment_bytes = gso.size;
        }
    }
}

/// Returns what was asked for a super-frame that begins in this buffer with these bytes.
pub(super) fn meta_of_super_frame(entry: &TxEntry, frame: &[u8]) -> TxMeta {
    /// CWR in the byte of the flags of a TCP header.
    const CWR: u8 = 0x80;
    const FLAGS_AT: u16 = 13;
    let start = entry.l2_len + entry.l3_len;
    let gso = Gso {
        kind: if entry.flags & TX_IS_V6 == 0 { GsoKind::Tcp4 } else { GsoKind::Tcp6 },
        size: entry.segment_bytes,
        header_len: start + entry.l4_len,
        ecn: frame.get(usize::from(start + FLAGS_AT)).is_some_and(|flags| flags & CWR != 0),
    };
    TxMeta { partial_checksum: Some((start, TCP_CHECKSUM_AT)), gso: Some(gso), ..TxMeta::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(tx_offloads: u64) -> PortInfo {
        PortInfo { tx_offloads, rx_offloads: u64::MAX, ..PortInfo::default() }
    }

    #[test]
    fn offloads_are_used_together() {
        let choose = |bits, is_wanted| Offloads::choose(&info(bits), is_wanted, 2048, 1500);
        let all = choose(u64::MAX, true);
        assert_eq!(all.tx, TX_TCP | TX_UDP | TX_IPV4 | TX_SEGMENTATION | TX_SEVERAL_BUFFERS);
        assert_eq!((all.rx, all.super_frame_bytes), (RX_TCP | RX_UDP | RX_HASH, GSO_BYTES_MAX));
        let without_udp = choose(!TX_UDP, true);
        assert_eq!((without_udp.tx, without_udp.super_frame_bytes), (0, 0));
        let checksum = choose(TX_TCP | TX_UDP | TX_SEGMENTATION, true);
        assert!(checksum.has_checksum() && checksum.super_frame_bytes == 0);
        let off = choose(u64::MAX, false);
        assert_eq!((off.rx, off.tx), (RX_HASH, 0));
        let few = PortInfo { tx_segments_max: 8, ..info(u64::MAX) };
        assert_eq!(Offloads::choose(&few, true, 2048, 1500).super_frame_bytes, 8 * 2048);
    }

    #[test]
    fn drivers_cut_what_they_can() {
        let mut port = Offloads::choose(&info(u64::MAX), true, 2048, 1500);
        let gso = Gso { kind: GsoKind::Tcp6, size: 1000, header_len: 66, ecn: true };
        assert!(port.cuts(gso, 60_000) && !port.cuts(gso, GSO_BYTES_MAX + 1));
        assert!(!port.cuts(Gso { kind: GsoKind::Udp, ..gso }, 60_000));
        for (size, is_cut) in [(255, false), (256, true), (9668, true), (9669, false)] {
            assert_eq!(port.cuts(Gso { size, ..gso }, 60_000), is_cut, "{size}");
        }
        port.segmentation = Segmentation::of("net_tap", 1066);
        let plain = Gso { kind: GsoKind::Tcp4, ecn: false, ..gso };
        assert!(port.cuts(plain, 64_066) && !port.cuts(plain, 64_067));
        assert!(!port.cuts(Gso { size: 1001, ..plain }, 5000), "1,067 bytes");
        assert!(!port.cuts(Gso { ecn: true, ..plain }, 5000) && !port.cuts(Gso { ecn: false, ..gso }, 5000));
    }

    #[test]
    fn headers_are_found() {
        let mut frame = vec![0; 100];
        frame[12..14].copy_from_slice(&[0x08, 0x00]);
        frame[46] = 0x80;
        let tcp = Headers { is_udp: false, is_v6: false, l2_len: 14, l3_len: 20, l4_len: 32 };
        assert_eq!(Headers::of(&frame, (34, 16)), Some(tcp));
        frame[12..18].copy_from_slice(&[0x81, 0x00, 0, 5, 0x86, 0xdd]);
        let udp = Headers { is_udp: true, is_v6: true, l2_len: 18, l3_len: 40, l4_len: 8 };
        assert_eq!(Headers::of(&frame, (58, 6)), Some(udp));
        for (start, offset) in [(58, 2), (12, 16), (95, 16), (99, 6), (u16::MAX, 16)] {
            assert_eq!(Headers::of(&frame, (start, offset)), None, "{start} {offset}");
        }
    }
}
