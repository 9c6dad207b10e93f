//! The clients that own a socket or a listener, and for each client the list of what it owns. Each side knows
//! the position in the other one's list, so adding and removing an owner costs little however much either
//! owns.

use serde::{Deserialize, Serialize};

/// A client that owns a socket or a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    client: u16,
    /// Position in the client's list of what it owns.
    position: u32,
}

/// The clients that own one socket or listener. Nearly always there is one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<u16>", into = "Vec<u16>")]
pub(super) enum OwnerSet {
    #[default]
    None,
    One(Owner),
    /// In ascending order of the clients' numbers. Boxed, because few sockets have it.
    #[allow(clippy::box_collection)]
    Many(Box<Vec<Owner>>),
}

/// Saved are the clients alone: the lists of what they own are built again.
impl From<OwnerSet> for Vec<u16> {
    fn from(owners: OwnerSet) -> Self {
        owners.as_slice().iter().map(|owner| owner.client).collect()
    }
}

/// The positions in the clients' lists are 0 until [`OwnerSet::insert`] is called for each owner.
impl From<Vec<u16>> for OwnerSet {
    fn from(mut clients: Vec<u16>) -> Self {
        clients.sort_unstable();
        clients.dedup();
        let owner = |client: &u16| Owner { client: *client, position: 0 };
        match &clients[..] {
            [] => Self::None,
            [one] => Self::One(owner(one)),
            many => Self::Many(Box::new(many.iter().map(owner).collect())),
        }
    }
}

impl OwnerSet {
    #[inline]
    fn as_slice(&self) -> &[Owner] {
        match self {
            Self::None => &[],
            Self::One(owner) => core::slice::from_ref(owner),
            Self::Many(owners) => owners,
        }
    }

    fn as_mut_slice(&mut self) -> &mut [Owner] {
        match self {
            Self::None => &mut [],
            Self::One(owner) => core::slice::from_mut(owner),
            Self::Many(owners) => owners,
        }
    }

    fn index(&self, client: u16) -> Result<usize, usize> {
        self.as_slice().binary_search_by_key(&client, |owner| owner.client)
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }

    #[inline]
    pub fn contains(&self, client: usize) -> bool {
        match self {
            Self::None => false,
            Self::One(owner) => usize::from(owner.client) == client,
            Self::Many(_) => u16::try_from(client).is_ok_and(|client| self.index(client).is_ok()),
        }
    }

    /// Returns the owners, in ascending order.
    #[inline]
    pub fn clients(&self) -> impl Iterator<Item = usize> {
        self.as_slice().iter().map(|owner| owner.client.into())
    }

    /// Adds an owner whose list `owned` gets `id`. Returns false if it was an owner already.
    #[inline]
    pub fn insert(&mut self, client: usize, owned: &mut Vec<u32>, id: u32) -> bool {
        // Cannot truncate: client numbers have 16 bits, and a client owns less than 2^32 sockets.
        let owner = Owner { client: client as u16, position: owned.len() as u32 };
        if self.is_empty() {
            *self = Self::One(owner);
        } else if !self.insert_another(owner) {
            return false;
        }
        owned.push(id);
        true
    }

    /// Adds an owner to others. Returns false if it was an owner already.
    #[cold]
    fn insert_another(&mut self, owner: Owner) -> bool {
        let Err(index) = self.index(owner.client) else { return false };
        match self {
            Self::None => *self = Self::One(owner),
            Self::One(first) => {
                let mut owners = vec![*first];
                owners.insert(index, owner);
                *self = Self::Many(Box::new(owners));
            }
            Self::Many(owners) => owners.insert(index, owner),
        }
        true
    }

    /// Removes an owner. Returns its position in the client's list, or `None` if it was no owner.
    #[inline]
    pub fn remove(&mut self, client: usize) -> Option<usize> {
        match self {
            Self::None => None,
            Self::One(owner) => {
                let position = (usize::from(owner.client) == client).then_some(owner.position as usize)?;
                *self = Self::None;
                Some(position)
            }
            Self::Many(_) => self.remove_of_many(client),
        }
    }

    #[cold]
    fn remove_of_many(&mut self, client: usize) -> Option<usize> {
        let index = self.index(u16::try_from(client).ok()?).ok()?;
        let Self::Many(owners) = self else { return None };
        let position = owners.remove(index).position;
        if let [last] = owners[..] {
            *self = Self::One(last);
        }
        Some(position as usize)
    }

    /// Records that this socket or listener moved to another position in the client's list.
    pub fn set_position(&mut self, client: usize, position: usize) {
        if let Ok(client) = u16::try_from(client)
            && let Ok(index) = self.index(client)
        {
            // Cannot truncate: it was a position before.
            self.as_mut_slice()[index].position = position as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that both sides agree, whatever is added and removed.
    #[test]
    fn owners_and_lists_agree() {
        let mut random = ginnel_devices::random::Random::new(7);
        let (mut sets, mut lists) = (vec![OwnerSet::default(); 6], vec![Vec::new(); 5]);
        let mut expected = [[false; 5]; 6];
        for _ in 0..3000 {
            let (id, client) = (random.below(6) as usize, random.below(5) as usize);
            let was_owner = expected[id][client];
            expected[id][client] = !was_owner;
            assert_eq!(sets[id].contains(client), was_owner);
            if was_owner {
                let position = sets[id].remove(client).unwrap();
                assert_eq!(lists[client].swap_remove(position), id as u32);
                if let Some(moved) = lists[client].get(position).copied() {
                    sets[moved as usize].set_position(client, position);
                }
                assert_eq!(sets[id].remove(client), None);
            } else {
                assert!(sets[id].insert(client, &mut lists[client], id as u32));
                assert!(!sets[id].insert(client, &mut lists[client], id as u32), "an owner already");
            }
            let owners = sets.iter().map(|set| set.clients().count()).sum::<usize>();
            assert_eq!(owners, lists.iter().map(Vec::len).sum());
            let set = &sets[id];
            assert_eq!(set.is_empty(), expected[id] == [false; 5]);
            assert!(set.clients().is_sorted());
        }
    }

    #[test]
    fn set_is_small() {
        assert_eq!(size_of::<OwnerSet>(), 16);
    }
}
