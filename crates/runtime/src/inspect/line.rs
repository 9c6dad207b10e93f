//! A socket as a line of tab-separated fields. The first line of a listing has their names, so a reader of
//! any version finds the fields that it knows.

use core::fmt::{self, Write};
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::options::{BbrInfo, CaState, TcpInfo};
use ginnel_stack::stack::{ListedSocket, SocketHandle, SocketMemory, SocketProtocol, TimerKind};
use ginnel_stack::tcp::state::State;

/// The names of the fields, in order. Those of connections are the names of Linux's `struct tcp_info`, those
/// of memory are from its `SK_MEMINFO_*`.
pub(super) const FIELDS: &str = "shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer\ttimer\ttimer_ms\ttimer_count\tca_state\tretransmits\tprobes\tbackoff\trto_us\tato_us\tsnd_mss\trcv_mss\tadvmss\tpmtu\tunacked\tsacked\tlost\tretrans\ttotal_retrans\trtt_us\trttvar_us\tmin_rtt_us\tsnd_ssthresh\tsnd_cwnd\treordering\tsnd_wnd\trcv_wnd\tsnd_wscale\trcv_wscale\ttimestamps\tsack\tecn\tnotsent_bytes\tcongestion\tpacing_rate\tmax_pacing_rate\tdelivery_rate\tapp_limited\tbbr_bw\tbbr_mrtt_us\tbbr_pacing_gain\tbbr_cwnd_gain\trmem_alloc\trcvbuf\twmem_queued\tsndbuf\tfwd_alloc\tdrops\tmemory_bytes\tsk";

/// Number of the last fields, which every socket has: those about memory, and the handle.
const MEMORY_FIELDS: usize = 8;
/// Number of the first fields, which every socket has.
const COMMON_FIELDS: usize = 10;

/// Writes a socket of the shard `label`.
pub(super) fn write(out: &mut String, label: &str, socket: &ListedSocket) -> fmt::Result {
    let ListedSocket { protocol, state, local, remote, recv_queue, send_queue, timer, info, memory, handle } =
        socket;
    let (netid, state) = match protocol {
        SocketProtocol::Tcp => ("tcp", state_name(*state)),
        SocketProtocol::Udp if *state == State::Established => ("udp", "ESTAB"),
        SocketProtocol::Udp => ("udp", "UNCONN"),
    };
    write!(out, "{label}\t{netid}\t{state}\t{recv_queue}\t{send_queue}\t{local}\t{remote}")?;
    match timer {
        Some(timer) => {
            let kind = match timer.kind {
                TimerKind::On => "on",
                TimerKind::Keepalive => "keepalive",
                TimerKind::TimeWait => "timewait",
                TimerKind::Persist => "persist",
            };
            write!(out, "\t{kind}\t{}\t{}", timer.left.as_millis(), timer.count)?;
        }
        None => out.write_str("\t-\t-\t-")?,
    }
    let Some(info) = info else {
        let missing_fields = FIELDS.split('\t').count() - COMMON_FIELDS - MEMORY_FIELDS;
        out.extend(core::iter::repeat_n("\t-", missing_fields));
        return write_memory(out, memory, *handle);
    };
    let ca_state = match info.ca_state {
        CaState::Open => "open",
        CaState::Disorder => "disorder",
        CaState::Cwr => "cwr",
        CaState::Recovery => "recovery",
        CaState::Loss => "loss",
    };
    write!(
        out,
        "\t{ca_state}\t{}\t{}\t{}\t{}\t{}",
        info.retransmits,
        info.probes,
        info.backoff,
        info.rto.as_micros(),
        info.ato.as_micros()
    )?;
    for number in [
        info.snd_mss,
        info.rcv_mss,
        info.advmss,
        info.pmtu,
        info.unacked,
        info.sacked,
        info.lost,
        info.retrans,
        info.total_retrans,
        micros(info.rtt),
        micros(info.rttvar),
        micros(info.min_rtt),
        info.snd_ssthresh,
        info.snd_cwnd,
        info.reordering,
        info.snd_wnd,
        info.rcv_wnd,
        info.snd_wscale.into(),
        info.rcv_wscale.into(),
        info.timestamps.into(),
        info.sack.into(),
        info.ecn.into(),
        info.notsent_bytes,
    ] {
        write!(out, "\t{number}")?;
    }
    write_rates(out, info)?;
    write_memory(out, memory, *handle)
}

/// Writes the congestion control and the rates in bytes per second; gains are in 1/256.
fn write_rates(out: &mut String, info: &TcpInfo) -> fmt::Result {
    write!(out, "\t{}", info.congestion.linux_name())?;
    for rate in [info.pacing_rate, info.max_pacing_rate] {
        match rate {
            u64::MAX => out.write_str("\t-")?,
            rate => write!(out, "\t{rate}")?,
        }
    }
    write!(out, "\t{}\t{}", info.delivery_rate, u8::from(info.delivery_rate_app_limited))?;
    match info.bbr {
        Some(BbrInfo { bandwidth, min_rtt_us, pacing_gain, cwnd_gain }) => {
            write!(out, "\t{bandwidth}\t{min_rtt_us}\t{pacing_gain}\t{cwnd_gain}")
        }
        None => out.write_str("\t-\t-\t-\t-"),
    }
}

/// Writes the fields about memory, the handle and the end of the line.
fn write_memory(out: &mut String, memory: &SocketMemory, handle: Option<SocketHandle>) -> fmt::Result {
    let SocketMemory { rmem_alloc, rcvbuf, wmem_queued, sndbuf, fwd_alloc, drops, total } = memory;
    write!(out, "\t{rmem_alloc}\t{rcvbuf}\t{wmem_queued}\t{sndbuf}\t{fwd_alloc}")?;
    match drops {
        Some(drops) => write!(out, "\t{drops}\t{total}")?,
        None => write!(out, "\t-\t{total}")?,
    }
    match handle {
        Some(SocketHandle::Conn(conn)) => writeln!(out, "\tc{}.{}", conn.index(), conn.generation()),
        Some(SocketHandle::Listener(of)) => writeln!(out, "\tl{}.{}", of.index(), of.generation()),
        Some(SocketHandle::Udp(of)) => writeln!(out, "\tu{}.{}", of.index(), of.generation()),
        Some(SocketHandle::TimeWait(index)) => writeln!(out, "\tt{index}.0"),
        None => out.write_str("\t-\n"),
    }
}

/// Parses the field `sk`.
pub(super) fn parse_handle(text: &str) -> Option<SocketHandle> {
    let (kind, numbers) = text.split_at_checked(1)?;
    let (index, generation) = numbers.split_once('.')?;
    let (index, generation) = (index.parse().ok()?, generation.parse().ok()?);
    match kind {
        "c" => Some(SocketHandle::Conn(Conn::new(index, generation))),
        "l" => Some(SocketHandle::Listener(Listener::new(index, generation))),
        "u" => Some(SocketHandle::Udp(UdpHandle::new(index, generation))),
        "t" => Some(SocketHandle::TimeWait(index)),
        _ => None,
    }
}

fn micros(duration: core::time::Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// Returns the name of a state as `ss` writes it.
fn state_name(state: State) -> &'static str {
    match state {
        State::Closed => "CLOSED",
        State::Listen => "LISTEN",
        State::SynSent => "SYN-SENT",
        State::SynReceived => "SYN-RECV",
        State::Established => "ESTAB",
        State::FinWait1 => "FIN-WAIT-1",
        State::FinWait2 => "FIN-WAIT-2",
        State::CloseWait => "CLOSE-WAIT",
        State::Closing => "CLOSING",
        State::LastAck => "LAST-ACK",
        State::TimeWait => "TIME-WAIT",
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{FIELDS, parse_handle, write};
    use core::time::Duration;
    use ginnel_stack::handle::{Conn, Listener, UdpHandle};
    use ginnel_stack::stack::{
        ListedSocket, ListedTimer, SocketHandle, SocketMemory, SocketProtocol, TimerKind,
    };
    use ginnel_stack::tcp::state::State;

    #[test]
    fn each_line_has_a_field_for_each_name() {
        let mut socket = ListedSocket {
            protocol: SocketProtocol::Tcp,
            state: State::Listen,
            local: "[fd00::1]:80".parse().unwrap(),
            remote: "[::]:0".parse().unwrap(),
            recv_queue: 1,
            send_queue: 128,
            timer: None,
            info: None,
            memory: SocketMemory { rmem_alloc: 1, rcvbuf: 2, total: 7, ..SocketMemory::default() },
            handle: Some(SocketHandle::Listener(Listener::new(3, 4))),
        };
        let mut text = String::new();
        write(&mut text, "0", &socket).unwrap();
        assert!(text.starts_with("0\ttcp\tLISTEN\t1\t128\t[fd00::1]:80\t[::]:0\t-\t-\t-\t-"), "{text}");
        socket.timer =
            Some(ListedTimer { kind: TimerKind::Keepalive, left: Duration::from_millis(7), count: 2 });
        write(&mut text, "0", &socket).unwrap();
        assert!(text.contains("\tkeepalive\t7\t2\t"), "{text}");
        socket.memory.drops = Some(6);
        write(&mut text, "0", &socket).unwrap();
        let conn = SocketHandle::Conn(Conn::new(9, 8));
        let udp = SocketHandle::Udp(UdpHandle::new(6, 5));
        for handle in [Some(conn), Some(SocketHandle::TimeWait(7)), Some(udp), None] {
            socket.handle = handle;
            let mut line = String::new();
            write(&mut line, "0", &socket).unwrap();
            assert_eq!(parse_handle(line.trim_end().rsplit('\t').next().unwrap()), handle, "{line}");
        }
        for malformed in ["", "c", "c1", "c1.", "x1.2", "é1.2", "c-1.2", "t4294967296.0"] {
            assert_eq!(parse_handle(malformed), None, "{malformed}");
        }
        let ends = [
            "\t-\t1\t2\t0\t0\t0\t-\t7\tl3.4",
            "\t-\t1\t2\t0\t0\t0\t-\t7\tl3.4",
            "\t-\t1\t2\t0\t0\t0\t6\t7\tl3.4",
        ];
        for (line, end) in text.lines().zip(ends) {
            assert!(line.ends_with(end), "{line}");
            assert_eq!(line.split('\t').count(), FIELDS.split('\t').count(), "{line}");
        }
    }
}
