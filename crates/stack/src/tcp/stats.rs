//! Counters of TCP.

use crate::events::CloseReason;
use serde::{Deserialize, Serialize};

macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct $name { $($(#[$fdoc])* pub $field: u64,)* }

        impl $name {
            /// Returns the name and value of each counter.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Counters of TCP. They are never reset.
    TcpStats {
        /// Segments received with a valid checksum.
        segments_in,
        /// Segments sent, retransmissions included; a super-frame counts as the segments it is cut into.
        segments_out,
        /// Segments retransmitted.
        retransmitted,
        /// RST sent.
        resets_out,
        /// Segments with a header that cannot be parsed.
        malformed,
        /// Segments for ports without a listener.
        no_listener,
        /// SYNs that waited for a listener because the process that had listened at their address has ended.
        syns_held,
        /// Segments without a connection for which a listener was found: SYNs, and acknowledgements of SYN
        /// cookies.
        listener_lookups,
        /// Times that the route or the neighbour in a connection was not valid any more and was looked up
        /// again.
        reroutes,
        /// Active opens begun.
        active_opens,
        /// Connections that listeners have received and that were established.
        passive_opens,
        /// SYNs and final ACKs of handshakes dropped because the accept queue was full.
        accept_overflows,
        /// SYNs dropped because the limit of half-open connections or a listener's backlog was reached.
        half_open_overflows,
        /// Acknowledgements without data that did not create a connection yet (`TCP_DEFER_ACCEPT`).
        accepts_deferred,
        /// Connections that were created by SYNs with data or a cookie (TCP Fast Open, RFC 7413).
        fastopen_accepts,
        /// SYNs that requested a fast open cookie.
        fastopen_cookie_requests,
        /// SYNs with an invalid fast open cookie.
        fastopen_failures,
        /// SYNs with a fast open cookie of a listener's second key.
        fastopen_alternate_keys,
        /// SYNs that were not opened fast because of a listener's `TCP_FASTOPEN`.
        fastopen_overflows,
        /// Connections opened from here whose SYN had data that the peer has acknowledged (TCP Fast Open).
        fastopen_active,
        /// Connections opened from here whose SYN had data that the peer has not acknowledged, and those
        /// after whose fast open everything was lost.
        fastopen_active_failures,
        /// Times that fast open of clients was paused because everything was lost after it.
        fastopen_black_holes,
        /// Fast open cookies of peers dropped at `fastopen_cookies_max`.
        fastopen_cookies_evicted,
        /// SYN cookies sent.
        cookies_sent,
        /// Connections created from a SYN cookie.
        cookies_accepted,
        /// Acknowledgements to listeners without a valid SYN cookie.
        cookies_failed,
        /// SYNs dropped at `connections_max`.
        connection_overflows,
        /// Connections that could not be opened from here at `connections_max`.
        connects_refused,
        /// Connections that could not be opened from here because this shard had no free local port towards
        /// their peer.
        ports_exhausted,
        /// Listeners that were refused at `listeners_max`.
        listeners_refused,
        /// TIME-WAIT entries removed early at `time_wait_max`.
        time_wait_overflows,
        /// TIME-WAIT entries replaced by a new connection.
        time_wait_reused,
        /// Segments rejected by PAWS.
        paws_rejected,
        /// SYN+ACKs that echoed no timestamp of the SYN, and were answered with RST.
        paws_active_rejected,
        /// Segments outside of the window.
        out_of_window,
        /// Segments, and ICMP errors about them, dropped because their hop limit is below the minimum of the
        /// socket (`IP_MINTTL`).
        min_ttl_drops,
        /// Segments that the filter of their socket dropped (`SO_ATTACH_FILTER`).
        filter_drops,
        /// Challenge acknowledgements sent.
        challenge_acks,
        /// Challenge acknowledgements suppressed by the rate limit.
        challenge_acks_limited,
        /// Retransmission time-outs.
        timeouts,
        /// Tail loss probes sent.
        tail_probes,
        /// Larger segments sent to probe the path MTU (RFC 4821).
        mtu_probes,
        /// Path MTU probes that arrived.
        mtu_probes_acknowledged,
        /// Path MTU probes lost because of their size.
        mtu_probes_lost,
        /// Reductions of the segment size because everything was lost for long.
        mtu_black_holes,
        /// Zero window probes sent.
        window_probes,
        /// Keepalive probes sent.
        keepalive_probes,
        /// Fast recoveries entered.
        fast_recoveries,
        /// Reductions of the congestion window that were undone.
        undos,
        /// Times that a paced connection had something to send and waited for its next departure.
        pacing_waits,
        /// Segments that were delayed or lost because the device had no room, or held as many frames as their
        /// priority may find in it.
        device_full,
        /// ICMP errors about segments that are not in flight.
        icmp_ignored,
        /// Segments received out of order.
        out_of_order,
        /// Bytes received twice.
        duplicate_bytes,
        /// Segments received whose payload was dropped in whole or in part, because the buffer pool had no
        /// memory.
        pool_exhausted,
        /// Ranges received out of order that were dropped because there were too many, or to make room for
        /// data in order.
        ofo_ranges_dropped,
        /// Segments, or parts of them, that the application could take before the gap in front of them
        /// filled.
        unordered,
        /// Segments of high priority delivered in order only because too many ranges were delivered early.
        unordered_limited,
        /// Bytes of payload received in order.
        bytes_in,
        /// Bytes of payload sent, without retransmissions.
        bytes_out,
        /// Bytes of payload copied to receive buffers.
        bytes_copied_in,
        /// Connections that ended normally.
        closed_normal,
        /// Connections that the peer reset or refused.
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
