//! Internet group management protocol: version 3 (RFC 3376), and the messages of versions 1 and 2 that a
//! host exchanges with older routers (RFC 2236).

use super::checksum::Sum;
use super::group_record::{self, GroupQuery, GroupRecord};
use super::{WireError, array, be16};
use core::net::Ipv4Addr;

/// Type of a query of any version.
pub const QUERY: u8 = 0x11;
/// Type of a version 1 report.
pub const REPORT_V1: u8 = 0x12;
/// Type of a version 2 report.
pub const REPORT_V2: u8 = 0x16;
/// Type of a version 2 "leave group" message.
pub const LEAVE: u8 = 0x17;
/// Type of a version 3 report.
pub const REPORT_V3: u8 = 0x22;

/// The group of all IGMPv3-capable routers, to which reports are sent (RFC 3376 §4.2.14).
pub const ALL_IGMPV3_ROUTERS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 22);
/// The group of all routers, to which "leave group" messages are sent (RFC 2236 §3).
pub const ALL_ROUTERS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 2);

/// Length in bytes of the messages of versions 1 and 2.
pub const MESSAGE_LEN: usize = 8;
/// Maximum response delay of a version 1 query in milliseconds (RFC 2236 §4).
const V1_MAX_RESPONSE_MS: u32 = 10_000;

/// A received message that a host acts on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A router queries group members.
    Query(GroupQuery),
    /// Another host reports that it is a member of a group, by version 1 or 2.
    Report(Ipv4Addr),
    /// A message for routers, or of an unknown type.
    Other,
}

impl Message {
    /// Parses a message.
    ///
    /// # Errors
    /// `Truncated`, `BadChecksum`; `BadLength` for a query that ends within its sources or has 9 to 11 bytes
    /// (RFC 3376 §7.1); `BadValue` for a group that is not a multicast address.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let header: &[u8; MESSAGE_LEN] = bytes.first_chunk().ok_or(WireError::Truncated)?;
        if !Sum::of(bytes).is_valid() {
            return Err(WireError::BadChecksum);
        }
        let group = Ipv4Addr::from_octets(array(header, 4));
        match header[0] {
            QUERY => Self::parse_query(bytes, header[1], group).map(Self::Query),
            REPORT_V1 | REPORT_V2 if !group.is_multicast() => Err(WireError::BadValue),
            REPORT_V1 | REPORT_V2 => Ok(Self::Report(group)),
            _ => Ok(Self::Other),
        }
    }

    fn parse_query(bytes: &[u8], code: u8, group: Ipv4Addr) -> Result<GroupQuery, WireError> {
        if !group.is_multicast() && !group.is_unspecified() {
            return Err(WireError::BadValue);
        }
        let mut query = GroupQuery {
            max_response_ms: V1_MAX_RESPONSE_MS,
            group: (!group.is_unspecified()).then_some(group.into()),
            sources: Vec::new(),
            version: 1,
            robustness: 0,
            interval_seconds: 0,
        };
        match bytes.len() {
            MESSAGE_LEN if code == 0 => {}
            MESSAGE_LEN => (query.version, query.max_response_ms) = (2, u32::from(code) * 100),
            9..12 => return Err(WireError::BadLength),
            _ => {
                let header: &[u8; 12] = bytes.first_chunk().ok_or(WireError::Truncated)?;
                let count = usize::from(be16(header, 10));
                let sources = bytes.get(12..12 + 4 * count).ok_or(WireError::BadLength)?;
                let address = |bytes: &[u8]| Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into();
                query = GroupQuery {
                    max_response_ms: group_record::decode_float_8(code) * 100,
                    sources: sources.chunks_exact(4).map(address).collect(),
                    version: 3,
                    robustness: header[8] & 7,
                    interval_seconds: group_record::decode_float_8(header[9]),
                    ..query
                };
            }
        }
        Ok(query)
    }
}

/// Writes a version 3 report with its checksum and returns its length. The packet must have TTL 1 and the
/// router alert option (RFC 3376 §4).
///
/// # Panics
/// If `out` is shorter than [`group_record::report_len`] of the records.
pub fn emit_report(records: &[GroupRecord], out: &mut [u8]) -> usize {
    let len = group_record::emit_report(REPORT_V3, records, out);
    complete_checksum(&mut out[..len]);
    len
}

/// Writes a message of version 1 or 2 about a group, and returns its length.
///
/// # Panics
/// If `out` is shorter than [`MESSAGE_LEN`].
pub fn emit_message(kind: u8, group: Ipv4Addr, out: &mut [u8]) -> usize {
    out[..4].copy_from_slice(&[kind, 0, 0, 0]);
    out[4..MESSAGE_LEN].copy_from_slice(&group.octets());
    complete_checksum(&mut out[..MESSAGE_LEN]);
    MESSAGE_LEN
}

fn complete_checksum(message: &mut [u8]) {
    let checksum = Sum::of(message).finish();
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::group_record::RecordType;

    const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);

    fn with_checksum(mut message: Vec<u8>) -> Vec<u8> {
        complete_checksum(&mut message);
        message
    }

    #[test]
    fn report_lists_records_with_sources() {
        let source = Ipv4Addr::new(10, 0, 0, 9);
        let records = [
            GroupRecord {
                kind: RecordType::AllowNewSources,
                group: GROUP.into(),
                sources: vec![source.into()],
            },
            GroupRecord { kind: RecordType::ChangeToIncludeMode, group: GROUP.into(), sources: Vec::new() },
        ];
        let mut out = [0xee; 64];
        let len = emit_report(&records, &mut out);
        assert_eq!((len, group_record::report_len(&records)), (28, 28));
        assert!(Sum::of(&out[..len]).is_valid());
        assert_eq!((out[0], &out[4..12]), (REPORT_V3, &[0, 0, 0, 2, 5, 0, 0, 1][..]));
        assert_eq!((&out[12..16], &out[16..20]), (&GROUP.octets()[..], &source.octets()[..]));
        assert_eq!(out[20..28], [3, 0, 0, 0, 239, 1, 2, 3]);
        assert_eq!(Message::parse(&out[..len]), Ok(Message::Other));
    }

    #[test]
    fn query_is_parsed_in_all_versions() {
        let query = |bytes: Vec<u8>| match Message::parse(&with_checksum(bytes)) {
            Ok(Message::Query(query)) => query,
            other => panic!("{other:?}"),
        };
        let v1 = query(vec![QUERY, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((v1.version, v1.max_response_ms, v1.group), (1, 10_000, None));
        let v2 = query(vec![QUERY, 50, 0, 0, 239, 1, 2, 3]);
        assert_eq!((v2.version, v2.max_response_ms, v2.group), (2, 5_000, Some(GROUP.into())));
        let v3 = query(vec![QUERY, 0x80, 0, 0, 239, 1, 2, 3, 0x0b, 125, 0, 1, 10, 0, 0, 9]);
        assert_eq!((v3.version, v3.max_response_ms, v3.robustness, v3.interval_seconds), (3, 12_800, 3, 125));
        assert_eq!(v3.sources, [core::net::IpAddr::from([10, 0, 0, 9])]);
    }

    #[test]
    fn malformed_messages_are_rejected() {
        let parse = |bytes: &[u8]| Message::parse(&with_checksum(bytes.to_vec()));
        assert_eq!(parse(&[QUERY, 0, 0, 0, 0, 0, 0]), Err(WireError::Truncated));
        assert_eq!(parse(&[QUERY, 9, 0, 0, 10, 0, 0, 1]), Err(WireError::BadValue));
        assert_eq!(parse(&[QUERY, 9, 0, 0, 0, 0, 0, 0, 0, 0]), Err(WireError::BadLength));
        assert_eq!(parse(&[QUERY, 9, 0, 0, 0, 0, 0, 0, 2, 125, 0, 1, 1, 1]), Err(WireError::BadLength));
        assert_eq!(parse(&[REPORT_V2, 0, 0, 0, 10, 0, 0, 1]), Err(WireError::BadValue));
        assert_eq!(Message::parse(&[QUERY, 9, 0, 0, 0, 0, 0, 0]), Err(WireError::BadChecksum));
        let mut report = [0; MESSAGE_LEN];
        emit_message(REPORT_V2, GROUP, &mut report);
        assert_eq!(Message::parse(&report), Ok(Message::Report(GROUP)));
    }
}
