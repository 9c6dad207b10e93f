//! `ginnel echo`: sends back what it receives (RFC 862).
//!
//! The smallest useful program on the native API, and an example of back-pressure: data that do not fit into
//! the send buffer are left unread, so the receive window limits the client. The program keeps no state per
//! connection. UDP has no flow control, so datagrams that do not fit are dropped.

use core::net::SocketAddr;
use ginnel::stats::CounterKind;
use ginnel::{
    Conn, Context, Datagram, Error, Handler, ListenOptions, SocketOptions, UdpError, UdpHandle, UdpOptions,
};

/// Lowest source port of a datagram that is answered. Two servers of such simple services could otherwise be
/// made to answer each other forever by one forged datagram.
const CLIENT_PORT_MIN: u16 = 1024;

/// Options of `ginnel echo`.
#[derive(Clone, Debug, clap::Args)]
pub struct EchoOptions {
    /// Address and port to listen on. An unspecified address (`0.0.0.0` or `[::]`) stands for all addresses
    /// of the stack. May be given several times.
    #[arg(long, value_name = "ADDRESS:PORT", default_values = ["0.0.0.0:7", "[::]:7"])]
    pub listen: Vec<SocketAddr>,

    /// Echo UDP datagrams, too, on the same addresses and ports.
    #[arg(long)]
    pub udp: bool,

    /// Probe idle connections (`SO_KEEPALIVE`), as the keys `keepalive_…` of `[tcp]` say. Connections whose
    /// peers have vanished then end.
    #[arg(long)]
    pub keepalive: bool,
}

/// The echo server as a shard's application.
#[derive(Clone, Debug)]
pub struct Echo {
    options: EchoOptions,
    datagrams_dropped: u64,
}

impl Echo {
    /// Creates an echo server.
    pub fn new(options: &EchoOptions) -> Self {
        Self { options: options.clone(), datagrams_dropped: 0 }
    }

    /// Returns the number of datagrams that were not answered.
    pub const fn datagrams_dropped(&self) -> u64 {
        self.datagrams_dropped
    }
}

impl Handler for Echo {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let keepalive = self.options.keepalive;
        let socket = SocketOptions { nodelay: true, keepalive, ..SocketOptions::default() };
        for address in &self.options.listen {
            cx.listen(*address, ListenOptions { socket, v6_only: true, ..ListenOptions::default() })?;
            // If this shard does not serve the address, another one receives the datagrams.
            if self.options.udp && cx.serves(address.ip()) {
                // Each address has a socket of its own, so that [::] and 0.0.0.0 can both be listened on, and
                // so has each shard.
                let options = UdpOptions { v6only: true, reuse_port: true, ..UdpOptions::default() };
                let failed = |e: UdpError| Error::application(format!("UDP socket on {address}: {e}"));
                cx.udp_bind(*address, options).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        // After an error nothing can be sent any more: the data are dropped until `closed` is called.
        cx.send(conn, data).unwrap_or(data.len())
    }

    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        report(CounterKind::Counter, "echo.datagrams_dropped", self.datagrams_dropped);
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.resume_reading(conn);
    }

    // The peer's FIN is reported after all data were echoed; the provided `peer_closed` then closes after the
    // queued data.

    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        let is_client = datagram.from.port() >= CLIENT_PORT_MIN;
        // `data` is shorter than the datagram if it was truncated; a truncated answer would be wrong.
        if !is_client || data.len() < datagram.len || cx.udp_reply(socket, datagram, data).is_err() {
            self.datagrams_dropped += 1;
        }
    }
}
