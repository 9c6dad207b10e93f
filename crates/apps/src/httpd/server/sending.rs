//! Sends responses: at once if they fit into the send buffer, otherwise in parts from the record of the
//! exchange.

use super::{ConnectionPhase, ResponsePlan, Server, Transport};
use crate::httpd::body::BodyReader;
use crate::httpd::exchange::{self, FileRead, Payload};
use crate::httpd::response::{DateText, Persistence, write_plain};
use crate::httpd::site::{FileId, Site};
use crate::httpd::status::Status;
use ginnel::Conn;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl Server {
    /// Stores a response until the body of its request has been read.
    pub(super) fn defer(&mut self, conn: Conn, plan: ResponsePlan, body: BodyReader) {
        let mut head = core::mem::take(&mut self.head);
        if let Some((file, is_head)) = plan.prepared {
            head.clear();
            let date = self.clock.date;
            head.extend_from_slice(prepared_bytes(&mut self.site, file, is_head, plan.close, &date));
        }
        let exchange = self.exchange(conn);
        exchange.output.clear();
        exchange.output.extend_from_slice(&head);
        (exchange.sent, exchange.interim) = (0, 0);
        (exchange.payload, exchange.close, exchange.body) = (plan.payload, plan.close, Some(body));
        self.head = head;
        self.set_phase(conn, ConnectionPhase::Body);
    }

    /// Sends the stored response without waiting for the body, and closes afterwards.
    pub(super) fn send_deferred_and_close(&mut self, conn: Conn, net: &mut impl Transport) {
        self.close_after_deferred(conn);
        self.set_phase(conn, ConnectionPhase::Sending);
        self.flush(conn, net);
    }

    /// Lets the stored response announce the close that will follow it.
    pub(super) fn close_after_deferred(&mut self, conn: Conn) {
        let exchange = self.exchange(conn);
        if !exchange.close {
            exchange.close = true;
            insert_connection_close(&mut exchange.output, exchange.interim);
        }
    }

    /// Sends 100 (Continue). If only a part fits, the rest precedes the response. If nothing fits, the client
    /// continues after a timeout of its own.
    pub(super) fn send_continue(&mut self, conn: Conn, net: &mut impl Transport) {
        let sent = net.send(conn, CONTINUE);
        if sent > 0 && sent < CONTINUE.len() {
            let exchange = self.exchange(conn);
            exchange.interim = CONTINUE.len() - sent;
            exchange.output.splice(0..0, CONTINUE[sent..].iter().copied());
        }
    }

    /// Sends a response. It usually takes one or two calls and no exchange record.
    pub(super) fn respond(&mut self, conn: Conn, plan: ResponsePlan, net: &mut impl Transport) {
        let ResponsePlan { payload, close, .. } = plan;
        let date = self.clock.date;
        let bytes = match plan.prepared {
            Some((file, is_head)) => prepared_bytes(&mut self.site, file, is_head, close, &date),
            None => &self.head,
        };
        let sent = net.send(conn, bytes);
        let is_complete = sent == bytes.len();
        if is_complete {
            let rest = match payload {
                Payload::None => Payload::None,
                Payload::File { file, offset, len } if net.send_file(conn, file, offset, len) => {
                    Payload::None
                }
                other => other,
            };
            if matches!(rest, Payload::None) {
                return self.responded(conn, close, net);
            }
            let exchange = self.exchange(conn);
            (exchange.payload, exchange.close) = (rest, close);
        } else {
            let slot = &mut self.connections[conn.index() as usize];
            if slot.exchange == exchange::NONE {
                slot.exchange = self.exchanges.take();
            }
            let exchange = self.exchanges.get(slot.exchange);
            exchange.output.clear();
            exchange.output.extend_from_slice(&bytes[sent..]);
            (exchange.sent, exchange.interim, exchange.payload, exchange.close) = (0, 0, payload, close);
        }
        let is_stream = matches!(self.exchange(conn).payload, Payload::Stream(_));
        self.set_phase(conn, ConnectionPhase::Sending);
        if is_stream && is_complete {
            self.flush(conn, net);
        }
    }

    /// Sends as much of the exchange's response as fits into the send buffer.
    pub(super) fn flush(&mut self, conn: Conn, net: &mut impl Transport) {
        let slot = self.connections[conn.index() as usize];
        let exchange = self.exchanges.get(slot.exchange);
        let mut progress = 0;
        if exchange.sent < exchange.output.len() {
            progress = net.send(conn, &exchange.output[exchange.sent..]);
            exchange.sent += progress;
        }
        let mut done = exchange.sent == exchange.output.len();
        let mut is_failed = false;
        if done {
            match &mut exchange.payload {
                Payload::None => {}
                Payload::File { file, offset, len } => done = net.send_file(conn, *file, *offset, *len),
                Payload::Stream(stream) => {
                    while stream.left() > 0 && !is_failed {
                        match stream.read(&mut self.read_buffer) {
                            FileRead::Bytes(n) => {
                                let sent = net.send(conn, &self.read_buffer[..n]);
                                stream.advance(sent);
                                progress += sent;
                                if sent < n {
                                    break;
                                }
                            }
                            FileRead::WouldBlock => {
                                self.waiting_for_disk.push(conn);
                                break;
                            }
                            FileRead::Failed => is_failed = true,
                        }
                    }
                    done = stream.left() == 0;
                }
            }
        }
        if is_failed {
            // The length has been announced, so only a reset can signal the failure.
            net.abort(conn);
            self.set_phase(conn, ConnectionPhase::Closed);
        } else if done {
            let close = exchange.close;
            self.responded(conn, close, net);
        } else if progress > 0 {
            self.set_phase(conn, ConnectionPhase::Sending);
        }
    }

    /// Handles the end of a response, all of which was queued.
    pub(super) fn responded(&mut self, conn: Conn, close: bool, net: &mut impl Transport) {
        self.release_exchange(conn);
        let slot = &mut self.connections[conn.index() as usize];
        let (was_sending, half_closed) = (slot.phase == ConnectionPhase::Sending, slot.half_closed);
        if close {
            self.finish(conn, net);
        } else if half_closed {
            self.close(conn, net);
        } else {
            self.set_phase(conn, ConnectionPhase::Idle);
            if was_sending {
                net.resume_reading(conn);
            }
        }
    }

    /// Sends FIN and waits for the client's FIN.
    pub(super) fn finish(&mut self, conn: Conn, net: &mut impl Transport) {
        self.release_exchange(conn);
        if self.connections[conn.index() as usize].half_closed {
            return self.close(conn, net);
        }
        net.finish(conn);
        let was_sending = self.connections[conn.index() as usize].phase == ConnectionPhase::Sending;
        self.set_phase(conn, ConnectionPhase::Draining);
        if was_sending {
            net.resume_reading(conn); // what was left unread must go, or the close becomes a reset
        }
    }

    pub(super) fn close(&mut self, conn: Conn, net: &mut impl Transport) {
        self.release_exchange(conn);
        net.close(conn);
        self.set_phase(conn, ConnectionPhase::Closed);
    }

    /// Answers with an error and closes the connection. Data that the client still sends are dropped.
    pub(super) fn refuse(&mut self, conn: Conn, status: Status, is_head: bool, net: &mut impl Transport) {
        let mut head = core::mem::take(&mut self.head);
        head.clear();
        write_plain(&mut head, status, &self.clock.date, None, Persistence::Close, is_head);
        let in_body = self.connections[conn.index() as usize].phase == ConnectionPhase::Body;
        // the request in whose body the error is was counted already
        self.counters.responses += u64::from(!in_body);
        self.counters.errors += 1;
        let exchange = self.exchange(conn);
        // An interim response that was sent in part is completed first.
        exchange.output.truncate(exchange.interim);
        exchange.output.extend_from_slice(&head);
        (exchange.sent, exchange.payload, exchange.close) = (0, Payload::None, true);
        self.head = head;
        self.set_phase(conn, ConnectionPhase::Sending);
        self.flush(conn, net);
    }
}

fn prepared_bytes<'a>(
    site: &'a mut Site,
    file: FileId,
    is_head: bool,
    close: bool,
    date: &DateText,
) -> &'a [u8] {
    match &mut site.entry_mut(file).prepared {
        Some(pair) => {
            let response = if close { &mut pair.1 } else { &mut pair.0 };
            if is_head { response.head(date) } else { response.whole(date) }
        }
        None => &[],
    }
}

/// Inserts `Connection: close` into a head that was written without it and begins at `start`. The field
/// replaces the last one if that keeps the connection of an HTTP/1.0 client.
fn insert_connection_close(output: &mut Vec<u8>, start: usize) {
    const KEEP: &[u8] = b"Connection: keep-alive\r\n";
    if let Some(len) = memchr::memmem::find(&output[start..], b"\r\n\r\n") {
        let end = start + len + 2;
        let replaced = if output[start..end].ends_with(KEEP) { KEEP.len() } else { 0 };
        output.splice(end - replaced..end, *b"Connection: close\r\n");
    }
}
