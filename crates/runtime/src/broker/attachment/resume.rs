//! Continuation of a process after a restart of the shards (docs/adr/0021-restart-of-the-shards.md).

use super::super::message::{ControlReply, ControlRequest, Refusal};
use super::{Attachment, REPLY_TIMEOUT, lock_connection, open_clients};
use crate::channel::control::{ChannelReply, ChannelRequest, UdpRequest};
use crate::channel::{Client, SocketId};
use crate::error::Error;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::ListenOptions;
use ginnel_stack::udp::UdpOptions;

/// How long a process waits for shards that are being started again, possibly after several attempts.
const RESTART_TIMEOUT: Duration = Duration::from_secs(60);

impl Attachment {
    /// Returns clients of the shards that were started again. Waits until they run. The process owns no
    /// socket there yet.
    ///
    /// # Errors
    /// The broker is gone, too, or starts no shards again.
    pub fn resume(&mut self) -> Result<Vec<Client>, Error> {
        let mut connection = lock_connection(&self.connection);
        connection.reply_timeout = RESTART_TIMEOUT;
        let attached = connection.attach_all(&ControlRequest::Resume, &[]);
        connection.reply_timeout = REPLY_TIMEOUT;
        drop(connection);
        let (wake, attachments, _) = attached?;
        open_clients(&self.connection, &wake, attachments)
    }

    /// Opens a listener again on a shard, where it had the number `before`. Processes that share the listener
    /// get one listener. Returns its number.
    ///
    /// # Errors
    /// The stack's error, or the shards are gone.
    pub fn restore_listener(
        &self,
        shard: u16,
        before: u32,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<u32, Error> {
        match self.restore(shard, SocketId::Listener(before), ChannelRequest::Listen(local, options))? {
            ChannelReply::Listen(result) => result,
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }

    /// Opens a UDP socket again on a shard, where its handle was `before`. Processes that share the socket
    /// get one socket, which `client` owns then.
    ///
    /// # Errors
    /// As [`Attachment::restore_listener`].
    pub fn restore_udp(
        &self,
        client: &mut Client,
        shard: u16,
        before: Conn,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<Conn, Error> {
        let before = SocketId::Socket { socket: before.index(), generation: before.generation() };
        match self.restore(shard, before, ChannelRequest::Udp(UdpRequest::Open(local, options)))? {
            ChannelReply::UdpBind(Ok((socket, generation))) => {
                let conn = Conn::new(socket, generation);
                client.adopt(conn);
                Ok(conn)
            }
            ChannelReply::UdpBind(Err(error)) => Err(Error::Udp(local, error)),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }

    fn restore(&self, shard: u16, before: SocketId, request: ChannelRequest) -> Result<ChannelReply, Error> {
        let request = ControlRequest::Restore(shard, before, request);
        match lock_connection(&self.connection).request(&request, &[])?.0 {
            ControlReply::Reply(reply) => Ok(reply),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }
}
