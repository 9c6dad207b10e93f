//! A UDP socket belongs to the shard that bound it, and receives all of its datagrams there.

use super::{Fixture, RecordingFixture, RecordingHandler, recording_fixture, stack_config};
use crate::context::Context;
use crate::error::Error;
use crate::handler::Handler;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel_devices::memory::RssMode;
use ginnel_stack::handle::{Conn, LinkId, UdpHandle};
use ginnel_stack::ip::FlowLabel;
use ginnel_stack::multicast::{MulticastOptions, SourceFilter};
use ginnel_stack::udp::{Datagram, PmtuDiscovery, UdpError, UdpOptions};
use std::collections::BTreeSet;

/// Echoes datagrams.
struct Reflector;

impl Handler for Reflector {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.udp_bind(at("0.0.0.0:7"), UdpOptions::default())
            .map(|_| ())
            .map_err(|e| Error::application(e.to_string()))
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        cx.udp_reply(socket, datagram, data).unwrap();
    }
}

fn at(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

const SHARED: UdpOptions = UdpOptions {
    reuse_address: false,
    reuse_port: true,
    uid: 0,
    broadcast: false,
    v6only: false,
    rcvbuf: None,
    hop_limit: None,
    tos: 0,
    flow_label: FlowLabel::Auto,
    priority: 0,
    recverr_v4: false,
    recverr_v6: false,
    pmtu_discovery: PmtuDiscovery::Want,
    gro: false,
    multicast_v4: MulticastOptions {
        link: None,
        source: None,
        hop_limit: None,
        no_loop: false,
        members_only: false,
    },
    multicast_v6: MulticastOptions {
        link: None,
        source: None,
        hop_limit: None,
        no_loop: false,
        members_only: false,
    },
};

fn bind<C: Handler>(
    fixture: &mut Fixture<RecordingHandler, C>,
    shard: usize,
    local: &str,
    options: UdpOptions,
) -> Result<UdpHandle, UdpError> {
    let bound = fixture.with_shard(shard, |_, cx| cx.udp_bind(at(local), options));
    fixture.advance(Duration::from_millis(1));
    bound
}

/// Sends `count` datagrams of `len` bytes, each from another port of the client.
fn send(fixture: &mut RecordingFixture, to: &str, count: usize, len: usize) {
    let options = UdpOptions { broadcast: true, ..UdpOptions::default() };
    for _ in 0..count {
        let act = |_: &mut RecordingHandler, cx: &mut Context<'_>| {
            let socket = cx.udp_bind(at("0.0.0.0:0"), options)?;
            cx.udp_send(socket, Some(at(to)), &vec![7; len])
        };
        fixture.client.with(fixture.now, act).unwrap();
        fixture.advance(Duration::from_micros(50));
    }
    fixture.advance(Duration::from_millis(50));
}

/// Returns the number of datagrams that each shard's application received.
fn received(fixture: &RecordingFixture) -> Vec<usize> {
    fixture.shards.iter().map(|shard| shard.handler().datagrams.len()).collect()
}

#[test]
fn socket_receives_datagrams_from_every_queue() {
    for spread in [RssMode::RoundRobin, RssMode::Hash, RssMode::Fixed(3)] {
        let mut fixture = recording_fixture(4, spread);
        bind(&mut fixture, 2, "0.0.0.0:53", UdpOptions::default()).unwrap();
        send(&mut fixture, "10.0.0.1:53", 40, 100);
        assert_eq!(received(&fixture), [0, 0, 40, 0], "{spread:?}");
        assert!(fixture.client.handler().errors.is_empty());
    }
}

#[test]
fn bound_port_conflicts_on_all_shards_until_closed() {
    let mut fixture = recording_fixture(3, RssMode::RoundRobin);
    let first = bind(&mut fixture, 1, "0.0.0.0:53", UdpOptions::default()).unwrap();
    assert_eq!(bind(&mut fixture, 2, "10.0.0.1:53", UdpOptions::default()), Err(UdpError::AddressInUse));
    assert_eq!(bind(&mut fixture, 2, "10.0.0.1:53", SHARED), Err(UdpError::AddressInUse));
    bind(&mut fixture, 2, "0.0.0.0:54", UdpOptions::default()).unwrap();
    fixture.with_shard(1, |_, cx| cx.udp_close(first)).unwrap();
    bind(&mut fixture, 2, "10.0.0.1:53", UdpOptions::default()).unwrap();
    send(&mut fixture, "10.0.0.1:53", 20, 100);
    assert_eq!(received(&fixture), [0, 0, 20]);
}

#[test]
fn reuseport_shares_unicast_and_copies_multicast() {
    let mut fixture = recording_fixture(4, RssMode::RoundRobin);
    for shard in [1, 3] {
        bind(&mut fixture, shard, "0.0.0.0:53", SHARED).unwrap();
    }
    send(&mut fixture, "10.0.0.1:53", 60, 100);
    let unicast = received(&fixture);
    assert_eq!((unicast[0], unicast[2], unicast[1] + unicast[3]), (0, 0, 60));
    assert!(unicast[1] >= 15 && unicast[3] >= 15, "{unicast:?}");
    send(&mut fixture, "10.0.0.255:53", 10, 100);
    assert_eq!(received(&fixture), [0, unicast[1] + 10, 0, unicast[3] + 10]);
    // All datagrams of a sender go to one shard.
    let senders = |shard: usize| -> BTreeSet<SocketAddr> {
        fixture.shards[shard].handler().datagrams[..unicast[shard]].iter().map(|(from, _)| *from).collect()
    };
    assert!(senders(1).is_disjoint(&senders(3)));
}

#[test]
fn ephemeral_ports_are_per_shard_and_receive_replies() {
    let mut fixture =
        Fixture::new(stack_config(4), RssMode::RoundRobin, |_| RecordingHandler::default(), Reflector);
    fixture.advance(Duration::from_secs(3));
    let mut ports = BTreeSet::new();
    for shard in 0..4 {
        for _ in 0..25 {
            let act = |_: &mut RecordingHandler, cx: &mut Context<'_>| {
                let socket = cx.udp_bind(at("0.0.0.0:0"), UdpOptions::default()).unwrap();
                cx.udp_send(socket, Some(at("10.0.0.2:7")), b"there and back").unwrap();
                cx.udp_local(socket).unwrap().port()
            };
            assert!(ports.insert(fixture.with_shard(shard, act)), "a port was chosen twice");
            fixture.advance(Duration::from_micros(100));
        }
    }
    fixture.advance(Duration::from_millis(50));
    for shard in &fixture.shards {
        assert_eq!(shard.handler().datagrams.len(), 25);
    }
    // An ephemeral port conflicts with a bind to it by number.
    let taken = format!("0.0.0.0:{}", ports.first().unwrap());
    let refused = (0..4).filter(|&shard| bind(&mut fixture, shard, &taken, SHARED).is_err()).count();
    assert_eq!(refused, 4);
}

#[test]
fn ephemeral_reuseport_port_is_shared_with_other_shards() {
    let mut fixture = recording_fixture(3, RssMode::RoundRobin);
    let first = bind(&mut fixture, 1, "0.0.0.0:0", SHARED).unwrap();
    let port = fixture.with_shard(1, |_, cx| cx.udp_local(first)).unwrap().port();
    let named = format!("0.0.0.0:{port}");
    assert_eq!(bind(&mut fixture, 2, &named, UdpOptions::default()), Err(UdpError::AddressInUse));
    bind(&mut fixture, 2, &named, SHARED).unwrap();
    send(&mut fixture, &format!("10.0.0.1:{port}"), 40, 100);
    let got = received(&fixture);
    assert!(got[0] == 0 && got[1] >= 10 && got[2] >= 10 && got[1] + got[2] == 40, "{got:?}");
}

#[test]
fn fragments_reassemble_on_one_shard() {
    let mut misrouted = 0;
    for owner in 0..4 {
        let mut fixture = recording_fixture(4, RssMode::RoundRobin);
        bind(&mut fixture, owner, "0.0.0.0:53", UdpOptions::default()).unwrap();
        send(&mut fixture, "10.0.0.1:53", 10, 4000);
        let mut expected = vec![0; 4];
        expected[owner] = 10;
        assert_eq!(received(&fixture), expected);
        assert!(fixture.shards[owner].handler().datagrams.iter().all(|(_, len)| *len == 4000));
        let met = fixture
            .shards
            .iter()
            .filter(|shard| shard.core.stack.local().unwrap().network().stats().reassembled > 0);
        assert_eq!(met.count(), 1, "one shard reassembles all fragments");
        let reassembler = fixture
            .shards
            .iter()
            .position(|shard| shard.core.stack.local().unwrap().network().stats().reassembled == 10);
        misrouted += usize::from(reassembler != Some(owner));
    }
    assert_eq!(misrouted, 3, "three of four sockets are on another shard");
}

#[test]
fn icmp_error_reaches_its_udp_socket() {
    for shard in 0..3 {
        let mut fixture = recording_fixture(3, RssMode::Fixed(0));
        let act = |_: &mut RecordingHandler, cx: &mut Context<'_>| {
            let socket = cx.udp_bind(at("0.0.0.0:5353"), UdpOptions::default())?;
            cx.udp_connect(socket, at("10.0.0.2:99"))?;
            cx.udp_send(socket, None, b"is anybody there?")
        };
        fixture.with_shard(shard, act).unwrap();
        fixture.advance(Duration::from_millis(50));
        for (index, other) in fixture.shards.iter().enumerate() {
            let expected: &[UdpError] = if index == shard { &[UdpError::ConnectionRefused] } else { &[] };
            assert_eq!(other.handler().errors, expected, "shard {index}");
        }
    }
}

/// The socket moves to another shard while a datagram is in the queue to the first. The datagram is not
/// forwarded a second time.
#[test]
fn frame_is_forwarded_at_most_once() {
    let mut fixture = recording_fixture(3, RssMode::Fixed(0));
    let socket = bind(&mut fixture, 1, "0.0.0.0:53", UdpOptions::default()).unwrap();
    send(&mut fixture, "10.0.0.1:53", 1, 100);
    assert_eq!(received(&fixture), [0, 1, 0]);
    let act = |_: &mut RecordingHandler, cx: &mut Context<'_>| {
        let socket = cx.udp_bind(at("0.0.0.0:0"), UdpOptions::default())?;
        cx.udp_send(socket, Some(at("10.0.0.1:53")), b"late")
    };
    fixture.client.with(fixture.now, act).unwrap();
    fixture.client.poll_once(fixture.now).unwrap();
    let forwarded = fixture.sum(|s| s.frames_forwarded);
    fixture.shards[0].poll_once(fixture.now).unwrap();
    assert_eq!(
        fixture.sum(|s| s.frames_forwarded),
        forwarded + 1,
        "the frame waits in the queue to the second shard"
    );
    fixture.with_shard(1, |_, cx| cx.udp_close(socket)).unwrap();
    fixture.with_shard(2, |_, cx| cx.udp_bind(at("0.0.0.0:53"), UdpOptions::default()).map(|_| ())).unwrap();
    for shard in &mut fixture.shards[1..] {
        shard.poll_once(fixture.now).unwrap();
    }
    assert_eq!(fixture.sum(|s| s.frames_forwarded), forwarded + 1);
    assert_eq!(
        fixture.shards[1].core.stack.local().unwrap().udp_stats().no_port,
        1,
        "it is refused on the second shard"
    );
    send(&mut fixture, "10.0.0.1:53", 1, 100);
    assert_eq!(received(&fixture), [0, 1, 1], "the next datagram goes to the new shard");
}

/// Members on every shard receive a copy, whichever shard a datagram arrives at, and one shard reports.
#[test]
fn group_members_of_all_shards_receive_copies() {
    let group = IpAddr::from([239, 1, 2, 3]);
    let mut fixture = recording_fixture(3, RssMode::RoundRobin);
    for shard in [0, 1, 2] {
        bind(&mut fixture, shard, "0.0.0.0:53", SHARED).unwrap();
    }
    let filter = Some(SourceFilter::ANY);
    let socket = bind(&mut fixture, 2, "239.1.2.3:53", SHARED).unwrap();
    let reports = fixture.sum_network(|stats| stats.igmp_reports_out);
    fixture.with_shard(2, |_, cx| cx.udp_set_membership(socket, LinkId(0), group, filter)).unwrap();
    fixture.advance(Duration::from_secs(3));
    let reported = fixture.sum_network(|stats| stats.igmp_reports_out) - reports;
    assert_eq!(reported, 2, "a report and its repetition");
    send(&mut fixture, "239.1.2.3:53", 9, 100);
    assert_eq!(received(&fixture), [9, 9, 18], "every socket receives what the host does");
    // What a shard sends comes back to the members of all shards.
    let act = |_: &mut RecordingHandler, cx: &mut Context<'_>| {
        let socket = cx.udp_bind(at("0.0.0.0:0"), UdpOptions::default())?;
        cx.udp_send(socket, Some(at("239.1.2.3:53")), b"from within")
    };
    fixture.with_shard(1, act).unwrap();
    fixture.advance(Duration::from_millis(50));
    assert_eq!(received(&fixture), [10, 10, 20]);
    fixture.with_shard(2, |_, cx| cx.udp_close(socket)).unwrap();
    fixture.advance(Duration::from_secs(3));
    send(&mut fixture, "239.1.2.3:53", 3, 100);
    assert_eq!(received(&fixture), [10, 10, 20], "the host has left the group");
}

#[test]
fn groups_joined_in_one_turn_reach_all_shards() {
    let groups = ["239.1.2.3:53", "239.1.2.4:53"];
    let mut fixture = recording_fixture(3, RssMode::RoundRobin);
    let members = [0, 1].map(|shard| bind(&mut fixture, shard, "0.0.0.0:53", SHARED).unwrap());
    bind(&mut fixture, 2, "0.0.0.0:53", SHARED).unwrap();
    fixture.advance(Duration::from_millis(1));
    // No shard takes a turn in between.
    for (shard, (member, group)) in members.into_iter().zip(groups).enumerate() {
        let (group, join) = (at(group).ip(), Some(SourceFilter::ANY));
        fixture.with_shard(shard, |_, cx| cx.udp_set_membership(member, LinkId(0), group, join)).unwrap();
    }
    fixture.advance(Duration::from_millis(1));
    groups.iter().for_each(|group| send(&mut fixture, group, 9, 100));
    assert_eq!(received(&fixture), [18, 18, 18]);
    fixture.with_shard(0, |_, cx| cx.udp_close(members[0])).unwrap();
    fixture.advance(Duration::from_millis(1));
    groups.iter().for_each(|group| send(&mut fixture, group, 9, 100));
    assert_eq!(received(&fixture), [18, 27, 27], "one group is left");
}

// limit: bytes of looped-back datagrams of a turn
#[test]
fn looped_back_datagrams_of_a_turn_are_limited() {
    let mut fixture = recording_fixture(2, RssMode::RoundRobin);
    let member = bind(&mut fixture, 0, "0.0.0.0:53", UdpOptions::default()).unwrap();
    let (link, group) = (LinkId(0), IpAddr::from([239, 1, 2, 3]));
    let join = Some(SourceFilter::ANY);
    fixture.with_shard(0, |_, cx| cx.udp_set_membership(member, link, group, join)).unwrap();
    fixture.advance(Duration::from_millis(1));
    let within_host = MulticastOptions { hop_limit: Some(0), ..MulticastOptions::default() };
    let act = |_: &mut RecordingHandler, cx: &mut Context<'_>| {
        let options = UdpOptions { multicast_v4: within_host, ..UdpOptions::default() };
        let socket = cx.udp_bind(at("0.0.0.0:0"), options)?;
        // No socket has this port.
        (0..1100).try_for_each(|_| cx.udp_send(socket, Some(at("239.1.2.3:54")), &[7; 1000]))?;
        (0..1100).try_for_each(|_| cx.udp_send(socket, Some(at("239.1.2.3:53")), &[7; 1000]))
    };
    fixture.with_shard(1, act).unwrap();
    // The datagrams are passed on at the end of the turn.
    fixture.shards[1].poll_once(fixture.now).unwrap();
    fixture.shards[0].poll_once(fixture.now).unwrap();
    // Each frame has 42 bytes of headers and is charged 64 bytes more.
    let passed_on = (1 << 20) / (1000 + 42 + 64);
    assert_eq!(fixture.sum_network(|stats| stats.looped_back_dropped), 1100 - passed_on);
    assert!(received(&fixture)[0] > 0);
    fixture.with_shard(1, act).unwrap();
    fixture.shards[1].poll_once(fixture.now).unwrap();
    assert_eq!(fixture.sum_network(|stats| stats.looped_back_dropped), 2 * (1100 - passed_on));
}
