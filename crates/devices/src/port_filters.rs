//! Filters in an adapter that send packets to connections of the stack to the queue whose number is in the
//! low bits of the local port, as Fastsocket set them. One filter for each queue and address family is enough
//! for all connections, so opening one makes no system call.

use crate::ethtool::flow_filters::{FilterTable, LOCATION_ANY, PortFilter};
use core::ops::RangeInclusive;
use std::fmt;
use std::io;

/// The way that the filters are set. Text key `port_filters` of an AF_XDP device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PortFilterMode {
    /// Set, and reported if the adapter does not accept them.
    #[default]
    Auto,
    /// Set; opening fails if the adapter does not accept them.
    On,
    /// Not set.
    Off,
}

impl PortFilterMode {
    pub(crate) const WORDS: [(&'static str, Self); 3] =
        [("auto", Self::Auto), ("on", Self::On), ("off", Self::Off)];
}

/// Returns the filters for packets to `ports`, the lowest bits of which are an index of `queues`.
///
/// # Errors
/// Says why filters that compare bits cannot tell these ports from all others.
pub(crate) fn filters_for(ports: &RangeInclusive<u16>, queues: &[u16]) -> Result<Vec<PortFilter>, String> {
    let (first, last) = (u32::from(*ports.start()), u32::from(*ports.end()));
    // The ports that have the highest bits in common.
    let block = (last.saturating_sub(first) + 1).next_power_of_two();
    let indices = queues.len().max(1).next_power_of_two();
    if !first.is_multiple_of(block) {
        return Err(format!(
            "filters compare bits of the port: tcp.local_port_first = {first} is no multiple of {block}, the number of ports up to tcp.local_port_last = {last}, rounded up to a power of two"
        ));
    }
    if indices > block as usize {
        return Err(format!("the {block} ports from {first} to {last} are fewer than the queues"));
    }
    // The casts do not truncate: blocks end at port 65,535 at the latest.
    let mask = !((block - 1) as u16) | (indices - 1) as u16;
    let of_family = |is_ipv6| {
        queues.iter().enumerate().map(move |(index, &queue)| PortFilter {
            is_ipv6,
            mask,
            port: first as u16 | index as u16,
            queue: queue.into(),
        })
    };
    Ok(of_family(false).chain(of_family(true)).collect())
}

impl PortFilter {
    /// Returns whether a packet can match both filters.
    fn overlaps(&self, other: &Self) -> bool {
        self.is_ipv6 == other.is_ipv6 && (self.port ^ other.port) & self.mask & other.mask == 0
    }
}

impl fmt::Display for PortFilter {
    /// Writes the filter as `ethtool -N` takes it, whose masks have the bits that are not compared.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = if self.is_ipv6 { "tcp6" } else { "tcp4" };
        let (port, ignored, queue) = (self.port, !self.mask, self.queue);
        write!(f, "flow-type {family} dst-port {port:#x} m {ignored:#x} action {queue}")
    }
}

/// Filters that are set in an adapter. They are removed when the value is dropped.
#[derive(Debug)]
pub(crate) struct PortFilters<T: FilterTable> {
    table: T,
    /// Where the filters are.
    locations: Vec<u32>,
}

impl<T: FilterTable> PortFilters<T> {
    /// Sets filters. Those that the adapter has already are kept, and are removed with the others: a stack
    /// that was killed has left them.
    ///
    /// # Errors
    /// `Unsupported` if the adapter has no filters, `StorageFull` if it has no room, otherwise the error of
    /// the driver, with the filter that it refuses. No filter is set then.
    pub fn set(table: T, wanted: &[PortFilter]) -> io::Result<Self> {
        let (size, chooses_location) = table.size()?;
        let used = table.locations()?;
        let mut present = Vec::new();
        for &location in &used {
            match table.filter(location) {
                Ok(filter) => present.extend(filter.map(|filter| (filter, location))),
                // Removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let is_wanted = |filter: &PortFilter| wanted.contains(filter);
        for (filter, location) in present.iter().filter(|(filter, _)| !is_wanted(filter)) {
            if wanted.iter().any(|wanted| wanted.overlaps(filter)) {
                tracing::warn!(
                    location,
                    "a filter of the adapter is for ports of the stack, too: {filter}; \"ethtool -N … delete {location}\" removes it"
                );
            }
        }
        // From the end: where the first filter that matches decides, those of the operator come first.
        let mut free = (0..size).rev().filter(|location| !used.contains(location));
        let mut set = Self { table, locations: Vec::with_capacity(wanted.len()) };
        for filter in wanted {
            if let Some(&(_, location)) = present.iter().find(|(present, _)| present == filter) {
                set.locations.push(location);
                continue;
            }
            let location = if chooses_location { Some(LOCATION_ANY) } else { free.next() };
            let location = location.ok_or_else(|| {
                let problem = format!("the adapter has room for {size} filters, and none is left");
                io::Error::new(io::ErrorKind::StorageFull, problem)
            })?;
            let inserted = set.table.insert(location, *filter);
            let location =
                inserted.map_err(|error| io::Error::new(error.kind(), format!("{filter}: {error}")))?;
            set.locations.push(location);
        }
        Ok(set)
    }
}

impl<T: FilterTable> Drop for PortFilters<T> {
    fn drop(&mut self) {
        for &location in &self.locations {
            if let Err(error) = self.table.remove(location) {
                // The interface is gone, or the operator has removed the filter.
                tracing::warn!(location, %error, "a filter of the adapter was not removed");
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::rc::Rc;

    /// An adapter with a few locations. It refuses a filter for `refused`.
    #[derive(Clone, Debug, Default)]
    struct Adapter {
        filters: Rc<RefCell<BTreeMap<u32, Option<PortFilter>>>>,
        size: u32,
        chooses_location: bool,
        refused: Option<u32>,
    }

    impl FilterTable for Adapter {
        fn size(&self) -> io::Result<(u32, bool)> {
            Ok((self.size, self.chooses_location))
        }

        fn locations(&self) -> io::Result<Vec<u32>> {
            Ok(self.filters.borrow().keys().copied().collect())
        }

        fn filter(&self, location: u32) -> io::Result<Option<PortFilter>> {
            self.filters.borrow().get(&location).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
        }

        fn insert(&mut self, location: u32, filter: PortFilter) -> io::Result<u32> {
            if self.refused == Some(filter.queue) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let mut filters = self.filters.borrow_mut();
            let location = match (location, self.chooses_location) {
                (LOCATION_ANY, true) => (0..self.size).find(|location| !filters.contains_key(location)),
                (location, false) if location < self.size => Some(location),
                _ => None,
            };
            let location = location.ok_or(io::ErrorKind::StorageFull)?;
            assert!(filters.insert(location, Some(filter)).is_none(), "a filter was overwritten");
            Ok(location)
        }

        fn remove(&mut self, location: u32) -> io::Result<()> {
            self.filters
                .borrow_mut()
                .remove(&location)
                .map(drop)
                .ok_or_else(|| io::ErrorKind::NotFound.into())
        }
    }

    impl Adapter {
        /// Returns an adapter with 16 locations, the last but one of which has a filter of another kind.
        fn new(chooses_location: bool) -> Self {
            let adapter = Self { size: 16, chooses_location, ..Self::default() };
            adapter.filters.borrow_mut().insert(14, None);
            adapter
        }

        fn locations_of_others(&self) -> Vec<u32> {
            let filters = self.filters.borrow();
            filters.iter().filter(|(_, filter)| filter.is_none()).map(|(&location, _)| location).collect()
        }
    }

    #[test]
    fn each_port_has_one_filter_of_its_queue() {
        for (ports, queues) in [
            (32_768..=60_999, &[0_u16, 1][..]),
            (32_768..=u16::MAX, &[5, 0, 7]),
            (49_152..=50_151, &[0, 1, 2, 3, 4]),
            (0..=u16::MAX, &[0, 1]),
            (40_960..=40_961, &[1, 0]),
        ] {
            let filters = filters_for(&ports, queues).unwrap();
            assert_eq!(filters.len(), 2 * queues.len());
            for port in ports {
                for is_ipv6 in [false, true] {
                    let matching =
                        |filter: &&PortFilter| filter.is_ipv6 == is_ipv6 && port & filter.mask == filter.port;
                    let found: Vec<u32> =
                        filters.iter().filter(matching).map(|filter| filter.queue).collect();
                    let index = usize::from(port) & (queues.len().next_power_of_two() - 1);
                    let expected: Vec<u32> =
                        queues.get(index).into_iter().map(|&queue| queue.into()).collect();
                    assert_eq!(found, expected, "port {port}");
                }
            }
            let below = filters.iter().all(|filter| 80 & filter.mask != filter.port);
            assert!(below || filters[0].mask < 0x8000, "port 80 has no filter unless all have one");
        }
    }

    #[test]
    fn filters_of_one_packet_overlap() {
        let two = filters_for(&(32_768..=60_999), &[0, 1]).unwrap();
        let four = filters_for(&(32_768..=60_999), &[0, 1, 2, 3]).unwrap();
        let above = filters_for(&(61_440..=65_535), &[0, 1]).unwrap();
        let below = filters_for(&(16_384..=32_767), &[0, 1]).unwrap();
        let overlapping = |a: &PortFilter, all: &[PortFilter]| all.iter().filter(|b| a.overlaps(b)).count();
        assert_eq!(overlapping(&two[0], &four), 2, "port bits 00 and 10 over IPv4");
        assert_eq!(overlapping(&two[3], &above), 1);
        assert_eq!(overlapping(&two[0], &below), 0);
    }

    #[test]
    fn ports_that_no_mask_describes_are_named() {
        let problem = |ports| filters_for(&ports, &[0, 1, 2]).unwrap_err();
        assert!(problem(40_000..=50_000).contains("40000 is no multiple of 16384"));
        assert!(problem(1024..=60_999).contains("1024 is no multiple of 65536"));
        assert!(problem(40_960..=40_961).contains("fewer than the queues"));
    }

    #[test]
    fn filters_are_written_as_ethtool_takes_them() {
        let filters = filters_for(&(32_768..=60_999), &[0, 1]).unwrap();
        let lines: Vec<String> = filters.iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "flow-type tcp4 dst-port 0x8000 m 0x7ffe action 0",
                "flow-type tcp4 dst-port 0x8001 m 0x7ffe action 1",
                "flow-type tcp6 dst-port 0x8000 m 0x7ffe action 0",
                "flow-type tcp6 dst-port 0x8001 m 0x7ffe action 1",
            ]
        );
    }

    #[test]
    fn filters_are_set_and_removed() {
        for chooses_location in [false, true] {
            let adapter = Adapter::new(chooses_location);
            let wanted = filters_for(&(32_768..=60_999), &[0, 1, 2]).unwrap();
            let set = PortFilters::set(adapter.clone(), &wanted).unwrap();
            let present: Vec<PortFilter> = adapter.filters.borrow().values().copied().flatten().collect();
            assert!(present.len() == 6 && wanted.iter().all(|filter| present.contains(filter)));
            if !chooses_location {
                assert!(!adapter.filters.borrow().contains_key(&0), "the first locations stay free");
            }
            // The process is killed, and its successor finds the filters.
            std::mem::forget(set);
            let set = PortFilters::set(adapter.clone(), &wanted).unwrap();
            assert_eq!(adapter.filters.borrow().len(), 7);
            drop(set);
            assert_eq!((adapter.filters.borrow().len(), adapter.locations_of_others()), (1, vec![14]));
        }
    }

    #[test]
    fn a_refused_filter_leaves_none() {
        for chooses_location in [false, true] {
            let adapter = Adapter { refused: Some(2), ..Adapter::new(chooses_location) };
            let wanted = filters_for(&(32_768..=60_999), &[0, 1, 2]).unwrap();
            let error = PortFilters::set(adapter.clone(), &wanted).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().starts_with("flow-type tcp4 dst-port 0x8002 m 0x7ffc action 2: "));
            assert_eq!(adapter.filters.borrow().len(), 1);
        }
    }

    #[test]
    fn a_full_adapter_is_named() {
        for chooses_location in [false, true] {
            // One location too few, because one has a filter of another kind.
            let adapter = Adapter { size: 8, ..Adapter::new(chooses_location) };
            adapter.filters.borrow_mut().insert(3, None);
            let wanted = filters_for(&(32_768..=60_999), &[0, 1, 2, 3]).unwrap();
            let error = PortFilters::set(adapter.clone(), &wanted).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(adapter.locations_of_others(), [3, 14]);
            assert_eq!(adapter.filters.borrow().len(), 2);
        }
    }
}
