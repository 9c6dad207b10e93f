//! How a stack shows itself to other processes: a directory by name, with the counters of its shards in it, and a thread that lists their sockets.

use crate::broker::AttachedQuery;
use crate::command::Commander;
use crate::config::RunConfig;
use crate::error::Error;
use crate::inspect::InspectServer;
use crate::run_dir::{self, RunDir};
use core::time::Duration;
use std::path::Path;
use std::sync::Arc;

/// A stack that can be seen: `ginnel stat`, `ginnel ss`. It is gone when the last of its shards is.
#[derive(Debug)]
pub struct PublishedStack {
    // Before the directory, which goes after it.
    inspect_server: InspectServer,
    dir: RunDir,
    publish_every: Duration,
}

impl PublishedStack {
    /// Makes the directory for a stack that is called `run.name`, or else by the name of its program and the number of its process. `None` if
    /// `run.directory` is false.
    ///
    /// # Errors
    /// As of [`RunDir::create`].
    pub fn new(config: &RunConfig, program: &str) -> Result<Option<Arc<Self>>, Error> {
        Self::new_in(&run_dir::base(), config, program)
    }

    /// The same in another place than the user's.
    pub fn new_in(base: &Path, config: &RunConfig, program: &str) -> Result<Option<Arc<Self>>, Error> {
        if !config.directory {
            return Ok(None);
        }
        let name = config.name.clone().unwrap_or_else(|| format!("{program}-{}", std::process::id()));
        let publish_every = Duration::from_millis(config.publish_ms.into());
        let dir = RunDir::create_in(base, &name)?;
        let inspect_server = InspectServer::open(dir.path());
        let inspect_server =
            inspect_server.map_err(|e| Error::io(format!("socket in {}", dir.path().display()), e))?;
        Ok(Some(Arc::new(Self { inspect_server, dir, publish_every })))
    }

    /// Its directory.
    pub fn dir(&self) -> &RunDir {
        &self.dir
    }

    /// A shard with an engine, whose sockets can be listed.
    pub(crate) fn register(&self, label: &str, shard: Commander) {
        self.inspect_server.register(label, shard);
    }

    /// The door of the stack has this list of those who came in.
    pub(crate) fn set_broker(&self, query: AttachedQuery) {
        self.inspect_server.set_broker(query);
    }

    /// Says in the directory that the stack serves: there is a file `ready` from now on.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn mark_ready(&self) -> Result<(), Error> {
        let path = self.dir.path().join(run_dir::READY);
        std::fs::write(&path, "").map_err(|e| Error::io(path.display().to_string(), e))
    }

    /// How often a busy shard shows its counters.
    pub(crate) fn publish_every(&self) -> Duration {
        self.publish_every
    }
}
