//! `listen` and `accept4`.

use crate::Ops;
use crate::connect::errno_of;
use crate::fd_table::FileId;
use crate::file::{Bound, Kind, Listening, Shape, Shut, Socket, Stream, Urgency};
use crate::jumps::OnJump;
use crate::kernel;
use crate::lane::Lane;
use crate::raw;
use crate::sleep::{Patience, Wait};
use crate::sockaddr::{self, Family, Written};
use core::cell::Cell;
use core::ffi::c_int;
use core::net::SocketAddr;
use core::pin::pin;
use ginnel::ListenOptions;
use libc::{POLLIN, pollfd};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Longest accept queue (`net.core.somaxconn`).
const SOMAXCONN: u32 = 4096;

impl Ops {
    /// `listen`. A socket without an address gets a port that the stack chooses.
    ///
    /// # Errors
    /// `EADDRINUSE`, `EINVAL` if it is connected, `ENFILE`.
    pub fn listen(&self, fd: RawFd, backlog: c_int) -> Result<(), Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        // A negative one is as long as possible, as on Linux, where it is compared without its sign.
        let backlog = u32::try_from(backlog).unwrap_or(SOMAXCONN).min(SOMAXCONN);
        let socket = lane.files.socket(file)?;
        let sharing = socket.options.sharing(socket.family);
        // An address without its port outlives what was made with it (`SOCK_BINDADDR_LOCK`).
        let any = socket.past.map_or(socket.family.any(), |past| SocketAddr::new(past.ip(), 0));
        match &mut socket.shape {
            Shape::Listening(listening) => {
                // How many may wait is told anew, and that is all.
                listening.backlog = backlog;
                let number = listening.number;
                if let Some(fd) = listening.kernel {
                    raw::listen(fd, backlog)?;
                }
                return lane.client.set_backlog(number, backlog).map_err(|e| errno_of(&e));
            }
            Shape::Datagrams(_) => return Err(Errno::OPNOTSUPP),
            Shape::Fresh { .. } if socket.datagrams => return Err(Errno::OPNOTSUPP),
            Shape::Stream(_) => return Err(Errno::INVAL),
            Shape::Fresh { bound: None } => lane.reserve(file, any, sharing, None)?,
            Shape::Fresh { .. } => {}
        }
        let socket = lane.files.socket(file)?;
        let Shape::Fresh { bound: Some(bound) } = socket.shape else { return Err(Errno::INVAL) };
        let v4 = socket.will_be_v4();
        let options = ListenOptions {
            backlog,
            v6_only: socket.options.is_v6_only(),
            reuse_port: sharing.reuse_port,
            user: sharing.user,
            socket: socket.options.at_birth(v4),
        };
        let number = lane.client.listen(bound.address(), options, 0).map_err(|e| errno_of(&e))?;
        lane.bind_listener(number, file);
        if let Some(time) = lane.files.socket(file)?.options.defers_accept() {
            lane.client.defer(number, time).map_err(|e| errno_of(&e))?;
        }
        let socket = lane.files.socket(file)?;
        socket.options.born(v4);
        let kernel = bound.kernel;
        socket.shape = Shape::Listening(Listening { number, bound, accepts: false, backlog, kernel });
        lane.write_down(fd, file);
        match kernel {
            Some(fd) => raw::listen(fd, backlog),
            None => Ok(()),
        }
    }

    /// `accept4`. The peer's address is written as for `getpeername`.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `EINVAL` if the socket does not listen or the flags are unknown, `EMFILE`.
    pub fn accept4(&self, fd: RawFd, flags: c_int) -> Result<(RawFd, Written), Errno> {
        if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
            return Err(Errno::INVAL);
        }
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let socket = lane.files.socket(file)?;
        let patience = if socket.nonblocking { Patience::None } else { socket.options.recv_patience() };
        if socket.datagrams {
            return Err(Errno::OPNOTSUPP);
        }
        if !matches!(socket.shape, Shape::Listening(_)) {
            return Err(Errno::INVAL);
        }
        lane.begin_accepting(file);
        lane.client.flush();
        // The number first: a connection that was accepted cannot be given back. Who does not wait finds it where it is now.
        let cloexec = flags & libc::SOCK_CLOEXEC != 0;
        let at_hand = patience == Patience::None && lane.placeholders.has_kept();
        let mut new = if at_hand { None } else { Some(lane.placeholders.take(cloexec)?) };
        let mut by_kernel = None;
        let done = Cell::new(0);
        let wait = Wait { exclusive: true, ..Wait::restarting(patience, &done) };
        let family = lane.files.socket(file)?.family;
        let half = lane.kernel_half(file);
        let mut watched = [pollfd { fd: half.unwrap_or(-1), events: POLLIN, revents: 0 }];
        let watched = &mut watched[..usize::from(half.is_some())];
        let unused = new;
        let on_jump = pin!(OnJump::new(|| self.accepts_no_more(unused)));
        // Only who has taken a number, and waits, has something to give back.
        let on_jump = unused.is_some().then(|| on_jump.watch());
        let (mut lane, result) = self.until(lane, &[file], watched, &wait, |lane, _| {
            match (lane.accept_step(file, flags), half) {
                (Err(Errno::AGAIN), Some(half)) => kernel::accept(half, flags, family).map(Accepted::Kernel),
                (result, _) => result.map(Accepted::Stack),
            }
        });
        drop(on_jump);
        let result = result.and_then(|accepted| match accepted {
            Accepted::Stack(socket) => Ok(socket),
            Accepted::Kernel(from) => {
                by_kernel = Some(from);
                Err(Errno::AGAIN)
            }
        });
        let accepted = result.and_then(|socket| {
            let (family, conn) = (socket.family, socket.conn());
            let peer = conn.and_then(|conn| lane.client.peer(conn).ok());
            let fd = match new.take() {
                Some(fd) => fd,
                None => lane.placeholders.take(cloexec)?,
            };
            self.adopt(&mut lane, fd, Kind::Socket(socket)).map(|fd| (fd, family, conn, peer))
        });
        match accepted {
            Ok((new, family, conn, peer)) => {
                let file = self.file(&mut lane, new)?;
                if let Some(conn) = conn {
                    lane.bind_conn(conn, file);
                }
                lane.apply_options(file)?;
                Ok((new, sockaddr::write(peer.unwrap_or(family.any()), family)))
            }
            Err(error) => {
                if let Some(new) = new {
                    lane.placeholders.give_back(new, self.config.descriptors_kept);
                }
                by_kernel.ok_or(error)
            }
        }
    }
}

impl Ops {
    /// A handler jumps over `accept`, which has taken a number.
    #[cold]
    fn accepts_no_more(&self, unused: Option<RawFd>) {
        if let (Some(unused), Ok(mut lane)) = (unused, self.lock()) {
            lane.placeholders.give_back(unused, self.config.descriptors_kept);
        }
    }
}

/// Where a connection came from.
enum Accepted {
    Stack(Box<Socket>),
    /// The kernel: its descriptor is not ours.
    Kernel((RawFd, Written)),
}

impl Socket {
    /// Whether connections of a listener will be of IPv4, if that is known.
    pub fn will_be_v4(&self) -> Option<bool> {
        match self.family {
            Family::V4 => Some(true),
            Family::V6 if self.options.is_v6_only() => Some(false),
            Family::V6 => None,
        }
    }

    fn conn(&self) -> Option<ginnel::Conn> {
        match self.shape {
            Shape::Stream(stream) => Some(stream.conn),
            _ => None,
        }
    }
}

impl Lane {
    /// This process takes its share of a listener's connections from now on.
    #[inline]
    pub fn begin_accepting(&mut self, file: FileId) {
        if let Ok(Socket { shape: Shape::Listening(listening), .. }) = self.files.socket(file)
            && !core::mem::replace(&mut listening.accepts, true)
        {
            let (number, backlog) = (listening.number, listening.backlog);
            self.take_share(number, backlog);
        }
    }

    #[cold]
    fn take_share(&mut self, number: u32, backlog: u32) {
        // Linux lets one more wait than the backlog says.
        self.client.set_credits(number, backlog.saturating_add(1));
        // What came before anybody asked is there when this returns; if the stack is gone nothing is. How many may wait is not told: another process that has the listener may
        // have said something else since.
        let _ = self.client.ask_for_offers(number);
    }

    /// A connection that is offered.
    fn accept_step(&mut self, file: FileId, flags: c_int) -> Result<Box<Socket>, Errno> {
        let Shape::Listening(listening) = self.files.socket(file)?.shape else { return Err(Errno::INVAL) };
        let taken = self.client.accept(listening.number).or_else(|| {
            self.pump();
            self.client.accept(listening.number)
        });
        // Where the stack is gone there is nobody who could connect, as where an interface is; an error would come again at once.
        let conn = taken.ok_or(Errno::AGAIN)?;
        let listener = self.files.socket(file)?;
        let socket = Socket {
            family: listener.family,
            datagrams: false,
            outbox: None,
            nonblocking: flags & libc::SOCK_NONBLOCK != 0,
            options: listener.options.inherited(),
            shut: Shut::default(),
            shape: Shape::Stream(Stream::new(conn, false, None)),
            past: None,
            urgency: Urgency::default(),
            cookie: 0,
        };
        Ok(self.files.boxed(socket))
    }

    /// The socket listens no more, and keeps the address that the program bound it to.
    pub fn stop_listening(&mut self, file: FileId) {
        let Ok(Socket { shape: Shape::Listening(listening), .. }) = self.files.socket(file) else { return };
        let listening = *listening;
        self.unbind_listener(listening.number);
        let kept = Some(listening.bound).filter(Bound::stays);
        let given_up = if kept.is_none() { listening.bound.own() } else { None };
        // If the stack is gone there is nothing to close.
        let _ = self.client.unlisten(listening.number, given_up);
        if let Ok(socket) = self.files.socket(file) {
            socket.shape = Shape::Fresh { bound: kept };
            socket.past = Some(listening.bound.address());
        }
    }
}
