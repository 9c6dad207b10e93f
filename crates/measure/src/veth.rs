//! A cable of two veth interfaces in the namespace of the measurement, a server at one end and a generator at the other, and fair charging: on veth the kernel receives on the core
//! of whoever sends, unless it has threads for that, which can be put where the receiver runs.

use crate::{CoreLayout, MeasureError};
use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::OnceLock;

/// The server's interface.
pub fn server() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| interface_name('s'))
}

/// The generator's.
pub fn generator() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| interface_name('g'))
}

/// A name that no other measurement on this machine has: the kernel's threads are called after their interface, and are to be seen from every network namespace. Short, because older
/// kernels cut the name of a thread at 15 bytes: with the longest number of a process 14 go up to the dash.
fn interface_name(end: char) -> String {
    format!("{end}{}", std::process::id())
}

/// Length of the network's prefix.
pub const PREFIX_LEN: u8 = 24;

/// Runs a program that sets something up.
pub fn run_setup_command(command: &str) -> Result<(), MeasureError> {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap_or_default())
        .args(words)
        .output()
        .map_err(|e| MeasureError::Skipped(format!("{command}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(MeasureError::Failed(format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// Who is at the ends of the cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VethOffloads {
    /// The kernel at one of them at the most: it leaves no checksums and segments undone, which are none to a device that is no kernel.
    Disabled,
    /// The kernel at both, with all its offloads.
    Enabled,
}

/// Lays the cable anew: nothing is left of the one before.
///
/// # Errors
/// A program for that is missing, or the kernel does not permit it.
pub fn create(ends: VethOffloads, layout: CoreLayout) -> Result<(), MeasureError> {
    let (server, generator) = (server(), generator());
    // There is none the first time.
    let _ = run_setup_command(&format!("ip link del {server}"));
    // Whoever asks a server of the same namespace goes through it.
    run_setup_command("ip link set lo up")?;
    run_setup_command(&format!("ip link add {server} type veth peer name {generator}"))?;
    if fs::metadata(format!("/sys/class/net/{server}")).is_err() {
        // Interfaces of a namespace are only to be seen in a view of /sys that was made inside.
        run_setup_command("mount -t sysfs sysfs /sys")?;
    }
    for interface in [server, generator] {
        fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"), "1")?;
        let undone = match ends {
            VethOffloads::Disabled => "tx off tso off gso off",
            VethOffloads::Enabled => "tx on tso on gso on",
        };
        // GRO makes veth receive as a network card's driver does.
        run_setup_command(&format!("ethtool -K {interface} {undone} gro on"))?;
        run_setup_command(&format!("ip link set {interface} up"))?;
        if layout != CoreLayout::Sender {
            fs::write(format!("/sys/class/net/{interface}/threaded"), "1")?;
        }
    }
    Ok(())
}

/// Gives the kernel an address at one end. `within` are the words of a command that runs another one where the interface is; usually none.
///
/// # Errors
/// The kernel does not permit it.
pub fn assign_kernel_address(interface: &str, address: Ipv4Addr, within: &str) -> Result<(), MeasureError> {
    run_setup_command(&format!("{within} ip addr add {address}/{PREFIX_LEN} dev {interface}"))?;
    run_setup_command(&format!("{within} ip link set {interface} up"))?;
    // The kernel's default may be another one; a namespace cannot choose it, a route can.
    let network = Ipv4Addr::from_bits(address.to_bits() & u32::MAX << (32 - u32::from(PREFIX_LEN)));
    run_setup_command(&format!(
        "{within} ip route replace {network}/{PREFIX_LEN} dev {interface} congctl cubic"
    ))
}

/// The kernel's threads that receive for an interface.
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

/// Whether a thread of this name receives for the interface: the kernel writes "napi/", the interface, "-" and a number.
fn is_napi_thread_of(comm: &str, interface: &str) -> bool {
    comm.strip_prefix("napi/")
        .and_then(|rest| rest.strip_prefix(interface))
        .is_some_and(|rest| rest.starts_with('-'))
}

/// Packets that an interface has received and sent so far; 0 if there is none of this name.
pub fn packets(interface: &str) -> u64 {
    let of = |counter: &str| {
        let text = fs::read_to_string(format!("/sys/class/net/{interface}/statistics/{counter}"));
        text.ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    of("rx_packets") + of("tx_packets")
}

#[cfg(test)]
mod tests {
    use super::{generator, is_napi_thread_of, server};

    #[test]
    fn threads_of_other_interfaces_are_let_alone() {
        assert_ne!(server(), generator());
        assert!(is_napi_thread_of(&format!("napi/{}-8193\n", server()), server()));
        // A process whose number begins as this one's.
        for other in ["napi/s12-8193", "napi/s1", "napi/g1-8193", "s1-8193", "napi/"] {
            assert!(!is_napi_thread_of(other, "s1"), "{other}");
        }
    }
}
