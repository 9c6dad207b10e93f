//! Buffers whose sizes nobody has set: they grow with what the connection needs.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::handle::Conn;
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};

/// Default receive buffer of Linux in bytes (the second value of `tcp_rmem`).
const RECV_BUFFER: usize = 131_072;

/// Connects host 0 to host 1, which reads nothing unless `reads`, and queues `len` bytes. Returns the handles
/// of the client and of the server.
fn transfer(reads: bool, link: LinkModel, len: usize) -> (Sim, Conn, Conn) {
    let server = HostConfig { defer_reads: !reads, ..HostConfig::default() };
    let mut sim = Sim::pair_with(1, HostConfig::default(), server, link);
    sim.hosts[1].listen(80);
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 80);
    let now = sim.now;
    let client = sim.hosts[0].connect(now, to);
    sim.collect(0);
    assert!(sim.run_until(Duration::from_secs(9), |sim| !sim.hosts[1].accepted.is_empty()));
    let served = sim.hosts[1].accepted[0];
    let now = sim.now;
    sim.hosts[0].send_all(now, client, vec![7; len], false);
    sim.collect(0);
    (sim, client, served)
}

fn within_a_fifth(value: usize, of: usize) -> bool {
    (of * 4 / 5..=of * 6 / 5).contains(&value)
}

#[test]
fn unread_data_stay_within_the_usual_buffer() {
    let (mut sim, _, served) = transfer(false, LinkModel::default(), 10 << 20);
    sim.run(Duration::from_secs(30));
    let waiting = sim.hosts[1].stack.readable(served);
    assert!(within_a_fifth(waiting, RECV_BUFFER), "{waiting} bytes wait");
}

#[test]
fn slow_reading_does_not_grow_the_window() {
    let (mut sim, _, served) = transfer(false, LinkModel::default(), 10 << 20);
    for _ in 0..200 {
        sim.run(Duration::from_millis(20));
        sim.hosts[1].read(served, 8192);
        let now = sim.now;
        sim.hosts[1].stack.transmit(now);
        sim.collect(1);
    }
    sim.run(Duration::from_secs(30));
    assert_eq!(sim.hosts[1].received[&served].bytes.len(), 200 * 8192);
    let waiting = sim.hosts[1].stack.readable(served);
    assert!(within_a_fifth(waiting, RECV_BUFFER), "{waiting} bytes wait");
}

#[test]
fn reading_at_once_grows_the_window() {
    let link = LinkModel { delay: Duration::from_millis(20), ..LinkModel::default() };
    let (mut sim, _, served) = transfer(true, link, 20 << 20);
    sim.run(Duration::from_secs(1));
    let window = sim.hosts[1].stack.info(served).unwrap().rcv_wnd;
    assert!(window > 3 << 20, "the window is {window} bytes");
}

#[test]
fn reading_everything_now_and_then_grows_the_window() {
    let (mut sim, _, served) = transfer(false, LinkModel::default(), 20 << 20);
    for _ in 0..8 {
        sim.run(Duration::from_millis(20));
        while sim.hosts[1].read(served, 1 << 16) > 0 {}
        let now = sim.now;
        sim.hosts[1].stack.transmit(now);
        sim.collect(1);
    }
    sim.run(Duration::from_secs(1));
    let waiting = sim.hosts[1].stack.readable(served);
    assert!(waiting > 4 * RECV_BUFFER, "{waiting} bytes wait");
}

#[test]
// limit: tcp.send_buffer_first_bytes
fn send_buffer_grows_with_the_congestion_window() {
    let link = LinkModel { delay: Duration::from_millis(20), ..LinkModel::default() };
    let (mut sim, client, _) = transfer(true, link, 20 << 20);
    let queued = sim.hosts[0].stack.queued(client);
    assert_eq!(queued, 2 * 10 * 4352, "twenty segments, with what the kernel needs for each");
    sim.run(Duration::from_millis(150));
    let (queued, cwnd) =
        (sim.hosts[0].stack.queued(client), sim.hosts[0].stack.info(client).unwrap().snd_cwnd);
    assert!(cwnd > 40 && queued > 2 * 4352 * 30, "{queued} bytes, {cwnd} segments");
    sim.run(Duration::from_secs(1));
    let queued = sim.hosts[0].stack.queued(client);
    assert!(queued <= 4 << 20, "{queued} bytes are more than tcp.send_buffer_bytes");
}

#[test]
fn requested_send_buffer_size_is_kept() {
    let (mut sim, client, _) = transfer(false, LinkModel::default(), 0);
    let size = ginnel_stack::options::TcpOption::SendBuffer(1 << 20);
    sim.hosts[0].stack.set_option(client, size).unwrap();
    assert_eq!(sim.hosts[0].stack.send(client, &vec![1; 2 << 20]), Ok(1 << 20));
}
