//! Send queues: bytes that are not acknowledged, in chunks of a common pool, so that nothing is allocated
//! once the pool has grown.

/// Size of a chunk in bytes: several requests, or a part of a long one.
pub(super) const CHUNK_BYTES: usize = 1024;
/// Most bytes in the send queue of a connection.
pub(super) const SEND_QUEUE_BYTES_MAX: usize = 64 << 10;
const NONE: u32 = u32::MAX;

/// The send queue of a connection, oldest bytes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct SendQueue {
    head: u32,
    tail: u32,
    /// Length in bytes.
    len: u32,
    /// Number of bytes of the first chunk that are acknowledged.
    offset: u16,
}

impl SendQueue {
    /// The empty queue.
    pub const EMPTY: Self = Self { head: NONE, tail: NONE, len: 0, offset: 0 };

    /// Returns the length in bytes.
    pub const fn len(&self) -> u32 {
        self.len
    }
}

/// The pool of chunks. It grows with the queues, each of which has at most [`SEND_QUEUE_BYTES_MAX`] bytes.
#[derive(Debug, Default)]
pub(super) struct SendBuffers {
    #[allow(clippy::vec_box)] // the pool grows during a run, and its buffers must not be copied
    chunks: Vec<Box<[u8; CHUNK_BYTES]>>,
    next: Vec<u32>,
    free: Vec<u32>,
}

impl SendBuffers {
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| self.grow())
    }

    #[cold]
    fn grow(&mut self) -> u32 {
        self.chunks.push(Box::new([0; CHUNK_BYTES]));
        self.next.push(NONE);
        // Returning a chunk to the pool must not allocate.
        self.free.reserve(self.chunks.len());
        self.chunks.len() as u32 - 1
    }

    /// Appends as many bytes as fit and returns how many.
    pub fn append(&mut self, queue: &mut SendQueue, bytes: &[u8]) -> usize {
        let bytes = &bytes[..bytes.len().min(SEND_QUEUE_BYTES_MAX - queue.len as usize)];
        let mut rest = bytes;
        while !rest.is_empty() {
            let used = (usize::from(queue.offset) + queue.len as usize) % CHUNK_BYTES;
            if queue.head == NONE {
                queue.head = self.take();
                queue.tail = queue.head;
            } else if used == 0 {
                let chunk = self.take();
                self.next[queue.tail as usize] = chunk;
                queue.tail = chunk;
            }
            let n = rest.len().min(CHUNK_BYTES - used);
            self.chunks[queue.tail as usize][used..used + n].copy_from_slice(&rest[..n]);
            queue.len += n as u32;
            rest = &rest[n..];
        }
        bytes.len()
    }

    /// Returns the bytes from `offset` to the end of their chunk or of the queue.
    pub fn slice_at(&self, queue: &SendQueue, offset: u32) -> &[u8] {
        if offset >= queue.len {
            return &[];
        }
        let (mut chunk, mut at) = (queue.head, usize::from(queue.offset) + offset as usize);
        let mut end = usize::from(queue.offset) + queue.len as usize;
        while at >= CHUNK_BYTES {
            chunk = self.next[chunk as usize];
            at -= CHUNK_BYTES;
            end -= CHUNK_BYTES;
        }
        &self.chunks[chunk as usize][at..end.min(CHUNK_BYTES)]
    }

    /// Removes the first `count` bytes; the queue must have as many.
    pub fn acknowledge(&mut self, queue: &mut SendQueue, count: u32) {
        queue.len -= count;
        let mut passed = usize::from(queue.offset) + count as usize;
        // The tail chunk stays while it has bytes. Once all are acknowledged, it is returned below.
        while queue.head != queue.tail && passed >= CHUNK_BYTES {
            self.free.push(queue.head);
            queue.head = self.next[queue.head as usize];
            passed -= CHUNK_BYTES;
        }
        if queue.len == 0 {
            if queue.head != NONE {
                self.free.push(queue.head);
            }
            *queue = SendQueue::EMPTY;
        } else {
            queue.offset = passed as u16;
        }
    }

    /// Returns the number of chunks in use.
    #[cfg(test)]
    pub fn in_use(&self) -> usize {
        self.chunks.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_stay_in_order(
            steps in prop::collection::vec((0usize..3000, 0u32..3000), 1..60),
        ) {
            let (mut buffers, mut queue, mut model) = (SendBuffers::default(), SendQueue::EMPTY, Vec::new());
            let mut next = 0u8;
            for (add, remove) in steps {
                let bytes: Vec<u8> = (0..add).map(|_| { next = next.wrapping_mul(5).wrapping_add(1); next }).collect();
                let taken = buffers.append(&mut queue, &bytes);
                prop_assert_eq!(taken, add.min(SEND_QUEUE_BYTES_MAX - model.len()));
                model.extend_from_slice(&bytes[..taken]);
                let mut seen = Vec::new();
                while seen.len() < model.len() {
                    let chunk = buffers.slice_at(&queue, seen.len() as u32);
                    prop_assert!(!chunk.is_empty());
                    seen.extend_from_slice(chunk);
                }
                prop_assert_eq!(&seen, &model);
                prop_assert!(buffers.slice_at(&queue, model.len() as u32).is_empty());
                let remove = remove.min(model.len() as u32);
                buffers.acknowledge(&mut queue, remove);
                model.drain(..remove as usize);
                prop_assert_eq!(queue.len() as usize, model.len());
            }
            let left = queue.len();
            buffers.acknowledge(&mut queue, left);
            prop_assert_eq!(buffers.in_use(), 0);
        }
    }
}
