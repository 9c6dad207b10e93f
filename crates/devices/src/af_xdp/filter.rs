//! The redirect program with its maps: loaded, attached, and told at run time what is the stack's.

use super::assembler::Instruction;
use super::bpf::{self, AttachMode, MapKind};
use super::causes;
use super::config::{Attach, Take};
use super::redirect::{self, KEY_BYTES, Maps, PORT_BYTES, PORTS, UDP_PORTS_AT, WHOLE};
use core::net::IpAddr;
use core::ops::RangeInclusive;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Addresses that can be added at run time.
const ADDRESSES_MORE: u32 = 1024;

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// What is the stack's at an interface. Can be changed while frames come.
#[derive(Clone, Debug)]
pub struct Filter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    take: Take,
    sockets: OwnedFd,
    addresses: OwnedFd,
    ports: OwnedFd,
    missed: OwnedFd,
    /// What is in the map of ports, which is written as a whole.
    port_bits: Mutex<Box<[u8; PORT_BYTES]>>,
}

/// The program at its interface. It is detached when the last queue is gone, and by the kernel when the process is.
#[derive(Debug)]
pub(super) struct Attached {
    _link: OwnedFd,
    pub(super) mode: AttachMode,
}

impl Filter {
    /// Empty maps, with room for so many addresses and some more. Queues have numbers below `queues`.
    pub(super) fn new(take: Take, queues: u32, addresses: usize) -> io::Result<Self> {
        let addresses = u32::try_from(addresses).unwrap_or(u32::MAX).saturating_add(ADDRESSES_MORE);
        let map = |kind, key: usize, value: usize, entries, name| {
            // Cannot truncate: sizes of a few bytes.
            bpf::create_map(kind, key as u32, value as u32, entries, name).map_err(causes::of_map)
        };
        let inner = Inner {
            take,
            sockets: map(MapKind::Sockets, 4, 4, queues, "ginnel_sockets")?,
            addresses: map(MapKind::Hash, KEY_BYTES, 4, addresses, "ginnel_addrs")?,
            ports: map(MapKind::Array, 4, PORT_BYTES, 1, "ginnel_ports")?,
            missed: map(MapKind::Array, 4, 8, 1, "ginnel_missed")?,
            port_bits: Mutex::new(Box::new([0; PORT_BYTES])),
        };
        Ok(Self(Arc::new(inner)))
    }

    /// Loads the program.
    pub(super) fn load(&self, multi_buffer: bool) -> io::Result<OwnedFd> {
        let maps = Maps {
            sockets: self.0.sockets.as_raw_fd(),
            addresses: self.0.addresses.as_raw_fd(),
            ports: self.0.ports.as_raw_fd(),
            missed: self.0.missed.as_raw_fd(),
        };
        let code: Result<Vec<Instruction>, _> = match self.0.take {
            Take::All => redirect::everything(maps),
            Take::Addresses | Take::Ports => redirect::shared(maps),
        };
        let code = code.map_err(|error| io::Error::other(error.to_string()))?;
        bpf::load(&code, multi_buffer, "ginnel_redirect")
            .map_err(|(error, log)| causes::of_load(error, &log, multi_buffer))
    }

    /// An address, in a VLAN (0 is none), is the stack's from now on.
    ///
    /// # Errors
    /// What the kernel answered: 1,024 more than the device was opened with have room.
    pub fn add_address(&self, address: IpAddr, vlan: u16) -> io::Result<()> {
        let what = if self.0.take == Take::Ports { PORTS } else { WHOLE };
        Ok(bpf::update(self.0.addresses.as_fd(), &redirect::key(address, vlan), &what)?)
    }

    /// An address is the kernel's from now on.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn remove_address(&self, address: IpAddr, vlan: u16) -> io::Result<()> {
        Ok(bpf::remove(self.0.addresses.as_fd(), &redirect::key(address, vlan))?)
    }

    /// Ports of shared addresses are the stack's, or the kernel's, from now on.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn set_ports(&self, kind: PortKind, ports: RangeInclusive<u16>, ours: bool) -> io::Result<()> {
        let mut bits = self.0.port_bits.lock().unwrap_or_else(PoisonError::into_inner);
        let start = usize::from(if kind == PortKind::Udp { UDP_PORTS_AT } else { 0 });
        for port in ports {
            let (byte, bit) = (start + usize::from(port / 8), 1 << (port % 8));
            if ours {
                bits[byte] |= bit;
            } else {
                bits[byte] &= !bit;
            }
        }
        Ok(bpf::update(self.0.ports.as_fd(), &0u32, &**bits)?)
    }

    /// Frames for the stack that came on a queue of the interface that is none of the device's, and were dropped.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn missed(&self) -> io::Result<u64> {
        Ok(bpf::look_up(self.0.missed.as_fd(), &0u32)?)
    }

    /// A socket gets the frames of its queue from now on.
    pub(super) fn add_socket(&self, queue: u16, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        bpf::update(self.0.sockets.as_fd(), &u32::from(queue), &socket.as_raw_fd())
    }
}

/// Attaches a program to an interface.
pub(super) fn attach(
    program: &OwnedFd,
    interface: (&str, u32),
    how: Attach,
    zero_copy: bool,
) -> io::Result<Attached> {
    let (name, index) = interface;
    let attempt = |mode| bpf::attach(program.as_fd(), index, mode).map(|link| Attached { _link: link, mode });
    let first = if how == Attach::Generic { AttachMode::Generic } else { AttachMode::Driver };
    match attempt(first) {
        Ok(attached) => Ok(attached),
        Err(error) if how == Attach::Auto && !zero_copy && !causes::is_occupied(error) => {
            tracing::warn!(
                interface = name,
                %error,
                "the driver does not take the redirect program: it runs before the kernel's own path, which is slower"
            );
            attempt(AttachMode::Generic).map_err(|error| causes::of_attach(error, how))
        }
        Err(error) => Err(causes::of_attach(error, how)),
    }
}

#[cfg(all(test, not(loom)))]
impl Attached {
    /// One that is attached to nothing.
    pub(super) fn of(link: OwnedFd) -> Arc<Self> {
        Arc::new(Self { _link: link, mode: AttachMode::Generic })
    }
}
