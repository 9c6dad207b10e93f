//! The conformance suite, in both roles, with and without the extension.

use super::*;
use crate::conformance::{self, Guarantees};

/// Guarantees of two ends with the extension.
const WHOLE: Guarantees =
    Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };

/// Guarantees without the extension, which sends plain wire frames.
const PLAIN: Guarantees = Guarantees { labels: false, ..WHOLE };

/// Runs the suite with the server on the left, then with the client on the left.
fn run(name: &str, guarantees: Guarantees, adjust: impl Fn(&mut MemifConfig)) {
    for server_first in [true, false] {
        conformance::run(&format!("{name}, server first: {server_first}"), guarantees, &mut || {
            let folder = Folder::new();
            let (mut server, mut client) = connected(&folder, &adjust);
            let (server, client) = (server.queues.remove(0), client.queues.remove(0));
            if server_first { (server, client) } else { (client, server) }
        });
    }
}

#[test]
fn two_ends_with_the_extension_conform() {
    run("memif", WHOLE, |_| {});
}

#[test]
fn two_ends_without_offloads_conform_with_any_mtu() {
    for mtu in [68, 576, 9000, 65_535] {
        run("memif without offloads", PLAIN, |config| {
            (config.offload, config.mtu) = (false, mtu);
        });
    }
}

/// One end does not offer the extension, like other implementations: the other end performs the offloads in
/// software.
#[test]
fn mixed_offload_support_conforms() {
    let cut = Guarantees { uncut_super_frame_bytes: 0, ..PLAIN };
    for role in [Role::Server, Role::Client] {
        run("memif with one end without offloads", cut, |config| config.offload = config.role != role);
    }
}

#[test]
fn small_buffers_and_small_rings_conform() {
    run("memif with buffers of 256 bytes", WHOLE, |config| config.buffer_bytes = 256);
    run("memif with large buffers", WHOLE, |config| (config.buffer_bytes, config.ring) = (65_536, 128));
    run("memif with a ring of 64", PLAIN, |config| (config.ring, config.offload) = (64, false));
}

#[test]
fn multi_queue_device_conforms() {
    conformance::run("memif with three queues as one", WHOLE, &mut || {
        let folder = Folder::new();
        let (server, client) = connected(&folder, |config| config.queues = 3);
        (
            server.into_single_device().expect("a descriptor"),
            client.into_single_device().expect("a descriptor"),
        )
    });
}
