//! Requests without an answer. A connection has 4 bytes for them, and 24 bytes for each from a common pool.

use super::plan::Kind;
use ginnel::Instant;

/// Stands for no request.
pub const NONE: u32 = u32::MAX;

/// Most messages of a connection that [`Outstanding::is_mixed`] looks at.
const MIXED_LOOKED_AT_MAX: usize = 64;

/// A message whose answer has not arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMessage {
    /// When the message was due.
    pub intended: Instant,
    /// Number of the message on its connection.
    pub counter: u32,
    /// Kind of the message.
    pub kind: Kind,
}

/// The messages of all connections that wait for answers. A connection's messages form a ring, and the
/// connection has the index of the last one, or [`NONE`].
#[derive(Debug, Default)]
pub struct Outstanding {
    entries: Vec<(DeviceMessage, u32)>,
    free: Vec<u32>,
}

impl Outstanding {
    /// Returns the number of messages of all connections.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Returns true if no message waits for an answer.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends a message to those of a connection.
    pub fn push(&mut self, last: &mut u32, message: DeviceMessage) {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.entries.push((message, NONE));
                // Returning an index to the list must not allocate.
                self.free.reserve(self.entries.len());
                self.entries.len() as u32 - 1
            }
        };
        let first = match *last {
            NONE => index,
            last => core::mem::replace(&mut self.entries[last as usize].1, index),
        };
        self.entries[index as usize] = (message, first);
        *last = index;
    }

    /// Returns the oldest message of a connection.
    pub fn first(&self, last: u32) -> Option<DeviceMessage> {
        let (_, first) = self.entries.get(last as usize)?;
        Some(self.entries[*first as usize].0)
    }

    /// Removes the oldest message of a connection and returns it.
    pub fn pop(&mut self, last: &mut u32) -> Option<DeviceMessage> {
        let first = self.entries.get(*last as usize)?.1;
        let (message, second) = self.entries[first as usize];
        if first == *last {
            *last = NONE;
        } else {
            self.entries[*last as usize].1 = second;
        }
        self.free.push(first);
        Some(message)
    }

    /// Returns true if the oldest messages of a connection and the newest one are of more than one kind.
    /// Looks at no more than [`MIXED_LOOKED_AT_MAX`], so that many messages do not slow the generator.
    pub fn is_mixed(&self, last: u32) -> bool {
        let Some((message, first)) = self.entries.get(last as usize) else { return false };
        let mut index = *first;
        for _ in 0..MIXED_LOOKED_AT_MAX {
            if index == last {
                break;
            }
            let (other, next) = self.entries[index as usize];
            if other.kind != message.kind {
                return true;
            }
            index = next;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn message(counter: u32) -> DeviceMessage {
        let kind = if counter.is_multiple_of(3) { Kind::High } else { Kind::Low };
        DeviceMessage { intended: Instant::from_nanos(counter.into()), counter, kind }
    }

    proptest! {
        #[test]
        fn connections_keep_their_messages_in_order(
            steps in proptest::collection::vec((0usize..4, any::<bool>()), 0..300),
        ) {
            let mut pool = Outstanding::default();
            let (mut lasts, mut models) = ([NONE; 4], [const { VecDeque::new() }; 4]);
            for (n, (connection, pushes)) in (0..).zip(steps) {
                let (last, model) = (&mut lasts[connection], &mut models[connection]);
                if pushes {
                    pool.push(last, message(n));
                    model.push_back(message(n));
                } else {
                    prop_assert_eq!(pool.pop(last), model.pop_front());
                }
                prop_assert_eq!(pool.first(*last), model.front().copied());
                let kinds = |kind| model.iter().any(|m| m.kind == kind);
                prop_assert_eq!(pool.is_mixed(*last), kinds(Kind::High) && kinds(Kind::Low));
                prop_assert_eq!(pool.len(), models.iter().map(VecDeque::len).sum::<usize>());
            }
        }
    }
}
