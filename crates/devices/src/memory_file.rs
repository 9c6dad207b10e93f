//! Files in memory, which processes share.

use crate::resource_limit::resource_limit;
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::Resource;

/// Creates a file of `bytes` bytes, all of them 0, which is closed on exec. The system shows the file by
/// `name`.
///
/// # Errors
/// `EFBIG`: `RLIMIT_FSIZE` is less than `bytes`. `ENOMEM`, `EMFILE`, `ENFILE`.
pub fn create(name: &str, bytes: usize, flags: MemfdFlags) -> Result<OwnedFd, Errno> {
    // ftruncate(2) would send SIGXFSZ as well, which ends a process.
    if resource_limit(Resource::Fsize).current.is_some_and(|max| bytes as u64 > max) {
        return Err(Errno::FBIG);
    }
    let file = memfd_create(name, flags | MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes as u64)?;
    Ok(file)
}
