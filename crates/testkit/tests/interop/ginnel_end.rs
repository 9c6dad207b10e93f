//! Ginnel's end of the connections: an application that follows a plan.

use crate::case::{Case, Client};
use crate::plan::{Ended, Finish, Info, Outcome, Plan};
use crate::stream::{Stream, Verifier};
use ginnel::{
    CloseReason, Conn, ConnectOptions, Context, Error, Handler, ListenOptions, Listener, SocketOptions,
    TcpInfo,
};
use std::any::Any;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;

/// Maximum number of bytes per send call.
const CHUNK: u64 = 256 << 10;

/// Role of Ginnel's end.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    /// Accepts connections on this address.
    Server(SocketAddr),
    /// Opens `count` connections, `parallel` at a time.
    Client { remote: SocketAddr, count: usize, parallel: usize },
    /// Neither listens nor connects.
    Idle,
}

/// Command that requests a description of all connections as text.
pub struct Describe(pub Sender<String>);

/// State of one connection.
struct Flow {
    sent: u64,
    incoming: Verifier,
    /// True if sending may begin.
    started: bool,
    finished: bool,
    peer_closed: bool,
    paused: bool,
    pause_over: bool,
    problem: Option<&'static str>,
    info: Option<TcpInfo>,
}

/// The application.
pub struct GinnelEnd {
    role: Role,
    plan: Plan,
    options: SocketOptions,
    outgoing: Stream,
    incoming: Stream,
    report: Sender<Outcome>,
    opened: usize,
    /// Number of connections that must be established before the first one sends.
    open_before_sending: usize,
    established: Vec<Conn>,
    flows: HashMap<Conn, Flow>,
    /// Connections with a pause, indexed by the token of its timer.
    paused: Vec<Conn>,
}

impl GinnelEnd {
    pub fn new(role: Role, case: &Case, report: Sender<Outcome>) -> Self {
        let (outgoing, incoming) = match case.client {
            Client::Kernel => (Stream::Response, Stream::Request),
            Client::Ginnel => (Stream::Request, Stream::Response),
        };
        Self {
            role,
            plan: case.ginnel,
            options: case.options,
            outgoing,
            incoming,
            report,
            opened: 0,
            open_before_sending: if case.all_open { case.count } else { 1 },
            established: Vec::new(),
            flows: HashMap::new(),
            paused: Vec::new(),
        }
    }

    fn add(&mut self, conn: Conn) {
        let flow = Flow {
            sent: 0,
            incoming: Verifier::new(self.incoming),
            started: false,
            finished: false,
            peer_closed: false,
            paused: false,
            pause_over: false,
            problem: None,
            info: None,
        };
        assert!(self.flows.insert(conn, flow).is_none(), "a handle is not used twice");
    }

    fn open_more(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let Role::Client { remote, count, parallel } = self.role else { return Ok(()) };
        while self.opened < count && self.flows.len() < parallel {
            let options = ConnectOptions { socket: self.options, ..ConnectOptions::default() };
            let conn = cx.connect(remote, options)?;
            self.opened += 1;
            self.add(conn);
        }
        Ok(())
    }

    /// Begins to send, unless the plan waits for the peer's FIN.
    fn established(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if self.plan.answer_after_fin {
            return;
        }
        if self.open_before_sending <= 1 {
            return self.start_sending(cx, conn);
        }
        self.established.push(conn);
        if self.established.len() == self.open_before_sending {
            for conn in std::mem::take(&mut self.established) {
                self.start_sending(cx, conn);
            }
        }
    }

    fn start_sending(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(flow) = self.flows.get_mut(&conn) {
            flow.started = true;
        }
        self.send_more(cx, conn);
    }

    /// Sends as much as possible, and finishes when the plan is complete.
    fn send_more(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let plan = self.plan;
        let Some(flow) = self.flows.get_mut(&conn) else { return };
        if !flow.started {
            return;
        }
        while flow.sent < plan.send {
            let piece = self.outgoing.piece(flow.sent, CHUNK.min(plan.send - flow.sent));
            match cx.send(conn, piece) {
                Ok(consumed) => {
                    flow.sent += consumed as u64;
                    if consumed < piece.len() {
                        return;
                    }
                }
                Err(_) => {
                    flow.problem = Some("send was refused");
                    return;
                }
            }
        }
        if !flow.finished && flow.incoming.received() >= plan.finish_after {
            flow.finished = true;
            flow.info = cx.info(conn).ok();
            let result = match plan.finish {
                Finish::Fin if flow.peer_closed => cx.close(conn),
                Finish::Fin => cx.shutdown_write(conn),
                Finish::Close => cx.close(conn),
                Finish::Reset => cx.abort(conn),
            };
            if result.is_err() {
                flow.problem = Some("the handle went stale before its end was reported");
            }
        }
    }

    fn describe(&self, cx: &Context<'_>) -> String {
        let mut text = String::new();
        for (conn, flow) in self.flows.iter().take(8) {
            let state = cx.info(*conn).map_or_else(|_| "stale".into(), |info| print(&info));
            let received = flow.incoming.received();
            let _ = writeln!(
                text,
                "  {conn:?}: sent {} received {received} finished {} peer closed {} paused {} trouble {:?}\n    {state}",
                flow.sent, flow.finished, flow.peer_closed, flow.paused, flow.problem
            );
        }
        let open = self.flows.len();
        let _ = writeln!(text, "  {open} connections open, {} opened by us", self.opened);
        let network = cx.network_stats();
        let counters = cx.tcp_stats().entries().chain(network.entries());
        let counters = counters.chain(cx.network_drops().entries()).chain(cx.stats().iter());
        for (name, count) in counters.filter(|(_, count)| *count > 0) {
            let _ = write!(text, "  {name} {count}");
        }
        text
    }
}

/// Returns Ginnel's view of a connection.
fn translate(info: &TcpInfo) -> Info {
    Info {
        timestamps: info.timestamps,
        sack: info.sack,
        window_scaling: info.wscale,
        ecn: info.ecn,
        retransmits: info.total_retrans,
        path_mtu: info.pmtu,
        segment_bytes: info.snd_mss,
        text: print(info),
    }
}

fn print(info: &TcpInfo) -> String {
    format!("{info:?}")
}

impl Handler for GinnelEnd {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        match self.role {
            Role::Server(address) => {
                let options = ListenOptions { socket: self.options, ..ListenOptions::default() };
                cx.listen(address, options).map(drop)
            }
            Role::Client { .. } => self.open_more(cx),
            Role::Idle => Ok(()),
        }
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _listener: Listener) {
        self.add(conn);
        self.established(cx, conn);
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.established(cx, conn);
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let Some(flow) = self.flows.get_mut(&conn) else { return 0 };
        if flow.paused {
            return 0;
        }
        let mut consumed = data.len();
        if self.plan.finish != Finish::Fin {
            consumed = consumed.min((self.plan.finish_after - flow.incoming.received()) as usize);
        }
        if let Some(pause) = self.plan.pause.filter(|_| !flow.pause_over) {
            let left = pause.after.saturating_sub(flow.incoming.received());
            if consumed as u64 >= left {
                consumed = left as usize;
                (flow.paused, flow.pause_over) = (true, true);
                self.paused.push(conn);
                if cx.set_timer(pause.time, self.paused.len() as u64 - 1).is_none() {
                    flow.problem = Some("no timer left");
                }
            }
        }
        flow.incoming.take(&data[..consumed]);
        self.send_more(cx, conn);
        consumed
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        let conn = self.paused[token as usize];
        if let Some(flow) = self.flows.get_mut(&conn) {
            flow.paused = false;
            cx.resume_reading(conn);
        }
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.send_more(cx, conn);
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let Some(flow) = self.flows.get_mut(&conn) else { return };
        flow.peer_closed = true;
        if flow.finished {
            flow.info = cx.info(conn).ok();
            if cx.close(conn).is_err() {
                flow.problem = Some("the handle went stale before its end was reported");
            }
        } else if flow.started || !self.plan.answer_after_fin {
            self.send_more(cx, conn);
        } else {
            self.start_sending(cx, conn);
        }
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let Some(flow) = self.flows.remove(&conn) else { return };
        let ended = match (flow.problem, reason) {
            (Some("send was refused") | None, CloseReason::Reset) => Ended::Reset,
            (Some(trouble), _) => Ended::Otherwise(trouble),
            (_, CloseReason::Normal) => match self.plan.finish {
                Finish::Fin if flow.peer_closed && flow.finished => Ended::Fin,
                Finish::Close if flow.finished => Ended::Closed,
                _ => Ended::Otherwise("closed as normal before both ends were done"),
            },
            (_, CloseReason::Aborted) if flow.finished && self.plan.finish != Finish::Fin => Ended::Aborted,
            (_, CloseReason::Aborted) => Ended::Otherwise("aborted without a request"),
            (_, CloseReason::Refused) => Ended::Refused,
            (_, CloseReason::TimedOut) => Ended::TimedOut,
            (_, _) => Ended::Otherwise("ended by an ICMP error"),
        };
        let outcome = Outcome {
            sent: flow.sent,
            received: flow.incoming.received(),
            mismatch: flow.incoming.mismatch(),
            digest: flow.incoming.digest(),
            ended,
            info: flow.info.as_ref().map(translate).unwrap_or_default(),
        };
        // The receiver is gone when the case has failed.
        let _ = self.report.send(outcome);
        if let Err(e) = self.open_more(cx) {
            eprintln!("interop: {e}");
        }
    }

    fn command(&mut self, cx: &mut Context<'_>, command: Box<dyn Any + Send>) {
        if let Ok(describe) = command.downcast::<Describe>() {
            let _ = describe.0.send(self.describe(cx));
        }
    }
}
