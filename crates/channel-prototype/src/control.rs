//! Messages between a client and the stack: sequenced packets of 16 bytes, with descriptors beside them.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// What a message is about; `a` and `b` are its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Client: I am here. Stack: your number is `a`; with the region, the stack's event descriptor and yours.
    Attach,
    /// Client: a new socket, please. Stack: it is `a`.
    Open,
    /// Client: a child is about to be; the descriptor is the stack's end of its connection. `a`: 0 if it gets all sockets of mine,
    /// 1 if those of the list `b` (a bit each).
    Fork,
    /// Client: I am about to become another program that keeps the sockets in the list `b`; if the descriptor hangs up, I did.
    Exec,
    /// Client: socket `a` has a descriptor whose other end this is, and whose cookie is `b`.
    Share,
    /// Client: I was given a descriptor with cookie `b`. Stack: that is socket `a`.
    Resolve,
    /// Client: how is socket `a`? Stack: held by `a`, generation `b`; 0 if it is free.
    Status,
    /// Client: let `a` connections come in.
    Incoming,
    /// Stack: no.
    Refused,
}

const KINDS: [Kind; 9] = [
    Kind::Attach,
    Kind::Open,
    Kind::Fork,
    Kind::Exec,
    Kind::Share,
    Kind::Resolve,
    Kind::Status,
    Kind::Incoming,
    Kind::Refused,
];

/// One message.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub kind: Kind,
    pub a: u32,
    pub b: u64,
}

impl Message {
    pub fn new(kind: Kind, a: u32, b: u64) -> Self {
        Self { kind, a, b }
    }
}

/// Two ends of a connection.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// The kernel's number for a socket, the same for each descriptor of it in any process.
pub fn cookie(fd: impl AsFd) -> io::Result<u64> {
    Ok(sockopt::socket_cookie(fd)?)
}

pub fn send(to: impl AsFd, message: Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&(message.kind as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&message.a.to_ne_bytes());
    bytes[8..].copy_from_slice(&message.b.to_ne_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)), "there is room for three");
    }
    retry_on_intr(|| sendmsg(&to, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// `None` if the other end is gone, or sent what is no message.
pub fn receive(from: impl AsFd, flags: RecvFlags) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let mut bytes = [0; 16];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        match recvmsg(&from, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let Some(kind) = KINDS.get(word(0) as usize).filter(|_| got.bytes == bytes.len()) else {
        return Ok(None);
    };
    let b = u64::from_ne_bytes(bytes[8..].try_into().expect("eight bytes"));
    Ok(Some((Message::new(*kind, word(4), b), fds)))
}
