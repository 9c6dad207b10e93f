//! `libginnel_kernel.so`: preloaded into a pre-forking server, it gives each worker a listener of its own on
//! the kernel's stack. All other calls of the program are the kernel's.

mod hooks;
mod real;
