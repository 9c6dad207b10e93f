//! The connections of a capture, as they are replayed.

use core::ops::Range;
use serde::Serialize;

/// End of a connection by its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedEnd {
    /// FIN, or the end of the capture.
    Fin,
    /// RST.
    Reset,
}

/// Bytes that a client sent at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedSend {
    /// Time since the start of the recording, in nanoseconds.
    pub at_ns: u64,
    /// Position in [`Recording::bytes`].
    pub start: usize,
    /// Number of bytes, > 0.
    pub len: u32,
}

/// Bytes that a client sent, followed by bytes of the server's. Without knowing the protocol, these are a
/// request and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedRequest {
    /// The first send that belongs to the request, among all sends of the recording.
    pub first_send: u32,
    /// The last send that belongs to the request.
    pub last_send: u32,
    /// Bytes that the server sent on the connection before this answer.
    pub answer_from: u64,
    /// Bytes of the answer; 0 if the server sent nothing more.
    pub answer_bytes: u64,
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedConnection {
    /// Time of the SYN since the start of the recording, in nanoseconds.
    pub opened_ns: u64,
    /// Port of the server.
    pub server_port: u16,
    /// Sends, in [`Recording::sends`].
    pub sends: Range<u32>,
    /// Requests, in [`Recording::requests`].
    pub requests: Range<u32>,
    /// All bytes that the server sent.
    pub answer_bytes: u64,
    /// Time of the client's end since the start of the recording; that of the last packet if the client did
    /// not end the connection.
    pub ended_ns: u64,
    /// How the client ended the connection.
    pub end: RecordedEnd,
}

/// The connections of a capture, ordered by their opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// Connections.
    pub connections: Vec<RecordedConnection>,
    /// Sends of all connections, those of each in their order.
    pub sends: Vec<RecordedSend>,
    /// Requests of all connections, those of each in their order.
    pub requests: Vec<RecordedRequest>,
    /// Bytes of all sends.
    pub bytes: Vec<u8>,
    /// Time from the first opening to the last packet, in nanoseconds.
    pub length_ns: u64,
    /// Packets of the capture, and connections that are left out.
    pub account: CaptureAccount,
}

/// Counts of what was found in a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CaptureAccount {
    /// Packets.
    pub packets: u64,
    /// Packets that are not TCP, fragments, or between other ports.
    pub other_packets: u64,
    /// Packets whose headers contradict themselves, or that were cut off within them.
    pub malformed_packets: u64,
    /// Connections that are replayed.
    pub connections: u64,
    /// Connections that are left out because their beginning is not in the capture.
    pub left_out_midstream: u64,
    /// Connections that are left out because bytes of their client are missing.
    pub left_out_incomplete: u64,
    /// Segments with bytes of clients that were seen before.
    pub retransmissions: u64,
    /// Segments that the capture has before earlier bytes of their stream.
    pub early_segments: u64,
    /// Bytes of servers that are not in the capture; they count as sent.
    pub missed_answer_bytes: u64,
    /// Why the capture could not be read to its end.
    pub cut: Option<String>,
}

impl Recording {
    /// Returns the number of a connection's requests that have answers.
    #[must_use]
    pub fn requests_with_answers(&self, connection: &RecordedConnection) -> u64 {
        let requests = connection.requests.start as usize..connection.requests.end as usize;
        self.requests[requests].iter().filter(|request| request.answer_bytes > 0).count() as u64
    }

    /// Returns how many bytes the server may have sent by now. The position of the client is the first
    /// request that was not sent completely, the next send, and how many bytes of that were sent.
    pub(super) fn expected_bytes(
        &self,
        connection: &RecordedConnection,
        (request, send, offset): (u32, u32, u32),
    ) -> u64 {
        let first = |number: u32| self.requests.get(number as usize).map_or(u32::MAX, |next| next.first_send);
        let has_begun = request < connection.requests.end && (first(request), 0) < (send, offset);
        let next = request + u32::from(has_begun);
        match self.requests.get(next as usize).filter(|_| next < connection.requests.end) {
            Some(next) => next.answer_from,
            None => connection.answer_bytes,
        }
    }

    /// Returns the most connections that are open at the same time if the server is as fast as the recorded
    /// one.
    #[must_use]
    pub fn open_max(&self) -> u64 {
        let mut changes: Vec<(u64, i64)> = Vec::with_capacity(self.connections.len() * 2);
        for connection in &self.connections {
            changes.push((connection.opened_ns, 1));
            changes.push((connection.ended_ns + 1, -1));
        }
        changes.sort_unstable();
        let mut open = 0;
        let most = changes.iter().map(|(_, change)| {
            open += change;
            open
        });
        most.max().unwrap_or(0).max(0) as u64
    }
}
