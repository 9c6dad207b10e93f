//! Ginnel and the Linux kernel talk to each other over a TAP device, each in every role.
//!
//! Each case has a network namespace of its own that vanishes with it. `GINNEL_INTEROP=text cargo test --test interop` runs the cases
//! whose names contain the text; `--nocapture` shows how long each took. A case that fails prints what both stacks
//! know about the connection, and where its capture is.

mod case;
mod datagrams;
mod device_lost;
mod endings;
mod ginnel_end;
mod kernel_end;
mod network;
mod path;
mod plan;
mod settings;
mod short;
mod stream;
mod suite;
mod transfer;
mod window;
