//! Processes that come from processes: children, and other programs (docs/adr/0012-holders-and-placeholders.md).

use super::super::codec::{Code, Reader, record};
use super::super::message::{Answer, Ask, CHILD, Held, Hello, MAGIC, Refusal, VERSION, encode};
use super::{Asker, Line, Process, locked};
use crate::channel::{Client, Thing};
use crate::door::line;
use crate::error::Error;
use crate::own_fd::OwnFd;
use ginnel_stack::handle::Conn;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::io::{Errno, pread, write};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::sync::{Arc, Mutex};

/// Bytes of a table at the most: whoever reads one takes so much memory.
const TABLE_MAX: usize = 64 << 20;

/// A process that the stack knows before there is one. Whoever has this connection open is taken for it, so that nothing is lost whoever dies when.
///
/// After a fork the parent drops its copy, and the child turns it into [its own attachment](Process::become_child). A program that is started inherits its
/// [descriptor](Expected::line), and finds in the [table](Expected::table) what it needs.
#[derive(Debug)]
pub struct Expected {
    line: OwnFd,
    /// Of a child: what its parent was told for it, so that it need not ask.
    child: Option<Child>,
}

/// The places of a child on the shards, and what wakes it.
#[derive(Debug)]
struct Child {
    seats: Vec<u32>,
    wake: OwnFd,
}

/// What a program needs to know of what it inherits.
struct Table {
    magic: u32,
    version: u32,
    kept: Vec<Held>,
    note: Vec<u8>,
}
record!(Table { magic, version, kept, note });

impl Expected {
    /// Its connection, which closes by exec unless that is changed.
    pub fn line(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }

    /// A memory file that says to the next program what it keeps; `note` is for the library that reads it. To be inherited as the line is.
    ///
    /// # Errors
    /// No memory, or no descriptor.
    pub fn table(kept: &[Held], note: &[u8]) -> Result<OwnedFd, Error> {
        let io = |e| Error::io("table for the next program", e);
        let table = Table { magic: MAGIC, version: VERSION, kept: kept.to_vec(), note: note.to_vec() };
        let mut bytes = Vec::new();
        table.put(&mut bytes);
        let file = memfd_create("ginnel-table", MemfdFlags::CLOEXEC).map_err(io)?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest = &rest[write(&file, rest).map_err(io)?..];
        }
        Ok(file)
    }
}

impl Process {
    fn expect(&self, ask: &Ask) -> Result<Expected, Error> {
        let (its, stacks) = line::pair().map_err(|e| Error::io("connection for a process", e))?;
        let (answer, mut descriptors) = locked(&self.line).ask(ask, &[stacks.as_fd()])?;
        let child = match (answer, descriptors.pop()) {
            (Answer::Done, None) => None,
            // What is done before the fork the child need not do, which pays for everything that it touches first.
            (Answer::Child(seats), Some(wake)) => Some(Child { seats, wake: OwnFd::new(wake) }),
            _ => return Err(Error::Refused(Refusal::Malformed)),
        };
        // A program is told the number that the line has.
        let line = if child.is_some() { OwnFd::new(its) } else { OwnFd::in_place(its) };
        Ok(Expected { line, child })
    }

    /// To be called before fork(2): from now on the child is a holder of all that this process holds.
    ///
    /// No thread may open or release connections between this and the fork.
    ///
    /// # Errors
    /// There is no room for another process, or the stack is gone.
    pub fn expect_child(&self) -> Result<Expected, Error> {
        self.expect(&Ask::Fork)
    }

    /// To be called before execve(2) or posix_spawn(3): from now on a program is a holder of what it keeps. If the program is not started, dropping the value
    /// says so. By exec, the connection of the program that was closes, and what it alone held ends; the new one needs no word of its own to keep the rest,
    /// and may not know this library at all.
    ///
    /// # Errors
    /// As [`Process::expect_child`].
    pub fn expect_program(&self, kept: &[Held]) -> Result<Expected, Error> {
        self.expect(&Ask::Start(kept.to_vec()))
    }

    /// To be called in a child before it first uses what it inherited. Its clients go on where the parent's stood when it forked. [Streams](crate::channel::Streams)
    /// of the parent's clients must not be used here any more.
    ///
    /// # Errors
    /// The stack is gone.
    pub fn become_child(&mut self, expected: Expected) -> Result<(), Error> {
        let mut clients = core::mem::take(&mut self.clients);
        let result = self.become_child_of(&mut clients, expected);
        self.clients = clients;
        result
    }

    /// The same for clients that were [taken](Process::take_client): the parent's become the child's.
    ///
    /// # Errors
    /// As [`Process::become_child`]: then nothing has changed.
    pub fn become_child_of(&mut self, clients: &mut [Client], expected: Expected) -> Result<(), Error> {
        let malformed = || Error::Refused(Refusal::Malformed);
        let Expected { line, child } = expected;
        let Child { seats, wake } = child.ok_or_else(malformed)?;
        if seats.len() != clients.len() {
            return Err(malformed());
        }
        // Nothing comes back, and nothing is waited for: each round of a question costs as much as all the rest here.
        let io = |e: Errno| Error::io("descriptor of this process", e);
        let copies = (1..seats.len()).map(|_| wake.try_clone()).collect::<Result<Vec<_>, _>>().map_err(io)?;
        let this = pidfd_open(getpid(), PidfdFlags::empty()).map_err(io)?;
        let hello = Hello { magic: CHILD, version: VERSION, domain: String::new() };
        line::send(&line, &encode(0, &hello), &[this.as_fd()]).map_err(|_| Error::StackGone)?;
        let line = Arc::new(Mutex::new(Line::of(line)));
        let wakes = [wake].into_iter().chain(copies);
        for (shard, ((client, seat), wake)) in clients.iter_mut().zip(seats).zip(wakes).enumerate() {
            // Cannot truncate: shards are 64 at the most.
            let asker = Asker { line: line.clone(), shard: shard as u16 };
            client.become_child(seat, wake, Box::new(asker));
        }
        // The parent's connection is closed here only; the parent has it still.
        self.line = line;
        Ok(())
    }

    /// In a program that was started so: what it inherits, and the note. The descriptors are those that [`Expected`] has described.
    ///
    /// # Errors
    /// The stack is gone, or the table is none.
    pub fn resume(line: OwnedFd, table: OwnedFd) -> Result<(Self, Vec<Held>, Vec<u8>), Error> {
        let broken = || Error::application("channel: what the last program left is damaged");
        let io = |e| Error::io("table of the last program", e);
        let size = usize::try_from(fstat(&table).map_err(io)?.st_size).ok().filter(|size| *size <= TABLE_MAX);
        let mut bytes = vec![0; size.ok_or_else(broken)?];
        let mut at = 0;
        while at < bytes.len() {
            match pread(&table, &mut bytes[at..], at as u64).map_err(io)? {
                0 => return Err(broken()),
                count => at += count,
            }
        }
        let table = Table::get(&mut Reader::new(&bytes)).filter(|t| t.magic == MAGIC).ok_or_else(broken)?;
        if table.version != VERSION {
            return Err(Error::Refused(Refusal::Version(table.version)));
        }
        let mut process = Self::over(line)?;
        process.adopt(&table.kept);
        Ok((process, table.kept, table.note))
    }

    /// Its clients hold these connections from now on, as the stack has agreed.
    pub(super) fn adopt(&mut self, things: &[Held]) {
        adopt(&mut self.clients, things);
    }

    /// Everything that it holds besides listeners.
    pub fn held(&self) -> Vec<Held> {
        let of = |(shard, client): (usize, &Client)| -> Vec<Held> {
            // Cannot truncate: shards are 64 at the most.
            client.conns().map(|conn| Held::conn(shard as u16, conn)).collect()
        };
        self.clients.iter().enumerate().flat_map(of).collect()
    }
}

/// These clients, one for each shard, hold these connections from now on, as the stack has agreed.
pub(super) fn adopt(clients: &mut [Client], things: &[Held]) {
    for held in things {
        if let Thing::Socket { socket, generation } = held.thing
            && let Some(client) = clients.get_mut(usize::from(held.shard))
        {
            client.adopt(Conn::new(socket, generation));
        }
    }
}

impl Held {
    /// A connection, or a UDP socket, on a shard.
    pub fn conn(shard: u16, conn: Conn) -> Self {
        let thing = Thing::Socket { socket: conn.index(), generation: conn.generation() };
        Self { shard, thing }
    }

    /// A listener on a shard, by its number there.
    pub fn listener(shard: u16, number: u32) -> Self {
        Self { shard, thing: Thing::Listener(number) }
    }
}
