//! What is said at the door. Each message is one packet: a number that the answer repeats, then what is asked or answered.

use super::codec::{Code, Reader, choice, record};
use crate::channel::Thing;
use crate::channel::control::{Reply, Request};
use core::fmt;

/// The version of everything in this file and of the region. Both ends must have the same: they are parts of one installation.
pub const VERSION: u32 = 7;
/// First word of a first message, in every version.
pub(super) const MAGIC: u32 = 0x6c65_6e67;
/// First word of somebody who wants no place yet. No answer, unless it is refused; what follows are [descriptors](guest).
pub(super) const GUEST: u32 = 0x7473_6775;
/// First word of a child, on the connection that its parent has announced. No answer, unless it is refused: its parent has been told what it needs. The descriptor is the process.
pub(super) const CHILD: u32 = 0x646c_6863;
/// What a guest's messages are about, each with a descriptor: their one byte. There is no answer.
pub(super) mod guest {
    /// The connection of a process that comes in, as the guest's user.
    pub const ENTERS: u8 = 0;
    /// The connection of somebody who comes after the guest, as the user who has made it.
    pub const IS_FOLLOWED: u8 = 1;
    /// The process that has the guest's connection now.
    pub const IS: u8 = 2;
}
/// Bytes of the longest message: a datagram with all that stands around it.
pub(super) const MESSAGE_MAX: usize = 66 << 10;
/// Descriptors with a message at the most: the region, and what wakes the stack.
pub(super) const DESCRIPTORS_MAX: usize = 2;
/// Bytes of a domain's name.
pub(super) const NAME_MAX: usize = 64;
/// Things that may be named in one message.
pub(super) const THINGS_MAX: usize = 4096;
/// Bytes of a note beside a descriptor.
pub(super) const NOTE_MAX: usize = 4096;

/// The first message of a connection. It stays as it is in all versions, so that a refusal can always be understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub magic: u32,
    pub version: u32,
    /// The domain to join, by the name that its user gave it. Ignored on a connection that belongs to a domain already.
    pub domain: String,
}
record!(Hello { magic, version, domain });

/// What holds for the programs on a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// 127.0.0.0/8 and ::1 are the stack's, not the kernel's.
    pub loopback: bool,
    /// Ports from this one on can be bound without `CAP_NET_BIND_SERVICE`.
    pub unprivileged_port_start: u16,
    /// The CPU of each shard; [`NOT_PINNED`] of one that has none of its own. Empty: nothing is known.
    pub shard_cpus: Vec<u16>,
}
record!(Terms { loopback, unprivileged_port_start, shard_cpus });

/// No CPU.
pub const NOT_PINNED: u16 = u16::MAX;

/// A thing on one of the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The shard.
    pub shard: u16,
    /// What it is there.
    pub thing: Thing,
}
record!(Held { shard, thing });

/// What a process asks the door for.
#[derive(Clone, Debug)]
pub(super) enum Ask {
    /// The region of a shard, and what wakes it: as descriptors.
    Attach(u16),
    /// Something of a shard.
    Shard(u16, Request),
    /// A child is about to be, which will hold all that this process holds. The descriptor is the stack's end of its connection.
    Fork,
    /// Another program is about to be started, which keeps these things. The descriptor is the stack's end of its connection.
    Start(Vec<Held>),
    /// A descriptor with this cookie holds these things from now on, and whoever receives it is told the note. Beside this message: its other end.
    Share(u64, Vec<Held>, Vec<u8>),
    /// A descriptor with this cookie came: what does it hold?
    Resolve(u64),
    /// Another program is about to be started, which keeps nothing and may not be able to open the door. The descriptor is the stack's end of its connection, and it comes as the user
    /// who has made it.
    Follow,
}
choice!(Ask {
    0 => Attach(shard), 1 => Shard(shard, request), 2 => Fork, 3 => Start(kept), 4 => Share(cookie, things, note), 5 => Resolve(cookie),
    6 => Follow,
});

/// The answer.
#[derive(Debug)]
pub(super) enum Answer {
    /// To [`Hello`]: how many shards there are, and what holds for programs here. Beside it: what wakes this process.
    Welcome(u16, Terms),
    /// To [`Ask::Attach`]: the number of the client there.
    Seat(u32),
    /// To [`Ask::Shard`].
    Reply(Reply),
    /// It is done.
    Done,
    /// To [`Ask::Fork`]: the numbers of the child's clients on the shards. Beside it: what wakes the child.
    Child(Vec<u32>),
    /// To [`Ask::Resolve`], with the note of whoever shared them.
    Things(Vec<Held>, Vec<u8>),
    /// No, and why.
    Refused(Refusal),
}
choice!(Answer {
    0 => Welcome(shards, terms), 1 => Seat(number), 2 => Reply(reply), 3 => Done, 4 => Things(things, note), 5 => Refused(why),
    6 => Child(seats),
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
    Placeholders,
    /// There is no such shard, connection or descriptor, or the process does not hold it.
    Unknown,
    /// The message could not be understood.
    Malformed,
    /// The shard has ended.
    Gone,
    /// Ports below this one are not for every user.
    Port(u16),
    /// As many processes of the user as there may be are at the door and have not come in.
    Crowd,
}
choice!(Refusal {
    0 => Version(theirs), 1 => User, 2 => Clients, 3 => Domains, 4 => Placeholders, 5 => Unknown, 6 => Malformed, 7 => Gone, 8 => Port(start),
    9 => Crowd,
});

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(theirs) => {
                write!(f, "it speaks version {theirs} of the channel, and this program version {VERSION}")
            }
            Self::User => f.write_str("it serves its own user, and what programs on it start"),
            Self::Clients => f.write_str("as many applications as channel.clients_max are attached"),
            Self::Domains => f.write_str("as many domains as channel.domains_max are there"),
            Self::Placeholders => f.write_str("too many sockets are on their way between processes"),
            Self::Unknown => f.write_str("there is no such connection, or this process does not hold it"),
            Self::Malformed => f.write_str("the message could not be understood"),
            Self::Gone => f.write_str("the shard has ended"),
            Self::Crowd => f.write_str("as many processes of this user as there may be wait at its door"),
            Self::Port(start) => write!(f, "ports below {start} are for the stack's own user"),
        }
    }
}

impl std::error::Error for Refusal {}

/// A message with its number.
pub(super) fn encode(number: u32, what: &impl Code) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(128);
    number.put(&mut bytes);
    what.put(&mut bytes);
    bytes
}

/// The number of a message, and what it says if that can be understood.
pub(super) fn decode<T: Code>(bytes: &[u8]) -> (u32, Option<T>) {
    let mut from = Reader::new(bytes);
    let Some(number) = u32::get(&mut from) else { return (0, None) };
    let what = T::get(&mut from).filter(|_| from.is_done());
    (number, what)
}

/// What fuzzing does with a message: decodes it as each side would. Whatever can be decoded says the same when it is encoded and decoded again. Returns what
/// it asks a shard for, if it does.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> Option<Request> {
    fn again<T: Code + fmt::Debug>(bytes: &[u8]) {
        let (number, Some(what)) = decode::<T>(bytes) else { return };
        let encoded = encode(number, &what);
        let (second, same) = decode::<T>(&encoded);
        assert_eq!(second, number);
        assert_eq!(format!("{same:?}"), format!("{:?}", Some(&what)));
    }
    again::<Hello>(bytes);
    again::<Ask>(bytes);
    again::<Answer>(bytes);
    match decode::<Ask>(bytes).1 {
        Some(Ask::Shard(_, request)) => Some(request),
        _ => None,
    }
}
