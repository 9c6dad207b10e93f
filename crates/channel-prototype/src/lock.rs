//! A lock in shared memory that the kernel opens when its holder dies: glibc's robust, process-shared mutex.
//!
//! `unsafe`: calls pthread functions.
#![allow(unsafe_code)]

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;

/// Between clients only: the stack never waits for it.
#[repr(transparent)]
pub struct RobustLock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a process-shared mutex.
unsafe impl Sync for RobustLock {}

pub struct Guard<'a>(&'a RobustLock);

impl RobustLock {
    /// To be called once, before the region is given away.
    pub fn init(&self) {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: the attributes are initialised by the first call; the mutex is not in use yet.
        unsafe {
            assert_eq!(libc::pthread_mutexattr_init(attributes.as_mut_ptr()), 0);
            let attributes = attributes.assume_init_mut();
            assert_eq!(libc::pthread_mutexattr_setpshared(attributes, libc::PTHREAD_PROCESS_SHARED), 0);
            assert_eq!(libc::pthread_mutexattr_setrobust(attributes, libc::PTHREAD_MUTEX_ROBUST), 0);
            assert_eq!(libc::pthread_mutex_init(self.0.get(), attributes), 0);
        }
    }

    /// What the last holder did not commit did not happen, so a dead one leaves nothing to be mended.
    pub fn lock(&self) -> Guard<'_> {
        // SAFETY: initialised before the region was given away.
        match unsafe { libc::pthread_mutex_lock(self.0.get()) } {
            0 => {}
            // SAFETY: this thread holds it now.
            libc::EOWNERDEAD => assert_eq!(unsafe { libc::pthread_mutex_consistent(self.0.get()) }, 0),
            error => panic!("a lock of the region: {}", std::io::Error::from_raw_os_error(error)),
        }
        Guard(self)
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread holds it.
        unsafe { libc::pthread_mutex_unlock(self.0.0.get()) };
    }
}
