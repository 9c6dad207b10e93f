//! Filters of sockets (`SO_ATTACH_FILTER`). A program is passed in the encoding of `struct sock_filter`.

use super::{Client, unexpected_reply};
use crate::channel::control::{ChannelReply, ChannelRequest, SocketId, UdpRequest};
use crate::error::Error;
use crate::socket_filter::FilterError;
use core::net::{IpAddr, SocketAddr};
use ginnel_stack::error::{GroupError, Stale};
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::udp::UdpOptions;

/// Returns a request for a socket that has a filter from the start, if there is a program.
pub(crate) fn with_filter(code: Option<&[u8]>, request: ChannelRequest) -> ChannelRequest {
    match code {
        Some(code) => ChannelRequest::Filtered(code.to_vec(), Box::new(request)),
        None => request,
    }
}

impl Client {
    /// Sets the filter of a socket or listener; `None` removes it.
    ///
    /// # Errors
    /// Returns an error if the client does not own the socket, the program is not valid, or there is no
    /// memory for it; the socket then has the filter that it had before.
    pub fn set_filter(&mut self, of: SocketId, code: Option<&[u8]>) -> Result<(), FilterError> {
        match self.call(ChannelRequest::SetFilter(of, code.map(<[u8]>::to_vec))) {
            Ok(ChannelReply::SetFilter(result)) => result,
            _ => Err(FilterError::Stale),
        }
    }

    /// Returns the program of a socket's filter, without bytes if it has none.
    ///
    /// # Errors
    /// Returns an error if the client does not own the socket, or if the shard is gone.
    pub fn filter(&mut self, of: SocketId) -> Result<Vec<u8>, Stale> {
        match self.call(ChannelRequest::Filter(of)) {
            Ok(ChannelReply::Filter(result)) => result,
            _ => Err(Stale::Handle),
        }
    }

    /// Sets the program that selects the member of the group of sockets with the address of this one
    /// (`SO_REUSEPORT`); `None` removes it. With `is_first` the group must have no other member.
    ///
    /// # Errors
    /// Returns an error if the client does not own the socket, the program is not valid, or there is no
    /// memory for it. The inner error is that of the group.
    pub fn set_group_program(
        &mut self,
        of: SocketId,
        code: Option<&[u8]>,
        is_first: bool,
    ) -> Result<Result<(), GroupError>, FilterError> {
        match self.call(ChannelRequest::SetGroupProgram(of, code.map(<[u8]>::to_vec), is_first)) {
            Ok(ChannelReply::SetGroupProgram(result)) => result,
            _ => Err(FilterError::Stale),
        }
    }

    /// As [`Client::listen`], with a filter if there is a program, for the open file description with this
    /// number. If the number is not 0 and another process listens for the description, this client becomes an
    /// owner of the listener, which keeps its filter if it has one.
    ///
    /// # Errors
    /// As [`Client::listen`]; [`Error::Filter`].
    pub fn listen_shared(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
        credits: u32,
        description: u64,
        code: Option<&[u8]>,
    ) -> Result<u32, Error> {
        self.listen_as(with_filter(code, ChannelRequest::ListenShared(local, options, description)), credits)
    }

    /// As [`Client::connect`], with a filter if there is a program.
    ///
    /// # Errors
    /// As [`Client::connect`]; [`Error::Filter`].
    pub fn connect_filtered(
        &mut self,
        remote: SocketAddr,
        options: ConnectOptions,
        code: Option<&[u8]>,
    ) -> Result<Conn, Error> {
        match self.call(with_filter(code, ChannelRequest::Connect(remote, options)))? {
            ChannelReply::Connect(Ok((socket, generation))) => {
                self.track(socket, generation);
                Ok(Conn::new(socket, generation))
            }
            ChannelReply::Connect(Err(error)) => Err(error),
            ChannelReply::SetFilter(Err(error)) => Err(Error::Filter(error)),
            _ => Err(unexpected_reply()),
        }
    }

    /// As [`Client::udp_open_served`], with a filter if there is a program.
    ///
    /// # Errors
    /// As [`Client::udp_open_served`]; [`Error::Filter`].
    pub fn udp_open_filtered(
        &mut self,
        local: SocketAddr,
        options: UdpOptions,
        to: Option<IpAddr>,
        code: Option<&[u8]>,
    ) -> Result<Conn, Error> {
        let request = ChannelRequest::Udp(UdpRequest::OpenServed(local, options, to));
        self.udp_open_by(local, with_filter(code, request))
    }
}
