//! A stack process as far as a channel can see it: sockets that send back in capitals what is written to them, and no TCP.

use crate::control::{self, Kind, Message};
use crate::region::{BUFFER_BYTES, CLIENTS, OFFERS, RELEASED, Region, SOCKETS, offer, state};
use core::sync::atomic::{Ordering::*, fence};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::Timespec;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use std::io;
use std::time::{Duration, Instant};

/// An offer that was not taken for so long goes to another worker.
const OFFER_MAX: Duration = Duration::from_millis(50);

/// Sockets, a bit each.
type Set = u64;

/// Whoever keeps sockets alive through one connection to the stack: a process, or a child that did not say so yet.
struct Holder {
    control: OwnedFd,
    held: Set,
    /// Its area, once it has attached.
    number: Option<usize>,
    wake: OwnedFd,
    /// The process. It may die while others keep its connection open.
    process: Option<OwnedFd>,
    /// It wants to become another program that keeps these.
    exec: Option<(OwnedFd, Set)>,
    offers: [Option<(u32, Instant)>; OFFERS],
    /// It did not take what it was offered: its credits are worth nothing until it rings again.
    dozes: bool,
    gone: bool,
}

impl Holder {
    fn new(control: OwnedFd, held: Set) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let offers = [None; OFFERS];
        Ok(Self {
            control,
            held,
            number: None,
            wake,
            process: None,
            exec: None,
            offers,
            dozes: false,
            gone: false,
        })
    }
}

/// A descriptor for a socket that left its process.
struct Token {
    end: OwnedFd,
    cookie: u64,
    socket: u32,
    gone: bool,
}

/// What the stack knows of a socket, which no client can change.
#[derive(Clone, Copy, Default)]
struct Private {
    open: bool,
    generation: u32,
    received: u64,
    sent: u64,
}

pub struct Stack {
    region: &'static Region,
    memory: OwnedFd,
    wake: OwnedFd,
    listener: OwnedFd,
    holders: Vec<Holder>,
    tokens: Vec<Token>,
    sockets: [Private; SOCKETS],
    /// Connections that no worker took yet.
    incoming: Vec<u32>,
}

/// Sends what is in the set of a poll.
#[derive(Clone, Copy)]
enum Source {
    Wake,
    Listener,
    Control(usize),
    Process(usize),
    Exec(usize),
    Token(usize),
}

impl Stack {
    pub fn new(path: &str) -> io::Result<Self> {
        let (region, memory) = Region::create()?;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, 16)?;
        Ok(Self {
            region,
            memory,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            listener,
            holders: Vec::new(),
            tokens: Vec::new(),
            sockets: [Private::default(); SOCKETS],
            incoming: Vec::new(),
        })
    }

    /// Serves until somebody ends the process.
    pub fn run(&mut self) -> io::Result<()> {
        loop {
            let busy = self.take_bells(None) | self.make_offers();
            self.end_unheld();
            if busy {
                continue;
            }
            self.region.stack_sleeps.store(1, Relaxed);
            fence(SeqCst);
            let late = self.take_bells(None);
            if !late {
                self.wait()?;
            }
            self.region.stack_sleeps.store(0, Relaxed);
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        let mut sources = vec![(Source::Wake, self.wake.as_fd()), (Source::Listener, self.listener.as_fd())];
        for (i, holder) in self.holders.iter().enumerate() {
            sources.push((Source::Control(i), holder.control.as_fd()));
            sources.extend(holder.process.as_ref().map(|p| (Source::Process(i), p.as_fd())));
            sources.extend(holder.exec.as_ref().map(|(p, _)| (Source::Exec(i), p.as_fd())));
        }
        for (i, token) in self.tokens.iter().enumerate() {
            sources.push((Source::Token(i), token.end.as_fd()));
        }
        let mut fds: Vec<PollFd<'_>> =
            sources.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        // Offers are taken back after a while.
        let nap = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        match poll(&mut fds, Some(&nap)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<Source> =
            fds.iter().zip(&sources).filter(|(fd, _)| !fd.revents().is_empty()).map(|(_, s)| s.0).collect();
        for source in ready {
            self.serve(source)?;
        }
        self.bury();
        Ok(())
    }

    fn serve(&mut self, source: Source) -> io::Result<()> {
        match source {
            Source::Wake => _ = rustix::io::read(&self.wake, &mut [0; 8]),
            Source::Listener => {
                let control = accept_with(&self.listener, SocketFlags::CLOEXEC)?;
                self.holders.push(Holder::new(control, 0)?);
            }
            Source::Control(i) => match control::receive(&self.holders[i].control, RecvFlags::DONTWAIT) {
                Ok(Some((message, fds))) => {
                    // What it did before is in its ring.
                    self.take_bells(Some(i));
                    if self.answer(i, message, fds).is_err() {
                        self.holders[i].gone = true;
                    }
                }
                Ok(None) => self.holders[i].gone = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => self.holders[i].gone = true,
            },
            Source::Process(i) => self.holders[i].gone = true,
            Source::Exec(i) => {
                let Some((end, kept)) = self.holders[i].exec.take() else { return Ok(()) };
                // A byte says that it failed; a hang-up that the old program is gone.
                if rustix::io::read(&end, &mut [0; 1]) == Ok(0) {
                    self.take_bells(Some(i));
                    self.holders[i].held &= kept;
                }
            }
            Source::Token(i) => self.tokens[i].gone = true,
        }
        Ok(())
    }

    fn answer(&mut self, i: usize, message: Message, fds: Vec<OwnedFd>) -> io::Result<()> {
        let mut fds = fds.into_iter();
        let refused = Message::new(Kind::Refused, 0, 0);
        let reply = match message.kind {
            Kind::Attach => {
                let used = |n: &usize| self.holders.iter().any(|h| h.number == Some(*n));
                let Some(number) = (0..CLIENTS).find(|n| !used(n)) else {
                    return control::send(&self.holders[i].control, refused, &[]);
                };
                self.clear_area(number);
                let holder = &mut self.holders[i];
                holder.number = Some(number);
                holder.process = fds.next();
                let with: [BorrowedFd<'_>; 3] = [self.memory.as_fd(), self.wake.as_fd(), holder.wake.as_fd()];
                return control::send(
                    &holder.control,
                    Message::new(Kind::Attach, number as u32, holder.held),
                    &with,
                );
            }
            Kind::Open => match self.open() {
                Some(socket) => {
                    self.holders[i].held |= 1 << socket;
                    Message::new(Kind::Open, socket, 0)
                }
                None => refused,
            },
            Kind::Fork => match fds.next() {
                Some(control) => {
                    let held = self.holders[i].held;
                    let held = if message.a == 0 { held } else { held & message.b };
                    self.holders.push(Holder::new(control, held)?);
                    message
                }
                None => refused,
            },
            Kind::Exec => {
                self.holders[i].exec = fds.next().map(|end| (end, message.b));
                message
            }
            Kind::Share => match fds.next() {
                Some(end) if self.holds(i, message.a) => {
                    self.tokens.push(Token { end, cookie: message.b, socket: message.a, gone: false });
                    message
                }
                _ => refused,
            },
            Kind::Resolve => match self.tokens.iter().find(|t| t.cookie == message.b) {
                Some(token) => {
                    self.holders[i].held |= 1 << token.socket;
                    Message::new(Kind::Resolve, token.socket, 0)
                }
                None => refused,
            },
            Kind::Status => {
                let socket = message.a as usize % SOCKETS;
                let private = self.sockets[socket];
                let generation = if private.open { u64::from(private.generation) } else { 0 };
                Message::new(Kind::Status, self.holders_of(socket), generation)
            }
            Kind::Incoming => {
                for _ in 0..message.a {
                    let connection = self.open();
                    self.incoming.extend(connection);
                }
                message
            }
            Kind::Refused => refused,
        };
        control::send(&self.holders[i].control, reply, &[])
    }

    /// The area of a new client: nothing of an old one is left in it.
    fn clear_area(&self, number: usize) {
        let area = &self.region.clients[number];
        while area.bells.pop().is_some() {}
        area.credits.store(0, Relaxed);
        area.sleeps.store(0, Relaxed);
        for slot in &area.offers {
            slot.store(offer::NONE, Release);
        }
    }

    fn open(&mut self) -> Option<u32> {
        let socket = self.sockets.iter().position(|s| !s.open)?;
        let private = &mut self.sockets[socket];
        *private = Private { open: true, generation: private.generation + 1, received: 0, sent: 0 };
        let shared = &self.region.sockets[socket];
        for position in [&shared.received, &shared.sent, &shared.read, &shared.written] {
            position.store(0, Relaxed);
        }
        shared.rung.store(0, Relaxed);
        shared.generation.store(private.generation, Relaxed);
        shared.state.store(state::OPEN, Release);
        Some(socket as u32)
    }

    fn holds(&self, i: usize, socket: u32) -> bool {
        (socket as usize) < SOCKETS && self.holders[i].held & 1 << socket != 0
    }

    fn holders_of(&self, socket: usize) -> u32 {
        let holders = self.holders.iter().filter(|h| h.held & 1 << socket != 0).count();
        let tokens = self.tokens.iter().filter(|t| t.socket as usize == socket).count();
        (holders + tokens) as u32
    }

    /// Takes the bells of one client, or of all. Whether there were any.
    fn take_bells(&mut self, only: Option<usize>) -> bool {
        let mut any = false;
        for i in 0..self.holders.len() {
            let Some(number) = self.holders[i].number.filter(|_| only.is_none_or(|only| only == i)) else {
                continue;
            };
            for _ in 0..2 * SOCKETS {
                let Some(bell) = self.region.clients[number].bells.pop() else { break };
                any = true;
                self.holders[i].dozes = false;
                let socket = bell & !RELEASED;
                if socket as usize >= SOCKETS {
                    continue;
                }
                self.settle_offers(i, number);
                if self.holds(i, socket) && bell & RELEASED != 0 {
                    self.holders[i].held &= !(1 << socket);
                }
                self.work(socket as usize);
            }
        }
        any
    }

    /// What a socket has to do: here, to send back in capitals.
    fn work(&mut self, socket: usize) {
        if !self.sockets[socket].open {
            return;
        }
        let shared = &self.region.sockets[socket];
        // From here on it is rung again for what comes later.
        shared.rung.store(0, SeqCst);
        let mut bytes = [0; BUFFER_BYTES];
        let private = &mut self.sockets[socket];
        let room = shared.room(private.received);
        let count = shared.take_outgoing(private.sent, &mut bytes[..room]);
        if count == 0 {
            return;
        }
        private.sent += count as u64;
        bytes[..count].make_ascii_uppercase();
        shared.give(private.received, &bytes[..count]);
        private.received += count as u64;
        fence(SeqCst);
        for holder in self.holders.iter().filter(|h| h.held & 1 << socket != 0) {
            let Some(number) = holder.number else { continue };
            if self.region.clients[number].sleeps.swap(0, SeqCst) != 0 {
                _ = rustix::io::write(&holder.wake, &1u64.to_ne_bytes());
            }
        }
    }

    /// What a worker took is its own.
    fn settle_offers(&mut self, i: usize, number: usize) {
        let area = &self.region.clients[number];
        let holder = &mut self.holders[i];
        for (slot, offered) in holder.offers.iter_mut().enumerate() {
            let Some((socket, _)) = *offered else { continue };
            if area.offers[slot].load(Acquire) == offer::TAKEN {
                *offered = None;
                area.offers[slot].store(offer::NONE, Release);
                holder.held |= 1 << socket;
            }
        }
    }

    /// Gives connections to workers with credit, and takes back what was not taken. Whether anything happened.
    fn make_offers(&mut self) -> bool {
        let now = Instant::now();
        let mut any = false;
        for i in 0..self.holders.len() {
            let Some(number) = self.holders[i].number else { continue };
            self.settle_offers(i, number);
            if self.somebody_else_would(i) {
                any |= self.revoke(i, number, |since| now - since > OFFER_MAX);
            }
        }
        for i in 0..self.holders.len() {
            let Some(number) = self.holders[i].number else { continue };
            any |= self.offer(i, number, now);
        }
        any
    }

    /// Whether a worker has credit that is not used up.
    fn has_credit(&self, i: usize) -> bool {
        let holder = &self.holders[i];
        let outstanding = holder.offers.iter().flatten().count();
        let credits = holder.number.map_or(0, |n| self.region.clients[n].credits.load(Acquire));
        !holder.dozes && outstanding < (credits as usize).min(OFFERS)
    }

    fn somebody_else_would(&self, i: usize) -> bool {
        (0..self.holders.len()).any(|other| other != i && self.has_credit(other))
    }

    fn offer(&mut self, i: usize, number: usize, now: Instant) -> bool {
        let mut any = false;
        while !self.incoming.is_empty() && self.has_credit(i) {
            let Some(slot) = self.holders[i].offers.iter().position(Option::is_none) else { break };
            let socket = self.incoming.remove(0);
            self.holders[i].offers[slot] = Some((socket, now));
            let area = &self.region.clients[number];
            area.offered[slot].store(socket, Relaxed);
            area.offers[slot].store(offer::OFFERED, SeqCst);
            if area.sleeps.swap(0, SeqCst) != 0 {
                _ = rustix::io::write(&self.holders[i].wake, &1u64.to_ne_bytes());
            }
            any = true;
        }
        any
    }

    /// Takes offers back that are not taken yet. The worker cannot take them at the same time: one of both wins.
    fn revoke(&mut self, i: usize, number: usize, old: impl Fn(Instant) -> bool) -> bool {
        let mut any = false;
        for slot in 0..OFFERS {
            let Some((socket, since)) = self.holders[i].offers[slot] else { continue };
            let state = &self.region.clients[number].offers[slot];
            if old(since) && state.compare_exchange(offer::OFFERED, offer::NONE, SeqCst, Relaxed).is_ok() {
                self.holders[i].offers[slot] = None;
                self.holders[i].dozes = true;
                self.incoming.push(socket);
                any = true;
            }
        }
        any
    }

    /// Holders and tokens that are gone.
    fn bury(&mut self) {
        for i in 0..self.holders.len() {
            if !self.holders[i].gone {
                continue;
            }
            self.take_bells(Some(i));
            if let Some(number) = self.holders[i].number {
                self.settle_offers(i, number);
                self.revoke(i, number, |_| true);
            }
            // It may have died after it wrote and before it rang.
            let held = self.holders[i].held;
            for socket in (0..SOCKETS).filter(|s| held & 1 << s != 0) {
                self.work(socket);
            }
        }
        self.holders.retain(|h| !h.gone);
        self.tokens.retain(|t| !t.gone);
    }

    /// A socket that nobody holds ends, as the kernel ends one with its last descriptor.
    fn end_unheld(&mut self) {
        for socket in 0..SOCKETS {
            let waits = self.incoming.contains(&(socket as u32))
                || self.holders.iter().any(|h| h.offers.iter().flatten().any(|(s, _)| *s == socket as u32));
            if self.sockets[socket].open && !waits && self.holders_of(socket) == 0 {
                self.sockets[socket].open = false;
                self.region.sockets[socket].state.store(state::FREE, Release);
            }
        }
    }
}
