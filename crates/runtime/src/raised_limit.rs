//! The soft limit of descriptors (`RLIMIT_NOFILE`), raised for a moment so that the library in a process gets
//! numbers when the program has used all of its own.

use ginnel_devices::resource_limit::resource_limit;
use rustix::process::{Resource, Rlimit, setrlimit};

/// Raises the soft limit to the hard limit while it lives. Lowering the limit closes no descriptor.
#[derive(Debug)]
pub struct RaisedLimit(Option<Rlimit>);

impl RaisedLimit {
    /// Raises the limit if that is possible and the limit is known.
    pub fn new() -> Self {
        let limit = resource_limit(Resource::Nofile);
        let raised = Rlimit { current: limit.maximum, ..limit };
        Self((limit.current != limit.maximum && setrlimit(Resource::Nofile, raised).is_ok()).then_some(limit))
    }
}

impl Default for RaisedLimit {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for RaisedLimit {
    fn drop(&mut self) {
        if let Some(limit) = self.0.take() {
            // Lowering the limit is always permitted.
            let _ = setrlimit(Resource::Nofile, limit);
        }
    }
}

/// Calls `action`, and a second time with the limit raised if `is_shortage` says that the error is `EMFILE`.
///
/// # Errors
/// The errors of `action`.
pub fn with_raised_limit<T, E>(
    is_shortage: impl FnOnce(&E) -> bool,
    mut action: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    match action() {
        Err(error) if is_shortage(&error) => {
            let _raised = RaisedLimit::new();
            action()
        }
        result => result,
    }
}
