//! The programs of this crate, each with what it talks to at the other end of a cable in memory.

mod common;
mod echo;
mod end_to_end;
mod limits;
