use super::recorder::Recorder;
use super::*;
use crate::httpd::site::SiteOptions;
use core::time::Duration;
use proptest::prelude::*;
use std::fs;
use std::path::Path;

mod framing;
mod lifecycle;

const UNIX: u64 = 784_111_777; // Sun, 06 Nov 1994 08:49:37 GMT
const CONN: Conn = Conn::new(3, 7);

/// A server with one connection.
struct ServerFixture {
    server: Server,
    net: Recorder,
    now: Instant,
    /// Received bytes that the server has not consumed.
    unread: Vec<u8>,
}

impl ServerFixture {
    fn new(root: &Path, site: &SiteOptions, options: ServerOptions) -> Self {
        let date = DateText::new(UNIX);
        let site = Site::read(root, site, &date).unwrap();
        let files = Recorder::files_of(&site);
        let now = Instant::from_millis(5_000);
        let mut server = Server::new(site, options, now, Duration::from_secs(UNIX));
        server.accepted(now, CONN);
        let net = Recorder { files, room: usize::MAX, ..Recorder::default() };
        Self { server, net, now, unread: Vec::new() }
    }

    /// Adds received bytes.
    fn feed(&mut self, bytes: &[u8]) {
        self.unread.extend_from_slice(bytes);
        self.offer_input();
    }

    /// Delivers the unconsumed bytes to the server, as a transport does.
    fn offer_input(&mut self) {
        loop {
            self.net.resumed = false;
            let taken = self.server.data(self.now, CONN, &self.unread, &mut self.net);
            self.unread.drain(..taken);
            if !self.net.resumed || self.unread.is_empty() {
                return;
            }
        }
    }

    /// Frees `bytes` bytes of send buffer.
    fn make_room(&mut self, bytes: usize) {
        self.net.room += bytes;
        self.server.writable(self.now, CONN, &mut self.net);
        self.server.read_disk(self.now, &mut self.net);
        if self.net.resumed {
            self.offer_input();
        }
    }

    /// The client closes its side.
    fn close_by_peer(&mut self) {
        assert!(self.unread.is_empty(), "only told when everything was taken");
        self.server.peer_closed(CONN, &mut self.net);
    }

    fn pass_seconds(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.server.tick(self.now, &mut self.net);
        }
    }

    fn take_output(&mut self) -> String {
        String::from_utf8(core::mem::take(&mut self.net.output)).unwrap()
    }

    fn has_ended(&self) -> bool {
        self.net.finished || self.net.closed || self.net.aborted
    }
}

/// Creates a site with a small page, a file too large to be stored after its head, an empty file, and a
/// directory.
fn site_directory() -> tempfile::TempDir {
    let outer = tempfile::tempdir().unwrap();
    let root = outer.path().join("root");
    fs::create_dir_all(root.join("dir with space/sub")).unwrap();
    fs::write(outer.path().join("secret.txt"), "secret").unwrap();
    fs::write(root.join("index.html"), "<p>home</p>").unwrap();
    fs::write(root.join("dir with space/index.html"), "dir").unwrap();
    fs::write(root.join("empty.txt"), "").unwrap();
    fs::write(root.join("large.bin"), large_file()).unwrap();
    std::os::unix::fs::symlink("../secret.txt", root.join("leak.txt")).unwrap();
    for name in ["index.html", "dir with space/index.html", "empty.txt", "large.bin"] {
        let file = fs::File::open(root.join(name)).unwrap();
        file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(UNIX - 1000)).unwrap();
    }
    outer
}

fn large_file() -> Vec<u8> {
    (0..200_000u32).map(|i| (i * 31 % 251) as u8).collect()
}

fn fixture(outer: &tempfile::TempDir) -> ServerFixture {
    ServerFixture::new(&outer.path().join("root"), &SiteOptions::default(), ServerOptions::default())
}

fn streaming_fixture(outer: &tempfile::TempDir) -> ServerFixture {
    let site = SiteOptions { memory_bytes_max: 0, ..SiteOptions::default() };
    ServerFixture::new(&outer.path().join("root"), &site, ServerOptions::default())
}

const HEAD_200: &str = "HTTP/1.1 200 OK\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nServer: ginnel\r\n";
const VALIDATORS_11: &str = "Last-Modified: Sun, 06 Nov 1994 08:32:57 GMT\r\nETag: \"ae1b898e7a3fa00-b\"\r\n";
