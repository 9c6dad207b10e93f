//! The redirect program with its maps: loads and attaches it, and changes at run time which frames it
//! redirects.

use super::assembler::Instruction;
use super::bpf::{self, AttachMode, MapKind};
use super::config::{Attach, RedirectScope};
use super::errors;
use super::redirect::{self, KEY_BYTES, Maps, PORT_BYTES, SCOPE_ADDRESS, SCOPE_PORTS, UDP_PORTS_AT};
use crate::ethtool::flow_filters::InterfaceFilters;
use crate::port_filters::PortFilters;
use core::net::IpAddr;
use core::ops::RangeInclusive;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Addresses that can be added at run time.
const ADDRESSES_EXTRA: u32 = 1024;

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// The addresses and ports whose frames are redirected to the stack. They can be changed while frames arrive.
#[derive(Clone, Debug)]
pub struct RedirectFilter(Arc<FilterMaps>);

#[derive(Debug)]
struct FilterMaps {
    take: RedirectScope,
    sockets: OwnedFd,
    addresses: OwnedFd,
    ports: OwnedFd,
    drops_without_socket: OwnedFd,
    /// Content of the map of ports, which is a single value and therefore always written as a whole.
    port_bits: Mutex<Box<[u8; PORT_BYTES]>>,
}

/// An attached program. It is detached when the last queue is dropped, or by the kernel when the process
/// ends.
#[derive(Debug)]
pub(super) struct AttachedProgram {
    _link: OwnedFd,
    pub(super) mode: AttachMode,
    /// Filters of the adapter that belong to the program, and are removed with it.
    pub(super) port_filters: Option<PortFilters<InterfaceFilters>>,
}

impl RedirectFilter {
    /// Creates empty maps, with room for `addresses` addresses and 1,024 more. All queue numbers are below
    /// `queues`.
    pub(super) fn new(take: RedirectScope, queues: u32, addresses: usize) -> io::Result<Self> {
        let addresses = u32::try_from(addresses).unwrap_or(u32::MAX).saturating_add(ADDRESSES_EXTRA);
        let map = |kind, key: usize, value: usize, entries, name| {
            // The casts do not truncate: keys and values have at most [`PORT_BYTES`] bytes.
            bpf::create_map(kind, key as u32, value as u32, entries, name).map_err(errors::map_error)
        };
        let inner = FilterMaps {
            take,
            sockets: map(MapKind::XskMap, 4, 4, queues, "ginnel_sockets")?,
            addresses: map(MapKind::Hash, KEY_BYTES, 4, addresses, "ginnel_addrs")?,
            ports: map(MapKind::Array, 4, PORT_BYTES, 1, "ginnel_ports")?,
            drops_without_socket: map(MapKind::Array, 4, 8, 1, "ginnel_missed")?,
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
            drops_without_socket: self.0.drops_without_socket.as_raw_fd(),
        };
        let code: Result<Vec<Instruction>, _> = match self.0.take {
            RedirectScope::All => redirect::redirect_all(maps),
            RedirectScope::Addresses | RedirectScope::Ports => redirect::redirect_selected(maps),
        };
        let code = code.map_err(|error| io::Error::other(error.to_string()))?;
        bpf::load(&code, multi_buffer, "ginnel_redirect")
            .map_err(|(error, log)| errors::load_error(error, &log, multi_buffer))
    }

    /// Redirects frames to an address in a VLAN (0 for none) from now on.
    ///
    /// # Errors
    /// The error of the kernel. The map has room for 1,024 addresses more than the device was opened with.
    pub fn add_address(&self, address: IpAddr, vlan: u16) -> io::Result<()> {
        let scope = if self.0.take == RedirectScope::Ports { SCOPE_PORTS } else { SCOPE_ADDRESS };
        Ok(bpf::update_element(self.0.addresses.as_fd(), &redirect::key(address, vlan), &scope)?)
    }

    /// Leaves frames to an address to the kernel from now on. Succeeds if the address is not redirected.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn remove_address(&self, address: IpAddr, vlan: u16) -> io::Result<()> {
        Ok(bpf::delete_element(self.0.addresses.as_fd(), &redirect::key(address, vlan))?)
    }

    /// Redirects frames to ports of shared addresses if `redirected`, and leaves them to the kernel
    /// otherwise, from now on.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn set_ports(&self, kind: PortKind, ports: RangeInclusive<u16>, redirected: bool) -> io::Result<()> {
        let mut bits = self.0.port_bits.lock().unwrap_or_else(PoisonError::into_inner);
        let start = usize::from(if kind == PortKind::Udp { UDP_PORTS_AT } else { 0 });
        for port in ports {
            let (byte, bit) = (start + usize::from(port / 8), 1 << (port % 8));
            if redirected {
                bits[byte] |= bit;
            } else {
                bits[byte] &= !bit;
            }
        }
        Ok(bpf::update_element(self.0.ports.as_fd(), &0u32, &**bits)?)
    }

    /// Returns the number of frames for the stack that were dropped because they arrived on a queue of the
    /// interface that the device does not use.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn drops_without_socket(&self) -> io::Result<u64> {
        Ok(bpf::lookup_element(self.0.drops_without_socket.as_fd(), &0u32)?)
    }

    /// Redirects frames of a queue to this socket from now on.
    pub(super) fn add_socket(&self, queue: u16, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        bpf::update_element(self.0.sockets.as_fd(), &u32::from(queue), &socket.as_raw_fd())
    }
}

/// Attaches a program to an interface. If the driver does not accept the program, falls back to generic mode
/// with [`Attach::Auto`], unless zero copy is required.
pub(super) fn attach(
    program: &OwnedFd,
    name: &str,
    index: u32,
    attach_option: Attach,
    zero_copy: bool,
) -> io::Result<AttachedProgram> {
    let attempt = |mode| {
        bpf::attach(program.as_fd(), index, mode).map(|link| AttachedProgram {
            _link: link,
            mode,
            port_filters: None,
        })
    };
    let first = if attach_option == Attach::Generic { AttachMode::Generic } else { AttachMode::Driver };
    match attempt(first) {
        Ok(attached) => Ok(attached),
        Err(error) if attach_option == Attach::Auto && !zero_copy && !errors::is_busy(error) => {
            tracing::warn!(
                interface = name,
                %error,
                "the driver does not accept the redirect program, which runs in generic mode instead and is slower"
            );
            attempt(AttachMode::Generic).map_err(|error| errors::attach_error(error, AttachMode::Generic))
        }
        Err(error) => Err(errors::attach_error(error, first)),
    }
}

#[cfg(all(test, not(loom)))]
impl AttachedProgram {
    /// Creates a value without an attached program.
    pub(super) fn of(link: OwnedFd) -> Arc<Self> {
        Arc::new(Self { _link: link, mode: AttachMode::Generic, port_filters: None })
    }
}
