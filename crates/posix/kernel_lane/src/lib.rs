//! The kernel lane: a pre-forking server on the kernel's stack gets one listener per worker instead of one
//! that all workers share, and each CPU delivers new connections to its own worker.
//!
//! ```text
//!   master   socket, bind, listen            the listener: slot 0, group of SO_REUSEPORT
//!     │      before each fork                binds a socket for each further slot, and keeps all of them
//!     ▼
//!   worker   first accept, epoll_ctl, poll   takes a free slot, listens on its socket, and puts that socket
//!                                            in the place of the shared listener; a BPF program of the
//!                                            group delivers connections to the slot of the receiving CPU
//! ```
//!
//! New connections go to other workers as soon as a worker closes its listener, or has ended and its parent
//! has waited for it. Connections in its accept queue stay there until a new worker takes the slot or another
//! worker accepts them: the master has the socket, too.
//!
//! Processes share one [`Region`](region::Region) of memory per program. Each process knows its descriptors
//! in statics ([`local`]), because hooks of libc have no other state, and a child has a copy of them.

mod affinity;
mod errno;
mod lane;
mod local;
mod members;
mod mode;
mod note;
mod notification;
mod region;
pub mod report;
mod slot_socket;
mod steering;
mod worker;

pub use errno::ErrnoGuard;
pub use lane::{
    accept_waiting, accepted, after_fork_child, after_fork_parent, before_fork, child_reaped, closed_range,
    closes, epoll_changed, is_listener, listening, listening_begins, listening_failed, memory_in, replaced,
    replaces, use_all_in, use_listener,
};
pub use mode::{MODE_VARIABLE, Mode};
