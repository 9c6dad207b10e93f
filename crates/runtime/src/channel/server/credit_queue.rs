//! The clients that have credit for a listener, in the order in which they get connections
//! (docs/adr/0013-accept-credits.md).

use std::collections::VecDeque;

/// Number of clients among which the one with the fewest outstanding offers gets a connection. To look at
/// more clients would cost more than it balances.
const CANDIDATES_MAX: usize = 16;

/// Willingness of a client to accept a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Credit {
    /// The client does not accept a connection now.
    None,
    /// The client accepts a connection. It has this many outstanding offers.
    Ordinary(usize),
    /// The client accepts a connection, but gets one only if no client has ordinary credit. It has this many
    /// outstanding offers.
    Fallback(usize),
}

/// Clients in the order in which they get connections.
#[derive(Clone, Debug, Default)]
struct ClientQueue {
    order: VecDeque<u16>,
    /// A bit for each client that is in the queue.
    members: Vec<u64>,
}

impl ClientQueue {
    /// Adds a client at the end, unless it is in the queue.
    fn push(&mut self, client: usize) {
        let (word, bit) = (client / 64, 1 << (client % 64));
        if word >= self.members.len() {
            self.members.resize(word + 1, 0);
        }
        if self.members[word] & bit == 0 {
            self.members[word] |= bit;
            // Cannot truncate: client numbers have 16 bits.
            self.order.push_back(client as u16);
        }
    }

    #[inline]
    fn contains(&self, client: usize) -> bool {
        self.members.get(client / 64).is_some_and(|bits| bits & 1 << (client % 64) != 0)
    }

    #[inline]
    fn get(&self, index: usize) -> Option<usize> {
        self.order.get(index).map(|client| usize::from(*client))
    }

    fn remove(&mut self, index: usize) -> Option<usize> {
        let client = usize::from(self.order.remove(index)?);
        self.members[client / 64] &= !(1 << (client % 64));
        Some(client)
    }
}

/// The queues of one listener. A client in them may have lost its credit meanwhile.
#[derive(Clone, Debug, Default)]
pub(super) struct CreditQueue {
    ordinary: ClientQueue,
    fallback: ClientQueue,
}

/// The client that gets a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChosenClient {
    pub client: usize,
    /// True if it has fallback credit only.
    pub is_fallback: bool,
}

impl CreditQueue {
    /// Adds a client that has got credit.
    pub fn push(&mut self, client: usize, credit: Credit) {
        match credit {
            Credit::None => {}
            Credit::Ordinary(_) => self.ordinary.push(client),
            Credit::Fallback(_) => self.fallback.push(client),
        }
    }

    /// Returns whether a client is in one of the queues.
    #[inline]
    pub fn contains(&self, client: usize) -> bool {
        self.ordinary.contains(client) || self.fallback.contains(client)
    }

    /// Returns the client that gets the next connection, and moves it to the end of its queue. It is one with
    /// the fewest outstanding offers among the first [`CANDIDATES_MAX`] of the queue. A client with fallback
    /// credit gets the connection only if no client has ordinary credit. `credit` returns the present credit
    /// of a client. Returns `None` if no client has credit.
    pub fn pick(&mut self, mut credit: impl FnMut(usize) -> Credit) -> Option<ChosenClient> {
        let ordinary = |client| match credit(client) {
            Credit::Ordinary(outstanding) => Some(outstanding),
            _ => None,
        };
        if let Some(client) = self.ordinary.pick(ordinary) {
            return Some(ChosenClient { client, is_fallback: false });
        }
        let fallback = |client| match credit(client) {
            Credit::Fallback(outstanding) => Some(outstanding),
            _ => None,
        };
        self.fallback.pick(fallback).map(|client| ChosenClient { client, is_fallback: true })
    }

    /// Returns whether a client other than `client` has credit.
    pub fn has_other(&self, client: usize, mut credit: impl FnMut(usize) -> Credit) -> bool {
        let all = self.ordinary.order.iter().chain(&self.fallback.order).map(|other| usize::from(*other));
        all.filter(|other| *other != client).any(|other| credit(other) != Credit::None)
    }
}

impl ClientQueue {
    /// Returns the client with the fewest outstanding offers among the first [`CANDIDATES_MAX`], and moves it
    /// to the end. Removes clients for which `outstanding` returns `None`: they have no credit of this kind.
    fn pick(&mut self, mut outstanding: impl FnMut(usize) -> Option<usize>) -> Option<usize> {
        let (mut index, mut best) = (0, None);
        while index < CANDIDATES_MAX
            && let Some(client) = self.get(index)
        {
            let Some(count) = outstanding(client) else {
                self.remove(index);
                continue;
            };
            if best.is_none_or(|(_, least)| count < least) {
                best = Some((index, count));
            }
            if count == 0 {
                break;
            }
            index += 1;
        }
        let (index, _) = best?;
        if self.order.len() > 1 {
            let client = self.order.remove(index)?;
            self.order.push_back(client);
        }
        self.order.back().map(|client| usize::from(*client))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the client that a queue picks.
    fn pick(queue: &mut CreditQueue, credit: impl FnMut(usize) -> Credit) -> Option<usize> {
        queue.pick(credit).map(|chosen| chosen.client)
    }

    #[test]
    fn clients_get_connections_in_turn() {
        let mut queue = CreditQueue::default();
        for client in [7, 70, 3, 7] {
            queue.push(client, Credit::Ordinary(0));
        }
        let picked: Vec<_> = (0..6).map(|_| pick(&mut queue, |_| Credit::Ordinary(0))).collect();
        assert_eq!(picked, [7, 70, 3, 7, 70, 3].map(Some));
        assert!(queue.has_other(3, |client| if client == 70 { Credit::Fallback(5) } else { Credit::None }));
        assert!(!queue.has_other(70, |client| if client == 70 { Credit::Fallback(5) } else { Credit::None }));
    }

    #[test]
    fn fewest_outstanding_offers_come_first() {
        let mut queue = CreditQueue::default();
        (0..3).for_each(|client| queue.push(client, Credit::Ordinary(0)));
        let outstanding = [2, 1, 1];
        assert_eq!(pick(&mut queue, |client| Credit::Ordinary(outstanding[client])), Some(1));
        assert_eq!(pick(&mut queue, |client| Credit::Ordinary(outstanding[client])), Some(2));
    }

    #[test]
    fn fallback_clients_come_last() {
        let mut queue = CreditQueue::default();
        (0..40).for_each(|client| queue.push(client, Credit::Fallback(0)));
        queue.push(40, Credit::Ordinary(0));
        let credit = |client| if client == 40 { Credit::Ordinary(60) } else { Credit::Fallback(0) };
        assert_eq!((pick(&mut queue, credit), pick(&mut queue, credit)), (Some(40), Some(40)));
        // A client changes its credit, and is then in both queues.
        let changed = |client| if client == 5 { Credit::Ordinary(9) } else { Credit::Fallback(0) };
        queue.push(5, changed(5));
        assert_eq!((pick(&mut queue, changed), pick(&mut queue, changed)), (Some(5), Some(5)));
        let is_fallback =
            |queue: &mut CreditQueue, credit: Credit| queue.pick(|_| credit).map(|c| c.is_fallback);
        assert_eq!(is_fallback(&mut queue, Credit::Ordinary(0)), Some(false));
        assert_eq!(is_fallback(&mut queue, Credit::Fallback(0)), Some(true));
    }

    #[test]
    fn clients_without_credit_leave_the_queue() {
        let mut queue = CreditQueue::default();
        (0..100).for_each(|client| queue.push(client, Credit::Ordinary(0)));
        let mut asked = 0;
        let mut only_last = |client| {
            asked += 1;
            if client == 99 { Credit::Ordinary(3) } else { Credit::None }
        };
        assert_eq!(pick(&mut queue, &mut only_last), Some(99));
        assert_eq!(pick(&mut queue, &mut only_last), Some(99));
        assert_eq!(asked, 101, "the others are asked once");
        assert_eq!(pick(&mut queue, |_| Credit::None), None);
        queue.push(4, Credit::None);
        assert_eq!(pick(&mut queue, |_| Credit::Ordinary(0)), None, "nobody is in the queue");
        queue.push(4, Credit::Ordinary(0));
        assert_eq!(pick(&mut queue, |_| Credit::Ordinary(0)), Some(4));
    }
}
