//! Groups of UDP sockets that share an address (`SO_REUSEPORT`), and the program that selects the member for
//! a datagram.

use super::{Udp, UdpOptions};
use crate::error::GroupError;
use crate::handle::UdpHandle;
use crate::ip::{L4, Network};
use crate::reuseport::GroupKey;
use crate::socket_filter::{FilteredPacket, SocketFilter, loopback_header};
use std::sync::Arc;

impl Udp {
    /// Adds a socket to the group of its address.
    pub(super) fn join_group(&mut self, index: u32) {
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        let UdpOptions { v6only, uid, .. } = socket.options;
        let key = GroupKey { local: socket.local, v6_only: v6only, uid };
        socket.group = Some(Box::new(key));
        self.groups.join(key, index);
    }

    /// Removes a socket from its group, because it is connected (`udp_lib_rehash`, `udp_lib_hash4`).
    pub(super) fn leave_group(&mut self, index: u32) {
        if let Some(socket) = &mut self.slots[index as usize].socket
            && let Some(group) = socket.group.take()
        {
            self.groups.leave(&group, index);
        }
    }

    /// Sets the program that selects the member of a socket's group for a datagram; `None` removes it. With
    /// `is_first` the socket must be the only member.
    ///
    /// # Errors
    /// Any [`GroupError`].
    pub fn set_group_program(
        &mut self,
        handle: UdpHandle,
        program: Option<Arc<dyn SocketFilter>>,
        is_first: bool,
    ) -> Result<(), GroupError> {
        let socket = self.socket(handle).map_err(|_| GroupError::Stale)?;
        let group = *socket.group.as_deref().ok_or(GroupError::NotInGroup)?;
        self.groups.set_program(&group, program, is_first)
    }

    /// Returns the socket that the program of the group of a socket selects for a datagram, if it selects
    /// one.
    #[inline(always)]
    pub(super) fn select_by_program(
        &self,
        index: u32,
        network: &Network,
        l4: &L4<'_>,
        payload: &[u8],
    ) -> Option<u32> {
        if self.groups.has_programs() { self.run_group_program(index, network, l4, payload) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn run_group_program(&self, index: u32, network: &Network, l4: &L4<'_>, payload: &[u8]) -> Option<u32> {
        let group = self.socket_at(index)?.group.as_deref()?;
        let packet = FilteredPacket {
            bytes: payload,
            header_len: 0,
            network: l4.ip_packet,
            frame: &loopback_header(l4.dst.is_ipv4()),
            destination: l4.dst,
            is_broadcast: false,
            link: l4.link,
            is_loopback: network.is_loopback(l4.link),
        };
        self.groups.select(group, &packet)
    }
}
