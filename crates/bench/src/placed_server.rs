//! A server that runs by itself, with its application where a placement says, and the client on a pinned thread of its own.

use crate::client::{Client, ClientConfig, ClientCounts};
use crate::harness::MeasureError;
use crate::server::{Checksums, Responder, ShardServer, cable};
use crate::two_threads::{self, RunPlan};
use ginnel::config::Placement;
use ginnel::{Error, Shard, ShardStats, StopFlag, clock};
use ginnel_stack::device::Device;
use ginnel_stack::tcp::config::TcpConfig;
use std::num::NonZero;
use std::sync::atomic::AtomicU8;
use std::thread;

/// Bytes of each ring.
const RING_BYTES: usize = 1 << 20;

/// What a server is to be like.
#[derive(Clone, Copy, Debug)]
pub struct PlacedServer {
    /// Where its application runs.
    pub placement: Placement,
    /// Whether connections stay.
    pub keep_alive: bool,
    /// Who does checksums.
    pub checksums: Checksums,
}

/// What a measurement found.
#[derive(Clone, Copy, Debug)]
pub struct PlacedResult {
    /// How long it took.
    pub seconds: f64,
    /// What the client did in that time.
    pub counts: ClientCounts,
    /// What the stack's shard counted from beginning to end.
    pub stack: ShardStats,
}

/// Sets the flag when it goes, whatever happens: the server's thread is waited for.
struct StopAtEnd<'a>(&'a StopFlag);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl PlacedServer {
    fn server(self, plan: &RunPlan, device: Device) -> Result<Shard<Responder>, Error> {
        let has_two_cpus = thread::available_parallelism().map_or(1, NonZero::get) <= 2;
        let change = |config: &mut ginnel::Config| {
            config.shard.placement = self.placement;
            config.shard.cpu = u32::try_from(plan.cpus.server).ok();
            if self.placement == Placement::Split && has_two_cpus {
                // There is no third: the client lets it have the CPU when it finds nothing to do itself.
                config.shard.application_cpu = u32::try_from(plan.cpus.client).ok();
            }
        };
        let handler = Responder::new(self.keep_alive);
        let server = ShardServer::with_config(device, handler, TcpConfig::default(), clock::now(), change)?;
        Ok(server.into_shard())
    }

    /// Runs the server while `client` does something with the other end of the cable.
    pub fn run_beside<R>(
        self,
        plan: &RunPlan,
        client: impl FnOnce(Device) -> Result<R, MeasureError>,
    ) -> Result<(R, ShardStats), MeasureError> {
        let (server_end, client_end) = cable(self.checksums, RING_BYTES);
        let stop = StopFlag::new()?;
        let failed = |error: Error| MeasureError::Failed(error.to_string());
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                let mut server = self.server(plan, server_end)?;
                server.run(&stop)?;
                Ok(server.stack_stats())
            });
            let stop_at_end = StopAtEnd(&stop);
            let result = client(client_end);
            drop(stop_at_end);
            let stack = server.join().map_err(|_| MeasureError::Failed("the server panicked".into()))?;
            Ok((result?, stack.map_err(failed)?))
        })
    }

    /// Measures what the server does for a client that asks as fast as it can.
    pub fn measure_rate(self, plan: &RunPlan, client: &ClientConfig) -> Result<PlacedResult, MeasureError> {
        let plan = RunPlan { yields_when_idle: true, ..*plan };
        let drive = |device| {
            crate::harness::machine::pin(plan.cpus.client)?;
            Ok(two_threads::drive_client(&plan, client, device, &AtomicU8::new(0)))
        };
        // On a thread of its own, whose CPU nobody inherits.
        let on_a_thread = |device| {
            let run = || drive(device);
            thread::scope(|scope| scope.spawn(run).join())
                .map_err(|_| MeasureError::Failed("the client panicked".into()))?
        };
        let ((seconds, counts, _), stack) = self.run_beside(&plan, on_a_thread)?;
        Ok(PlacedResult { seconds, counts, stack })
    }

    /// How long an answer of a server that sleeps takes, in seconds, so many times, with `rest` between.
    pub fn measure_wake_ups(
        self,
        plan: &RunPlan,
        client: &ClientConfig,
        times: usize,
        rest: core::time::Duration,
    ) -> Result<(Vec<f64>, ShardStats), MeasureError> {
        let drive = |device| {
            crate::harness::machine::pin(plan.cpus.client)?;
            let mut client = Client::new(device, client);
            let answered = |client: &mut Client, count| {
                let started = std::time::Instant::now();
                while client.counts().done < count {
                    if client.turn(clock::now()) == 0 {
                        thread::yield_now();
                    }
                    if started.elapsed().as_secs() > 10 {
                        return Err(MeasureError::Failed(format!("no answer: {:?}", client.counts())));
                    }
                }
                Ok(started.elapsed().as_secs_f64())
            };
            answered(&mut client, 1)?;
            (2..2 + times as u64)
                .map(|count| {
                    // Takes what came late, then lets the server fall asleep.
                    client.turn(clock::now());
                    thread::sleep(rest);
                    client.request_again();
                    answered(&mut client, count)
                })
                .collect()
        };
        let on_a_thread = |device| {
            let run = || drive(device);
            thread::scope(|scope| scope.spawn(run).join())
                .map_err(|_| MeasureError::Failed("the client panicked".into()))?
        };
        self.run_beside(plan, on_a_thread)
    }
}
