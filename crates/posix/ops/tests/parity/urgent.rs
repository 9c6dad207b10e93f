//! Urgent data.

use crate::sys::{Fd, SIOCATMARK, SIOCOUTQNSD, World, word};
use libc::{
    EPOLL_CTL_ADD, EPOLLET, EPOLLIN, EPOLLPRI, MSG_DONTWAIT, MSG_OOB, MSG_PEEK, MSG_TRUNC, MSG_WAITALL,
    POLLIN, POLLPRI, SHUT_WR, SO_OOBINLINE, SOCK_DGRAM, SOCK_STREAM, SOL_SOCKET,
};
use rustix::fd::AsRawFd;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const OOB: i32 = MSG_OOB | MSG_DONTWAIT;

pub fn nothing_urgent(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.say("new", w.a.recv(a, 1, OOB));
    w.b.send(b, b"plain", 0).unwrap();
    w.wait(w.a, a, POLLIN);
    w.say("behind plain data", w.a.recv(a, 1, OOB));
    w.say("plain", w.a.recv(a, 10, 0));
}

pub fn an_urgent_byte(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.b.send(b, b"x", MSG_OOB).unwrap();
    w.wait(w.a, a, POLLPRI);
    w.say("alone", w.ready(w.a, a));
    w.say("select", w.a.select(&[vec![a], vec![], vec![a]]).map(|(count, sets)| (count, sets[2] == [a])));
    w.say("taken", w.a.recv(a, 10, OOB));
    w.say("then", w.ready(w.a, a));
    w.say("again", w.a.recv(a, 10, OOB));
    w.b.send(b, b"more", 0).unwrap();
    w.wait(w.a, a, POLLIN);
    w.say("what follows", w.a.recv(a, 10, 0));
}

pub fn urgent_behind_plain_data(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.b.send(b, b"abc!", MSG_OOB).unwrap();
    // The urgent pointer is announced before the bytes arrive, so both have arrived with the bytes.
    w.wait(w.a, a, POLLIN);
    w.say("both", w.ready(w.a, a));
    w.say("the urgent one first", w.a.recv(a, 10, OOB));
    w.say("still to read", w.ready(w.a, a));
    w.say("the others", w.a.recv(a, 10, 0));
    w.say("no more", w.ready(w.a, a));
}

pub fn urgent_bytes_at_epoll(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, (EPOLLIN | EPOLLPRI | EPOLLET) as u32, 7).unwrap();
    w.say("quiet", w.a.epoll_wait(set, 4, 0));
    w.b.send(b, b"x", MSG_OOB).unwrap();
    w.wait(w.a, a, POLLPRI);
    w.say("wakes", w.a.epoll_wait(set, 4, 0));
    w.say("once", w.a.epoll_wait(set, 4, 0));
    w.say("taken", w.a.recv(a, 1, OOB));
    w.b.send(b, b"y", MSG_OOB).unwrap();
    w.wait(w.a, a, POLLPRI);
    w.say("wakes again", w.a.epoll_wait(set, 4, 0));
    w.say("the next", w.a.recv(a, 1, OOB));
}

/// Records the results of `poll` and `ioctl`.
fn state(w: &mut World<'_>, what: &str, fd: Fd) {
    let line = format!(
        "{}, {:?} to be read, at the mark: {:?}",
        w.ready(w.a, fd),
        w.a.readable_bytes(fd),
        w.a.query(fd, SIOCATMARK)
    );
    w.say(what, line);
}

/// Establishes a connection on which these bytes have arrived; `true` makes the last byte of a piece urgent.
fn came(w: &mut World<'_>, pieces: &[(&[u8], bool)]) -> (Fd, Fd) {
    let (a, b) = w.connection();
    more(w, (a, b), pieces);
    (a, b)
}

fn more(w: &mut World<'_>, (_, b): (Fd, Fd), pieces: &[(&[u8], bool)]) {
    for (bytes, urgent) in pieces {
        w.b.send(b, bytes, if *urgent { MSG_OOB } else { 0 }).unwrap();
    }
    w.settle();
}

pub fn reads_stop_at_the_mark(w: &mut World<'_>) {
    let (a, _) = came(w, &[(b"abc!", true), (b"def", false)]);
    state(w, "all of it", a);
    w.say("in front", w.a.recv(a, 100, 0));
    state(w, "at the mark", a);
    w.say("looked at", w.a.recv(a, 10, OOB | MSG_PEEK));
    w.say("again", w.a.recv(a, 10, OOB | MSG_PEEK));
    w.say("taken", w.a.recv(a, 10, OOB));
    w.say("no more", w.a.recv(a, 10, OOB));
    state(w, "still at the mark", a);
    w.say("behind", w.a.recv(a, 100, 0));
    state(w, "over", a);
    w.say("none", w.a.recv(a, 10, OOB));
}

pub fn who_reads_on_has_passed_it(w: &mut World<'_>) {
    let ends = came(w, &[(b"abc!", true), (b"def", false)]);
    let (a, _) = ends;
    w.say("two of them", w.a.recv(a, 2, 0));
    state(w, "in front", a);
    w.say("the third", w.a.recv(a, 2, 0));
    w.say("one behind", w.a.recv(a, 1, 0));
    state(w, "behind", a);
    w.say("too late", w.a.recv(a, 10, OOB));
    more(w, ends, &[(b"gh?", true)]);
    state(w, "another", a);
    w.say("up to it", w.a.recvv(a, &[1, 1, 5], 0));
    w.say("nothing behind it", w.a.recv(a, 10, MSG_DONTWAIT));
    state(w, "passed all the same", a);
    w.say("too late again", w.a.recv(a, 10, OOB));
}

pub fn in_line(w: &mut World<'_>) {
    let ends = came(w, &[(b"abc!", true), (b"def", false)]);
    let (a, _) = ends;
    w.say("wanted in line", w.a.setsockopt(a, SOL_SOCKET, SO_OOBINLINE, &word(1)));
    state(w, "all of it", a);
    w.say("not out of line", w.a.recv(a, 10, OOB));
    w.say("in front", w.a.recv(a, 100, 0));
    state(w, "at the mark", a);
    w.say("looked at", w.a.recv(a, 3, MSG_PEEK));
    w.say("it and what follows", w.a.recv(a, 2, 0));
    state(w, "behind", a);
    more(w, ends, &[(b"!", true)]);
    w.say("the rest", w.a.recv(a, 100, 0));
    state(w, "at the next", a);
    w.say("out of line again", w.a.setsockopt(a, SOL_SOCKET, SO_OOBINLINE, &word(0)));
    state(w, "hidden", a);
    w.say("nothing to be read", w.a.recv(a, 10, MSG_DONTWAIT));
    state(w, "which passed it", a);
}

pub fn a_look_stops_and_passes_as_a_read_does(w: &mut World<'_>) {
    let (a, _) = came(w, &[(b"abc!", true), (b"def", false)]);
    w.say("in front", w.a.recv(a, 100, MSG_PEEK));
    w.say("read", w.a.recv(a, 100, 0));
    w.say("behind", w.a.recv(a, 100, MSG_PEEK));
    state(w, "at the mark", a);
    w.say("still there", w.a.recv(a, 10, OOB));
    w.say("behind again", w.a.recv(a, 2, MSG_PEEK));
    w.say("dropped", w.a.recv(a, 2, MSG_TRUNC).map(|bytes| bytes.len()));
    w.say("the last", w.a.recv(a, 10, 0));
}

pub fn a_look_from_an_offset(w: &mut World<'_>) {
    let (a, _) = came(w, &[(b"abc!", true), (b"def", false)]);
    w.say("begins behind one", w.a.setsockopt(a, SOL_SOCKET, libc::SO_PEEK_OFF, &word(1)));
    w.say("up to the mark", w.a.recv(a, 100, MSG_PEEK));
    w.say("from there on", w.a.recv(a, 100, MSG_PEEK));
    w.say("as it is", w.a.recv(a, 2, 0));
    state(w, "one in front", a);
}

pub fn waiting_for_all_ends_at_the_mark(w: &mut World<'_>) {
    let (a, _) = came(w, &[(b"abc!", true), (b"def", false)]);
    w.say("not all", w.a.recv(a, 6, MSG_WAITALL));
    w.say("all of these", w.a.recv(a, 3, MSG_WAITALL));
    state(w, "behind", a);
}

pub fn a_second_one_replaces_the_first(w: &mut World<'_>) {
    let ends = came(w, &[(b"abc!", true)]);
    let (a, _) = ends;
    w.say("first", w.a.recv(a, 10, OOB | MSG_PEEK));
    more(w, ends, &[(b"de?", true), (b"f", false)]);
    state(w, "two", a);
    w.say("the second", w.a.recv(a, 10, OOB));
    w.say("the first is one of them now", w.a.recv(a, 100, 0));
    state(w, "at the second", a);
    w.say("behind", w.a.recv(a, 100, 0));
}

pub fn a_second_one_while_reading_is_at_the_first(w: &mut World<'_>) {
    let ends = came(w, &[(b"x", true)]);
    let (a, _) = ends;
    state(w, "one", a);
    more(w, ends, &[(b"y", true)]);
    state(w, "another", a);
    w.say("the last", w.a.recv(a, 10, OOB));
    w.say("no byte between them", w.a.recv(a, 10, MSG_DONTWAIT));
    // Sent one by one, because bytes that leave together have one mark.
    for byte in [b"1", b"2", b"3"] {
        more(w, ends, &[(byte, true)]);
    }
    more(w, ends, &[(b"end", false)]);
    state(w, "three", a);
    w.say("the last of three", w.a.recv(a, 10, OOB));
    w.say("what is left", w.a.recv(a, 10, MSG_DONTWAIT));
}

pub fn the_end_behind_an_urgent_byte(w: &mut World<'_>) {
    let (a, b) = came(w, &[(b"x", true)]);
    w.b.shutdown(b, SHUT_WR).unwrap();
    w.settle();
    state(w, "both", a);
    w.say("taken", w.a.recv(a, 10, OOB));
    w.say("none", w.a.recv(a, 10, OOB));
    w.say("the end", w.a.recv(a, 10, 0));
    state(w, "over", a);
    let (a, b) = came(w, &[(b"abc!", true)]);
    w.b.setsockopt(b, SOL_SOCKET, libc::SO_LINGER, &[word(1), word(0)].concat()).unwrap();
    w.b.close(b).unwrap();
    // The kernel's RST may take longer than usual on a busy machine.
    w.a.poll(&mut [libc::pollfd { fd: a, events: 0, revents: 0 }], 5_000).unwrap();
    w.say("of a connection that was reset", w.a.recv(a, 10, OOB));
}

pub fn messages_say_that_it_is_urgent(w: &mut World<'_>) {
    let (a, _) = came(w, &[(b"abc!", true)]);
    w.say("no room", w.a.recv_from(a, 0, 0, OOB | MSG_PEEK).map(|message| message.count));
    w.say("only its length", w.a.recv_from(a, 9, 0, OOB | MSG_PEEK | MSG_TRUNC).map(|m| (m.count, m.flags)));
    w.say("the byte", w.a.recv_from(a, 9, 0, OOB).map(|m| (m.bytes, m.flags)));
    w.say("the others", w.a.recv_from(a, 9, 0, 0).map(|m| (m.bytes, m.flags)));
}

pub fn into_a_pipe(w: &mut World<'_>) {
    let ends = came(w, &[(b"abc!", true), (b"def", false)]);
    let (a, _) = ends;
    let (out, into) = rustix::pipe::pipe().unwrap();
    w.say("up to the mark", w.a.splice(a, into.as_raw_fd(), 100, libc::SPLICE_F_NONBLOCK));
    state(w, "at the mark", a);
    w.say("not beyond", w.a.splice(a, into.as_raw_fd(), 100, libc::SPLICE_F_NONBLOCK));
    let mut bytes = [0; 100];
    w.say("what came", rustix::io::read(&out, &mut bytes).map(|count| bytes[..count].to_vec()));
}

pub fn marks_of_other_sockets(w: &mut World<'_>) {
    for kind in [SOCK_STREAM, SOCK_DGRAM] {
        let a = w.a.socket(w.domain(), kind).unwrap();
        w.say("new", w.a.query(a, SIOCATMARK));
        w.say("not sent", w.a.query(a, SIOCOUTQNSD));
        w.a.close(a).unwrap();
    }
    let (a, _) = w.listener(0);
    w.say("a listener", w.a.query(a, SIOCATMARK));
    w.say("not sent", w.a.query(a, SIOCOUTQNSD));
}

/// A process that reports `SIGURG`. It is a separate process, because the signal would interrupt other cases
/// of this one.
struct Listener {
    process: Child,
    words: BufReader<ChildStdout>,
}

impl Listener {
    fn new() -> Self {
        let script = "trap 'echo urgent' URG; echo ready; while sleep 0.01; do :; done";
        let mut process = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("sh");
        let words = BufReader::new(process.stdout.take().expect("its output is a pipe"));
        let mut listener = Self { process, words };
        assert_eq!(listener.next_word(), "ready");
        listener
    }

    fn pid(&self) -> i32 {
        self.process.id().cast_signed()
    }

    /// Waits for the next report.
    fn next_word(&mut self) -> String {
        let mut line = String::new();
        self.words.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Ends the process. Returns its remaining reports.
    fn last_words(mut self) -> String {
        // Signals sent before have been reported by then.
        std::thread::sleep(Duration::from_millis(100));
        self.process.kill().unwrap();
        let mut rest = String::new();
        self.words.read_to_string(&mut rest).unwrap();
        self.process.wait().unwrap();
        rest
    }
}

pub fn who_hears_of_it(w: &mut World<'_>) {
    let mut listener = Listener::new();
    let ends = w.connection();
    let (a, _) = ends;
    w.say("nobody", w.a.owner(a));
    // The poll lets the stack deliver the signal.
    let come = |w: &mut World<'_>, pieces: &[(&[u8], bool)]| {
        more(w, ends, pieces);
        w.ready(w.a, a);
    };
    come(w, &[(b"x", true)]);
    w.say("no such process", w.a.set_owner(a, 0x3fff_fff0));
    w.say("no such group", w.a.set_owner(a, -0x3fff_fff0));
    w.say("what has no opposite", w.a.set_owner(a, i32::MIN));
    w.say("that one", w.a.set_owner(a, listener.pid()));
    w.say("it is", w.a.owner(a).map(|owner| owner == listener.pid()));
    come(w, &[(b"plain", false), (b"y", true)]);
    w.say("told", listener.next_word());
    w.say("the byte", w.a.recv(a, 10, OOB));
    come(w, &[(b"z", true)]);
    w.say("told again", listener.next_word());
    w.say("nobody", w.a.set_owner(a, 0));
    come(w, &[(b"!", true)]);
    w.say("nothing more", listener.last_words());
}

pub mod tests {
    crate::cases! {
        nothing_urgent
        an_urgent_byte
        urgent_behind_plain_data
        urgent_bytes_at_epoll
        reads_stop_at_the_mark
        who_reads_on_has_passed_it
        in_line
        a_look_stops_and_passes_as_a_read_does
        a_look_from_an_offset
        waiting_for_all_ends_at_the_mark
        a_second_one_replaces_the_first
        a_second_one_while_reading_is_at_the_first
        the_end_behind_an_urgent_byte
        messages_say_that_it_is_urgent
        into_a_pipe
        marks_of_other_sockets
        who_hears_of_it
    }
}
