//! Memory for fragments awaiting reassembly: payloads and headers in lists of small blocks, and for each
//! datagram a search tree of its fragments.
//!
//! Blocks and tree nodes live in vectors that grow to the peak usage, which the budget of
//! [`Reassembly`](super::reassembly::Reassembly) bounds. Freed slots are reused, so nothing is allocated in
//! steady state.

use core::cmp::Ordering;
use core::fmt;

/// Bytes of a block. Each fragment is charged 64 bytes besides its own, so no fragment takes more blocks than
/// it is charged for.
const BLOCK: usize = 64;
/// Marks the end of a list, or an empty tree.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// Bytes stored in a linked list of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockList {
    first: u32,
    len: u16,
}

/// A fragment in the tree of a datagram's fragments. The tree is a treap: a search tree by offset and a heap
/// by priority.
#[derive(Clone, Copy, Debug)]
struct FragmentNode {
    start: u16,
    /// Derived from a keyed hash, so that a sender cannot degenerate the tree into a list.
    priority: u32,
    left: u32,
    right: u32,
    payload: BlockList,
}

/// The byte range of a fragment within its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FragmentRange {
    pub start: usize,
    pub end: usize,
}

/// The tree of one datagram's fragments: the index of its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FragmentTree(u32);

impl FragmentTree {
    pub(super) const EMPTY: Self = Self(NO_SLOT);
}

/// The storage of all blocks and tree nodes.
pub(super) struct FragmentStore {
    blocks: Vec<[u8; BLOCK]>,
    /// For each block, the next one in its list or in the free list.
    next: Vec<u32>,
    free_block: u32,
    nodes: Vec<FragmentNode>,
    /// The head of the list of free nodes, linked by `left`.
    free_node: u32,
}

impl fmt::Debug for FragmentStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (blocks, nodes) = (self.blocks.len(), self.nodes.len());
        f.debug_struct("FragmentStore").field("blocks", &blocks).field("nodes", &nodes).finish()
    }
}

impl FragmentStore {
    pub(super) const fn new() -> Self {
        Self {
            blocks: Vec::new(),
            next: Vec::new(),
            free_block: NO_SLOT,
            nodes: Vec::new(),
            free_node: NO_SLOT,
        }
    }

    /// Copies bytes into blocks. There must be at most 65,535.
    pub(super) fn store(&mut self, bytes: &[u8]) -> BlockList {
        let mut chain = BlockList { first: NO_SLOT, len: bytes.len() as u16 };
        let mut last = NO_SLOT;
        for part in bytes.chunks(BLOCK) {
            let block = self.take_block();
            self.blocks[block as usize][..part.len()].copy_from_slice(part);
            if last == NO_SLOT {
                chain.first = block;
            } else {
                self.next[last as usize] = block;
            }
            last = block;
        }
        chain
    }

    fn take_block(&mut self) -> u32 {
        let block = self.free_block;
        if block == NO_SLOT {
            self.blocks.push([0; BLOCK]);
            self.next.push(NO_SLOT);
            // Cannot truncate: the budget is below 2^32 bytes, which is 64 times the number of blocks.
            return (self.blocks.len() - 1) as u32;
        }
        self.free_block = core::mem::replace(&mut self.next[block as usize], NO_SLOT);
        block
    }

    /// Appends the bytes of a list to `out`.
    pub(super) fn read(&self, chain: BlockList, out: &mut Vec<u8>) {
        let (mut block, mut left) = (chain.first, usize::from(chain.len));
        while left > 0 {
            let part = left.min(BLOCK);
            out.extend_from_slice(&self.blocks[block as usize][..part]);
            left -= part;
            block = self.next[block as usize];
        }
    }

    /// Returns the blocks of a list to the free list.
    pub(super) fn free(&mut self, chain: BlockList) {
        let mut block = chain.first;
        while block != NO_SLOT {
            let next = core::mem::replace(&mut self.next[block as usize], self.free_block);
            self.free_block = block;
            block = next;
        }
    }

    /// Returns the last fragment that begins at or before `at`, and the start of the first fragment after
    /// `at`.
    pub(super) fn find_adjacent(
        &self,
        tree: FragmentTree,
        at: usize,
    ) -> (Option<FragmentRange>, Option<usize>) {
        let (mut previous, mut next) = (None, None);
        let mut node = tree.0;
        while node != NO_SLOT {
            let fragment = &self.nodes[node as usize];
            let start = usize::from(fragment.start);
            if start <= at {
                previous = Some(FragmentRange { start, end: start + usize::from(fragment.payload.len) });
                node = fragment.right;
            } else {
                next = Some(start);
                node = fragment.left;
            }
        }
        (previous, next)
    }

    /// Adds a fragment, which must not overlap any other of its datagram. Returns the new tree.
    pub(super) fn insert(
        &mut self,
        tree: FragmentTree,
        start: u16,
        payload: &[u8],
        priority: u32,
    ) -> FragmentTree {
        let payload = self.store(payload);
        let fragment = FragmentNode { start, priority, left: NO_SLOT, right: NO_SLOT, payload };
        let node = self.free_node;
        let node = if node == NO_SLOT {
            self.nodes.push(fragment);
            (self.nodes.len() - 1) as u32
        } else {
            self.free_node = core::mem::replace(&mut self.nodes[node as usize], fragment).left;
            node
        };
        FragmentTree(self.insert_below(tree.0, node))
    }

    /// Inserts `node` into the subtree of `root` and returns the new root. Recurses as deep as the tree: a
    /// few dozen levels for the at most 8,192 fragments of a datagram.
    fn insert_below(&mut self, root: u32, node: u32) -> u32 {
        let FragmentNode { start, priority, .. } = self.nodes[node as usize];
        let Some(&FragmentNode { start: root_start, priority: root_priority, left, right, .. }) =
            self.nodes.get(root as usize)
        else {
            return node;
        };
        if priority > root_priority {
            let (left, right) = self.split(root, start);
            let fragment = &mut self.nodes[node as usize];
            (fragment.left, fragment.right) = (left, right);
            return node;
        }
        match start.cmp(&root_start) {
            Ordering::Less => self.nodes[root as usize].left = self.insert_below(left, node),
            _ => self.nodes[root as usize].right = self.insert_below(right, node),
        }
        root
    }

    /// Splits a tree into the fragments that begin before `at` and the others.
    fn split(&mut self, root: u32, at: u16) -> (u32, u32) {
        let Some(&FragmentNode { start, left, right, .. }) = self.nodes.get(root as usize) else {
            return (NO_SLOT, NO_SLOT);
        };
        if start < at {
            let (previous, next) = self.split(right, at);
            self.nodes[root as usize].right = previous;
            (root, next)
        } else {
            let (previous, next) = self.split(left, at);
            self.nodes[root as usize].left = next;
            (previous, root)
        }
    }

    /// Appends the payloads of all fragments to `out`, in order of their offsets.
    pub(super) fn read_all(&self, tree: FragmentTree, out: &mut Vec<u8>) {
        if let Some(fragment) = self.nodes.get(tree.0 as usize) {
            self.read_all(FragmentTree(fragment.left), out);
            self.read(fragment.payload, out);
            self.read_all(FragmentTree(fragment.right), out);
        }
    }

    /// Appends the payload of the fragment at offset 0 to `out`. Returns false if there is none.
    pub(super) fn read_first(&self, tree: FragmentTree, out: &mut Vec<u8>) -> bool {
        let mut first = None;
        let mut node = tree.0;
        while let Some(fragment) = self.nodes.get(node as usize) {
            first = Some(fragment);
            node = fragment.left;
        }
        let Some(first) = first.filter(|fragment| fragment.start == 0) else { return false };
        self.read(first.payload, out);
        true
    }

    /// Frees all fragments of a tree and their payloads.
    pub(super) fn free_all(&mut self, tree: FragmentTree) {
        if let Some(&FragmentNode { left, right, payload, .. }) = self.nodes.get(tree.0 as usize) {
            self.free_all(FragmentTree(left));
            self.free_all(FragmentTree(right));
            self.free(payload);
            self.nodes[tree.0 as usize].left = self.free_node;
            self.free_node = tree.0;
        }
    }

    /// Returns the number of blocks and of nodes in use.
    #[cfg(test)]
    pub(super) fn in_use(&self) -> (usize, usize) {
        let count = |first: u32, next: &dyn Fn(u32) -> u32| {
            let used = |at: &u32| *at != NO_SLOT;
            core::iter::successors(Some(first).filter(used), |&at| Some(next(at)).filter(used)).count()
        };
        let free_blocks = count(self.free_block, &|at| self.next[at as usize]);
        let free_pieces = count(self.free_node, &|at| self.nodes[at as usize].left);
        (self.blocks.len() - free_blocks, self.nodes.len() - free_pieces)
    }

    /// Returns the number of allocated blocks and nodes.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> (usize, usize) {
        (self.blocks.len(), self.nodes.len())
    }

    /// Returns the depth of a tree.
    #[cfg(test)]
    fn depth(&self, tree: FragmentTree) -> usize {
        self.nodes.get(tree.0 as usize).map_or(0, |fragment| {
            1 + self.depth(FragmentTree(fragment.left)).max(self.depth(FragmentTree(fragment.right)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ip::entropy::KeyedHash;
    use proptest::prelude::*;

    #[test]
    fn stored_bytes_are_returned_and_blocks_reused() {
        let mut store = FragmentStore::new();
        for _ in 0..3 {
            let lens = [0, 1, 63, 64, 65, 1480, 65_535];
            let chains = lens.map(|len| store.store(&vec![len as u8; len]));
            for (chain, len) in chains.into_iter().zip(lens) {
                let mut out = Vec::new();
                store.read(chain, &mut out);
                assert_eq!(out, vec![len as u8; len]);
                store.free(chain);
            }
            assert_eq!(store.in_use(), (0, 0));
            assert_eq!(store.capacity(), (1 + 1 + 1 + 2 + 24 + 1024, 0));
        }
    }

    #[test]
    fn any_insertion_order_yields_a_shallow_tree() {
        let hash = KeyedHash::new(&[1; 32]);
        let orders: [fn(u32) -> u32; 3] = [|i| i, |i| 8190 - i, |i| i * 37 % 8191];
        for order in orders {
            let mut store = FragmentStore::new();
            let mut tree = FragmentTree::EMPTY;
            for i in 0..8191 {
                let start = order(i) as u16 * 8;
                tree = store.insert(tree, start, &[i as u8; 8], hash.of(start) as u32);
            }
            assert!(store.depth(tree) < 60, "{}", store.depth(tree));
            store.free_all(tree);
            assert_eq!(store.in_use(), (0, 0));
        }
    }

    proptest! {
        /// The tree returns what an ordered map returns.
        #[test]
        fn tree_matches_an_ordered_map(
            starts in prop::collection::btree_map(0_u16..1000, any::<(u32, u8)>(), 0..100),
            order in any::<u64>(),
            offsets in prop::collection::vec(0_usize..8100, 20),
        ) {
            let mut store = FragmentStore::new();
            let mut tree = FragmentTree::EMPTY;
            let mut inserted: Vec<_> = starts.iter().collect();
            inserted.sort_by_key(|(start, _)| order.wrapping_mul(u64::from(**start) * 2 + 1));
            for (&start, &(priority, fill)) in inserted {
                tree = store.insert(tree, start * 8, &[fill; 8], priority);
            }
            let mut all = Vec::new();
            store.read_all(tree, &mut all);
            let expected: Vec<u8> = starts.values().flat_map(|&(_, fill)| [fill; 8]).collect();
            prop_assert_eq!(all, expected);
            for at in offsets {
                let previous = starts.keys().rev().map(|&start| usize::from(start) * 8).find(|&start| start <= at);
                let next = starts.keys().map(|&start| usize::from(start) * 8).find(|&start| start > at);
                let previous = previous.map(|start| FragmentRange { start, end: start + 8 });
                prop_assert_eq!(store.find_adjacent(tree, at), (previous, next));
            }
            prop_assert_eq!(store.in_use(), (starts.len(), starts.len()));
            store.free_all(tree);
            prop_assert_eq!(store.in_use(), (0, 0));
        }
    }
}
