//! How the stacks of this command are seen by others.

use crate::failure::Failure;
use ginnel::PublishedStack;
use ginnel::config::RunConfig;
use std::sync::Arc;

/// A directory for the stack. One that has no name of its own goes without if there is no place for it, and says so: serving matters more.
pub fn publish_stack(config: &RunConfig, program: &str) -> Result<Option<Arc<PublishedStack>>, Failure> {
    match PublishedStack::new(config, program) {
        Err(e) if config.name.is_none() => {
            tracing::warn!("ginnel stat will not find this stack: {e}");
            Ok(None)
        }
        presence => Ok(presence?),
    }
}
