//! `ginnel corpus`: writes 500 synthetic pages with the size distribution of the 500 most popular front pages
//! of 2015: 3.5 KB to 1.1 MB, mean 126 KB, median 68 KB, 70 % below 150 KB, 90 % below 300 KB, 17 above 500
//! KB (1 KB = 1,000 bytes).
//!
//! Equal seeds write equal bytes. The file `urls.txt` beside the pages is a list for `ginnel
//! load http --urls`, in the order of popularity.

use ginnel::Random;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Number of pages in the corpus.
pub const PAGES: usize = 500;

/// Size in bytes of the smallest page.
const BYTES_MIN: u64 = 3_500;
/// Size in bytes of the largest page.
const BYTES_MAX: u64 = 1_100_000;

/// The size distribution: share of pages below a size in bytes. Between two points the logarithm of the size
/// is interpolated linearly. The mean of this distribution is 126.6 KB.
const QUANTILES: [(f64, f64); 6] = [
    (0.0, BYTES_MIN as f64),
    (0.5, 68_000.0),
    (0.7, 150_000.0),
    (0.9, 300_000.0),
    (0.966, 500_000.0), // 17 of 500 lie above
    (1.0, BYTES_MAX as f64),
];

/// Options of `ginnel corpus`.
#[derive(Clone, Debug, clap::Args)]
pub struct CorpusOptions {
    /// Directory to write to; created if missing. The pages go to DIR/site, the list of URLs to DIR/urls.txt.
    /// Existing files of these names are overwritten; no file is deleted.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,

    /// Seed of the contents: the same seed writes the same bytes on every machine.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// A page of the corpus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Popularity rank, 1 for the most popular page.
    pub rank: u32,
    /// Path on the server, with the leading slash.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Seed of the contents.
    seed: u64,
}

impl Page {
    /// Returns how often the page is requested relative to the others: 1/rank (Zipf's law), scaled to an
    /// integer.
    pub const fn weight(&self) -> u32 {
        1_000_000 / self.rank
    }

    /// Writes the page, exactly [`Page::bytes`] bytes.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let mut rng = Random::new(self.seed);
        let head = format!(
            "<!doctype html>\n<html lang=\"en\"><head><title>Page {}</title></head><body>\n",
            self.rank
        );
        const TAIL: &[u8] = b"\n</body></html>\n";
        out.write_all(head.as_bytes())?;
        let mut left = self.bytes as usize - head.len() - TAIL.len();
        let mut line = Vec::with_capacity(128);
        while left > 0 {
            line.clear();
            line.extend_from_slice(b"<p>");
            while line.len() < 96 {
                line.extend_from_slice(WORDS[rng.below(WORDS.len() as u64) as usize].as_bytes());
                line.push(b' ');
            }
            line.extend_from_slice(b"</p>\n");
            if line.len() > left {
                // The last line is padded with spaces, so that no tag is truncated.
                line.clear();
                line.resize(left, b' ');
            }
            out.write_all(&line)?;
            left -= line.len();
        }
        out.write_all(TAIL)
    }
}

const WORDS: [&str; 32] = [
    "lane",
    "house",
    "river",
    "stone",
    "between",
    "morning",
    "market",
    "paper",
    "window",
    "garden",
    "number",
    "letter",
    "quiet",
    "yellow",
    "bridge",
    "people",
    "winter",
    "again",
    "under",
    "north",
    "small",
    "every",
    "second",
    "open",
    "<b>today</b>",
    "<i>later</i>",
    "story",
    "answer",
    "station",
    "water",
    "light",
    "field",
];

/// Returns the size in bytes below which a share `q` (0 … 1) of the pages lies.
fn size_at(q: f64) -> f64 {
    let upper = QUANTILES.iter().position(|(share, _)| q <= *share).unwrap_or(QUANTILES.len() - 1).max(1);
    let ((q0, s0), (q1, s1)) = (QUANTILES[upper - 1], QUANTILES[upper]);
    (s0.ln() + (s1.ln() - s0.ln()) * (q - q0) / (q1 - q0)).exp()
}

/// Returns the pages of the corpus of `seed`, in order of popularity. Each size is drawn from one of 500
/// equal shares of the distribution, so that every seed has the stated statistics; the sizes are assigned to
/// the ranks at random.
pub fn plan(seed: u64) -> Vec<Page> {
    let mut rng = Random::new(seed);
    let mut sizes: Vec<u64> =
        (0..PAGES).map(|i| size_at((i as f64 + rng.unit()) / PAGES as f64).round() as u64).collect();
    sizes[0] = BYTES_MIN;
    sizes[PAGES - 1] = BYTES_MAX;
    rng.shuffle(&mut sizes);
    (1u32..)
        .zip(sizes)
        .map(|(rank, bytes)| Page {
            rank,
            path: format!("/page-{rank:03}.html"),
            bytes,
            seed: rng.next_u64(),
        })
        .collect()
}

/// Writes the pages to `directory/site` and the list of URLs to `directory/urls.txt`. Returns the pages.
pub fn write(directory: &Path, seed: u64) -> io::Result<Vec<Page>> {
    let site = directory.join("site");
    fs::create_dir_all(&site)?;
    let pages = plan(seed);
    let mut urls = BufWriter::new(File::create(directory.join("urls.txt"))?);
    writeln!(
        urls,
        "# ginnel corpus, seed {seed}: path, weight (1/rank); the line's place is the page's popularity rank"
    )?;
    for page in &pages {
        let mut out = BufWriter::with_capacity(1 << 16, File::create(site.join(&page.path[1..]))?);
        page.write_to(&mut out)?;
        out.flush()?;
        writeln!(urls, "{} {}", page.path, page.weight())?;
    }
    urls.flush()?;
    Ok(pages)
}

/// Runs the program: writes the corpus and prints a summary on standard output.
pub fn run(options: &CorpusOptions) -> io::Result<()> {
    let pages = write(&options.directory, options.seed)?;
    let total: u64 = pages.iter().map(|p| p.bytes).sum();
    let (site, urls) = (options.directory.join("site"), options.directory.join("urls.txt"));
    let (count, site, urls) = (pages.len(), site.display(), urls.display());
    match writeln!(io::stdout(), "{count} pages, {total} bytes, in {site}\nlist of URLs in {urls}") {
        // The pages are there all the same.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_stated_distribution_for_every_seed() {
        for seed in 0..50 {
            let mut sizes: Vec<u64> = plan(seed).iter().map(|p| p.bytes).collect();
            sizes.sort_unstable();
            assert_eq!(sizes.len(), 500);
            assert_eq!((sizes[0], sizes[499]), (3_500, 1_100_000));
            let mean = sizes.iter().sum::<u64>() / 500;
            let median = (sizes[249] + sizes[250]) / 2;
            assert!((125_000..=127_500).contains(&mean), "seed {seed}: mean {mean}");
            assert!((67_000..=69_000).contains(&median), "seed {seed}: median {median}");
            let below = |bytes: u64| sizes.iter().filter(|s| **s < bytes).count();
            assert_eq!(below(150_000), 350, "seed {seed}");
            assert_eq!(below(300_000), 450, "seed {seed}");
            assert_eq!(500 - below(500_001), 17, "seed {seed}");
        }
    }

    #[test]
    fn pages_have_exactly_their_size_and_are_repeatable() {
        for page in plan(3).iter().take(20) {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            page.write_to(&mut a).unwrap();
            page.write_to(&mut b).unwrap();
            assert_eq!(a.len() as u64, page.bytes);
            assert_eq!(a, b);
            assert!(a.ends_with(b"</html>\n"));
        }
        assert_ne!(plan(3), plan(4));
    }

    #[test]
    fn list_of_urls_is_in_order_of_popularity() {
        let directory = tempfile::tempdir().unwrap();
        let pages = write(directory.path(), 1).unwrap();
        let list = fs::read_to_string(directory.path().join("urls.txt")).unwrap();
        let lines: Vec<&str> = list.lines().filter(|l| !l.starts_with('#')).collect();
        assert_eq!(lines.len(), 500);
        assert_eq!(lines[0], "/page-001.html 1000000");
        assert_eq!(lines[9], "/page-010.html 100000");
        for page in pages {
            let file = directory.path().join("site").join(&page.path[1..]);
            assert_eq!(fs::metadata(file).unwrap().len(), page.bytes);
        }
    }
}
