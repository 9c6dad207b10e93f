//! Tests of the counters and of the files with counters.

use super::page::{HEADER_BYTES, LEADING_WORDS};
use super::{
    BURST_BUCKETS, CounterKind, PageError, PageReader, ShardActivity, ShardStats, StatsPage, StatsWriter,
    pages,
};
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::time::Instant;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

#[test]
fn bursts_are_counted_by_powers_of_two() {
    let mut stats = ShardStats::default();
    for frames in [1, 2, 3, 4, 31, 32, 63, 64] {
        stats.count_burst(frames);
    }
    assert_eq!(stats.bursts, [1, 2, 1, 0, 1, 2, 1]);
    assert_eq!(stats.frames_received, 200);
}

#[test]
fn reader_never_sees_a_torn_snapshot() {
    let writer = StatsWriter::new();
    let reader = writer.reader();
    let thread = std::thread::spawn(move || {
        let mut last = 0;
        while last < 20_000 {
            let seen = reader.snapshot();
            assert_eq!(seen.bursts, [seen.turns; BURST_BUCKETS]);
            assert_eq!(seen.running_ns, seen.turns);
            assert!(seen.turns >= last);
            last = seen.turns;
        }
    });
    for turns in 1..=20_000 {
        writer.publish(&ShardStats {
            turns,
            running_ns: turns,
            bursts: [turns; BURST_BUCKETS],
            ..ShardStats::default()
        });
    }
    thread.join().unwrap();
}

/// A directory that is removed at the end of the test.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ginnel-pages-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn page(&self, label: &str) -> StatsPage {
        let names =
            [(CounterKind::Counter, "tcp.a".into()), (CounterKind::Gauge, "device.my tap\n.b".into())];
        StatsPage::create(&self.0, label, Duration::from_millis(100), &names).unwrap()
    }

    fn path(&self, label: &str) -> PathBuf {
        self.0.join(format!("stats.{label}"))
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn publish(page: &mut StatsPage, at: u64, values: [u64; 2]) {
    page.publish(Instant::from_nanos(at), ShardActivity::Running, |publication| {
        values.into_iter().for_each(|value| publication.put(value));
    });
}

#[test]
fn published_counters_are_read_with_names() {
    let temp_folder = TempFolder::new();
    let mut page = temp_folder.page("0");
    assert_eq!(fs::metadata(temp_folder.path("0")).unwrap().permissions().mode() & 0o777, 0o600);
    let reader = PageReader::open(&temp_folder.0, "0").unwrap();
    assert_eq!(
        reader.names(),
        [(CounterKind::Counter, "tcp.a".into()), (CounterKind::Gauge, "device.my_tap_.b".into())]
    );
    assert_eq!(reader.interval(), Duration::from_millis(100));
    assert_eq!(reader.read().unwrap().values, [0, 0], "nothing was published yet");
    publish(&mut page, 5, [1, u64::MAX]);
    let snapshot = reader.read().unwrap();
    assert_eq!((snapshot.published, snapshot.activity), (Instant::from_nanos(5), ShardActivity::Running));
    assert_eq!(snapshot.values, [1, u64::MAX]);
    drop(page);
    assert_eq!(reader.read().unwrap(), snapshot, "the last publication stays");
}

#[test]
fn shards_are_listed_by_number() {
    let temp_folder = TempFolder::new();
    let _shown = ["10", "2.app", "server", "2", "0"].map(|label| temp_folder.page(label));
    fs::write(temp_folder.0.join("lock"), "").unwrap();
    let labels: Vec<String> = pages(&temp_folder.0).unwrap().iter().map(|page| page.label().into()).collect();
    assert_eq!(labels, ["0", "2", "2.app", "10", "server"]);
}

#[test]
fn other_process_never_sees_a_torn_publication() {
    let temp_folder = TempFolder::new();
    let mut page = temp_folder.page("0");
    let reader = PageReader::open(&temp_folder.0, "0").unwrap();
    let thread = std::thread::spawn(move || {
        let mut last = 0;
        while last < 50_000 {
            match reader.read() {
                Ok(snapshot) => {
                    let value = snapshot.published.as_nanos();
                    assert_eq!(snapshot.values, [value, value]);
                    assert!(value >= last);
                    last = value;
                }
                // A writer in a tight loop may be faster than any reader.
                Err(PageError::Unfinished(_)) => {}
                Err(e) => panic!("{e}"),
            }
        }
    });
    for value in 1..=50_000 {
        publish(&mut page, value, [value, value]);
    }
    thread.join().unwrap();
}

#[test]
fn interrupted_publication_is_detected() {
    let temp_folder = TempFolder::new();
    let mut page = temp_folder.page("0");
    publish(&mut page, 5, [1, 2]);
    let reader = PageReader::open(&temp_folder.0, "0").unwrap();
    let file = OpenOptions::new().write(true).open(temp_folder.path("0")).unwrap();
    file.write_all_at(&3u64.to_le_bytes(), 4096).unwrap();
    let error = reader.read().unwrap_err();
    assert!(matches!(error, PageError::Unfinished(_)), "{error}");
}

#[test]
fn other_versions_and_other_files_are_refused() {
    let temp_folder = TempFolder::new();
    let page = temp_folder.page("0");
    let file = OpenOptions::new().write(true).open(temp_folder.path("0")).unwrap();
    file.write_all_at(&2u32.to_le_bytes(), 8).unwrap();
    let error = PageReader::open(&temp_folder.0, "0").unwrap_err().to_string();
    assert!(error.ends_with("stats.0: has version 2, this program supports version 1"), "{error}");
    file.write_all_at(b"X", 0).unwrap();
    let error = PageReader::open(&temp_folder.0, "0").unwrap_err().to_string();
    assert!(error.ends_with("stats.0: is not a file of counters"), "{error}");
    drop(page);
    fs::create_dir(temp_folder.path("1")).unwrap();
    assert!(matches!(PageReader::open(&temp_folder.0, "1"), Err(PageError::NotStatsFile(_))));
    assert!(matches!(PageReader::open(&temp_folder.0, "2"), Err(PageError::Io(..))));
}

/// A truncated file, or one with arbitrary bytes, is an error or has values, and never crashes the reader.
#[test]
fn damaged_files_are_errors() {
    let temp_folder = TempFolder::new();
    let mut page = temp_folder.page("0");
    publish(&mut page, 5, [1, 2]);
    drop(page);
    let complete = fs::read(temp_folder.path("0")).unwrap();
    assert_eq!(complete.len(), 4096 + 8 * (LEADING_WORDS as usize + 2));
    let open_and_read = || PageReader::open(&temp_folder.0, "0").and_then(|reader| reader.read());
    for len in (0..200).chain(complete.len() - 48..complete.len()) {
        fs::write(temp_folder.path("0"), &complete[..len]).unwrap();
        assert!(open_and_read().is_err(), "{len} bytes");
    }
    let mut random = Random::new(1);
    let mut refused = 0;
    for _ in 0..3_000 {
        let mut bytes = complete.clone();
        for _ in 0..=random.below(3) {
            // Mostly in the header, where it matters.
            let reach = if random.below(8) == 0 { complete.len() as u64 } else { HEADER_BYTES + 40 };
            let at = random.below(reach) as usize;
            // An odd sequence number takes all retries; another test covers it.
            if at != 4096 {
                bytes[at] = random.below(256) as u8;
            }
        }
        fs::write(temp_folder.path("0"), &bytes).unwrap();
        refused += u32::from(open_and_read().is_err());
    }
    assert!(refused > 1_000, "{refused}");
}
