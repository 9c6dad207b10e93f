//! Options of `ginnel iot`.

use super::pipeline::PipelineLimits;
use core::fmt;
use core::net::SocketAddr;
use core::str::FromStr;
use core::time::Duration;
use std::io;
use std::net::ToSocketAddrs;
use std::path::PathBuf;

/// Address of a Redis server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedisAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// An IP address and a port.
    Tcp(SocketAddr),
    /// A name with a port, which is looked up once, at the start.
    Name(String),
}

/// Default port of Redis.
const REDIS_PORT: u16 = 6379;

impl FromStr for RedisAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err("must have a path, as in unix:/run/redis.sock".to_owned());
            }
            return Ok(Self::Unix(path.into()));
        }
        if let Ok(address) = text.parse::<core::net::IpAddr>() {
            return Ok(Self::Tcp(SocketAddr::new(address, REDIS_PORT)));
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Tcp(address));
        }
        let is_name = |name: &str| {
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        };
        match text.rsplit_once(':') {
            Some((name, port)) if is_name(name) && port.parse::<u16>().is_ok() => {
                Ok(Self::Name(text.to_owned()))
            }
            None if is_name(text) => Ok(Self::Name(format!("{text}:{REDIS_PORT}"))),
            _ => Err("must be unix:PATH, HOST or HOST:PORT".to_owned()),
        }
    }
}

impl RedisAddress {
    /// Looks up a name, which may take seconds. Other addresses are returned as they are.
    ///
    /// # Errors
    /// If the name cannot be looked up, or has no address.
    pub fn resolve(&self) -> io::Result<Self> {
        let Self::Name(name) = self else { return Ok(self.clone()) };
        let address = name.to_socket_addrs()?.next();
        address.map(Self::Tcp).ok_or_else(|| io::Error::other("the name has no address"))
    }
}

impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Options of `ginnel iot`. Each is also a key of the table `[iot]` in the configuration file, with `_` in
/// place of `-`.
#[derive(Clone, Debug, clap::Args)]
pub struct IotOptions {
    /// Address and port to listen on. An unspecified address (`0.0.0.0` or `[::]`) stands for all addresses
    /// of the stack. May be given several times.
    #[arg(long, value_name = "ADDRESS:PORT", default_values = ["0.0.0.0:80", "[::]:80"])]
    pub listen: Vec<SocketAddr>,

    /// Length of a message in bytes.
    #[arg(long, value_name = "BYTES", default_value = "200", value_parser = clap::value_parser!(u32).range(8..=65_536))]
    pub message_bytes: u32,

    /// Redis server, as in unix:/run/redis.sock, 127.0.0.1:6379 or a name with a port, which the kernel
    /// reaches. May be given several times: the keys are distributed to all servers. Each application of the
    /// stack (one for each shard, or each worker) has a connection to each server.
    #[arg(long, value_name = "SERVER", default_value = "127.0.0.1:6379", conflicts_with = "start_redis")]
    pub redis: Vec<RedisAddress>,

    /// The servers form a Redis Cluster: --redis names some of them, by address, and the others are found.
    #[arg(long, conflicts_with = "start_redis")]
    pub redis_cluster: bool,

    /// Start this many Redis servers, with Unix sockets in a temporary directory and without persistence, and
    /// end them with this command, even if it is killed.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub start_redis: Option<u32>,

    /// Number of keys. Each connection has one of them, by the peer's address and port.
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..))]
    pub keys: u32,

    /// Commands in flight on each Redis connection; a message has three. Redis executes commands in their
    /// order, so an urgent message waits for those in flight.
    #[arg(long, value_name = "N", default_value = "96", value_parser = clap::value_parser!(u32).range(3..=1_000_000))]
    pub in_flight_max: u32,

    /// Messages that wait for each Redis connection. When as many wait, ordinary ones are dropped first.
    #[arg(long, value_name = "N", default_value = "65536", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pub queue_max: u32,

    /// Share of ordinary messages in percent while urgent ones wait.
    #[arg(long, value_name = "PERCENT", default_value = "10", value_parser = clap::value_parser!(u32).range(0..=50))]
    pub low_share_percent: u32,

    /// Time in milliseconds after which a message fails unless Redis has executed its commands. A request is
    /// then answered with an error. After as long without a reply, the connection to Redis is opened again.
    #[arg(long, value_name = "MILLISECONDS", default_value = "2000", value_parser = clap::value_parser!(u32).range(1..=3_600_000))]
    pub deadline_ms: u32,

    /// Time in milliseconds before the first attempt to connect to Redis again. It doubles with each attempt.
    #[arg(long, value_name = "MILLISECONDS", default_value = "10", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub reconnect_first_ms: u32,

    /// Longest time in milliseconds between attempts to connect to Redis.
    #[arg(long, value_name = "MILLISECONDS", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub reconnect_max_ms: u32,
}

impl IotOptions {
    /// Returns the time after which a message fails.
    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.into())
    }

    /// Returns the limits of a pipeline.
    pub fn pipeline_limits(&self) -> PipelineLimits {
        PipelineLimits {
            waiting_max: self.queue_max as usize,
            in_flight_max: self.in_flight_max,
            low_share_percent: self.low_share_percent,
            reply_timeout: self.deadline(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct IotCommand {
        #[command(flatten)]
        options: IotOptions,
    }

    fn parse(args: &[&str]) -> Result<IotOptions, String> {
        IotCommand::try_parse_from([&["iot"], args].concat()).map(|c| c.options).map_err(|e| e.to_string())
    }

    #[test]
    fn servers_are_unix_sockets_names_or_addresses() {
        for (text, shown) in [
            ("unix:/run/a.sock", "unix:/run/a.sock"),
            ("127.0.0.1", "127.0.0.1:6379"),
            ("127.0.0.1:7000", "127.0.0.1:7000"),
            ("::1", "[::1]:6379"),
            ("[::1]:7000", "[::1]:7000"),
            ("redis.example", "redis.example:6379"),
            ("redis.example:7000", "redis.example:7000"),
        ] {
            assert_eq!(text.parse::<RedisAddress>().map(|address| address.to_string()), Ok(shown.to_owned()));
        }
        for bad in ["", "unix:", "a b", "host:", "host:port", "host:70000", "http://host"] {
            assert!(bad.parse::<RedisAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        assert!(parse(&[]).is_ok());
        for args in [
            ["--message-bytes", "7"],
            ["--keys", "0"],
            ["--in-flight-max", "2"],
            ["--queue-max", "0"],
            ["--low-share-percent", "51"],
            ["--deadline-ms", "0"],
            ["--reconnect-first-ms", "0"],
            ["--start-redis", "65"],
            ["--redis", "unix:"],
        ] {
            let error = parse(&args).unwrap_err();
            assert!(error.contains(args[0]), "{error}");
        }
        assert!(parse(&["--redis", "a", "--start-redis", "1"]).is_err());
    }
}
