//! States that were changed are refused, and never make a shard panic.

use super::*;
use crate::saved_shard::{DescriptorTable, SectionReader, SectionWriter};
use ginnel_stack::udp::UdpOptions;
use rustix::fd::AsFd;

/// Returns the state of a shard with sockets of all kinds, the clients, and what keeps them.
fn busy_server() -> (SavedFixture, SavedShard, [Client; 2]) {
    let mut fixture = SavedFixture::new(&small_config(), Peer { listens: true, ..Peer::default() });
    let (domain, mut client) = fixture.open_domain();
    client.accept_explicitly();
    let listener = listen(&mut client, 1);
    fixture.connect_peer(b"offered");
    fixture.connect_peer(b"pending");
    let conn = client.connect(peer_port(), ConnectOptions::default()).unwrap();
    client.udp_open("0.0.0.0:53".parse().unwrap(), UdpOptions::default()).unwrap();
    fixture.events(&mut client);
    client.send(conn, b"sent").unwrap();
    let child = domain.fork(&client).unwrap();
    assert!(client.has_offer(listener));
    let saved = fixture.save();
    (fixture, saved, [client, child])
}

fn copy_of(saved: &SavedShard, bytes: Vec<u8>) -> SavedShard {
    let descriptors = saved.descriptors.iter().map(|fd| fd.try_clone().unwrap()).collect();
    SavedShard { bytes, descriptors, ..SavedShard::default() }
}

fn restore(fixture: &SavedFixture, saved: SavedShard) -> Result<(Shard<ChannelServer>, Device), String> {
    let (mut server, far) = build_server(&fixture.channel, fixture.now);
    server.restore(saved)?;
    Ok((server, far))
}

#[test]
fn damaged_states_are_errors() {
    let (fixture, saved, clients) = busy_server();
    let len = saved.bytes.len();
    for at in (0..len).step_by(len / 50) {
        let mut bytes = saved.bytes.clone();
        bytes[at] ^= 0x10;
        assert!(restore(&fixture, copy_of(&saved, bytes)).is_err());
        assert!(restore(&fixture, copy_of(&saved, saved.bytes[..at].to_vec())).is_err());
    }
    let without = SavedShard { bytes: saved.bytes.clone(), ..SavedShard::default() };
    let error = restore(&fixture, without).map(|_| ()).unwrap_err();
    assert!(error.contains("descriptor"), "{error}");
    // A descriptor of another kind.
    let (reader, _writer) = std::io::pipe().unwrap();
    for index in 0..saved.descriptors.len() {
        let mut other = copy_of(&saved, saved.bytes.clone());
        other.descriptors[index] = reader.as_fd().try_clone_to_owned().unwrap();
        // Sockets that wake clients cannot be told from pipes.
        let _ = restore(&fixture, other);
    }
    assert!(restore(&fixture, saved).is_ok());
    drop(clients);
}

/// Values whose digest is right, but which contradict each other.
#[test]
fn contradictions_do_not_panic() {
    let (fixture, saved, clients) = busy_server();
    let mut reader = SectionReader::new(&saved.bytes).unwrap();
    let sections = [(); 3].map(|()| reader.next().unwrap().to_vec());
    let mut random = Random::new(11);
    let mut refused = 0;
    const ROUNDS: usize = 300;
    for round in 0..ROUNDS {
        let mut changed = sections.clone();
        let section = &mut changed[if round % 4 == 0 { 0 } else { 1 }];
        for _ in 0..=random.below(2) {
            let at = random.below(section.len() as u64) as usize;
            section[at] ^= 1 << random.below(8);
        }
        let mut writer = SectionWriter::default();
        for section in &changed {
            let append = |mut out: Vec<u8>| {
                out.extend_from_slice(section);
                Ok(out)
            };
            writer.add(append).unwrap();
        }
        let bytes = writer.finish(DescriptorTable::default()).bytes;
        match restore(&fixture, copy_of(&saved, bytes)) {
            Err(_) => refused += 1,
            Ok((mut server, _far)) => {
                for turn in 0..20 {
                    server.poll_once(fixture.now + turn * Duration::from_millis(60)).unwrap();
                }
            }
        }
    }
    assert!((ROUNDS / 4..ROUNDS).contains(&refused), "{refused} of {ROUNDS} are refused");
    drop(clients);
}
