//! The network of the test: a client, a router, and a switch with three hosts.

use ginnel_testkit::interop::Namespace;

/// Number of hosts, which are numbered from 1.
pub const HOSTS: usize = 3;

/// One namespace for each machine and one for the switch.
pub struct Network {
    pub client: Namespace,
    pub router: Namespace,
    switch: Namespace,
    hosts: Vec<Namespace>,
}

impl Network {
    /// Creates the addresses that the examples have.
    pub fn create() -> Self {
        let namespace = || Namespace::new().unwrap();
        let network = Self {
            client: namespace(),
            router: namespace(),
            switch: namespace(),
            hosts: (0..HOSTS).map(|_| namespace()).collect(),
        };
        network.switch.ip("link add lan type bridge").unwrap();
        network.switch.ip("link set lan up").unwrap();
        let plug = |machine: &Namespace, interface: &str, port: &str, address: &str| {
            machine.connect(interface, &network.switch, port, 1500).unwrap();
            network.switch.ip(&format!("link set {port} master lan")).unwrap();
            machine.ip(&format!("address add {address}/24 dev {interface}")).unwrap();
        };
        plug(&network.router, "eth1", "router", "10.0.0.1");
        for number in 1..=HOSTS {
            plug(network.host(number), "eth0", &port(number), &format!("10.0.0.1{number}"));
        }
        network.client.connect("eth0", &network.router, "eth0", 1500).unwrap();
        network.client.ip("address add 198.51.100.2/24 dev eth0").unwrap();
        network.router.ip("address add 198.51.100.1/24 dev eth0").unwrap();
        network.client.ip("route add default via 198.51.100.1").unwrap();
        for (sysctl, value) in [("net.ipv4.ip_forward", "1"), ("net.ipv4.fib_multipath_hash_policy", "1")] {
            network.router.sysctl(sysctl, value).unwrap();
        }
        network
    }

    pub fn host(&self, number: usize) -> &Namespace {
        &self.hosts[number - 1]
    }

    /// Sets the switch's port of a host "up" or "down".
    pub fn set_link(&self, number: usize, state: &str) {
        self.switch.ip(&format!("link set {} {state}", port(number))).unwrap();
    }
}

fn port(number: usize) -> String {
    format!("host{number}")
}
