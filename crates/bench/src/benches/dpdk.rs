//! `ginnel httpd` over drivers of DPDK against the AF_XDP device, on equal veth pairs.

use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::program_comparison::{Figure, ProgramComparison, create_site};
use ginnel_measure::generator::{LoadProtocol, LoadSpec};

/// Measures short connections.
pub fn run(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    if !cfg!(feature = "dpdk") {
        return Err(MeasureError::Skipped(
            "needs DPDK: build with --features dpdk, as scripts/bench does if libdpdk-dev 22.11 or later is installed"
                .into(),
        ));
    }
    let mut results = Vec::new();
    for (part, driver) in [("af_xdp", "net_af_xdp"), ("af_packet", "net_af_packet")] {
        let name = format!("dpdk-vs-af-xdp/{part}");
        if !options.wants(&name) {
            continue;
        }
        let load = LoadSpec::new(LoadProtocol::Http, &["http://10.77.0.1/64", "--connections", "64"]);
        let contest = ProgramComparison::new(name, "connections/s", Figure::Rate, options, load)?;
        let site = create_site(contest.folder())?;
        let ours = Box::new(|| contest.on_httpd_over_dpdk(&site, driver));
        let theirs = Box::new(|| contest.on_httpd(&site));
        results.push(contest.run(ours, Some(theirs))?);
    }
    Ok(results)
}
