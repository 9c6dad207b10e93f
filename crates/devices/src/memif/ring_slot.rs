//! Passes rings of a connection from the control thread to the halves of a device, and wakes halves that
//! sleep.
//!
//! A half reads one atomic generation number per call, which changes only when a connection comes up or goes
//! down; then it takes the content of the slot.

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An eventfd that wakes a thread of this process.
#[derive(Debug)]
pub(super) struct EventFd(OwnedFd);

impl EventFd {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn signal(&self) {
        // Writing fails only if the counter is full, in which case the descriptor is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.0
    }
}

/// The eventfd of a ring (the interrupt of the protocol). The peer has it, too, and may fill its counter or
/// make it blocking. So it is never read (an edge-triggered epoll set reports the wake-up), and it is
/// signalled by a [`Signaller`](super::signal::Signaller), which does not block.
#[derive(Debug)]
pub(super) struct InterruptFd(OwnedFd);

impl InterruptFd {
    /// Creates an interrupt to pass to the peer.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wraps a descriptor of the peer. Returns `None` if it is no eventfd: other descriptors may block in any
    /// call, even in `poll`.
    pub(super) fn from_peer(fd: OwnedFd) -> Option<Self> {
        let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
        (name.as_os_str() == "anon_inode:[eventfd]").then_some(Self(fd))
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.0
    }
}

/// The descriptor that a receiving half sleeps on: one epoll set for its lifetime, to which the interrupt of
/// the current connection is added.
#[derive(Debug)]
pub(super) struct Waker {
    epoll: OwnedFd,
    /// Signalled when a connection comes up or goes down.
    event: EventFd,
}

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let own = EventFd::new()?;
        epoll::add(&epoll, own.fd(), EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self { epoll, event: own })
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.epoll
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    pub(super) fn wake(&self) {
        self.event.signal();
    }

    /// Makes the descriptor unreadable again.
    #[cold]
    pub(super) fn clear(&self) {
        self.event.clear();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 2];
        // `epoll_wait` consumes the edge.
        let _ = epoll::wait(&self.epoll, &mut events, Some(&now));
    }

    /// Adds an interrupt. It is edge-triggered, so that its counter need not be read.
    pub(super) fn register(self: &Arc<Self>, interrupt: InterruptFd) -> io::Result<RegisteredInterrupt> {
        epoll::add(&self.epoll, interrupt.fd(), EventData::new_u64(1), EventFlags::IN | EventFlags::ET)?;
        Ok(RegisteredInterrupt { interrupt, waker: self.clone() })
    }
}

/// An interrupt that wakes a receiving half while this value lives. Closing the descriptor alone would not
/// remove it from the epoll set, because the peer has it, too.
#[derive(Debug)]
pub(super) struct RegisteredInterrupt {
    interrupt: InterruptFd,
    waker: Arc<Waker>,
}

impl Drop for RegisteredInterrupt {
    fn drop(&mut self) {
        let _ = epoll::delete(&self.waker.epoll, self.interrupt.fd().as_fd());
    }
}

/// Tells the control thread that the peer of a connection has violated the protocol.
#[derive(Debug)]
pub(super) struct ViolationFlag {
    pub(super) raised: AtomicBool,
    control: Arc<EventFd>,
}

impl ViolationFlag {
    pub(super) fn new(control: &Arc<EventFd>) -> Arc<Self> {
        Arc::new(Self { raised: AtomicBool::new(false), control: control.clone() })
    }

    #[cold]
    pub(super) fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        self.control.signal();
    }
}

/// Slot for one direction of a queue. The control thread fills it when a connection comes up, and empties it
/// when the connection goes down.
#[derive(Debug)]
pub(super) struct RingSlot<T> {
    /// Incremented at each change of the slot.
    generation: AtomicU64,
    slot: Mutex<Option<T>>,
}

impl<T> RingSlot<T> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { generation: AtomicU64::new(0), slot: Mutex::new(None) })
    }

    fn slot(&self) -> MutexGuard<'_, Option<T>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn replace(&self, ring: Option<T>) {
        let mut slot = self.slot();
        let old = std::mem::replace(&mut *slot, ring);
        // Under the lock: a half that took the new ring must not find the slot changed, and empty, again.
        self.generation.fetch_add(1, Ordering::Release);
        drop(slot);
        drop(old);
    }
}

/// A half's view of a slot.
#[derive(Debug)]
pub(super) struct SlotReader<T> {
    shared: Arc<RingSlot<T>>,
    seen_generation: u64,
    pub(super) ring: Option<T>,
}

impl<T> SlotReader<T> {
    pub(super) fn new(shared: Arc<RingSlot<T>>) -> Self {
        Self { shared, seen_generation: 0, ring: None }
    }

    /// Takes the content of the slot if the control thread has changed it since the last call.
    pub(super) fn refresh(&mut self) {
        if self.is_stale() {
            self.reload();
        }
    }

    pub(super) fn is_stale(&self) -> bool {
        self.shared.generation.load(Ordering::Acquire) != self.seen_generation
    }

    #[cold]
    fn reload(&mut self) {
        let mut slot = self.shared.slot();
        // The generation changes only while the slot is locked, so it is that of the ring.
        self.seen_generation = self.shared.generation.load(Ordering::Acquire);
        let ring = slot.take();
        drop(slot);
        self.ring = ring;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memif::signal::Signaller;
    use rustix::event::{PollFd, PollFlags, poll};

    fn is_readable(waker: &Waker) -> bool {
        let mut fds = [PollFd::new(&waker.epoll, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
    }

    #[test]
    fn interrupt_wakes_while_registered() {
        let waker = Arc::new(Waker::new().expect("descriptors"));
        let interrupt = InterruptFd::new().expect("an eventfd");
        let peer = InterruptFd(interrupt.fd().try_clone().expect("a descriptor"));
        let attached = waker.register(interrupt).expect("the eventfd is registered");
        let signaller = Signaller::new().expect("a descriptor");
        assert!(!is_readable(&waker));
        for _ in 0..3 {
            signaller.signal(peer.fd());
            assert!(is_readable(&waker));
            waker.clear();
            assert!(!is_readable(&waker));
        }
        drop(attached);
        signaller.signal(peer.fd());
        assert!(!is_readable(&waker), "the unregistered eventfd does not wake");
        waker.wake();
        assert!(is_readable(&waker));
        waker.clear();
        assert!(!is_readable(&waker));
    }

    #[test]
    fn interrupt_must_be_an_eventfd() {
        let file = std::fs::File::open("/dev/null").expect("a file");
        assert!(InterruptFd::from_peer(file.into()).is_none());
        let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
        assert!(InterruptFd::from_peer(pipe).is_none());
        assert!(InterruptFd::from_peer(InterruptFd::new().expect("an eventfd").0).is_some());
    }

    #[test]
    fn slot_returns_the_last_ring() {
        let port = RingSlot::new();
        let mut half = SlotReader::new(port.clone());
        half.refresh();
        assert_eq!(half.ring, None);
        port.replace(Some(1));
        port.replace(Some(2));
        assert!(half.is_stale());
        half.refresh();
        assert_eq!(half.ring, Some(2));
        half.refresh();
        assert_eq!(half.ring, Some(2));
        port.replace(None);
        half.refresh();
        assert_eq!(half.ring, None);
    }
}
