//! A server that runs by itself with its application in a given placement, and the client on a pinned thread
//! of its own.

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

/// Size of each ring in bytes.
const RING_BYTES: usize = 1 << 20;

/// Configuration of a server.
#[derive(Clone, Copy, Debug)]
pub struct PlacedServer {
    /// Placement of its application.
    pub placement: Placement,
    /// True if connections stay open after a response.
    pub keep_alive: bool,
    /// Place where checksums are computed.
    pub checksums: Checksums,
}

/// Result of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct PlacedResult {
    /// Length of the measurement.
    pub seconds: f64,
    /// Counters of the client for that time.
    pub counts: ClientCounts,
    /// Counters of the stack's shard from its start to its end.
    pub stack: ShardStats,
}

/// Sets the stop flag when dropped, also after an error or a panic, because the scope waits for the server's
/// thread.
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
                // There is no third CPU: the client yields its CPU to the application when it has nothing to
                // do.
                config.shard.application_cpu = u32::try_from(plan.cpus.client).ok();
            }
        };
        let handler = Responder::new(self.keep_alive);
        let server = ShardServer::with_config(device, handler, TcpConfig::default(), clock::now(), change)?;
        Ok(server.into_shard())
    }

    /// Runs the server while `client` uses the other end of the cable. `phase` tells the client that the
    /// server has failed.
    pub fn run_beside<R>(
        self,
        plan: &RunPlan,
        phase: &AtomicU8,
        client: impl FnOnce(Device) -> Result<R, MeasureError>,
    ) -> Result<(R, ShardStats), MeasureError> {
        let (server_end, client_end) = cable(self.checksums, RING_BYTES);
        let stop = StopFlag::new()?;
        let failed = |error: Error| MeasureError::Failed(error.to_string());
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                let _end_of_run = two_threads::StopAtEnd(phase);
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

    /// Measures the rate of a client that sends requests as fast as it can.
    pub fn measure_rate(self, plan: &RunPlan, client: &ClientConfig) -> Result<PlacedResult, MeasureError> {
        let plan = RunPlan { yields_when_idle: true, ..*plan };
        let phase = AtomicU8::new(two_threads::WARM_UP);
        let drive = |device| {
            crate::harness::machine::pin(plan.cpus.client)?;
            Ok(two_threads::drive_client(&plan, client, device, &phase))
        };
        // On a separate thread, so that the calling thread stays unpinned.
        let on_a_thread = |device| {
            let run = || drive(device);
            thread::scope(|scope| scope.spawn(run).join())
                .map_err(|_| MeasureError::Failed("the client panicked".into()))?
        };
        let ((seconds, counts, _), stack) = self.run_beside(&plan, &phase, on_a_thread)?;
        Ok(PlacedResult { seconds, counts, stack })
    }

    /// Measures `times` response times of a sleeping server, in seconds, with pauses of `rest` between.
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
                        return Err(MeasureError::Failed(format!(
                            "no response in time: {:?}",
                            client.counts()
                        )));
                    }
                }
                Ok(started.elapsed().as_secs_f64())
            };
            answered(&mut client, 1)?;
            (2..2 + times as u64)
                .map(|count| {
                    // Handles late frames, then lets the server fall asleep.
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
        self.run_beside(plan, &AtomicU8::new(two_threads::WARM_UP), on_a_thread)
    }
}
