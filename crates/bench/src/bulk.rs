//! An application that sends or receives as fast as it can.

use crate::host::Application;
use ginnel_stack::device::RxBurst;
use ginnel_stack::events::Event;
use ginnel_stack::handle::Conn;
use ginnel_stack::stack::Stack;
use ginnel_stack::tcp::source::{Source, SourceId};
use ginnel_stack::wire::checksum::Sum;

/// Bytes queued in one call.
const CHUNK_BYTES: u64 = 1 << 18;

/// An endless source of zeros, whose checksum is known.
struct Zeros;

impl Source for Zeros {
    fn len(&self) -> u64 {
        u64::MAX
    }

    fn fill(&self, _offset: u64, out: &mut [u8]) {
        out.fill(0);
    }

    fn sum(&self, _offset: u64, _len: usize) -> Option<Sum> {
        Some(Sum::of(&[]))
    }
}

/// A bulk sender or receiver.
pub struct BulkTransfer {
    /// The source that is sent on every connection; `None` for a receiver.
    zeros: Option<SourceId>,
    /// Connections opened.
    pub opened: u64,
    /// Bytes received.
    pub received: u64,
    /// Connections ended.
    pub ended: u64,
    rest: Box<[u8]>,
}

impl BulkTransfer {
    /// Creates a receiver.
    pub fn receiver() -> Self {
        Self { zeros: None, opened: 0, received: 0, ended: 0, rest: vec![0; 1 << 16].into() }
    }

    /// Creates a sender.
    pub fn sender(stack: &mut Stack) -> Self {
        Self { zeros: Some(stack.add_source(Box::new(Zeros))), ..Self::receiver() }
    }

    fn send(&self, stack: &mut Stack, conn: Conn) {
        let Some(zeros) = self.zeros else { return };
        while stack.send_source(conn, zeros, 0, CHUNK_BYTES).is_ok() {}
    }
}

impl Application for BulkTransfer {
    fn on_event(&mut self, stack: &mut Stack, event: Event, burst: &RxBurst<'_>) {
        match event {
            Event::Incoming { listener } => {
                while let Some(conn) = stack.accept(listener) {
                    self.opened += 1;
                    self.send(stack, conn);
                }
            }
            Event::Connected { conn } => {
                self.opened += 1;
                self.send(stack, conn);
            }
            Event::Writable { conn } => self.send(stack, conn),
            Event::Data { conn, data } => {
                // Bytes left unread earlier would come before `data`, but this application leaves none.
                self.received += data.len() as u64;
                stack.consume(conn, data, data.len(), burst);
            }
            Event::Readable { conn } => {
                while let Ok(count @ 1..) = stack.recv(conn, &mut self.rest) {
                    self.received += count as u64;
                }
            }
            Event::PeerClosed { conn } => _ = stack.close(conn),
            Event::Closed { .. } => self.ended += 1,
            _ => {}
        }
    }
}
