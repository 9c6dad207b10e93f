//! Sockets that clients have at hand, to open connections with and ask nothing (docs/adr/0018-connecting-without-a-question.md).

use super::domain::{Domain, Socket};
use super::served::Served;
use super::wake::Wake;
use crate::channel::places;
use crate::channel::region::BLANKS_MAX;
use crate::channel::socket::{Blank, ended, request, word_of_refusal};
use crate::channel::sync::Ordering;
use crate::context::Context;
use crate::error::Error;
use core::net::{Ipv6Addr, SocketAddr};
use ginnel_stack::error::ConnectError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::options::ConnectOptions;

impl Domain {
    /// Whether there are so many free sockets that those that clients have at hand keep none from connections that come.
    fn has_plenty(&self) -> bool {
        self.numbers.left() > self.sockets_max() / 2 + BLANKS_MAX
    }

    /// Gives a client in another process, which has opened a connection, as many as it may have.
    pub(super) fn stock(&mut self, client: usize) {
        if !matches!(&self.clients[client], Some(Served { wake: Wake::Process(_), .. })) {
            return;
        }
        for place in 0..BLANKS_MAX {
            self.lay_out(client, place);
        }
    }

    /// Puts one into a place where there is none.
    fn lay_out(&mut self, client: usize, place: usize) {
        let plenty = self.has_plenty();
        let Some(served) = self.clients[client].as_mut().filter(|c| plenty && c.blanks[place].is_none())
        else {
            return;
        };
        let Some(socket) = self.numbers.take() else { return };
        served.blanks[place] = Some(socket);
        self.blanks += 1;
        let generation = self.socket(socket).generation;
        // Cannot truncate: clients and places are 64 at the most.
        let blank = Some((client as u8, place as u8));
        *self.socket(socket) = Socket { in_use: true, generation, blank, ..Socket::default() };
        let words = self.region.socket(socket);
        words.begin(generation);
        let nobody = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        words.set_ends([nobody; 2]);
        words.state.store(0, Ordering::Relaxed);
        places::lay_out(&self.region.blanks(client)[place], Blank { socket, generation });
    }

    /// Opens a connection with a socket that its client rang for, if it asks for that, and lays out another.
    pub(super) fn open_blank(&mut self, cx: &mut Context<'_>, client: usize, place: usize, socket: u32) {
        let words = self.region.socket(socket);
        if words.requests.load(Ordering::Acquire) & request::CONNECT == 0 {
            return;
        }
        let [_, remote] = words.ends();
        self.take_up(client, place);
        self.region.blanks(client)[place].store(0, Ordering::Relaxed);
        self.socket(socket).holders = 1 << client;
        self.lay_out(client, place);
        match cx.connect(remote, ConnectOptions::default()) {
            Ok(conn) => self.tie(cx, conn, socket),
            Err(error) => {
                let why = match error {
                    Error::Connect(_, why) => why,
                    _ => ConnectError::NetUnreachable,
                };
                self.region.socket(socket).error.store(word_of_refusal(why), Ordering::Relaxed);
                self.add_bits(socket, ended(CloseReason::Aborted));
            }
        }
    }

    /// What lies in a place is a client's no more.
    fn take_up(&mut self, client: usize, place: usize) -> Option<u32> {
        let socket = self.clients[client].as_mut()?.blanks[place].take()?;
        self.blanks -= 1;
        self.socket(socket).blank = None;
        Some(socket)
    }

    /// Takes all back from a client that goes.
    pub(super) fn take_up_all(&mut self, cx: &mut Context<'_>, client: usize) {
        for place in 0..BLANKS_MAX {
            if let Some(socket) = self.take_up(client, place) {
                self.put_back(cx, socket);
            }
        }
    }
}
