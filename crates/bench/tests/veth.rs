//! The comparison with the kernel over veth runs, in each layout, and says who was the bottleneck. Its figures mean nothing here.

use ginnel_testkit::interop::unavailable;
use ginnel_testkit::skip;
use std::process::Command;

/// Runs a bench for a moment and returns what it printed.
fn smoke(bench: &str, layout: &str) -> String {
    let folder = env!("CARGO_TARGET_TMPDIR");
    let output = Command::new(env!("CARGO_BIN_EXE_ginnel-bench"))
        .args([bench, "--smoke", "--seconds", "0.5", "--layout", layout])
        // A lock and a record of its own: it disturbs no measurement, and none has to wait for it.
        .env("TMPDIR", folder)
        .env("CARGO_TARGET_DIR", folder)
        .output()
        .unwrap();
    let (text, problem) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{problem}");
    text.into_owned()
}

#[test]
fn the_comparison_over_veth_runs_in_each_layout_and_names_the_bottleneck() {
    const TEST: &str = "the_comparison_over_veth_runs_in_each_layout_and_names_the_bottleneck";
    let missing = |program: &&&str| Command::new(program).arg("-v").output().is_err();
    let reason = unavailable()
        .or_else(|| (!rustix::process::geteuid().is_root()).then(|| "BPF programs need root".into()))
        .or_else(|| ["nginx", "ethtool", "ip"].iter().find(missing).map(|program| format!("no {program}")));
    if let Some(reason) = reason {
        return skip(TEST, &reason);
    }
    for (bench, layout) in [
        ("short-vs-kernel", "charged"),
        ("keepalive-vs-kernel", "charged"),
        ("short-vs-kernel", "sender"),
        ("short-vs-kernel", "one"),
    ] {
        let text = smoke(bench, layout);
        let line = |start: &str| {
            let line = text.lines().map(str::trim).find(|line| line.starts_with(start));
            line.unwrap_or_else(|| panic!("no {start:?}: {text}"))
        };
        for arm in ["ours: ", "theirs: "] {
            let line = line(arm);
            assert!(line.contains("bottleneck: ") && line.contains(&format!("layout {layout}")), "{line}");
            assert!(!line.starts_with(&format!("{arm}0/s")), "{line}");
            assert_eq!(line.contains("server_receives"), layout != "sender", "{line}");
        }
        assert_eq!(
            line("failures ").split_whitespace().collect::<Vec<_>>(),
            ["failures", "0", "0"],
            "{text}"
        );
    }
}
