//! `ginnel run`: unmodified programs on a stack, and the kernel's clients at the other end of a TAP.

use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
const STACK: [&str; 6] =
    ["--device", "tap:run0", "--address", "10.9.0.2/24", "--kernel-address", "10.9.0.1/24"];

/// The library, which cargo does not build for the tests of another package by itself.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = Path::new(GINNEL).parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--locked", "--package", "ginnel-posix"]);
        build.arg("--target-dir").arg(folder.parent().unwrap());
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        let built = build.output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        folder.join("libginnel.so")
    })
}

/// A folder of a test's own, removed with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("run-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `ginnel run` in a namespace of its own. All of it goes with the value.
struct Running {
    namespace: Namespace,
    child: Child,
    folder: Folder,
}

impl Running {
    fn start(folder: Folder, program: &[&str]) -> Self {
        let namespace = Namespace::new().unwrap();
        let mut command = Command::new(GINNEL);
        command.arg("run").args(STACK).arg("--").args(program);
        command.env("GINNEL_LIBRARY", library()).env("XDG_RUNTIME_DIR", &folder.0);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = namespace.run(|| command.spawn()).unwrap();
        Self { namespace, child, folder }
    }

    /// Runs a program on the kernel's side.
    fn client(&self, program: &str, arguments: &[&str]) -> Output {
        self.namespace.run(|| Command::new(program).args(arguments).output()).unwrap()
    }

    fn wait_for(&mut self, url: &str) {
        let start = Instant::now();
        while !self.client("curl", &["-sg", "-o", "/dev/null", "-m", "2", url]).status.success() {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("ended with {status}: {}", self.said());
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{url} does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What it wrote to standard error until its end.
    fn said(&mut self) -> String {
        std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap()
    }

    /// Asks it to stop, and returns its exit status.
    fn stop(&mut self) -> i32 {
        let asked = Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(asked.success());
        self.child.wait().unwrap().code().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The program goes with a stack that is asked to end.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// True, with a note, if the test cannot run here.
fn skipped(test: &str, program: &str) -> bool {
    let missing = Command::new(program).arg("-V").output().err().map(|e| format!("{program}: {e}"));
    let reason = unavailable().or(missing);
    if let Some(reason) = &reason {
        skip(test, reason);
    }
    reason.is_some()
}

/// A configuration of nginx as a single process that serves `folder`.
fn nginx_in(folder: &Path, rest: &str) -> String {
    let at = folder.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary: String = temporary.iter().map(|name| format!("{name}_temp_path {at};\n")).collect();
    let conf = format!(
        "daemon off; {rest}\nerror_log {at}/error.log notice; pid {at}/pid;\nevents {{ worker_connections 1024; }}\n\
         http {{ access_log off; keepalive_requests 1000000; {temporary}\n\
         server {{ listen 8000; root {at}/site; location /ok {{ return 200 ok; }} }} }}\n"
    );
    let path = folder.join("nginx.conf");
    std::fs::write(&path, conf).unwrap();
    path.display().to_string()
}

#[test]
fn nginx_serves_the_kernels_clients_on_a_stack_and_by_the_kernel() {
    if skipped("nginx_serves_the_kernels_clients_on_a_stack_and_by_the_kernel", "nginx") {
        return;
    }
    let folder = Folder::new("nginx");
    let site = folder.0.join("site");
    std::fs::create_dir(&site).unwrap();
    let page: Vec<u8> =
        (0..3_000_000u32).flat_map(|n| (n.wrapping_mul(2_654_435_761) >> 16).to_le_bytes()).collect();
    std::fs::write(site.join("page"), &page).unwrap();
    let conf = nginx_in(&folder.0, "master_process off;");
    let mut nginx = Running::start(folder, &["nginx", "-c", &conf]);
    nginx.wait_for("http://10.9.0.2:8000/ok");
    for host in ["10.9.0.2", "127.0.0.1"] {
        let fetched = nginx.client("curl", &["-sS", "-m", "30", &format!("http://{host}:8000/page")]);
        assert!(fetched.status.success(), "{host}: {}", String::from_utf8_lossy(&fetched.stderr));
        assert!(Sha256::digest(&fetched.stdout) == Sha256::digest(&page), "{host}: the page differs");
    }
    for header in ["Connection: keep-alive", "Connection: close"] {
        let arguments = ["-c", "20", "-d", "1", "-t", "1", "-H", header, "http://10.9.0.2:8000/ok"];
        let output = nginx.client("wrk", &arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("Requests/sec"), "{header}: {text}");
        assert!(!text.contains("Socket errors") && !text.contains("Non-2xx"), "{header}: {text}");
    }
    let log = std::fs::read_to_string(nginx.folder.0.join("error.log")).unwrap();
    let bad = ["[emerg]", "[alert]", "[crit]", "[error]", "[warn]"];
    assert!(!bad.iter().any(|level| log.contains(level)), "{log}");
    assert_eq!(nginx.stop(), 0, "{}", nginx.said());
}

#[test]
fn nginx_with_a_master_and_workers_serves_while_it_is_reloaded_and_a_worker_is_killed() {
    if skipped("nginx_with_a_master_and_workers_serves_while_it_is_reloaded_and_a_worker_is_killed", "nginx")
    {
        return;
    }
    let folder = Folder::new("workers");
    std::fs::create_dir(folder.0.join("site")).unwrap();
    let conf = nginx_in(&folder.0, "worker_processes 2;");
    let mut nginx = Running::start(folder, &["nginx", "-c", &conf]);
    let url = "http://10.9.0.2:8000/ok";
    nginx.wait_for(url);
    let pid = std::fs::read_to_string(nginx.folder.0.join("pid")).unwrap();
    let master = pid.trim();
    for act in ["nothing", "reload", "kill", "reload"] {
        match act {
            "reload" => assert!(Command::new("kill").args(["-HUP", master]).status().unwrap().success()),
            "kill" => {
                let workers = Command::new("pgrep").args(["-P", master]).output().unwrap();
                let workers = String::from_utf8(workers.stdout).unwrap();
                let worker = workers.lines().next().expect("a worker");
                assert!(Command::new("kill").args(["-9", worker]).status().unwrap().success());
            }
            _ => {}
        }
        nginx.wait_for(url);
        let arguments = ["-c", "10", "-d", "1", "-t", "1", "-H", "Connection: close", url];
        let text = String::from_utf8(nginx.client("wrk", &arguments).stdout).unwrap();
        assert!(text.contains("Requests/sec") && !text.contains("Non-2xx"), "{act}: {text}");
    }
    let log = std::fs::read_to_string(nginx.folder.0.join("error.log")).unwrap();
    assert!(!["[emerg]", "[crit]", "[error]", "[warn]"].iter().any(|level| log.contains(level)), "{log}");
    assert_eq!(nginx.stop(), 0, "{}", nginx.said());
}

#[test]
fn the_exit_status_is_the_programs() {
    if skipped("the_exit_status_is_the_programs", "curl") {
        return;
    }
    for (script, status) in [("exit 7", 7), ("exit 0", 0), ("kill -9 $$", 137)] {
        let mut shell = Running::start(Folder::new("status"), &["sh", "-c", script]);
        assert_eq!(shell.child.wait().unwrap().code(), Some(status), "{script}: {}", shell.said());
    }
    let mut missing = Running::start(Folder::new("missing"), &["/no/such/program"]);
    assert_eq!(missing.child.wait().unwrap().code(), Some(1));
    assert!(missing.said().contains("/no/such/program"));
}

#[test]
fn curl_fetches_over_a_stack_from_a_server_of_the_kernel() {
    if skipped("curl_fetches_over_a_stack_from_a_server_of_the_kernel", "nginx") {
        return;
    }
    let folder = Folder::new("curl");
    let site = folder.0.join("site");
    std::fs::create_dir(&site).unwrap();
    std::fs::write(site.join("page"), b"from the kernel").unwrap();
    let conf = nginx_in(&folder.0, "master_process off;");
    // It waits until the server at the other end has come up.
    let script =
        "for i in $(seq 300); do curl -sS -m 5 http://10.9.0.1:8000/page && exit 0; sleep 0.1; done; exit 1";
    let mut curl = Running::start(folder, &["sh", "-c", script]);
    let mut server = curl.namespace.run(|| Command::new("nginx").args(["-c", &conf]).spawn()).unwrap();
    let status = curl.child.wait().unwrap();
    let _ = server.kill();
    let _ = server.wait();
    let text = std::io::read_to_string(curl.child.stdout.take().unwrap()).unwrap();
    assert!(status.success(), "{}", curl.said());
    assert_eq!(text, "from the kernel");
}

#[test]
fn a_program_whose_stack_is_missing_says_so_once() {
    let run = |policy: Option<&str>| {
        let mut command = Command::new("echo");
        command.arg("here").env("LD_PRELOAD", library()).env("GINNEL_STACK", "/nowhere/control");
        if let Some(policy) = policy {
            command.env("GINNEL_ON_MISSING", policy);
        }
        command.output().unwrap()
    };
    let failed = run(None);
    let error = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(125), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.contains("/nowhere/control"), "{error}");
    assert!(failed.stdout.is_empty());
    let kernel = run(Some("kernel"));
    assert!(kernel.status.success());
    assert_eq!(kernel.stdout, b"here\n");
    assert_eq!(String::from_utf8_lossy(&kernel.stderr).lines().count(), 1);
}
