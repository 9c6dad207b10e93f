//! Transmission of control frames (ARP, NDP, MLD), whose destination MAC address is known, so that they are
//! never queued.

use crate::device::TxMeta;
use crate::handle::LinkId;
use crate::ip::Network;
use crate::wire::MacAddr;
use crate::wire::ethernet::EtherType;

impl Network {
    /// Sends one frame with up to `len_max` bytes after the link header; `write` fills them in and returns
    /// their number. Returns false if the device is full: the frame is lost unless the caller tries again.
    pub(crate) fn send_control(
        &mut self,
        link: LinkId,
        dst: MacAddr,
        ethertype: EtherType,
        len_max: usize,
        write: impl FnOnce(&mut [u8]) -> usize,
    ) -> bool {
        let link = &self.links[usize::from(link.0)];
        let header = link.header(dst, ethertype);
        let header_len = usize::from(header.len);
        let port = &mut self.ports[usize::from(link.port.0)];
        let len = header_len + len_max;
        let Some(buffer) = port.tx.reserve(len).and_then(|buffer| buffer.get_mut(..len)) else {
            self.stats.tx_control_dropped += 1;
            return false;
        };
        header.emit(buffer);
        let len = header_len + write(&mut buffer[header_len..]);
        port.commit(len, TxMeta::default());
        true
    }
}
