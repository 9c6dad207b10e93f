//! A device over a port of DPDK, if the feature `dpdk` is on.
//!
//! DPDK's drivers run inside the process and poll their adapters. The library is Debian's, linked
//! dynamically; its headers are inline functions, so a shim in C makes one call for each burst.
//!
//! ```text
//! config       configuration, and its text form (also without the feature)
//! eal          the environment abstraction layer, which a process starts once (signals: its threads' masks)
//! port         a port, which all queues share
//! rss          key and indirection table, set and read back
//! offload      checksums and super-frames
//! host         interfaces of the kernel below ports (membership: what their adapters receive)
//! sizes        sizes of buffers and rings
//! link         links that go down, devices that are removed
//! rx, tx       the halves of the device
//! timer        sleeping without interrupts
//! thread       threads that use ports
//! log, errors  what DPDK logs, and explanations of its errors
//! ffi, shim.c  the calls
//! ```

mod config;

#[cfg(feature = "dpdk")]
mod eal;
#[cfg(feature = "dpdk")]
mod errors;
#[cfg(feature = "dpdk")]
mod ffi;
#[cfg(feature = "dpdk")]
mod host;
#[cfg(feature = "dpdk")]
mod link;
#[cfg(feature = "dpdk")]
mod log;
#[cfg(feature = "dpdk")]
mod membership;
#[cfg(feature = "dpdk")]
mod offload;
#[cfg(feature = "dpdk")]
mod open;
#[cfg(feature = "dpdk")]
mod port;
#[cfg(feature = "dpdk")]
mod rss;
#[cfg(feature = "dpdk")]
mod rx;
#[cfg(feature = "dpdk")]
mod signals;
#[cfg(feature = "dpdk")]
mod sizes;
#[cfg(all(test, not(loom), feature = "dpdk"))]
mod tests;
#[cfg(feature = "dpdk")]
mod thread;
#[cfg(feature = "dpdk")]
mod timer;
#[cfg(feature = "dpdk")]
mod tx;

pub use crate::partial_checksums::PartialChecksums;
pub use config::{DpdkConfig, DpdkOptions, EalOptions, HugePages, QUEUES_MAX};
#[cfg(feature = "dpdk")]
pub use open::{Dpdk, DpdkStats, open};
#[cfg(feature = "dpdk")]
pub use rss::RssReport;

use ginnel_stack::device::Device;
use std::io;

/// Opens the queues of a port: one device for each.
///
/// # Errors
/// `InvalidInput` for a value outside its range, `PermissionDenied` if the process lacks a permission,
/// `Unsupported` without the feature `dpdk`. Otherwise the error of DPDK, with its cause and the remedy.
#[cfg(feature = "dpdk")]
pub fn open_queues(config: &DpdkConfig) -> io::Result<Vec<Device>> {
    Ok(open(config)?.queues)
}

/// Opens the queues of a port as one device, for a single shard.
///
/// # Errors
/// As of [`open_queues`].
#[cfg(feature = "dpdk")]
pub fn open_single(config: &DpdkConfig) -> io::Result<Device> {
    open(config)?.into_single_device()
}

/// Returns the error of a build without DPDK, after the checks of the configuration.
///
/// # Errors
/// `InvalidInput` for a value outside its range, otherwise `Unsupported`.
#[cfg(not(feature = "dpdk"))]
pub fn open_queues(config: &DpdkConfig) -> io::Result<Vec<Device>> {
    config.validate().map_err(|problem| io::Error::new(io::ErrorKind::InvalidInput, problem))?;
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "this build of Ginnel has no DPDK: install libdpdk-dev, and build with \"--features dpdk\"",
    ))
}

/// As [`open_queues`].
///
/// # Errors
/// As of [`open_queues`].
#[cfg(not(feature = "dpdk"))]
pub fn open_single(config: &DpdkConfig) -> io::Result<Device> {
    open_queues(config)?.pop().ok_or_else(|| io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, not(loom), not(feature = "dpdk")))]
mod tests_without_dpdk {
    use super::*;

    #[test]
    fn build_without_dpdk_says_so() {
        let config = |port: &str| DpdkConfig { port: port.into(), ..DpdkConfig::default() };
        for result in
            [open_queues(&config("net_null0")).map(drop), open_single(&config("net_null0")).map(drop)]
        {
            let error = result.expect_err("no DPDK");
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
            assert!(error.to_string().contains("this build of Ginnel has no DPDK"), "{error}");
        }
        let error = open_queues(&config("net nothing")).map(drop).expect_err("no name");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
