//! Opening connections with sockets that the client has at hand (docs/adr/0018-connecting-without-a-question.md).

use super::Client;
use crate::channel::bells::RUNG;
use crate::channel::places;
use crate::channel::region::BLANKS_MAX;
use crate::channel::socket::{Blank, refusal, request};
use crate::channel::sync::Ordering;
use crate::error::Error;
use core::net::{Ipv6Addr, SocketAddr};
use ginnel_stack::error::ConnectError;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::ConnectOptions;

impl Client {
    /// As [`Client::connect`], but asks nothing where that can be: whether the connection could be opened at all is told by [`ClientEvent::Closed`](super::ClientEvent::Closed)
    /// and [`Client::refusal`]. Until the stack has looked, our [end](Client::ends) has port 0. Options can be set at once.
    ///
    /// # Errors
    /// As [`Client::connect`], when it had to ask.
    pub fn connect_unasked(&mut self, remote: SocketAddr) -> Result<Conn, Error> {
        match self.connect_with_blank(remote) {
            Some(conn) => Ok(conn),
            None => self.connect(remote, ConnectOptions::default()),
        }
    }

    fn connect_with_blank(&mut self, remote: SocketAddr) -> Option<Conn> {
        if matches!(remote, SocketAddr::V6(v6) if v6.scope_id() != 0) || self.is_gone() {
            // The words have no room for it.
            return None;
        }
        let blanks = self.region.blanks(self.number);
        let (behind, before) = (self.blank..BLANKS_MAX, 0..self.blank);
        let place = behind.chain(before).find(|at| places::is_laid_out(&blanks[*at]))?;
        self.blank = (place + 1) % BLANKS_MAX;
        let Blank { socket, generation } = places::take_up(&blanks[place])?;
        // Another process of the domain may have written any number there.
        if socket as usize >= self.sockets_max() {
            return None;
        }
        let words = self.region.socket(socket);
        words.set_ends([SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0), remote]);
        words.requests.store(request::CONNECT, Ordering::Release);
        self.hold(socket, generation);
        self.ring(socket, RUNG);
        Some(Conn::new(socket, generation))
    }

    /// Why a connection could not be opened, if that is why it is over.
    pub fn refusal(&self, conn: Conn) -> Option<ConnectError> {
        self.held(conn).ok()?;
        refusal(self.region.socket(conn.index()).error.load(Ordering::Acquire))
    }
}
