//! The peer at 10.0.0.2: opens connections and sends bytes on command, and records what it receives.

use ginnel::{CloseReason, Conn, ConnectOptions, Context, Error, Handler, ListenOptions, Listener};
use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// A command to the peer.
pub enum PeerCommand {
    /// Opens a connection to this port and sends these bytes.
    Connect(u16, Vec<u8>),
    /// Sends these bytes on the connection of this number.
    Send(usize, Vec<u8>),
}

/// Record of a connection at the peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnRecord {
    pub received: Vec<u8>,
    /// FIN was received.
    pub has_fin: bool,
    pub close_reason: Option<CloseReason>,
}

/// The connections, in the order in which they were opened.
pub type ConnRecords = Arc<Mutex<Vec<ConnRecord>>>;

pub struct Peer {
    pub records: ConnRecords,
    pub conns: Vec<Conn>,
    pub numbers: HashMap<Conn, usize>,
    pub to_send: Vec<Vec<u8>>,
}

impl Peer {
    pub fn new(records: ConnRecords) -> Self {
        Self { records, conns: Vec::new(), numbers: HashMap::new(), to_send: Vec::new() }
    }

    fn add(&mut self, conn: Conn, text: Vec<u8>) {
        self.numbers.insert(conn, self.conns.len());
        self.conns.push(conn);
        self.to_send.push(text);
        self.records.lock().unwrap().push(ConnRecord::default());
    }

    fn push(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let text = &mut self.to_send[self.numbers[&conn]];
        if let Ok(count) = cx.send(conn, text) {
            text.drain(..count);
        }
    }

    fn note(&self, conn: Conn, what: impl FnOnce(&mut ConnRecord)) {
        what(&mut self.records.lock().unwrap()[self.numbers[&conn]]);
    }
}

impl Handler for Peer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:90".parse().unwrap(), ListenOptions::default())?;
        Ok(())
    }

    fn accepted(&mut self, _cx: &mut Context<'_>, conn: Conn, _listener: Listener) {
        self.add(conn, Vec::new());
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.push(cx, conn);
    }

    fn data(&mut self, _cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        self.note(conn, |seen| seen.received.extend(data));
        data.len()
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.push(cx, conn);
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.note(conn, |seen| seen.has_fin = true);
        let _ = cx.close(conn);
    }

    fn closed(&mut self, _cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        self.note(conn, |seen| seen.close_reason = Some(reason));
    }

    fn command(&mut self, cx: &mut Context<'_>, command: Box<dyn Any + Send>) {
        match *command.downcast().unwrap() {
            PeerCommand::Connect(port, text) => {
                let conn = cx.connect(([10, 0, 0, 1], port).into(), ConnectOptions::default()).unwrap();
                self.add(conn, text);
            }
            PeerCommand::Send(number, text) => {
                self.to_send[number].extend(text);
                let conn = self.conns[number];
                self.push(cx, conn);
            }
        }
    }
}
