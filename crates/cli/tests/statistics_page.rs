//! `docs/statistics.md` and the help texts of `ginnel metrics` are generated from the sources, so they have
//! every counter with its meaning. The counters that a shard publishes are compared with the page. After a
//! change: `GINNEL_BLESS=1 cargo test -p ginnel-cli --test statistics_page`.

use ginnel::config::{Config, DeviceConfig, DeviceKind, LinkConfig, Placement, RunConfig};
use ginnel::stats::pages;
use ginnel::{Executor, Handler, PublishedStack, Shard};
use ginnel_apps::echo::Echo;
use ginnel_apps::httpd::Httpd;
use ginnel_devices::memory::{MemoryConfig, pair};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// A group of counters: name, description, and the file and struct or macro call in which they are declared.
const GROUPS: &[(&str, &str, &str, &str)] = &[
    ("shard", "The shard's thread and its loop.", "crates/runtime/src/stats.rs", "counters! {\n    ///"),
    ("tcp", "TCP.", "crates/stack/src/tcp/stats.rs", "    TcpStats {\n"),
    (
        "ip",
        "The layers between devices and transport.",
        "crates/stack/src/ip/stats.rs",
        "    NetworkStats {\n",
    ),
    (
        "drop",
        "Received frames that were dropped, by reason.",
        "crates/stack/src/ip/stats.rs",
        "drop_reasons! {\n    ///",
    ),
    ("udp", "UDP.", "crates/stack/src/udp/mod.rs", "    UdpStats {\n"),
    (
        "device",
        "Each device, by its name in the configuration. Counters that all queues of a device share are those of the first shard.",
        "",
        "",
    ),
    ("pool", "Resources with a limit.", "", ""),
    (
        "channel",
        "The channel between a shard and applications with threads of their own (`shard.placement`) or in other processes.",
        "crates/runtime/src/channel/stats.rs",
        "pub struct ChannelStats {\n",
    ),
    ("tasks", "An `Executor`.", "crates/runtime/src/executor/mod.rs", "pub struct ExecutorStats {\n"),
    ("httpd", "`ginnel httpd`.", "crates/apps/src/httpd/server.rs", "pub struct ServerCounters {\n"),
    ("iot", "`ginnel iot`.", "crates/apps/src/iot/counters.rs", "pub struct IotCounters {\n"),
    ("echo", "`ginnel echo`.", "", ""),
    ("demo_server", "`ginnel demo-server`.", "crates/apps/src/demo_server/counters.rs", "\ncounters! {\n"),
];

/// Counters that are not declared in a struct.
const OTHER_COUNTERS: &[(&str, &str)] = &[
    ("shard.bursts_1", "Bursts of one frame."),
    ("shard.bursts_2", "Bursts of 2 and 3 frames."),
    ("shard.bursts_4", "Bursts of 4 to 7 frames."),
    ("shard.bursts_8", "Bursts of 8 to 15 frames."),
    ("shard.bursts_16", "Bursts of 16 to 31 frames."),
    ("shard.bursts_32", "Bursts of 32 to 63 frames."),
    ("shard.bursts_64", "Bursts of 64 frames, the maximum."),
    (
        "device.NAME.rx_frames",
        "Frames received on this shard's queue, before any check. A super-frame counts as one.",
    ),
    ("device.NAME.rx_bytes", "Bytes of those frames, Ethernet headers included."),
    ("device.NAME.tx_frames", "Frames transmitted on this shard's queue. A super-frame counts as one."),
    ("device.NAME.tx_bytes", "Bytes of those frames, Ethernet headers included."),
    (
        "device.NAME.tap_tx_dropped",
        "Frames that the kernel refused: the interface was down, or memory was short.",
    ),
    ("device.NAME.tap_rx_malformed", "Frames that are inconsistent with their virtio-net header."),
    ("device.NAME.tap_rx_errors", "Calls of read(2) that failed."),
    ("device.NAME.memif_connections", "Connections that were established."),
    (
        "device.NAME.memif_refused",
        "Peers that were disconnected during the handshake, because of an invalid message.",
    ),
    ("device.NAME.memif_violations", "Connections closed because the peer wrote an invalid value to a ring."),
    (
        "device.NAME.memif_rx_malformed",
        "Frames that were empty, too long, incomplete, or inconsistent with their header.",
    ),
    (
        "device.NAME.memif_tx_dropped",
        "Frames dropped because no peer was connected, or because the segments of a super-frame did not fit.",
    ),
    ("device.NAME.dpdk_rx_missed", "Frames that the port dropped because its queue was full."),
    ("device.NAME.dpdk_rx_no_buffer", "Received frames for which the driver had no buffer."),
    ("device.NAME.dpdk_rx_errors", "Received frames with errors, as the driver counts them."),
    ("device.NAME.dpdk_rx_dropped", "Received frames that were longer than the MTU permits."),
    (
        "device.NAME.dpdk_rx_partial_checksums",
        "Frames of local senders that left the checksum to the device and that were accepted (`partial_checksums`).",
    ),
    ("device.NAME.dpdk_tx_errors", "Frames that the driver failed to send."),
    (
        "device.NAME.dpdk_tx_dropped",
        "Frames to send that were malformed, and segments for which no buffer was free.",
    ),
    ("device.NAME.dpdk_tx_refused", "Frames to send that the driver refuses, or does not take for a second."),
    ("device.NAME.xdp_rx_invalid", "Descriptors from the kernel that refer to a frame that it does not own."),
    ("device.NAME.xdp_rx_dropped", "Received frames that were incomplete, or longer than the MTU permits."),
    ("device.NAME.xdp_tx_invalid", "Completions from the kernel that refer to no transmitted frame."),
    ("device.NAME.xdp_tx_errors", "Calls of sendto(2) that failed: the interface is down or gone."),
    (
        "device.NAME.xdp_rx_partial_checksums",
        "Frames of local senders that left the checksum to the device and that were accepted (`partial_checksums`).",
    ),
    ("device.NAME.xdp_tx_calls", "Calls of sendto(2)."),
    ("device.NAME.faults_tx_lost", "Transmitted frames that the configured faults dropped."),
    ("device.NAME.faults_tx_duplicated", "Transmitted frames that the faults duplicated."),
    ("device.NAME.faults_tx_reordered", "Transmitted frames that the faults reordered."),
    ("device.NAME.faults_tx_corrupted", "Transmitted frames in which the faults flipped a bit."),
    (
        "device.NAME.faults_tx_queue_full",
        "Transmitted frames dropped because the queue of the simulated link was full.",
    ),
    ("device.NAME.faults_rx_lost", "Received frames that the configured faults dropped."),
    ("device.NAME.faults_rx_duplicated", "Received frames that the faults duplicated."),
    ("device.NAME.faults_rx_reordered", "Received frames that the faults reordered."),
    ("device.NAME.faults_rx_corrupted", "Received frames in which the faults flipped a bit."),
    (
        "device.NAME.faults_rx_queue_full",
        "Received frames dropped because the queue of the simulated link was full.",
    ),
    ("device.NAME.capture_frames", "Frames written to the capture."),
    ("device.NAME.capture_filtered", "Frames that the filter of the capture excluded."),
    ("device.NAME.capture_lost", "Frames that were not captured because of an error."),
    ("pool.NAME.used", "Amount in use."),
    ("pool.NAME.limit", "Limit. docs/limits.md says what happens at the limit."),
    ("pool.NAME.high_water", "Largest amount that was in use at a time."),
    (
        "channel.domains",
        "Trust domains, including those without clients whose last data is still being sent.",
    ),
    ("channel.domains_limit", "`channel.domains_max`."),
    (
        "channel.sockets",
        "Sockets in use: connections, and sockets that clients own after the end of their connections.",
    ),
    ("channel.sockets_limit", "Sum of `channel.sockets_max` of all domains."),
    ("channel.large_buffers", "Large buffers in use."),
    ("channel.large_buffers_limit", "Sum of `channel.large_buffers_max` of all domains."),
    ("channel.clients", "Clients: applications that are attached."),
    ("channel.clients_limit", "Sum of `channel.clients_max` of all domains."),
    ("echo.datagrams_dropped", "Datagrams that could not be echoed."),
    ("iot.open", "Connections open now."),
    ("iot.waiting", "Messages that have not ended: those that wait, and those whose commands are in flight."),
    ("iot.in_flight", "Messages whose commands are in flight."),
];

/// Counters whose published name differs from the name in the source.
const RENAMED: &[(&str, &str)] = &[("tasks.tasks", "tasks.live")];

/// The pools.
const POOLS: &[(&str, &str)] = &[
    ("connections", "Connections, including half-open ones (`tcp.connections_max`)."),
    ("half_open", "Half-open connections (`tcp.half_open_max`)."),
    ("time_wait", "Entries in TIME_WAIT (`tcp.time_wait_max`)."),
    ("listeners", "Listeners (`tcp.listeners_max`)."),
    ("buffer_bytes", "Receive and send buffers (`tcp.buffer_pool_bytes`)."),
    ("reassembly_bytes", "Fragments of incomplete datagrams (`network.fragment_bytes`)."),
    ("udp_sockets", "UDP sockets (`network.udp_sockets_max`)."),
    (
        "udp_receive_bytes",
        "Datagrams that the application has not received yet (`network.udp_receive_total_bytes`).",
    ),
    (
        "timers",
        "Timers of the application (`shard.timers_max`). Timers of connections are part of the connections.",
    ),
];

/// Equal or similar counters of Linux in `nstat` and /proc/net/sockstat.
const LINUX: &[(&str, &str)] = &[
    ("tcp.segments_in", "TcpInSegs, less TcpInErrs and TcpExtTCPBacklogDrop"),
    ("tcp.segments_out", "TcpOutSegs + TcpRetransSegs + TcpOutRsts"),
    ("tcp.retransmitted", "TcpRetransSegs"),
    ("tcp.resets_out", "TcpOutRsts"),
    ("tcp.malformed", "TcpInErrs"),
    ("tcp.active_opens", "TcpActiveOpens"),
    ("tcp.passive_opens", "TcpPassiveOpens"),
    ("tcp.accept_overflows", "TcpExtListenOverflows"),
    ("tcp.half_open_overflows", "TcpExtTCPReqQFullDrop"),
    ("tcp.accepts_deferred", "TcpExtTCPDeferAcceptDrop"),
    ("tcp.fastopen_accepts", "TcpExtTCPFastOpenPassive"),
    ("tcp.fastopen_cookie_requests", "TcpExtTCPFastOpenCookieReqd"),
    ("tcp.fastopen_failures", "TcpExtTCPFastOpenPassiveFail"),
    ("tcp.fastopen_alternate_keys", "TcpExtTCPFastOpenPassiveAltKey"),
    ("tcp.fastopen_overflows", "TcpExtTCPFastOpenListenOverflow"),
    ("tcp.fastopen_active", "TcpExtTCPFastOpenActive"),
    ("tcp.fastopen_active_failures", "TcpExtTCPFastOpenActiveFail"),
    ("tcp.fastopen_black_holes", "TcpExtTCPFastOpenBlackhole"),
    ("tcp.cookies_sent", "TcpExtSyncookiesSent"),
    ("tcp.cookies_accepted", "TcpExtSyncookiesRecv"),
    ("tcp.cookies_failed", "TcpExtSyncookiesFailed"),
    ("tcp.time_wait_overflows", "TcpExtTCPTimeWaitOverflow"),
    ("tcp.time_wait_reused", "TcpExtTWRecycled"),
    ("tcp.paws_rejected", "TcpExtPAWSEstab"),
    ("tcp.paws_active_rejected", "TcpExtPAWSActive"),
    ("tcp.min_ttl_drops", "TcpExtTCPMinTTLDrop"),
    ("tcp.challenge_acks", "TcpExtTCPChallengeACK"),
    ("tcp.timeouts", "TcpExtTCPTimeouts"),
    ("tcp.tail_probes", "TcpExtTCPLossProbes"),
    ("tcp.mtu_probes_acknowledged", "TcpExtTCPMTUPSuccess"),
    ("tcp.mtu_probes_lost", "TcpExtTCPMTUPFail"),
    ("tcp.window_probes", "TcpExtTCPWinProbe"),
    ("tcp.keepalive_probes", "TcpExtTCPKeepAlive"),
    ("tcp.fast_recoveries", "TcpExtTCPSackRecovery + TcpExtTCPRenoRecovery"),
    ("tcp.undos", "TcpExtTCPFullUndo + TcpExtTCPPartialUndo + TcpExtTCPDSACKUndo + TcpExtTCPLossUndo"),
    ("tcp.icmp_ignored", "TcpExtOutOfWindowIcmps"),
    ("tcp.out_of_order", "TcpExtTCPOFOQueue"),
    ("tcp.pool_exhausted", "TcpExtTCPRcvQDrop"),
    ("tcp.closed_timeout", "TcpExtTCPAbortOnTimeout"),
    ("udp.received", "UdpInDatagrams"),
    ("udp.sent", "UdpOutDatagrams"),
    ("udp.no_port", "UdpNoPorts"),
    ("udp.receive_overflow", "UdpRcvbufErrors + UdpMemErrors"),
    ("udp.filter_drops", "UdpInErrors"),
    ("ip.fragments_in", "IpReasmReqds, Ip6ReasmReqds"),
    ("ip.reassembled", "IpReasmOKs, Ip6ReasmOKs"),
    ("ip.reassembly_timeouts", "IpReasmTimeout, Ip6ReasmTimeout"),
    ("ip.reassembly_overlaps", "IpExtReasmOverlaps"),
    ("ip.tx_fragmented", "IpFragOKs, Ip6FragOKs"),
    ("ip.tx_fragments", "IpFragCreates, Ip6FragCreates"),
    ("ip.tx_too_big", "IpFragFails, Ip6FragFails"),
    ("ip.icmp_in", "IcmpInMsgs, Icmp6InMsgs"),
    ("ip.icmp_invalid", "IcmpInErrors, Icmp6InErrors"),
    ("ip.icmp_echo_replies", "IcmpOutEchoReps, Icmp6OutEchoReplies"),
    ("ip.icmp_errors_limited", "IcmpOutRateLimitGlobal + IcmpOutRateLimitHost"),
    ("ip.ndp_solicitations_in", "Icmp6InNeighborSolicits"),
    ("ip.ndp_advertisements_in", "Icmp6InNeighborAdvertisements"),
    ("ip.ndp_solicitations_out", "Icmp6OutNeighborSolicits"),
    ("ip.ndp_advertisements_out", "Icmp6OutNeighborAdvertisements"),
    ("ip.ndp_router_solicitations_out", "Icmp6OutRouterSolicits"),
    ("drop.bad_ip_header", "IpInHdrErrors, Ip6InHdrErrors"),
    ("drop.bad_ip_checksum", "IpExtInCsumErrors"),
    ("drop.martian_source", "IpInAddrErrors"),
    ("drop.not_local", "IpInAddrErrors, Ip6InAddrErrors"),
    ("drop.bad_transport_checksum", "TcpInCsumErrors + UdpInCsumErrors"),
    ("device.NAME.rx_frames", "RX packets of `ip -s link`"),
    ("device.NAME.rx_bytes", "RX bytes"),
    ("device.NAME.tx_frames", "TX packets"),
    ("device.NAME.tx_bytes", "TX bytes"),
];

/// Columns of `ginnel ss` that are no counters.
const SOCKETS: &str = r"
## Sockets

`ginnel ss` lists sockets as Linux's `ss` does. With `--memory` it shows the memory of each socket in bytes, in the format of `ss -m`:
`skmem:(r…,rb…,t…,tb…,f…,w…,o…,bl…,d…) memory:…`. `--json` has the values under the names of the second column.

| Word | `--json` | Of a connection | Of a UDP socket |
|---|---|---|---|
| `r` | `rmem_alloc` | Bytes received and held: readable bytes (Recv-Q), and bytes out of order. | Bytes charged to its queue: the payload, and 64 for each datagram. |
| `rb` | `rcvbuf` | Limit of unread bytes. Of a listener: the initial limit of its connections. | Limit of the charged bytes. |
| `t` | – | 0: transmitted frames belong to the device. | 0 |
| `tb` | `sndbuf` | Limit of the bytes queued for transmission. | 0: nothing is queued. |
| `f` | `fwd_alloc` | Unused memory of the buffers, whose chunks have 2,048 bytes. | Unused memory of the queue. |
| `w` | `wmem_queued` | Bytes that were copied for transmission and are not acknowledged. Files are sent without copying; Send-Q counts them, too. | 0 |
| `o`, `bl` | – | 0: no such memory exists. | 0 |
| `d` | `drops` | Out-of-order ranges discarded for lack of memory since the connection was last idle. Not counted for a listener. | Datagrams dropped because the queue was full. |
| `memory` | `memory_bytes` | All memory of this connection alone: 128 bytes (IPv6 more, for its addresses) and, unless it is idle, the state of an active connection and the chunks and lists of its buffers. An entry in TIME-WAIT is smaller. | Its entry, its queue and its pending error reports. |

The sum of `r`, `w` and `f` of all connections is `pool.buffer_bytes`, without connections that have ended and whose owner has not been told yet.
Not included are tables that all connections share (about 27 bytes per connection), and data in the memory between a shard and its applications
([`channel`](#channel)).
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().into()
}

/// Returns the counters that are declared after `start` in a file, with their documentation.
fn declared_counters(file: &str, start: &str) -> Vec<(String, String)> {
    let source = std::fs::read_to_string(root().join(file)).unwrap();
    let at = source.find(start).unwrap_or_else(|| panic!("{start:?} in {file}"));
    let (mut found, mut text) = (Vec::new(), String::new());
    let body = &source[at + start.find('\n').unwrap() + 1..];
    for line in body.lines().map(str::trim) {
        if let Some(doc) = line.strip_prefix("///") {
            let _ = write!(text, "{}{}", if text.is_empty() { "" } else { " " }, doc.trim());
        } else if line == "}" {
            break;
        } else if line.ends_with(',') {
            // `name,` or `Reason => name,` or `pub name: u64,`.
            let name = line.trim_end_matches(',').trim_start_matches("pub ");
            let name = name.split(": ").next().unwrap().rsplit(' ').next().unwrap();
            found.push((name.to_string(), std::mem::take(&mut text)));
        }
    }
    assert!(!found.is_empty(), "{file}");
    found
}

/// Returns every counter with its meaning, by group.
fn documented_counters() -> Vec<(&'static str, Vec<(String, String)>)> {
    let group = |&(group, _, file, start): &(&'static str, &str, &str, &str)| {
        let mut counters = if file.is_empty() { Vec::new() } else { declared_counters(file, start) };
        for (name, _) in &mut counters {
            *name = format!("{group}.{name}");
            if let Some((_, shown)) = RENAMED.iter().find(|(known, _)| known == name) {
                *name = (*shown).into();
            }
        }
        let others = OTHER_COUNTERS.iter().filter(|(name, _)| name.split('.').next() == Some(group));
        counters.extend(others.map(|(name, text)| ((*name).into(), (*text).into())));
        (group, counters)
    };
    GROUPS.iter().map(group).collect()
}

fn render_document() -> String {
    let mut out = String::from(
        "# Statistics\n\n\
         The counters that `ginnel stat` shows; `ginnel stat --json` has them under the same names. Each shard has counters of its own,\n\
         which are never reset. `busy` is computed: the share of the time in which the shard had work, from `shard.idle_ns` and\n\
         `shard.running_ns`.\n\n\
         `restarts` counts the restarts of all shards without their state, as after a death; an upgrade that keeps\n\
         the connections is none. It has no shard, and the table has it with `--all` or if it is not 0.\n\n\
         A busy shard publishes its counters every `run.publish_ms`, a shard that falls asleep within a millisecond.\n\
         docs/adr/0014-statistics.md says how it does so without synchronization with readers. The file of a shard has the names of its\n\
         counters, so every version of `ginnel stat` shows the counters of every version of a stack.\n\n\
         The last column has the counter of Linux with the same, or nearly the same, meaning in `nstat` and elsewhere.\n\n\
         This page is generated from the sources (`crates/cli/tests/statistics_page.rs`).\n",
    );
    let linux: BTreeMap<&str, &str> = LINUX.iter().copied().collect();
    for ((group, counters), (_, about, ..)) in documented_counters().into_iter().zip(GROUPS) {
        let _ = write!(out, "\n## `{group}`\n\n");
        if !about.is_empty() {
            let _ = write!(out, "{about}\n\n");
        }
        out.push_str("| Name | Meaning | Linux |\n|---|---|---|\n");
        for (name, text) in counters {
            let linux = linux.get(name.as_str()).copied().unwrap_or("–");
            let _ = writeln!(out, "| `{name}` | {} | {linux} |", text.replace('|', "\\|"));
        }
        if group == "pool" {
            out.push_str("\nThe pools:\n\n| Pool | What it holds |\n|---|---|\n");
            for (name, text) in POOLS {
                let _ = writeln!(out, "| `{name}` | {text} |");
            }
        }
    }
    out.push_str(SOCKETS);
    out
}

/// Returns the table that "ginnel metrics" contains: a line with name and meaning for each counter.
fn render_table() -> String {
    let counters = documented_counters().into_iter().flat_map(|(_, counters)| counters);
    counters.map(|(name, text)| format!("{name}\t{}\n", text.replace('`', ""))).collect()
}

/// Compares a generated file with what it should be.
fn check_generated(name: &str, expected: &str) {
    let path = root().join(name);
    if std::env::var_os("GINNEL_BLESS").is_some() {
        std::fs::write(&path, expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    for (i, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "{name}:{} (GINNEL_BLESS=1 writes it anew)", i + 1);
    }
    assert_eq!(found, expected, "{name} (GINNEL_BLESS=1 writes it anew)");
}

#[test]
fn every_counter_is_documented() {
    check_generated("docs/statistics.md", &render_document());
    check_generated("crates/cli/src/metrics/counters.tsv", &render_table());
}

/// Publishes a shard with this application. It need not run: the names are published at its start.
fn show<H: Handler>(
    presence: &std::sync::Arc<PublishedStack>,
    label: &str,
    placement: Placement,
    handler: H,
) {
    let mut config = Config::default();
    config.shard.placement = placement;
    let mut wire = DeviceConfig::new("wire", DeviceKind::Memory);
    wire.faults = Some("delay=1ms".parse().unwrap());
    wire.capture = Some(presence.dir().path().join(format!("capture-{label}")));
    config.devices = vec![wire];
    let memif = format!("socket=@ginnel-names-{}-{label},role=server", std::process::id());
    let memif =
        DeviceConfig { memif: Some(memif.parse().unwrap()), ..DeviceConfig::new("memif", DeviceKind::Memif) };
    config.devices.push(memif);
    config.links = vec![LinkConfig::new("lan", "wire", vec!["10.0.0.1/24".parse().unwrap()])];
    let (device, _other) = pair(MemoryConfig::default());
    let shard = Shard::builder(config).handler(handler).device("wire", device);
    drop(shard.published(Some(presence.clone()), label).build().unwrap());
}

#[test]
fn published_counters_are_documented() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("names-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("site")).unwrap();
    // No other test of this process creates directories.
    let run = RunConfig { name: Some("names".into()), ..RunConfig::default() };
    let presence = PublishedStack::new_in(&folder.join("run"), &run, "test").unwrap().unwrap();
    let site = folder.join("site");
    let options = <ginnel_apps::httpd::HttpdOptions as clap::FromArgMatches>::from_arg_matches(
        &<ginnel_apps::httpd::HttpdOptions as clap::Args>::augment_args(clap::Command::new("httpd"))
            .try_get_matches_from(["httpd".as_ref(), site.as_os_str()])
            .unwrap(),
    )
    .unwrap();
    show(&presence, "0", Placement::Inline, Httpd::new(&options).unwrap());
    let echo = ginnel_apps::echo::EchoOptions { listen: Vec::new(), udp: false, keepalive: false };
    show(&presence, "1", Placement::Split, Echo::new(&echo));
    let iot = <ginnel_apps::iot::IotOptions as clap::FromArgMatches>::from_arg_matches(
        &<ginnel_apps::iot::IotOptions as clap::Args>::augment_args(clap::Command::new("iot"))
            .try_get_matches_from(["iot"])
            .unwrap(),
    )
    .unwrap();
    show(&presence, "3", Placement::Inline, ginnel_apps::iot::Iot::new(&iot, &iot.redis).unwrap());
    let demo = <ginnel_apps::demo_server::DemoServerOptions as clap::FromArgMatches>::from_arg_matches(
        &<ginnel_apps::demo_server::DemoServerOptions as clap::Args>::augment_args(clap::Command::new(
            "demo",
        ))
        .try_get_matches_from(["demo"])
        .unwrap(),
    )
    .unwrap();
    let demo = ginnel_apps::demo_server::DemoServer::new(&demo, 0, std::sync::Arc::default(), None);
    show(&presence, "4", Placement::Inline, demo);
    show(&presence, "2", Placement::Inline, Executor::new(|| async {}));

    let mut shown = BTreeSet::new();
    for page in pages(presence.dir().path()).unwrap() {
        for (_, name) in page.names() {
            let name = match name.split('.').collect::<Vec<_>>()[..] {
                ["device", _, item] => format!("device.NAME.{item}"),
                ["pool", pool, item] => {
                    assert!(POOLS.iter().any(|(known, _)| *known == pool), "{name} is not documented");
                    format!("pool.NAME.{item}")
                }
                _ => name.clone(),
            };
            shown.insert(name);
        }
    }
    let documented: BTreeSet<String> =
        documented_counters().into_iter().flat_map(|(_, counters)| counters).map(|(name, _)| name).collect();
    let missing: Vec<_> = shown.difference(&documented).collect();
    assert!(missing.is_empty(), "shown and not documented: {missing:?}");
    // Opening interfaces of the kernel needs privileges, and ports of DPDK need a build with DPDK.
    let unavailable = |name: &&String| [".tap_", ".xdp_", ".dpdk_"].iter().any(|part| name.contains(part));
    let gone: Vec<_> = documented.difference(&shown).filter(|name| !unavailable(name)).collect();
    assert!(gone.is_empty(), "documented and not shown: {gone:?}");
    let unknown: Vec<_> = LINUX.iter().filter(|(name, _)| !documented.contains(*name)).collect();
    assert!(unknown.is_empty(), "compared with Linux and not documented: {unknown:?}");
    drop(presence);
    std::fs::remove_dir_all(folder).unwrap();
}
