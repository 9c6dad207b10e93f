//! Errors name the cause and the remedy.

use super::*;
use std::io::ErrorKind;

fn error(config: &DpdkConfig) -> std::io::Error {
    open_port(config).err().expect("refused")
}

#[test]
fn ports_that_cannot_be_opened_are_explained() {
    in_namespace("dpdk::tests::errors::ports_that_cannot_be_opened_are_explained", || {
        let says = |config: &DpdkConfig, kind: ErrorKind, words: &str| {
            let error = error(config);
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(error.kind(), kind, "{error}");
        };
        let cases = [
            ("net nothing", "", ErrorKind::InvalidInput, "not the name of a port"),
            ("eth0", "", ErrorKind::NotFound, "DPDK has no driver of this name"),
            ("net_af_packet0", "", ErrorKind::InvalidInput, "args=iface=eth0"),
            ("net_af_packet0", "args=iface=none0", ErrorKind::NotFound, "interface none0 does not exist"),
            ("net_af_xdp0", "args=iface=lo", ErrorKind::NetworkDown, "interface lo is down"),
        ];
        for (port, keys, kind, words) in cases {
            says(&config(port, keys), kind, words);
        }
        says(&config("net_ring0", "queues=64"), ErrorKind::InvalidInput, "the port has 16 queues, and 64");
        let few = config("net_null0", "ring=1000,buffers=1024");
        says(
            &few,
            ErrorKind::InvalidInput,
            "buffers: 1024 are too few for rings of 1000 and 1000 descriptors",
        );
        let large = DpdkConfig { mtu: Some(16_001), ..config("net_null0", "") };
        says(&large, ErrorKind::InvalidInput, "the MTU 16001 is outside 68 to 16000");
        // The failed attempts leave nothing: the name is free.
        drop(open("net_ring0", "queues=2"));
        drop(open("net_null0", ""));
    });
}

#[test]
fn second_start_of_eal_needs_equal_options() {
    in_namespace("dpdk::tests::errors::second_start_of_eal_needs_equal_options", || {
        let first = open("net_null0", "");
        let other = DpdkConfig {
            options: "huge=off,memory_mib=64".parse().expect("valid"),
            ..config("net_null1", "")
        };
        let error = error(&other);
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("a process has one EAL"), "{error}");
        drop(first);
        drop(open("net_null1", ""));
    });
}

#[test]
fn too_little_memory_is_named() {
    in_namespace("dpdk::tests::errors::too_little_memory_is_named", || {
        let options = "huge=off,memory_mib=64,buffers=65536".parse().expect("valid");
        let error = error(&DpdkConfig { options, ..config("net_null0", "") });
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        assert!(error.to_string().contains("need 156 MiB, and EAL has 64 MiB"), "{error}");
    });
}

/// The argument is unknown to EAL, which can be started only once.
#[test]
fn failed_start_of_eal_is_remembered() {
    in_namespace("dpdk::tests::errors::failed_start_of_eal_is_remembered", || {
        let kinds = [(); 2].map(|()| {
            let error = error(&config("net_null0", "eal=--no-such-argument"));
            assert!(error.to_string().contains("EAL does not start: an argument may be wrong"), "{error}");
            error.kind()
        });
        assert_eq!(kinds[0], kinds[1]);
    });
}

#[test]
fn missing_huge_pages_are_counted() {
    in_namespace("dpdk::tests::errors::missing_huge_pages_are_counted", || {
        // More than any machine of the tests has.
        let options = "huge=on,memory_mib=1048576".parse().expect("valid");
        let error = error(&DpdkConfig { options, ..config("net_null0", "") });
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("huge=on needs 1048576 MiB of free huge pages"), "{error}");
        // EAL was not called, so it can still start.
        drop(open("net_null0", ""));
    });
}
