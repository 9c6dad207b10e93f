//! A program that executes commands, line by line, from a socket of the test, and answers with lines. Its
//! children and the programs that it executes connect to the same address.

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
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Address of the test's socket.
pub const ADDRESS_ENV: &str = "GINNEL_TEST_ADDRESS";
/// Descriptors inherited from the program that executed this one: the control connection and the table.
const INHERITED_ENV: &str = "GINNEL_TEST_INHERITED";
/// Name of the memory file of a region.
const REGION_NAME: &str = "ginnel-channel";
/// Limit of every wait.
const TIMEOUT: Duration = Duration::from_secs(20);

struct ScriptedProcess {
    attachment: Option<Attachment>,
    events: VecDeque<ClientEvent>,
    listener: u32,
    proxy_fd: Option<OwnedFd>,
    address: String,
}

/// Runs the program of a scripted process.
pub fn run(address: String) {
    let mut scripted =
        ScriptedProcess { attachment: None, events: VecDeque::new(), listener: 0, proxy_fd: None, address };
    if let Ok(inherited) = std::env::var(INHERITED_ENV) {
        let (control_fd, table) = inherited.split_once(' ').expect("two numbers");
        let [control_fd, table] = [control_fd, table].map(|fd| sys::own(fd.parse().expect("a number")));
        let (attachment, _, metadata) =
            Attachment::inherit(control_fd, table).expect("inherited descriptors");
        assert_eq!(metadata, b"metadata");
        scripted.attachment = Some(attachment);
        scripted.serve("executed");
    }
    scripted.serve("new");
}

impl ScriptedProcess {
    /// Answers commands until the test closes the connection.
    fn serve(&mut self, name: &str) -> ! {
        let mut test = UnixStream::connect(&self.address).expect("the test");
        writeln!(test, "{name} {}", std::process::id()).expect("the test");
        let mut lines = BufReader::new(test.try_clone().expect("a descriptor"));
        loop {
            let mut line = String::new();
            match lines.read_line(&mut line) {
                Ok(1..) => {}
                _ => sys::exit(),
            }
            let mut words = line.trim_end().splitn(3, ' ');
            let mut next = || words.next().unwrap_or("");
            let (command, first, second) = (next(), next(), next());
            let answer = match self.execute(command, first, second) {
                Ok(answer) => answer,
                Err(error) => format!("error: {error}"),
            };
            if writeln!(test, "{answer}").is_err() {
                sys::exit();
            }
        }
    }

    fn attachment(&mut self) -> &mut Attachment {
        self.attachment.as_mut().expect("attached")
    }

    fn client(&mut self) -> &mut Client {
        &mut self.attachment().clients()[0]
    }

    /// Returns the first connection that the process owns.
    fn conn(&mut self) -> Conn {
        self.client().conns().next().expect("a connection")
    }

    fn held_sockets(&mut self) -> Vec<GlobalSocketId> {
        let listener = GlobalSocketId::listener(0, self.listener);
        let mut sockets = self.attachment().owned_sockets();
        sockets.push(listener);
        sockets
    }

    /// Waits until `ready` returns a value.
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

    fn execute(&mut self, command: &str, first: &str, second: &str) -> Result<String, Error> {
        let done = || Ok("ok".to_string());
        match command {
            "attach" => {
                self.attachment = Some(Attachment::connect(first.as_ref(), second)?);
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
            // Like join, for an inherited listener.
            "credits" => {
                let (listener, credits) = (self.listener, first.parse().expect("a number"));
                self.client().set_credits(listener, credits);
                self.client().flush();
                done()
            }
            "accept" => self.wait(|process| {
                let index = process.events.iter().position(|e| matches!(e, ClientEvent::Accepted { .. }))?;
                process.events.remove(index);
                Some("ok".to_string())
            }),
            "connect" => {
                let to = ([10, 0, 0, 2], first.parse().expect("a port")).into();
                self.client().connect(to, ConnectOptions::default())?;
                done()
            }
            // Receives this number of bytes from the first connection.
            "recv" => {
                let mut got = vec![0; first.parse().expect("a number")];
                let mut at = 0;
                self.wait(|process| {
                    let conn = process.conn();
                    at += process.client().recv(conn, &mut got[at..]).expect("readable");
                    process.client().flush();
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
            // Like send, without waking the stack.
            "send-unflushed" => {
                let conn = self.conn();
                let sent = self.client().send(conn, first.as_bytes()).map_err(Error::Send)?;
                Ok(sent.to_string())
            }
            // Echoes received bytes for ever.
            "echo" => {
                let mut bytes = [0; 4096];
                loop {
                    // First the events that occurred while another command waited.
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
            "owned" => Ok(self.attachment().owned_sockets().len().to_string()),
            // Waits for the end of the first connection.
            "close-reason" => {
                let reason = self.wait(|process| {
                    let closed = |e: &ClientEvent| match e {
                        ClientEvent::Closed { reason, .. } => Some(*reason),
                        _ => None,
                    };
                    process.events.iter().find_map(closed)
                })?;
                Ok(format!("{reason:?}"))
            }
            // The child attaches when the file `first` exists.
            "fork-late" => {
                let expected = self.attachment().prepare_fork()?;
                if let Some(child) = sys::fork() {
                    return Ok(child.to_string());
                }
                while !std::path::Path::new(first).exists() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                self.attachment().become_child(expected)?;
                self.serve("child")
            }
            // The stack is not told: the child inherits the control connection of its parent.
            "fork-unannounced" => match sys::fork() {
                Some(child) => Ok(child.to_string()),
                None => loop {
                    std::thread::sleep(Duration::from_secs(1));
                },
            },
            // Overwrites this number of random words of the region.
            "scribble" => {
                scribble(first.parse().expect("a number"));
                done()
            }
            "fork" => {
                let expected = self.attachment().prepare_fork()?;
                if let Some(child) = sys::fork() {
                    return Ok(child.to_string());
                }
                if first != "silent" {
                    self.attachment().become_child(expected)?;
                    self.serve("child");
                }
                // The child never attaches: only its connection shows that it lives.
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                }
            }
            // Announces a child that never starts.
            "prepare-fork" => {
                drop(self.attachment().prepare_fork()?);
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
                let sockets = self.held_sockets();
                let sockets: Vec<GlobalSocketId> =
                    if first == "all" { sockets } else { sockets[..1].to_vec() };
                let proxy_fd = self.attachment().share(&sockets)?;
                self.proxy_fd = Some(proxy_fd);
                done()
            }
            "unshare" => {
                self.proxy_fd = None;
                done()
            }
            // Sends the proxy descriptor to the process that listens at an address.
            "send-proxy" => {
                let to = UnixStream::connect(first).map_err(|e| Error::io("the other", e))?;
                let proxy_fd = self.proxy_fd.as_ref().expect("shared");
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let fds = [proxy_fd.as_fd()];
                assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
                sendmsg(&to, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).expect("sent");
                done()
            }
            // Receives a proxy descriptor at an address of its own; with a second word it does not resolve
            // the descriptor.
            "receive-proxy" => {
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
                let proxy_fd = self.proxy_fd.take().expect("taken");
                let sockets = self.attachment().resolve(&proxy_fd)?;
                if let Some(GlobalSocketId { id: ginnel::channel::SocketId::Listener(number), .. }) =
                    sockets.last()
                {
                    self.listener = *number;
                }
                Ok(sockets.len().to_string())
            }
            other => Err(Error::application(format!("unknown command {other}"))),
        }
    }

    /// Starts this program again with inherited sockets, or another program that does not use the stack.
    fn start<T>(
        &mut self,
        program: &str,
        keep: bool,
        start: impl FnOnce(&mut Command) -> T,
    ) -> Result<T, Error> {
        let kept = if keep { self.held_sockets() } else { Vec::new() };
        let expected = self.attachment().prepare_exec(&kept)?;
        let table = PreparedProcess::inheritance_table(&kept, b"metadata")?;
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

/// Writes random words to random places of the channel's memory, as a hostile program can.
fn scribble(words: u32) {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("mappings");
    let regions: Vec<(u64, u64)> = maps
        .lines()
        .filter(|line| line.contains(REGION_NAME) && line.contains(" rw-s "))
        .map(|line| {
            let (start, end) =
                line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
            let address = |text| u64::from_str_radix(text, 16).expect("an address");
            (address(start), address(end))
        })
        .collect();
    assert!(!regions.is_empty(), "no region is mapped: {maps}");
    let memory = OpenOptions::new().write(true).open("/proc/self/mem").expect("own memory");
    // xorshift64: the words follow from a fixed seed.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for word in 0..words {
        let (start, end) = regions[word as usize % regions.len()];
        // Tables of sockets and rings come first, so half of the words go to the first 64 KiB.
        let len = if word % 2 == 0 { (end - start).min(64 << 10) } else { end - start };
        let at = start + next() % len / 8 * 8;
        memory.write_all_at(&next().to_ne_bytes(), at).expect("a mapped word");
    }
}
