//! Interfaces of the kernel below the ports of `net_af_packet` and `net_af_xdp`. They belong to the host, so
//! their MAC address and MTU are left alone.

use super::config::DpdkConfig;
use crate::interface::{self, InterfaceInfo};
use std::io;

/// Drivers over an interface, which the argument `iface` names.
const DRIVERS: [&str; 2] = ["net_af_packet", "net_af_xdp"];

/// Returns whether the driver of a port uses an interface of the host.
pub(super) fn is_used(config: &DpdkConfig) -> bool {
    DRIVERS.iter().any(|driver| config.port.starts_with(driver))
}

/// Returns the name of the interface below a port.
pub(super) fn name(config: &DpdkConfig) -> Option<&str> {
    config.driver_argument("iface").filter(|_| is_used(config))
}

/// Reads the interface below a port, if its driver uses one.
///
/// # Errors
/// No interface is named, it does not exist, or it is down.
pub(super) fn read(config: &DpdkConfig) -> io::Result<Option<InterfaceInfo>> {
    if !is_used(config) {
        return Ok(None);
    }
    let Some(name) = name(config) else {
        let problem = "the driver needs the name of an interface, as in args=iface=eth0";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    };
    let info = interface::read(name).map_err(|error| match error.raw_os_error() {
        Some(libc::ENODEV) => {
            let problem = format!("the interface {name} does not exist (\"ip link\" lists interfaces)");
            io::Error::new(io::ErrorKind::NotFound, problem)
        }
        _ => error,
    })?;
    if !info.up {
        let problem = format!("the interface {name} is down: set it up with \"ip link set {name} up\"");
        return Err(io::Error::new(io::ErrorKind::NetworkDown, problem));
    }
    Ok(Some(info))
}
