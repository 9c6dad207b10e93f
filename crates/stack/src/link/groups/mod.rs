//! Group membership of a link: which groups this host receives from which sources, and what it reports to
//! routers by IGMP (RFC 3376) and MLD (RFC 3810).
//!
//! Sockets and the link layer itself (solicited-node groups) are the *users* of a group. The filter of a
//! group is the union of its users' filters ([`users`]). A change of the filter is reported at once and
//! repeated ([`state_change`]), and queries of routers are answered after a random delay ([`querier`]).
//!
//! Every shard knows the filters of all shards, because a datagram may arrive at any of them. The primary
//! shard alone reports and answers.

mod igmp;
mod mld;
mod querier;
mod report;
mod state_change;
mod users;

use crate::handle::LinkId;
use crate::ip::Network;
use crate::ip::timers::NetworkTimer;
use crate::link::{ALL_HOSTS_V4, ALL_NODES_V6};
use crate::multicast::SourceFilter;
use crate::time::Instant;
use core::net::IpAddr;
use querier::{PendingResponse, Querier};
use state_change::StateChange;
use std::collections::{BTreeMap, BTreeSet};
use users::Users;

/// The groups of a link.
#[derive(Debug, Default)]
pub(crate) struct GroupTable {
    /// By address: IPv4 groups first.
    groups: BTreeMap<IpAddr, Group>,
    /// The routers, for IPv4 and IPv6.
    queriers: [Querier; 2],
}

/// A group that this host has joined, or has left recently.
#[derive(Debug)]
struct Group {
    address: IpAddr,
    /// The users of this shard, and one for each other shard.
    users: Users,
    /// The sockets of this shard.
    own_sockets: Users,
    /// The union of the users' filters.
    filter: SourceFilter,
    /// The last changes of `filter`, as far as they remain to be reported.
    change: StateChange,
    /// The answer to a query about this group, or about all groups in compatibility mode.
    response: Option<PendingResponse>,
    /// Unsolicited reports of an older version that remain to be sent.
    repeats_left: u8,
}

/// Key of the filter that another shard has for a group: shard, link and group.
pub type ShardGroup = (u8, u16, IpAddr);

/// The groups of all shards.
#[derive(Debug, Default)]
pub(crate) struct ShardGroups {
    /// The filters of the other shards.
    others: BTreeMap<ShardGroup, SourceFilter>,
    /// Changes of this shard's filters that the other shards do not know yet.
    changes: BTreeSet<(LinkId, IpAddr)>,
}

impl GroupTable {
    fn find(&self, address: IpAddr) -> Option<&Group> {
        self.groups.get(&address)
    }

    fn find_mut(&mut self, address: IpAddr) -> Option<&mut Group> {
        self.groups.get_mut(&address)
    }

    fn find_or_add(&mut self, address: IpAddr) -> &mut Group {
        self.groups.entry(address).or_insert_with(|| Group::new(address))
    }

    fn of_family(&mut self, is_v4: bool) -> impl Iterator<Item = &mut Group> {
        self.groups.values_mut().filter(move |group| group.address.is_ipv4() == is_v4)
    }

    fn querier(&mut self, is_v4: bool) -> &mut Querier {
        &mut self.queriers[usize::from(!is_v4)]
    }

    /// Forgets all groups that are unused.
    fn remove_unused(&mut self) {
        self.groups.retain(|_, group| !group.is_unused());
    }

    /// Forgets a group if it is unused.
    fn remove_if_unused(&mut self, address: IpAddr) {
        if self.find(address).is_some_and(Group::is_unused) {
            self.groups.remove(&address);
        }
    }

    /// Returns whether this host is a member of a group.
    pub(crate) fn is_member(&self, group: IpAddr) -> bool {
        is_permanent(group) || self.find(group).is_some_and(|group| !group.filter.is_none())
    }

    /// Returns whether packets of `source` to this group are received.
    pub(crate) fn accepts(&self, group: IpAddr, source: IpAddr) -> bool {
        is_permanent(group) || self.find(group).is_some_and(|group| group.filter.allows(source))
    }
}

impl Group {
    fn new(address: IpAddr) -> Self {
        Self {
            address,
            users: Users::default(),
            own_sockets: Users::default(),
            filter: SourceFilter::NONE,
            change: StateChange::default(),
            response: None,
            repeats_left: 0,
        }
    }

    /// Returns whether the group has no users and nothing remains to be reported about it.
    fn is_unused(&self) -> bool {
        self.users.is_empty() && self.change.is_done()
    }
}

/// Returns whether all hosts are members of the group at all times.
fn is_permanent(group: IpAddr) -> bool {
    group == IpAddr::V4(ALL_HOSTS_V4) || group == IpAddr::V6(ALL_NODES_V6)
}

/// Returns whether membership is reported: not of permanent groups, nor of those that stay within the host
/// (RFC 3376 §6, RFC 3810 §6).
fn is_reported(group: IpAddr) -> bool {
    let within_host = matches!(group, IpAddr::V6(v6) if v6.octets()[1] & 0x0f < 2);
    !is_permanent(group) && !within_host
}

/// The user whose filter changes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupUser {
    /// The link layer itself.
    LinkLayer,
    /// A socket of this shard.
    Socket,
    /// Another shard.
    OtherShard,
}

impl Network {
    /// Joins a group for the link layer itself. The report is sent in the next call of
    /// [`Network::run_timers`].
    pub(crate) fn join_group(&mut self, id: LinkId, group: IpAddr) {
        self.change_group(id, group, GroupUser::LinkLayer, None, Some(&SourceFilter::ANY));
    }

    /// Leaves a group that the link layer has joined.
    pub(crate) fn leave_group(&mut self, id: LinkId, group: IpAddr) {
        self.change_group(id, group, GroupUser::LinkLayer, Some(&SourceFilter::ANY), None);
    }

    /// Replaces the filter of a user of a group; `None` is that of a user that is not a member. The change is
    /// reported in the next call of [`Network::run_timers`].
    pub(crate) fn change_group(
        &mut self,
        id: LinkId,
        address: IpAddr,
        user: GroupUser,
        before: Option<&SourceFilter>,
        now: Option<&SourceFilter>,
    ) {
        let reports = !self.is_secondary_shard(id);
        let has_other_shards = self.steering.is_some();
        let link = self.link_mut(id);
        let reports = reports && !link.loopback && is_reported(address);
        let robustness = link.groups.querier(address.is_ipv4()).robustness();
        let group = link.groups.find_or_add(address);
        if user == GroupUser::Socket {
            group.own_sockets.replace(before, now);
        }
        group.users.replace(before, now);
        let filter = group.users.merged();
        if filter != group.filter {
            if reports {
                group.change.record(&group.filter, &filter, robustness);
            }
            group.filter = filter;
        }
        if reports && !group.change.is_done() {
            self.timers.arm(NetworkTimer::StateChange(id, address.is_ipv4()), Instant::ZERO);
        } else {
            link.groups.remove_if_unused(address);
        }
        if user == GroupUser::Socket && has_other_shards {
            self.shard_groups.changes.insert((id, address));
        }
    }

    /// Returns whether a link exists on which sockets can join groups.
    pub(crate) fn can_join_groups(&self, id: LinkId) -> bool {
        self.links.get(usize::from(id.0)).is_some_and(|link| !link.kernel_has_groups)
    }

    /// Returns whether a link exists.
    pub(crate) fn has_link(&self, id: LinkId) -> bool {
        usize::from(id.0) < self.links.len()
    }

    /// Takes the next group for which the filter of this shard's sockets has changed, with that filter: all
    /// other shards must learn it. Without other shards there are no such changes.
    pub fn next_group_change(&mut self) -> Option<(LinkId, IpAddr, SourceFilter)> {
        let (link, address) = self.shard_groups.changes.pop_first()?;
        let group = self.link(link).groups.find(address);
        Some((link, address, group.map_or(SourceFilter::NONE, |group| group.own_sockets.merged())))
    }

    /// Replaces the filters of the other shards.
    pub fn set_groups_of_other_shards(&mut self, others: BTreeMap<ShardGroup, SourceFilter>) {
        if self.shard_groups.others == others {
            return;
        }
        let before = core::mem::take(&mut self.shard_groups.others);
        for (key @ &(_, link, address), filter) in &before {
            if others.get(key) != Some(filter) && self.has_link(LinkId(link)) {
                let now = others.get(key);
                self.change_group(LinkId(link), address, GroupUser::OtherShard, Some(filter), now);
            }
        }
        for (key @ &(_, link, address), filter) in &others {
            if !before.contains_key(key) && self.has_link(LinkId(link)) {
                self.change_group(LinkId(link), address, GroupUser::OtherShard, None, Some(filter));
            }
        }
        self.shard_groups.others = others;
    }
}

#[cfg(test)]
mod tests;
