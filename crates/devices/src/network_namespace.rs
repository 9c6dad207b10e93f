//! Identity of the network namespace of the calling thread.
#![allow(unsafe_code)] // rustix does not have the option

use rustix::fd::AsRawFd;
use std::io;
use std::os::unix::net::UnixDatagram;

/// Returns the cookie of the network namespace of this thread (`SO_NETNS_COOKIE`), which no other namespace
/// has until the next boot; the inode of a deleted namespace is used again. Returns `None` on kernels before
/// 5.14, which have no cookies.
///
/// # Errors
/// No socket can be created, or the kernel refuses the option for another reason.
pub fn cookie() -> io::Result<Option<u64>> {
    let socket = UnixDatagram::unbound()?;
    let mut cookie = 0_u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, and any bytes are a valid number.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if result == 0 {
        return Ok(Some(cookie));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
        error => Err(error),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::cookie;

    #[test]
    fn cookie_stays_within_a_namespace() {
        let own = cookie().unwrap();
        assert_ne!(own, Some(0));
        assert_eq!(std::thread::spawn(cookie).join().unwrap().unwrap(), own);
    }
}
