//! Duplicated descriptors, `fcntl` and `ioctl` calls on them, `sendfile`, and waiting with blocked signals.

use crate::sys::{Fixture, word};
use crate::{kernel, signals};
use libc::{MSG_DONTWAIT, MSG_WAITALL, POLLIN, POLLOUT, SIGUSR1, TIOCOUTQ, pollfd};
use rustix::fd::AsRawFd;
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
use std::time::Duration;

pub fn dup_to_higher_numbers(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let copy = w.a.dup_above(a, 300).unwrap();
    w.log("at or above the minimum", copy >= 300);
    w.log("minimum too high", w.a.dup_above(a, i32::MAX));
    w.log("negative minimum", w.a.dup_above(a, -1));
    w.log("close the first", w.a.close(a));
    w.log("send on the duplicate", w.a.send(copy, b"still there", 0));
    w.log("received", w.b.recv(b, 11, MSG_WAITALL));
    w.log("close of the duplicate", w.a.close(copy));
    w.log("end of file", w.b.recv(b, 11, 0));
}

pub fn fionbio(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("on", w.a.fionbio(a, true));
    w.log("empty", w.a.recv(a, 1, 0));
    w.log("off", w.a.fionbio(a, false));
    w.b.send(b, b"x", 0).unwrap();
    w.log("blocking recv", w.a.recv(a, 1, 0));
}

pub fn siocoutq(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("empty", w.a.query(a, TIOCOUTQ));
    w.a.send(a, b"four", 0).unwrap();
    w.log("received", w.b.recv(b, 4, MSG_WAITALL));
    // The reply acknowledges the data.
    w.b.send(b, b"y", 0).unwrap();
    w.log("reply", w.a.recv(a, 1, 0));
    w.settle();
    w.log("all acknowledged", w.a.query(a, TIOCOUTQ));
    let (listener, _) = w.listener(0);
    w.log("listener", w.a.query(listener, TIOCOUTQ));
    let u = w.a.socket(w.domain(), libc::SOCK_DGRAM).unwrap();
    w.log("datagrams", w.a.query(u, TIOCOUTQ));
}

pub fn sendfile(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let file = memfd_create("case", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&file, b"0123456789").unwrap();
    let mut offset = 4;
    w.log("from an offset", w.a.sendfile(a, file.as_raw_fd(), Some(&mut offset), 3));
    w.log("offset after the call", offset);
    w.log("to the end", w.a.sendfile(a, file.as_raw_fd(), Some(&mut offset), 100));
    w.log("after the end", w.a.sendfile(a, file.as_raw_fd(), Some(&mut offset), 100));
    let mut before = -1;
    w.log("negative offset", w.a.sendfile(a, file.as_raw_fd(), Some(&mut before), 1));
    w.log("file position at the end", w.a.sendfile(a, file.as_raw_fd(), None, 10));
    seek(&file, SeekFrom::Start(8)).unwrap();
    w.log("from the file position", w.a.sendfile(a, file.as_raw_fd(), None, 10));
    w.log("file position", seek(&file, SeekFrom::Current(0)));
    w.log("received", w.b.recv(b, 8, MSG_WAITALL));
    w.log("invalid source", w.a.sendfile(a, -1, None, 10));
    // The count and the end of the range are checked before the count is limited (`rw_verify_area`).
    for count in [usize::MAX, 1 << 63, i64::MAX as usize] {
        for mut offset in [0, 1, 10, i64::MAX] {
            w.log("long", (count, offset, w.a.sendfile(a, file.as_raw_fd(), Some(&mut offset), count)));
        }
    }
    w.log("long from the file position", w.a.sendfile(a, file.as_raw_fd(), None, usize::MAX));
    seek(&file, SeekFrom::Start(8)).unwrap();
    w.log("to the end of the numbers", w.a.sendfile(a, file.as_raw_fd(), None, i64::MAX as usize - 8));
}

/// The source is closed while the call waits, so that its position cannot be set afterwards.
pub fn sendfile_counts_what_it_sent(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let (host, peer) = (w.a, w.b);
    // Buffers of a fixed size do not grow while the call waits.
    w.log("send buffer", host.setsockopt(a, libc::SOL_SOCKET, libc::SO_SNDBUF, &word(65_536)));
    w.log("receive buffer", peer.setsockopt(b, libc::SOL_SOCKET, libc::SO_RCVBUF, &word(65_536)));
    let mut filled = 0;
    while let Ok(sent) = host.send(a, &[0; 10_000], MSG_DONTWAIT) {
        filled += sent;
        w.settle();
    }
    let bytes: Vec<u8> = (0..60_000u32).map(|at| (at % 251) as u8).collect();
    let file = memfd_create("case", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&file, &bytes).unwrap();
    seek(&file, SeekFrom::Start(2)).unwrap();
    let source = file.as_raw_fd();
    let (result, received) = std::thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let call = scope.spawn(move || {
            sender.send(kernel::this_thread()).unwrap();
            host.sendfile(a, source, None, 100_000)
        });
        signals::wait_in_call(receiver.recv().unwrap());
        assert!(!call.is_finished(), "the call must wait");
        drop(file);
        let mut received = Vec::new();
        while received.len() < filled + bytes.len() - 2 {
            let more = peer.recv(b, 100_000, 0).unwrap();
            assert!(!more.is_empty());
            received.extend(more);
        }
        (call.join().unwrap(), received)
    });
    w.log("result", result);
    w.log("received", received[filled..] == bytes[2..]);
}

pub fn ppoll_and_pselect_block_signals(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let entry = |events| [pollfd { fd: a, events, revents: 0 }];
    let mut fds = entry(POLLIN);
    w.log("empty", w.a.ppoll(&mut fds, Some(Duration::from_millis(1)), &[SIGUSR1]));
    let mut fds = entry(POLLIN | POLLOUT);
    w.log("writable", (w.a.ppoll(&mut fds, None, &[]), fds[0].revents));
    w.log(
        "pselect",
        w.a.pselect(&[vec![a], vec![a], vec![]], &[SIGUSR1]).map(|(count, sets)| (count, sets[1] == [a])),
    );
    w.b.send(b, b"x", 0).unwrap();
    let mut fds = entry(POLLIN);
    w.log("received", (w.a.ppoll(&mut fds, Some(Duration::from_secs(10)), &[SIGUSR1]), fds[0].revents));
    w.log(
        "both",
        w.a.pselect(&[vec![a], vec![a], vec![a]], &[])
            .map(|(count, sets)| (count, sets[0] == [a], sets[2].len())),
    );
}

pub fn poll_overwrites_revents(w: &mut Fixture<'_>) {
    let (a, _b) = w.connection();
    let mut fds = [libc::pollfd { fd: a, events: libc::POLLIN, revents: -1 }];
    w.log("poll", w.a.poll(&mut fds, 0));
    w.log("revents", fds[0].revents);
}

pub mod tests {
    crate::cases! {
        poll_overwrites_revents
        dup_to_higher_numbers
        fionbio
        siocoutq
        sendfile
        sendfile_counts_what_it_sent
        ppoll_and_pselect_block_signals
    }
}
