//! Two stacks on separate threads, joined by a cable, and the operations on each.

use crate::kernel::set_of;
use crate::sys::{Fd, Message, SIOCATMARK, SIOCOUTQNSD, Sys};
use core::ffi::{c_int, c_uint, c_ulong};
use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;
use ginnel::channel::{ChannelConfig, ChannelServer};
use ginnel::config::{Config, DeviceConfig, DeviceKind, Loopback};
use ginnel::{Shard, StopFlag};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_posix_ops::flow_labels::FLOWLABEL_MGR;
use ginnel_posix_ops::{EpollEvent, Ops, OpsConfig, SendArgs, Timeout, UserSlice, UserSliceMut};
use ginnel_stack::device::Device;
use rustix::io::Errno;
use std::thread::JoinHandle;

pub const ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2))];

/// The operations on one stack.
pub struct OnStack(pub Ops);

/// The stacks of a case: two joined by a cable, or one with loopback that plays both hosts. They run as long
/// as this value lives.
pub struct Stacks {
    hosts: Vec<OnStack>,
    stop: StopFlag,
    threads: Vec<JoinHandle<()>>,
}

/// Creates a stack that is large enough for a case.
pub fn shard(address: &str, device: Device) -> Shard<ChannelServer> {
    build(config(address), device)
}

fn config(address: &str) -> Config {
    let device = DeviceConfig::new("cable", DeviceKind::Memory);
    let mut config = Config::single(device, &[address.parse().unwrap()], &[]);
    config.tcp.connections_max = 1000;
    config.tcp.fastopen = 3;
    config
}

fn build(config: Config, device: Device) -> Shard<ChannelServer> {
    let channel = ChannelConfig { sockets_max: 256, ..ChannelConfig::default() };
    let server = ChannelServer::new(&channel).unwrap();
    Shard::builder(config).handler(server).device("cable", device).build().unwrap()
}

impl Stacks {
    pub fn start() -> Self {
        Self::with(OpsConfig::default)
    }

    pub fn with(config: fn() -> OpsConfig) -> Self {
        let (a, b) = pair(MemoryConfig::default());
        let stop = StopFlag::new().unwrap();
        let mut threads = Vec::new();
        let hosts = [("10.0.0.1/24", a), ("10.0.0.2/24", b)].map(|(address, device)| {
            let mut shard = shard(address, device);
            let commander = shard.commander();
            let client = shard.handler_mut().attach(Box::new(commander)).unwrap();
            let stop = stop.clone();
            threads.push(std::thread::spawn(move || shard.run(&stop).unwrap()));
            OnStack(Ops::new(client, config()).unwrap())
        });
        Self { hosts: hosts.into(), stop, threads }
    }

    /// Starts one stack with loopback, which plays both hosts.
    pub fn alone() -> Self {
        let (device, _) = pair(MemoryConfig::default());
        let stop = StopFlag::new().unwrap();
        let mut config = config("10.0.0.1/24");
        config.loopback = Loopback::Stack;
        let mut shard = build(config, device);
        let commander = shard.commander();
        let client = shard.handler_mut().attach(Box::new(commander)).unwrap();
        let stop_flag = stop.clone();
        let threads = vec![std::thread::spawn(move || shard.run(&stop_flag).unwrap())];
        Self { hosts: vec![OnStack(Ops::new(client, OpsConfig::default()).unwrap())], stop, threads }
    }

    pub fn a(&self) -> &OnStack {
        &self.hosts[0]
    }

    pub fn b(&self) -> &OnStack {
        self.hosts.last().unwrap()
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        self.stop.stop();
        for thread in self.threads.drain(..) {
            let result = thread.join();
            assert!(result.is_ok() || std::thread::panicking(), "the thread of a stack panicked");
        }
    }
}

impl OnStack {
    fn select_with(
        &self,
        sets: &[Vec<Fd>; 3],
        mask: Option<libc::sigset_t>,
    ) -> Result<(usize, [Vec<Fd>; 3]), Errno> {
        let fd_end = sets.iter().flatten().max().map_or(0, |fd| fd + 1);
        let mut bits = sets.each_ref().map(|fds| {
            let mut words = vec![0u64; fd_end as usize / 64 + 1];
            fds.iter().for_each(|fd| words[*fd as usize / 64] |= 1 << (fd % 64));
            words
        });
        let [read, write, except] = &mut bits;
        let count =
            self.0.select(fd_end, [Some(read), Some(write), Some(except)], Timeout::Zero, mask.as_ref())?;
        let has = |set: usize, fd: &&Fd| bits[set][**fd as usize / 64] & 1 << (**fd % 64) != 0;
        let ready = [0, 1, 2].map(|set| sets[set].iter().filter(|fd| has(set, fd)).copied().collect());
        Ok((count, ready))
    }
}

impl Sys for OnStack {
    /// Binds a socket: the stack's thread answers only after it has processed all earlier input.
    fn catch_up(&self) {
        let anywhere = crate::sys::address((Ipv4Addr::UNSPECIFIED, 0).into());
        let probe = self.0.socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
        self.0.bind(probe, &anywhere).unwrap();
        self.0.close(probe).unwrap();
    }

    fn socket(&self, domain: c_int, kind: c_int) -> Result<Fd, Errno> {
        self.0.socket(domain, kind, 0)
    }

    fn bind(&self, fd: Fd, address: &[u8]) -> Result<(), Errno> {
        self.0.bind(fd, address)
    }

    fn listen(&self, fd: Fd, backlog: c_int) -> Result<(), Errno> {
        self.0.listen(fd, backlog)
    }

    fn accept4(&self, fd: Fd, flags: c_int) -> Result<Fd, Errno> {
        self.0.accept4(fd, flags).map(|(fd, _)| fd)
    }

    fn connect(&self, fd: Fd, address: &[u8]) -> Result<(), Errno> {
        self.0.connect(fd, address)
    }

    fn send(&self, fd: Fd, bytes: &[u8], flags: c_int) -> Result<usize, Errno> {
        self.0.send(fd, &[UserSlice::new(bytes)], flags)
    }

    fn recv(&self, fd: Fd, len_max: usize, flags: c_int) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; len_max];
        let count = self.0.recv(fd, &mut [UserSliceMut::new(&mut bytes)], flags)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    fn sendv(&self, fd: Fd, parts: &[&[u8]], flags: c_int) -> Result<usize, Errno> {
        let parts: Vec<UserSlice<'_>> = parts.iter().map(|part| UserSlice::new(part)).collect();
        self.0.send(fd, &parts, flags)
    }

    fn recvv(&self, fd: Fd, lengths: &[usize], flags: c_int) -> Result<Vec<u8>, Errno> {
        let mut parts: Vec<Vec<u8>> = lengths.iter().map(|length| vec![0; *length]).collect();
        let mut list: Vec<UserSliceMut<'_>> = parts.iter_mut().map(|part| UserSliceMut::new(part)).collect();
        let count = self.0.recv(fd, &mut list, flags)?;
        let mut bytes = parts.concat();
        bytes.truncate(count);
        Ok(bytes)
    }

    fn send_to(
        &self,
        fd: Fd,
        bytes: &[u8],
        to: Option<&[u8]>,
        control: &[u8],
        flags: c_int,
    ) -> Result<usize, Errno> {
        self.0.send_to(fd, &[UserSlice::new(bytes)], &SendArgs { flags, to, control })
    }

    fn recv_from(
        &self,
        fd: Fd,
        len_max: usize,
        control_capacity: usize,
        flags: c_int,
    ) -> Result<Message, Errno> {
        let mut bytes = vec![0; len_max];
        let received = self.0.recv_from(fd, &mut [UserSliceMut::new(&mut bytes)], flags, control_capacity)?;
        bytes.truncate(received.count.min(len_max));
        let truncation = if received.control.is_truncated() { libc::MSG_CTRUNC } else { 0 };
        Ok(Message {
            count: received.count,
            bytes,
            from: received.from.map_or(Vec::new(), |from| from.bytes().to_vec()),
            control: received.control.bytes().to_vec(),
            flags: received.flags | truncation,
        })
    }

    fn send_many(
        &self,
        fd: Fd,
        messages: &[(&[u8], Option<&[u8]>)],
        flags: c_int,
    ) -> Result<Vec<usize>, Errno> {
        let mut sent = Vec::new();
        let count = self.0.sendmmsg(messages.len(), |number| {
            let (bytes, to) = messages[number];
            sent.push(self.send_to(fd, bytes, to, &[], flags)?);
            Ok((sent[number], bytes.len()))
        })?;
        assert_eq!(sent.len(), count);
        Ok(sent)
    }

    fn recv_many(
        &self,
        fd: Fd,
        count: usize,
        len_max: usize,
        flags: c_int,
        timeout: Option<Duration>,
    ) -> Result<Vec<Vec<u8>>, Errno> {
        let mut received_messages = Vec::new();
        let (count, _) = self.0.recvmmsg(fd, count, flags, timeout, |_, flags| {
            let message = self.recv_from(fd, len_max, 0, flags)?;
            received_messages.push(message.bytes);
            Ok(message.flags)
        })?;
        assert_eq!(received_messages.len(), count);
        Ok(received_messages)
    }

    fn shutdown(&self, fd: Fd, how: c_int) -> Result<(), Errno> {
        self.0.shutdown(fd, how)
    }

    fn close(&self, fd: Fd) -> Result<(), Errno> {
        self.0.close(fd)
    }

    fn dup(&self, fd: Fd) -> Result<Fd, Errno> {
        let copy = crate::kernel::Kernel.dup(fd)?;
        self.0.dup(fd, copy)?;
        Ok(copy)
    }

    fn dup_above(&self, fd: Fd, lowest: Fd) -> Result<Fd, Errno> {
        let copy = crate::kernel::Kernel.dup_above(fd, lowest)?;
        self.0.dup(fd, copy)?;
        Ok(copy)
    }

    fn fionbio(&self, fd: Fd, on: bool) -> Result<(), Errno> {
        self.0.set_nonblocking(fd, on).map(drop)
    }

    fn ppoll(
        &self,
        fds: &mut [libc::pollfd],
        timeout: Option<Duration>,
        mask: &[c_int],
    ) -> Result<usize, Errno> {
        self.0.poll(fds, Timeout::after(timeout), Some(&set_of(mask)))
    }

    fn sendfile(&self, to: Fd, from: Fd, offset: Option<&mut i64>, count: usize) -> Result<usize, Errno> {
        self.0.sendfile(to, from, offset, count)
    }

    fn set_nonblocking(&self, fd: Fd, on: bool) -> Result<(), Errno> {
        self.0.set_nonblocking(fd, on).map(drop)
    }

    fn setsockopt(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
        self.0.setsockopt(fd, level, name, value)
    }

    fn getsockopt_into(
        &self,
        fd: Fd,
        level: c_int,
        name: c_int,
        capacity: usize,
    ) -> Result<Vec<u8>, (Errno, usize)> {
        let value = self.0.getsockopt(fd, level, name, capacity).map_err(|error| (error, capacity))?;
        value.fits(capacity).map_err(|error| (error, value.bytes().len()))?;
        Ok(value.bytes()[..capacity.min(value.bytes().len())].to_vec())
    }

    fn attached_filter(&self, fd: Fd, space: usize) -> Result<(usize, Vec<u8>), Errno> {
        let ask = |space| self.0.getsockopt(fd, libc::SOL_SOCKET, libc::SO_GET_FILTER, space);
        crate::kernel::written_filter(space, ask)
    }

    fn source_filter(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<Vec<u8>, Errno> {
        if (level, name) == (libc::IPPROTO_IPV6, FLOWLABEL_MGR) {
            return self.0.flow_label(fd, value).map(|answer| answer.bytes().to_vec());
        }
        self.0.source_filter(fd, level, name, value)?.ok_or(Errno::NOPROTOOPT)
    }

    fn getsockname(&self, fd: Fd) -> Result<Vec<u8>, Errno> {
        self.0.getsockname(fd).map(|name| name.bytes().to_vec())
    }

    fn getpeername(&self, fd: Fd) -> Result<Vec<u8>, Errno> {
        self.0.getpeername(fd).map(|name| name.bytes().to_vec())
    }

    fn query(&self, fd: Fd, request: c_ulong) -> Result<c_int, Errno> {
        match request {
            libc::FIONREAD => self.0.siocinq(fd),
            libc::TIOCOUTQ => self.0.siocoutq(fd),
            SIOCATMARK => self.0.is_at_mark(fd).map(c_int::from),
            SIOCOUTQNSD => self.0.siocoutqnsd(fd),
            _ => Err(Errno::NOTTY),
        }
    }

    fn arrival(&self, fd: Fd) -> Result<bool, Errno> {
        self.0.siocgstamp(fd).map(|time| !time.is_zero())
    }

    fn epoll_params(&self, fd: Fd) -> Result<[u8; 8], Errno> {
        self.0.epoll_params(fd)
    }

    fn set_epoll_params(&self, fd: Fd, params: [u8; 8]) -> Result<(), Errno> {
        self.0.set_epoll_params(fd, params)
    }

    fn owner(&self, fd: Fd) -> Result<c_int, Errno> {
        self.0.owner(fd)
    }

    fn set_owner(&self, fd: Fd, owner: c_int) -> Result<(), Errno> {
        self.0.set_owner(fd, owner)
    }

    fn poll(&self, fds: &mut [libc::pollfd], timeout_ms: c_int) -> Result<usize, Errno> {
        self.0.poll(fds, Timeout::from_millis(timeout_ms), None)
    }

    fn select(&self, sets: &[Vec<Fd>; 3]) -> Result<(usize, [Vec<Fd>; 3]), Errno> {
        self.select_with(sets, None)
    }

    fn pselect(&self, sets: &[Vec<Fd>; 3], mask: &[c_int]) -> Result<(usize, [Vec<Fd>; 3]), Errno> {
        self.select_with(sets, Some(set_of(mask)))
    }

    fn epoll_create(&self) -> Result<Fd, Errno> {
        self.0.epoll_create1(0)
    }

    fn epoll_ctl(&self, set: Fd, op: c_int, fd: Fd, events: u32, data: u64) -> Result<(), Errno> {
        self.0.epoll_ctl(set, op, fd, Some(EpollEvent { events, data }))
    }

    fn handlers_changed(&self) {
        self.0.invalidate_handlers();
    }

    fn epoll_wait(&self, set: Fd, len_max: usize, timeout_ms: c_int) -> Result<Vec<(u32, u64)>, Errno> {
        let mut events = vec![EpollEvent::default(); len_max];
        let count = self.0.epoll_wait(set, &mut events, Timeout::from_millis(timeout_ms), None)?;
        Ok(events[..count].iter().map(|event| (event.events, event.data)).collect())
    }

    fn splice(&self, from: Fd, to: Fd, len: usize, flags: c_uint) -> Result<usize, Errno> {
        match (self.0.owns(from), self.0.owns(to)) {
            (true, true) => Err(Errno::INVAL),
            (true, false) => self.0.splice_to_pipe(from, to, len, flags),
            (false, _) => self.0.splice_from_pipe(from, to, len, flags),
        }
    }
}
