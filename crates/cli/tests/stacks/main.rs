//! Stacks that several programs use (`ginnel up`, `down`, `run --stack`), programs that talk to themselves and to each other inside a stack, and such that become others.

mod attaching;
mod between;
mod check;
mod descriptions;
mod descriptors;
mod exec;
mod guests;
mod handlers;
mod homes;
mod inside;
mod interfaces;
mod jumps;
mod lives;
mod rig;
mod rights;
mod shared;
mod symbols;
mod urgent;
