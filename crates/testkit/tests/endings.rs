//! What becomes of connections whose end is not a plain exchange of FINs.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::handle::LinkId;
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};

fn link_local(sim: &Sim, host: usize) -> IpAddr {
    let mut addresses = sim.hosts[host].stack.network().addresses(LinkId(0)).iter().map(|a| a.address);
    addresses
        .find(|a| matches!(a, IpAddr::V6(v6) if v6.is_unicast_link_local()))
        .expect("every link has a link-local address")
}

/// Both directions are closed, but the owner has not read everything: meanwhile other connections come.
#[test]
fn a_finished_ipv6_connection_that_is_not_read_out_keeps_its_addresses() {
    let lazy = HostConfig { lazy_reader: true, ..HostConfig::default() };
    let mut sim = Sim::pair_with(1, HostConfig::default(), lazy, LinkModel::default());
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 80);
    sim.hosts[1].stack.listen(any, Default::default()).unwrap();
    sim.run(Duration::from_secs(3));
    let (now, to) = (sim.now, SocketAddr::new(sim.hosts[1].v6.into(), 80));
    let client = sim.hosts[0].connect(now, to);
    sim.hosts[0].send_all(now, client, b"unread".to_vec(), true);
    sim.collect(0);
    sim.run(Duration::from_secs(1));
    let served = sim.hosts[1].accepted[0];
    sim.hosts[1].stack.shutdown_write(served).unwrap();
    sim.hosts[1].stack.transmit(now);
    sim.collect(1);
    sim.run(Duration::from_secs(1));
    let before = sim.hosts[1].stack.info(served).expect("it is there until it is read out");
    assert_eq!(before.remote.ip(), IpAddr::V6(sim.hosts[0].v6));

    let (now, to) = (sim.now, SocketAddr::new(link_local(&sim, 1), 80));
    sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_secs(1));
    assert_eq!(sim.hosts[1].accepted.len(), 2);
    let after = sim.hosts[1].stack.info(served).expect("nobody has read it");
    assert_eq!((after.remote, after.local), (before.remote, before.local));
}
