//! Sockets whose latency stages are sampled (`ginnel ss --stages`): the shard notes when their bytes are in
//! the region, and when clients have read and written. Clients notify the shard of each read meanwhile.

use super::domain::Domain;
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

impl Domain {
    /// Begins or ends the sampling of a socket.
    pub(super) fn set_stages(&mut self, socket: u32, stages: Option<(Arc<StageSampler>, u32)>) {
        let entry = self.socket(socket);
        if let Some(times) = &mut entry.arrival_times
            && let Some(mark) = times.stages.take()
        {
            entry.is_unread_reported = mark.is_unread_reported;
        }
        if let Some((sampler, slot)) = stages {
            let is_unread_reported = core::mem::replace(&mut entry.is_unread_reported, true);
            entry.report_arrivals().stages = Some(StageMark { sampler, slot, is_unread_reported });
        }
        entry.end_unneeded_reports();
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
        let received = self.socket(socket).received;
        self.with_mark(socket, |mark| mark.sampler.delivered(mark.slot, received));
        if is_above {
            self.report_unread_of_sampled(cx, socket, conn);
        }
        // Clients notify of the next read.
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
        self.note_clients(cx, socket, conn);
        if is_reported {
            self.report_unread_of_sampled(cx, socket, conn);
        }
    }

    /// Notes what clients have read and written.
    fn note_clients(&mut self, cx: &Context<'_>, socket: u32, conn: Conn) {
        let read = self.region.socket(socket).positions(Direction::Incoming).read();
        let (has_written, ahead) = (self.untaken_bytes(socket) > 0, cx.notsent(conn));
        self.with_mark(socket, |mark| mark.sampler.noticed(mark.slot, read, has_written, ahead));
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
