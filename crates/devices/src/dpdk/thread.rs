//! Registers the threads that use ports with DPDK's EAL, which gives each of them a cache in every buffer
//! pool, so that allocating and freeing a buffer takes no atomic operation.

use super::ffi;

thread_local! {
    static REGISTRATION: Registration = Registration::new();
}

/// The registration of a thread, which ends with the thread.
struct Registration {
    is_registered: bool,
}

impl Registration {
    fn new() -> Self {
        let result = ffi::register_thread();
        if let Err(error) = result {
            tracing::warn!("a thread of a DPDK port has no cache for buffers, which costs time: {error}");
        }
        Self { is_registered: result.is_ok() }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.is_registered {
            ffi::unregister_thread();
        }
    }
}

/// Registers the calling thread unless it is registered.
#[inline]
pub(super) fn register() {
    // A thread that ends has lost its registration, and uses the port without a cache.
    let _ = REGISTRATION.try_with(|_| ());
}
