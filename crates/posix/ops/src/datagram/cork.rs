//! Datagrams under construction: `UDP_CORK` and `MSG_MORE`, as `udp_sendmsg` and `ip_append_data` implement
//! them.

use super::{DATAGRAM_BYTES_MAX, UdpMessage};
use crate::Ops;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::lock::LockGuard;
use crate::process::ProcessState;
use crate::sleep::Timeout;
use crate::tx_stamps::StampRequest;
use crate::user_memory::{UserSlice, efault};
use ginnel::channel::gather;
use rustix::io::Errno;

/// A datagram under construction.
#[derive(Clone, Debug)]
pub(crate) struct CorkedDatagram {
    message: UdpMessage,
    bytes: Vec<u8>,
    /// The timestamps that the program wanted when it began the datagram.
    stamp: Option<StampRequest>,
}

impl CorkedDatagram {
    /// Returns whether the destination is an IPv4 address.
    pub(super) fn is_ipv4(&self) -> bool {
        self.message.remote.is_ipv4()
    }
}

impl Ops {
    /// Appends to the datagram, and sends it unless `corking` says that more follows.
    pub(super) fn append(
        &self,
        mut state: LockGuard<'_>,
        file: FileId,
        buffers: &[UserSlice<'_>],
        corking: bool,
        timeout: Timeout,
    ) -> Result<usize, Errno> {
        let udp_send = state.files.socket(file)?.udp_send.get_or_insert_default();
        let Some(corked) = &mut udp_send.corked else { return Err(Errno::AGAIN) };
        let before = corked.bytes.len();
        if let Err(fault) = gather(buffers, usize::MAX, &mut corked.bytes) {
            // The whole datagram is discarded (`udp_flush_pending_frames`).
            udp_send.corked = None;
            return Err(efault(fault));
        }
        let added = corked.bytes.len() - before;
        if corked.bytes.len() > DATAGRAM_BYTES_MAX {
            udp_send.corked = None;
            return Err(Errno::MSGSIZE);
        }
        if corking {
            return Ok(added);
        }
        self.send_corked(state, file, timeout).map(|()| added)
    }

    /// Sends the datagram, if there is one (`udp_push_pending_frames`).
    pub(crate) fn send_corked(
        &self,
        mut state: LockGuard<'_>,
        file: FileId,
        timeout: Timeout,
    ) -> Result<(), Errno> {
        let socket = state.files.socket(file)?;
        let corked = socket.udp_send.as_mut().and_then(|udp_send| udp_send.corked.take());
        let (Some(CorkedDatagram { message, bytes, stamp }), SocketRole::Udp(_)) = (corked, socket.role)
        else {
            return Ok(());
        };
        if stamp.is_some() || socket.udp_send.as_ref().is_some_and(|udp_send| udp_send.tx_stamps.is_on) {
            state.set_corked_stamp(file, stamp);
        }
        self.send_datagram(state, file, message, &[UserSlice::new(&bytes)], timeout).map(|_| ())
    }
}

impl ProcessState {
    /// Starts a datagram.
    pub(super) fn cork(
        &mut self,
        file: FileId,
        message: UdpMessage,
        buffers: &[UserSlice<'_>],
    ) -> Result<(), Errno> {
        let mut bytes = Vec::new();
        let gathered = gather(buffers, usize::MAX, &mut bytes).map_err(efault);
        let stamp = self.take_stamp_request(file);
        if let Err(error) = gathered {
            stamp.into_iter().for_each(|stamp| self.return_stamp_request(file, stamp));
            return Err(error);
        }
        let udp_send = self.files.socket(file)?.udp_send.get_or_insert_default();
        udp_send.corked = Some(CorkedDatagram { message, bytes, stamp });
        Ok(())
    }
}
