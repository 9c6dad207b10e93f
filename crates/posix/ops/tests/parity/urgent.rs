//! Urgent data.

use crate::sys::{Fd, Fixture, SIOCATMARK, SIOCOUTQNSD, word};
use crate::{kernel, signals};
use libc::{
    EPOLL_CTL_ADD, EPOLLET, EPOLLIN, EPOLLPRI, MSG_DONTWAIT, MSG_OOB, MSG_PEEK, MSG_TRUNC, MSG_WAITALL,
    POLLIN, POLLPRI, SHUT_WR, SO_OOBINLINE, SOCK_DGRAM, SOCK_STREAM, SOL_SOCKET,
};
use rustix::fd::AsRawFd;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const OOB: i32 = MSG_OOB | MSG_DONTWAIT;

pub fn no_urgent_data(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("new", w.a.recv(a, 1, OOB));
    w.b.send(b, b"plain", 0).unwrap();
    w.wait(w.a, a, POLLIN);
    w.log("after normal data", w.a.recv(a, 1, OOB));
    w.log("normal data", w.a.recv(a, 10, 0));
}

pub fn urgent_byte(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.b.send(b, b"x", MSG_OOB).unwrap();
    w.wait(w.a, a, POLLPRI);
    w.log("urgent byte only", w.ready(w.a, a));
    w.log("select", w.a.select(&[vec![a], vec![], vec![a]]).map(|(count, sets)| (count, sets[2] == [a])));
    w.log("recv of the urgent byte", w.a.recv(a, 10, OOB));
    w.log("poll after the urgent byte", w.ready(w.a, a));
    w.log("again", w.a.recv(a, 10, OOB));
    w.b.send(b, b"more", 0).unwrap();
    w.wait(w.a, a, POLLIN);
    w.log("next bytes", w.a.recv(a, 10, 0));
}

pub fn urgent_bytes_wait_for_room(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let mut filled = 0;
    while let Ok(sent) = w.b.send(b, &[b'.'; 100_000], MSG_DONTWAIT) {
        filled += sent;
        w.settle();
    }
    w.log("no room", w.b.send(b, b"!", OOB));
    let (from, to) = (w.b, w.a);
    let bytes = vec![b'u'; 300_000];
    let (result, received) = std::thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let call = scope.spawn(move || {
            sender.send(kernel::this_thread()).unwrap();
            from.send(b, &bytes, MSG_OOB)
        });
        signals::wait_in_call(receiver.recv().unwrap());
        assert!(!call.is_finished(), "the call must wait");
        let mut received = 0;
        // The urgent byte is not in the stream.
        while received < filled + 300_000 - 1 {
            received += to.recv(a, 50_000, 0).unwrap().len();
        }
        (call.join().unwrap(), received - filled)
    });
    w.log("result", result);
    w.log("received", received);
    w.log("urgent byte", w.a.recv(a, 10, OOB));
}

pub fn urgent_byte_after_normal_data(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.b.send(b, b"abc!", MSG_OOB).unwrap();
    // The urgent pointer is announced before the bytes arrive, so both have arrived with the bytes.
    w.wait(w.a, a, POLLIN);
    w.log("both events", w.ready(w.a, a));
    w.log("urgent byte first", w.a.recv(a, 10, OOB));
    w.log("poll after the urgent byte", w.ready(w.a, a));
    w.log("other bytes", w.a.recv(a, 10, 0));
    w.log("no further result", w.ready(w.a, a));
}

pub fn urgent_data_and_epoll(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, (EPOLLIN | EPOLLPRI | EPOLLET) as u32, 7).unwrap();
    w.log("no event", w.a.epoll_wait(set, 4, 0));
    w.b.send(b, b"x", MSG_OOB).unwrap();
    w.wait(w.a, a, POLLPRI);
    // The stack may tell of the urgent byte and of its arrival one after the other.
    w.settle();
    w.log("event", w.a.epoll_wait(set, 4, 0));
    w.log("no second event", w.a.epoll_wait(set, 4, 0));
    w.log("recv of the urgent byte", w.a.recv(a, 1, OOB));
    w.b.send(b, b"y", MSG_OOB).unwrap();
    w.wait(w.a, a, POLLPRI);
    w.settle();
    w.log("second event", w.a.epoll_wait(set, 4, 0));
    w.log("next urgent byte", w.a.recv(a, 1, OOB));
}

/// Records the results of `poll` and `ioctl`.
fn state(w: &mut Fixture<'_>, label: &str, fd: Fd) {
    let line = format!(
        "{}, {:?} to be read, at the mark: {:?}",
        w.ready(w.a, fd),
        w.a.readable_bytes(fd),
        w.a.query(fd, SIOCATMARK)
    );
    w.log(label, line);
}

/// Establishes a connection on which these bytes have arrived; `true` makes the last byte of a piece urgent.
fn connection_with(w: &mut Fixture<'_>, pieces: &[(&[u8], bool)]) -> (Fd, Fd) {
    let (a, b) = w.connection();
    send_pieces(w, (a, b), pieces);
    (a, b)
}

fn send_pieces(w: &mut Fixture<'_>, (_, b): (Fd, Fd), pieces: &[(&[u8], bool)]) {
    for (bytes, urgent) in pieces {
        w.b.send(b, bytes, if *urgent { MSG_OOB } else { 0 }).unwrap();
    }
    w.settle();
}

pub fn reads_stop_at_the_mark(w: &mut Fixture<'_>) {
    let (a, _) = connection_with(w, &[(b"abc!", true), (b"def", false)]);
    state(w, "all bytes", a);
    w.log("before the mark", w.a.recv(a, 100, 0));
    state(w, "at the mark", a);
    w.log("peek", w.a.recv(a, 10, OOB | MSG_PEEK));
    w.log("again", w.a.recv(a, 10, OOB | MSG_PEEK));
    w.log("recv of the urgent byte", w.a.recv(a, 10, OOB));
    w.log("no further result", w.a.recv(a, 10, OOB));
    state(w, "still at the mark", a);
    w.log("after the mark", w.a.recv(a, 100, 0));
    state(w, "after reading all", a);
    w.log("no urgent byte", w.a.recv(a, 10, OOB));
}

pub fn reading_past_the_mark_discards_it(w: &mut Fixture<'_>) {
    let ends = connection_with(w, &[(b"abc!", true), (b"def", false)]);
    let (a, _) = ends;
    w.log("two bytes", w.a.recv(a, 2, 0));
    state(w, "before the mark", a);
    w.log("third byte", w.a.recv(a, 2, 0));
    w.log("one byte after the mark", w.a.recv(a, 1, 0));
    state(w, "after the mark", a);
    w.log("urgent byte is gone", w.a.recv(a, 10, OOB));
    send_pieces(w, ends, &[(b"gh?", true)]);
    state(w, "second urgent byte", a);
    w.log("up to the mark", w.a.recvv(a, &[1, 1, 5], 0));
    w.log("no data after the mark", w.a.recv(a, 10, MSG_DONTWAIT));
    state(w, "mark passed", a);
    w.log("urgent byte is gone", w.a.recv(a, 10, OOB));
}

pub fn so_oobinline(w: &mut Fixture<'_>) {
    let ends = connection_with(w, &[(b"abc!", true), (b"def", false)]);
    let (a, _) = ends;
    w.log("set SO_OOBINLINE", w.a.setsockopt(a, SOL_SOCKET, SO_OOBINLINE, &word(1)));
    state(w, "all bytes", a);
    w.log("recv with MSG_OOB", w.a.recv(a, 10, OOB));
    w.log("before the mark", w.a.recv(a, 100, 0));
    state(w, "at the mark", a);
    w.log("peek", w.a.recv(a, 3, MSG_PEEK));
    w.log("across the mark", w.a.recv(a, 2, 0));
    state(w, "after the mark", a);
    send_pieces(w, ends, &[(b"!", true)]);
    w.log("rest", w.a.recv(a, 100, 0));
    state(w, "at the next mark", a);
    w.log("clear SO_OOBINLINE", w.a.setsockopt(a, SOL_SOCKET, SO_OOBINLINE, &word(0)));
    state(w, "urgent byte hidden", a);
    w.log("no data", w.a.recv(a, 10, MSG_DONTWAIT));
    state(w, "after reading past the mark", a);
}

pub fn peek_stops_at_the_mark(w: &mut Fixture<'_>) {
    let (a, _) = connection_with(w, &[(b"abc!", true), (b"def", false)]);
    w.log("before the mark", w.a.recv(a, 100, MSG_PEEK));
    w.log("read", w.a.recv(a, 100, 0));
    w.log("after the mark", w.a.recv(a, 100, MSG_PEEK));
    state(w, "at the mark", a);
    w.log("urgent byte kept", w.a.recv(a, 10, OOB));
    w.log("after the mark again", w.a.recv(a, 2, MSG_PEEK));
    w.log("discarded", w.a.recv(a, 2, MSG_TRUNC).map(|bytes| bytes.len()));
    w.log("last byte", w.a.recv(a, 10, 0));
}

pub fn peek_offset_and_the_mark(w: &mut Fixture<'_>) {
    let (a, _) = connection_with(w, &[(b"abc!", true), (b"def", false)]);
    w.log("offset 1", w.a.setsockopt(a, SOL_SOCKET, libc::SO_PEEK_OFF, &word(1)));
    w.log("up to the mark", w.a.recv(a, 100, MSG_PEEK));
    w.log("next peek", w.a.recv(a, 100, MSG_PEEK));
    w.log("recv", w.a.recv(a, 2, 0));
    state(w, "one byte before the mark", a);
}

pub fn waitall_ends_at_the_mark(w: &mut Fixture<'_>) {
    let (a, _) = connection_with(w, &[(b"abc!", true), (b"def", false)]);
    w.log("interrupted by the mark", w.a.recv(a, 6, MSG_WAITALL));
    w.log("full length", w.a.recv(a, 3, MSG_WAITALL));
    state(w, "after the mark", a);
}

pub fn second_urgent_byte_replaces_the_first(w: &mut Fixture<'_>) {
    let ends = connection_with(w, &[(b"abc!", true)]);
    let (a, _) = ends;
    w.log("first", w.a.recv(a, 10, OOB | MSG_PEEK));
    send_pieces(w, ends, &[(b"de?", true), (b"f", false)]);
    state(w, "two urgent bytes", a);
    w.log("second urgent byte", w.a.recv(a, 10, OOB));
    w.log("first byte is normal data", w.a.recv(a, 100, 0));
    state(w, "at the second mark", a);
    w.log("after the mark", w.a.recv(a, 100, 0));
}

pub fn second_urgent_byte_at_the_mark(w: &mut Fixture<'_>) {
    let ends = connection_with(w, &[(b"x", true)]);
    let (a, _) = ends;
    state(w, "one", a);
    send_pieces(w, ends, &[(b"y", true)]);
    state(w, "second urgent byte", a);
    w.log("last byte", w.a.recv(a, 10, OOB));
    w.log("no data between marks", w.a.recv(a, 10, MSG_DONTWAIT));
    // Sent one by one, because bytes that leave together have one mark.
    for byte in [b"1", b"2", b"3"] {
        send_pieces(w, ends, &[(byte, true)]);
    }
    send_pieces(w, ends, &[(b"end", false)]);
    state(w, "three urgent bytes", a);
    w.log("last of three urgent bytes", w.a.recv(a, 10, OOB));
    w.log("remaining bytes", w.a.recv(a, 10, MSG_DONTWAIT));
}

pub fn eof_after_an_urgent_byte(w: &mut Fixture<'_>) {
    let (a, b) = connection_with(w, &[(b"x", true)]);
    w.b.shutdown(b, SHUT_WR).unwrap();
    w.settle();
    state(w, "both events", a);
    w.log("peek", w.a.recv(a, 10, MSG_PEEK | libc::MSG_DONTWAIT));
    state(w, "after the peek", a);
    w.log("recv of the urgent byte", w.a.recv(a, 10, OOB));
    w.log("no urgent byte", w.a.recv(a, 10, OOB));
    w.log("end of file", w.a.recv(a, 10, 0));
    state(w, "after reading all", a);
    let (a, b) = connection_with(w, &[(b"abc!", true)]);
    w.b.setsockopt(b, SOL_SOCKET, libc::SO_LINGER, &[word(1), word(0)].concat()).unwrap();
    w.b.close(b).unwrap();
    // The kernel's RST may take longer than usual on a busy machine.
    w.a.poll(&mut [libc::pollfd { fd: a, events: 0, revents: 0 }], 5_000).unwrap();
    w.log("after a reset", w.a.recv(a, 10, OOB));
}

pub fn recvmsg_reports_msg_oob(w: &mut Fixture<'_>) {
    let (a, _) = connection_with(w, &[(b"abc!", true)]);
    w.log("zero-length buffer", w.a.recv_from(a, 0, 0, OOB | MSG_PEEK).map(|message| message.count));
    w.log("length only", w.a.recv_from(a, 9, 0, OOB | MSG_PEEK | MSG_TRUNC).map(|m| (m.count, m.flags)));
    w.log("urgent byte", w.a.recv_from(a, 9, 0, OOB).map(|m| (m.bytes, m.flags)));
    w.log("other bytes", w.a.recv_from(a, 9, 0, 0).map(|m| (m.bytes, m.flags)));
}

pub fn splice_stops_at_the_mark(w: &mut Fixture<'_>) {
    let ends = connection_with(w, &[(b"abc!", true), (b"def", false)]);
    let (a, _) = ends;
    let (out, into) = rustix::pipe::pipe().unwrap();
    w.log("up to the mark", w.a.splice(a, into.as_raw_fd(), 100, libc::SPLICE_F_NONBLOCK));
    state(w, "at the mark", a);
    w.log("at the mark again", w.a.splice(a, into.as_raw_fd(), 100, libc::SPLICE_F_NONBLOCK));
    let mut bytes = [0; 100];
    w.log("received", rustix::io::read(&out, &mut bytes).map(|count| bytes[..count].to_vec()));
}

pub fn siocatmark_of_other_sockets(w: &mut Fixture<'_>) {
    for kind in [SOCK_STREAM, SOCK_DGRAM] {
        let a = w.a.socket(w.domain(), kind).unwrap();
        w.log("new", w.a.query(a, SIOCATMARK));
        w.log("SIOCOUTQNSD", w.a.query(a, SIOCOUTQNSD));
        w.a.close(a).unwrap();
    }
    let (a, _) = w.listener(0);
    w.log("listener", w.a.query(a, SIOCATMARK));
    w.log("SIOCOUTQNSD", w.a.query(a, SIOCOUTQNSD));
}

/// A process that reports `SIGURG`. It is a separate process, because the signal would interrupt other cases
/// of this one.
struct SignalReporter {
    process: Child,
    reports: BufReader<ChildStdout>,
}

impl SignalReporter {
    fn new() -> Self {
        let script = "trap 'echo urgent' URG; echo ready; while sleep 0.01; do :; done";
        let mut process = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("sh");
        let reports = BufReader::new(process.stdout.take().expect("standard output is a pipe"));
        let mut reporter = Self { process, reports };
        assert_eq!(reporter.next_report(), "ready");
        reporter
    }

    fn pid(&self) -> i32 {
        self.process.id().cast_signed()
    }

    /// Waits for the next report.
    fn next_report(&mut self) -> String {
        let mut line = String::new();
        self.reports.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Ends the process. Returns its remaining reports.
    fn remaining_reports(mut self) -> String {
        // Signals sent before have been reported by then.
        std::thread::sleep(Duration::from_millis(100));
        self.process.kill().unwrap();
        let mut rest = String::new();
        self.reports.read_to_string(&mut rest).unwrap();
        self.process.wait().unwrap();
        rest
    }
}

pub fn sigurg_goes_to_the_owner(w: &mut Fixture<'_>) {
    let mut reporter = SignalReporter::new();
    let ends = w.connection();
    let (a, _) = ends;
    w.log("no owner", w.a.owner(a));
    // The poll lets the stack deliver the signal.
    let send_and_poll = |w: &mut Fixture<'_>, pieces: &[(&[u8], bool)]| {
        send_pieces(w, ends, pieces);
        w.ready(w.a, a);
    };
    send_and_poll(w, &[(b"x", true)]);
    w.log("no such process", w.a.set_owner(a, 0x3fff_fff0));
    w.log("no such group", w.a.set_owner(a, -0x3fff_fff0));
    w.log("owner without negation", w.a.set_owner(a, i32::MIN));
    w.log("owner set", w.a.set_owner(a, reporter.pid()));
    w.log("owner equal", w.a.owner(a).map(|owner| owner == reporter.pid()));
    send_and_poll(w, &[(b"plain", false), (b"y", true)]);
    w.log("signal", reporter.next_report());
    w.log("urgent byte", w.a.recv(a, 10, OOB));
    send_and_poll(w, &[(b"z", true)]);
    w.log("second signal", reporter.next_report());
    w.log("no owner", w.a.set_owner(a, 0));
    send_and_poll(w, &[(b"!", true)]);
    w.log("no further signal", reporter.remaining_reports());
}

pub mod tests {
    crate::cases! {
        no_urgent_data
        urgent_byte
        urgent_byte_after_normal_data
        urgent_bytes_wait_for_room
        urgent_data_and_epoll
        reads_stop_at_the_mark
        reading_past_the_mark_discards_it
        so_oobinline
        peek_stops_at_the_mark
        peek_offset_and_the_mark
        waitall_ends_at_the_mark
        second_urgent_byte_replaces_the_first
        second_urgent_byte_at_the_mark
        eof_after_an_urgent_byte
        recvmsg_reports_msg_oob
        splice_stops_at_the_mark
        siocatmark_of_other_sockets
        sigurg_goes_to_the_owner
    }
}
