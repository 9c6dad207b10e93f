//! Runs steps and records their results.

use crate::hosts::HostPair;
use crate::steps::{Address, Host, Slot, Step};
use crate::sys::{self, Fd, Sys};
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};

/// Timeout of blocking calls: no packet arrives while they wait, because all have arrived before.
const BLOCKING_TIMEOUT_US: i64 = 1000;

struct Runner<'a> {
    hosts: &'a mut dyn HostPair,
    slots: BTreeMap<Slot, (Host, Option<Fd>)>,
    /// Ports, numbered in the order in which they were seen.
    ports: HashMap<(String, u16), usize>,
    /// Number of bytes sent from each slot.
    sent: HashMap<Slot, usize>,
}

/// Runs steps. Returns the result of each.
pub fn run<'a>(hosts: &mut dyn HostPair, steps: impl Iterator<Item = &'a Step>) -> Vec<String> {
    let mut runner = Runner { hosts, slots: BTreeMap::new(), ports: HashMap::new(), sent: HashMap::new() };
    let mut transcript = Vec::new();
    for step in steps {
        let result = runner.step(step).unwrap_or_else(|| "empty slot".into());
        transcript.push(result);
        let open = runner.open();
        runner.hosts.settle(&open);
    }
    for (host, fd) in runner.slots.values() {
        if let Some(fd) = fd {
            // Closes descriptors that no step has closed.
            let _ = runner.hosts.host(*host).close(*fd);
        }
    }
    transcript
}

/// Value that a program may have left in `revents`.
const LEFTOVER: i16 = 0x7fff;
/// A descriptor that is not open.
const CLOSED: Fd = -1;

impl Runner<'_> {
    fn open(&self) -> Vec<Fd> {
        self.slots.values().filter_map(|(_, fd)| *fd).collect()
    }

    /// Returns host and descriptor of a slot, if it was filled.
    fn at(&self, slot: Slot) -> Option<(&dyn Sys, Fd)> {
        let (host, fd) = self.slots.get(&slot)?;
        Some((self.hosts.host(*host), fd.unwrap_or(CLOSED)))
    }

    fn fill_slot(&mut self, slot: Slot, host: Host, opened: Result<Fd, Errno>, blocking: bool) -> String {
        let Ok(fd) = opened else { return format!("{opened:?}") };
        self.slots.insert(slot, (host, Some(fd)));
        if blocking { self.set_timeouts(host, fd) } else { "open".into() }
    }

    /// Sets timeouts: calls on a blocking socket would never return otherwise.
    fn set_timeouts(&self, host: Host, fd: Fd) -> String {
        let sys = self.hosts.host(host);
        let time = [0i64.to_ne_bytes(), BLOCKING_TIMEOUT_US.to_ne_bytes()].concat();
        let set = [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO]
            .map(|name| sys.setsockopt(fd, libc::SOL_SOCKET, name, &time));
        format!("open, timeouts {set:?}")
    }

    /// Formats an address so that kernel and stack have equal names for it.
    fn name(&mut self, host: Host, address: Result<Vec<u8>, Errno>, is_peer: bool) -> String {
        let address = match address {
            Ok(address) if address.len() >= 8 => address,
            other => return format!("{other:?}"),
        };
        let ip = IpAddr::V4(Ipv4Addr::new(address[4], address[5], address[6], address[7]));
        // The kernel opens connections to any address of its loopback from 127.0.0.1.
        let opener = if is_peer { 1 - host } else { host };
        let host = match self.hosts.addresses().iter().position(|own| *own == ip) {
            Some(host) => format!("host {host}"),
            None if ip == IpAddr::V4(Ipv4Addr::LOCALHOST) => format!("host {opener}"),
            None => ip.to_string(),
        };
        let port = sys::port(&address);
        if port == 0 {
            return format!("{host}, no port");
        }
        let next = self.ports.len();
        let port = self.ports.entry((host.clone(), port)).or_insert(next);
        format!("{host}, port {port}")
    }

    fn bytes(&mut self, slot: Slot, lengths: &[usize]) -> Vec<Vec<u8>> {
        let sent = self.sent.entry(slot).or_default();
        let next = |_| {
            *sent += 1;
            (slot * 31 + *sent) as u8
        };
        let all: Vec<u8> = (0..lengths.iter().sum()).map(next).collect();
        let mut rest = &all[..];
        lengths
            .iter()
            .map(|length| {
                let (part, after) = rest.split_at(*length);
                rest = after;
                part.to_vec()
            })
            .collect()
    }

    fn bind(&mut self, at: Slot, to: &Address) -> Option<String> {
        let host = self.slots.get(&at)?.0;
        let own = self.hosts.addresses()[host];
        let address = match to {
            Address::Own => sys::address(SocketAddr::new(own, 0)),
            Address::Any => sys::address(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0)),
            Address::SameAs(other) => {
                let (sys, fd) = self.at(*other)?;
                let Ok(name) = sys.getsockname(fd) else { return None };
                if sys::port(&name) == 0 {
                    return None;
                }
                name
            }
        };
        let (sys, fd) = self.at(at)?;
        // Without this option, kernel and stack differ: see "bind to a port with connections in TIME_WAIT" in
        // docs/posix.md.
        let shared = sys.setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32.to_ne_bytes());
        Some(format!("{shared:?} {:?}", sys.bind(fd, &address)))
    }

    fn connect(&mut self, at: Slot, to: Slot) -> Option<String> {
        let host = self.slots.get(&to)?.0;
        let (sys, fd) = self.at(to)?;
        let name = sys.getsockname(fd).ok().filter(|name| sys::port(name) != 0)?;
        let to = sys::address(SocketAddr::new(self.hosts.addresses()[host], sys::port(&name)));
        let (sys, fd) = self.at(at)?;
        // Makes the socket nonblocking, because no packet would arrive while it waits.
        let free = sys.set_nonblocking(fd, true);
        Some(format!("{free:?} {:?}", sys.connect(fd, &to)))
    }

    fn poll(&self, of: &[(Slot, i16)]) -> Option<String> {
        let (host, _) = self.slots.get(&of.first()?.0)?;
        let mut fds: Vec<libc::pollfd> = of
            .iter()
            .filter_map(|(slot, events)| {
                let fd = self.slots.get(slot)?.1.unwrap_or(CLOSED);
                Some(libc::pollfd { fd, events: *events, revents: LEFTOVER })
            })
            .collect();
        let count = self.hosts.host(*host).poll(&mut fds, 0);
        let ready = fds.iter().map(|fd| sys::names(fd.revents.cast_unsigned().into()));
        Some(format!("{count:?} {:?}", ready.collect::<Vec<_>>()))
    }

    fn select(&self, of: &[(Slot, [bool; 3])]) -> Option<String> {
        let (host, _) = self.slots.get(&of.first()?.0)?;
        let sets = [0, 1, 2].map(|set| {
            let polled = of.iter().filter(|(_, sets)| sets[set]);
            polled.filter_map(|(slot, _)| self.slots.get(slot)?.1).collect::<Vec<Fd>>()
        });
        let result = match self.hosts.host(*host).select(&sets) {
            Ok((count, ready)) => {
                let polled = of.iter().map(|(slot, _)| self.slots.get(slot).and_then(|(_, fd)| *fd));
                let words = polled.map(|fd| {
                    let ready = ready.each_ref().map(|set| fd.is_some_and(|fd| set.contains(&fd)));
                    ["r", "w", "e"]
                        .iter()
                        .zip(ready)
                        .filter(|(_, ready)| *ready)
                        .map(|(word, _)| *word)
                        .collect()
                });
                format!("{count} {:?}", words.collect::<Vec<String>>())
            }
            Err(error) => format!("{error:?}"),
        };
        Some(result)
    }

    fn step(&mut self, step: &Step) -> Option<String> {
        match step {
            Step::Socket { host, slot, blocking } => {
                let flags = if *blocking { 0 } else { libc::SOCK_NONBLOCK };
                let opened = self.hosts.host(*host).socket(libc::AF_INET, libc::SOCK_STREAM | flags);
                Some(self.fill_slot(*slot, *host, opened, *blocking))
            }
            Step::EpollCreate { host, slot } => {
                let opened = self.hosts.host(*host).epoll_create();
                Some(self.fill_slot(*slot, *host, opened, false))
            }
            Step::Accept { at, slot, blocking } => {
                let host = self.slots.get(at)?.0;
                let (sys, fd) = self.at(*at)?;
                let accepted = sys.accept4(fd, if *blocking { 0 } else { libc::SOCK_NONBLOCK });
                Some(self.fill_slot(*slot, host, accepted, *blocking))
            }
            Step::Dup { at, slot } => {
                let host = self.slots.get(at)?.0;
                let (sys, fd) = self.at(*at)?;
                let copy = sys.dup(fd);
                Some(self.fill_slot(*slot, host, copy, false))
            }
            Step::Close { at } => {
                let (sys, fd) = self.at(*at)?;
                let result = format!("{:?}", sys.close(fd));
                self.slots.get_mut(at)?.1 = None;
                Some(result)
            }
            Step::Bind { at, to } => self.bind(*at, to),
            Step::Connect { at, to } => self.connect(*at, *to),
            Step::Listen { at, backlog } => {
                self.at(*at).map(|(sys, fd)| format!("{:?}", sys.listen(fd, *backlog)))
            }
            Step::Shutdown { at, how } => {
                self.at(*at).map(|(sys, fd)| format!("{:?}", sys.shutdown(fd, *how)))
            }
            Step::Readable { at } => self.at(*at).map(|(sys, fd)| format!("{:?}", sys.readable_bytes(fd))),
            Step::Send { at, lengths, flags } => {
                let bytes = self.bytes(*at, lengths);
                let (sys, fd) = self.at(*at)?;
                let parts: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
                Some(format!("{:?}", sys.sendv(fd, &parts, flags | libc::MSG_NOSIGNAL)))
            }
            Step::Recv { at, lengths, flags } => {
                let (sys, fd) = self.at(*at)?;
                Some(format!("{:?}", sys.recvv(fd, lengths, *flags)))
            }
            Step::SetNonblocking { at, on } => {
                let host = self.slots.get(at)?.0;
                let (sys, fd) = self.at(*at)?;
                let blocking = if *on { String::new() } else { self.set_timeouts(host, fd) };
                Some(format!("{blocking} {:?}", sys.set_nonblocking(fd, *on)))
            }
            Step::SetOption { at, level, name, value } => {
                let bytes: Vec<u8> = value.iter().flat_map(|word| word.to_ne_bytes()).collect();
                self.at(*at).map(|(sys, fd)| format!("{:?}", sys.setsockopt(fd, *level, *name, &bytes)))
            }
            Step::GetOption { at, level, name } => self.at(*at).map(|(sys, fd)| {
                let words = |bytes: Vec<u8>| -> Vec<c_int> {
                    bytes
                        .chunks_exact(4)
                        .map(|word| c_int::from_ne_bytes([word[0], word[1], word[2], word[3]]))
                        .collect()
                };
                format!("{:?}", sys.getsockopt(fd, *level, *name).map(words))
            }),
            Step::Names { at } => {
                let host = self.slots.get(at)?.0;
                let (sys, fd) = self.at(*at)?;
                let (own, peer) = (sys.getsockname(fd), sys.getpeername(fd));
                Some(format!("{} to {}", self.name(host, own, false), self.name(host, peer, true)))
            }
            Step::State { at } => self.at(*at).map(|(sys, fd)| {
                let info = sys.getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO);
                format!("{:?}", info.map(|info| info.first().copied()))
            }),
            Step::Poll { of } => self.poll(of),
            Step::Select { of } => self.select(of),
            Step::EpollCtl { set, op, of, events, data } => {
                let (_, of) = self.at(*of)?;
                self.at(*set).map(|(sys, set)| format!("{:?}", sys.epoll_ctl(set, *op, of, *events, *data)))
            }
            Step::EpollWait { set, max } => self.at(*set).map(|(sys, set)| {
                let events = sys.epoll_wait(set, *max, 0).map(|mut events| {
                    // "Order of events that became ready between two calls of `epoll_wait`" (docs/posix.md)
                    events.sort_by_key(|(_, data)| *data);
                    events.into_iter().map(|(events, data)| (sys::names(events), data)).collect::<Vec<_>>()
                });
                format!("{events:?}")
            }),
        }
    }
}
