//! How a connection gets from the control thread to the halves of a device, and how a half that sleeps is woken.
//!
//! A half looks at one word per call, which changes only when a connection comes or goes; then it takes what lies in the slot.

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A counter in the kernel to wake somebody.
#[derive(Debug)]
pub(super) struct EventFd(OwnedFd);

impl EventFd {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn signal(&self) {
        // Fails only when the counter is full: then it is readable anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.0
    }
}

/// The eventfd of a ring. The peer has it too, and can do with it what it likes: fill the counter, or make the descriptor block. So it is
/// never read (the wake-up is the edge that an epoll sees), and rung by a [`Signaller`](super::signal::Signaller), which does not wait.
#[derive(Debug)]
pub(super) struct InterruptFd(OwnedFd);

impl InterruptFd {
    /// A bell to give to the peer.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// A bell from the peer. `None` if it is no eventfd: other descriptors may block in any call, even in that of `poll`.
    pub(super) fn from_peer(fd: OwnedFd) -> Option<Self> {
        let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
        (name.as_os_str() == "anon_inode:[eventfd]").then_some(Self(fd))
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.0
    }
}

/// What a receiving half sleeps on: one descriptor for its lifetime, behind which the bell of the present connection hangs.
#[derive(Debug)]
pub(super) struct Waker {
    epoll: OwnedFd,
    /// Signalled when a connection comes or goes.
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
        // An edge is taken by looking at it.
        let _ = epoll::wait(&self.epoll, &mut events, Some(&now));
    }

    /// From now on the bell wakes. The edge is enough, so that nobody has to read the counter.
    pub(super) fn register(self: &Arc<Self>, bell: InterruptFd) -> io::Result<RegisteredInterrupt> {
        epoll::add(&self.epoll, bell.fd(), EventData::new_u64(1), EventFlags::IN | EventFlags::ET)?;
        Ok(RegisteredInterrupt { interrupt: bell, waker: self.clone() })
    }
}

/// A bell that wakes a receiving half, for as long as this value lives. (Closing the descriptor alone would not take it out of the epoll, as
/// the peer has it too.)
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

/// A connection's own word to the control thread: the peer broke the rules.
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

/// Where the control thread puts one direction of a queue when a connection comes, and takes it away when it goes.
#[derive(Debug)]
pub(super) struct RingSlot<T> {
    /// Changes with each change of the slot.
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
        let old = std::mem::replace(&mut *self.slot(), ring);
        self.generation.fetch_add(1, Ordering::Release);
        drop(old);
    }
}

/// A half's side of a port.
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

    /// Takes over what the control thread has put there since the last call.
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
        // Inside the lock nobody changes it, so what is taken belongs to this number or a later one, and then it is taken again.
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
    fn a_bell_wakes_as_long_as_it_hangs_there_and_is_never_read() {
        let waker = Arc::new(Waker::new().expect("descriptors"));
        let bell = InterruptFd::new().expect("an eventfd");
        let peer = InterruptFd(bell.fd().try_clone().expect("a descriptor"));
        let attached = waker.register(bell).expect("an eventfd can be waited for");
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
        assert!(!is_readable(&waker), "the peer keeps the counter, but it hangs there no more");
        waker.wake();
        assert!(is_readable(&waker));
        waker.clear();
        assert!(!is_readable(&waker));
    }

    #[test]
    fn only_an_eventfd_is_a_bell() {
        let file = std::fs::File::open("/dev/null").expect("a file");
        assert!(InterruptFd::from_peer(file.into()).is_none());
        let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
        assert!(InterruptFd::from_peer(pipe).is_none());
        assert!(InterruptFd::from_peer(InterruptFd::new().expect("an eventfd").0).is_some());
    }

    #[test]
    fn a_half_takes_what_was_put_last() {
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
