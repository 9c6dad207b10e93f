//! `splice` between a connection and a pipe, as `splice_file_to_pipe` with `tcp_splice_read` and
//! `splice_to_socket` implement it. `SPLICE_F_NONBLOCK` applies to the pipe alone; whether the call waits for
//! the connection depends on the socket.

use crate::descriptor::borrow;
use crate::lock::SignalDeferred;
use crate::user_memory::{UserSlice, UserSliceMut};
use crate::{Ops, Timeout, signal};
use core::cell::Cell;
use core::ffi::c_uint;
use libc::pollfd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{BorrowedFd, RawFd};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{Errno, ReadWriteFlags, preadv2, pwritev2};
use rustix::pipe::fcntl_getpipe_size;
use std::io::{IoSlice, IoSliceMut};

/// Bytes moved at a time: the default capacity of a pipe.
const CHUNK_BYTES: usize = 64 << 10;
/// Bytes that fit in every pipe that is writable.
const PIPE_BUF: usize = 4096;
/// Offset that stands for the current position (`preadv2`).
const CURRENT_OFFSET: u64 = u64::MAX;

thread_local! {
    /// Buffer for data in transit.
    static CHUNK: Cell<Option<Box<[u8]>>> = const { Cell::new(None) };
}

/// Runs a closure with this thread's buffer.
fn with_chunk<T>(run: impl FnOnce(&mut [u8]) -> T) -> T {
    let cached = || CHUNK.try_with(Cell::take).ok().flatten();
    let mut chunk = SignalDeferred::new(|| cached().unwrap_or_else(|| vec![0; CHUNK_BYTES].into()));
    let result = run(&mut chunk);
    // An exiting thread keeps no buffer.
    chunk.drop_with(|chunk| {
        let _ = CHUNK.try_with(|place| place.set(Some(chunk)));
    });
    result
}

impl Ops {
    /// Implements `splice` from a connection to a pipe.
    ///
    /// # Errors
    /// As [`Ops::recv`]; `EINVAL` if `to` is not a pipe, `EAGAIN` if the pipe is full and the call must not
    /// wait, `EPIPE` if it has no reader.
    pub fn splice_to_pipe(&self, from: RawFd, to: RawFd, len: usize, flags: c_uint) -> Result<usize, Errno> {
        if len == 0 {
            return Ok(0);
        }
        let pipe = pipe_of(to)?;
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, from)?;
        // An epoll set.
        state.files.socket(file).map_err(|_| Errno::INVAL)?;
        drop(state);
        with_chunk(|chunk| {
            let max = chunk.len().min(len);
            loop {
                // Bytes that the pipe does not take stay in the connection.
                let count = self.recv_stream(
                    from,
                    &mut [UserSliceMut::new(&mut chunk[..max])],
                    libc::MSG_PEEK,
                    true,
                )?;
                if count == 0 {
                    return Ok(0);
                }
                match write_now(pipe, &chunk[..count]) {
                    Ok(written) => {
                        let taken = &mut [UserSliceMut::new(&mut chunk[..written])];
                        let count = self.recv_stream(from, taken, libc::MSG_DONTWAIT | libc::MSG_TRUNC, true);
                        // Of a datagram the rest is lost.
                        return count.map(|count| count.min(written));
                    }
                    Err(Errno::AGAIN) if may_block(pipe, flags)? => {
                        wait_for(pipe, PollFlags::OUT, true)?;
                    }
                    Err(error) => return Err(error),
                }
            }
        })
    }

    /// Implements `splice` from a pipe to a connection.
    ///
    /// # Errors
    /// As [`Ops::send`]; `EINVAL` if `from` is not a pipe, `EAGAIN` if the pipe is empty and the call must
    /// not wait.
    pub fn splice_from_pipe(
        &self,
        from: RawFd,
        to: RawFd,
        len: usize,
        flags: c_uint,
    ) -> Result<usize, Errno> {
        if len == 0 {
            return Ok(0);
        }
        let pipe = pipe_of(from)?;
        self.check_is_socket(to)?;
        let more = if flags & libc::SPLICE_F_MORE != 0 { libc::MSG_MORE } else { 0 };
        let mut done = 0;
        with_chunk(|chunk| {
            while done < len {
                let wait = done == 0 && may_block(pipe, flags)?;
                let ready = wait_for(pipe, PollFlags::IN, wait)?;
                if !ready.contains(PollFlags::IN) {
                    // The pipe is empty, and stays so without a writer.
                    let ended = ready.contains(PollFlags::HUP);
                    return if done > 0 || ended { Ok(done) } else { Err(Errno::AGAIN) };
                }
                // Bytes that have left the pipe cannot return to it, so the connection must have space first.
                let space = match self.wait_for_send_space(to, false) {
                    Ok(space) => space,
                    Err(_) if done > 0 => return Ok(done),
                    Err(error) => {
                        if error == Errno::PIPE {
                            signal::raise_sigpipe();
                        }
                        return Err(error);
                    }
                };
                let max = chunk.len().min(len - done).min(space);
                let count = match read_now(pipe, &mut chunk[..max]) {
                    // Another thread has read the bytes.
                    Err(Errno::AGAIN) => continue,
                    Ok(0) => return Ok(done),
                    result => result?,
                };
                match self.send_all(to, &chunk[..count], more) {
                    Ok(sent) => done += sent,
                    Err(_) if done > 0 => return Ok(done),
                    Err(error) => return Err(error),
                }
            }
            Ok(done)
        })
    }

    /// Checks that a descriptor of the stack can be spliced into.
    ///
    /// # Errors
    /// `EINVAL` for an epoll set, `EDESTADDRREQ` for a UDP socket without a peer.
    fn check_is_socket(&self, fd: RawFd) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file).map_err(|_| Errno::INVAL)?;
        if socket.is_udp && socket.connected_peer().is_none() { Err(Errno::DESTADDRREQ) } else { Ok(()) }
    }

    /// Sends bytes of which there is no other copy. There is space, unless another thread writes, too: then
    /// this waits even if the socket is non-blocking.
    fn send_all(&self, to: RawFd, bytes: &[u8], flags: libc::c_int) -> Result<usize, Errno> {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.send(to, &[UserSlice::new(&bytes[sent..])], flags) {
                Ok(more) => sent += more,
                Err(Errno::AGAIN) => {
                    let mut fds = [pollfd { fd: to, events: libc::POLLOUT, revents: 0 }];
                    // After a signal the next send decides how to continue.
                    let _ = self.poll(&mut fds, Timeout::Infinite, None);
                }
                Err(error) if sent == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(sent)
    }
}

/// Borrows a descriptor that must be a pipe.
///
/// # Errors
/// `EINVAL` if it is not a pipe, `EBADF`.
fn pipe_of<'a>(fd: RawFd) -> Result<BorrowedFd<'a>, Errno> {
    let pipe = borrow(fd)?;
    match fcntl_getpipe_size(pipe) {
        Ok(_) => Ok(pipe),
        // For an open descriptor that is not a pipe `fcntl` fails with `EBADF`, and `splice` with `EINVAL`.
        Err(_) => rustix::io::fcntl_getfd(pipe).and(Err(Errno::INVAL)),
    }
}

/// Returns whether the call may wait for the pipe.
fn may_block(pipe: BorrowedFd<'_>, flags: c_uint) -> Result<bool, Errno> {
    Ok(flags & libc::SPLICE_F_NONBLOCK == 0 && !fcntl_getfl(pipe)?.contains(OFlags::NONBLOCK))
}

/// Returns the readiness of a pipe, after waiting for it if `wait` is set.
fn wait_for(pipe: BorrowedFd<'_>, events: PollFlags, wait: bool) -> Result<PollFlags, Errno> {
    let mut fds = [PollFd::from_borrowed_fd(pipe, events)];
    let zero = Timespec::default();
    poll(&mut fds, (!wait).then_some(&zero))?;
    Ok(fds[0].revents())
}

/// Writes what fits in a pipe, without waiting even if the pipe is blocking.
fn write_now(pipe: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    match pwritev2(pipe, &[IoSlice::new(bytes)], CURRENT_OFFSET, ReadWriteFlags::NOWAIT) {
        // Before Linux 6.4 pipes do not support the flag: a writable pipe has space for `PIPE_BUF` bytes.
        Err(Errno::OPNOTSUPP) => match wait_for(pipe, PollFlags::OUT, false)? {
            ready if ready.is_empty() => Err(Errno::AGAIN),
            _ => rustix::io::write(pipe, &bytes[..bytes.len().min(PIPE_BUF)]),
        },
        result => result,
    }
}

/// Reads what is in a pipe, without waiting even if the pipe is blocking.
fn read_now(pipe: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
    match preadv2(pipe, &mut [IoSliceMut::new(bytes)], CURRENT_OFFSET, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) => match wait_for(pipe, PollFlags::IN, false)? {
            ready if ready.is_empty() => Err(Errno::AGAIN),
            _ => rustix::io::read(pipe, bytes),
        },
        result => result,
    }
}
