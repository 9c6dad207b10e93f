//! Handwritten seed inputs. They are committed as `fuzz/corpus/frames`; a test compares the files with this
//! code.

use super::setup::variant;
use super::udp::udp_bits;
use super::word::{Op, PeerAction, Word, segment_bits, syn_options};
use ginnel_stack::wire::tcp::TcpFlags;

const ACK: TcpFlags = TcpFlags::ACK;
const V6: u8 = syn_options::V6;
const DEFAULT: u8 = syn_options::DEFAULT;

fn setup_word(a: u8, b: u8, c: u8) -> Word {
    Word { a, b, c, x: 1_000, y: 1, ..Word::default() }
}

fn default_setup() -> Word {
    setup_word(0, 0, 0)
}

/// Returns operations that open a listener and establish an accepted connection to it.
fn established(options: u8) -> Vec<Word> {
    vec![
        Word::listen(1, 0, 16),
        Word::open(0, options, 0, 1, 5000),
        Word::peer_action(0, PeerAction::AckAll, 0),
    ]
}

/// Returns operations that establish a connection that the application opens.
fn connected(options: u8) -> Vec<Word> {
    vec![Word::connect(options, 0, 1), Word::peer_action(0, PeerAction::AcceptSyn, 0)]
}

fn scenario(first: Word, parts: &[&[Word]]) -> Vec<u8> {
    let words = core::iter::once(first).chain(parts.iter().flat_map(|p| p.iter().copied()));
    words.flat_map(|w| w.encode()).collect()
}

/// Returns name and input of all scenarios.
pub fn scenarios() -> Vec<(&'static str, Vec<u8>)> {
    [states(), faults(), resources(), network(), datagrams()].concat()
}

/// Returns scenarios that together reach all states of a connection.
fn states() -> Vec<(&'static str, Vec<u8>)> {
    let data = [
        Word::peer_action(0, PeerAction::Data, 700),
        Word::send(0, 5000),
        Word::peer_action(0, PeerAction::AckAll, 0),
    ];
    let ack = Word::peer_action(0, PeerAction::AckAll, 0);
    let fin = Word::peer_action(0, PeerAction::Fin, 0);
    let (close, shutdown) = (Word::on_conn(Op::Close, 0), Word::on_conn(Op::Shutdown, 0));
    let time_out = Word::milliseconds(130_000);
    let crossing =
        [Word::hold(), Word::peer_action(0, PeerAction::Fin, 0), close, Word::release(), ack, time_out];
    let segment = |flags| Word::segment(0, flags, 0, 0, 0, segment_bits::ADVANCE_SEQ);
    let crossing_fin =
        [close, Word::segment(0, ACK | TcpFlags::FIN, 0, -1, 0, segment_bits::ADVANCE_SEQ), ack, time_out];
    vec![
        ("passive-close", scenario(default_setup(), &[&established(DEFAULT), &data, &[fin, close, ack]])),
        (
            "active-close",
            scenario(default_setup(), &[&established(DEFAULT), &data, &[close, ack, fin, time_out]]),
        ),
        (
            "half-close",
            scenario(default_setup(), &[&established(0), &[shutdown, ack], &data, &[fin, time_out]]),
        ),
        ("closing", scenario(default_setup(), &[&established(DEFAULT), &crossing_fin])),
        ("crossing-fins", scenario(default_setup(), &[&established(DEFAULT), &crossing])),
        ("connect", scenario(default_setup(), &[&connected(DEFAULT), &data, &[close, ack, fin]])),
        ("connect-v6", scenario(default_setup(), &[&connected(DEFAULT | V6), &data, &[fin, close, ack]])),
        (
            "simultaneous-open",
            scenario(
                default_setup(),
                &[&[Word::connect(0, 0, 1), Word::peer_action(0, PeerAction::CrossingSyn, 0), ack], &data],
            ),
        ),
        (
            "refused",
            scenario(
                default_setup(),
                &[&[Word::connect(0, 0, 1), segment(TcpFlags::RST | ACK), Word::connect(0, 1, 2)]],
            ),
        ),
        (
            "reset",
            scenario(
                default_setup(),
                &[&established(DEFAULT), &data, &[Word::peer_action(0, PeerAction::Reset, 0)]],
            ),
        ),
        (
            "abort",
            scenario(default_setup(), &[&established(DEFAULT), &data, &[Word::on_conn(Op::Abort, 0), ack]]),
        ),
        ("closed-port", scenario(default_setup(), &[&[Word::open(255, DEFAULT, 0, 1, 9), segment(ACK)]])),
        (
            "syn-ack-lost",
            scenario(
                default_setup(),
                &[&[Word::listen(0, 0, 4), Word::open(0, 0, 0, 1, 9), time_out, time_out]],
            ),
        ),
        (
            "connect-times-out",
            scenario(
                setup_word(variant::SHORT_TIMEOUTS, 0, 0),
                &[&[Word::connect(0, 0, 1), time_out, time_out, time_out]],
            ),
        ),
        (
            "time-wait-reuse",
            scenario(
                default_setup(),
                &[
                    &established(DEFAULT),
                    &[close, ack, fin, Word::milliseconds(2000)],
                    &[
                        Word::open(0, DEFAULT, 0, 1, 9_000_000),
                        Word::peer_action(0, PeerAction::AckAll, 0),
                        Word::peer_action(0, PeerAction::Data, 10),
                    ],
                ],
            ),
        ),
        (
            "fin-wait-2-times-out",
            scenario(default_setup(), &[&established(DEFAULT), &[close, ack, time_out, time_out]]),
        ),
    ]
}

/// Returns scenarios with lost, repeated, reordered and out-of-window segments.
fn faults() -> Vec<(&'static str, Vec<u8>)> {
    let ack = Word::peer_action(0, PeerAction::AckAll, 0);
    let advance_seq = segment_bits::ADVANCE_SEQ;
    let ahead = [
        Word::segment(0, ACK, 1000, 0, 500, 0),
        Word::segment(0, ACK, 2500, 0, 500, 0),
        Word::segment(0, ACK | TcpFlags::FIN, 3000, 0, 100, 0),
        Word::segment(0, ACK, 0, 0, 1000, advance_seq),
        Word::segment(0, ACK, -300, 0, 1600, advance_seq),
        Word::segment(0, ACK, 0, 0, 2000, advance_seq),
    ];
    let holes = [
        Word::send(0, 60_000),
        Word::peer_action(0, PeerAction::SackHoles, 0x1234_5675),
        Word::peer_action(0, PeerAction::SackHoles, 0x0f0f_3331),
        Word::deadlines(3),
        ack,
        Word::send(0, 60_000),
        ack,
    ];
    let loss = [Word::send(0, 30_000), Word::deadlines(8), ack, Word::deadlines(5), ack, ack];
    let window = [
        Word::peer_action(0, PeerAction::CloseWindow, 0),
        Word::send(0, 4000),
        Word::deadlines(20),
        Word::peer_action(0, PeerAction::OpenWindow, 700),
        Word::deadlines(4),
        Word::peer_action(0, PeerAction::OpenWindow, 60_000),
        ack,
    ];
    let out_of_window = [
        Word::segment(0, ACK, -30_000, 0, 10, 0),
        Word::segment(0, ACK, 30_000, 0, 10, segment_bits::SCALED_OFFSETS),
        Word::segment(0, TcpFlags::RST, 100, 0, 0, 0),
        Word::segment(0, TcpFlags::SYN, 0, 0, 0, segment_bits::GARBAGE),
        Word::segment(0, ACK, 0, 20_000, 0, 0),
        Word::segment(0, ACK, 0, -20_000, 0, 0),
        Word::segment(0, ACK, 0, 0, 5, segment_bits::OLD_TIMESTAMP),
        Word::segment(0, TcpFlags(0xff), 0, 0, 5, 0),
        Word::segment(0, TcpFlags(0), 0, 0, 5, 0),
        Word::segment(0, ACK, 0, 0, 5, segment_bits::BAD_CHECKSUM),
        Word::segment(0, ACK, 0, 0, 5, advance_seq | segment_bits::GARBAGE),
    ];
    let mutated = [
        Word::peer_action(0, PeerAction::Data, 300),
        Word::mutate(0, 2, true, 7),
        Word::mutate(1, 1, true, 99),
        Word::mutate(2, 3, false, 5),
        ack,
    ];
    let urgent = [
        Word::send_urgent(0, 10),
        Word { z: 3 << 16, ..Word::segment(0, ACK | TcpFlags::URG, 0, 0, 20, advance_seq) },
        Word::recv(0, 5),
        Word::recv(0, 100),
    ];
    let raw = [Word::raw(2), Word::peer_action(0, PeerAction::Data, 1), Word::send(1, 2)];
    let congestion = [
        Word { c: segment_bits::CE | advance_seq, ..Word::segment(0, ACK, 0, 0, 900, 0) },
        Word::send(0, 9000),
        Word::segment(0, ACK | TcpFlags::ECE, 0, 0, 0, advance_seq),
        Word::segment(0, ACK | TcpFlags::CWR, 0, 0, 10, advance_seq),
    ];
    let no_sack = setup_word(0, variant::NO_SACK | variant::NO_TIMESTAMPS | variant::NEW_RENO, 0);
    let duplicates =
        [Word::send(0, 30_000), Word::repeat(5), Word::segment(0, ACK, 0, -14_600, 0, 0), ack, ack];
    vec![
        (
            "unordered",
            scenario(default_setup(), &[&established(DEFAULT), &[Word::set_option(0, 14, 1)], &ahead]),
        ),
        (
            "out-of-order",
            scenario(default_setup(), &[&established(DEFAULT), &ahead, &[Word::milliseconds(100)]]),
        ),
        ("sack", scenario(default_setup(), &[&established(DEFAULT), &holes])),
        ("retransmission", scenario(default_setup(), &[&established(DEFAULT), &loss])),
        ("duplicate-acks", scenario(no_sack, &[&established(0), &duplicates])),
        ("zero-window", scenario(default_setup(), &[&established(DEFAULT), &window])),
        (
            "out-of-window",
            scenario(default_setup(), &[&established(DEFAULT), &out_of_window, &[Word::send(0, 10), ack]]),
        ),
        ("mutated", scenario(default_setup(), &[&established(DEFAULT), &mutated])),
        ("urgent", scenario(default_setup(), &[&established(DEFAULT), &urgent])),
        ("raw", scenario(default_setup(), &[&established(DEFAULT), &raw])),
        (
            "ecn",
            scenario(
                setup_word(0, variant::ECN, 0),
                &[&established(DEFAULT | syn_options::ECN), &congestion],
            ),
        ),
        (
            "old-duplicate",
            scenario(
                default_setup(),
                &[&established(DEFAULT), &[Word::peer_action(0, PeerAction::Retransmit, 50)]],
            ),
        ),
    ]
}

/// Returns scenarios about limits, timers, options and devices.
fn resources() -> Vec<(&'static str, Vec<u8>)> {
    let ack = Word::peer_action(0, PeerAction::AckAll, 0);
    let fin = Word::peer_action(0, PeerAction::Fin, 0);
    let close = Word::on_conn(Op::Close, 0);
    let auto_respond = Word::auto_respond(0, true);
    let syn_flood =
        [Word::listen(0, 0, 2), Word { b: 1, ..Word::repeat(12) }, Word::open(0, DEFAULT, 1, 50, 77)];
    let mut time_wait = Vec::new();
    for i in 0..4 {
        time_wait.push(Word::open(0, DEFAULT, 0, 10 + i, 5000));
        time_wait.push(Word::peer_action(i as u8, PeerAction::AckAll, 0));
        time_wait.extend([
            close,
            Word::peer_action(i as u8, PeerAction::AckAll, 0),
            Word::peer_action(i as u8, PeerAction::Fin, 0),
        ]);
    }
    let unread = [
        Word::read_policy(0, false),
        Word::repeat(40),
        Word::peer_action(0, PeerAction::Data, 1400),
        Word::recv(0, 3000),
        Word::read_policy(1, true),
        Word::peer_action(0, PeerAction::Data, 1400),
        Word::recv(0, 99_000),
    ];
    let bulk = [
        auto_respond,
        Word::repeat(6),
        Word::send(0, 90_000),
        Word::deadlines(10),
        close,
        Word::deadlines(3),
        fin,
    ];
    let device_full =
        [Word::tx_capacity(0), Word::send(0, 20_000), Word::deadlines(3), Word::tx_capacity(255), ack];
    let keepalive = [
        Word::set_option(0, 3, 1),
        Word::set_option(0, 4, 5),
        Word::set_option(0, 5, 2),
        Word::milliseconds(7000),
        ack,
        Word::milliseconds(100_000),
    ];
    let user_timeout = [Word::set_option(0, 7, 3000), Word::send(0, 10), Word::milliseconds(100_000)];
    let cork = [
        Word::set_option(0, 1, 1),
        Word::send(0, 10),
        Word::milliseconds(300),
        Word::set_option(0, 1, 0),
        Word::send(0, 10),
        Word::send(0, 10),
        Word::set_option(0, 0, 1),
    ];
    let unread_close = [Word::read_policy(0, false), Word::peer_action(0, PeerAction::Data, 100), close];
    let unaccepted = [Word::auto_accept(false), Word::listen(0, 0, 2), Word::open(0, DEFAULT, 0, 1, 3)];
    let late_accept = [
        ack,
        Word::peer_action(0, PeerAction::Data, 100),
        fin,
        Word::accept(),
        Word::recv(0, 1000),
        Word::unlisten(0),
    ];
    let sources = [
        auto_respond,
        Word::send(0, 100),
        Word::send_source(0, 300_000),
        Word::send(0, 100),
        Word::deadlines(5),
    ];
    let small_memory = variant::SMALL_POOL | variant::SMALL_BUFFERS;
    vec![
        (
            "syn-flood",
            scenario(setup_word(variant::SMALL_TABLES | variant::COOKIES_NEVER, 0, 0), &[&syn_flood]),
        ),
        (
            "cookies",
            scenario(
                setup_word(variant::SMALL_TABLES, 0, 0),
                &[&syn_flood, &[Word::peer_action(8, PeerAction::AckAll, 0)]],
            ),
        ),
        (
            "cookie-connection",
            scenario(
                setup_word(variant::COOKIES_ALWAYS, 0, 0),
                &[&established(DEFAULT), &[Word::peer_action(0, PeerAction::Data, 9)]],
            ),
        ),
        (
            "time-wait-limit",
            scenario(setup_word(variant::SMALL_TABLES, 0, 0), &[&[Word::listen(0, 0, 9)], &time_wait]),
        ),
        ("unread", scenario(setup_word(small_memory, 0, 0), &[&established(DEFAULT), &unread])),
        ("bulk", scenario(default_setup(), &[&established(DEFAULT), &bulk])),
        ("bulk-offload", scenario(setup_word(0, 0, variant::OFFLOAD), &[&established(DEFAULT), &bulk])),
        ("bulk-jumbo", scenario(setup_word(0, 0, 3), &[&connected(DEFAULT), &bulk])),
        (
            "bulk-new-reno",
            scenario(
                setup_word(0, variant::NEW_RENO | variant::NO_SCALING, 0),
                &[&connected(DEFAULT), &bulk],
            ),
        ),
        ("device-full", scenario(default_setup(), &[&established(DEFAULT), &device_full])),
        ("keepalive", scenario(default_setup(), &[&established(DEFAULT), &keepalive])),
        ("user-timeout", scenario(default_setup(), &[&established(DEFAULT), &user_timeout])),
        ("cork", scenario(default_setup(), &[&established(DEFAULT), &cork, &[ack]])),
        ("close-with-unread-data", scenario(default_setup(), &[&established(DEFAULT), &unread_close])),
        ("late-accept", scenario(default_setup(), &[&unaccepted, &late_accept])),
        ("sources", scenario(default_setup(), &[&established(DEFAULT), &sources])),
    ]
}

/// Returns scenarios about the protocols below TCP.
fn network() -> Vec<(&'static str, Vec<u8>)> {
    let ack = Word::peer_action(0, PeerAction::AckAll, 0);
    let fragments =
        |order| [Word::fragment(2, 256, order), Word::peer_action(0, PeerAction::Data, 1000), ack];
    let too_big = [Word::send(0, 20_000), Word::icmp_error(0, 4, 900), Word::deadlines(3), ack, ack];
    let too_big6 = [Word::send(0, 20_000), Word::icmp_error(0, 7, 1300), Word::deadlines(3), ack, ack];
    let unreachable = [Word::connect(syn_options::REMOTE, 0, 1), Word::icmp_error(0, 1, 0)];
    let neighbours = setup_word(0, 0, variant::RESOLVE_NEIGHBOURS | variant::VLAN);
    let arp = [
        Word::connect(0, 0, 1),
        Word::arp(1, 0),
        Word::connect(0, 1, 1),
        Word::milliseconds(5000),
        Word::arp(2, 2),
    ];
    let ndp = [
        Word::milliseconds(3000),
        Word::ndp(3, 4, 0x0010_0020),
        Word::connect(V6, 0, 1),
        Word::ndp(1, 0, 0),
        Word::ndp(2, 1, 2),
        Word::ndp(0, 2, 0),
        Word::milliseconds(100_000),
        Word::ndp(3, 4, 0x0110_0090),
    ];
    let autoconf = setup_word(0, 0, variant::RESOLVE_NEIGHBOURS | variant::AUTOCONF | variant::SMALL_NETWORK);
    let pings = [
        Word::ping(0, 100),
        Word::ping(1, 100),
        Word::fragment(1, 1200, 1),
        Word::ping(0, 9000),
        Word::ping(3, 60),
        Word::ping(132, 60),
    ];
    let small = setup_word(0, 0, 1);
    vec![
        ("fragments", scenario(default_setup(), &[&established(DEFAULT), &fragments(1), &fragments(3)])),
        (
            "fragments-v6",
            scenario(default_setup(), &[&established(DEFAULT | V6), &fragments(0), &fragments(4)]),
        ),
        ("path-mtu", scenario(default_setup(), &[&established(DEFAULT), &too_big])),
        ("path-mtu-v6", scenario(default_setup(), &[&established(DEFAULT | V6), &too_big6])),
        ("unreachable", scenario(default_setup(), &[&unreachable])),
        ("arp", scenario(neighbours, &[&arp])),
        ("ndp", scenario(autoconf, &[&ndp])),
        ("ping", scenario(default_setup(), &[&pings])),
        (
            "small-mtu",
            scenario(small, &[&established(DEFAULT), &[Word::auto_respond(0, true), Word::send(0, 9000)]]),
        ),
    ]
}

/// Returns scenarios about UDP.
fn datagrams() -> Vec<(&'static str, Vec<u8>)> {
    let bind = Word::udp_bind(0, 0, 4);
    let exchange = |v6| {
        [
            Word::udp_bind(1, 0, 0),
            Word::datagram(0, v6, 1, 4000, 700),
            Word::datagram(0, v6, 2, 4001, 0),
            Word::udp_send(0, v6, 1, 4000, 900),
            Word::fragment(1, 512, 1),
            Word::datagram(0, v6, 1, 4000, 5000),
            Word::udp_send(0, v6, 1, 4000, 5000),
            Word::read_policy(2, false),
            Word::repeat(20),
            Word::datagram(0, v6, 1, 4000, 1200),
            Word::udp_recv(0, 300),
            Word::udp_recv(0, 3000),
            Word::on_conn(Op::UdpClose, 0),
            Word::datagram(0, v6, 1, 4000, 10),
            Word::udp_recv(240, 10),
        ]
    };
    let errors = [
        bind,
        Word::udp_connect(0, 0, 1, 9),
        Word::udp_send(0, udp_bits::CONNECTED, 0, 0, 1400),
        Word::udp_error(0, 0),
        Word::udp_error(4, 700),
        Word::udp_send(0, udp_bits::CONNECTED, 0, 0, 1400),
        Word::udp_send(0, udp_bits::CONNECTED, 0, 0, 1400),
        Word::udp_connect(0, syn_options::REMOTE, 2, 9),
        Word::udp_send(0, udp_bits::CONNECTED, 0, 0, 60_000),
        Word::datagram(1, 0, 1, 5, 5),
        Word::datagram(0, udp_bits::BAD_CHECKSUM, 1, 5, 5),
        Word::datagram(0, udp_bits::NO_CHECKSUM, 1, 5, 5),
        Word::datagram(0, udp_bits::NO_CHECKSUM | V6, 1, 5, 5),
    ];
    let sockets = [
        Word::udp_bind(0, 0, 1),
        Word::udp_bind(3, 0, 1),
        Word::udp_bind(0, 1, 6),
        Word::udp_bind(0, 1, 6),
        Word::udp_bind(2, 0x80, 0),
        Word::datagram(0, udp_bits::TO_ALL, 1, 6, 100),
        Word::datagram(1, 0, 2, 7, 100),
        Word::udp_send(2, udp_bits::TO_ALL, 0, 53, 100),
        Word::udp_send(2, udp_bits::TO_ALL, 1, 53, 100),
        Word::on_conn(Op::UdpClose, 0),
        Word::udp_bind(5, 0x80, 4),
        Word::datagram(0x81, 0, 1, 6, 100),
    ];
    let unresolved = [
        bind,
        Word::repeat(6),
        Word::udp_send(0, 0, 1, 9, 1000),
        Word::arp(1, 1),
        Word::udp_send(0, V6, 2, 9, 1000),
        Word::milliseconds(9000),
        Word::udp_send(0, 0, 1, 9, 10),
    ];
    let small = variant::RESOLVE_NEIGHBOURS | variant::SMALL_NETWORK;
    vec![
        ("datagrams", scenario(default_setup(), &[&exchange(0)])),
        ("datagrams-v6", scenario(setup_word(0, 0, variant::OFFLOAD), &[&exchange(V6)])),
        ("datagram-errors", scenario(default_setup(), &[&errors])),
        ("datagram-sockets", scenario(setup_word(0, 0, variant::SMALL_NETWORK), &[&sockets, &sockets])),
        ("unresolved-neighbour", scenario(setup_word(0, 0, small), &[&unresolved])),
    ]
}
