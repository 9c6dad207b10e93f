//! A responder without connections: each answer follows from the segment that it answers. It is cheaper than
//! any client, so that a generator can be measured against it.

use super::Server;
use crate::frames::{ACK, Direction, FIN, FrameTemplate, LinkSetup, PSH, RST, SYN, Segment, arp_reply};
use crate::http;
use ginnel_stack::device::{Device, RxBurst, RxQueue, TxMeta, TxQueue};
use ginnel_stack::time::Instant;

/// Initial sequence number of all connections.
const INITIAL_SEQUENCE: u32 = 0x5eed_0000;

/// The responder. It acknowledges a SYN, answers a request with a response and FIN, and acknowledges a FIN.
pub struct Sink {
    rx: Box<dyn RxQueue + Send>,
    tx: Box<dyn TxQueue + Send>,
    wire: LinkSetup,
    syn_ack: FrameTemplate,
    response: FrameTemplate,
    ack: FrameTemplate,
    /// Answers for which the device had no free buffer.
    full: u64,
}

impl Sink {
    /// Creates the responder on a device.
    pub fn new(device: Device, wire: LinkSetup) -> Self {
        let to_client = |flags, options: &[u8], payload: &[u8]| {
            FrameTemplate::with_direction(Direction::ToClient, &wire, flags, options, payload)
        };
        Self {
            rx: device.rx,
            tx: device.tx,
            // MSS 1,460.
            syn_ack: to_client(SYN | ACK, &[2, 4, 5, 0xb4], &[]),
            response: to_client(FIN | PSH | ACK, &[], &http::response(false)),
            ack: to_client(ACK, &[], &[]),
            wire,
            full: 0,
        }
    }
}

impl Server for Sink {
    fn turn(&mut self, now: Instant) -> usize {
        let mut burst = RxBurst::new();
        self.rx.rx_burst(now, &mut burst);
        for frame in &burst {
            let Some(segment) = Segment::parse(frame.bytes) else {
                if let Some(reply) = arp_reply(frame.bytes, self.wire.server_mac)
                    && let Some(room) = self.tx.reserve(reply.len())
                {
                    room.copy_from_slice(&reply);
                    self.tx.commit(reply.len(), TxMeta::default());
                }
                continue;
            };
            let len = segment.payload.len() as u32;
            let (template, seq, ack) = match segment.flags & (SYN | FIN | RST) {
                SYN => (&self.syn_ack, INITIAL_SEQUENCE, segment.seq.wrapping_add(1)),
                0 if len > 0 => (&self.response, segment.ack, segment.seq.wrapping_add(len)),
                FIN => (&self.ack, segment.ack, segment.seq.wrapping_add(len + 1)),
                _ => continue,
            };
            let Some(room) = self.tx.reserve(template.len()) else {
                self.full += 1;
                continue;
            };
            template.write(room, segment.from, seq, ack);
            self.tx.commit(template.len(), template.meta());
        }
        let frames = burst.len();
        drop(burst);
        self.tx.flush(now);
        frames
    }

    fn facts(&self) -> Vec<(&'static str, u64)> {
        vec![("sink_full", self.full)]
    }
}
