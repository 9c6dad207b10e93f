//! `libginnel_kernel.so`: preloaded into a pre-forking server, it gives each worker a listener of its own on
//! the kernel's stack. All connections and all other sockets of the program stay the kernel's.

mod hooks;
mod program_memory;
mod real;
