//! Rules that choose the shard of a connection: those of the configuration (`[[steering.rules]]`) and those
//! of the program. They are Fastsocket's framework for packet steering, at the level of connections.

use crate::config::{SteeringConfig, SteeringMode};
use core::fmt;
use ginnel_matcher::Rule;
pub use ginnel_stack::steering::policy::SteeredFlow;
use ginnel_stack::steering::policy::SteeringPolicy;
use std::sync::Arc;

/// A rule of the program. All shards ask the rule about a flow, at any time and from any thread, and must get
/// the same answer: the answer may depend on nothing but the flow.
///
/// Rules are not asked about packets to the ports from `tcp.local_port_first` to `tcp.local_port_last`: these
/// belong to connections that the stack has opened, whose ports were chosen so that packets come home.
pub trait SteerConnection: Send + Sync {
    /// Returns the shard that owns the connection, or `None` if the rule does not apply.
    /// [`SteeredFlow::shard`] is the choice so far. A shard that does not exist, or does not serve the device
    /// of the destination, is counted (`shard.steering_invalid`), and the flow hash decides.
    fn shard(&self, flow: &SteeredFlow) -> Option<u8>;
}

impl<F: Fn(&SteeredFlow) -> Option<u8> + Send + Sync> SteerConnection for F {
    fn shard(&self, flow: &SteeredFlow) -> Option<u8> {
        self(flow)
    }
}

/// A rule of the program, and its mode: whether later rules are asked if it matches.
#[derive(Clone)]
pub(crate) struct ProgramRule {
    pub(crate) mode: SteeringMode,
    pub(crate) rule: Arc<dyn SteerConnection>,
}

/// All rules of a stack, in the order in which they are asked.
///
/// First come the rules that continue: the last one that matches proposes a shard. Then come the rules that
/// stop: the first one that matches decides. The operator's rules prevail: they are the last of those that
/// continue and the first of those that stop.
pub(crate) struct SteeringRules {
    continuing: Vec<Step>,
    stopping: Vec<Step>,
}

enum Step {
    Configured(Rule<Box<[u8]>>),
    Program(Arc<dyn SteerConnection>),
}

impl SteeringRules {
    /// Collects the rules; `None` if there are none.
    pub(crate) fn new(config: &SteeringConfig, program: &[ProgramRule]) -> Option<Arc<Self>> {
        if config.rules.is_empty() && program.is_empty() {
            return None;
        }
        let configured = |mode| {
            let rules = config.rules.iter().filter(move |rule| rule.mode == mode);
            rules.map(|rule| Step::Configured(rule.matcher_rule()))
        };
        let programmed = |mode| {
            let rules = program.iter().filter(move |rule| rule.mode == mode);
            rules.map(|rule| Step::Program(Arc::clone(&rule.rule)))
        };
        let (go_on, stop) = (SteeringMode::Continue, SteeringMode::Stop);
        Some(Arc::new(Self {
            continuing: programmed(go_on).chain(configured(go_on)).collect(),
            stopping: configured(stop).chain(programmed(stop)).collect(),
        }))
    }
}

impl Step {
    fn shard(&self, flow: &SteeredFlow) -> Option<u8> {
        match self {
            Self::Program(rule) => rule.shard(flow),
            Self::Configured(rule) => {
                let matches = rule.matches_between(flow.source, flow.destination);
                // Shards that do not serve the device of the destination are left out.
                let mut serving = rule.action.iter().copied().filter(|&shard| flow.is_served_by(shard));
                matches.then(|| serving.clone().count()).and_then(|count| serving.nth(flow.spread(count)))
            }
        }
    }
}

impl SteeringPolicy for SteeringRules {
    fn owner(&self, flow: &SteeredFlow) -> Option<u8> {
        let (mut flow, mut chosen) = (*flow, None);
        for step in &self.continuing {
            if let Some(shard) = step.shard(&flow) {
                (flow.shard, chosen) = (shard, Some(shard));
            }
        }
        self.stopping.iter().find_map(|step| step.shard(&flow)).or(chosen)
    }
}

impl fmt::Debug for SteeringRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rules that continue, {} that stop", self.continuing.len(), self.stopping.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn flow(source: &str, destination: &str, hash: u32) -> SteeredFlow {
        let (source, destination) = (source.parse().unwrap(), destination.parse().unwrap());
        SteeredFlow { source, destination, hash, shards: 4, serving: u64::MAX, shard: 3 }
    }

    fn rules(toml: &str, program: &[ProgramRule]) -> Arc<SteeringRules> {
        let config = Config::from_toml("x.toml", &format!("shards.count = 4\n{toml}")).unwrap();
        SteeringRules::new(&config.steering, program).unwrap()
    }

    #[test]
    fn rules_that_continue_come_before_those_that_stop() {
        let rules = rules(
            "[[steering.rules]]\nshards = [0]\nsource = [\"10.1.0.0/16\"]\ndestination_ports = 80\n\
             [[steering.rules]]\nshards = [1]\nsource = [\"10.0.0.0/8\"]\nmode = \"continue\"\n\
             [[steering.rules]]\nshards = [2]\nports = \"80\"\nmode = \"continue\"\n\
             [[steering.rules]]\nshards = [3]\naddress = [\"fd00::/8\"]\n",
            &[],
        );
        let owner = |source, destination| rules.owner(&flow(source, destination, 0));
        // The first one stops, though two others match and one comes after it.
        assert_eq!(owner("10.1.0.9:5", "10.9.0.1:80"), Some(0));
        // The last one of those that continue.
        assert_eq!(owner("10.2.0.9:5", "10.9.0.1:80"), Some(2));
        assert_eq!(owner("10.1.0.9:5", "10.9.0.1:81"), Some(1));
        assert_eq!(owner("[fd00::9]:80", "[fe80::1]:81"), Some(3));
        assert_eq!(owner("[fe80::9]:80", "[fe80::1]:81"), Some(2));
        assert_eq!(owner("172.16.0.9:5", "10.9.0.1:81"), None);
    }

    #[test]
    fn several_shards_share_connections_by_hash() {
        let rules = rules("[[steering.rules]]\nshards = [1, 3]\ndestination_ports = \"80-90\"\n", &[]);
        let owners: Vec<_> = (0..4).map(|hash| rules.owner(&flow("[::2]:5", "[::1]:85", hash))).collect();
        assert_eq!(owners, [Some(1), Some(3), Some(1), Some(3)]);
    }

    #[test]
    fn the_operator_prevails_over_the_program() {
        let program = |mode, shard| ProgramRule { mode, rule: Arc::new(move |_: &SteeredFlow| Some(shard)) };
        let (go_on, stop) = (SteeringMode::Continue, SteeringMode::Stop);
        let file = |mode: &str| format!("[[steering.rules]]\nshards = [1]\nports = 80\nmode = \"{mode}\"\n");
        let web = flow("10.0.0.9:5", "10.9.0.1:80", 0);
        let other = flow("10.0.0.9:5", "10.9.0.1:81", 0);
        for (mode, own) in [("continue", go_on), ("stop", stop)] {
            let rules = rules(&file(mode), &[program(own, 2)]);
            assert_eq!((rules.owner(&web), rules.owner(&other)), (Some(1), Some(2)));
        }
        // What stops prevails over what continues, whoever has said it.
        assert_eq!(rules(&file("continue"), &[program(stop, 2)]).owner(&web), Some(2));
        let seen = ProgramRule { mode: stop, rule: Arc::new(|flow: &SteeredFlow| Some(flow.shard)) };
        assert_eq!(rules(&file("continue"), &[seen]).owner(&web), Some(1));
    }
}
