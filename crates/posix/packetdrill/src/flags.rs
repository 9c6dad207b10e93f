//! What `--so_flags` says: `KEY=VALUE`, separated by commas or blanks.

use crate::sysctls;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ginnel::config::TcpConfig;
use std::path::PathBuf;

/// What `packetdrill` uses if it is told nothing.
const LOCAL_V4: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 1);
const LOCAL_V6: Ipv6Addr = Ipv6Addr::new(0xfd3d, 0x0a0b, 0x17d6, 0x888, 0, 0, 0, 1);
const MTU: u32 = 1500;

/// Settings of an instance.
#[derive(Debug)]
pub struct Flags {
    /// The stack's addresses.
    pub local: Vec<IpAddr>,
    /// Largest packet in bytes.
    pub mtu: u32,
    pub tcp: TcpConfig,
    /// Settings of the kernel's that the stack does not have, with the reason.
    pub refused: Vec<String>,
}

impl Flags {
    /// Reads what was given, and what the kernel is set to.
    ///
    /// # Errors
    /// The first that is wrong, and how.
    pub fn parse(text: &str, defaults: TcpConfig) -> Result<Self, String> {
        let mut local = Vec::new();
        let mut mtu = MTU;
        let mut folder = Some(PathBuf::from(sysctls::PROC));
        let mut own = Vec::new();
        let separators = |c: char| c == ',' || c.is_whitespace();
        for word in text.split(separators).filter(|word| !word.is_empty()) {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("{word:?} is not KEY=VALUE"))?;
            let wrong = |what: &str| format!("{key}: {value:?} is not {what}");
            match key {
                "local" => local.push(value.parse().map_err(|_| wrong("an IP address"))?),
                "mtu" => {
                    let fits = |mtu: &u32| (68..=65_521).contains(mtu);
                    mtu = value.parse().ok().filter(fits).ok_or_else(|| wrong("from 68 to 65521"))?;
                }
                "proc" => folder = (value != "off").then(|| PathBuf::from(value)),
                _ => match key.strip_prefix("net.ipv4.") {
                    Some(name) => own.push((name, value.replace(':', " "))),
                    None => return Err(format!("{key:?} is none of local, mtu, proc and net.ipv4.…")),
                },
            }
        }
        if local.is_empty() {
            local.push(LOCAL_V4.into());
            // IPv6 has no smaller links (RFC 8200 §5).
            if mtu >= 1280 {
                local.push(LOCAL_V6.into());
            }
        }
        let mut tcp = defaults;
        let refused = folder.map_or_else(Vec::new, |folder| sysctls::read(&folder, &mut tcp));
        for (name, value) in own {
            let known = sysctls::set(&mut tcp, name, &value);
            let known = known.map_err(|problem| format!("net.ipv4.{name}: {problem}"))?;
            if !known {
                return Err(format!("net.ipv4.{name}: the stack has nothing that corresponds to it"));
            }
        }
        tcp.validate().map_err(|error| error.to_string())?;
        Ok(Self { local, mtu, tcp, refused })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Flags, String> {
        Flags::parse(text, TcpConfig::default())
    }

    #[test]
    fn without_flags_it_is_what_packetdrill_expects() {
        let flags = parse("").unwrap();
        assert_eq!(flags.local, [IpAddr::V4(LOCAL_V4), IpAddr::V6(LOCAL_V6)]);
        assert_eq!(flags.mtu, 1500);
        assert_eq!(parse("mtu=600").unwrap().local, [IpAddr::V4(LOCAL_V4)]);
    }

    #[test]
    fn what_is_given_goes_before_what_the_kernel_is_set_to() {
        let flags =
            parse("proc=off local=10.1.1.1,mtu=9000, net.ipv4.tcp_sack=0 net.ipv4.tcp_rmem=4096:8192:70000");
        let flags = flags.unwrap();
        assert_eq!((flags.local, flags.mtu), (vec!["10.1.1.1".parse().unwrap()], 9000));
        assert_eq!((flags.tcp.sack, flags.tcp.recv_buffer_bytes), (false, 70_000));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("local", "KEY=VALUE"),
            ("local=10.0.0", "not an IP address"),
            ("mtu=10", "from 68 to 65521"),
            ("colour=red", "\"colour\" is none of"),
            ("net.ipv4.tcp_sack=yes", "\"yes\" is not a number"),
            ("net.ipv4.tcp_nothing=1", "nothing that corresponds"),
            ("net.ipv4.tcp_syn_retries=0", "tcp.syn_retries"),
        ] {
            let problem = parse(text).unwrap_err();
            assert!(problem.contains(part), "{text}: {problem}");
        }
    }
}
