//! The engine on which a shard's application acts: one in the same thread, or one that is reached through a
//! channel.

use crate::channel::remote::RemoteEngine;
use core::net::{IpAddr, SocketAddr};
use ginnel_stack::error::{ConnectError, ListenError, OptionError, RecvError, SendError, Stale};
use ginnel_stack::events::Event;
use ginnel_stack::handle::{Conn, LinkId, Listener, UdpHandle};
use ginnel_stack::ip::{DropStats, NetworkStats};
use ginnel_stack::multicast::SourceFilter;
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use ginnel_stack::stack::Stack;
use ginnel_stack::tcp::TcpStats;
use ginnel_stack::tcp::UnorderedBytes;
use ginnel_stack::tcp::source::{Source, SourceId};
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{Datagram, UdpError, UdpExtendedError, UdpOptions, UdpSendParams};
use ginnel_stack::wire::tcp::SeqNumber;
use rustix::fd::{AsRawFd, RawFd};

/// Where the engine is.
#[expect(
    clippy::large_enum_variant,
    reason = "there is one in each shard, and a pointer more would stand in the way of every packet"
)]
pub(crate) enum Engine {
    /// In this thread.
    Local(Stack),
    /// In another thread, reached through a channel.
    Channel(Box<RemoteEngine>),
}

/// Defines methods that both engines have with the same signature.
macro_rules! both {
    ($($(#[$doc:meta])* fn $name:ident(&mut self $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        impl Engine {
            $($(#[$doc])*
            #[inline]
            pub fn $name(&mut self $(, $argument: $type)*) $(-> $result)? {
                // A separate function, so that the local call is inlined as if it were the only one.
                #[cold]
                #[inline(never)]
                fn call_remote(remote: &mut RemoteEngine $(, $argument: $type)*) $(-> $result)? {
                    remote.$name($($argument),*)
                }
                match self {
                    Self::Local(stack) => stack.$name($($argument),*),
                    Self::Channel(remote) => call_remote(remote $(, $argument)*),
                }
            })*
        }
    };
}

both! {
    fn listen(&mut self, local: SocketAddr, options: ListenOptions) -> Result<Listener, ListenError>;
    fn unlisten(&mut self, listener: Listener) -> bool;
    fn accept(&mut self, listener: Listener) -> Option<Conn>;
    fn accept_incoming(&mut self, listener: Listener) -> Option<Conn>;
    fn accept_with_class(&mut self, listener: Listener) -> Option<(Conn, u8)>;
    fn connect(&mut self, now: Instant, remote: SocketAddr, options: &ConnectOptions) -> Result<Conn, ConnectError>;
    fn send_deferred_syn(&mut self, now: Instant, conn: Conn);
    fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError>;
    fn send_message(&mut self, conn: Conn, bytes: &[u8], priority: u8) -> Result<(), SendError>;
    fn send_source(&mut self, conn: Conn, id: SourceId, offset: u64, len: u64) -> Result<(), SendError>;
    fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError>;
    fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError>;
    fn recv_unordered(&mut self, conn: Conn, out: &mut [u8]) -> Result<Option<UnorderedBytes>, Stale>;
    fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError>;
    fn skip(&mut self, conn: Conn, count: usize) -> Result<(), Stale>;
    fn add_source(&mut self, source: Box<dyn Source>) -> SourceId;
    fn release_source(&mut self, id: SourceId) -> bool;
    fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale>;
    fn close(&mut self, conn: Conn) -> Result<(), Stale>;
    fn abort(&mut self, conn: Conn) -> Result<(), Stale>;
    fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError>;
    fn set_token(&mut self, conn: Conn, token: u32) -> bool;
    fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError>;
    fn udp_connect(&mut self, now: Instant, socket: UdpHandle, to: SocketAddr) -> Result<(), UdpError>;
    fn udp_send_to(&mut self, now: Instant, socket: UdpHandle, to: Option<SocketAddr>, data: &[u8]) -> Result<(), UdpError>;
    fn udp_send_with(&mut self, now: Instant, socket: UdpHandle, sending: &UdpSendParams, data: &[u8]) -> Result<(), UdpError>;
    fn udp_recv_from(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError>;
    fn udp_take_report(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<UdpExtendedError, UdpError>;
    fn udp_path_mtu(&mut self, now: Instant, socket: UdpHandle) -> Result<u16, UdpError>;
    fn udp_set_options(&mut self, socket: UdpHandle, options: UdpOptions) -> Result<(), UdpError>;
    fn udp_set_membership(&mut self, socket: UdpHandle, link: LinkId, group: IpAddr, filter: Option<SourceFilter>) -> Result<(), UdpError>;
    fn udp_local(&mut self, socket: UdpHandle) -> Result<SocketAddr, UdpError>;
    fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError>;
    fn advance(&mut self, now: Instant);
    fn transmit(&mut self, now: Instant);
}

impl Engine {
    /// See [`Stack::next_event_by_class`].
    #[inline(always)]
    pub fn next_event_by_class(&mut self) -> Option<Event> {
        match self {
            Self::Local(stack) => stack.next_event_by_class(),
            Self::Channel(remote) => remote.next_event(),
        }
    }

    /// See [`Stack::next_event`]. Inlined into each of its callers, of which one runs for each frame.
    #[inline(always)]
    pub fn next_event(&mut self) -> Option<Event> {
        #[cold]
        #[inline(never)]
        fn call_remote(remote: &mut RemoteEngine) -> Option<Event> {
            remote.next_event()
        }
        match self {
            Self::Local(stack) => stack.next_event(),
            Self::Channel(remote) => call_remote(remote),
        }
    }
}

/// Bytes that are copied at a time to an engine in another thread.
const COPY_BYTES: usize = 4096;

/// Defines methods that take `&self`, likewise.
macro_rules! both_read {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        impl Engine {
            $(#[inline]
            pub fn $name(&self $(, $argument: $type)*) -> $result {
                #[cold]
                #[inline(never)]
                fn call_remote(remote: &RemoteEngine $(, $argument: $type)*) -> $result {
                    remote.$name($($argument),*)
                }
                match self {
                    Self::Local(stack) => stack.$name($($argument),*),
                    Self::Channel(remote) => call_remote(remote $(, $argument)*),
                }
            })*
        }
    };
}

both_read! {
    fn peek(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError>;
    fn buffered(&self, conn: Conn) -> usize;
    fn has_readable(&self, conn: Conn) -> bool;
    fn urgent_ahead(&self, conn: Conn, at: SeqNumber) -> i32;
    fn info(&self, conn: Conn) -> Option<TcpInfo>;
    fn state(&self, conn: Conn) -> Option<State>;
    fn token(&self, conn: Conn) -> Option<u32>;
    fn tcp_stats(&self) -> &TcpStats;
    fn events_waiting(&self) -> usize;
}

impl Engine {
    /// Returns the engine, if it is in this thread.
    #[inline]
    pub fn local(&self) -> Option<&Stack> {
        match self {
            Self::Local(stack) => Some(stack),
            Self::Channel(_) => None,
        }
    }

    /// Returns the engine to change it, if it is in this thread.
    #[inline]
    pub fn local_mut(&mut self) -> Option<&mut Stack> {
        match self {
            Self::Local(stack) => Some(stack),
            Self::Channel(_) => None,
        }
    }

    /// Returns the class of priority of the events that are being delivered.
    #[inline]
    pub fn event_class(&self) -> u8 {
        match self {
            Self::Local(stack) => stack.selected_class(),
            Self::Channel(remote) => remote.event_class(),
        }
    }

    /// Returns the class of priority of the datagram that was received last; that of the event where the
    /// engine is reached through a channel.
    pub fn received_class(&self) -> u8 {
        match self {
            Self::Local(stack) => stack.udp_received_class(),
            Self::Channel(remote) => remote.event_class(),
        }
    }

    /// Reports a listener again that may have more connections in its accept queue.
    pub fn report_incoming_again(&mut self, listener: Listener) {
        match self {
            Self::Local(stack) => stack.report_incoming_again(listener),
            Self::Channel(remote) => remote.report_incoming_again(listener),
        }
    }

    /// Ends the delivery of events: what follows is of best effort.
    pub fn end_events(&mut self) {
        match self {
            // The receive queues select the class of their events.
            Self::Local(_) => {}
            Self::Channel(remote) => remote.end_events(),
        }
    }

    /// Returns the local and the peer's address of a connection.
    pub fn endpoints(&self, conn: Conn) -> Option<[SocketAddr; 2]> {
        match self {
            Self::Local(stack) => stack.endpoints(conn),
            Self::Channel(remote) => remote.endpoints(conn),
        }
    }

    /// Returns the counters of the network layer.
    pub fn network_stats(&self) -> NetworkStats {
        match self {
            Self::Local(stack) => stack.network().stats(),
            Self::Channel(remote) => remote.counters().network.clone(),
        }
    }

    /// Returns the frames that the network layer dropped.
    pub fn network_drops(&self) -> &DropStats {
        match self {
            Self::Local(stack) => stack.network().drops(),
            Self::Channel(remote) => &remote.counters().drops,
        }
    }

    /// Replies to a datagram from the address to which it was sent, or from the preferred one if that was a
    /// multicast or broadcast address.
    pub fn udp_reply(
        &mut self,
        now: Instant,
        socket: UdpHandle,
        to: &Datagram,
        data: &[u8],
    ) -> Result<(), UdpError> {
        match self {
            Self::Local(stack) if stack.network().is_local(to.to) => {
                stack.udp_send_from(now, socket, to.to, to.from, data)
            }
            Self::Local(stack) => stack.udp_send_to(now, socket, Some(to.from), data),
            Self::Channel(remote) => remote.udp_reply(socket, to, data),
        }
    }

    /// Takes the pending error of a UDP socket, if it was not reported yet.
    pub fn udp_take_error(&mut self, socket: UdpHandle) -> Option<UdpError> {
        self.local_mut().and_then(|stack| stack.udp_take_error(socket).ok().flatten())
    }

    /// Queues `len` bytes. `fill` gets the number of bytes that it wrote before and a slice, which it has to
    /// fill.
    #[inline]
    pub fn send_with(
        &mut self,
        conn: Conn,
        len: usize,
        continues: bool,
        mut fill: impl FnMut(usize, &mut [u8]),
    ) -> Result<usize, SendError> {
        match self {
            Self::Local(stack) => stack.send_with(conn, len, continues, fill),
            Self::Channel(remote) => {
                let mut chunk = [0; COPY_BYTES];
                let mut done = 0;
                while done < len {
                    let chunk = &mut chunk[..COPY_BYTES.min(len - done)];
                    fill(done, chunk);
                    let sent = remote.send(conn, chunk)?;
                    done += sent;
                    if sent < chunk.len() {
                        break;
                    }
                }
                Ok(done)
            }
        }
    }

    /// Returns when the engine has to run again if nothing happens before.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.local().and_then(Stack::next_deadline)
    }

    /// Makes events wake a sleeping shard. Returns false if an event is pending.
    pub fn before_sleep(&mut self) -> bool {
        match self {
            Self::Local(_) => true,
            Self::Channel(remote) => remote.before_sleep(),
        }
    }

    /// Makes events stop waking the shard. `readable`: the descriptor of [`wake_fd`](Self::wake_fd) is
    /// readable.
    pub fn after_sleep(&mut self, readable: bool) {
        if let Self::Channel(remote) = self {
            remote.after_sleep(readable);
        }
    }

    /// Returns the descriptor that becomes readable when an event occurs during a sleep.
    pub fn wake_fd(&self) -> Option<RawFd> {
        match self {
            Self::Local(_) => None,
            Self::Channel(remote) => Some(remote.wake_fd().as_raw_fd()),
        }
    }
}
