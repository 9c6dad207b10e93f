//! Findings about an interface, its driver, and AF_XDP.

use super::description::{InterfaceDescription, MachineDescription};
use super::drivers::{self, XdpSupport};
use super::examine::{Finding, Level, counted};
use super::setting::{Change, Setting, channels_value};

/// Largest MTU whose frames fit a page together with what XDP needs, in bytes.
const MTU_ONE_PAGE: usize = 3498;

/// Returns the findings.
pub fn all(machine: &MachineDescription, interface: &InterfaceDescription) -> Vec<Finding> {
    let mut findings = vec![state(interface)];
    if !interface.sysfs_error.is_empty() {
        findings.push(Finding::new("interface", Level::Todo, interface.sysfs_error.clone()));
    }
    if let Some(master) = &interface.master {
        let text = format!(
            "{} is a port of {master}: frames that AF_XDP takes from it never reach {master}, and AF_XDP on {master} itself runs in the slow generic mode",
            interface.name
        );
        findings.push(Finding::new("interface", Level::Note, text));
    }
    if interface.is_loopback {
        let text = "lo has no frames for a stack: use --loopback stack, or another interface";
        findings.push(Finding::new("driver", Level::Fail, text));
        return findings;
    }
    findings.push(driver(interface));
    if interface.is_tap {
        return findings;
    }
    if interface.mtu > MTU_ONE_PAGE {
        let text = format!(
            "MTU {} is above {MTU_ONE_PAGE}: many drivers then refuse the program of AF_XDP, and Linux before 6.6 has no frames of several buffers; \"ip link set {} mtu {MTU_ONE_PAGE}\" if the stack reports that",
            interface.mtu, interface.name
        );
        findings.push(Finding::new("mtu", Level::Note, text));
    }
    for (item, error, what) in [
        ("bpf", &machine.bpf_error, "the program of AF_XDP cannot be loaded"),
        ("af_xdp", &machine.af_xdp_error, "no AF_XDP socket can be opened"),
    ] {
        findings.push(match error.is_empty() {
            false => Finding::new(item, Level::Fail, format!("{what}: {error}")),
            true if item == "bpf" => Finding::new(item, Level::Ok, "the kernel loads the program of AF_XDP"),
            true => Finding::new(item, Level::Ok, "this process may open AF_XDP sockets"),
        });
    }
    findings
}

fn state(interface: &InterfaceDescription) -> Finding {
    let name = &interface.name;
    if !interface.up {
        let text = format!("{name} is down, and a stack needs it up: ip link set {name} up");
        return Finding::new("interface", Level::Todo, text);
    }
    if !interface.carrier && !interface.is_tap {
        return Finding::new(
            "interface",
            Level::Todo,
            format!("{name} is up without a carrier: check the cable, the port, or the other end"),
        );
    }
    let speed = interface.speed_mbits.map_or_else(String::new, |mbits| match mbits % 1000 {
        0 => format!(", {} Gbit/s", mbits / 1000),
        _ => format!(", {mbits} Mbit/s"),
    });
    let addresses = match &interface.addresses[..] {
        [] => "no address".to_owned(),
        all => all.join(" "),
    };
    Finding::new("interface", Level::Ok, format!("{name} is up{speed}, MTU {}, {addresses}", interface.mtu))
}

fn driver(interface: &InterfaceDescription) -> Finding {
    let name = interface.driver_name();
    if interface.is_tap {
        return Finding::new(
            "driver",
            Level::Ok,
            format!(
                "{} is a TAP interface: a shard reads its frames by system calls, and queues and interrupts do not matter",
                interface.name
            ),
        );
    }
    let Some(known) = drivers::find(name) else {
        let text = format!(
            "the driver {name} is not known to this program: AF_XDP works with every driver, at least in the slow generic mode; \"ginnel log NAME\" says which mode a stack got"
        );
        return Finding::new("driver", Level::Note, text);
    };
    if known.needs_spare_queues
        && let Some(channels) = interface.channels
        && channels.combined * 2 > channels.combined_max
    {
        let half = (channels.combined_max / 2).max(1);
        let text = format!(
            "{name} loads the program of AF_XDP only if at most half of its queues are in use, and {} of {} are",
            channels.combined, channels.combined_max
        );
        return match channels.combined_max {
            0 | 1 => Finding::new("driver", Level::Fail, text),
            _ => {
                let change = Change::of(interface, Setting::Channels, channels_value(0, 0, half));
                Finding::fix("driver", text, vec![change])
            }
        };
    }
    let queues = counted(interface.rx_queues() as usize, "queue");
    match known.support {
        XdpSupport::ZeroCopy => Finding::new(
            "driver",
            Level::Ok,
            format!("{name}, {queues}: recent kernels pass its frames to AF_XDP without a copy"),
        ),
        XdpSupport::Copy => Finding::new(
            "driver",
            Level::Ok,
            format!("{name}, {queues}: AF_XDP runs in the driver, and the kernel copies each frame once"),
        ),
        XdpSupport::Generic => Finding::new(
            "driver",
            Level::Note,
            format!(
                "{name}, {queues}: the driver does not support XDP, so AF_XDP runs in generic mode, which is slower"
            ),
        ),
    }
}
