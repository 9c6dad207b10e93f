//! Options that name the protocol and the ports of the servers.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use ginnel_monitor::rules::{IOT_MESSAGE_BYTES, PortRule, ProtocolName};
use std::path::PathBuf;

/// Options that name the protocol.
#[derive(Clone, Debug, Args)]
pub struct ProtocolOptions {
    /// Protocol of the servers. For others, and for several at a time: --rules.
    #[arg(long, short, value_enum, help_heading = "Protocol")]
    protocol: Option<Protocol>,

    /// Ports of the servers, separated by commas. Default: 80, or 6379 for redis.
    #[arg(long, value_name = "PORTS", value_delimiter = ',', help_heading = "Protocol", value_parser = clap::value_parser!(u16).range(1..), requires = "protocol")]
    port: Vec<u16>,

    /// Length of the messages of iot.
    #[arg(long, value_name = "BYTES", default_value_t = IOT_MESSAGE_BYTES, help_heading = "Protocol", value_parser = clap::value_parser!(u32).range(7..))]
    message_bytes: u32,

    /// Read protocols and ports from a TOML file.
    #[arg(long, value_name = "FILE", help_heading = "Protocol", conflicts_with_all = ["protocol", "port", "message_bytes"])]
    rules: Option<PathBuf>,
}

/// Protocols that need no rules.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Protocol {
    /// Messages of ginnel-iot (QStack)
    Iot,
    /// HTTP/1.1
    Http,
    /// RESP
    Redis,
}

impl ProtocolOptions {
    /// Returns whether a protocol is named.
    pub fn is_given(&self) -> bool {
        self.protocol.is_some() || self.rules.is_some()
    }

    /// Returns the rules.
    pub fn rules(&self) -> Result<Vec<PortRule>, Failure> {
        if let Some(path) = &self.rules {
            let failed = |e: String| Failure::usage(format!("{}: {e}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
            // An error of TOML has several lines, with a picture of the place.
            return PortRule::parse_file(&text).map_err(|e| failed(e.lines().collect::<Vec<_>>().join(" ")));
        }
        let (name, port) = match self.protocol {
            Some(Protocol::Iot) => (ProtocolName::Iot, 80),
            Some(Protocol::Http) => (ProtocolName::Http, 80),
            Some(Protocol::Redis) => (ProtocolName::Redis, 6379),
            None => return Err(Failure::usage("--protocol or --rules is missing")),
        };
        let ports = if self.port.is_empty() { vec![port] } else { self.port.clone() };
        Ok(vec![PortRule { message_bytes: self.message_bytes, ..PortRule::new(name, ports) }])
    }
}
