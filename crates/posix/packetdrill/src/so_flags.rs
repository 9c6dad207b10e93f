//! The flags of `--so_flags`: `KEY=VALUE`, separated by commas or blanks.

use crate::instance::defaults;
use crate::sysctls::{self, StackSettings};
use core::net::IpAddr;
use ginnel::config::{Prefix, TcpConfig};
use std::path::PathBuf;

/// The stack's default addresses, each with a network in which every address belongs to the stack, too:
/// packetdrill chooses the stack's address in it at random or by its own options.
const NETWORKS: [(&str, &str); 2] =
    [("192.168.0.2", "192.168.0.0/16"), ("fd3d:fa7b:d17d::2", "fd3d:fa7b:d17d::/48")];
const MTU: u32 = 1500;
/// Initial size of send buffers in bytes (`tcp_wmem`).
const SEND_BUFFER_FIRST: u32 = 16_384;
/// Time in milliseconds that is added to the reordering timer of RFC 8985. The kernel's timer adds 2 ms and
/// then waits for the tick after the next one: with 250 ticks per second this is up to 10 ms in total, with
/// 100 up to 22 ms. Public scripts expect about 15 ms.
const SLACK_MS: u32 = 12;

/// Settings of a session's stacks.
#[derive(Debug)]
pub struct SoFlags {
    /// Addresses of the stack.
    pub local: Vec<IpAddr>,
    /// Networks in which every address belongs to the stack, too.
    pub networks: Vec<Prefix>,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// Directory from which the kernel's settings are read.
    proc_dir: Option<PathBuf>,
    /// Names and values that override the kernel's settings.
    overrides: Vec<(String, String)>,
    /// Time in milliseconds that is added to the reordering timer.
    slack_ms: u32,
}

impl SoFlags {
    /// Parses the flags, and relevant options of packetdrill's own command line.
    ///
    /// # Errors
    /// Describes the first error.
    pub fn parse(text: &str) -> Result<Self, String> {
        let arguments = std::fs::read("/proc/self/cmdline").unwrap_or_default();
        let arguments: Vec<_> = arguments.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        Self::parse_with_arguments(text, arguments.iter().map(AsRef::as_ref))
    }

    fn parse_with_arguments<'a>(
        text: &str,
        arguments: impl Iterator<Item = &'a str>,
    ) -> Result<Self, String> {
        let (argument_local, argument_mtu) = options_from_arguments(arguments);
        let mut local = Vec::new();
        let mut mtu = argument_mtu.unwrap_or(MTU);
        let mut proc_dir = Some(PathBuf::from(sysctls::PROC_DIR));
        let mut overrides = Vec::new();
        let mut slack_ms = SLACK_MS;
        let separators = |c: char| c == ',' || c.is_whitespace();
        for word in text.split(separators).filter(|word| !word.is_empty()) {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("{word:?} is not KEY=VALUE"))?;
            let invalid = |expected: &str| format!("{key}: {value:?} is not {expected}");
            match key {
                "local" => local.push(value.parse().map_err(|_| invalid("an IP address"))?),
                "mtu" => mtu = parse_mtu(value).ok_or_else(|| invalid("from 68 to 65521"))?,
                "slack" => {
                    let slack = value.parse().ok().filter(|ms| *ms <= 200);
                    slack_ms = slack.ok_or_else(|| invalid("from 0 to 200"))?;
                }
                "proc" => proc_dir = (value != "off").then(|| PathBuf::from(value)),
                _ => match key.strip_prefix("net.ipv4.") {
                    Some(name) => overrides.push((name.to_owned(), value.replace(':', " "))),
                    None => {
                        return Err(format!("{key:?} is not one of local, mtu, proc, slack and net.ipv4.…"));
                    }
                },
            }
        }
        if local.is_empty() {
            local.extend(argument_local);
        }
        let mut networks = Vec::new();
        if local.is_empty() {
            // Links of IPv6 have an MTU of at least 1280 (RFC 8200 §5).
            let fits = |(address, _): &&(&str, &str)| mtu >= 1280 || !address.contains(':');
            for (address, network) in NETWORKS.iter().filter(fits) {
                local.push(address.parse().expect("an address"));
                networks.push(network.parse().expect("a network"));
            }
        }
        let flags = Self { local, networks, mtu, proc_dir, overrides, slack_ms };
        flags.tcp_settings().map(|_| flags)
    }

    /// Returns the TCP settings: those of the kernel at this moment, overridden by the flags. Also returns
    /// the kernel's settings that the stack does not support, with the reason.
    ///
    /// # Errors
    /// Describes flags that the stack does not support.
    pub fn tcp_settings(&self) -> Result<(StackSettings, Vec<String>), String> {
        let tcp = TcpConfig { reordering_slack_ms: self.slack_ms, ..defaults() };
        let mut settings = StackSettings { tcp, send_buffer_first: SEND_BUFFER_FIRST };
        let unsupported = self
            .proc_dir
            .as_ref()
            .map_or_else(Vec::new, |proc_dir| sysctls::read_all(proc_dir, &mut settings));
        for (name, value) in &self.overrides {
            let known = sysctls::set_sysctl(&mut settings, name, value);
            let known = known.map_err(|problem| format!("net.ipv4.{name}: {problem}"))?;
            if !known {
                return Err(format!("net.ipv4.{name}: the stack has no corresponding setting"));
            }
        }
        settings.tcp.validate().map_err(|error| error.to_string())?;
        Ok((settings, unsupported))
    }
}

fn parse_mtu(text: &str) -> Option<u32> {
    text.parse().ok().filter(|mtu| (68..=65_521).contains(mtu))
}

/// Returns `--local_ip` and `--mtu` of packetdrill's command line, which the interface does not pass on. The
/// last value of each counts; invalid values are ignored, because packetdrill rejects them itself.
fn options_from_arguments<'a>(arguments: impl Iterator<Item = &'a str>) -> (Option<IpAddr>, Option<u32>) {
    let (mut local, mut mtu) = (None, None);
    let mut arguments = arguments.skip(1);
    while let Some(argument) = arguments.next() {
        let Some(option) = argument.strip_prefix("--") else { continue };
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        if !["local_ip", "mtu"].contains(&name) {
            continue;
        }
        let Some(value) = value.or_else(|| arguments.next()) else { break };
        match name {
            "local_ip" => local = value.parse().ok().or(local),
            _ => mtu = parse_mtu(value).or(mtu),
        }
    }
    (local, mtu)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SoFlags, String> {
        SoFlags::parse_with_arguments(text, core::iter::empty())
    }

    #[test]
    fn default_flags_match_packetdrill() {
        let flags = parse("").unwrap();
        let [v4, v6] = &flags.networks[..] else { panic!("{flags:?}") };
        assert_eq!((v4.to_string(), v6.to_string()), ("192.168.0.0/16".into(), "fd3d:fa7b:d17d::/48".into()));
        assert_eq!((flags.local.len(), flags.mtu), (2, 1500));
        assert_eq!(parse("mtu=600").unwrap().networks, [*v4]);
    }

    #[test]
    fn arguments_of_packetdrill_override_defaults() {
        let line = |text: &'static str| options_from_arguments(text.split(' '));
        let address: IpAddr = "10.0.0.9".parse().unwrap();
        assert_eq!(line("packetdrill --local_ip=10.0.0.9 --mtu 1520 a.pkt"), (Some(address), Some(1520)));
        assert_eq!(line("--local_ip=10.0.0.9 a.pkt --mtu=1 --mtu"), (None, None));
        let flags = SoFlags::parse_with_arguments(
            "",
            ["packetdrill", "--local_ip=10.0.0.9", "--mtu=1520"].into_iter(),
        )
        .unwrap();
        assert_eq!((&flags.local[..], flags.networks.len(), flags.mtu), (&[address][..], 0, 1520));
        let flags =
            SoFlags::parse_with_arguments("local=10.1.1.1 mtu=600", ["x", "--local_ip=10.0.0.9"].into_iter())
                .unwrap();
        assert_eq!((flags.local, flags.mtu), (vec!["10.1.1.1".parse().unwrap()], 600));
    }

    #[test]
    fn flags_override_sysctls() {
        let flags =
            parse("proc=off local=10.1.1.1,mtu=9000, net.ipv4.tcp_sack=0 net.ipv4.tcp_rmem=4096:8192:70000");
        let flags = flags.unwrap();
        let (StackSettings { tcp, .. }, unsupported) = flags.tcp_settings().unwrap();
        assert_eq!((flags.local, flags.mtu), (vec!["10.1.1.1".parse().unwrap()], 9000));
        assert_eq!((tcp.sack, tcp.recv_buffer_bytes, unsupported.len()), (false, 70_000, 0));
        assert_eq!((tcp.recv_window_first_bytes, tcp.reordering_slack_ms), (4096, SLACK_MS));
        assert_eq!(
            parse("proc=off,slack=200").unwrap().tcp_settings().unwrap().0.tcp.reordering_slack_ms,
            200
        );
    }

    #[test]
    fn errors_name_the_invalid_flag() {
        for (text, part) in [
            ("local", "KEY=VALUE"),
            ("local=10.0.0", "not an IP address"),
            ("mtu=10", "from 68 to 65521"),
            ("slack=201", "from 0 to 200"),
            ("colour=red", "\"colour\" is not one of"),
            ("net.ipv4.tcp_sack=yes", "\"yes\" is not a number"),
            ("net.ipv4.tcp_nothing=1", "no corresponding setting"),
            ("net.ipv4.tcp_syn_retries=0", "tcp.syn_retries"),
        ] {
            let problem = parse(text).unwrap_err();
            assert!(problem.contains(part), "{text}: {problem}");
        }
    }
}
