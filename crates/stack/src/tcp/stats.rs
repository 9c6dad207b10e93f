//! Counters.

use crate::events::CloseReason;

macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$fdoc])* pub $field: u64,)* }

        impl $name {
            /// Name and value of each counter.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }
        }
    };
}

counters! {
    /// What TCP counts. None of them is ever reset.
    TcpStats {
        /// Segments received with a valid checksum.
        segments_in,
        /// Segments sent, retransmissions included; a super-frame counts as the segments it is cut into.
        segments_out,
        /// Segments sent again.
        retransmitted,
        /// RST sent.
        resets_out,
        /// Segments with a header that cannot be parsed.
        malformed,
        /// Segments for ports nobody listens on.
        no_listener,
        /// Active opens begun.
        active_opens,
        /// Connections that came to listeners and were established.
        passive_opens,
        /// SYNs dropped because the accept queue was full.
        accept_overflows,
        /// SYNs dropped because no half-open connection could be made.
        half_open_overflows,
        /// SYN cookies sent.
        cookies_sent,
        /// Connections made from a cookie.
        cookies_accepted,
        /// Acknowledgements to listeners that were no valid cookie.
        cookies_failed,
        /// SYNs dropped at `connections_max`.
        connection_overflows,
        /// TIME_WAIT entries that went early at `time_wait_max`.
        time_wait_overflows,
        /// TIME_WAIT entries replaced by a new connection.
        time_wait_reused,
        /// Segments refused by PAWS.
        paws_rejected,
        /// Segments outside of the window.
        out_of_window,
        /// Segments, and ICMP errors about them, dropped because they took more hops than their socket allows (`IP_MINTTL`).
        min_hops_drops,
        /// Challenge acknowledgements sent.
        challenge_acks,
        /// Challenge acknowledgements not sent for the limit.
        challenge_acks_limited,
        /// Retransmission time-outs.
        timeouts,
        /// Tail loss probes.
        tail_probes,
        /// Larger segments sent to find out whether the path takes them (RFC 4821).
        mtu_probes,
        /// Of those, arrived.
        mtu_probes_acknowledged,
        /// Of those, lost for their size.
        mtu_probes_lost,
        /// Times that everything was lost for so long that segments were made smaller.
        mtu_black_holes,
        /// Zero window probes.
        window_probes,
        /// Keepalive probes.
        keepalive_probes,
        /// Fast recoveries.
        fast_recoveries,
        /// Reductions taken back.
        undos,
        /// Segments that had to wait, or were lost, because the device had no room.
        device_full,
        /// ICMP errors about segments that are not in flight.
        icmp_ignored,
        /// Segments that came out of order.
        out_of_order,
        /// Bytes received twice.
        duplicate_bytes,
        /// Payload dropped because the buffer pool was empty.
        pool_exhausted,
        /// Pieces out of order that were dropped because there were too many of them, or to make room for data in order.
        pieces_dropped,
        /// Bytes of payload received in order.
        bytes_in,
        /// Bytes of payload sent, without retransmissions.
        bytes_out,
        /// Bytes of payload that were copied to receive buffers.
        bytes_copied_in,
        /// Connections that ended normally.
        closed_normal,
        /// Connections that the peer reset.
        closed_reset,
        /// Connections that ended by a time-out.
        closed_timeout,
        /// Connections that ended for another reason.
        closed_other,
    }
}

impl TcpStats {
    pub(crate) fn count_close(&mut self, reason: CloseReason) {
        match reason {
            CloseReason::Normal => self.closed_normal += 1,
            CloseReason::Reset | CloseReason::Refused => self.closed_reset += 1,
            CloseReason::TimedOut => self.closed_timeout += 1,
            _ => self.closed_other += 1,
        }
    }
}
