//! Latency of urgent messages while the server is overloaded, with and without priorities.
//!
//! A generator in a thread of its own sends messages on many connections at a fixed rate, above what the
//! server's thread can answer. One connection in twenty sends urgent messages, which a rule recognizes by a
//! byte of the payload. Latency counts from the time at which a message was due. A message that was not
//! answered until the end counts with its age then, and so does one that could not be sent.

use crate::harness::machine::{Cpus, pin};
use crate::harness::pairs::{self, Arm, Better, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{
    Config, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Shard, SocketOptions,
    StatsReader, StopFlag, clock,
};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
use std::collections::VecDeque;
use std::sync::mpsc;
use std::thread;

/// Time that the server's application takes for a message.
const COST: Duration = Duration::from_micros(10);
/// Messages per second, relative to what the server can answer at the most.
const OVERLOAD: f64 = 1.5;
const CONNECTIONS: usize = 400;
/// Number of connections among which one sends urgent messages.
const URGENT_EACH: usize = 20;
const MESSAGE_BYTES: usize = 200;
/// Position of the label in a message, and its value in urgent ones.
const LABEL_AT: usize = 6;
const URGENT: u8 = 2;
/// Largest number of unanswered messages of a connection; further ones are not sent.
const WAITING_MAX: usize = 4096;
/// Largest idle share of an overloaded server.
const IDLE_SHARE_MAX: f64 = 0.02;
/// Largest delay of the generator, at the 99th percentile.
const LATE_MAX: Duration = Duration::from_millis(1);

/// Smallest ratio of the 99th percentiles of usual and of urgent messages with priorities.
const USUAL_OVER_URGENT_MIN: f64 = 10.0;
/// Smallest ratio of the 99th percentiles of urgent messages without priorities and with them.
const GAIN_MIN: f64 = 10.0;

const RULES: &str = r#"
[[priority.rules]]
priority = 6
protocol = "tcp"
payload = { offset_bytes = 6, value = "02" }
"#;

/// Measures the 99th percentile of urgent messages under overload, with priorities and without.
pub fn overload(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let measure = Duration::from_secs_f64(options.seconds(3.0));
    let cpus = Cpus::choose()?;
    let ours: Arm<'_> = Box::new(|| run(cpus, true, measure));
    let theirs: Arm<'_> = Box::new(|| run(cpus, false, measure));
    let name = "priority-overload";
    let unit = "µs, p99 of urgent";
    let mut result = pairs::run_for(Better::Lower, name, unit, options, Bound::Machine, ours, Some(theirs))?;
    let problems = missed_goals(&result);
    result.problems.extend(problems);
    Ok(vec![result])
}

/// Returns a problem for each goal that the result misses, or for which a figure is missing.
fn missed_goals(result: &BenchResult) -> Vec<String> {
    let usual_over_urgent = result.our_facts.get("usual_over_urgent").copied();
    let goals = [
        (usual_over_urgent, USUAL_OVER_URGENT_MIN, "p99 of usual messages over p99 of urgent ones"),
        (result.ratio, GAIN_MIN, "p99 of urgent messages without priorities over p99 with them"),
    ];
    let missed = goals.into_iter().filter(|(figure, min, _)| figure.is_none_or(|figure| figure < *min));
    missed
        .map(|(figure, min, name)| match figure {
            Some(figure) => format!("the goal is missed: {name} is {figure:.1}, at least {min} is the goal"),
            None => format!("the goal is missed: {name} is unknown"),
        })
        .collect()
}

/// Answers messages, and takes [`COST`] for each.
struct Server;

impl Handler for Server {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        let address = "0.0.0.0:80".parse().map_err(|_| Error::application("address"))?;
        cx.listen(address, ListenOptions { socket, ..ListenOptions::default() }).map(|_| ())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let messages = data.chunks_exact(MESSAGE_BYTES);
        let consumed = messages.len() * MESSAGE_BYTES;
        for message in messages {
            let until = clock::now() + COST;
            while clock::now() < until {
                core::hint::spin_loop();
            }
            // A short send cannot happen: answers are much smaller than the send buffer.
            let _ = cx.send(conn, &message[..1]);
        }
        consumed
    }
}

/// A connection of the generator.
#[derive(Default)]
struct Sender {
    conn: Option<Conn>,
    /// Due times of the unanswered messages that were sent, at least in part.
    waiting: VecDeque<Instant>,
    /// Number of bytes at the end of the last message in `waiting` that have not been sent.
    rest: usize,
    /// Due times of the messages that could not be sent.
    unsent: Vec<Instant>,
}

/// Sends messages when they are due.
struct Generator {
    senders: Vec<Sender>,
    connected: usize,
    /// Latencies of usual and of urgent messages.
    latencies: [Vec<Duration>; 2],
    /// Delays of the generator itself.
    late: Vec<Duration>,
    is_measuring: bool,
}

const fn is_urgent(sender: usize) -> bool {
    sender.is_multiple_of(URGENT_EACH)
}

/// Returns a message of this sender.
fn message(sender: usize) -> [u8; MESSAGE_BYTES] {
    let mut message = [0; MESSAGE_BYTES];
    message[LABEL_AT] = if is_urgent(sender) { URGENT } else { 0 };
    message
}

impl Generator {
    fn new() -> Self {
        Self {
            senders: (0..CONNECTIONS).map(|_| Sender::default()).collect(),
            connected: 0,
            latencies: [Vec::new(), Vec::new()],
            late: Vec::new(),
            is_measuring: false,
        }
    }

    fn send(&mut self, cx: &mut Context<'_>, number: usize, due: Instant) {
        if self.is_measuring {
            self.late.push(clock::now() - due);
        }
        let is_possible = self.finish(cx, number) && self.senders[number].waiting.len() < WAITING_MAX;
        let sender = &mut self.senders[number];
        let sent = match sender.conn {
            Some(conn) if is_possible => cx.send(conn, &message(number)).unwrap_or(0),
            _ => 0,
        };
        if sent == 0 {
            sender.unsent.push(due);
        } else {
            sender.waiting.push_back(due);
            sender.rest = MESSAGE_BYTES - sent;
        }
    }

    /// Sends what is left of the last message of a connection. Returns false if some of it is still left.
    fn finish(&mut self, cx: &mut Context<'_>, number: usize) -> bool {
        let sender = &mut self.senders[number];
        if sender.rest > 0
            && let Some(conn) = sender.conn
        {
            sender.rest -= cx.send(conn, &message(number)[MESSAGE_BYTES - sender.rest..]).unwrap_or(0);
        }
        sender.rest == 0
    }

    fn record(&mut self, number: usize, due: Instant, now: Instant) {
        if self.is_measuring {
            self.latencies[usize::from(is_urgent(number))].push(now - due);
        }
    }
}

impl Handler for Generator {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        for number in 0..CONNECTIONS {
            let address = "10.0.0.1:80".parse().map_err(|_| Error::application("address"))?;
            let conn = cx.connect(address, ConnectOptions { socket, ..ConnectOptions::default() })?;
            cx.set_token(conn, number as u32).map_err(|_| Error::application("the connection ended"))?;
            self.senders[number].conn = Some(conn);
        }
        Ok(())
    }

    fn connected(&mut self, _: &mut Context<'_>, _: Conn) {
        self.connected += 1;
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let now = clock::now();
        let number = cx.token(conn).map_or(0, |token| token as usize);
        for _ in data {
            if let Some(due) = self.senders[number].waiting.pop_front() {
                self.record(number, due, now);
            }
        }
        data.len()
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Ok(number) = cx.token(conn) {
            self.finish(cx, number as usize);
        }
    }
}

fn config(address: &str, rules: &str) -> Result<Config, MeasureError> {
    let failed = |e: &dyn std::fmt::Display| MeasureError::Failed(e.to_string());
    let address = address.parse().map_err(|_| MeasureError::Failed("address".into()))?;
    let single = Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &[address], &[]);
    let priority = Config::from_toml("rules", rules).map_err(|e| failed(&e))?.priority;
    Ok(Config { priority, ..single })
}

fn run(cpus: Cpus, has_priorities: bool, measure: Duration) -> Result<Measurement, MeasureError> {
    let (near, far) = pair(MemoryConfig { ring_bytes: 16 << 20, ..MemoryConfig::default() });
    let server_config = config("10.0.0.1/24", if has_priorities { RULES } else { "" })?;
    let stop = StopFlag::new().map_err(|e| MeasureError::Failed(e.to_string()))?;
    thread::scope(|scope| {
        let (send_reader, reader) = mpsc::channel();
        let stop = &stop;
        let server = scope.spawn(move || -> Result<_, MeasureError> {
            pin(cpus.server)?;
            let server = Shard::builder(server_config).handler(Server).device("cable", near);
            let mut server = server.build().map_err(|e| MeasureError::Failed(e.to_string()))?;
            // Fails only if the generator has ended with an error.
            let _ = send_reader.send(server.stats_reader());
            server.run(stop).map_err(|e| MeasureError::Failed(e.to_string()))?;
            Ok(*server.stats())
        });
        let reader = reader.recv().map_err(|_| MeasureError::Failed("the server did not start".into()));
        let generator = scope.spawn(move || generate(cpus, far, measure, &reader?));
        let generated = generator.join().map_err(|_| MeasureError::Failed("the generator panicked".into()));
        stop.stop();
        let server = server.join().map_err(|_| MeasureError::Failed("the server panicked".into()))??;
        let mut measured = generated??;
        let shed = server.priority0_shed as f64;
        measured.facts.insert("shed".into(), shed);
        measured.facts.insert("frames_queued".into(), server.frames_queued as f64);
        Ok(measured)
    })
}

/// Runs the generator on this thread, which stays pinned.
fn generate(
    cpus: Cpus,
    device: Device,
    measure: Duration,
    server: &StatsReader,
) -> Result<Measurement, MeasureError> {
    pin(cpus.client)?;
    let failed = |e: Error| MeasureError::Failed(e.to_string());
    let client = Shard::builder(config("10.0.0.2/24", "")?).handler(Generator::new()).device("cable", device);
    let mut client = client.build().map_err(failed)?;
    let begun = clock::now();
    while client.handler().connected < CONNECTIONS {
        let now = clock::now();
        client.poll_once(now).map_err(failed)?;
        if now - begun > Duration::from_secs(10) {
            return Err(MeasureError::Failed("the connections did not open within 10 s".into()));
        }
    }
    let interval = COST.div_f64(OVERLOAD);
    let warm_up = measure / 3;
    let start = clock::now();
    let (mut sent, mut due_at_begin) = (0_u32, 0);
    let mut before = server.snapshot();
    loop {
        let now = clock::now();
        if now - start >= warm_up + measure {
            break;
        }
        if !client.handler().is_measuring && now - start >= warm_up {
            client.handler_mut().is_measuring = true;
            due_at_begin = waiting_and_unsent(client.handler()).iter().sum();
            before = server.snapshot();
        }
        client.with(now, |generator, cx| {
            while start + interval * sent <= now {
                // Neighbouring messages belong to different connections.
                generator.send(cx, sent as usize % CONNECTIONS, start + interval * sent);
                sent += 1;
            }
        });
        client.poll_once(now).map_err(failed)?;
    }
    let after = server.snapshot();
    let mut measured = evaluate(client.handler_mut(), clock::now(), due_at_begin);
    let idle = (after.idle_ns - before.idle_ns) as f64 / (after.running_ns - before.running_ns).max(1) as f64;
    measured.facts.insert("server_idle".into(), idle);
    if idle > IDLE_SHARE_MAX {
        measured.problems.push(format!("the server was idle for {:.1} % of the time", idle * 100.0));
    }
    Ok(measured)
}

/// Returns the number of messages that were sent and not answered, and the number of those that could not be
/// sent.
fn waiting_and_unsent(generator: &Generator) -> [u64; 2] {
    let sum = |count: fn(&Sender) -> usize| generator.senders.iter().map(count).sum::<usize>() as u64;
    [sum(|sender| sender.waiting.len()), sum(|sender| sender.unsent.len())]
}

fn evaluate(generator: &mut Generator, now: Instant, due_at_begin: u64) -> Measurement {
    let answered: usize = generator.latencies.iter().map(Vec::len).sum();
    let [waiting_at_end, unsent] = waiting_and_unsent(generator);
    for number in 0..CONNECTIONS {
        let sender = &mut generator.senders[number];
        let (waiting, unsent) = (core::mem::take(&mut sender.waiting), core::mem::take(&mut sender.unsent));
        for due in waiting.into_iter().chain(unsent) {
            generator.record(number, due, now);
        }
    }
    let [usual, urgent] = &mut generator.latencies;
    let (usual_p99, urgent_p99) = (p99(usual), p99(urgent));
    let late = p99(&mut generator.late);
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let mut measured = Measurement::new(micros(urgent_p99))
        .with("usual_p99_us", micros(usual_p99))
        .with("usual_over_urgent", micros(usual_p99) / micros(urgent_p99).max(1e-3))
        .with("answered", answered as f64)
        .with("waiting_at_end", waiting_at_end as f64)
        .with("unsent", unsent as f64)
        .with("late_p99_us", micros(late));
    if late > LATE_MAX {
        measured.problems.push(format!("the generator was late by {late:?} at the 99th percentile"));
    }
    if waiting_at_end + unsent <= due_at_begin {
        measured.problems.push("the queue did not grow: the server was not overloaded".into());
    }
    measured
}

/// Returns the 99th percentile.
fn p99(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() * 99 / 100).or(times.last()).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_judged() {
        let result = |usual_over_urgent: f64, ratio| {
            let mut result = BenchResult::from_counts("priority-overload", "µs", 1.0, None);
            result.our_facts.insert("usual_over_urgent".into(), usual_over_urgent);
            BenchResult { ratio, ..result }
        };
        assert!(missed_goals(&result(10.0, Some(10.0))).is_empty());
        let missed = missed_goals(&result(9.9, Some(9.0)));
        assert!(
            missed.len() == 2 && missed[0].contains("is 9.9") && missed[1].contains("is 9.0"),
            "{missed:?}"
        );
        assert!(missed_goals(&result(11.0, None))[0].ends_with("is unknown"));
    }
}
