//! Open file descriptions that several processes have: flags and options are the description's, whoever changes them.
//!
//! Who forks, starts a program or sends a socket writes down what there is, beside the socket in the region; from then on each call compares one word with the last that it has seen.
//! A description of one process alone has no part in it.

use crate::fd_table::FileId;
use crate::file::{FileKind, ShutdownState, Socket, SocketRole};
use crate::options::SocketOptionState;
use crate::process::ProcessState;
use ginnel::broker::codec::Codec;
use ginnel::channel::DescriptionKey;
use ginnel::codec_struct;

/// What all agree on.
struct SharedDescription {
    nonblocking: bool,
    shutdown: ShutdownState,
    options: SocketOptionState,
    /// The connection is over, and a call has said so: the next `connect` is a new attempt, whoever makes it.
    disconnected: bool,
}
codec_struct!(SharedDescription { nonblocking, shutdown, options, disconnected });

/// Where it stands. A socket without anything on the stack has no place.
fn shared_key(socket: &Socket) -> Option<DescriptionKey> {
    match socket.role {
        SocketRole::Unconnected { .. } => None,
        SocketRole::Listening(listening) => Some(DescriptionKey::Listener(listening.number)),
        SocketRole::Stream(stream) => Some(DescriptionKey::Socket(stream.conn)),
        SocketRole::Udp(dgram) => Some(DescriptionKey::Socket(dgram.conn)),
    }
}

impl ProcessState {
    /// Another process is about to have a description, too.
    pub fn share(&mut self, file: FileId) {
        if self.files.get(file).shared_version.is_none() {
            self.publish(file, false);
        }
    }

    /// Writes down what this process has changed.
    #[inline]
    pub fn publish_shared(&mut self, file: FileId) {
        if self.files.get(file).shared_version.is_some() {
            self.publish(file, false);
        }
    }

    /// Writes down that the socket is as good as new here.
    pub fn publish_disconnected(&mut self, file: FileId) {
        if self.files.get(file).shared_version.is_some() {
            self.publish(file, true);
        }
    }

    fn publish(&mut self, file: FileId, given_up: bool) {
        let Ok(socket) = self.files.socket(file) else { return };
        let Some(place) = shared_key(socket) else { return };
        let (nonblocking, shut) = (socket.nonblocking, socket.shutdown);
        let agreed = SharedDescription {
            nonblocking,
            shutdown: shut,
            options: socket.options.shared(),
            disconnected: given_up,
        };
        let mut bytes = Vec::new();
        agreed.encode(&mut bytes);
        self.files.get(file).shared_version = self.client.write_description(place, &bytes);
    }

    /// What another process has changed is so here, too.
    #[inline]
    pub fn sync_shared(&mut self, file: FileId) {
        if let Some(seen) = self.files.get(file).shared_version {
            self.sync_shared_from(file, seen);
        }
    }

    #[inline(never)]
    fn sync_shared_from(&mut self, file: FileId, seen: u32) {
        let FileKind::Socket(socket) = &mut self.files.get(file).kind else { return };
        let Some(place) = shared_key(socket) else {
            // It is nothing to others any more.
            self.files.get(file).shared_version = None;
            return;
        };
        let now = self.client.description_version(place);
        if now == seen {
            return;
        }
        let Some((version, bytes)) = self.client.read_description(place) else {
            // Whoever was writing may be dead. The next change is another version.
            self.files.get(file).shared_version = Some(now);
            return;
        };
        let mut given_up = false;
        if let Some(agreed) = SharedDescription::decode(&mut &bytes[..]) {
            given_up = agreed.disconnected;
            socket.nonblocking = agreed.nonblocking;
            socket.record_shutdown(agreed.shutdown.read, agreed.shutdown.write);
            socket.options.update_from_shared(agreed.options);
            if socket.is_udp {
                socket.options.apply_to_udp_send(socket.family, socket.udp_send.get_or_insert_default());
            }
        }
        self.files.get(file).shared_version = Some(version);
        if given_up {
            self.drop_connection(file);
        }
    }
}
