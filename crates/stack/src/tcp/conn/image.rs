//! The connections in an image of a stack, each with its active state and its addresses.
//!
//! Nothing in it depends on the configuration: the hop is looked up again before the next segment, and
//! indices into pools are made anew.

use super::{ConnTable, NONE, SlotState, Tcb};
use crate::tcp::Tcp;
use crate::tcp::active::ActiveConn;
use crate::tcp::demux::HostAddr;
use crate::tcp::profile::image::ProfileNumbers;
use crate::timer_wheel::TimerNode;
use serde::{Deserialize, Serialize, Serializer};

/// A connection, to be written.
#[derive(Serialize)]
#[serde(rename = "Connection")]
pub(crate) struct ConnRef<'a> {
    tcb: &'a Tcb,
    profile: u16,
    remote: HostAddr,
    local: HostAddr,
    active: Option<&'a ActiveConn>,
}

/// A connection as it was read.
#[derive(Deserialize)]
#[serde(rename = "Connection")]
pub(crate) struct ConnImage {
    pub tcb: Tcb,
    /// Number of the profile in the image.
    pub profile: u16,
    pub remote: HostAddr,
    pub local: HostAddr,
    pub active: Option<Box<ActiveConn>>,
}

/// A slot of the table, to be written.
#[derive(Serialize)]
#[serde(rename = "ConnSlot")]
enum SlotRef<'a> {
    Vacant { generation: u32 },
    Used(ConnRef<'a>),
}

/// A slot of the table as it was read.
#[derive(Deserialize)]
#[serde(rename = "ConnSlot")]
pub(crate) enum SlotImage {
    Vacant {
        /// The generation of the next connection in the slot.
        generation: u32,
    },
    Used(Box<ConnImage>),
}

/// All slots, to be written.
pub(crate) struct SlotsRef<'a> {
    pub tcp: &'a Tcp,
    pub profiles: ProfileNumbers,
}

impl SlotsRef<'_> {
    fn slot<'a>(&self, tcp: &'a Tcp, (idx, tcb): (u32, &'a Tcb)) -> SlotRef<'a> {
        if tcb.slot_state == SlotState::Vacant {
            return SlotRef::Vacant { generation: tcb.generation };
        }
        let key = tcp.key(idx);
        SlotRef::Used(ConnRef {
            tcb,
            profile: self.profiles.number(tcb.profile),
            remote: key.remote,
            local: key.local,
            active: (tcb.active != NONE).then(|| &tcp.active[tcb.active]),
        })
    }
}

impl Serialize for SlotsRef<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.tcp.conns.iter().map(|slot| self.slot(self.tcp, slot)))
    }
}

impl ConnTable {
    /// Returns the vacant slots in the order in which they will be used.
    pub(crate) fn vacant(&self) -> Vec<u32> {
        let known = |index: u32| (index != NONE).then_some(index);
        core::iter::successors(known(self.free), |index| known(self[*index].token)).collect()
    }

    /// Returns whether a slot has a connection.
    pub(crate) fn is_used(&self, index: u32) -> bool {
        self.slots.get(index as usize).is_some_and(|slot| slot.slot_state != SlotState::Vacant)
    }

    /// Returns the timer of a connection.
    pub(crate) fn timer(&self, index: u32) -> TimerNode {
        self[index].timer
    }

    /// Adds a slot of an image; a vacant one if there is no connection.
    ///
    /// # Errors
    /// The configuration does not allow that many.
    pub(crate) fn restore_slot(&mut self, tcb: Tcb) -> Result<(), String> {
        if self.slots.len() == self.max {
            let max = self.max;
            return Err(format!("tcp.connections_max is {max}, but there were more connections at a time"));
        }
        self.live += usize::from(tcb.slot_state != SlotState::Vacant);
        self.slots.push(tcb);
        Ok(())
    }

    /// Links the vacant slots of an image in this order.
    ///
    /// # Errors
    /// The list is not that of the vacant slots.
    pub(crate) fn restore_vacant(&mut self, vacant: &[u32]) -> Result<(), &'static str> {
        let mut is_free = vec![false; self.slots.len()];
        for index in vacant {
            match is_free.get_mut(*index as usize) {
                Some(is_free) if !*is_free && !self.is_used(*index) => *is_free = true,
                _ => return Err("a slot of a connection is vacant twice, or vacant and used"),
            }
        }
        if vacant.len() != self.slots.len() - self.live {
            return Err("a vacant slot of a connection is not listed");
        }
        for index in vacant.iter().rev() {
            self.slots[*index as usize].token = core::mem::replace(&mut self.free, *index);
        }
        Ok(())
    }
}
