//! The conformance suite over pairs of ports.

use super::*;
use crate::conformance::{self, Guarantees};
use crate::memif::{self, MemifConfig, Role, SocketName};
use ginnel_stack::device::Device;
use ginnel_testkit::skip;
use std::time::Duration;

const GUARANTEES: Guarantees = Guarantees { back_pressure: false, uncut_super_frame_bytes: 0, labels: false };
const WITH_BACK_PRESSURE: Guarantees = Guarantees { back_pressure: true, ..GUARANTEES };

fn single(port: &str, keys: &str) -> Device {
    open(port, keys).into_single_device().expect("one queue")
}

/// A port of net_ring receives what it sends, so two ports exchange their receiving halves.
#[test]
fn ring_conforms() {
    in_namespace("dpdk::tests::pairs::ring_conforms", || {
        conformance::run("net_ring", WITH_BACK_PRESSURE, &mut || {
            let port = |last| {
                let config = DpdkConfig {
                    mac: Some([2, 0, 0, 0, 1, last]),
                    ..config(&format!("net_ring{}", unique()), "")
                };
                open_port(&config).and_then(Dpdk::into_single_device).expect("a port")
            };
            let (left, right) = (port(1), port(2));
            (Device { rx: right.rx, tx: left.tx }, Device { rx: left.rx, tx: right.tx })
        });
    });
}

/// DPDK's memif at one end and Ginnel's at the other, in both roles, on both sides.
#[test]
fn memif_conforms_with_ginnels_memif() {
    in_namespace("dpdk::tests::pairs::memif_conforms_with_ginnels_memif", || {
        let folder = std::env::temp_dir().join(format!("ginnel-dpdk-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for (role, other) in [(Role::Server, "client"), (Role::Client, "server")] {
            for dpdk_is_left in [false, true] {
                let name = format!("net_memif as {other}, on the left: {dpdk_is_left}");
                conformance::run(&name, WITH_BACK_PRESSURE, &mut || {
                    let number = unique();
                    let socket = folder.join(number.to_string());
                    let ginnel = || {
                        memif::open(&MemifConfig::new(SocketName::Path(socket.clone()), role)).expect("memif")
                    };
                    let dpdk = || {
                        let socket = socket.display();
                        let keys = format!("args=role={other}+socket={socket}+socket-abstract=no+id=0");
                        single(&format!("net_memif{number}"), &keys)
                    };
                    // The server listens first.
                    let (ginnel, dpdk) = if role == Role::Server {
                        let ginnel = ginnel();
                        (ginnel, dpdk())
                    } else {
                        let dpdk = dpdk();
                        (ginnel(), dpdk)
                    };
                    assert!(ginnel.link.wait_for(true, Duration::from_secs(10)), "no connection");
                    let mut ginnel = ginnel.into_single_device().expect("one queue");
                    let mut dpdk = dpdk;
                    // A client offers its first buffers when it receives.
                    while ginnel.tx.reserve(60).is_none() {
                        dpdk.rx.arm();
                    }
                    if dpdk_is_left { (dpdk, ginnel) } else { (ginnel, dpdk) }
                });
            }
        }
        let _ = std::fs::remove_dir_all(&folder);
    });
}

/// Creates two ports of net_tap whose interfaces are ports of one bridge.
fn bridged_taps(offload: bool) -> (Device, Device) {
    let number = unique();
    ip(&format!("link add br{number} type bridge mcast_snooping 0"));
    set_up(&format!("br{number}"));
    let port = |side: char| {
        let interface = format!("t{number}{side}");
        let port = format!("net_tap{}", unique());
        let config = DpdkConfig { offload, ..config(&port, &format!("args=iface={interface}")) };
        let device = open_port(&config).and_then(Dpdk::into_single_device).expect("a port");
        // A bridge delivers frames to the address of one of its ports to the host itself. Each port gets an
        // address other than that of the DPDK port, which it has at first.
        let address = format!("02:00:00:00:{:02x}:{:02x}", number % 256, side as u32);
        ip(&format!("link set {interface} address {address}"));
        set_up(&interface);
        ip(&format!("link set {interface} master br{number}"));
        device
    };
    (port('a'), port('b'))
}

#[test]
fn tap_conforms_with_checksums_and_segmentation() {
    in_namespace("dpdk::tests::pairs::tap_conforms_with_checksums_and_segmentation", || {
        conformance::run("net_tap", GUARANTEES, &mut || {
            let pair = bridged_taps(true);
            let capabilities = pair.0.tx.capabilities();
            assert!(capabilities.tx_checksum && capabilities.gso_bytes_max > 60_000, "{capabilities:?}");
            pair
        });
    });
}

#[test]
fn tap_conforms_without_offloads() {
    in_namespace("dpdk::tests::pairs::tap_conforms_without_offloads", || {
        conformance::run("net_tap without offloads", GUARANTEES, &mut || {
            let pair = bridged_taps(false);
            let capabilities = pair.0.tx.capabilities();
            assert!(!capabilities.tx_checksum && capabilities.gso_bytes_max == 0, "{capabilities:?}");
            pair
        });
    });
}

/// Runs the suite over ports at the ends of veth pairs.
fn veth_conforms(driver: &str) {
    conformance::run(driver, GUARANTEES, &mut || {
        let number = unique();
        let (left, right) = (format!("left{number}"), format!("right{number}"));
        veth(&left, &right);
        let end =
            |interface: &str| single(&format!("{driver}{}", unique()), &format!("args=iface={interface}"));
        (end(&left), end(&right))
    });
}

#[test]
fn af_packet_conforms() {
    in_namespace("dpdk::tests::pairs::af_packet_conforms", || veth_conforms("net_af_packet"));
}

#[test]
fn af_xdp_conforms() {
    let test = "dpdk::tests::pairs::af_xdp_conforms";
    in_namespace(test, || match crate::af_xdp::check_program() {
        Err(error) => skip(test, &error.to_string()),
        Ok(()) => veth_conforms("net_af_xdp"),
    });
}
