//! Infrastructure of interop tests with the Linux kernel: network namespaces, programs that run in them, and
//! the kernel's view of its sockets.

mod programs;
mod socket;

pub use crate::namespace::{
    Namespace, VethEnd, enter_new_loopback, in_namespace, rerun_in_namespace, unavailable,
};
pub use programs::{
    ProgramFixture, RunningClient, RunningProgram, STACK, build_c_library, build_kernel_library,
    build_preload_library, programs_are_built, programs_unavailable,
};
pub use socket::{KernelInfo, kernel_info, reset_on_close};
