//! Sources of packets: capture files, interfaces of the kernel, and stacks.

pub mod capture_file;
pub mod interface;
mod packet_ring;
pub mod stack;

use crate::frame::LinkType;
use core::fmt;
use core::time::Duration;
use ginnel_stack::time::Instant;
use std::io;

/// State of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceState {
    /// There may be more packets.
    More,
    /// There are no packets now; others may come.
    Idle,
    /// There are no further packets.
    End,
}

/// Why a source ends early.
#[derive(Debug)]
pub enum SourceError {
    /// The capture ends within a packet.
    CutShort,
    /// The capture violates its format, or uses a part of the format that is not supported; the text says
    /// which.
    Unusable(String),
    /// A system call failed.
    Io(io::Error),
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CutShort => f.write_str("the capture is cut short, or a length in it is wrong"),
            Self::Unusable(problem) => f.write_str(problem),
            Self::Io(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for SourceError {}

impl From<io::Error> for SourceError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

/// A packet, and when it was captured.
pub type TimedPacket<'a> = (Instant, &'a [u8]);

/// Receives packets in the order of their capture. The packets are valid during the call.
pub type PacketVisitor<'a> = dyn FnMut(LinkType, &[TimedPacket<'_>]) + 'a;

/// A source of packets.
pub trait PacketSource {
    /// Passes the next packets to `visit`.
    ///
    /// # Errors
    /// Why there are no further packets.
    fn poll(&mut self, visit: &mut PacketVisitor<'_>) -> Result<SourceState, SourceError>;

    /// Waits for packets after [`SourceState::Idle`], `timeout` at most.
    ///
    /// # Errors
    /// A system call failed.
    fn wait(&mut self, timeout: Duration) -> io::Result<()>;

    /// Returns a time up to which all packets have been passed on, on the clock of the packets: the current
    /// time less the source's delay. `None` if the packets do not arrive while the source runs, as with a
    /// capture.
    fn now(&self) -> Option<Instant>;

    /// Returns the number of packets that were lost since the source was opened, because the monitor was too
    /// slow.
    fn lost(&mut self) -> u64;
}
