//! Rules and their conditions.

use crate::expression::Expression;
use crate::flow::FlowShape;
use crate::network::Network;
use crate::packet::{Packet, TCP, UDP};
use crate::payload::PayloadTest;
use crate::ports::Ports;
use core::net::{IpAddr, SocketAddr};
use core::ops::RangeInclusive;
use serde::Deserialize;

/// An action, and the conditions that must all hold for it. A rule without conditions matches every frame.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule<A> {
    /// The conditions.
    pub conditions: Vec<Condition>,
    /// The action.
    pub action: A,
}

/// A condition on a frame. A condition on a field that the frame lacks does not hold.
#[derive(Clone, Debug, PartialEq)]
pub enum Condition {
    /// An address is in one of the networks.
    Address(Side, Vec<Network>),
    /// A port is in the set.
    Port(Side, Ports),
    /// The transport protocol is this one.
    Protocol(Protocol),
    /// The differentiated services code point is one of these.
    Dscp(Vec<u8>),
    /// The number of bytes of the payload is in the range. Does not hold for fragments, because the length of
    /// their payload is unknown.
    PayloadBytes(RangeInclusive<u32>),
    /// Bytes of the payload have a value.
    Payload(PayloadTest),
    /// An expression accepts the frame.
    Expression(Expression),
}

/// The side whose address or port a condition is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The sender.
    Source,
    /// The receiver.
    Destination,
    /// Either of them.
    Either,
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// The packets of a flow for which a condition or a rule holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlowVerdict {
    /// None of them.
    Never,
    /// All of them.
    Always,
    /// Some of them, depending on the packet.
    Depends,
}

impl Side {
    fn holds<T>(self, source: T, destination: T, test: impl Fn(T) -> bool) -> bool {
        match self {
            Self::Source => test(source),
            Self::Destination => test(destination),
            Self::Either => test(source) || test(destination),
        }
    }
}

impl Condition {
    /// Returns whether the condition holds.
    #[must_use]
    pub fn holds(&self, packet: &Packet<'_>) -> bool {
        match self {
            Self::Address(side, networks) => {
                let (Some(source), Some(destination)) = (packet.source(), packet.destination()) else {
                    return false;
                };
                let is_inside = |address: IpAddr| networks.iter().any(|network| network.contains(address));
                side.holds(source, destination, is_inside)
            }
            Self::Port(side, ports) => packet.ports().is_some_and(|(source, destination)| {
                side.holds(source, destination, |port| ports.contains(port))
            }),
            Self::Protocol(protocol) => {
                let number = match protocol {
                    Protocol::Tcp => TCP,
                    Protocol::Udp => UDP,
                };
                packet.protocol() == Some(number)
            }
            Self::Dscp(values) => packet.dscp().is_some_and(|dscp| values.contains(&dscp)),
            Self::PayloadBytes(range) => {
                let payload = packet.payload().filter(|_| !packet.is_fragment());
                // Cannot truncate: an IP packet has at most 65,575 bytes.
                payload.is_some_and(|payload| range.contains(&(payload.len() as u32)))
            }
            Self::Payload(test) => packet.payload().is_some_and(|payload| test.matches(payload)),
            Self::Expression(expression) => expression.accepts(packet.bytes()),
        }
    }

    /// Returns whether the condition holds for TCP segments from `source` to `destination`; `None` if it
    /// depends on more than a segment's addresses and ports.
    #[must_use]
    pub fn holds_between(&self, source: SocketAddr, destination: SocketAddr) -> Option<bool> {
        match self {
            Self::Address(side, networks) => {
                let is_inside = |address: IpAddr| networks.iter().any(|network| network.contains(address));
                Some(side.holds(source.ip(), destination.ip(), is_inside))
            }
            Self::Port(side, ports) => {
                Some(side.holds(source.port(), destination.port(), |port| ports.contains(port)))
            }
            Self::Protocol(protocol) => Some(*protocol == Protocol::Tcp),
            Self::Dscp(_) | Self::PayloadBytes(_) | Self::Payload(_) | Self::Expression(_) => None,
        }
    }

    /// Returns for which packets of the flow of `packet` the condition holds.
    fn holds_for_flow(&self, packet: &Packet<'_>, shape: FlowShape) -> FlowVerdict {
        match self {
            Self::Address(..) | Self::Port(..) | Self::Protocol(_) | Self::Dscp(_) => {
                if self.holds(packet) {
                    FlowVerdict::Always
                } else {
                    FlowVerdict::Never
                }
            }
            Self::PayloadBytes(_) | Self::Payload(_) => FlowVerdict::Depends,
            Self::Expression(expression) => match expression.accepts_flow(packet.bytes(), shape) {
                Some(true) => FlowVerdict::Always,
                Some(false) => FlowVerdict::Never,
                None => FlowVerdict::Depends,
            },
        }
    }
}

impl<A> Rule<A> {
    /// Returns whether all conditions hold.
    #[must_use]
    pub fn matches(&self, packet: &Packet<'_>) -> bool {
        self.conditions.iter().all(|condition| condition.holds(packet))
    }

    /// Returns whether all conditions hold for TCP segments from `source` to `destination`. A condition that
    /// depends on more than a segment's addresses and ports counts as not holding.
    #[must_use]
    pub fn matches_between(&self, source: SocketAddr, destination: SocketAddr) -> bool {
        self.conditions.iter().all(|condition| condition.holds_between(source, destination) == Some(true))
    }

    /// Returns which packets of the flow of `packet` the rule matches.
    pub(crate) fn matches_flow(&self, packet: &Packet<'_>, shape: FlowShape) -> FlowVerdict {
        let mut verdict = FlowVerdict::Always;
        for condition in &self.conditions {
            match condition.holds_for_flow(packet, shape) {
                FlowVerdict::Never => return FlowVerdict::Never,
                FlowVerdict::Depends => verdict = FlowVerdict::Depends,
                FlowVerdict::Always => {}
            }
        }
        verdict
    }
}
