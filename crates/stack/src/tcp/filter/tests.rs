use super::super::filter_table::{FilterId, FilterTable};
use super::super::profile::{Profile, ProfileId, ProfileTable};
use super::*;
use crate::tcp::config::TcpConfig;
use core::net::IpAddr;

/// Keeps a fixed number of bytes.
#[derive(Debug)]
struct Keeps(u32);

impl SocketFilter for Keeps {
    fn run(&self, _: &FilteredPacket<'_>) -> u32 {
        self.0
    }

    fn code(&self) -> &[u8] {
        &[]
    }
}

fn packet() -> FilteredPacket<'static> {
    FilteredPacket {
        bytes: &[],
        header_len: 0,
        network: &[],
        frame: &[],
        destination: IpAddr::from([10, 0, 0, 1]),
        is_broadcast: false,
        link: LinkId(0),
        is_loopback: false,
    }
}

#[test]
fn filters_are_freed_with_their_last_profile() {
    let mut table = ProfileTable::new(Profile::from_config(&TcpConfig::default()));
    let default = *table.get(ProfileId::DEFAULT);
    let filter: Arc<dyn SocketFilter> = Arc::new(Keeps(5));
    let id = table.filters.add(Arc::clone(&filter)).unwrap();
    let plain = table.intern(default.with_filter(id)).unwrap();
    let mut variant = default.with_filter(id);
    variant.keep_count = 3;
    let other = table.intern(variant).unwrap();
    assert_eq!(Arc::strong_count(&filter), 2);
    assert_eq!(table.filters.run(id, &packet()), 5);
    let shared = table.share(plain);
    table.release(plain);
    table.release(other);
    assert_eq!(Arc::strong_count(&filter), 2, "a connection shares the profile");
    table.release(shared);
    assert_eq!((Arc::strong_count(&filter), table.filters.len()), (1, 0));
    // Another filter gets the number, and no profile of the former one is found.
    let next = table.filters.add(Arc::new(Keeps(6))).unwrap();
    assert_eq!(next, id);
    let again = table.intern(default.with_filter(next)).unwrap();
    assert_eq!(table.filters.run(table.get(again).filter, &packet()), 6);
}

#[test]
fn fixed_filters_keep_all_or_nothing() {
    let mut table = FilterTable::default();
    assert_eq!(table.run(FilterId::NONE, &packet()), u32::MAX);
    assert_eq!(table.run(FilterId::DROP_ALL, &packet()), 0);
    for id in [FilterId::NONE, FilterId::DROP_ALL] {
        table.share(id);
        table.release(id);
        assert!(table.get(id).is_none());
    }
    let count = (0..).take_while(|_| table.add(Arc::new(Keeps(1))).is_some()).count();
    assert_eq!(count, usize::from(u16::MAX) - 1);
}
