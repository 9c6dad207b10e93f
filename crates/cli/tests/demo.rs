//! `ginnel demo` measures servers that really run, and leaves nothing. The figures themselves mean nothing
//! here.

use ginnel_testkit::interop::build_preload_library;
use ginnel_testkit::skip;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
/// An ordinary user: `nobody`.
const USER: &str = "65534";
/// Directories in which a program may be.
const FOLDERS: [&str; 5] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin"];

fn is_installed(program: &str) -> bool {
    FOLDERS.iter().any(|folder| Path::new(folder).join(program).exists())
}

/// Returns true if this machine permits the test.
fn can_run(test: &str, programs: &[&str]) -> bool {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let missing = programs.iter().find(|program| !is_installed(program));
    let reason = missing.map(|program| format!("no {program}"));
    let reason = reason.or_else(|| (cpus < 2).then(|| "needs two CPUs".into()));
    if let Some(reason) = &reason {
        skip(test, reason);
    }
    reason.is_none()
}

/// The only directory that the demonstration can write to.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("demo-{name}-{}", std::process::id());
        // Not in the target directory, which other users may be unable to enter.
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        Self(path)
    }

    fn command(&self, words: &[&str], rounds: &str) -> Command {
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .args(["demo", "--seconds", "0.2", "--rounds", rounds])
            .env("TMPDIR", &self.0);
        command.env("GINNEL_LIBRARY", build_preload_library(GINNEL)).stdin(Stdio::null());
        command
    }

    /// Returns the paths of the files and the command lines of the processes that are left.
    fn leftovers(&self) -> Vec<String> {
        let files = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path().display().to_string());
        let mut found: Vec<String> = files.collect();
        let mark = format!("TMPDIR={}\0", self.0.display());
        for process in fs::read_dir("/proc").unwrap() {
            let process = process.unwrap().path();
            // Processes of other users, and those that have ended, cannot be read.
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            if String::from_utf8_lossy(&environment).contains(&mark) {
                found.push(fs::read_to_string(process.join("cmdline")).unwrap_or_default());
            }
        }
        found
    }

    /// Asserts that neither files nor processes are left. The shards of a stack end a moment after their
    /// supervisor.
    #[track_caller]
    fn assert_nothing_is_left(&self) {
        let until = Instant::now() + Duration::from_secs(10);
        while !self.leftovers().is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(self.leftovers(), [""; 0]);
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// Returns a number with thousands separators and a unit.
fn number(cell: &str) -> f64 {
    let digits: String = cell.chars().filter(|c| c.is_ascii_digit() || *c == '.').collect();
    digits.parse().unwrap_or_else(|e| panic!("{cell}: {e}"))
}

/// Asserts that the table has a row for each load, whose figures are those of the progress lines, and whose
/// ratio is theirs.
fn assert_table(output: &Output, loads: &[&str]) {
    let (table, progress) = texts(output);
    assert!(output.status.success(), "{table}{progress}");
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
    assert_eq!(rows.iter().map(|row| row[1]).collect::<Vec<_>>(), loads, "{table}");
    for row in rows {
        let [_, name, kernel, ginnel, ratio, kernel_p99, ginnel_p99, _] = row[..] else { panic!("{table}") };
        let step =
            format!("{name}: kernel {}, Ginnel {}", &kernel[..kernel.len() - 2], &ginnel[..ginnel.len() - 2]);
        assert!(progress.contains(&step), "{step}: {progress}");
        let (kernel, ginnel) = (number(kernel), number(ginnel));
        // Even an emulator answers a hundred requests per second; no CPU of today answers ten million.
        assert!((100.0..1e7).contains(&kernel) && (100.0..1e7).contains(&ginnel), "{table}");
        assert!((number(ratio) - ginnel / kernel).abs() < 0.06, "{table}");
        assert!(number(kernel_p99) > 0.0 && number(ginnel_p99) > 0.0, "{table}");
    }
    assert!(table.contains(", over loopback.") && table.contains("\"ginnel run\""), "{table}");
}

const NGINX_LOADS: [&str; 2] = ["nginx, a connection per request", "nginx, 64 connections kept alive"];
const REDIS_LOAD: &str = "redis, GET by 50 clients";

#[test]
fn demo_measures_nginx_and_redis() {
    if !can_run("demo_measures_nginx_and_redis", &["nginx", "redis-server", "ip", "unshare"]) {
        return;
    }
    let folder = Folder::new("root");
    let output = folder.command(&[GINNEL], "1").output().unwrap();
    assert_table(&output, &[NGINX_LOADS[0], NGINX_LOADS[1], REDIS_LOAD]);
    folder.assert_nothing_is_left();
}

#[test]
fn demo_needs_no_root() {
    let test = "demo_needs_no_root";
    if !can_run(test, &["nginx", "redis-server", "ip", "unshare", "setpriv"]) {
        return;
    }
    // For another user than root, the previous test has shown it.
    if !rustix::process::geteuid().is_root() {
        return skip(test, "needs root to become another user");
    }
    let folder = Folder::new("user");
    let as_user = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"];
    // The user must be able to enter the target directory.
    let entered = Command::new(as_user[0]).args(&as_user[1..]).args([GINNEL, "--version"]).output().unwrap();
    if !entered.status.success() {
        return skip(test, "the target directory is not readable for other users");
    }
    let output = folder.command(&[&as_user[..], &[GINNEL]].concat(), "1").output().unwrap();
    assert_table(&output, &[NGINX_LOADS[0], NGINX_LOADS[1], REDIS_LOAD]);
    folder.assert_nothing_is_left();
}

/// Without `unshare` there is no namespace, and without redis-server only nginx is measured.
#[test]
fn demo_names_what_is_missing() {
    let test = "demo_names_what_is_missing";
    if !can_run(test, &["nginx"]) {
        return;
    }
    if Path::new("/usr/local/sbin/redis-server").exists() || Path::new("/usr/sbin/redis-server").exists() {
        return skip(test, "redis-server is in a directory that is always searched");
    }
    let folder = Folder::new("missing");
    let bin = Folder::new("missing-bin");
    let nginx = FOLDERS.iter().map(|folder| Path::new(folder).join("nginx")).find(|path| path.exists());
    symlink(nginx.unwrap(), bin.0.join("nginx")).unwrap();
    let output = folder.command(&[GINNEL], "1").env("PATH", &bin.0).output().unwrap();
    assert_table(&output, &NGINX_LOADS);
    let (_, notes) = texts(&output);
    for note in ["note: no network namespace is available (unshare: ", "apt-get install redis-server"] {
        assert!(notes.contains(note), "{note}: {notes}");
    }
    folder.assert_nothing_is_left();
}

#[test]
fn demo_names_a_server_that_fails() {
    if !can_run("demo_names_a_server_that_fails", &["ip", "unshare"]) {
        return;
    }
    let folder = Folder::new("fails");
    let bin = Folder::new("fails-bin");
    let nginx = bin.0.join("nginx");
    fs::write(&nginx, "#!/bin/sh\necho bad configuration >&2\nexit 3\n").unwrap();
    fs::set_permissions(&nginx, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.0.display(), std::env::var("PATH").unwrap());
    let output = folder.command(&[GINNEL], "1").env("PATH", path).output().unwrap();
    let (_, errors) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let expected =
        "ginnel: nginx on the kernel: the program has ended: exit status 3; it output: bad configuration";
    assert!(errors.contains(expected), "{errors}");
    folder.assert_nothing_is_left();
}

/// Starts a long demonstration, and waits until the servers run. Returns its process and its further output.
fn start_demo(folder: &Folder) -> (Child, impl Iterator<Item = String>) {
    let mut command = folder.command(&[GINNEL], "100");
    let mut demo = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = BufReader::new(demo.stderr.take().unwrap()).lines().map(Result::unwrap);
    // Both servers run when the first step is done.
    let first = errors.find(|line| line.starts_with("[1/"));
    assert!(first.is_some(), "{:?}", demo.wait());
    (demo, errors)
}

#[test]
fn killed_demo_leaves_nothing() {
    if !can_run("killed_demo_leaves_nothing", &["nginx"]) {
        return;
    }
    let folder = Folder::new("killed");
    let (mut demo, _errors) = start_demo(&folder);
    let servers = folder.leftovers();
    let is_nginx = |words: &&String| words.split('\0').next().is_some_and(|word| word.ends_with("/nginx"));
    assert_eq!(servers.iter().filter(is_nginx).count(), 2, "{servers:?}");
    demo.kill().unwrap();
    demo.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !folder.leftovers().is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    folder.assert_nothing_is_left();
}

#[test]
fn interrupted_demo_leaves_nothing() {
    if !can_run("interrupted_demo_leaves_nothing", &["nginx"]) {
        return;
    }
    let folder = Folder::new("interrupted");
    let (mut demo, errors) = start_demo(&folder);
    kill_process(Pid::from_child(&demo), Signal::INT).unwrap();
    let last = errors.last();
    assert_eq!(demo.wait().unwrap().code(), Some(1), "{last:?}");
    assert_eq!(last.as_deref(), Some("ginnel: interrupted"));
    folder.assert_nothing_is_left();
}
