//! `libginnel.so`: loaded into a program before libc, it answers the program's socket calls from a stack instead of the kernel.
//!
//! ```text
//!   program ── send(fd, …) ──► hooks/ ── is fd the stack's? ── yes ──► ginnel_posix_ops::Ops ──► channel
//!                                └────── no ──► real.rs: libc's own
//! ```
//!
//! Nothing here prints by libc, starts a thread in the program, or lets a panic out: an `extern "C"` function that panics ends the program, as a
//! broken libc would.

mod attach;
mod fork;
mod hooks;
mod inherit;
mod real;
