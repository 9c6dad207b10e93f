//! Descriptions that this process shares with others: what all must know of them.

use super::Client;
use crate::channel::common::Common;
use ginnel_stack::handle::Conn;

/// What it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommonOf {
    /// A connection, or a UDP socket.
    Socket(Conn),
    /// A listener of this number.
    Listener(u32),
}

impl Client {
    fn common(&self, of: CommonOf) -> Option<(&Common, u32)> {
        match of {
            CommonOf::Socket(conn) => {
                self.held(conn).ok()?;
                Some((self.region.common_of_socket(conn.index())?, conn.generation()))
            }
            CommonOf::Listener(number) => Some((self.region.common_of_listener(number)?, 0)),
        }
    }

    /// Counts up with each change. 0 if nothing was said yet.
    #[inline]
    pub fn common_version(&self, of: CommonOf) -> u32 {
        self.common(of).map_or(0, |(common, _)| common.version())
    }

    /// Tells all who share it; which change this is. `None`: it is too long, or not held here.
    pub fn tell_common(&self, of: CommonOf, bytes: &[u8]) -> Option<u32> {
        let (common, generation) = self.common(of)?;
        common.write(generation, bytes)
    }

    /// What was told last, and which change it was. Another process of the domain may have written anything.
    pub fn common_told(&self, of: CommonOf) -> Option<(u32, Vec<u8>)> {
        let (common, generation) = self.common(of)?;
        common.read(generation)
    }
}
