//! Filters of `ss`: conditions that must all be met.

use super::socket::SocketLine;
use core::net::{IpAddr, SocketAddr};

/// A filter.
#[derive(Debug, Default)]
pub struct Filter {
    /// States to show; empty for all.
    states: Vec<&'static str>,
    /// Each condition, and whether it must hold; false after `not`.
    conditions: Vec<(FilterCondition, bool)>,
}

#[derive(Debug, PartialEq)]
enum FilterCondition {
    Port(Side, Comparison, u16),
    Address(Side, AddressPattern),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    Local,
    Peer,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Comparison {
    Equal,
    NotEqual,
    Below,
    Above,
    AtMost,
    AtLeast,
}

#[derive(Debug, PartialEq)]
struct AddressPattern {
    address: Option<IpAddr>,
    /// Prefix length.
    bits: u8,
    port: Option<u16>,
}

/// Names of states in filters, and in the column State.
const STATES: &[(&str, &str)] = &[
    ("established", "ESTAB"),
    ("syn-sent", "SYN-SENT"),
    ("syn-recv", "SYN-RECV"),
    ("fin-wait-1", "FIN-WAIT-1"),
    ("fin-wait-2", "FIN-WAIT-2"),
    ("time-wait", "TIME-WAIT"),
    ("closed", "UNCONN"),
    ("close-wait", "CLOSE-WAIT"),
    ("last-ack", "LAST-ACK"),
    ("listening", "LISTEN"),
    ("listen", "LISTEN"),
    ("closing", "CLOSING"),
];

/// Returns true if a word begins a filter, so that it cannot be the name of a stack.
pub fn is_keyword(word: &str) -> bool {
    ["state", "exclude", "sport", "dport", "src", "dst", "not", "and", "or", "("].contains(&word)
}

/// Returns the states that a name stands for: one state, or a group of states.
fn states(name: &str) -> Result<Vec<&'static str>, String> {
    let all = || STATES.iter().map(|(_, shown)| *shown);
    let but = |excluded: &[&str]| all().filter(|state| !excluded.contains(state)).collect();
    Ok(match name {
        "all" => all().collect(),
        "connected" => but(&["LISTEN", "UNCONN"]),
        "synchronized" => but(&["LISTEN", "UNCONN", "SYN-SENT"]),
        "bucket" => vec!["TIME-WAIT", "SYN-RECV"],
        "big" => but(&["TIME-WAIT", "SYN-RECV"]),
        _ => match STATES.iter().find(|(known, _)| *known == name) {
            Some((_, shown)) => vec![shown],
            None => return Err(format!("\"{name}\" is not a state")),
        },
    })
}

impl Filter {
    /// Parses the words of the command line.
    pub fn parse(words: &[String]) -> Result<Self, String> {
        let mut filter = Self::default();
        let mut excluded: Vec<&str> = Vec::new();
        // A condition may be written without spaces ("sport=:80"), and several words may be one argument.
        let joined = words.join(" ");
        let mut spaced = String::new();
        let mut before = ' ';
        for c in joined.chars() {
            let (sign, was) = ("=!<>".contains(c), "=!<>".contains(before));
            if sign != was && c != ' ' && before != ' ' {
                spaced.push(' ');
            }
            spaced.push(c);
            before = c;
        }
        let mut words = spaced.split_whitespace().peekable();
        let mut holds = true;
        while let Some(word) = words.next() {
            let mut argument = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word {
                "and" | "&&" => continue,
                "not" => {
                    holds = !holds;
                    continue;
                }
                "state" | "exclude" if holds == (word == "state") => {
                    filter.states.extend(states(argument()?)?);
                }
                "state" | "exclude" => excluded.extend(states(argument()?)?),
                "sport" | "dport" => {
                    let end = if word == "sport" { Side::Local } else { Side::Peer };
                    let comparison = comparison(argument()?)?;
                    let port = argument()?;
                    let number = port.trim_start_matches(':').parse();
                    let number =
                        number.map_err(|_| format!("{word}: \"{port}\" is not a port; write it as :80"))?;
                    filter.conditions.push((FilterCondition::Port(end, comparison, number), holds));
                }
                "src" | "dst" => {
                    let end = if word == "src" { Side::Local } else { Side::Peer };
                    let mut text = argument()?;
                    if matches!(text, "=" | "==" | "eq") {
                        text = argument()?;
                    }
                    let network = AddressPattern::parse(text).ok_or_else(|| {
                        format!("{word}: \"{text}\" is not an address; write it as 10.0.0.1, 10.0.0.0/8, 10.0.0.1:80, [fd00::1]:80 or :80")
                    })?;
                    filter.conditions.push((FilterCondition::Address(end, network), holds));
                }
                _ => {
                    return Err(format!(
                        "\"{word}\": this filter knows state, exclude, sport, dport, src, dst, not and and"
                    ));
                }
            }
            holds = true;
        }
        if !excluded.is_empty() {
            if filter.states.is_empty() {
                filter.states = states("all")?;
            }
            filter.states.retain(|state| !excluded.contains(state));
        }
        Ok(filter)
    }

    /// Returns true if the filter selects states.
    pub fn has_states(&self) -> bool {
        !self.states.is_empty()
    }

    /// Returns true if a socket meets all conditions.
    pub fn matches(&self, socket: &SocketLine<'_>) -> bool {
        let state = self.states.is_empty() || self.states.contains(&socket.state);
        state && self.conditions.iter().all(|(condition, holds)| condition.is_met(socket) == *holds)
    }
}

fn comparison(word: &str) -> Result<Comparison, String> {
    Ok(match word {
        "=" | "==" | "eq" => Comparison::Equal,
        "!=" | "ne" | "neq" => Comparison::NotEqual,
        "<" | "lt" => Comparison::Below,
        ">" | "gt" => Comparison::Above,
        "<=" | "le" | "leq" => Comparison::AtMost,
        ">=" | "ge" | "geq" => Comparison::AtLeast,
        _ => return Err(format!("\"{word}\" is not a comparison: use = != < > <= or >=")),
    })
}

impl FilterCondition {
    fn is_met(&self, socket: &SocketLine<'_>) -> bool {
        let at = |end: &Side| match end {
            Side::Local => socket.local,
            Side::Peer => socket.peer,
        };
        match self {
            Self::Port(end, comparison, wanted) => {
                let port = at(end).port();
                match comparison {
                    Comparison::Equal => port == *wanted,
                    Comparison::NotEqual => port != *wanted,
                    Comparison::Below => port < *wanted,
                    Comparison::Above => port > *wanted,
                    Comparison::AtMost => port <= *wanted,
                    Comparison::AtLeast => port >= *wanted,
                }
            }
            Self::Address(end, network) => network.contains(at(end)),
        }
    }
}

impl AddressPattern {
    fn parse(text: &str) -> Option<Self> {
        if let Some(port) = text.strip_prefix(':').and_then(|port| port.parse().ok()) {
            return Some(Self { address: None, bits: 0, port: Some(port) });
        }
        if let Ok(both) = text.parse::<SocketAddr>() {
            let bits = if both.is_ipv4() { 32 } else { 128 };
            return Some(Self { address: Some(both.ip()), bits, port: Some(both.port()) });
        }
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().ok()?)),
            None => (text, None),
        };
        let address: IpAddr = address.trim_start_matches('[').trim_end_matches(']').parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(most);
        (bits <= most).then_some(Self { address: Some(address), bits, port: None })
    }

    fn contains(&self, end: SocketAddr) -> bool {
        let same = |a: u128, b: u128, width: u32| {
            // A shift by the full width means prefix length 0, which contains every address.
            (a ^ b).checked_shr(width - u32::from(self.bits)).is_none_or(|differs| differs == 0)
        };
        let inside = match (self.address, end.ip()) {
            (None, _) => true,
            (Some(IpAddr::V4(own)), IpAddr::V4(address)) => {
                same(own.to_bits().into(), address.to_bits().into(), 32)
            }
            (Some(IpAddr::V6(own)), IpAddr::V6(address)) => same(own.to_bits(), address.to_bits(), 128),
            _ => false,
        };
        inside && self.port.is_none_or(|port| port == end.port())
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::Columns;
    use super::{Filter, is_keyword};

    const NAMES: &str = "shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer";
    const LINES: [&str; 5] = [
        "0\ttcp\tLISTEN\t0\t128\t0.0.0.0:80\t0.0.0.0:0",
        "0\ttcp\tESTAB\t0\t0\t10.0.0.1:80\t10.0.0.2:40000",
        "1\ttcp\tTIME-WAIT\t0\t0\t10.0.0.1:80\t192.168.0.9:2000",
        "1\ttcp\tSYN-SENT\t0\t0\t[fd00::1]:5000\t[fd00::2]:443",
        "1\tudp\tUNCONN\t0\t0\t[::]:53\t[::]:0",
    ];

    /// Returns the indices of the lines that pass a filter.
    fn through(filter: &str) -> Vec<usize> {
        let filter = Filter::parse(&[filter.into()]).unwrap();
        let columns = Columns::new(NAMES);
        let matches = |line: &str| filter.matches(&columns.socket(line).unwrap());
        (0..LINES.len()).filter(|&n| matches(LINES[n])).collect()
    }

    #[test]
    fn filters_are_those_of_ss() {
        for (filter, expected) in [
            ("", &[0, 1, 2, 3, 4][..]),
            ("state established", &[1]),
            ("state established state time-wait", &[1, 2]),
            ("state connected", &[1, 2, 3]),
            ("state synchronized", &[1, 2]),
            ("exclude listening exclude closed", &[1, 2, 3]),
            ("not state listening", &[1, 2, 3, 4]),
            ("not exclude listening", &[0]),
            ("sport = :80", &[0, 1, 2]),
            ("sport=:80", &[0, 1, 2]),
            ("sport eq 80 and state established", &[1]),
            ("not sport = :80", &[3, 4]),
            ("sport != :80", &[3, 4]),
            ("dport > :1024", &[1, 2]),
            ("dport>=:2000 dport<:40000", &[2]),
            ("dst 10.0.0.2", &[1]),
            ("dst 10.0.0.0/8", &[1]),
            ("dst = 192.168.0.0/16", &[2]),
            ("dst 0.0.0.0/0", &[0, 1, 2]),
            ("dst ::/0", &[3, 4]),
            ("dst [fd00::2]:443", &[3]),
            ("src fd00::/64", &[3]),
            ("src :53", &[4]),
            ("src 10.0.0.1:80 not dst 10.0.0.2", &[2]),
        ] {
            assert_eq!(through(filter), expected, "{filter}");
        }
    }

    #[test]
    fn invalid_filters_are_named() {
        for (filter, expected) in [
            ("state", "state needs a value"),
            ("state open", "\"open\" is not a state"),
            ("sport near :80", "\"near\" is not a comparison"),
            ("sport = http", "sport: \"http\" is not a port; write it as :80"),
            ("dst nowhere", "dst: \"nowhere\" is not an address"),
            ("dst 10.0.0.0/33", "dst: \"10.0.0.0/33\" is not an address"),
            ("state established or sport = :80", "\"or\": this filter knows"),
        ] {
            let error = Filter::parse(&[filter.into()]).unwrap_err();
            assert!(error.starts_with(expected), "{filter}: {error}");
        }
        assert!(is_keyword("dport") && !is_keyword("httpd-12"));
    }
}
