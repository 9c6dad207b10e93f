//! Slots in which the stack puts something for one client: connections that it offers
//! (docs/adr/0013-accept-credits.md), and preallocated sockets with which the client opens connections
//! (docs/adr/0018-connecting-without-a-request.md).
//!
//! A client that takes a socket from a slot sees everything that the stack wrote about the socket before. An
//! offer is either accepted by the client or revoked by the stack, never both.

use super::socket::{OfferSlot, PreallocatedSocket};
use super::sync::{AtomicU64, Ordering};

/// Result of revoking an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RevokeOutcome {
    /// The offer is revoked.
    Revoked,
    /// The client had accepted the offer.
    Taken,
    /// The client wrote an invalid value into the slot, which is empty now.
    Overwritten,
}

/// Offers a connection in an empty slot.
pub(super) fn offer(slot: &AtomicU64, listener: u16, socket: u32) {
    slot.store(OfferSlot::Offered { listener, socket }.to_bits(), Ordering::Release);
}

/// Accepts an offer that was seen in the slot. Returns false if the stack has revoked it meanwhile.
pub(super) fn accept(slot: &AtomicU64, listener: u16, socket: u32) -> bool {
    let (offered, taken) = (OfferSlot::Offered { listener, socket }, OfferSlot::Taken { listener, socket });
    slot.compare_exchange(offered.to_bits(), taken.to_bits(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Empties a slot whose offer the client has accepted. Returns false if the client has not.
pub(super) fn clear_accepted(slot: &AtomicU64, listener: u16, socket: u32) -> bool {
    let is_taken =
        OfferSlot::from_bits(slot.load(Ordering::Acquire)) == OfferSlot::Taken { listener, socket };
    if is_taken {
        slot.store(OfferSlot::None.to_bits(), Ordering::Release);
    }
    is_taken
}

/// Revokes an offer.
pub(super) fn revoke(slot: &AtomicU64, listener: u16, socket: u32) -> RevokeOutcome {
    let (offered, none) = (OfferSlot::Offered { listener, socket }.to_bits(), OfferSlot::None.to_bits());
    match slot.compare_exchange(offered, none, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => RevokeOutcome::Revoked,
        Err(bits) if OfferSlot::from_bits(bits) == (OfferSlot::Taken { listener, socket }) => {
            RevokeOutcome::Taken
        }
        Err(_) => {
            slot.store(none, Ordering::Release);
            RevokeOutcome::Overwritten
        }
    }
}

/// Puts a preallocated socket into an empty slot.
pub(super) fn put_preallocated(slot: &AtomicU64, preallocated: PreallocatedSocket) {
    slot.store(preallocated.to_bits(), Ordering::Release);
}

/// Returns whether the slot may hold a preallocated socket.
pub(super) fn has_preallocated(slot: &AtomicU64) -> bool {
    slot.load(Ordering::Relaxed) != 0
}

/// Takes the preallocated socket out of the slot.
pub(super) fn take_preallocated(slot: &AtomicU64) -> Option<PreallocatedSocket> {
    PreallocatedSocket::from_bits(slot.swap(0, Ordering::Acquire))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn overwritten_offer_is_detected() {
        let slot = AtomicU64::new(0);
        offer(&slot, 3, 7);
        assert!(!accept(&slot, 3, 8) && !accept(&slot, 2, 7) && !clear_accepted(&slot, 3, 7));
        slot.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(revoke(&slot, 3, 7), RevokeOutcome::Overwritten);
        assert_eq!(slot.load(Ordering::Relaxed), 0);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::channel::sync::AtomicU32;
    use std::sync::Arc;

    /// A slot, and for each of two sockets: what the stack writes before it puts the socket into the slot,
    /// the client's request, and the peer to connect to.
    struct Memory {
        slot: AtomicU64,
        about: [AtomicU32; 2],
        requests: [AtomicU32; 2],
        peer: [AtomicU32; 2],
    }

    fn memory() -> Arc<Memory> {
        let zeros = || [AtomicU32::new(0), AtomicU32::new(0)];
        Arc::new(Memory { slot: AtomicU64::new(0), about: zeros(), requests: zeros(), peer: zeros() })
    }

    fn mark(socket: u32) -> u32 {
        10 + socket
    }

    /// Accepts what is offered, as a client does after a notification.
    fn accept_offered(memory: &Memory) -> Option<u32> {
        let bits = memory.slot.load(Ordering::Acquire);
        let OfferSlot::Offered { listener, socket } = OfferSlot::from_bits(bits) else { return None };
        accept(&memory.slot, listener, socket).then(|| {
            let about = memory.about[socket as usize].load(Ordering::Relaxed);
            assert_eq!(about, mark(socket), "the value written before the offer");
            socket
        })
    }

    /// Each offered connection gets one owner, and the owner sees what was written before the offer.
    #[test]
    fn offer_is_accepted_or_revoked_never_both() {
        loom::model(|| {
            let memory = memory();
            let client = {
                let memory = memory.clone();
                loom::thread::spawn(move || [accept_offered(&memory), accept_offered(&memory)])
            };
            let mut back = Vec::new();
            for socket in 0..2 {
                memory.about[socket as usize].store(mark(socket), Ordering::Relaxed);
                offer(&memory.slot, 1, socket);
                match revoke(&memory.slot, 1, socket) {
                    RevokeOutcome::Revoked => back.push(socket),
                    RevokeOutcome::Taken => {
                        assert!(clear_accepted(&memory.slot, 1, socket), "the offer stays accepted")
                    }
                    RevokeOutcome::Overwritten => panic!("nobody wrote an invalid value"),
                }
            }
            let taken = client.join().unwrap();
            let mut all: Vec<u32> = taken.into_iter().flatten().chain(back).collect();
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        });
    }

    /// Opens a connection with the preallocated socket in the slot.
    fn open(memory: &Memory) -> Option<u32> {
        let preallocated = has_preallocated(&memory.slot).then(|| take_preallocated(&memory.slot))??;
        let socket = preallocated.socket as usize;
        assert_eq!(
            memory.about[socket].load(Ordering::Relaxed),
            preallocated.generation,
            "with the generation it was put with"
        );
        memory.peer[socket].store(mark(preallocated.socket), Ordering::Relaxed);
        // As `Client::connect_preallocated` and `Domain::connect_preallocated` do.
        memory.requests[socket].store(1, Ordering::Release);
        Some(preallocated.socket)
    }

    /// A preallocated socket is used once, with the generation it was put with, and a stack that sees the
    /// request sees the peer.
    #[test]
    fn preallocated_socket_is_used_exactly_once() {
        loom::model(|| {
            let memory = memory();
            let client = {
                let memory = memory.clone();
                loom::thread::spawn(move || [open(&memory), open(&memory)])
            };
            let mut count = 0;
            for socket in 0..2 {
                count += 1;
                memory.about[socket as usize].store(mark(socket), Ordering::Relaxed);
                put_preallocated(&memory.slot, PreallocatedSocket { socket, generation: mark(socket) });
                // The next socket is put only after a notification for this one.
                if memory.requests[socket as usize].load(Ordering::Acquire) == 0 {
                    break;
                }
                assert_eq!(memory.peer[socket as usize].load(Ordering::Relaxed), mark(socket));
                memory.slot.store(0, Ordering::Relaxed);
            }
            let used: Vec<u32> = client.join().unwrap().into_iter().flatten().collect();
            let left = take_preallocated(&memory.slot).map(|preallocated| preallocated.socket);
            let all: Vec<u32> = used.into_iter().chain(left).collect();
            assert!(all.iter().copied().eq(0..count), "each once: {all:?} of {count}");
        });
    }
}
