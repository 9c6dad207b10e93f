//! Kernel descriptors of handlers, in every placement, on threads that sleep and that are busy.

use crate::fixture::{SERVER_ADDRESS, config};
use crate::placement_suite::PLACEMENTS;
use core::time::Duration;
use ginnel::{
    Conn, Context, Error, Handler, Instant, Interest, KernelFd, Readiness, Shard, Shards, Stale, StopFlag,
};
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue, pair};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;

const TIMEOUT: Duration = Duration::from_secs(30);

/// The index of a socket, and the bytes that arrived on it.
type Report = (usize, Vec<u8>);

/// Watches sockets, and reports the bytes that arrive on each. Byte `d` deregisters the other sockets, `r`
/// registers its own again, `w` writes until the socket is full, `!` stops the shard.
struct Watcher {
    sockets: Vec<(UnixStream, Option<KernelFd>)>,
    interest: Interest,
    /// True if the shard is never idle.
    is_busy: bool,
    to: mpsc::Sender<Report>,
    calls: u32,
    written: usize,
}

impl Watcher {
    /// Returns a handler with `count` sockets, and their other ends.
    fn new(count: usize, interest: Interest) -> (Self, Vec<UnixStream>, mpsc::Receiver<Report>) {
        let (to, from) = mpsc::channel();
        let (near, far) = (0..count).map(|_| UnixStream::pair().unwrap()).unzip::<_, _, Vec<_>, Vec<_>>();
        near.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        let sockets = near.into_iter().map(|socket| (socket, None)).collect();
        (Self { sockets, interest, is_busy: false, to, calls: 0, written: 0 }, far, from)
    }

    fn register(&mut self, cx: &mut Context<'_>, index: usize) {
        let (socket, handle) = &mut self.sockets[index];
        *handle = Some(cx.register_kernel_fd(&*socket, self.interest, index as u64).unwrap());
    }
}

impl Handler for Watcher {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        (0..self.sockets.len()).for_each(|index| self.register(cx, index));
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn kernel_ready(&mut self, cx: &mut Context<'_>, token: u64, readiness: Readiness) {
        self.calls += 1;
        let index = token as usize;
        assert!(self.sockets[index].1.is_some(), "descriptor {index} is not registered");
        let mut bytes = [0; 64];
        // Bytes may arrive after the poll: then they are read now and reported once more, or not at all.
        loop {
            let len = match self.sockets[index].0.read(&mut bytes) {
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            };
            for byte in &bytes[..len] {
                match byte {
                    b'd' => {
                        for other in (0..self.sockets.len()).filter(|other| *other != index) {
                            let handle = self.sockets[other].1.take().unwrap();
                            cx.deregister_kernel_fd(handle).unwrap();
                            assert_eq!(cx.deregister_kernel_fd(handle), Err(Stale::Handle));
                            assert!(cx.modify_kernel_fd(handle, Interest::READ).is_err());
                        }
                    }
                    b'r' => {
                        cx.deregister_kernel_fd(self.sockets[index].1.take().unwrap()).unwrap();
                        self.register(cx, index);
                    }
                    b'w' => {
                        while let Ok(written) = self.sockets[index].0.write(&[7; 1000]) {
                            self.written += written;
                        }
                    }
                    b'!' => cx.stop(),
                    _ => {}
                }
            }
            // The test does not wait for the last report.
            let _ = self.to.send((index, bytes[..len].to_vec()));
            if len == 0 {
                // The other end is closed.
                cx.deregister_kernel_fd(self.sockets[index].1.take().unwrap()).unwrap();
                break;
            }
        }
        if readiness.writable && self.written > 0 {
            self.written = 0;
            self.to.send((index, b"writable".to_vec())).unwrap();
        }
    }

    fn work(&mut self, _: &mut ginnel::WorkContext<'_>) -> Result<usize, Error> {
        Ok(usize::from(self.is_busy))
    }
}

/// Runs a handler on threads in a placement while `act` is called, and returns the
/// number of calls.
fn run(placement: usize, watcher: Watcher, act: impl FnOnce() + Send) -> u32 {
    let mut ours = config(&[SERVER_ADDRESS]);
    PLACEMENTS[placement].set(&mut ours);
    let (_far, queues) = multi_queue(&MemoryConfig::default(), 1, RssMode::RoundRobin);
    let shards = Shards::new(ours).device("cable", queues).open().unwrap();
    let stop = StopFlag::new().unwrap();
    let handler = std::sync::Mutex::new(Some(watcher));
    let mut ended = thread::scope(|scope| {
        scope.spawn(act);
        let take = |_| Ok(handler.lock().unwrap().take().expect("there is one application"));
        shards.run(&stop, take, |_, shard| shard.handler().calls).unwrap()
    });
    ended.pop().unwrap()
}

fn receive(from: &mpsc::Receiver<Report>) -> (usize, Vec<u8>) {
    from.recv_timeout(TIMEOUT).expect("the handler is called")
}

#[test]
fn every_placement_wakes_for_descriptors() {
    for (number, placement) in PLACEMENTS.iter().enumerate() {
        for (interest, is_busy) in [
            (Interest::READ, false),
            (Interest::EDGES, false),
            (Interest::READ, true),
            (Interest::EDGES, true),
        ] {
            let (mut watcher, mut far, from) = Watcher::new(3, interest);
            watcher.is_busy = is_busy;
            run(number, watcher, move || {
                for round in 0..20 {
                    // A shard without work has fallen asleep by then.
                    thread::sleep(Duration::from_millis(if round % 5 == 0 { 5 } else { 0 }));
                    let index = round % 3;
                    far[index].write_all(b"abc").unwrap();
                    assert_eq!(receive(&from), (index, b"abc".to_vec()), "{placement:?} {interest:?}");
                }
                far[0].write_all(b"!").unwrap();
            });
        }
    }
}

#[test]
fn many_descriptors_are_all_reported() {
    // More than one poll reports.
    const COUNT: usize = 300;
    for interest in [Interest::READ, Interest::EDGES] {
        let (watcher, mut far, from) = Watcher::new(COUNT, interest);
        // They stay open until the shard has ended.
        let far = &mut far;
        let calls = run(0, watcher, move || {
            for round in 0..3u8 {
                far.iter_mut().for_each(|socket| socket.write_all(&[b'0' + round]).unwrap());
                let mut reported = BTreeMap::new();
                for _ in 0..COUNT {
                    let (index, bytes) = receive(&from);
                    assert!(reported.insert(index, bytes).is_none(), "descriptor {index} twice");
                }
                assert!(reported.values().all(|bytes| *bytes == [b'0' + round]));
            }
            far[COUNT - 1].write_all(b"!").unwrap();
        });
        // An edge-triggered descriptor is also reported as writable once. The last byte may be read with the
        // report before it.
        let spurious = if interest.write { COUNT as u32 } else { 0 };
        let expected = 3 * COUNT as u32;
        assert!((expected..=expected + 1 + spurious).contains(&calls), "{calls} calls, {interest:?}");
    }
}

/// Runs a turn in simulated time, late enough for a poll.
fn turn(shard: &mut Shard<Watcher>, now: &mut Instant) {
    *now += Duration::from_millis(1);
    shard.poll_once(*now).unwrap();
}

fn simulated(watcher: Watcher) -> (Shard<Watcher>, Instant) {
    let (device, _far) = pair(MemoryConfig::default());
    let mut now = Instant::from_millis(1);
    let builder = Shard::builder(config(&[SERVER_ADDRESS])).handler(watcher).device("cable", device);
    let mut shard = builder.now(now).build().unwrap();
    turn(&mut shard, &mut now);
    (shard, now)
}

#[test]
fn deregistered_descriptors_of_a_poll_are_not_reported() {
    let (watcher, mut far, from) = Watcher::new(5, Interest::READ);
    let (mut shard, mut now) = simulated(watcher);
    // All are ready in the same poll, and the first call deregisters the others.
    far.iter_mut().for_each(|socket| socket.write_all(b"d").unwrap());
    (0..3).for_each(|_| turn(&mut shard, &mut now));
    assert_eq!((shard.handler().calls, from.try_iter().count()), (1, 1));
}

#[test]
fn registration_is_renewed_during_a_call() {
    for interest in [Interest::READ, Interest::EDGES] {
        let (watcher, mut far, from) = Watcher::new(2, interest);
        let (mut shard, mut now) = simulated(watcher);
        for _ in 0..3 {
            far[1].write_all(b"r").unwrap();
            (0..3).for_each(|_| turn(&mut shard, &mut now));
            assert_eq!(from.try_iter().collect::<Vec<_>>(), [(1, b"r".to_vec())]);
        }
    }
}

#[test]
fn closed_other_end_is_readable() {
    let (watcher, mut far, from) = Watcher::new(2, Interest::EDGES);
    let (mut shard, mut now) = simulated(watcher);
    turn(&mut shard, &mut now);
    far.remove(0);
    (0..3).for_each(|_| turn(&mut shard, &mut now));
    assert_eq!(from.try_iter().collect::<Vec<_>>(), [(0, Vec::new())]);
}

#[test]
fn descriptor_closed_while_registered_is_forgotten() {
    let (watcher, _far, from) = Watcher::new(1, Interest::READ);
    let (mut shard, mut now) = simulated(watcher);
    let old = shard.handler().sockets[0].1.unwrap();
    // The number is used again at once, by a socket that is registered, too.
    let (near, mut other_end) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let closed = std::mem::replace(&mut shard.handler_mut().sockets[0].0, near);
    let reused = rustix::io::fcntl_dupfd_cloexec(&closed, 0).unwrap();
    drop((closed, reused));
    other_end.write_all(b"x").unwrap();
    turn(&mut shard, &mut now);
    assert_eq!(from.try_iter().count(), 0, "it is not registered yet");
    shard.with(now, |watcher, cx| {
        watcher.register(cx, 0);
        if watcher.sockets[0].1.unwrap() != old {
            // A stale handle neither removes nor changes the other registration.
            let _ = cx.deregister_kernel_fd(old);
        }
    });
    turn(&mut shard, &mut now);
    assert_eq!(from.try_iter().collect::<Vec<_>>(), [(0, b"x".to_vec())]);
}

#[test]
fn interest_changes_what_is_reported() {
    let (watcher, mut far, from) = Watcher::new(1, Interest::READ);
    let (mut shard, mut now) = simulated(watcher);
    let modify = |shard: &mut Shard<Watcher>, now, interest| {
        shard.with(now, |watcher, cx| cx.modify_kernel_fd(watcher.sockets[0].1.unwrap(), interest).unwrap());
    };
    modify(&mut shard, now, Interest::NONE);
    far[0].write_all(b"w").unwrap();
    turn(&mut shard, &mut now);
    assert_eq!(from.try_iter().count(), 0);
    modify(&mut shard, now, Interest::READ);
    turn(&mut shard, &mut now);
    assert_eq!(from.try_iter().collect::<Vec<_>>(), [(0, b"w".to_vec())]);
    // It is full now.
    modify(&mut shard, now, Interest::WRITE);
    turn(&mut shard, &mut now);
    assert_eq!(from.try_iter().count(), 0);
    let mut written = vec![0; shard.handler().written];
    far[0].read_exact(&mut written).unwrap();
    turn(&mut shard, &mut now);
    assert_eq!(from.try_iter().collect::<Vec<_>>(), [(0, b"writable".to_vec())]);
    // Errors are not reported without interest.
    modify(&mut shard, now, Interest::NONE);
    let calls = shard.handler().calls;
    drop(far);
    (0..3).for_each(|_| turn(&mut shard, &mut now));
    assert_eq!(shard.handler().calls, calls);
}

#[test]
fn unsuitable_descriptors_are_refused() {
    let (watcher, _far, _from) = Watcher::new(1, Interest::READ);
    let (mut shard, now) = simulated(watcher);
    shard.with(now, |watcher, cx| {
        let file = tempfile::tempfile().unwrap();
        let error = cx.register_kernel_fd(&file, Interest::READ, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::PERM.raw_os_error()));
        let error = cx.register_kernel_fd(&watcher.sockets[0].0, Interest::READ, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::EXIST.raw_os_error()));
    });
}
