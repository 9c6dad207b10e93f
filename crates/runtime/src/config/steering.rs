//! The `[[steering.rules]]` tables.

use ginnel_matcher::{Condition, Network, Ports, RULES_MAX, Rule, Side, TooManyRules};
use ginnel_stack::error::ConfigError;
use serde::Deserialize;

/// Keys of the `[steering]` table.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SteeringConfig {
    /// How devices steer packets to TCP connections that the stack opens. `hash`: by the flow hash, as all
    /// other packets. `port-bits`: by the low bits of their local port, from `tcp.local_port_first` to
    /// `tcp.local_port_last`, as filters with a port mask do (`ethtool -N`), which an `af_xdp` device sets;
    /// the bits are the number of the queue. Default `hash`.
    pub opened: OpenedSteering,
    /// Rules that choose the shard of a TCP connection.
    pub rules: Vec<SteeringRule>,
}

/// How devices steer packets to connections that the stack opens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OpenedSteering {
    /// By the flow hash.
    #[default]
    Hash,
    /// By the low bits of the local port.
    PortBits,
}

/// Keys of a `[[steering.rules]]` table. All conditions must hold. They are about the packets that the stack
/// receives. Rules do not apply to packets to the ports from `tcp.local_port_first` to `tcp.local_port_last`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SteeringRule {
    /// Shards that own the connections that match, each below `shards.count`: `[0]`, or several, over which
    /// the flow hash spreads the connections. A rule requires it.
    pub shards: Vec<u8>,
    /// `stop`: the rule decides. `continue`: a later rule may choose another shard. All rules with `continue`
    /// are tried first, and the last one that matches proposes a shard; then the first one with `stop` that
    /// matches decides. Default `stop`.
    #[serde(default)]
    pub mode: SteeringMode,
    /// Networks or addresses of the sender, of which one must match: `["10.0.0.0/8", "fd00::7"]`. Default:
    /// any.
    #[serde(default)]
    pub source: Vec<Network>,
    /// As `source`, for the receiver: an address of the stack. Default: any.
    #[serde(default)]
    pub destination: Vec<Network>,
    /// As `source`, for the sender or the receiver. Default: any.
    #[serde(default)]
    pub address: Vec<Network>,
    /// Ports of the sender: `80`, `"80,8000-8010"` or `[80, "8000-8010"]`. Default: any.
    #[serde(default)]
    pub source_ports: Option<Ports>,
    /// As `source_ports`, for the receiver. Default: any.
    #[serde(default)]
    pub destination_ports: Option<Ports>,
    /// As `source_ports`, for the sender or the receiver. Default: any.
    #[serde(default)]
    pub ports: Option<Ports>,
}

/// The effect of a rule that matches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SteeringMode {
    /// Later rules may choose another shard. These rules come before those that stop.
    Continue,
    /// The rule decides.
    #[default]
    Stop,
}

impl SteeringConfig {
    /// Validates the rules for a stack of `shards` shards.
    pub(super) fn validate(&self, shards: u32) -> Result<(), ConfigError> {
        if self.rules.len() > RULES_MAX {
            return Err(ConfigError::new("steering.rules", TooManyRules(self.rules.len()).to_string()));
        }
        for (i, rule) in self.rules.iter().enumerate() {
            let key = |name: &str| format!("steering.rules[{i}]{name}");
            if rule.shards.is_empty() {
                return Err(ConfigError::new(key(".shards"), "is empty: name a shard, as in [0]"));
            }
            if let Some(at) = rule.shards.iter().position(|shard| u32::from(*shard) >= shards) {
                let problem = format!(
                    "there is no shard {}: shards.count is {shards}, so shards are 0 to {}",
                    rule.shards[at],
                    shards - 1
                );
                return Err(ConfigError::new(key(&format!(".shards[{at}]")), problem));
            }
            if rule.conditions().is_empty() {
                let problem = "has no condition: add a key such as `destination_ports`";
                return Err(ConfigError::new(key(""), problem));
            }
        }
        Ok(())
    }
}

impl SteeringRule {
    /// Returns the rule as the matcher takes it, with the shards as its action.
    pub(crate) fn matcher_rule(&self) -> Rule<Box<[u8]>> {
        Rule { conditions: self.conditions(), action: self.shards.clone().into() }
    }

    fn conditions(&self) -> Vec<Condition> {
        let networks = [
            (Side::Source, &self.source),
            (Side::Destination, &self.destination),
            (Side::Either, &self.address),
        ];
        let ports = [
            (Side::Source, &self.source_ports),
            (Side::Destination, &self.destination_ports),
            (Side::Either, &self.ports),
        ];
        let addresses = networks.into_iter().filter(|(_, networks)| !networks.is_empty());
        let addresses = addresses.map(|(side, networks)| Condition::Address(side, networks.clone()));
        let ports = ports.into_iter().filter_map(|(side, p)| Some(Condition::Port(side, p.clone()?)));
        addresses.chain(ports).collect()
    }
}
