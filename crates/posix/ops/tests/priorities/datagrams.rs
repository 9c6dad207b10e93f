//! UDP sockets whose device has no room.

use super::*;
use ginnel::UdpOptions;
use ginnel_posix_ops::SendArgs;

const PEER: [u8; 4] = [10, 0, 0, 2];

fn send(hosts: &Hosts, fd: RawFd, port: u16, byte: u8) -> Result<usize, Errno> {
    let to = sockaddr_of(PEER, port);
    let args = SendArgs { flags: 0, to: Some(&to), control: &[] };
    hosts.ops.send_to(fd, &[UserSlice::new(&[byte; 100])], &args)
}

/// Sends datagrams to several destinations, each the first one there, while the device is at its bound.
#[test]
fn first_datagram_to_a_destination_waits_for_the_device() {
    let mut hosts = Hosts::new(true);
    hosts.clients.with(hosts.now, |_, cx| {
        for port in 9000..9010 {
            cx.udp_bind(([10, 0, 0, 2], port).into(), UdpOptions::default()).unwrap();
        }
    });
    let [bulk, fresh] = [libc::SOCK_NONBLOCK, 0]
        .map(|flags| hosts.ops.socket(libc::AF_INET, libc::SOCK_DGRAM | flags, 0).unwrap());
    hosts.fds.extend([bulk, fresh]);
    assert_eq!(send(&hosts, bulk, 9000, 0), Ok(100));
    hosts.run(Duration::from_millis(20));
    assert_eq!(hosts.clients.handler().datagrams, [0]);
    for _ in 0..100 {
        assert_eq!(send(&hosts, bulk, 9000, 0), Ok(100));
        hosts.stack.lock().unwrap().poll_once(hosts.now).unwrap();
    }
    for number in 1..10 {
        assert_eq!(send(&hosts, fresh, 9000 + u16::from(number), number), Ok(100), "{number}");
        assert_eq!(send(&hosts, fresh, 9000, 10 * number), Ok(100), "{number}");
        hosts.stack.lock().unwrap().poll_once(hosts.now).unwrap();
    }
    assert_eq!(hosts.clients.handler().datagrams.len(), 1, "the peer has taken none");
    hosts.run(Duration::from_millis(20));
    let mut arrived = hosts.clients.handler().datagrams.clone();
    arrived.retain(|number| *number > 0);
    // The peer reads one socket after the other.
    let (later, mut first): (Vec<u8>, Vec<u8>) = arrived.into_iter().partition(|number| *number >= 10);
    assert_eq!(later, [10, 20, 30, 40, 50, 60, 70, 80, 90], "in the order in which they were sent");
    first.sort_unstable();
    assert_eq!(first, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    // Nothing waits any more.
    assert_eq!(send(&hosts, fresh, 9999, 1), Ok(100));
}
