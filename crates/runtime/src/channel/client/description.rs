//! Descriptions that this process shares with others: what all must know of them.

use super::Client;
use crate::channel::description::SharedDescription;
use ginnel_stack::handle::Conn;

/// What it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptionKey {
    /// A connection, or a UDP socket.
    Socket(Conn),
    /// A listener of this number.
    Listener(u32),
}

impl Client {
    fn description(&self, of: DescriptionKey) -> Option<(&SharedDescription, u32)> {
        match of {
            DescriptionKey::Socket(conn) => {
                self.tracked(conn).ok()?;
                Some((self.region.socket_description(conn.index())?, conn.generation()))
            }
            DescriptionKey::Listener(number) => Some((self.region.listener_description(number)?, 0)),
        }
    }

    /// Counts up with each change. 0 if nothing was said yet.
    #[inline]
    pub fn description_version(&self, of: DescriptionKey) -> u32 {
        self.description(of).map_or(0, |(common, _)| common.version())
    }

    /// Tells all who share it; which change this is. `None`: it is too long, or not held here.
    pub fn write_description(&self, of: DescriptionKey, bytes: &[u8]) -> Option<u32> {
        let (common, generation) = self.description(of)?;
        common.write(generation, bytes)
    }

    /// What was told last, and which change it was. Another process of the domain may have written anything.
    pub fn read_description(&self, of: DescriptionKey) -> Option<(u32, Vec<u8>)> {
        let (common, generation) = self.description(of)?;
        common.read(generation)
    }
}
