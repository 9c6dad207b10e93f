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
pub type Slot = usize;
/// Index of a host: 0 or 1.
pub type Host = usize;

/// One call, without the setup that keeps it from blocking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Socket { host: Host, slot: Slot, blocking: bool },
    Bind { at: Slot, to: Address },
    Listen { at: Slot, backlog: c_int },
    Connect { at: Slot, to: Slot },
    Accept { at: Slot, slot: Slot, blocking: bool },
    Send { at: Slot, lengths: Vec<usize>, flags: c_int },
    Recv { at: Slot, lengths: Vec<usize>, flags: c_int },
    Shutdown { at: Slot, how: c_int },
    Close { at: Slot },
    Dup { at: Slot, slot: Slot },
    SetNonblocking { at: Slot, on: bool },
    SetOption { at: Slot, level: c_int, name: c_int, value: Vec<c_int> },
    GetOption { at: Slot, level: c_int, name: c_int },
    Names { at: Slot },
    State { at: Slot },
    Readable { at: Slot },
    Poll { of: Vec<(Slot, i16)> },
    Select { of: Vec<(Slot, [bool; 3])> },
    EpollCreate { host: Host, slot: Slot },
    EpollCtl { set: Slot, op: c_int, of: Slot, events: u32, data: u64 },
    EpollWait { set: Slot, max: usize },
}

/// Address to bind to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An automatic port at the host's address.
    Own,
    /// An automatic port at all addresses.
    Any,
    /// The address of another socket of the host.
    SameAs(Slot),
}

/// Expected content of a slot, if its call succeeds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    Fresh,
    Listening,
    Stream,
    Set,
    Closed,
}

struct SlotInfo {
    host: Host,
    expected: Expected,
}

const LENGTHS: [usize; 8] = [1, 2, 3, 5, 8, 13, 100, 700];
const POLL_EVENTS: [i16; 6] = [POLLIN, POLLOUT, POLLPRI, POLLRDHUP, POLLRDNORM, POLLWRNORM];
const EPOLL_EVENTS: [c_int; 8] =
    [EPOLLIN, EPOLLOUT, EPOLLPRI, EPOLLRDHUP, EPOLLRDNORM, EPOLLWRNORM, EPOLLERR, EPOLLHUP];
/// Options that sequences read.
const QUERIED_OPTIONS: [(c_int, c_int); 9] = [
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
struct Generator {
    random: Random,
    slots: Vec<SlotInfo>,
    steps: Vec<Step>,
}

/// Returns the sequence of a seed.
pub fn sequence(seed: u64) -> Vec<Step> {
    let mut generator = Generator { random: Random::new(seed), slots: Vec::new(), steps: Vec::new() };
    generator.connection();
    let length = 10 + generator.random.below(50) as usize;
    while generator.steps.len() < length {
        generator.step();
    }
    generator.steps
}

impl Generator {
    fn new_slot(&mut self, host: Host, expected: Expected) -> Slot {
        self.slots.push(SlotInfo { host, expected });
        self.slots.len() - 1
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.random.below(100) < percent
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.random.below(of.len() as u64) as usize].clone()
    }

    /// Returns one of the slots that `accepts` accepts; closed ones are rare.
    fn any_slot(&mut self, accepts: impl Fn(&SlotInfo) -> bool) -> Option<Slot> {
        let closed = self.chance(3);
        let fit =
            |(_, slot): &(Slot, &SlotInfo)| accepts(slot) && (closed || slot.expected != Expected::Closed);
        let all: Vec<Slot> = self.slots.iter().enumerate().filter(fit).map(|(slot, _)| slot).collect();
        if all.is_empty() { None } else { Some(self.pick(&all)) }
    }

    /// Adds a listener at one host, and a connection from the other host to it.
    fn connection(&mut self) {
        let host = self.random.below(2) as Host;
        let listener = match self.any_slot(|slot| slot.host == host && slot.expected == Expected::Listening) {
            Some(listener) if self.random.below(2) == 0 => listener,
            _ => {
                let listener = self.new_slot(host, Expected::Listening);
                let to = if self.chance(15) { Address::Any } else { Address::Own };
                self.steps.push(Step::Socket { host, slot: listener, blocking: false });
                self.set_nodelay(listener);
                self.steps.push(Step::Bind { at: listener, to });
                self.steps.push(Step::Listen { at: listener, backlog: 16 });
                listener
            }
        };
        let host = self.slots[listener].host;
        let from = self.new_slot(1 - host, Expected::Stream);
        self.steps.push(Step::Socket { host: 1 - host, slot: from, blocking: false });
        self.set_nodelay(from);
        if self.chance(30) {
            let events = self.epoll_events();
            self.add_to_epoll(from, events);
        }
        self.steps.push(Step::Connect { at: from, to: listener });
        if self.chance(90) {
            let blocking = self.chance(10);
            let slot = self.new_slot(host, Expected::Stream);
            self.steps.push(Step::Accept { at: listener, slot, blocking });
            if self.chance(40) {
                let events = self.epoll_events();
                self.add_to_epoll(slot, events);
            }
        }
    }

    /// Disables Nagle's algorithm on most sockets, because waiting for held-back data takes time.
    fn set_nodelay(&mut self, at: Slot) {
        if self.chance(75) {
            self.steps.push(Step::SetOption { at, level: IPPROTO_TCP, name: TCP_NODELAY, value: vec![1] });
        }
    }

    /// Returns random events and flags of an epoll entry.
    fn epoll_events(&mut self) -> u32 {
        let mut events = if self.chance(80) { EPOLLIN } else { 0 };
        for event in EPOLL_EVENTS {
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
    fn add_to_epoll(&mut self, of: Slot, events: u32) {
        let host = self.slots[of].host;
        let set = self.any_slot(|slot| slot.host == host && slot.expected == Expected::Set);
        let set = set.filter(|set| *set != of).unwrap_or_else(|| {
            let set = self.new_slot(host, Expected::Set);
            self.steps.push(Step::EpollCreate { host, slot: set });
            set
        });
        self.steps.push(Step::EpollCtl { set, op: EPOLL_CTL_ADD, of, events, data: of as u64 });
    }

    fn lengths(&mut self) -> Vec<usize> {
        let count = if self.chance(80) { 1 } else { self.random.below(4) };
        (0..count).map(|_| if self.chance(3) { 0 } else { self.pick(&LENGTHS) }).collect()
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
            58..64 => self.query(),
            64..74 => self.poll(),
            74..77 => self.select(),
            77..87 => self.epoll_ctl(),
            _ => self.epoll_wait(),
        };
        self.steps.extend(step);
    }

    /// Adds a call on a new or unconnected socket.
    fn open(&mut self) {
        let host = self.random.below(2) as Host;
        match self.random.below(6) {
            0 => {
                let slot = self.new_slot(host, Expected::Set);
                self.steps.push(Step::EpollCreate { host, slot });
            }
            1 => {
                let slot = self.new_slot(host, Expected::Fresh);
                let blocking = self.chance(20);
                self.steps.push(Step::Socket { host, slot, blocking });
            }
            2 => {
                // Not on connected sockets: see "`bind` after a connection" in docs/posix.md.
                let bindable =
                    |slot: &SlotInfo| matches!(slot.expected, Expected::Fresh | Expected::Listening);
                let Some(at) = self.any_slot(bindable) else { return };
                let host = self.slots[at].host;
                let bound = |slot: &SlotInfo| slot.host == host && bindable(slot);
                let to = match self.any_slot(bound) {
                    Some(other) if self.random.below(2) == 0 => Address::SameAs(other),
                    _ => Address::Own,
                };
                self.steps.push(Step::Bind { at, to });
            }
            3 => {
                let Some(at) = self.any_slot(|slot| slot.expected != Expected::Set) else { return };
                self.steps.push(Step::Listen { at, backlog: 16 });
            }
            4 => {
                let Some(at) = self.any_slot(|slot| slot.expected != Expected::Set) else { return };
                let host = self.slots[at].host;
                let Some(to) = self.any_slot(|slot| slot.host != host && slot.expected != Expected::Set)
                else {
                    return;
                };
                self.slots[at].expected = Expected::Stream;
                self.steps.push(Step::Connect { at, to });
            }
            _ => {
                let Some(at) = self.any_slot(|slot| slot.expected != Expected::Set) else { return };
                let host = self.slots[at].host;
                let slot = self.new_slot(host, Expected::Stream);
                self.steps.push(Step::Accept { at, slot, blocking: false });
            }
        }
    }

    fn stream_slot(&mut self) -> Option<Slot> {
        let any = self.chance(6);
        self.any_slot(|slot| any || slot.expected == Expected::Stream)
    }

    fn send(&mut self) -> Option<Step> {
        let at = self.stream_slot()?;
        let mut flags = 0;
        for (flag, percent) in [(MSG_DONTWAIT, 20), (MSG_MORE, 1)] {
            if self.chance(percent) {
                flags |= flag;
            }
        }
        Some(Step::Send { at, lengths: self.lengths(), flags })
    }

    fn recv(&mut self) -> Option<Step> {
        let at = self.stream_slot()?;
        let mut flags = 0;
        for (flag, percent) in [(MSG_DONTWAIT, 20), (MSG_PEEK, 12), (MSG_TRUNC, 6), (MSG_WAITALL, 6)] {
            if self.chance(percent) {
                flags |= flag;
            }
        }
        Some(Step::Recv { at, lengths: self.lengths(), flags })
    }

    fn shutdown(&mut self) -> Option<Step> {
        let at = self.stream_slot()?;
        let how = self.pick(&[SHUT_RD, SHUT_WR, SHUT_WR, SHUT_RDWR]);
        Some(Step::Shutdown { at, how })
    }

    fn close(&mut self) -> Option<Step> {
        let at = self.any_slot(|_| true)?;
        self.slots[at].expected = Expected::Closed;
        Some(Step::Close { at })
    }

    fn dup(&mut self) -> Option<Step> {
        let at = self.any_slot(|_| true)?;
        let SlotInfo { host, expected } = self.slots[at];
        let slot = self.new_slot(host, expected);
        Some(Step::Dup { at, slot })
    }

    fn option(&mut self) -> Option<Step> {
        // Not on listeners: see "options of a listener" in docs/posix.md.
        let at = self.any_slot(|slot| !matches!(slot.expected, Expected::Set | Expected::Listening))?;
        let number = self.pick(&[1, 0, 2, 4, 10, 50]);
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

    fn query(&mut self) -> Option<Step> {
        let at = self.any_slot(|_| true)?;
        Some(match self.random.below(5) {
            0 => Step::Names { at },
            1 => Step::Readable { at },
            2 => Step::State { at },
            _ => {
                let (level, name) = self.pick(&QUERIED_OPTIONS);
                Step::GetOption { at, level, name }
            }
        })
    }

    fn poll(&mut self) -> Option<Step> {
        let host = self.random.below(2) as Host;
        let mut of = Vec::new();
        for _ in 0..=self.random.below(3) {
            let slot = self.any_slot(|slot| slot.host == host)?;
            let mut events = 0;
            for event in POLL_EVENTS {
                if self.chance(60) {
                    events |= event;
                }
            }
            of.push((slot, events));
        }
        Some(Step::Poll { of })
    }

    fn select(&mut self) -> Option<Step> {
        let host = self.random.below(2) as Host;
        let mut of = Vec::new();
        for _ in 0..=self.random.below(3) {
            let slot = self.any_slot(|slot| slot.host == host && slot.expected != Expected::Closed)?;
            of.push((slot, [self.chance(70), self.chance(50), self.chance(30)]));
        }
        Some(Step::Select { of })
    }

    fn epoll_ctl(&mut self) -> Option<Step> {
        let events = self.epoll_events();
        let op = self.pick(&[EPOLL_CTL_ADD, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_MOD, EPOLL_CTL_DEL]);
        let of = self.any_slot(|_| true)?;
        let host = self.slots[of].host;
        if op == EPOLL_CTL_ADD {
            self.add_to_epoll(of, events);
            return None;
        }
        let set = self.any_slot(|slot| slot.host == host && slot.expected == Expected::Set)?;
        Some(Step::EpollCtl { set, op, of, events, data: of as u64 + 100 })
    }

    fn epoll_wait(&mut self) -> Option<Step> {
        let any = self.chance(2);
        let set = self.any_slot(|slot| any || slot.expected == Expected::Set)?;
        Some(Step::EpollWait { set, max: 16 })
    }
}
