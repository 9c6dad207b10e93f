//! Open file descriptions that several processes share: flags and options belong to the description,
//! whichever process changes them.
//!
//! A process that forks, executes a program or passes a socket publishes the state beside the socket in the
//! region. From then on each call compares one version word with the last version that it has read.
//! Descriptions of a single process publish nothing.

use crate::channels::Channels;
use crate::fd_table::FileId;
use crate::file::{FileKind, ShutdownState, Socket, SocketRole};
use crate::options::SocketOptionState;
use crate::options::filter::FilterCopy;
use crate::process::ProcessState;
use ginnel::broker::codec::Codec;
use ginnel::channel::{DESCRIPTION_BYTES_MAX, DescriptionKey};
use ginnel::codec_struct;

/// The published state of a description.
struct SharedDescription {
    nonblocking: bool,
    shutdown: ShutdownState,
    options: SocketOptionState,
    /// True if the connection is over and a call has reported that: the next `connect`, in whichever process,
    /// is a new attempt.
    disconnected: bool,
}
codec_struct!(SharedDescription { nonblocking, shutdown, options, disconnected });

impl SharedDescription {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.encode(&mut bytes);
        bytes
    }
}

/// Returns where the state of a socket is published. Returns `None` for a socket that has nothing on the
/// stack.
pub(crate) fn shared_key(socket: &Socket) -> Option<DescriptionKey> {
    match socket.role {
        SocketRole::Unconnected { .. } => None,
        SocketRole::Listening(listening) => Some(DescriptionKey::Listener(listening.number)),
        SocketRole::Stream(stream) => Some(DescriptionKey::Socket(stream.conn)),
        SocketRole::Udp(udp) => Some(DescriptionKey::Socket(udp.conn)),
    }
}

/// Returns the filter that was published last; `None` if nothing was published.
pub(crate) fn shared_filter(channels: &Channels, of: DescriptionKey) -> Option<FilterCopy> {
    let (_, bytes) = channels.read_description(of)?;
    Some(SharedDescription::decode(&mut &bytes[..])?.options.published_filter())
}

impl ProcessState {
    /// Publishes a description that another process is about to share. One that is only bound is published
    /// when a process listens on it. No call sleeps on the kernel's instance of an epoll set any more.
    pub fn share(&mut self, file: FileId) {
        if self.files.get(file).shared_version.is_none() {
            self.publish(file, false);
        }
        match &mut self.files.get(file).kind {
            FileKind::Free => {}
            FileKind::Epoll(set) => set.ban_direct_sleep(),
            FileKind::Socket(socket) => {
                if let Some(bound) = socket.bound_mut() {
                    bound.is_shared = true;
                }
            }
        }
    }

    /// Publishes what this process has changed.
    #[inline]
    pub fn publish_shared(&mut self, file: FileId) {
        if self.files.get(file).shared_version.is_some() {
            self.publish(file, false);
        }
    }

    /// Publishes that the socket was disconnected.
    pub fn publish_disconnected(&mut self, file: FileId) {
        if self.files.get(file).shared_version.is_some() {
            self.publish(file, true);
        }
    }

    /// Returns whether the socket may get the options that `change` makes of its options: the state of a
    /// description that other processes share is limited to [`DESCRIPTION_BYTES_MAX`].
    pub fn can_publish(&mut self, file: FileId, change: impl FnOnce(&mut SocketOptionState)) -> bool {
        if self.files.get(file).shared_version.is_none() {
            return true;
        }
        let Ok(socket) = self.files.socket(file) else { return true };
        let mut options = socket.options.published();
        change(&mut options);
        let (nonblocking, shutdown) = (socket.nonblocking, socket.shutdown);
        let published = SharedDescription { nonblocking, shutdown, options, disconnected: false };
        published.bytes().len() <= DESCRIPTION_BYTES_MAX
    }

    fn publish(&mut self, file: FileId, disconnected: bool) {
        let Some((key, bytes)) = self.description_bytes(file, disconnected) else { return };
        self.files.get(file).shared_version = self.client.write_description(key, &bytes);
    }

    /// Returns what is published about a socket, and where.
    fn description_bytes(&mut self, file: FileId, disconnected: bool) -> Option<(DescriptionKey, Vec<u8>)> {
        let socket = self.files.socket(file).ok()?;
        let key = shared_key(socket)?;
        let (nonblocking, shutdown) = (socket.nonblocking, socket.shutdown);
        let options = socket.options.published();
        let published = SharedDescription { nonblocking, shutdown, options, disconnected };
        Some((key, published.bytes()))
    }

    /// Publishes a description that other processes share, after its socket was opened again. If another
    /// process has published it before, that process may have changed it since, so what it has published
    /// applies.
    pub fn share_again(&mut self, file: FileId) {
        if self.files.get(file).shared_version.is_none() {
            return;
        }
        let Some((key, bytes)) = self.description_bytes(file, false) else { return };
        let version = self.client.description_version(key);
        if version & 1 != 0 {
            // A process is writing, or has died while it did: this one takes over after a while.
            return self.publish(file, false);
        }
        if shared_filter(&self.client, key).is_none()
            && let Some(version) = self.client.write_description_after(key, version, &bytes)
        {
            self.files.get(file).shared_version = Some(version);
            return;
        }
        self.files.get(file).shared_version = Some(0);
        self.sync_shared_from(file, 0);
        // A process that did not know the program can learn it now, so the version changes.
        if let Some(version) = self.files.get(file).shared_version
            && self.files.socket(file).is_ok_and(|socket| socket.options.knows_filter())
            && let Some((key, bytes)) = self.description_bytes(file, false)
            && let Some(version) = self.client.write_description_after(key, version, &bytes)
        {
            self.files.get(file).shared_version = Some(version);
        }
    }

    /// Applies what other processes have published.
    #[inline]
    pub fn sync_shared(&mut self, file: FileId) {
        if let Some(last_version) = self.files.get(file).shared_version {
            self.sync_shared_from(file, last_version);
        }
    }

    #[inline(never)]
    fn sync_shared_from(&mut self, file: FileId, last_version: u32) {
        let FileKind::Socket(socket) = &mut self.files.get(file).kind else { return };
        let Some(key) = shared_key(socket) else {
            // The socket has nothing on the stack any more, so nothing is shared.
            self.files.get(file).shared_version = None;
            return;
        };
        let now = self.client.description_version(key);
        if now == last_version {
            return;
        }
        let Some((version, bytes)) = self.client.read_description(key) else {
            // The process that was writing may have died. The next change has another version.
            self.files.get(file).shared_version = Some(now);
            return;
        };
        let (mut disconnected, is_udp) = (false, socket.is_udp);
        if let Some(published) = SharedDescription::decode(&mut &bytes[..]) {
            disconnected = published.disconnected;
            socket.nonblocking = published.nonblocking;
            socket.record_shutdown(published.shutdown.read, published.shutdown.write);
            socket.options.update_from_shared(published.options);
            if is_udp {
                socket.options.apply_to_udp_send(socket.family, socket.udp_send.get_or_insert_default());
            }
        }
        self.files.get(file).shared_version = Some(version);
        if !is_udp {
            self.update_end_work(file);
        }
        self.learn_filter(file);
        if disconnected {
            self.drop_connection(file);
        }
    }
}
