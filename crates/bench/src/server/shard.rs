//! A handler on a shard of the runtime, as applications use it.

use super::{ROUTER_IP, SERVER, Server};
use crate::http;
use core::net::{Ipv4Addr, SocketAddr};
use ginnel::config::{Config, DeviceConfig, DeviceKind, LinkConfig, Prefix, RouteConfig};
use ginnel::{Conn, Context, Error, Handler, ListenOptions, Shard, SocketOptions};
use ginnel_stack::device::Device;
use ginnel_stack::tcp::config::TcpConfig;
use ginnel_stack::time::Instant;

/// A shard with its handler.
pub struct ShardServer<H> {
    shard: Shard<H>,
}

impl<H: Handler> ShardServer<H> {
    /// Creates a shard with the server's address on a device.
    ///
    /// # Errors
    /// An error in the configuration.
    pub fn new(device: Device, handler: H, tcp: TcpConfig, now: Instant) -> Result<Self, Error> {
        Self::with_config(device, handler, tcp, now, |_| {})
    }

    /// Creates a shard with a configuration that `change` changes.
    ///
    /// # Errors
    /// An error in the configuration.
    pub fn with_config(
        device: Device,
        handler: H,
        tcp: TcpConfig,
        now: Instant,
        change: impl FnOnce(&mut Config),
    ) -> Result<Self, Error> {
        const NAME: &str = "client";
        let address = Ipv4Addr::from_bits(SERVER.ip).into();
        let route = RouteConfig {
            destination: Prefix::everything(true),
            gateway: Some(Ipv4Addr::from_bits(ROUTER_IP).into()),
            link: NAME.into(),
            metric: 0,
        };
        let mut config = Config {
            tcp,
            devices: vec![DeviceConfig::new(NAME, DeviceKind::Memory)],
            links: vec![LinkConfig::new(NAME, NAME, vec![Prefix { address, len: 24 }])],
            routes: vec![route],
            ..Config::default()
        };
        change(&mut config);
        let builder = Shard::builder(config).handler(handler).device(NAME, device).seed([7; 32]).now(now);
        Ok(Self { shard: builder.build()? })
    }

    /// Returns the application.
    pub fn handler(&self) -> &H {
        self.shard.handler()
    }

    /// Returns the shard, for driving it another way.
    pub fn into_shard(self) -> Shard<H> {
        self.shard
    }
}

impl<H: Handler> Server for ShardServer<H> {
    fn turn(&mut self, now: Instant) -> usize {
        self.shard.poll_once(now).expect("the handler of a bench does not fail").work
    }
}

/// The responder as a handler.
pub struct Responder {
    response: Vec<u8>,
    keep_alive: bool,
}

impl Responder {
    /// Creates a responder with the default response. It then closes the connection, or with `keep_alive`
    /// waits for the next request.
    pub fn new(keep_alive: bool) -> Self {
        Self { response: http::response(keep_alive), keep_alive }
    }
}

impl Handler for Responder {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        let local = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), SERVER.port);
        cx.listen(local, ListenOptions { socket, ..ListenOptions::default() })?;
        Ok(())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if http::is_request(data) {
            // The client sends its next request after the last response, so the send buffer is empty.
            let sent = cx.send(conn, &self.response);
            debug_assert_eq!(sent, Ok(self.response.len()));
            if !self.keep_alive {
                _ = cx.close(conn);
            }
        }
        data.len()
    }
}
