//! Datagrams under construction: `UDP_CORK` and `MSG_MORE`, as `udp_sendmsg` and `ip_append_data` implement
//! them.

use super::{DATAGRAM_BYTES_MAX, UdpMessage};
use crate::Ops;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::lock::LockGuard;
use crate::process::ProcessState;
use crate::sleep::Timeout;
use rustix::io::Errno;
use std::io::IoSlice;

/// A datagram under construction.
#[derive(Clone, Debug)]
pub(crate) struct CorkedDatagram {
    message: UdpMessage,
    bytes: Vec<u8>,
}

impl Ops {
    /// Appends to the datagram, and sends it unless `corks` says that more follows.
    pub(super) fn append(
        &self,
        mut lane: LockGuard<'_>,
        file: FileId,
        buffers: &[IoSlice<'_>],
        corks: bool,
        patience: Timeout,
    ) -> Result<usize, Errno> {
        let outbox = lane.files.socket(file)?.udp_send.get_or_insert_default();
        let Some(corked) = &mut outbox.corked else { return Err(Errno::AGAIN) };
        let before = corked.bytes.len();
        buffers.iter().for_each(|buffer| corked.bytes.extend_from_slice(buffer));
        let added = corked.bytes.len() - before;
        if corked.bytes.len() > DATAGRAM_BYTES_MAX {
            // The whole datagram is discarded (`udp_flush_pending_frames`).
            outbox.corked = None;
            return Err(Errno::MSGSIZE);
        }
        if corks {
            return Ok(added);
        }
        self.send_corked(lane, file, patience).map(|()| added)
    }

    /// Sends the datagram, if there is one (`udp_push_pending_frames`).
    pub(crate) fn send_corked(
        &self,
        mut lane: LockGuard<'_>,
        file: FileId,
        patience: Timeout,
    ) -> Result<(), Errno> {
        let socket = lane.files.socket(file)?;
        let corked = socket.udp_send.as_mut().and_then(|outbox| outbox.corked.take());
        let (Some(CorkedDatagram { message: letter, bytes }), SocketRole::Udp(dgram)) = (corked, socket.role)
        else {
            return Ok(());
        };
        self.send_datagram(lane, file, dgram, letter, &[IoSlice::new(&bytes)], patience).map(|_| ())
    }
}

impl ProcessState {
    /// Starts a datagram.
    pub(super) fn cork(
        &mut self,
        file: FileId,
        letter: UdpMessage,
        buffers: &[IoSlice<'_>],
    ) -> Result<(), Errno> {
        let bytes = buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
        let outbox = self.files.socket(file)?.udp_send.get_or_insert_default();
        outbox.corked = Some(CorkedDatagram { message: letter, bytes });
        Ok(())
    }
}
