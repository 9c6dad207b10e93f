//! The programs of this crate, each with what it talks to at the other end of a cable in memory.

mod common;
mod limits;
mod placements;

/// The same tests with each application in its shard's thread, and with each beside its shard.
macro_rules! placements {
    ($($name:ident: $split:literal)*) => {
        $(mod $name {
            type Pair<S, C> = crate::common::Pair<S, C, $split>;

            mod echo {
                use super::Pair;
                include!("echo.rs");
            }

            mod end_to_end {
                use super::Pair;
                include!("end_to_end.rs");
            }
        })*
    };
}

placements! { inline: false split: true }
