//! The proxy: relays requests to a backend and its responses to the client.

use super::super::head::{HeadChanges, rewrite};
use super::session::{BackendConn, RequestState, ResponseState};
use super::{DemoCore, StackConnections, flush};
use crate::httpd::body::BodyReader;
use crate::httpd::head::BodyFraming;
use crate::httpd::status::Status;
use crate::load::response::http::{HEAD_BYTES_MAX, ResponseFraming, ResponseHead, parse_head};
use core::fmt;

/// Status line of a response whose backend failed.
const BAD_GATEWAY: &str = "502 Bad Gateway";

/// Sends those of `bytes` that belong to the body, as far as `net` accepts them. Returns the number of bytes
/// sent.
///
/// # Errors
/// Returns an error if the bytes are not a body; those before the error may have been sent.
pub(super) fn send_body<C: Copy>(
    reader: &mut BodyReader,
    bytes: &[u8],
    to: C,
    net: &mut impl StackConnections<C>,
) -> Result<usize, Status> {
    let before = *reader;
    let belongs = reader.read(bytes)?;
    let sent = net.send(to, &bytes[..belongs]);
    if sent < belongs {
        *reader = before;
        reader.read(&bytes[..sent])?;
    }
    Ok(sent)
}

impl<C: Copy + PartialEq + fmt::Debug> DemoCore<C> {
    /// Sends the head of a request to the session's backend, or connects to one first.
    pub(super) fn relay_request(&mut self, slot: usize, head: &[u8], net: &mut impl StackConnections<C>) {
        let changes =
            HeadChanges { keep_alive: self.keepalive, is_chunked: false, added: b"Via: 1.1 ginnel\r\n" };
        let session = &mut self.sessions[slot];
        rewrite(head, changes, &mut session.backend_out);
        session.response = ResponseState::Head;
        match session.backend {
            BackendConn::None => {}
            BackendConn::Connecting(_) => return,
            BackendConn::Connected(backend) => {
                flush(&mut session.backend_out, backend, net);
                return;
            }
        }
        let to = self.backends[self.next_backend % self.backends.len()];
        self.next_backend = self.next_backend.wrapping_add(1);
        self.counters.backend_connects.add(1);
        match net.connect(to, (slot as u32) << 1 | 1) {
            Some(conn) => {
                self.sessions[slot].backend = BackendConn::Connecting(conn);
                self.trace(format_args!("connects {conn:?} to {to}"));
            }
            None => self.backend_failed(slot, net),
        }
    }

    /// Consumes bytes of a backend.
    pub(super) fn backend_data(
        &mut self,
        slot: usize,
        bytes: &[u8],
        net: &mut impl StackConnections<C>,
    ) -> usize {
        let mut used = 0;
        while used < bytes.len() {
            let session = &mut self.sessions[slot];
            let Some(client) = session.client else { return bytes.len() };
            if !flush(&mut session.client_out, client, net) {
                return used;
            }
            let rest = &bytes[used..];
            match session.response {
                ResponseState::Idle => {
                    // Nobody has asked, or the response has ended the connection.
                    self.drop_backend(slot, net);
                    return bytes.len();
                }
                ResponseState::Head => used += self.response_head(slot, rest, net),
                ResponseState::UntilClose => match net.send(client, rest) {
                    0 => return used,
                    n => used += n,
                },
                ResponseState::Body(mut reader) => match send_body(&mut reader, rest, client, net) {
                    Err(_) => {
                        self.backend_failed(slot, net);
                        return bytes.len();
                    }
                    Ok(sent) => {
                        used += sent;
                        session.response = ResponseState::Body(reader);
                        if reader.is_done() {
                            self.response_complete(slot, net);
                        } else if sent == 0 {
                            return used;
                        }
                    }
                },
            }
        }
        used
    }

    /// Consumes bytes of a response's head.
    fn response_head(&mut self, slot: usize, bytes: &[u8], net: &mut impl StackConnections<C>) -> usize {
        let session = &mut self.sessions[slot];
        let mut head = core::mem::take(&mut session.response_head);
        let before = head.len();
        let whole = if before == 0 {
            bytes
        } else {
            head.extend_from_slice(bytes);
            &head
        };
        let used = match parse_head(whole) {
            Ok(Some((end, parsed))) if end <= HEAD_BYTES_MAX => {
                self.begin_response(slot, parsed, &whole[..end], net);
                end - before
            }
            Ok(None) if whole.len() < HEAD_BYTES_MAX => {
                if before == 0 {
                    head.extend_from_slice(bytes);
                }
                session.response_head = head;
                return bytes.len();
            }
            _ => {
                self.backend_failed(slot, net);
                bytes.len()
            }
        };
        head.clear();
        self.sessions[slot].response_head = head;
        used
    }

    /// Relays the head of a response.
    fn begin_response(
        &mut self,
        slot: usize,
        parsed: ResponseHead,
        bytes: &[u8],
        net: &mut impl StackConnections<C>,
    ) {
        let session = &mut self.sessions[slot];
        match parsed.status {
            // Nobody has asked for another protocol: `Upgrade` is not relayed.
            101 => return self.backend_failed(slot, net),
            100..=199 => {
                if !session.is_http10 {
                    session.client_out.extend_from_slice(bytes);
                    self.send_to_client(slot, net);
                }
                return;
            }
            _ => {}
        }
        let has_no_body = session.to_head || matches!(parsed.status, 204 | 304);
        let framing = match parsed.framing {
            _ if has_no_body => BodyFraming::None,
            ResponseFraming::Length(length) => BodyFraming::Length(length),
            ResponseFraming::Chunked => BodyFraming::Chunked,
            ResponseFraming::UntilClose => {
                session.keep_alive = false;
                BodyFraming::None
            }
        };
        let ends_with_connection = !has_no_body && parsed.framing == ResponseFraming::UntilClose;
        session.backend_closes = parsed.close || !self.keepalive || ends_with_connection;
        let is_chunked = parsed.framing == ResponseFraming::Chunked;
        let changes = HeadChanges { keep_alive: session.keep_alive, is_chunked, added: b"" };
        rewrite(bytes, changes, &mut session.client_out);
        // No length is too large.
        let reader = BodyReader::new(framing, u64::MAX).unwrap_or(BodyReader::chunked());
        let is_complete = reader.is_done() && !ends_with_connection;
        session.response =
            if ends_with_connection { ResponseState::UntilClose } else { ResponseState::Body(reader) };
        self.send_to_client(slot, net);
        if is_complete {
            self.response_complete(slot, net);
        }
    }

    /// Ends a response of which all bytes were passed on.
    pub(super) fn response_complete(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        let session = &mut self.sessions[slot];
        session.response = ResponseState::Idle;
        let is_request_complete = matches!(session.request, RequestState::Answering);
        if session.backend_closes || !is_request_complete || !session.keep_alive {
            self.drop_backend(slot, net);
        }
        self.end_response(slot);
        // Requests that the client has sent meanwhile are unread.
        let session = &self.sessions[slot];
        if let (Some(client), RequestState::Head(_)) = (session.client, session.request) {
            net.resume_reading(client);
        }
    }

    /// Tells the client that its backend has failed: by a response if none has begun, else by a reset.
    pub(super) fn backend_failed(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        self.counters.backend_failures.add(1);
        self.trace(format_args!("the backend of {:?} has failed", self.sessions[slot].client));
        if matches!(self.sessions[slot].response, ResponseState::Head) {
            self.refuse(slot, BAD_GATEWAY, net);
        } else {
            self.abort_client(slot, net);
        }
    }

    /// Returns whether the client has received a part of a backend's response, and not its end.
    pub(super) fn is_within_response(&self, slot: usize) -> bool {
        matches!(self.sessions[slot].response, ResponseState::Body(_) | ResponseState::UntilClose)
    }

    /// Resets the client, because its response cannot be completed.
    pub(super) fn abort_client(&mut self, slot: usize, net: &mut impl StackConnections<C>) {
        if let Some(client) = self.sessions[slot].client.take() {
            net.abort(client);
            self.release(slot, net);
        }
    }
}
