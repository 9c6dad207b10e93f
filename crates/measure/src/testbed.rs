//! The medium between server and generator, and the configuration of each end.

use crate::machine::Cpus;
use crate::veth::{self, PREFIX_LEN, VethOffloads, network_of, run_setup_command};
use crate::{CoreLayout, MeasureError};
use ginnel::config::{AfXdpOptions, Config, DeviceConfig, DeviceKind};
use ginnel_apps::load::light::WorkerStack;
use ginnel_stack::tcp::config::TcpConfig;
use rustix::process::Pid;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// Capacity for all connections in TIME_WAIT.
pub const TIME_WAIT_MAX: u32 = 6_000_000;
/// Host parts of the generator's source addresses. Each has 32,768 ports: so many that no port is needed
/// again before its TIME_WAIT has ended.
const SOURCES: core::ops::RangeInclusive<u8> = 50..=249;

/// The medium that carries the frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A veth pair, with AF_XDP at the ends that are not the kernel's.
    Veth,
    /// A memif: shared memory between two processes. The kernel cannot use it.
    Memif,
    /// The kernel's loopback interface, with the generator on the kernel's TCP. It needs no privilege. A
    /// stack cannot use it.
    Loopback,
}

impl Medium {
    /// Returns the name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Veth => "veth (AF_XDP)",
            Self::Memif => "memif",
            Self::Loopback => "loopback",
        }
    }
}

/// The environment of a measurement.
#[derive(Clone, Debug)]
pub struct Testbed {
    /// The medium between both ends.
    pub medium: Medium,
    /// The CPUs of both ends.
    pub cpus: Cpus,
    /// Which core bears the receive work.
    pub layout: CoreLayout,
    /// True if the stack busy-polls as long as it does by default. Its idle time then does not show whether
    /// it was the bottleneck. Set it only if no NAPI thread has to run on the stack's core.
    pub polls: bool,
    /// The server's address.
    pub address: Ipv4Addr,
    /// A directory for sockets and configurations. It must outlive the value.
    pub folder: PathBuf,
    /// The process group of the programs; that of this process if there is none.
    pub process_group: Option<Pid>,
}

impl Testbed {
    /// Sets up the medium for the next server and discards the previous one. `kernel` says that the server
    /// uses the kernel's stack, which gets the server's address.
    ///
    /// # Errors
    /// If the medium cannot connect such a server, or the kernel does not permit the configuration.
    pub fn set_up(&self, kernel: bool) -> Result<(), MeasureError> {
        match self.medium {
            Medium::Veth => {
                veth::create(VethOffloads::Disabled, self.layout)?;
                if kernel { veth::assign_kernel_address(veth::server(), self.address, "") } else { Ok(()) }
            }
            Medium::Memif if kernel => Err(MeasureError::failed("the kernel does not support memif")),
            // The server removes a stale socket.
            Medium::Memif => Ok(()),
            Medium::Loopback if !kernel => Err(stack_on_loopback()),
            // The host's own addresses exist already.
            Medium::Loopback if self.address.is_loopback() => Ok(()),
            Medium::Loopback => {
                run_setup_command("ip link set lo up")?;
                // With the prefix, all source addresses are the kernel's own, too.
                let network = network_of(self.address);
                run_setup_command(&format!("ip address replace {}/{PREFIX_LEN} dev lo", self.address))?;
                run_setup_command(&format!(
                    "ip route replace local {network}/{PREFIX_LEN} dev lo table local congctl cubic"
                ))
            }
        }
    }

    /// Returns whether the generator uses the kernel's TCP.
    pub fn generator_is_kernel(&self) -> bool {
        self.medium == Medium::Loopback
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("wire")
    }

    /// Returns the options of `ginnel run` or `ginnel up` for a stack at the server's end, and writes the
    /// configuration file that they name. Unless `polls` is set, the shard sleeps while it is idle, because
    /// the program and the NAPI thread run on its core.
    ///
    /// # Errors
    /// If a stack cannot use the medium, or the file cannot be written.
    pub fn stack_options(&self) -> Result<Vec<String>, MeasureError> {
        self.options_of_end(veth::server(), "server", self.address)
    }

    /// Returns the options of `ginnel run` for a client in the generator's place, as
    /// [`Testbed::stack_options`] does for a server.
    pub fn client_options(&self) -> Result<Vec<String>, MeasureError> {
        self.options_of_end(veth::generator(), "client", self.client_address())
    }

    /// Returns the address of a client in the generator's place.
    pub fn client_address(&self) -> Ipv4Addr {
        self.with_host(*SOURCES.start())
    }

    fn options_of_end(
        &self,
        interface: &str,
        role: &str,
        address: Ipv4Addr,
    ) -> Result<Vec<String>, MeasureError> {
        let file = self.folder.join("stack.toml");
        fs::write(&file, format!("[tcp]\ntime_wait_max = {TIME_WAIT_MAX}\n"))?;
        let device = match self.medium {
            Medium::Veth => ["--device".into(), format!("af_xdp:{interface}")],
            Medium::Memif => ["--memif".into(), format!("socket={},role={role}", self.socket().display())],
            Medium::Loopback => return Err(stack_on_loopback()),
        };
        let mut options: Vec<String> = device.into();
        options.extend(["--config".into(), display(&file)]);
        options.extend(["--address".into(), format!("{address}/{PREFIX_LEN}")]);
        if !self.polls {
            options.extend(["--spin-us".into(), "0".into()]);
        }
        Ok(options)
    }

    /// Returns the configuration of a stack in this process at the server's end. It does not busy-poll,
    /// whatever `polls` says.
    pub fn server_config(&self) -> Result<Config, MeasureError> {
        self.config("", veth::server(), "server", self.address)
    }

    /// Returns the stack of the generator, or `None` if that is the kernel's.
    pub fn generator(&self) -> Result<Option<WorkerStack>, MeasureError> {
        if self.generator_is_kernel() {
            return Ok(None);
        }
        let config = self.config("take=all", veth::generator(), "client", self.client_address())?;
        Ok(Some(WorkerStack { config, device: None }))
    }

    /// Returns the generator's options for its source addresses, which exclude the server's address.
    pub fn source_options(&self) -> Vec<String> {
        let host = self.address.octets()[3];
        let (first, last) = (*SOURCES.start(), *SOURCES.end());
        let ranges = match host {
            _ if !SOURCES.contains(&host) => vec![(first, last)],
            _ => vec![(first, host.saturating_sub(1)), (host.saturating_add(1), last)],
        };
        let range = |(from, to): (u8, u8)| {
            (from <= to).then(|| format!("{}-{}", self.with_host(from), self.with_host(to)))
        };
        ranges.into_iter().filter_map(range).flat_map(|range| ["--source".into(), range]).collect()
    }

    fn with_host(&self, host: u8) -> Ipv4Addr {
        let [a, b, c, _] = self.address.octets();
        let taken = self.address.octets()[3] == host;
        // The server's address is replaced by the next one.
        Ipv4Addr::new(a, b, c, if taken { host + 1 } else { host })
    }

    fn config(
        &self,
        keys: &str,
        interface: &str,
        role: &str,
        address: Ipv4Addr,
    ) -> Result<Config, MeasureError> {
        let device = match self.medium {
            Medium::Veth => {
                let keys: AfXdpOptions = keys.parse().map_err(MeasureError::Failed)?;
                DeviceConfig { af_xdp: Some(keys), ..DeviceConfig::new(interface, DeviceKind::AfXdp) }
            }
            Medium::Memif => {
                let memif = format!("socket={},role={role}", self.socket().display());
                let memif = memif.parse().map_err(MeasureError::Failed)?;
                DeviceConfig { memif: Some(memif), ..DeviceConfig::new("memif", DeviceKind::Memif) }
            }
            Medium::Loopback => return Err(stack_on_loopback()),
        };
        let prefix = format!("{address}/{PREFIX_LEN}").parse().map_err(MeasureError::Failed)?;
        let mut config = Config {
            tcp: TcpConfig { time_wait_max: TIME_WAIT_MAX, ..TcpConfig::default() },
            ..Config::single(device, &[prefix], &[])
        };
        config.shard.spin_us = 0;
        Ok(config)
    }
}

fn stack_on_loopback() -> MeasureError {
    MeasureError::failed("a stack cannot use the kernel's loopback interface")
}

fn display(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn testbed(address: &str) -> Testbed {
        Testbed {
            medium: Medium::Veth,
            cpus: Cpus { server: 0, client: 1 },
            layout: CoreLayout::Charged,
            polls: false,
            address: address.parse().unwrap(),
            folder: std::env::temp_dir(),
            process_group: None,
        }
    }

    #[test]
    fn stack_on_loopback_is_refused() {
        let loopback = Testbed { medium: Medium::Loopback, ..testbed("127.0.0.1") };
        assert!(loopback.generator_is_kernel() && loopback.set_up(true).is_ok());
        assert!(loopback.set_up(false).is_err() && loopback.generator().unwrap().is_none());
        assert!(loopback.stack_options().is_err() && loopback.server_config().is_err());
    }

    #[test]
    fn source_addresses_exclude_the_server() {
        assert_eq!(testbed("10.77.0.1").source_options(), ["--source", "10.77.0.50-10.77.0.249"]);
        let around = testbed("10.77.0.60").source_options();
        assert_eq!(around, ["--source", "10.77.0.50-10.77.0.59", "--source", "10.77.0.61-10.77.0.249"]);
        assert_eq!(testbed("10.77.0.50").source_options(), ["--source", "10.77.0.51-10.77.0.249"]);
        assert_eq!(testbed("10.77.0.249").source_options(), ["--source", "10.77.0.50-10.77.0.248"]);
        for address in ["10.77.0.1", "10.77.0.50", "10.77.0.249"] {
            let config = testbed(address).generator().unwrap().unwrap().config;
            assert_ne!(config.links[0].addresses[0].address.to_string(), address);
        }
    }
}
