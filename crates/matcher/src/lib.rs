//! Ordered rules over Ethernet frames. The first rule that matches a frame gives the frame its action, for
//! example a priority.
//!
//! A rule is a list of conditions that must all hold: addresses, ports, protocol, DSCP, payload bytes,
//! payload length, or an expression in tcpdump's language. Conditions on the addresses, ports, protocol and
//! DSCP are evaluated once per flow; conditions on the payload and on other bytes are evaluated for every
//! frame.
//!
//! ```
//! use ginnel_matcher::{Condition, Matcher, Packet, Ports, Rule, Side};
//!
//! let web = Rule { conditions: vec![Condition::Port(Side::Destination, "80,443".parse().unwrap())], action: 6 };
//! let mut matcher = Matcher::new(vec![web], 1024).unwrap();
//! assert_eq!(matcher.find(&Packet::parse(&[0; 60])), None);
//! ```

mod bpf;
mod expression;
mod flow;
mod libpcap;
mod matcher;
mod network;
mod packet;
mod payload;
mod ports;
mod rule;

pub use bpf::{BadProgram, Program, RawInstruction, SocketPacket, SocketProgram};
pub use expression::{Expression, ExpressionError};
pub use matcher::{FLOW_CACHE_ENTRIES_MAX, FLOW_CACHE_ENTRIES_MIN, Matcher, RULES_MAX, TooManyRules};
pub use network::Network;
pub use packet::{Packet, TCP, UDP};
pub use payload::{HexBytes, PAYLOAD_TEST_BYTES_MAX, PayloadTest};
pub use ports::Ports;
pub use rule::{Condition, Protocol, Rule, Side};

/// Deserializes types through [`FromStr`](core::str::FromStr), so that a file and a command line accept the
/// same text.
macro_rules! from_text {
    ($name:ident) => {
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
use from_text;
