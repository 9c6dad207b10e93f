//! What clients ask for: by bells, and by requests, which are rare and get an answer.

use super::domain::Domain;
use crate::channel::bells::RELEASED;
use crate::channel::control::{Counters, LinkInfo, Reply, Request};
use crate::context::Context;
use crate::error::Error;
use ginnel_stack::error::{ConnectError, SendError, Stale};

impl Domain {
    /// Answers bells of a client, `most` at the most and no more than its ring holds. Returns how many.
    pub(super) fn answer_bells(&mut self, cx: &mut Context<'_>, number: usize, most: usize) -> usize {
        let most = most.min(self.sockets.len());
        let mut answered = 0;
        while answered < most {
            let Some(client) = self.clients.get_mut(number).and_then(Option::as_mut) else { break };
            match client.up.take(self.region.up(number)) {
                Ok(None) => break,
                Ok(Some((socket, why))) => {
                    client.dozes = false;
                    answered += 1;
                    self.answer(cx, number, socket, why);
                }
                Err(_) => {
                    self.stats.violations += 1;
                    break;
                }
            }
        }
        self.stats.bells += answered as u64;
        answered
    }

    /// Answers one bell.
    fn answer(&mut self, cx: &mut Context<'_>, number: usize, socket: u32, why: u8) {
        let Some(known) = self.sockets.get(socket as usize) else {
            self.stats.violations += 1;
            return;
        };
        let (offered, blank) = (known.offered, known.blank);
        if let Some((client, place)) = offered
            && usize::from(client) == number
        {
            self.settle(cx, number, place.into());
        }
        if let Some((client, place)) = blank
            && usize::from(client) == number
        {
            self.open_blank(cx, number, place.into(), socket);
        }
        let known = self.socket(socket);
        let bit = 1 << number;
        if known.holders & bit == 0 {
            return;
        }
        if why & RELEASED != 0 {
            let is_connection = known.conn.is_some();
            known.holders &= !bit;
            self.unheld(cx, socket);
            if is_connection && self.socket(socket).closing {
                // It was the last, and what was written before it was released is done.
                return;
            }
        }
        // One that had its part of this turn goes on in the next, however often it rings.
        if !self.socket(socket).unfinished {
            // Also what was written before it was released.
            self.go_on(cx, socket);
        }
    }

    /// Does what a client asks for.
    pub(in crate::channel) fn serve(&mut self, cx: &mut Context<'_>, number: usize, asked: Request) -> Reply {
        let held = |server: &Self, socket: u32| {
            let known = server.sockets.get(socket as usize)?;
            known.conn.filter(|_| known.holders & 1 << number != 0)
        };
        // What it did before it asked is in its ring.
        self.answer_bells(cx, number, usize::MAX);
        match asked {
            Request::Listen(at, options) => Reply::Listen(self.listen(cx, number, at, options, false)),
            Request::ListenAlone(at, options) => Reply::Listen(self.listen(cx, number, at, options, true)),
            // These are the whole stack's, not a domain's.
            Request::Reserve(..) | Request::Unreserve(_) => Reply::Done,
            Request::Defer(listener, time) => {
                self.defer(listener, time);
                Reply::Done
            }
            Request::Backlog(listener, backlog) => {
                self.set_backlog(cx, listener, backlog);
                Reply::Done
            }
            Request::Offer => {
                self.take_more(cx);
                self.deal(cx);
                Reply::Done
            }
            Request::Amend(listener, options) => {
                self.amend(cx, listener, &options);
                Reply::Done
            }
            Request::Join(listener) => Reply::Join(self.join(number, listener)),
            Request::Unlisten(listener) => {
                self.unlisten(cx, number, listener);
                Reply::Done
            }
            Request::Connect(remote, options) => {
                if self.is_full() {
                    return Reply::Connect(Err(Error::Connect(remote, ConnectError::TooMany)));
                }
                let is_narrow = self.is_narrow(options.socket.recv_buffer_bytes);
                let socket = cx.connect(remote, options).map(|conn| self.begin(cx, conn, 0));
                if socket.is_ok() {
                    self.stock(number);
                }
                Reply::Connect(socket.map(|socket| {
                    let socket = socket.expect("one was free");
                    let known = self.socket(socket);
                    (known.holders, known.is_narrow) = (1 << number, is_narrow);
                    (socket, known.generation)
                }))
            }
            Request::Info(socket) => Reply::Info(match held(self, socket) {
                Some(conn) => cx.info(conn).map(Box::new),
                None => Err(Stale::Handle),
            }),
            Request::SavedSyn(socket, room) => Reply::SavedSyn(match held(self, socket) {
                Some(conn) => cx.saved_syn(conn, room as usize),
                None => Vec::new(),
            }),
            Request::RoomBelow(socket, len, (unsent, queued)) => Reply::RoomBelow(match held(self, socket) {
                Some(conn) => {
                    // What was written before stands in front of it.
                    self.go_on(cx, socket);
                    let ahead = self.waiting(socket);
                    let most = (unsent.saturating_sub(ahead), queued.saturating_sub(ahead));
                    let room = cx.room_below(conn, len.min(1 << 30), most);
                    let room = if ahead < unsent.min(queued) { room } else { 0 };
                    if room < len {
                        self.socket(socket).awaits_acked = true;
                        cx.await_acked(conn);
                    }
                    Ok(room)
                }
                None => Err(Stale::Handle),
            }),
            Request::SendUrgent(socket, bytes) => Reply::SendUrgent(match held(self, socket) {
                // It stands behind what was written before.
                Some(conn) if self.forward(cx, socket, conn, usize::MAX) => cx.send_urgent(conn, &bytes),
                Some(_) => Err(SendError::Full),
                None => Err(SendError::Stale),
            }),
            Request::Udp(request) => self.serve_udp(cx, number, request),
            Request::Links(from) => Reply::Links(LinkInfo::portion(cx.links(), from)),
            Request::Counters => Reply::Counters(Box::new(Counters {
                tcp: *cx.tcp_stats(),
                network: cx.network_stats().clone(),
                drops: cx.network_drops().clone(),
            })),
            Request::Detach => {
                self.detach(cx, number);
                Reply::Done
            }
        }
    }
}
