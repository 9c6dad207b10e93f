//! Performs the operations of an input and checks all invariants after each.

use super::app::{App, EndlessSource};
use super::build::{self, GATEWAY, HOSTS, LOCAL_MAC};
use super::check;
use super::peer::Peer;
use super::setup::Setup;
use super::word::{Op, PeerAction, WORD_BYTES, Word, syn_options};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::device::{BURST_FRAMES_MAX, Label, RxBurst, RxFrame};
use ginnel_stack::ip::FlowLabel;
use ginnel_stack::options::{ConnectOptions, ListenOptions, PortSharing, SaveSyn, SocketOptions, TcpOption};
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;
use ginnel_stack::wire::protocol;
use ginnel_stack::wire::tcp::{SeqNumber, TcpOptions, TcpSegment};
use std::collections::VecDeque;

/// Number of frames kept for [`Op::Mutate`].
const HISTORY_FRAMES: usize = 16;
/// Number of ports that listeners use.
const PORTS: u8 = 4;
/// Maximum number of remote ends.
const PEERS_MAX: usize = 64;
/// Maximum number of rounds in which automatic ends and the stack answer each other within one operation.
const ROUNDS_MAX: usize = 24;
/// Maximum number of consecutive deadlines that advance time by no more than a microsecond.
const STALLED_DEADLINES_MAX: u32 = 70;

/// Fragmentation of packets before delivery, as arguments of [`build::fragments`].
#[derive(Clone, Copy, Default)]
struct Fragmentation {
    /// Number of packets that are still to be fragmented.
    packets_left: u8,
    size: usize,
    order: u8,
}

/// The stack under test with its application and remote ends.
pub struct StackFixture {
    setup: Setup,
    /// The application.
    pub app: App,
    peers: Vec<Peer>,
    /// Last IP packet that the stack sent to each peer, for ICMP errors.
    quotes: Vec<Vec<u8>>,
    history: VecDeque<Vec<u8>>,
    /// Frames collected for [`Op::Release`].
    held_frames: Option<Vec<Vec<u8>>>,
    /// Fragmentation of the next packets.
    fragmentation: Fragmentation,
    /// Identification of the last fragmented packet.
    last_fragment_id: u16,
    /// Number of frames that the device takes per turn; `None` is unlimited.
    tx_capacity: Option<usize>,
    /// Number of consecutive deadlines that were not in the future.
    stalled_deadlines: u32,
    /// Receives a description of each step.
    trace: Option<fn(&str)>,
}

impl StackFixture {
    /// Creates the stack that the first word selects, and runs its first turn.
    pub fn new(first: &Word, trace: Option<fn(&str)>) -> Self {
        let mut fixture = Self {
            setup: Setup::new(first),
            app: App::default(),
            peers: Vec::new(),
            quotes: Vec::new(),
            history: VecDeque::new(),
            held_frames: None,
            fragmentation: Fragmentation::default(),
            last_fragment_id: 0,
            tx_capacity: None,
            stalled_deadlines: 0,
            trace,
        };
        fixture.turn(Vec::new());
        fixture
    }

    fn now_ms(&self) -> u32 {
        self.setup.now.as_millis() as u32
    }

    /// Performs one operation. `rest` is the remaining input; returns the number of its words that were used.
    pub fn step(&mut self, word: &Word, rest: &[u8]) -> usize {
        let mut used = 0;
        match word.operation() {
            Op::Raw => {
                used = usize::from(word.a).min(rest.len().div_ceil(WORD_BYTES));
                let bytes = rest[..rest.len().min(used * WORD_BYTES)].to_vec();
                self.taint(None);
                self.deliver_frame(bytes);
            }
            Op::Repeat => {
                let next = Word::decode(rest);
                if !rest.is_empty() && !matches!(next.operation(), Op::Raw | Op::Repeat) {
                    for round in 0..word.a.min(40) {
                        // Ports and sequence numbers advance, so that repeated operations differ.
                        let shifted =
                            Word { y: next.y.wrapping_add(u32::from(round) * u32::from(word.b)), ..next };
                        self.apply(&shifted);
                    }
                }
            }
            _ => self.apply(word),
        }
        used
    }

    fn trace_event(&self, text: impl FnOnce() -> String) {
        if let Some(trace) = self.trace {
            trace(&text());
        }
    }

    fn apply(&mut self, word: &Word) {
        self.trace_event(|| format!("{:?} {word:?}", word.operation()));
        match word.operation() {
            Op::Open | Op::Segment | Op::PeerAction | Op::AutoRespond => self.remote_operation(word),
            Op::IcmpError | Op::Arp | Op::Ndp | Op::Ping | Op::Mutate => self.network_operation(word),
            Op::Hold => {
                self.held_frames.get_or_insert_default();
            }
            Op::Release => {
                if let Some(frames) = self.held_frames.take() {
                    self.turn(frames);
                }
            }
            Op::Advance => self.advance(word),
            Op::Fragment => {
                self.fragmentation =
                    Fragmentation { packets_left: word.a, size: word.x as usize, order: word.b };
            }
            Op::TxCapacity => self.tx_capacity = (word.a != 255).then_some(word.a.into()),
            Op::Raw | Op::Repeat => {}
            Op::UdpBind
            | Op::UdpConnect
            | Op::UdpSend
            | Op::UdpRecv
            | Op::UdpClose
            | Op::Datagram
            | Op::UdpError => {
                let Setup { stack, now, network, .. } = &mut self.setup;
                if let Some((from, packet)) = self.app.udp.apply(stack, *now, network, word) {
                    self.deliver_packet(from, packet);
                }
            }
            _ => self.application_operation(word),
        }
        self.turn(Vec::new());
    }

    fn remote_operation(&mut self, word: &Word) {
        let now_ms = self.now_ms();
        if word.operation() == Op::Open {
            let v6 = word.b & syn_options::V6 != 0;
            let Some(local) = self.listener_address(word.a, v6) else { return };
            let host = build::address(word.c, v6, word.b & syn_options::REMOTE != 0);
            let remote = SocketAddr::new(host, 1024 + word.y as u16 % 60_000);
            let Some(index) = self.find_or_add_peer(remote, local, SeqNumber(word.x)) else { return };
            let packet = self.peers[index].open(word, now_ms);
            return self.deliver_packet(remote.ip(), packet);
        }
        if self.peers.is_empty() {
            return;
        }
        let index = usize::from(word.a) % self.peers.len();
        let peer = &mut self.peers[index];
        let packet = match word.operation() {
            Op::Segment => Some(peer.segment(word, now_ms)),
            Op::PeerAction => {
                let action = PeerAction::ALL[usize::from(word.b) % PeerAction::ALL.len()];
                Some(peer.act(action, word.x, now_ms))
            }
            _ => {
                peer.auto_respond = word.b & 1 != 0;
                None
            }
        };
        let remote = peer.remote.ip();
        if let Some(packet) = packet {
            self.deliver_packet(remote, packet);
        }
    }

    fn network_operation(&mut self, word: &Word) {
        let vlan = self.setup.vlan;
        let host = word.c % (HOSTS + 1);
        match word.operation() {
            Op::IcmpError => {
                let Some(index) = usize::from(word.a).checked_rem(self.peers.len()) else { return };
                let quote = &self.quotes[index];
                if let Some(packet) = build::icmp_error(word.b, word.x, quote) {
                    self.deliver_packet(build::on_link(GATEWAY).0.into(), packet);
                }
            }
            Op::Arp => self.deliver_frame(build::arp(host, word.a, vlan)),
            Op::Ndp => self.deliver_frame(build::ndp(host, word.a, word.x, vlan)),
            Op::Ping => {
                let data = vec![0x5a; word.x as usize % 20_000];
                let packet = match word.a {
                    kind @ (0 | 1) => build::echo_request(host, kind == 1, &data),
                    protocol::IGMP => build::group_message(host, word.b, word.x),
                    other => {
                        let protocol = if other & 1 == 0 { other } else { protocol::UDP };
                        let (source, target) = (build::on_link(host).0, build::LOCAL_V4);
                        build::ip(source.into(), target.into(), protocol, 0, 1, &data[..data.len().min(100)])
                    }
                };
                self.deliver_packet(build::on_link(host).0.into(), packet);
            }
            _ => {
                let Some(age) = usize::from(word.a).checked_rem(self.history.len()) else { return };
                let mut frame = self.history[self.history.len() - 1 - age].clone();
                build::mutate(&mut frame, word.b, word.c & 1 != 0, word.x);
                let ends = flow_of_frame(&frame);
                self.taint(ends);
                self.deliver_frame(frame);
            }
        }
    }

    /// Marks the content of the stream between `ends` as uncertain, or of all streams if `ends` is `None`.
    fn taint(&mut self, ends: Option<(SocketAddr, SocketAddr)>) {
        if ends.is_none() {
            self.app.udp.taint();
        }
        for peer in &mut self.peers {
            if ends.is_none_or(|e| e == (peer.remote, peer.local)) {
                peer.tainted = true;
            }
        }
    }

    fn application_operation(&mut self, word: &Word) {
        let (app, stack) = (&mut self.app, &mut self.setup.stack);
        match word.operation() {
            Op::Listen => self.listen(word),
            Op::Unlisten => {
                if let Some(at) = usize::from(word.a).checked_rem(app.listeners.len()) {
                    assert!(stack.unlisten(app.listeners.remove(at).0), "an open listener");
                }
            }
            Op::Connect => self.connect(word),
            Op::Accept => match word.a {
                1 => app.auto_accept = false,
                2 => app.auto_accept = true,
                _ => {
                    if let Some(at) = usize::from(word.b).checked_rem(app.listeners.len()) {
                        app.accept(stack, app.listeners[at].0);
                    }
                }
            },
            Op::Send => app.send(stack, word.a, word.x as usize % 100_000, false),
            Op::SendUrgent => app.send(stack, word.a, word.x as usize % 3000, true),
            Op::SendSource => {
                let Some(c) = app.pick_conn(word.a) else { return };
                let len = u64::from(word.x) % (1 << 20);
                let source = stack.add_source(Box::new(EndlessSource));
                if stack.send_source(c.conn, source, c.sent, len).is_ok() {
                    c.sent += len;
                }
                assert!(stack.release_source(source), "a new source");
            }
            Op::Recv => {
                let Some(conn) = app.pick_conn(word.a).map(|c| c.conn) else { return };
                app.read(stack, conn, word.x as usize % 100_000, &self.peers);
                let _ = stack.recv_urgent(conn);
            }
            Op::ReadPolicy => {
                app.take_share = word.a % 3;
                app.reads_when_readable = word.b & 1 != 0;
            }
            Op::SetOption => {
                let Some(conn) = app.pick_conn(word.a).map(|c| c.conn) else { return };
                let _ = stack.set_option(conn, tcp_option(word.b, word.x));
            }
            op => {
                let Some(conn) = app.pick_conn(word.a).map(|c| c.conn) else { return };
                let _ = match op {
                    Op::Shutdown => stack.shutdown_write(conn),
                    Op::Close => stack.close(conn),
                    _ => stack.abort(conn),
                };
            }
        }
    }

    fn listen(&mut self, word: &Word) {
        let port = 80 + u16::from(word.b % PORTS);
        let ip: IpAddr = match word.a % 5 {
            0 => Ipv4Addr::UNSPECIFIED.into(),
            1 | 2 => Ipv6Addr::UNSPECIFIED.into(),
            3 => build::LOCAL_V4.into(),
            _ => build::LOCAL_V6.into(),
        };
        let buffers = (word.x != 0).then_some(word.x % (1 << 22));
        let options = ListenOptions {
            backlog: word.c.into(),
            v6_only: word.a % 5 == 2,
            reuse_port: word.a % 7 == 3,
            awaits_filter: false,
            user: 0,
            socket: SocketOptions {
                recv_buffer_bytes: buffers,
                send_buffer_bytes: buffers,
                mss: (word.y != 0).then_some(word.y as u16),
                nodelay: word.z & 1 != 0,
                keepalive: word.z & 2 != 0,
                ack_events: word.z & 4 != 0,
                tos: word.z as u8 & 0xf8,
                hop_limit: (word.z & 8 != 0).then_some(word.a),
                flow_label: match word.z >> 23 & 3 {
                    0 => FlowLabel::Auto,
                    1 => FlowLabel::Reflect,
                    _ => FlowLabel::Fixed(word.y & 0xf_ffff),
                },
                priority: (word.z >> 8) as u8 & 7,
                min_ttl: if word.z & 1 << 16 == 0 { 0 } else { 60 },
                min_hop_count: if word.z & 1 << 17 == 0 { 0 } else { 60 },
                rto_min: (word.z & 1 << 18 != 0)
                    .then_some(Duration::from_millis(1 + u64::from(word.y % 200))),
                rto_max: (word.z & 1 << 19 != 0).then_some(Duration::from_secs(1 + u64::from(word.y % 120))),
                delayed_ack_max: (word.z & 1 << 20 != 0)
                    .then_some(Duration::from_millis(1 + u64::from(word.y % 200))),
                save_syn: match word.z >> 21 & 3 {
                    1 => SaveSyn::Packet,
                    2 => SaveSyn::Frame,
                    _ => SaveSyn::Off,
                },
                unordered: word.z & 1 << 23 != 0,
                port_sharing: PortSharing {
                    reuse_address: word.z & 1 << 24 != 0,
                    reuse_port: word.z & 1 << 25 != 0,
                },
                defer_accept: (word.z >> 26) as u8 & 3,
                may_fragment: word.z & 1 << 28 != 0,
                fastopen_queue: word.z >> 29 & 3,
                fastopen_keys: (None, None),
                fastopen_no_cookie: word.z & 1 << 31 != 0,
                fastopen_connect: false,
            },
        };
        // The cookie of one listener may return to another one with different options.
        self.peers.iter_mut().for_each(Peer::forget_stack_state);
        let addr = SocketAddr::new(ip, port);
        if let Ok(listener) = self.setup.stack.listen(addr, options) {
            self.app.listeners.push((listener, addr));
        }
    }

    fn connect(&mut self, word: &Word) {
        let v6 = word.b & syn_options::V6 != 0;
        let host = build::address(word.c, v6, word.b & syn_options::REMOTE != 0);
        let remote = SocketAddr::new(host, 1024 + word.y as u16 % 60_000);
        let ip: IpAddr = if v6 { build::LOCAL_V6.into() } else { build::LOCAL_V4.into() };
        // Sometimes the caller chooses the port, so that addresses are reused.
        let local = (word.x & 1 != 0).then(|| SocketAddr::new(ip, 2000 + (word.x >> 8) as u16 % 4));
        let socket = SocketOptions {
            fastopen_connect: word.x & 1 << 30 != 0,
            fastopen_no_cookie: word.x & 1 << 31 != 0,
            ..SocketOptions::default()
        };
        let options = ConnectOptions { local, socket, ..ConnectOptions::default() };
        if let Ok(conn) = self.setup.stack.connect(self.setup.now, remote, &options) {
            self.app.register_conn(&self.setup.stack, conn);
        }
    }

    /// Returns the address of listener number `number`, or that of a closed port if there is none. Returns
    /// `None` for IPv6 on a link whose MTU is too small for it.
    fn listener_address(&self, number: u8, v6: bool) -> Option<SocketAddr> {
        let ip: IpAddr = if v6 { build::LOCAL_V6.into() } else { build::LOCAL_V4.into() };
        let port = match usize::from(number).checked_rem(self.app.listeners.len()) {
            Some(at) if number < 0xf0 => self.app.listeners[at].1.port(),
            _ => 79,
        };
        (!v6 || self.setup.mtu >= 1280).then(|| SocketAddr::new(ip, port))
    }

    /// Returns the index of the remote end with these addresses, which is created if necessary. Returns
    /// `None` if there are too many others.
    fn find_or_add_peer(&mut self, remote: SocketAddr, local: SocketAddr, start: SeqNumber) -> Option<usize> {
        if let Some(index) = self.peers.iter().position(|p| (p.remote, p.local) == (remote, local)) {
            return Some(index);
        }
        if self.peers.len() == PEERS_MAX {
            return None;
        }
        self.peers.push(Peer::new(remote, local, start));
        self.quotes.push(Vec::new());
        Some(self.peers.len() - 1)
    }

    /// Delivers a packet of a remote host, possibly in fragments.
    fn deliver_packet(&mut self, from: IpAddr, packet: Vec<u8>) {
        let Fragmentation { packets_left, size, order } = self.fragmentation;
        let packets = if packets_left > 0 {
            self.fragmentation.packets_left -= 1;
            self.last_fragment_id = self.last_fragment_id.wrapping_add(1);
            build::fragments(&packet, size, order, self.last_fragment_id)
        } else {
            vec![packet]
        };
        let host = build::next_hop_host(from);
        for packet in packets {
            let ethertype = build::ethertype(&packet);
            self.deliver_frame(build::frame(host, LOCAL_MAC, self.setup.vlan, ethertype, &packet));
        }
    }

    fn deliver_frame(&mut self, frame: Vec<u8>) {
        if self.history.len() == HISTORY_FRAMES {
            self.history.pop_front();
        }
        self.history.push_back(frame.clone());
        match &mut self.held_frames {
            Some(held_frames) => held_frames.push(frame),
            None => self.turn(vec![frame]),
        }
    }

    fn advance(&mut self, word: &Word) {
        let target = match word.a % 4 {
            0 => {
                for _ in 0..word.x % 40 {
                    self.next_deadline(Instant::MAX);
                }
                return;
            }
            1 => Duration::from_millis(u64::from(word.x) % 200_000),
            2 => Duration::from_micros(word.x.into()),
            _ => Duration::from_secs(u64::from(word.x) % 10_000),
        };
        let target = self.setup.now + target;
        if word.b & 1 == 0 {
            for _ in 0..100 {
                if !self.next_deadline(target) {
                    break;
                }
            }
        }
        // A shard may also run late.
        self.setup.now = self.setup.now.max(target);
        self.stalled_deadlines = 0;
        self.turn(Vec::new());
    }

    /// Advances time to the next deadline, if there is one up to `limit`.
    fn next_deadline(&mut self, limit: Instant) -> bool {
        let Some(at) = self.setup.stack.next_deadline().filter(|at| *at <= limit) else { return false };
        if at <= self.setup.now {
            self.setup.now += Duration::from_micros(1);
            self.stalled_deadlines += 1;
            let stalled = self.tx_capacity.is_none() && self.stalled_deadlines > STALLED_DEADLINES_MAX;
            assert!(!stalled, "the next deadline stays at {at:?}, in the past");
        } else {
            self.setup.now = at;
            self.stalled_deadlines = 0;
        }
        self.turn(Vec::new());
        true
    }

    /// Runs turns of the stack until the automatic ends have no more answers.
    fn turn(&mut self, mut frames: Vec<Vec<u8>>) {
        for _ in 0..ROUNDS_MAX {
            self.one_turn(&frames);
            frames = self.auto_responses();
            if frames.is_empty() {
                break;
            }
        }
    }

    fn auto_responses(&mut self) -> Vec<Vec<u8>> {
        let now_ms = self.now_ms();
        let vlan = self.setup.vlan;
        let mut frames = Vec::new();
        for peer in &mut self.peers {
            if let Some(packet) = peer.answer(now_ms) {
                let host = build::next_hop_host(peer.remote.ip());
                frames.push(build::frame(host, LOCAL_MAC, vlan, build::ethertype(&packet), &packet));
            }
        }
        frames
    }

    fn one_turn(&mut self, frames: &[Vec<u8>]) {
        self.setup.device().capacity = self.tx_capacity;
        let (stack, app) = (&mut self.setup.stack, &mut self.app);
        let now = self.setup.now;
        for burst_frames in frames.chunks(BURST_FRAMES_MAX) {
            if let Some(trace) = self.trace {
                burst_frames.iter().for_each(|f| trace(&format!("  {now:?} in  {}", describe(f))));
            }
            let mut burst = RxBurst::new();
            for bytes in burst_frames {
                // Any priority, which is constant for the frame.
                let label = Label::new(None, bytes.len() as u8 & Label::PRIORITY_MAX);
                burst.push(RxFrame { label, ..RxFrame::new(bytes) });
            }
            stack.receive(now, self.setup.port, &burst);
            app.take_events(stack, &burst, &self.peers);
            stack.finish_burst(&burst);
            stack.check_invariants();
        }
        stack.advance(now);
        app.take_events(stack, &RxBurst::new(), &self.peers);
        app.record_states(stack);
        stack.transmit(now);
        app.take_events(stack, &RxBurst::new(), &self.peers);
        app.record_states(stack);
        stack.check_invariants();
        self.check_limits();
        self.check_liveness();
        self.check_sent_frames();
    }

    /// Checks that no limit is exceeded.
    fn check_limits(&self) {
        let usage = self.setup.stack.usage();
        let limits = &self.setup.tcp;
        assert!(usage.connections <= limits.connections_max as usize, "{usage:?}");
        assert!(usage.half_open <= limits.half_open_max as usize, "{usage:?}");
        assert!(usage.time_wait <= limits.time_wait_max as usize, "{usage:?}");
        assert!(usage.active <= usage.connections, "{usage:?}");
        assert!(usage.chunks as u64 * 2048 <= limits.buffer_pool_bytes, "{usage:?}");
        assert!(usage.timers <= usage.connections, "{usage:?}");
    }

    /// Checks that unsent or unacknowledged data have a timer.
    fn check_liveness(&self) {
        let stack = &self.setup.stack;
        if stack.next_deadline().is_some() || self.tx_capacity.is_some() {
            return;
        }
        for c in self.app.conns.iter().filter(|c| !c.ended) {
            let info = stack.info(c.conn);
            let waiting =
                info.is_some_and(|i| i.unacked > 0 || i.notsent_bytes > 0 || !is_stable_state(i.state));
            assert!(!waiting, "no timer for {info:?}");
        }
    }

    /// Checks all sent frames and passes them to the remote ends.
    fn check_sent_frames(&mut self) {
        let sent = core::mem::take(&mut self.setup.device().sent);
        let capabilities = self.setup.capabilities;
        for (frame, meta) in sent {
            let mut wire_frames = Vec::new();
            check::to_wire_frames(&frame, &meta, &capabilities, |f| wire_frames.push(f.to_vec()));
            for frame in wire_frames {
                self.app.frames.add(&frame);
                self.on_sent(&frame);
            }
        }
    }

    fn on_sent(&mut self, frame: &[u8]) {
        self.trace_event(|| format!("  {:?} out {}", self.setup.now, describe(frame)));
        let header = if self.setup.vlan.is_some() { 18 } else { 14 };
        let Some(sent_segment) = check::frame(frame, self.setup.mtu) else {
            return self.app.udp.on_sent(&frame[header..]);
        };
        let ends = (sent_segment.remote, sent_segment.local);
        let start = SeqNumber(0xffff_f000u32.wrapping_add(u32::from(sent_segment.local.port()) << 12));
        let Some(index) = self.find_or_add_peer(sent_segment.remote, sent_segment.local, start) else {
            return;
        };
        let peer = &mut self.peers[index];
        let cookies = self.setup.stack.tcp_stats().cookies_accepted > 1;
        check::segment(peer, &sent_segment.segment, self.app.sent_max(ends), cookies);
        peer.on_stack_segment(&sent_segment.segment);
        // A cookie does not preserve the window scale if its ACK lacks the timestamp that encodes it.
        let cookies = self.setup.stack.tcp_stats().cookies_accepted > 0;
        check::check_window_edge(peer, &sent_segment.segment, cookies);
        self.quotes[index] = frame[header..].to_vec();
    }

    /// Ends everything and checks that no resource remains in use.
    pub fn finish(mut self) -> App {
        self.held_frames = None;
        self.tx_capacity = None;
        for peer in &mut self.peers {
            peer.auto_respond = false;
        }
        self.app.auto_accept = true;
        for (listener, _) in core::mem::take(&mut self.app.listeners) {
            assert!(self.setup.stack.unlisten(listener), "an open listener");
        }
        for i in 0..self.app.conns.len() {
            let c = &self.app.conns[i];
            if !c.ended {
                assert!(self.setup.stack.abort(c.conn).is_ok(), "{c:?} has not ended");
            }
        }
        self.app.udp.finish(&mut self.setup.stack);
        self.turn(Vec::new());
        if let Some(c) = self.app.conns.iter().find(|c| !c.ended) {
            panic!("{c:?} was aborted and has not ended: {:?}", self.setup.stack.info(c.conn));
        }
        // Half-open connections and TIME_WAIT entries expire.
        self.setup.now += Duration::from_secs(4000);
        for _ in 0..200 {
            self.turn(Vec::new());
            self.setup.now += Duration::from_secs(130);
        }
        let usage = self.setup.stack.usage();
        let in_use =
            (usage.connections, usage.half_open, usage.time_wait, usage.active, usage.chunks, usage.timers);
        assert_eq!(in_use, (0, 0, 0, 0, 0, 0), "resources are still in use: {usage:?}");
        self.app
    }
}

/// Returns the addresses of a TCP frame, (remote, local), if they can be parsed.
fn flow_of_frame(frame: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let start = if frame.get(12..14)? == [0x81, 0] { 18 } else { 14 };
    let packet = frame.get(start..)?;
    let port = |l4: &[u8], at: usize| Some(u16::from_be_bytes([*l4.get(at)?, *l4.get(at + 1)?]));
    let (src, dst, l4): (IpAddr, IpAddr, &[u8]) = match packet.first()? >> 4 {
        4 if packet.get(9) == Some(&protocol::TCP) && packet[6] & 0x3f == 0 && packet[7] == 0 => {
            let octets = |at: usize| Some(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?.into());
            let l4 = packet.get(usize::from(packet[0] & 15) * 4..)?;
            (IpAddr::V4(octets(12)?), IpAddr::V4(octets(16)?), l4)
        }
        6 if packet.get(6) == Some(&protocol::TCP) => {
            let octets = |at: usize| Some(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?.into());
            (IpAddr::V6(octets(8)?), IpAddr::V6(octets(24)?), packet.get(40..)?)
        }
        _ => return None,
    };
    Some((SocketAddr::new(src, port(l4, 0)?), SocketAddr::new(dst, port(l4, 2)?)))
}

/// Returns whether a connection may stay in this state indefinitely without activity.
fn is_stable_state(state: State) -> bool {
    matches!(state, State::Closed | State::Established | State::CloseWait | State::FinWait2)
}

/// Formats a frame for traces.
fn describe(frame: &[u8]) -> String {
    let Some((a, b)) = flow_of_frame(frame) else {
        return format!("{} bytes {:02x?}", frame.len(), &frame[..frame.len().min(60)]);
    };
    let start = if frame[12..14] == [0x81, 0] { 18 } else { 14 };
    let l4 = start + if a.is_ipv4() { usize::from(frame[start] & 15) * 4 } else { 40 };
    match TcpSegment::parse(&frame[l4..]) {
        Ok(s) => format!("{a} > {b} {:?} {:?} {}", s.header, TcpOptions::parse(s.options), s.payload.len()),
        Err(e) => format!("{a} > {b} {e:?}"),
    }
}

fn tcp_option(code: u8, value: u32) -> TcpOption {
    let on = value & 1 != 0;
    let seconds = Duration::from_secs(u64::from(value) % 40_000);
    match code % 16 {
        0 => TcpOption::NoDelay(on),
        1 => TcpOption::Cork(on),
        2 => TcpOption::QuickAck(on),
        3 => TcpOption::KeepAlive(on),
        4 => TcpOption::KeepIdle(seconds),
        5 => TcpOption::KeepInterval(seconds),
        6 => TcpOption::KeepCount(value as u8),
        7 => TcpOption::UserTimeout(Duration::from_millis(value.into())),
        8 => TcpOption::LingerZero(on),
        9 => TcpOption::Linger2(seconds),
        10 => TcpOption::OobInline(on),
        11 => TcpOption::AckEvents(on),
        12 => TcpOption::RecvBuffer(value % (1 << 22)),
        13 => TcpOption::SendBuffer(value % (1 << 22)),
        14 => TcpOption::Unordered(on),
        _ => TcpOption::MaxSegment(value as u16),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_stack::wire::MacAddr;

    #[test]
    fn addresses_are_parsed_from_tcp_frame() {
        let (remote, local) = (SocketAddr::from(([10, 0, 0, 9], 5)), SocketAddr::from(([10, 0, 0, 1], 80)));
        let mut peer = Peer::new(remote, local, SeqNumber(1));
        let packet = peer.open(&Word::open(0, syn_options::DEFAULT, 0, 0, 1), 0);
        let frame = build::frame(0, MacAddr([2; 6]), Some(3), build::ethertype(&packet), &packet);
        assert_eq!(flow_of_frame(&frame), Some((remote, local)));
        assert_eq!(flow_of_frame(&frame[..30]), None);
    }
}
