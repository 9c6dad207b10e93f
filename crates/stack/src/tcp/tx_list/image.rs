//! The transmit list in an image of a stack.

use super::TxList;
use crate::priority::{BEST_EFFORT, CLASSES};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The list.
#[derive(Serialize, Deserialize)]
#[serde(rename = "TxList")]
pub(crate) struct TxListImage {
    best_effort: VecDeque<u32>,
    classes: [VecDeque<u32>; CLASSES],
}

impl TxList {
    /// Returns the image, in which connections that a device has refused are the first of their classes. The
    /// class of events that are processed must be best effort.
    pub(crate) fn image(&self) -> TxListImage {
        debug_assert!(self.raised_to.is_none() && self.device_class.is_none());
        let mut classes = self.classes.clone();
        let mut best_effort = self.best_effort.clone();
        for (class, ports) in self.refused.iter().enumerate() {
            let refused = ports.iter().flat_map(|port| &port.queue);
            let queue =
                if class == usize::from(BEST_EFFORT) { &mut best_effort } else { &mut classes[class] };
            *queue = refused.chain(&*queue).copied().collect();
        }
        TxListImage { best_effort, classes }
    }

    /// Takes over the connections of an image, of which there are `connections`.
    ///
    /// # Errors
    /// A connection does not exist.
    pub(crate) fn restore(&mut self, image: TxListImage, connections: usize) -> Result<(), &'static str> {
        let TxListImage { best_effort, classes } = image;
        let mut listed = classes.iter().flatten().chain(&best_effort);
        if !listed.all(|idx| (*idx as usize) < connections) {
            return Err("the transmit list has a connection that does not exist");
        }
        self.classes_len = self.classes_len_min + classes.iter().map(VecDeque::len).sum::<usize>();
        (self.best_effort, self.classes) = (best_effort, classes);
        self.refused = Default::default();
        Ok(())
    }
}
