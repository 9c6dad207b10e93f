//! UDP sockets with queued datagrams.

use super::*;
use core::num::NonZeroU32;
use ginnel_stack::udp::{UdpOptions, UdpSendParams};
use std::io::{IoSlice, IoSliceMut};

fn receive(client: &mut Client, socket: Conn) -> Option<Vec<u8>> {
    let mut out = vec![0; 65_536];
    let received = client.udp_recv_into(socket, &mut [IoSliceMut::new(&mut out)]).ok()?;
    out.truncate(received.ok()?.len);
    Some(out)
}

#[test]
fn queued_datagrams_are_received_in_order() {
    let mut fixture = SavedFixture::new(&small_config(), Peer::default());
    let (_domain, mut client) = fixture.open_domain();
    let served = client.udp_open("0.0.0.0:53".parse().unwrap(), UdpOptions::default()).unwrap();
    let requested = client.udp_bind("0.0.0.0:54".parse().unwrap(), UdpOptions::default()).unwrap();
    // More than the region has room for, and one that is longer than its buffer.
    let sent: Vec<Vec<u8>> = [900, 1400, 1400, 6000, 1300, 1400, 10].map(|len| bytes(len, len)).to_vec();
    let own = fixture.peer.with(fixture.now, |_, cx| {
        cx.udp_bind("0.0.0.0:99".parse().unwrap(), UdpOptions::default()).unwrap()
    });
    for datagram in &sent {
        fixture.peer.with(fixture.now, |_, cx| {
            for port in [53, 54] {
                cx.udp_send(own, Some(([10, 0, 0, 1], port).into()), datagram).unwrap();
            }
        });
        fixture.run(Duration::from_millis(1));
    }
    for taken in [0, 3] {
        for datagram in &sent[taken..taken + 3] {
            assert!(receive(&mut client, served).as_ref() == Some(datagram));
            assert!(client.udp_recv(requested).map(|(_, data)| data).as_ref() == Ok(datagram));
        }
        fixture.replace_shard();
        fixture.run(Duration::from_millis(5));
    }
    assert!(receive(&mut client, served).as_ref() == sent.last());
    assert_eq!((receive(&mut client, served), client.udp_recv(requested).is_ok()), (None, true));
    // Both still send.
    let params = UdpSendParams { to: Some("10.0.0.2:99".parse().unwrap()), ..UdpSendParams::default() };
    client.udp_send_queued(served, &params, &[IoSlice::new(b"from the region")]).unwrap();
    client.flush();
    client.udp_send(requested, params.to, b"by a request").unwrap();
    fixture.run(Duration::from_millis(5));
    let mut received = fixture.peer.handler().datagrams.clone();
    received.sort();
    assert_eq!(received, [&b"by a request"[..], b"from the region"]);
    client.release(served).unwrap();
    drop(client);
    fixture.assert_all_freed();
}

#[test]
fn datagrams_written_without_a_shard_are_sent() {
    let mut fixture = SavedFixture::new(&small_config(), Peer::default());
    let (_domain, mut client) = fixture.open_domain();
    fixture.peer.with(fixture.now, |_, cx| {
        cx.udp_bind("0.0.0.0:99".parse().unwrap(), UdpOptions::default()).unwrap();
    });
    let socket = client.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    let local = client.udp_local(socket).unwrap();
    let saved = fixture.save();
    let params = UdpSendParams { to: Some("10.0.0.2:99".parse().unwrap()), ..UdpSendParams::default() };
    client.udp_send_queued(socket, &params, &[IoSlice::new(b"and released")]).unwrap();
    client.release(socket).unwrap();
    client.flush();
    fixture.restore(saved);
    fixture.run(Duration::from_millis(50));
    assert_eq!(fixture.peer.handler().datagrams, [b"and released"]);
    // The port is free again.
    assert!(client.udp_open(local, UdpOptions::default()).is_ok());
    drop(client);
    fixture.assert_all_freed();
}

#[test]
fn held_datagrams_leave_in_time_after_an_upgrade() {
    const MS: Duration = Duration::from_millis(1);
    let mut fixture = SavedFixture::new(&small_config(), Peer::default());
    let (_domain, mut client) = fixture.open_domain();
    fixture.peer.with(fixture.now, |_, cx| {
        cx.udp_bind("0.0.0.0:99".parse().unwrap(), UdpOptions::default()).unwrap();
    });
    let socket = client.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    client.udp_connect(socket, "10.0.0.2:99".parse().unwrap()).unwrap();
    let params = UdpSendParams::default();
    for (ms, text) in [(40, &b"last"[..]), (20, b"first"), (0, b"at once")] {
        let departs_us = NonZeroU32::new(((fixture.now + ms * MS).as_nanos() / 1000) as u32);
        let sent = client.udp_send_queued_from(socket, &params, departs_us, &[IoSlice::new(text)]);
        assert!(sent.unwrap().is_ok());
    }
    client.flush();
    fixture.run(10 * MS);
    assert_eq!(fixture.peer.handler().datagrams, [b"at once"]);
    // The socket has no owner any more, but stays until the datagrams have left.
    client.release(socket).unwrap();
    client.flush();
    fixture.run(MS);
    fixture.replace_shard();
    fixture.run(8 * MS);
    assert_eq!(fixture.peer.handler().datagrams.len(), 1, "19 ms");
    fixture.run(3 * MS);
    assert_eq!(fixture.peer.handler().datagrams[1..], [b"first"], "22 ms");
    fixture.run(17 * MS);
    assert_eq!(fixture.peer.handler().datagrams.len(), 2, "39 ms");
    fixture.run(3 * MS);
    assert_eq!(fixture.peer.handler().datagrams[2..], [b"last"], "42 ms");
    drop(client);
    fixture.assert_all_freed();
}
