//! An interface that stack and kernel share. The other end of its cable is a device that receives all frames.

use super::*;
use crate::conformance::sleep;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};

const KERNEL: Ipv4Addr = Ipv4Addr::new(10, 4, 0, 1);
const STACK: Ipv4Addr = Ipv4Addr::new(10, 4, 0, 2);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 4, 0, 9);
const PEER_MAC: [u8; 6] = [2, 9, 9, 9, 9, 9];

/// Creates the shared end, whose kernel has an address, and the far end.
fn pair(name: &str, config: AfXdpConfig) -> (AfXdp, Device) {
    let far = format!("{name}1");
    veth(&config.interface, &far, 1500);
    ip(&format!("addr add {KERNEL}/24 dev {}", config.interface));
    ip(&format!("neigh add {PEER} lladdr 02:09:09:09:09:09 dev {}", config.interface));
    let shared = open(&config).expect("the shared end");
    (shared, only(open(&all_of(&far, "queues=0-3")).expect("the far end")))
}

fn config(name: &str, keys: &str, addresses: &[IpAddr]) -> AfXdpConfig {
    AfXdpConfig {
        interface: format!("{name}0"),
        options: keys.parse().expect("valid keys"),
        addresses: addresses.iter().map(|&address| (address, 0)).collect(),
        ephemeral: [(61_000, 62_000); 2],
        ..AfXdpConfig::default()
    }
}

/// Returns an ARP message of the far end; `tag` is a VLAN tag or empty.
fn arp(operation: u8, tag: &[u8], sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = [&[0xff; 6], &PEER_MAC[..], tag, &[8, 6, 0, 1, 8, 0, 6, 4, 0, operation]].concat();
    frame.extend(PEER_MAC);
    frame.extend(sender.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    frame
}

/// Returns a UDP datagram without a checksum.
fn udp(mac: [u8; 6], to: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut header = vec![0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0];
    header.extend([PEER.octets(), to.octets()].concat());
    let sum = ginnel_stack::wire::checksum::Sum::of(&header).finish();
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut frame = [&mac[..], &PEER_MAC, &[8, 0], &header].concat();
    frame.extend([0, 9]);
    frame.extend(port.to_be_bytes());
    frame.extend([0, 12, 0, 0]);
    frame.extend(*b"ping");
    frame
}

/// Returns whether a datagram arrives at a kernel socket within a second.
fn received(socket: &UdpSocket) -> bool {
    socket.set_read_timeout(Some(Duration::from_secs(1))).expect("a time limit");
    socket.recv(&mut [0; 100]).is_ok()
}

#[test]
fn only_frames_of_the_stack_are_redirected() {
    in_bpf_namespace("af_xdp::tests::sharing::only_frames_of_the_stack_are_redirected", || {
        let (shared, mut far) = pair("mine", config("mine", "", &[STACK.into()]));
        let mut stack = only(shared);
        let mac = stack.tx.capabilities().mac;
        let kernel = UdpSocket::bind((KERNEL, 700)).expect("a socket of the kernel");
        // Each datagram arrives at its destination, and no other frame does.
        let ours = [udp(mac, STACK, 700), arp(1, &[], PEER, STACK)];
        let theirs = udp(mac, KERNEL, 700);
        send(&mut far, &[ours[0].clone(), theirs, ours[1].clone()]);
        assert_eq!(receive(&mut stack, 3), ours);
        assert!(received(&kernel));
        // Messages that are not about the stack's address alone arrive at both, with their tags; the
        // kernel answers those about its own address.
        let for_both = arp(1, &[], PEER, KERNEL);
        let tagged = arp(2, &[0x81, 0, 0x20, 12], PEER, KERNEL);
        send(&mut far, &[for_both.clone(), tagged.clone()]);
        assert_eq!(receive(&mut stack, 2), [for_both, tagged]);
        let answers = receive(&mut far, 1);
        assert_eq!(answers[0][20..22], [0, 2], "reply of the kernel");
        assert_eq!(answers[0][28..32], KERNEL.octets());
        // The stack can send any frame.
        send(&mut stack, &[udp(PEER_MAC, PEER, 1)]);
        assert_eq!(receive(&mut far, 1), [udp(PEER_MAC, PEER, 1)]);
    });
}

#[test]
fn shared_address_redirects_only_ports_of_the_stack() {
    in_bpf_namespace("af_xdp::tests::sharing::shared_address_redirects_only_ports_of_the_stack", || {
        let config = config("port", "take=ports,ports=80+90-91", &[KERNEL.into()]);
        let (shared, mut far) = pair("port", config);
        let filter = shared.filter.clone();
        let mut stack = only(shared);
        let mac = stack.tx.capabilities().mac;
        let kernel = UdpSocket::bind((KERNEL, 700)).expect("a socket of the kernel");
        let to = |port| udp(mac, KERNEL, port);
        let answer = arp(2, &[], PEER, KERNEL);
        send(&mut far, &[to(80), to(700), to(89), to(91), to(61_000), to(62_001), answer.clone()]);
        assert_eq!(receive(&mut stack, 5), [to(80), to(91), to(61_000), answer]);
        assert!(received(&kernel));
        filter.set_ports(PortKind::Udp, 700..=700, true).expect("a port");
        send(&mut far, &[to(700)]);
        assert_eq!(receive(&mut stack, 1), [to(700)]);
        assert!(!received(&kernel));
    });
}

#[test]
fn frames_on_other_queues_are_counted() {
    in_bpf_namespace("af_xdp::tests::sharing::frames_on_other_queues_are_counted", || {
        let (shared, _) = pair("other", config("other", "queues=1", &[STACK.into()]));
        let filter = shared.filter.clone();
        let mut stack = only(shared);
        let mac = stack.tx.capabilities().mac;
        // The sender's queue determines the receiver's queue.
        let mut sender = only(open(&all_of("other1", "queues=3")).expect("the far end"));
        send(&mut sender, &[udp(mac, STACK, 5), udp(mac, KERNEL, 5)]);
        assert_eq!(receive(&mut stack, 1), [[0u8; 0]; 0]);
        assert_eq!(filter.drops_without_socket().expect("a counter"), 1);
    });
}

#[test]
fn only_received_neighbour_messages_wake() {
    in_bpf_namespace("af_xdp::tests::sharing::only_received_neighbour_messages_wake", || {
        let (shared, mut far) = pair("wake", config("wake", "", &[STACK.into()]));
        let mut stack = only(shared);
        // The kernel sends an ARP request, which leaves the interface and must not reach the stack.
        let kernel = UdpSocket::bind((KERNEL, 0)).expect("a socket of the kernel");
        kernel.send_to(b"x", (Ipv4Addr::new(10, 4, 0, 77), 9)).expect("sent");
        assert_eq!(receive(&mut far, 1)[0][20..22], [0, 1], "neighbour query");
        assert!(stack.rx.arm() && !sleep(stack.rx.wake_fd(), Duration::from_millis(200)));
        let answer = arp(2, &[], Ipv4Addr::new(10, 4, 0, 77), KERNEL);
        send(&mut far, std::slice::from_ref(&answer));
        assert!(sleep(stack.rx.wake_fd(), Duration::from_secs(10)));
        assert_eq!(receive(&mut stack, 1), [answer]);
        // The ring of copies wraps several times.
        for round in 0..40 {
            let frames: Vec<_> =
                (0..5).map(|n| arp(1, &[], Ipv4Addr::new(10, 4, 1, round * 5 + n), KERNEL)).collect();
            send(&mut far, &frames);
            assert_eq!(receive(&mut stack, 5), frames, "round {round}");
            receive(&mut far, 0);
        }
    });
}
