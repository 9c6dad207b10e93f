//! Messages between a process and the broker. Each message is one packet: an id, which the reply repeats,
//! then the request or reply.

use super::codec::{Codec, codec_enum, codec_struct};
use super::thread::PROXY_FDS_MAX;
use crate::channel::SocketId;
use crate::channel::control::{ChannelReply, ChannelRequest};
use core::fmt;
use ginnel_stack::tcp::config::CongestionControl;
use rustix::io::Errno;

/// Version of the messages, of the connection between the supervisor and the process of its shards, and of
/// the region's layout. Both ends belong to one installation, so they must have the same version.
pub const PROTOCOL_VERSION: u32 = 23;
/// Magic number of [`Hello`] of a process that attaches; the same in every version.
pub(super) const MAGIC: u32 = 0x6c65_6e67;
/// Magic number of [`Hello`] of a process that does not attach yet. It gets a reply only if it is refused.
/// The messages after it are those of [`unattached`].
pub(super) const MAGIC_UNATTACHED: u32 = 0x7473_6775;
/// Magic number of [`Hello`] of a child, on the connection that its parent announced. It gets a reply only if
/// it is refused, because its parent was told what the child needs. A pidfd of the child is attached.
pub(super) const MAGIC_CHILD: u32 = 0x646c_6863;
/// Magic number of [`Hello`] of a process that asks for an upgrade of the shards. Their new executable is
/// attached. The field `domain` says what is to happen to connections
/// ([`ConnectionPolicy`](super::ConnectionPolicy)). The only reply tells the result.
pub(super) const MAGIC_UPGRADE: u32 = 0x6465_7075;
/// Messages of an unattached process: one byte and a descriptor each. They get no reply.
pub(super) mod unattached {
    /// The descriptor is the broker's end of a connection for a process that attaches as the user of this
    /// connection.
    pub const ATTACH: u8 = 0;
    /// The descriptor is the broker's end of a connection for a successor program, which attaches as the user
    /// who created the socket pair.
    pub const SUCCESSOR: u8 = 1;
    /// The descriptor is a pidfd of the process that owns this connection now.
    pub const IDENTIFY: u8 = 2;
}
/// Length of the longest message in bytes: a datagram of maximal size and its header.
pub(super) const MESSAGE_BYTES_MAX: usize = 66 << 10;
/// Largest number of shards of a stack.
const SHARDS_MAX: usize = 64;
/// Largest number of descriptors of a message: the socket that wakes a child, and its memory for each shard.
pub(super) const DESCRIPTORS_MAX: usize = 1 + SHARDS_MAX;
/// Length of the longest domain name in bytes.
pub(super) const DOMAIN_NAME_BYTES_MAX: usize = 64;
/// Sockets that one message may name.
pub(super) const SOCKETS_PER_MESSAGE_MAX: usize = 4096;
/// Largest number of bytes of the metadata of a passed descriptor.
pub(super) const METADATA_BYTES_MAX: usize = 4096;

/// The first message of a connection. It is the same in all versions, so that every version can refuse every
/// other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub magic: u32,
    pub version: u32,
    /// Name of the domain to join. Ignored on a connection that belongs to a domain already.
    pub domain: String,
}
codec_struct!(Hello { magic, version, domain });

/// Properties of a stack that its programs need to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StackInfo {
    /// 127.0.0.0/8 and ::1 belong to the stack, not to the kernel.
    pub loopback: bool,
    /// Binding a port below this one requires `CAP_NET_BIND_SERVICE`.
    pub unprivileged_port_start: u16,
    /// The CPU of each shard, [`NOT_PINNED`] for a shard that is not pinned. Empty if the CPUs are not known.
    pub shard_cpus: Vec<u16>,
    /// The congestion control of connections whose socket has chosen none.
    pub congestion_control: CongestionControl,
}
codec_struct!(StackInfo { loopback, unprivileged_port_start, shard_cpus, congestion_control });

/// Marks a shard that is not pinned to a CPU.
pub const NOT_PINNED: u16 = u16::MAX;

/// A socket or listener of one of the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalSocketId {
    /// Index of the shard.
    pub shard: u16,
    /// The socket's id on that shard.
    pub id: SocketId,
}
codec_struct!(GlobalSocketId { shard, id });

/// The sockets that a proxy descriptor owns.
#[derive(Clone, Debug)]
pub(super) struct ProxyContents {
    pub sockets: Vec<GlobalSocketId>,
    /// Sent to each process that resolves the descriptor.
    pub metadata: Vec<u8>,
}
codec_struct!(ProxyContents { sockets, metadata });

/// A socket of a process on shards that have ended since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreviousSocket {
    /// How often the process has resumed since the id was valid: 1 for an id on the shards that ended last.
    pub resumes: u32,
    /// The id that the socket had there.
    pub id: SocketId,
}
codec_struct!(PreviousSocket { resumes, id });

/// A request of a process to the broker.
#[derive(Clone, Debug)]
pub(super) enum ControlRequest {
    /// Asks for the region of the shard with this index, the memory that the process shares with that shard
    /// alone, and the socket that wakes the shard, all as descriptors.
    Attach(u16),
    /// A request to the shard with this index.
    Shard(u16, ChannelRequest),
    /// The process is about to fork a child that owns all sockets of this process. The descriptor is the
    /// broker's end of the child's connection.
    Fork,
    /// The process is about to execute a program that owns these sockets. The descriptor is the broker's end
    /// of the program's connection.
    Exec(Vec<GlobalSocketId>),
    /// Creates a proxy descriptor: the descriptor with this cookie owns these sockets from now on; its
    /// receiver gets the metadata. The attached descriptor is its other end.
    Share(u64, ProxyContents),
    /// Asks for the sockets that the received descriptor with this cookie owns.
    Resolve(u64),
    /// The process is about to execute a program that owns none of its sockets and may not be able to open
    /// the broker's socket. The descriptor is the broker's end of the program's connection; the program
    /// attaches as the user who created the socket pair.
    Successor,
    /// The process has noticed that the shards' process is gone, and asks for clients of the next one. The
    /// reply is [`ControlReply::Welcome`]; [`ControlRequest::Attach`] follows for each shard.
    Resume,
    /// Opens a socket again on this shard, by the given request. If another process has opened the socket
    /// already, this process becomes an owner of it.
    Restore(u16, PreviousSocket, ChannelRequest),
}
codec_enum!(ControlRequest {
    0 => Attach(shard), 1 => Shard(shard, request), 2 => Fork, 3 => Exec(kept), 4 => Share(cookie, contents), 5 => Resolve(cookie),
    6 => Successor, 7 => Resume, 8 => Restore(shard, before, request),
});

/// A reply of the broker.
#[derive(Debug)]
pub(super) enum ControlReply {
    /// To [`Hello`] and [`ControlRequest::Resume`]: the number of shards and the properties of the stack. The
    /// attached descriptor wakes the process.
    Welcome(u16, StackInfo),
    /// To [`ControlRequest::Attach`]: the id of the client on that shard.
    Attached(u32),
    /// To [`ControlRequest::Shard`].
    Reply(ChannelReply),
    /// The request was carried out.
    Done,
    /// To [`ControlRequest::Fork`]: the ids of the child's clients, by shard. The first attached descriptor
    /// wakes the child; the others are the memory of its clients.
    Forked(Vec<u32>),
    /// To [`ControlRequest::Resolve`]: the sockets, and the metadata of the process that shared them.
    Resolved(ProxyContents),
    /// The request was refused.
    Refused(Refusal),
    /// To [`MAGIC_UPGRADE`]: the new executable runs the shards, which were away for this many milliseconds.
    /// Then the number of TCP connections that were kept, or why all connections were reset.
    Upgraded(u32, Result<u64, String>),
    /// To [`MAGIC_UPGRADE`]: the shards run the executable that they had, for this reason.
    NotUpgraded(String),
}
codec_enum!(ControlReply {
    0 => Welcome(shards, terms), 1 => Attached(request_id), 2 => Reply(reply), 3 => Done, 4 => Resolved(contents), 5 => Refused(why),
    6 => Forked(clients), 7 => Upgraded(milliseconds, connections), 8 => NotUpgraded(why),
});

/// Why the broker refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The stack has this version of the protocol.
    Version(u32),
    /// The user is neither the stack's own, which has this number, nor root, and no attached process created
    /// the connection for it.
    User(u32),
    /// The domain has as many applications as it may have: the value of `channel.clients_max`.
    Clients(u32),
    /// The stack has as many domains as it may have: the value of `channel.domains_max`.
    Domains(u32),
    /// The domain has as many proxy descriptors as it may have.
    ProxyDescriptors,
    /// No such shard, socket or descriptor exists, or the process does not own it.
    Unknown,
    /// The message cannot be decoded, or violates the protocol.
    Malformed,
    /// The shard has ended.
    ShardEnded,
    /// The shards run in the process of the broker, which cannot exchange them.
    Unsupervised,
    /// Only root may upgrade the shards: the process of the broker has capabilities, which the new executable
    /// would get.
    Capabilities,
    /// The shards have ended and are being started again, for this many seconds so far.
    Restarting(u32),
    /// The process wants to resume on other shards, and those that it has were not seen to end yet.
    ShardsRun,
    /// The user may not bind ports below this one.
    Port(u16),
    /// The kernel refused the stack's process a descriptor, memory or a mapping, with this error.
    Resources(Errno),
    /// The user's share of the unattached processes is used up. The number is the limit for all users.
    Unattached(u32),
    /// The user's share of the connections without a first message is used up. The number is the limit for
    /// all users.
    Pending(u32),
}
codec_enum!(Refusal {
    0 => Version(version), 1 => User(uid), 2 => Clients(limit), 3 => Domains(limit), 4 => ProxyDescriptors, 5 => Unknown, 6 => Malformed, 7 => ShardEnded, 8 => Port(start),
    9 => Unattached(limit), 10 => Resources(errno), 11 => Pending(limit), 12 => ShardsRun,
    13 => Restarting(seconds), 14 => Unsupervised, 15 => Capabilities,
});

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(
                f,
                "it has version {version} of the broker protocol, and this program's library has version {PROTOCOL_VERSION}: start the stack again with the installed ginnel"
            ),
            Self::User(uid) => write!(
                f,
                "it belongs to user {uid}, and admits processes of that user, of root, and programs that those start"
            ),
            Self::Clients(limit) => write!(
                f,
                "it is full: {limit} programs and threads of this user are attached, the limit channel.clients_max (raise it with --clients-max)"
            ),
            Self::Resources(errno) => fmt_shortage(f, *errno),
            Self::Domains(limit) => write!(
                f,
                "it is full: it serves {limit} users and domains, the limit channel.domains_max (raise it in the stack's configuration)"
            ),
            Self::ProxyDescriptors => write!(
                f,
                "this user's programs pass {PROXY_FDS_MAX} sockets to each other at this time, which is the limit"
            ),
            Self::Unknown => f.write_str("no such socket exists, or this process does not own it"),
            Self::Malformed => f.write_str("the message is malformed"),
            Self::ShardEnded => f.write_str("the shard has ended"),
            Self::Restarting(seconds) => write!(
                f,
                "its shards have ended and are being started again, for {seconds} s so far (ginnel log says why)"
            ),
            Self::ShardsRun => f.write_str("its shards run"),
            Self::Capabilities => {
                f.write_str("it has capabilities, which the new version would get: only root may upgrade it")
            }
            Self::Unsupervised => f.write_str(
                "it has no supervisor that could exchange its shards: stop it, and start it again",
            ),
            Self::Unattached(limit) => write!(
                f,
                "this user has too many programs on it that have opened no socket yet: all users may have {limit}, at most a quarter of the descriptors of the stack's process (see its ulimit -n)"
            ),
            Self::Pending(limit) => write!(
                f,
                "this user has most of the {limit} connections to it that have sent no message yet, which is the limit"
            ),
            Self::Port(start) => write!(
                f,
                "ports below {start} are only for the stack's own user and root (run.unprivileged_port_start)"
            ),
        }
    }
}

/// Writes what the kernel refused to the stack's process, and what raises the limit.
fn fmt_shortage(f: &mut fmt::Formatter<'_>, errno: Errno) -> fmt::Result {
    match errno {
        Errno::MFILE => f.write_str(
            "its process has no descriptor left: raise its hard limit (ulimit -Hn, or LimitNOFILE= of its unit)",
        ),
        Errno::NFILE => f.write_str("the system has no open file left for its process: raise fs.file-max"),
        Errno::NOMEM => f.write_str(
            "its process gets no more memory or mappings: free memory, or raise vm.max_map_count or its ulimit -v",
        ),
        errno => write!(f, "the kernel refuses its process a descriptor or memory: {errno}"),
    }
}

impl std::error::Error for Refusal {}

/// Encodes a message with its id.
pub(super) fn encode(request_id: u32, message: &impl Codec) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(128);
    request_id.encode(&mut bytes);
    message.encode(&mut bytes);
    bytes
}

/// Decodes a message: its id, and the value if the bytes after the id are an encoding of one.
pub(super) fn decode<T: Codec>(bytes: &[u8]) -> (u32, Option<T>) {
    let mut from = bytes;
    let Some(request_id) = u32::decode(&mut from) else { return (0, None) };
    let message = T::decode(&mut from).filter(|_| from.is_empty());
    (request_id, message)
}

/// Decodes `bytes` as either side would, for fuzzing, and checks that every message that can be decoded
/// encodes to bytes that decode to the same message. Returns the request to a shard, if `bytes` are one.
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
