//! What arrives and is neither TCP nor UDP.

use super::Network;
use super::parse::{Other, OtherKind};
use crate::icmp::error::TransportError;
use crate::time::Instant;

/// What came of a frame that [`Network::input`] took.
#[derive(Debug)]
pub enum Input {
    /// Nothing the transport needs to know.
    Nothing,
    /// Somebody says that a packet of ours could not be delivered.
    Error(TransportError),
}

impl Network {
    /// Handles ARP, NDP, ICMP and fragments.
    pub fn input(&mut self, now: Instant, other: &Other<'_>) -> Input {
        match &other.kind {
            OtherKind::Arp(packet) => {
                self.arp_input(now, other.link, packet, other.group_frame);
                Input::Nothing
            }
            _ => Input::Nothing,
        }
    }
}
