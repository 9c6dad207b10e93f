//! The matcher: finds the first of its rules that matches a frame.

use crate::flow::{FlowCache, FlowShape, FlowVerdicts};
use crate::packet::Packet;
use crate::rule::{FlowVerdict, Rule};
use core::fmt;

/// Largest number of rules of a matcher.
// limit: rules of a matcher
pub const RULES_MAX: usize = 64;
/// Smallest flow cache, in entries.
pub const FLOW_CACHE_ENTRIES_MIN: usize = 16;
/// Largest flow cache, in entries.
pub const FLOW_CACHE_ENTRIES_MAX: usize = 1 << 20;

/// Ordered rules, of which the first that matches a frame gives its action.
///
/// Conditions on addresses, ports, protocol and DSCP, and expressions that look at nothing else, are
/// evaluated once per flow. The results are kept in a cache of bounded size. A packet belongs to a flow if it
/// is TCP or UDP, no fragment, and has at most one VLAN tag, no IPv4 options and no IPv6 extension headers.
#[derive(Debug)]
pub struct Matcher<A> {
    rules: Vec<Rule<A>>,
    flows: FlowCache,
}

/// More rules than [`RULES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyRules(pub usize);

impl fmt::Display for TooManyRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rules, at most {RULES_MAX} are possible", self.0)
    }
}

impl std::error::Error for TooManyRules {}

impl<A> Matcher<A> {
    /// Creates a matcher with these rules in this order. The flow cache has `flow_cache_entries` entries of
    /// 64 bytes, limited to [`FLOW_CACHE_ENTRIES_MIN`] to [`FLOW_CACHE_ENTRIES_MAX`] and rounded up to a
    /// power of two.
    ///
    /// # Errors
    /// If there are more than [`RULES_MAX`] rules.
    pub fn new(rules: Vec<Rule<A>>, flow_cache_entries: usize) -> Result<Self, TooManyRules> {
        if rules.len() > RULES_MAX {
            return Err(TooManyRules(rules.len()));
        }
        let entries = flow_cache_entries.clamp(FLOW_CACHE_ENTRIES_MIN, FLOW_CACHE_ENTRIES_MAX);
        Ok(Self { rules, flows: FlowCache::new(entries) })
    }

    /// Returns the action of the first rule that matches the packet; `None` if no rule does.
    pub fn find(&mut self, packet: &Packet<'_>) -> Option<&A> {
        let rules = &self.rules;
        let (Some(key), Some((version, ip_at))) = (packet.flow_key(), packet.ip_header()) else {
            return rules.iter().find(|rule| rule.matches(packet)).map(|rule| &rule.action);
        };
        let shape = FlowShape { version, ip_at };
        let verdicts = self.flows.get(&key, || evaluate_flow(rules, packet, shape));
        let mut depending = verdicts.depending;
        while depending != 0 {
            let rule = rules.get(depending.trailing_zeros() as usize)?;
            if rule.matches(packet) {
                return Some(&rule.action);
            }
            depending &= depending - 1;
        }
        Some(&rules.get(usize::from(verdicts.certain?))?.action)
    }

    /// Returns how many flows of the cache were replaced by others since the matcher was created. A replaced
    /// flow is evaluated again with its next packet.
    #[must_use]
    pub fn flows_replaced(&self) -> u64 {
        self.flows.replaced
    }
}

/// Determines what the rules say about the flow of a packet.
#[cold]
fn evaluate_flow<A>(rules: &[Rule<A>], packet: &Packet<'_>, shape: FlowShape) -> FlowVerdicts {
    let mut depending = 0;
    for (rule, index) in rules.iter().zip(0u8..) {
        match rule.matches_flow(packet, shape) {
            FlowVerdict::Never => {}
            FlowVerdict::Depends => depending |= 1 << index,
            FlowVerdict::Always => return FlowVerdicts { depending, certain: Some(index) },
        }
    }
    FlowVerdicts { depending, certain: None }
}

#[cfg(test)]
mod tests;
