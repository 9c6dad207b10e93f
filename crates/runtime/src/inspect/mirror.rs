//! Copies of all frames of a running stack, for a monitor in another process.
//!
//! ```text
//!   ginnel monitor ──"mirror 1 …"──► thread "inspect" ──a request in the shard's mailbox──► shard: puts layers
//!                  ◄─a ring in shared memory for each device and direction─                 around its devices
//! ```
//!
//! The layers exist while the monitor is connected: otherwise frames take the way that they would take
//! without this module. A ring has one writer, the shard, and one reader, the monitor.

use super::{send_request, wait_for_reply};
use crate::clock;
use crate::command::Commander;
use crate::context::ShardCore;
use crate::shard::RxPort;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use ginnel_devices::mirror::ring::{self, MirrorReader, MirrorWriter};
use ginnel_devices::mirror::{wrap_rx, wrap_tx};
use ginnel_devices::peer_credentials::peer_credentials;
use ginnel_stack::stack::Stack;
use rustix::cmsg_space;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::geteuid;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};

/// Request for copies of frames, with the version of the answer. The bytes of each ring and the bytes to copy
/// of each frame follow, and [`LOOPBACK`] for the frames that the stack sends to itself, too.
pub(super) const MIRROR: &str = "mirror 1 ";

/// Reply to a request while the layers of another one are around the devices.
pub(super) const IS_OBSERVED: &str =
    "!\tanother capture, monitor, top --protocol or ss --stages observes this stack: end it first";
/// Last word of a request that includes the loopback link.
const LOOPBACK: &str = " loopback";
/// Bytes of each message of the answer: `shard`, `device` and direction of a ring, separated by tabs, with
/// the file of the ring; `.` as the last one; or `!` and an error.
const MESSAGE_BYTES: usize = 256;
/// Interval at which the stack looks whether its shards still run.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long the stack may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A direction of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorDirection {
    /// Frames that the stack receives.
    Received,
    /// Frames that the stack sends.
    Sent,
}

/// The writing ends of a device: for received and for sent frames. What is sent on the loopback link is
/// received there, and copied once.
type DeviceWriters = (MirrorWriter, Option<MirrorWriter>);

/// A device of a shard.
pub(crate) struct DeviceName {
    name: String,
    is_loopback: bool,
    /// False if other shards send and receive the frames of the device, so that they have the copies.
    is_served: bool,
}

/// A request in the shard's mailbox.
pub(crate) enum MirrorRequest {
    /// Asks for the names of all devices. The loopback link is the last one.
    Names(SyncSender<Vec<DeviceName>>),
    /// Puts layers around the devices that have writers, in the order of their names.
    Attach(Vec<Option<DeviceWriters>>, SyncSender<()>),
    /// Removes the layers.
    Detach(SyncSender<()>),
}

impl MirrorRequest {
    /// Handles the request on the shard, between two bursts.
    #[cold]
    pub(crate) fn answer(self, ports: &mut [RxPort], core: &mut ShardCore) {
        let Some(stack) = core.stack.local_mut() else { return };
        // Sending fails only if the requester is gone.
        match self {
            Self::Names(reply) => {
                let steering = stack.network().steering();
                let name = |port: &RxPort| DeviceName {
                    name: port.name.clone(),
                    is_loopback: port.is_loopback,
                    is_served: steering.is_none_or(|steering| steering.serves_device(port.id)),
                };
                let _ = reply.try_send(ports.iter().map(name).collect());
            }
            Self::Attach(writers, reply) => {
                for (port, writers) in ports.iter_mut().zip(writers) {
                    let Some((received, sent)) = writers else { continue };
                    port.replace_rx(|rx| wrap_rx(rx, received));
                    if let Some(sent) = sent {
                        stack.replace_tx(port.id, |tx| Some(wrap_tx(tx, sent)));
                    }
                    port.is_mirrored = true;
                }
                let _ = reply.try_send(());
            }
            Self::Detach(reply) => {
                remove_layers(ports, stack);
                let _ = reply.try_send(());
            }
        }
    }
}

/// Removes the layers from the devices that have them.
pub(super) fn remove_layers(ports: &mut [RxPort], stack: &mut Stack) {
    for port in ports.iter_mut().filter(|port| port.is_mirrored) {
        port.replace_rx(crate::shard::without_layer);
        if !port.is_loopback {
            stack.replace_tx(port.id, |tx| tx.remove_layer());
        }
        port.is_mirrored = false;
    }
}

/// Mirrors the devices of all shards until the client closes its connection or all shards have ended.
/// `is_mirrored` is set meanwhile, since a device has one mirror at a time.
pub(super) fn serve(
    mut client: &UnixStream,
    arguments: &str,
    shards: &[(String, Commander)],
    is_mirrored: &AtomicBool,
) -> io::Result<()> {
    let (own_uid, uid) = (geteuid().as_raw(), peer_credentials(client)?.uid);
    if uid != own_uid && uid != 0 {
        let problem = format!("only user {own_uid} and root may see the traffic of this stack");
        return send_message(client, &format!("!\t{problem}"), None);
    }
    let with_loopback = arguments.ends_with(LOOPBACK);
    let parsed = arguments
        .trim_end_matches(LOOPBACK)
        .split_once(' ')
        .and_then(|(bytes, snaplen)| Some((bytes.parse().ok()?, snaplen.parse().ok()?)));
    let Some((ring_bytes, snaplen)) = parsed else {
        return send_message(client, "!\tmalformed request", None);
    };
    if is_mirrored.swap(true, Ordering::AcqRel) {
        return send_message(client, IS_OBSERVED, None);
    }
    // The files outlive the shards' mappings, so that no shard frees their memory.
    let mut files = Vec::new();
    let result = attach(client, (ring_bytes, snaplen), with_loopback, shards, &mut files).and_then(|()| {
        client.set_read_timeout(Some(LIVENESS_INTERVAL))?;
        // The client sends nothing more.
        loop {
            match client.read(&mut [0; 16]) {
                Ok(0) => return Ok(()),
                Err(e) if e.kind() != ErrorKind::WouldBlock && e.kind() != ErrorKind::Interrupted => {
                    return Err(e);
                }
                _ if shards.iter().all(|(_, shard)| shard.has_ended()) => return Ok(()),
                _ => {}
            }
        }
    });
    for (_, shard) in shards {
        let (reply, replies) = sync_channel(1);
        // A shard that has ended has no layers any more.
        while !shard.has_ended() {
            if send_request(shard, Box::new(MirrorRequest::Detach(reply.clone()))).is_ok() {
                let _ = wait_for_reply(shard, &replies);
                break;
            }
        }
    }
    drop(files);
    is_mirrored.store(false, Ordering::Release);
    if let Err(error) = &result {
        // Fails if the client is gone, which is the usual reason.
        let _ = send_message(client, &format!("!\t{error}"), None);
    }
    result
}

/// Creates the rings, passes them to the shards and their files to the client. Adds the files to `files`.
fn attach(
    client: &UnixStream,
    (ring_bytes, snaplen): (usize, usize),
    with_loopback: bool,
    shards: &[(String, Commander)],
    files: &mut Vec<(String, OwnedFd)>,
) -> io::Result<()> {
    for (label, shard) in shards {
        let failed = |problem: &str| io::Error::other(format!("shard {label} {problem}"));
        let (reply, replies) = sync_channel(1);
        send_request(shard, Box::new(MirrorRequest::Names(reply))).map_err(failed)?;
        let names = wait_for_reply(shard, &replies).map_err(failed)?;
        let mut writers = Vec::new();
        for DeviceName { name, is_loopback, is_served } in names {
            if is_loopback && !with_loopback || !is_served {
                writers.push(None);
                continue;
            }
            let mut create = |direction: &str| {
                let (writer, file) = ring::create(ring_bytes, snaplen, |_| clock::now())?;
                files.push((format!("{label}\t{name}\t{direction}"), file));
                io::Result::Ok(writer)
            };
            let received = create("received")?;
            writers.push(Some((received, if is_loopback { None } else { Some(create("sent")?) })));
        }
        let (reply, replies) = sync_channel(1);
        send_request(shard, Box::new(MirrorRequest::Attach(writers, reply))).map_err(failed)?;
        wait_for_reply(shard, &replies).map_err(failed)?;
    }
    for (text, file) in &*files {
        send_message(client, text, Some(file))?;
    }
    send_message(client, ".", None)
}

/// Sends a message, with a descriptor.
fn send_message(client: &UnixStream, text: &str, file: Option<&OwnedFd>) -> io::Result<()> {
    let mut message = [0; MESSAGE_BYTES];
    let text = &text.as_bytes()[..text.len().min(MESSAGE_BYTES)];
    message[..text.len()].copy_from_slice(text);
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = file.map(AsFd::as_fd);
    if let Some(descriptor) = &descriptors
        && !control.push(SendAncillaryMessage::ScmRights(core::slice::from_ref(descriptor)))
    {
        return Err(ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(client, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
    (&*client).write_all(&message[sent..])
}

/// Receives a message. Returns `None` at the end of the connection.
fn receive_message(client: &UnixStream) -> io::Result<Option<(String, Option<OwnedFd>)>> {
    let (mut message, mut received, mut file) = ([0; MESSAGE_BYTES], 0, None);
    while received < MESSAGE_BYTES {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let rest = &mut [IoSliceMut::new(&mut message[received..])];
        let got = recvmsg(client, rest, &mut control, RecvFlags::CMSG_CLOEXEC);
        let got = got.map_err(|e| super::explain_timeout(e.into()))?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut files) = message {
                file = files.next().or(file);
            }
        }
        if got.bytes == 0 {
            break;
        }
        received += got.bytes;
    }
    let text = message[..received].split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text).trim_end().to_owned();
    Ok(if received == 0 { None } else { Some((text, file)) })
}

/// A ring of a stack.
#[derive(Debug)]
pub struct MirrorRing {
    /// Name of the shard.
    pub shard: String,
    /// Name of the device in the configuration.
    pub device: String,
    /// Which frames of the device are in the ring.
    pub direction: MirrorDirection,
    /// Reads the frames.
    pub reader: MirrorReader,
}

/// The frames of a running stack. Dropping the value ends the copying.
#[derive(Debug)]
pub struct StackMirror {
    connection: UnixStream,
    /// Rings of all shards.
    pub rings: Vec<MirrorRing>,
}

impl StackMirror {
    /// Connects to the stack with this directory. From then on the first `snaplen` bytes of each frame are
    /// copied into rings of `ring_bytes` bytes; frames that the stack sends to itself only `with_loopback`,
    /// and once.
    ///
    /// # Errors
    /// The stack refuses the request, or does not answer.
    pub fn attach(dir: &Path, ring_bytes: usize, snaplen: usize, with_loopback: bool) -> io::Result<Self> {
        let mut connection = UnixStream::connect(dir.join(super::SOCKET))?;
        connection.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let loopback = if with_loopback { LOOPBACK } else { "" };
        writeln!(connection, "{MIRROR}{ring_bytes} {snaplen}{loopback}")?;
        let mut rings = Vec::new();
        loop {
            let Some((text, file)) = receive_message(&connection)? else {
                return Err(io::Error::other("the stack cannot be observed (see its log)"));
            };
            if text == "." {
                break;
            }
            if let Some(problem) = text.strip_prefix("!\t") {
                return Err(io::Error::other(problem.to_owned()));
            }
            let cells: Vec<&str> = text.split('\t').collect();
            let (&[shard, device, direction], Some(file)) = (&cells[..], file) else {
                return Err(io::Error::new(ErrorKind::InvalidData, format!("malformed answer: {text:?}")));
            };
            let direction = match direction {
                "received" => MirrorDirection::Received,
                _ => MirrorDirection::Sent,
            };
            let reader = MirrorReader::open(&file)?;
            rings.push(MirrorRing { shard: shard.into(), device: device.into(), direction, reader });
        }
        connection.set_nonblocking(true)?;
        Ok(Self { connection, rings })
    }

    /// Returns whether the stack has ended.
    pub fn has_ended(&self) -> bool {
        match (&self.connection).read(&mut [0; 16]) {
            Ok(count) => count == 0,
            Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}
