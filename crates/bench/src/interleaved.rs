//! Measures two servers on one CPU and their clients on another in alternating slices of milliseconds, so
//! that disturbances by the machine affect both.
//!
//! On a shared machine the speed of a core may halve from one second to the next, and the host may take a
//! core away. A pair of measurements that take seconds then says more about the machine than about the
//! servers.

use crate::client::{Client, ClientConfig, ClientCounts};
use crate::harness::machine::pin;
use crate::server::Server;
use crate::two_threads::{PollTime, RunPlan, RunResult};
use core::time::Duration;
use ginnel::clock;
use ginnel_stack::device::Device;
use ginnel_stack::time::Instant;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

/// Warm-up of a slice, in which the server's code and data return to the caches.
const WARM_UP: Duration = Duration::from_micros(1500);
/// Measured part of a slice. It is short compared with the timers of both stacks, which see the other's slice
/// as idle time.
const SLICE: Duration = Duration::from_millis(5);
/// A pause of this length occurs only if the host took a CPU away. Both arms then drop the slice.
const STALL_MIN: Duration = Duration::from_micros(300);
/// If a larger share of slices was dropped, the machine is too busy.
const STALLED_SHARE_MAX: f64 = 0.5;

/// Added to the number of the arm in `phase` while the slice is measured.
const MEASURED: u8 = 2;
const STOP: u8 = 4;

/// Measures both servers, each for the time of the plan.
pub fn run<A: Server, B: Server>(
    plan: &RunPlan,
    client: &ClientConfig,
    cables: [(Device, Device); 2],
    ours: impl FnOnce(Device, Instant) -> A + Send,
    theirs: impl FnOnce(Device, Instant) -> B + Send,
) -> io::Result<[RunResult; 2]> {
    let phase = AtomicU8::new(0);
    let [(our_server, our_client), (their_server, their_client)] = cables;
    std::thread::scope(|scope| {
        let servers = scope.spawn(|| -> io::Result<_> {
            pin(plan.cpus.server)?;
            let mut ours = ours(our_server, clock::now());
            let mut theirs = theirs(their_server, clock::now());
            let loads = serve(&mut ours, &mut theirs, &phase);
            Ok((loads, [ours.facts(), theirs.facts()]))
        });
        let driven = scope.spawn(|| -> io::Result<_> {
            let driven = pin(plan.cpus.client).map(|()| {
                let mut clients = [Client::new(our_client, client), Client::new(their_client, client)];
                drive_clients(plan, &mut clients, &phase)
            });
            phase.store(STOP, Ordering::Relaxed);
            driven
        });
        let driven = driven.join().expect("the clients do not panic")?;
        let (loads, facts) = servers.join().expect("the servers do not panic")?;
        let samples = driven.into_iter().zip(loads).zip(facts);
        let samples: Vec<RunResult> = samples
            .map(|((driven, server), server_facts)| RunResult {
                seconds: driven.time.as_secs_f64(),
                counts: driven.counts,
                server,
                client: driven.load,
                server_facts,
                problems: driven.problems,
            })
            .collect();
        Ok(samples.try_into().expect("there are two samples"))
    })
}

fn serve(ours: &mut impl Server, theirs: &mut impl Server, phase: &AtomicU8) -> [PollTime; 2] {
    let mut loads = [PollTime::default(); 2];
    // Polls without frames since the last frame: dropped if the CPU was taken away.
    let mut idle = PollTime::default();
    let mut now = clock::now();
    loop {
        let phase = phase.load(Ordering::Relaxed);
        if phase == STOP {
            return loads;
        }
        let arm = usize::from(phase % MEASURED);
        let frames = if arm == 0 { ours.turn(now) } else { theirs.turn(now) };
        let end = clock::now();
        if frames == 0 {
            idle.count(0, end - now);
        } else {
            if phase >= MEASURED {
                if idle.idle_for() < STALL_MIN {
                    loads[arm].add(&idle);
                }
                loads[arm].count(frames, end - now);
            }
            idle = PollTime::default();
        }
        now = end;
    }
}

/// Results of a client's measured slices.
#[derive(Default)]
struct ArmResult {
    time: Duration,
    counts: ClientCounts,
    load: PollTime,
    problems: Vec<String>,
}

/// The loop of the clients.
fn drive_clients(plan: &RunPlan, clients: &mut [Client; 2], phase: &AtomicU8) -> [ArmResult; 2] {
    let mut driven = [ArmResult::default(), ArmResult::default()];
    let begin = clock::now();
    let (mut slices, mut stalled) = (0_u32, 0_u32);
    while clock::now() - begin < 2 * (plan.warm_up + plan.measure) {
        let slice = [0, 1].map(|arm| {
            phase.store(arm as u8, Ordering::Relaxed);
            drive_client_for(WARM_UP, &mut clients[arm]);
            phase.store(arm as u8 + MEASURED, Ordering::Relaxed);
            drive_client_for(SLICE, &mut clients[arm])
        });
        if clock::now() - begin < 2 * plan.warm_up {
            continue;
        }
        slices += 1;
        if slice.iter().any(|turn| turn.longest_wait >= STALL_MIN) {
            stalled += 1;
            continue;
        }
        for (driven, slice) in driven.iter_mut().zip(slice) {
            driven.time += slice.time;
            driven.counts = driven.counts.plus(&slice.counts);
            driven.load.add(&slice.load);
        }
    }
    if f64::from(stalled) > STALLED_SHARE_MAX * f64::from(slices) || stalled == slices {
        driven[0].problems.push(format!("the machine was stalled in {stalled} of {slices} slices"));
    }
    driven
}

struct SliceResult {
    time: Duration,
    counts: ClientCounts,
    load: PollTime,
    longest_wait: Duration,
}

fn drive_client_for(time: Duration, client: &mut Client) -> SliceResult {
    let before = client.counts();
    let started = clock::now();
    let (mut now, mut progress) = (started, started);
    let (mut load, mut longest_wait) = (PollTime::default(), Duration::ZERO);
    while now - started < time {
        let frames = client.turn(now);
        let end = clock::now();
        load.count(frames, end - now);
        now = end;
        longest_wait = longest_wait.max(now - progress);
        if frames > 0 {
            progress = now;
        }
    }
    SliceResult { time: now - started, counts: client.counts().since(&before), load, longest_wait }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Mode;
    use crate::harness::MeasureError;
    use crate::harness::machine::Cpus;
    use crate::http;
    use crate::server::{Checksums, EngineOptions, EngineServer, SmoltcpServer, cable, link_setup};
    use ginnel_testkit::steal;

    #[test]
    fn both_servers_work_in_turns() {
        let cpus = match Cpus::choose() {
            Err(MeasureError::Skipped(reason)) => {
                return ginnel_testkit::skip("both_servers_work_in_turns", &reason);
            }
            cpus => cpus.unwrap(),
        };
        let client = ClientConfig {
            wire: link_setup(Checksums::Device),
            mode: Mode::Short,
            connections: 4,
            requests: vec![http::REQUEST.to_vec()],
            window_scale: None,
        };
        let measured = steal::repeat_if_stalled(|| {
            let cables = [cable(Checksums::Device, 1 << 16), cable(Checksums::Device, 1 << 16)];
            let samples = run(
                &RunPlan::new(cpus, 0.5),
                &client,
                cables,
                |device, now| EngineServer::new(device, EngineOptions::new(false), now),
                |device, now| SmoltcpServer::new(device, Checksums::Device, 4, false, now),
            )
            .unwrap();
            // On a busy machine all slices may have been dropped, and then the result says so. The servers
            // count the work in those slices, too, unless they did not run.
            let is_stalled = samples[0].problems.iter().any(|problem| problem.contains("stalled"));
            for (sample, name) in samples.iter().zip(["time_wait", "sockets_reused"]) {
                assert_eq!(sample.counts.resets, 0, "{sample:?}");
                let (_, served) = sample.server_facts.iter().find(|(fact, _)| *fact == name).unwrap();
                if *served == 0 || sample.counts.done == 0 && !is_stalled {
                    return Err(format!("{sample:?}"));
                }
            }
            Ok(())
        });
        assert!(measured.is_ok(), "{measured:?}");
    }
}
