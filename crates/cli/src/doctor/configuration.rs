//! A configuration of a stack for a machine.

use super::description::{InterfaceDescription, MachineDescription};
use super::plan::ShardPlan;
use core::fmt::Write as _;
use core::net::IpAddr;
use ginnel::Config;
use ginnel::config::Prefix;
use std::path::Path;

/// First port above the kernel's usual ephemeral ports.
const PORT_FIRST: u16 = 61_000;
/// Fewest ephemeral ports of a stack that are worth a range of their own.
const PORTS_MIN: u16 = 4096;
/// First port that is no well-known or registered port of a common service.
const UNUSED_PORT_FIRST: u16 = 10_000;

/// Choices of the operator.
pub struct Choices<'a> {
    /// Ports that the stack takes if it shares the addresses of the host.
    pub ports: &'a [(u16, u16)],
    /// Addresses of the stack; none to share those of the host.
    pub addresses: &'a [Prefix],
}

/// Returns a configuration for the machine, which the parser of configurations accepts. `file` names the
/// file in messages.
///
/// # Errors
/// There is no interface, it cannot have a stack, addresses are missing, the kernel's ephemeral ports leave
/// none for the stack, or the choices do not make a valid configuration.
pub fn configuration(
    machine: &MachineDescription,
    plan: &ShardPlan,
    choices: &Choices<'_>,
    file: &Path,
) -> Result<String, String> {
    let interface =
        machine.interface.as_ref().ok_or("name an interface: no interface has a default route")?;
    let name = &interface.name;
    if interface.is_loopback {
        return Err("lo has no frames for a stack: name another interface".into());
    }
    let shares = choices.addresses.is_empty();
    let addresses = match shares {
        false => choices.addresses.iter().map(ToString::to_string).collect(),
        true if interface.is_tap => {
            return Err(format!(
                "--address is missing: the addresses of the TAP interface {name} belong to the kernel's side"
            ));
        }
        true => shared_addresses(interface),
    };
    if addresses.is_empty() {
        return Err(format!("--address is missing: {name} has no address that a stack could share"));
    }
    let mut text = format!("# A stack on {name}, for this machine (ginnel doctor {name} --write).\n\n");
    write_shards(&mut text, plan);
    if shares {
        write_local_ports(&mut text, machine.local_ports)?;
    }
    write_device(&mut text, interface, plan, choices, shares);
    let quoted: Vec<String> = addresses.iter().map(|address| format!("\"{address}\"")).collect();
    let _ = write!(
        text,
        "\n[[link]]\nname = \"{name}\"\ndevice = \"{name}\"\naddresses = [{}]\n",
        quoted.join(", ")
    );
    write_routes(&mut text, interface, &addresses);
    Config::from_toml(&file.display().to_string(), &text).map_err(|e| e.to_string())?;
    Ok(text)
}

/// Returns the addresses of the host that a stack can share.
fn shared_addresses(interface: &InterfaceDescription) -> Vec<String> {
    let is_shared = |text: &&String| match text.parse::<Prefix>() {
        Ok(prefix) => !matches!(prefix.address, IpAddr::V6(v6) if v6.is_unicast_link_local()),
        Err(_) => false,
    };
    interface.addresses.iter().filter(is_shared).cloned().collect()
}

fn write_shards(text: &mut String, plan: &ShardPlan) {
    let cpus: Vec<String> = plan.cpus.iter().map(ToString::to_string).collect();
    let _ = write!(text, "[shards]\ncount = {}\ncpus = [{}]\n", plan.cpus.len(), cpus.join(", "));
}

/// Writes ephemeral ports that the kernel does not use.
fn write_local_ports(text: &mut String, local_ports: Option<(u16, u16)>) -> Result<(), String> {
    let (kernel_first, kernel_last) = local_ports.ok_or(
        "the kernel's ephemeral ports are unknown, because /proc/sys/net/ipv4/ip_local_port_range cannot be read: give the stack its own --address",
    )?;
    let above = kernel_last.saturating_add(1).max(PORT_FIRST);
    let (first, last) = if kernel_last < u16::MAX && u16::MAX - above >= PORTS_MIN - 1 {
        (above, u16::MAX)
    } else if kernel_first >= UNUSED_PORT_FIRST + PORTS_MIN {
        (UNUSED_PORT_FIRST, kernel_first - 1)
    } else {
        return Err(format!(
            "the kernel's ephemeral ports, {kernel_first} to {kernel_last}, leave none for a stack that shares its addresses: narrow net.ipv4.ip_local_port_range, or give the stack its own --address"
        ));
    };
    let _ = write!(
        text,
        "\n# The kernel uses {kernel_first} to {kernel_last}.\n[tcp]\nlocal_port_first = {first}\nlocal_port_last = {last}\n\n[network]\nudp_port_first = {first}\nudp_port_last = {last}\n"
    );
    Ok(())
}

fn write_device(
    text: &mut String,
    interface: &InterfaceDescription,
    plan: &ShardPlan,
    choices: &Choices<'_>,
    shares: bool,
) {
    let name = &interface.name;
    if interface.is_tap {
        let _ = write!(text, "\n[[device]]\nname = \"{name}\"\nkind = \"tap\"\n");
        return;
    }
    // A single shard serves all queues.
    let queues = if plan.count() == 1 { interface.rx_queues() } else { plan.count() };
    let queues = if queues == 1 { "queues=0".to_owned() } else { format!("queues=0-{}", queues - 1) };
    let take = if shares {
        let port = |(first, last): &(u16, u16)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        let ports: Vec<String> = choices.ports.iter().map(port).collect();
        format!("take=ports,ports={}", ports.join("+"))
    } else {
        "take=addresses".to_owned()
    };
    let _ =
        write!(text, "\n[[device]]\nname = \"{name}\"\nkind = \"af_xdp\"\naf_xdp = \"{queues},{take}\"\n");
}

/// Writes a default route for each gateway whose family the stack has. A gateway in no network of the
/// interface, as pods often have it, gets a route of its own.
fn write_routes(text: &mut String, interface: &InterfaceDescription, addresses: &[String]) {
    let has = |ipv4: bool| addresses.iter().any(|address| address.contains(':') != ipv4);
    let networks: Vec<Prefix> = addresses.iter().filter_map(|address| address.parse().ok()).collect();
    let is_outside = |gateway: IpAddr| {
        let link_local = matches!(gateway, IpAddr::V6(gateway) if gateway.is_unicast_link_local());
        !link_local && !networks.iter().any(|network| network.contains(gateway))
    };
    for gateway in &interface.gateways {
        let ipv4 = !gateway.contains(':');
        if has(ipv4) {
            if gateway.parse().is_ok_and(is_outside) {
                let len = if ipv4 { 32 } else { 128 };
                let link = &interface.name;
                let _ = write!(text, "\n[[route]]\ndestination = \"{gateway}/{len}\"\nlink = \"{link}\"\n");
            }
            let destination = if ipv4 { "0.0.0.0/0" } else { "::/0" };
            let _ = write!(
                text,
                "\n[[route]]\ndestination = \"{destination}\"\ngateway = \"{gateway}\"\nlink = \"{}\"\n",
                interface.name
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(
        interface: InterfaceDescription,
        local_ports: Option<(u16, u16)>,
        addresses: &[&str],
    ) -> Result<String, String> {
        let machine = MachineDescription { interface: Some(interface), local_ports, ..Default::default() };
        let addresses: Vec<Prefix> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let choices = Choices { ports: &[(80, 80), (8000, 8010)], addresses: &addresses };
        configuration(&machine, &ShardPlan { cpus: vec![1, 2] }, &choices, Path::new("x.toml"))
    }

    fn interface(addresses: &[&str]) -> InterfaceDescription {
        InterfaceDescription {
            name: "eth0".into(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            gateways: vec!["10.0.0.1".into(), "fe80::1".into()],
            ..Default::default()
        }
    }

    #[test]
    fn a_shared_address_gets_ports() {
        let config = text(interface(&["10.0.0.2/24", "fe80::2/64"]), Some((32_768, 60_999)), &[]).unwrap();
        assert!(config.contains("af_xdp = \"queues=0-1,take=ports,ports=80+8000-8010\""), "{config}");
        assert!(
            config.contains("addresses = [\"10.0.0.2/24\"]") && config.contains("cpus = [1, 2]"),
            "{config}"
        );
        assert!(config.contains("local_port_first = 61000\n") && config.contains("gateway = \"10.0.0.1\""));
        assert!(!config.contains("::/0"), "the stack has no address of that family");
        let low = text(interface(&["10.0.0.2/24"]), Some((20_000, 65_535)), &[]).unwrap();
        assert!(low.contains("local_port_first = 10000\nlocal_port_last = 19999"), "{low}");
        let none = text(interface(&["10.0.0.2/24"]), Some((1024, 65_535)), &[]).unwrap_err();
        assert!(none.contains("1024 to 65535"), "{none}");
        let unknown = text(interface(&["10.0.0.2/24"]), None, &[]).unwrap_err();
        assert!(unknown.contains("ip_local_port_range cannot be read"), "{unknown}");
    }

    #[test]
    fn a_gateway_outside_of_the_network_is_on_the_link() {
        let mut pod = interface(&["10.244.0.7/32", "fd00::7/128"]);
        pod.gateways = vec!["169.254.1.1".into(), "fe80::1".into()];
        let config = text(pod, Some((32_768, 60_999)), &[]).unwrap();
        let direct = "[[route]]\ndestination = \"169.254.1.1/32\"\nlink = \"eth0\"\n";
        assert!(config.contains(direct) && config.contains("gateway = \"169.254.1.1\""), "{config}");
        assert_eq!(config.matches("[[route]]").count(), 3, "{config}");
    }

    #[test]
    fn own_addresses_are_taken_alone() {
        let config =
            text(interface(&["10.0.0.2/24"]), Some((1024, 65_535)), &["10.0.0.3/24", "fd00::3/64"]).unwrap();
        assert!(config.contains("take=addresses\"") && !config.contains("[tcp]"), "{config}");
        assert!(config.contains("destination = \"::/0\""), "{config}");
        let tap = InterfaceDescription { is_tap: true, ..interface(&["10.0.0.1/24"]) };
        assert!(text(tap.clone(), Some((1, 2)), &[]).unwrap_err().starts_with("--address is missing"));
        assert!(text(tap, Some((1, 2)), &["10.0.0.2/24"]).unwrap().contains("kind = \"tap\""));
        assert!(
            text(interface(&["fe80::1/64"]), Some((1, 2)), &[])
                .unwrap_err()
                .starts_with("--address is missing")
        );
    }
}
