//! Options of `ginnel load replay`.

use super::recording::Recording;
use super::{ReplayJob, ReplayPlan};
use crate::load::options::{CommonOptions, StackKind, parse_interval};
use crate::load::sources::SourceRange;
use crate::units::{parse_bytes, parse_duration};
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel::Error;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::sync::Arc;

/// Options of `ginnel load replay`.
#[derive(Clone, Debug, clap::Args)]
pub struct ReplayOptions {
    /// Capture, pcap or pcapng; "-" is standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Server, as in 10.0.0.1, 10.0.0.1:8080 or web.example:80. Without a port, each connection uses that of
    /// the recorded server. May be given several times; connections use the servers in turn.
    #[arg(long, value_name = "SERVER", required = true)]
    pub to: Vec<String>,

    /// Replay only connections to this port of the recorded servers. May be given several times.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Vec<u16>,

    /// Factor by which time passes faster than in the capture: 2 sends in half the time.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_speed)]
    pub speed: f64,

    /// Replay the capture this many times, one after the other.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub repeat: u32,

    /// Open this many connections for each one of the capture.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub copies: u32,

    /// With --copies: distribute the starts of the copies evenly over this time.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration)]
    pub spread: Duration,

    /// Longest wait for a connection, and for the rest of the answers after the recorded end of a connection.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub timeout: Duration,

    /// Most bytes of clients that are read from the capture. All of them are in memory.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_bytes)]
    pub bytes_max: u64,

    /// TCP implementation of the generator; "load http --help" describes the three.
    #[arg(long, value_name = "STACK", value_enum, default_value_t)]
    pub stack: StackKind,

    /// Source addresses, as in "load http --source". May be given several times; connections use them in
    /// turn.
    #[arg(long, visible_alias = "ips", value_name = "ADDRESSES")]
    pub source: Vec<SourceRange>,

    /// Number of generator threads. With --stack ginnel they are shards of one stack, with --stack light each
    /// has one of the links of --config.
    #[arg(long, visible_alias = "threads", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: u32,

    /// Print progress at this interval.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_interval)]
    pub report_interval: Duration,

    /// Print the report as JSON instead of a table.
    #[arg(long)]
    pub json: bool,

    /// Draw the distributions of latencies and of the generator's send-time error into this file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Do not print progress on standard error.
    #[arg(short, long)]
    pub quiet: bool,
}

fn parse_speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(speed) if (1e-3..=1e6).contains(&speed) => Ok(speed),
        _ => Err("must be a number from 0.001 to 1000000".to_owned()),
    }
}

/// A server to which connections are replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayTarget {
    /// Address.
    pub ip: IpAddr,
    /// Port; `None` for that of the recorded server.
    pub port: Option<u16>,
}

impl ReplayTarget {
    /// Resolves a server.
    fn resolve(server: &str) -> Result<Self, Error> {
        let bare = server.strip_prefix('[').and_then(|s| s.strip_suffix(']')).unwrap_or(server);
        if let Ok(ip) = bare.parse() {
            return Ok(Self { ip, port: None });
        }
        let failed = |problem: String| Error::application(format!("--to {server}: {problem}"));
        let has_port = server.contains(':');
        let found = if has_port { server.to_socket_addrs() } else { (server, 0).to_socket_addrs() };
        let address = found.map_err(|e| failed(e.to_string()))?.next();
        let address = address.ok_or_else(|| failed("no address".to_owned()))?;
        if has_port && address.port() == 0 {
            return Err(failed("\"0\" is not a port".to_owned()));
        }
        Ok(Self { ip: address.ip(), port: has_port.then_some(address.port()) })
    }

    /// Returns where to connect if the recorded server had this port.
    #[must_use]
    pub fn address(self, recorded_port: u16) -> SocketAddr {
        SocketAddr::new(self.ip, self.port.unwrap_or(recorded_port))
    }
}

impl ReplayOptions {
    /// Checks what clap cannot check, and creates the job.
    ///
    /// # Errors
    /// There is nothing to replay, or a server's name cannot be resolved.
    pub fn job(&self, capture: String, recording: Recording) -> Result<ReplayJob, Error> {
        let account = &recording.account;
        if recording.connections.is_empty() {
            return Err(Error::application(format!(
                "{capture} has no connection that could be replayed: {} packets, {} connections without their \
                 beginning, {} with missing bytes of their clients",
                account.packets, account.left_out_midstream, account.left_out_incomplete
            )));
        }
        let servers = self.to.iter().map(|server| ReplayTarget::resolve(server));
        let servers = servers.collect::<Result<Vec<_>, _>>()?;
        let mut ports: Vec<u16> = recording.connections.iter().map(|c| c.server_port).collect();
        ports.sort_unstable();
        ports.dedup();
        let mut targets: Vec<SocketAddr> =
            servers.iter().flat_map(|server| ports.iter().map(|port| server.address(*port))).collect();
        targets.sort_unstable();
        targets.dedup();
        // At least this many are open at a time if the server is as fast as the recorded one.
        let at_a_time = if self.spread.is_zero() { self.copies } else { 1 };
        let open_max = recording.open_max().saturating_mul(at_a_time.into());
        let plan = ReplayPlan {
            recording,
            speed: self.speed,
            repeat: self.repeat,
            copies: self.copies,
            spread: self.spread,
            timeout: self.timeout,
        };
        Ok(ReplayJob {
            common: self.common(u32::try_from(open_max).unwrap_or(u32::MAX)),
            plan: Arc::new(plan),
            capture,
            servers,
            targets,
            report_interval: self.report_interval,
        })
    }

    /// Returns the options that all kinds of load have.
    fn common(&self, connections: u32) -> CommonOptions {
        CommonOptions {
            stack: self.stack,
            dest: Vec::new(),
            source: self.source.clone(),
            // Every worker needs a connection.
            connections: connections.max(self.workers),
            rate: None,
            poisson: false,
            duration: None,
            requests: None,
            setup: Duration::ZERO,
            warmup: Duration::ZERO,
            timeout: self.timeout,
            give_up: None,
            workers: if self.stack == StackKind::Ginnel { 1 } else { self.workers },
            shards: (self.stack == StackKind::Ginnel && self.workers > 1).then_some(self.workers),
            seed: 1,
            json: self.json,
            quiet: self.quiet,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_an_address_and_perhaps_a_port() {
        let resolve = |server| ReplayTarget::resolve(server).map_err(|e| e.to_string());
        let target = |ip: &str, port| Ok(ReplayTarget { ip: ip.parse().unwrap(), port });
        assert_eq!(resolve("10.0.0.1"), target("10.0.0.1", None));
        assert_eq!(resolve("[fd00::1]"), target("fd00::1", None));
        assert_eq!(resolve("10.0.0.1:81"), target("10.0.0.1", Some(81)));
        assert_eq!(resolve("[fd00::1]:81"), target("fd00::1", Some(81)));
        for zero in ["10.0.0.1:0", "[fd00::1]:0"] {
            assert!(resolve(zero).unwrap_err().ends_with("\"0\" is not a port"));
        }
    }
}
