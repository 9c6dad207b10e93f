//! Interoperability of Ginnel and the Linux kernel over a TAP device, each in every role.
//!
//! Each case has a network namespace of its own. `GINNEL_INTEROP=text cargo test --test interop` runs the
//! cases whose names contain the text; `--nocapture` shows their durations. A case that fails prints the
//! state of the connection in both stacks, and the path of its capture.

mod case;
mod datagrams;
mod device_lost;
mod endings;
mod ginnel_end;
mod kernel_end;
mod messages;
mod network;
mod path;
mod plan;
mod settings;
mod short;
mod stream;
mod suite;
mod transfer;
mod window;
