//! Publishes the stacks of this command, so that `ginnel stat`, `ginnel ss` and other processes find them.

use crate::failure::Failure;
use ginnel::PublishedStack;
use ginnel::config::RunConfig;
use std::sync::Arc;

/// Creates the stack's directory. Returns `None` with a warning if the configuration gives no name and the
/// directory cannot be created: the program then runs, but `ginnel stat` does not find its stack.
pub fn publish_stack(config: &RunConfig, program: &str) -> Result<Option<Arc<PublishedStack>>, Failure> {
    match PublishedStack::new(config, program) {
        Err(e) if config.name.is_none() => {
            tracing::warn!("ginnel stat and ginnel ss cannot find this stack: {e}");
            Ok(None)
        }
        presence => Ok(presence?),
    }
}
