//! A program that does what it is told, line by line, over a socket of the test: its answers are lines, too. Its children and the programs that
//! it becomes come to the same address.

use crate::sys;
use ginnel::broker::{Attachment, GlobalSocketId, PreparedProcess};
use ginnel::channel::{Client, ClientEvent};
use ginnel::{Conn, ConnectOptions, Error, ListenOptions};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Where the test is.
pub const ADDRESS_ENV: &str = "GINNEL_PUPPET";
/// The descriptors that the program before left: the connection, and the table.
const INHERITED_ENV: &str = "GINNEL_LEFT";
/// Nothing takes longer.
const TIMEOUT: Duration = Duration::from_secs(20);

struct ScriptedProcess {
    process: Option<Attachment>,
    events: VecDeque<ClientEvent>,
    listener: u32,
    proxy_fd: Option<OwnedFd>,
    address: String,
}

/// What a puppet's program does.
pub fn run(address: String) {
    let mut puppet =
        ScriptedProcess { process: None, events: VecDeque::new(), listener: 0, proxy_fd: None, address };
    if let Ok(left) = std::env::var(INHERITED_ENV) {
        let (line, table) = left.split_once(' ').expect("two numbers");
        let [line, table] = [line, table].map(|fd| sys::own(fd.parse().expect("a number")));
        let (process, _, note) = Attachment::inherit(line, table).expect("what was left");
        assert_eq!(note, b"a note");
        puppet.process = Some(process);
        puppet.serve("image");
    }
    puppet.serve("puppet");
}

impl ScriptedProcess {
    /// Answers lines until the test hangs up.
    fn serve(&mut self, who: &str) -> ! {
        let mut test = UnixStream::connect(&self.address).expect("the test");
        writeln!(test, "{who} {}", std::process::id()).expect("the test");
        let mut lines = BufReader::new(test.try_clone().expect("a descriptor"));
        loop {
            let mut line = String::new();
            match lines.read_line(&mut line) {
                Ok(1..) => {}
                _ => sys::exit(),
            }
            let mut words = line.trim_end().splitn(3, ' ');
            let mut next = || words.next().unwrap_or("");
            let (what, first, second) = (next(), next(), next());
            let answer = match self.execute(what, first, second) {
                Ok(answer) => answer,
                Err(error) => format!("error: {error}"),
            };
            if writeln!(test, "{answer}").is_err() {
                sys::exit();
            }
        }
    }

    fn process(&mut self) -> &mut Attachment {
        self.process.as_mut().expect("attached")
    }

    fn client(&mut self) -> &mut Client {
        &mut self.process().clients()[0]
    }

    /// The first connection that it holds and has not let go of.
    fn conn(&mut self) -> Conn {
        self.client().conns().next().expect("a connection")
    }

    fn held_sockets(&mut self) -> Vec<GlobalSocketId> {
        let listener = GlobalSocketId::listener(0, self.listener);
        let mut things = self.process().owned_sockets();
        things.push(listener);
        things
    }

    /// Waits until `ready` has an answer.
    fn wait<T>(&mut self, mut ready: impl FnMut(&mut Self) -> Option<T>) -> Result<T, Error> {
        let until = Instant::now() + TIMEOUT;
        loop {
            while let Some(event) = self.client().next_event() {
                self.events.push_back(event);
            }
            if let Some(found) = ready(self) {
                return Ok(found);
            }
            if Instant::now() > until {
                return Err(Error::application("nothing came"));
            }
            self.client().sleep(Some(Duration::from_millis(100)))?;
        }
    }

    fn execute(&mut self, what: &str, first: &str, second: &str) -> Result<String, Error> {
        let done = || Ok("ok".to_string());
        match what {
            "attach" => {
                self.process = Some(Attachment::connect(first.as_ref(), second)?);
                done()
            }
            "listen" => {
                let at = ([0, 0, 0, 0], first.parse().expect("a port")).into();
                let credits = second.parse().expect("a number");
                self.listener = self.client().listen(at, ListenOptions::default(), credits)?;
                Ok(self.listener.to_string())
            }
            "join" => {
                self.listener = first.parse().expect("a number");
                let (listener, credits) = (self.listener, second.parse().expect("a number"));
                self.client().join(listener, credits)?;
                self.client().flush();
                done()
            }
            // As join, of one that was inherited.
            "credits" => {
                let (listener, credits) = (self.listener, first.parse().expect("a number"));
                self.client().set_credits(listener, credits);
                self.client().flush();
                done()
            }
            "accept" => self.wait(|puppet| {
                let place = puppet.events.iter().position(|e| matches!(e, ClientEvent::Accepted { .. }))?;
                puppet.events.remove(place);
                Some("ok".to_string())
            }),
            "connect" => {
                let to = ([10, 0, 0, 2], first.parse().expect("a port")).into();
                self.client().connect(to, ConnectOptions::default())?;
                done()
            }
            // So many bytes, of the first connection.
            "recv" => {
                let mut got = vec![0; first.parse().expect("a number")];
                let mut at = 0;
                self.wait(|puppet| {
                    let conn = puppet.conn();
                    at += puppet.client().recv(conn, &mut got[at..]).expect("readable");
                    puppet.client().flush();
                    (at == got.len()).then_some(())
                })?;
                Ok(String::from_utf8(got).expect("text"))
            }
            "send" => {
                let conn = self.conn();
                let sent = self.client().send(conn, first.as_bytes()).map_err(Error::Send)?;
                self.client().flush();
                Ok(sent.to_string())
            }
            // As send, but the stack is not told.
            "whisper" => {
                let conn = self.conn();
                let sent = self.client().send(conn, first.as_bytes()).map_err(Error::Send)?;
                Ok(sent.to_string())
            }
            // Sends back what comes, for ever.
            "echo" => {
                let mut bytes = [0; 4096];
                loop {
                    // Those first that came while something else was awaited.
                    while let Some(event) = self.events.pop_front().or_else(|| self.client().next_event()) {
                        if let ClientEvent::Readable { conn } = event {
                            let count = self.client().recv(conn, &mut bytes).unwrap_or(0);
                            self.client().send(conn, &bytes[..count]).ok();
                        }
                    }
                    self.client().sleep(None)?;
                }
            }
            "release" => {
                let conn = self.conn();
                self.client().release(conn).expect("held");
                self.client().flush();
                done()
            }
            "unlisten" => {
                let listener = self.listener;
                self.client().unlisten(listener)?;
                done()
            }
            "held" => Ok(self.process().owned_sockets().len().to_string()),
            // The end of the first connection.
            "ended" => {
                let reason = self.wait(|puppet| {
                    let closed = |e: &ClientEvent| match e {
                        ClientEvent::Closed { reason, .. } => Some(*reason),
                        _ => None,
                    };
                    puppet.events.iter().find_map(closed)
                })?;
                Ok(format!("{reason:?}"))
            }
            "fork" => {
                let expected = self.process().prepare_fork()?;
                if let Some(child) = sys::fork() {
                    return Ok(child.to_string());
                }
                if first != "mute" {
                    self.process().become_child(expected)?;
                    self.serve("child");
                }
                // It never says anything: its connection alone speaks for it.
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                }
            }
            // Announces a child that never is.
            "expect" => {
                drop(self.process().prepare_fork()?);
                done()
            }
            "exec" => {
                let error = self.start(first, second == "keep", |command| command.exec());
                Err(Error::io("exec", error?))
            }
            "spawn" => {
                let child = self.start(first, second == "keep", |command| command.spawn());
                match child? {
                    Ok(child) => Ok(child.id().to_string()),
                    Err(error) => Err(Error::io("spawn", error)),
                }
            }
            "share" => {
                let things = self.held_sockets();
                let things: Vec<GlobalSocketId> = if first == "all" { things } else { things[..1].to_vec() };
                let placeholder = self.process().share(&things)?;
                self.proxy_fd = Some(placeholder);
                done()
            }
            "unshare" => {
                self.proxy_fd = None;
                done()
            }
            // Sends it to whoever listens at an address.
            "give" => {
                let to = UnixStream::connect(first).map_err(|e| Error::io("the other", e))?;
                let placeholder = self.proxy_fd.as_ref().expect("shared");
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let fds = [placeholder.as_fd()];
                assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
                sendmsg(&to, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).expect("sent");
                done()
            }
            // Waits for one at an address of its own; with a second word it does not use it.
            "take" => {
                let listener = UnixListener::bind(first).map_err(|e| Error::io("address", e))?;
                let (from, _) = listener.accept().expect("somebody");
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let mut byte = [0];
                recvmsg(&from, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
                    .expect("received");
                let fd = control.drain().find_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                    _ => None,
                });
                self.proxy_fd = fd;
                if second.is_empty() { self.execute("resolve", "", "") } else { done() }
            }
            "resolve" => {
                let placeholder = self.proxy_fd.take().expect("taken");
                let things = self.process().resolve(&placeholder)?;
                if let Some(GlobalSocketId { id: ginnel::channel::SocketId::Listener(number), .. }) =
                    things.last()
                {
                    self.listener = *number;
                }
                Ok(things.len().to_string())
            }
            other => Err(Error::application(format!("what is {other}?"))),
        }
    }

    /// This program again, with what it keeps, or another one that knows nothing.
    fn start<T>(
        &mut self,
        program: &str,
        keep: bool,
        start: impl FnOnce(&mut Command) -> T,
    ) -> Result<T, Error> {
        let kept = if keep { self.held_sockets() } else { Vec::new() };
        let expected = self.process().prepare_exec(&kept)?;
        let table = PreparedProcess::inheritance_table(&kept, b"a note")?;
        for fd in [expected.connection(), table.as_fd()] {
            fcntl_setfd(fd, FdFlags::empty()).expect("a descriptor");
        }
        let mut command = match program {
            "self" => Command::new(std::env::current_exe().expect("this program")),
            other => Command::new(other),
        };
        if program == "sleep" {
            command.arg("1000");
        }
        command.env(ADDRESS_ENV, &self.address);
        command.env(INHERITED_ENV, format!("{} {}", expected.connection().as_raw_fd(), table.as_raw_fd()));
        Ok(start(&mut command))
    }
}
