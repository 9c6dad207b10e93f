//! A veth pair in the namespace of the measurement, with a server at one end and a generator at the other. By
//! default the kernel receives on the core of the sender; with threaded NAPI it receives in threads, which
//! can be pinned to the core of the receiver.

use crate::{CoreLayout, MeasureError};
use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::OnceLock;

/// Returns the name of the server's interface.
pub fn server() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| interface_name('s'))
}

/// Returns the name of the generator's interface.
pub fn generator() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| interface_name('g'))
}

/// Returns an interface name that no other measurement on this machine uses: NAPI threads are named after
/// their interface and visible from every network namespace. It is short because older kernels truncate
/// thread names to 15 bytes; with the longest process ID the dash is byte 14.
fn interface_name(end: char) -> String {
    format!("{end}{}", std::process::id())
}

/// Prefix length of the network.
pub const PREFIX_LEN: u8 = 24;

/// Returns the address of the network of [`PREFIX_LEN`] bits that an address is in.
pub fn network_of(address: Ipv4Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits() & u32::MAX << (32 - u32::from(PREFIX_LEN)))
}

/// Runs a command that configures the network.
///
/// # Errors
/// [`MeasureError::Skipped`] if the program is missing, [`MeasureError::Failed`] if it fails.
pub fn run_setup_command(command: &str) -> Result<(), MeasureError> {
    let mut words = command.split_whitespace();
    let program = words.next().unwrap_or_default();
    let output = Command::new(program).args(words).output().map_err(|e| {
        MeasureError::Skipped(match e.kind() {
            ErrorKind::NotFound => format!("{program} is not installed"),
            _ => format!("{command}: {e}"),
        })
    })?;
    if output.status.success() {
        return Ok(());
    }
    Err(MeasureError::Failed(format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// State of the kernel's transmit offloads on the veth pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VethOffloads {
    /// Disabled, if a user-space stack is at one end: it needs segmented frames with complete checksums.
    Disabled,
    /// Enabled, if both ends are the kernel.
    Enabled,
}

/// Deletes the veth pair if it exists, and creates it.
///
/// # Errors
/// If a required program is missing, or the kernel does not permit the configuration.
pub fn create(ends: VethOffloads, layout: CoreLayout) -> Result<(), MeasureError> {
    let (server, generator) = (server(), generator());
    // The first time there is no interface to delete.
    let _ = run_setup_command(&format!("ip link del {server}"));
    // Clients in the server's namespace use the loopback interface.
    run_setup_command("ip link set lo up")?;
    run_setup_command(&format!("ip link add {server} type veth peer name {generator}"))?;
    if fs::metadata(format!("/sys/class/net/{server}")).is_err() {
        // Interfaces of a namespace are visible only in a sysfs mounted inside of it.
        run_setup_command("mount -t sysfs sysfs /sys")?;
    }
    for interface in [server, generator] {
        fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"), "1")?;
        let offloads = match ends {
            VethOffloads::Disabled => "tx off tso off gso off",
            VethOffloads::Enabled => "tx on tso on gso on",
        };
        // With GRO, veth receives like the driver of a network adapter.
        run_setup_command(&format!("ethtool -K {interface} {offloads} gro on"))?;
        run_setup_command(&format!("ip link set {interface} up"))?;
        if layout != CoreLayout::Sender {
            fs::write(format!("/sys/class/net/{interface}/threaded"), "1")?;
        }
    }
    Ok(())
}

/// Assigns the kernel an address at one end. `within` is a prefix of the commands that runs them in another
/// namespace; an empty one leaves them in this one.
///
/// # Errors
/// If the kernel does not permit it.
pub fn assign_kernel_address(interface: &str, address: Ipv4Addr, within: &str) -> Result<(), MeasureError> {
    run_setup_command(&format!("{within} ip addr add {address}/{PREFIX_LEN} dev {interface}"))?;
    run_setup_command(&format!("{within} ip link set {interface} up"))?;
    // The machine's default congestion control may differ. A route can set it; a namespace cannot.
    let network = network_of(address);
    run_setup_command(&format!(
        "{within} ip route replace {network}/{PREFIX_LEN} dev {interface} congctl cubic"
    ))
}

/// Returns the process IDs of the NAPI threads of an interface.
pub fn napi_threads(interface: &str) -> Vec<i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm"));
            comm.is_ok_and(|comm| is_napi_thread_of(&comm, interface))
        })
        .collect()
}

/// Returns whether a thread with this name is a NAPI thread of the interface. The kernel names it "napi/",
/// the interface, "-" and a number.
fn is_napi_thread_of(comm: &str, interface: &str) -> bool {
    comm.strip_prefix("napi/")
        .and_then(|rest| rest.strip_prefix(interface))
        .is_some_and(|rest| rest.starts_with('-'))
}

/// Returns the number of packets that an interface has received and sent so far; 0 if it does not exist.
pub fn packets(interface: &str) -> u64 {
    let of = |counter: &str| {
        let text = fs::read_to_string(format!("/sys/class/net/{interface}/statistics/{counter}"));
        text.ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    of("rx_packets") + of("tx_packets")
}

#[cfg(test)]
mod tests {
    use super::{MeasureError, generator, is_napi_thread_of, run_setup_command, server};

    #[test]
    fn a_missing_program_is_named() {
        let Err(MeasureError::Skipped(why)) = run_setup_command("no-such-program -K eth0") else { panic!() };
        assert_eq!(why, "no-such-program is not installed");
    }

    #[test]
    fn threads_of_other_interfaces_do_not_match() {
        assert_ne!(server(), generator());
        assert!(is_napi_thread_of(&format!("napi/{}-8193\n", server()), server()));
        // `s12` is the interface of a process whose ID begins with that of the process of `s1`.
        for other in ["napi/s12-8193", "napi/s1", "napi/g1-8193", "s1-8193", "napi/"] {
            assert!(!is_napi_thread_of(other, "s1"), "{other}");
        }
    }
}
