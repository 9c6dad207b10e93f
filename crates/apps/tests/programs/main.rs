//! The programs of this crate, each with its peer at the other end of a memory cable.

mod common;
mod iot;
mod limits;
mod placements;
mod proxy;
mod vanished;

/// Defines the tests twice: with each application in its shard's thread, and with each in a thread of its
/// own.
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
