//! Inheritance of sockets by children and by programs that a process executes
//! (docs/adr/0012-owners-and-proxy-descriptors.md).

use super::super::codec::{Codec, codec_struct};
use super::super::message::{
    ControlReply, ControlRequest, GlobalSocketId, Hello, MAGIC, MAGIC_CHILD, PROTOCOL_VERSION, Refusal,
    encode,
};
use super::{
    Attachment, BrokerControl, ControlConnection, is_errno_mfile, is_io_mfile, lock_connection,
    request_again_if_short,
};
use crate::broker::seqpacket;
use crate::channel::{Client, SocketId};
use crate::error::Error;
use crate::internal_fd::InternalFd;
use crate::raised_limit::with_raised_limit;
use ginnel_devices::memory_file;
use ginnel_stack::handle::Conn;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, fstat};
use rustix::io::{Errno, pread, write};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::sync::{Arc, Mutex};

/// Length of the longest inheritance table in bytes; the reader allocates as much memory as the table has.
const TABLE_BYTES_MAX: usize = 64 << 20;

/// A process that the stack knows before it exists. The stack takes the owner of this connection for that
/// process, so its sockets survive whichever process dies first.
///
/// After a fork the parent drops its copy, and the child turns it into [its own
/// attachment](Attachment::become_child). A program inherits the [connection](PreparedProcess::connection)
/// and the [table](PreparedProcess::inheritance_table) of its sockets.
#[derive(Debug)]
pub struct PreparedProcess {
    connection: InternalFd,
    /// For a child: what the broker replied to its parent, so that the child does not need to ask.
    child: Option<ChildClients>,
}

/// The clients of a child by shard (their numbers and their memory), and the descriptor that wakes the child.
#[derive(Debug)]
struct ChildClients {
    clients: Vec<u32>,
    memories: Vec<OwnedFd>,
    wake_fd: InternalFd,
}

/// Description of the sockets that a program inherits.
struct InheritanceTable {
    magic: u32,
    version: u32,
    kept: Vec<GlobalSocketId>,
    metadata: Vec<u8>,
}
codec_struct!(InheritanceTable { magic, version, kept, metadata });

impl PreparedProcess {
    /// Returns the connection. It is close-on-exec; the caller clears that for a program.
    pub fn connection(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// Creates a memory file that lists the inherited sockets; `metadata` is for the library that reads the
    /// table. A program inherits its descriptor together with the connection.
    ///
    /// # Errors
    /// No memory or no descriptor is left.
    pub fn inheritance_table(kept: &[GlobalSocketId], metadata: &[u8]) -> Result<OwnedFd, Error> {
        let io = |e| Error::io("inheritance table", e);
        let table = InheritanceTable {
            magic: MAGIC,
            version: PROTOCOL_VERSION,
            kept: kept.to_vec(),
            metadata: metadata.to_vec(),
        };
        let mut bytes = Vec::new();
        table.encode(&mut bytes);
        let file = memory_file::create("ginnel-table", bytes.len(), MemfdFlags::CLOEXEC).map_err(io)?;
        let mut remaining = &bytes[..];
        while !remaining.is_empty() {
            remaining = &remaining[write(&file, remaining).map_err(io)?..];
        }
        Ok(file)
    }
}

impl Attachment {
    /// Announces a process. The program may have used all of its descriptors: on the kernel, a fork needs
    /// none.
    fn prepare(&self, request: &ControlRequest) -> Result<PreparedProcess, Error> {
        // If the first reply was received without its descriptors, the broker finds the connection of that
        // process closed, and forgets the process.
        request_again_if_short(|is_short| self.try_prepare(request, is_short))
    }

    /// Announces a process. If `is_short` is true, the descriptors of the reply may get numbers above the
    /// soft limit.
    fn try_prepare(&self, request: &ControlRequest, is_short: bool) -> Result<PreparedProcess, Error> {
        let ends = with_raised_limit(is_io_mfile, seqpacket::pair);
        let (process_end, broker_end) = ends.map_err(|e| Error::io("connection for a process", e))?;
        let mut connection = lock_connection(&self.connection);
        let descriptors = [broker_end.as_fd()];
        connection.is_short = is_short;
        let reply = connection.request(request, &descriptors);
        connection.is_short = false;
        drop(connection);
        let (reply, descriptors) = reply?;
        let mut descriptors = descriptors.into_iter();
        let high = |fd| InternalFd::new(fd).map_err(|e| Error::io("descriptor of a process", e));
        let child = match (reply, descriptors.next()) {
            (ControlReply::Done, None) => None,
            // Moved to a high number before the fork: in the child, each first write to a page costs a copy.
            (ControlReply::Forked(clients), Some(wake_fd)) => {
                Some(ChildClients { clients, memories: descriptors.collect(), wake_fd: high(wake_fd)? })
            }
            _ => return Err(Error::Refused(Refusal::Malformed)),
        };
        // The program is told the number of the descriptor, so it must not change.
        let connection = if child.is_some() { high(process_end)? } else { InternalFd::in_place(process_end) };
        Ok(PreparedProcess { connection, child })
    }

    /// Must be called before fork(2): from now on, the child is an owner of all sockets of this process.
    ///
    /// No thread may open or release connections between this call and the fork.
    ///
    /// # Errors
    /// The stack cannot take another process, or is gone.
    pub fn prepare_fork(&self) -> Result<PreparedProcess, Error> {
        self.prepare(&ControlRequest::Fork)
    }

    /// Must be called before execve(2) or posix_spawn(3): from now on, the program is an owner of the sockets
    /// `kept`. If the program is not started, drop the value to release them. execve(2) closes the connection
    /// of the old program, which releases the sockets that it alone owned. The new program owns `kept` even
    /// if it never uses this library.
    ///
    /// # Errors
    /// As [`Attachment::prepare_fork`].
    pub fn prepare_exec(&self, kept: &[GlobalSocketId]) -> Result<PreparedProcess, Error> {
        self.prepare(&ControlRequest::Exec(kept.to_vec()))
    }

    /// Must be called in a child before its first use of an inherited socket. The clients continue where the
    /// parent's clients were at the fork. The child must not use
    /// [`SharedStreams`](crate::channel::SharedStreams) of the parent's clients any more.
    ///
    /// # Errors
    /// The stack is gone.
    pub fn become_child(&mut self, expected: PreparedProcess) -> Result<(), Error> {
        let mut clients = core::mem::take(&mut self.clients);
        let result = self.become_child_with(&mut clients, expected);
        self.clients = clients;
        result
    }

    /// As [`Attachment::become_child`], for clients that were [taken](Attachment::take_client): they become
    /// the child's.
    ///
    /// # Errors
    /// As [`Attachment::become_child`]; the clients are unchanged then.
    pub fn become_child_with(
        &mut self,
        clients: &mut [Client],
        expected: PreparedProcess,
    ) -> Result<(), Error> {
        let malformed = || Error::Refused(Refusal::Malformed);
        let PreparedProcess { connection, child } = expected;
        let ChildClients { clients: client_ids, memories, wake_fd } = child.ok_or_else(malformed)?;
        if client_ids.len() != clients.len() || memories.len() != clients.len() {
            return Err(malformed());
        }
        let memories = clients.iter().zip(&memories).map(|(client, file)| client.open_child_memory(file));
        let memories = memories.collect::<Result<Vec<_>, _>>()?;
        // Sends without waiting for a reply: a round trip costs as much as everything else here.
        let io = |e: Errno| Error::io("descriptor of this process", e);
        let copies = (1..client_ids.len()).map(|_| with_raised_limit(is_errno_mfile, || wake_fd.try_clone()));
        let copies = copies.collect::<Result<Vec<_>, _>>().map_err(io)?;
        let pidfd = with_raised_limit(is_errno_mfile, || pidfd_open(getpid(), PidfdFlags::empty()));
        let pidfd = pidfd.map_err(io)?;
        let hello = Hello { magic: MAGIC_CHILD, version: PROTOCOL_VERSION, domain: String::new() };
        seqpacket::send(&connection, &encode(0, &hello), &[pidfd.as_fd()]).map_err(|_| Error::StackGone)?;
        let connection = Arc::new(Mutex::new(ControlConnection::from_internal_fd(connection)));
        let wakes = [wake_fd].into_iter().chain(copies);
        let children = client_ids.into_iter().zip(memories).zip(wakes);
        for (shard, (client, ((client_id, memory), wake_fd))) in clients.iter_mut().zip(children).enumerate()
        {
            // Cannot truncate: there are at most 64 shards.
            let control = BrokerControl { connection: connection.clone(), shard: shard as u16 };
            client.become_child(client_id, memory, wake_fd, Box::new(control));
        }
        // Closes the parent's connection in this process only.
        self.connection = connection;
        Ok(())
    }

    /// Must be called in a program that was executed after [`Attachment::prepare_exec`], with the two
    /// inherited descriptors. Returns the attachment, the inherited sockets and the metadata.
    ///
    /// # Errors
    /// The stack is gone, or the table is damaged or of another version.
    pub fn inherit(
        connection: OwnedFd,
        table: OwnedFd,
    ) -> Result<(Self, Vec<GlobalSocketId>, Vec<u8>), Error> {
        let damaged = || Error::application("channel: the inheritance table is damaged");
        let io = |e| Error::io("inheritance table", e);
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
        let mut process = Self::greet(connection, "", false, false)?;
        process.clients.iter_mut().for_each(Client::rescan_at_next_poll);
        process.adopt(&table.kept);
        Ok((process, table.kept, table.metadata))
    }

    /// Makes the clients owners of `sockets`. The stack has recorded them as owners already.
    pub(super) fn adopt(&mut self, sockets: &[GlobalSocketId]) {
        adopt(&mut self.clients, sockets);
    }

    /// Returns all connections and UDP sockets that this process owns, without listeners.
    pub fn owned_sockets(&self) -> Vec<GlobalSocketId> {
        let of = |(shard, client): (usize, &Client)| -> Vec<GlobalSocketId> {
            // Cannot truncate: there are at most 64 shards.
            client.conns().map(|conn| GlobalSocketId::conn(shard as u16, conn)).collect()
        };
        self.clients.iter().enumerate().flat_map(of).collect()
    }
}

/// Makes `clients`, one for each shard, owners of `sockets`. The stack has recorded them as owners already.
pub(super) fn adopt(clients: &mut [Client], sockets: &[GlobalSocketId]) {
    for socket_id in sockets {
        if let SocketId::Socket { socket, generation } = socket_id.id
            && let Some(client) = clients.get_mut(usize::from(socket_id.shard))
        {
            client.adopt(Conn::new(socket, generation));
        }
    }
}

impl GlobalSocketId {
    /// Returns the ID of a connection or UDP socket on a shard.
    pub fn conn(shard: u16, conn: Conn) -> Self {
        let id = SocketId::Socket { socket: conn.index(), generation: conn.generation() };
        Self { shard, id }
    }

    /// Returns the ID of a listener, given its shard and its number on that shard.
    pub fn listener(shard: u16, number: u32) -> Self {
        Self { shard, id: SocketId::Listener(number) }
    }
}
