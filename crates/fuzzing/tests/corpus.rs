//! The committed corpus: it contains the code's seed inputs, passes, and reaches what it was written for.

use ginnel::channel::ChannelStats;
use ginnel_fuzzing::{TARGETS, Target, channel, frames};
use ginnel_stack::tcp::state::State;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

fn folder(target: &Target) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus")).join(target.name)
}

/// Returns name and content of each committed input.
fn committed(target: &Target) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder(target)).expect("the corpus of the target");
    let mut found: Vec<_> = entries
        .map(|entry| {
            let entry = entry.expect("an entry of the corpus");
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, fs::read(entry.path()).expect("an input"))
        })
        .collect();
    found.sort();
    assert!(!found.is_empty(), "no corpus for {}", target.name);
    found
}

/// The corpus may also contain inputs found by fuzzing.
#[test]
fn handwritten_inputs_are_committed() {
    for target in &TARGETS {
        let folder = folder(target);
        for (name, data) in (target.seeds)() {
            let path = folder.join(name);
            if std::env::var_os("GINNEL_WRITE_CORPUS").is_some() {
                fs::create_dir_all(&folder).expect("the folder of the corpus");
                fs::write(&path, &data).expect("an input");
            }
            let hint = "GINNEL_WRITE_CORPUS=1 rewrites the corpus";
            assert!(
                fs::read(&path).is_ok_and(|d| d == data),
                "{}/{name} differs from the code: {hint}",
                target.name
            );
        }
    }
}

#[test]
fn every_committed_input_passes() {
    for target in &TARGETS {
        for (name, data) in committed(target) {
            println!("{}/{name}", target.name);
            (target.run)(&data);
        }
    }
}

#[test]
fn the_corpus_reaches_every_state_of_a_connection() {
    let mut states = BTreeSet::new();
    for (_, data) in committed(&TARGETS[0]) {
        states.extend(frames::run(&data).states);
    }
    use State::*;
    let all = [
        Closed,
        Listen,
        SynSent,
        SynReceived,
        Established,
        FinWait1,
        FinWait2,
        CloseWait,
        Closing,
        LastAck,
        TimeWait,
    ];
    assert_eq!(states, BTreeSet::from(all));
}

#[test]
fn corpus_covers_datagrams_and_their_errors() {
    let runs: Vec<_> = committed(&TARGETS[0]).iter().map(|(_, data)| frames::run(data).udp).collect();
    let (received, errors) = runs.iter().fold((0, 0), |(r, e), d| (r + d.received, e + d.errors));
    assert!(received > 10 && errors > 5, "{received} datagrams, {errors} errors");
}

#[test]
fn channel_corpus_causes_violations_and_refusals() {
    let target = TARGETS.iter().find(|target| target.name == "channel").expect("the target");
    let (mut sum, mut datagrams, mut preallocated) = (ChannelStats::default(), 0, 0);
    for (_, data) in committed(target) {
        let summary = channel::run_counted(&data);
        sum = sum + summary.stats;
        datagrams += summary.datagrams;
        preallocated += summary.preallocated_connects;
    }
    assert!(
        sum.violations > 5 && sum.sockets_refused > 0 && sum.accepted > 5 && sum.doorbells > 100,
        "{sum:?}"
    );
    assert!(
        datagrams > 20 && preallocated > 10,
        "{datagrams} datagrams, {preallocated} connections on preallocated sockets"
    );
}

#[test]
fn equal_inputs_have_equal_effects() {
    for (name, data) in committed(&TARGETS[0]) {
        let (first, second) = (frames::run(&data), frames::run(&data));
        assert_eq!((first.events, first.frames), (second.events, second.frames), "{name}");
    }
}
