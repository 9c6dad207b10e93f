//! An interface of the kernel, both directions, by a packet socket. The kernel stamps the packets.

use super::packet_ring::PacketRing;
use super::{PacketSource, PacketVisitor, SourceError, SourceState};
use crate::frame::LinkType;
use core::time::Duration;
use ginnel_stack::time::Instant;
use rustix::time::{ClockId, clock_gettime};
use std::io;

/// Hardware types of interfaces (`ARPHRD_…` of Linux).
const ETHERNET: u16 = 1;
const LOOPBACK: u16 = 772;
const NONE: u16 = 65_534;

/// The packets of an interface.
pub struct Interface {
    ring: PacketRing,
    link: LinkType,
    lost: u64,
}

impl Interface {
    /// Opens a packet socket. The interface is promiscuous as long as the socket is open.
    ///
    /// # Errors
    /// There is no such interface, or this process may not see its packets.
    pub fn open(name: &str) -> io::Result<Self> {
        let ring = PacketRing::open(name).map_err(|e| {
            let hint = match e.kind() {
                io::ErrorKind::PermissionDenied => ": run as root, or with the capability CAP_NET_RAW",
                _ => "",
            };
            io::Error::new(e.kind(), format!("interface {name}: {e}{hint}"))
        })?;
        let link = match ring.hardware_type() {
            ETHERNET | LOOPBACK => LinkType::Ethernet,
            NONE => LinkType::Raw,
            other => {
                let problem = format!("interface {name}: hardware type {other} is not supported");
                return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
            }
        };
        Ok(Self { ring, link, lost: 0 })
    }
}

impl PacketSource for Interface {
    fn poll(&mut self, visit: &mut PacketVisitor<'_>) -> Result<SourceState, SourceError> {
        // Packets over the loopback interface are sent and received, but should count once.
        let without_sent = self.ring.hardware_type() == LOOPBACK;
        let link = self.link;
        match self.ring.read_block(without_sent, &mut |packets| visit(link, packets))? {
            true => Ok(SourceState::More),
            false => Ok(SourceState::Idle),
        }
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.ring.wait(timeout)
    }

    fn now(&self) -> Option<Instant> {
        let now = clock_gettime(ClockId::Realtime);
        let nanos = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
        // The ring passes packets on only after its retirement time.
        let nanos = u64::try_from(nanos)
            .unwrap_or(0)
            .saturating_sub(2 * u64::from(super::packet_ring::RETIRE_MS) * 1_000_000);
        Some(Instant::from_nanos(nanos))
    }

    fn lost(&mut self) -> u64 {
        self.lost += self.ring.take_drops();
        self.lost
    }
}
