//! Group records of membership reports: IGMPv3 (RFC 3376 §4.2.4) and MLDv2 (RFC 3810 §5.2) have them in one
//! layout, which differs in the length of addresses only. Both encode the interval of a query alike, too.

use core::net::IpAddr;

/// The type of a group record (RFC 3376 §4.2.12, RFC 3810 §5.2.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecordType {
    /// The group is in INCLUDE mode with these sources; an answer to a query (`MODE_IS_INCLUDE`).
    ModeIsInclude = 1,
    /// The group is in EXCLUDE mode with these sources; an answer to a query (`MODE_IS_EXCLUDE`).
    ModeIsExclude = 2,
    /// The group has changed to INCLUDE mode; without sources the host has left it
    /// (`CHANGE_TO_INCLUDE_MODE`).
    ChangeToIncludeMode = 3,
    /// The group has changed to EXCLUDE mode (`CHANGE_TO_EXCLUDE_MODE`).
    ChangeToExcludeMode = 4,
    /// Packets of these sources are received from now on, too (`ALLOW_NEW_SOURCES`).
    AllowNewSources = 5,
    /// Packets of these sources are not received any more (`BLOCK_OLD_SOURCES`).
    BlockOldSources = 6,
}

/// A group record of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRecord {
    /// The type of the record.
    pub kind: RecordType,
    /// The group.
    pub group: IpAddr,
    /// Sources, of the family of the group.
    pub sources: Vec<IpAddr>,
}

impl GroupRecord {
    /// Returns the length in bytes of a record with `sources` sources, for the family of `group`.
    pub const fn len_with(group: IpAddr, sources: usize) -> usize {
        let address = if group.is_ipv4() { 4 } else { 16 };
        4 + address * (1 + sources)
    }

    /// Returns the length of the record in bytes.
    pub fn encoded_len(&self) -> usize {
        Self::len_with(self.group, self.sources.len())
    }

    /// Writes the record without auxiliary data and returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than [`GroupRecord::encoded_len`].
    pub(super) fn emit(&self, out: &mut [u8]) -> usize {
        out[..2].copy_from_slice(&[self.kind as u8, 0]);
        // Cannot truncate: a report has fewer bytes than an IP packet.
        out[2..4].copy_from_slice(&(self.sources.len() as u16).to_be_bytes());
        let mut at = 4;
        for address in core::iter::once(&self.group).chain(&self.sources) {
            match address {
                IpAddr::V4(v4) => out[at..at + 4].copy_from_slice(&v4.octets()),
                IpAddr::V6(v6) => out[at..at + 16].copy_from_slice(&v6.octets()),
            }
            at += if address.is_ipv4() { 4 } else { 16 };
        }
        at
    }
}

/// Length in bytes of a report's header, of both protocols.
pub(super) const REPORT_HEADER_LEN: usize = 8;

/// Returns the length in bytes of a report with these records.
pub fn report_len(records: &[GroupRecord]) -> usize {
    REPORT_HEADER_LEN + records.iter().map(GroupRecord::encoded_len).sum::<usize>()
}

/// Writes a report of this type without its checksum, and returns its length.
pub(super) fn emit_report(kind: u8, records: &[GroupRecord], out: &mut [u8]) -> usize {
    out[..REPORT_HEADER_LEN].copy_from_slice(&[kind, 0, 0, 0, 0, 0, 0, 0]);
    // Cannot truncate: a report has fewer bytes than an IP packet.
    out[6..8].copy_from_slice(&(records.len() as u16).to_be_bytes());
    records.iter().fold(REPORT_HEADER_LEN, |at, record| at + record.emit(&mut out[at..]))
}

/// A query for group members, of either protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupQuery {
    /// The maximum response delay in milliseconds.
    pub max_response_ms: u32,
    /// The queried group; `None` queries all groups.
    pub group: Option<IpAddr>,
    /// The queried sources; none if the query is about all sources.
    pub sources: Vec<IpAddr>,
    /// The version of the querier's protocol: 1 to 3 for IGMP, 1 or 2 for MLD.
    pub version: u8,
    /// The querier's robustness variable; 0 if the query has none.
    pub robustness: u8,
    /// The querier's query interval in seconds; 0 if the query has none.
    pub interval_seconds: u32,
}

/// Decodes a number of eight bits that is a floating-point number from 128 on (RFC 3376 §4.1.1, §4.1.7;
/// RFC 3810 §5.1.9).
pub(super) fn decode_float_8(code: u8) -> u32 {
    if code < 128 { code.into() } else { (u32::from(code & 0x0f) | 0x10) << (((code >> 4) & 7) + 3) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_codes_are_floating_point_numbers() {
        assert_eq!([0, 100, 127, 128, 129, 0xff].map(decode_float_8), [0, 100, 127, 128, 136, 31_744]);
    }
}
