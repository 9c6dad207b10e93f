//! The messages of one Redis connection, without I/O: those that wait, those whose commands are in flight,
//! and what became of them.
//!
//! Redis has no priorities: what it was given it executes in order. So no more than a few commands are in
//! flight, and urgent messages overtake ordinary ones before them.

use super::cluster::Redirection;
use crate::resp::{BadReply, Reply, ReplyDecoder, encode_command};
use core::time::Duration;
use ginnel::Instant;
use ginnel::priority::{BEST_EFFORT, ClassScheduler, ClassSet};
use std::collections::VecDeque;
use std::io::Write;

/// Commands for each message: GET, SET and GET of its key.
pub const COMMANDS_PER_MESSAGE: u32 = 3;
/// Class of priority of urgent messages.
const URGENT: u8 = 6;
/// Longest key: a prefix and ten digits.
const KEY_BYTES_MAX: usize = 16;

/// A message for Redis. `C` identifies its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<C> {
    /// The connection to answer.
    pub conn: C,
    /// Number of the key.
    pub key: u32,
    /// The value for the key.
    pub counter: [u8; 4],
    /// True if the message is answered.
    pub is_request: bool,
    /// True if the message overtakes those that are not urgent.
    pub is_urgent: bool,
    /// When it fails unless Redis has executed its commands.
    pub deadline: Instant,
    /// True if each command follows `ASKING`, because a slot of Redis Cluster is being migrated.
    pub is_asking: bool,
}

/// Why a message failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// Redis did not execute its commands before the deadline.
    Deadline,
    /// The queue was full.
    Shed,
    /// Redis answered with an error.
    Redis,
}

/// A message that has ended, and how. Each message ends exactly once.
pub type Ended<C> = (Message<C>, Result<(), MessageError>);

/// Why a connection to Redis must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkError {
    /// The server sent something that is not RESP2, or a reply to no command.
    BadReply,
    /// The server is loading its data set.
    Loading,
    /// Its cluster is not complete.
    ClusterDown,
}

impl core::fmt::Display for LinkError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::BadReply => "the server's reply is not one to the commands that were sent",
            Self::Loading => "the server is loading its data set",
            Self::ClusterDown => "the cluster of the server is down",
        })
    }
}

/// A message whose commands were sent.
#[derive(Debug)]
struct InFlight<C> {
    message: Message<C>,
    replies: u32,
    is_failed: bool,
    /// True if the message has failed already because of its deadline.
    is_expired: bool,
    /// Another server owns its key.
    redirection: Option<Redirection>,
}

/// Limits of a pipeline.
#[derive(Clone, Copy, Debug)]
pub struct PipelineLimits {
    /// Messages that wait.
    pub waiting_max: usize,
    /// Commands in flight; at least those of one message.
    pub in_flight_max: u32,
    /// Share of ordinary messages in percent while urgent ones wait: 0 to 50.
    pub low_share_percent: u32,
    /// Time without a reply after which a connection to Redis is given up.
    pub reply_timeout: Duration,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Pipeline<C> {
    limits: PipelineLimits,
    urgent: VecDeque<Message<C>>,
    ordinary: VecDeque<Message<C>>,
    in_flight: VecDeque<InFlight<C>>,
    decoder: ReplyDecoder,
    /// Gives ordinary messages their share.
    scheduler: ClassScheduler,
    /// Messages of which another server owns the key.
    redirected: Vec<(Message<C>, Redirection)>,
    /// True if the deadlines of a queue may not ascend.
    is_unsorted: bool,
    /// When the last reply arrived, or commands were sent while none were in flight.
    last_progress: Instant,
}

impl<C: Copy> Pipeline<C> {
    /// Creates a pipeline without messages.
    pub fn new(limits: PipelineLimits) -> Self {
        Self {
            limits,
            urgent: VecDeque::new(),
            ordinary: VecDeque::new(),
            in_flight: VecDeque::new(),
            decoder: ReplyDecoder::default(),
            scheduler: ClassScheduler::new(limits.low_share_percent),
            redirected: Vec::new(),
            is_unsorted: false,
            last_progress: Instant::ZERO,
        }
    }

    /// Returns the messages that have not ended and whose commands are not in flight.
    pub fn waiting(&self) -> usize {
        self.urgent.len() + self.ordinary.len()
    }

    /// Returns whether as many messages wait as may wait.
    pub fn is_full(&self) -> bool {
        self.waiting() >= self.limits.waiting_max
    }

    /// Returns the messages that have not ended and whose commands are in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.iter().filter(|sent| !sent.is_expired).count()
    }

    /// Returns whether there is nothing to do, not even to wait for a reply.
    pub fn is_idle(&self) -> bool {
        self.waiting() == 0 && self.in_flight.is_empty()
    }

    /// Adds a message. If the queue is full, the last ordinary message is shed; the new one if there is none.
    pub fn push(&mut self, message: Message<C>, ended: &mut Vec<Ended<C>>) {
        if self.is_full() {
            let shed = if message.is_urgent { self.ordinary.pop_back() } else { None };
            ended.push((shed.unwrap_or(message), Err(MessageError::Shed)));
            if shed.is_none() {
                return;
            }
        }
        if message.is_urgent {
            self.urgent.push_back(message);
        } else {
            self.ordinary.push_back(message);
        }
    }

    /// Appends the commands of the next messages to `out`, as many as may be in flight. Returns the number of
    /// messages.
    pub fn send(&mut self, now: Instant, out: &mut Vec<u8>) -> usize {
        let max = (self.limits.in_flight_max / COMMANDS_PER_MESSAGE).max(1) as usize;
        if self.in_flight.is_empty() {
            self.last_progress = now;
        }
        let mut count = 0;
        while self.in_flight.len() < max
            && let Some(message) = self.take_next()
        {
            encode(out, &message);
            self.in_flight.push_back(InFlight {
                message,
                replies: 0,
                is_failed: false,
                is_expired: false,
                redirection: None,
            });
            count += 1;
        }
        count
    }

    /// Takes the next message: an urgent one, except that ordinary ones get their share.
    fn take_next(&mut self) -> Option<Message<C>> {
        let waits = |queue: &VecDeque<_>, class: u8| ClassSet::from(!queue.is_empty()) << class;
        let with_work = waits(&self.urgent, URGENT) | waits(&self.ordinary, BEST_EFFORT);
        let class = self.scheduler.pick(with_work)?;
        self.scheduler.charge(class, with_work, 1);
        if class == URGENT { self.urgent.pop_front() } else { self.ordinary.pop_front() }
    }

    /// Processes bytes from Redis.
    ///
    /// # Errors
    /// After an error the connection must be closed; [`disconnect`](Self::disconnect) follows.
    pub fn receive(
        &mut self,
        now: Instant,
        bytes: &[u8],
        ended: &mut Vec<Ended<C>>,
    ) -> Result<(), LinkError> {
        let Self { decoder, in_flight, redirected, .. } = self;
        let mut result = Ok(());
        let decoded = decoder.decode(bytes, |reply| {
            if result.is_ok() {
                result = accept_reply(in_flight, reply, ended, redirected);
            }
        });
        self.last_progress = now;
        result.and(decoded.map_err(|BadReply| LinkError::BadReply))
    }

    /// Ends the messages whose deadline is over.
    pub fn expire(&mut self, now: Instant, ended: &mut Vec<Ended<C>>) {
        for queue in [&mut self.urgent, &mut self.ordinary] {
            if self.is_unsorted {
                queue.retain(|message| {
                    let is_over = message.deadline <= now;
                    if is_over {
                        ended.push((*message, Err(MessageError::Deadline)));
                    }
                    !is_over
                });
                continue;
            }
            while let Some(message) = queue.pop_front_if(|message| message.deadline <= now) {
                ended.push((message, Err(MessageError::Deadline)));
            }
        }
        self.is_unsorted &= self.waiting() > 0;
        for sent in &mut self.in_flight {
            if !sent.is_expired && sent.message.deadline <= now {
                sent.is_expired = true;
                ended.push((sent.message, Err(MessageError::Deadline)));
            }
        }
    }

    /// Returns whether Redis has not replied for too long.
    pub fn is_stalled(&self, now: Instant) -> bool {
        !self.in_flight.is_empty() && now.saturating_since(self.last_progress) >= self.limits.reply_timeout
    }

    /// Takes a message whose key another server owns, the last one first, in order to
    /// [put](Self::push_front) it into the pipeline of that server.
    pub fn take_redirected(&mut self) -> Option<(Message<C>, Redirection)> {
        self.redirected.pop()
    }

    /// Takes a message that waits, the last one first, in order to [put](Self::push_front) it into another
    /// pipeline.
    pub fn take_waiting(&mut self) -> Option<Message<C>> {
        self.urgent.pop_back().or_else(|| self.ordinary.pop_back())
    }

    /// Adds a message of another pipeline in front of the others, whether there is space or not.
    pub fn push_front(&mut self, message: Message<C>) {
        self.is_unsorted = true;
        let queue = if message.is_urgent { &mut self.urgent } else { &mut self.ordinary };
        queue.push_front(message);
    }

    /// The connection to Redis has ended: the messages in flight wait again, in front of the others. Returns
    /// their number. It is not known which of their commands were executed; executing them once more changes
    /// nothing but the counts of Redis.
    pub fn disconnect(&mut self) -> usize {
        self.decoder = ReplyDecoder::default();
        let mut count = 0;
        while let Some(sent) = self.in_flight.pop_back() {
            if sent.is_expired {
                continue;
            }
            count += 1;
            self.is_unsorted = true;
            let queue = if sent.message.is_urgent { &mut self.urgent } else { &mut self.ordinary };
            queue.push_front(sent.message);
        }
        count
    }
}

/// Applies a reply to the message whose turn it is.
fn accept_reply<C: Copy>(
    in_flight: &mut VecDeque<InFlight<C>>,
    reply: Reply<'_>,
    ended: &mut Vec<Ended<C>>,
    redirected: &mut Vec<(Message<C>, Redirection)>,
) -> Result<(), LinkError> {
    let sent = in_flight.front_mut().ok_or(LinkError::BadReply)?;
    let is_asking = sent.message.is_asking;
    // With ASKING, every second reply is the one to a command.
    let command = if is_asking { sent.replies / 2 } else { sent.replies };
    let is_to_asking = is_asking && sent.replies.is_multiple_of(2);
    match reply {
        Reply::Error(text) if text.starts_with(b"LOADING") => return Err(LinkError::Loading),
        Reply::Error(text) if text.starts_with(b"CLUSTERDOWN") => return Err(LinkError::ClusterDown),
        Reply::Error(text) => match Redirection::parse(text) {
            Some(redirection) => sent.redirection = Some(redirection),
            None => sent.is_failed = true,
        },
        Reply::Simple(_) if is_to_asking || command == 1 => {}
        Reply::Bulk(_) | Reply::Null if !is_to_asking && command != 1 => {}
        _ => return Err(LinkError::BadReply),
    }
    sent.replies += 1;
    if sent.replies == if is_asking { 2 * COMMANDS_PER_MESSAGE } else { COMMANDS_PER_MESSAGE } {
        if !sent.is_expired {
            match sent.redirection {
                Some(redirection) if !sent.is_failed => redirected.push((sent.message, redirection)),
                _ if sent.is_failed => ended.push((sent.message, Err(MessageError::Redis))),
                _ => ended.push((sent.message, Ok(()))),
            }
        }
        in_flight.pop_front();
    }
    Ok(())
}

/// The key of a number, as text.
#[derive(Clone, Copy, Debug)]
pub struct KeyText {
    bytes: [u8; KEY_BYTES_MAX],
    len: usize,
}

impl KeyText {
    /// Writes the key of a number.
    pub fn new(key: u32) -> Self {
        let mut bytes = [0; KEY_BYTES_MAX];
        let mut rest = &mut bytes[..];
        // Cannot fail: a number has at most ten digits.
        let _ = write!(rest, "iot:{key}");
        let unused = rest.len();
        Self { bytes, len: KEY_BYTES_MAX - unused }
    }

    /// Returns the text.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Appends the commands of a message.
fn encode<C>(out: &mut Vec<u8>, message: &Message<C>) {
    let key = KeyText::new(message.key);
    let key = key.as_bytes();
    for words in [&[b"GET", key][..], &[b"SET", key, &message.counter], &[b"GET", key]] {
        if message.is_asking {
            encode_command(out, &[b"ASKING"]);
        }
        encode_command(out, words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: PipelineLimits = PipelineLimits {
        waiting_max: 8,
        in_flight_max: 6,
        low_share_percent: 10,
        reply_timeout: Duration::from_millis(100),
    };

    fn message(conn: u32, is_urgent: bool, deadline_ms: u64) -> Message<u32> {
        let deadline = Instant::from_millis(deadline_ms);
        Message {
            conn,
            key: conn % 3,
            counter: conn.to_be_bytes(),
            is_request: is_urgent,
            is_urgent,
            deadline,
            is_asking: false,
        }
    }

    /// Returns the numbers of the ended messages, and whether they are done.
    fn numbers(ended: &mut Vec<Ended<u32>>) -> Vec<(u32, Result<(), MessageError>)> {
        ended.drain(..).map(|(message, result)| (message.conn, result)).collect()
    }

    const REPLIES: &[u8] = b"$-1\r\n+OK\r\n$4\r\nabcd\r\n";
    const START: Instant = Instant::ZERO;

    #[test]
    fn commands_are_get_set_get() {
        let (mut pipeline, mut ended, mut out) = (Pipeline::new(LIMITS), Vec::new(), Vec::new());
        pipeline.push(Message { key: 4_294_967_295, counter: *b"abcd", ..message(1, false, 9) }, &mut ended);
        assert_eq!(pipeline.send(START, &mut out), 1);
        let key = "$14\r\niot:4294967295\r\n";
        let get = format!("*2\r\n$3\r\nGET\r\n{key}");
        let expected = format!("{get}*3\r\n$3\r\nSET\r\n{key}$4\r\nabcd\r\n{get}");
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        for byte in REPLIES {
            assert!(ended.is_empty());
            pipeline.receive(START, &[*byte], &mut ended).unwrap();
        }
        assert_eq!(numbers(&mut ended), [(1, Ok(()))]);
        assert!(pipeline.is_idle());
    }

    // limit: iot --in-flight-max
    #[test]
    fn only_a_few_commands_are_in_flight() {
        for (in_flight_max, messages) in [(3, 1), (5, 1), (6, 2), (9, 3), (1000, 8)] {
            let mut pipeline = Pipeline::new(PipelineLimits { in_flight_max, ..LIMITS });
            let (mut ended, mut out) = (Vec::new(), Vec::new());
            (0..8).for_each(|number| pipeline.push(message(number, false, 9), &mut ended));
            assert_eq!(pipeline.send(START, &mut out), messages);
            assert_eq!(pipeline.send(START, &mut out), 0);
            assert_eq!((pipeline.in_flight(), pipeline.waiting()), (messages, 8 - messages));
            pipeline.receive(START, REPLIES, &mut ended).unwrap();
            assert_eq!(pipeline.send(START, &mut out), usize::from(messages < 8));
        }
    }

    #[test]
    fn urgent_messages_overtake_but_ordinary_ones_keep_their_share() {
        for share in [0, 1, 10, 25, 50] {
            let limits = PipelineLimits { waiting_max: 1000, low_share_percent: share, ..LIMITS };
            let mut pipeline = Pipeline::new(limits);
            let mut ended = Vec::new();
            (0..300).for_each(|number| pipeline.push(message(number, false, 9), &mut ended));
            (300..600).for_each(|number| pipeline.push(message(number, true, 9), &mut ended));
            let order: Vec<bool> =
                (0..300).map(|_| pipeline.take_next().unwrap()).map(|m| m.is_urgent).collect();
            let ordinary = order.iter().filter(|urgent| !**urgent).count();
            assert!((ordinary as u32).abs_diff(300 * share / 100) <= 1, "{share} %: {ordinary}");
            // Evenly, and not at once.
            for part in order.chunks(100) {
                assert!(share.abs_diff(part.iter().filter(|urgent| !**urgent).count() as u32) <= 1);
            }
        }
    }

    // limit: iot --queue-max
    #[test]
    fn ordinary_messages_are_shed_first() {
        let (mut pipeline, mut ended) = (Pipeline::new(LIMITS), Vec::new());
        (0..8).for_each(|number| pipeline.push(message(number, number < 2, 9), &mut ended));
        assert!(ended.is_empty());
        pipeline.push(message(8, false, 9), &mut ended);
        assert_eq!(numbers(&mut ended), [(8, Err(MessageError::Shed))]);
        // Urgent ones replace the last of the others.
        (10..16).for_each(|number| pipeline.push(message(number, true, 9), &mut ended));
        let shed: Vec<_> = (2..8).rev().map(|number| (number, Err(MessageError::Shed))).collect();
        assert_eq!(numbers(&mut ended), shed);
        pipeline.push(message(16, true, 9), &mut ended);
        assert_eq!(numbers(&mut ended), [(16, Err(MessageError::Shed))]);
        // Normal service resumes when there is space.
        pipeline.send(START, &mut Vec::new());
        pipeline.push(message(17, true, 9), &mut ended);
        assert!(ended.is_empty());
        assert_eq!(pipeline.waiting(), 7);
    }

    // limit: iot --deadline-ms
    #[test]
    fn messages_end_at_their_deadline() {
        let (mut pipeline, mut ended, mut out) = (Pipeline::new(LIMITS), Vec::new(), Vec::new());
        (0..6).for_each(|number| {
            pipeline.push(message(number, number % 2 == 0, 10 + number as u64), &mut ended)
        });
        assert_eq!(pipeline.send(START, &mut out), 2);
        pipeline.expire(Instant::from_millis(9), &mut ended);
        assert!(ended.is_empty());
        pipeline.expire(Instant::from_millis(13), &mut ended);
        let mut expired = numbers(&mut ended);
        expired.sort_by_key(|(number, _)| *number);
        assert_eq!(expired, (0..4).map(|n| (n, Err(MessageError::Deadline))).collect::<Vec<_>>());
        // The replies to those in flight come later, and end nothing any more.
        pipeline.receive(START, &REPLIES.repeat(2), &mut ended).unwrap();
        assert!(ended.is_empty());
        assert_eq!(pipeline.send(START, &mut out), 2);
        pipeline.receive(START, &REPLIES.repeat(2), &mut ended).unwrap();
        assert_eq!(numbers(&mut ended), [(4, Ok(())), (5, Ok(()))]);
        assert!(pipeline.is_idle());
    }

    #[test]
    fn messages_in_flight_are_repeated_in_order() {
        let (mut pipeline, mut ended, mut out) =
            (Pipeline::new(PipelineLimits { in_flight_max: 12, ..LIMITS }), Vec::new(), Vec::new());
        (0..6).for_each(|number| pipeline.push(message(number, false, 99), &mut ended));
        assert_eq!(pipeline.send(START, &mut out), 4);
        pipeline.receive(START, &REPLIES[..7], &mut ended).unwrap();
        pipeline.push(message(6, true, 99), &mut ended);
        assert_eq!((pipeline.disconnect(), pipeline.in_flight(), pipeline.waiting()), (4, 0, 7));
        out.clear();
        pipeline.scheduler = ClassScheduler::new(0);
        assert_eq!(pipeline.send(START, &mut out), 4);
        pipeline.receive(START, &REPLIES.repeat(4), &mut ended).unwrap();
        assert_eq!(numbers(&mut ended), [6, 0, 1, 2].map(|number| (number, Ok(()))));
        // Those that have failed meanwhile are not repeated.
        assert_eq!(pipeline.send(START, &mut out), 3);
        pipeline.expire(Instant::from_millis(99), &mut ended);
        assert_eq!((numbers(&mut ended).len(), pipeline.disconnect(), pipeline.is_idle()), (3, 0, true));
    }

    #[test]
    fn replies_that_do_not_fit_end_the_connection() {
        for (replies, expected) in [
            (&b"-ERR a\r\n+OK\r\n$-1\r\n"[..], Ok(Err(MessageError::Redis))),
            (b"$-1\r\n-OOM full\r\n$-1\r\n", Ok(Err(MessageError::Redis))),
            (b"$1\r\nx\r\n+OK\r\n$-1\r\n", Ok(Ok(()))),
            (b"-LOADING Redis is loading\r\n", Err(LinkError::Loading)),
            (b"-CLUSTERDOWN The cluster is down\r\n", Err(LinkError::ClusterDown)),
            (b"+OK\r\n", Err(LinkError::BadReply)),
            (b"$-1\r\n$-1\r\n", Err(LinkError::BadReply)),
            (b"*1\r\n$-1\r\n", Err(LinkError::BadReply)),
            (b":1\r\n", Err(LinkError::BadReply)),
            (b"junk\r\n", Err(LinkError::BadReply)),
            (b"$-1\r\n+OK\r\n$-1\r\n$-1\r\n", Err(LinkError::BadReply)),
        ] {
            let (mut pipeline, mut ended) = (Pipeline::new(LIMITS), Vec::new());
            pipeline.push(message(1, true, 9), &mut ended);
            pipeline.send(START, &mut Vec::new());
            let text = String::from_utf8_lossy(replies);
            match (pipeline.receive(START, replies, &mut ended), expected) {
                (Ok(()), Ok(result)) => assert_eq!(numbers(&mut ended), [(1, result)], "{text}"),
                (found, expected) => assert_eq!(found.err(), expected.err(), "{text}"),
            }
        }
    }

    #[test]
    fn message_of_another_server_is_redirected() {
        let moved = b"-MOVED 12182 127.0.0.1:7001\r\n".repeat(3);
        let ask = b"$-1\r\n-ASK 12182 127.0.0.1:7001\r\n$-1\r\n".to_vec();
        for (replies, is_ask) in [(moved, false), (ask, true)] {
            let (mut pipeline, mut ended) = (Pipeline::new(LIMITS), Vec::new());
            pipeline.push(message(1, true, 9), &mut ended);
            pipeline.send(START, &mut Vec::new());
            pipeline.receive(START, &replies, &mut ended).unwrap();
            assert!(ended.is_empty());
            let (mut message, redirection) = pipeline.take_redirected().unwrap();
            assert_eq!((redirection.slot, redirection.is_ask), (12_182, is_ask));
            assert!(pipeline.is_idle() && pipeline.take_redirected().is_none());
            message.is_asking = true;
            pipeline.push_front(message);
            let mut out = Vec::new();
            pipeline.send(START, &mut out);
            assert_eq!(String::from_utf8(out).unwrap().matches("ASKING").count(), 3);
            let answers = b"+OK\r\n$-1\r\n+OK\r\n+OK\r\n+OK\r\n$4\r\nabcd\r\n";
            pipeline.receive(START, answers, &mut ended).unwrap();
            assert_eq!(numbers(&mut ended), [(1, Ok(()))]);
        }
    }

    #[test]
    fn moved_messages_end_at_their_own_deadline() {
        let (mut pipeline, mut ended) = (Pipeline::new(LIMITS), Vec::new());
        pipeline.push(message(1, true, 20), &mut ended);
        pipeline.push_front(message(2, true, 30));
        pipeline.push(message(3, true, 10), &mut ended);
        pipeline.expire(Instant::from_millis(20), &mut ended);
        assert_eq!(numbers(&mut ended), [1, 3].map(|number| (number, Err(MessageError::Deadline))));
        assert_eq!(pipeline.take_waiting().map(|message| message.conn), Some(2));
    }

    #[test]
    fn silent_server_is_stalled() {
        let (mut pipeline, mut ended) = (Pipeline::new(LIMITS), Vec::new());
        let at = Instant::from_millis;
        assert!(!pipeline.is_stalled(at(1000)), "nothing was sent");
        (0..3).for_each(|number| pipeline.push(message(number, true, 9000), &mut ended));
        pipeline.send(at(1000), &mut Vec::new());
        assert!(!pipeline.is_stalled(at(1099)) && pipeline.is_stalled(at(1100)));
        pipeline.receive(at(1090), b"$-1", &mut ended).unwrap();
        assert!(!pipeline.is_stalled(at(1189)) && pipeline.is_stalled(at(1190)));
    }

    /// A step of the test below.
    #[derive(Clone, Debug)]
    enum Step {
        Push(bool),
        Send,
        Reply(usize),
        Expire,
        Disconnect,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => any::<bool>().prop_map(Step::Push),
            4 => Just(Step::Send),
            4 => (1usize..30).prop_map(Step::Reply),
            1 => Just(Step::Expire),
            1 => Just(Step::Disconnect),
        ]
    }

    proptest! {
        #[test]
        fn every_message_ends_once(steps in proptest::collection::vec(step(), 0..200)) {
            let mut pipeline = Pipeline::new(LIMITS);
            let (mut ended, mut pushed, mut time) = (Vec::new(), 0u32, 0u64);
            // The replies to the commands that were sent on this connection.
            let mut replies: Vec<u8> = Vec::new();
            for step in steps {
                time += 1;
                match step {
                    Step::Push(is_urgent) => {
                        pipeline.push(message(pushed, is_urgent, time + 40), &mut ended);
                        pushed += 1;
                    }
                    Step::Send => {
                        let sent = pipeline.send(Instant::from_millis(time), &mut Vec::new());
                        replies.extend(REPLIES.repeat(sent));
                    }
                    Step::Reply(len) => {
                        let bytes: Vec<u8> = replies.drain(..len.min(replies.len())).collect();
                        pipeline.receive(Instant::from_millis(time), &bytes, &mut ended).unwrap();
                    }
                    Step::Expire => pipeline.expire(Instant::from_millis(time), &mut ended),
                    Step::Disconnect => {
                        pipeline.disconnect();
                        replies.clear();
                    }
                }
                let open = pipeline.waiting() + pipeline.in_flight();
                prop_assert_eq!(ended.len() + open, pushed as usize);
                prop_assert!(pipeline.waiting() <= LIMITS.waiting_max + 2);
            }
            pipeline.expire(Instant::from_millis(10_000), &mut ended);
            let mut all: Vec<u32> = ended.iter().map(|(message, _)| message.conn).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..pushed).collect::<Vec<_>>());
        }
    }
}
