//! A service on three hosts, set up as in `docs/past-one-machine.md`: BIRD and the scripts of
//! `packaging/ecmp` spread the connections, and a host that dies loses only its own.

mod host;
mod load;
mod network;
mod process;
mod router;
mod scripts;

use ginnel_testkit::interop::programs_unavailable;
use ginnel_testkit::processes::wait_until;
use ginnel_testkit::skip;
use ginnel_testkit::steal::repeat_if_stalled;
use host::Host;
use load::Load;
use network::{HOSTS, Network};
use router::Router;
use std::time::{Duration, Instant};

/// Longest time in which the share of a dead host moves to the others.
const MOVE_TIME_MAX: Duration = Duration::from_secs(1);

/// How a host dies.
#[derive(Clone, Copy, Debug)]
enum Death {
    /// The stack's process is killed.
    Stack,
    /// The cable is cut.
    Link,
    /// The web server is killed.
    Server,
    /// The stack's process is stopped.
    Hang,
}

impl Death {
    fn kill(self, host: &mut Host, network: &Network) {
        match self {
            Self::Stack => host.kill_stack(),
            Self::Link => network.set_link(host.number(), "down"),
            Self::Server => host.kill_server(),
            Self::Hang => host.stop_shards(),
        }
    }

    fn revive(self, host: &mut Host, network: &Network) {
        match self {
            Self::Stack => {
                host.kill_server();
                host.start_stack();
                host.start_server();
            }
            Self::Link => network.set_link(host.number(), "up"),
            Self::Server => host.start_server(),
            Self::Hang => host.continue_shards(),
        }
    }
}

/// Returns an error if a connection ended that does not belong to the host `killed`.
fn expect_no_end(load: &Load, killed: Option<usize>, what: &str) -> Result<(), String> {
    match load.take_ends().iter().find(|end| Some(end.host) != killed) {
        Some(end) => Err(format!("{what}: a connection of host {} ended: {}", end.host, end.reason)),
        None => Ok(()),
    }
}

/// Kills a host, waits until the others serve its clients, and brings the host back.
fn kill_and_return(network: &Network, host: &mut Host, load: &Load, death: Death) -> Result<(), String> {
    let what = format!("{death:?} of host {}", host.number());
    let number = host.number();
    load.wait_until_all_answered();
    assert!(load.connections_of(number) > 0, "{what}: no connection is lost");
    expect_no_end(load, None, &what)?;

    let killed = Instant::now();
    death.kill(host, network);
    load.wait_until(&what, |load| load.connections_of(number) == 0);
    load.wait_until_all_answered();
    let moved = load.last_failure_since(killed).map_or(Duration::ZERO, |failure| failure - killed);
    // A stack that hangs is noticed by a deadline, which is most of a second.
    if moved > MOVE_TIME_MAX && !matches!(death, Death::Hang) {
        return Err(format!("{what}: new connections failed for {moved:?}"));
    }
    expect_no_end(load, Some(number), &what)?;

    let what = format!("return from {what}");
    let returns = Instant::now();
    death.revive(host, network);
    load.wait_until(&what, |load| load.new_connection_since(number, returns));
    load.wait_until_all_answered();
    expect_no_end(load, None, &what)
}

#[test]
fn a_dead_host_loses_only_its_connections() {
    let test = "a_dead_host_loses_only_its_connections";
    let programs = ["bird", "birdc", "curl", "nginx", "ip", "bash"];
    let reason = programs_unavailable(&programs).or_else(router::groups_unavailable);
    if let Some(reason) = reason {
        return skip(test, &reason);
    }
    let scenario = || {
        let network = Network::create();
        let mut hosts: Vec<Host> = (1..=HOSTS).map(|number| Host::start(&network, number)).collect();
        let router = Router::start(&network);
        wait_until("the shares are equal", || router.shares_are_equal());
        let load = Load::start(&network);
        kill_and_return(&network, &mut hosts[0], &load, Death::Stack)?;
        kill_and_return(&network, &mut hosts[1], &load, Death::Link)?;
        kill_and_return(&network, &mut hosts[2], &load, Death::Server)?;
        kill_and_return(&network, &mut hosts[0], &load, Death::Hang)
    };
    if let Err(failure) = repeat_if_stalled(scenario) {
        panic!("{failure}");
    }
}
