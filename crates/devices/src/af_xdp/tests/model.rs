//! Compares the redirect program with a model in Rust: the kernel runs the program on frames of every kind,
//! complete, truncated and randomly modified.

use super::super::bpf;
use super::super::filter::{PortKind, RedirectFilter};
use super::super::redirect::{XDP_DROP, XDP_PASS};
use super::super::{RedirectScope, errors};
use super::in_bpf_namespace;
use crate::random::Random;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::BTreeSet;
use std::os::fd::AsFd;

const OURS_4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const OURS_6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
const THEIRS_4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);
const THEIRS_6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9);
const VLAN: u16 = 12;
const TCP_PORT: u16 = 80;
const UDP_PORT: u16 = 53;

/// Returns whether the program should redirect a frame to the stack. `None`, for a truncated frame, means no.
fn is_ours(frame: &[u8], shared: bool) -> Option<bool> {
    let be16 = |bytes: &[u8], at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    let mut kind = be16(frame, 12)?;
    let mut packet = frame.get(14..)?;
    let mut vlan = 0;
    if kind == 0x8100 || kind == 0x88a8 {
        vlan = be16(packet, 0)? & 0xfff;
        kind = be16(packet, 2)?;
        packet = &packet[4..];
    }
    let mine = |address: IpAddr| (address == OURS_4 || address == OURS_6) && (vlan == 0 || vlan == VLAN);
    let v4 = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?));
    let v6 = |at: usize| Some(IpAddr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?));
    let port_is_ours = |protocol: u8, port: u16| match protocol {
        6 => port == TCP_PORT,
        17 => port == UDP_PORT,
        _ => false,
    };
    match kind {
        0x0806 => {
            packet.get(..28)?;
            Some(packet[..6] == [0, 1, 8, 0, 6, 4] && mine(v4(24)?) && !shared)
        }
        0x0800 => {
            packet.get(..20)?;
            if !mine(v4(16)?) || !shared {
                return Some(mine(v4(16)?));
            }
            let header = |packet: &[u8]| usize::from(packet[0] & 15) * 4;
            let at = header(packet);
            if be16(packet, 6)? & 0x3fff != 0 || at < 20 {
                return Some(false);
            }
            let transport = packet.get(at..)?;
            if packet[9] != 1 {
                return Some(port_is_ours(packet[9], be16(transport, 2)?));
            }
            transport.get(..8)?;
            if ![3, 11, 12].contains(&transport[0]) {
                return Some(false);
            }
            let quote = &transport[8..];
            quote.get(..20)?;
            let at = header(quote);
            let ports = quote.get(at..at + 4)?;
            Some(be16(quote, 6)? & 0x1fff == 0 && at >= 20 && port_is_ours(quote[9], be16(ports, 0)?))
        }
        0x86dd => {
            packet.get(..40)?;
            let mut next = packet[6];
            if !mine(v6(24)?) {
                packet.get(..64)?;
                return Some(next == 58 && [135, 136].contains(&packet[40]) && mine(v6(48)?) && !shared);
            }
            if !shared {
                return Some(true);
            }
            let mut rest = &packet[40..];
            for _ in 0..3 {
                if [0, 43, 60].contains(&next) {
                    rest.get(..8)?;
                    let len = (usize::from(rest[1]) + 1) * 8;
                    next = rest[0];
                    rest = rest.get(len..)?;
                }
            }
            if next == 58 {
                rest.get(..8)?;
                let quote = &rest[8..];
                let is_error = (1..=4).contains(&rest[0]);
                let ports = quote.get(40..44)?;
                return Some(is_error && port_is_ours(quote[6], be16(ports, 0)?));
            }
            Some([6, 17].contains(&next) && port_is_ours(next, be16(rest.get(..4)?, 2)?))
        }
        _ => Some(false),
    }
}

/// Returns a frame of a random kind, which in most cases is close to the frames that the program inspects.
fn frame(random: &mut Random) -> Vec<u8> {
    fn one<T: Copy>(random: &mut Random, of: &[T]) -> T {
        of[random.below(of.len() as u64) as usize]
    }
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    match random.below(4) {
        0 => frame.extend([0x81, 0, 0x40, one(random, &[0, VLAN as u8, 13])]),
        1 => frame.extend([0x88, 0xa8, one(random, &[0, 1]), VLAN as u8]),
        _ => {}
    }
    let ports = |random: &mut Random| {
        let port = |random: &mut Random| one(random, &[TCP_PORT, UDP_PORT, 1, 81, 65_535]).to_be_bytes();
        [port(random), port(random)].concat()
    };
    let v4 = |random: &mut Random, protocol: u8| {
        let words = one(random, &[5, 5, 5, 6, 15, 4]);
        let fragment = one(random, &[0u16, 0, 0, 0x4000, 0x2000, 1]).to_be_bytes();
        let mut header = vec![0x40 | words, 0, 0, 0, 0, 0, fragment[0], fragment[1], 64, protocol, 0, 0];
        header.extend(one(random, &[OURS_4, THEIRS_4]).octets());
        header.extend(one(random, &[OURS_4, OURS_4, THEIRS_4]).octets());
        header.resize(usize::from(words.max(5)) * 4, 1);
        header
    };
    let v6 = |random: &mut Random, next: u8| {
        let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 2);
        let mut header = vec![0x60, 0, 0, 0, 0, 0, next, 64];
        header.extend(one(random, &[OURS_6, THEIRS_6]).octets());
        header.extend(one(random, &[OURS_6, OURS_6, THEIRS_6, group]).octets());
        header
    };
    let protocol = one(random, &[6u8, 17, 1, 58, 6, 17, 132]);
    match random.below(4) {
        0 => {
            frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, one(random, &[1, 2])]);
            frame.extend([0; 16]);
            frame.extend(one(random, &[OURS_4, THEIRS_4]).octets());
        }
        1 => {
            frame.extend([8, 0]);
            frame.extend(v4(random, protocol));
            if protocol == 1 {
                frame.extend([one(random, &[3, 11, 12, 5, 0, 8]), 0, 0, 0, 0, 0, 0, 0]);
                let quoted = one(random, &[6, 17, 1]);
                frame.extend(v4(random, quoted));
            }
            frame.extend(ports(random));
            frame.extend([0; 8]);
        }
        2 => {
            frame.extend([0x86, 0xdd]);
            let headers: Vec<u8> =
                (0..random.below(5)).map(|_| one(random, &[0u8, 43, 60, 60, 44])).collect();
            frame.extend(v6(random, *headers.first().unwrap_or(&protocol)));
            for (i, _) in headers.iter().enumerate() {
                let words = one(random, &[0u8, 0, 1]);
                frame.extend([*headers.get(i + 1).unwrap_or(&protocol), words]);
                frame.resize(frame.len() + 6 + usize::from(words) * 8, 0);
            }
            if protocol == 58 {
                frame.extend([one(random, &[1, 2, 3, 4, 0, 5, 128]), 0, 0, 0, 0, 0, 0, 0]);
                let quoted = one(random, &[6, 17, 58]);
                frame.extend(v6(random, quoted));
            }
            frame.extend(ports(random));
            frame.extend([0; 8]);
        }
        _ => {
            frame.extend([0x86, 0xdd]);
            frame.extend(v6(random, 58));
            frame.extend([one(random, &[135, 136, 133, 134]), 0, 0, 0, 0, 0, 0, 0]);
            frame.extend(one(random, &[OURS_6, THEIRS_6]).octets());
        }
    }
    match random.below(4) {
        0 => frame.truncate(14 + random.below(frame.len() as u64 - 13) as usize),
        1 => {
            let at = random.below(frame.len() as u64) as usize;
            frame[at] = random.below(256) as u8;
        }
        _ => {}
    }
    frame
}

/// Returns kind and protocol of a frame. For tagged frames, the kind is that of the tag.
fn kind(frame: &[u8]) -> (u16, u8) {
    let kind = u16::from_be_bytes([frame[12], frame[13]]);
    (
        kind,
        match kind {
            0x0800 => frame[23],
            0x86dd => frame[20],
            _ => 0,
        },
    )
}

#[test]
fn program_decides_like_its_model() {
    in_bpf_namespace("af_xdp::tests::model::program_decides_like_its_model", || {
        for (take, shared) in [(RedirectScope::Addresses, false), (RedirectScope::Ports, true)] {
            let filter = RedirectFilter::new(take, 4, 4).expect("maps");
            for vlan in [0, VLAN] {
                filter.add_address(OURS_4.into(), vlan).expect("map entry");
                filter.add_address(OURS_6.into(), vlan).expect("map entry");
            }
            filter.set_ports(PortKind::Tcp, TCP_PORT..=TCP_PORT, true).expect("ports");
            filter.set_ports(PortKind::Udp, UDP_PORT..=UDP_PORT, true).expect("ports");
            let program = filter.load(false).expect("the verifier accepts the program");
            let mut random = Random::new(16);
            let mut missed = 0;
            let mut kinds = BTreeSet::new();
            for number in 0..200_000 {
                let frame = frame(&mut random);
                let verdict = bpf::test_run(program.as_fd(), &frame).expect("BPF_PROG_TEST_RUN");
                let expected = is_ours(&frame, shared).unwrap_or(false);
                // Without a socket, frames for the stack are dropped and counted.
                let wanted = if expected { XDP_DROP } else { XDP_PASS };
                assert_eq!(verdict, wanted as u32, "frame {number}, shared: {shared}: {frame:02x?}");
                if expected {
                    kinds.insert(kind(&frame));
                }
                missed += u64::from(verdict == XDP_DROP as u32);
            }
            assert_eq!(filter.drops_without_socket().expect("a counter"), missed);
            let both = [(0x0800, 6), (0x0800, 17), (0x0800, 1), (0x86dd, 6), (0x86dd, 17), (0x86dd, 58)];
            let alone = [(0x0806, 0), (0x86dd, 132)];
            assert!(both.iter().all(|kind| kinds.contains(kind)), "shared: {shared}, only {kinds:?}");
            assert!(alone.iter().all(|kind| kinds.contains(kind) != shared), "shared: {shared}, {kinds:?}");
        }
    });
}

#[test]
fn maps_change_while_the_program_runs() {
    in_bpf_namespace("af_xdp::tests::model::maps_change_while_the_program_runs", || {
        let filter = RedirectFilter::new(RedirectScope::Ports, 4, 1).expect("maps");
        let program = filter.load(true).expect("the verifier accepts the program");
        let mut packet = vec![0; 12];
        packet.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0]);
        packet.extend([THEIRS_4.octets(), OURS_4.octets()].concat());
        packet.extend([0x10, 0, 0, TCP_PORT as u8]);
        packet.resize(54, 0);
        let is_taken =
            || bpf::test_run(program.as_fd(), &packet).expect("BPF_PROG_TEST_RUN") == XDP_DROP as u32;
        assert!(!is_taken(), "the maps are empty");
        filter.set_ports(PortKind::Tcp, 0..=u16::MAX, true).expect("ports");
        assert!(!is_taken(), "the address is not in the map");
        filter.add_address(OURS_4.into(), 0).expect("map entry");
        assert!(is_taken());
        filter.set_ports(PortKind::Tcp, 70..=90, false).expect("ports");
        assert!(!is_taken(), "the port was removed");
        filter.set_ports(PortKind::Tcp, TCP_PORT..=TCP_PORT, true).expect("ports");
        assert!(is_taken());
        filter.remove_address(OURS_4.into(), 0).expect("the entry exists");
        filter.remove_address(OURS_4.into(), 0).expect("removing a missing entry succeeds");
        assert!(!is_taken());
    });
}

#[test]
fn verifier_errors_contain_the_log() {
    in_bpf_namespace("af_xdp::tests::model::verifier_errors_contain_the_log", || {
        let mut assembler = super::super::assembler::Assembler::default();
        assembler.exit();
        let code = assembler.finish().expect("exit instruction");
        let (error, log) = bpf::load(&code, false, "wrong").expect_err("R0 was never set");
        assert!(log.contains("R0 !read_ok"), "{error}: {log}");
        assert!(errors::load_error(error, &log, false).to_string().contains("R0 !read_ok"));
    });
}
