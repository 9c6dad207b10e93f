//! Responses that the server makes itself.

use super::session::RequestState;
use super::{DemoCore, StackConnections};
use crate::httpd::head::Scanner;
use core::fmt;

/// The page: 64 bytes.
const PAGE: &str = "This page was sent by ginnel demo-server: a test of connections\n";
const _: () = assert!(PAGE.len() == 64);

/// Returns a response without its body.
const fn page_head(keep_alive: bool) -> &'static str {
    // Both have a length, also for clients of HTTP/1.0 that keep the connection open.
    if keep_alive {
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 64\r\nConnection: keep-alive\r\n\r\n"
    } else {
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 64\r\nConnection: close\r\n\r\n"
    }
}

impl<C: Copy + PartialEq + fmt::Debug> DemoCore<C> {
    /// Answers a complete request with the page.
    pub(super) fn answer(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        let session = &mut self.sessions[slot];
        session.client_out.extend_from_slice(page_head(session.keep_alive).as_bytes());
        if !session.to_head {
            session.client_out.extend_from_slice(PAGE.as_bytes());
        }
        self.send_to_client(slot, net);
        self.end_response(slot);
    }

    /// Counts a response, and continues with the next request or closes.
    pub(super) fn end_response(&mut self, slot: usize) {
        self.counters.responses.add(1);
        let session = &mut self.sessions[slot];
        let is_read = matches!(session.request, RequestState::Answering);
        if session.keep_alive && is_read && !session.has_client_ended {
            session.request = RequestState::Head(Scanner::NEW);
        } else {
            self.finish(slot, !is_read);
        }
    }

    /// Answers with an error, and closes.
    pub(super) fn refuse(&mut self, slot: usize, status: &'static str, net: &mut impl StackConnections<C>) {
        self.trace(format_args!("{:?}: {status}", self.sessions[slot].client));
        self.counters.errors.add(1);
        self.counters.responses.add(1);
        self.drop_backend(slot, net);
        let session = &mut self.sessions[slot];
        let body = if session.to_head { "" } else { status };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            status.len()
        );
        session.client_out.extend_from_slice(head.as_bytes());
        self.finish(slot, true);
        self.send_to_client(slot, net);
    }

    /// Ends the connection of the client once all bytes were accepted. `must_drain` tells that bytes may
    /// follow that nobody wants.
    pub(super) fn finish(&mut self, slot: usize, must_drain: bool) {
        let session = &mut self.sessions[slot];
        session.request = RequestState::Ended;
        session.is_closing = true;
        session.must_drain = must_drain && !session.has_client_ended;
    }
}
