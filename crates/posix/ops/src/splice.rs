//! `splice` between a connection and a pipe, as `splice_file_to_pipe` with `tcp_splice_read` and `splice_to_socket` do it. `SPLICE_F_NONBLOCK` is about the
//! pipe alone: whether the connection is waited for, the socket says.

use crate::descriptor::borrow;
use crate::lock::SignalDeferred;
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

/// Bytes moved at a time: what a pipe holds, unless it was made larger.
const CHUNK_BYTES: usize = 64 << 10;
/// Bytes that fit into a pipe that can be written to (`PIPE_BUF`).
const PIPE_BUF: usize = 4096;
/// Not at an offset but where the file stands (`preadv2`).
const CURRENT_OFFSET: u64 = u64::MAX;

thread_local! {
    /// Where bytes rest on their way.
    static CHUNK: Cell<Option<Box<[u8]>>> = const { Cell::new(None) };
}

/// Runs with a buffer of this thread's.
fn with_chunk<T>(run: impl FnOnce(&mut [u8]) -> T) -> T {
    let kept = || CHUNK.try_with(Cell::take).ok().flatten();
    let mut piece = SignalDeferred::new(|| kept().unwrap_or_else(|| vec![0; CHUNK_BYTES].into()));
    let result = run(&mut piece);
    // A thread that is at its end keeps none.
    piece.drop_with(|piece| {
        let _ = CHUNK.try_with(|place| place.set(Some(piece)));
    });
    result
}

impl Ops {
    /// `splice` from a connection to a pipe.
    ///
    /// # Errors
    /// As [`Ops::recv`]; `EINVAL` if `to` is no pipe, `EAGAIN` if it is full and not waited for, `EPIPE` if nobody reads from it.
    pub fn splice_to_pipe(&self, from: RawFd, to: RawFd, len: usize, flags: c_uint) -> Result<usize, Errno> {
        if len == 0 {
            return Ok(0);
        }
        let pipe = pipe_of(to)?;
        with_chunk(|piece| {
            let most = piece.len().min(len);
            loop {
                // What the pipe does not take stays in the connection.
                let count =
                    self.recv_stream(from, &mut [IoSliceMut::new(&mut piece[..most])], libc::MSG_PEEK, true)?;
                if count == 0 {
                    return Ok(0);
                }
                match write_now(pipe, &piece[..count]) {
                    Ok(written) => {
                        let taken = &mut [IoSliceMut::new(&mut piece[..written])];
                        return self.recv_stream(from, taken, libc::MSG_DONTWAIT | libc::MSG_TRUNC, true);
                    }
                    Err(Errno::AGAIN) if may_block(pipe, flags)? => {
                        wait_for(pipe, PollFlags::OUT, true)?;
                    }
                    Err(error) => return Err(error),
                }
            }
        })
    }

    /// `splice` from a pipe to a connection.
    ///
    /// # Errors
    /// As [`Ops::send`]; `EINVAL` if `from` is no pipe, `EAGAIN` if it is empty and not waited for.
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
        let more = if flags & libc::SPLICE_F_MORE != 0 { libc::MSG_MORE } else { 0 };
        let mut done = 0;
        with_chunk(|piece| {
            while done < len {
                let wait = done == 0 && may_block(pipe, flags)?;
                let ready = wait_for(pipe, PollFlags::IN, wait)?;
                if !ready.contains(PollFlags::IN) {
                    // Empty, and it stays so if nobody has it open for writing.
                    let ended = ready.contains(PollFlags::HUP);
                    return if done > 0 || ended { Ok(done) } else { Err(Errno::AGAIN) };
                }
                // What has left the pipe cannot go back, so there has to be room first.
                let room = match self.wait_for_send_space(to, false) {
                    Ok(room) => room,
                    Err(_) if done > 0 => return Ok(done),
                    Err(error) => {
                        if error == Errno::PIPE {
                            signal::raise_sigpipe();
                        }
                        return Err(error);
                    }
                };
                let most = piece.len().min(len - done).min(room);
                let count = match read_now(pipe, &mut piece[..most]) {
                    // Another thread was faster.
                    Err(Errno::AGAIN) => continue,
                    Ok(0) => return Ok(done),
                    result => result?,
                };
                match self.send_all(to, &piece[..count], more) {
                    Ok(sent) => done += sent,
                    Err(_) if done > 0 => return Ok(done),
                    Err(error) => return Err(error),
                }
            }
            Ok(done)
        })
    }

    /// Sends bytes that are nowhere else any more. There is room, unless another thread writes too: then this one waits, whatever the socket says.
    fn send_all(&self, to: RawFd, bytes: &[u8], flags: libc::c_int) -> Result<usize, Errno> {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.send(to, &[IoSlice::new(&bytes[sent..])], flags) {
                Ok(more) => sent += more,
                Err(Errno::AGAIN) => {
                    let mut fds = [pollfd { fd: to, events: libc::POLLOUT, revents: 0 }];
                    // After a signal the next send tells what to do.
                    let _ = self.poll(&mut fds, Timeout::Infinite, None);
                }
                Err(error) if sent == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(sent)
    }
}

/// A descriptor that the program says is a pipe.
fn pipe_of<'a>(fd: RawFd) -> Result<BorrowedFd<'a>, Errno> {
    let pipe = borrow(fd)?;
    match fcntl_getpipe_size(pipe) {
        Ok(_) => Ok(pipe),
        // A descriptor that is open and no pipe is EBADF to fcntl, and EINVAL to splice.
        Err(_) => rustix::io::fcntl_getfd(pipe).and(Err(Errno::INVAL)),
    }
}

/// Whether a pipe is waited for.
fn may_block(pipe: BorrowedFd<'_>, flags: c_uint) -> Result<bool, Errno> {
    Ok(flags & libc::SPLICE_F_NONBLOCK == 0 && !fcntl_getfl(pipe)?.contains(OFlags::NONBLOCK))
}

/// What a pipe is ready for, after a wait if `wait` says so.
fn wait_for(pipe: BorrowedFd<'_>, events: PollFlags, wait: bool) -> Result<PollFlags, Errno> {
    let mut fds = [PollFd::from_borrowed_fd(pipe, events)];
    let zero = Timespec::default();
    poll(&mut fds, (!wait).then_some(&zero))?;
    Ok(fds[0].revents())
}

/// Writes what a pipe has room for, never waiting, also if the pipe itself would.
fn write_now(pipe: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    match pwritev2(pipe, &[IoSlice::new(bytes)], CURRENT_OFFSET, ReadWriteFlags::NOWAIT) {
        // Pipes before Linux 6.4: what is ready has room for so much.
        Err(Errno::OPNOTSUPP) => match wait_for(pipe, PollFlags::OUT, false)? {
            ready if ready.is_empty() => Err(Errno::AGAIN),
            _ => rustix::io::write(pipe, &bytes[..bytes.len().min(PIPE_BUF)]),
        },
        result => result,
    }
}

/// Reads what a pipe holds, never waiting, also if the pipe itself would.
fn read_now(pipe: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
    match preadv2(pipe, &mut [IoSliceMut::new(bytes)], CURRENT_OFFSET, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) => match wait_for(pipe, PollFlags::IN, false)? {
            ready if ready.is_empty() => Err(Errno::AGAIN),
            _ => rustix::io::read(pipe, bytes),
        },
        result => result,
    }
}
