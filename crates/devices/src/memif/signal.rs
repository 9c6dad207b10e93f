//! Signals an eventfd that another process holds, too, without ever blocking.
//!
//! `write` blocks while the counter is full, unless the descriptor is nonblocking; but that flag is shared
//! with the other process, which can change it at any time. The kernel itself signals eventfds without
//! blocking: this module submits an asynchronous read of zero bytes from an empty file, whose completion is
//! reported by an eventfd (io_submit(2), `IOCB_FLAG_RESFD`).
#![allow(unsafe_code)] // system calls that rustix does not have

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, memfd_create};
use std::io;

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;
/// Maximum number of requests in flight: each is complete when its submission returns.
const REQUESTS_MAX: libc::c_long = 4;

/// `struct iocb` of the kernel. The pairs of 32-bit fields whose order depends on the byte order are zero
/// here.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key_and_flags: u64,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// `struct io_event` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent([u64; 4]);

const _: () = assert!(size_of::<Iocb>() == 64 && size_of::<IoEvent>() == 32);

/// A context of asynchronous I/O, and an empty file to read from. Without a context (the kernel has no AIO,
/// or its limit is reached), signals are written when the eventfd is writable.
#[derive(Debug)]
pub(super) struct Signaller(Option<(libc::c_ulong, OwnedFd)>);

impl Signaller {
    pub(super) fn new() -> io::Result<Self> {
        let file = memfd_create("ginnel-nothing", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: io_setup writes the identifier of the new context to this variable.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, REQUESTS_MAX, &raw mut context) };
        Ok(Self((made == 0).then_some((context, file))))
    }

    /// Increments the counter, unless it is full.
    #[cold]
    pub(super) fn signal(&self, eventfd: &OwnedFd) {
        if !self.submit(eventfd) {
            write_if_writable(eventfd);
        }
    }

    fn submit(&self, eventfd: &OwnedFd) -> bool {
        let Some((context, file)) = &self.0 else { return false };
        let mut request = Iocb {
            opcode: IOCB_CMD_PREAD,
            file: file.as_raw_fd() as u32,
            flags: IOCB_FLAG_RESFD,
            result_fd: eventfd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let mut requests = [&raw mut request];
        // SAFETY: io_submit reads one pointer to a request and writes to the key of that request. It reads no
        // bytes from the file, so nothing is written to memory later.
        let submitted =
            unsafe { libc::syscall(libc::SYS_io_submit, *context, 1 as libc::c_long, requests.as_mut_ptr()) };
        let mut completions = [IoEvent::default(); REQUESTS_MAX as usize];
        // SAFETY: io_getevents writes at most this number of completions, and with a minimum of zero it does
        // not wait. The completions are read to make room for the next ones.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                *context,
                0 as libc::c_long,
                REQUESTS_MAX,
                completions.as_mut_ptr(),
                std::ptr::null_mut::<libc::timespec>(),
            )
        };
        submitted == 1
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        if let Some((context, _)) = &self.0 {
            // SAFETY: this value owns the context, and no request is in flight.
            unsafe { libc::syscall(libc::SYS_io_destroy, *context) };
        }
    }
}

fn write_if_writable(eventfd: &OwnedFd) {
    let mut fds = [PollFd::new(eventfd, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::OUT) {
        let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn counter(eventfd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(eventfd, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    #[test]
    fn each_signal_is_counted() {
        let eventfd = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        for signaller in [Signaller::new().expect("a descriptor"), Signaller(None)] {
            assert_eq!(counter(&eventfd), 0);
            (0..1000).for_each(|_| signaller.signal(&eventfd));
            assert_eq!(counter(&eventfd), 1000);
        }
    }

    /// The other side continuously fills and empties the counter and makes the descriptor blocking: a plain
    /// `write` would soon block for ever.
    #[test]
    fn full_eventfd_does_not_block_the_signaller() {
        let signaller = Signaller::new().expect("a descriptor");
        if signaller.0.is_none() {
            // The kernel has no asynchronous I/O; the test above covers the fallback.
            return;
        }
        let eventfd = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = rustix::io::ioctl_fionbio(&eventfd, true);
                    let _ = rustix::io::read(&eventfd, &mut [0; 8]);
                    let _ = rustix::io::write(&eventfd, &(u64::MAX - 1).to_ne_bytes());
                    let _ = rustix::io::ioctl_fionbio(&eventfd, false);
                }
                let _ = rustix::io::ioctl_fionbio(&eventfd, true);
            });
            (0..50_000).for_each(|_| signaller.signal(&eventfd));
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
