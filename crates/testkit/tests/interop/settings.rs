//! Negotiation between the two stacks: every option disabled on either side, ECN in all modes, SYN cookies,
//! congestion control.

use crate::case::{Case, Client, Family};
use crate::plan::{Info, Outcome, Plan};
use crate::suite;
use ginnel::Config;
use ginnel::config::TcpConfig;
use ginnel_stack::tcp::config::{CongestionControl, EcnMode, SynCookies};

/// Condition on the negotiated options of both ends.
type AgreedOptions = fn(&Info) -> bool;

/// A combination of settings.
struct Setting {
    name: &'static str,
    sysctls: &'static [(&'static str, &'static str)],
    config: fn(&mut Config),
    congestion: &'static str,
    check: fn(&Outcome, &Outcome) -> Result<(), String>,
}

fn agree(ginnel: &Outcome, kernel: &Outcome, agreed: AgreedOptions) -> Result<(), String> {
    for (who, outcome) in [("Ginnel", ginnel), ("the kernel", kernel)] {
        if !agreed(&outcome.info) {
            return Err(format!("{who} agreed on something else: {}", outcome.info.text));
        }
    }
    Ok(())
}

const DEFAULT: Setting = Setting {
    name: "defaults",
    sysctls: &[],
    config: |_| {},
    congestion: "cubic",
    check: |a, b| agree(a, b, |i| i.timestamps && i.sack && i.window_scaling && !i.ecn),
};

const SETTINGS: &[Setting] = &[
    DEFAULT,
    Setting {
        name: "kernel without timestamps",
        sysctls: &[("net.ipv4.tcp_timestamps", "0")],
        check: |a, b| agree(a, b, |i| !i.timestamps && i.sack && i.window_scaling),
        ..DEFAULT
    },
    Setting {
        name: "kernel without SACK",
        sysctls: &[("net.ipv4.tcp_sack", "0")],
        check: |a, b| agree(a, b, |i| i.timestamps && !i.sack && i.window_scaling),
        ..DEFAULT
    },
    Setting { name: "kernel without DSACK", sysctls: &[("net.ipv4.tcp_dsack", "0")], ..DEFAULT },
    Setting {
        name: "kernel without window scaling",
        sysctls: &[("net.ipv4.tcp_window_scaling", "0")],
        check: |a, b| agree(a, b, |i| i.timestamps && i.sack && !i.window_scaling),
        ..DEFAULT
    },
    Setting {
        name: "kernel without any option",
        sysctls: &[
            ("net.ipv4.tcp_timestamps", "0"),
            ("net.ipv4.tcp_sack", "0"),
            ("net.ipv4.tcp_window_scaling", "0"),
        ],
        check: |a, b| agree(a, b, |i| !i.timestamps && !i.sack && !i.window_scaling),
        ..DEFAULT
    },
    Setting {
        name: "Ginnel without timestamps",
        config: |config| config.tcp.timestamps = false,
        check: |a, b| agree(a, b, |i| !i.timestamps && i.sack && i.window_scaling),
        ..DEFAULT
    },
    Setting {
        name: "Ginnel without SACK",
        config: |config| config.tcp.sack = false,
        check: |a, b| agree(a, b, |i| i.timestamps && !i.sack && i.window_scaling),
        ..DEFAULT
    },
    Setting {
        name: "Ginnel without window scaling",
        config: |config| config.tcp.window_scaling = false,
        check: |a, b| agree(a, b, |i| i.timestamps && i.sack && !i.window_scaling),
        ..DEFAULT
    },
    Setting {
        name: "Ginnel without any option",
        config: |config| {
            config.tcp =
                TcpConfig { timestamps: false, sack: false, window_scaling: false, ..config.tcp.clone() };
        },
        check: |a, b| agree(a, b, |i| !i.timestamps && !i.sack && !i.window_scaling),
        ..DEFAULT
    },
    Setting {
        name: "Ginnel with NewReno",
        config: |c| c.tcp.congestion_control = CongestionControl::NewReno,
        ..DEFAULT
    },
    Setting {
        name: "Ginnel with BBR",
        config: |c| c.tcp.congestion_control = CongestionControl::Bbr,
        ..DEFAULT
    },
    Setting { name: "kernel with Reno", congestion: "reno", ..DEFAULT },
    Setting { name: "kernel with BBR", congestion: "bbr", ..DEFAULT },
    Setting {
        name: "kernel asks for ECN",
        sysctls: &[("net.ipv4.tcp_ecn", "1")],
        // Ginnel's ECN is passive by default, so only the kernel's SYN requests it.
        check: |_, _| Ok(()),
        ..DEFAULT
    },
    Setting {
        name: "both ask for ECN",
        sysctls: &[("net.ipv4.tcp_ecn", "1")],
        config: |config| config.tcp.ecn = EcnMode::Active,
        check: |a, b| agree(a, b, |i| i.ecn),
        ..DEFAULT
    },
    Setting {
        name: "kernel refuses ECN",
        sysctls: &[("net.ipv4.tcp_ecn", "0")],
        config: |config| config.tcp.ecn = EcnMode::Active,
        check: |a, b| agree(a, b, |i| !i.ecn),
        ..DEFAULT
    },
    Setting {
        name: "Ginnel refuses ECN",
        sysctls: &[("net.ipv4.tcp_ecn", "1")],
        config: |config| config.tcp.ecn = EcnMode::Off,
        check: |a, b| agree(a, b, |i| !i.ecn),
        ..DEFAULT
    },
    Setting { name: "kernel with SYN cookies", sysctls: &[("net.ipv4.tcp_syncookies", "2")], ..DEFAULT },
    Setting {
        name: "Ginnel with SYN cookies",
        config: |config| config.tcp.syn_cookies = SynCookies::Always,
        ..DEFAULT
    },
    Setting {
        name: "both with SYN cookies, no timestamps",
        sysctls: &[("net.ipv4.tcp_syncookies", "2"), ("net.ipv4.tcp_timestamps", "0")],
        config: |config| config.tcp.syn_cookies = SynCookies::Always,
        // A cookie without a timestamp cannot encode the options.
        check: |a, b| agree(a, b, |i| !i.timestamps),
        ..DEFAULT
    },
    Setting { name: "kernel probes the path MTU", sysctls: &[("net.ipv4.tcp_mtu_probing", "2")], ..DEFAULT },
    Setting {
        name: "kernel with small buffers",
        sysctls: &[("net.ipv4.tcp_rmem", "4096 16384 65536"), ("net.ipv4.tcp_wmem", "4096 16384 65536")],
        ..DEFAULT
    },
];

fn cases(bytes: u64, link: &'static str) -> Vec<Case> {
    let mut cases = Vec::new();
    for setting in SETTINGS {
        for client in [Client::Ginnel, Client::Kernel] {
            let family = if cases.len() % 4 < 2 { Family::V4 } else { Family::V6 };
            let name = format!("{}, {client:?} connects {link}", setting.name);
            let Setting { config, congestion, check, .. } = *setting;
            let (ginnel, kernel) = (Plan::send(bytes), Plan::send(bytes));
            let sysctls = setting.sysctls.to_vec();
            let case = Case { name, family, client, ginnel, kernel, link, sysctls, ..Case::default() };
            cases.push(Case { config, congestion, check, ..case });
        }
    }
    cases
}

#[test]
fn both_stacks_agree_on_options() {
    suite::run("both_stacks_agree_on_options", 2, cases(8 << 20, ""));
}

#[test]
fn recovery_works_with_every_negotiation() {
    suite::run(
        "recovery_works_with_every_negotiation",
        6,
        cases(4 << 20, "delay=1ms loss=1% reorder=1% duplicate=1%"),
    );
}
