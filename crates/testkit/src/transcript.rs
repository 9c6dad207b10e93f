//! Records the application data that two hosts exchange on the wire, without segmentation and
//! retransmissions: programs that behave alike have equal transcripts, whatever frames their stacks sent.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ginnel_devices::mirror::{self, FrameSink};
use ginnel_devices::offload::WireFrames;
use ginnel_stack::device::{Device, TxMeta};
use ginnel_stack::time::Instant;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
const URG: u8 = 32;

/// Bytes compared of a stream that the receiver reset: how many more were sent depends on buffer sizes along
/// the path.
const COMPARED_BEFORE_RESET: usize = 4096;

/// The data that one end of a conversation sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct EndTranscript {
    /// Bytes of the stream; for datagrams, each datagram preceded by its length in 32 bits.
    bytes: Vec<u8>,
    /// Stream offset of the FIN.
    fin: Option<u32>,
    /// True if this end reset the connection before both FINs were seen. A later reset answers a segment that
    /// was in flight for longer than the connection lived, which depends on timing.
    reset: bool,
    /// Stream offsets after urgent bytes.
    urgent: Vec<u32>,
    /// Sequence number of the first byte, while recording.
    first_seq: Option<u32>,
}

/// One TCP connection, or all datagrams between two ports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Conversation {
    protocol: u8,
    /// Address of the responder. The port of the initiator does not matter.
    responder: SocketAddr,
    /// Data of the initiator and of the responder.
    ends: [EndTranscript; 2],
}

impl Conversation {
    /// Returns whether the initiator aborted the connection before any data: whether its SYN had left by then
    /// depends on timing.
    fn is_empty_abort(&self) -> bool {
        let silent = |end: &EndTranscript| end.bytes.is_empty() && end.fin.is_none();
        self.protocol == TCP && self.ends[0].reset && self.ends.iter().all(silent)
    }
}

/// All conversations, in an order that does not depend on time.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Transcript(Vec<Conversation>);

impl fmt::Debug for Transcript {
    /// Writes a line for each conversation, with length and hash of the data of each end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Conversation { protocol, responder, ends } in &self.0 {
            write!(f, "\n{} {responder}", if *protocol == TCP { "tcp" } else { "udp" })?;
            for (EndTranscript { bytes, fin, reset, urgent, .. }, side) in ends.iter().zip([">", "<"]) {
                // FNV-1a.
                let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
                let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325, add);
                write!(f, " {side} {} bytes ({sum:016x})", bytes.len())?;
                match fin {
                    Some(fin) => write!(f, " fin {fin}")?,
                    None => f.write_str(" open")?,
                }
                if *reset {
                    f.write_str(" reset")?;
                }
                if !urgent.is_empty() {
                    write!(f, " urgent {urgent:?}")?;
                }
            }
        }
        Ok(())
    }
}

/// Records the traffic of a device.
#[derive(Clone, Default)]
pub struct WireRecorder(Arc<Mutex<Conversations>>);

#[derive(Default)]
struct Conversations {
    list: Vec<Conversation>,
    /// Index of the latest conversation by protocol, initiator and responder.
    latest: BTreeMap<(u8, SocketAddr, SocketAddr), usize>,
}

impl WireRecorder {
    /// Wraps a device so that both directions are recorded. Returns the device and the recorder.
    #[must_use]
    pub fn wrap(device: Device) -> (Device, Self) {
        let recorder = Self::default();
        let sink = || RecordingSink { recorder: recorder.clone(), frames: WireFrames::new() };
        (mirror::wrap(device, sink(), sink()), recorder)
    }

    /// Returns the data recorded so far.
    #[must_use]
    pub fn transcript(&self) -> Transcript {
        let conversations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = conversations.list.clone();
        for conversation in &mut all {
            let resets = conversation.ends.each_ref().map(|end| end.reset);
            for (end, peer_reset) in conversation.ends.iter_mut().zip([resets[1], resets[0]]) {
                end.first_seq = None;
                end.urgent.sort_unstable();
                if peer_reset && end.fin.is_none() {
                    end.bytes.truncate(COMPARED_BEFORE_RESET);
                }
            }
        }
        all.retain(|conversation| !conversation.is_empty_abort());
        all.sort();
        Transcript(all)
    }
}

/// Gets the copies of one direction. Both directions are recorded together, in the order of their frames.
struct RecordingSink {
    recorder: WireRecorder,
    frames: WireFrames,
}

impl FrameSink for RecordingSink {
    fn put(&mut self, frame: &[u8], meta: TxMeta) {
        let mut conversations = self.recorder.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A frame that contradicts its metadata, other protocols and truncated packets carry no application
        // data.
        let _ = self.frames.for_each(frame, meta, |frame| _ = conversations.record_frame(frame));
    }

    fn end_burst(&mut self, _: Instant) {}
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

impl Conversations {
    fn record_frame(&mut self, frame: &[u8]) -> Option<()> {
        let packet = frame.get(14..)?;
        match be16(frame, 12)? {
            0x0800 => {
                let header = usize::from(packet.first()? & 15) * 4;
                let packet_bytes = packet.get(..usize::from(be16(packet, 2)?))?;
                let ip = |at: usize| Some(IpAddr::from(Ipv4Addr::from(be32(packet, at)?)));
                let fragment = be16(packet, 6)? & 0x3fff;
                let ends = [ip(12)?, ip(16)?];
                self.packet(*packet.get(9)?, ends, packet_bytes.get(header..)?, fragment)
            }
            0x86dd => {
                let packet_bytes = packet.get(40..40 + usize::from(be16(packet, 4)?))?;
                let ip = |at: usize| -> Option<IpAddr> {
                    Some(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?).into())
                };
                self.packet(*packet.get(6)?, [ip(8)?, ip(24)?], packet_bytes, 0)
            }
            _ => None,
        }
    }

    /// `fragment` contains fragment offset and more-fragments flag; 0 for an unfragmented packet.
    fn packet(&mut self, protocol: u8, ends: [IpAddr; 2], data: &[u8], fragment: u16) -> Option<()> {
        let port = |at: usize| if fragment == 0 { be16(data, at) } else { Some(0) };
        let [from, to] = [SocketAddr::new(ends[0], port(0)?), SocketAddr::new(ends[1], port(2)?)];
        match protocol {
            TCP => self.segment(from, to, data),
            UDP if fragment == 0 => self.datagram(from, to, data.get(8..)?),
            // Fragments of a datagram are recorded as datagrams between ports 0.
            UDP if fragment & 0x1fff == 0 => self.datagram(from, to, data.get(8..)?),
            UDP => self.datagram(from, to, data),
            _ => None,
        }
    }

    /// Returns the index of the conversation between two addresses, and the index of `from` in it. Starts a
    /// conversation if `restart` is set or there is none.
    fn find_or_begin(
        &mut self,
        protocol: u8,
        from: SocketAddr,
        to: SocketAddr,
        restart: bool,
    ) -> (usize, usize) {
        if !restart {
            if let Some(index) = self.latest.get(&(protocol, from, to)) {
                return (*index, 0);
            }
            if let Some(index) = self.latest.get(&(protocol, to, from)) {
                return (*index, 1);
            }
        }
        let index = self.list.len();
        self.list.push(Conversation { protocol, responder: to, ends: Default::default() });
        self.latest.remove(&(protocol, to, from));
        self.latest.insert((protocol, from, to), index);
        (index, 0)
    }

    fn datagram(&mut self, from: SocketAddr, to: SocketAddr, data: &[u8]) -> Option<()> {
        let (index, side) = self.find_or_begin(UDP, from, to, false);
        let bytes = &mut self.list[index].ends[side].bytes;
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        Some(())
    }

    fn segment(&mut self, from: SocketAddr, to: SocketAddr, data: &[u8]) -> Option<()> {
        let (seq, flags) = (be32(data, 4)?, *data.get(13)?);
        let payload = data.get(usize::from(*data.get(12)? >> 4) * 4..)?;
        let (mut index, mut side) = self.find_or_begin(TCP, from, to, false);
        if flags & (SYN | ACK) == SYN {
            let first = self.list[index].ends[side].first_seq;
            if first.is_some_and(|first| first != seq.wrapping_add(1)) {
                (index, side) = self.find_or_begin(TCP, from, to, true);
            }
        }
        let is_over = self.list[index].ends.iter().all(|end| end.fin.is_some());
        let sender = &mut self.list[index].ends[side];
        if flags & SYN != 0 {
            sender.first_seq = Some(seq.wrapping_add(1));
        }
        sender.reset |= flags & RST != 0 && !is_over;
        let at = seq.wrapping_sub(sender.first_seq?) as i32;
        let (Ok(at), 0) = (usize::try_from(at), flags & (SYN | RST)) else { return None };
        let end = at + payload.len();
        if !payload.is_empty() {
            let len = sender.bytes.len().max(end);
            sender.bytes.resize(len, 0);
            sender.bytes[at..end].copy_from_slice(payload);
        }
        if flags & FIN != 0 {
            sender.fin = Some(end as u32);
        }
        if flags & URG != 0 {
            let urgent = at as u32 + u32::from(be16(data, 18)?);
            if !sender.urgent.contains(&urgent) {
                sender.urgent.push(urgent);
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a segment between 10.0.0.1:1000 and 10.0.0.2:80, without checksums.
    fn segment(from_first: bool, seq: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0]);
        frame.extend((40 + payload.len() as u16).to_be_bytes());
        frame.extend([0, 0, 0, 0, 64, TCP, 0, 0]);
        let mut ends = [([10, 0, 0, 1], 1000u16), ([10, 0, 0, 2], 80)];
        if !from_first {
            ends.reverse();
        }
        ends.iter().for_each(|(ip, _)| frame.extend(ip));
        ends.iter().for_each(|(_, port)| frame.extend(port.to_be_bytes()));
        frame.extend(seq.to_be_bytes());
        frame.extend([0, 0, 0, 0, 0x50, flags, 0, 0, 0, 0, 0, 0]);
        frame.extend(payload);
        frame
    }

    fn transcript_of(frames: &[Vec<u8>]) -> Transcript {
        let recorder = WireRecorder::default();
        for frame in frames {
            let _ = recorder.0.lock().unwrap().record_frame(frame);
        }
        recorder.transcript()
    }

    #[test]
    fn segmentation_does_not_change_the_transcript() {
        let syn = segment(true, 99, SYN, b"");
        let answer = segment(false, 7, SYN | ACK, b"");
        let complete = transcript_of(&[
            syn.clone(),
            answer.clone(),
            segment(true, 100, ACK, b"request"),
            segment(true, 107, ACK | FIN, b""),
        ]);
        let cut = transcript_of(&[
            syn.clone(),
            syn.clone(),
            answer.clone(),
            segment(true, 103, ACK | FIN, b"uest"),
            segment(true, 108, ACK, b""),
            segment(true, 100, ACK, b"requ"),
        ]);
        assert_eq!(complete, cut);
        for other in [
            segment(true, 100, ACK, b"bequest"),
            segment(true, 100, ACK, b"request!"),
            segment(true, 100, ACK | FIN, b"reque"),
            segment(false, 8, RST, b""),
        ] {
            let changed =
                transcript_of(&[syn.clone(), answer.clone(), segment(true, 100, ACK, b"request"), other]);
            assert_ne!(changed, complete, "{changed:?}");
        }
        let ends = [segment(true, 100, ACK | FIN, b"bye"), segment(false, 8, ACK | FIN, b"")];
        let ended = [&[syn.clone(), answer.clone()], &ends[..]].concat();
        let late = segment(false, 9, RST, b"");
        assert_eq!(
            transcript_of(&[&ended[..], core::slice::from_ref(&late)].concat()),
            transcript_of(&ended),
            "a reset that answers a late segment"
        );
        assert_ne!(
            transcript_of(&[&ended[..3], &[late]].concat()),
            transcript_of(&ended[..3]),
            "one direction is still open"
        );
        let reopened = [syn, answer, segment(true, 500, SYN, b""), segment(true, 501, ACK, b"two")];
        assert_eq!(transcript_of(&reopened).0.len(), 2, "a reused port");
    }
}
