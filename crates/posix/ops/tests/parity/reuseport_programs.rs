//! Programs that select the member of a group of sockets which share an address:
//! `SO_ATTACH_REUSEPORT_CBPF` and `SO_DETACH_REUSEPORT_BPF`.

use crate::filters::{Instruction, RET_A, encode, op, ret};
use crate::sys::{Fd, Fixture, Sys, port, word};
use libc::{MSG_DONTWAIT, SO_LOCK_FILTER, SO_REUSEPORT, SOCK_DGRAM, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET};
use rustix::io::Errno;

const ATTACH: i32 = 51;
const DETACH: i32 = 68;
const TCP_FASTOPEN: i32 = 23;

/// Selects by the first word of the payload.
fn modulo(members: u32) -> Vec<Instruction> {
    vec![op(0x20, 0), op(0x94, members), RET_A]
}

fn attach(sys: &dyn Sys, fd: Fd, program: &[Instruction]) -> Result<(), Errno> {
    let code = encode(program);
    let mut value = [0; 16];
    value[..2].copy_from_slice(&(program.len() as u16).to_ne_bytes());
    value[8..].copy_from_slice(&code.as_ptr().expose_provenance().to_ne_bytes());
    sys.setsockopt(fd, SOL_SOCKET, ATTACH, &value)
}

fn detach(sys: &dyn Sys, fd: Fd) -> Result<(), Errno> {
    sys.setsockopt(fd, SOL_SOCKET, DETACH, &word(0))
}

fn share(sys: &dyn Sys, fd: Fd, on: i32) {
    sys.setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &word(on)).unwrap();
}

/// Creates a socket of host `a`, with `SO_REUSEPORT` and perhaps with a program, and binds it; a TCP socket
/// listens. Returns the error of the call that fails.
fn member(w: &Fixture<'_>, kind: i32, at: &[u8], program: Option<&[Instruction]>) -> Result<Fd, Errno> {
    let fd = w.a.socket(w.domain(), kind | SOCK_NONBLOCK).unwrap();
    share(w.a, fd, 1);
    if kind == SOCK_STREAM {
        w.a.setsockopt(fd, libc::IPPROTO_TCP, TCP_FASTOPEN, &word(16)).unwrap();
    }
    let opened = program.map_or(Ok(()), |program| attach(w.a, fd, program));
    let opened = opened.and_then(|()| w.a.bind(fd, at));
    let opened = opened.and_then(|()| if kind == SOCK_STREAM { w.a.listen(fd, 64) } else { Ok(()) });
    opened.map(|()| fd).inspect_err(|_| w.a.close(fd).unwrap())
}

/// Creates a group whose first member has a program before it is bound. Returns it and its address.
fn group(w: &Fixture<'_>, kind: i32, len: usize, program: &[Instruction]) -> (Vec<Fd>, Vec<u8>) {
    let first = member(w, kind, &w.at_a(0), Some(program)).unwrap();
    let at = w.at_a(port(&w.a.getsockname(first).unwrap()));
    let others = (1..len).map(|_| member(w, kind, &at, None).unwrap());
    ([first].into_iter().chain(others.collect::<Vec<_>>()).collect(), at)
}

/// Waits until a member has something to receive or to accept, and takes it. Returns its index.
fn receiver(w: &Fixture<'_>, kind: i32, members: &[Fd]) -> usize {
    let mut fds: Vec<_> =
        members.iter().map(|fd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 }).collect();
    assert_eq!(w.a.poll(&mut fds, 10_000), Ok(1), "one member receives");
    let index = fds.iter().position(|fd| fd.revents != 0).unwrap();
    if kind == SOCK_STREAM {
        let accepted = w.a.accept4(members[index], 0).unwrap();
        w.a.close(accepted).unwrap();
    } else {
        w.a.recv(members[index], 9, MSG_DONTWAIT).unwrap();
    }
    index
}

/// Sends a datagram, or a SYN with data, that begins with this word.
fn send(w: &Fixture<'_>, kind: i32, at: &[u8], first: u32) -> Fd {
    let fd = w.b.socket(w.domain(), kind).unwrap();
    let flags = if kind == SOCK_STREAM { libc::MSG_FASTOPEN } else { 0 };
    assert_eq!(w.b.send_to(fd, &first.to_be_bytes(), Some(at), &[], flags), Ok(4));
    fd
}

/// Sends words, and logs the members that receive them.
fn log_receivers(w: &mut Fixture<'_>, what: &str, kind: i32, (members, at): (&[Fd], &[u8]), words: u32) {
    let indices: Vec<usize> = (0..words)
        .map(|first| {
            let fd = send(w, kind, at, first);
            let index = receiver(w, kind, members);
            w.b.close(fd).unwrap();
            index
        })
        .collect();
    w.log(what, indices);
}

/// The cBPF half of Linux's selftest `reuseport_bpf`.
pub fn programs_select_members(w: &mut Fixture<'_>) {
    for (kind, len) in [(SOCK_DGRAM, 10), (SOCK_DGRAM, 20), (SOCK_STREAM, 10)] {
        let (mut members, at) = group(w, kind, len as usize, &modulo(len));
        log_receivers(w, "all", kind, (&members, &at), 2 * len);
        w.log("another program", attach(w.a, members[3], &modulo(len / 2)));
        log_receivers(w, "the first half", kind, (&members, &at), 2 * len);
        // The last member takes the place of one that leaves.
        w.a.close(members.remove(1)).unwrap();
        log_receivers(w, "without a member", kind, (&members, &at), len);
        w.log("joins", member(w, kind, &at, None).map(|fd| members.push(fd)));
        w.log("program for all", attach(w.a, members[0], &modulo(len)));
        log_receivers(w, "with a new member", kind, (&members, &at), len);
        members.iter().for_each(|fd| w.a.close(*fd).unwrap());
    }
}

/// A program may select by other things than the payload, which a SYN usually does not have.
pub fn constants_select_members(w: &mut Fixture<'_>) {
    for kind in [SOCK_DGRAM, SOCK_STREAM] {
        let (members, at) = group(w, kind, 4, &[ret(2)]);
        let open = |w: &Fixture<'_>| {
            let fd = w.b.socket(w.domain(), kind).unwrap();
            w.b.connect(fd, &at).unwrap();
            if kind == SOCK_DGRAM {
                w.b.send(fd, b"x", 0).unwrap();
            }
            let index = receiver(w, kind, &members);
            w.b.close(fd).unwrap();
            index
        };
        w.log("before", open(w));
        for index in [3, 0, 1, 2] {
            w.log("attach", attach(w.a, members[1], &[ret(index)]));
            w.log("selected", open(w));
        }
        // A load beyond the end of the payload returns 0.
        w.log("attach", attach(w.a, members[1], &modulo(4)));
        w.log("selected", open(w));
        // The length is that of the payload.
        w.log("attach", attach(w.a, members[1], &[op(0x80, 0), RET_A]));
        w.log("selected", open(w));
        // Beyond the group the hash selects.
        w.log("attach", attach(w.a, members[1], &[ret(4)]));
        let selected: std::collections::BTreeSet<usize> = (0..60).map(|_| open(w)).collect();
        w.log("by hash", selected.len());
        w.log("detach", detach(w.a, members[3]));
        let selected: std::collections::BTreeSet<usize> = (0..60).map(|_| open(w)).collect();
        w.log("without program", selected.len());
        members.iter().for_each(|fd| w.a.close(*fd).unwrap());
    }
}

/// A socket that has a program before it is bound begins a group of its own.
pub fn own_groups_join_no_other(w: &mut Fixture<'_>) {
    for kind in [SOCK_DGRAM, SOCK_STREAM] {
        let (members, at) = group(w, kind, 2, &modulo(2));
        w.log("with a program", member(w, kind, &at, Some(&modulo(2))).err());
        w.log("detach by the other", detach(w.a, members[1]));
        w.log("detach again", detach(w.a, members[0]));
        w.log("with a program, next to none", member(w, kind, &at, Some(&modulo(2))).err());
        w.log("without a program", member(w, kind, &at, None).map(|fd| w.a.close(fd).unwrap()));
        if kind == SOCK_STREAM {
            // Between `bind` and `listen`.
            let fd = w.a.socket(w.domain(), kind).unwrap();
            share(w.a, fd, 1);
            w.log("bind", w.a.bind(fd, &at));
            w.log("attach", attach(w.a, fd, &modulo(2)));
            w.log("listen", w.a.listen(fd, 1));
            w.log("detach", detach(w.a, fd));
            w.log("listen", w.a.listen(fd, 1));
            w.a.close(fd).unwrap();
        }
        members.iter().for_each(|fd| w.a.close(*fd).unwrap());
    }
}

pub fn which_sockets_take_programs(w: &mut Fixture<'_>) {
    for kind in [SOCK_DGRAM, SOCK_STREAM] {
        let new = |w: &Fixture<'_>| w.a.socket(w.domain(), kind).unwrap();
        let fd = new(w);
        w.log("plain", (attach(w.a, fd, &modulo(2)), detach(w.a, fd)));
        share(w.a, fd, 1);
        w.log("no program", detach(w.a, fd));
        w.log("shared", attach(w.a, fd, &modulo(2)));
        w.log("detach", (detach(w.a, fd), detach(w.a, fd)));
        w.log("bad program", attach(w.a, fd, &[op(0x20, 0)]));
        for len in [0, 1, 8, 15, 17] {
            let values = (&[0; 20][..len], &[0; 20][..len]);
            let set = w.a.setsockopt(fd, SOL_SOCKET, ATTACH, values.0);
            w.log("short", (set, w.a.setsockopt(fd, SOL_SOCKET, DETACH, values.1)));
        }
        let pointer =
            w.a.setsockopt(fd, SOL_SOCKET, ATTACH, &[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        w.log("bad pointer", pointer);
        w.log("get", [ATTACH, DETACH].map(|name| w.a.getsockopt(fd, SOL_SOCKET, name)));
        w.log("attach", attach(w.a, fd, &modulo(2)));
        w.a.setsockopt(fd, SOL_SOCKET, SO_LOCK_FILTER, &word(1)).unwrap();
        w.log("locked", (attach(w.a, fd, &modulo(2)), detach(w.a, fd)));
        w.a.close(fd).unwrap();
        let fd = new(w);
        share(w.a, fd, 1);
        w.log("attach", attach(w.a, fd, &modulo(2)));
        share(w.a, fd, 0);
        w.log("not shared any more", (attach(w.a, fd, &modulo(2)), detach(w.a, fd)));
        w.a.close(fd).unwrap();
        let fd = new(w);
        w.a.bind(fd, &w.at_a(0)).unwrap();
        w.log("bound alone", (attach(w.a, fd, &modulo(2)), detach(w.a, fd)));
        share(w.a, fd, 1);
        w.log("shared after bind", (attach(w.a, fd, &modulo(2)), detach(w.a, fd)));
        if kind == SOCK_STREAM {
            w.a.listen(fd, 4).unwrap();
            w.log("listens", (attach(w.a, fd, &modulo(2)), detach(w.a, fd)));
            let to = w.a.getsockname(fd).unwrap();
            let b = w.b.socket(w.domain(), kind).unwrap();
            w.b.connect(b, &to).unwrap();
            let accepted = w.a.accept4(fd, 0).unwrap();
            w.log("accepted", (attach(w.a, accepted, &modulo(2)), detach(w.a, accepted)));
            w.log("connected", (attach(w.b, b, &modulo(2)), detach(w.b, b)));
            share(w.b, b, 1);
            w.log("connected, shared", (attach(w.b, b, &modulo(2)), detach(w.b, b)));
            w.a.close(accepted).unwrap();
            w.b.close(b).unwrap();
        }
        w.a.close(fd).unwrap();
    }
}

/// A socket that `connect` gives another address leaves its group.
pub fn connected_datagram_sockets_leave(w: &mut Fixture<'_>) {
    let (members, at) = group(w, SOCK_DGRAM, 3, &modulo(3));
    let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.b.bind(b, &w.at_b(0)).unwrap();
    let peer = w.at_b(port(&w.b.getsockname(b).unwrap()));
    w.log("connect", w.a.connect(members[1], &peer));
    w.b.send_to(b, &2u32.to_be_bytes(), Some(&at), &[], 0).unwrap();
    w.log("its peer", receiver(w, SOCK_DGRAM, &members));
    w.log("attach by it", attach(w.a, members[1], &modulo(3)));
    w.b.close(b).unwrap();
    let others = [members[0], members[2]];
    log_receivers(w, "another peer", SOCK_DGRAM, (&others, &at), 2);
    // The member that has set the program.
    w.log("connect", w.a.connect(members[0], &peer));
    w.log("disconnect", w.a.connect(members[0], &[0; 16]));
    w.log("its port", port(&w.a.getsockname(members[0]).unwrap()) == port(&at));
    members.iter().for_each(|fd| w.a.close(*fd).unwrap());
}

pub mod tests {
    crate::cases! {
        ; both {
            programs_select_members
            constants_select_members
            own_groups_join_no_other
            which_sockets_take_programs
            connected_datagram_sockets_leave
        }
    }
}
