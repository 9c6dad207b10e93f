//! Opens a port, and makes a device of each of its queues.

use super::config::DpdkConfig;
use super::ffi::PortStats;
use super::port::Port;
use super::rss::RssReport;
use super::rx::DpdkRx;
use super::tx::DpdkTx;
use crate::ethtool;
use crate::joined;
use crate::partial_checksums::PartialChecksumCheck;
use ginnel_stack::device::Device;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counters of frames.
#[derive(Debug, Default)]
pub struct DpdkStats {
    /// Received frames that spanned several buffers, and so were longer than the MTU allows.
    pub rx_dropped: AtomicU64,
    /// Received frames whose checksum was partial and that were accepted (`partial_checksums`).
    pub rx_partial_checksums: AtomicU64,
    /// Frames to send that were malformed, or segments without a free buffer.
    pub tx_dropped: AtomicU64,
    /// Frames to send that the driver refuses, or does not take for a second.
    pub tx_refused: AtomicU64,
}

impl DpdkStats {
    /// Reports these counters, and those of the driver.
    pub(super) fn report(&self, port: &PortStats, report: &mut dyn FnMut(&'static str, u64)) {
        let Self { rx_dropped, rx_partial_checksums, tx_dropped, tx_refused } = self;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        for (name, count) in [
            ("dpdk_rx_missed", port.missed),
            ("dpdk_rx_no_buffer", port.no_buffer),
            ("dpdk_rx_errors", port.rx_errors),
            ("dpdk_rx_dropped", load(rx_dropped)),
            ("dpdk_rx_partial_checksums", load(rx_partial_checksums)),
            ("dpdk_tx_errors", port.tx_errors),
            ("dpdk_tx_dropped", load(tx_dropped)),
            ("dpdk_tx_refused", load(tx_refused)),
        ] {
            report(name, count);
        }
    }
}

/// An open DPDK device.
pub struct Dpdk {
    /// One device for each queue.
    pub queues: Vec<Device>,
    /// Name of the driver.
    pub driver: String,
    /// How the port spreads flows; `None` if it has one queue or no hash.
    pub rss: Option<RssReport>,
    /// Counters of all queues.
    pub stats: Arc<DpdkStats>,
    /// Copies of the descriptors that the queues sleep on.
    wakers: Vec<OwnedFd>,
}

impl Dpdk {
    /// Joins all queues to one device, for a single shard. The device sends on the first queue.
    ///
    /// # Errors
    /// If the process has no descriptor left for the epoll set.
    pub fn into_single_device(self) -> io::Result<Device> {
        joined::join(self.queues, self.wakers.iter().map(|waker| waker.as_fd()))
    }
}

/// Starts EAL unless it runs, and opens a port.
///
/// # Errors
/// `InvalidInput` for a value outside its range, `PermissionDenied` if the process lacks a permission.
/// Otherwise the error of DPDK, with its cause and the remedy.
pub fn open(config: &DpdkConfig) -> io::Result<Dpdk> {
    let name = config.port.as_str();
    let queues = config.validate().map_err(|problem| io::Error::new(io::ErrorKind::InvalidInput, problem))?;
    let in_context = |error: io::Error| io::Error::new(error.kind(), format!("DPDK port {name}: {error}"));
    open_checked(config, queues).map_err(in_context)
}

fn open_checked(config: &DpdkConfig, queues: u16) -> io::Result<Dpdk> {
    let port = Arc::new(Port::open(config, queues)?);
    let interface = config.driver_argument("iface");
    let driver = interface.and_then(ethtool::driver);
    let interval = Duration::from_micros(config.options.poll_us.into());
    let (mut devices, mut wakers) = (Vec::new(), Vec::new());
    for queue in 0..queues {
        let choice = config.options.partial_checksums;
        let check = match interface {
            Some(_) => PartialChecksumCheck::new(choice, driver.as_deref()),
            None => PartialChecksumCheck::without_interface(choice),
        };
        let rx = DpdkRx::new(port.clone(), queue, interval, check)?;
        wakers.push(rx.clone_wake_fd()?);
        devices.push(Device { rx: Box::new(rx), tx: Box::new(DpdkTx::new(port.clone(), queue)) });
    }
    port.link.check();
    let capabilities = port.capabilities;
    tracing::info!(
        port = config.port,
        driver = port.driver,
        queues,
        mtu = capabilities.mtu,
        checksums = capabilities.tx_checksum,
        super_frame_bytes = capabilities.gso_bytes_max,
        "DPDK"
    );
    if queues > 1 && !port.rss.is_some_and(|rss| rss.is_exact()) {
        tracing::info!(
            port = config.port,
            "frames may arrive at shards that do not own them, and are forwarded: the port does not spread flows by the stack's hash"
        );
    }
    Ok(Dpdk {
        queues: devices,
        driver: port.driver.clone(),
        rss: port.rss,
        stats: port.stats.clone(),
        wakers,
    })
}
