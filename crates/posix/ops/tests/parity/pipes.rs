//! `splice`, with which proxies move bytes between connections and pipes.

use crate::sys::World;
use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, SPLICE_F_MORE, SPLICE_F_MOVE, SPLICE_F_NONBLOCK};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::{ioctl_fionbio, read, write};
use rustix::pipe::{fcntl_getpipe_size, pipe};

/// Creates a pipe. Returns its read end and its write end.
fn new_pipe() -> (OwnedFd, OwnedFd) {
    pipe().unwrap()
}

fn fill(into: &OwnedFd) -> usize {
    let page = [7; 4096];
    let room = fcntl_getpipe_size(into).unwrap();
    (0..room / page.len()).map(|_| write(into, &page).unwrap()).sum()
}

pub fn a_pipe_that_waits_is_not_waited_for_if_the_call_says_so(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let (out, into) = new_pipe();
    let full = fill(&into);
    w.b.send(b, b"on its way", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    let flags = SPLICE_F_MOVE | SPLICE_F_NONBLOCK;
    w.say("into a full pipe", w.a.splice(a, into.as_raw_fd(), 100, flags));
    w.say("it stays", w.a.recv(a, 100, libc::MSG_PEEK));
    let mut bytes = vec![0; full];
    w.say("emptied", read(&out, &mut bytes) == Ok(full));
    w.say("some of it", w.a.splice(a, into.as_raw_fd(), 5, flags));
    w.say("the rest", w.a.splice(a, into.as_raw_fd(), 100, flags));
    w.say("what came", read(&out, &mut bytes).map(|count| bytes[..count].to_vec()));
    w.say("from an empty one", w.a.splice(out.as_raw_fd(), a, 100, flags));
    ioctl_fionbio(&out, true).unwrap();
    w.say("from one that does not wait", w.a.splice(out.as_raw_fd(), a, 100, 0));
    write(&into, b"back").unwrap();
    w.say("back", w.a.splice(out.as_raw_fd(), a, 100, flags | SPLICE_F_MORE));
    w.say("and more", w.a.send(a, b" again", 0));
    w.say("all of it", w.b.recv(b, 10, libc::MSG_WAITALL));
}

pub fn ends_on_either_side(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let (out, into) = new_pipe();
    write(&into, b"last").unwrap();
    drop(into);
    w.say("what was left", w.a.splice(out.as_raw_fd(), a, 100, 0));
    w.say("nobody writes", w.a.splice(out.as_raw_fd(), a, 100, SPLICE_F_NONBLOCK));
    w.say("all of it", w.b.recv(b, 4, libc::MSG_WAITALL));
    let (out, into) = new_pipe();
    w.a.set_nonblocking(a, true).unwrap();
    w.say("nothing came", w.a.splice(a, into.as_raw_fd(), 100, 0));
    w.b.send(b, b"end", 0).unwrap();
    w.b.shutdown(b, libc::SHUT_WR).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.say("before the end", w.a.splice(a, into.as_raw_fd(), 100, 0));
    w.say("the end", w.a.splice(a, into.as_raw_fd(), 100, 0));
    drop(out);
    w.b.close(b).unwrap();
    let (out, into) = new_pipe();
    write(&into, b"nobody reads").unwrap();
    w.say("accepted by the connection", w.a.splice(out.as_raw_fd(), a, 100, 0));
    w.wait(w.a, a, libc::POLLHUP);
    write(&into, b"nobody reads").unwrap();
    w.say("after the reset", w.a.splice(out.as_raw_fd(), a, 100, 0));
    w.say("and after", w.a.send(a, b"x", MSG_DONTWAIT | MSG_NOSIGNAL));
}

pub fn what_cannot_be_spliced(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let (_, into) = new_pipe();
    w.say("between connections", w.a.splice(a, b, 1, 0));
    w.say("nothing at all", w.a.splice(a, into.as_raw_fd(), 0, 0));
    w.b.send(b, b"x", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.say("nobody reads from the pipe", w.a.splice(a, into.as_raw_fd(), 1, SPLICE_F_NONBLOCK));
    let file = std::fs::File::options().read(true).write(true).open("/dev/null").unwrap();
    w.say("from a file", w.a.splice(file.as_raw_fd(), a, 1, 0));
    w.say("to a file", w.a.splice(a, file.as_raw_fd(), 1, 0));
    w.say("it stays", w.a.recv(a, 1, MSG_DONTWAIT));
}

/// Moves a megabyte through a pipe of 64 KiB; each call moves the bytes that are available.
pub fn a_stream_through_a_pipe(w: &mut World<'_>) {
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
        let (out, into) = new_pipe();
        loop {
            let count = w.a.splice(a, into.as_raw_fd(), 1 << 20, SPLICE_F_MOVE).unwrap();
            if count == 0 {
                break;
            }
            let mut left = count;
            while left > 0 {
                left -= w.a.splice(out.as_raw_fd(), c, left, SPLICE_F_MOVE).unwrap();
            }
        }
        w.a.shutdown(c, libc::SHUT_WR).unwrap();
        reader.join().unwrap()
    });
    w.say("the same", received == bytes);
}

pub mod tests {
    crate::cases! {
        a_pipe_that_waits_is_not_waited_for_if_the_call_says_so
        ends_on_either_side
        what_cannot_be_spliced
        a_stream_through_a_pipe
    }
}
