//! Open file descriptions that several processes have: flags and options are the description's, whoever changes them.
//!
//! Who forks, starts a program or sends a socket writes down what there is, beside the socket in the region; from then on each call compares one word with the last that it has seen.
//! A description of one process alone has no part in it.

use crate::fd_table::FileId;
use crate::file::{Kind, Shape, Shut, Socket};
use crate::lane::Lane;
use crate::note::{Note, fields};
use crate::options::Options;
use ginnel::channel::CommonOf;

/// What all agree on.
struct Agreed {
    nonblocking: bool,
    shut: Shut,
    options: Options,
    /// The connection is over, and a call has said so: the next `connect` is a new attempt, whoever makes it.
    given_up: bool,
}
fields!(Agreed { nonblocking, shut, options, given_up });

/// Where it stands. A socket without anything on the stack has no place.
fn place(socket: &Socket) -> Option<CommonOf> {
    match socket.shape {
        Shape::Fresh { .. } => None,
        Shape::Listening(listening) => Some(CommonOf::Listener(listening.number)),
        Shape::Stream(stream) => Some(CommonOf::Socket(stream.conn)),
        Shape::Datagrams(dgram) => Some(CommonOf::Socket(dgram.conn)),
    }
}

impl Lane {
    /// Another process is about to have a description, too.
    pub fn share(&mut self, file: FileId) {
        if self.files.get(file).shared.is_none() {
            self.agree(file, false);
        }
    }

    /// Writes down what this process has changed.
    #[inline]
    pub fn tell_sharers(&mut self, file: FileId) {
        if self.files.get(file).shared.is_some() {
            self.agree(file, false);
        }
    }

    /// Writes down that the socket is as good as new here.
    pub fn tell_given_up(&mut self, file: FileId) {
        if self.files.get(file).shared.is_some() {
            self.agree(file, true);
        }
    }

    fn agree(&mut self, file: FileId, given_up: bool) {
        let Ok(socket) = self.files.socket(file) else { return };
        let Some(place) = place(socket) else { return };
        let (nonblocking, shut) = (socket.nonblocking, socket.shut);
        let agreed = Agreed { nonblocking, shut, options: socket.options.common(), given_up };
        let mut bytes = Vec::new();
        agreed.put(&mut bytes);
        self.files.get(file).shared = self.client.tell_common(place, &bytes);
    }

    /// What another process has changed is so here, too.
    #[inline]
    pub fn catch_up(&mut self, file: FileId) {
        if let Some(seen) = self.files.get(file).shared {
            self.catch_up_from(file, seen);
        }
    }

    #[inline(never)]
    fn catch_up_from(&mut self, file: FileId, seen: u32) {
        let Kind::Socket(socket) = &mut self.files.get(file).kind else { return };
        let Some(place) = place(socket) else {
            // It is nothing to others any more.
            self.files.get(file).shared = None;
            return;
        };
        let now = self.client.common_version(place);
        if now == seen {
            return;
        }
        let Some((version, bytes)) = self.client.common_told(place) else {
            // Whoever was writing may be dead. The next change is another version.
            self.files.get(file).shared = Some(now);
            return;
        };
        let mut given_up = false;
        if let Some(agreed) = Agreed::get(&mut &bytes[..]) {
            given_up = agreed.given_up;
            socket.nonblocking = agreed.nonblocking;
            socket.shut(agreed.shut.read, agreed.shut.write);
            socket.options.take_over(agreed.options);
            if socket.datagrams {
                socket.options.for_outbox(socket.family, socket.outbox.get_or_insert_default());
            }
        }
        self.files.get(file).shared = Some(version);
        if given_up {
            self.drop_connection(file);
        }
    }
}
