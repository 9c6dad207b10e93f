//! The command as a user sees it: exit codes, messages, and one run of each program.

use ginnel_testkit::interop::rerun_in_namespace;
use ginnel_testkit::skip;
use pcap_file::pcapng::{Block, PcapNgReader};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn ginnel(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ginnel")).args(arguments).output().unwrap()
}

/// Returns exit code and standard error, which must be one line.
fn run_refused(arguments: &[&str]) -> (i32, String) {
    let output = ginnel(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("ginnel: "), "{text}");
    (output.status.code().unwrap(), text.trim_end().trim_start_matches("ginnel: ").into())
}

/// A directory with a small site, removed when the value is dropped.
struct TempSite(PathBuf);

impl TempSite {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("index.html"), "<p>here</p>").unwrap();
        std::fs::write(path.join("large.bin"), pattern(3 << 20)).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TempSite {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 15)) as u8).collect()
}

#[test]
fn wrong_arguments_give_one_line_and_code_2() {
    let site = TempSite::new("wrong");
    let root = site.path();
    for (arguments, expected) in [
        (&["nonsense"][..], "unrecognized subcommand 'nonsense'"),
        (&["httpd"], "<ROOT>"),
        (&["httpd", root], "--device is missing"),
        (&["httpd", root, "--device", "tap:t0"], "--address is missing"),
        (&["httpd", root, "--device", "eth0"], "invalid value 'eth0' for '--device <DEVICE>'"),
        (
            &["echo", "--device=tap:t0", "--address=10.1.0.2/24", "--capture-filter=tcp"],
            "device[0].capture_filter: applies only to a device with a `capture`",
        ),
        (&["echo", "--capture=x", "--capture-filter=tcp port http"], "\"http\" is not a port"),
        (&["echo", "--priority-rule=8 tcp"], "\"8\" is not a priority from 0 to 7"),
        (&["echo", "--priority-rule=6"], "the expression \"\": is empty"),
        (
            &["echo", "--device=tap:t0", "--address=10.1.0.2/24", "--gateway=10.2.0.1"],
            "route[0].gateway: 10.2.0.1 is in no network of link",
        ),
        (
            &["echo", "--device=tap:t0", "--address=10.1.0.2/24", "--kernel-address=10.1.0.2/24"],
            "device[0].kernel_addresses: 10.1.0.2 is an address of the stack",
        ),
        (
            &["doctor", "--from", "Cargo.toml"],
            "Cargo.toml: cannot be read as a description of \"ginnel doctor --describe\": ",
        ),
        (&["load", "http", "--stack=kernel", "--duration=0", "http://10.0.0.1/"], "must not be 0"),
        (
            &["httpd", root, "--device", "memory", "--address", "10.0.0.1/24"],
            "--device memory has nothing at its other end",
        ),
        (&["echo", "--device", "tap:t0", "--address", "10.0.0.1"], "has no prefix length"),
        (&["echo", "--device", "tap:t0", "--address", "10.0.0.1/24", "--mtu", "12"], "'--mtu <BYTES>'"),
        (&["echo", "--device", "tap:t0", "--address", "10.0.0.1/24", "--link", "delay=fast"], "delay"),
        (&["echo", "--config", "no/such.toml"], "no/such.toml: No such file"),
        (&["load", "http", "--device", "memory", "http://10.0.0.1/"], "--device memory needs --serve ROOT"),
        (
            &[
                "load",
                "http",
                "--device",
                "tap:t0",
                "--address",
                "10.0.0.2/24",
                "--workers",
                "2",
                "http://10.0.0.1/",
            ],
            "--workers 2 needs --serve ROOT, or a --config FILE with 2 [[link]] tables",
        ),
        (
            &[
                "load",
                "http",
                "--device",
                "memory",
                "--serve",
                root,
                "--source",
                "10.0.0.2",
                "--workers",
                "2",
                "http://10.0.0.1/",
            ],
            "--source cannot be combined with --serve and --workers 2",
        ),
        (
            &["load", "http", "--stack", "kernel", "--shards", "2", "http://10.0.0.1/"],
            "--shards needs --stack ginnel: use --workers instead",
        ),
        (
            &[
                "load",
                "http",
                "--device=memory",
                "--serve",
                root,
                "--stack=light",
                "--shards=2",
                "http://10.0.0.1/",
            ],
            "--shards needs --stack ginnel: use --workers instead",
        ),
        (
            &[
                "load",
                "http",
                "--device=memory",
                "--serve",
                root,
                "--shards=3",
                "-c",
                "2",
                "http://10.0.0.1/",
            ],
            "--shards 3 needs at least 3 connections, but --connections is 2",
        ),
        (
            &["load", "http", "--stack", "kernel", "--mtu", "1500", "http://10.0.0.1/"],
            "--mtu cannot be combined with --stack kernel",
        ),
    ] {
        let (code, text) = run_refused(arguments);
        assert!(text.contains(expected), "{arguments:?}: {text}");
        assert_eq!(code, 2, "{arguments:?}: {text}");
    }
}

#[test]
fn a_relative_runtime_directory_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_ginnel"))
        .args(["stat", "--list"])
        .env("GINNEL_RUN_DIR", "stacks")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text, "ginnel: GINNEL_RUN_DIR: \"stacks\" is not an absolute path\n");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn wrong_expressions_are_refused() {
    let site = TempSite::new("expression");
    let file = site.0.join("stack.toml");
    std::fs::write(&file, "[[priority.rules]]\npriority = 6\nexpression = \"tcp prot 80\"\n").unwrap();
    let file = file.to_str().unwrap();
    let (code, text) = run_refused(&["echo", "--config", file]);
    if text.contains("apt-get install libpcap0.8") {
        return skip("wrong_expressions_are_refused", &text);
    }
    let problem = format!("{file}:3: priority.rules[0].expression: ");
    assert!(code == 2 && text.starts_with(&problem) && text.contains("syntax error"), "{text}");
    let (code, text) = run_refused(&["echo", "--priority-rule=6 tcp prot 80"]);
    assert!(
        code == 2 && text.contains("the expression \"tcp prot 80\": ") && text.contains("syntax error"),
        "{text}"
    );
}

#[test]
fn configuration_errors_name_line_and_key() {
    let site = TempSite::new("config");
    let file = site.0.join("ginnel.toml");
    std::fs::write(&file, "[tcp]\nsack = true\nrto_min_ms = 0\n").unwrap();
    let (code, text) = run_refused(&["echo", "--config", file.to_str().unwrap()]);
    assert_eq!(code, 2);
    assert!(text.ends_with("ginnel.toml:3: tcp.rto_min_ms: 0 is outside 1 to 120000"), "{text}");
}

#[test]
fn help_and_version_succeed() {
    for arguments in [&["--help"][..], &["--version"], &["httpd", "--help"], &["load", "http", "--help"]] {
        let output = ginnel(arguments);
        assert!(output.status.success() && !output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn help_of_run_tells_of_daemons() {
    let output = ginnel(&["run", "--help"]);
    let text = String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let daemons = "If the program leaves processes behind when it exits, as a daemon does, \"ginnel run\" serves them \
                   until the last has ended";
    assert!(text.contains(daemons), "{text}");
}

#[test]
fn a_load_without_answers_fails() {
    // A loopback address on which nothing listens any more.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (server, url) = (address.to_string(), format!("http://{address}/"));
    let [redis, memcached] = ["redis", "memcached"].map(|scheme| format!("{scheme}://{server}"));
    for what in
        [&["http", &*url, "--json"][..], &["redis", &server], &["redis", &redis], &["memcached", &memcached]]
    {
        let how = ["--stack=kernel", "--duration=500ms", "--quiet", "--timeout=5s"];
        let output = ginnel(&[&["load"], what, &how].concat());
        assert_eq!(output.status.code(), Some(1), "{what:?}: {output:?}");
        let (stdout, stderr) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(stdout.contains("refused"), "the report is there all the same: {stdout}");
        assert_eq!(stderr.trim_end(), format!("ginnel: {server} answered no request: connect refused"));
    }
}

/// Answers requests with one response each, until `requests` were answered on all connections together; then
/// nothing listens any more.
fn serve_then_vanish(listener: TcpListener, request: usize, response: &[u8], requests: usize) {
    let mut left = requests;
    while left > 0 {
        let (mut connection, _) = listener.accept().unwrap();
        let mut buffer = vec![0; request];
        while left > 0 && connection.read(&mut buffer).is_ok_and(|bytes| bytes > 0) {
            connection.write_all(response).unwrap();
            left -= 1;
        }
    }
}

#[test]
fn a_server_that_vanishes_fails_the_load() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap().to_string();
    let response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab";
    let thread = std::thread::spawn(move || serve_then_vanish(listener, 4096, response, 50));
    let url = format!("http://{server}/");
    let output = ginnel(&[
        "load",
        "http",
        &url,
        "--stack=kernel",
        "--connections=1",
        "--keep-alive",
        "--duration=2s",
        "--quiet",
    ]);
    thread.join().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let (report, error) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(
        report.contains("answered 50,") && report.contains("the server answered nothing after"),
        "{report}"
    );
    assert!(error.starts_with(&format!("ginnel: {server} answered no request after ")), "{error}");
    assert!(error.contains("connect refused"), "{error}");
}

/// A reader that closes its pipe is no error of the command, and does not change its exit status.
#[test]
fn closed_pipes_end_a_load_quietly() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for kind in ["http", "redis", "memcached"] {
        let url = if kind == "http" { format!("http://{address}/") } else { address.clone() };
        for json in [&["--json"][..], &[]] {
            let mut load = Command::new(env!("CARGO_BIN_EXE_ginnel"));
            load.args(["load", kind, &url, "--stack=kernel", "--duration=1500ms"]).args(json);
            let mut load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            // Both close before the first line of progress and the report.
            drop((load.stdout.take(), load.stderr.take()));
            assert_eq!(load.wait().unwrap().code(), Some(1), "{kind}: nothing listens there");
        }
    }
}

#[test]
fn workers_are_refused_without_options_of_other_kinds() {
    for (kind, target, serve) in
        [("http", "http://10.0.0.1/", true), ("redis", "10.0.0.1", false), ("memcached", "10.0.0.1", false)]
    {
        let stack = ["--device=tap:none0", "--address=10.0.0.2/24", "--workers=2"];
        let (code, error) = run_refused(&[&["load", kind, target][..], &stack].concat());
        assert_eq!((code, error.contains("--serve")), (2, serve), "{kind}: {error}");
        assert!(error.contains("a --config FILE with 2 [[link]] tables"), "{error}");
    }
}

/// A hidden command that removes a directory must not run by mistake.
#[test]
fn watch_group_needs_its_caller() {
    let site = TempSite::new("watched");
    for (leads, input) in [(true, Stdio::null()), (false, Stdio::piped())] {
        let mut watcher = Command::new(env!("CARGO_BIN_EXE_ginnel"));
        watcher.args(["watch-group", "--folder", site.path()]).stdin(input);
        if leads {
            watcher.process_group(0);
        }
        let output = watcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("a pipe as its standard input"),
            "{output:?}"
        );
        assert!(Path::new(site.path()).exists());
    }
}

#[test]
fn a_counted_load_without_answers_ends() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (server, url) = (address.to_string(), format!("http://{address}/"));
    let site = TempSite::new("given-up");
    let serve = format!("--serve={}", site.path());
    // Its server listens on another port.
    let across = ["http", "--device=memory", &serve, "http://10.0.0.1/", "--dest=10.0.0.1:81"];
    let kernel = "--stack=kernel";
    for (what, server) in [
        (&["http", &*url, kernel, "--keep-alive"][..], &*server),
        (&["http", &url, kernel, "--keep-alive", "--rate=1000"], &server),
        (&["http", &url, kernel], &server),
        (&["redis", &server, kernel, "--workers=2"], &server),
        (&["memcached", &server, kernel], &server),
        (&[&across[..], &["--keep-alive"]].concat(), "10.0.0.1"),
        (&[&across[..], &["--keep-alive", "--stack=light"]].concat(), "10.0.0.1"),
    ] {
        let how = ["--requests=1000000", "--quiet", "--timeout=1s", "--give-up=300ms"];
        let output = ginnel(&[&["load"], what, &how].concat());
        assert_eq!(output.status.code(), Some(1), "{what:?}: {output:?}");
        let (stdout, stderr) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(
            stdout.contains("warning: the run was given up: requests failed for 0.3 s"),
            "{what:?}: {stdout}"
        );
        let expected = format!(
            "ginnel: {server} answered no request for 0.3 s, so the run was given up: connect refused"
        );
        assert_eq!(stderr.trim_end(), expected, "{what:?}");
    }
}

#[test]
fn a_site_is_loaded_over_a_memory_cable() {
    let site = TempSite::new("memory");
    let serve = format!("--serve={}", site.path());
    let loads: [&[&str]; 6] = [
        &["--requests=2000", "--connections=20", "http://10.0.0.1/index.html"],
        &["--requests=20", "--keep-alive", "--connections=3", "http://10.0.0.1:8080/large.bin"],
        &["--requests=200", "--address=fd00::2/64", "http://[fd00::1]/index.html"],
        &[
            "--requests=30",
            "--connections=5",
            "--link=delay=1ms loss=2% reorder=1%",
            "http://10.0.0.1/large.bin",
        ],
        &["--requests=3001", "--workers=3", "--connections=20", "http://10.0.0.1/index.html"],
        &["--requests=300", "--workers=2", "--keep-alive", "http://[fd00::1]/index.html"],
    ];
    let both = loads.iter().flat_map(|load| [(*load, "ginnel"), (*load, "light")]);
    // Several shards need Ginnel's TCP.
    let both = both.chain([
        (&["--requests=2001", "--shards=3", "--connections=20", "http://10.0.0.1/index.html"][..], "ginnel"),
        (
            &[
                "--requests=300",
                "--shards=2",
                "--keep-alive",
                "--connections=7",
                "http://[fd00::1]/index.html",
            ],
            "ginnel",
        ),
    ]);
    // The light TCP drops segments out of order, so large pages over links with loss would take minutes.
    for (load, stack) in both.filter(|(load, stack)| *stack == "ginnel" || !load[2].starts_with("--link")) {
        let own = ["load", "http", "--device=memory", &serve, "--json", "--quiet", "--timeout=60s"];
        let arguments = [&own, &["--stack", stack][..], load].concat();
        let output = ginnel(&arguments);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{stack} {load:?}: {}", String::from_utf8_lossy(&output.stderr));
        let compact: String = text.split_whitespace().collect();
        assert!(compact.contains("\"failures\":{}"), "{stack} {load:?}: {text}");
        assert!(compact.contains("\"statuses\":{\"2xx\":"), "{stack} {load:?}: {text}");
        let requests = load.iter().find_map(|a| a.strip_prefix("--requests=")).unwrap();
        assert!(compact.contains(&format!("\"completed\":{requests},")), "{stack} {load:?}: {text}");
    }
}

/// A process that is killed when the value is dropped.
struct RunningGinnel(Child);

impl Drop for RunningGinnel {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl RunningGinnel {
    /// Sends SIGINT, as Ctrl-C does, and returns what the process printed.
    fn interrupt(mut self) -> String {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let started = Instant::now();
        while self.0.try_wait().unwrap().is_none() {
            assert!(started.elapsed() < Duration::from_secs(10), "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(self.0.wait().unwrap().success());
        std::io::read_to_string(self.0.stdout.take().unwrap()).unwrap()
    }
}

/// Runs the test again in a network namespace of its own, as [`rerun_in_namespace`] does, if it can run here.
fn rerun_over_tap(test: &str) -> bool {
    let has_curl = Command::new("curl").arg("--version").output().is_ok();
    if !rustix::process::geteuid().is_root() || !has_curl {
        skip(test, if has_curl { "needs root" } else { "no curl" });
        return true;
    }
    rerun_in_namespace(test)
}

#[test]
fn echo_answers_the_kernel_over_tap() {
    if rerun_over_tap("echo_answers_the_kernel_over_tap") {
        return;
    }
    let mut server = Command::new(env!("CARGO_BIN_EXE_ginnel"));
    server.args(["echo", "--device=tap:gtap1", "--address=10.78.0.2/24", "--kernel-address=10.78.0.1/24"]);
    let server = RunningGinnel(server.stdout(Stdio::piped()).spawn().unwrap());
    let started = Instant::now();
    let mut stream = loop {
        match TcpStream::connect("10.78.0.2:7") {
            Ok(stream) => break stream,
            Err(e) => assert!(started.elapsed() < Duration::from_secs(10), "{e}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let sent = pattern(1 << 20);
    let mut writer = stream.try_clone().unwrap();
    let bytes = sent.clone();
    let writing = std::thread::spawn(move || {
        writer.write_all(&bytes).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    writing.join().unwrap();
    assert!(received == sent);
    assert!(server.interrupt().contains("| shard"));
}

#[test]
fn httpd_serves_curl_over_tap() {
    if rerun_over_tap("httpd_serves_curl_over_tap") {
        return;
    }
    let site = TempSite::new("tap");
    let capture = site.0.join("trace.pcapng");
    let capture_argument = format!("--capture={}", capture.display());
    let mut server = Command::new(env!("CARGO_BIN_EXE_ginnel"));
    server.args(["httpd", "--device=tap:gtap0", "--address=10.77.0.2/24", "--kernel-address=10.77.0.1/24"]);
    server.args([&capture_argument, site.path()]).stdout(Stdio::piped());
    let server = RunningGinnel(server.spawn().unwrap());
    for (path, expected) in [("index.html", b"<p>here</p>".to_vec()), ("large.bin", pattern(3 << 20))] {
        let url = format!("http://10.77.0.2/{path}");
        let arguments = ["--silent", "--fail", "--retry", "20", "--retry-all-errors", "--retry-delay", "1"];
        let output = Command::new("curl").args(arguments).args(["--max-time", "60", &url]).output().unwrap();
        assert!(output.status.success(), "{path}: {output:?}");
        assert!(output.stdout == expected, "{path}");
    }
    let table = server.interrupt();
    assert!(table.contains("| responses                       |     2 |"), "{table}");
    assert!(std::fs::metadata(&capture).unwrap().len() > 3 << 20);
}

/// The capture has only frames that match the filter, truncated to the snaplen, in the newest files of a
/// ring.
// limit: device.capture_file_bytes
#[test]
fn a_capture_has_filter_ring_and_snaplen() {
    let site = TempSite::new("ring");
    let traces = site.0.with_extension("traces");
    std::fs::create_dir_all(&traces).unwrap();
    let path = traces.join("trace.pcapng");
    let output = ginnel(&[
        "load",
        "http",
        "--device=memory",
        &format!("--serve={}", site.path()),
        "--requests=500",
        "--connections=4",
        "--timeout=60s",
        "--quiet",
        &format!("--capture={}", path.display()),
        "--capture-filter=tcp src port 80",
        "--capture-snaplen=60",
        "--capture-files=2",
        "--capture-file-bytes=64KiB",
        "http://10.0.0.1/index.html",
    ]);
    assert!(output.status.success(), "{output:?}");
    let mut files: Vec<_> = std::fs::read_dir(&traces).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 2, "{files:?}");
    assert_ne!(files[0], traces.join("trace-00001.pcapng"), "the oldest is gone");
    let mut frames = 0;
    for file in files {
        assert!(file.metadata().unwrap().len() <= 64 << 10, "{file:?}");
        let mut reader = PcapNgReader::new(File::open(file).unwrap()).unwrap();
        while let Some(block) = reader.next_block() {
            let Block::EnhancedPacket(packet) = block.unwrap() else { continue };
            assert_eq!((packet.data.len(), &packet.data[34..36]), (60, &80u16.to_be_bytes()[..]));
            frames += 1;
        }
    }
    assert!(frames > 300, "{frames} frames");
    std::fs::remove_dir_all(traces).unwrap();
}
