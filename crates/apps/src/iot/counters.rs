//! Counters of the server.

use ginnel::stats::CounterKind;

/// Counts messages, answers and connections. `messages` is the sum of `done`, the three `failed_…` and the
/// gauge `waiting`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IotCounters {
    /// Connections accepted.
    pub connections: u64,
    /// Messages received.
    pub messages: u64,
    /// Urgent messages received.
    pub urgent: u64,
    /// Requests received.
    pub requests: u64,
    /// Urgent requests received.
    pub urgent_requests: u64,
    /// Messages for which Redis executed GET, SET and GET.
    pub done: u64,
    /// Messages that Redis did not execute before their deadline.
    pub failed_deadline: u64,
    /// Messages dropped because a queue was full.
    pub failed_shed: u64,
    /// Messages for which Redis answered with an error.
    pub failed_redis: u64,
    /// Requests answered.
    pub answers: u64,
    /// Requests answered with an error; `answers` includes them.
    pub answers_error: u64,
    /// Requests whose connection ended before the answer.
    pub answers_undeliverable: u64,
    /// Connections reset because a message was neither a request nor a heartbeat.
    pub malformed: u64,
    /// Connections that ended within a message.
    pub truncated: u64,
    /// Connections to Redis that were established.
    pub redis_connects: u64,
    /// Attempts to connect to Redis that failed.
    pub redis_refused: u64,
    /// Connections to Redis that ended.
    pub redis_disconnects: u64,
    /// Messages that were sent to Redis once more, because the connection ended before all replies.
    pub redis_repeated: u64,
    /// Messages that a server of Redis Cluster redirected to another one.
    pub redis_redirected: u64,
}

impl IotCounters {
    /// Calls `report` with each counter and its published name.
    pub fn report(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        for (name, count) in [
            ("iot.connections", self.connections),
            ("iot.messages", self.messages),
            ("iot.urgent", self.urgent),
            ("iot.requests", self.requests),
            ("iot.urgent_requests", self.urgent_requests),
            ("iot.done", self.done),
            ("iot.failed_deadline", self.failed_deadline),
            ("iot.failed_shed", self.failed_shed),
            ("iot.failed_redis", self.failed_redis),
            ("iot.answers", self.answers),
            ("iot.answers_error", self.answers_error),
            ("iot.answers_undeliverable", self.answers_undeliverable),
            ("iot.malformed", self.malformed),
            ("iot.truncated", self.truncated),
            ("iot.redis_connects", self.redis_connects),
            ("iot.redis_refused", self.redis_refused),
            ("iot.redis_disconnects", self.redis_disconnects),
            ("iot.redis_repeated", self.redis_repeated),
            ("iot.redis_redirected", self.redis_redirected),
        ] {
            report(CounterKind::Counter, name, count);
        }
    }

    /// Returns the messages that failed.
    pub const fn failed(&self) -> u64 {
        self.failed_deadline + self.failed_shed + self.failed_redis
    }
}

impl core::ops::AddAssign for IotCounters {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.messages += other.messages;
        self.urgent += other.urgent;
        self.requests += other.requests;
        self.urgent_requests += other.urgent_requests;
        self.done += other.done;
        self.failed_deadline += other.failed_deadline;
        self.failed_shed += other.failed_shed;
        self.failed_redis += other.failed_redis;
        self.answers += other.answers;
        self.answers_error += other.answers_error;
        self.answers_undeliverable += other.answers_undeliverable;
        self.malformed += other.malformed;
        self.truncated += other.truncated;
        self.redis_connects += other.redis_connects;
        self.redis_refused += other.redis_refused;
        self.redis_disconnects += other.redis_disconnects;
        self.redis_repeated += other.redis_repeated;
        self.redis_redirected += other.redis_redirected;
    }
}
