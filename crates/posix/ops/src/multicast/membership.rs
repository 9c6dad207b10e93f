//! The memberships of a socket on links of the stack, with the rules of `ip_mc_join_group`, `ip_mc_source`,
//! `ip_mc_msfilter` and their IPv6 counterparts.

use super::StackFilter;
use super::request::{MembershipAction, MembershipRequest};
use core::net::IpAddr;
use ginnel::{FilterMode, MembershipLimits, SourceFilter};
use rustix::io::Errno;

/// The memberships of one address family.
#[derive(Clone, Debug, Default)]
pub(super) struct Memberships(Vec<MembershipEntry>);

/// A membership.
#[derive(Clone, Debug)]
pub(super) struct MembershipEntry {
    pub(super) link: u16,
    pub(super) group: IpAddr,
    mode: FilterMode,
    /// The listed sources; `None` if none was ever listed, which lets the mode change.
    sources: Option<Vec<IpAddr>>,
}

ginnel::codec_struct!(MembershipEntry { link, group, mode, sources });

impl ginnel::broker::codec::Codec for Memberships {
    fn encode(&self, out: &mut Vec<u8>) {
        self.0.encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Vec::decode(from).map(Self)
    }
}

impl MembershipEntry {
    /// Returns the mode, and the sources in the order in which they were listed.
    pub(super) fn mode_and_sources(&self) -> (FilterMode, &[IpAddr]) {
        (self.mode, self.sources.as_deref().unwrap_or_default())
    }

    fn filter(&self) -> SourceFilter {
        SourceFilter::new(self.mode, self.sources.clone().unwrap_or_default())
    }
}

impl Memberships {
    pub(super) fn entries(&self) -> &[MembershipEntry] {
        &self.0
    }

    /// Returns the filter of a membership.
    pub(super) fn filter(&self, link: u16, group: IpAddr) -> StackFilter {
        self.find(link, group).map(|at| self.0[at].filter())
    }

    fn find(&self, link: u16, group: IpAddr) -> Option<usize> {
        self.0.iter().position(|entry| entry.link == link && entry.group == group)
    }

    /// Carries out a request on a link. Returns the resulting filter.
    ///
    /// # Errors
    /// As Linux.
    pub(super) fn change(
        &mut self,
        link: u16,
        request: &MembershipRequest,
        limits: &MembershipLimits,
    ) -> Result<StackFilter, Errno> {
        let group = request.group;
        let (sources_max, memberships_max, too_many) = if group.is_ipv4() {
            (limits.igmp_max_msf, limits.igmp_max_memberships, Errno::NOBUFS)
        } else {
            (limits.mld_max_msf, limits.mld_max_memberships, Errno::NOMEM)
        };
        let sources_max = sources_max as usize;
        let mut found = self.find(link, group);
        let join = |entries: &mut Vec<MembershipEntry>, mode| {
            if entries.len() >= memberships_max as usize {
                return Err(too_many);
            }
            entries.push(MembershipEntry { link, group, mode, sources: None });
            Ok(entries.len() - 1)
        };
        match &request.action {
            MembershipAction::Join if found.is_some() => return Err(Errno::ADDRINUSE),
            MembershipAction::Join => {
                join(&mut self.0, FilterMode::Exclude)?;
            }
            MembershipAction::Leave => {
                self.0.remove(found.ok_or(Errno::ADDRNOTAVAIL)?);
            }
            MembershipAction::Source { source, mode, add, joins } => {
                if *joins && found.is_none() {
                    found = Some(join(&mut self.0, *mode)?);
                }
                // A source needs an earlier membership.
                let at = found.ok_or(Errno::INVAL)?;
                let entry = &mut self.0[at];
                if entry.mode != *mode {
                    if entry.sources.is_some() {
                        return Err(Errno::INVAL);
                    }
                    entry.mode = *mode;
                }
                let sources = entry.sources.as_deref().unwrap_or_default();
                let listed = sources.iter().position(|listed| listed == source);
                match (add, listed) {
                    (true, _) if sources.len() >= sources_max && entry.sources.is_some() => {
                        return Err(Errno::NOBUFS);
                    }
                    (true, Some(_)) | (false, None) => return Err(Errno::ADDRNOTAVAIL),
                    (true, None) => entry.sources.get_or_insert_default().push(*source),
                    // A filter that lets nothing pass is no membership.
                    (false, Some(_)) if sources.len() == 1 && *mode == FilterMode::Include => {
                        self.0.remove(at);
                    }
                    (false, Some(listed)) => {
                        entry.sources.get_or_insert_default().remove(listed);
                    }
                }
            }
            MembershipAction::Filter { mode, sources } => {
                if sources.len() > sources_max {
                    return Err(Errno::NOBUFS);
                }
                if *mode == FilterMode::Include && sources.is_empty() {
                    self.0.remove(found.ok_or(Errno::ADDRNOTAVAIL)?);
                } else {
                    let entry = &mut self.0[found.ok_or(Errno::INVAL)?];
                    entry.mode = *mode;
                    entry.sources = (!sources.is_empty()).then(|| sources.clone());
                }
            }
        }
        Ok(self.filter(link, group))
    }
}
