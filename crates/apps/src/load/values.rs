//! Options of `ginnel load redis` and `ginnel load memcached`, which request one value that each connection
//! stores first.

use super::options::{CommonOptions, ConnectionOptions, Job, LoadOptions};
use super::plan::Closer;
use super::response::Protocol;
use super::urls::{Requests, UrlScheme};
use crate::resp;
use core::net::SocketAddr;
use ginnel::Error;
use std::net::ToSocketAddrs;

/// Longest key in bytes: memcached's limit.
const KEY_BYTES_MAX: usize = 250;
/// Longest value in bytes: a little less than memcached's default limit.
const VALUE_BYTES_MAX: u32 = 1_000_000;

/// Options that both protocols have.
#[derive(Clone, Debug, clap::Args)]
pub struct Values {
    /// Key of the value.
    #[arg(long, value_name = "KEY", default_value = "ginnel", value_parser = parse_key)]
    pub key: String,

    /// Size of the value in bytes. Each connection stores the value before its first request; these requests
    /// are not counted.
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u32).range(0..=i64::from(VALUE_BYTES_MAX)))]
    pub size: u32,

    /// Do not store the value; request an existing one.
    #[arg(long, conflicts_with = "size")]
    pub no_store: bool,

    /// Requests in flight on each connection.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub pipeline: u16,

    /// Close each connection after this many requests and open a new one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub per_connection: Option<u32>,

    /// Options that do not depend on the protocol.
    #[command(flatten)]
    pub common: CommonOptions,
}

/// Options of `ginnel load redis`.
#[derive(Clone, Debug, clap::Args)]
pub struct RedisOptions {
    /// URL or address of the server, as in redis://10.0.0.1:6379 or 10.0.0.1.
    #[arg(value_name = "URL", value_parser = |text: &str| UrlScheme::Redis.server(text))]
    pub server: String,

    /// The value to request.
    #[command(flatten)]
    pub values: Values,
}

/// Options of `ginnel load memcached`.
#[derive(Clone, Debug, clap::Args)]
pub struct MemcachedOptions {
    /// URL or address of the server, as in memcached://10.0.0.1:11211 or 10.0.0.1.
    #[arg(value_name = "URL", value_parser = |text: &str| UrlScheme::Memcached.server(text))]
    pub server: String,

    /// The value to request.
    #[command(flatten)]
    pub values: Values,
}

fn parse_key(text: &str) -> Result<String, String> {
    if (1..=KEY_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(text.to_owned());
    }
    Err(format!("must have 1 to {KEY_BYTES_MAX} ASCII characters without spaces"))
}

/// Resolves a server's name and returns its first address.
fn resolve(server: &str, port: u16) -> Result<SocketAddr, Error> {
    let failed = |problem: String| Error::application(format!("{server}: {problem}"));
    let bare = server.strip_prefix('[').and_then(|s| s.strip_suffix(']')).unwrap_or(server);
    if let Ok(address) = bare.parse() {
        return Ok(SocketAddr::new(address, port));
    }
    let found =
        if server.contains(':') { server.to_socket_addrs() } else { (server, port).to_socket_addrs() };
    found.map_err(|e| failed(e.to_string()))?.next().ok_or_else(|| failed("no address".to_owned()))
}

impl Values {
    fn job(&self, protocol: Protocol, server: &str, port: u16) -> Result<Job, Error> {
        let (key, value) = (&self.key, "x".repeat(self.size as usize));
        let (get, set) = match protocol {
            Protocol::Redis => {
                let command = |words: &[&str]| {
                    let mut bytes = Vec::new();
                    resp::encode_command(&mut bytes, &words.iter().map(|w| w.as_bytes()).collect::<Vec<_>>());
                    bytes
                };
                (command(&["GET", key]), command(&["SET", key, &value]))
            }
            _ => (
                format!("get {key}\r\n").into_bytes(),
                format!("set {key} 0 0 {}\r\n{value}\r\n", value.len()).into_bytes(),
            ),
        };
        let opening = (!self.no_store).then_some(&set[..]);
        let requests = Requests::of_values(protocol, &get, opening);
        let connections = ConnectionOptions {
            requests: self.per_connection.unwrap_or(u32::MAX),
            pipeline: self.pipeline,
            closer: Closer::Client,
        };
        self.common.job(requests, connections, server, || resolve(server, port))
    }
}

/// Redis' port.
const REDIS_PORT: u16 = 6379;
/// memcached's port.
const MEMCACHED_PORT: u16 = 11211;

impl LoadOptions for RedisOptions {
    fn common(&self) -> &CommonOptions {
        &self.values.common
    }

    fn common_mut(&mut self) -> &mut CommonOptions {
        &mut self.values.common
    }

    fn server(&self) -> Result<SocketAddr, Error> {
        resolve(&self.server, REDIS_PORT)
    }

    fn job(&self) -> Result<Job, Error> {
        self.values.job(Protocol::Redis, &self.server, REDIS_PORT)
    }
}

impl LoadOptions for MemcachedOptions {
    fn common(&self) -> &CommonOptions {
        &self.values.common
    }

    fn common_mut(&mut self) -> &mut CommonOptions {
        &mut self.values.common
    }

    fn server(&self) -> Result<SocketAddr, Error> {
        resolve(&self.server, MEMCACHED_PORT)
    }

    fn job(&self) -> Result<Job, Error> {
        self.values.job(Protocol::Memcached, &self.server, MEMCACHED_PORT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct ValueCommand<T: clap::Args> {
        #[command(flatten)]
        options: T,
    }

    fn parse<T: clap::Args>(line: &str) -> Result<T, String> {
        let words = ["load"].into_iter().chain(line.split_whitespace());
        ValueCommand::try_parse_from(words).map(|c| c.options).map_err(|e| e.to_string())
    }

    #[test]
    fn requests_follow_the_servers_protocols() {
        let redis = parse::<RedisOptions>("redis://10.0.0.1/ --key ab --size 3").unwrap().job().unwrap();
        assert_eq!(redis.targets, ["10.0.0.1:6379".parse().unwrap()]);
        assert_eq!(redis.requests.get(0), b"*2\r\n$3\r\nGET\r\n$2\r\nab\r\n");
        let opening = redis.requests.opening().unwrap();
        assert_eq!(redis.requests.get(opening), b"*3\r\n$3\r\nSET\r\n$2\r\nab\r\n$3\r\nxxx\r\n");
        let memcached = parse::<MemcachedOptions>("[fd00::1]:99 --key ab --size 3").unwrap().job().unwrap();
        assert_eq!(memcached.targets, ["[fd00::1]:99".parse().unwrap()]);
        assert_eq!(memcached.requests.get(0), b"get ab\r\n");
        let opening = memcached.requests.opening().unwrap();
        assert_eq!(memcached.requests.get(opening), b"set ab 0 0 3\r\nxxx\r\n");
        let job = parse::<RedisOptions>("10.0.0.1 --no-store --pipeline 4").unwrap().job().unwrap();
        assert_eq!((job.requests.opening(), job.plan.pipeline, job.plan.is_short()), (None, 4, false));
    }

    #[test]
    fn invalid_options_are_refused() {
        for line in [
            "",
            "a --key=",
            "a --size -1",
            "a --size 1000001",
            "a --no-store --size 5",
            "a --per-connection 1",
        ] {
            assert!(parse::<RedisOptions>(line).is_err(), "{line}");
        }
        assert!(parse::<RedisOptions>(&format!("a --key {}", "k".repeat(251))).is_err());
        assert!(parse::<MemcachedOptions>("10.0.0.1:x").unwrap().job().is_err());
    }
}
