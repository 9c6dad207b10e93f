//! Duplicated descriptors, `fcntl` and `ioctl` calls on them, `sendfile`, and waiting with blocked signals.

use crate::sys::World;
use libc::{MSG_WAITALL, POLLIN, POLLOUT, SIGUSR1, TIOCOUTQ, pollfd};
use rustix::fd::AsRawFd;
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
use std::time::Duration;

pub fn copies_under_other_numbers(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let copy = w.a.dup_above(a, 300).unwrap();
    w.say("no lower", copy >= 300);
    w.say("not that high", w.a.dup_above(a, i32::MAX));
    w.say("nor below 0", w.a.dup_above(a, -1));
    w.say("close the first", w.a.close(a));
    w.say("the copy stays", w.a.send(copy, b"still there", 0));
    w.say("what came", w.b.recv(b, 11, MSG_WAITALL));
    w.say("the last", w.a.close(copy));
    w.say("the end", w.b.recv(b, 11, 0));
}

pub fn not_waiting_by_ioctl(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.say("on", w.a.fionbio(a, true));
    w.say("nothing", w.a.recv(a, 1, 0));
    w.say("off", w.a.fionbio(a, false));
    w.b.send(b, b"x", 0).unwrap();
    w.say("waits", w.a.recv(a, 1, 0));
}

pub fn what_is_on_its_way(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.say("nothing", w.a.query(a, TIOCOUTQ));
    w.a.send(a, b"four", 0).unwrap();
    w.say("there", w.b.recv(b, 4, MSG_WAITALL));
    // The reply acknowledges the data.
    w.b.send(b, b"y", 0).unwrap();
    w.say("back", w.a.recv(a, 1, 0));
    w.settle();
    w.say("all acknowledged", w.a.query(a, TIOCOUTQ));
    let (listener, _) = w.listener(0);
    w.say("a listener", w.a.query(listener, TIOCOUTQ));
    let u = w.a.socket(w.domain(), libc::SOCK_DGRAM).unwrap();
    w.say("datagrams", w.a.query(u, TIOCOUTQ));
}

pub fn files_are_sent(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let file = memfd_create("case", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&file, b"0123456789").unwrap();
    let mut offset = 4;
    w.say("from an offset", w.a.sendfile(a, file.as_raw_fd(), Some(&mut offset), 3));
    w.say("which moves", offset);
    w.say("to the end", w.a.sendfile(a, file.as_raw_fd(), Some(&mut offset), 100));
    w.say("behind it", w.a.sendfile(a, file.as_raw_fd(), Some(&mut offset), 100));
    let mut before = -1;
    w.say("before it", w.a.sendfile(a, file.as_raw_fd(), Some(&mut before), 1));
    w.say("the file stands at its end", w.a.sendfile(a, file.as_raw_fd(), None, 10));
    seek(&file, SeekFrom::Start(8)).unwrap();
    w.say("from where it stands", w.a.sendfile(a, file.as_raw_fd(), None, 10));
    w.say("where that is now", seek(&file, SeekFrom::Current(0)));
    w.say("what came", w.b.recv(b, 8, MSG_WAITALL));
    w.say("from nothing", w.a.sendfile(a, -1, None, 10));
}

pub fn waiting_with_signals_kept_back(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let entry = |events| [pollfd { fd: a, events, revents: 0 }];
    let mut fds = entry(POLLIN);
    w.say("nothing", w.a.ppoll(&mut fds, Some(Duration::from_millis(1)), &[SIGUSR1]));
    let mut fds = entry(POLLIN | POLLOUT);
    w.say("room", (w.a.ppoll(&mut fds, None, &[]), fds[0].revents));
    w.say(
        "sets",
        w.a.pselect(&[vec![a], vec![a], vec![]], &[SIGUSR1]).map(|(count, sets)| (count, sets[1] == [a])),
    );
    w.b.send(b, b"x", 0).unwrap();
    let mut fds = entry(POLLIN);
    w.say("came", (w.a.ppoll(&mut fds, Some(Duration::from_secs(10)), &[SIGUSR1]), fds[0].revents));
    w.say(
        "both",
        w.a.pselect(&[vec![a], vec![a], vec![a]], &[])
            .map(|(count, sets)| (count, sets[0] == [a], sets[2].len())),
    );
}

pub mod tests {
    crate::cases! {
        copies_under_other_numbers
        not_waiting_by_ioctl
        what_is_on_its_way
        files_are_sent
        waiting_with_signals_kept_back
    }
}
