//! `sendfile`.

use crate::Ops;
use crate::descriptor::{borrow, is_internal};
use crate::lock::SignalDeferred;
use crate::user_memory::{MAX_RW_COUNT, UserSlice};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Bytes moved at a time.
const CHUNK_BYTES: usize = 64 << 10;

impl Ops {
    /// Implements `sendfile` to a connection, for [`MAX_RW_COUNT`] bytes at the most. Reads from `offset` and
    /// advances it; without `offset` reads from the file's position and advances that.
    ///
    /// # Errors
    /// As [`Ops::send`], and errors of reading the file. `EINVAL` if the count or the end of the range
    /// exceeds what an offset can be. After bytes were sent there is no error.
    pub fn sendfile(
        &self,
        out: RawFd,
        from: RawFd,
        offset: Option<&mut i64>,
        count: usize,
    ) -> Result<usize, Errno> {
        if !self.owns(out) || is_internal(from) {
            return Err(Errno::BADF);
        }
        let file = borrow(from)?;
        let start = match &offset {
            Some(offset) => u64::try_from(**offset).map_err(|_| Errno::INVAL)?,
            None => rustix::fs::tell(file).map_err(not_a_source)?,
        };
        let count = limit_count(start, count)?;
        let mut chunk = SignalDeferred::new(|| vec![0; CHUNK_BYTES.min(count)]);
        let mut done = 0;
        let result = loop {
            let max = chunk.len().min(count - done);
            if max == 0 {
                break Ok(());
            }
            let read = match rustix::io::pread(file, &mut chunk[..max], start + done as u64) {
                Ok(0) => break Ok(()),
                Ok(read) => read,
                Err(Errno::ISDIR) => break Err(Errno::INVAL),
                Err(error) if offset.is_none() => break Err(not_a_source(error)),
                Err(error) => break Err(error),
            };
            match self.send(out, &[UserSlice::new(&chunk[..read])], 0) {
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
            // Another thread may have closed the file meanwhile. The bytes were sent nevertheless.
            None if done > 0 => drop(rustix::fs::seek(file, rustix::fs::SeekFrom::Start(end))),
            None => {}
        }
        match result {
            Err(error) if done == 0 => Err(error),
            _ => Ok(done),
        }
    }
}

/// Returns the error of a descriptor whose position cannot be read: only a seekable file can be sent
/// (`splice_direct_to_actor`).
fn not_a_source(error: Errno) -> Errno {
    if error == Errno::SPIPE { Errno::INVAL } else { error }
}

/// Returns how many bytes one call moves from `start`, where `count` are requested (`rw_verify_area`).
///
/// # Errors
/// `EINVAL` if `count` or the end of the range is not an offset.
fn limit_count(start: u64, count: usize) -> Result<usize, Errno> {
    let count_fits = isize::try_from(count).is_ok();
    let end_fits = start.checked_add(count as u64).is_some_and(|end| i64::try_from(end).is_ok());
    if count_fits && end_fits { Ok(count.min(MAX_RW_COUNT)) } else { Err(Errno::INVAL) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_moves_at_most_max_rw_count() {
        for (count, expected) in [(0, 0), (1, 1), (0x7fff_f000, 0x7fff_f000), (0x7fff_f001, 0x7fff_f000)] {
            assert_eq!(limit_count(0, count), Ok(expected), "{count}");
        }
        let most = isize::MAX as usize;
        assert_eq!((limit_count(0, most), limit_count(1, most)), (Ok(0x7fff_f000), Err(Errno::INVAL)));
        assert_eq!(limit_count(0, most + 1), Err(Errno::INVAL));
        assert_eq!((limit_count(most as u64, 0), limit_count(most as u64, 1)), (Ok(0), Err(Errno::INVAL)));
    }
}
