//! Steps of a sequence, and generation of sequences from a seed. A step names sockets by the slot into which
//! an earlier step put them, never by a result, so that the remaining steps stay meaningful when others are
//! removed.

use core::ffi::c_int;
use ginnel_devices::random::Random;
use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLERR, EPOLLET, EPOLLEXCLUSIVE, EPOLLHUP, EPOLLIN,
    EPOLLONESHOT, EPOLLOUT, EPOLLPRI, EPOLLRDHUP, EPOLLRDNORM, EPOLLWRNORM, IPPROTO_TCP, MSG_DONTWAIT,
    MSG_MORE, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, POLLIN, POLLOUT, POLLPRI, POLLRDHUP, POLLRDNORM, POLLWRNORM,
    SHUT_RD, SHUT_RDWR, SHUT_WR, SO_ACCEPTCONN, SO_ERROR, SO_KEEPALIVE, SO_LINGER, SO_RCVLOWAT, SOL_SOCKET,
    TCP_CORK, TCP_KEEPCNT, TCP_KEEPIDLE, TCP_NODELAY, TCP_QUICKACK,
};

/// Index of the slot that holds a descriptor.
pub type Place = usize;
/// Index of a host: 0 or 1.
pub type Host = usize;

/// One call, without the setup that keeps it from blocking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Socket { host: Host, place: Place, waits: bool },
    Bind { at: Place, to: Address },
    Listen { at: Place, backlog: c_int },
    Connect { at: Place, to: Place },
    Accept { at: Place, place: Place, waits: bool },
    Send { at: Place, lengths: Vec<usize>, flags: c_int },
    Recv { at: Place, lengths: Vec<usize>, flags: c_int },
    Shutdown { at: Place, how: c_int },
    Close { at: Place },
    Dup { at: Place, place: Place },
    SetNonblocking { at: Place, on: bool },
    SetOption { at: Place, level: c_int, name: c_int, value: Vec<c_int> },
    GetOption { at: Place, level: c_int, name: c_int },
    Names { at: Place },
    State { at: Place },
    Readable { at: Place },
    Poll { of: Vec<(Place, i16)> },
    Select { of: Vec<(Place, [bool; 3])> },
    EpollCreate { host: Host, place: Place },
    EpollCtl { set: Place, op: c_int, of: Place, events: u32, data: u64 },
    EpollWait { set: Place, most: usize },
}

/// Address to bind to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An automatic port at the host's address.
    Own,
    /// An automatic port at all addresses.
    Any,
    /// The address of another socket of the host.
    SameAs(Place),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Guess {
    Fresh,
    Listening,
    Stream,
    Set,
    Closed,
}

struct Known {
    host: Host,
    guess: Guess,
}

const LENGTHS: [usize; 8] = [1, 2, 3, 5, 8, 13, 100, 700];
const POLLED: [i16; 6] = [POLLIN, POLLOUT, POLLPRI, POLLRDHUP, POLLRDNORM, POLLWRNORM];
const WATCHED: [c_int; 8] =
    [EPOLLIN, EPOLLOUT, EPOLLPRI, EPOLLRDHUP, EPOLLRDNORM, EPOLLWRNORM, EPOLLERR, EPOLLHUP];
/// Options that sequences read.
const ASKED: [(c_int, c_int); 9] = [
    (SOL_SOCKET, SO_ERROR),
    (SOL_SOCKET, SO_ERROR),
    (SOL_SOCKET, SO_ACCEPTCONN),
    (SOL_SOCKET, SO_LINGER),
    (SOL_SOCKET, SO_RCVLOWAT),
    (SOL_SOCKET, SO_KEEPALIVE),
    (IPPROTO_TCP, TCP_NODELAY),
    (IPPROTO_TCP, TCP_KEEPIDLE),
    (IPPROTO_TCP, TCP_KEEPCNT),
];

/// Generates a sequence.
struct Maker {
    random: Random,
    known: Vec<Known>,
    steps: Vec<Step>,
}

/// Returns the sequence of a seed.
pub fn sequence(seed: u64) -> Vec<Step> {
    let mut maker = Maker { random: Random::new(seed), known: Vec::new(), steps: Vec::new() };
    maker.connection();
    let length = 10 + maker.random.below(50) as usize;
    while maker.steps.len() < length {
        maker.step();
    }
    maker.steps
}

impl Maker {
    fn place(&mut self, host: Host, guess: Guess) -> Place {
        self.known.push(Known { host, guess });
        self.known.len() - 1
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.random.below(100) < percent
    }

    fn one<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.random.below(of.len() as u64) as usize].clone()
    }

    /// Returns one of the slots that `fits` accepts; closed ones are rare.
    fn some(&mut self, fits: impl Fn(&Known) -> bool) -> Option<Place> {
        let closed = self.chance(3);
        let fit = |(_, known): &(Place, &Known)| fits(known) && (closed || known.guess != Guess::Closed);
        let all: Vec<Place> = self.known.iter().enumerate().filter(fit).map(|(place, _)| place).collect();
        if all.is_empty() { None } else { Some(self.one(&all)) }
    }

    /// Adds a listener at one host, and a connection from the other host to it.
    fn connection(&mut self) {
        let host = self.random.below(2) as Host;
        let listener = match self.some(|known| known.host == host && known.guess == Guess::Listening) {
            Some(listener) if self.random.below(2) == 0 => listener,
            _ => {
                let listener = self.place(host, Guess::Listening);
                let to = if self.chance(15) { Address::Any } else { Address::Own };
                self.steps.push(Step::Socket { host, place: listener, waits: false });
                self.undelay(listener);
                self.steps.push(Step::Bind { at: listener, to });
                self.steps.push(Step::Listen { at: listener, backlog: 16 });
                listener
            }
        };
        let host = self.known[listener].host;
        let from = self.place(1 - host, Guess::Stream);
        self.steps.push(Step::Socket { host: 1 - host, place: from, waits: false });
        self.undelay(from);
        if self.chance(30) {
            let watched = self.watched();
            self.watch(from, watched);
        }
        self.steps.push(Step::Connect { at: from, to: listener });
        if self.chance(90) {
            let waits = self.chance(10);
            let place = self.place(host, Guess::Stream);
            self.steps.push(Step::Accept { at: listener, place, waits });
            if self.chance(40) {
                let watched = self.watched();
                self.watch(place, watched);
            }
        }
    }

    /// Disables Nagle's algorithm on most sockets, because waiting for held-back data takes time.
    fn undelay(&mut self, at: Place) {
        if self.chance(75) {
            self.steps.push(Step::SetOption { at, level: IPPROTO_TCP, name: TCP_NODELAY, value: vec![1] });
        }
    }

    /// Returns random events and flags of an epoll entry.
    fn watched(&mut self) -> u32 {
        let mut events = if self.chance(80) { EPOLLIN } else { 0 };
        for event in WATCHED {
            if self.chance(25) {
                events |= event;
            }
        }
        for (behaviour, percent) in [(EPOLLET, 50), (EPOLLONESHOT, 12), (EPOLLEXCLUSIVE, 6)] {
            if self.chance(percent) {
                events |= behaviour;
            }
        }
        events.cast_unsigned()
    }

    /// Adds a descriptor to an epoll set of its host; creates the set if there is none.
    fn watch(&mut self, of: Place, events: u32) {
        let host = self.known[of].host;
        let set = self.some(|known| known.host == host && known.guess == Guess::Set);
        let set = set.filter(|set| *set != of).unwrap_or_else(|| {
            let set = self.place(host, Guess::Set);
            self.steps.push(Step::EpollCreate { host, place: set });
            set
        });
        self.steps.push(Step::EpollCtl { set, op: EPOLL_CTL_ADD, of, events, data: of as u64 });
    }

    fn lengths(&mut self) -> Vec<usize> {
        let count = if self.chance(80) { 1 } else { self.random.below(4) };
        (0..count).map(|_| if self.chance(3) { 0 } else { self.one(&LENGTHS) }).collect()
    }

    fn step(&mut self) {
        let kind = self.random.below(100);
        let step = match kind {
            0..4 => return self.connection(),
            4..6 => return self.open(),
            6..20 => self.send(),
            20..38 => self.recv(),
            38..44 => self.shutdown(),
            44..49 => self.close(),
            49..52 => self.dup(),
            52..58 => self.option(),
            58..64 => self.ask(),
            64..74 => self.poll(),
            74..77 => self.select(),
            77..87 => self.control(),
            _ => self.wait(),
        };
        self.steps.extend(step);
    }

    /// Adds a call on a new or unconnected socket.
    fn open(&mut self) {
        let host = self.random.below(2) as Host;
        match self.random.below(6) {
            0 => {
                let place = self.place(host, Guess::Set);
                self.steps.push(Step::EpollCreate { host, place });
            }
            1 => {
                let place = self.place(host, Guess::Fresh);
                let waits = self.chance(20);
                self.steps.push(Step::Socket { host, place, waits });
            }
            2 => {
                // Not on connected sockets: see "`bind` after a connection" in docs/posix.md.
                let bindable = |known: &Known| matches!(known.guess, Guess::Fresh | Guess::Listening);
                let Some(at) = self.some(bindable) else { return };
                let host = self.known[at].host;
                let bound = |known: &Known| known.host == host && bindable(known);
                let to = match self.some(bound) {
                    Some(other) if self.random.below(2) == 0 => Address::SameAs(other),
                    _ => Address::Own,
                };
                self.steps.push(Step::Bind { at, to });
            }
            3 => {
                let Some(at) = self.some(|known| known.guess != Guess::Set) else { return };
                self.steps.push(Step::Listen { at, backlog: 16 });
            }
            4 => {
                let Some(at) = self.some(|known| known.guess != Guess::Set) else { return };
                let host = self.known[at].host;
                let Some(to) = self.some(|known| known.host != host && known.guess != Guess::Set) else {
                    return;
                };
                self.known[at].guess = Guess::Stream;
                self.steps.push(Step::Connect { at, to });
            }
            _ => {
                let Some(at) = self.some(|known| known.guess != Guess::Set) else { return };
                let host = self.known[at].host;
                let place = self.place(host, Guess::Stream);
                self.steps.push(Step::Accept { at, place, waits: false });
            }
        }
    }

    fn bytes_at(&mut self) -> Option<Place> {
        let any = self.chance(6);
        self.some(|known| any || known.guess == Guess::Stream)
    }

    fn send(&mut self) -> Option<Step> {
        let at = self.bytes_at()?;
        let mut flags = 0;
        for (flag, percent) in [(MSG_DONTWAIT, 20), (MSG_MORE, 1)] {
            if self.chance(percent) {
                flags |= flag;
            }
        }
        Some(Step::Send { at, lengths: self.lengths(), flags })
    }

    fn recv(&mut self) -> Option<Step> {
        let at = self.bytes_at()?;
        let mut flags = 0;
        for (flag, percent) in [(MSG_DONTWAIT, 20), (MSG_PEEK, 12), (MSG_TRUNC, 6), (MSG_WAITALL, 6)] {
            if self.chance(percent) {
                flags |= flag;
            }
        }
        Some(Step::Recv { at, lengths: self.lengths(), flags })
    }

    fn shutdown(&mut self) -> Option<Step> {
        let at = self.bytes_at()?;
        let how = self.one(&[SHUT_RD, SHUT_WR, SHUT_WR, SHUT_RDWR]);
        Some(Step::Shutdown { at, how })
    }

    fn close(&mut self) -> Option<Step> {
        let at = self.some(|_| true)?;
        self.known[at].guess = Guess::Closed;
        Some(Step::Close { at })
    }

    fn dup(&mut self) -> Option<Step> {
        let at = self.some(|_| true)?;
        let Known { host, guess } = self.known[at];
        let place = self.place(host, guess);
        Some(Step::Dup { at, place })
    }

    fn option(&mut self) -> Option<Step> {
        // Not on listeners: see "options of a listener" in docs/posix.md.
        let at = self.some(|known| !matches!(known.guess, Guess::Set | Guess::Listening))?;
        let number = self.one(&[1, 0, 2, 4, 10, 50]);
        let (level, name, value) = match self.random.below(20) {
            0..2 => return Some(Step::SetNonblocking { at, on: self.chance(60) }),
            2..6 => (SOL_SOCKET, SO_LINGER, vec![c_int::from(self.chance(70)), 0]),
            6..9 => (SOL_SOCKET, SO_RCVLOWAT, vec![number]),
            9..12 => (IPPROTO_TCP, TCP_NODELAY, vec![number]),
            12..14 => (SOL_SOCKET, SO_KEEPALIVE, vec![number]),
            14..16 => (IPPROTO_TCP, TCP_KEEPCNT, vec![number]),
            // Rare, because waiting for held-back data takes time.
            16 => (IPPROTO_TCP, TCP_CORK, vec![number]),
            _ => (IPPROTO_TCP, TCP_QUICKACK, vec![number]),
        };
        Some(Step::SetOption { at, level, name, value })
    }

    fn ask(&mut self) -> Option<Step> {
        let at = self.some(|_| true)?;
        Some(match self.random.below(5) {
            0 => Step::Names { at },
            1 => Step::Readable { at },
            2 => Step::State { at },
            _ => {
                let (level, name) = self.one(&ASKED);
                Step::GetOption { at, level, name }
            }
        })
    }

    fn poll(&mut self) -> Option<Step> {
        let host = self.random.below(2) as Host;
        let mut of = Vec::new();
        for _ in 0..=self.random.below(3) {
            let place = self.some(|known| known.host == host)?;
            let mut events = 0;
            for event in POLLED {
                if self.chance(60) {
                    events |= event;
                }
            }
            of.push((place, events));
        }
        Some(Step::Poll { of })
    }

    fn select(&mut self) -> Option<Step> {
        let host = self.random.below(2) as Host;
        let mut of = Vec::new();
        for _ in 0..=self.random.below(3) {
            let place = self.some(|known| known.host == host && known.guess != Guess::Closed)?;
            of.push((place, [self.chance(70), self.chance(50), self.chance(30)]));
        }
        Some(Step::Select { of })
    }

    fn control(&mut self) -> Option<Step> {
        let events = self.watched();
        let op = self.one(&[EPOLL_CTL_ADD, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_MOD, EPOLL_CTL_DEL]);
        let of = self.some(|_| true)?;
        let host = self.known[of].host;
        if op == EPOLL_CTL_ADD {
            self.watch(of, events);
            return None;
        }
        let set = self.some(|known| known.host == host && known.guess == Guess::Set)?;
        Some(Step::EpollCtl { set, op, of, events, data: of as u64 + 100 })
    }

    fn wait(&mut self) -> Option<Step> {
        let any = self.chance(2);
        let set = self.some(|known| any || known.guess == Guess::Set)?;
        Some(Step::EpollWait { set, most: 16 })
    }
}
