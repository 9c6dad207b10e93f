//! A peer that uses the messages and rings of the device, but is controlled by a test.

use super::*;
use crate::memif::control_channel::{ChannelEvent, ControlChannel};
use crate::memif::handshake::{ClientHandshake, HandshakeStep, NegotiatedLink, ServerHandshake};
use crate::memif::message::{ControlMessage, MESSAGE_BYTES};
use crate::memif::socket::{MemifListener, connect_to};
use crate::random::Random;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendFlags, send};
use std::sync::Arc;

/// The far end of a connection.
pub(super) struct Peer {
    channel: ControlChannel,
    pub(super) link: Option<NegotiatedLink>,
}

/// Establishes connections to one device.
pub(super) struct Meet {
    config: MemifConfig,
    listener: Option<MemifListener>,
}

enum Side {
    Server(ServerHandshake),
    Client(ClientHandshake),
}

impl Side {
    fn on_message(
        &mut self,
        message: ControlMessage,
        descriptor: Option<OwnedFd>,
    ) -> Result<HandshakeStep, String> {
        match self {
            Self::Server(handshake) => handshake.on_message(message, descriptor, false),
            Self::Client(handshake) => handshake.on_message(message),
        }
    }
}

impl Peer {
    /// Returns whether the device has not ended the connection yet.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.channel.receive(), ChannelEvent::Empty)
    }

    /// Waits until the device ends the connection. Returns whether it does.
    pub(super) fn is_sent_away(&self) -> bool {
        loop {
            wait_for(self.channel.fd());
            match self.channel.receive() {
                ChannelEvent::Closed => return true,
                ChannelEvent::Message(..) => {}
                ChannelEvent::Empty | ChannelEvent::Malformed(_) => return false,
            }
        }
    }

    /// Returns the configuration of the other end of a device.
    pub(super) fn config(memif: &Memif, folder: &Folder) -> MemifConfig {
        // The MAC address tells the role of the device.
        let server = memif.queues[0].tx.capabilities().mac[5] == 1;
        let role = if server { Role::Client } else { Role::Server };
        MemifConfig { ring: 64, ..MemifConfig::new(folder.socket(), role) }
    }

    /// Prepares connections of peers that can violate the protocol. From now on this side listens if the
    /// device is the client.
    pub(super) fn stranger(memif: &Memif, folder: &Folder) -> Meet {
        let config = Self::config(memif, folder);
        let listener = (config.role == Role::Server)
            .then(|| MemifListener::bind(&config.socket).expect("a listening socket"));
        Meet { config, listener }
    }
}

impl Meet {
    /// Opens a channel to the device, and creates the handshake of this side.
    fn channel(&self, offload: bool) -> (ControlChannel, Side) {
        let config = Arc::new(MemifConfig { offload, ..self.config.clone() });
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "the device does not listen");
            let side = match &self.listener {
                None => connect_to(&config.socket)
                    .ok()
                    .map(|channel| (channel, Side::Client(ClientHandshake::new(&config)))),
                Some(listener) => {
                    wait_for(listener.fd());
                    listener.accept().ok().flatten().map(|channel| {
                        let (handshake, hello) = ServerHandshake::new(&config);
                        let _ = channel.send(&hello, None);
                        (channel, Side::Server(handshake))
                    })
                }
            };
            if let Some(side) = side {
                return side;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Establishes a connection by the rules.
    pub(super) fn connect(&mut self, offload: bool) -> Peer {
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "the device does not connect");
            let (channel, mut side) = self.channel(offload);
            if let Some(link) = shake(&channel, &mut side) {
                return Peer { channel, link: Some(link) };
            }
            // The device was still busy with the previous connection.
        }
    }

    /// Sends up to 20 messages of a handshake, about half of them with a random error. Returns earlier if the
    /// device disconnects, and at random.
    pub(super) fn confuse(&mut self, random: &mut Random) {
        let (channel, mut side) = self.channel(random.below(2) == 0);
        for _ in 0..20 {
            wait_at_most(channel.fd(), 50);
            let step = match channel.receive() {
                ChannelEvent::Message(message, descriptor) => side.on_message(message, descriptor),
                ChannelEvent::Empty => Err("nothing".into()),
                ChannelEvent::Closed | ChannelEvent::Malformed(_) => return,
            };
            let (message, descriptor) = match step {
                Ok(HandshakeStep::Send(message, descriptor)) => (message, descriptor),
                Ok(HandshakeStep::Connect(_, message)) => (message, None),
                Ok(HandshakeStep::Connected(_) | HandshakeStep::Disconnected(_)) | Err(_) => {
                    (ControlMessage::Ack, None)
                }
            };
            let mut bytes = message.encode();
            let mut len = MESSAGE_BYTES;
            let mut descriptor = descriptor;
            match random.below(24) {
                0 => bytes[0] = random.below(11) as u8,
                1..=3 => bytes[random.below(16) as usize] = [0, 1, 2, 0x7f, 0xff][random.below(5) as usize],
                4 => bytes[random.below(128) as usize] = random.next_u64() as u8,
                5 => len = random.below(MESSAGE_BYTES as u64) as usize,
                6 => descriptor = None,
                7 => descriptor = Some(rustix::pipe::pipe().expect("a pipe").0),
                8 => descriptor = Some(memfd(MemfdFlags::empty())),
                9 => descriptor = Some(memfd(MemfdFlags::ALLOW_SEALING)),
                10 => drop(channel.send(&message, None)),
                11 => return,
                _ => {}
            }
            let sent = if len == MESSAGE_BYTES {
                match ControlMessage::decode(&bytes) {
                    Ok(message) => channel.send(&message, descriptor.as_ref()).is_ok(),
                    Err(_) => send(channel.fd(), &bytes, SendFlags::NOSIGNAL).is_ok(),
                }
            } else {
                send(channel.fd(), &bytes[..len], SendFlags::NOSIGNAL).is_ok()
            };
            if !sent {
                return;
            }
        }
    }
}

/// Creates a file of 100 bytes, which is smaller than any region.
fn memfd(flags: MemfdFlags) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | flags).expect("a memfd");
    ftruncate(&fd, 100).expect("its size");
    fd
}

fn wait_for(fd: &OwnedFd) {
    wait_at_most(fd, 5000);
}

fn wait_at_most(fd: &OwnedFd, milliseconds: i64) {
    let pause = Timespec { tv_sec: milliseconds / 1000, tv_nsec: milliseconds % 1000 * 1_000_000 };
    let _ = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&pause));
}

/// Performs the whole handshake. Returns `None` if the device rejects it.
fn shake(channel: &ControlChannel, side: &mut Side) -> Option<NegotiatedLink> {
    loop {
        wait_for(channel.fd());
        let ChannelEvent::Message(message, descriptor) = channel.receive() else { return None };
        match side.on_message(message, descriptor).ok()? {
            HandshakeStep::Send(message, descriptor) => channel.send(&message, descriptor.as_ref()).ok()?,
            HandshakeStep::Connect(link, message) => {
                channel.send(&message, None).ok()?;
                return Some(*link);
            }
            HandshakeStep::Connected(link) => {
                // Offers all buffers, as the receiving halves of a device do.
                link.to_client.iter().for_each(|offered| offered.ring.set_head(offered.ring.size()));
                return Some(*link);
            }
            HandshakeStep::Disconnected(_) => return None,
        }
    }
}
