//! `ginnel doctor` on descriptions of machines with drivers that no test machine has, and on interfaces in
//! network namespaces.
//!
//! The descriptions in `tests/doctor` were composed after what ethtool(8) prints for these drivers, but for
//! `virtio-recorded`, which `ginnel doctor --describe` has recorded on a virtual machine with one queue.
//! `GINNEL_BLESS=1` writes the expected texts beside them.

mod temp_folder;

use ginnel_testkit::interop::{Namespace, VethEnd, unavailable};
use ginnel_testkit::skip;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use temp_folder::TempFolder;

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
const MACHINES: [&str; 7] = ["ixgbe", "ice", "mlx5", "ena", "virtio", "virtio-recorded", "unknown"];

fn description(machine: &str, suffix: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doctor").join(format!("{machine}.{suffix}"))
}

fn doctor(arguments: &[&str]) -> Output {
    Command::new(GINNEL).arg("doctor").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns the findings about a described machine.
fn findings(machine: &str, options: &[&str]) -> Vec<Value> {
    let path = description(machine, "json").display().to_string();
    let output = doctor(&[&["--from", &path, "--json"], options].concat());
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    found["findings"].as_array().unwrap().clone()
}

/// Returns the level and the changes of an item.
fn item(findings: &[Value], item: &str) -> (String, Vec<String>) {
    let finding = findings.iter().find(|finding| finding["item"] == item).unwrap();
    let changes = finding["changes"].as_array().unwrap().iter();
    let changes = changes
        .map(|change| format!("{} {}", change["setting"].as_str().unwrap(), change["to"].as_str().unwrap()));
    (finding["level"].as_str().unwrap().into(), changes.collect())
}

#[test]
fn described_machines_have_the_expected_findings() {
    for machine in MACHINES {
        let path = description(machine, "json").display().to_string();
        let output = doctor(&["--from", &path]);
        let shown = text(&output.stdout);
        assert_eq!(text(&output.stderr), "", "{machine}");
        let is_done = shown.ends_with("Nothing is to be done.\n");
        assert_eq!(output.status.code(), Some(i32::from(!is_done)), "{machine}");
        let expected = description(machine, "txt");
        if std::env::var_os("GINNEL_BLESS").is_some() {
            fs::write(&expected, &shown).unwrap();
        }
        assert_eq!(shown, fs::read_to_string(expected).unwrap_or_default(), "{machine}");
    }
}

#[test]
fn findings_name_what_to_change() {
    let ixgbe = findings("ixgbe", &["--shards", "4"]);
    assert_eq!(item(&ixgbe, "channels").1, ["enp4s0f0 channels rx=0 tx=0 combined=4"]);
    assert_eq!(item(&ixgbe, "offload").1, ["enp4s0f0 rx-lro off"]);
    assert_eq!(item(&ixgbe, "irqbalance").0, "todo");
    assert_eq!(item(&ixgbe, "governor").1.len(), 32);
    let mlx5 = findings("mlx5", &[]);
    assert_eq!(item(&mlx5, "rps").1, ["/sys/class/net/enp59s0f0np0/queues/rx-0/rps_cpus 00000000"]);
    assert_eq!(item(&mlx5, "rss").1, ["enp59s0f0np0 table of queues default"]);
    assert_eq!(
        item(&mlx5, "coalescing").1,
        ["enp59s0f0np0 coalescing adaptive-rx=off rx-usecs=20 rx-frames=128"]
    );
    let ena = findings("ena", &[]);
    assert_eq!(item(&ena, "driver").1, ["ens5 channels rx=0 tx=0 combined=4"]);
    let virtio = findings("virtio", &[]);
    assert_eq!(item(&virtio, "bpf").0, "fail");
    assert_eq!(item(&virtio, "hugepages").1, ["/sys/kernel/mm/transparent_hugepage/enabled madvise"]);
    assert_eq!(item(&findings("ice", &[]), "channels").0, "ok");
    assert_eq!(item(&findings("unknown", &[]), "driver").0, "note");
}

#[test]
fn configurations_of_described_machines_are_valid() {
    let folder = TempFolder::new("doctor-write");
    for machine in MACHINES.into_iter().filter(|machine| *machine != "unknown") {
        let file = folder.0.join(format!("{machine}.toml")).display().to_string();
        let path = description(machine, "json").display().to_string();
        let output = doctor(&["--from", &path, "--write", &file, "--ports", "80,443,8000-8010"]);
        assert!(output.status.success(), "{machine}: {}", text(&output.stderr));
        let config = ginnel::Config::from_file(Path::new(&file)).unwrap();
        assert_eq!(config.shards.cpus.len(), config.shards.count as usize, "{machine}");
        // A default route for each family.
        let routes = if matches!(machine, "ice" | "virtio-recorded") { 2 } else { 1 };
        assert_eq!(config.routes.len(), routes, "{machine}");
        let again = doctor(&["--from", &path, "--write", &file]);
        assert!(text(&again.stderr).contains("remove it, or name another file"), "{machine}");
    }
    let path = description("unknown", "json").display().to_string();
    let file = folder.0.join("unknown.toml").display().to_string();
    let output = doctor(&["--from", &path, "--write", &file]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--address is missing") && !Path::new(&file).exists());
}

#[test]
fn wrong_descriptions_are_refused_with_a_reason() {
    let folder = TempFolder::new("doctor-wrong");
    let good = fs::read_to_string(description("ice", "json")).unwrap();
    let file = folder.0.join("x.json");
    for (content, reason) in [
        (String::new(), "EOF"),
        (good[..good.len() / 2].to_owned(), "EOF"),
        (good.replace("\"version\": 1", "\"version\": 7"), "has version 7"),
        (good.replace("\"rps\"", "\"rpz\""), "unknown field `rpz`"),
        (good.replace("\"combined\": 4", "\"combined\": -4"), "invalid value"),
        ("x".repeat(5 << 20), "is larger than"),
    ] {
        fs::write(&file, content).unwrap();
        let output = doctor(&["--from", file.to_str().unwrap()]);
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{error}");
        assert!(error.contains("x.json: ") && error.contains(reason), "{error}");
    }
    // Numbers of queues, CPUs and interrupts that no device has.
    for (from, to) in [
        ("\"combined\": 4", "\"combined\": 4294967295"),
        ("\"number\": 0,", "\"number\": 4294967295,"),
        ("TxRx-3", "TxRx-4294967295"),
        ("\"indirection\": [", "\"indirection\": [4294967295,"),
        ("\"speed_mbits\": 100000", "\"speed_mbits\": 18446744073709551615"),
    ] {
        assert!(good.contains(from), "{from}");
        fs::write(&file, good.replace(from, to)).unwrap();
        let output = doctor(&["--from", file.to_str().unwrap()]);
        assert!(output.status.code().is_some_and(|code| code < 3), "{to}: {}", text(&output.stderr));
    }
}

#[test]
fn wrong_command_lines_are_refused_with_a_reason() {
    for (arguments, reason) in [
        (&["nonesuch0"][..], "there is no interface \"nonesuch0\""),
        (&["lo", "--shards", "0"], "--shards: 0 shards are not 1 to 64"),
        (&["lo", "--only", "nonsense"], "nonsense"),
        (&["lo", "--write", "/nonexistent/x"], "lo has no frames"),
        (&["--undo", "lo"], "--undo restores all that --fix has changed: leave out lo"),
        (&["lo", "--fix", "--undo"], "cannot be used with"),
    ] {
        let output = doctor(arguments);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains(reason), "{arguments:?}: {error}");
    }
}

/// Interfaces in a namespace, and the folder of the record.
struct Host {
    namespace: Namespace,
    _peer: Namespace,
    folder: TempFolder,
}

impl Host {
    /// Creates a namespace with an end of a veth pair, `web0`, or returns `None` and says why.
    fn new(test: &str) -> Option<Self> {
        let is_root = rustix::process::geteuid().is_root();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let reason = unavailable()
            .or_else(|| (!is_root).then(|| "a sysfs of a namespace needs root".into()))
            .or_else(|| Command::new("ethtool").arg("--version").output().err().map(|_| "no ethtool".into()))
            .or_else(|| (cpus < 2).then(|| "two shards need two CPUs".into()));
        if let Some(reason) = reason {
            skip(test, &reason);
            return None;
        }
        let (namespace, peer) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        let veth = |name| VethEnd { name, queues: 2 };
        namespace.connect_queues(veth("web0"), &peer, veth("web1"), 1500).unwrap();
        namespace.ip("addr add 10.9.0.3/24 dev web0").unwrap();
        Some(Self { namespace, _peer: peer, folder: TempFolder::new(test) })
    }

    /// Runs a command in the namespace, with a sysfs of the namespace.
    fn run(&self, words: &[&str]) -> Output {
        let mounted = "mount -t sysfs sysfs /sys && exec \"$@\"";
        let arguments = [&["--mount", "--", "sh", "-c", mounted, "sh"], words].concat();
        let run = || {
            let mut command = Command::new("unshare");
            command.env("GINNEL_RUN_DIR", self.folder.0.join("run")).args(arguments).output()
        };
        self.namespace.run(run).unwrap()
    }

    /// Runs `ginnel doctor`, which must exit with `code`. Returns its output.
    #[track_caller]
    fn doctor(&self, arguments: &[&str], code: i32) -> String {
        let output = self.run(&[&[GINNEL, "doctor"], arguments].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}{error}", text(&output.stdout));
        text(&output.stdout)
    }

    /// Runs a shell command and returns its output.
    #[track_caller]
    fn shell(&self, script: &str) -> String {
        let output = self.run(&["sh", "-ec", script]);
        assert!(output.status.success(), "{script}: {}", text(&output.stderr));
        text(&output.stdout)
    }
}

const QUEUES: [&str; 5] = ["web0", "--shards", "2", "--only", "channels,rps,xps,rss,irq,coalescing"];
const SETTINGS: &str = "cd /sys/class/net/web0/queues; ls -d *; cat rx-*/rps_cpus";

#[test]
fn a_veth_is_fixed_and_restored() {
    let Some(host) = Host::new("a_veth_is_fixed_and_restored") else { return };
    // One queue, whose frames go on to two CPUs.
    host.shell("ethtool -L web0 rx 1 tx 1; echo 3 >/sys/class/net/web0/queues/rx-0/rps_cpus");
    host.doctor(&["web0", "--describe"], 0);
    let shown = host.doctor(&QUEUES, 1);
    assert!(shown.contains("1 queue for 2 shards: each shard needs a queue of its own"), "{shown}");
    assert!(shown.contains("fix   rps") && shown.contains("--fix\" changes"), "{shown}");
    let before = host.shell(SETTINGS);
    let fixed = host.doctor(&[&QUEUES[..], &["--fix"]].concat(), 0);
    assert!(fixed.contains("rx-0/rps_cpus: 00000003 -> 00000000"), "{fixed}");
    assert!(fixed.contains("web0 channels: rx=1 tx=1 combined=0 -> rx=2 tx=2 combined=0"), "{fixed}");
    assert!(fixed.contains("tx-1/xps_cpus"), "a queue that is there only since the first change: {fixed}");
    assert_eq!(host.doctor(&[&QUEUES[..], &["--fix"]].concat(), 0), "nothing is to be changed\n");
    host.doctor(&QUEUES, 0);
    assert!(host.doctor(&QUEUES, 0).contains("2 queues for 2 shards"));
    let undone = host.doctor(&["--undo"], 0);
    assert!(undone.contains("rx-0/rps_cpus: 00000000 -> 00000003"), "{undone}");
    assert_eq!(host.shell(SETTINGS), before);
    assert_eq!(host.doctor(&["--undo"], 0), "nothing is to be undone\n");
    assert_eq!(fs::read_dir(host.folder.0.join("run/.doctor")).unwrap().count(), 1, "only the lock stays");
}

#[test]
fn an_offload_is_switched_off_and_on() {
    let Some(host) = Host::new("an_offload_is_switched_off_and_on") else { return };
    host.shell("ip link add d0 type bridge; ip link set d0 up");
    let gro = || host.shell("ethtool -k d0 | grep generic-receive-offload").trim().to_owned();
    assert_eq!(gro(), "generic-receive-offload: on");
    let shown = host.doctor(&["d0", "--only", "driver,offload"], 1);
    assert!(shown.contains("AF_XDP runs in generic mode") && shown.contains("; --fix sets off"), "{shown}");
    assert_eq!(host.doctor(&["d0", "--only", "offload", "--fix"], 0), "changed    d0 rx-gro: on -> off\n");
    assert_eq!(gro(), "generic-receive-offload: off");
    assert_eq!(host.doctor(&["--undo"], 0), "changed    d0 rx-gro: off -> on\n");
    assert_eq!(gro(), "generic-receive-offload: on");
}

#[test]
fn undo_leaves_what_others_have_changed() {
    let Some(host) = Host::new("undo_leaves_what_others_have_changed") else { return };
    host.shell("echo 3 >/sys/class/net/web0/queues/rx-0/rps_cpus");
    let only = ["web0", "--only", "rps", "--fix", "--json"];
    let fixed: Value = serde_json::from_str(&host.doctor(&only, 0)).unwrap();
    assert_eq!(fixed[0]["outcome"], "changed", "{fixed}");
    // Fixed again after another change, the record still has the first value.
    host.shell("echo 2 >/sys/class/net/web0/queues/rx-0/rps_cpus");
    host.doctor(&only, 0);
    assert!(host.doctor(&["--undo"], 0).contains("00000000 -> 00000003"));
    host.doctor(&only, 0);
    host.shell("echo 2 >/sys/class/net/web0/queues/rx-0/rps_cpus");
    assert!(host.doctor(&["--undo"], 0).contains("left"), "somebody wants that value");
    assert!(host.shell(SETTINGS).contains('2'));
    // An interface that has gone takes its settings with it.
    host.doctor(&only, 0);
    host.namespace.ip("link del web0").unwrap();
    assert!(host.doctor(&["--undo"], 0).contains("gone"));
    assert_eq!(host.doctor(&["--undo"], 0), "nothing is to be undone\n");
}

#[test]
fn a_damaged_record_is_an_error() {
    let Some(host) = Host::new("a_damaged_record_is_an_error") else { return };
    host.doctor(&["--undo"], 0);
    let record = host.folder.0.join("run/.doctor/undo.json");
    fs::write(&record, "{\"boot\":").unwrap();
    let output = host.run(&[GINNEL, "doctor", "--undo"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("undo.json: is damaged"), "{}", text(&output.stderr));
    // What another boot has changed is not undone.
    fs::write(&record, "{\"boot\":\"other\",\"entries\":[{\"key\":{\"interface\":null,\"setting\":{\"File\":\"/proc/sys/vm/swappiness\"}},\"namespace\":\"\",\"before\":\"1\",\"after\":\"2\"}]}").unwrap();
    assert_eq!(host.doctor(&["--undo"], 0), "nothing is to be undone\n");
}

#[test]
fn a_tap_is_examined() {
    let Some(host) = Host::new("a_tap_is_examined") else { return };
    host.shell("ip tuntap add lan0 mode tap; ip addr add 10.8.0.1/24 dev lan0");
    assert!(host.doctor(&["lan0"], 1).contains("lan0 is down, and a stack needs it up"));
    host.shell("ip link set lan0 up");
    let shown = host.doctor(&["lan0", "--only", "interface,driver"], 0);
    assert!(shown.contains("lan0 is a TAP interface"), "{shown}");
    let file = host.folder.0.join("lan.toml").display().to_string();
    let missing = host.run(&[GINNEL, "doctor", "lan0", "--write", &file]);
    assert!(text(&missing.stderr).contains("--address is missing"));
    host.doctor(&["lan0", "--write", &file, "--address", "10.8.0.2/24"], 0);
    let started = host.run(&[GINNEL, "up", "lan", "--config", &file, "--background"]);
    assert!(started.status.success(), "{}", text(&started.stderr));
    host.namespace.wait_until_reachable("10.8.0.2".parse().unwrap()).unwrap();
    assert!(host.run(&[GINNEL, "down", "lan"]).status.success());
}

#[test]
fn a_written_configuration_starts_a_stack() {
    let Some(host) = Host::new("a_written_configuration_starts_a_stack") else { return };
    let bpf = host.doctor(&["web0", "--only", "bpf,af_xdp", "--json"], 0);
    assert!(bpf.contains("the kernel loads the program"), "{bpf}");
    let file = host.folder.0.join("web.toml").display().to_string();
    host.doctor(&["web0", "--shards", "2", "--write", &file], 0);
    let started = host.run(&[GINNEL, "up", "web", "--config", &file, "--background"]);
    assert!(started.status.success(), "{}", text(&started.stderr));
    let listed = text(&host.run(&[GINNEL, "stat", "web", "--all", "--filter", "device"]).stdout);
    assert!(listed.contains("device.web0.rx_frames"), "{listed}");
    assert!(host.run(&[GINNEL, "down", "web"]).status.success());
}

#[test]
fn a_foreign_sysfs_is_said() {
    let Some(host) = Host::new("a_foreign_sysfs_is_said") else { return };
    let output = host.namespace.run(|| Command::new(GINNEL).args(["doctor", "web0"]).output()).unwrap();
    let shown = text(&output.stdout);
    assert!(shown.contains("/sys belongs to another network namespace"), "{shown}");
    let output = host.namespace.run(|| Command::new(GINNEL).arg("doctor").output()).unwrap();
    let shown = text(&output.stdout);
    assert!(shown.starts_with("note  interface") && shown.contains("there is no default route"), "{shown}");
}
