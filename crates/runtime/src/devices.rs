//! Opens devices from their configuration.

use crate::config::{Config, DeviceConfig, DeviceKind, OpenedSteering};
use crate::error::Error;
use core::time::Duration;
use ginnel_devices::af_xdp::{self, AfXdpConfig};
use ginnel_devices::dpdk::{self, DpdkConfig};
use ginnel_devices::memif::{MemifConfig, Role};
use ginnel_devices::{capture, faults, interface, memif, tap};
use ginnel_stack::device::Device;
use ginnel_stack::error::ConfigError;

/// How long a memif client waits for a server when it is opened, so that its first frames are not lost if the
/// server runs already.
const SERVER_WAIT: Duration = Duration::from_millis(200);

/// Opens the device itself, without layers around it. `stack_config` is the configuration that `config` is
/// part of.
pub(crate) fn open(config: &DeviceConfig, stack_config: &Config) -> Result<Device, Error> {
    match config.kind {
        DeviceKind::Memory => {
            let problem =
                format!("memory device \"{}\" has no other end: the program must supply it", config.name);
            Err(ConfigError::new("device", problem).into())
        }
        DeviceKind::Tap => {
            tap::open(&tap_config(config)).map_err(|e| Error::io(format!("device {}", config.name), e))
        }
        // A single shard may be connected to a peer with several queues.
        DeviceKind::Memif => open_memif(config, None)?
            .into_single_device()
            .map_err(|e| Error::io(format!("device {}", config.name), e)),
        DeviceKind::AfXdp => af_xdp::open(&af_xdp_config(config, stack_config, 0))
            .and_then(af_xdp::AfXdp::into_single_device)
            .map_err(|e| Error::io(format!("device {}", config.name), e)),
        DeviceKind::Dpdk => dpdk::open_single(&dpdk_config(config, stack_config, 0))
            .map_err(|e| Error::io(format!("device {}", config.name), e)),
    }
}

/// Checks what can be known of a device before it is opened. `queues` is the number of shards that serve it.
pub(crate) fn check(config: &DeviceConfig, queues: usize) -> Result<(), Error> {
    check_queue_count(config, queues)?;
    if config.kind == DeviceKind::AfXdp {
        let name = config.interface();
        interface::read(name)
            .map_err(|e| Error::io(format!("device {}: interface {name}", config.name), e))?;
    }
    Ok(())
}

/// Checks that a device of several shards has a queue for each of them, as far as the configuration says.
fn check_queue_count(config: &DeviceConfig, queues: usize) -> Result<(), ConfigError> {
    if queues == 1 {
        return Ok(());
    }
    let problem = |key, problem: String| {
        Err(ConfigError::new(key, format!("of \"{}\" needs {problem}, one for each shard", config.name)))
    };
    match (&config.memif, &config.af_xdp) {
        (Some(memif), _) if config.kind == DeviceKind::Memif && queues != usize::from(memif.queues) => {
            problem("device.memif", format!("queues={queues}"))
        }
        (_, Some(af_xdp)) if config.kind == DeviceKind::AfXdp => match &af_xdp.queues {
            Some(numbers) if numbers.len() != queues => {
                problem("device.af_xdp", format!("{queues} queues (queues=…)"))
            }
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Opens a memif; with several shards, it needs a queue for each of them.
fn open_memif(config: &DeviceConfig, shards: Option<usize>) -> Result<memif::Memif, Error> {
    check_queue_count(config, shards.unwrap_or(1))?;
    let device_config = config
        .memif
        .clone()
        .ok_or_else(|| ConfigError::new("device.memif", format!("of \"{}\" is missing", config.name)))?;
    let device_config = MemifConfig {
        mtu: config.mtu.map_or(device_config.mtu, |mtu| mtu as usize),
        mac: config.mac.map(|mac| mac.0),
        offload: config.offload,
        ..device_config
    };
    let memif = memif::open(&device_config).map_err(|e| Error::io(format!("device {}", config.name), e))?;
    if device_config.role == Role::Client {
        memif.link.wait_for(true, SERVER_WAIT);
    }
    Ok(memif)
}

/// Descriptors of the TAP devices of a stack, by the names of the devices. Another process may keep them: the
/// interfaces exist as long as one process has them open.
pub type KeptTaps = Vec<(String, tap::TapDescriptors)>;

/// Opens the descriptors of all TAP devices of a configuration.
///
/// # Errors
/// As of opening the devices.
pub fn open_taps(config: &Config) -> Result<KeptTaps, Error> {
    let taps = config.devices.iter().filter(|device| device.kind == DeviceKind::Tap);
    let open = |device: &DeviceConfig| {
        let queues = config.shards_of(device).len();
        let opened = tap::open_descriptors(&tap_config(device), queues);
        Ok((device.name.clone(), opened.map_err(|e| tap_error(device, queues > 1, &e))?))
    };
    taps.map(open).collect()
}

fn tap_error(config: &DeviceConfig, is_shared: bool, e: &std::io::Error) -> Error {
    let kind = e.kind();
    // The kernel's error for a second queue of an interface that was created for one.
    let hint = if is_shared && kind == std::io::ErrorKind::InvalidInput {
        " (several shards need an interface with several queues: ip tuntap add … multi_queue)"
    } else {
        ""
    };
    Error::io(format!("device {}", config.name), std::io::Error::new(kind, format!("{e}{hint}")))
}

/// Opens the device with a queue for each shard that serves it. `kept` are the descriptors of a TAP device
/// that is open already.
pub(crate) fn open_queues(
    config: &DeviceConfig,
    stack_config: &Config,
    queues: usize,
    kept: Option<tap::TapDescriptors>,
) -> Result<Vec<Device>, Error> {
    if let Some(kept) = kept {
        let tap = tap::open_with(&tap_config(config), kept);
        return Ok(tap_queues(tap.map_err(|e| tap_error(config, queues > 1, &e))?));
    }
    match config.kind {
        _ if queues == 1 => Ok(vec![open(config, stack_config)?]),
        DeviceKind::Memory => Ok(vec![open(config, stack_config)?]),
        DeviceKind::Tap => {
            let tap = tap::open_queues(&tap_config(config), queues);
            Ok(tap_queues(tap.map_err(|e| tap_error(config, true, &e))?))
        }
        DeviceKind::Memif => Ok(open_memif(config, Some(queues))?.queues),
        DeviceKind::AfXdp => {
            check_queue_count(config, queues)?;
            let device_config = af_xdp_config(config, stack_config, queues);
            let device =
                af_xdp::open(&device_config).map_err(|e| Error::io(format!("device {}", config.name), e))?;
            Ok(device.queues)
        }
        // The number of shards has at most two digits.
        DeviceKind::Dpdk => dpdk::open_queues(&dpdk_config(config, stack_config, queues as u16))
            .map_err(|e| Error::io(format!("device {}", config.name), e)),
    }
}

/// Returns the queues of a TAP device. Logs if the kernel does not deliver frames to their shards.
fn tap_queues(tap: tap::Tap) -> Vec<Device> {
    if let Some(error) = &tap.steering_error {
        tracing::info!(
            "TAP interface {}: frames may arrive at shards that do not own them, and are forwarded: the kernel refused the steering program: {error}",
            tap.name
        );
    }
    tap.queues
}

/// The stack's addresses at the interface are those of the links over the device; its ports include the
/// ephemeral ports of the stack.
fn af_xdp_config(config: &DeviceConfig, stack_config: &Config, queues: usize) -> AfXdpConfig {
    let links = stack_config.links.iter().filter(|link| link.device == config.name);
    let addresses = links
        .flat_map(|link| link.addresses.iter().map(|prefix| (prefix.address, link.vlan.unwrap_or_default())));
    let (tcp, network) = (&stack_config.tcp, &stack_config.network);
    AfXdpConfig {
        interface: config.interface().into(),
        options: config.af_xdp.clone().unwrap_or_default(),
        queue_count: queues,
        addresses: addresses.collect(),
        ephemeral: [
            (tcp.local_port_first, tcp.local_port_last),
            (network.udp_port_first, network.udp_port_last),
        ],
        opened_ports: (queues > 1 && stack_config.steering.opened == OpenedSteering::PortBits)
            .then_some(tcp.local_port_first..=tcp.local_port_last),
        mtu: config.mtu.map(|mtu| mtu as usize),
    }
}

/// Returns the configuration of a DPDK device. It names all ports of the stack, because EAL must know PCI
/// devices from the start.
fn dpdk_config(config: &DeviceConfig, stack_config: &Config, queues: u16) -> DpdkConfig {
    let ports = stack_config.devices.iter().filter(|device| device.kind == DeviceKind::Dpdk);
    let arguments_of = |device: &DeviceConfig| {
        let options = device.dpdk.clone().unwrap_or_default();
        options.device_arguments(device.interface())
    };
    DpdkConfig {
        port: config.interface().into(),
        options: config.dpdk.clone().unwrap_or_default(),
        queues,
        mtu: config.mtu.map(|mtu| mtu as usize),
        mac: config.mac.map(|mac| mac.0),
        offload: config.offload,
        all_ports: ports.map(arguments_of).collect(),
    }
}

fn tap_config(config: &DeviceConfig) -> tap::TapConfig {
    tap::TapConfig {
        name: Some(config.interface().into()),
        mtu: config.mtu.map(|mtu| mtu as usize),
        mac: config.mac.map(|mac| mac.0),
        kernel_addresses: config.kernel_addresses.iter().map(|p| (p.address, p.len)).collect(),
        without_offloads: !config.offload,
        ..tap::TapConfig::default()
    }
}

/// Puts the configured layers around a device. The capture is the outermost layer, so it has the frames that
/// the stack sends and receives: including frames that the faults drop on transmission, and excluding frames
/// that they drop on reception.
pub(crate) fn wrap(mut device: Device, config: &DeviceConfig) -> Result<Device, Error> {
    if let Some(spec) = &config.faults {
        device = faults::wrap(device, spec, config.faults_seed);
    }
    if let Some(path) = &config.capture {
        let ring = |files| capture::FileRing { file_bytes: config.capture_file_bytes, files };
        let capture = capture::CaptureConfig {
            interface: config.name.clone(),
            snaplen: config.capture_snaplen_bytes,
            filter: config.capture_filter.clone(),
            ring: config.capture_files.map(ring),
            ..capture::CaptureConfig::new(path)
        };
        device = capture::wrap(device, &capture)
            .map_err(|e| Error::io(format!("capture {}", path.display()), e))?;
    }
    Ok(device)
}
