//! A client for short connections on the kernel's sockets, with few system calls.

use crate::http;
use core::net::{Ipv4Addr, SocketAddrV4};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use std::io;

/// First source port.
const PORT_FIRST: u32 = 1024;
/// Number of source ports of each address.
const PORTS: u32 = 65_536 - PORT_FIRST;
/// Longest wait for events, after which the caller checks whether the measurement is over.
const EPOLL_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

struct KernelSlot {
    socket: OwnedFd,
    is_request_sent: bool,
    received: usize,
}

/// The client.
pub struct KernelClient {
    epoll: OwnedFd,
    to: SocketAddrV4,
    first_address: u32,
    addresses: u32,
    /// Connections begun, from which the next source address and port follow.
    begun: u32,
    slots: Vec<KernelSlot>,
    events: Vec<epoll::Event>,
    /// Connections that received their response and ended.
    pub done: u64,
    /// Connections that failed.
    pub failed: u64,
}

impl KernelClient {
    /// Creates a client with `connections` concurrent connections from `addresses` addresses.
    pub fn new(
        to: SocketAddrV4,
        first_address: Ipv4Addr,
        addresses: u32,
        connections: usize,
    ) -> io::Result<Self> {
        let mut client = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            to,
            first_address: first_address.to_bits(),
            addresses,
            begun: 0,
            slots: Vec::with_capacity(connections),
            events: Vec::with_capacity(connections),
            done: 0,
            failed: 0,
        };
        for index in 0..connections {
            let socket = client.open(index)?;
            client.slots.push(KernelSlot { socket, is_request_sent: false, received: 0 });
        }
        Ok(client)
    }

    /// Begins a connection from the next source address and port.
    fn open(&mut self, index: usize) -> io::Result<OwnedFd> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        loop {
            let address = Ipv4Addr::from_bits(self.first_address + self.begun % self.addresses);
            let port = PORT_FIRST + self.begun / self.addresses % PORTS;
            self.begun = self.begun.wrapping_add(1);
            let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
            if net::bind(&socket, &SocketAddrV4::new(address, port as u16)) == Err(Errno::ADDRINUSE) {
                continue;
            }
            match net::connect(&socket, &self.to) {
                Ok(()) | Err(Errno::INPROGRESS) => {}
                Err(e) => return Err(e.into()),
            }
            let interest = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
            epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(index as u64), interest)?;
            return Ok(socket);
        }
    }

    /// Waits for events and handles them.
    pub fn turn(&mut self) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&EPOLL_TIMEOUT)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        for event in &events {
            let index = event.data.u64() as usize;
            let ended = self.slots[index].advance();
            if let Some(good) = ended {
                self.done += u64::from(good);
                self.failed += u64::from(!good);
                let socket = self.open(index)?;
                self.slots[index] = KernelSlot { socket, is_request_sent: false, received: 0 };
            }
        }
        self.events = events;
        Ok(())
    }
}

impl KernelSlot {
    /// Advances as far as possible. Returns whether the connection succeeded when it is over.
    fn advance(&mut self) -> Option<bool> {
        if !self.is_request_sent {
            match rustix::io::write(&self.socket, http::REQUEST) {
                Ok(_) => self.is_request_sent = true,
                Err(Errno::AGAIN) => return None,
                Err(_) => return Some(false),
            }
        }
        let mut buffer = [0; 1024];
        loop {
            match rustix::io::read(&self.socket, &mut buffer) {
                Ok(0) => return Some(self.received > http::BODY_BYTES),
                Ok(count) => self.received += count,
                Err(Errno::AGAIN) => return None,
                Err(_) => return Some(false),
            }
        }
    }
}
