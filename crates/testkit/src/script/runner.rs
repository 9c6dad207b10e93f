//! Runs the events of a script against a backend.

use super::assertion::Assertion;
use super::ast::{BackendKind, Event, EventKind, Flags, Packet, PacketBody, Script, Segment, Target, Time};
use super::backend::Backend;
use super::calls::{Call, CallResult, Fd, Op};
use super::flow::{Flow, local_byte, options_match, remote_byte};
use super::report::{Failure, History};
use super::wire::{Corruption, WireIcmp, WireSegment, addresses};
use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

/// Extra time to wait for a late packet, so that the report can say how late it was.
const LATE_PACKET_GRACE: Duration = Duration::from_millis(100);
/// Longest time to wait for a packet that a script expects at any time.
const ANY_TIME_MAX: Duration = Duration::from_secs(150);

/// Runs one script against one stack.
///
/// # Errors
/// A description of the first event that failed.
pub fn run(script: &Script, target: Target, backend: &mut dyn Backend) -> Result<(), Failure> {
    let mut runner = Runner {
        script,
        target,
        backend,
        flows: BTreeMap::new(),
        unmatched: VecDeque::new(),
        history: History::default(),
        last: Duration::ZERO,
        nominal: Duration::ZERO,
        streams: BTreeMap::new(),
        latest_fd: None,
        pending: Vec::new(),
        expects_packets: true,
    };
    let mut line = 0;
    let mut result = Ok(());
    let events = script.events(target);
    let is_outbound = |event: &Event| matches!(event.kind, EventKind::Outbound(_));
    let mut expected = events.iter().filter(|event| is_outbound(event)).count();
    for event in events {
        runner.expects_packets = script.directives.check_rest || expected > 0;
        expected -= usize::from(is_outbound(&event));
        line = event.line;
        result = runner.event(&event);
        if result.is_err() {
            break;
        }
    }
    if result.is_ok() {
        runner.expects_packets = script.directives.check_rest;
        result = runner.finish();
    }
    result.map_err(|message| Failure {
        path: script.path.clone(),
        line,
        target,
        message,
        history: runner.history.lines(),
    })
}

/// A blocking call that has not returned.
struct PendingCall {
    call_id: usize,
    call: Call,
    line: u32,
    /// Time of the call.
    from: Duration,
    /// Expected time of the return.
    until: Duration,
}

/// Number of bytes of a descriptor's streams so far.
#[derive(Clone, Copy, Default)]
struct StreamOffsets {
    read: u64,
    written: u64,
}

struct Runner<'a> {
    script: &'a Script,
    target: Target,
    backend: &'a mut dyn Backend,
    flows: BTreeMap<u16, Flow>,
    /// Segments of the stack that no event has matched yet.
    unmatched: VecDeque<(Duration, WireSegment)>,
    history: History,
    /// Actual time of the last event.
    last: Duration,
    /// Time that the script gives the last event; the actual time if it is `*`.
    nominal: Duration,
    streams: BTreeMap<Fd, StreamOffsets>,
    /// The descriptor that was connected or accepted last.
    latest_fd: Option<Fd>,
    pending: Vec<PendingCall>,
    /// False after the last expected packet if the script ignores the packets after it (`// rest: any`).
    expects_packets: bool,
}

type StepResult = Result<(), String>;

impl Runner<'_> {
    fn event(&mut self, event: &Event) -> StepResult {
        let (earliest, latest) = match event.time {
            Time::Relative { from, to } => {
                let nominal = self.nominal;
                self.nominal = nominal + from;
                (self.last + from, self.last + to.unwrap_or(from))
            }
            Time::Absolute { from, to } => {
                self.nominal = from;
                (from, to.unwrap_or(from))
            }
            Time::Any => (Duration::ZERO, Duration::MAX),
        };
        if let EventKind::Outbound(packet) = &event.kind {
            return self.outbound(packet, earliest, latest);
        }
        self.wait_until(earliest)?;
        self.last = self.backend.now();
        match &event.kind {
            EventKind::Inbound(packet) => self.inbound(packet),
            EventKind::Call(call) => match event.until {
                Some(until) => {
                    let base =
                        if matches!(event.time, Time::Relative { .. }) { self.last } else { Duration::ZERO };
                    let start = match event.time {
                        Time::Relative { from, .. } => from,
                        _ => Duration::ZERO,
                    };
                    self.call_blocking(call, event.line, base + until - start);
                    Ok(())
                }
                None => self.call(call),
            },
            EventKind::Assert(assertion) => self.assert(assertion),
            EventKind::Outbound(_) => Ok(()),
        }
    }

    /// Waits until `until`. A packet that arrives earlier than the tolerance allows is unexpected, and fails
    /// the run.
    fn wait_until(&mut self, until: Duration) -> StepResult {
        while self.receive(until)? {}
        self.check_finished_calls()?;
        let tolerance = self.script.directives.tolerance;
        match self.unmatched.front() {
            Some((at, _)) if *at + tolerance < until => self.check_nothing_unmatched(),
            _ => Ok(()),
        }
    }

    fn check_nothing_unmatched(&mut self) -> StepResult {
        if !self.expects_packets {
            self.unmatched.clear();
        }
        let Some((at, segment)) = self.unmatched.pop_front() else { return Ok(()) };
        let text = self.actual_text(&segment);
        self.history.add(at, &format!(">{text}"));
        Err(format!("the stack sent an unexpected packet: >{text}"))
    }

    /// Waits until `until` for a segment and stores it. Returns whether one arrived.
    fn receive(&mut self, until: Duration) -> Result<bool, String> {
        let (local, remote) = addresses(self.target.ip);
        while let Some(sent) = self.backend.wait(until) {
            match WireSegment::from_bytes(&sent.packet, local, remote) {
                Ok(Some(segment)) => {
                    self.unmatched.push_back((sent.at, segment));
                    return Ok(true);
                }
                Ok(None) => {}
                Err(problem) => return Err(format!("the stack sent a malformed packet: {problem}")),
            }
        }
        Ok(false)
    }

    /// Formats a segment of the stack in script numbers, with the number of its flow.
    fn actual_text(&self, segment: &WireSegment) -> String {
        match self.flows.iter().find(|(_, flow)| flow.matches(segment)) {
            Some((number, flow)) => {
                let body = PacketBody::Tcp(flow.to_script(segment));
                Packet { flow: *number, body }.to_string()
            }
            None => {
                let flow = Flow::active(segment.src_port, segment.dst_port, 0);
                format!(" {} (ports {} to {})", flow.to_script(segment), segment.src_port, segment.dst_port)
            }
        }
    }

    fn outbound(&mut self, packet: &Packet, earliest: Duration, latest: Duration) -> StepResult {
        let PacketBody::Tcp(expected) = &packet.body else {
            return Err("an expected packet must be TCP".into());
        };
        let tolerance = self.script.directives.tolerance;
        let since_last = earliest.saturating_sub(self.last);
        let bound = latest.saturating_add(tolerance + self.backend.timer_slack(since_last));
        if self.unmatched.is_empty() {
            let limit =
                if latest == Duration::MAX { self.last + ANY_TIME_MAX } else { bound + LATE_PACKET_GRACE };
            self.receive(limit)?;
        }
        self.check_finished_calls()?;
        let Some((at, mut segment)) = self.unmatched.pop_front() else {
            return Err(match bound {
                Duration::MAX => {
                    format!("no packet arrived within {} s; expected >{packet}", ANY_TIME_MAX.as_secs())
                }
                _ => format!("no packet arrived until {:.6}; expected >{packet}", bound.as_secs_f64()),
            });
        };
        let number = packet.flow;
        if expected.flags.has(Flags::SYN)
            && !expected.flags.has(Flags::ACK)
            && segment.flags == expected.flags
        {
            let (src, dst, isn) = (segment.src_port, segment.dst_port, self.script.directives.remote_isn);
            self.flows.entry(number).or_insert_with(|| Flow::active(src, dst, isn));
        }
        if let Some(flow) = self.flows.get_mut(&number).filter(|flow| flow.matches(&segment)) {
            flow.learn(expected, &segment);
        }
        let mut text = self.actual_text(&segment);
        self.history.add(at, &format!(">{text}"));
        if self.append_segments(&mut segment, expected)? {
            text = self.actual_text(&segment);
        }
        let Some(flow) = self.flows.get(&number).filter(|flow| flow.matches(&segment)) else {
            return Err(format!("packet of another connection\n  expected >{packet}\n  actual   >{text}"));
        };
        let drift = at.abs_diff(self.nominal);
        let differences = self.compare(flow, expected, &segment, tolerance + drift);
        if !differences.is_empty() {
            let fields = differences.join(", ");
            return Err(format!("packet differs in {fields}\n  expected >{packet}\n  actual   >{text}"));
        }
        let seconds = |d: Duration| d.as_secs_f64();
        if at + tolerance < earliest || at > bound {
            let range = format!("{:.6} … {:.6}", seconds(earliest), seconds(latest));
            let slack = seconds(bound.saturating_sub(latest));
            return Err(format!(
                "packet arrived at {:.6}, expected {range} (at most {slack:.6} late)\n  >{text}",
                seconds(at)
            ));
        }
        if latest == Duration::MAX {
            self.nominal = at;
        }
        self.last = at;
        Ok(())
    }

    /// Appends the segments that follow `first` as long as a device could have made them of one packet that
    /// is no longer than the expected one (segmentation offload): they arrive at once, are contiguous, have
    /// the length of the first segment except the last one, and differ only in the flags of the first and
    /// the last one. Returns whether any was appended.
    fn append_segments(&mut self, first: &mut WireSegment, expected: &Segment) -> Result<bool, String> {
        let size = first.payload.len();
        let mut is_merged = false;
        if size == 0 || first.flags.has(Flags::SYN) {
            return Ok(false);
        }
        while first.payload.len() < expected.len as usize && first.payload.len().is_multiple_of(size) {
            if self.unmatched.is_empty() {
                let limit = self.backend.now() + self.script.directives.tolerance;
                self.receive(limit)?;
            }
            let end = first.seq.wrapping_add(first.payload.len() as u32);
            let Some((at, next)) = self.unmatched.pop_front_if(|(_, next)| {
                (next.src_port, next.dst_port) == (first.src_port, first.dst_port)
                    && (next.seq, next.ack, next.window) == (end, first.ack, first.window)
                    && (1..=size).contains(&next.payload.len())
                    && !next.flags.has(Flags::SYN)
            }) else {
                break;
            };
            let text = self.actual_text(&next);
            self.history.add(at, &format!(">{text}"));
            // Segmentation sets CWR on the first segment, and PSH with FIN on the last one.
            let last = Flags::PSH.with(Flags::FIN).0;
            first.flags = Flags(first.flags.0 & !last | next.flags.0 & last);
            first.payload.extend(next.payload);
            is_merged = true;
        }
        Ok(is_merged)
    }

    /// Returns the names of the fields in which a segment differs from the expected one.
    fn compare(
        &self,
        flow: &Flow,
        expected: &Segment,
        wire: &WireSegment,
        slack: Duration,
    ) -> Vec<&'static str> {
        use super::ast::Ecn;
        let actual = flow.to_script(wire);
        let mss = self.script.directives.mtu.saturating_sub(self.target.ip.header_bytes()) as u16;
        let ecn_fits = match expected.ecn {
            None => true,
            Some(Ecn::AnyEct) => matches!(wire.ecn, Ecn::Ect0 | Ecn::Ect1),
            Some(ecn) => wire.ecn == ecn,
        };
        let options_fit = match (&expected.options, &actual.options) {
            (Some(expected), Some(actual)) => options_match(expected, actual, mss, slack),
            _ => true,
        };
        let syn = wire.flags.has(Flags::SYN);
        let payload = || flow.expected_payload(expected.seq, wire.payload.len(), syn);
        let may_push = self.target.backend == BackendKind::Kernel
            && (!wire.payload.is_empty() || wire.flags.has(Flags::FIN));
        let checks = [
            ("flags", flags_match(expected.flags, actual.flags, may_push, self.script.directives.check_push)),
            ("sequence number", expected.seq == actual.seq),
            ("length", expected.len == actual.len),
            ("acknowledgement number", expected.ack == actual.ack),
            ("window", expected.window.is_none() || expected.window == actual.window),
            ("urgent pointer", expected.urgent == actual.urgent),
            ("ECN field", ecn_fits),
            ("TTL", expected.ttl.is_none() || expected.ttl == actual.ttl),
            // There is no DF over IPv6.
            (
                "DF",
                expected.dont_fragment.is_none()
                    || actual.dont_fragment.is_none()
                    || expected.dont_fragment == actual.dont_fragment,
            ),
            ("options", options_fit),
            (
                "payload",
                !self.script.directives.check_payload
                    || expected.seq != actual.seq
                    || payload() == wire.payload,
            ),
        ];
        checks.into_iter().filter(|(_, fits)| !fits).map(|(name, _)| name).collect()
    }

    fn inbound(&mut self, packet: &Packet) -> StepResult {
        let (local, remote) = addresses(self.target.ip);
        let isn = self.script.directives.remote_isn;
        let flow = self.flows.entry(packet.flow).or_insert_with(|| Flow::passive(packet.flow, isn));
        let bytes = match &packet.body {
            PacketBody::Tcp(segment) => {
                let spoil = Corruption { checksum: segment.bad_checksum, data_offset: segment.data_offset };
                let mut wire = flow.to_wire(segment);
                let mss = self.script.directives.mtu.saturating_sub(self.target.ip.header_bytes()) as u16;
                resolve_mss(&mut wire, mss);
                wire.to_bytes(remote, local, spoil)
            }
            PacketBody::Icmp(icmp) => {
                let error = WireIcmp {
                    kind: icmp.kind,
                    mtu: icmp.mtu,
                    local_port: flow.local_port,
                    remote_port: flow.remote_port,
                    seq: flow.local_seq(icmp.seq),
                    flags: icmp.flags,
                    len: icmp.len as u16,
                    ttl: icmp.ttl,
                    quoted_ttl: icmp.quoted_ttl,
                };
                error.to_bytes(local, remote)
            }
        };
        self.history.add(self.last, &format!("<{packet}"));
        self.backend.inject(&bytes);
        Ok(())
    }

    fn call(&mut self, call: &Call) -> StepResult {
        let (new_fd, data) = self.prepare(call);
        let returned = self.backend.call(&call.op, new_fd, &data);
        self.history.add(self.last, &format!("{} = {}", call.text, returned_text(&returned)));
        self.check_returned(call, &returned)
    }

    /// Returns the descriptor that the call creates and the bytes that it sends.
    fn prepare(&mut self, call: &Call) -> (Option<Fd>, Vec<u8>) {
        if let Op::Connect { .. } | Op::SendTo { .. } = call.op {
            self.flows.values_mut().for_each(Flow::expect_new_connection);
        }
        let makes_fd = matches!(call.op, Op::Socket | Op::Accept { .. });
        let new_fd = call.expect.value.filter(|v| makes_fd && *v >= 0).map(|v| v as Fd);
        let data = match call.op {
            Op::Send { fd, len, .. } | Op::SendTo { fd, len, .. } => {
                let start = self.streams.entry(fd).or_default().written;
                (0..len as u64).map(|i| local_byte(start + i)).collect()
            }
            Op::SendMessage { fd, ref parts, .. } => {
                let start = self.streams.entry(fd).or_default().written;
                (0..parts.iter().sum::<usize>() as u64).map(|i| local_byte(start + i)).collect()
            }
            _ => Vec::new(),
        };
        (new_fd, data)
    }

    fn call_blocking(&mut self, call: &Call, line: u32, until: Duration) {
        let (new_fd, data) = self.prepare(call);
        self.history.add(self.last, &format!("{} …", call.text));
        let call_id = line as usize;
        self.pending.push(PendingCall { call_id, call: call.clone(), line, from: self.last, until });
        self.backend.call_blocking(call_id, &call.op, new_fd, &data);
    }

    /// Checks all blocking calls that have returned.
    fn check_finished_calls(&mut self) -> StepResult {
        while let Some(done) = self.backend.take_finished_call() {
            let Some(index) = self.pending.iter().position(|p| p.call_id == done.call_id) else { continue };
            let pending = self.pending.remove(index);
            let text = returned_text(&done.returned);
            self.history.add(done.at, &format!("{} = {text} (of line {})", pending.call.text, pending.line));
            self.check_returned(&pending.call, &done.returned)
                .map_err(|message| format!("line {}: {message}", pending.line))?;
            let tolerance = self.script.directives.tolerance;
            let late = tolerance + self.backend.timer_slack(pending.until.saturating_sub(pending.from));
            if done.at + tolerance < pending.until || done.at > pending.until + late {
                let (at, until) = (done.at.as_secs_f64(), pending.until.as_secs_f64());
                return Err(format!(
                    "line {}: the call returned at {at:.6}, expected {until:.6}",
                    pending.line
                ));
            }
        }
        Ok(())
    }

    fn check_returned(&mut self, call: &Call, returned: &CallResult) -> StepResult {
        let expect = call.expect;
        let matches = expect.value.is_none_or(|v| match call.op {
            // The script assigns the number of a new descriptor.
            Op::Socket | Op::Accept { .. } if v >= 0 => returned.value >= 0,
            _ => v == returned.value && (v != -1 || expect.errno == returned.errno),
        });
        let text = returned_text(returned);
        if !matches {
            let expected = match (expect.value, expect.errno) {
                (Some(v), Some(errno)) => format!("{v} {errno}"),
                (v, _) => v.map_or("*".into(), |v| v.to_string()),
            };
            return Err(format!("{} returned {text}, expected {expected}", call.text));
        }
        self.latest_fd = match call.op {
            Op::Accept { .. } if returned.value >= 0 => expect.value.map(|v| v as Fd),
            Op::Connect { fd } | Op::SendTo { fd, .. } => Some(fd),
            _ => self.latest_fd,
        };
        self.check_detail(call, returned)
    }

    /// Checks values that the call returned through pointers, and updates stream offsets.
    fn check_detail(&mut self, call: &Call, returned: &CallResult) -> StepResult {
        let done = u64::try_from(returned.value).unwrap_or(0);
        match &call.op {
            Op::Send { fd, .. } | Op::SendTo { fd, .. } | Op::SendMessage { fd, .. } => {
                self.streams.entry(*fd).or_default().written += done
            }
            Op::Close { fd } | Op::Disconnect { fd } => {
                self.streams.remove(fd);
            }
            Op::Receive { fd, flags, .. } if !flags.has(libc::MSG_OOB) => {
                let start = self.streams.entry(*fd).or_default().read;
                let matches = (0..).zip(&returned.data).all(|(i, b)| *b == remote_byte(start + i));
                if !matches && self.script.directives.check_payload && !flags.has(libc::MSG_TRUNC) {
                    return Err(format!("{} returned other bytes than the script sent", call.text));
                }
                if !flags.has(libc::MSG_PEEK) {
                    self.streams.entry(*fd).or_default().read += done;
                }
            }
            Op::GetOption { expected, .. } | Op::Ioctl { expected, .. }
                if returned.value == 0 && returned.detail != Some(*expected) =>
            {
                let got = returned.detail.map_or("nothing".into(), |v| v.to_string());
                return Err(format!("{} returned {got}, expected {expected}", call.text));
            }
            Op::Poll { entries, .. } => {
                let expected: Vec<_> = entries.iter().map(|e| e.revents).collect();
                if expected != returned.revents {
                    let list = |v: &[super::names::PollEvents]| {
                        v.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
                    };
                    let (got, expected) = (list(&returned.revents), list(&expected));
                    return Err(format!("poll({}) returned events {got}, expected {expected}", call.text));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn assert(&mut self, assertion: &Assertion) -> StepResult {
        let Some(fd) = assertion.fd.or(self.latest_fd) else {
            return Err("no connection was accepted or opened before this assertion".into());
        };
        let mut info = self.backend.info(fd)?;
        let mss = self.script.directives.mtu.saturating_sub(self.target.ip.header_bytes());
        info.insert("MSS", mss.into());
        for (condition, text) in &assertion.conditions {
            if condition.evaluate(&info).map_err(|e| format!("%{{ {text} }}%: {e}"))? == 0 {
                let mut fields = Vec::new();
                condition.fields(&mut fields);
                let values: Vec<_> = fields.iter().map(|f| format!("{f} = {}", info[f])).collect();
                return Err(format!("%{{ {text} }}% does not hold: {}", values.join(", ")));
            }
        }
        Ok(())
    }

    /// Checks after the last event that no further packet arrives, and that every blocking call has returned.
    fn finish(&mut self) -> StepResult {
        let mut until = self.backend.now() + self.backend.settle_time();
        for pending in &self.pending {
            until = until.max(
                pending.until
                    + self.backend.timer_slack(pending.until.saturating_sub(pending.from))
                    + LATE_PACKET_GRACE,
            );
        }
        while self.receive(until)? {}
        self.check_finished_calls()?;
        if let Some(pending) = self.pending.first() {
            return Err(format!("line {}: {} has not returned", pending.line, pending.call.text));
        }
        self.check_nothing_unmatched()
    }
}

/// Returns whether the flags match. PSH must be set where the script has it (RFC 9293 §3.9.1.2: on the last
/// segment of a send). With `may_push`, PSH may be set additionally: the kernel sets it on further segments
/// with data or FIN.
fn flags_match(expected: Flags, actual: Flags, may_push: bool, check_push: bool) -> bool {
    if !check_push {
        return expected.with(Flags::PSH) == actual.with(Flags::PSH);
    }
    expected == actual || may_push && expected.with(Flags::PSH) == actual
}

fn resolve_mss(segment: &mut WireSegment, link: u16) {
    use super::ast::{MssValue, TcpOpt};
    for option in &mut segment.options {
        if *option == TcpOpt::Mss(Some(MssValue::Link)) {
            *option = TcpOpt::Mss(Some(MssValue::Number(link)));
        }
    }
}

fn returned_text(returned: &CallResult) -> String {
    match returned.errno {
        Some(errno) => format!("{} {errno}", returned.value),
        None => returned.value.to_string(),
    }
}
