//! Headers of SYNs that are saved for the application that accepts the connection (`TCP_SAVE_SYN`). They are
//! rare, so they are stored apart from the connections.

use super::Tcp;
use super::input::Segment;
use crate::device::{RxBurst, RxFrame};
use crate::handle::Conn;
use crate::options::SaveSyn;
use crate::wire::be16;
use crate::wire::tcp::TcpHeader;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of an Ethernet header without VLAN tag, and of a tag.
const ETHERNET: usize = 14;
const TAG: usize = 4;

/// Bytes that are saved of one SYN at most. The headers of IPv4 and TCP with all their options and the link
/// header have at most 142 bytes; those of IPv6 may be as long as a frame.
// limit: bytes of a saved SYN
const BYTES_MAX: usize = 256;

/// Headers of SYNs by the index of their connection, at most one for each connection.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct SavedSyns(BTreeMap<u32, Box<[u8]>>);

impl SavedSyns {
    /// Removes the headers of a connection that has ended.
    #[inline]
    pub fn remove(&mut self, idx: u32) {
        if !self.0.is_empty() {
            self.remove_cold(idx);
        }
    }

    /// Out of line, because few listeners save SYNs.
    #[cold]
    #[inline(never)]
    fn remove_cold(&mut self, idx: u32) {
        self.0.remove(&idx);
    }
}

impl Tcp {
    /// Saves the headers of a SYN that has created a connection. A SYN that was reassembled from fragments is
    /// not saved, nor one with more than [`BYTES_MAX`] bytes of headers.
    #[cold]
    #[inline(never)]
    pub(super) fn save_syn(&mut self, idx: u32, mode: SaveSyn, seg: &Segment<'_>, burst: &RxBurst<'_>) {
        let frame = seg.position.and_then(|position| {
            Some((burst.get(usize::from(position.frame))?, usize::try_from(position.start).ok()?))
        });
        let headers = frame.and_then(|(frame, end)| headers(frame, end, mode));
        if let Some(headers) = headers {
            self.saved_syns.0.insert(idx, headers.into());
        }
    }

    /// Returns the headers of the SYN that created a connection, if they were saved.
    pub fn saved_syn(&self, conn: Conn) -> Option<&[u8]> {
        self.saved_syns.0.get(&self.index(conn)?).map(Box::as_ref)
    }

    /// Removes the headers after they were read: they can be read only once.
    pub fn drop_saved_syn(&mut self, conn: Conn) {
        if let Some(idx) = self.index(conn) {
            self.saved_syns.remove(idx);
        }
    }
}

/// Returns the bytes from the IP header, or the link header, to the end of the TCP header.
fn headers<'b>(frame: &RxFrame<'b>, end: usize, mode: SaveSyn) -> Option<&'b [u8]> {
    let start = match mode {
        SaveSyn::Off => return None,
        SaveSyn::Frame => 0,
        SaveSyn::Packet => {
            let mut start = ETHERNET;
            while matches!(be16(frame.bytes.get(start - 2..start)?.first_chunk::<2>()?, 0), 0x8100 | 0x88a8) {
                start += TAG;
            }
            start
        }
    };
    frame.bytes.get(start..end).filter(|headers| (TcpHeader::LEN + 1..=BYTES_MAX).contains(&headers.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // limit: bytes of a saved SYN
    #[test]
    fn headers_are_saved_from_requested_layer_within_bounds() {
        let mut bytes = [0; 400];
        bytes[12..14].copy_from_slice(&[0x81, 0x00]);
        let frame = RxFrame::new(&bytes);
        let saved_len = |end, mode| headers(&frame, end, mode).map(<[u8]>::len);
        assert_eq!(saved_len(18 + 60, SaveSyn::Off), None);
        assert_eq!(saved_len(18 + 60, SaveSyn::Frame), Some(78));
        assert_eq!(saved_len(18 + 60, SaveSyn::Packet), Some(60), "after the tag");
        assert_eq!(saved_len(BYTES_MAX, SaveSyn::Frame), Some(BYTES_MAX));
        assert_eq!(saved_len(BYTES_MAX + 1, SaveSyn::Frame), None);
        assert_eq!(saved_len(18 + BYTES_MAX, SaveSyn::Packet), Some(BYTES_MAX));
        assert_eq!(saved_len(18 + BYTES_MAX + 1, SaveSyn::Packet), None);
        assert_eq!(saved_len(401, SaveSyn::Packet), None, "longer than the frame");
    }
}
