//! `sendfile`.

use crate::Ops;
use crate::descriptor::borrow;
use crate::lock::SignalDeferred;
use crate::user_memory::UserSlice;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Bytes moved at a time.
const CHUNK_BYTES: usize = 64 << 10;

impl Ops {
    /// Implements `sendfile` to a connection. Reads from `offset` and advances it; without `offset` reads
    /// from the file's position and advances that.
    ///
    /// # Errors
    /// As [`Ops::send`], and errors of reading the file.
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
}
