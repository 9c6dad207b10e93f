//! The other end of a memif, written from the protocol specification and independent of the device's code.
//! The shared memory is a file here, which is read and written with system calls.

use ginnel_devices::memif::Role;
use rustix::cmsg_space;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Length of a message in bytes.
const MESSAGE_BYTES: usize = 128;
const VERSION: u16 = 0x0200;
const COOKIE: u32 = 0x03e3_1f20;
/// Length of each buffer of the peer in bytes.
const BUFFER_BYTES: u32 = 2048;
/// Offset of the descriptors in a ring, and length of a descriptor, in bytes.
const DESCRIPTORS_AT: u32 = 128;
const DESCRIPTOR_BYTES: u32 = 16;
/// Marker of the extension, followed by its feature bits.
const EXTENSION: [u8; 12] = *b"GINNELX1\x01\0\0\0";
const EXTENSION_AT: usize = 112;

/// A message with the file descriptor that accompanies it.
pub(super) type OutgoingMessage = ([u8; MESSAGE_BYTES], Option<OwnedFd>);

/// Offset of a field in a ring's header.
#[derive(Clone, Copy)]
pub(super) enum RingField {
    Cookie = 0,
    Flags = 4,
    Head = 6,
    Tail = 64,
}

/// A descriptor in a ring.
pub(super) struct RingDescriptor {
    pub(super) flags: u16,
    pub(super) region: u16,
    pub(super) length: u32,
    pub(super) offset: u32,
}

/// Position of a ring in the memory, and its size as a power of two.
#[derive(Clone, Copy)]
struct Ring {
    at: u32,
    log2: u8,
}

impl Ring {
    fn descriptor_at(self, index: u16) -> u32 {
        let slot = u32::from(index) & ((1 << self.log2) - 1);
        self.at + DESCRIPTORS_AT + DESCRIPTOR_BYTES * slot
    }
}

/// The peer.
pub(super) struct MemifPeer {
    /// Role of the device, not of the peer.
    role: Role,
    socket: OwnedFd,
    memory: Option<OwnedFd>,
    /// The ring to the server and the ring to the client, once their positions are known.
    rings: [Option<Ring>; 2],
    /// Number of messages sent.
    next_step: usize,
    log2: u8,
    headers: bool,
    secret: bool,
    /// Number of descriptors filled, and number of descriptors received.
    tx_index: u16,
    rx_index: u16,
}

/// Returns a file descriptor that may or may not be of the expected kind.
pub(super) fn test_fd(kind: u8) -> Option<OwnedFd> {
    match kind % 6 {
        0 => None,
        1 => Some(rustix::pipe::pipe().ok()?.0),
        2 => memfd(1 << 20, MemfdFlags::empty()),
        3 => memfd(100, MemfdFlags::ALLOW_SEALING),
        4 => interrupt_fd(),
        _ => memfd(1 << 20, MemfdFlags::ALLOW_SEALING),
    }
}

fn memfd(len: u64, flags: MemfdFlags) -> Option<OwnedFd> {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC | flags).ok()?;
    ftruncate(&file, len).ok()?;
    Some(file)
}

fn interrupt_fd() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()
}

impl MemifPeer {
    /// Creates a peer. The lowest bit of `settings` disables the extension, the other bits select the size of
    /// its rings.
    pub(super) fn new(role: Role, socket: OwnedFd, settings: u8) -> Self {
        let log2 = 3 + (settings >> 1) % 4;
        let headers = settings & 1 == 0;
        Self {
            role,
            socket,
            memory: None,
            rings: [None; 2],
            next_step: 0,
            log2,
            headers,
            secret: false,
            tx_index: 0,
            rx_index: 0,
        }
    }

    /// Creates a well-behaved peer without the extension, which knows the secret if there is one.
    pub(super) fn well_behaved(role: Role, socket: OwnedFd, secret: bool) -> Self {
        Self { secret, ..Self::new(role, socket, 1) }
    }

    /// Returns the next message by the protocol, or `None` if it is the device's turn.
    pub(super) fn next_message(&mut self) -> Option<OutgoingMessage> {
        let received = self.receive();
        if self.role == Role::Server {
            // The peer proceeds without waiting for a greeting or an acknowledgement.
            self.next_step += 1;
            return self.client_message(self.next_step - 1);
        }
        if self.next_step == 0 {
            self.next_step = 1;
            return Some((self.hello(), None));
        }
        let (message, fd) = received?;
        self.server_reply(&message, fd)
    }

    fn client_message(&mut self, step: usize) -> Option<OutgoingMessage> {
        let ring_bytes = DESCRIPTORS_AT + (DESCRIPTOR_BYTES << self.log2);
        let private_bytes = if self.headers { 16u16 } else { 0 };
        let ring = |to_server: bool, log2: u8, fd| {
            let at = if to_server { 0 } else { ring_bytes };
            let fields = [
                &u16::from(to_server).to_ne_bytes()[..],
                &[0; 4],
                &at.to_ne_bytes(),
                &[log2],
                &private_bytes.to_ne_bytes(),
            ];
            Some((message(5, &fields.concat()), fd))
        };
        match step {
            0 => {
                let mut secret = [0; 24];
                if self.secret {
                    secret[..4].copy_from_slice(b"word");
                }
                let fields = [&VERSION.to_ne_bytes()[..], &0u32.to_ne_bytes(), &[0], &secret, b"fuzz"];
                let mut init = message(3, &fields.concat());
                self.extend(&mut init);
                Some((init, None))
            }
            1 => {
                self.make_memory(ring_bytes);
                let memory = self.memory.as_ref()?;
                let size = fstat(memory).ok()?.st_size as u64;
                let fields = [&0u16.to_ne_bytes()[..], &size.to_ne_bytes()];
                Some((message(4, &fields.concat()), memory.try_clone().ok()))
            }
            2 => ring(true, self.log2, interrupt_fd()),
            3 => ring(false, self.log2, interrupt_fd()),
            4 => Some((message(6, b"fuzz"), None)),
            _ => None,
        }
    }

    /// Creates the memory with both rings and their buffers. All buffers of the ring to the client are
    /// offered.
    fn make_memory(&mut self, ring_bytes: u32) {
        let count = 1u32 << self.log2;
        let buffers_at = (2 * ring_bytes).next_multiple_of(4096);
        let size = buffers_at + 2 * count * BUFFER_BYTES;
        self.memory = memfd(size.into(), MemfdFlags::ALLOW_SEALING);
        for number in 0..2u32 {
            let ring = Ring { at: number * ring_bytes, log2: self.log2 };
            self.rings[number as usize] = Some(ring);
            self.write(ring.at, &COOKIE.to_ne_bytes());
            self.write(ring.at + RingField::Flags as u32, &1u16.to_ne_bytes());
            for index in 0..count {
                let offset = buffers_at + (number * count + index) * BUFFER_BYTES;
                let descriptor = RingDescriptor { flags: 0, region: 0, length: BUFFER_BYTES, offset };
                self.write_descriptor(number as usize, index as u16, descriptor);
            }
        }
        self.update_field(1, RingField::Head, |_| count as u16);
    }

    fn hello(&self) -> [u8; MESSAGE_BYTES] {
        let limits = [VERSION, VERSION, 15, 0, 0].map(u16::to_ne_bytes).concat();
        let mut hello = message(2, &[&[0; 32][..], &limits, &[14]].concat());
        self.extend(&mut hello);
        hello
    }

    fn extend(&self, message: &mut [u8; MESSAGE_BYTES]) {
        if self.headers {
            message[EXTENSION_AT..EXTENSION_AT + EXTENSION.len()].copy_from_slice(&EXTENSION);
        }
    }

    fn server_reply(&mut self, received: &[u8], fd: Option<OwnedFd>) -> Option<OutgoingMessage> {
        let half = |at: usize| u16::from_ne_bytes([received[at], received[at + 1]]);
        match half(0) {
            3 => {}
            4 => self.memory = fd,
            5 => {
                let at = u32::from_ne_bytes([received[8], received[9], received[10], received[11]]);
                self.rings[usize::from(half(2) & 1 == 0)] = Some(Ring { at, log2: received[12] });
            }
            6 => return Some((message(7, b"fuzz"), None)),
            _ => return None,
        }
        Some((message(1, &[]), None))
    }

    pub(super) fn send(&self, bytes: &[u8], fd: Option<OwnedFd>) {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        // The device may have closed the connection.
        let _ = sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// Returns the last message of the device.
    fn receive(&self) -> Option<([u8; MESSAGE_BYTES], Option<OwnedFd>)> {
        let mut last = None;
        loop {
            let mut bytes = [0; MESSAGE_BYTES];
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                Ok(received) if received.bytes == MESSAGE_BYTES => {}
                _ => return last,
            }
            let rights = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
                _ => None,
            });
            last = Some((bytes, rights));
        }
    }

    fn write(&self, at: u32, bytes: &[u8]) {
        if let Some(memory) = &self.memory {
            let _ = pwrite(memory, bytes, at.into());
        }
    }

    fn read<const N: usize>(&self, at: u32) -> [u8; N] {
        let mut bytes = [0; N];
        if let Some(memory) = &self.memory {
            let _ = pread(memory, &mut bytes, at.into());
        }
        bytes
    }

    /// Writes to any position of the memory.
    pub(super) fn write_anywhere(&self, at: u32, bytes: &[u8]) {
        let Some(memory) = &self.memory else { return };
        let size = fstat(memory).map_or(1, |stat| stat.st_size.max(1)) as u64;
        // Cannot truncate: the value is below the size, which fits 32 bits.
        self.write((u64::from(at) % size) as u32, bytes);
    }

    /// Changes a field of a ring's header.
    pub(super) fn update_field(&self, ring: usize, field: RingField, change: impl Fn(u16) -> u16) {
        let Some(ring) = self.rings[ring] else { return };
        let at = ring.at + field as u32;
        self.write(at, &change(u16::from_ne_bytes(self.read(at))).to_ne_bytes());
    }

    pub(super) fn write_descriptor(&self, ring: usize, index: u16, descriptor: RingDescriptor) {
        let Some(ring) = self.rings[ring] else { return };
        let RingDescriptor { flags, region, length, offset } = descriptor;
        let bytes = [
            &flags.to_ne_bytes()[..],
            &region.to_ne_bytes(),
            &length.to_ne_bytes(),
            &offset.to_ne_bytes(),
            &[0; 4],
        ];
        self.write(ring.descriptor_at(index), &bytes.concat());
    }

    /// Sends a frame by the protocol, with a header if the extension was negotiated, in as many buffers as
    /// necessary.
    pub(super) fn send_frame(&mut self, header: &[u8; 16], len: usize, fill: u8) {
        let (number, field) =
            if self.role == Role::Server { (0, RingField::Head) } else { (1, RingField::Tail) };
        let Some(ring) = self.rings[number] else { return };
        let mut frame = if self.headers { header.to_vec() } else { Vec::new() };
        frame.resize(frame.len() + len, fill);
        let pieces = frame.chunks(BUFFER_BYTES as usize);
        let last = pieces.len().saturating_sub(1);
        for (piece_index, piece) in pieces.enumerate() {
            let [.., o0, o1, o2, o3] = self.read::<12>(ring.descriptor_at(self.tx_index));
            let offset = u32::from_ne_bytes([o0, o1, o2, o3]);
            self.write_anywhere(offset, piece);
            let flags = u16::from(piece_index < last);
            self.write_descriptor(
                number,
                self.tx_index,
                RingDescriptor { flags, region: 0, length: piece.len() as u32, offset },
            );
            self.tx_index = self.tx_index.wrapping_add(1);
        }
        self.update_field(number, field, |_| self.tx_index);
    }

    /// Returns the number of descriptors that the device has filled, and the frame in the last one.
    pub(super) fn last_received(&mut self) -> (u16, Vec<u8>) {
        let (number, field) =
            if self.role == Role::Server { (1, RingField::Tail) } else { (0, RingField::Head) };
        let Some(ring) = self.rings[number] else { return (0, Vec::new()) };
        let filled = u16::from_ne_bytes(self.read(ring.at + field as u32));
        let [_, _, _, _, l0, l1, l2, l3, o0, o1, o2, o3] = self.read(ring.descriptor_at(self.rx_index));
        let (len, at) = (u32::from_ne_bytes([l0, l1, l2, l3]), u32::from_ne_bytes([o0, o1, o2, o3]));
        let mut bytes = vec![0; len.min(BUFFER_BYTES) as usize];
        if let Some(memory) = &self.memory {
            let _ = pread(memory, &mut bytes, at.into());
        }
        self.rx_index = filled;
        (filled, bytes)
    }
}

/// Builds a message of a type with its fields.
fn message(kind: u16, fields: &[u8]) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    bytes[..2].copy_from_slice(&kind.to_ne_bytes());
    bytes[2..2 + fields.len()].copy_from_slice(fields);
    bytes
}
