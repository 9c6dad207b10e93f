//! Findings about offloads that change what AF_XDP sees.

use super::description::InterfaceDescription;
use super::drivers::{self, XdpSupport};
use super::examine::{Finding, Level};
use super::setting::{Change, Setting};

/// Name of the feature, as ethtool(8) calls it, as the kernel calls it, and why it must be off.
type Offload = (&'static str, &'static str, &'static str);

/// Merged frames, which drivers do not combine with XDP.
const OFFLOADS: &[Offload] = &[
    (
        "large-receive-offload",
        "rx-lro",
        "drivers refuse the program of AF_XDP while they merge frames, and a stack gets the slow generic mode",
    ),
    (
        "rx-gro-hw",
        "rx-gro-hw",
        "drivers refuse the program of AF_XDP while the device merges frames, and a stack gets the slow generic mode",
    ),
];

/// Hides VLAN tags in every mode.
const VLAN: Offload =
    ("rx-vlan-offload", "rx-vlan-hw-parse", "the device removes VLAN tags, which AF_XDP then does not see");

/// For drivers without XDP.
const GENERIC: Offload = (
    "generic-receive-offload",
    "rx-gro",
    "in generic mode AF_XDP would get merged frames, which fit no buffer",
);

/// Returns the findings.
pub fn all(interface: &InterfaceDescription) -> Vec<Finding> {
    const ITEM: &str = "offload";
    let is_generic =
        drivers::find(interface.driver_name()).is_none_or(|driver| driver.support == XdpSupport::Generic);
    let mut findings = Vec::new();
    for (shown, name, reason) in OFFLOADS.iter().chain([&VLAN]).chain(is_generic.then_some(&GENERIC)) {
        let Some(feature) = interface.features.get(*name).filter(|feature| feature.on) else { continue };
        findings.push(if feature.fixed {
            let text = format!("{shown} is on, and the driver cannot switch it off: {reason}");
            Finding::new(ITEM, Level::Note, text)
        } else {
            let change = Change::of(interface, Setting::Feature((*name).into()), "off");
            Finding::fix(ITEM, format!("{shown} is on: {reason}"), vec![change])
        });
    }
    if findings.is_empty() {
        findings.push(Finding::new(
            ITEM,
            Level::Ok,
            "no offload hides or merges frames before AF_XDP sees them",
        ));
    }
    findings
}
