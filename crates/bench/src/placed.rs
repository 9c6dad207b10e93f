//! A server that runs by itself, with its application where a placement says, and the client on a pinned thread of its own.

use crate::client::{Client, ClientConfig, Counts};
use crate::duel::{self, Plan};
use crate::harness::Failure;
use crate::server::{Checksums, Responder, ShardServer, cable};
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
pub struct Placed {
    /// Where its application runs.
    pub placement: Placement,
    /// Whether connections stay.
    pub keep_alive: bool,
    /// Who does checksums.
    pub checksums: Checksums,
}

/// What a measurement found.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// How long it took.
    pub seconds: f64,
    /// What the client did in that time.
    pub counts: Counts,
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

impl Placed {
    fn server(self, plan: &Plan, device: Device) -> Result<Shard<Responder>, Error> {
        let few = thread::available_parallelism().map_or(1, NonZero::get) <= 2;
        let change = |config: &mut ginnel::Config| {
            config.shard.placement = self.placement;
            config.shard.cpu = u32::try_from(plan.cpus.server).ok();
            if self.placement == Placement::Split && few {
                // There is no third: the client lets it have the CPU when it finds nothing to do itself.
                config.shard.application_cpu = u32::try_from(plan.cpus.client).ok();
            }
        };
        let handler = Responder::new(self.keep_alive);
        let server = ShardServer::changed(device, handler, TcpConfig::default(), clock::now(), change)?;
        Ok(server.into_shard())
    }

    /// Runs the server while `client` does something with the other end of the cable.
    pub fn during<R>(
        self,
        plan: &Plan,
        client: impl FnOnce(Device) -> Result<R, Failure>,
    ) -> Result<(R, ShardStats), Failure> {
        let (server_end, client_end) = cable(self.checksums, RING_BYTES);
        let stop = StopFlag::new()?;
        let failed = |error: Error| Failure::Failed(error.to_string());
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                let mut server = self.server(plan, server_end)?;
                server.run(&stop)?;
                Ok(server.stack_stats())
            });
            let end = StopAtEnd(&stop);
            let result = client(client_end);
            drop(end);
            let stack = server.join().map_err(|_| Failure::Failed("the server panicked".into()))?;
            Ok((result?, stack.map_err(failed)?))
        })
    }

    /// Measures what the server does for a client that asks as fast as it can.
    pub fn load(self, plan: &Plan, client: &ClientConfig) -> Result<Found, Failure> {
        let plan = Plan { polite: true, ..*plan };
        let drive = |device| {
            crate::harness::machine::pin(plan.cpus.client)?;
            Ok(duel::drive(&plan, client, device, &AtomicU8::new(0)))
        };
        // On a thread of its own, whose CPU nobody inherits.
        let on_a_thread = |device| {
            let run = || drive(device);
            thread::scope(|scope| scope.spawn(run).join())
                .map_err(|_| Failure::Failed("the client panicked".into()))?
        };
        let ((seconds, counts, _), stack) = self.during(&plan, on_a_thread)?;
        Ok(Found { seconds, counts, stack })
    }

    /// How long an answer of a server that sleeps takes, in seconds, so many times, with `rest` between.
    pub fn wake_ups(
        self,
        plan: &Plan,
        client: &ClientConfig,
        times: usize,
        rest: core::time::Duration,
    ) -> Result<(Vec<f64>, ShardStats), Failure> {
        let drive = |device| {
            crate::harness::machine::pin(plan.cpus.client)?;
            let mut client = Client::new(device, client);
            let answered = |client: &mut Client, count| {
                let begun = std::time::Instant::now();
                while client.counts().done < count {
                    if client.turn(clock::now()) == 0 {
                        thread::yield_now();
                    }
                    if begun.elapsed().as_secs() > 10 {
                        return Err(Failure::Failed(format!("no answer: {:?}", client.counts())));
                    }
                }
                Ok(begun.elapsed().as_secs_f64())
            };
            answered(&mut client, 1)?;
            (2..2 + times as u64)
                .map(|count| {
                    // Takes what came late, then lets the server fall asleep.
                    client.turn(clock::now());
                    thread::sleep(rest);
                    client.ask_again();
                    answered(&mut client, count)
                })
                .collect()
        };
        let on_a_thread = |device| {
            let run = || drive(device);
            thread::scope(|scope| scope.spawn(run).join())
                .map_err(|_| Failure::Failed("the client panicked".into()))?
        };
        self.during(plan, on_a_thread)
    }
}
