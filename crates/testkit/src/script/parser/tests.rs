use super::*;
use crate::script::ast::{
    Ecn, Flags, IcmpKind, MssValue, Packet, PacketBody, Segment, Target, TcpOpt, TsValue,
};
use crate::script::calls::{Op, OptionValue};
use crate::script::names::Errno;

fn script(text: &str) -> Script {
    parse(Path::new("test.pkt"), text).unwrap_or_else(|e| panic!("{e}"))
}

fn error(text: &str) -> String {
    parse(Path::new("test.pkt"), text).unwrap_err().to_string()
}

fn only_event(text: &str) -> Event {
    let target = Target { backend: BackendKind::Kernel, ip: IpVersion::V4 };
    let mut events = script(text).events(target);
    assert_eq!(events.len(), 1);
    events.pop().unwrap()
}

fn segment(text: &str) -> Segment {
    match only_event(text).kind {
        EventKind::Inbound(Packet { body: PacketBody::Tcp(segment), .. })
        | EventKind::Outbound(Packet { body: PacketBody::Tcp(segment), .. }) => segment,
        other => panic!("{other:?}"),
    }
}

#[test]
fn directives_at_the_head_are_read() {
    let s = script(
        "// Three-way handshake (RFC 9293 §3.5).\n// ip: v6\n// sysctl: net.ipv4.tcp_sack=0\n// tolerance: 10ms\n\
         // differs: kernel sends more (RFC 9293 §3.8)\n// mtu: 9000\n+0 socket(..., SOCK_STREAM, 0) = 3\n",
    );
    assert_eq!(s.summary, "Three-way handshake (RFC 9293 §3.5).");
    assert_eq!(s.directives.ip, [IpVersion::V6]);
    assert_eq!(s.directives.sysctls, [("net.ipv4.tcp_sack".to_string(), "0".to_string())]);
    assert_eq!(s.directives.tolerance, Duration::from_millis(10));
    assert_eq!(s.directives.differs[0].backend, BackendKind::Kernel);
    assert_eq!(s.directives.mtu, 9000);
}

#[test]
fn difference_must_name_an_rfc() {
    assert!(error("// differs: kernel because\n").contains("RFC"));
}

#[test]
fn times_are_read_in_every_form() {
    let ms = Duration::from_millis;
    let time = |text: &str| only_event(&format!("{text} > . 1:1(0) ack 1")).time;
    assert_eq!(time("+.1"), Time::Relative { from: ms(100), to: None });
    assert_eq!(time("0.25"), Time::Absolute { from: ms(250), to: None });
    assert_eq!(time("+0.1~+0.2"), Time::Relative { from: ms(100), to: Some(ms(200)) });
    assert_eq!(time("1~2"), Time::Absolute { from: ms(1000), to: Some(ms(2000)) });
    assert_eq!(time("*"), Time::Any);
    let event = only_event("0...0.3 connect(3, ..., ...) = 0");
    assert_eq!((event.time, event.until), (Time::Absolute { from: ms(0), to: None }, Some(ms(300))));
}

#[test]
fn segments_are_read() {
    let s = segment("+0 < S 0:0(0) win 1000 <mss 1000,sackOK,TS val 100 ecr 0,nop,wscale 7>");
    assert_eq!(s.flags, Flags::SYN);
    assert_eq!((s.seq, s.len, s.ack, s.window), (0, 0, None, Some(1000)));
    let ts = TcpOpt::Ts { val: TsValue::Number(100), ecr: TsValue::Number(0) };
    let mss = TcpOpt::Mss(Some(MssValue::Number(1000)));
    assert_eq!(s.options, Some(vec![mss, TcpOpt::SackOk, ts, TcpOpt::Nop, TcpOpt::Wscale(Some(7))]));

    let s = segment("+0 > [ect0] P. 1:1001(1000) ack 1 win * <...>");
    assert_eq!((s.ecn, s.flags), (Some(Ecn::Ect0), Flags::PSH.with(Flags::ACK)));
    assert_eq!((s.seq, s.len, s.ack, s.window, s.options), (1, 1000, Some(1), None, None));

    let s = segment("+0 < . 1:1(0) ack 1 win 5 <nop,nop,sack 1001:2001 3001:4001>");
    assert_eq!(s.options.unwrap()[2], TcpOpt::Sack(vec![(1001, 2001), (3001, 4001)]));

    let s = segment("+0 < [badcsum] - 7:7(0) win 5 <hex 0204>");
    assert_eq!((s.bad_checksum, s.flags), (true, Flags::default()));
    assert_eq!(s.options.unwrap(), [TcpOpt::Raw(vec![2, 4])]);
}

#[test]
fn flows_and_icmp_errors_are_read() {
    let event = only_event("+0 <2 icmp unreachable frag_needed mtu 1200 [1:1001(1000)]");
    let EventKind::Inbound(Packet { flow: 2, body: PacketBody::Icmp(icmp) }) = event.kind else { panic!() };
    assert_eq!((icmp.kind, icmp.mtu, icmp.seq, icmp.len), (IcmpKind::FragNeeded, 1200, 1, 1000));
    assert_eq!((icmp.ttl, icmp.quoted_ttl), (64, 64));
    let event = only_event("+0 < icmp [ttl 9] unreachable port_unreachable [[ttl 3] S 0:0(0)]");
    let EventKind::Inbound(Packet { body: PacketBody::Icmp(icmp), .. }) = event.kind else { panic!() };
    assert_eq!((icmp.kind, icmp.ttl, icmp.quoted_ttl), (IcmpKind::PortUnreachable, 9, 3));
    assert_eq!(icmp.to_string(), "icmp [ttl 9] unreachable port_unreachable [[ttl 3] S 0:0(0)]");
}

#[test]
fn calls_are_read() {
    let call = |text: &str| match only_event(text).kind {
        EventKind::Call(call) => call,
        other => panic!("{other:?}"),
    };
    let c = call("+0 connect(3, ..., ...) = -1 EINPROGRESS (Operation now in progress)");
    assert_eq!(c.op, Op::Connect { fd: 3 });
    assert_eq!((c.expect.value, c.expect.errno), (Some(-1), Some(Errno(libc::EINPROGRESS))));
    let c = call("+0 setsockopt(4, SOL_SOCKET, SO_LINGER, {onoff=1, linger=0}, 8) = 0");
    let Op::SetOption { value, .. } = c.op else { panic!() };
    assert_eq!(value, OptionValue::Linger { on: 1, seconds: 0 });
    let c = call("+0 poll([{fd=4, events=POLLIN|POLLOUT, revents=POLLOUT}], 1, 0) = 1");
    let Op::Poll { entries, timeout_ms: 0 } = c.op else { panic!() };
    assert_eq!(entries[0].events.0, libc::POLLIN | libc::POLLOUT);
    let c = call("+0 getsockopt(4, SOL_SOCKET, SO_ERROR, [ECONNRESET], [4]) = 0");
    let Op::GetOption { expected, .. } = c.op else { panic!() };
    assert_eq!(expected, libc::ECONNRESET.into());
    assert_eq!(call("+0 bind(3, {port=9}, ...) = 0").op, Op::Bind { fd: 3, port: Some(9) });
}

#[test]
fn blocks_are_selected_by_run() {
    let s = script("@kernel {\n+0 close(3) = 0\n}\n@v6 { @ginnel { +0 close(4) = 0 } }\n+0 close(5) = 0\n");
    let count = |backend, ip| s.events(Target { backend, ip }).len();
    assert_eq!(count(BackendKind::Kernel, IpVersion::V4), 2);
    assert_eq!(count(BackendKind::Ginnel, IpVersion::V4), 1);
    assert_eq!(count(BackendKind::Ginnel, IpVersion::V6), 2);
}

#[test]
fn mistakes_are_reported_with_their_line() {
    assert_eq!(error("\n+0 < S 0:5(0) win 9\n"), "line 2: 0:5 is 5 bytes, not 0");
    assert!(error("+0 < S 0:0(0) ack 1 win 9").contains("require each other"));
    assert!(error("+0 frobnicate(3) = 0").contains("unknown call"));
    assert!(error("@kernel { +0 close(3) = 0").contains("not closed"));
    assert!(error("*  < . 1:1(0) ack 1 win 9").contains("outbound"));
    assert!(error("+0 read(4, ..., 5) = -1 EFOO").contains("EFOO"));
}

#[test]
fn packetdrill_names_of_options_are_bytes() {
    let s = segment("+0 < S 0:0(0) win 5 <FO,nop,nop,FO abcd1234,md5 00ff>");
    let expected = [
        TcpOpt::Raw(vec![34, 2]),
        TcpOpt::Nop,
        TcpOpt::Nop,
        TcpOpt::Raw(vec![34, 6, 0xab, 0xcd, 0x12, 0x34]),
        TcpOpt::Raw(vec![19, 4, 0, 0xff]),
    ];
    assert_eq!(s.options.unwrap(), expected);
}

#[test]
fn relaxing_directives_are_read() {
    let s = script("// RFC 9293\n// push: any\n// rest: any\n// gso: 1000\n+0 close(3) = 0");
    let directives = s.directives;
    assert!(!directives.check_push && !directives.check_rest && directives.gso == Some(1000));
    assert!(error("// gso: 0\n+0 close(3) = 0").contains("1 to 65535"));
    assert!(error("// rest: none\n+0 close(3) = 0").contains("is not `any`"));
}

#[test]
fn message_parts_and_disconnect_are_read() {
    let op = |text: &str| match only_event(text).kind {
        EventKind::Call(call) => call.op,
        other => panic!("{other:?}"),
    };
    assert!(
        matches!(op("+0 sendmsg(4, {msg_iov=[40, 0, 20]}, MSG_MORE) = 60"), Op::SendMessage { fd: 4, parts, .. } if parts == [40, 0, 20])
    );
    assert_eq!(op("+0 connect(4, AF_UNSPEC, ...) = 0"), Op::Disconnect { fd: 4 });
}
