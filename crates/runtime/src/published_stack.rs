//! A stack that other processes can see: a directory with its name, which has the counters of its shards, and
//! a thread that lists their sockets.

use crate::broker::AttachedQuery;
use crate::command::Commander;
use crate::config::RunConfig;
use crate::error::Error;
use crate::inspect::{self, InspectServer};
use crate::run_dir::{self, RunDir};
use core::time::Duration;
use std::path::Path;
use std::sync::Arc;

/// A stack that `ginnel stat` and `ginnel ss` can see, until its last shard is dropped.
#[derive(Debug)]
pub struct PublishedStack {
    // Dropped before the directory, in which it has a socket.
    inspect_server: InspectServer,
    dir: RunDir,
    publish_every: Duration,
}

impl PublishedStack {
    /// Creates the directory of a stack. Its name is `run.name`, or else the name of the program and the
    /// process id. Returns `None` if `run.directory` is false.
    ///
    /// # Errors
    /// As of [`RunDir::create`].
    pub fn new(config: &RunConfig, program: &str) -> Result<Option<Arc<Self>>, Error> {
        Self::new_in(&run_dir::base(), config, program)
    }

    /// As [`PublishedStack::new`], below `base` instead of the user's runtime directory.
    pub fn new_in(base: &Path, config: &RunConfig, program: &str) -> Result<Option<Arc<Self>>, Error> {
        Self::create(base, config, program, InspectServer::open)
    }

    /// As [`PublishedStack::new`], for a process whose child runs the shards ([`PublishedStack::join`]).
    ///
    /// # Errors
    /// As of [`RunDir::create`].
    pub fn for_supervisor(config: &RunConfig, program: &str) -> Result<Option<Arc<Self>>, Error> {
        Self::create(&run_dir::base(), config, program, InspectServer::open_for_processes)
    }

    /// Publishes the shards of this process in the directory at `path`, which its parent has created. Removes
    /// what an earlier child has left there.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn join(path: &Path, config: &RunConfig) -> Result<Arc<Self>, Error> {
        let io = |e| Error::io(path.display().to_string(), e);
        for entry in std::fs::read_dir(path).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name();
            if name == inspect::SOCKET || name.to_string_lossy().starts_with(".stats.") {
                std::fs::remove_file(entry.path()).map_err(io)?;
            }
        }
        let inspect_server = InspectServer::open(path).map_err(io)?;
        let publish_every = Duration::from_millis(config.publish_ms.into());
        Ok(Arc::new(Self { inspect_server, dir: RunDir::of_parent(path), publish_every }))
    }

    fn create(
        base: &Path,
        config: &RunConfig,
        program: &str,
        open: impl FnOnce(&Path) -> std::io::Result<InspectServer>,
    ) -> Result<Option<Arc<Self>>, Error> {
        if !config.directory {
            return Ok(None);
        }
        let name = config.name.clone().unwrap_or_else(|| format!("{program}-{}", std::process::id()));
        let publish_every = Duration::from_millis(config.publish_ms.into());
        let dir = RunDir::create_in(base, &name)?;
        let inspect_server = open(dir.path());
        let inspect_server = inspect_server.map_err(|e| socket_error(dir.path(), e))?;
        Ok(Some(Arc::new(Self { inspect_server, dir, publish_every })))
    }

    /// Returns the directory.
    pub fn dir(&self) -> &RunDir {
        &self.dir
    }

    /// Adds a shard with an engine, whose sockets can be listed.
    pub(crate) fn register(&self, label: &str, shard: Commander) {
        self.inspect_server.register(label, shard);
    }

    /// Sets the broker, whose attached processes can be listed.
    pub(crate) fn set_broker(&self, query: AttachedQuery) {
        self.inspect_server.set_broker(query);
    }

    /// Creates the file `ready` in the directory: the stack serves programs from now on.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn mark_ready(&self) -> Result<(), Error> {
        let path = self.dir.path().join(run_dir::READY);
        std::fs::write(&path, "").map_err(|e| Error::io(path.display().to_string(), e))
    }

    /// Returns the interval at which a busy shard publishes its counters.
    pub(crate) fn publish_every(&self) -> Duration {
        self.publish_every
    }
}
/// Returns the error of a socket that cannot be made in a stack's directory.
fn socket_error(directory: &Path, error: std::io::Error) -> Error {
    let directory = directory.display();
    // std's error for a path that does not fit in `sockaddr_un`.
    if error.kind() == std::io::ErrorKind::InvalidInput {
        return Error::application(format!(
            "{directory}: the paths of sockets would be too long (unix(7)): set GINNEL_RUN_DIR to a shorter path"
        ));
    }
    Error::io(format!("socket in {directory}"), error)
}
