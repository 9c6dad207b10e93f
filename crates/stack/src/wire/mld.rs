//! Multicast listener discovery: version 2 (RFC 3810), and the messages of version 1 that a host exchanges
//! with older routers (RFC 2710).

use super::group_record::{self, GroupQuery, GroupRecord};
use super::{WireError, array, be16, header_bytes, icmpv6};
use core::net::Ipv6Addr;

/// ICMPv6 type of a query of either version.
pub const QUERY: u8 = 130;
/// ICMPv6 type of a version 1 report.
pub const REPORT_V1: u8 = 131;
/// ICMPv6 type of a version 1 "done" message.
pub const DONE: u8 = 132;
/// ICMPv6 type of a version 2 report.
pub const REPORT: u8 = 143;

/// The group of all MLDv2-capable routers, to which reports are sent (RFC 3810 §5.2.14).
pub const ALL_MLDV2_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);
/// The group of all routers, to which "done" messages are sent (RFC 2710 §5).
pub const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

/// Length in bytes of the messages of version 1.
pub const MESSAGE_LEN: usize = 24;

/// Writes a report with its checksum and returns its length. The packet must have hop limit 1, a link-local
/// or unspecified source and a router alert (RFC 3810 §5): see
/// [`ipv6::emit_router_alert`](super::ipv6::emit_router_alert).
///
/// # Panics
/// If `out` is shorter than [`group_record::report_len`] of the records.
pub fn emit_report(records: &[GroupRecord], src: Ipv6Addr, dst: Ipv6Addr, out: &mut [u8]) -> usize {
    let len = group_record::emit_report(REPORT, records, out);
    icmpv6::complete_checksum(src, dst, &mut out[..len]);
    len
}

/// Writes a message of version 1 about a group, and returns its length.
///
/// # Panics
/// If `out` is shorter than [`MESSAGE_LEN`].
pub fn emit_message(kind: u8, group: Ipv6Addr, src: Ipv6Addr, dst: Ipv6Addr, out: &mut [u8]) -> usize {
    out[..8].copy_from_slice(&[kind, 0, 0, 0, 0, 0, 0, 0]);
    out[8..MESSAGE_LEN].copy_from_slice(&group.octets());
    icmpv6::complete_checksum(src, dst, &mut out[..MESSAGE_LEN]);
    MESSAGE_LEN
}

/// Parses a query whose checksum has been verified. `hop_limit` and `src` are those of its packet.
///
/// # Errors
/// `BadValue` for a source address that is not link-local, a hop limit other than 1 (RFC 3810 §6.2), or a
/// group that is not a multicast address; `Truncated`, `BadLength` (RFC 3810 §8.1), also if the query ends
/// within its sources; `Unsupported` if the message is not a query.
pub fn parse_query(message: &[u8], src: Ipv6Addr, hop_limit: u8) -> Result<GroupQuery, WireError> {
    let bytes = header_bytes::<MESSAGE_LEN>(message)?;
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
    let query = GroupQuery {
        max_response_ms: code.into(),
        group: (!group.is_unspecified()).then_some(group.into()),
        sources: Vec::new(),
        version: 1,
        robustness: 0,
        interval_seconds: 0,
    };
    let extension: &[u8; 4] = match message.get(MESSAGE_LEN..) {
        None | Some([]) => return Ok(query),
        Some(rest) => rest.first_chunk().ok_or(WireError::BadLength)?,
    };
    let count = usize::from(be16(extension, 2));
    let sources = message.get(28..28 + 16 * count).ok_or(WireError::BadLength)?;
    let (sources, _) = sources.as_chunks::<16>();
    Ok(GroupQuery {
        // RFC 3810 §5.1.3: long delays are floating-point numbers.
        max_response_ms: if code < 0x8000 {
            code.into()
        } else {
            (u32::from(code & 0x0fff) | 0x1000) << (((code >> 12) & 7) + 3)
        },
        sources: sources.iter().map(|octets| Ipv6Addr::from_octets(*octets).into()).collect(),
        version: 2,
        robustness: extension[0] & 7,
        interval_seconds: group_record::decode_float_8(extension[1]),
        ..query
    })
}

/// Returns the group that a version 1 report of another host is about; `None` if the message is too short or
/// of another type. The checksum has been verified.
pub fn parse_report_v1(message: &[u8]) -> Option<Ipv6Addr> {
    let bytes: &[u8; MESSAGE_LEN] = message.first_chunk()?;
    (bytes[0] == REPORT_V1).then(|| Ipv6Addr::from_octets(array(bytes, 8)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::group_record::RecordType;

    const HOST: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    const GROUP: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 1);

    fn record(kind: RecordType, group: Ipv6Addr) -> GroupRecord {
        GroupRecord { kind, group: group.into(), sources: Vec::new() }
    }

    #[test]
    fn report_lists_its_records() {
        let records = [
            record(RecordType::ChangeToExcludeMode, GROUP),
            GroupRecord {
                sources: vec![HOST.into()],
                ..record(RecordType::BlockOldSources, ALL_MLDV2_ROUTERS)
            },
        ];
        let mut out = [0xee; 80];
        let len = emit_report(&records, HOST, ALL_MLDV2_ROUTERS, &mut out);
        assert_eq!((len, group_record::report_len(&records)), (64, 64));
        assert_eq!((out[0], out[1], &out[4..12]), (143, 0, &[0, 0, 0, 2, 4, 0, 0, 0][..]));
        assert_eq!(out[12..28], GROUP.octets());
        assert_eq!(out[28..32], [6, 0, 0, 1]);
        assert_eq!(out[48..64], HOST.octets());
        let parsed = icmpv6::Message::parse(&out[..len], HOST, ALL_MLDV2_ROUTERS).unwrap();
        assert!(matches!(parsed, icmpv6::Message::Other { kind: 143, .. }));
        emit_message(REPORT_V1, GROUP, HOST, GROUP, &mut out);
        assert_eq!(parse_report_v1(&out[..MESSAGE_LEN]), Some(GROUP));
        assert_eq!((parse_report_v1(&out[..23]), parse_report_v1(&[0; 24])), (None, None));
    }

    #[test]
    fn query_is_parsed_in_both_versions() {
        let mut message = [0; 44];
        message[0] = QUERY;
        message[4..6].copy_from_slice(&10_000u16.to_be_bytes());
        let general = GroupQuery {
            max_response_ms: 10_000,
            group: None,
            sources: Vec::new(),
            version: 2,
            robustness: 0,
            interval_seconds: 0,
        };
        assert_eq!(parse_query(&message[..28], HOST, 1), Ok(general.clone()));
        assert_eq!(parse_query(&message[..24], HOST, 1), Ok(GroupQuery { version: 1, ..general.clone() }));
        message[8..24].copy_from_slice(&GROUP.octets());
        (message[4], message[5]) = (0xff, 0xff);
        message[24..28].copy_from_slice(&[0x0a, 0x80, 0, 1]);
        message[28..].copy_from_slice(&HOST.octets());
        let slow = GroupQuery {
            max_response_ms: 0x1fff << 10,
            group: Some(GROUP.into()),
            sources: vec![HOST.into()],
            robustness: 2,
            interval_seconds: 128,
            ..general
        };
        assert_eq!(parse_query(&message, HOST, 1), Ok(slow));
        assert_eq!(parse_query(&message[..43], HOST, 1), Err(WireError::BadLength));
    }

    #[test]
    fn invalid_query_source_or_group_is_rejected() {
        let mut message = [0; 28];
        message[0] = QUERY;
        assert_eq!(parse_query(&message, HOST, 2), Err(WireError::BadValue));
        assert_eq!(parse_query(&message, Ipv6Addr::UNSPECIFIED, 1), Err(WireError::BadValue));
        assert_eq!(parse_query(&message[..23], HOST, 1), Err(WireError::Truncated));
        assert_eq!(parse_query(&message[..26], HOST, 1), Err(WireError::BadLength));
        message[8..24].copy_from_slice(&HOST.octets());
        assert_eq!(parse_query(&message, HOST, 1), Err(WireError::BadValue));
    }
}
