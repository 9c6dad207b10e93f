//! The blocks of pcapng that captures have: interfaces, packets, and what was lost.

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{InterfaceStatisticsBlock, InterfaceStatisticsOption};
use pcap_file::{DataLink, Endianness, PcapError};
use std::borrow::Cow;
use std::io::{self, Write};
use std::time::Duration;

/// Value of pcapng's `if_tsresol` for nanoseconds (negative power of ten).
const NANOSECONDS: u8 = 9;

/// An interface of a capture. Its frames begin with Ethernet headers.
#[derive(Clone, Debug)]
pub struct CapturedInterface {
    /// Name of the interface.
    pub name: String,
    /// Most bytes that are kept of a frame.
    pub snaplen: u32,
    /// The filter that selects frames.
    pub filter: Option<String>,
}

/// Direction of a frame, from the engine's point of view. The values are those of pcapng's `epb_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The stack has received the frame.
    Received = 1,
    /// The stack has sent the frame.
    Sent = 2,
}

/// A frame to write.
#[derive(Clone, Copy, Debug)]
pub struct CapturedPacket<'a> {
    /// Direction of the frame.
    pub direction: Direction,
    /// The bytes that are kept.
    pub bytes: &'a [u8],
    /// Length in bytes before truncation.
    pub original_len: usize,
    /// Segment size in bytes of a super-frame.
    pub segment_bytes: Option<u16>,
}

/// A section of pcapng.
pub struct PcapngStream<W: Write> {
    out: PcapNgWriter<W>,
}

impl<W: Write> PcapngStream<W> {
    /// Writes the heads of the section and of its interfaces.
    ///
    /// # Errors
    /// The error of writing.
    pub fn create(out: W, interfaces: &[CapturedInterface]) -> io::Result<Self> {
        let mut out = PcapNgWriter::with_endianness(out, Endianness::Little).map_err(io_error)?;
        for interface in interfaces {
            let mut options = vec![
                InterfaceDescriptionOption::IfName(Cow::Borrowed(&interface.name)),
                InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
            ];
            if let Some(text) = &interface.filter {
                // The first byte states that text follows.
                let bytes = [&[0], text.as_bytes()].concat();
                options.push(InterfaceDescriptionOption::IfFilter(Cow::Owned(bytes)));
            }
            let block = InterfaceDescriptionBlock {
                linktype: DataLink::ETHERNET,
                snaplen: interface.snaplen,
                options,
            };
            out.write_pcapng_block(block).map_err(io_error)?;
        }
        Ok(Self { out })
    }

    /// Writes a frame of an interface, which was captured at the UNIX time `at`.
    ///
    /// # Errors
    /// The error of writing.
    pub fn write(&mut self, interface: u32, at: Duration, packet: &CapturedPacket<'_>) -> io::Result<()> {
        let mut options = vec![EnhancedPacketOption::Flags(packet.direction as u32)];
        if let Some(size) = packet.segment_bytes {
            let comment = format!("super-frame, sent as segments of {size} bytes of payload");
            options.push(EnhancedPacketOption::Comment(Cow::Owned(comment)));
        }
        let block = EnhancedPacketBlock {
            interface_id: interface,
            timestamp: at,
            original_len: packet.original_len as u32,
            data: Cow::Borrowed(packet.bytes),
            options,
        };
        self.out.write_pcapng_block(block).map(drop).map_err(io_error)
    }

    /// Writes how many frames passed an interface until the UNIX time `at`, and how many of them were lost.
    ///
    /// # Errors
    /// The error of writing.
    pub fn write_statistics(
        &mut self,
        interface: u32,
        at: Duration,
        passed: u64,
        lost: u64,
    ) -> io::Result<()> {
        let options =
            vec![InterfaceStatisticsOption::IsbIfRecv(passed), InterfaceStatisticsOption::IsbIfDrop(lost)];
        // The format wants the upper half first, and the crate writes a little-endian number.
        let timestamp = (at.as_nanos() as u64).rotate_left(32);
        let block = InterfaceStatisticsBlock { interface_id: interface, timestamp, options };
        self.out.write_pcapng_block(block).map(drop).map_err(io_error)
    }

    /// Returns the output of the stream.
    pub fn inner(&self) -> &W {
        self.out.get_ref()
    }

    /// Flushes the output of the stream.
    ///
    /// # Errors
    /// The error of flushing.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.get_mut().flush()
    }
}

fn io_error(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other.to_string()),
    }
}
