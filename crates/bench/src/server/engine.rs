//! A responder on the engine itself, which handles events directly.

use super::{ROUTER_IP, SERVER, Server};
use crate::host::{Application, StackHost};
use crate::http;
use core::net::{Ipv4Addr, SocketAddr};
use ginnel_stack::device::{Device, RxBurst};
use ginnel_stack::events::Event;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{ListenOptions, SocketOptions};
use ginnel_stack::stack::{Stack, Usage};
use ginnel_stack::tcp::config::TcpConfig;
use ginnel_stack::tcp::source::{PreloadedSource, SourceId};
use ginnel_stack::time::Instant;

/// Options of the server.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// True if connections stay open after a response.
    pub keep_alive: bool,
    /// Length of a body that is sent from a source without copying, instead of the default response.
    pub bulk_bytes: Option<u64>,
    /// TCP configuration.
    pub tcp: TcpConfig,
}

impl EngineOptions {
    /// Returns the options for the default response and the default TCP configuration.
    pub fn new(keep_alive: bool) -> Self {
        Self { keep_alive, bulk_bytes: None, tcp: TcpConfig::default() }
    }
}

/// The server.
pub struct EngineServer {
    host: StackHost,
    responder: EngineResponder,
}

struct EngineResponder {
    head: Vec<u8>,
    /// Source and length of the body after the head.
    body: Option<(SourceId, u64)>,
    keep_alive: bool,
}

impl EngineServer {
    /// Creates a server on a device.
    pub fn new(device: Device, options: EngineOptions, now: Instant) -> Self {
        let (address, router) = (Ipv4Addr::from_bits(SERVER.ip), Ipv4Addr::from_bits(ROUTER_IP));
        let mut host = StackHost::new(device, address, Some(router), options.tcp, now);
        let local = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), SERVER.port);
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        let listen = ListenOptions { socket, ..ListenOptions::default() };
        host.stack.listen(local, listen).expect("the port is free");
        let keep_alive = options.keep_alive;
        let responder = match options.bulk_bytes {
            None => EngineResponder { head: http::response(keep_alive), body: None, keep_alive },
            Some(len) => {
                let source = PreloadedSource::new(vec![b'x'; len as usize]);
                let body = Some((host.stack.add_source(Box::new(source)), len));
                EngineResponder { head: http::head(len, keep_alive), body, keep_alive }
            }
        };
        Self { host, responder }
    }

    /// Returns segments received and sent per established connection.
    pub fn packets_each(&self) -> [f64; 2] {
        let stats = self.host.stack.tcp_stats();
        [stats.segments_in, stats.segments_out].map(|n| n as f64 / stats.passive_opens.max(1) as f64)
    }

    /// Returns the resources in use.
    pub fn usage(&self) -> Usage {
        self.host.stack.usage()
    }
}

impl Application for EngineResponder {
    #[inline]
    fn on_event(&mut self, stack: &mut Stack, event: Event, burst: &RxBurst<'_>) {
        match event {
            Event::Incoming { listener } => while stack.accept(listener).is_some() {},
            Event::Data { conn, data } => {
                let bytes = stack.inline_data(burst, &data);
                let is_request = http::is_request(bytes);
                stack.consume(conn, data, bytes.len(), burst);
                if is_request {
                    self.send_response(stack, conn);
                }
            }
            // Fails only for a stale handle.
            Event::PeerClosed { conn } => _ = stack.close(conn),
            _ => {}
        }
    }
}

impl EngineResponder {
    fn send_response(&self, stack: &mut Stack, conn: Conn) {
        // The client sends its next request after the last response, so the send buffer is empty.
        let sent = stack.send(conn, &self.head);
        debug_assert_eq!(sent, Ok(self.head.len()));
        if let Some((source, len)) = self.body {
            let sent = stack.send_source(conn, source, 0, len);
            debug_assert_eq!(sent, Ok(()));
        }
        if !self.keep_alive {
            _ = stack.close(conn);
        }
    }
}

impl Server for EngineServer {
    fn turn(&mut self, now: Instant) -> usize {
        self.host.turn(now, &mut self.responder)
    }

    fn facts(&self) -> Vec<(&'static str, u64)> {
        let stats = self.host.stack.tcp_stats();
        vec![
            ("time_wait", self.usage().time_wait as u64),
            ("time_wait_overflows", stats.time_wait_overflows),
            ("retransmitted", stats.retransmitted),
            ("resets_sent", stats.resets_out),
            ("cookies_sent", stats.cookies_sent),
        ]
    }
}
