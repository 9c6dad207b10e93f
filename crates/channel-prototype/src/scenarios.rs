//! What a channel has to survive: each is played by processes of its own, and looked at from outside by asking the stack.

use crate::client::Client;
use crate::sys;
use rustix::process::Signal;
use std::io::{self, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// One scenario: its name, and what plays it.
pub type Scenario = (&'static str, fn(&Stage) -> io::Result<()>);

pub const ALL: &[Scenario] = &[
    ("fork: the child goes on when the parent is gone", fork_keeps_the_stream),
    ("fork: the child is killed before it says a word", fork_and_kill_child),
    ("fork: the parent is killed before the child says a word", fork_and_kill_parent),
    ("fork that the library does not see: death is seen all the same", unseen_fork),
    ("exec: what is not close-on-exec goes on, the rest ends", exec_keeps_what_it_should),
    ("exec that fails changes nothing", exec_that_fails),
    ("exec of a program without the library", exec_of_a_stranger),
    ("posix_spawn: the new program goes on", spawn_keeps_the_stream),
    (
        "vfork: a child in its parent's memory closes a socket of its own and becomes another program",
        vfork_keeps_the_stream,
    ),
    ("SCM_RIGHTS: the sender ends while the descriptor is on its way", rights_in_flight),
    ("SCM_RIGHTS: nobody receives it", rights_never_received),
    ("kill -9 with the lock held and nothing committed", killed_before_commit),
    ("kill -9 after the commit and before the bell", killed_before_bell),
    ("accept: what a stopped worker was offered goes to another", stopped_worker),
    ("accept: what a killed worker was offered goes to another", killed_worker),
    ("a client that writes anything anywhere hurts nobody else's socket", hostile_client),
];

/// The stack, seen by who watches.
pub struct Stage {
    pub path: String,
    pub program: String,
    pub observer: Client,
}

type Role = Box<dyn FnOnce(&mut UnixStream) -> io::Result<()>>;

/// A process of a scenario, and a line to it.
struct Actor {
    process: u32,
    line: UnixStream,
    ended: bool,
}

impl Actor {
    fn start(role: Role) -> io::Result<Self> {
        let (line, mut its) = UnixStream::pair()?;
        match sys::fork()? {
            Some(process) => Ok(Self { process, line, ended: false }),
            None => {
                drop(line);
                let status = match role(&mut its) {
                    Ok(()) => 0,
                    Err(error) => {
                        eprintln!("    {error}");
                        1
                    }
                };
                sys::exit(status)
            }
        }
    }

    fn hear(&mut self) -> io::Result<u32> {
        hear(&mut self.line)
    }

    fn tell(&mut self, number: u32) -> io::Result<()> {
        tell(&mut self.line, number)
    }

    fn kill(&mut self) -> io::Result<()> {
        sys::signal(self.process, Signal::KILL);
        self.ended = true;
        sys::wait(self.process).map(|_| ())
    }

    fn finish(mut self) -> io::Result<()> {
        self.ended = true;
        match sys::wait(self.process)? {
            0 => Ok(()),
            status => Err(io::Error::other(format!("a process ended with {status}"))),
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        if !self.ended {
            sys::signal(self.process, Signal::KILL);
            _ = sys::wait(self.process);
        }
    }
}

fn tell(line: &mut UnixStream, number: u32) -> io::Result<()> {
    line.write_all(&number.to_ne_bytes())
}

fn hear(line: &mut UnixStream) -> io::Result<u32> {
    line.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut bytes = [0; 4];
    line.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

impl Stage {
    /// Waits until so many hold a socket; 0 also wants it to be free.
    fn until_held_by(&self, socket: u32, count: u32) -> io::Result<()> {
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let (held, generation) = self.observer.status(socket)?;
            if held == count && (generation == 0) == (count == 0) {
                return Ok(());
            }
            if Instant::now() > until {
                let text = format!("socket {socket} is held by {held} instead of {count}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            sleep(Duration::from_millis(1));
        }
    }

    fn actor(
        &self,
        role: impl FnOnce(&str, &str, &mut UnixStream) -> io::Result<()> + 'static,
    ) -> io::Result<Actor> {
        let (path, program) = (self.path.clone(), self.program.clone());
        Actor::start(Box::new(move |line| role(&path, &program, line)))
    }
}

fn fork_keeps_the_stream(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut parent = Client::attach(path)?;
        let fd = parent.open()?;
        parent.echo(fd, "one")?;
        tell(line, parent.socket_of(fd))?;
        if parent.fork()?.is_some() {
            // The end of the process closes nothing by itself: the stack sees it go.
            parent.write(fd, b"two");
            return Ok(());
        }
        let mut child = parent.attach_child()?;
        child.expect(fd, "TWO")?;
        hear(line)?;
        child.echo(fd, "three")?;
        child.close(fd);
        tell(line, 3)?;
        hear(line).map(|_| ())
    })?;
    let socket = actor.hear()?;
    stage.until_held_by(socket, 1)?;
    actor.tell(0)?;
    assert_eq!(actor.hear()?, 3);
    stage.until_held_by(socket, 0)?;
    actor.tell(0)?;
    actor.finish()
}

fn fork_and_kill_child(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut parent = Client::attach(path)?;
        let fd = parent.open()?;
        let Some(child) = parent.fork()? else { sys::die() };
        sys::wait(child)?;
        tell(line, parent.socket_of(fd))?;
        hear(line)?;
        parent.echo(fd, "still here")
    })?;
    let socket = actor.hear()?;
    stage.until_held_by(socket, 1)?;
    actor.tell(0)?;
    actor.finish()?;
    stage.until_held_by(socket, 0)
}

fn fork_and_kill_parent(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut parent = Client::attach(path)?;
        let fd = parent.open()?;
        let socket = parent.socket_of(fd);
        if parent.fork()?.is_some() {
            tell(line, socket)?;
            sys::die();
        }
        hear(line)?;
        let child = parent.attach_child()?;
        child.echo(fd, "orphan")?;
        tell(line, 1)
    })?;
    let socket = actor.hear()?;
    stage.until_held_by(socket, 1)?;
    actor.tell(0)?;
    actor.hear()?;
    stage.until_held_by(socket, 0)?;
    assert_eq!(sys::wait(actor.process)?, -1, "killed");
    actor.ended = true;
    Ok(())
}

fn unseen_fork(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut parent = Client::attach(path)?;
        let fd = parent.open()?;
        parent.echo(fd, "seen")?;
        // The child inherits the connection to the stack, so that does not hang up.
        if sys::fork()?.is_none() {
            hear(line)?;
            return Ok(());
        }
        tell(line, parent.socket_of(fd))?;
        sys::die()
    })?;
    let socket = actor.hear()?;
    stage.until_held_by(socket, 0)?;
    actor.tell(0)?;
    sys::wait(actor.process)?;
    actor.ended = true;
    Ok(())
}

/// The end of a scenario in a new program: what it was left works, and stays open for a while.
pub fn resumed(text: &str, time: Duration) -> io::Result<()> {
    let client = Client::resume()?.ok_or_else(|| io::Error::other("nothing was left to this program"))?;
    for fd in client.fds() {
        client.echo(fd, text)?;
    }
    sleep(time);
    Ok(())
}

fn exec_keeps_what_it_should(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, program, line| {
        let mut client = Client::attach(path)?;
        let (kept, closed) = (client.open()?, client.open()?);
        client.keep_across_exec(kept)?;
        client.echo(kept, "before")?;
        tell(line, client.socket_of(kept))?;
        tell(line, client.socket_of(closed))?;
        hear(line)?;
        client.exec(program, &["resumed", "after", "300"])
    })?;
    let (kept, closed) = (actor.hear()?, actor.hear()?);
    stage.until_held_by(closed, 1)?;
    actor.tell(0)?;
    stage.until_held_by(closed, 0)?;
    stage.until_held_by(kept, 1)?;
    actor.finish()?;
    stage.until_held_by(kept, 0)
}

fn exec_that_fails(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut client = Client::attach(path)?;
        let fd = client.open()?;
        let error = client.exec("/nonexistent/program", &[]).expect_err("there is no such program");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        tell(line, client.socket_of(fd))?;
        hear(line)?;
        client.echo(fd, "the same program")
    })?;
    let socket = actor.hear()?;
    sleep(Duration::from_millis(20));
    stage.until_held_by(socket, 1)?;
    actor.tell(0)?;
    actor.finish()?;
    stage.until_held_by(socket, 0)
}

fn exec_of_a_stranger(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut client = Client::attach(path)?;
        let (kept, closed) = (client.open()?, client.open()?);
        client.keep_across_exec(kept)?;
        tell(line, client.socket_of(kept))?;
        tell(line, client.socket_of(closed))?;
        client.exec("/bin/sleep", &["0.3"])
    })?;
    let (kept, closed) = (actor.hear()?, actor.hear()?);
    stage.until_held_by(closed, 0)?;
    // As with the kernel: the descriptor is open in the program, whether it knows or not.
    stage.until_held_by(kept, 1)?;
    actor.finish()?;
    stage.until_held_by(kept, 0)
}

fn spawn_keeps_the_stream(stage: &Stage) -> io::Result<()> {
    started_program_keeps_the_stream(stage, |client, _, program, arguments| client.spawn(program, arguments))
}

fn vfork_keeps_the_stream(stage: &Stage) -> io::Result<()> {
    started_program_keeps_the_stream(stage, |client, unwanted, program, arguments| {
        client.vfork(unwanted, program, arguments)
    })
}

/// One socket goes on in another program and one in ours. `start` starts it, and may close the second in the child.
fn started_program_keeps_the_stream(
    stage: &Stage,
    start: fn(&mut Client, RawFd, &str, &[&str]) -> io::Result<u32>,
) -> io::Result<()> {
    let mut actor = stage.actor(move |path, program, line| {
        let mut client = Client::attach(path)?;
        let (kept, closed) = (client.open()?, client.open()?);
        client.keep_across_exec(kept)?;
        let child = start(&mut client, closed, program, &["resumed", "spawned", "300"])?;
        tell(line, client.socket_of(kept))?;
        tell(line, client.socket_of(closed))?;
        client.close(kept);
        hear(line)?;
        client.echo(closed, "mine")?;
        match sys::wait(child)? {
            0 => Ok(()),
            status => Err(io::Error::other(format!("the new program ended with {status}"))),
        }
    })?;
    let (kept, closed) = (actor.hear()?, actor.hear()?);
    stage.until_held_by(kept, 1)?;
    stage.until_held_by(closed, 1)?;
    actor.tell(0)?;
    actor.finish()?;
    stage.until_held_by(kept, 0)?;
    stage.until_held_by(closed, 0)
}

fn rights_in_flight(stage: &Stage) -> io::Result<()> {
    let (from, to) = UnixStream::pair()?;
    let mut sender = stage.actor(move |path, _, line| {
        let mut client = Client::attach(path)?;
        let fd = client.open()?;
        client.write(fd, b"sent");
        tell(line, client.socket_of(fd))?;
        client.share(fd, &from)
    })?;
    let socket = sender.hear()?;
    sender.finish()?;
    // Only the descriptor on its way keeps it.
    stage.until_held_by(socket, 1)?;
    let mut receiver = stage.actor(move |path, _, line| {
        let mut client = Client::attach(path)?;
        let fd = client.receive(&to)?;
        client.expect(fd, "SENT")?;
        client.echo(fd, "received")?;
        client.close(fd);
        tell(line, 0)?;
        hear(line).map(|_| ())
    })?;
    receiver.hear()?;
    stage.until_held_by(socket, 0)?;
    receiver.tell(0)?;
    receiver.finish()
}

fn rights_never_received(stage: &Stage) -> io::Result<()> {
    let (from, to) = UnixStream::pair()?;
    let mut sender = stage.actor(move |path, _, line| {
        let mut client = Client::attach(path)?;
        let fd = client.open()?;
        tell(line, client.socket_of(fd))?;
        client.share(fd, &from)
    })?;
    let socket = sender.hear()?;
    sender.finish()?;
    stage.until_held_by(socket, 1)?;
    drop(to);
    stage.until_held_by(socket, 0)
}

fn killed_before_commit(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut parent = Client::attach(path)?;
        let fd = parent.open()?;
        parent.echo(fd, "first")?;
        let Some(child) = parent.fork()? else {
            let child = parent.attach_child()?;
            child.write_up_to(fd, b"never", || sys::die());
            unreachable!("killed");
        };
        sys::wait(child)?;
        parent.echo(fd, "second")?;
        tell(line, parent.socket_of(fd))
    })?;
    let socket = actor.hear()?;
    actor.finish()?;
    stage.until_held_by(socket, 0)
}

fn killed_before_bell(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut parent = Client::attach(path)?;
        let fd = parent.open()?;
        let Some(child) = parent.fork()? else {
            let child = parent.attach_child()?;
            child.write_up_to(fd, b"committed", || ());
            sys::die();
        };
        sys::wait(child)?;
        parent.expect(fd, "COMMITTED")?;
        parent.echo(fd, "and on")?;
        tell(line, parent.socket_of(fd))
    })?;
    let socket = actor.hear()?;
    actor.finish()?;
    stage.until_held_by(socket, 0)
}

/// A worker that says it would take two connections, and takes none.
fn lazy_worker(stage: &Stage) -> io::Result<Actor> {
    let mut worker = stage.actor(|path, _, line| {
        let client = Client::attach(path)?;
        client.give_credits(2);
        tell(line, 0)?;
        hear(line).map(|_| ())
    })?;
    worker.hear()?;
    stage.observer.incoming(2)?;
    Ok(worker)
}

/// A worker that takes two connections and uses them.
fn eager_worker(stage: &Stage) -> io::Result<Actor> {
    stage.actor(|path, _, line| {
        let mut client = Client::attach(path)?;
        for text in ["accepted", "both"] {
            let fd = client.accept(2)?;
            client.echo(fd, text)?;
        }
        tell(line, 2)
    })
}

fn stopped_worker(stage: &Stage) -> io::Result<()> {
    let mut stopped = lazy_worker(stage)?;
    sys::signal(stopped.process, Signal::STOP);
    let mut other = eager_worker(stage)?;
    assert_eq!(other.hear()?, 2);
    other.finish()?;
    sys::signal(stopped.process, Signal::CONT);
    stopped.tell(0)?;
    stopped.finish()
}

fn killed_worker(stage: &Stage) -> io::Result<()> {
    let mut killed = lazy_worker(stage)?;
    killed.kill()?;
    let mut other = eager_worker(stage)?;
    assert_eq!(other.hear()?, 2);
    other.finish()
}

fn hostile_client(stage: &Stage) -> io::Result<()> {
    let mut actor = stage.actor(|path, _, line| {
        let mut client = Client::attach(path)?;
        let fd = client.open()?;
        client.scribble(fd, 20_000);
        tell(line, client.socket_of(fd))?;
        hear(line).map(|_| ())
    })?;
    let socket = actor.hear()?;
    stage.until_held_by(socket, 1)?;
    let mut other = eager_worker(stage)?;
    stage.observer.incoming(2)?;
    assert_eq!(other.hear()?, 2);
    other.finish()?;
    actor.kill()?;
    stage.until_held_by(socket, 0)
}
