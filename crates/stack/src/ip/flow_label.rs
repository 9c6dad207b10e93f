//! Flow labels of packets over IPv6 (RFC 6437).

use super::{IpHeader, Network};
use crate::ip::entropy::KeyedHash;
use core::net::IpAddr;
use serde::{Deserialize, Serialize};

/// Largest flow label: 20 bits.
pub const FLOW_LABEL_MAX: u32 = 0x000f_ffff;

/// How a socket's packets over IPv6 get their flow label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FlowLabel {
    /// A keyed hash of addresses and ports, so that all packets of a flow have one label
    /// (`IPV6_AUTOFLOWLABEL`).
    #[default]
    Auto,
    /// This label, at most [`FLOW_LABEL_MAX`]; 0 stands for none.
    Fixed(u32),
    /// For a listener: connections take the label of their SYN (`IPV6_FL_F_REFLECT`). Otherwise, and for a
    /// SYN without a label, as `Auto`.
    Reflect,
}

impl FlowLabel {
    /// Returns the number of the choice, the inverse of [`FlowLabel::from_bits`].
    pub const fn bits(self) -> u32 {
        match self {
            Self::Fixed(label) => label,
            Self::Auto => FLOW_LABEL_MAX + 1,
            Self::Reflect => FLOW_LABEL_MAX + 2,
        }
    }

    /// Returns the choice with this number; larger numbers are invalid labels.
    pub const fn from_bits(bits: u32) -> Self {
        match bits {
            AUTO => Self::Auto,
            REFLECT => Self::Reflect,
            label => Self::Fixed(label),
        }
    }

    /// Returns whether the label has at most 20 bits.
    pub const fn is_valid(self) -> bool {
        !matches!(self, Self::Fixed(label) if label > FLOW_LABEL_MAX)
    }

    /// Returns the choice of a connection whose SYN has this label.
    pub(crate) fn of_connection(self, syn_label: u32) -> Self {
        match self {
            Self::Reflect if syn_label == 0 => Self::Auto,
            Self::Reflect => Self::Fixed(syn_label),
            other => other,
        }
    }
}

const AUTO: u32 = FlowLabel::Auto.bits();
const REFLECT: u32 = FlowLabel::Reflect.bits();

/// Computes the labels of flows. It has keys of its own, because labels are public.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct FlowLabelHash([u64; 3]);

impl FlowLabelHash {
    pub fn new(hash: KeyedHash) -> Self {
        Self([1, 2, 3].map(|number: u64| hash.of(("flow label", number))))
    }

    /// Returns a label other than 0, which stands for none.
    fn of(&self, src: u128, dst: u128, ports: u32) -> u32 {
        let [k0, k1, k2] = self.0;
        let halves = |address: u128| ((address >> 64) as u64, address as u64);
        let fold = |a: u64, b: u64| {
            let product = u128::from(a) * u128::from(b);
            product as u64 ^ (product >> 64) as u64
        };
        let ((s0, s1), (d0, d1)) = (halves(src), halves(dst));
        let addresses = fold(s0 ^ k0, s1 ^ k1).wrapping_add(fold(d0 ^ k2, d1 ^ k0));
        let hash = fold(fold(addresses ^ k1, u64::from(ports) ^ k2) ^ k0, k1);
        // Cannot truncate: the highest 20 bits.
        ((hash >> 44) as u32).max(1)
    }
}

impl Network {
    /// Returns a header with the flow label of a flow between these ports. A header of IPv4 is unchanged.
    #[inline]
    pub(crate) fn with_flow_label(&self, header: IpHeader, choice: FlowLabel, ports: (u16, u16)) -> IpHeader {
        let (IpAddr::V6(src), IpAddr::V6(dst)) = (header.src, header.dst) else { return header };
        let flow_label = match choice {
            FlowLabel::Fixed(label) => label,
            FlowLabel::Auto | FlowLabel::Reflect => {
                let ports = u32::from(ports.0) << 16 | u32::from(ports.1);
                self.flow_label_hash.of(src.to_bits(), dst.to_bits(), ports)
            }
        };
        IpHeader { flow_label, ..header }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_round_trip_through_bits() {
        for choice in [FlowLabel::Auto, FlowLabel::Reflect, FlowLabel::Fixed(0), FlowLabel::Fixed(0xf_ffff)] {
            assert_eq!(FlowLabel::from_bits(choice.bits()), choice);
            assert!(choice.is_valid());
        }
        assert!(!FlowLabel::from_bits(u32::MAX).is_valid());
        assert_eq!(FlowLabel::Reflect.of_connection(7), FlowLabel::Fixed(7));
        assert_eq!(FlowLabel::Reflect.of_connection(0), FlowLabel::Auto);
    }

    #[test]
    fn labels_depend_on_addresses_ports_and_key() {
        let hash = |seed: u8| FlowLabelHash::new(KeyedHash::new(&[seed; 32]));
        let label = hash(1).of(1, 2, 3);
        assert_eq!(hash(1).of(1, 2, 3), label);
        for other in [hash(1).of(2, 2, 3), hash(1).of(1, 3, 3), hash(1).of(1, 2, 4), hash(2).of(1, 2, 3)] {
            assert_ne!(other, label);
        }
        let labels: Vec<u32> = (0..1000).map(|port| hash(1).of(1, 2, port)).collect();
        assert!(labels.iter().all(|label| (1..=FLOW_LABEL_MAX).contains(label)));
        // Of 1,000 labels among 2^20, about half a pair is equal.
        let mut distinct = labels.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() > 990, "{}", distinct.len());
    }
}
