//! The Toeplitz hash by which network adapters distribute flows (Microsoft, "RSS hashing types").

use core::net::{IpAddr, SocketAddr};

/// Microsoft's key, the default of most adapters, so that their hashes agree with those computed here.
pub const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0,
    0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42,
    0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// A value by which two ends verify that they compute the same hash: the hash under [`KEY`] of a flow of
/// Microsoft's verification suite, 3ffe:2501:200:1fff::7 port 2794 to 3ffe:2501:200:3::1 port 1766. Another
/// key or hash function yields another value.
pub const KEY_CHECK: u32 = 0x4020_7d3d;

/// Two IPv6 addresses and two ports.
const INPUT_BYTES_MAX: usize = 36;

/// The hash function under one key. The hash is linear, so the contribution of each half byte is looked up:
/// 72 tables of 16 words, of which an IPv4 flow uses 1.5 KiB.
pub struct Toeplitz {
    tables: Box<[[u32; 16]; 2 * INPUT_BYTES_MAX]>,
}

impl Toeplitz {
    /// Computes the tables.
    pub fn new(key: &[u8; 40]) -> Self {
        let mut tables = Box::new([[0; 16]; 2 * INPUT_BYTES_MAX]);
        for (at, table) in tables.iter_mut().enumerate() {
            for (value, entry) in table.iter_mut().enumerate() {
                // Bit 3 of a half byte is the first on the wire.
                let set = (0..4).filter(|bit| value & (8 >> bit) != 0);
                *entry = set.fold(0, |hash, bit| hash ^ key_window(key, 4 * at + bit));
            }
        }
        Self { tables }
    }

    /// Returns the contribution of bytes that begin at byte `FROM` of the input. Their number is a constant,
    /// so that the compiler unrolls the loop and needs no checks of bounds.
    #[inline(always)]
    fn part<const FROM: usize, const BYTES: usize>(&self, bytes: [u8; BYTES]) -> u32 {
        let mut hash = 0;
        for (at, byte) in bytes.into_iter().enumerate() {
            let at = 2 * (FROM + at);
            hash ^= self.tables[at][usize::from(byte >> 4)] ^ self.tables[at + 1][usize::from(byte & 15)];
        }
        hash
    }

    /// Returns the hash of a packet's addresses and, if given, of its ports, source before destination. The
    /// reverse direction has another hash. Addresses of different families, which no packet has, yield a
    /// hash, too.
    #[inline]
    pub fn hash(&self, src: IpAddr, dst: IpAddr, ports: Option<(u16, u16)>) -> u32 {
        let with_ports = ports.map(|(src, dst)| (u32::from(src) << 16 | u32::from(dst)).to_be_bytes());
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let addresses = self.part::<0, 4>(src.octets()) ^ self.part::<4, 4>(dst.octets());
                addresses ^ with_ports.map_or(0, |ports| self.part::<8, 4>(ports))
            }
            _ => self.hash_wide(src, dst, with_ports),
        }
    }

    /// Returns the hash of packets from `remote` to port 0 of `local`: what the flow contributes without its
    /// local port.
    #[inline]
    pub fn hash_without_local_port(&self, remote: SocketAddr, local: IpAddr) -> u32 {
        match (remote, local) {
            (SocketAddr::V4(remote), IpAddr::V4(local)) => {
                self.part::<0, 4>(remote.ip().octets())
                    ^ self.part::<4, 4>(local.octets())
                    ^ self.part::<8, 2>(remote.port().to_be_bytes())
            }
            _ => self.hash(remote.ip(), local, Some((remote.port(), 0))),
        }
    }

    #[inline(never)]
    fn hash_wide(&self, src: IpAddr, dst: IpAddr, ports: Option<[u8; 4]>) -> u32 {
        let octets = |address| match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        let addresses = self.part::<0, 16>(octets(src)) ^ self.part::<16, 16>(octets(dst));
        addresses ^ ports.map_or(0, |ports| self.part::<32, 4>(ports))
    }
}

/// Returns the 32 bits of the key from bit `at` on.
fn key_window(key: &[u8; 40], at: usize) -> u32 {
    let byte = |i: usize| u64::from(key.get(at / 8 + i).copied().unwrap_or(0));
    let wide = byte(0) << 32 | byte(1) << 24 | byte(2) << 16 | byte(3) << 8 | byte(4);
    // The cast drops the bits in front of the window.
    (wide >> (8 - at % 8)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verification suite of Microsoft's "Verifying the RSS hash calculation": destination, source, the
    /// hash of the addresses, and the hash with TCP ports.
    #[test]
    fn microsoft_verification_suite_passes() {
        let suite = [
            ("161.142.100.80", 1766, "66.9.149.187", 2794, 0x323e_8fc2, 0x51cc_c178),
            ("65.69.140.83", 4739, "199.92.111.2", 14230, 0xd718_262a, 0xc626_b0ea),
            ("12.22.207.184", 38024, "24.19.198.95", 12898, 0xd2d0_a5de, 0x5c2b_394a),
            ("209.142.163.6", 2217, "38.27.205.30", 48228, 0x8298_9176, 0xafc7_327f),
            ("202.188.127.2", 1303, "153.39.163.191", 44251, 0x5d18_09c5, 0x10e8_28a2),
            ("3ffe:2501:200:3::1", 1766, "3ffe:2501:200:1fff::7", 2794, 0x2cc1_8cd5, 0x4020_7d3d),
            ("ff02::1", 4739, "3ffe:501:8::260:97ff:fe40:efab", 14230, 0x0f0c_461c, 0xdde5_1bbf),
            (
                "fe80::200:f8ff:fe21:67cf",
                38024,
                "3ffe:1900:4545:3:200:f8ff:fe21:67cf",
                44251,
                0x4b61_e985,
                0x02d1_feef,
            ),
        ];
        let toeplitz = Toeplitz::new(&KEY);
        for (dst, dst_port, src, src_port, addresses, tcp) in suite {
            let (dst, src): (IpAddr, IpAddr) = (dst.parse().unwrap(), src.parse().unwrap());
            assert_eq!(toeplitz.hash(src, dst, None), addresses, "{src} to {dst}");
            assert_eq!(toeplitz.hash(src, dst, Some((src_port, dst_port))), tcp, "{src} to {dst} with ports");
        }
    }

    #[test]
    fn key_check_distinguishes_keys() {
        let [src, dst] = ["3ffe:2501:200:1fff::7", "3ffe:2501:200:3::1"].map(|text| text.parse().unwrap());
        let check = |key: &[u8; 40]| Toeplitz::new(key).hash(src, dst, Some((2794, 1766)));
        assert_eq!(check(&KEY), KEY_CHECK);
        // A key with a symmetric hash, as some adapters have it, and other keys.
        for other in [[0x6d, 0x5a].repeat(20), vec![0; 40], (0..40).collect()] {
            assert_ne!(check(&other.try_into().unwrap()), KEY_CHECK);
        }
    }
}
