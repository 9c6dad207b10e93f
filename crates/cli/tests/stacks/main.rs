//! Stacks that several programs use (`ginnel up`, `down`, `run --stack`); programs that connect to themselves
//! and to each other inside a stack; and programs that exec others.

mod attachment;
mod bad_pointers;
mod blocking_handlers;
mod check;
mod descriptions;
mod descriptors;
mod exec;
mod fd_passing;
mod filters;
mod fixture;
mod interfaces;
mod latency_stages;
mod lifecycle;
mod linger;
mod log;
mod loopback;
mod many_processes;
mod priorities;
mod refusals;
mod restart;
mod restart_devices;
mod reuseport;
mod routes;
mod shard_placement;
mod siglongjmp;
mod signal_delivery;
mod socket_arguments;
mod socket_kill;
mod socket_users;
mod symbols;
mod system_calls;
mod terminal_signals;
mod unattached;
mod upgrade;
mod urgent;
