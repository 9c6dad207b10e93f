//! Suites that are built from the source packages of Debian.

use crate::selftests::run_selftests;
use crate::side::{Side, assert_ended, command};
use crate::verdict::{Verdicts, prove_verdicts, redis_verdicts, tap_verdicts, tinytest_verdicts};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Units of redis' tests that are about connections: clients, blocking commands, replication, tools.
const REDIS_UNITS: &[&str] = &[
    "unit/protocol",
    "unit/auth",
    "unit/querybuf",
    "unit/limits",
    "unit/networking",
    "unit/introspection",
    "unit/introspection-2",
    "unit/pubsub",
    "unit/pubsubshard",
    "unit/tracking",
    "unit/client-eviction",
    "unit/wait",
    "unit/pause",
    "unit/shutdown",
    "unit/type/list",
    "unit/obuf-limits",
    "unit/other",
    "unit/replybufsize",
    "integration/block-repl",
    "integration/replication",
    "integration/replication-2",
    "integration/replication-3",
    "integration/replication-4",
    "integration/replication-buffer",
    "integration/replication-psync",
    "integration/psync2",
    "integration/psync2-reg",
    "integration/psync2-pingoff",
    "integration/redis-cli",
    "integration/redis-benchmark",
    "integration/shutdown",
    "integration/failover",
    "integration/logging",
];

/// Runs perl's tests of modules that use sockets, each in the folder of its module.
const PERL: &str = "for module in cpan/HTTP-Tiny cpan/IO-Socket-IP cpan/Socket cpan/libnet dist/IO dist/Net-Ping; do \
    (cd $module && prove -j2 t | sed s:^t/:$module/:); done; prove t/io/socket.t t/io/socketpair.t";

type Run = fn(Side, &Path) -> Verdicts;

/// Suites, their source packages, and what runs them in the folder of the sources.
pub(crate) const FROM_SOURCE: &[(&str, &str, Run)] = &[
    ("Linux selftests `net`", "linux", run_selftests),
    ("libevent, `epoll`", "libevent", |side, folder| run_libevent(side, folder, &[])),
    ("libevent, `epoll` with changelists", "libevent", |side, folder| {
        run_libevent(side, folder, &[("EVENT_EPOLL_USE_CHANGELIST", "1")])
    }),
    ("libevent, `poll`", "libevent", |side, folder| run_libevent(side, folder, &[("EVENT_NOEPOLL", "1")])),
    ("libevent, `select`", "libevent", |side, folder| {
        run_libevent(side, folder, &[("EVENT_NOEPOLL", "1"), ("EVENT_NOPOLL", "1")])
    }),
    ("libuv", "libuv1", run_libuv),
    ("memcached, files of tests", "memcached", run_memcached),
    ("perl, files of tests", "perl", run_perl),
    ("redis, units about connections", "redis", run_redis),
];

/// Returns the folder of a source package whose tests were built, or `None` if there is no network.
pub(crate) fn built_source(package: &str) -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/suite-source");
    let output = Command::new(script).arg(package).stderr(Stdio::inherit()).output().unwrap();
    output.status.success().then(|| PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()))
}

/// Runs a suite in the folder of its sources. Returns what it prints, without colours.
fn run_source(side: Side, folder: &Path, environment: &[(&str, &str)], words: &[&str]) -> String {
    let mut command = command(side, folder, words);
    command.envs(environment.iter().copied());
    let output = command.output().unwrap();
    assert_ended(&output, side, words);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut parts = text.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('m').map_or("", |(_, rest)| rest))
}

fn run_libevent(side: Side, folder: &Path, environment: &[(&str, &str)]) -> Verdicts {
    tinytest_verdicts(&run_source(side, folder, environment, &["build/bin/regress"]))
}

fn run_libuv(side: Side, folder: &Path) -> Verdicts {
    tap_verdicts(&run_source(side, folder, &[("UV_RUN_AS_ROOT", "1")], &["build/uv_run_tests"]))
}

fn run_memcached(side: Side, folder: &Path) -> Verdicts {
    prove_verdicts(&run_source(side, folder, &[], &["prove", "-j2", "t/"]))
}

fn run_perl(side: Side, folder: &Path) -> Verdicts {
    prove_verdicts(&run_source(side, folder, &[], &["sh", "-c", PERL]))
}

fn run_redis(side: Side, folder: &Path) -> Verdicts {
    let mut words = vec!["./runtest", "--clients", "3", "--timeout", "300", "--tags", "-slow"];
    REDIS_UNITS.iter().for_each(|unit| words.extend(["--single", unit]));
    redis_verdicts(&run_source(side, folder, &[], &words))
}
