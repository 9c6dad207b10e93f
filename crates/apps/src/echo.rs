//! `ginnel echo`: sends back what it receives.
//!
//! The smallest useful program on the native API, and an example of back-pressure: what does not fit into the send buffer is left unread,
//! so the stack's receive window holds the client back. No state is kept per connection.

use crate::Run;
use core::net::SocketAddr;
use ginnel::{Conn, Context, Error, Handler, ListenOptions, SocketOptions};

/// What `ginnel echo` is told.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Address and port to listen on; an unspecified address stands for all of the stack's. May be given several times.
    #[arg(long, value_name = "ADDRESS:PORT", default_values = ["0.0.0.0:7", "[::]:7"])]
    pub listen: Vec<SocketAddr>,
}

/// The program as a shard's application.
#[derive(Clone, Debug)]
pub struct Echo {
    listen: Vec<SocketAddr>,
}

impl Echo {
    /// An echo server.
    pub fn new(options: &Options) -> Self {
        Self { listen: options.listen.clone() }
    }
}

impl Handler for Echo {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        for address in &self.listen {
            cx.listen(*address, ListenOptions { socket, v6_only: true, ..ListenOptions::default() })?;
        }
        Ok(())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        // An error means that nothing can be sent any more: what still comes is dropped until the connection's end is told.
        cx.send(conn, data).unwrap_or(data.len())
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.resume_reading(conn);
    }

    // The client's end comes after all it sent was echoed; the provided `peer_closed` then closes, behind what is queued.
}

/// Runs the program on a stack until it is told to stop.
pub fn run(options: &Options, stack: impl Run) -> Result<(), Error> {
    let addresses: Vec<String> = options.listen.iter().map(SocketAddr::to_string).collect();
    println!("echo on {}", addresses.join(" "));
    stack.run(Echo::new(options))
}
