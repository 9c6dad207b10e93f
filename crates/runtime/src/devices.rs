//! From a device's configuration to the device.

use crate::config::{DeviceConfig, DeviceKind};
use crate::error::Error;
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
        DeviceKind::Tap => Err(ConfigError::new("device", "tap").into()),
    }
}

/// Puts the configured layers around a device: the capture sees what the wire beyond the faults would see.
pub(crate) fn wrap(device: Device, config: &DeviceConfig) -> Result<Device, Error> {
    let _ = config;
    Ok(device)
}
