//! Unordered receive and unordered send of programs (docs/unordered.md).

use super::*;
use ginnel_posix_ops::SendArgs;
use ginnel_posix_ops::unordered::{
    GINNEL_STREAM_OFFSET, GINNEL_UNORDERED_RECV, GINNEL_UNORDERED_SEND, SOL_GINNEL,
};

/// Bytes of each part of a stream in these tests. Frames with one are longer than headers alone.
pub const PART: usize = 32;

fn set_option(ops: &Ops, fd: RawFd, name: c_int, value: c_int) -> Result<(), Errno> {
    ops.setsockopt(fd, SOL_GINNEL, name, &value.to_ne_bytes())
}

/// Returns a connection with unordered receive.
pub fn receiver() -> Hosts {
    let mut hosts = Hosts::new(true);
    hosts.connect(1, 0);
    hosts.accept(IN);
    set_option(&hosts.ops, hosts.fds[0], GINNEL_UNORDERED_RECV, 1).unwrap();
    hosts.settle();
    hosts
}

impl Hosts {
    /// Sends a part of the stream with this priority. It is lost if `is_lost` is set.
    pub fn send_part(&mut self, byte: u8, priority: u8, is_lost: bool) {
        self.lost.store(is_lost.into(), Ordering::Relaxed);
        self.clients.with(self.now, |clients, cx| {
            cx.set_priority(clients.conns[0], priority).unwrap();
            assert_eq!(cx.send(clients.conns[0], &[byte; PART]), Ok(PART));
        });
        self.settle();
        assert_eq!(self.lost.load(Ordering::Relaxed), 0);
    }

    /// Receives up to `len_max` bytes and the offset of the first one.
    pub fn recv_at(&self, len_max: usize) -> Result<(Vec<u8>, Option<u64>), Errno> {
        let mut bytes = vec![0; len_max];
        let received = self.ops.recv_from(self.fds[0], &mut [UserSliceMut::new(&mut bytes)], 0, 64)?;
        bytes.truncate(received.count);
        let control = received.control.bytes();
        let offset = (!control.is_empty()).then(|| {
            let header = [24, 0, 0, 0, 0, 0, 0, 0];
            assert_eq!((control.len(), &control[..8]), (24, &header[..]));
            assert_eq!(control[8..12], SOL_GINNEL.to_ne_bytes());
            assert_eq!(control[12..16], GINNEL_STREAM_OFFSET.to_ne_bytes());
            u64::from_ne_bytes(control[16..].try_into().unwrap())
        });
        Ok((bytes, offset))
    }

    fn recv(&self, len_max: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; len_max];
        let count = self.ops.recv(self.fds[0], &mut [UserSliceMut::new(&mut bytes)], 0)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// Sends a message with a priority.
    fn send_message(&self, bytes: &[u8], priority: c_int) -> Result<usize, Errno> {
        let args = SendArgs { flags: 0, to: None, control: &priority_cmsg(priority) };
        self.ops.send_to(self.fds[0], &[UserSlice::new(bytes)], &args)
    }
}

pub fn priority_cmsg(priority: c_int) -> Vec<u8> {
    let mut control = 20usize.to_ne_bytes().to_vec();
    for word in [libc::SOL_SOCKET, libc::SO_PRIORITY, priority, 0] {
        control.extend(word.to_ne_bytes());
    }
    control
}

pub fn part(byte: u8, offset: u64) -> Result<(Vec<u8>, Option<u64>), Errno> {
    Ok((vec![byte; PART], Some(offset)))
}

#[test]
fn urgent_bytes_come_before_a_gap_and_once() {
    let mut hosts = receiver();
    hosts.send_part(b'a', 0, false);
    assert_eq!(hosts.wait(1), [0]);
    assert_eq!(hosts.recv_at(100), part(b'a', 0));
    assert_eq!(hosts.wait(1), []);
    hosts.send_part(b'b', 0, true);
    hosts.send_part(b'c', HIGH, false);
    assert_eq!(hosts.wait(1), [0], "bytes can be taken early");
    assert_eq!(hosts.recv(100), Err(Errno::AGAIN), "in order there is nothing");
    assert_eq!(hosts.recv_at(10), Ok((vec![b'c'; 10], Some(64))), "as much as the buffer holds");
    assert_eq!(hosts.recv_at(100), Ok((vec![b'c'; 22], Some(74))));
    assert_eq!((hosts.recv_at(100), hosts.wait(1)), (Err(Errno::AGAIN), vec![]));
    hosts.send_part(b'd', HIGH, false);
    hosts.run(Duration::from_millis(500));
    assert_eq!(hosts.wait(1), [0]);
    // The gap is filled: what was not taken early is read in order. A call ends before bytes that were taken.
    assert_eq!(hosts.recv_at(100), part(b'b', 32));
    assert_eq!(hosts.recv_at(100), part(b'd', 96));
    assert_eq!((hosts.recv_at(100), hosts.wait(1)), (Err(Errno::AGAIN), vec![]));
    hosts.send_part(b'e', 0, false);
    hosts.clients.with(hosts.now, |clients, cx| cx.shutdown_write(clients.conns[0]).unwrap());
    hosts.settle();
    assert_eq!(hosts.recv_at(100), part(b'e', 128));
    assert_eq!(hosts.recv_at(100), Ok((vec![], None)), "the end of the stream");
}

/// Calls that cannot carry an offset read in order, and skip what was taken early.
#[test]
fn plain_reads_stay_in_order() {
    let mut hosts = receiver();
    hosts.send_part(b'a', 0, false);
    hosts.send_part(b'b', 0, true);
    hosts.send_part(b'c', HIGH, false);
    assert_eq!(hosts.recv_at(100), part(b'c', 64));
    assert_eq!(hosts.recv(20), Ok(vec![b'a'; 20]));
    assert_eq!(hosts.recv(100), Ok(vec![b'a'; 12]));
    assert_eq!(hosts.recv(100), Err(Errno::AGAIN));
    hosts.run(Duration::from_millis(500));
    hosts.send_part(b'd', 0, false);
    assert_eq!(hosts.recv(20), Ok(vec![b'b'; 20]));
    assert_eq!(hosts.recv_at(100), Ok((vec![b'b'; 12], Some(52))));
    assert_eq!(hosts.recv_at(20), Ok((vec![b'd'; 20], Some(96))));
    assert_eq!(hosts.recv(100), Ok(vec![b'd'; 12]));
}

/// `recvmsg` ends before an urgent byte, which is data of the next call only with `SO_OOBINLINE`, as on any
/// socket.
#[test]
fn reads_with_offsets_stop_at_urgent_byte() {
    for is_inline in [false, true] {
        let mut hosts = receiver();
        let value = c_int::from(is_inline).to_ne_bytes();
        hosts.ops.setsockopt(hosts.fds[0], libc::SOL_SOCKET, libc::SO_OOBINLINE, &value).unwrap();
        hosts.send_part(b'a', 0, false);
        hosts.clients.with(hosts.now, |clients, cx| {
            assert_eq!(cx.send_urgent(clients.conns[0], b"xU"), Ok(2));
        });
        hosts.settle();
        hosts.send_part(b'b', 0, false);
        let before = [&[b'a'; PART][..], b"x"].concat();
        assert_eq!(hosts.recv_at(10), Ok((vec![b'a'; 10], Some(0))));
        assert_eq!(hosts.recv_at(100), Ok((before[10..].to_vec(), Some(10))));
        if is_inline {
            assert_eq!(hosts.recv_at(100), Ok(([b"U", &[b'b'; PART][..]].concat(), Some(33))));
        } else {
            let mut byte = [0];
            let buffers = &mut [UserSliceMut::new(&mut byte)];
            assert_eq!(hosts.ops.recv(hosts.fds[0], buffers, libc::MSG_OOB), Ok(1));
            assert_eq!((byte, hosts.recv_at(100)), (*b"U", part(b'b', 34)));
        }
        assert_eq!(hosts.recv_at(100), Err(Errno::AGAIN));
    }
}

#[test]
fn messages_overtake_queued_ones_of_lower_priority() {
    for is_on in [true, false] {
        let mut hosts = Hosts::new(true);
        hosts.connect(1, 0);
        hosts.accept(IN);
        if is_on {
            set_option(&hosts.ops, hosts.fds[0], GINNEL_UNORDERED_SEND, 1).unwrap();
        }
        let write = |hosts: &Hosts, text: &[u8]| {
            assert_eq!(hosts.ops.send(hosts.fds[0], &[UserSlice::new(text)], 0), Ok(text.len()));
        };
        write(&hosts, b"first ");
        for (text, priority) in
            [(&b"low "[..], 0), (b"least ", 1), (b"high ", 6), (b"higher ", 7), (b"high2 ", 6)]
        {
            assert_eq!(hosts.send_message(text, priority), Ok(text.len()));
        }
        write(&hosts, b"last ");
        hosts.settle();
        let expected = match is_on {
            true => "first higher high high2 low least last ",
            false => "first low least high higher high2 last ",
        };
        assert_eq!(String::from_utf8_lossy(&hosts.clients.handler().received), expected);
    }
}

/// A message that finds no room fails whole, and the socket is writable again when there is room.
// limit: bytes of a message with GINNEL_UNORDERED_SEND
#[test]
fn full_queue_refuses_whole_messages() {
    let mut hosts = Hosts::new(true);
    hosts.connect(1, 0);
    hosts.accept(libc::EPOLLOUT as u32);
    set_option(&hosts.ops, hosts.fds[0], GINNEL_UNORDERED_SEND, 1).unwrap();
    assert_eq!(hosts.wait(1), [0]);
    let message = [b'm'; 5000];
    let mut sent = 0;
    while hosts.send_message(&message, 3).is_ok() {
        sent += 1;
        assert!(sent < 10_000, "the queue has a limit");
    }
    // Earlier events about room are over then.
    hosts.wait(1);
    assert_eq!(hosts.send_message(&message, 7), Err(Errno::AGAIN));
    assert!(sent > 5 && hosts.wait(1).is_empty(), "{sent}");
    hosts.run(Duration::from_millis(20));
    assert_eq!(hosts.wait(1), [0]);
    assert_eq!(hosts.clients.handler().received.len(), sent * message.len());
    assert_eq!(hosts.send_message(&message, 7), Ok(message.len()));
    assert_eq!(hosts.send_message(&vec![1; 65_536], 7), Ok(65_536));
    assert_eq!(hosts.send_message(&vec![1; 65_537], 7), Err(Errno::MSGSIZE));
    let send = |flags, control: &[u8]| {
        let args = SendArgs { flags, to: None, control };
        hosts.ops.send_to(hosts.fds[0], &[UserSlice::new(b"x")], &args)
    };
    for refused in [libc::MSG_MORE, libc::MSG_OOB] {
        assert_eq!(send(refused, &priority_cmsg(1)), Err(Errno::OPNOTSUPP));
    }
    assert_eq!(send(libc::MSG_FASTOPEN, &priority_cmsg(1)), Err(Errno::ISCONN));
    for accepted in [libc::MSG_DONTROUTE, libc::MSG_CONFIRM, libc::MSG_EOR] {
        hosts.run(Duration::from_millis(20));
        let args = SendArgs { flags: accepted, to: None, control: &priority_cmsg(1) };
        assert_eq!(hosts.ops.send_to(hosts.fds[0], &[UserSlice::new(b"x")], &args), Ok(1));
    }
    let send = |flags, control: &[u8]| {
        let args = SendArgs { flags, to: None, control };
        hosts.ops.send_to(hosts.fds[0], &[UserSlice::new(b"x")], &args)
    };
    let mut malformed = priority_cmsg(1);
    malformed[0] = 19;
    assert_eq!(send(0, &malformed), Err(Errno::INVAL));
    malformed[0] = 200;
    assert_eq!(send(0, &malformed), Err(Errno::INVAL));
    hosts.ops.shutdown(hosts.fds[0], libc::SHUT_WR).unwrap();
    assert_eq!(send(libc::MSG_NOSIGNAL, &priority_cmsg(1)), Err(Errno::PIPE));
}

#[test]
fn options_read_back_and_are_inherited() {
    let mut hosts = Hosts::new(true);
    let get = |hosts: &Hosts, fd, name| {
        hosts.ops.getsockopt(fd, SOL_GINNEL, name, 4).map(|value| value.bytes().to_vec())
    };
    let values = |value: c_int| Ok(value.to_ne_bytes().to_vec());
    let both = [GINNEL_UNORDERED_RECV, GINNEL_UNORDERED_SEND];
    assert_eq!(both.map(|name| get(&hosts, hosts.listener, name)), [values(0), values(0)]);
    for name in both {
        set_option(&hosts.ops, hosts.listener, name, 5).unwrap();
    }
    hosts.connect(1, 0);
    hosts.accept(IN);
    assert_eq!(both.map(|name| get(&hosts, hosts.fds[0], name)), [values(1), values(1)]);
    hosts.send_part(b'a', 0, false);
    hosts.send_part(b'b', 0, true);
    hosts.send_part(b'c', HIGH, false);
    assert_eq!(hosts.recv_at(100), part(b'c', 64), "the connection has the option from its start");
    let refused = Err(Errno::NOPROTOOPT);
    assert_eq!(set_option(&hosts.ops, hosts.fds[0], 3, 1), refused);
    assert_eq!(hosts.ops.setsockopt(hosts.fds[0], SOL_GINNEL, 1, &[1]), Err(Errno::INVAL));
    let udp = hosts.ops.socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
    assert_eq!(both.map(|name| set_option(&hosts.ops, udp, name, 1)), [refused; 2]);
    // As for every unknown level (`do_ip_getsockopt`).
    assert_eq!(get(&hosts, udp, GINNEL_UNORDERED_RECV), Err(Errno::OPNOTSUPP));
    hosts.ops.close(udp).unwrap();
}
