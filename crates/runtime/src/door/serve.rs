//! The door's thread: who is there, what they hold, and what they ask for. It trusts nothing that comes from a process.

use super::Counts;
use super::crowd::{self, Comer};
use super::line::{self, Received};
use super::listen::{Caller, Knocker, maker_of};
use super::message::{
    Answer, Ask, CHILD, GUEST, Held, Hello, MAGIC, NAME_MAX, NOTE_MAX, Refusal, THINGS_MAX, Terms, VERSION,
    decode, encode, guest,
};
use super::users::{Users, pid_of};
use crate::channel::Thing;
use crate::channel::control::{Errand, Outcome, run};
use crate::command::Commander;
use crate::wait::EventFd;
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustix::process::{Resource, geteuid, getrlimit};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};

/// Connections that have not said who they are; of the user who has most of them the oldest makes room for one more (see `crowd`).
// limit: connections to the broker before their first message
pub(super) const SILENT_MAX: usize = 64;
/// Descriptors between processes that hold something of a domain: each takes one of this process's.
// limit: sockets of a domain in SCM_RIGHTS messages
pub(super) const PLACEHOLDERS_MAX: usize = 256;
/// Looks at what is ready, each at many, in which all that was there when somebody asked has been attended to, also where there is always more.
const LOOKS: u32 = 64;
/// Processes that want no place yet, of all users. A user has no more of them than it leaves free, so alone it gets half; users other than the stack's own and root have half of them together.
// limit: unattached processes
pub(super) const GUESTS_MAX: usize = 2048;
/// Each of them takes two descriptors, and they get no more than half of those that this process may have.
const DESCRIPTORS_PER_GUEST: u64 = 4;
/// Packets of one process that are attended to before others' are: its end stands behind the last.
const PACKETS_AT_ONCE: u32 = 4;
/// Events looked at in one go.
const EVENTS: usize = 64;
/// After an error that would only come again: no descriptors, usually.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

const HANDED: u64 = u64::MAX;
const KNOCKER: u64 = u64::MAX - 1;

/// What an event is about: a number, and which descriptor of it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Line = 0,
    Process = 1,
    Placeholder = 2,
}

/// What other threads of the stack's process hand to this one.
pub(super) enum Handed {
    /// A connection of a program that belongs to the domain of this name.
    Line(OwnedFd, String),
    /// Somebody who is told once all that is there already has been attended to.
    Asked(Sender<()>),
    /// The end.
    Close,
}

/// A descriptor that is watched for as long as the value lives: closing alone is not enough, for whoever sent it may have kept a copy.
struct Watched {
    fd: OwnedFd,
    epoll: Arc<OwnedFd>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        // It was added.
        let _ = epoll::delete(&self.epoll, &self.fd);
    }
}

/// A process, or one that is about to be, or a connection that did not say yet who it is.
struct Holder {
    line: Watched,
    /// The process itself: its connection may stay open when it dies, in a child that nobody was told of.
    process: Option<Watched>,
    user: u32,
    /// It is the stack's own user, or root: ports below `unprivileged_port_start` are its, too.
    any_port: bool,
    /// The domain it belongs to without saying so.
    name: Option<String>,
    /// Its domain, and its number on each shard.
    seated: Option<(u64, Vec<u32>)>,
    /// What wakes it, until it is given that.
    wake: Option<OwnedFd>,
    /// It has said who it is.
    greeted: bool,
    /// It wants no place yet.
    guest: bool,
}

impl Holder {
    fn comer(&self) -> Comer {
        Comer { user: self.user, at_home: self.any_port }
    }
}

/// A domain, while somebody is in it.
struct Home {
    user: u32,
    name: String,
    shards: Vec<Region>,
    holders: usize,
    placeholders: usize,
}

/// A domain on one shard.
struct Region {
    domain: u8,
    memory: OwnedFd,
    wake: OwnedFd,
}

/// A descriptor that may be anywhere, and what it holds.
struct Placeholder {
    end: Watched,
    cookie: u64,
    home: u64,
    things: Vec<Held>,
    /// What whoever receives it is told.
    note: Vec<u8>,
}

/// What the door's thread writes for others, and what it tells those who come in.
pub(super) struct Books {
    pub counts: Arc<Counts>,
    pub users: Arc<Users>,
    pub terms: Terms,
}

pub(super) struct Porter {
    knocker: Option<Knocker>,
    shards: Vec<Commander>,
    handed: Receiver<Handed>,
    wake: Arc<EventFd>,
    books: Books,
    epoll: Arc<OwnedFd>,
    /// In the order in which they came.
    holders: BTreeMap<u64, Holder>,
    homes: HashMap<u64, Home>,
    placeholders: HashMap<u64, Placeholder>,
    /// Numbers of placeholders by their cookies.
    cookies: HashMap<u64, u64>,
    next: u64,
    buffer: Vec<u8>,
    /// Who waits until nothing is left to be attended to, and for how many more looks at the longest.
    asked: Vec<Sender<()>>,
    looks: u32,
}

/// How many guests there may be in a process that may have so many descriptors.
pub(super) fn guests_max(descriptors: Option<u64>) -> usize {
    let share = descriptors.map_or(usize::MAX, |all| (all / DESCRIPTORS_PER_GUEST) as usize);
    GUESTS_MAX.min(share)
}

fn count(what: &AtomicU64) {
    what.fetch_add(1, Ordering::Relaxed);
}

impl Porter {
    pub fn new(
        knocker: Option<Knocker>,
        shards: Vec<Commander>,
        handed: Receiver<Handed>,
        wake: Arc<EventFd>,
        books: Books,
    ) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let add = |fd: BorrowedFd<'_>, what| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(what), epoll::EventFlags::IN)
        };
        add(wake.as_fd(), HANDED)?;
        if let Some(knocker) = &knocker {
            add(knocker.fd(), KNOCKER)?;
        }
        Ok(Self {
            knocker,
            shards,
            handed,
            wake,
            books,
            epoll,
            holders: BTreeMap::new(),
            homes: HashMap::new(),
            placeholders: HashMap::new(),
            cookies: HashMap::new(),
            next: 0,
            buffer: line::buffer(),
            asked: Vec::new(),
            looks: 0,
        })
    }

    /// Until the door is closed.
    pub fn serve(mut self) {
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [nothing; EVENTS];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            let patience = if self.asked.is_empty() { None } else { Some(&at_once) };
            let ready = match epoll::wait(&self.epoll, &mut events, patience) {
                Ok(ready) => ready,
                Err(Errno::INTR) => 0,
                Err(_) => {
                    std::thread::sleep(PAUSE);
                    0
                }
            };
            self.looks = self.looks.saturating_sub(1);
            if ready == 0 || self.looks == 0 {
                for asked in self.asked.drain(..) {
                    // It may not wait any more.
                    let _ = asked.send(());
                }
            }
            for event in &events[..ready] {
                match event.data.u64() {
                    HANDED => {
                        self.wake.clear();
                        while let Ok(handed) = self.handed.try_recv() {
                            match handed {
                                Handed::Line(line, name) => {
                                    self.meet(line, geteuid().as_raw(), Some(name));
                                }
                                Handed::Asked(asked) => {
                                    self.asked.push(asked);
                                    self.looks = LOOKS;
                                }
                                Handed::Close => return,
                            }
                        }
                    }
                    KNOCKER => self.let_in(),
                    data => self.attend(data),
                }
            }
        }
    }

    /// Watches a descriptor, unless it is one that cannot be watched.
    fn watch(&self, fd: OwnedFd, number: u64, what: What) -> Result<Watched, Refusal> {
        let data = epoll::EventData::new_u64(number << 2 | what as u64);
        match epoll::add(&self.epoll, &fd, data, epoll::EventFlags::IN) {
            Ok(()) => Ok(Watched { fd, epoll: self.epoll.clone() }),
            Err(_) => Err(Refusal::Malformed),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn let_in(&mut self) {
        let Some(knocker) = &self.knocker else { return };
        match knocker.answer() {
            Ok(Caller::Welcome(line, user)) => self.meet(line, user, None),
            Ok(Caller::Stranger(line)) => {
                count(&self.books.counts.turned_away);
                // It may be gone.
                let _ = line::send(&line, &encode(0, &Answer::Refused(Refusal::User)), &[]);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // It would be ready again at once.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }

    /// Somebody who has not said anything yet.
    fn meet(&mut self, line: OwnedFd, user: u32, name: Option<String>) {
        self.make_room();
        let number = self.number();
        let any_port = user == 0 || user == geteuid().as_raw();
        if let Ok(line) = self.watch(line, number, What::Line) {
            let holder = Holder {
                line,
                process: None,
                user,
                any_port,
                name,
                seated: None,
                wake: None,
                greeted: false,
                guest: false,
            };
            self.holders.insert(number, holder);
        }
    }

    /// So many may say nothing, of all users together.
    fn make_room(&mut self) {
        let silent = |holder: &Holder| !holder.greeted && holder.seated.is_none();
        let comers = self.holders.values().filter(|holder| silent(holder)).map(Holder::comer);
        let Some(user) = crowd::who_makes_room(comers, SILENT_MAX) else { return };
        let mut oldest = self.holders.iter().filter(|(_, holder)| silent(holder));
        let oldest = oldest.find(|(_, holder)| holder.user == user).map(|(number, _)| *number);
        if let Some(oldest) = oldest {
            count(&self.books.counts.turned_away);
            self.say(oldest, 0, &Answer::Refused(Refusal::Crowd), &[]);
            self.holders.remove(&oldest);
        }
    }

    /// Something happened to a process or a placeholder.
    fn attend(&mut self, data: u64) {
        let number = data >> 2;
        if data & 3 == What::Placeholder as u64 {
            let Some(placeholder) = self.placeholders.get(&number) else { return };
            // Somebody may write into it; that is nothing to us.
            if matches!(line::receive(&placeholder.end.fd, &mut self.buffer), Received::Closed) {
                self.let_go(number);
            }
            return;
        }
        if data & 3 == What::Process as u64 {
            if let Some(guest) = self.holders.get_mut(&number).filter(|holder| holder.guest) {
                // Its children may still have the connection.
                guest.process = None;
                self.books.users.note(number, 0);
                return;
            }
            self.hear_out(number);
            self.bury(number);
            return;
        }
        // A child that says its word and ends is gone before its parent, which learns of that, has its next question answered.
        for _ in 0..PACKETS_AT_ONCE {
            if !self.attend_to_packet(number) {
                break;
            }
        }
    }

    /// Whether there was one, and its sender stays.
    fn attend_to_packet(&mut self, number: u64) -> bool {
        let Some(holder) = self.holders.get(&number) else { return false };
        let stays = match line::receive(&holder.line.fd, &mut self.buffer) {
            Received::Nothing => return false,
            Received::Closed => false,
            Received::TooLong => {
                count(&self.books.counts.refused);
                false
            }
            Received::Packet(bytes, descriptors) => {
                // Taken out, because what is done with it needs the rest of the porter.
                let buffer = core::mem::take(&mut self.buffer);
                let stays = self.hear(number, &buffer[..bytes], descriptors);
                self.buffer = buffer;
                stays
            }
        };
        if !stays {
            self.bury(number);
        }
        stays
    }

    /// What a process said before it died still counts: it may have announced a child.
    fn hear_out(&mut self, number: u64) {
        let mut buffer = core::mem::take(&mut self.buffer);
        // One question is under way at a time, and behind it there may be one more.
        for _ in 0..2 {
            let Some(holder) = self.holders.get(&number) else { break };
            let Received::Packet(bytes, descriptors) = line::receive(&holder.line.fd, &mut buffer) else {
                break;
            };
            self.hear(number, &buffer[..bytes], descriptors);
        }
        self.buffer = buffer;
    }

    /// A message. Whether whoever sent it may stay.
    fn hear(&mut self, number: u64, bytes: &[u8], descriptors: Vec<OwnedFd>) -> bool {
        let Some(holder) = self.holders.get(&number) else { return true };
        if holder.guest {
            return self.hear_guest(number, bytes, descriptors);
        }
        if !holder.greeted {
            let (asked, hello) = decode::<Hello>(bytes);
            if let Some(hello) = hello.as_ref().filter(|hello| hello.magic == GUEST) {
                let noted = self.take_note(number, hello, descriptors);
                if let Err(why) = &noted {
                    count(&self.books.counts.turned_away);
                    // It hears of it when it wants to come in.
                    self.say(number, asked, &Answer::Refused(*why), &[]);
                }
                return noted.is_ok();
            }
            if let Some(hello) = hello.as_ref().filter(|hello| hello.magic == CHILD) {
                return match self.bear(number, hello, descriptors) {
                    Ok(()) => {
                        count(&self.books.counts.admitted);
                        true
                    }
                    Err(why) => {
                        count(&self.books.counts.turned_away);
                        self.say(number, asked, &Answer::Refused(why), &[]);
                        false
                    }
                };
            }
            let answer = match hello {
                Some(hello) if hello.magic == MAGIC => self.greet(number, &hello, descriptors),
                _ => Err(Refusal::Malformed),
            };
            return match answer {
                Ok(wake) => {
                    count(&self.books.counts.admitted);
                    // Cannot truncate: shards are 64 at the most.
                    self.say(
                        number,
                        asked,
                        &Answer::Welcome(self.shards.len() as u16, self.books.terms.clone()),
                        &[wake],
                    )
                }
                Err(why) => {
                    let full = matches!(why, Refusal::Clients | Refusal::Domains);
                    count(if full { &self.books.counts.no_room } else { &self.books.counts.turned_away });
                    self.say(number, asked, &Answer::Refused(why), &[]);
                    false
                }
            };
        }
        let (asked, ask) = decode::<Ask>(bytes);
        let Some(ask) = ask else {
            // Who speaks another language is not listened to any more: it may be the door itself, at the other end of a connection both of whose ends were sent here.
            count(&self.books.counts.refused);
            self.say(number, asked, &Answer::Refused(Refusal::Malformed), &[]);
            return false;
        };
        let answer = self.answer(number, ask, descriptors);
        let (answer, descriptors) = answer.unwrap_or_else(|why| {
            let full = matches!(why, Refusal::Clients | Refusal::Placeholders);
            count(if full { &self.books.counts.no_room } else { &self.books.counts.refused });
            (Answer::Refused(why), Vec::new())
        });
        self.say(number, asked, &answer, &descriptors)
    }

    /// What a guest says behind its first word. Whether it may stay.
    fn hear_guest(&mut self, number: u64, bytes: &[u8], mut descriptors: Vec<OwnedFd>) -> bool {
        let Some(holder) = self.holders.get(&number) else { return true };
        let (user, name) = (holder.user, holder.name.clone());
        match (bytes, descriptors.pop()) {
            ([guest::ENTERS], Some(line)) => self.meet(line, user, name),
            ([guest::IS_FOLLOWED], Some(line)) => self.let_follow(line, name),
            ([guest::IS], Some(process)) => return self.recognize(number, process),
            _ => count(&self.books.counts.refused),
        }
        true
    }

    /// Somebody inside has made a connection for a program of its own, which comes as the user who made it, as the kernel knows.
    fn let_follow(&mut self, line: OwnedFd, name: Option<String>) {
        match maker_of(&line) {
            // One domain for each user: the name is not for whoever comes to choose.
            Ok(user) => self.meet(line, user, Some(name.unwrap_or_default())),
            Err(_) => count(&self.books.counts.refused),
        }
    }

    /// Which process a guest is. Whether it may stay.
    fn recognize(&mut self, number: u64, process: OwnedFd) -> bool {
        let pid = pid_of(&process);
        let Ok(process) = self.watch(process, number, What::Process) else { return false };
        let Some(holder) = self.holders.get_mut(&number) else { return false };
        (holder.process, holder.greeted, holder.guest) = (Some(process), true, true);
        self.books.users.note(number, pid);
        true
    }

    /// The first word of somebody who wants no place yet.
    fn take_note(
        &mut self,
        number: u64,
        hello: &Hello,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        if hello.version != VERSION {
            return Err(Refusal::Version(VERSION));
        }
        let process = descriptors.pop().ok_or(Refusal::Malformed)?;
        let comer = self.holders.get(&number).ok_or(Refusal::Unknown)?.comer();
        let guests = self.holders.values().filter(|holder| holder.guest).map(Holder::comer);
        if !crowd::has_room(comer, guests, guests_max(getrlimit(Resource::Nofile).current)) {
            return Err(Refusal::Crowd);
        }
        if self.recognize(number, process) { Ok(()) } else { Err(Refusal::Malformed) }
    }

    /// Whether it could be said: whoever does not read answers is sent away.
    fn say(&self, number: u64, asked: u32, answer: &Answer, descriptors: &[OwnedFd]) -> bool {
        let Some(holder) = self.holders.get(&number) else { return false };
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        line::send(&holder.line.fd, &encode(asked, answer), &descriptors).is_ok()
    }

    /// The first word of a process. Returns what wakes it.
    fn greet(
        &mut self,
        number: u64,
        hello: &Hello,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<OwnedFd, Refusal> {
        if hello.version != VERSION {
            return Err(Refusal::Version(VERSION));
        }
        if hello.domain.len() > NAME_MAX {
            return Err(Refusal::Malformed);
        }
        let process = descriptors.pop().ok_or(Refusal::Malformed)?;
        let pid = pid_of(&process);
        let process = self.watch(process, number, What::Process)?;
        let holder = self.holders.get_mut(&number).ok_or(Refusal::Unknown)?;
        holder.process = Some(process);
        if holder.seated.is_none() {
            let name = holder.name.clone().unwrap_or_else(|| hello.domain.clone());
            let user = holder.user;
            let (home, seats, wake) = self.seat(user, &name)?;
            let holder = self.holders.get_mut(&number).ok_or(Refusal::Unknown)?;
            (holder.seated, holder.wake) = (Some((home, seats)), Some(wake));
        }
        let holder = self.holders.get_mut(&number).ok_or(Refusal::Unknown)?;
        holder.greeted = true;
        self.books.users.note(number, pid);
        holder.wake.take().ok_or(Refusal::Unknown)
    }

    /// The first word of a child, of which its parent has told.
    fn bear(&mut self, number: u64, hello: &Hello, mut descriptors: Vec<OwnedFd>) -> Result<(), Refusal> {
        if hello.version != VERSION {
            return Err(Refusal::Version(VERSION));
        }
        let process = descriptors.pop().ok_or(Refusal::Malformed)?;
        let pid = pid_of(&process);
        let process = self.watch(process, number, What::Process)?;
        let holder = self.holders.get_mut(&number).ok_or(Refusal::Unknown)?;
        // What wakes it stands here as long as nobody has it: of who was announced as a program.
        if holder.seated.is_none() || holder.wake.is_some() {
            return Err(Refusal::Unknown);
        }
        (holder.process, holder.greeted) = (Some(process), true);
        self.books.users.note(number, pid);
        Ok(())
    }

    /// A place on each shard for somebody in a domain.
    fn seat(&mut self, user: u32, name: &str) -> Result<(u64, Vec<u32>, OwnedFd), Refusal> {
        let home = self.homes.iter().find(|(_, home)| home.user == user && home.name == name);
        let home = home.map(|(number, _)| *number);
        let (ours, its) = wake_pair()?;
        if let Some(home) = home {
            let admit = |domain, wake| Errand::Admit { domain, wake };
            let seats = self.seat_in(home, &ours, admit)?;
            return Ok((home, seats, its));
        }
        let (mut shards, mut seats) = (Vec::new(), Vec::new());
        for shard in &self.shards {
            let wake = ours.try_clone().map_err(|_| Refusal::Clients)?;
            match run(shard, Errand::Open { wake }) {
                Ok(Outcome::Opened { domain, region, wake, client }) => {
                    shards.push(Region { domain, memory: region, wake });
                    seats.push(client);
                }
                other => {
                    for ((shard, region), client) in self.shards.iter().zip(&shards).zip(&seats) {
                        let _ = run(shard, Errand::Bury { domain: region.domain, client: *client });
                    }
                    return Err(if other.is_ok() { Refusal::Domains } else { Refusal::Gone });
                }
            }
        }
        let number = self.number();
        let home = Home { user, name: name.into(), shards, holders: 1, placeholders: 0 };
        self.homes.insert(number, home);
        Ok((number, seats, its))
    }

    /// A place on each shard in a domain that there is.
    fn seat_in(
        &mut self,
        home: u64,
        wake: &OwnedFd,
        mut errand: impl FnMut(u8, OwnedFd) -> Errand,
    ) -> Result<Vec<u32>, Refusal> {
        let there = self.homes.get_mut(&home).ok_or(Refusal::Unknown)?;
        let mut seats = Vec::new();
        for (shard, region) in self.shards.iter().zip(&there.shards) {
            let wake = wake.try_clone().map_err(|_| Refusal::Clients)?;
            match run(shard, errand(region.domain, wake)) {
                Ok(Outcome::Seat(client)) => seats.push(client),
                other => {
                    for ((shard, region), client) in self.shards.iter().zip(&there.shards).zip(&seats) {
                        let _ = run(shard, Errand::Bury { domain: region.domain, client: *client });
                    }
                    return Err(if other.is_ok() { Refusal::Clients } else { Refusal::Gone });
                }
            }
        }
        there.holders += 1;
        Ok(seats)
    }

    /// Where a process sits on a shard: its domain there, and its number.
    fn place(&self, number: u64, shard: u16) -> Result<(&Commander, &Region, u32), Refusal> {
        let holder = self.holders.get(&number).ok_or(Refusal::Unknown)?;
        let (home, seats) = holder.seated.as_ref().ok_or(Refusal::Unknown)?;
        let shard = usize::from(shard);
        let home = self.homes.get(home).ok_or(Refusal::Unknown)?;
        match (self.shards.get(shard), home.shards.get(shard), seats.get(shard)) {
            (Some(commander), Some(region), Some(client)) => Ok((commander, region, *client)),
            _ => Err(Refusal::Unknown),
        }
    }

    /// Does what a process asks for: the one place where that is decided.
    fn answer(
        &mut self,
        number: u64,
        ask: Ask,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(Answer, Vec<OwnedFd>), Refusal> {
        let answer = match ask {
            Ask::Attach(shard) => {
                let (_, region, client) = self.place(number, shard)?;
                let copies = [region.memory.try_clone(), region.wake.try_clone()];
                let copies: Result<Vec<OwnedFd>, _> = copies.into_iter().collect();
                return Ok((Answer::Seat(client), copies.map_err(|_| Refusal::Clients)?));
            }
            Ask::Shard(shard, request) => {
                let (commander, region, client) = self.place(number, shard)?;
                let holder = self.holders.get(&number).ok_or(Refusal::Unknown)?;
                let (user, start) = (holder.user, self.books.terms.unprivileged_port_start);
                // The library has looked, too; here nobody gets around it.
                if !holder.any_port && request.claims().is_some_and(|port| (1..start).contains(&port)) {
                    return Err(Refusal::Port(start));
                }
                // Root may have given up its rights since it came.
                let request = if user == 0 { request } else { request.of_user(user) };
                match run(commander, Errand::Ask { domain: region.domain, client, request }) {
                    Ok(Outcome::Reply(reply)) => Answer::Reply(reply),
                    Ok(_) => return Err(Refusal::Unknown),
                    Err(_) => return Err(Refusal::Gone),
                }
            }
            Ask::Fork => {
                let child = self.expect(number, None, descriptors)?;
                let holder = self.holders.get_mut(&child).ok_or(Refusal::Unknown)?;
                let wake = holder.wake.take().ok_or(Refusal::Unknown)?;
                let seats = holder.seated.as_ref().map_or_else(Vec::new, |(_, seats)| seats.clone());
                return Ok((Answer::Child(seats), vec![wake]));
            }
            Ask::Start(kept) => {
                self.expect(number, Some(kept), descriptors)?;
                Answer::Done
            }
            Ask::Share(cookie, things, note) => self.share(number, cookie, (things, note), descriptors)?,
            Ask::Resolve(cookie) => self.resolve(number, cookie)?,
            Ask::Follow => {
                let line = { descriptors }.pop().ok_or(Refusal::Malformed)?;
                let name = self.holders.get(&number).ok_or(Refusal::Unknown)?.name.clone();
                self.let_follow(line, name);
                Answer::Done
            }
        };
        Ok((answer, Vec::new()))
    }

    /// A process announces another, which will hold what it holds, or some of that. Returns its number.
    fn expect(
        &mut self,
        number: u64,
        kept: Option<Vec<Held>>,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<u64, Refusal> {
        let line = descriptors.pop().ok_or(Refusal::Malformed)?;
        if kept.as_ref().is_some_and(|kept| kept.len() > THINGS_MAX) {
            return Err(Refusal::Malformed);
        }
        let holder = self.holders.get(&number).ok_or(Refusal::Unknown)?;
        let (user, any_port, name) = (holder.user, holder.any_port, holder.name.clone());
        let (home, parents) = holder.seated.clone().ok_or(Refusal::Unknown)?;
        let (ours, its) = wake_pair()?;
        let child = self.number();
        let line = self.watch(line, child, What::Line)?;
        let mut shard = 0;
        let seats = self.seat_in(home, &ours, |domain, wake| {
            let kept = kept.as_ref().map(|kept| things_on(kept, shard));
            let parent = parents[shard];
            shard += 1;
            Errand::Fork { domain, parent, kept, wake }
        })?;
        let holder = Holder {
            line,
            process: None,
            user,
            any_port,
            name,
            seated: Some((home, seats)),
            wake: Some(its),
            greeted: false,
            guest: false,
        };
        self.holders.insert(child, holder);
        self.books.users.note(child, 0);
        Ok(child)
    }

    /// A process has a descriptor that it may send to others.
    fn share(
        &mut self,
        number: u64,
        cookie: u64,
        (things, note): (Vec<Held>, Vec<u8>),
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<Answer, Refusal> {
        let end = descriptors.pop().ok_or(Refusal::Malformed)?;
        let fits = (1..=THINGS_MAX).contains(&things.len()) && note.len() <= NOTE_MAX;
        if !fits || self.cookies.contains_key(&cookie) {
            return Err(Refusal::Malformed);
        }
        let holder = self.holders.get(&number).ok_or(Refusal::Unknown)?;
        let (home, _) = holder.seated.as_ref().ok_or(Refusal::Unknown)?;
        let home = *home;
        if self.homes.get(&home).is_none_or(|home| home.placeholders >= PLACEHOLDERS_MAX) {
            return Err(Refusal::Placeholders);
        }
        let placeholder = self.number();
        // To whoever does not know the library it is a connection whose other end has said all it had to say.
        let _ = shutdown(&end, Shutdown::Write);
        let end = self.watch(end, placeholder, What::Placeholder)?;
        let hold = |domain, client, things| Errand::Hold { domain, client, things };
        if let Err((why, done)) = self.for_each_shard(number, &things, hold) {
            self.undo(home, &things, done);
            return Err(why);
        }
        self.cookies.insert(cookie, placeholder);
        self.placeholders.insert(placeholder, Placeholder { end, cookie, home, things, note });
        if let Some(home) = self.homes.get_mut(&home) {
            home.placeholders += 1;
        }
        Ok(Answer::Done)
    }

    /// A process was sent such a descriptor.
    fn resolve(&mut self, number: u64, cookie: u64) -> Result<Answer, Refusal> {
        let placeholder = self.cookies.get(&cookie).and_then(|number| self.placeholders.get(number));
        let placeholder = placeholder.ok_or(Refusal::Unknown)?;
        let holder = self.holders.get(&number).ok_or(Refusal::Unknown)?;
        // Another domain has other memory.
        if holder.seated.as_ref().is_none_or(|(home, _)| *home != placeholder.home) {
            return Err(Refusal::Unknown);
        }
        let (things, note) = (placeholder.things.clone(), placeholder.note.clone());
        let resolve = |domain, client, things| Errand::Resolve { domain, client, things };
        self.for_each_shard(number, &things, resolve).map_err(|(why, _)| why)?;
        Ok(Answer::Things(things, note))
    }

    /// Asks each shard on which there are some of these things. An error comes with the number of shards that had agreed before.
    fn for_each_shard(
        &self,
        number: u64,
        things: &[Held],
        errand: impl Fn(u8, u32, Vec<Thing>) -> Errand,
    ) -> Result<(), (Refusal, usize)> {
        if things.iter().any(|held| usize::from(held.shard) >= self.shards.len()) {
            return Err((Refusal::Unknown, 0));
        }
        for shard in 0..self.shards.len() {
            let here = things_on(things, shard);
            if here.is_empty() {
                continue;
            }
            let (commander, region, client) = self.place(number, shard as u16).map_err(|why| (why, shard))?;
            match run(commander, errand(region.domain, client, here)) {
                Ok(Outcome::Done) => {}
                Ok(_) => return Err((Refusal::Unknown, shard)),
                Err(_) => return Err((Refusal::Gone, shard)),
            }
        }
        Ok(())
    }

    /// Things are held by a placeholder no more, on so many shards.
    fn undo(&self, home: u64, things: &[Held], shards: usize) {
        let Some(home) = self.homes.get(&home) else { return };
        for (index, (shard, region)) in self.shards.iter().zip(&home.shards).enumerate().take(shards) {
            let things = things_on(things, index);
            if !things.is_empty() {
                // A shard that is gone holds nothing.
                let _ = run(shard, Errand::LetGo { domain: region.domain, things });
            }
        }
    }

    /// The last copy of a descriptor is gone.
    fn let_go(&mut self, number: u64) {
        let Some(placeholder) = self.placeholders.remove(&number) else { return };
        self.cookies.remove(&placeholder.cookie);
        self.undo(placeholder.home, &placeholder.things, self.shards.len());
        if let Some(home) = self.homes.get_mut(&placeholder.home) {
            home.placeholders -= 1;
        }
        self.forget_if_empty(placeholder.home);
    }

    /// A process is gone: whatever it alone held ends.
    fn bury(&mut self, number: u64) {
        let Some(holder) = self.holders.remove(&number) else { return };
        if holder.guest {
            self.books.users.forget(number);
        }
        let Some((home, seats)) = holder.seated else { return };
        self.books.users.forget(number);
        count(&self.books.counts.buried);
        if let Some(home) = self.homes.get_mut(&home) {
            for ((shard, region), client) in self.shards.iter().zip(&home.shards).zip(&seats) {
                // A shard that is gone holds nothing.
                let _ = run(shard, Errand::Bury { domain: region.domain, client: *client });
            }
            home.holders -= 1;
        }
        self.forget_if_empty(home);
    }

    /// A domain without anybody in it is no longer one to join. On the shards it lives until its last byte is sent.
    fn forget_if_empty(&mut self, home: u64) {
        if self.homes.get(&home).is_some_and(|home| home.holders == 0 && home.placeholders == 0) {
            self.homes.remove(&home);
        }
    }
}

/// Those of the things that are on a shard.
fn things_on(things: &[Held], shard: usize) -> Vec<Thing> {
    things.iter().filter(|held| usize::from(held.shard) == shard).map(|held| held.thing).collect()
}

/// What wakes a process: our end and its.
fn wake_pair() -> Result<(OwnedFd, OwnedFd), Refusal> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Out of descriptors.
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(|_| Refusal::Clients)
}
