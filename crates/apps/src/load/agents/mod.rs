//! Several generators, on several machines or not, that send one plan together: agents.
//!
//! Agents meet in Redis. Each of `N` agents gets a number, and the last one fixes the time at which all
//! start. Every agent sends its share of the plan as a worker does, and stores its results. The first agent
//! adds them up and makes the report. An agent shows that it lives by a key that expires; one that dies is
//! named in the report.
//!
//! | Key below `ginnel:load:RUN` | Value |
//! |---|---|
//! | – | identifier of the group that agents join now; deleted by the last one |
//! | `:ID:joined` | number of agents |
//! | `:ID:plan` | the plan of the first agent, with which others compare theirs |
//! | `:ID:start` | time of the start in microseconds of Redis' clock |
//! | `:ID:alive:n`, `:ID:name:n` | agent n: expires after [`ALIVE_SECONDS`]; its host and process |
//! | `:ID:result:n` | results of agent n as JSON |
//! | `:ID:done` | the first agent has made the report |

mod client;

use self::client::{RedisClient, Value};
use crate::iot::RedisAddress;
use core::time::Duration;
use ginnel::{Error, Instant, StopFlag, clock};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::hash::{BuildHasher, RandomState};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;

/// Longest wait for the other agents at the start.
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time from the arrival of the last agent to the start.
const START_DELAY_MICROS: u64 = 500_000;
/// Lifetime of the key that shows that an agent lives, which is renewed every second.
const ALIVE_SECONDS: &str = "10";
/// Lifetime of all other keys.
const KEPT_SECONDS: &str = "604800";
/// Interval at which keys of other agents are looked at.
const POLL: Duration = Duration::from_millis(20);

/// Where agents meet.
#[derive(Clone, Debug)]
pub struct Meeting {
    /// The Redis server.
    pub redis: RedisAddress,
    /// Name of the run. Several runs with different names may use one server.
    pub run: String,
    /// Number of agents, ≥ 1.
    pub agents: u32,
}

/// An agent that has joined a group.
pub struct Agent {
    client: RedisClient,
    redis: RedisAddress,
    /// Key of the group that agents join now.
    base: String,
    /// Prefix of the group's keys.
    prefix: String,
    index: u32,
    count: u32,
    start: Instant,
    heartbeat: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

/// The end of an agent's work.
#[derive(Debug)]
pub enum AgentResult<S> {
    /// The results of the other agents, and those that have none. Only the first agent gets them.
    Collected {
        /// Results of the other agents.
        others: Vec<S>,
        /// A sentence about each agent that died without results, or was not awaited.
        dead: Vec<String>,
    },
    /// The first agent has the results.
    Delivered,
}

fn failed(problem: impl Into<String>) -> Error {
    Error::application(problem)
}

fn text(value: Value) -> Option<String> {
    match value {
        Value::Text(text) => Some(text),
        Value::Null | Value::Number(_) | Value::Array(_) => None,
    }
}

/// Returns Redis' time in microseconds.
fn redis_time(client: &mut RedisClient) -> Result<u64, Error> {
    let Value::Array(parts) = client.command(&["TIME"])? else {
        return Err(failed("--redis: TIME is no time"));
    };
    let numbers: Vec<u64> = parts.into_iter().filter_map(text).filter_map(|n| n.parse().ok()).collect();
    match numbers[..] {
        [seconds, micros] => Ok(seconds * 1_000_000 + micros),
        _ => Err(failed("--redis: TIME is no time")),
    }
}

/// Returns the host and the process of this agent.
fn own_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}, process {}", host.trim(), std::process::id())
}

/// Shows that the agent lives until the channel is closed.
fn show_life(mut client: RedisClient, redis: &RedisAddress, key: &str, ended: &mpsc::Receiver<()>) {
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(Duration::from_secs(1)) {
        // If Redis is gone for good, the agent finds out when it stores its results.
        if client.command(&["SET", key, "1", "EX", ALIVE_SECONDS]).is_err()
            && let Ok(new) = RedisClient::connect(redis)
        {
            client = new;
        }
    }
}

impl Meeting {
    /// Joins a group and waits until it is complete and the time of its start is known. `plan` describes what
    /// the group does and must be equal for all agents. `on_joined` learns the agent's number, from 1 on,
    /// before the wait.
    ///
    /// # Errors
    /// Redis fails, the plan differs from that of the first agent, the group is complete already, agents are
    /// missing after a minute, or `stop` is set.
    pub fn join(&self, plan: &str, stop: &StopFlag, on_joined: impl FnOnce(u32)) -> Result<Agent, Error> {
        let mut client = RedisClient::connect(&self.redis)?;
        let base = format!("ginnel:load:{}", self.run);
        let deadline = clock::now() + JOIN_TIMEOUT;
        let plan = format!("{plan} by {} agents", self.agents);
        let (prefix, number) = self.number(&mut client, &base, &plan, deadline)?;
        let key = |name: &str| format!("{prefix}:{name}");
        client.command(&["SET", &key(&format!("name:{number}")), &own_name(), "EX", KEPT_SECONDS])?;
        let alive = key(&format!("alive:{number}"));
        client.command(&["SET", &alive, "1", "EX", ALIVE_SECONDS])?;
        let (second, redis) = (RedisClient::connect(&self.redis)?, self.redis.clone());
        let (end, ended) = mpsc::channel();
        let thread = std::thread::spawn(move || show_life(second, &redis, &alive, &ended));
        if number == self.agents {
            client.command(&["DEL", &base])?;
            let start = redis_time(&mut client)? + START_DELAY_MICROS;
            client.command(&["SET", &key("start"), &start.to_string(), "EX", KEPT_SECONDS])?;
        }
        on_joined(number);
        let mut agent = Agent {
            client,
            redis: self.redis.clone(),
            base,
            prefix: prefix.clone(),
            index: number - 1,
            count: self.agents,
            start: Instant::ZERO,
            heartbeat: Some((end, thread)),
        };
        agent.start = agent.wait_for_start(deadline, stop)?;
        Ok(agent)
    }

    /// Finds the group that agents join now, and compares its plan. Returns the prefix of its keys and the
    /// agent's number, from 1 on.
    fn number(
        &self,
        client: &mut RedisClient,
        base: &str,
        plan: &str,
        deadline: Instant,
    ) -> Result<(String, u32), Error> {
        loop {
            let own = format!("{:016x}", RandomState::new().hash_one(std::process::id()));
            let seconds = JOIN_TIMEOUT.as_secs().to_string();
            client.command(&["SET", base, &own, "NX", "EX", &seconds])?;
            if let Some(id) = text(client.command(&["GET", base])?) {
                let prefix = format!("{base}:{id}");
                let plan_key = format!("{prefix}:plan");
                client.command(&["SET", &plan_key, plan, "NX", "EX", KEPT_SECONDS])?;
                if text(client.command(&["GET", &plan_key])?).as_deref() != Some(plan) {
                    return Err(failed(format!(
                        "--agents {}: the options of this agent differ from those of the first one: give all \
                         the same load, workers, seed and number of agents",
                        self.agents
                    )));
                }
                let joined = format!("{prefix}:joined");
                let number = client.command(&["INCR", &joined])?;
                client.command(&["EXPIRE", &joined, KEPT_SECONDS])?;
                if let Value::Number(number) = number
                    && let Some(number) = u32::try_from(number).ok().filter(|n| *n <= self.agents)
                {
                    return Ok((prefix, number));
                }
            }
            // The group was complete already; its last agent deletes its identifier.
            if clock::now() >= deadline {
                return Err(failed(format!(
                    "--agents {}: the run \"{}\" has more agents: choose another --run",
                    self.agents, self.run
                )));
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Agent {
    /// Returns the agent's number, from 0 on.
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Returns when all agents start.
    pub const fn start(&self) -> Instant {
        self.start
    }

    fn get(&mut self, name: &str) -> Result<Option<String>, Error> {
        let key = format!("{}:{name}", self.prefix);
        Ok(text(self.client.command(&["GET", &key])?))
    }

    fn wait_for_start(&mut self, deadline: Instant, stop: &StopFlag) -> Result<Instant, Error> {
        loop {
            if let Some(start) = self.get("start")? {
                let start: u64 = start.parse().map_err(|_| failed("--redis: the start is no time"))?;
                let before = clock::now();
                let now = redis_time(&mut self.client)?;
                let after = clock::now();
                // Redis read its clock in the middle of the round trip, as far as is known.
                let middle = before + (after - before) / 2;
                return Ok(middle + Duration::from_micros(start.saturating_sub(now)));
            }
            if clock::now() >= deadline || stop.is_set() {
                let joined = self.get("joined")?.unwrap_or_default();
                // Agents that are started again begin a new group.
                let is_current = text(self.client.command(&["GET", &self.base])?)
                    .is_some_and(|id| self.prefix.ends_with(&id));
                if is_current {
                    self.client.command(&["DEL", &self.base])?;
                }
                return Err(failed(format!("--agents {}: only {joined} have joined", self.count)));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Stores the agent's results. The first agent waits for the results of the others and returns them; the
    /// others wait until it has them. Nobody waits once `stop` is set.
    ///
    /// # Errors
    /// Redis fails, or results of another agent cannot be read. For the other agents also: the first one has
    /// died, or `stop` is set.
    pub fn finish<S: Serialize + DeserializeOwned>(
        mut self,
        own: &S,
        stop: &StopFlag,
    ) -> Result<AgentResult<S>, Error> {
        // Redis or the network may have ended the connection, which was idle during the run.
        self.client = RedisClient::connect(&self.redis)?;
        if self.index > 0 {
            let json = serde_json::to_string(own).map_err(|e| failed(format!("the results: {e}")))?;
            let key = format!("{}:result:{}", self.prefix, self.index + 1);
            self.client.command(&["SET", &key, &json, "EX", KEPT_SECONDS])?;
            while self.get("done")?.is_none() {
                if self.get("alive:1")?.is_none() {
                    let name = self.get("name:1")?.unwrap_or_default();
                    return Err(failed(format!("agent 1 ({name}), which makes the report, has died")));
                }
                if stop.is_set() {
                    return Err(failed("interrupted: agent 1 makes the report"));
                }
                std::thread::sleep(POLL);
            }
            return Ok(AgentResult::Delivered);
        }
        let (mut others, mut dead) = (Vec::new(), Vec::new());
        for number in 2..=self.count {
            loop {
                // Looked at before the results: an agent that has stored them may end.
                let is_alive = self.get(&format!("alive:{number}"))?.is_some();
                let name = self.get(&format!("name:{number}"))?.unwrap_or_default();
                if let Some(json) = self.get(&format!("result:{number}"))? {
                    let results = serde_json::from_str(&json);
                    others.push(
                        results.map_err(|e| failed(format!("results of agent {number} ({name}): {e}")))?,
                    );
                    break;
                }
                if !is_alive {
                    dead.push(format!("agent {number} ({name}) has died and left no results"));
                    break;
                }
                if stop.is_set() {
                    dead.push(format!("agent {number} ({name}) was not awaited: this agent was interrupted"));
                    break;
                }
                std::thread::sleep(POLL);
            }
        }
        let done = format!("{}:done", self.prefix);
        self.client.command(&["SET", &done, "1", "EX", KEPT_SECONDS])?;
        Ok(AgentResult::Collected { others, dead })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.heartbeat.take() {
            drop(end);
            // The thread ends by itself; an agent that gives up need not wait for Redis.
            drop(thread);
        }
    }
}

#[cfg(test)]
mod tests;
