//! The control channel: a SEQPACKET socket that carries messages, each with at most one file descriptor.

use super::message::{ControlMessage, MESSAGE_BYTES, MessageError};
use rustix::cmsg_space;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Largest number of descriptors that are received with a message; the kernel drops further ones. More than
/// the one that the protocol allows, so that a violation is detected.
const DESCRIPTORS_MAX: usize = 3;

/// One end of a connected socket.
#[derive(Debug)]
pub(super) struct ControlChannel(OwnedFd);

/// Result of [`ControlChannel::receive`].
#[derive(Debug)]
pub(super) enum ChannelEvent {
    Message(ControlMessage, Option<OwnedFd>),
    /// No message is waiting.
    Empty,
    /// The peer has closed the connection.
    Closed,
    /// The bytes received are no message of the protocol; the text gives the reason.
    Malformed(String),
}

impl ControlChannel {
    /// Wraps a nonblocking socket.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// Sends a message. A full socket buffer is an error like a closed connection: the peer has left too many
    /// messages unread.
    pub(super) fn send(&self, message: &ControlMessage, descriptor: Option<&OwnedFd>) -> io::Result<()> {
        let bytes = message.encode();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = descriptor.into_iter().map(AsFd::as_fd).collect();
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags)?;
        Ok(())
    }

    pub(super) fn receive(&self) -> ChannelEvent {
        // One byte more than a message, so that a longer message is detected.
        let mut bytes = [0; MESSAGE_BYTES + 1];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return ChannelEvent::Empty,
            Err(_) => return ChannelEvent::Closed,
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if received.bytes == 0 {
            return ChannelEvent::Closed;
        }
        if descriptors.len() > 1 || received.flags.contains(ReturnFlags::CTRUNC) {
            return ChannelEvent::Malformed("more than one descriptor".into());
        }
        match ControlMessage::decode(&bytes[..received.bytes]) {
            Ok(message) => ChannelEvent::Message(message, descriptors.pop()),
            Err(MessageError::Length(_)) => ChannelEvent::Malformed("message of wrong length".into()),
            Err(MessageError::Type(_)) => ChannelEvent::Malformed("message of an unknown type".into()),
        }
    }
}

#[cfg(all(test, not(loom)))]
pub(super) mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, send, socketpair};

    pub(in crate::memif) fn pair() -> (ControlChannel, ControlChannel) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("two sockets");
        (ControlChannel(a), ControlChannel(b))
    }

    #[test]
    fn messages_arrive_with_their_descriptor() {
        let (a, b) = pair();
        assert!(matches!(b.receive(), ChannelEvent::Empty));
        let region = ControlMessage::AddRegion { index: 0, size: 5 };
        let fd = rustix::pipe::pipe().expect("a pipe").0;
        a.send(&region, Some(&fd)).expect("socket space");
        a.send(&ControlMessage::Ack, None).expect("socket space");
        assert!(matches!(b.receive(), ChannelEvent::Message(message, Some(_)) if message == region));
        assert!(matches!(b.receive(), ChannelEvent::Message(ControlMessage::Ack, None)));
        drop(a);
        assert!(matches!(b.receive(), ChannelEvent::Closed));
        assert!(b.send(&ControlMessage::Ack, None).is_err(), "SIGPIPE is not raised");
    }

    #[test]
    fn invalid_packets_are_malformed() {
        let (a, b) = pair();
        for len in [1, 127, 129, 4000] {
            send(&a.0, &vec![1; len], SendFlags::empty()).expect("socket space");
            assert!(matches!(b.receive(), ChannelEvent::Malformed(_)), "{len}");
        }
        let fds: Vec<_> = (0..5).map(|_| rustix::pipe::pipe().expect("a pipe").0).collect();
        for count in [2, 5] {
            let fds: Vec<_> = fds[..count].iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(5))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let bytes = ControlMessage::Ack.encode();
            sendmsg(&a.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).expect("socket space");
            assert!(matches!(b.receive(), ChannelEvent::Malformed(_)), "{count} descriptors");
        }
    }

    #[test]
    fn peer_with_a_full_socket_is_disconnected() {
        let (a, _b) = pair();
        assert!((0..100_000).any(|_| a.send(&ControlMessage::Ack, None).is_err()));
    }
}
