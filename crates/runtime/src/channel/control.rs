//! What is rare and needs an answer: it goes through the shard's mailbox.

use crate::command::{CommandError, Commander};
use crate::error::Error;
use core::net::SocketAddr;
use ginnel_stack::error::{OptionError, Stale};
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use std::sync::mpsc::{SyncSender, sync_channel};

/// A question to the stack's side of a channel. `client` is the number of who asks.
#[derive(Clone, Debug)]
pub enum Request {
    /// Listen.
    Listen(SocketAddr, ListenOptions),
    /// Hold the listener of this number too.
    Join(u32),
    /// Hold the listener of this number no more. The last to do so closes it.
    Unlisten(u32),
    /// Open a connection.
    Connect(SocketAddr, ConnectOptions),
    /// Set an option of a socket.
    SetOption(u32, TcpOption),
    /// What is known of a socket.
    Info(u32),
    /// The client is gone, or wants to be: what it alone holds is closed.
    Detach,
}

/// The answer.
#[derive(Debug)]
pub enum Reply {
    /// The listener's number.
    Listen(Result<u32, Error>),
    /// To [`Request::Join`].
    Join(Result<(), Stale>),
    /// The socket's number and generation.
    Connect(Result<(u32, u32), Error>),
    /// To [`Request::SetOption`].
    SetOption(Result<(), OptionError>),
    /// To [`Request::Info`].
    Info(Result<Box<TcpInfo>, Stale>),
    /// To what cannot fail.
    Done,
}

/// A request on its way.
pub(crate) struct Envelope {
    pub client: usize,
    pub request: Request,
    pub reply: SyncSender<Reply>,
}

/// Carries requests to the stack's side and answers back.
pub trait Control: Send {
    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// The shard is gone.
    fn ask(&mut self, client: usize, request: Request) -> Result<Reply, Error>;
}

/// The way from a thread that is not the shard's.
impl Control for Commander {
    fn ask(&mut self, client: usize, request: Request) -> Result<Reply, Error> {
        let gone = || Error::application("channel: the shard is gone");
        let (reply, answer) = sync_channel(1);
        let mut command: crate::Command = Box::new(Envelope { client, request, reply });
        loop {
            match self.send(command) {
                Ok(()) => return answer.recv().map_err(|_| gone()),
                Err(CommandError::Full(back)) => {
                    command = back;
                    std::thread::yield_now();
                }
                Err(CommandError::Gone(_)) => return Err(gone()),
            }
        }
    }
}
