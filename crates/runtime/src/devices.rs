//! From a device's configuration to the device.

use crate::config::{DeviceConfig, DeviceKind};
use crate::error::Error;
use ginnel_devices::{faults, tap};
use ginnel_stack::device::Device;
use ginnel_stack::error::ConfigError;

/// Opens the device itself, without the layers around it.
pub(crate) fn open(config: &DeviceConfig) -> Result<Device, Error> {
    match config.kind {
        DeviceKind::Memory => {
            let problem =
                format!("memory device \"{}\" has no other end: the program must supply it", config.name);
            Err(ConfigError::new("device", problem).into())
        }
        DeviceKind::Tap => {
            let tap = tap::TapConfig {
                name: Some(config.interface().into()),
                mtu: config.mtu.map(|mtu| mtu as usize),
                mac: config.mac.map(|mac| mac.0),
                kernel_addresses: config.kernel_addresses.iter().map(|p| (p.address, p.len)).collect(),
                without_offloads: !config.offload,
                ..tap::TapConfig::default()
            };
            tap::open(&tap).map_err(|e| Error::io(format!("tap {}", config.interface()), e))
        }
    }
}

/// Puts the configured layers around a device. The capture is the innermost but for the device itself, so it shows what crosses the
/// wire: what faults drop on the way out is not in it, and what they drop on the way in is.
pub(crate) fn wrap(mut device: Device, config: &DeviceConfig) -> Result<Device, Error> {
    if let Some(spec) = &config.faults {
        device = faults::wrap(device, spec, config.faults_seed);
    }
    Ok(device)
}
