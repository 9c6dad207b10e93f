//! A server in POSIX calls, as nginx makes them for each connection: the cost of the socket calls of an
//! unmodified program.

use super::{SERVER, Server, ShardServer};
use crate::http;
use core::ffi::c_int;
use core::net::Ipv4Addr;
use ginnel::channel::control::SameThread;
use ginnel::channel::{ChannelConfig, ChannelServer, Client};
use ginnel::{Error, Shard};
use ginnel_posix_ops::{EpollEvent, Ops, OpsConfig, Timeout, UserSlice, UserSliceMut};
use ginnel_stack::device::Device;
use ginnel_stack::tcp::config::TcpConfig;
use ginnel_stack::time::Instant;
use rustix::io::Errno;
use std::sync::{Arc, Mutex};

/// Events per `epoll_wait` (nginx's `epoll_events`).
const EVENTS: usize = 512;
/// Descriptors of closed sockets that are kept, as in the preloaded library.
const DESCRIPTORS_KEPT: usize = 1024;
/// User data of the listener's epoll events.
const LISTENER: u64 = u64::MAX;

/// A shard and a program beside it, which run in turns.
pub struct CallsServer {
    shard: Arc<Mutex<Shard<ChannelServer>>>,
    ops: Ops,
    epoll: c_int,
    listener: c_int,
    response: Vec<u8>,
    keep_alive: bool,
    events: Vec<EpollEvent>,
    request: Vec<u8>,
    /// Clients that own the listener and accept nothing.
    _idle_clients: Vec<Client>,
}

fn error_in(what: &str) -> impl Fn(Errno) -> Error + '_ {
    move |error| Error::application(format!("{what}: {error}"))
}

impl CallsServer {
    /// Creates a program that listens, beside `idle_clients` other clients that own its listener, too, and do
    /// nothing.
    ///
    /// # Errors
    /// An error in the configuration, or a lack of memory or descriptors.
    pub fn new(
        device: Device,
        keep_alive: bool,
        idle_clients: usize,
        tcp: TcpConfig,
        now: Instant,
    ) -> Result<Self, Error> {
        let channel = ChannelServer::new(&ChannelConfig::default())?;
        let mut shard = ShardServer::new(device, channel, tcp, now)?.into_shard();
        shard.poll_once(now)?;
        let parts = shard.handler_mut().attach_process()?;
        let shard = Arc::new(Mutex::new(shard));
        // As in another process: shared state is locked and accessed through a mapping of its own.
        let client = Client::open(parts, Box::new(SameThread(shard.clone())))?;
        let config = OpsConfig { proxy_pool_max: DESCRIPTORS_KEPT, ..OpsConfig::default() };
        let ops = Ops::new(client, config).map_err(error_in("operations"))?;
        let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
        let listener = ops.socket(libc::AF_INET, kind, 0).map_err(error_in("socket"))?;
        ops.bind(listener, &wildcard_address(SERVER.port)).map_err(error_in("bind"))?;
        ops.listen(listener, 511).map_err(error_in("listen"))?;
        let set = ops.epoll_create1(0).map_err(error_in("epoll_create1"))?;
        let event = EpollEvent { events: (libc::EPOLLIN | libc::EPOLLRDHUP) as u32, data: LISTENER };
        ops.epoll_ctl(set, libc::EPOLL_CTL_ADD, listener, Some(event)).map_err(error_in("epoll_ctl"))?;
        let idle_clients = (0..idle_clients).map(|_| {
            let control = Box::new(SameThread(shard.clone()));
            let attached = shard.lock().expect("no panic").handler_mut().attach(control);
            let mut client = attached?;
            // The first listener has this number.
            client.join(0, 0)?;
            Ok(client)
        });
        let idle_clients = idle_clients.collect::<Result<Vec<_>, Error>>()?;
        let response = http::response(keep_alive);
        let events = vec![EpollEvent::default(); EVENTS];
        Ok(Self {
            shard,
            ops,
            epoll: set,
            listener,
            response,
            keep_alive,
            events,
            request: vec![0; 1024],
            _idle_clients: idle_clients,
        })
    }

    /// Runs the program until it would block.
    fn serve_ready(&mut self) -> Result<(), Errno> {
        loop {
            let count = self.ops.epoll_wait(self.epoll, &mut self.events, Timeout::Zero, None)?;
            if count == 0 {
                return Ok(());
            }
            for at in 0..count {
                match self.events[at].data {
                    LISTENER => self.accept()?,
                    fd => self.respond(fd as c_int)?,
                }
            }
        }
    }

    fn accept(&self) -> Result<(), Errno> {
        let fd = match self.ops.accept4(self.listener, libc::SOCK_NONBLOCK) {
            Ok((fd, _)) => fd,
            Err(Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error),
        };
        let events = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
        let event = EpollEvent { events, data: fd.cast_unsigned().into() };
        self.ops.epoll_ctl(self.epoll, libc::EPOLL_CTL_ADD, fd, Some(event))
    }

    fn respond(&mut self, fd: c_int) -> Result<(), Errno> {
        let count = match self.ops.recv(fd, &mut [UserSliceMut::new(&mut self.request)], 0) {
            Ok(0) => return self.ops.close(fd),
            Err(Errno::AGAIN) => return Ok(()),
            // A reset ends the connection, too.
            Err(_) => return self.ops.close(fd),
            Ok(count) => count,
        };
        if !http::is_request(&self.request[..count]) {
            return Ok(());
        }
        let sent = self.ops.send(fd, &[UserSlice::new(&self.response)], 0)?;
        debug_assert_eq!(sent, self.response.len());
        if self.keep_alive { Ok(()) } else { self.ops.close(fd) }
    }
}

impl Server for CallsServer {
    fn turn(&mut self, now: Instant) -> usize {
        let turn = |server: &Self| {
            let mut shard = server.shard.lock().expect("no thread panics while it holds the shard");
            shard.poll_once(now).expect("the channel does not fail").work
        };
        let work = turn(self);
        self.serve_ready().expect("the program's calls do not fail");
        // What the program wrote is sent in the same turn.
        work + turn(self)
    }
}

/// Returns the wildcard IPv4 address as a `sockaddr_in`.
fn wildcard_address(port: u16) -> Vec<u8> {
    let family = (libc::AF_INET as u16).to_ne_bytes();
    [&family[..], &port.to_be_bytes(), &Ipv4Addr::UNSPECIFIED.octets(), &[0; 8]].concat()
}
