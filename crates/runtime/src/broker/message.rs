//! What is said at the door. Each message is one packet: a number that the answer repeats, then what is asked or answered.

use super::codec::{Codec, codec_enum, codec_struct};
use crate::channel::SocketId;
use crate::channel::control::{ChannelReply, ChannelRequest};
use core::fmt;

/// The version of everything in this file and of the region. Both ends must have the same: they are parts of one installation.
pub const PROTOCOL_VERSION: u32 = 8;
/// First word of a first message, in every version.
pub(super) const MAGIC: u32 = 0x6c65_6e67;
/// First word of somebody who wants no place yet. No answer, unless it is refused; what follows are [descriptors](guest).
pub(super) const MAGIC_UNATTACHED: u32 = 0x7473_6775;
/// First word of a child, on the connection that its parent has announced. No answer, unless it is refused: its parent has been told what it needs. The descriptor is the process.
pub(super) const MAGIC_CHILD: u32 = 0x646c_6863;
/// What a guest's messages are about, each with a descriptor: their one byte. There is no answer.
pub(super) mod unattached {
    /// The connection of a process that comes in, as the guest's user.
    pub const ATTACH: u8 = 0;
    /// The connection of somebody who comes after the guest, as the user who has made it.
    pub const SUCCESSOR: u8 = 1;
    /// The process that has the guest's connection now.
    pub const IDENTIFY: u8 = 2;
}
/// Bytes of the longest message: a datagram with all that stands around it.
pub(super) const MESSAGE_BYTES_MAX: usize = 66 << 10;
/// Descriptors with a message at the most: the region, and what wakes the stack.
pub(super) const DESCRIPTORS_MAX: usize = 2;
/// Bytes of a domain's name.
pub(super) const DOMAIN_NAME_BYTES_MAX: usize = 64;
/// Things that may be named in one message.
pub(super) const SOCKETS_PER_MESSAGE_MAX: usize = 4096;
/// Bytes of a note beside a descriptor.
pub(super) const METADATA_BYTES_MAX: usize = 4096;

/// The first message of a connection. It stays as it is in all versions, so that a refusal can always be understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub magic: u32,
    pub version: u32,
    /// The domain to join, by the name that its user gave it. Ignored on a connection that belongs to a domain already.
    pub domain: String,
}
codec_struct!(Hello { magic, version, domain });

/// What holds for the programs on a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StackInfo {
    /// 127.0.0.0/8 and ::1 are the stack's, not the kernel's.
    pub loopback: bool,
    /// Ports from this one on can be bound without `CAP_NET_BIND_SERVICE`.
    pub unprivileged_port_start: u16,
    /// The CPU of each shard; [`NOT_PINNED`] of one that has none of its own. Empty: nothing is known.
    pub shard_cpus: Vec<u16>,
}
codec_struct!(StackInfo { loopback, unprivileged_port_start, shard_cpus });

/// No CPU.
pub const NOT_PINNED: u16 = u16::MAX;

/// A thing on one of the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalSocketId {
    /// The shard.
    pub shard: u16,
    /// What it is there.
    pub id: SocketId,
}
codec_struct!(GlobalSocketId { shard, id });

/// What a process asks the door for.
#[derive(Clone, Debug)]
pub(super) enum ControlRequest {
    /// The region of a shard, and what wakes it: as descriptors.
    Attach(u16),
    /// Something of a shard.
    Shard(u16, ChannelRequest),
    /// A child is about to be, which will hold all that this process holds. The descriptor is the stack's end of its connection.
    Fork,
    /// Another program is about to be started, which keeps these things. The descriptor is the stack's end of its connection.
    Exec(Vec<GlobalSocketId>),
    /// A descriptor with this cookie holds these things from now on, and whoever receives it is told the note. Beside this message: its other end.
    Share(u64, Vec<GlobalSocketId>, Vec<u8>),
    /// A descriptor with this cookie came: what does it hold?
    Resolve(u64),
    /// Another program is about to be started, which keeps nothing and may not be able to open the door. The descriptor is the stack's end of its connection, and it comes as the user
    /// who has made it.
    Successor,
}
codec_enum!(ControlRequest {
    0 => Attach(shard), 1 => Shard(shard, request), 2 => Fork, 3 => Exec(kept), 4 => Share(cookie, sockets, metadata), 5 => Resolve(cookie),
    6 => Successor,
});

/// The answer.
#[derive(Debug)]
pub(super) enum ControlReply {
    /// To [`Hello`]: how many shards there are, and what holds for programs here. Beside it: what wakes this process.
    Welcome(u16, StackInfo),
    /// To [`Ask::Attach`]: the number of the client there.
    Attached(u32),
    /// To [`Ask::Shard`].
    Reply(ChannelReply),
    /// It is done.
    Done,
    /// To [`Ask::Fork`]: the numbers of the child's clients on the shards. Beside it: what wakes the child.
    Forked(Vec<u32>),
    /// To [`Ask::Resolve`], with the note of whoever shared them.
    Resolved(Vec<GlobalSocketId>, Vec<u8>),
    /// No, and why.
    Refused(Refusal),
}
codec_enum!(ControlReply {
    0 => Welcome(shards, terms), 1 => Attached(request_id), 2 => Reply(reply), 3 => Done, 4 => Resolved(sockets, metadata), 5 => Refused(why),
    6 => Forked(seats),
});

/// Why the door does not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The stack is of another version: this one.
    Version(u32),
    /// The user is neither the stack's nor root, and nobody who is inside has brought it along.
    User,
    /// As many applications of the domain as `channel.clients_max` are there.
    Clients,
    /// As many domains as `channel.domains_max` are there.
    Domains,
    /// As many descriptors between processes as there may be are out.
    ProxyDescriptors,
    /// There is no such shard, connection or descriptor, or the process does not hold it.
    Unknown,
    /// The message could not be understood.
    Malformed,
    /// The shard has ended.
    ShardEnded,
    /// Ports below this one are not for every user.
    Port(u16),
    /// As many processes of the user as there may be are at the door and have not come in.
    UserLimit,
}
codec_enum!(Refusal {
    0 => Version(version), 1 => User, 2 => Clients, 3 => Domains, 4 => ProxyDescriptors, 5 => Unknown, 6 => Malformed, 7 => ShardEnded, 8 => Port(start),
    9 => UserLimit,
});

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => {
                write!(
                    f,
                    "it speaks version {version} of the channel, and this program version {PROTOCOL_VERSION}"
                )
            }
            Self::User => f.write_str("it serves its own user, and what programs on it start"),
            Self::Clients => f.write_str("as many applications as channel.clients_max are attached"),
            Self::Domains => f.write_str("as many domains as channel.domains_max are there"),
            Self::ProxyDescriptors => f.write_str("too many sockets are on their way between processes"),
            Self::Unknown => f.write_str("there is no such connection, or this process does not hold it"),
            Self::Malformed => f.write_str("the message could not be understood"),
            Self::ShardEnded => f.write_str("the shard has ended"),
            Self::UserLimit => f.write_str("as many processes of this user as there may be wait at its door"),
            Self::Port(start) => write!(f, "ports below {start} are for the stack's own user"),
        }
    }
}

impl std::error::Error for Refusal {}

/// A message with its number.
pub(super) fn encode(request_id: u32, message: &impl Codec) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(128);
    request_id.encode(&mut bytes);
    message.encode(&mut bytes);
    bytes
}

/// The number of a message, and what it says if that can be understood.
pub(super) fn decode<T: Codec>(bytes: &[u8]) -> (u32, Option<T>) {
    let mut from = bytes;
    let Some(request_id) = u32::decode(&mut from) else { return (0, None) };
    let message = T::decode(&mut from).filter(|_| from.is_empty());
    (request_id, message)
}

/// What fuzzing does with a message: decodes it as each side would. Whatever can be decoded says the same when it is encoded and decoded again. Returns what
/// it asks a shard for, if it does.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> Option<ChannelRequest> {
    fn round_trip<T: Codec + fmt::Debug>(bytes: &[u8]) {
        let (request_id, Some(message)) = decode::<T>(bytes) else { return };
        let encoded = encode(request_id, &message);
        let (second_id, decoded) = decode::<T>(&encoded);
        assert_eq!(second_id, request_id);
        assert_eq!(format!("{decoded:?}"), format!("{:?}", Some(&message)));
    }
    round_trip::<Hello>(bytes);
    round_trip::<ControlRequest>(bytes);
    round_trip::<ControlReply>(bytes);
    match decode::<ControlRequest>(bytes).1 {
        Some(ControlRequest::Shard(_, request)) => Some(request),
        _ => None,
    }
}
