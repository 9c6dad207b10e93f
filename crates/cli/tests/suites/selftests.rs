//! The selftests of Linux that use sockets of IP on loopback (`tools/testing/selftests/net`).

use crate::side::{Side, command_for};
use crate::verdict::{Verdict, Verdicts, tap_verdicts};
use std::path::Path;

/// Time in seconds for a program.
const SECONDS: u32 = 120;
/// Exit status of a program that skips itself (`KSFT_SKIP`).
const SKIP_STATUS: i32 = 4;
/// A receiver and a sender of `msg_zerocopy`, with these options and this protocol.
macro_rules! zerocopy {
    ($options:literal, $protocol:literal) => {
        concat!(
            "./msg_zerocopy -t 2 -C 0 ",
            $options,
            " -r ",
            $protocol,
            " & sleep 0.3; ",
            "./msg_zerocopy -t 1 -C 1 ",
            $options,
            " ",
            $protocol,
            " && wait $!"
        )
    };
}

/// A receiver and a sender of `so_txtime`, with these options.
macro_rules! txtime {
    ($options:literal) => {
        concat!(
            "start=$(date +%s%N --date='+ 0.2 seconds'); ",
            "./so_txtime -c mono -t $start ",
            $options,
            " a,-1 -r & ",
            "./so_txtime -c mono -t $start ",
            $options,
            " a,-1 && wait $!"
        )
    };
}

/// A receiver of `udpgso_bench` until its sender has ended.
macro_rules! bench {
    ($receiver:literal, $sender:literal) => {
        concat!(
            "./udpgso_bench_rx ",
            $receiver,
            " & sleep 0.3; ./udpgso_bench_tx ",
            $sender,
            "; s=$?; kill $!; exit $s"
        )
    };
}

/// A receiver of `udpgso_bench` that counts what a sender has sent.
macro_rules! gro {
    ($receiver:literal, $sender:literal) => {
        concat!(
            "./udpgso_bench_rx -C 1000 -R 300 ",
            $receiver,
            " & sleep 0.3; ./udpgso_bench_tx ",
            $sender,
            " && wait $!"
        )
    };
}

/// Cases, and what the shell executes for them. A case of a receiver and a sender starts the receiver in the
/// background.
const SELFTESTS: &[(&str, &str)] = &[
    ("bind_bhash, IPv4", "ulimit -n 32768; ./bind_bhash 443 ipv4 127.0.0.2 | grep spent"),
    ("bind_timewait", "./bind_timewait"),
    ("bind_wildcard", "./bind_wildcard"),
    ("epoll_busy_poll", "./epoll_busy_poll"),
    ("epoll_wakeup_test", "./epoll_wakeup_test"),
    ("ip_local_port_range", "./ip_local_port_range"),
    ("ipv6_flowlabel", "./ipv6_flowlabel -l 1"),
    ("ipv6_flowlabel -s", "./ipv6_flowlabel -l 1 -s"),
    ("ipv6_flowlabel_mgr", "./ipv6_flowlabel_mgr"),
    ("msg_zerocopy -4 tcp", zerocopy!("-4 -S 127.0.0.1 -D 127.0.0.1", "tcp")),
    ("msg_zerocopy -6 tcp", zerocopy!("-6 -S ::1 -D ::1", "tcp")),
    ("msg_zerocopy -4 udp", zerocopy!("-4 -S 127.0.0.1 -D 127.0.0.1", "udp")),
    ("msg_zerocopy -6 udp", zerocopy!("-6 -S ::1 -D ::1", "udp")),
    ("msg_zerocopy -4 -z tcp", zerocopy!("-4 -z -S 127.0.0.1 -D 127.0.0.1", "tcp")),
    ("msg_zerocopy -6 -z tcp", zerocopy!("-6 -z -S ::1 -D ::1", "tcp")),
    ("msg_zerocopy -4 -z udp", zerocopy!("-4 -z -S 127.0.0.1 -D 127.0.0.1", "udp")),
    ("msg_zerocopy -6 -z udp", zerocopy!("-6 -z -S ::1 -D ::1", "udp")),
    ("reuseaddr_conflict", "./reuseaddr_conflict"),
    ("reuseaddr_ports_exhausted", "./reuseaddr_ports_exhausted"),
    ("reuseport_addr_any", "./reuseport_addr_any"),
    ("reuseport_bpf", "./reuseport_bpf"),
    ("reuseport_bpf_cpu", "./reuseport_bpf_cpu"),
    ("reuseport_dualstack", "./reuseport_dualstack"),
    ("rxtimestamp", "./rxtimestamp"),
    ("sk_bind_sendto_listen", "./sk_bind_sendto_listen"),
    ("sk_connect_zero_addr", "./sk_connect_zero_addr"),
    ("sk_so_peek_off", "./sk_so_peek_off"),
    ("so_incoming_cpu", "./so_incoming_cpu"),
    ("so_netns_cookie", "./so_netns_cookie"),
    ("so_txtime -4", txtime!("-4 -S 127.0.0.1 -D 127.0.0.1")),
    ("so_txtime -6", txtime!("-6 -S ::1 -D ::1")),
    ("socket", "./socket"),
    ("stress_reuseport_listen", "ulimit -n 24100; ./stress_reuseport_listen 300 80"),
    ("tcp_fastopen_backup_key -4s", "./tcp_fastopen_backup_key -4s"),
    ("tcp_fastopen_backup_key -6s", "./tcp_fastopen_backup_key -6s"),
    ("tcp_fastopen_backup_key -4sr", "./tcp_fastopen_backup_key -4sr"),
    ("tcp_fastopen_backup_key -6sr", "./tcp_fastopen_backup_key -6sr"),
    ("tcp_inq -4", "./tcp_inq -4"),
    ("tcp_inq -6", "./tcp_inq -6"),
    ("tls", "./tls"),
    ("udpgso_bench tcp -4", bench!("-t", "-l 1 -4 -D 127.0.0.1 -t")),
    ("udpgso_bench tcp -6", bench!("-t", "-l 1 -6 -D ::1 -t")),
    ("udpgso_bench tcp -z", bench!("-t", "-l 1 -4 -D 127.0.0.1 -t -z")),
    ("udpgso_bench udp -4", bench!("", "-l 1 -4 -D 127.0.0.1")),
    ("udpgso_bench udp -6", bench!("", "-l 1 -6 -D ::1")),
    ("udpgso_bench gso", bench!("", "-l 1 -4 -D 127.0.0.1 -S 0")),
    ("udpgso_bench gso -z", bench!("", "-l 1 -4 -D 127.0.0.1 -S 0 -z -a")),
    ("udpgso_bench gso -T", bench!("", "-l 1 -4 -D 127.0.0.1 -S 0 -T -a")),
    ("udpgro, off -4", gro!("-4 -n 10 -l 1400", "-l 4 -4 -D 127.0.0.1 -M 10 -s 1400")),
    ("udpgro, off, cmsg -4", gro!("-4 -G -r -n 10 -l 1400 -S -1", "-l 4 -4 -D 127.0.0.1 -M 10 -s 1400")),
    ("udpgro -4", gro!("-4 -G -r -n 1 -l 14720", "-l 4 -4 -D 127.0.0.1 -M 1 -s 14720 -S 0")),
    ("udpgro, cmsg -4", gro!("-4 -G -r -n 1 -l 14720 -S 1472", "-l 4 -4 -D 127.0.0.1 -M 1 -s 14720 -S 1472")),
    ("udpgro, size -4", gro!("-4 -G -r -n 1 -l 14720 -S 500", "-l 4 -4 -D 127.0.0.1 -M 1 -s 14720 -S 500")),
    ("udpgro, cmsg -6", gro!("-G -r -n 1 -l 14520 -S 1452", "-l 4 -6 -D ::1 -M 1 -s 14520 -S 1452")),
    ("udpgro, size -6", gro!("-G -r -n 1 -l 14520 -S 500", "-l 4 -6 -D ::1 -M 1 -s 14520 -S 500")),
];

/// Runs the programs, each in a network namespace of its own with the sysctls that Linux's scripts set.
pub(crate) fn run_selftests(side: Side, folder: &Path) -> Verdicts {
    const NAMESPACE: &str = "ip link set lo up; \
        sysctl -q -w net.ipv4.ip_local_port_range='40000 49999' net.ipv4.tcp_fastopen=3 net.ipv6.ip_nonlocal_bind=1; \
        exec \"$@\"";
    const WRAPPER: &[&str] = &["unshare", "--net", "sh", "-c", NAMESPACE, "sh"];
    // What stands for the sysctls in the configuration of a stack.
    const CONFIG: &str = "[tcp]\nlocal_port_first = 40000\nlocal_port_last = 49999\nfastopen = 3\n\
        [network]\nudp_port_first = 40000\nudp_port_last = 49999\n";
    let config = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    std::fs::write(config.path(), CONFIG).unwrap();
    let options = ["--config", config.path().to_str().unwrap()];
    let mut verdicts = Verdicts::new();
    for (case, script) in SELFTESTS {
        let output =
            command_for(side, folder, SECONDS, (WRAPPER, &options), &["sh", "-c", script]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let cases = tap_verdicts(&text);
        let verdict = match output.status.code() {
            Some(0) => Verdict::Passed,
            Some(SKIP_STATUS) => Verdict::Skipped,
            _ => Verdict::Failed,
        };
        if verdict == Verdict::Failed {
            println!(
                "{side:?}: {case}: {}\n{text}{}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        verdicts.extend(cases.into_iter().map(|(name, verdict)| (format!("{case}: {name}"), verdict)));
        verdicts.insert((*case).to_owned(), verdict);
    }
    verdicts
}
