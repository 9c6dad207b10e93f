//! Bytes between a connection and a descriptor of the kernel: `sendfile` and `splice`.

use crate::Ops;
use crate::descriptor::borrow;
use core::ffi::c_uint;
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::io::{IoSlice, IoSliceMut};

/// Bytes moved at a time.
const PIECE_BYTES: usize = 64 << 10;

impl Ops {
    /// `sendfile` to a connection. With `offset` the file is read from there and the number moved on; without, from where the file stands.
    ///
    /// # Errors
    /// As [`Ops::send`], and what reading the file says.
    pub fn sendfile(
        &self,
        out: RawFd,
        from: RawFd,
        offset: Option<&mut i64>,
        count: usize,
    ) -> Result<usize, Errno> {
        let file = borrow(from)?;
        let start = match &offset {
            Some(offset) => u64::try_from(**offset).map_err(|_| Errno::INVAL)?,
            None => rustix::fs::tell(file)?,
        };
        let mut piece = vec![0; PIECE_BYTES.min(count)];
        let mut done = 0;
        let result = loop {
            let most = piece.len().min(count - done);
            if most == 0 {
                break Ok(());
            }
            let read = match rustix::io::pread(file, &mut piece[..most], start + done as u64) {
                Ok(0) => break Ok(()),
                Ok(read) => read,
                Err(error) => break Err(error),
            };
            match self.send(out, &[IoSlice::new(&piece[..read])], 0) {
                Ok(sent) => {
                    done += sent;
                    if sent < read {
                        break Ok(());
                    }
                }
                Err(error) => break Err(error),
            }
        };
        let end = start + done as u64;
        match offset {
            Some(offset) => *offset = end.cast_signed(),
            None if done > 0 => {
                rustix::fs::seek(file, rustix::fs::SeekFrom::Start(end))?;
            }
            None => {}
        }
        match result {
            Err(error) if done == 0 => Err(error),
            _ => Ok(done),
        }
    }

    /// `splice` from a connection to a pipe.
    ///
    /// # Errors
    /// As [`Ops::recv`], and what writing to the pipe says.
    pub fn splice_from(&self, from: RawFd, to: RawFd, len: usize, flags: c_uint) -> Result<usize, Errno> {
        let wait = if flags & libc::SPLICE_F_NONBLOCK != 0 { libc::MSG_DONTWAIT } else { 0 };
        let mut piece = vec![0; PIECE_BYTES.min(len)];
        // What the pipe does not take stays in the connection.
        let count = self.recv(from, &mut [IoSliceMut::new(&mut piece)], libc::MSG_PEEK | wait)?;
        if count == 0 {
            return Ok(0);
        }
        let written = rustix::io::write(borrow(to)?, &piece[..count])?;
        self.recv(from, &mut [IoSliceMut::new(&mut piece[..written])], libc::MSG_DONTWAIT)
    }

    /// `splice` from a pipe to a connection.
    ///
    /// # Errors
    /// As [`Ops::send`], and what reading the pipe says.
    pub fn splice_to(&self, from: RawFd, to: RawFd, len: usize, flags: c_uint) -> Result<usize, Errno> {
        let room = self.wait_for_room(to, flags & libc::SPLICE_F_NONBLOCK != 0)?;
        let mut piece = vec![0; PIECE_BYTES.min(len).min(room)];
        let count = rustix::io::read(borrow(from)?, &mut piece)?;
        // There is room, unless another thread writes too: then this one waits, for the bytes have left the pipe.
        let mut sent = 0;
        while sent < count {
            match self.send(to, &[IoSlice::new(&piece[sent..count])], 0) {
                Ok(more) => sent += more,
                Err(Errno::AGAIN) => {
                    self.wait_for_room(to, false)?;
                }
                Err(error) if sent == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(sent)
    }
}
