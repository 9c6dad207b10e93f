//! Operations that POSIX calls need besides events: socket states, and rare requests.

use super::{Client, NOTIFIED, SocketState, SocketStatus};
use crate::channel::control::{AddressSharing, ChannelReply, ChannelRequest, Reservation, StreamStamp};
use crate::error::Error;
use crate::internal_fd::InternalFd;
use core::net::SocketAddr;
use core::sync::atomic::Ordering::Relaxed;
use ginnel_stack::error::Stale;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::SocketOptions;

impl Client {
    /// Returns the state of a connection and its buffers, without a request to the stack.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    #[inline(always)]
    pub fn status(&self, conn: Conn) -> Result<SocketStatus, Stale> {
        let socket_ref = self.socket_ref(conn)?;
        Ok(socket_ref.status(self.with_stack_liveness(socket_ref.state())))
    }

    /// Returns the state of a connection without its buffers.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    #[inline]
    pub fn socket_state(&self, conn: Conn) -> Result<SocketState, Stale> {
        self.tracked(conn)?;
        Ok(self.with_stack_liveness(SocketState::load(self.region.socket(conn.index()))))
    }

    /// Returns the state that the stack has written, or a closed state if the stack is gone.
    #[inline]
    pub(super) fn with_stack_liveness(&self, written: SocketState) -> SocketState {
        if self.is_stack_gone() { written.with_stack_lost() } else { written }
    }

    /// Returns the state of a connection's buffers together with a state of the connection that was read
    /// before.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    #[inline]
    pub fn status_with_state(&self, conn: Conn, state: SocketState) -> Result<SocketStatus, Stale> {
        Ok(self.socket_ref(conn)?.status(state))
    }

    /// Returns whether the stack's shard is running on another CPU than the caller: an event may then come
    /// without sleeping.
    pub fn is_stack_running_elsewhere(&self) -> bool {
        let is_asleep = self.region.stack_sleep().is_asleep() || self.memory.has_cpu().load(Relaxed) != 0;
        !is_asleep && self.region.cpu().is_none_or(|cpu| cpu != rustix::thread::sched_getcpu())
    }

    /// Returns the descriptors that the channel needs: of the region, the one that wakes the stack, and the
    /// one that wakes this client.
    pub fn internal_fds(&self) -> [&InternalFd; 3] {
        [self.region.internal_fd(), self.stack_wake.internal_fd(), self.wake.internal_fd()]
    }

    /// Returns how many bytes of a connection can be queued in front of the engine's own buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.region.buffer_bytes()
    }

    /// Requests [`ClientEvent::Writable`](super::ClientEvent::Writable) as after a short send, and returns
    /// whether there is space for `enough` bytes already.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn await_send_space(&mut self, conn: Conn, enough: usize) -> Result<bool, Stale> {
        let socket_ref = self.socket_ref(conn)?;
        self.blocked.flag(conn.index()).store(true, Relaxed);
        socket_ref.await_send_space();
        let has_space = socket_ref.send_space() >= enough;
        if !has_space && socket_ref.has_loan() {
            // The stack may copy bytes out of the lent buffer, which it does only for clients that wait.
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(has_space)
    }

    /// Returns an upper limit of the bytes that were written and not yet sent. Only valid after
    /// [`TcpOption::NotSentLowat`](ginnel_stack::options::TcpOption::NotSentLowat) was set.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn not_sent(&self, conn: Conn) -> Result<usize, Stale> {
        Ok(self.socket_ref(conn)?.notsent())
    }

    /// Returns how many bytes were ever written on a connection.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn written(&self, conn: Conn) -> Result<u64, Stale> {
        Ok(self.socket_ref(conn)?.write_position())
    }

    /// Returns how many bytes the SYN of a connection takes that waits for the first bytes
    /// ([`SocketOptions::fastopen_connect`]); `None` if the SYN was sent.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn syn_data_max(&self, conn: Conn) -> Result<Option<u16>, Stale> {
        let state = self.socket_state(conn)?;
        let is_open = !state.is_connected() && !state.is_closed();
        Ok(state.syn_data_max().filter(|_| is_open && self.written(conn) == Ok(0)))
    }

    /// Sends the SYN of a connection that waits for the first bytes, without them.
    ///
    /// # Errors
    /// Returns an error if the handle is stale, or if the shard is gone.
    pub fn send_deferred_syn(&mut self, conn: Conn) -> Result<(), Stale> {
        self.tracked(conn)?;
        self.call(ChannelRequest::SendDeferredSyn(conn.index())).map(|_| ()).map_err(|_| Stale::Handle)
    }

    /// Returns whether the stack uses TCP Fast Open as a client (`tcp.fastopen`).
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn can_open_fast(&mut self) -> Result<bool, Error> {
        match self.call(ChannelRequest::CanOpenFast)? {
            ChannelReply::CanOpenFast(can) => Ok(can),
            _ => Err(super::unexpected_reply()),
        }
    }

    /// Reserves an address for a socket that is going to listen or to connect. For port 0 the stack chooses a
    /// port.
    ///
    /// # Errors
    /// Returns why the address cannot be reserved, or an error if the shard is gone.
    pub fn reserve(&mut self, address: SocketAddr, sharing: AddressSharing) -> Result<Reservation, Error> {
        match self.call(ChannelRequest::Reserve(address, sharing))? {
            ChannelReply::Reserve(Ok(reserved)) => Ok(reserved),
            ChannelReply::Reserve(Err(error)) => Err(Error::Reserve(address, error)),
            _ => Err(super::unexpected_reply()),
        }
    }

    /// Gives up a reservation.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn unreserve(&mut self, reserved: Reservation) -> Result<(), Error> {
        self.call(ChannelRequest::Unreserve(reserved.number)).map(|_| ())
    }

    /// Sets the options with which later connections of a listener begin.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn set_listener_options(&mut self, listener: u32, options: SocketOptions) -> Result<(), Error> {
        self.call(ChannelRequest::SetListenerOptions(listener, options)).map(|_| ())
    }

    /// Returns the headers of the SYN that began a connection, if the listener saved them (`TCP_SAVED_SYN`);
    /// empty if there are none. If they fit into `max_len` bytes, the stack discards them.
    ///
    /// # Errors
    /// Returns an error if the handle is stale, or if the shard is gone.
    pub fn saved_syn(&mut self, conn: Conn, max_len: usize) -> Result<Vec<u8>, Stale> {
        self.tracked(conn)?;
        match self.call(ChannelRequest::SavedSyn(conn.index(), u32::try_from(max_len).unwrap_or(u32::MAX))) {
            Ok(ChannelReply::SavedSyn(bytes)) => Ok(bytes),
            _ => Err(Stale::Handle),
        }
    }

    /// Returns when the byte of a connection's stream before position `end` arrived: the lowest 32 bits of
    /// the time in microseconds, or `None` if times are not recorded
    /// ([`ArrivalTimes`](ginnel_stack::options::TcpOption::ArrivalTimes)).
    ///
    /// # Errors
    /// Returns an error if the handle is stale or the shard is gone.
    pub fn arrival_time(&mut self, conn: Conn, end: u64) -> Result<Option<u32>, Stale> {
        self.tracked(conn)?;
        self.flush();
        match self.call(ChannelRequest::ArrivalTime(conn.index(), end)) {
            Ok(ChannelReply::ArrivalTime(Ok(at))) => Ok(Some(at).filter(|at| *at != 0)),
            _ => Err(Stale::Handle),
        }
    }

    /// Has the times taken at which the byte before position `end` of what was written is sent and
    /// acknowledged. [`ClientEvent::Acked`](super::ClientEvent::Acked) follows. Returns false if they are not
    /// taken, because too many times of the stream are awaited or were not fetched by
    /// [`take_stamps`](Client::take_stamps).
    ///
    /// # Errors
    /// Returns an error if the handle is stale or the shard is gone.
    pub fn await_stamps(&mut self, conn: Conn, end: u64, sent: bool, acked: bool) -> Result<bool, Stale> {
        self.tracked(conn)?;
        self.flush();
        let request = ChannelRequest::AwaitStamps(conn.index(), end, sent, acked);
        match self.call(request) {
            Ok(ChannelReply::AwaitStamps(result)) => result,
            _ => Err(Stale::Handle),
        }
    }

    /// Returns the times that were taken since the last call.
    ///
    /// # Errors
    /// As [`Client::await_stamps`].
    pub fn take_stamps(&mut self, conn: Conn) -> Result<Vec<StreamStamp>, Stale> {
        self.tracked(conn)?;
        match self.call(ChannelRequest::TakeStamps(conn.index())) {
            Ok(ChannelReply::Stamps(stamps)) => Ok(stamps),
            _ => Err(Stale::Handle),
        }
    }

    /// Makes the stack offer pending connections, as far as credits allow, before this call returns.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn request_offers(&mut self) -> Result<(), Error> {
        self.call(ChannelRequest::OfferPending).map(|_| ())
    }

    /// Returns whether another process, or a descriptor on its way to one, owns a connection or UDP socket,
    /// too.
    ///
    /// # Errors
    /// Returns an error if the handle is stale, or the shard is gone.
    pub fn is_shared(&mut self, conn: Conn) -> Result<bool, Stale> {
        self.tracked(conn)?;
        self.flush();
        match self.call(ChannelRequest::IsShared(conn.index())) {
            Ok(ChannelReply::IsShared(is_shared)) => Ok(is_shared),
            _ => Err(Stale::Handle),
        }
    }

    /// Sets the backlog of a listener. The stack offers pending connections, as far as credits allow, before
    /// this call returns.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn set_backlog(&mut self, listener: u32, backlog: u32) -> Result<(), Error> {
        self.call(ChannelRequest::SetBacklog(listener, backlog)).map(|_| ())
    }
}
