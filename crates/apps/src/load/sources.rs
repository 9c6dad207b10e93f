//! Source addresses. Several addresses allow more connections than one address has ports.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ops::Range;
use core::str::FromStr;

/// Most addresses in all ranges of a run.
pub const SOURCES_MAX: u64 = 1 << 24;

/// A range of consecutive addresses: `10.0.0.2`, `10.0.0.2-10.0.0.9`, `10.0.0.2-9` or `10.1.0.0/16`.
///
/// An IPv4 prefix shorter than /31 excludes its first and last address, which are the network and the
/// broadcast address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRange {
    first: IpAddr,
    count: u64,
}

impl SourceRange {
    /// Returns the number of addresses.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Returns the `n`-th address, counted from 0.
    pub fn nth(&self, n: u64) -> IpAddr {
        debug_assert!(n < self.count);
        match self.first {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits().wrapping_add(n as u32)).into(),
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits().wrapping_add(n.into())).into(),
        }
    }

    /// Creates a range of `count` addresses that begins with `first`.
    ///
    /// # Errors
    /// Fewer than `count` addresses exist from `first` on, or `count` exceeds [`SOURCES_MAX`].
    pub fn consecutive(first: IpAddr, count: u32) -> Result<Self, String> {
        let more = count.saturating_sub(1);
        let last = match first {
            IpAddr::V4(first) => {
                first.to_bits().checked_add(more).map(|bits| Ipv4Addr::from_bits(bits).into())
            }
            IpAddr::V6(first) => {
                first.to_bits().checked_add(more.into()).map(|bits| Ipv6Addr::from_bits(bits).into())
            }
        };
        Self::between(first, last.ok_or_else(|| format!("there are no {count} addresses from {first} on"))?)
    }

    fn between(first: IpAddr, last: IpAddr) -> Result<Self, String> {
        let span = match (first, last) {
            (IpAddr::V4(a), IpAddr::V4(b)) => b.to_bits().checked_sub(a.to_bits()).map(u128::from),
            (IpAddr::V6(a), IpAddr::V6(b)) => b.to_bits().checked_sub(a.to_bits()),
            _ => return Err("mixes IPv4 and IPv6 addresses".to_owned()),
        };
        let span = span.ok_or("ends before it begins")?;
        if span >= u128::from(SOURCES_MAX) {
            return Err(format!("has more than {SOURCES_MAX} addresses"));
        }
        Ok(Self { first, count: span as u64 + 1 })
    }

    fn prefix(address: IpAddr, len: &str) -> Result<Self, String> {
        let len: u32 = len.parse().map_err(|_| format!("\"{len}\" is not a prefix length"))?;
        let (bits, width) = match address {
            IpAddr::V4(a) => (u128::from(a.to_bits()), 32),
            IpAddr::V6(a) => (a.to_bits(), 128),
        };
        if len > width {
            return Err(format!("\"{len}\" is not a prefix length"));
        }
        let host = u128::MAX.checked_shr(128 - (width - len)).unwrap_or(0);
        let (mut first, mut last) = (bits & !host, bits | host);
        if width == 32 && len < 31 {
            (first, last) = (first + 1, last - 1);
        }
        let address = |bits: u128| match width {
            32 => IpAddr::from(Ipv4Addr::from_bits(bits as u32)),
            _ => IpAddr::from(Ipv6Addr::from_bits(bits)),
        };
        Self::between(address(first), address(last))
    }
}

impl FromStr for SourceRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address =
            |text: &str| text.parse::<IpAddr>().map_err(|_| format!("\"{text}\" is not an IP address"));
        if let Some((network, len)) = text.split_once('/') {
            return Self::prefix(address(network)?, len);
        }
        let Some((first, last)) = text.split_once('-') else {
            return Ok(Self { first: address(text)?, count: 1 });
        };
        let first = address(first)?;
        match (first, last.parse::<u8>()) {
            // The short form gives only the last byte.
            (IpAddr::V4(a), Ok(byte)) => {
                let [x, y, z, _] = a.octets();
                Self::between(first, Ipv4Addr::new(x, y, z, byte).into())
            }
            _ => Self::between(first, address(last)?),
        }
    }
}

impl fmt::Display for SourceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            1 => write!(f, "{}", self.first),
            n => write!(f, "{}-{}", self.first, self.nth(n - 1)),
        }
    }
}

/// A worker's share of the addresses of several ranges, used in turn. The share consists of consecutive
/// addresses, so that with ranges of equal length each worker can have one range.
#[derive(Clone, Debug)]
pub struct Sources {
    ranges: Vec<SourceRange>,
    /// The part of all addresses that belongs to this worker.
    share: Range<u64>,
    next: u64,
}

impl Sources {
    /// Creates the share of worker `worker` of `workers`. If there are fewer addresses than workers, some
    /// workers share an address.
    pub fn new(ranges: &[SourceRange], worker: u64, workers: u64) -> Self {
        let total: u64 = ranges.iter().map(SourceRange::count).sum();
        let share = match total {
            0 => 0..0,
            few if few < workers => worker % few..worker % few + 1,
            _ => worker * total / workers..(worker + 1) * total / workers,
        };
        Self { ranges: ranges.to_vec(), next: share.start, share }
    }

    /// Returns the next address, or `None` if there are no ranges and the stack chooses the address.
    pub fn next_address(&mut self) -> Option<IpAddr> {
        let n = self.next;
        self.next = if n + 1 < self.share.end { n + 1 } else { self.share.start };
        self.nth(n)
    }

    /// Returns each address of the share once.
    pub fn all(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.share.clone().filter_map(|n| self.nth(n))
    }

    /// Returns the `n`-th of all addresses.
    fn nth(&self, mut n: u64) -> Option<IpAddr> {
        for range in &self.ranges {
            if n < range.count {
                return Some(range.nth(n));
            }
            n -= range.count;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Result<(String, u64), String> {
        text.parse::<SourceRange>().map(|r| (r.to_string(), r.count()))
    }

    #[test]
    fn ranges_are_parsed() {
        let table = [
            ("10.0.0.2", "10.0.0.2", 1),
            ("10.0.0.2-10.0.1.1", "10.0.0.2-10.0.1.1", 256),
            ("10.0.0.2-9", "10.0.0.2-10.0.0.9", 8),
            ("10.1.2.3/24", "10.1.2.1-10.1.2.254", 254),
            ("10.1.2.3/31", "10.1.2.2-10.1.2.3", 2),
            ("10.1.2.3/32", "10.1.2.3", 1),
            ("fd00::1", "fd00::1", 1),
            ("fd00::1-fd00::ff", "fd00::1-fd00::ff", 255),
            ("fd00::1/120", "fd00::-fd00::ff", 256),
            ("fd00::1/128", "fd00::1", 1),
        ];
        for (text, shown, count) in table {
            assert_eq!(range(text), Ok((shown.to_owned(), count)), "{text}");
        }
    }

    #[test]
    fn invalid_ranges_are_refused() {
        for text in [
            "",
            "x",
            "10.0.0.9-10.0.0.2",
            "10.0.0.9-2",
            "10.0.0.1-fd00::1",
            "10.0.0.1/33",
            "10.0.0.1/x",
            "fd00::/64",
            "0.0.0.0/0",
            "10.0.0.1-300",
        ] {
            assert!(range(text).is_err(), "{text}");
        }
    }

    #[test]
    fn workers_get_disjoint_addresses() {
        let ranges: Vec<SourceRange> =
            ["10.0.0.1-4", "10.0.1.1-3"].iter().map(|t| t.parse().unwrap()).collect();
        let mut all = Vec::new();
        for worker in 0..2 {
            let mut sources = Sources::new(&ranges, worker, 2);
            let mine: Vec<IpAddr> = sources.all().collect();
            for round in 0..3 {
                let given: Vec<IpAddr> = mine.iter().map(|_| sources.next_address().unwrap()).collect();
                assert_eq!(given, mine, "round {round}");
            }
            all.extend(mine);
        }
        let expected: Vec<IpAddr> =
            ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.1.1", "10.0.1.2", "10.0.1.3"]
                .iter()
                .map(|t| t.parse().unwrap())
                .collect();
        assert_eq!(all, expected);
        assert_eq!(Sources::new(&[], 0, 1).next_address(), None);
    }

    #[test]
    fn with_few_addresses_every_worker_has_one() {
        let ranges = ["10.0.0.1-2".parse().unwrap()];
        for worker in 0..5 {
            let sources = Sources::new(&ranges, worker, 5);
            assert_eq!(sources.all().collect::<Vec<_>>(), [ranges[0].nth(worker % 2)]);
        }
    }
}
