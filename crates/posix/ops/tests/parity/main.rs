//! Parity tests: each case runs on the kernel and on the stack, and both transcripts of its calls must be
//! equal.
//!
//! The calls that each case makes on the stack are listed in `calls.txt`, and in a table of `docs/posix.md`;
//! `INDEX.md` counts the cases of each call. `GINNEL_BLESS=1 cargo test -p ginnel-posix-ops --test parity`
//! rewrites all three; without it, a case whose calls differ from its line fails, and so does the test of the
//! tables if they differ from the lines.

mod arrivals;
mod departures;
mod descriptors;
mod document;
mod dual_groups;
mod dual_listeners;
mod epoll;
mod fastopen;
mod filters;
mod flow_labels;
mod group_peers;
mod kernel;
mod listeners;
mod multicast;
mod options;
mod pacing;
mod pipes;
mod ports;
mod proxy_fds;
mod rebind;
mod record;
mod reuseport_programs;
mod signals;
mod stack;
mod states;
mod streams;
mod sys;
mod tcp_options;
mod tx_stamps;
mod udp;
mod udp_batches;
mod udp_destinations;
mod udp_errors;
mod udp_peek;
mod udp_segmentation;
mod urgent;
mod zerocopy;

use ginnel_testkit::interop::enter_new_loopback;
use record::{Record, Recorded};
use stack::Stacks;
use sys::Fixture;

/// The cases of a module.
struct Cases {
    module: &'static str,
    between_hosts: &'static [&'static str],
    over_loopback: &'static [&'static str],
}

/// The modules of all cases. If one is missing here, the document test reports unknown lines in `calls.txt`.
const MODULES: [Cases; 29] = [
    arrivals::tests::CASES,
    descriptors::tests::CASES,
    departures::tests::CASES,
    epoll::tests::CASES,
    fastopen::tests::CASES,
    filters::tests::CASES,
    flow_labels::tests::CASES,
    group_peers::tests::CASES,
    listeners::tests::CASES,
    multicast::tests::CASES,
    options::tests::CASES,
    pacing::tests::CASES,
    pipes::tests::CASES,
    ports::tests::CASES,
    rebind::tests::CASES,
    reuseport_programs::tests::CASES,
    signals::tests::CASES,
    states::tests::CASES,
    streams::tests::CASES,
    tcp_options::tests::CASES,
    tx_stamps::tests::CASES,
    udp::tests::CASES,
    udp_batches::tests::CASES,
    udp_destinations::tests::CASES,
    udp_errors::tests::CASES,
    udp_peek::tests::CASES,
    udp_segmentation::tests::CASES,
    urgent::tests::CASES,
    zerocopy::tests::CASES,
];

/// Moves the calling thread into a network namespace of its own, because sockets of other tests take ports,
/// and their connections remain in TIME_WAIT. Without the right to that, the thread stays where it is.
fn enter_own_namespace() {
    match enter_new_loopback() {
        // Clients and servers open connections fast; by default only clients do.
        Ok(()) => std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "3").expect("tcp_fastopen"),
        Err(e) if e.kind() != std::io::ErrorKind::PermissionDenied => panic!("network namespace: {e}"),
        Err(_) => {}
    }
}

/// Returns the transcript of a case on the kernel. Closes descriptors that the case leaves open, so that
/// numbers stay small enough for `select`.
fn on_kernel(addresses: [std::net::IpAddr; 2], case: fn(&mut Fixture<'_>)) -> Vec<String> {
    enter_own_namespace();
    let record = Record::default();
    let host = Recorded { host: &kernel::Kernel, record: &record };
    let mut fixture = Fixture::new(&host, &host, addresses);
    case(&mut fixture);
    let transcript = fixture.transcript;
    record.close_all();
    transcript
}

/// Runs a case on both, and compares the transcripts, and the calls with their line in the list.
fn compare_between_hosts(module: &str, name: &str, case: fn(&mut Fixture<'_>)) {
    let on_kernel = on_kernel(kernel::ADDRESSES, case);
    let (stacks, record) = (Stacks::start(), Record::default());
    let [a, b] = [stacks.a(), stacks.b()].map(|host| Recorded { host, record: &record });
    let mut on_stack = Fixture::new(&a, &b, stack::ADDRESSES);
    case(&mut on_stack);
    sys::assert_same(&on_kernel, &on_stack.transcript);
    drop(stacks);
    document::compare(module, name, false, &record.close_all());
}

/// Runs a case on both, with one host that plays both roles over loopback.
fn compare_over_loopback(module: &str, name: &str, case: fn(&mut Fixture<'_>)) {
    let (stacks, record) = (Stacks::alone(), Record::default());
    for addresses in [kernel::ADDRESSES, kernel::ADDRESSES_V6] {
        let on_kernel = on_kernel(addresses, case);
        let host = Recorded { host: stacks.a(), record: &record };
        let mut on_stack = Fixture::new(&host, &host, addresses);
        case(&mut on_stack);
        sys::assert_same(&on_kernel, &on_stack.transcript);
    }
    drop(stacks);
    document::compare(module, name, true, &record.close_all());
}

/// Defines a test for each case: those after `over_loopback` run over the stack's loopback, and those after
/// `both` run both ways.
macro_rules! cases {
    ($($(#[$doc:meta])* $name:ident)* $(; over_loopback { $($loopback:ident)* })? $(; both { $($both:ident)* })?) => {
        pub const CASES: crate::Cases = crate::Cases {
            module: module_path!(),
            between_hosts: &[$(stringify!($name),)* $($(stringify!($both),)*)?],
            over_loopback: &[$($(stringify!($loopback),)*)? $($(stringify!($both),)*)?],
        };
        $($(#[$doc])* #[test] fn $name() {
            crate::compare_between_hosts(module_path!(), stringify!($name), super::$name);
        })*
        $($(#[test] fn $loopback() {
            crate::compare_over_loopback(module_path!(), stringify!($loopback), super::$loopback);
        })*)?
        $($(mod $both {
            #[test] fn between_hosts() {
                crate::compare_between_hosts(module_path!(), stringify!($both), super::super::$both);
            }
            #[test] fn over_loopback() {
                crate::compare_over_loopback(module_path!(), stringify!($both), super::super::$both);
            }
        })*)?
    };
}
use cases;
