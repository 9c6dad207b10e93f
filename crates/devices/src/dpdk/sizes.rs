//! Sizes of a port: its MTU, its buffers and their number.

use super::config::DpdkConfig;
use super::ffi::PortInfo;
use crate::interface::InterfaceInfo;
use std::io;

/// Bytes of a frame besides the packet, as drivers of adapters count them: an Ethernet header, two VLAN tags,
/// and the frame check sequence.
const LINK_BYTES: usize = 14 + 8 + 4;
/// Drivers round the size of a buffer down to a multiple of up to this number of bytes.
const BUFFER_UNIT_BYTES: usize = 1024;
/// Smallest size of the frame in a buffer: some adapters take no less.
const BUFFER_BYTES_MIN: usize = 2048;
/// Largest MTU in bytes: a buffer holds a whole frame.
const MTU_MAX: usize = 16_000;
/// Buffers of a queue unless its rings need more.
const BUFFERS_DEFAULT: u32 = 8192;
/// Buffers of a queue that are in no ring of the adapter: those in the cache of a thread, those lent to the
/// stack, those whose frames wait for the adapter, and those reserved for the next frames.
const BUFFERS_OUTSIDE: u32 = 1024;
/// Assumed bytes of a buffer besides its frame: its description, and headroom.
const BUFFER_OVERHEAD_BYTES: usize = 448;
/// The driver whose pool is a UMEM, each buffer of which has a power of two of bytes and fits into a page.
const AF_XDP: &str = "net_af_xdp";
/// Descriptors that `net_af_xdp` fills in each direction, whatever the rings have.
const AF_XDP_RING: u16 = 2048;
/// Bytes of a frame besides the packet, as `net_af_xdp` counts them: an Ethernet header, and the frame check
/// sequence.
const AF_XDP_LINK_BYTES: usize = 14 + 4;
/// Bytes that the kernel leaves free in front of a received frame (`XDP_PACKET_HEADROOM`).
const AF_XDP_HEADROOM_BYTES: usize = 256;
/// Bytes of a buffer of `net_af_xdp` besides the frame and the headroom of the kernel.
const AF_XDP_OVERHEAD_BYTES: usize = 320;

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

/// Returns the MTU of the configuration or of the port, in bytes. A port over an interface of the host has at
/// most the MTU of the interface, because the kernel skips longer frames.
///
/// # Errors
/// The configured MTU is outside the range that the port can have.
pub(super) fn mtu(
    config: &DpdkConfig,
    info: &PortInfo,
    interface: Option<&InterfaceInfo>,
) -> io::Result<usize> {
    let of_port = match info.mtu_max {
        0 => MTU_MAX,
        most => MTU_MAX.min(most.into()),
    };
    let most = of_port.min(interface.map_or(MTU_MAX, |interface| interface.mtu));
    let least = usize::from(info.mtu_min).max(68);
    match config.mtu {
        None => Ok(usize::from(info.mtu).min(most)),
        Some(mtu) if (least..=most).contains(&mtu) => Ok(mtu),
        Some(mtu) if mtu > most && most < of_port => Err(invalid(format!(
            "the MTU {mtu} is above {most}, which the interface below the port has (\"ip link set … mtu {mtu}\" changes it)"
        ))),
        Some(mtu) => {
            Err(invalid(format!("the MTU {mtu} is outside {least} to {most}, which the port can have")))
        }
    }
}

/// Returns whether the pool of a queue is a UMEM.
pub(super) fn is_umem(driver: &str) -> bool {
    driver == AF_XDP
}

/// Returns the bytes of a frame that each buffer holds, so that no driver spreads a frame over two buffers.
pub(super) fn buffer_bytes(mtu: usize, driver: &str) -> usize {
    let bytes = if is_umem(driver) {
        mtu + AF_XDP_LINK_BYTES + AF_XDP_HEADROOM_BYTES
    } else {
        (mtu + LINK_BYTES).next_multiple_of(BUFFER_UNIT_BYTES)
    };
    bytes.max(BUFFER_BYTES_MIN)
}

/// Returns the approximate MiB of all buffers, each of which holds `buffer_bytes` of a frame.
pub(super) fn buffers_mib(buffer_bytes: usize, driver: &str, queues: u16, buffers: u32) -> u64 {
    let bytes = if is_umem(driver) {
        (buffer_bytes + AF_XDP_OVERHEAD_BYTES).next_power_of_two()
    } else {
        buffer_bytes + BUFFER_OVERHEAD_BYTES
    };
    (u64::from(queues) * u64::from(buffers) * bytes as u64) >> 20
}

/// Returns the number of buffers of a queue whose driver has rings of these sizes.
///
/// # Errors
/// The configured number is too small: an adapter would have all buffers, and nothing could be sent.
pub(super) fn buffers(configured: Option<u32>, driver: &str, (rx, tx): (u16, u16)) -> io::Result<u32> {
    let filled = |ring: u16| u32::from(if is_umem(driver) { ring.max(AF_XDP_RING) } else { ring });
    let least = filled(rx) + filled(tx) + BUFFERS_OUTSIDE;
    match configured {
        None => Ok(BUFFERS_DEFAULT.max(least)),
        Some(buffers) if buffers >= least => Ok(buffers),
        Some(buffers) => Err(invalid(format!(
            "buffers: {buffers} are too few for rings of {rx} and {tx} descriptors: set buffers to {least} or more, or a smaller ring"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ixgbe rounds a buffer down to 1,024 bytes, and i40e to 128. Both count two VLAN tags.
    #[test]
    fn buffer_holds_a_frame_after_rounding() {
        for (mtu, bytes) in
            [(68, 2048), (1500, 2048), (2022, 2048), (2023, 3072), (9000, 9216), (16_000, 16_384)]
        {
            assert_eq!(buffer_bytes(mtu, "net_ixgbe"), bytes, "{mtu}");
        }
    }

    /// The kernel takes no buffer of more than a page. 3,502 is the largest MTU of net_af_xdp for pages of
    /// 4 KiB.
    #[test]
    fn buffer_of_a_umem_fits_into_a_page() {
        for (mtu, bytes) in [(68, 2048), (1500, 2048), (3502, 3776)] {
            assert_eq!(buffer_bytes(mtu, AF_XDP), bytes, "{mtu}");
            assert_eq!(buffers_mib(bytes, AF_XDP, 2, 8192), 64, "{mtu}");
        }
        assert_eq!(buffers_mib(2048, "net_ixgbe", 2, 8192), 39);
    }

    #[test]
    fn buffers_suffice_for_both_rings() {
        let choose = |configured, ring| buffers(configured, "net_ixgbe", (ring, ring));
        assert_eq!(choose(None, 1024).expect("the default"), 8192);
        assert_eq!(choose(None, 4096).expect("more than the default"), 9216);
        assert_eq!(choose(None, 32_768).expect("the largest ring"), 66_560);
        assert_eq!(choose(Some(3072), 1024).expect("the smallest number"), 3072);
        let error = choose(Some(3071), 1024).expect_err("too few").to_string();
        assert!(error.starts_with("buffers: 3071 are too few for rings of 1024 and 1024"), "{error}");
        assert!(error.ends_with("set buffers to 3072 or more, or a smaller ring"), "{error}");
        assert!(buffers(Some(5119), "net_af_xdp", (64, 64)).is_err());
        assert_eq!(buffers(Some(5120), "net_af_xdp", (64, 64)).expect("its own rings"), 5120);
    }

    #[test]
    fn interface_bounds_the_mtu() {
        let info = PortInfo { mtu: 1500, mtu_min: 68, mtu_max: 65_535, ..PortInfo::default() };
        let interface = |mtu| InterfaceInfo { index: 1, up: true, mtu, mac: [0; 6], addresses: Vec::new() };
        let choose = |configured: Option<usize>, below: Option<usize>| {
            let config = DpdkConfig { mtu: configured, ..DpdkConfig::default() };
            mtu(&config, &info, below.map(interface).as_ref()).map_err(|error| error.to_string())
        };
        assert_eq!((choose(None, None), choose(None, Some(1420))), (Ok(1500), Ok(1420)));
        assert_eq!((choose(None, Some(9000)), choose(Some(1400), Some(1420))), (Ok(1500), Ok(1400)));
        assert_eq!(choose(Some(9000), None), Ok(9000));
        let error = choose(Some(1421), Some(1420)).expect_err("above the interface");
        assert!(error.starts_with("the MTU 1421 is above 1420, which the interface"), "{error}");
        for wrong in [67, 16_001] {
            let error = choose(Some(wrong), None).expect_err("outside");
            assert_eq!(error, format!("the MTU {wrong} is outside 68 to 16000, which the port can have"));
        }
    }
}
