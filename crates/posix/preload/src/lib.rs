//! `libginnel.so`: preloaded into a program, it serves the program's socket calls from a stack instead of the
//! kernel.
//!
//! ```text
//!   program ── send(fd, …) ──► hooks/ ── a stack socket? ── yes ──► ginnel_posix_ops::Ops ──► channel
//!                                └─────── no ──► real.rs: libc's function
//! ```
//!
//! The library never prints through libc, starts no thread in the program, and lets no panic out: an `extern
//! "C"` function that panics aborts the program, as a broken libc would.

#[macro_use]
mod macros;

mod attach;
mod fork;
mod hooks;
mod inherit;
mod real;
mod vfork;
