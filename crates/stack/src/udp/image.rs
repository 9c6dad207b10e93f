//! The UDP sockets in an image of a stack ([`crate::stack::Stack::save`]).

use super::error_queue::UdpErrorQueue;
use super::groups::Membership;
use super::queue::UdpReceiveQueue;
use super::{Udp, UdpError, UdpOptions, UdpSlot, UdpSocket, UdpStats};
use crate::handle::UdpHandle;
use crate::ip::Network;
use crate::priority::{BEST_EFFORT, ClassQueues, ClassSet};
use crate::reuseport::GroupKey;
use crate::reuseport::image::GroupImage;
use crate::stack::Restorer;
use crate::time::Instant;
use core::net::SocketAddr;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::{BTreeMap, VecDeque};

/// A socket, to be written.
#[derive(Serialize)]
#[serde(rename = "UdpSocket")]
struct SocketRef<'a> {
    local: SocketAddr,
    remote: Option<SocketAddr>,
    options: &'a UdpOptions,
    queue: &'a UdpReceiveQueue,
    error: Option<UdpError>,
    error_queue: &'a Option<Box<UdpErrorQueue>>,
    listed_in: ClassSet,
    drops: u64,
    filter: Option<Vec<u8>>,
    memberships: &'a [Membership],
    group: &'a Option<Box<GroupKey>>,
}

/// A socket as it was read.
#[derive(Deserialize)]
#[serde(rename = "UdpSocket")]
struct SocketImage {
    local: SocketAddr,
    remote: Option<SocketAddr>,
    options: UdpOptions,
    queue: UdpReceiveQueue,
    error: Option<UdpError>,
    error_queue: Option<Box<UdpErrorQueue>>,
    listed_in: ClassSet,
    drops: u64,
    filter: Option<Vec<u8>>,
    memberships: Vec<Membership>,
    group: Option<Box<GroupKey>>,
}

/// A slot, to be written.
#[derive(Serialize)]
#[serde(rename = "UdpSlot")]
struct SlotRef<'a> {
    generation: u32,
    socket: Option<SocketRef<'a>>,
}

/// A slot as it was read.
#[derive(Deserialize)]
#[serde(rename = "UdpSlot")]
struct SlotImage {
    generation: u32,
    socket: Option<Box<SocketImage>>,
}

/// All slots.
struct SlotsRef<'a>(&'a [UdpSlot]);

impl<'a> SlotRef<'a> {
    fn new(slot: &'a UdpSlot) -> Self {
        let socket = slot.socket.as_ref().map(|socket| {
            let UdpSocket {
                local,
                remote,
                options,
                queue,
                error,
                error_queue,
                listed_in,
                route: _,
                drops,
                filter,
                has_slow_path: _,
                memberships,
                group,
            } = socket;
            SocketRef {
                local: *local,
                remote: *remote,
                options,
                queue,
                error: *error,
                error_queue,
                listed_in: *listed_in,
                drops: *drops,
                filter: filter.as_ref().map(|filter| filter.saved()),
                memberships,
                group,
            }
        });
        Self { generation: slot.generation, socket }
    }
}

impl Serialize for SlotsRef<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(SlotRef::new))
    }
}

/// Defines the state as it is written, which refers to what is large, and as it is read.
macro_rules! image {
    ($($field:ident: $written:ty => $read:ty,)*) => {
        /// The state, to be written.
        #[derive(Serialize)]
        #[serde(rename = "Udp")]
        pub(crate) struct UdpRef<'a> { $($field: $written,)* }

        /// The state as it was read.
        #[derive(Deserialize)]
        #[serde(rename = "Udp")]
        pub(crate) struct UdpImage { $($field: $read,)* }
    };
}

image! {
    slots: SlotsRef<'a> => Vec<SlotImage>,
    free: &'a [u32] => Vec<u32>,
    ports: &'a BTreeMap<u16, Vec<u32>> => BTreeMap<u16, Vec<u32>>,
    readable: &'a VecDeque<u32> => VecDeque<u32>,
    readable_classes: &'a ClassQueues<u32> => ClassQueues<u32>,
    queued_peak: usize => usize,
    groups: Vec<GroupImage> => Vec<GroupImage>,
    stats: &'a UdpStats => UdpStats,
    retry_at: Instant => Instant,
}

impl Udp {
    /// Returns why the state cannot be saved now.
    pub(crate) fn cannot_be_saved(&self) -> Option<&'static str> {
        let is_usual = self.readable_classes.current() == BEST_EFFORT;
        (!is_usual).then_some("datagrams of a class of priority are being processed")
    }

    /// Returns the image.
    pub(crate) fn image(&self) -> UdpRef<'_> {
        // Each field is listed, so that none is forgotten.
        let Self {
            slots,
            free,
            ports,
            readable,
            readable_classes,
            classes: _,
            queued: _,
            queued_peak,
            capacity: _,
            memberships: _,
            groups,
            stats,
            retry_at,
            scratch: _,
            sockets_max: _,
            memberships_max: _,
            receive_bytes: _,
            receive_total_bytes: _,
            port_first: _,
            port_last: _,
        } = self;
        UdpRef {
            slots: SlotsRef(slots),
            free,
            ports,
            readable,
            readable_classes,
            queued_peak: *queued_peak,
            groups: groups.image(),
            stats,
            retry_at: *retry_at,
        }
    }

    /// Takes over the sockets of an image, and joins their groups again. There were none before; after an
    /// error the state must not be used.
    ///
    /// # Errors
    /// The configuration has too little room, the owner does not make a filter again, a link has no groups,
    /// or the image is malformed.
    pub(crate) fn restore(
        &mut self,
        image: UdpImage,
        network: &mut Network,
        owner: &mut dyn Restorer,
    ) -> Result<(), String> {
        if !self.slots.is_empty() {
            return Err("a stack that has UDP sockets cannot take over others".into());
        }
        if image.slots.len() > self.sockets_max {
            let (count, max) = (image.slots.len(), self.sockets_max);
            return Err(format!(
                "network.udp_sockets_max is {max}, but there were {count} sockets at a time"
            ));
        }
        let mut memberships = Vec::new();
        for (index, SlotImage { generation, socket }) in (0..).zip(image.slots) {
            let socket = match socket {
                Some(socket) => {
                    let (socket, joined) = self.restore_socket(*socket, owner)?;
                    memberships.push((UdpHandle { index, generation }, joined));
                    Some(socket)
                }
                None => None,
            };
            self.slots.push(UdpSlot { generation, socket });
        }
        let mut is_free = vec![false; self.slots.len()];
        for index in &image.free {
            match is_free.get_mut(*index as usize) {
                Some(is_free) if !*is_free && self.socket_at(*index).is_none() => *is_free = true,
                _ => return Err("a slot of a UDP socket is vacant twice, or vacant and used".into()),
            }
        }
        let sockets = memberships.len();
        let mut bound = vec![false; self.slots.len()];
        for (port, indices) in &image.ports {
            for index in indices {
                let has_port = self.socket_at(*index).is_some_and(|socket| socket.local.port() == *port);
                if !has_port || core::mem::replace(&mut bound[*index as usize], true) {
                    return Err("a UDP socket is listed under a wrong port".into());
                }
            }
        }
        let exists = |index: &u32| (*index as usize) < self.slots.len();
        let is_listed_right = image.readable.iter().all(exists)
            && image.readable_classes.others().all(exists)
            && bound.iter().filter(|bound| **bound).count() == sockets
            && image.free.len() == self.slots.len() - sockets
            && image.readable_classes.is_valid();
        if !is_listed_right {
            return Err("the lists of UDP sockets contradict each other".into());
        }
        (self.free, self.ports) = (image.free, image.ports);
        (self.readable, self.readable_classes) = (image.readable, image.readable_classes);
        self.queued_peak = image.queued_peak.max(self.queued);
        self.retry_at = image.retry_at;
        let (slots, groups) = (&self.slots, &mut self.groups);
        let group_of = |index: u32| slots.get(index as usize)?.socket.as_ref()?.group.as_deref().copied();
        let members = (0..slots.len() as u32).filter(|index| group_of(*index).is_some()).count();
        groups.restore(image.groups, |saved| owner.filter(saved), group_of, members)?;
        for (handle, joined) in memberships {
            for Membership { link, group, filter } in joined {
                self.set_membership(network, handle, link, group, Some(filter))
                    .map_err(|error| format!("group {group} cannot be joined on link {}: {error}", link.0))?;
            }
        }
        self.stats = image.stats;
        Ok(())
    }

    /// Returns a socket without its memberships, which are joined later.
    fn restore_socket(
        &mut self,
        image: SocketImage,
        owner: &mut dyn Restorer,
    ) -> Result<(UdpSocket, Vec<Membership>), &'static str> {
        let SocketImage { mut queue, error_queue, filter, memberships, .. } = image;
        if !queue.is_valid() || error_queue.as_ref().is_some_and(|errors| !errors.is_valid()) {
            return Err("the queue of a UDP socket contradicts itself");
        }
        queue.set_has_classes(self.classes.is_some());
        let filter = match filter {
            Some(saved) => Some(owner.filter(&saved).ok_or("the filter of a socket was not made again")?),
            None => None,
        };
        self.queued += queue.cost();
        self.capacity += queue.capacity();
        let mut socket = UdpSocket {
            local: image.local,
            remote: image.remote,
            options: image.options,
            queue,
            error: image.error,
            error_queue,
            listed_in: image.listed_in,
            route: None,
            drops: image.drops,
            filter,
            has_slow_path: false,
            memberships: Vec::new(),
            group: image.group,
        };
        socket.update_slow_path(self.classes.is_some());
        Ok((socket, memberships))
    }
}
