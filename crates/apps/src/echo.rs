//! `ginnel echo`: sends back what it receives (RFC 862).
//!
//! The smallest useful program on the native API, and an example of back-pressure: what does not fit into the send buffer is left unread,
//! so the stack's receive window holds the client back. No state is kept per connection. Over UDP, where nobody can be held back, what does not
//! fit is dropped.

use core::net::SocketAddr;
use ginnel::stats::CounterKind;
use ginnel::{
    Conn, Context, Datagram, Error, Handler, ListenOptions, SocketOptions, UdpError, UdpHandle, UdpOptions,
};

/// Datagrams from lower ports are not answered: two servers of such simple services, once set on each other by a forged
/// datagram, would never stop.
const CLIENT_PORT_MIN: u16 = 1024;

/// What `ginnel echo` is told.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Address and port to listen on; an unspecified address stands for all of the stack's. May be given several times.
    #[arg(long, value_name = "ADDRESS:PORT", default_values = ["0.0.0.0:7", "[::]:7"])]
    pub listen: Vec<SocketAddr>,

    /// Echo datagrams too, on the same addresses and ports.
    #[arg(long)]
    pub udp: bool,
}

/// The program as a shard's application.
#[derive(Clone, Debug)]
pub struct Echo {
    options: Options,
    datagrams_dropped: u64,
}

impl Echo {
    /// An echo server.
    pub fn new(options: &Options) -> Self {
        Self { options: options.clone(), datagrams_dropped: 0 }
    }

    /// Datagrams that could not be sent back.
    pub const fn datagrams_dropped(&self) -> u64 {
        self.datagrams_dropped
    }
}

impl Handler for Echo {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        for address in &self.options.listen {
            cx.listen(*address, ListenOptions { socket, v6_only: true, ..ListenOptions::default() })?;
            if self.options.udp {
                // Each address is a socket of its own, so that [::] and 0.0.0.0 can both be listened on.
                // And each shard has its own.
                let options = UdpOptions { v6only: true, reuse_port: true, ..UdpOptions::default() };
                let failed = |e: UdpError| Error::application(format!("UDP socket on {address}: {e}"));
                cx.udp_bind(*address, options).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        // An error means that nothing can be sent any more: what still comes is dropped until the connection's end is told.
        cx.send(conn, data).unwrap_or(data.len())
    }

    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        report(CounterKind::Counter, "echo.datagrams_dropped", self.datagrams_dropped);
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.resume_reading(conn);
    }

    // The client's end comes after all it sent was echoed; the provided `peer_closed` then closes, behind what is queued.

    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        let is_client = datagram.from.port() >= CLIENT_PORT_MIN;
        // `data` is shorter if the datagram was cut; half an answer would be a wrong one.
        if !is_client || data.len() < datagram.len || cx.udp_reply(socket, datagram, data).is_err() {
            self.datagrams_dropped += 1;
        }
    }
}
