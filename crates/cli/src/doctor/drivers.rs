//! Facts about drivers.

/// How a driver supports AF_XDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpSupport {
    /// The driver passes frames without a copy.
    ZeroCopy,
    /// The redirect program runs in the driver, and the kernel copies the frames.
    Copy,
    /// The redirect program runs after the driver, in generic mode.
    Generic,
}

/// A driver.
#[derive(Clone, Copy, Debug)]
pub struct KnownDriver {
    pub name: &'static str,
    pub support: XdpSupport,
    /// The driver loads an XDP program only if at most half of the possible queues are in use, because it
    /// takes as many for sending.
    pub needs_spare_queues: bool,
}

const fn driver(name: &'static str, support: XdpSupport) -> KnownDriver {
    KnownDriver { name, support, needs_spare_queues: false }
}

/// Drivers of the kernel's tree. Support depends on its release, too.
const DRIVERS: &[KnownDriver] = &[
    driver("ixgbe", XdpSupport::ZeroCopy),
    driver("i40e", XdpSupport::ZeroCopy),
    driver("ice", XdpSupport::ZeroCopy),
    driver("igb", XdpSupport::ZeroCopy),
    driver("igc", XdpSupport::ZeroCopy),
    driver("mlx5_core", XdpSupport::ZeroCopy),
    driver("stmmac", XdpSupport::ZeroCopy),
    driver("nfp", XdpSupport::ZeroCopy),
    driver("gve", XdpSupport::ZeroCopy),
    driver("virtio_net", XdpSupport::ZeroCopy),
    KnownDriver { needs_spare_queues: true, ..driver("ena", XdpSupport::Copy) },
    driver("bnxt_en", XdpSupport::Copy),
    driver("mlx4_en", XdpSupport::Copy),
    driver("sfc", XdpSupport::Copy),
    driver("qede", XdpSupport::Copy),
    driver("hv_netvsc", XdpSupport::Copy),
    driver("mana", XdpSupport::Copy),
    driver("vmxnet3", XdpSupport::Copy),
    driver("veth", XdpSupport::Copy),
    driver("tun", XdpSupport::Copy),
    driver("ixgbevf", XdpSupport::Copy),
    driver("e1000", XdpSupport::Generic),
    driver("e1000e", XdpSupport::Generic),
    driver("r8169", XdpSupport::Generic),
    driver("tg3", XdpSupport::Generic),
    driver("iavf", XdpSupport::Generic),
    driver("bridge", XdpSupport::Generic),
    driver("dummy", XdpSupport::Generic),
];

/// Returns the facts about a driver, or `None` if it is not known.
pub fn find(name: &str) -> Option<&'static KnownDriver> {
    DRIVERS.iter().find(|driver| driver.name == name)
}
