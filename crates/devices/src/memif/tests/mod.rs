//! Tests of the whole device.

mod conform;
mod connection;
mod hostile;
mod peer;

use super::*;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;

const PATIENCE: Duration = Duration::from_secs(10);

/// A directory for sockets, which is removed with this value.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("ginnel-memif-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).expect("a folder");
        Self(folder)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn socket(&self) -> SocketName {
        SocketName::Path(self.path("socket"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Creates a connected server and client. `adjust` sets the options in which they differ from the defaults.
fn connected(folder: &Folder, adjust: impl Fn(&mut MemifConfig)) -> (Memif, Memif) {
    let [server, client] = [Role::Server, Role::Client].map(|role| {
        let mut config = MemifConfig::new(folder.socket(), role);
        adjust(&mut config);
        open(&config).expect("a device")
    });
    assert!(client.link.wait_for(true, PATIENCE) && server.link.wait_for(true, PATIENCE));
    (server, client)
}
