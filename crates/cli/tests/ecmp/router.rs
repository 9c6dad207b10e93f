//! The router: BIRD, and `resilient-routes`.

use crate::network::{HOSTS, Network};
use crate::process::{Process, example, start_bird};
use ginnel_testkit::interop::Namespace;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Number of buckets of the service's group.
const BUCKETS: usize = 256;
/// Time without a packet after which a bucket may move to a host that returns, in seconds. The connections of
/// the load send more often.
const IDLE_TIMER: &str = "2";

/// The programs of the router. Dropping the value kills them.
pub struct Router<'a> {
    machine: &'a Namespace,
    folder: PathBuf,
    _bird: Process,
    _routes: Process,
}

impl<'a> Router<'a> {
    pub fn start(network: &'a Network) -> Self {
        let machine = &network.router;
        let folder = std::env::temp_dir().join(format!("ginnel-ecmp-{}-router", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let mut routes = Command::new(example("resilient-routes"));
        // The routing table to which `router.bird.conf` exports.
        routes.arg("100").env("BUCKETS", BUCKETS.to_string()).env("IDLE_TIMER", IDLE_TIMER);
        Self {
            machine,
            _bird: start_bird(machine, &folder, &example("router.bird.conf")),
            _routes: Process::start(machine, &folder, "routes", routes),
            folder,
        }
    }

    /// Returns whether each host has about a third of the buckets.
    pub fn shares_are_equal(&self) -> bool {
        let buckets = self.machine.ip("nexthop bucket show").unwrap_or_default();
        let mut shares: BTreeMap<&str, usize> = BTreeMap::new();
        for next_hop in buckets.lines().filter_map(|line| line.split_once(" nhid ")) {
            *shares.entry(next_hop.1.trim()).or_default() += 1;
        }
        shares.len() == HOSTS && shares.values().all(|share| share.abs_diff(BUCKETS / HOSTS) <= 1)
    }
}

impl Drop for Router<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns the error of the kernel if it lacks resilient groups. Returns `None` if it has them, or if there
/// can be no namespaces to try it in.
pub fn groups_unavailable() -> Option<String> {
    let namespace = Namespace::new().ok()?;
    let other = Namespace::new().ok()?;
    namespace.connect("v0", &other, "v1", 1500).ok()?;
    namespace.ip("address add 10.0.0.1/24 dev v0").ok()?;
    namespace.ip("nexthop add id 1 via 10.0.0.2 dev v0").err().map(|e| e.to_string()).or_else(|| {
        namespace.ip("nexthop add id 2 group 1 type resilient buckets 8").err().map(|e| e.to_string())
    })
}
