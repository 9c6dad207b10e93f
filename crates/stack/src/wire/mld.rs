//! Multicast listener discovery, version 2 (RFC 3810): the part that is needed by a host that only joins and
//! leaves groups without source filters.

use super::{WireError, array, be16, header_bytes, icmpv6};
use core::net::Ipv6Addr;

/// ICMPv6 type of a query of either version.
pub const QUERY: u8 = 130;
/// ICMPv6 type of a version 2 report.
pub const REPORT: u8 = 143;

/// The group of all MLDv2-capable routers, to which reports are sent (RFC 3810 §5.2.14).
pub const ALL_MLDV2_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);

const REPORT_HEADER_LEN: usize = 8;
const RECORD_LEN: usize = 20;

/// The type of a multicast address record (RFC 3810 §5.2.12). A group without source filter is in "exclude"
/// mode with no excluded sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecordType {
    /// Membership, reported in answer to a query (`MODE_IS_EXCLUDE`).
    ModeIsExclude,
    /// Joining of a group (`CHANGE_TO_EXCLUDE_MODE`).
    ChangeToExcludeMode,
    /// Leaving of a group (`CHANGE_TO_INCLUDE_MODE` without sources).
    ChangeToIncludeMode,
}

/// A multicast address record of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulticastAddressRecord {
    /// The type of the record.
    pub kind: RecordType,
    /// The group.
    pub group: Ipv6Addr,
}

/// Returns the length in bytes of a report with this many records.
pub const fn report_len(records: usize) -> usize {
    REPORT_HEADER_LEN + records * RECORD_LEN
}

/// Writes a report with its checksum and returns its length. The packet must have hop limit 1, a link-local
/// or unspecified source and a router alert (RFC 3810 §5): see
/// [`ipv6::emit_router_alert`](super::ipv6::emit_router_alert).
///
/// # Panics
/// If `out` is shorter than [`report_len`] of the number of records.
pub fn emit_report(
    records: &[MulticastAddressRecord],
    src: Ipv6Addr,
    dst: Ipv6Addr,
    out: &mut [u8],
) -> usize {
    let out = &mut out[..report_len(records.len())];
    out[..REPORT_HEADER_LEN].copy_from_slice(&[REPORT, 0, 0, 0, 0, 0, 0, 0]);
    out[6..8].copy_from_slice(&(records.len() as u16).to_be_bytes());
    for (record, out) in records.iter().zip(out[REPORT_HEADER_LEN..].chunks_exact_mut(RECORD_LEN)) {
        // RFC 3810 §5.2.12.
        let kind = match record.kind {
            RecordType::ModeIsExclude => 2,
            RecordType::ChangeToIncludeMode => 3,
            RecordType::ChangeToExcludeMode => 4,
        };
        out[..4].copy_from_slice(&[kind, 0, 0, 0]);
        out[4..].copy_from_slice(&record.group.octets());
    }
    icmpv6::complete_checksum(src, dst, out);
    out.len()
}

/// A router's query for group members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MldQuery {
    /// The maximum response delay in milliseconds.
    pub max_response_ms: u32,
    /// The queried group; `None` queries all groups.
    pub group: Option<Ipv6Addr>,
    /// True if the router uses version 1.
    pub version_1: bool,
}

impl MldQuery {
    /// Parses a query whose checksum has been verified. `hop_limit` and `src` are those of its packet.
    ///
    /// # Errors
    /// `BadValue` for a source address that is not link-local, a hop limit other than 1 (RFC 3810 §6.2), or a
    /// group that is not a multicast address; `Truncated`, `BadLength` (RFC 3810 §8.1); `Unsupported` if the
    /// message is not a query.
    pub fn parse(message: &[u8], src: Ipv6Addr, hop_limit: u8) -> Result<Self, WireError> {
        let bytes = header_bytes::<24>(message)?;
        if bytes[0] != QUERY {
            return Err(WireError::Unsupported);
        }
        if hop_limit != 1 || !src.is_unicast_link_local() {
            return Err(WireError::BadValue);
        }
        let code = be16(bytes, 4);
        let group = Ipv6Addr::from_octets(array(bytes, 8));
        if !group.is_multicast() && !group.is_unspecified() {
            return Err(WireError::BadValue);
        }
        let version_1 = match message.len() {
            24 => true,
            28.. => false,
            _ => return Err(WireError::BadLength),
        };
        // RFC 3810 §5.1.3: long delays are floating-point numbers.
        let max_response_ms = if version_1 || code < 0x8000 {
            u32::from(code)
        } else {
            (u32::from(code & 0x0fff) | 0x1000) << (((code >> 12) & 7) + 3)
        };
        Ok(Self { max_response_ms, group: (!group.is_unspecified()).then_some(group), version_1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    const GROUP: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 1);

    #[test]
    fn report_lists_its_records() {
        let records = [
            MulticastAddressRecord { kind: RecordType::ChangeToExcludeMode, group: GROUP },
            MulticastAddressRecord { kind: RecordType::ChangeToIncludeMode, group: ALL_MLDV2_ROUTERS },
        ];
        let mut out = [0xee; 64];
        let len = emit_report(&records, HOST, ALL_MLDV2_ROUTERS, &mut out);
        assert_eq!(len, 48);
        assert_eq!((out[0], out[1], &out[4..12]), (143, 0, &[0, 0, 0, 2, 4, 0, 0, 0][..]));
        assert_eq!(out[12..28], GROUP.octets());
        assert_eq!(out[28..32], [3, 0, 0, 0]);
        let parsed = icmpv6::Message::parse(&out[..len], HOST, ALL_MLDV2_ROUTERS).unwrap();
        assert!(matches!(parsed, icmpv6::Message::Other { kind: 143, .. }));
    }

    #[test]
    fn query_is_parsed_in_both_versions() {
        let mut message = [0; 28];
        message[0] = QUERY;
        message[4..6].copy_from_slice(&10_000u16.to_be_bytes());
        let general = MldQuery { max_response_ms: 10_000, group: None, version_1: false };
        assert_eq!(MldQuery::parse(&message, HOST, 1), Ok(general));
        assert_eq!(MldQuery::parse(&message[..24], HOST, 1), Ok(MldQuery { version_1: true, ..general }));
        message[8..24].copy_from_slice(&GROUP.octets());
        message[4] = 0xff;
        message[5] = 0xff;
        let slow = MldQuery { max_response_ms: 0x1fff << 10, group: Some(GROUP), version_1: false };
        assert_eq!(MldQuery::parse(&message, HOST, 1), Ok(slow));
    }

    #[test]
    fn invalid_query_source_or_group_is_rejected() {
        let mut message = [0; 28];
        message[0] = QUERY;
        assert_eq!(MldQuery::parse(&message, HOST, 2), Err(WireError::BadValue));
        assert_eq!(MldQuery::parse(&message, Ipv6Addr::UNSPECIFIED, 1), Err(WireError::BadValue));
        assert_eq!(MldQuery::parse(&message[..23], HOST, 1), Err(WireError::Truncated));
        assert_eq!(MldQuery::parse(&message[..26], HOST, 1), Err(WireError::BadLength));
        message[8..24].copy_from_slice(&HOST.octets());
        assert_eq!(MldQuery::parse(&message, HOST, 1), Err(WireError::BadValue));
    }
}
