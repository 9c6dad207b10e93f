//! Processes that come from processes: children, and other programs (docs/adr/0012-holders-and-placeholders.md).

use super::super::codec::{Codec, codec_struct};
use super::super::message::{
    ControlReply, ControlRequest, GlobalSocketId, Hello, MAGIC, MAGIC_CHILD, PROTOCOL_VERSION, Refusal,
    encode,
};
use super::{Attachment, BrokerControl, ControlConnection, lock_connection};
use crate::broker::seqpacket;
use crate::channel::{Client, SocketId};
use crate::error::Error;
use crate::internal_fd::InternalFd;
use ginnel_stack::handle::Conn;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::io::{Errno, pread, write};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::sync::{Arc, Mutex};

/// Bytes of a table at the most: whoever reads one takes so much memory.
const TABLE_BYTES_MAX: usize = 64 << 20;

/// A process that the stack knows before there is one. Whoever has this connection open is taken for it, so that nothing is lost whoever dies when.
///
/// After a fork the parent drops its copy, and the child turns it into [its own attachment](Process::become_child). A program that is started inherits its
/// [descriptor](Expected::line), and finds in the [table](Expected::table) what it needs.
#[derive(Debug)]
pub struct PreparedProcess {
    connection: InternalFd,
    /// Of a child: what its parent was told for it, so that it need not ask.
    child: Option<ChildClients>,
}

/// The places of a child on the shards, and what wakes it.
#[derive(Debug)]
struct ChildClients {
    clients: Vec<u32>,
    wake_fd: InternalFd,
}

/// What a program needs to know of what it inherits.
struct InheritanceTable {
    magic: u32,
    version: u32,
    kept: Vec<GlobalSocketId>,
    metadata: Vec<u8>,
}
codec_struct!(InheritanceTable { magic, version, kept, metadata });

impl PreparedProcess {
    /// Its connection, which closes by exec unless that is changed.
    pub fn connection(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// A memory file that says to the next program what it keeps; `note` is for the library that reads it. To be inherited as the line is.
    ///
    /// # Errors
    /// No memory, or no descriptor.
    pub fn inheritance_table(kept: &[GlobalSocketId], metadata: &[u8]) -> Result<OwnedFd, Error> {
        let io = |e| Error::io("table for the next program", e);
        let table = InheritanceTable {
            magic: MAGIC,
            version: PROTOCOL_VERSION,
            kept: kept.to_vec(),
            metadata: metadata.to_vec(),
        };
        let mut bytes = Vec::new();
        table.encode(&mut bytes);
        let file = memfd_create("ginnel-table", MemfdFlags::CLOEXEC).map_err(io)?;
        let mut remaining = &bytes[..];
        while !remaining.is_empty() {
            remaining = &remaining[write(&file, remaining).map_err(io)?..];
        }
        Ok(file)
    }
}

impl Attachment {
    fn prepare(&self, request: &ControlRequest) -> Result<PreparedProcess, Error> {
        let (process_end, broker_end) =
            seqpacket::pair().map_err(|e| Error::io("connection for a process", e))?;
        let (answer, mut descriptors) =
            lock_connection(&self.connection).request(request, &[broker_end.as_fd()])?;
        let child = match (answer, descriptors.pop()) {
            (ControlReply::Done, None) => None,
            // What is done before the fork the child need not do, which pays for everything that it touches first.
            (ControlReply::Forked(client_ids), Some(wake_fd)) => {
                Some(ChildClients { clients: client_ids, wake_fd: InternalFd::new(wake_fd) })
            }
            _ => return Err(Error::Refused(Refusal::Malformed)),
        };
        // A program is told the number that the line has.
        let connection =
            if child.is_some() { InternalFd::new(process_end) } else { InternalFd::in_place(process_end) };
        Ok(PreparedProcess { connection, child })
    }

    /// To be called before fork(2): from now on the child is a holder of all that this process holds.
    ///
    /// No thread may open or release connections between this and the fork.
    ///
    /// # Errors
    /// There is no room for another process, or the stack is gone.
    pub fn prepare_fork(&self) -> Result<PreparedProcess, Error> {
        self.prepare(&ControlRequest::Fork)
    }

    /// To be called before execve(2) or posix_spawn(3): from now on a program is a holder of what it keeps. If the program is not started, dropping the value
    /// says so. By exec, the connection of the program that was closes, and what it alone held ends; the new one needs no word of its own to keep the rest,
    /// and may not know this library at all.
    ///
    /// # Errors
    /// As [`Process::expect_child`].
    pub fn prepare_exec(&self, kept: &[GlobalSocketId]) -> Result<PreparedProcess, Error> {
        self.prepare(&ControlRequest::Exec(kept.to_vec()))
    }

    /// To be called in a child before it first uses what it inherited. Its clients go on where the parent's stood when it forked. [Streams](crate::channel::Streams)
    /// of the parent's clients must not be used here any more.
    ///
    /// # Errors
    /// The stack is gone.
    pub fn become_child(&mut self, expected: PreparedProcess) -> Result<(), Error> {
        let mut clients = core::mem::take(&mut self.clients);
        let result = self.become_child_with(&mut clients, expected);
        self.clients = clients;
        result
    }

    /// The same for clients that were [taken](Process::take_client): the parent's become the child's.
    ///
    /// # Errors
    /// As [`Process::become_child`]: then nothing has changed.
    pub fn become_child_with(
        &mut self,
        clients: &mut [Client],
        expected: PreparedProcess,
    ) -> Result<(), Error> {
        let malformed = || Error::Refused(Refusal::Malformed);
        let PreparedProcess { connection, child } = expected;
        let ChildClients { clients: client_ids, wake_fd } = child.ok_or_else(malformed)?;
        if client_ids.len() != clients.len() {
            return Err(malformed());
        }
        // Nothing comes back, and nothing is waited for: each round of a question costs as much as all the rest here.
        let io = |e: Errno| Error::io("descriptor of this process", e);
        let copies =
            (1..client_ids.len()).map(|_| wake_fd.try_clone()).collect::<Result<Vec<_>, _>>().map_err(io)?;
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).map_err(io)?;
        let hello = Hello { magic: MAGIC_CHILD, version: PROTOCOL_VERSION, domain: String::new() };
        seqpacket::send(&connection, &encode(0, &hello), &[pidfd.as_fd()]).map_err(|_| Error::StackGone)?;
        let connection = Arc::new(Mutex::new(ControlConnection::from_internal_fd(connection)));
        let wakes = [wake_fd].into_iter().chain(copies);
        for (shard, ((client, client_id), wake_fd)) in
            clients.iter_mut().zip(client_ids).zip(wakes).enumerate()
        {
            // Cannot truncate: shards are 64 at the most.
            let control = BrokerControl { connection: connection.clone(), shard: shard as u16 };
            client.become_child(client_id, wake_fd, Box::new(control));
        }
        // The parent's connection is closed here only; the parent has it still.
        self.connection = connection;
        Ok(())
    }

    /// In a program that was started so: what it inherits, and the note. The descriptors are those that [`Expected`] has described.
    ///
    /// # Errors
    /// The stack is gone, or the table is none.
    pub fn inherit(
        connection: OwnedFd,
        table: OwnedFd,
    ) -> Result<(Self, Vec<GlobalSocketId>, Vec<u8>), Error> {
        let damaged = || Error::application("channel: what the last program left is damaged");
        let io = |e| Error::io("table of the last program", e);
        let size =
            usize::try_from(fstat(&table).map_err(io)?.st_size).ok().filter(|size| *size <= TABLE_BYTES_MAX);
        let mut bytes = vec![0; size.ok_or_else(damaged)?];
        let mut offset = 0;
        while offset < bytes.len() {
            match pread(&table, &mut bytes[offset..], offset as u64).map_err(io)? {
                0 => return Err(damaged()),
                count => offset += count,
            }
        }
        let table =
            InheritanceTable::decode(&mut &bytes[..]).filter(|t| t.magic == MAGIC).ok_or_else(damaged)?;
        if table.version != PROTOCOL_VERSION {
            return Err(Error::Refused(Refusal::Version(table.version)));
        }
        let mut process = Self::from_connection(connection)?;
        process.adopt(&table.kept);
        Ok((process, table.kept, table.metadata))
    }

    /// Its clients hold these connections from now on, as the stack has agreed.
    pub(super) fn adopt(&mut self, sockets: &[GlobalSocketId]) {
        adopt(&mut self.clients, sockets);
    }

    /// Everything that it holds besides listeners.
    pub fn owned_sockets(&self) -> Vec<GlobalSocketId> {
        let of = |(shard, client): (usize, &Client)| -> Vec<GlobalSocketId> {
            // Cannot truncate: shards are 64 at the most.
            client.conns().map(|conn| GlobalSocketId::conn(shard as u16, conn)).collect()
        };
        self.clients.iter().enumerate().flat_map(of).collect()
    }
}

/// These clients, one for each shard, hold these connections from now on, as the stack has agreed.
pub(super) fn adopt(clients: &mut [Client], sockets: &[GlobalSocketId]) {
    for held in sockets {
        if let SocketId::Socket { socket, generation } = held.id
            && let Some(client) = clients.get_mut(usize::from(held.shard))
        {
            client.adopt(Conn::new(socket, generation));
        }
    }
}

impl GlobalSocketId {
    /// A connection, or a UDP socket, on a shard.
    pub fn conn(shard: u16, conn: Conn) -> Self {
        let id = SocketId::Socket { socket: conn.index(), generation: conn.generation() };
        Self { shard, id }
    }

    /// A listener on a shard, by its number there.
    pub fn listener(shard: u16, number: u32) -> Self {
        Self { shard, id: SocketId::Listener(number) }
    }
}
