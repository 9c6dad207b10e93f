//! Sockets that travel to other processes in messages over Unix sockets (`SCM_RIGHTS`), and such that come (docs/adr/0012-holders-and-placeholders.md).

use crate::Ops;
use crate::channels::Channels;
use crate::descriptor::{self, Internal, borrow};
use crate::exec::{SocketNote, note_of_socket};
use crate::fd_table::FileId;
use crate::file::{Kind, Shape, Socket};
use crate::lane::Lane;
use crate::note::Note;
use ginnel::Conn;
use ginnel::channel::Thing;
use ginnel::door::Held;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

/// What goes in a message in the place of a descriptor.
pub enum Traveller {
    /// This one, which may be closed once the message is sent.
    Instead(OwnedFd),
    /// The descriptor itself: what the kernel has behind it says what it stands for.
    Itself,
}

impl Traveller {
    /// The number for the message, of a socket that is `fd` here.
    pub fn number(&self, fd: RawFd) -> RawFd {
        match self {
            Self::Instead(other) => other.as_raw_fd(),
            Self::Itself => fd,
        }
    }
}

impl Ops {
    /// What to send in the place of a descriptor of ours. Epoll sets, and sockets that are neither connected nor listen, travel as what the kernel has behind them.
    ///
    /// # Errors
    /// `EBADF`; `ETOOMANYREFS`: as many as may be are on their way.
    pub fn send_away(&self, fd: RawFd) -> Result<Traveller, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let half = lane.kernel_half(file);
        lane.share(file);
        let Lane { files, client, .. } = &mut *lane;
        let Kind::Socket(socket) = &files.get(file).kind else { return Ok(Traveller::Itself) };
        if matches!(socket.shape, Shape::Fresh { .. }) {
            return Ok(Traveller::Itself);
        }
        let (note, held) = described(socket, client);
        let process = lane.process.as_ref().ok_or(Errno::NETDOWN)?;
        let share = |travels| process.share_with(&held, &note, travels).map_err(|_| Errno::TOOMANYREFS);
        let Some(half) = half else { return share(None).map(Traveller::Instead) };
        // Both halves have to arrive, so the kernel's travels. Nobody tells when its last copy is gone: the stack's half is held as long as this process lives.
        let half = borrow(half)?;
        let cookie = sockopt::socket_cookie(half)?;
        if !lane.sent.iter().any(|(known, _)| *known == cookie) {
            let holds = Internal::new(share(Some(half))?);
            lane.sent.push((cookie, holds));
        }
        Ok(Traveller::Itself)
    }

    /// Whether a descriptor that came in a message could stand for a socket of a stack's.
    pub fn may_stand_for_ours(fd: RawFd) -> bool {
        borrow(fd).and_then(may_travel).is_ok()
    }

    /// A descriptor came in a message. If it stands for a socket of the stack's, it is ours from now on.
    pub fn arrived(&self, fd: RawFd) {
        // Whatever is none of ours stays as it came.
        let _ = borrow(fd).and_then(|received| self.take_in(fd, received));
    }

    fn take_in(&self, fd: RawFd, received: BorrowedFd<'_>) -> Result<(), Errno> {
        let listener = may_travel(received)?;
        let mut lane = self.lock()?;
        let Lane { process, client, .. } = &mut *lane;
        let process = process.as_ref().ok_or(Errno::NETDOWN)?;
        let (held, note) = process.resolve_for(client.all_mut(), received).map_err(|_| Errno::BADF)?;
        let file = match lane.known(&held) {
            // A copy of one that this process has.
            Some(file) => file,
            None => {
                let note = SocketNote::get(&mut &note[..]).ok_or(Errno::INVAL)?;
                let socket = lane.socket_of(note, fd)?;
                let file = lane.files.add(Kind::Socket(Box::new(socket)));
                // What was changed while it was on its way is told by the first look.
                lane.files.get(file).shared = Some(0);
                file
            }
        };
        if !listener {
            lane.placeholders.replace(fd)?;
        }
        if !self.fds.set(fd, file) {
            descriptor::close(fd);
            return Err(Errno::MFILE);
        }
        let known = lane.files.get(file);
        known.users += 1;
        known.descriptors += 1;
        if known.descriptors == 1 {
            lane.take_up(file)?;
        }
        lane.write_down(fd, file);
        lane.client.flush();
        Ok(())
    }
}

impl Lane {
    /// The description that this process has of these things already.
    fn known(&mut self, held: &[Held]) -> Option<FileId> {
        let first = held.first()?;
        match first.thing {
            Thing::Socket { socket, generation } => {
                let conn = self.client.conn_of(first.shard, Conn::new(socket, generation));
                self.file_of(conn)
            }
            Thing::Listener(number) => {
                let number = self.client.listener_of(first.shard, number)?;
                self.file_of_listener(number)
            }
        }
    }
}

/// A socket for another process, in bytes.
fn described(socket: &Socket, channels: &Channels) -> (Vec<u8>, Vec<Held>) {
    let (note, held) = note_of_socket(socket, channels);
    let mut bytes = Vec::new();
    note.put(&mut bytes);
    (bytes, held)
}

/// Whether a descriptor can be one that stands for a socket of the stack's: of all others the stack need not be asked. True if it is a listener of the kernel's.
fn may_travel(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let kind = sockopt::socket_type(fd)?;
    match sockopt::socket_domain(fd)? {
        AddressFamily::UNIX if kind == SocketType::SEQPACKET => Ok(false),
        AddressFamily::INET | AddressFamily::INET6
            if kind == SocketType::STREAM && sockopt::socket_acceptconn(fd)? =>
        {
            Ok(true)
        }
        _ => Err(Errno::NOTSOCK),
    }
}
