//! Standard input as the source of a capture. A reader that waits for bytes sees the end of the file when the
//! run ends.

use crate::served_stack::POLL_INTERVAL;
use ginnel::StopFlag;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Read, Stdin};
use std::time::Instant;

/// Standard input until a signal or the end of the run.
pub struct StdinUntilEnd {
    stdin: Stdin,
    stop: StopFlag,
    /// The end of the run, if it has one.
    end: Option<Instant>,
}

impl StdinUntilEnd {
    /// Creates the reader of a run that ends when `stop` is set or at `end`.
    pub fn new(stop: StopFlag, end: Option<Instant>) -> Self {
        Self { stdin: io::stdin(), stop, end }
    }

    fn has_ended(&self) -> bool {
        self.stop.is_set() || self.end.is_some_and(|end| Instant::now() >= end)
    }
}

impl Read for StdinUntilEnd {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // A signal to another thread does not interrupt `poll`, so it ends now and then.
        let interval = Timespec { tv_sec: 0, tv_nsec: POLL_INTERVAL.as_nanos() as _ };
        while !self.has_ended() {
            match poll(&mut [PollFd::new(&self.stdin, PollFlags::IN)], Some(&interval)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                // `Stdin` has a buffer, so it must be read without one.
                Ok(_) => return Ok(rustix::io::read(&self.stdin, buffer)?),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(0)
    }
}
