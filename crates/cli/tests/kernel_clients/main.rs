//! `ginnel httpd` over TAP and AF_XDP with common HTTP clients on the kernel: curl, wrk and ab.

mod af_xdp;

use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A server with the corpus as its site, and the namespace of its clients. All are removed when the value is
/// dropped.
struct Server {
    namespace: Namespace,
    child: Child,
    folder: PathBuf,
}

impl Server {
    fn start(name: &str, options: &[&str]) -> Self {
        let folder = corpus(name);
        let namespace = Namespace::new().unwrap();
        let mut command = Command::new(GINNEL);
        command.arg("httpd").arg(folder.join("site")).args(["--device", "tap:web0"]);
        command.args(["--address", "10.9.0.2/24", "--kernel-address", "10.9.0.1/24"]);
        command.args(["--address", "fd09::2/64", "--kernel-address", "fd09::1/64"]).args(options);
        let child = namespace.run(|| command.stdout(Stdio::piped()).spawn()).unwrap();
        let server = Self { namespace, child, folder };
        server.wait_until_it_answers();
        server
    }

    /// Runs a program on the kernel's side.
    fn client(&self, program: &str, arguments: &[&str]) -> Output {
        self.namespace.run(|| Command::new(program).args(arguments).output()).unwrap()
    }

    fn wait_until_it_answers(&self) {
        let start = Instant::now();
        for url in ["http://10.9.0.2/", "http://[fd09::2]/"] {
            while !self.client("curl", &["-sg", "-o", "/dev/null", "-m", "2", url]).status.success() {
                assert!(start.elapsed() < Duration::from_secs(60), "{url} does not answer");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    /// Stops the server and returns its output.
    fn stop(&mut self) -> String {
        let asked = Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(asked.success());
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success(), "{text}");
        text
    }

    /// Returns the paths of all pages, with the leading slash.
    fn pages(&self) -> Vec<String> {
        let site = self.folder.join("site");
        let mut folders = vec![site.clone()];
        let mut pages = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    pages.push(format!("/{}", path.strip_prefix(&site).unwrap().display()));
                }
            }
        }
        pages.sort();
        pages
    }

    /// Fetches all pages with one curl process, and compares their SHA-256 with that of the files.
    fn compare_all_pages(&self, host: &str) {
        let pages = self.pages();
        assert!(pages.len() >= 500, "{} pages", pages.len());
        let fetched = self.folder.join("fetched");
        let mut list = String::new();
        for (number, page) in pages.iter().enumerate() {
            list += &format!("url = \"http://{host}{page}\"\noutput = \"{}/{number}\"\n", fetched.display());
        }
        let config = self.folder.join("list");
        std::fs::write(&config, list).unwrap();
        let arguments = ["-sSg", "--fail", "-m", "120", "--create-dirs", "-K", config.to_str().unwrap()];
        let output = self.client("curl", &arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let digest = |path: PathBuf| Sha256::digest(std::fs::read(path).unwrap());
        for (number, page) in pages.iter().enumerate() {
            let original = digest(self.folder.join("site").join(&page[1..]));
            assert!(digest(fetched.join(number.to_string())) == original, "{page} from {host} differs");
        }
        std::fs::remove_dir_all(fetched).unwrap();
    }
}

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");

/// Creates a directory with the corpus.
fn corpus(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let wrote = Command::new(GINNEL).arg("corpus").arg(&folder).output().unwrap();
    assert!(wrote.status.success(), "{wrote:?}");
    folder
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Returns true, and prints a note, if the test cannot run here.
fn skipped(test: &str, program: &str) -> bool {
    let missing = Command::new(program).arg("-V").output().err().map(|e| format!("{program}: {e}"));
    let reason = unavailable().or(missing);
    if let Some(reason) = &reason {
        skip(test, reason);
    }
    reason.is_some()
}

#[test]
fn curl_gets_every_page_intact() {
    if skipped("curl_gets_every_page_intact", "curl") {
        return;
    }
    let server = Server::start("curl", &[]);
    server.compare_all_pages("10.9.0.2");
    server.compare_all_pages("[fd09::2]");
}

#[test]
fn curl_gets_every_page_over_a_faulty_link() {
    if skipped("curl_gets_every_page_over_a_faulty_link", "curl") {
        return;
    }
    let server = Server::start("curl-bad", &["--link", "loss=1% reorder=1% duplicate=1% corrupt=0.5%"]);
    server.compare_all_pages("10.9.0.2");
}

#[test]
fn wrk_sees_no_error() {
    if skipped("wrk_sees_no_error", "wrk") {
        return;
    }
    let server = Server::start("wrk", &[]);
    let page = format!("http://10.9.0.2{}", server.pages()[0]);
    let output = server.client("wrk", &["-t1", "-c32", "-d2s", "--timeout", "30s", &page]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("Requests/sec"), "{text}");
    assert!(!text.contains("Socket errors") && !text.contains("Non-2xx"), "{text}");
}

#[test]
fn two_shards_serve_the_kernels_clients() {
    if skipped("two_shards_serve_the_kernels_clients", "curl")
        || skipped("two_shards_serve_the_kernels_clients", "ab")
    {
        return;
    }
    let mut server = Server::start("shards", &["--shards", "2"]);
    server.compare_all_pages("10.9.0.2");
    server.compare_all_pages("[fd09::2]");
    ab(&server);
    let text = server.stop();
    // A row of the final table has a column for each shard.
    let row = |name: &str| -> Vec<u64> {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("| {name} ")))
            .unwrap_or_else(|| panic!("{text}"));
        line.split('|').skip(2).filter_map(|cell| cell.trim().replace(',', "").parse().ok()).collect()
    };
    for counter in ["frames received", "events"] {
        let by_shard = row(counter);
        assert!(by_shard.len() == 2 && by_shard.iter().all(|&n| n > 1000), "{counter}: {by_shard:?}");
    }
    let (sent, received) = (row("frames forwarded"), row("forwards received"));
    assert_eq!((sent[0], sent[1]), (received[1], received[0]), "each shard receives what the other forwards");
}

/// Two shards need two queues, but the interface was created with one.
#[test]
fn two_shards_need_two_queues() {
    if let Some(reason) = unavailable() {
        return skip("two_shards_need_two_queues", &reason);
    }
    let namespace = Namespace::new().unwrap();
    namespace.ip("tuntap add one0 mode tap").unwrap();
    let arguments = ["echo", "--device", "tap:one0", "--address", "10.9.0.2/24", "--shards", "2"];
    let output = namespace.run(|| Command::new(GINNEL).args(arguments).output()).unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.lines().count() == 1, "{text}");
    assert!(text.contains("one0") && text.contains("multi_queue"), "{text}");
}

#[test]
fn ab_sees_no_error() {
    if skipped("ab_sees_no_error", "ab") {
        return;
    }
    ab(&Server::start("ab", &[]));
}

/// Runs many short connections, and fewer persistent ones.
fn ab(server: &Server) {
    let page = format!("http://10.9.0.2{}", server.pages()[0]);
    for keep_alive in [&[][..], &["-k"]] {
        let mut arguments = vec!["-q", "-n", "2000", "-c", "32", "-s", "60"];
        arguments.extend(keep_alive);
        arguments.push(&page);
        let output = server.client("ab", &arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let all = text.contains("Complete requests:      2000") && text.contains("Failed requests:        0");
        assert!(all && !text.contains("Non-2xx"), "{text}");
    }
}
