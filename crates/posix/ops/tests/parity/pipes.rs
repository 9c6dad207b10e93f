//! `splice`, with which proxies move bytes between connections and pipes.

use crate::sys::Fixture;
use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, SPLICE_F_MORE, SPLICE_F_MOVE, SPLICE_F_NONBLOCK};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::{ioctl_fionbio, read, write};
use rustix::pipe::{fcntl_getpipe_size, pipe};

/// Creates a pipe. Returns its read end and its write end.
fn new_pipe() -> (OwnedFd, OwnedFd) {
    pipe().unwrap()
}

fn fill(write_end: &OwnedFd) -> usize {
    let page = [7; 4096];
    let capacity = fcntl_getpipe_size(write_end).unwrap();
    (0..capacity / page.len()).map(|_| write(write_end, &page).unwrap()).sum()
}

pub fn splice_nonblock_ignores_blocking_pipes(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let (read_end, write_end) = new_pipe();
    let full = fill(&write_end);
    w.b.send(b, b"on its way", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    let flags = SPLICE_F_MOVE | SPLICE_F_NONBLOCK;
    w.log("into a full pipe", w.a.splice(a, write_end.as_raw_fd(), 100, flags));
    w.log("data stays queued", w.a.recv(a, 100, libc::MSG_PEEK));
    let mut bytes = vec![0; full];
    w.log("drain the pipe", read(&read_end, &mut bytes) == Ok(full));
    w.log("first part", w.a.splice(a, write_end.as_raw_fd(), 5, flags));
    w.log("rest", w.a.splice(a, write_end.as_raw_fd(), 100, flags));
    w.log("received", read(&read_end, &mut bytes).map(|count| bytes[..count].to_vec()));
    w.log("from an empty pipe", w.a.splice(read_end.as_raw_fd(), a, 100, flags));
    ioctl_fionbio(&read_end, true).unwrap();
    w.log("from a nonblocking pipe", w.a.splice(read_end.as_raw_fd(), a, 100, 0));
    write(&write_end, b"back").unwrap();
    w.log("reply", w.a.splice(read_end.as_raw_fd(), a, 100, flags | SPLICE_F_MORE));
    w.log("send", w.a.send(a, b" again", 0));
    w.log("all bytes", w.b.recv(b, 10, libc::MSG_WAITALL));
}

pub fn splice_at_end_of_file(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let (read_end, write_end) = new_pipe();
    write(&write_end, b"last").unwrap();
    drop(write_end);
    w.log("remaining bytes", w.a.splice(read_end.as_raw_fd(), a, 100, 0));
    w.log("pipe without writer", w.a.splice(read_end.as_raw_fd(), a, 100, SPLICE_F_NONBLOCK));
    w.log("all bytes", w.b.recv(b, 4, libc::MSG_WAITALL));
    let (read_end, write_end) = new_pipe();
    w.a.set_nonblocking(a, true).unwrap();
    w.log("no data", w.a.splice(a, write_end.as_raw_fd(), 100, 0));
    w.b.send(b, b"end", 0).unwrap();
    w.b.shutdown(b, libc::SHUT_WR).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.log("before the end", w.a.splice(a, write_end.as_raw_fd(), 100, 0));
    w.log("end of file", w.a.splice(a, write_end.as_raw_fd(), 100, 0));
    drop(read_end);
    w.b.close(b).unwrap();
    let (read_end, write_end) = new_pipe();
    write(&write_end, b"unread").unwrap();
    w.log("accepted by the connection", w.a.splice(read_end.as_raw_fd(), a, 100, 0));
    w.wait(w.a, a, libc::POLLHUP);
    write(&write_end, b"unread").unwrap();
    w.log("after the reset", w.a.splice(read_end.as_raw_fd(), a, 100, 0));
    w.log("second send after the reset", w.a.send(a, b"x", MSG_DONTWAIT | MSG_NOSIGNAL));
}

pub fn invalid_splices(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let (_, write_end) = new_pipe();
    w.log("between connections", w.a.splice(a, b, 1, 0));
    w.log("zero length", w.a.splice(a, write_end.as_raw_fd(), 0, 0));
    w.b.send(b, b"x", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.log("pipe without reader", w.a.splice(a, write_end.as_raw_fd(), 1, SPLICE_F_NONBLOCK));
    let file = std::fs::File::options().read(true).write(true).open("/dev/null").unwrap();
    w.log("from a file", w.a.splice(file.as_raw_fd(), a, 1, 0));
    w.log("to a file", w.a.splice(a, file.as_raw_fd(), 1, 0));
    w.log("data stays queued", w.a.recv(a, 1, MSG_DONTWAIT));
}

/// Moves a megabyte through a pipe of 64 KiB; each call moves the bytes that are available.
pub fn stream_through_a_pipe(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let (c, d) = w.connection();
    let bytes: Vec<u8> = (0..1_000_000u32).flat_map(|n| (n % 251).to_le_bytes()).take(1_000_000).collect();
    let (from, to, sent) = (w.b, w.b, bytes.clone());
    let received = std::thread::scope(|scope| {
        scope.spawn(move || {
            for piece in sent.chunks(10_000) {
                assert_eq!(from.send(b, piece, 0), Ok(piece.len()));
            }
            from.shutdown(b, libc::SHUT_WR).unwrap();
        });
        let reader = scope.spawn(move || {
            let mut all = Vec::new();
            while let Ok(more) = to.recv(d, 100_000, 0) {
                if more.is_empty() {
                    break;
                }
                all.extend(more);
            }
            all
        });
        let (read_end, write_end) = new_pipe();
        loop {
            let count = w.a.splice(a, write_end.as_raw_fd(), 1 << 20, SPLICE_F_MOVE).unwrap();
            if count == 0 {
                break;
            }
            let mut left = count;
            while left > 0 {
                left -= w.a.splice(read_end.as_raw_fd(), c, left, SPLICE_F_MOVE).unwrap();
            }
        }
        w.a.shutdown(c, libc::SHUT_WR).unwrap();
        reader.join().unwrap()
    });
    w.log("bytes equal", received == bytes);
}

pub mod tests {
    crate::cases! {
        splice_nonblock_ignores_blocking_pipes
        splice_at_end_of_file
        invalid_splices
        stream_through_a_pipe
    }
}
