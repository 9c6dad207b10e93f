//! Descriptions that this process shares with others: access to their shared state.

use super::Client;
use crate::channel::description::SharedDescription;
use ginnel_stack::handle::Conn;

/// Names a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptionKey {
    /// The description of a connection or a UDP socket.
    Socket(Conn),
    /// The description of the listener of this number.
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

    /// Returns whether an administrator has closed the listener of this number: see
    /// [`ClientEvent::ListenersDestroyed`](super::ClientEvent::ListenersDestroyed).
    pub fn is_listener_destroyed(&self, number: u32) -> bool {
        self.region.listener_description(number).is_some_and(SharedDescription::is_destroyed)
    }

    /// Returns the version of the shared state, which grows with each change; 0 if nothing was written yet,
    /// or if this client does not own the socket.
    #[inline]
    pub fn description_version(&self, of: DescriptionKey) -> u32 {
        self.description(of).map_or(0, |(description, _)| description.version())
    }

    /// Writes the shared state and returns its version. `None` if it is too long, or this client does not own
    /// the socket.
    pub fn write_description(&self, of: DescriptionKey, bytes: &[u8]) -> Option<u32> {
        let (description, generation) = self.description(of)?;
        description.write(generation, bytes)
    }

    /// Writes the shared state if nobody has written it since its version was `version`. Returns the new
    /// version, or `None` if somebody has written it or is writing it, the state is too long, or this client
    /// does not own the socket.
    pub fn write_description_after(&self, of: DescriptionKey, version: u32, bytes: &[u8]) -> Option<u32> {
        let (description, generation) = self.description(of)?;
        description.write_after(version, generation, bytes)
    }

    /// Returns the version and the state that was written last. Another process of the domain may have
    /// written anything. `None` if nothing was written, somebody is writing, or this client does not own the
    /// socket.
    pub fn read_description(&self, of: DescriptionKey) -> Option<(u32, Vec<u8>)> {
        let (description, generation) = self.description(of)?;
        description.read(generation)
    }
}
