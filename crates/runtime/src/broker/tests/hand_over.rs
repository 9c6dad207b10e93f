//! Hand-over of shards to another process. Threads that serve the link of the broker stand for the processes,
//! and all of them serve the shard of the fixture, which so goes on with its state.

use super::*;
use crate::broker::thread::Supervision;
use rustix::net::{Shutdown, shutdown};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc;

/// The shards of one process.
#[derive(Clone, Default)]
struct Saver {
    refusal: Option<String>,
    /// Number of times that it still refuses.
    refusals: Arc<AtomicU32>,
    released: Arc<AtomicU32>,
}

impl SaveShards for Saver {
    fn save(&mut self) -> Result<SavedState, String> {
        let is_refused = |left: u32| left.checked_sub(1);
        match &self.refusal {
            Some(reason)
                if self.refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_refused).is_ok() =>
            {
                Err(reason.clone())
            }
            _ => Ok(SavedState::new(vec![ShardState::new(b"state", Vec::new(), 3).unwrap()])),
        }
    }

    fn release(&mut self) {
        self.released.fetch_add(1, Ordering::Relaxed);
    }
}

/// Starts a thread that stands for a process of the shards. Returns the link to it, and a descriptor by which
/// the process can be ended.
fn start_process(shards: &[Commander], mut saver: Saver) -> (ChildLink, OwnedFd) {
    let (supervisor_end, child_end) = link_pair().unwrap();
    let (shards, end) = (shards.to_vec(), child_end.try_clone().unwrap());
    std::thread::spawn(move || serve_broker(&child_end, &shards, &mut saver));
    (ChildLink::open(supervisor_end, None, TEST_TIMEOUT).unwrap(), end)
}

struct Supervised {
    fixture: BrokerFixture,
    path: PathBuf,
    shards: Vec<Commander>,
    /// Ends the first process.
    end: OwnedFd,
    restarts: Arc<AtomicU32>,
    _directory: tempfile::TempDir,
}

impl Supervised {
    /// `upgrade` is called with the shards in the thread of an upgrade.
    fn new(
        saver: &Saver,
        upgrade: impl Fn(&[Commander], &HandOver) -> Result<Upgraded, String> + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let restarts = Arc::<AtomicU32>::default();
        let (count, mut process) = (restarts.clone(), None);
        let open = |shards: Vec<Commander>| {
            let (link, end) = start_process(&shards, saver.clone());
            process = Some((shards.clone(), end));
            let link = Arc::new(link);
            let links = vec![ShardLink::Child(link.clone(), 0)];
            let broker = Broker::open_with(Some(&path), links, StackInfo::default(), LIMITS).unwrap();
            let restart = Box::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
                AfterDeath::Ended
            });
            let upgrade = Arc::new(move |_, _, hand_over: &HandOver| upgrade(&shards, hand_over));
            broker.handle.send(BrokerCommand::Supervise(Supervision { link, restart, upgrade }));
            broker
        };
        let peer = Peer { echoes: true, listens: true, ..Peer::default() };
        let fixture = BrokerFixture::with_peers(&small_config(), [peer], open);
        let (shards, end) = process.unwrap();
        Self { fixture, path, shards, end, restarts, _directory: directory }
    }

    fn upgrade(&self) -> Result<Upgraded, Error> {
        let executable = File::open("/bin/true").unwrap();
        upgrade(&self.path, executable.as_fd(), ConnectionPolicy::Keep, TEST_TIMEOUT)
    }

    fn restarts(&self) -> u32 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Waits until the end of the process of the shards was noticed.
    fn await_restart(&self) {
        let until = Instant::now() + TEST_TIMEOUT;
        while self.restarts() == 0 {
            assert!(Instant::now() < until, "the end of the process was not noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn connect(client: &mut Client) -> Conn {
    client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap()
}

fn exchange(client: &mut Client, conn: Conn, text: &[u8]) {
    client.send(conn, text).unwrap();
    client.flush();
    wait_for_text(client, conn, text);
}

fn kept(away: Duration) -> Upgraded {
    Upgraded { away, connections: Ok(3) }
}

#[test]
fn attachments_go_on_after_a_hand_over() {
    let (begun, begins) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel::<()>();
    let goes_on = Mutex::new(goes_on);
    let next_end = Arc::<Mutex<Option<OwnedFd>>>::default();
    let end = next_end.clone();
    let supervised = Supervised::new(&Saver::default(), move |shards, hand_over| {
        let stopped = hand_over.begin().unwrap();
        begun.send(()).unwrap();
        goes_on.lock().unwrap().recv().unwrap();
        assert_eq!(stopped.state().connections(), 3);
        let (link, next_end) = start_process(shards, Saver::default());
        *end.lock().unwrap() = Some(next_end);
        stopped.finish(link);
        Ok(kept(Duration::from_millis(7)))
    });
    let mut first = Attachment::connect(&supervised.path, "first").unwrap();
    let mut second = Attachment::connect(&supervised.path, "second").unwrap();
    let conn = connect(&mut first.clients()[0]);
    exchange(&mut first.clients()[0], conn, b"before");
    listen(&mut second.clients()[0], 81);
    let _third = std::thread::scope(|scope| {
        let upgraded = scope.spawn(|| supervised.upgrade().unwrap());
        begins.recv().unwrap();
        // Programs that end, start and ask for something meanwhile have to wait for the next process.
        drop(second);
        let third = scope.spawn(|| Attachment::connect(&supervised.path, "third").unwrap());
        let listener = scope.spawn(|| listen(&mut first.clients()[0], 80));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!third.is_finished() && !listener.is_finished());
        assert_eq!(supervised.fixture.broker.stats().reaped, 0);
        go_on.send(()).unwrap();
        assert_eq!(upgraded.join().unwrap(), kept(Duration::from_millis(7)));
        let (mut third, _) = (third.join().unwrap(), listener.join().unwrap());
        let until = Instant::now() + TEST_TIMEOUT;
        while third.clients()[0].listen(([0; 4], 81).into(), ListenOptions::default(), 1).is_err() {
            assert!(Instant::now() < until, "the program that ended was not reaped");
        }
        third
    });
    exchange(&mut first.clients()[0], conn, b"after");
    supervised.fixture.connect_peer(80, b"to the new listener");
    let accepted = accept(&mut first.clients()[0]);
    wait_for_text(&mut first.clients()[0], accepted, b"to the new listener");
    assert_eq!((supervised.restarts(), supervised.fixture.broker.stats().reaped), (0, 1));
    assert!(!first.is_disconnected());
    shutdown(next_end.lock().unwrap().as_ref().unwrap(), Shutdown::Both).unwrap();
    supervised.await_restart();
}

#[test]
fn lost_state_restarts_the_shards() {
    let end = Arc::new(Mutex::new(None::<OwnedFd>));
    let ended = end.clone();
    let supervised = Supervised::new(&Saver::default(), move |_, hand_over| {
        let stopped = hand_over.begin().unwrap();
        shutdown(ended.lock().unwrap().as_ref().unwrap(), Shutdown::Both).unwrap();
        drop(stopped);
        Err("the next process cannot restore the state".into())
    });
    *end.lock().unwrap() = Some(supervised.end.try_clone().unwrap());
    let program = Attachment::connect(&supervised.path, "").unwrap();
    let error = supervised.upgrade().unwrap_err();
    assert!(error.to_string().contains("cannot restore"), "{error}");
    let until = Instant::now() + TEST_TIMEOUT;
    while supervised.restarts() == 0 || !program.is_disconnected() {
        assert!(Instant::now() < until, "{} restarts", supervised.restarts());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(supervised.restarts(), 1);
}

#[test]
fn shards_go_on_if_nobody_takes_their_state() {
    let saver = Saver::default();
    let supervised = Supervised::new(&saver, |_, hand_over| {
        drop(hand_over.begin().unwrap());
        Err("the stack is being stopped".into())
    });
    let mut program = Attachment::connect(&supervised.path, "").unwrap();
    let conn = connect(&mut program.clients()[0]);
    supervised.upgrade().unwrap_err();
    exchange(&mut program.clients()[0], conn, b"as before");
    // The broker answers only when the shards were released.
    listen(&mut program.clients()[0], 80);
    assert_eq!(saver.released.load(Ordering::Relaxed), 1);
    assert_eq!(supervised.restarts(), 0);
    // The process is watched again.
    shutdown(&supervised.end, Shutdown::Both).unwrap();
    supervised.await_restart();
}

#[test]
fn shards_that_cannot_be_saved_go_on() {
    let refusal = String::from("a connection has a source of its own");
    let refusals = Arc::new(AtomicU32::new(100));
    let saver = Saver { refusal: Some(refusal.clone()), refusals, ..Saver::default() };
    let supervised = Supervised::new(&saver, |_, hand_over| {
        let refused = hand_over.begin().unwrap_err();
        assert!(!refused.hangs);
        Err(refused.reason)
    });
    let mut program = Attachment::connect(&supervised.path, "").unwrap();
    let conn = connect(&mut program.clients()[0]);
    assert_eq!(supervised.upgrade().unwrap_err().to_string(), Error::application(refusal).to_string());
    exchange(&mut program.clients()[0], conn, b"as before");
    assert_eq!((supervised.restarts(), saver.released.load(Ordering::Relaxed)), (0, 0));
    assert_eq!(saver.refusals.load(Ordering::Relaxed), 97, "asked three times");
    assert_eq!(supervised.shards.len(), 1);
}

#[test]
fn shards_that_cannot_be_saved_at_once_are_asked_again() {
    let saver = Saver {
        refusal: Some("frames wait in its queues".into()),
        refusals: Arc::new(AtomicU32::new(2)),
        ..Saver::default()
    };
    let supervised = Supervised::new(&saver, |_, hand_over| {
        drop(hand_over.begin().map_err(|refused| refused.reason)?);
        Ok(kept(Duration::from_millis(7)))
    });
    assert_eq!(supervised.upgrade().unwrap(), kept(Duration::from_millis(7)));
    assert_eq!(saver.refusals.load(Ordering::Relaxed), 0);
}
