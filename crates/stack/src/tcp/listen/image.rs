//! The listeners in an image of a stack, with their accept queues and groups.

use super::{ListenEntry, ListenTable};
use crate::options::ListenOptions;
use crate::priority::ClassedQueue;
use crate::reuseport::image::GroupImage;
use crate::socket_filter::SocketFilter;
use crate::tcp::fastopen::FastOpenQueue;
use crate::tcp::profile::ProfileTable;
use crate::tcp::profile::image::{ProfileNumbers, RestoredProfiles};
use core::net::SocketAddr;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A listener, to be written.
#[derive(Serialize)]
#[serde(rename = "ListenEntry")]
struct ListenerRef<'a> {
    addr: SocketAddr,
    options: &'a ListenOptions,
    profile: u16,
    generation: u32,
    open: bool,
    queue: &'a ClassedQueue<u32>,
    accepted_undelivered: u32,
    fastopen: &'a FastOpenQueue,
}

/// A listener as it was read.
#[derive(Deserialize)]
#[serde(rename = "ListenEntry")]
struct ListenerImage {
    addr: SocketAddr,
    options: ListenOptions,
    profile: u16,
    generation: u32,
    open: bool,
    queue: ClassedQueue<u32>,
    accepted_undelivered: u32,
    fastopen: FastOpenQueue,
}

/// The table, to be written.
#[derive(Serialize)]
#[serde(rename = "ListenTable")]
pub(crate) struct ListenersRef<'a> {
    entries: Vec<ListenerRef<'a>>,
    free: &'a [u32],
    groups: Vec<GroupImage>,
}

/// The table as it was read.
#[derive(Deserialize)]
#[serde(rename = "ListenTable")]
pub(crate) struct ListenersImage {
    entries: Vec<ListenerImage>,
    free: Vec<u32>,
    groups: Vec<GroupImage>,
}

/// Connections that are not accepted, by listener: what the connections themselves say.
#[derive(Clone, Copy, Default)]
pub(crate) struct UnacceptedCount {
    pub half_open: u32,
    pub half_open_loopback: u32,
    /// Connections in the accept queue.
    pub queued: u32,
}

impl ListenTable {
    /// Returns the image.
    pub(crate) fn image<'a>(&'a self, profiles: &ProfileNumbers) -> ListenersRef<'a> {
        let entry = |entry: &'a ListenEntry| ListenerRef {
            addr: entry.addr,
            options: &entry.options,
            // A closed listener has released its profile.
            profile: if entry.open { profiles.number(entry.profile) } else { 0 },
            generation: entry.generation,
            open: entry.open,
            queue: &entry.queue,
            accepted_undelivered: entry.accepted_undelivered,
            fastopen: &entry.fastopen,
        };
        ListenersRef {
            entries: self.entries.iter().map(entry).collect(),
            free: &self.free,
            groups: self.groups.image(),
        }
    }

    /// Takes over the listeners of an image. `counts` has the unaccepted connections of each listener,
    /// `is_queued` tells whether a connection is in an accept queue, and `make` makes programs again.
    ///
    /// # Errors
    /// The configuration does not allow that many, a program was not made, or the image is malformed.
    pub(crate) fn restore(
        &mut self,
        image: ListenersImage,
        (profiles, restored): (&mut ProfileTable, &RestoredProfiles),
        counts: &[UnacceptedCount],
        mut is_queued: impl FnMut(u32, u32) -> bool,
        make: impl FnMut(&[u8]) -> Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), String> {
        let ListenersImage { entries, free, groups } = image;
        if counts.len() > entries.len() {
            return Err("a connection belongs to no listener".into());
        }
        let mut members = 0;
        for (index, image) in (0..).zip(entries) {
            let ListenerImage { addr, options, queue, accepted_undelivered, fastopen, .. } = image;
            let id = restored.get(image.profile)?;
            let profile = profiles.get(id);
            let count = counts.get(index as usize).copied().unwrap_or_default();
            let UnacceptedCount { half_open, half_open_loopback, queued } = count;
            let new = ListenEntry::new(addr, options, (id, profile), image.generation);
            let mut entry = ListenEntry {
                open: image.open,
                accepts_at_once: image.open && new.accepts_at_once,
                half_open,
                half_open_loopback,
                queue,
                accepted_undelivered,
                fastopen,
                ..new
            };
            if entry.queue.len() != queued as usize || !entry.queue.iter().all(|idx| is_queued(index, *idx)) {
                return Err("an accept queue contradicts its connections".into());
            }
            entry.count_others();
            if entry.open {
                profiles.share(id);
                self.by_port.push((addr.port(), index));
                members += usize::from(entry.group().is_some());
            }
            self.entries.push(entry);
        }
        if self.by_port.len() > self.max {
            let (count, max) = (self.by_port.len(), self.max);
            return Err(format!("tcp.listeners_max is {max}, but there are {count} listeners"));
        }
        self.by_port.sort_unstable();
        let is_vacant = |index: &u32| {
            self.entries.get(*index as usize).is_some_and(|entry| !entry.open && entry.half_open == 0)
        };
        let vacant = (0..self.entries.len() as u32).filter(is_vacant).count();
        let mut listed = free.clone();
        listed.sort_unstable();
        listed.dedup();
        if listed.len() != free.len() || listed.len() != vacant || !listed.iter().all(is_vacant) {
            return Err("the list of closed listeners contradicts the listeners".into());
        }
        self.free = free;
        let of = |index: u32| self.entries.get(index as usize).filter(|entry| entry.open)?.group();
        self.groups.restore(groups, make, of, members)?;
        for index in 0..self.entries.len() as u32 {
            let entry = &self.entries[index as usize];
            let (is_open, id) = (entry.open, entry.profile);
            let group = entry.group().filter(|group| is_open && self.groups.has_program(group));
            if group.is_some() {
                self.set_has_group_program(index, true, profiles.get(id));
            }
        }
        Ok(())
    }
}
