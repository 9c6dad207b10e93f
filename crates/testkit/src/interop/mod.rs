//! What interop tests with the Linux kernel stand on: network namespaces of their own, and the kernel's view of its sockets.

mod namespace;
mod running;
mod socket;

pub use namespace::{Namespace, unavailable};
pub use running::{Place, Running, library, unavailable_with};
pub use socket::{KernelInfo, kernel_info, reset_on_close};
