//! Path MTU discovery through kernel routers (RFC 1191, RFC 8201): neither end sees the narrow link.

use crate::case::{Case, Client, Family};
use crate::plan::Outcome;
use crate::suite;
use crate::transfer::Sender;

type Check = fn(&Outcome, &Outcome) -> Result<(), String>;

fn path_mtu(outcome: &Outcome, expected: u32) -> Result<(), String> {
    if outcome.info.path_mtu == expected {
        return Ok(());
    }
    Err(format!("the sender found a path MTU of {} instead of {expected}", outcome.info.path_mtu))
}

/// MTU of the narrow link, and the check for each sender.
const NARROW_V4: [(u32, Check, Check); 3] = [
    (1400, |ginnel, _| path_mtu(ginnel, 1400), |_, kernel| path_mtu(kernel, 1400)),
    (576, |ginnel, _| path_mtu(ginnel, 576), |_, kernel| path_mtu(kernel, 576)),
    (552, |ginnel, _| path_mtu(ginnel, 552), |_, kernel| path_mtu(kernel, 552)),
];
const NARROW_V6: [(u32, Check, Check); 2] = [
    (1400, |ginnel, _| path_mtu(ginnel, 1400), |_, kernel| path_mtu(kernel, 1400)),
    (1280, |ginnel, _| path_mtu(ginnel, 1280), |_, kernel| path_mtu(kernel, 1280)),
];

fn cases(bytes: u64) -> Vec<Case> {
    let v4 = NARROW_V4.into_iter().map(|narrow| (Family::V4, narrow));
    let v6 = NARROW_V6.into_iter().map(|narrow| (Family::V6, narrow));
    let mut cases = Vec::new();
    for (family, (narrow, of_ginnel, of_kernel)) in v4.chain(v6) {
        for client in [Client::Ginnel, Client::Kernel] {
            for (sender, check) in [(Sender::Ginnel, of_ginnel), (Sender::Kernel, of_kernel)] {
                for offload in [true, false] {
                    let with = if offload { "" } else { ", no offload" };
                    let name =
                        format!("narrow {narrow}, {family:?}, {client:?} connects, {sender:?} sends{with}");
                    let narrow = Some(narrow);
                    let case = Case { name, family, client, narrow, offload, check, ..Case::default() };
                    cases.push(sender.sends(bytes, case));
                }
            }
        }
    }
    cases
}

#[test]
fn the_path_mtu_is_found_behind_routers() {
    suite::run("the_path_mtu_is_found_behind_routers", 4, cases(8 << 20));
}

/// Both ends use jumbo frames, and an Ethernet link is between them.
#[test]
fn jumbo_frames_find_path_mtu_behind_router() {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for sender in [Sender::Ginnel, Sender::Kernel] {
            let check: Check = match sender {
                Sender::Kernel => |_, kernel| path_mtu(kernel, 1500),
                _ => |ginnel, _| path_mtu(ginnel, 1500),
            };
            let name = format!("jumbo frames through Ethernet, {family:?}, {sender:?} sends");
            let case = Case { name, family, mtu: 9000, narrow: Some(1500), check, ..Case::default() };
            cases.push(sender.sends(64 << 20, case));
        }
    }
    suite::run("jumbo_frames_find_path_mtu_behind_router", 4, cases);
}
