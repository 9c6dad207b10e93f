//! Reads the connections of a capture as they are replayed: what each client sent and when, and how much its
//! server answered.

use crate::connection::flag;
use crate::counters::MonitorCounters;
use crate::flow_table::{NONE, Tracking};
use crate::frame::{ACK, Addresses, FIN, Frame, LinkType, RST, SYN, TcpSegment};
use crate::framing::{REQUEST, RESPONSE};
use crate::ordering::{Arrival, OrderedStreams};
use crate::sources::{PacketSource, SourceError, SourceState};
use crate::streams::StreamPool;
use ginnel_apps::load::replay::recording::{
    RecordedConnection, RecordedEnd, RecordedRequest, RecordedSend, Recording,
};
use ginnel_stack::time::Instant;
use std::collections::HashMap;

/// Most bytes of segments that wait for earlier ones.
const EARLY_BYTES_MAX: usize = 256 << 20;

/// Selects connections.
#[derive(Clone, Debug, Default)]
pub struct RecordingOptions {
    /// Ports of servers; all if there are none.
    pub ports: Vec<u16>,
    /// Most bytes that all clients together may have sent.
    // limit: client bytes of a replay
    pub bytes_max: u64,
}

/// Reads a recording from a source that ends. A source that cannot be read to its end gives the connections
/// up to there, and the account says why.
///
/// # Errors
/// The clients sent more bytes than the options permit, or there are more than 4,294,967,295 sends.
pub fn read(source: &mut dyn PacketSource, options: &RecordingOptions) -> Result<Recording, String> {
    let mut reader = RecordingReader::new(options);
    loop {
        let mut problem = None;
        let state = source.poll(&mut |link, packets| {
            for (at, packet) in packets {
                reader.packet(*at, link, packet);
            }
            problem = reader.check();
        });
        if let Some(problem) = problem {
            return Err(problem);
        }
        match state {
            Ok(SourceState::More | SourceState::Idle) => {}
            Ok(SourceState::End) => return reader.finish(None),
            Err(error) => return reader.finish(Some(&error)),
        }
    }
}

/// Addresses and ports of a connection: of its client and of its server.
type FlowEnds = (Addresses, [u16; 2]);

/// Connections that are being read, and what was read.
struct RecordingReader<'a> {
    options: &'a RecordingOptions,
    flows: HashMap<FlowEnds, Flow>,
    finished: Vec<ReadConnection>,
    streams: StreamPool,
    counters: MonitorCounters,
    bytes: u64,
    /// Time of the first packet.
    first: Option<Instant>,
    midstream: u64,
    answers_missed: u64,
}

/// A connection of the capture.
enum Flow {
    /// Its beginning was not seen, it was reset, or its server's port is not selected.
    Ignored,
    Read(Box<ReadConnection>),
}

/// A connection, as far as it was read.
#[derive(Debug, Default)]
struct ReadConnection {
    tracking: Tracking,
    opened: Instant,
    /// Number of the packet that began the connection.
    first_packet: u64,
    /// Time of the last packet.
    seen: Instant,
    ended: Option<(Instant, RecordedEnd)>,
    server_port: u16,
    sends: Vec<ReadSend>,
    requests: Vec<RecordedRequest>,
    bytes: Vec<u8>,
    answer_bytes: u64,
    /// True if the server has sent something since the client's last bytes.
    is_answered: bool,
    /// True if bytes of the client are missing.
    is_incomplete: bool,
}

#[derive(Debug)]
struct ReadSend {
    at: Instant,
    start: usize,
    len: u32,
}

impl<'a> RecordingReader<'a> {
    fn new(options: &'a RecordingOptions) -> Self {
        Self {
            options,
            flows: HashMap::new(),
            finished: Vec::new(),
            streams: StreamPool::new(EARLY_BYTES_MAX, 0),
            counters: MonitorCounters::default(),
            bytes: 0,
            first: None,
            midstream: 0,
            answers_missed: 0,
        }
    }

    /// Returns why the recording cannot go on, or `None` if it can.
    fn check(&self) -> Option<String> {
        let max = self.options.bytes_max;
        (self.bytes > max).then(|| {
            format!("the clients of the capture sent more than {max} bytes (--bytes-max): select a --port, or a part")
        })
    }

    fn packet(&mut self, at: Instant, link: LinkType, packet: &[u8]) {
        self.counters.packets += 1;
        let at = at.max(*self.first.get_or_insert(at));
        let segment = match Frame::parse(link, packet) {
            Frame::Tcp(segment) => segment,
            Frame::Other => return self.counters.other_packets += 1,
            Frame::Malformed => return self.counters.malformed_packets += 1,
        };
        let ports = [segment.source_port, segment.destination_port];
        let sent: FlowEnds = (segment.addresses, ports);
        let answered: FlowEnds = (reversed(segment.addresses), [ports[1], ports[0]]);
        let is_start = segment.flags & SYN != 0;
        let is_syn_ack = segment.flags & (SYN | ACK) == SYN | ACK;
        let (ends, direction) = if is_syn_ack || !is_start && self.flows.contains_key(&answered) {
            (answered, RESPONSE)
        } else {
            (sent, REQUEST)
        };
        let wanted = &self.options.ports;
        let server_port = ends.1[1];
        let is_wanted = wanted.is_empty()
            || wanted.contains(&server_port)
            // Either end of an unknown connection may be the server.
            || !is_start && !self.flows.contains_key(&ends) && wanted.contains(&ends.1[0]);
        if !is_wanted {
            if is_start && wanted.contains(&ends.1[0]) {
                // Otherwise its later segments would be taken for those of an unknown connection.
                self.flows.insert(ends, Flow::Ignored);
            }
            return self.counters.unmonitored_packets += 1;
        }
        if is_start {
            self.start(ends, direction, &segment, at);
        }
        let Some(flow) = self.flows.get_mut(&ends) else {
            if segment.payload_len > 0 && segment.flags & RST == 0 {
                self.flows.insert(ends, Flow::Ignored);
                self.midstream += 1;
            }
            return;
        };
        let Flow::Read(connection) = flow else { return };
        connection.seen = connection.seen.max(at);
        let before = connection.bytes.len();
        let missed = self.counters.missed_bytes;
        let mut stream = ReadStream { connection, streams: &mut self.streams, counters: &mut self.counters };
        let TcpSegment { seq, ack, flags, payload, payload_len, .. } = segment;
        let arrival = Arrival { now: at, direction, seq, ack, flags, bytes: payload, len: payload_len };
        if flags & RST == 0 {
            stream.receive(&arrival);
        } else if direction == REQUEST {
            stream.connection.ended.get_or_insert((at, RecordedEnd::Reset));
        }
        self.bytes += (connection.bytes.len() - before) as u64;
        if !connection.is_incomplete {
            self.answers_missed += self.counters.missed_bytes - missed;
        }
        if flags & RST != 0 {
            self.end(&ends);
            // What is still on its way belongs to no connection.
            self.flows.insert(ends, Flow::Ignored);
        }
    }

    /// Begins a connection with its SYN or SYN-ACK, unless that is a copy.
    fn start(&mut self, ends: FlowEnds, direction: usize, segment: &TcpSegment<'_>, at: Instant) {
        let first = segment.seq.wrapping_add(1);
        if let Some(Flow::Read(known)) = self.flows.get_mut(&ends) {
            let is_known = known.tracking.flags & flag::KNOWN[direction] != 0;
            if !is_known || known.tracking.next[direction] == first || known.first_seq(direction) == first {
                known.learn(direction, first);
                return;
            }
            // The ports are used again.
            self.end(&ends);
        }
        if matches!(self.flows.remove(&ends), Some(Flow::Ignored)) && direction == RESPONSE {
            // The beginning was not seen; the connection is counted already.
            self.flows.insert(ends, Flow::Ignored);
            return;
        }
        // The ports were used the other way round.
        self.end(&(reversed(ends.0), [ends.1[1], ends.1[0]]));
        let mut connection = ReadConnection {
            tracking: Tracking { outstanding: NONE, streams: NONE, ..Tracking::default() },
            opened: at,
            first_packet: self.counters.packets,
            server_port: ends.1[1],
            ..ReadConnection::default()
        };
        connection.learn(direction, first);
        if direction == RESPONSE {
            connection.learn(REQUEST, segment.ack);
        }
        self.flows.insert(ends, Flow::Read(Box::new(connection)));
    }

    /// Moves a connection to those that have ended.
    fn end(&mut self, ends: &FlowEnds) {
        if let Some(Flow::Read(mut connection)) = self.flows.remove(ends) {
            // Bytes after a gap were sent, and those of the gap are missing.
            connection.is_incomplete |=
                self.streams.first_early(connection.tracking.streams, REQUEST).is_some();
            self.streams.release(&mut connection.tracking.streams);
            self.finished.push(*connection);
        }
    }

    /// Returns the recording.
    fn finish(mut self, error: Option<&SourceError>) -> Result<Recording, String> {
        let ends: Vec<FlowEnds> = self.flows.keys().copied().collect();
        for ends in ends {
            self.end(&ends);
        }
        let mut out = Recording::default();
        let account = &mut out.account;
        account.packets = self.counters.packets;
        account.other_packets = self.counters.other_packets + self.counters.unmonitored_packets;
        account.malformed_packets = self.counters.malformed_packets;
        account.left_out_midstream = self.midstream;
        account.retransmissions = self.counters.request_retransmissions;
        account.early_segments = self.counters.early_segments;
        account.missed_answer_bytes = self.answers_missed;
        account.cut = error.map(ToString::to_string);
        let count = self.finished.len();
        self.finished.retain(|connection| !connection.is_incomplete);
        account.left_out_incomplete = (count - self.finished.len()) as u64;
        account.connections = self.finished.len() as u64;
        self.finished.sort_by_key(|connection| (connection.opened, connection.first_packet));
        let start = self.finished.first().map_or(Instant::ZERO, |first| first.opened);
        let since = |at: Instant| at.as_nanos().saturating_sub(start.as_nanos());
        for connection in self.finished {
            let too_many = |_| "the capture has more than 4,294,967,295 sends".to_owned();
            let first_send = u32::try_from(out.sends.len()).map_err(too_many)?;
            let last_send = u32::try_from(out.sends.len() + connection.sends.len()).map_err(too_many)?;
            // There are at most as many requests as sends.
            let first_request = out.requests.len() as u32;
            let start = out.bytes.len();
            out.bytes.extend_from_slice(&connection.bytes);
            out.sends.extend(connection.sends.iter().map(|send| RecordedSend {
                at_ns: since(send.at),
                start: start + send.start,
                len: send.len,
            }));
            out.requests.extend(connection.requests.iter().map(|request| RecordedRequest {
                first_send: first_send + request.first_send,
                last_send: first_send + request.last_send,
                ..*request
            }));
            let (ended, end) = connection.ended.unwrap_or((connection.seen, RecordedEnd::Fin));
            out.length_ns = out.length_ns.max(since(connection.seen));
            out.connections.push(RecordedConnection {
                opened_ns: since(connection.opened),
                server_port: connection.server_port,
                sends: first_send..last_send,
                requests: first_request..out.requests.len() as u32,
                answer_bytes: connection.answer_bytes,
                ended_ns: since(ended),
                end,
            });
        }
        Ok(out)
    }
}

fn reversed(addresses: Addresses) -> Addresses {
    match addresses {
        Addresses::V4 { source, destination } => Addresses::V4 { source: destination, destination: source },
        Addresses::V6 { source, destination } => Addresses::V6 { source: destination, destination: source },
    }
}

impl ReadConnection {
    /// Learns the sequence number of the first byte of a direction.
    fn learn(&mut self, direction: usize, first: u32) {
        if self.tracking.flags & flag::KNOWN[direction] == 0 {
            self.tracking.next[direction] = first;
            self.tracking.flags |= flag::KNOWN[direction];
        }
    }

    /// Returns the sequence number of the first byte of a direction, counted back from the next one. It is
    /// right only if all bytes since then were seen.
    fn first_seq(&self, direction: usize) -> u32 {
        let seen = if direction == REQUEST { self.bytes.len() as u64 } else { self.answer_bytes };
        let has_fin = self.tracking.flags & flag::FIN[direction] != 0;
        // Modulo 2^32, as sequence numbers are.
        self.tracking.next[direction].wrapping_sub(seen as u32).wrapping_sub(u32::from(has_fin))
    }

    /// Appends bytes that the client sent.
    fn add_sent(&mut self, at: Instant, bytes: &[u8]) {
        let number = self.sends.len() as u32;
        match self.requests.last_mut().filter(|_| !self.is_answered) {
            Some(request) => request.last_send = number,
            None => self.requests.push(RecordedRequest {
                first_send: number,
                last_send: number,
                answer_from: self.answer_bytes,
                answer_bytes: 0,
            }),
        }
        self.is_answered = false;
        // Bytes that had waited for others are not earlier than those.
        let at = self.sends.last().map_or(at, |last| at.max(last.at));
        self.sends.push(ReadSend { at, start: self.bytes.len(), len: bytes.len() as u32 });
        self.bytes.extend_from_slice(bytes);
    }

    fn add_answered(&mut self, len: u32) {
        self.answer_bytes += u64::from(len);
        self.is_answered = true;
        if let Some(request) = self.requests.last_mut() {
            request.answer_bytes += u64::from(len);
        }
    }
}

/// A connection whose segments are ordered.
struct ReadStream<'a> {
    connection: &'a mut ReadConnection,
    streams: &'a mut StreamPool,
    counters: &'a mut MonitorCounters,
}

impl ReadStream<'_> {
    fn receive(&mut self, arrival: &Arrival<'_>) {
        let mut arrival = *arrival;
        if arrival.flags & SYN != 0 {
            arrival.seq = arrival.seq.wrapping_add(1);
        }
        if arrival.flags & ACK != 0 {
            self.receive_ack(1 - arrival.direction, &arrival);
        }
        if arrival.len > 0 || arrival.flags & FIN != 0 {
            self.receive_data(&arrival);
        }
    }
}

impl OrderedStreams for ReadStream<'_> {
    fn parts(&mut self) -> (&mut Tracking, &mut StreamPool, &mut MonitorCounters) {
        (&mut self.connection.tracking, self.streams, self.counters)
    }

    fn examine(&mut self, direction: usize, now: Instant, _: u32, bytes: &[u8], len: u32) {
        if direction == RESPONSE {
            return self.connection.add_answered(len);
        }
        // A capture may have cut the end of a packet off.
        self.connection.is_incomplete |= bytes.len() < len as usize;
        if !self.connection.is_incomplete {
            self.connection.add_sent(now, bytes);
        }
    }

    fn skip(&mut self, direction: usize, len: u32, _: Instant, _: u32) {
        match direction {
            RESPONSE => self.connection.add_answered(len),
            _ => self.connection.is_incomplete = true,
        }
    }

    fn end_direction(&mut self, direction: usize, now: Instant, _: u32) {
        if direction == REQUEST {
            self.connection.ended.get_or_insert((now, RecordedEnd::Fin));
        }
    }

    fn lose_place(&mut self, direction: usize) {
        self.connection.is_incomplete |= direction == REQUEST;
    }
}

#[cfg(test)]
mod tests;
