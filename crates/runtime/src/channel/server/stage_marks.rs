//! Sockets whose latency stages are sampled (`ginnel ss --stages`): the shard notes when their bytes are in
//! the region, and when clients have read and written. Clients notify the shard of each read meanwhile.

use super::domain::{Domain, DomainSocket};
use crate::channel::region::Direction;
use crate::channel::sync::{Ordering, fence};
use crate::context::Context;
use crate::stages::StageSampler;
use ginnel_stack::handle::Conn;
use std::sync::Arc;

/// Ties a socket to its place in a sampler.
#[derive(Clone, Debug)]
pub(super) struct StageMark {
    sampler: Arc<StageSampler>,
    slot: u32,
    /// [`DomainSocket::is_unread_reported`](super::domain::DomainSocket::is_unread_reported) as it would be
    /// without the sampler.
    is_unread_reported: bool,
}

impl DomainSocket {
    fn end_stage_mark(&mut self) {
        if let Some(times) = &mut self.arrival_times
            && let Some(mark) = times.stages.take()
        {
            self.is_unread_reported = mark.is_unread_reported;
        }
    }

    /// Ends the sampling of the socket.
    pub(super) fn end_stages(&mut self) {
        self.end_stage_mark();
        self.end_unneeded_reports();
    }
}

impl Domain {
    /// Begins or ends the sampling of a socket. Bytes that clients have written before are no answer.
    pub(super) fn set_stages(&mut self, socket: u32, stages: Option<(Arc<StageSampler>, u32)>) {
        self.socket(socket).end_stage_mark();
        if let Some((sampler, slot)) = stages {
            sampler.set_written(slot, self.written(socket).0);
            let entry = self.socket(socket);
            let is_unread_reported = core::mem::replace(&mut entry.is_unread_reported, true);
            entry.report_arrivals().stages = Some(StageMark { sampler, slot, is_unread_reported });
        }
        self.socket(socket).end_unneeded_reports();
    }

    /// Notes that all received bytes of a sampled socket are in the region.
    pub(super) fn note_delivered(&mut self, socket: u32) {
        let received = self.socket(socket).received;
        self.with_mark(socket, |mark| mark.sampler.delivered(mark.slot, received));
    }

    /// Handles bytes of a sampled socket that came into the region. `is_above`: unread bytes may have to be
    /// reported to the engine.
    #[cold]
    pub(super) fn on_sampled_arrival(
        &mut self,
        cx: &mut Context<'_>,
        socket: u32,
        conn: Conn,
        is_above: bool,
    ) {
        if is_above {
            self.report_unread_of_sampled(cx, socket, conn);
        }
        self.await_read(cx, socket, conn);
    }

    /// Has clients notify of the next read, and notes what they have done until now.
    fn await_read(&mut self, cx: &Context<'_>, socket: u32, conn: Conn) {
        self.region.socket(socket).wants_recv_space.store(1, Ordering::Relaxed);
        // Pairs with the fence of a client that has read.
        fence(Ordering::SeqCst);
        self.note_clients(cx, socket, conn);
    }

    /// Handles a notification of a client about a socket whose unread bytes were reported, or that is
    /// sampled.
    #[cold]
    pub(super) fn on_reported_notification(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) {
        let times = self.socket(socket).arrival_times.as_ref();
        let Some(mark) = times.and_then(|times| times.stages.as_ref()) else {
            return self.report_unread(cx, socket, conn);
        };
        // A small receive buffer may have been set since.
        let is_reported = mark.is_unread_reported || self.sockets[socket as usize].unread_threshold() == 0;
        let is_read = self.note_clients(cx, socket, conn);
        if is_reported {
            self.report_unread_of_sampled(cx, socket, conn);
        }
        if !is_read {
            // Clients have read a part. Their read ended the request to be notified.
            self.await_read(cx, socket, conn);
        }
    }

    /// Notes what clients have read and written. Returns false if they have yet to read delivered bytes.
    fn note_clients(&mut self, cx: &Context<'_>, socket: u32, conn: Conn) -> bool {
        let read = self.region.socket(socket).positions(Direction::Incoming).read();
        let (written, untaken) = self.written(socket);
        let unsent = cx.notsent(conn).saturating_add(untaken);
        let mut is_read = true;
        self.with_mark(socket, |mark| is_read = mark.sampler.noticed(mark.slot, read, written, unsent));
        is_read
    }

    /// Returns the position up to which clients have written, and how many of these bytes the engine has not
    /// taken.
    fn written(&self, socket: u32) -> (u64, u32) {
        let untaken = self.untaken_bytes(socket);
        (self.sockets[socket as usize].taken.saturating_add(untaken.into()), untaken)
    }

    /// As [`report_unread`](Self::report_unread), which sets and clears the flag of unread bytes.
    fn report_unread_of_sampled(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) {
        let mut before = false;
        self.with_mark(socket, |mark| before = mark.is_unread_reported);
        self.socket(socket).is_unread_reported = before;
        self.report_unread(cx, socket, conn);
        let after = core::mem::replace(&mut self.socket(socket).is_unread_reported, true);
        self.with_mark(socket, |mark| mark.is_unread_reported = after);
    }

    fn with_mark(&mut self, socket: u32, act: impl FnOnce(&mut StageMark)) {
        let times = self.socket(socket).arrival_times.as_mut();
        if let Some(mark) = times.and_then(|times| times.stages.as_mut()) {
            act(mark);
        }
    }
}
