//! Continuation of a process after a restart of the shards (docs/adr/0021-restart-of-the-shards.md).

use super::super::message::{ControlReply, ControlRequest, PreviousSocket, Refusal};
use super::{AttachedShards, Attachment, ControlConnection, lock_connection, open_clients};
use crate::channel::client::filters::with_filter;
use crate::channel::control::{ChannelReply, ChannelRequest, UdpRequest};
use crate::channel::{Client, SocketId};
use crate::error::Error;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::handle::Conn;
use ginnel_stack::udp::UdpOptions;
use std::time::Instant;

/// Pause before the next request while the shards are being started again.
const RESTART_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the broker may take to notice the end of the shards that the process has noticed. If the shards
/// still run after this time, the process has only lost its wake-up descriptor.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before the next request while the broker has not noticed the end.
const END_POLL_INTERVAL: Duration = Duration::from_millis(5);

impl ControlConnection {
    /// See [`Attachment::resume`].
    pub(super) fn resume(&mut self, resumes: &mut u32, timeout: Duration) -> Result<AttachedShards, Error> {
        let started = Instant::now();
        loop {
            let welcome = self.request_welcome(&ControlRequest::Resume, &[]);
            *resumes += u32::from(welcome.is_ok());
            match welcome.and_then(|welcome| self.attach_shards(welcome)) {
                // The next shards have ended, too.
                Err(Error::Refused(Refusal::ShardEnded)) if started.elapsed() < END_TIMEOUT.max(timeout) => {}
                Err(Error::Refused(Refusal::Restarting(_))) if started.elapsed() < timeout => {
                    std::thread::sleep(RESTART_POLL_INTERVAL);
                }
                Err(Error::Refused(Refusal::ShardsRun)) if started.elapsed() < END_TIMEOUT => {
                    std::thread::sleep(END_POLL_INTERVAL);
                }
                attached => return attached,
            }
        }
    }
}

impl Attachment {
    /// Returns clients of the shards that were started again. Waits up to `timeout` until the shards run,
    /// which may take several attempts. The process owns no socket there yet. Adds to `resumes` how often the
    /// broker has admitted this process again; that is more than once if shards ended soon after their start.
    ///
    /// # Errors
    /// The broker is gone, too, or does not start the shards again; [`Refusal::Restarting`] if they do not
    /// run in time: then a later call may succeed.
    pub fn resume(&mut self, resumes: &mut u32, timeout: Duration) -> Result<Vec<Client>, Error> {
        let attached = lock_connection(&self.connection).resume(resumes, timeout)?;
        open_clients(&self.connection, &attached.wake, attached.shards)
    }

    /// Opens a listener again on a shard, where it had the number `before`, which was valid until this
    /// process resumed `resumes` times. `request` is one to listen. The listener has the program `filter` as
    /// its filter, if there is one. Processes that share the listener get one listener. Returns its number.
    ///
    /// # Errors
    /// The stack's error, or the shards are gone.
    pub fn restore_listener(
        &self,
        shard: u16,
        before: u32,
        resumes: u32,
        request: ChannelRequest,
        filter: Option<&[u8]>,
    ) -> Result<u32, Error> {
        let before = PreviousSocket { resumes, id: SocketId::Listener(before) };
        match self.restore(shard, before, with_filter(filter, request))? {
            ChannelReply::Listen(result) => result,
            ChannelReply::SetFilter(Err(error)) => Err(Error::Filter(error)),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }

    /// Opens a UDP socket again on a shard, where its handle was `before`, which was valid until this process
    /// resumed `resumes` times. Processes that share the socket get one socket, which `client` owns then.
    /// A new socket has the program `filter` as its filter, if there is one.
    ///
    /// # Errors
    /// As [`Attachment::restore_listener`].
    pub fn restore_udp(
        &self,
        client: &mut Client,
        shard: u16,
        before: Conn,
        resumes: u32,
        local: SocketAddr,
        (options, filter): (UdpOptions, Option<&[u8]>),
    ) -> Result<Conn, Error> {
        let id = SocketId::Socket { socket: before.index(), generation: before.generation() };
        let before = PreviousSocket { resumes, id };
        let request = with_filter(filter, ChannelRequest::Udp(UdpRequest::Open(local, options)));
        match self.restore(shard, before, request)? {
            ChannelReply::UdpBind(Ok((socket, generation))) => {
                let conn = Conn::new(socket, generation);
                client.adopt(conn);
                Ok(conn)
            }
            ChannelReply::UdpBind(Err(error)) => Err(Error::Udp(local, error)),
            ChannelReply::SetFilter(Err(error)) => Err(Error::Filter(error)),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }

    fn restore(
        &self,
        shard: u16,
        before: PreviousSocket,
        request: ChannelRequest,
    ) -> Result<ChannelReply, Error> {
        let request = ControlRequest::Restore(shard, before, request);
        match lock_connection(&self.connection).request(&request, &[])?.0 {
            ControlReply::Reply(reply) => Ok(reply),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }
}
