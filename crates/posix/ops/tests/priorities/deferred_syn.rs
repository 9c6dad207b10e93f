//! TCP Fast Open where the kernel has no counterpart: messages with a priority on a connection whose SYN
//! waits for data, and a stack that is gone.

use super::unordered::priority_cmsg;
use super::*;
use ginnel::ListenOptions;
use ginnel::channel::control::{ChannelReply, ChannelRequest, ControlPath};
use ginnel_posix_ops::SendArgs;
use ginnel_posix_ops::unordered::{GINNEL_UNORDERED_SEND, SOL_GINNEL};
use std::sync::atomic::AtomicBool;

const TCP_FASTOPEN_NO_COOKIE: c_int = 34;
const PEER: [u8; 4] = [10, 0, 0, 2];

fn set(ops: &Ops, fd: RawFd, level: c_int, name: c_int) -> Result<(), Errno> {
    ops.setsockopt(fd, level, name, &1u32.to_ne_bytes())
}

/// Creates a socket that needs no cookie for data in its SYN.
fn socket(ops: &Ops) -> RawFd {
    let fd = ops.socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0).unwrap();
    set(ops, fd, libc::IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE).unwrap();
    fd
}

#[test]
fn message_sends_a_deferred_syn() {
    let mut hosts = Hosts::new(true);
    hosts.clients.with(hosts.now, |_, cx| {
        cx.listen("10.0.0.2:90".parse().unwrap(), ListenOptions::default()).unwrap();
    });
    let fd = socket(&hosts.ops);
    hosts.fds.push(fd);
    set(&hosts.ops, fd, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT).unwrap();
    set(&hosts.ops, fd, SOL_GINNEL, GINNEL_UNORDERED_SEND).unwrap();
    assert_eq!(hosts.ops.connect(fd, &sockaddr_of(PEER, 90)), Ok(()));
    hosts.run(Duration::from_millis(20));
    assert!(hosts.clients.handler().conns.is_empty(), "the SYN waits");
    let send = |hosts: &Hosts| {
        let args = SendArgs { flags: 0, to: None, control: &priority_cmsg(3) };
        hosts.ops.send_to(fd, &[UserSlice::new(b"message")], &args)
    };
    assert_eq!(send(&hosts), Err(Errno::AGAIN));
    hosts.run(Duration::from_millis(20));
    assert_eq!(hosts.clients.handler().conns.len(), 1);
    assert_eq!(send(&hosts), Ok(7));
    hosts.run(Duration::from_millis(20));
    assert_eq!(hosts.clients.handler().received, b"message");
}

/// Passes requests to a stack until the stack is gone.
struct BreakableControl {
    stack: SameThread,
    is_gone: Arc<AtomicBool>,
}

impl ControlPath for BreakableControl {
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        if self.is_gone.load(Ordering::Relaxed) {
            return Err(Error::StackGone);
        }
        self.stack.call(client, request)
    }
}

#[test]
fn gone_stack_is_not_reported_as_unsupported() {
    let hosts = Hosts::new(false);
    let is_gone = Arc::<AtomicBool>::default();
    let control = BreakableControl { stack: SameThread(Arc::clone(&hosts.stack)), is_gone: is_gone.clone() };
    let client = hosts.stack.lock().unwrap().handler_mut().attach(Box::new(control)).unwrap();
    let ops = Ops::new(client, OpsConfig { spin: Duration::ZERO, ..OpsConfig::default() }).unwrap();
    let fd = socket(&ops);
    let to = sockaddr_of(PEER, 90);
    let args = SendArgs { flags: libc::MSG_FASTOPEN, to: Some(&to), control: &[] };
    is_gone.store(true, Ordering::Relaxed);
    assert_eq!(set(&ops, fd, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT), Ok(()));
    assert_eq!(ops.send_to(fd, &[UserSlice::new(b"hello")], &args), Err(Errno::NETDOWN));
    is_gone.store(false, Ordering::Relaxed);
    assert_eq!(ops.send_to(fd, &[UserSlice::new(b"hello")], &args), Ok(5));
    ops.close(fd).unwrap();
}
