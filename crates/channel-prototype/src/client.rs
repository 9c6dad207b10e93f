//! What the preload library would do in a program.

use crate::control::{self, Kind, Message};
use crate::region::{OFFERS, RELEASED, Region, Socket, offer};
use crate::sys;
use core::sync::atomic::{Ordering::*, fence};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::fs::{MemfdFlags, Timespec, memfd_create};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Tells the next program the number of the descriptor that describes the rest.
pub const STATE: &str = "GINNEL_CHANNEL";

/// No step of a scenario takes longer.
const PATIENCE: Duration = Duration::from_secs(5);

struct Entry {
    socket: u32,
    placeholder: OwnedFd,
}

pub struct Client {
    control: OwnedFd,
    region: &'static Region,
    memory: OwnedFd,
    stack_wake: OwnedFd,
    wake: OwnedFd,
    number: usize,
    /// The descriptor that all private sockets are copies of.
    placeholder: OwnedFd,
    table: BTreeMap<RawFd, Entry>,
}

fn refused(what: &str) -> io::Error {
    io::Error::other(format!("the stack refused: {what}"))
}

impl Client {
    /// Connects to a stack by the name of its socket.
    pub fn attach(path: &str) -> io::Result<Self> {
        let control = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&control, &SocketAddrUnix::new(path)?)?;
        Self::on(control, BTreeMap::new())
    }

    /// The first message on a connection.
    fn on(control: OwnedFd, table: BTreeMap<RawFd, Entry>) -> io::Result<Self> {
        let process = sys::own_pidfd()?;
        control::send(&control, Message::new(Kind::Attach, 0, 0), &[process.as_fd()])?;
        let Some((reply, fds)) = control::receive(&control, RecvFlags::empty())? else {
            return Err(refused("attach"));
        };
        let [memory, stack_wake, wake]: [OwnedFd; 3] = fds.try_into().map_err(|_| refused("attach"))?;
        let region = Region::map(&memory)?;
        let placeholder = eventfd(0, EventfdFlags::CLOEXEC)?;
        let number = reply.a as usize;
        Ok(Self { control, region, memory, stack_wake, wake, number, placeholder, table })
    }

    fn ask(&self, kind: Kind, a: u32, b: u64, fds: &[rustix::fd::BorrowedFd<'_>]) -> io::Result<Message> {
        control::send(&self.control, Message::new(kind, a, b), fds)?;
        match control::receive(&self.control, RecvFlags::empty())? {
            Some((reply, _)) if reply.kind == kind => Ok(reply),
            _ => Err(refused(&format!("{kind:?}"))),
        }
    }

    fn adopt(&mut self, socket: u32) -> io::Result<RawFd> {
        let placeholder = fcntl_dupfd_cloexec(&self.placeholder, 3)?;
        let fd = placeholder.as_raw_fd();
        self.table.insert(fd, Entry { socket, placeholder });
        Ok(fd)
    }

    pub fn open(&mut self) -> io::Result<RawFd> {
        let reply = self.ask(Kind::Open, 0, 0, &[])?;
        self.adopt(reply.a)
    }

    /// Number of the socket in the region.
    pub fn socket_of(&self, fd: RawFd) -> u32 {
        self.table[&fd].socket
    }

    /// Descriptors of sockets, in order.
    pub fn fds(&self) -> Vec<RawFd> {
        self.table.keys().copied().collect()
    }

    pub fn keep_across_exec(&self, fd: RawFd) -> io::Result<()> {
        Ok(fcntl_setfd(&self.table[&fd].placeholder, FdFlags::empty())?)
    }

    fn shared(&self, fd: RawFd) -> &'static Socket {
        &self.region.sockets[self.socket_of(fd) as usize]
    }

    fn ring(&self, bell: u32) {
        self.region.clients[self.number].bells.push(bell);
        fence(SeqCst);
        if self.region.stack_sleeps.load(Relaxed) != 0 {
            _ = rustix::io::write(&self.stack_wake, &1u64.to_ne_bytes());
        }
    }

    /// Tells the stack that there is something to do for a socket, unless it knows.
    pub fn ring_for(&self, fd: RawFd) {
        if self.shared(fd).rung.swap(1, SeqCst) == 0 {
            self.ring(self.socket_of(fd));
        }
    }

    pub fn write(&self, fd: RawFd, bytes: &[u8]) -> usize {
        let count = self.shared(fd).write(bytes, || ());
        self.ring_for(fd);
        count
    }

    /// Writes as far as `commit`, and no bell.
    pub fn write_up_to(&self, fd: RawFd, bytes: &[u8], commit: impl FnOnce()) {
        self.shared(fd).write(bytes, commit);
    }

    /// Reads what there is, and waits until there is something.
    pub fn read(&self, fd: RawFd, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait_for(|| Some(self.shared(fd).take(bytes)).filter(|count| *count > 0))
    }

    /// Writes and reads back.
    pub fn echo(&self, fd: RawFd, text: &str) -> io::Result<()> {
        self.write(fd, text.as_bytes());
        self.expect(fd, &text.to_uppercase())
    }

    pub fn expect(&self, fd: RawFd, text: &str) -> io::Result<()> {
        let mut got = vec![0; text.len()];
        let mut at = 0;
        while at < got.len() {
            at += self.read(fd, &mut got[at..])?;
        }
        if got == text.as_bytes() {
            return Ok(());
        }
        Err(io::Error::other(format!("{:?} instead of {text:?}", String::from_utf8_lossy(&got))))
    }

    /// Takes a connection that the stack offers.
    pub fn accept(&mut self, credits: u32) -> io::Result<RawFd> {
        self.give_credits(credits);
        let socket = self.wait_for(|| self.take_offer())?;
        self.adopt(socket)
    }

    /// How many connections it would take.
    pub fn give_credits(&self, credits: u32) {
        self.region.clients[self.number].credits.store(credits, SeqCst);
        self.ring(0);
    }

    pub fn take_offer(&self) -> Option<u32> {
        let area = &self.region.clients[self.number];
        let taken = |slot: &usize| {
            area.offers[*slot].compare_exchange(offer::OFFERED, offer::TAKEN, SeqCst, Relaxed).is_ok()
        };
        let slot = (0..OFFERS).find(taken)?;
        let socket = area.offered[slot].load(Relaxed);
        self.ring(socket);
        Some(socket)
    }

    /// How many hold a socket, and its generation; 0 if it is free.
    pub fn status(&self, socket: u32) -> io::Result<(u32, u64)> {
        let reply = self.ask(Kind::Status, socket, 0, &[])?;
        Ok((reply.a, reply.b))
    }

    pub fn incoming(&self, count: u32) -> io::Result<()> {
        self.ask(Kind::Incoming, count, 0, &[]).map(|_| ())
    }

    fn wait_for<T>(&self, mut ready: impl FnMut() -> Option<T>) -> io::Result<T> {
        let until = Instant::now() + PATIENCE;
        let area = &self.region.clients[self.number];
        loop {
            if let Some(value) = ready() {
                return Ok(value);
            }
            area.sleeps.store(1, SeqCst);
            fence(SeqCst);
            if let Some(value) = ready() {
                return Ok(value);
            }
            if Instant::now() > until {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "nothing came"));
            }
            let nap = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&nap));
            _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    pub fn close(&mut self, fd: RawFd) {
        let Some(entry) = self.table.remove(&fd) else { return };
        if self.table.values().all(|other| other.socket != entry.socket) {
            self.ring(entry.socket | RELEASED);
        }
    }

    /// As fork(2): `None` in the child. The stack knows the child before there is one, so that nothing is lost whoever dies when.
    ///
    /// # Safety
    /// As for fork: no other thread.
    pub fn fork(&mut self) -> io::Result<Option<u32>> {
        let (ours, its) = control::pair()?;
        self.ask(Kind::Fork, 0, 0, &[its.as_fd()])?;
        drop(its);
        match sys::fork()? {
            Some(child) => Ok(Some(child)),
            None => {
                self.control = ours;
                Ok(None)
            }
        }
    }

    /// In a child: the first use of the stack. Until then the stack has kept its sockets.
    pub fn attach_child(self) -> io::Result<Self> {
        Self::on(self.control, self.table)
    }

    /// Sockets that another program keeps.
    fn kept(&self) -> io::Result<Vec<(RawFd, u32)>> {
        let mut kept = Vec::new();
        for (fd, entry) in &self.table {
            if !fcntl_getfd(&entry.placeholder)?.contains(FdFlags::CLOEXEC) {
                kept.push((*fd, entry.socket));
            }
        }
        Ok(kept)
    }

    /// What the next program has to know.
    fn describe(&self, control: &OwnedFd, number: Option<usize>) -> io::Result<OwnedFd> {
        let numbers = [control, &self.memory, &self.stack_wake, &self.wake].map(AsRawFd::as_raw_fd);
        let number = number.map_or(-1, |n| n as i64);
        let mut text = format!("{} {} {} {} {number}\n", numbers[0], numbers[1], numbers[2], numbers[3]);
        for (fd, socket) in self.kept()? {
            text += &format!("{fd} {socket}\n");
        }
        let state = memfd_create("ginnel-channel", MemfdFlags::empty())?;
        rustix::io::write(&state, text.as_bytes())?;
        Ok(state)
    }

    fn inheritable(&self, control: &OwnedFd, on: bool) -> io::Result<()> {
        let flags = if on { FdFlags::empty() } else { FdFlags::CLOEXEC };
        for fd in [control, &self.memory, &self.stack_wake, &self.wake] {
            fcntl_setfd(fd, flags)?;
        }
        Ok(())
    }

    /// As execve(2): returns only if it failed.
    pub fn exec(&mut self, program: &str, arguments: &[&str]) -> io::Result<()> {
        let set = self.kept()?.iter().fold(0u64, |set, (_, socket)| set | 1 << socket);
        let (ours, its) = control::pair()?;
        self.ask(Kind::Exec, 0, set, &[its.as_fd()])?;
        drop(its);
        let state = self.describe(&self.control, Some(self.number))?;
        self.inheritable(&self.control, true)?;
        let error = sys::exec(program, arguments, (STATE, &state.as_raw_fd().to_string()));
        self.inheritable(&self.control, false)?;
        rustix::io::write(&ours, &[1])?;
        Err(error)
    }

    /// As posix_spawn(3).
    pub fn spawn(&mut self, program: &str, arguments: &[&str]) -> io::Result<u32> {
        self.start(|variable| sys::spawn(program, arguments, variable))
    }

    /// As vfork(2) and execve(2), between which the child closes one of its descriptors. It has our memory until it is another program: the table in there must stay as it is.
    pub fn vfork(&mut self, unwanted: RawFd, program: &str, arguments: &[&str]) -> io::Result<u32> {
        self.start(|variable| sys::vfork(unwanted, program, arguments, variable))
    }

    /// Starts another program, which gets the sockets that are kept.
    fn start(&mut self, start: impl FnOnce((&str, &str)) -> io::Result<u32>) -> io::Result<u32> {
        let set = self.kept()?.iter().fold(0u64, |set, (_, socket)| set | 1 << socket);
        let (ours, its) = control::pair()?;
        self.ask(Kind::Fork, 1, set, &[its.as_fd()])?;
        drop(its);
        let state = self.describe(&ours, None)?;
        self.inheritable(&ours, true)?;
        let child = start((STATE, &state.as_raw_fd().to_string()));
        self.inheritable(&ours, false)?;
        child
    }

    /// In a new program: what the old one left. `None` if there was nothing.
    pub fn resume() -> io::Result<Option<Self>> {
        let Ok(number) = std::env::var(STATE) else { return Ok(None) };
        let broken = || io::Error::other("what the last program left is damaged");
        let state = sys::own(number.parse().map_err(|_| broken())?);
        rustix::fs::seek(&state, rustix::fs::SeekFrom::Start(0))?;
        let text = io::read_to_string(std::fs::File::from(state))?;
        let mut lines = text.lines().map(|line| line.split(' ').map(str::parse::<i64>));
        let head: Result<Vec<i64>, _> = lines.next().ok_or_else(broken)?.collect();
        let [control, memory, stack_wake, wake, number] = head.map_err(|_| broken())?[..] else {
            return Err(broken());
        };
        let [control, memory, stack_wake, wake] =
            [control, memory, stack_wake, wake].map(|fd| sys::own(fd as RawFd));
        let mut table = BTreeMap::new();
        for line in lines {
            let line: Result<Vec<i64>, _> = line.collect();
            let [fd, socket] = line.map_err(|_| broken())?[..] else { return Err(broken()) };
            let placeholder = sys::own(fd as RawFd);
            table.insert(fd as RawFd, Entry { socket: socket as u32, placeholder });
        }
        if number < 0 {
            return Self::on(control, table).map(Some);
        }
        let region = Region::map(&memory)?;
        let placeholder = eventfd(0, EventfdFlags::CLOEXEC)?;
        let client =
            Self { control, region, memory, stack_wake, wake, number: number as usize, placeholder, table };
        client.inheritable(&client.control, false)?;
        Ok(Some(client))
    }

    /// Sends a socket to another process: its descriptor becomes one whose last copy the stack can see go.
    pub fn share(&mut self, fd: RawFd, over: &UnixStream) -> io::Result<()> {
        let socket = self.socket_of(fd);
        let (ours, its) = control::pair()?;
        self.ask(Kind::Share, socket, control::cookie(&ours)?, &[its.as_fd()])?;
        let entry = self.table.get_mut(&fd).expect("looked at above");
        rustix::io::dup3(&ours, &mut entry.placeholder, rustix::io::DupFlags::CLOEXEC)?;
        control::send(over, Message::new(Kind::Share, 0, 0), &[entry.placeholder.as_fd()])
    }

    /// Receives a socket from another process.
    pub fn receive(&mut self, over: &UnixStream) -> io::Result<RawFd> {
        let received = control::receive(over, RecvFlags::empty())?;
        let placeholder =
            received.and_then(|(_, mut fds)| fds.pop()).ok_or_else(|| io::Error::other("nothing came"))?;
        let reply = self.ask(Kind::Resolve, 0, control::cookie(&placeholder)?, &[])?;
        let fd = placeholder.as_raw_fd();
        self.table.insert(fd, Entry { socket: reply.a, placeholder });
        Ok(fd)
    }

    /// Time of the lock of a socket alone, for the record.
    pub fn lock_once(&self, fd: RawFd) {
        drop(self.shared(fd).lock.lock());
    }
}

impl Client {
    /// Writes nonsense to everything of the region that belongs to this client and this socket, and rings for whatever comes up.
    pub fn scribble(&self, fd: RawFd, rounds: u32) {
        let (socket, area) = (self.shared(fd), &self.region.clients[self.number]);
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for _ in 0..rounds {
            let value = next();
            match next() % 6 {
                0 => socket.read.store(value, SeqCst),
                1 => socket.written.store(value, SeqCst),
                2 => socket.rung.store(value as u32, SeqCst),
                3 => area.offers[value as usize % OFFERS].store(value as u32 % 4, SeqCst),
                4 => area.offered[value as usize % OFFERS].store(value as u32, SeqCst),
                _ => self.ring(value as u32 & !RELEASED),
            }
        }
    }
}
