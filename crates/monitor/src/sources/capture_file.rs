//! Captures in the formats pcap and pcapng, from a file or a pipe.

use super::{PacketSource, PacketVisitor, SourceError, SourceState};
use crate::frame::LinkType;
use core::time::Duration;
use ginnel_stack::time::Instant;
use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::PcapNgReader;
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::{DataLink, Endianness, PcapError, TsResolution};
use std::io::{self, Cursor, ErrorKind, Read};

/// Types of pcapng blocks.
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
/// Bytes of an enhanced packet block before the packet.
const ENHANCED_HEADER_BYTES: usize = 20;
/// Value of `if_tsresol` if an interface has none: 10^-6 s.
const DEFAULT_RESOLUTION: u8 = 6;

type Input = io::Chain<Cursor<Vec<u8>>, Box<dyn Read>>;

/// Reads a capture once, from its beginning to its end.
pub struct CaptureFile {
    reader: CaptureReader,
}

enum CaptureReader {
    Pcap { reader: PcapReader<Input>, link: LinkType, nanos_per_unit: u64 },
    PcapNg { reader: Box<PcapNgReader<Input>>, interfaces: Vec<CapturedInterface> },
}

/// Link type and clock of an interface in pcapng.
#[derive(Clone, Debug)]
struct CapturedInterface {
    link: Result<LinkType, String>,
    units_per_second: u128,
    offset_seconds: i64,
}

impl CaptureFile {
    /// Reads the header of a capture.
    ///
    /// # Errors
    /// The bytes are empty, cut short or not a capture, the link type of a pcap capture is not supported, or
    /// the input cannot be read.
    pub fn open(mut input: Box<dyn Read>) -> Result<Self, SourceError> {
        let mut magic = Vec::new();
        input.by_ref().take(4).read_to_end(&mut magic)?;
        let is_pcapng = magic == SECTION_HEADER.to_be_bytes();
        match magic.len() {
            0 => return Err(SourceError::Unusable("the capture is empty".into())),
            1..4 => return Err(SourceError::CutShort),
            _ => {}
        }
        let input = Cursor::new(magic).chain(input);
        if is_pcapng {
            let reader = Box::new(PcapNgReader::new(input).map_err(explain)?);
            return Ok(Self { reader: CaptureReader::PcapNg { reader, interfaces: Vec::new() } });
        }
        let reader = PcapReader::new(input).map_err(|e| match e {
            PcapError::InvalidField(_) => {
                SourceError::Unusable("this is neither a pcap nor a pcapng capture".into())
            }
            e => explain(e),
        })?;
        let header = reader.header();
        let link = link_type(header.datalink).map_err(SourceError::Unusable)?;
        let nanos_per_unit = match header.ts_resolution {
            TsResolution::MicroSecond => 1000,
            TsResolution::NanoSecond => 1,
        };
        Ok(Self { reader: CaptureReader::Pcap { reader, link, nanos_per_unit } })
    }
}

impl PacketSource for CaptureFile {
    fn poll(&mut self, visit: &mut PacketVisitor<'_>) -> Result<SourceState, SourceError> {
        match &mut self.reader {
            CaptureReader::Pcap { reader, link, nanos_per_unit } => {
                let Some(packet) = reader.next_raw_packet() else { return Ok(SourceState::End) };
                let packet = packet.map_err(explain)?;
                let nanos =
                    u64::from(packet.ts_sec) * 1_000_000_000 + u64::from(packet.ts_frac) * *nanos_per_unit;
                visit(*link, &[(Instant::from_nanos(nanos), &packet.data)]);
            }
            CaptureReader::PcapNg { reader, interfaces } => {
                // `pcap_file` takes all times for nanoseconds, so the units of each interface are applied
                // here.
                let known = reader.interfaces();
                if known.len() != interfaces.len() {
                    *interfaces = known.iter().map(CapturedInterface::of).collect();
                }
                let endianness = reader.section().endianness;
                let Some(block) = reader.next_raw_block() else { return Ok(SourceState::End) };
                let block = block.map_err(explain)?;
                match block.type_ {
                    ENHANCED_PACKET => read_enhanced(&block.body, endianness, interfaces, visit)?,
                    SECTION_HEADER => interfaces.clear(),
                    PACKET | SIMPLE_PACKET => {
                        let problem =
                            "the capture has packets without times or in an obsolete form (pcapng block type";
                        return Err(SourceError::Unusable(format!("{problem} {})", block.type_)));
                    }
                    _ => {}
                }
            }
        }
        Ok(SourceState::More)
    }

    fn wait(&mut self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn now(&self) -> Option<Instant> {
        None
    }

    fn lost(&mut self) -> u64 {
        0
    }
}

/// Reads an enhanced packet block.
fn read_enhanced(
    body: &[u8],
    endianness: Endianness,
    interfaces: &[CapturedInterface],
    visit: &mut PacketVisitor<'_>,
) -> Result<(), SourceError> {
    let unusable = |problem: &str| SourceError::Unusable(format!("the capture is corrupt: {problem}"));
    let Some((head, data)) = body.split_first_chunk::<ENHANCED_HEADER_BYTES>() else {
        return Err(unusable("a packet block is too short"));
    };
    let word = |at: usize| {
        let bytes = [head[at], head[at + 1], head[at + 2], head[at + 3]];
        match endianness {
            Endianness::Big => u32::from_be_bytes(bytes),
            Endianness::Little => u32::from_le_bytes(bytes),
        }
    };
    let ticks = u64::from(word(4)) << 32 | u64::from(word(8));
    let Some(packet) = data.get(..word(12) as usize) else {
        return Err(unusable("a packet is longer than its block"));
    };
    let Some(interface) = interfaces.get(word(0) as usize) else {
        return Err(unusable("a packet belongs to an interface that is not described"));
    };
    let link = interface.link.clone().map_err(SourceError::Unusable)?;
    visit(link, &[(interface.time(ticks), packet)]);
    Ok(())
}

impl CapturedInterface {
    fn of(block: &InterfaceDescriptionBlock<'_>) -> Self {
        let (mut resolution, mut offset_seconds) = (DEFAULT_RESOLUTION, 0);
        for option in &block.options {
            match option {
                InterfaceDescriptionOption::IfTsResol(value) => resolution = *value,
                // A signed number, which `pcap_file` reads as an unsigned one.
                InterfaceDescriptionOption::IfTsOffset(value) => offset_seconds = *value as i64,
                _ => {}
            }
        }
        let exponent = u32::from(resolution & 0x7f);
        let base: u128 = if resolution & 0x80 == 0 { 10 } else { 2 };
        // Units per second that do not fit are limited to the largest number that does.
        let units_per_second = base.checked_pow(exponent).unwrap_or(u128::MAX);
        Self { link: link_type(block.linktype), units_per_second, offset_seconds }
    }

    /// Converts a time in units of the interface.
    fn time(&self, ticks: u64) -> Instant {
        let nanos = u128::from(ticks) * 1_000_000_000 / self.units_per_second;
        let nanos = i128::try_from(nanos).unwrap_or(i128::MAX);
        let nanos = nanos.saturating_add(i128::from(self.offset_seconds) * 1_000_000_000);
        Instant::from_nanos(u64::try_from(nanos.max(0)).unwrap_or(u64::MAX))
    }
}

fn link_type(link: DataLink) -> Result<LinkType, String> {
    Ok(match link {
        DataLink::ETHERNET => LinkType::Ethernet,
        DataLink::RAW | DataLink::IPV4 | DataLink::IPV6 => LinkType::Raw,
        DataLink::NULL | DataLink::LOOP => LinkType::Null,
        DataLink::LINUX_SLL => LinkType::LinuxSll,
        DataLink::LINUX_SLL2 => LinkType::LinuxSll2,
        other => {
            let number = u32::from(other);
            return Err(format!(
                "link type {number} is not supported: use Ethernet, raw IP, BSD loopback, or Linux's \"any\""
            ));
        }
    })
}

fn explain(e: PcapError) -> SourceError {
    match e {
        PcapError::IncompleteBuffer => SourceError::CutShort,
        PcapError::IoError(e) if e.kind() == ErrorKind::UnexpectedEof => SourceError::CutShort,
        PcapError::IoError(e) => SourceError::Io(e),
        e => SourceError::Unusable(format!("the capture is corrupt: {e}")),
    }
}

#[cfg(test)]
mod tests;
