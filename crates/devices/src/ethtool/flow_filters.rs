//! Filters by which an adapter chooses the queue of received frames (`ethtool -N`), as far as they look at
//! the destination port of TCP. Drivers call them ntuple filters, or Flow Director.
#![allow(unsafe_code)] // an ioctl's argument has the type that its number says

use super::FLOW_RULE_WORDS;
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;

const ETHTOOL_GRXCLSRLCNT: u32 = 0x2e;
const ETHTOOL_GRXCLSRULE: u32 = 0x2f;
const ETHTOOL_GRXCLSRLALL: u32 = 0x30;
const ETHTOOL_SRXCLSRLDEL: u32 = 0x31;
const ETHTOOL_SRXCLSRLINS: u32 = 0x32;
/// In the size of a table: the driver chooses locations if it is asked to (`RX_CLS_LOC_SPECIAL`).
const LOCATION_SPECIAL: u32 = 1 << 31;
/// The location that the driver replaces by a free one (`RX_CLS_LOC_ANY`).
pub(crate) const LOCATION_ANY: u32 = u32::MAX;
/// Most filters that are read; adapters have room for fewer.
const FILTERS_MAX: u32 = 1 << 16;

/// `TCP_V4_FLOW` and `TCP_V6_FLOW`.
const TCP_V4_FLOW: u32 = 1;
const TCP_V6_FLOW: u32 = 5;

/// Indices of the words of `struct ethtool_rxnfc`, whose first word is the command.
const DATA: usize = 2;
const FLOW_TYPE: usize = 4;
const HEADER: usize = 5;
const MASK: usize = 23;
const QUEUE: usize = 42;
const LOCATION: usize = 44;
const COUNT: usize = 46;
const LOCATIONS: usize = 47;
/// Index of the word that has the ports in the header of a flow type; the destination is its second half.
const IPV4_PORTS: usize = 2;
const IPV6_PORTS: usize = 8;

/// A filter: TCP packets whose destination port has certain bits go to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortFilter {
    /// The filter is for IPv6, otherwise for IPv4.
    pub is_ipv6: bool,
    /// Bits of the port that are compared.
    pub mask: u16,
    /// Values of these bits; the others are 0.
    pub port: u16,
    /// Number of the queue.
    pub queue: u32,
}

impl PortFilter {
    /// Returns `struct ethtool_rxnfc` that describes the filter.
    fn to_words(self, command: u32, location: u32) -> [u32; FLOW_RULE_WORDS] {
        let (flow_type, ports) =
            if self.is_ipv6 { (TCP_V6_FLOW, IPV6_PORTS) } else { (TCP_V4_FLOW, IPV4_PORTS) };
        let destination = |port: u16| {
            let [high, low] = port.to_be_bytes();
            u32::from_ne_bytes([0, 0, high, low])
        };
        let mut words = [0; FLOW_RULE_WORDS];
        words[0] = command;
        words[FLOW_TYPE] = flow_type;
        words[HEADER + ports] = destination(self.port);
        words[MASK + ports] = destination(self.mask);
        let queue = u64::from(self.queue).to_ne_bytes();
        for (word, bytes) in words[QUEUE..].iter_mut().zip(queue.chunks_exact(4)) {
            *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        words[LOCATION] = location;
        words
    }

    /// Reads `struct ethtool_rxnfc`. Returns `None` for a filter that compares something else, or that does
    /// not choose a queue.
    fn from_words(words: &[u32; FLOW_RULE_WORDS]) -> Option<Self> {
        let (is_ipv6, ports) = match words[FLOW_TYPE] {
            TCP_V4_FLOW => (false, IPV4_PORTS),
            TCP_V6_FLOW => (true, IPV6_PORTS),
            _ => return None,
        };
        let destination = |word: u32| {
            let [.., high, low] = word.to_ne_bytes();
            u16::from_be_bytes([high, low])
        };
        let queue = if cfg!(target_endian = "little") { words[QUEUE] } else { words[QUEUE + 1] };
        let mask = destination(words[MASK + ports]);
        let port = destination(words[HEADER + ports]) & mask;
        let filter = Self { is_ipv6, mask, port, queue };
        // Some drivers return bits of the port that the mask leaves out.
        let mut masked = *words;
        masked[HEADER + ports] &= words[MASK + ports];
        let expected = filter.to_words(words[0], words[LOCATION]);
        (masked[FLOW_TYPE..LOCATION] == expected[FLOW_TYPE..LOCATION]).then_some(filter)
    }
}

/// The filters of an adapter.
pub(crate) trait FilterTable {
    /// Returns the number of locations, and whether the driver chooses a free one for [`LOCATION_ANY`].
    ///
    /// # Errors
    /// `Unsupported` if the driver has no filters, otherwise the error of the driver.
    fn size(&self) -> io::Result<(u32, bool)>;

    /// Returns the locations that are in use, of all kinds of filters.
    ///
    /// # Errors
    /// The error of the driver.
    fn locations(&self) -> io::Result<Vec<u32>>;

    /// Returns the filter at a location; `None` for a filter of another kind.
    ///
    /// # Errors
    /// `NotFound` if the location has no filter, otherwise the error of the driver.
    fn filter(&self, location: u32) -> io::Result<Option<PortFilter>>;

    /// Adds a filter, and returns its location.
    ///
    /// # Errors
    /// The error of the driver.
    fn insert(&mut self, location: u32, filter: PortFilter) -> io::Result<u32>;

    /// Removes the filter at a location.
    ///
    /// # Errors
    /// `NotFound` if the location has no filter, otherwise the error of the driver.
    fn remove(&mut self, location: u32) -> io::Result<()>;
}

/// The filters of an interface, in the network namespace in which this value was made.
#[derive(Debug)]
pub(crate) struct InterfaceFilters {
    socket: OwnedFd,
    interface: String,
}

impl InterfaceFilters {
    /// Reaches the filters of an interface in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn open(interface: &str) -> io::Result<Self> {
        Ok(Self { socket: super::open_socket()?, interface: interface.into() })
    }

    fn call(&self, words: &mut [u32; FLOW_RULE_WORDS]) -> io::Result<()> {
        // SAFETY: `struct ethtool_rxnfc` has 48 words, and the commands of the callers need no locations.
        unsafe { super::call_through(&self.socket, &self.interface, words) }.map_err(explained)
    }
}

/// Returns an error of the kernel with the kind that `FilterTable` documents.
fn explained(error: Errno) -> io::Error {
    match error {
        Errno::OPNOTSUPP => io::Error::new(io::ErrorKind::Unsupported, error),
        Errno::NOENT => io::Error::new(io::ErrorKind::NotFound, error),
        _ => error.into(),
    }
}

impl FilterTable for InterfaceFilters {
    fn size(&self) -> io::Result<(u32, bool)> {
        let mut words = [0; FLOW_RULE_WORDS];
        words[0] = ETHTOOL_GRXCLSRLCNT;
        self.call(&mut words)?;
        let size = words[DATA + usize::from(cfg!(target_endian = "big"))];
        Ok((size & !LOCATION_SPECIAL, size & LOCATION_SPECIAL != 0))
    }

    fn locations(&self) -> io::Result<Vec<u32>> {
        let mut words = [0; FLOW_RULE_WORDS];
        words[0] = ETHTOOL_GRXCLSRLCNT;
        self.call(&mut words)?;
        let count = words[COUNT];
        if count > FILTERS_MAX {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("it has {count} filters")));
        }
        let count = count as usize;
        let mut words = vec![0; FLOW_RULE_WORDS + count];
        words[0] = ETHTOOL_GRXCLSRLALL;
        words[COUNT] = count as u32;
        // SAFETY: `struct ethtool_rxnfc` with room for `count` locations, as its word says.
        unsafe { super::call_through(&self.socket, &self.interface, &mut words) }.map_err(explained)?;
        // Filters that were removed meanwhile leave room.
        let found = count.min(words[COUNT] as usize);
        Ok(words[LOCATIONS..][..found].to_vec())
    }

    fn filter(&self, location: u32) -> io::Result<Option<PortFilter>> {
        let mut words = [0; FLOW_RULE_WORDS];
        (words[0], words[LOCATION]) = (ETHTOOL_GRXCLSRULE, location);
        self.call(&mut words)?;
        Ok(PortFilter::from_words(&words))
    }

    fn insert(&mut self, location: u32, filter: PortFilter) -> io::Result<u32> {
        let mut words = filter.to_words(ETHTOOL_SRXCLSRLINS, location);
        self.call(&mut words)?;
        Ok(words[LOCATION])
    }

    fn remove(&mut self, location: u32) -> io::Result<()> {
        let mut words = [0; FLOW_RULE_WORDS];
        (words[0], words[LOCATION]) = (ETHTOOL_SRXCLSRLDEL, location);
        self.call(&mut words)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const FILTERS: [PortFilter; 2] = [
        PortFilter { is_ipv6: false, mask: 0x8001, port: 0x8001, queue: 3 },
        PortFilter { is_ipv6: true, mask: 0x8001, port: 0x8001, queue: 3 },
    ];

    /// Returns what `ethtool -N a0 flow-type tcp4 dst-port 0x8001 m 0x7ffe action 3 loc 5` (6.1, on x86-64)
    /// passes to the kernel; for IPv6 it is `tcp6` and `loc 6`. The bytes that are not listed are 0.
    fn words_of_ethtool(is_ipv6: bool) -> [u32; FLOW_RULE_WORDS] {
        let listed: &[(usize, u8)] = if is_ipv6 {
            &[(0, 0x32), (16, 5), (54, 0x80), (55, 1), (126, 0x80), (127, 1), (168, 3), (176, 6)]
        } else {
            &[(0, 0x32), (16, 1), (30, 0x80), (31, 1), (102, 0x80), (103, 1), (168, 3), (176, 5)]
        };
        let mut bytes = [0; 4 * FLOW_RULE_WORDS];
        listed.iter().for_each(|&(at, byte)| bytes[at] = byte);
        let mut words = [0; FLOW_RULE_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        words
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn filters_have_the_bytes_of_ethtool() {
        for (filter, location) in FILTERS.into_iter().zip([5, 6]) {
            assert_eq!(filter.to_words(ETHTOOL_SRXCLSRLINS, location), words_of_ethtool(filter.is_ipv6));
        }
    }

    #[test]
    fn filters_are_read_as_written() {
        for filter in FILTERS {
            let words = filter.to_words(ETHTOOL_GRXCLSRULE, 7);
            assert_eq!(PortFilter::from_words(&words), Some(filter));
            // Bits of the port that are not compared do not count.
            let mut unmasked = words;
            let ports = if filter.is_ipv6 { IPV6_PORTS } else { IPV4_PORTS };
            unmasked[HEADER + ports] |= u32::from_ne_bytes([0, 0, 0x10, 0]);
            assert_eq!(PortFilter::from_words(&unmasked), Some(filter));
            // Another flow type, a compared address or VLAN, or another action.
            for at in [FLOW_TYPE, HEADER, MASK, MASK + 17, QUEUE + 1] {
                let mut other = words;
                other[at] ^= 0x100;
                assert_eq!(PortFilter::from_words(&other), None, "word {at}");
            }
        }
    }

    #[test]
    fn interfaces_without_filters_say_so() {
        let mut filters = InterfaceFilters::open("lo").unwrap();
        for error in [
            filters.size().unwrap_err(),
            filters.locations().unwrap_err(),
            filters.filter(0).unwrap_err(),
            filters.insert(LOCATION_ANY, FILTERS[0]).unwrap_err(),
            filters.remove(0).unwrap_err(),
        ] {
            // Without CAP_NET_ADMIN the kernel does not ask the driver.
            let kinds = [io::ErrorKind::Unsupported, io::ErrorKind::PermissionDenied];
            assert!(kinds.contains(&error.kind()), "{error:?}");
        }
        let missing = InterfaceFilters::open("nonesuch").unwrap();
        assert_eq!(missing.size().unwrap_err().raw_os_error(), Some(Errno::NODEV.raw_os_error()));
    }
}
