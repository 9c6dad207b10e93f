//! Static pages: `ginnel httpd` with the 500 pages of the corpus, over memory.

use super::vs_smoltcp::checksums;
use crate::client::{ClientConfig, Mode};
use crate::harness::machine::Cpus;
use crate::harness::pairs::{self, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::server::{ShardServer, cable, link_setup};
use crate::two_threads::{self, RunPlan};
use clap::Parser;
use ginnel_apps::{corpus, httpd};
use ginnel_stack::tcp::config::TcpConfig;

/// Concurrent connections, each of which requests page after page.
const CONNECTIONS: u32 = 32;
/// Size of each ring in bytes: some GSO frames of every connection.
const RING_BYTES: usize = 8 << 20;
/// Window scale of the client: windows of 8 MiB.
const WINDOW_SCALE: u8 = 7;
/// Seed of the corpus.
const SEED: u64 = 1;

/// Parser for the options of the server.
#[derive(Debug, Parser)]
struct CorpusCommand {
    #[command(flatten)]
    options: httpd::HttpdOptions,
}

/// Requests all pages in turn, on persistent connections.
pub fn run(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let plan = RunPlan::new(Cpus::choose()?, options.seconds(3.0));
    let checksums = checksums(options);
    let folder = tempfile::tempdir()?;
    let pages = corpus::write(folder.path(), SEED)?;
    let site = folder.path().join("site");
    let words = ["httpd".as_ref(), site.as_os_str(), "--listen".as_ref(), "0.0.0.0:80".as_ref()];
    let command = CorpusCommand::try_parse_from(words).map_err(|e| MeasureError::Failed(e.to_string()))?;
    let client = ClientConfig {
        wire: link_setup(checksums),
        mode: Mode::KeepAlive,
        connections: CONNECTIONS,
        requests: pages.iter().map(|p| request(&p.path)).collect(),
        window_scale: Some(WINDOW_SCALE),
    };
    let ours = || -> Result<Measurement, MeasureError> {
        let server = httpd::Httpd::new(&command.options).map_err(|e| MeasureError::Failed(e.to_string()))?;
        let cable = cable(checksums, RING_BYTES);
        let sample = two_threads::run(&plan, &client, cable, |device, now| {
            ShardServer::new(device, server, TcpConfig::default(), now).expect("the configuration is valid")
        })?;
        let mut measured = sample.rate();
        measured.facts.insert("pages_per_second".into(), measured.value);
        measured.value = sample.counts.bytes as f64 * 8.0 / sample.seconds / 1e9;
        Ok(measured)
    };
    Ok(vec![pairs::run("corpus", "Gbit/s", options, Bound::Machine, Box::new(ours), None)?])
}

fn request(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n").into_bytes()
}
