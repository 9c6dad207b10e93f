//! Filters that clients attach to sockets and listeners.

use super::domain::Domain;
use crate::channel::control::{ChannelReply, ChannelRequest, SocketId, UdpRequest};
use crate::context::Context;
use crate::socket_filter::{AttachedProgram, FilterError};
use ginnel_stack::error::{OptionError, Stale};
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::socket_filter::SocketFilter;
use std::sync::Arc;

/// The engine's side of a socket that a client owns.
#[derive(Clone, Copy)]
pub(super) enum Target {
    Conn(Conn),
    Udp(UdpHandle),
    Listener(Listener),
}

fn option_error(error: OptionError) -> FilterError {
    match error {
        OptionError::Stale => FilterError::Stale,
        OptionError::Invalid => FilterError::Invalid,
        OptionError::TooMany => FilterError::NoMemory,
    }
}

impl Domain {
    /// Returns the engine's side of a socket, if the client owns it.
    pub(super) fn target(&self, client: usize, of: SocketId) -> Option<Target> {
        match of {
            SocketId::Socket { socket, generation } => {
                let entry = self.sockets.get(socket as usize)?;
                if !entry.owners.contains(client) || entry.generation != generation {
                    return None;
                }
                entry.udp.map(Target::Udp).or(entry.conn.map(Target::Conn))
            }
            SocketId::Listener(number) => {
                let listening = self.listeners.get(number as usize)?.as_ref()?;
                let is_owned = listening.owners.contains(client) && !listening.is_destroyed;
                is_owned.then_some(Target::Listener(listening.listener))
            }
        }
    }

    /// Verifies a program, within the domain's memory for programs.
    fn new_filter(&mut self, code: &[u8]) -> Result<Arc<dyn SocketFilter>, FilterError> {
        let filter = AttachedProgram::new(code, &self.filter_budget);
        self.stats.filters_refused += u64::from(matches!(filter, Err(FilterError::NoMemory)));
        Ok(Arc::new(filter?))
    }

    /// Sets the filter of a socket; `None` removes it. After an error the socket has the filter that it had
    /// before.
    pub(super) fn set_filter(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        of: SocketId,
        code: Option<&[u8]>,
    ) -> Result<(), FilterError> {
        let target = self.target(client, of).ok_or(FilterError::Stale)?;
        let filter = code.map(|code| self.new_filter(code)).transpose()?;
        let set = set_in_engine(cx, target, filter);
        if let SocketId::Listener(number) = of
            && set.is_ok()
            && let Some(Some(listening)) = self.listeners.get_mut(number as usize)
        {
            listening.filter_removed = code.is_none();
        }
        self.stats.filters_refused += u64::from(set == Err(FilterError::NoMemory));
        set
    }

    /// Returns the program of a socket's filter, without bytes if it has none.
    pub(super) fn filter(&self, cx: &Context<'_>, client: usize, of: SocketId) -> Result<Vec<u8>, Stale> {
        let filter = match self.target(client, of).ok_or(Stale::Handle)? {
            Target::Conn(conn) => cx.filter(conn),
            Target::Udp(socket) => cx.udp_filter(socket),
            Target::Listener(listener) => cx.listener_filter(listener),
        };
        Ok(filter.map(|filter| filter.code().to_vec()).unwrap_or_default())
    }

    /// Handles a request that opens a socket, which has a filter before it gets a packet.
    pub(super) fn open_filtered(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        code: &[u8],
        mut request: ChannelRequest,
    ) -> ChannelReply {
        match &mut request {
            // With several shards, another one may open the engine's listener before.
            ChannelRequest::Listen(_, options)
            | ChannelRequest::ListenShared(_, options, _)
            | ChannelRequest::ListenExclusive(_, options) => {
                options.awaits_filter = true;
            }
            ChannelRequest::Connect(..)
            | ChannelRequest::Udp(UdpRequest::Bind(..) | UdpRequest::Open(..) | UdpRequest::OpenServed(..)) =>
                {}
            _ => return ChannelReply::SetFilter(Err(FilterError::Invalid)),
        }
        // The program has its memory before anything is opened.
        let filter = match self.new_filter(code) {
            Ok(filter) => filter,
            Err(error) => return ChannelReply::SetFilter(Err(error)),
        };
        let joined = match &request {
            ChannelRequest::ListenShared(.., description) => self.listener_of(*description),
            _ => None,
        };
        let reply = self.handle_request(cx, client, request);
        if let Some(number) = joined
            && (self.filter(cx, client, SocketId::Listener(number)).is_ok_and(|code| !code.is_empty())
                || matches!(self.listeners.get(number as usize), Some(Some(l)) if l.filter_removed))
        {
            // The process that listens may have set or removed it after this client's process got the socket.
            return reply;
        }
        let id = match &reply {
            ChannelReply::Listen(Ok(number)) => SocketId::Listener(*number),
            ChannelReply::Connect(Ok((socket, generation)))
            | ChannelReply::UdpBind(Ok((socket, generation))) => {
                SocketId::Socket { socket: *socket, generation: *generation }
            }
            _ => return reply,
        };
        // No frame is processed between the two.
        let target = self.target(client, id).ok_or(FilterError::Stale);
        match target.and_then(|target| set_in_engine(cx, target, Some(filter))) {
            Ok(()) => reply,
            Err(error) => {
                self.stats.filters_refused += u64::from(error == FilterError::NoMemory);
                match id {
                    SocketId::Listener(number) => self.unlisten(cx, client, number),
                    SocketId::Socket { socket, .. } => {
                        self.remove_owner(socket, client);
                        self.close_if_unowned(cx, socket);
                    }
                }
                ChannelReply::SetFilter(Err(error))
            }
        }
    }
}

fn set_in_engine(
    cx: &mut Context<'_>,
    target: Target,
    filter: Option<Arc<dyn SocketFilter>>,
) -> Result<(), FilterError> {
    match target {
        Target::Conn(conn) => cx.set_filter(conn, filter).map_err(option_error),
        Target::Udp(socket) => cx.udp_set_filter(socket, filter).map_err(|_| FilterError::Stale),
        Target::Listener(listener) => cx.set_listener_filter(listener, filter).map_err(option_error),
    }
}
