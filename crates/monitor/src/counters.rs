//! The counters of the monitor.

use serde::Serialize;

/// Defines the counters, and the difference of two samples.
macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters. They never decrease.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct MonitorCounters {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl MonitorCounters {
            /// Returns what was counted since `earlier`.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name - earlier.$name,)+ }
            }

            /// Calls `visit` with the name, the meaning and the value of each counter.
            pub fn visit(&self, visit: &mut dyn FnMut(&'static str, &'static str, u64)) {
                $(visit(stringify!($name), concat!($($doc),+).trim_ascii(), self.$name);)+
            }
        }
    };
}

counters! {
    /// Packets examined.
    packets,
    /// Captured bytes of the packets examined.
    bytes,
    /// Packets that are not TCP, or fragments.
    other_packets,
    /// TCP segments between ports without a rule.
    unmonitored_packets,
    /// Packets whose headers contradict themselves, or that were cut off within them.
    malformed_packets,
    /// Segments of unknown connections that begin nothing: late acknowledgements and resets.
    stray_packets,
    /// Segments of connections that are not tracked because there are too many.
    untracked_packets,
    /// Connections that were seen and tracked.
    connections_seen,
    /// Connections whose beginning was not seen; `connections_seen` includes them.
    connections_midstream,
    /// Connections that ended: by FIN of both sides or RST, or because their ports were used again.
    connections_ended,
    /// Connections that were forgotten because no packet was seen for too long.
    connections_idle,
    /// Connections that are not examined any more because their bytes are not those of the protocol.
    connections_given_up,
    /// Requests, those of high priority included.
    requests,
    /// Requests of high priority.
    requests_high,
    /// Messages that need no response, such as heartbeats.
    one_way,
    /// Responses that were matched to their requests.
    responses,
    /// Matched responses to requests of high priority.
    responses_high,
    /// Responses whose requests were not seen.
    responses_unmatched,
    /// Responses of `responses` that arrived while requests of both priorities were outstanding on their
    /// connection, whose server may answer them in another order.
    responses_ambiguous,
    /// Requests that got no response before their connection ended.
    unanswered,
    /// Requests whose responses could not be found because bytes were missing or were nonsense.
    abandoned,
    /// Segments with bytes of requests that were seen before.
    request_retransmissions,
    /// Segments with bytes of responses that were seen before.
    response_retransmissions,
    /// Segments that arrived before earlier ones.
    early_segments,
    /// Bytes that were not captured: the receiver has acknowledged them, or too many later ones waited for
    /// them.
    missed_bytes,
    /// How often the beginning of the next message became unknown.
    framing_lost,
    /// How often the beginning of the next message became unknown because the partial heads of all
    /// connections took too many bytes.
    heads_dropped,
    /// Segments that were skipped because no message begins with them, after the framing was lost.
    segments_skipped,
}

#[cfg(test)]
mod tests {
    use super::MonitorCounters;

    #[test]
    fn the_page_has_each_counter() {
        let page = include_str!("../../../docs/monitor.md");
        let mut rows = 0;
        MonitorCounters::default().visit(&mut |name, help, _| {
            rows += 1;
            let row = format!("\n| `{name}` | {help} |\n");
            assert!(page.contains(&row), "docs/monitor.md has no line {row}");
        });
        let table = page.split("| Counter | Meaning |\n|---|---|\n").nth(1).unwrap();
        assert_eq!(table.lines().take_while(|line| line.starts_with('|')).count(), rows);
    }
}
