//! Binding of UDP sockets, and the lookup of the socket for a datagram.

use super::queue::UdpReceiveQueue;
use super::{Udp, UdpError, UdpOptions, UdpSlot, UdpSocket, address_matches};
use crate::handle::UdpHandle;
use crate::ip::Network;
use core::net::SocketAddr;

/// Returns the score of a socket bound to `bound` and connected to `fixed` for a datagram from `remote` to
/// `local`, as Linux's `compute_score`; `None` if the socket does not match. A connected socket scores higher
/// than a bound address, which scores higher than the wildcard, which scores higher than the wildcard of the
/// other family.
pub(crate) fn compute_score(
    bound: SocketAddr,
    fixed: Option<SocketAddr>,
    options: &UdpOptions,
    local: SocketAddr,
    remote: SocketAddr,
) -> Option<u8> {
    if !address_matches(bound.ip(), options.v6only, local.ip()) {
        return None;
    }
    let same_family = u8::from(bound.is_ipv4() == local.is_ipv4());
    let exact = u8::from(!bound.ip().is_unspecified());
    match fixed {
        Some(fixed) if fixed != remote => None,
        Some(_) => Some(4 + 2 * exact + same_family),
        None => Some(2 * exact + same_family),
    }
}

/// Returns whether two sockets with one port must not be bound simultaneously.
pub(crate) fn has_bind_conflict(
    a: SocketAddr,
    a_options: &UdpOptions,
    b: SocketAddr,
    b_options: &UdpOptions,
) -> bool {
    let shared = (a_options.reuse_address && b_options.reuse_address)
        || (a_options.reuse_port && b_options.reuse_port && a_options.uid == b_options.uid);
    let overlap = address_matches(a.ip(), a_options.v6only, b.ip())
        || address_matches(b.ip(), b_options.v6only, a.ip());
    overlap && !shared
}

impl Udp {
    /// Opens a socket bound to a local address. Port 0 selects an ephemeral port (RFC 6056 §3.3.1); the
    /// unspecified address stands for all local addresses.
    ///
    /// # Errors
    /// [`UdpError::AddressInUse`], [`UdpError::AddressNotAvailable`] (also if no ephemeral port is free),
    /// [`UdpError::TooManySockets`].
    pub fn bind(
        &mut self,
        network: &mut Network,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<UdpHandle, UdpError> {
        let ip = local.ip();
        let usable =
            ip.is_unspecified() || ip.is_multicast() || network.is_local(ip) || network.is_broadcast(ip);
        if !usable {
            return Err(UdpError::AddressNotAvailable);
        }
        let port = match local.port() {
            0 => match self.choose_ephemeral_port(network, local, &options) {
                Some(port) => port,
                None => {
                    self.stats.ports_exhausted += 1;
                    return Err(UdpError::AddressNotAvailable);
                }
            },
            port if self.is_port_in_use(SocketAddr::new(ip, port), &options) => {
                return Err(UdpError::AddressInUse);
            }
            port => port,
        };
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < self.sockets_max => {
                self.slots.push(UdpSlot::default());
                // Cannot truncate: sockets_max is at most 2^20.
                (self.slots.len() - 1) as u32
            }
            None => {
                self.stats.sockets_refused += 1;
                return Err(UdpError::TooManySockets);
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.socket = Some(UdpSocket {
            local: SocketAddr::new(ip, port),
            remote: None,
            options,
            queue: UdpReceiveQueue::default(),
            error: None,
            error_queue: None,
            listed_in: 0,
            route: None,
            drops: 0,
            filter: None,
            has_slow_path: options.gro || self.classes.is_some(),
            memberships: Vec::new(),
            group: None,
        });
        let handle = UdpHandle { index, generation: slot.generation };
        self.ports.entry(port).or_default().push(index);
        if options.reuse_port {
            self.join_group(index);
        }
        Ok(handle)
    }

    /// Returns the range of ephemeral ports.
    pub fn ephemeral_ports(&self) -> core::ops::RangeInclusive<u16> {
        self.port_first..=self.port_last
    }

    /// Returns the first free ephemeral port, starting from a random one. Ports that could be shared are
    /// skipped, too.
    fn choose_ephemeral_port(
        &self,
        network: &mut Network,
        local: SocketAddr,
        options: &UdpOptions,
    ) -> Option<u16> {
        let exclusive = UdpOptions { reuse_address: false, reuse_port: false, ..*options };
        let count = u32::from(self.port_last - self.port_first) + 1;
        let start = network.entropy.below(count);
        (0..count)
            // Cannot truncate: the remainder is below 65,536 - port_first.
            .map(|step| self.port_first + ((start + step) % count) as u16)
            .filter(|&port| {
                network.steering.as_ref().is_none_or(|steering| steering.may_choose_udp_port(port))
            })
            .find(|&port| !self.is_port_in_use(SocketAddr::new(local.ip(), port), &exclusive))
    }

    /// Returns whether another socket conflicts with this address.
    fn is_port_in_use(&self, local: SocketAddr, options: &UdpOptions) -> bool {
        let Some(sockets) = self.ports.get(&local.port()) else { return false };
        sockets
            .iter()
            .filter_map(|&index| self.socket_at(index))
            .any(|other| has_bind_conflict(local, options, other.local, &other.options))
    }

    pub(super) fn remove_from_port(&mut self, port: u16, index: u32) {
        if let Some(sockets) = self.ports.get_mut(&port) {
            sockets.retain(|&other| other != index);
            if sockets.is_empty() {
                self.ports.remove(&port);
            }
        }
    }

    pub(super) fn compute_score(socket: &UdpSocket, local: SocketAddr, remote: SocketAddr) -> Option<u8> {
        compute_score(socket.local, socket.remote, &socket.options, local, remote)
    }

    /// Returns the socket that receives a datagram. Among sockets with equal scores, those with `reuse_port`
    /// are selected by a hash of the sender; otherwise the one bound last is selected.
    pub(super) fn lookup(&self, network: &Network, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        self.lookup_with(network, local, remote, |_| None)
    }

    /// As [`Udp::lookup`]. `select` is called with one of several sockets with `reuse_port`, and may select
    /// another one of their group.
    #[inline(always)]
    pub(super) fn lookup_with(
        &self,
        network: &Network,
        local: SocketAddr,
        remote: SocketAddr,
        select: impl FnOnce(u32) -> Option<u32>,
    ) -> Option<u32> {
        let sockets = self.ports.get(&local.port())?;
        let fit =
            |index: u32| self.socket_at(index).and_then(|socket| Self::compute_score(socket, local, remote));
        let mut best: Option<(u8, u32)> = None;
        let mut equals = 0_u64;
        for &index in sockets {
            let Some(rank) = fit(index) else { continue };
            match best {
                Some((best_rank, _)) if rank < best_rank => {}
                Some((best_rank, _)) if rank == best_rank => {
                    best = Some((rank, index));
                    equals += 1;
                }
                _ => {
                    best = Some((rank, index));
                    equals = 1;
                }
            }
        }
        let (rank, last) = best?;
        if equals == 1 || !self.socket_at(last)?.options.reuse_port {
            return Some(last);
        }
        if let Some(selected) = select(last).filter(|index| fit(*index) == Some(rank)) {
            return Some(selected);
        }
        let chosen = network.hash.of((local, remote)) % equals;
        let mut group = sockets.iter().copied().filter(|&index| fit(index) == Some(rank));
        // Cannot truncate: fewer than 2^20 sockets.
        group.nth(chosen as usize)
    }
}
