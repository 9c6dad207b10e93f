//! From a device's configuration to the device.

use crate::config::{DeviceConfig, DeviceKind};
use crate::error::Error;
use ginnel_devices::{capture, faults, tap};
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
            tap::open(&tap).map_err(|e| Error::io(format!("device {}", config.name), e))
        }
    }
}

/// Puts the configured layers around a device. The capture is the outermost, so it shows what the stack sends and receives: what faults
/// drop on the way out is in it, and what they drop on the way in is not.
pub(crate) fn wrap(mut device: Device, config: &DeviceConfig) -> Result<Device, Error> {
    if let Some(spec) = &config.faults {
        device = faults::wrap(device, spec, config.faults_seed);
    }
    if let Some(path) = &config.capture {
        let capture =
            capture::CaptureConfig { interface: config.name.clone(), ..capture::CaptureConfig::new(path) };
        device = capture::wrap(device, &capture)
            .map_err(|e| Error::io(format!("capture {}", path.display()), e))?;
    }
    Ok(device)
}
