//! Packets with file descriptors over `AF_UNIX` sockets of type `SOCK_SEQPACKET`.

use super::message::{DESCRIPTORS_MAX, MESSAGE_BYTES_MAX};
use rustix::cmsg_space;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Result of [`receive`].
#[derive(Debug)]
pub(super) enum RecvResult {
    /// A packet: its length in bytes, and its descriptors.
    Packet(usize, Vec<OwnedFd>),
    /// No packet is waiting.
    WouldBlock,
    /// The other end is closed, or nothing can be received for another reason.
    Closed,
    /// The packet is longer, or has more descriptors, than a message may have.
    Oversized,
    /// This process has no number left for the descriptors of the packet, which are lost. The length of the
    /// packet in bytes.
    NoDescriptors(usize),
}

/// Creates a connected pair of sockets.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Bytes of a receive buffer: more than the longest message, so that an oversized packet is noticed, and so
/// many that allocators map fresh pages for it. Pages that no message reaches are never touched, which saves
/// time at the start of a process and memory in each.
const BUFFER_BYTES: usize = 256 << 10;
const _: () = assert!(BUFFER_BYTES > MESSAGE_BYTES_MAX);

/// Returns a buffer for a message.
pub(super) fn buffer() -> Vec<u8> {
    vec![0; BUFFER_BYTES]
}

/// Sends a packet without waiting. Fails if the receive queue of the other end is full, as it does if the
/// other end is closed.
pub(super) fn send(to: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Receives a packet without waiting.
pub(super) fn receive(from: impl AsFd, buffer: &mut [u8]) -> RecvResult {
    // Space for more descriptors than a message may have, so that too many are noticed.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2 * DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = match recvmsg(from, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return RecvResult::WouldBlock,
        Err(_) => return RecvResult::Closed,
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let is_oversized = received.flags.contains(ReturnFlags::TRUNC);
    if is_oversized || received.bytes > MESSAGE_BYTES_MAX || descriptors.len() > DESCRIPTORS_MAX {
        return RecvResult::Oversized;
    }
    // There was space for the descriptors, so this process has no number left for them.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return RecvResult::NoDescriptors(received.bytes);
    }
    // No message is empty: 0 bytes are the end of the connection.
    if received.bytes == 0 { RecvResult::Closed } else { RecvResult::Packet(received.bytes, descriptors) }
}
