//! ICMP echo and UDP: small, fragmented and maximum-size datagrams, and ICMP errors for closed ports.

use crate::case::{Case, Family};
use crate::network::{Network, Node};
use crate::stream::Stream;
use crate::suite;
use ginnel::{Conn, Context, Error, Handler};
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::udp::{Datagram, UdpError, UdpOptions};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const PORT: u16 = 7000;
const CLOSED_PORT: u16 = 7001;
/// Time-out of a receive; only a lost answer takes this long.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Payload sizes that are small, fill a packet of MTU 1,500, just exceed it (in IPv4 and IPv6), and need many
/// fragments.
const SIZES: [usize; 10] = [0, 1, 56, 1452, 1453, 1472, 1473, 2960, 8000, 65_000];

/// Behaviour of Ginnel's UDP socket.
enum UdpRole {
    /// Echoes each datagram.
    Echo,
    /// Sends a datagram of each size, and reports the answers.
    Query { remote: SocketAddr, report: Sender<Result<Vec<u8>, UdpError>> },
}

struct Datagrams {
    local: SocketAddr,
    role: UdpRole,
}

impl Handler for Datagrams {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let open = |e: UdpError| Error::application(e.to_string());
        let socket = cx.udp_bind(self.local, UdpOptions::default()).map_err(open)?;
        if let UdpRole::Query { remote, .. } = self.role {
            cx.udp_connect(socket, remote).map_err(open)?;
            for size in SIZES {
                cx.udp_send(socket, None, Stream::Request.piece(0, size as u64)).map_err(open)?;
            }
        }
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        match &self.role {
            UdpRole::Echo => cx.udp_send(socket, Some(datagram.from), data).expect("the answer leaves"),
            UdpRole::Query { report, .. } => {
                let _ = report.send(Ok(data.to_vec()));
            }
        }
    }

    fn datagram_error(&mut self, _: &mut Context<'_>, _: UdpHandle, error: UdpError) {
        if let UdpRole::Query { report, .. } = &self.role {
            let _ = report.send(Err(error));
        }
    }
}

/// Runs `check` on networks of both families, with and without offloads, and with reordering, which fragments
/// must survive.
fn on_all_networks(test: &str, check: fn(&Case) -> Result<(), String>) {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for (what, mtu, offload, link) in [
            ("", 1500, true, ""),
            ("no offload", 1500, false, ""),
            ("small MTU", 1280, true, ""),
            ("jumbo frames", 9000, true, ""),
            ("reordering", 1500, true, "delay=1ms reorder=20% duplicate=10%"),
        ] {
            let name = format!("{test}, {family:?} {what}");
            cases.push(Case { name, family, mtu, offload, link, ..Case::default() });
        }
    }
    suite::check(test, 4, cases, check);
}

/// Runs `work` on the network of a case, with a stack whose UDP socket has this role.
fn with_node(
    case: &Case,
    role: impl FnOnce(&Network) -> UdpRole,
    work: impl FnOnce(&Network) -> Result<(), String>,
) -> Result<(), String> {
    let (network, device) = Network::new(case)?;
    let local = SocketAddr::new(network.ginnel, PORT);
    let node = Node::start(case, &network, device, Datagrams { local, role: role(&network) })?;
    let result = work(&network);
    node.stop().and(result)
}

/// Opens a UDP socket of the kernel.
fn kernel_socket(network: &Network, port: u16) -> Result<UdpSocket, String> {
    let bind = || {
        let socket = UdpSocket::bind(SocketAddr::new(network.kernel, port))?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        Ok(socket)
    };
    network.host.run(bind).map_err(|e| format!("a UDP socket: {e}"))
}

fn context<T>(what: impl std::fmt::Display, result: io::Result<T>) -> Result<T, String> {
    result.map_err(|e| format!("{what}: {e}"))
}

/// Repeats a receive with a time-out that Linux interrupted: it returns EINTR when the machine or the process
/// was stopped (signal(7)), although no signal was handled.
fn received<T>(mut receive: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match receive() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[test]
fn ginnel_answers_datagrams_of_every_size() {
    on_all_networks("Ginnel answers UDP", |case| {
        with_node(
            case,
            |_| UdpRole::Echo,
            |network| {
                let socket = kernel_socket(network, 0)?;
                context("connect", socket.connect(SocketAddr::new(network.ginnel, PORT)))?;
                let mut buffer = vec![0; 1 << 16];
                for size in SIZES {
                    let sent = Stream::Request.piece(size as u64, size as u64);
                    context(format_args!("sending {size} bytes"), socket.send(sent))?;
                    // A link that duplicates may deliver answers to earlier datagrams again.
                    loop {
                        let got = received(|| socket.recv(&mut buffer));
                        let got = context(format_args!("answer to {size} bytes"), got)?;
                        if got == size {
                            break;
                        }
                    }
                    if &buffer[..size] != sent {
                        return Err(format!("another answer to {size} bytes"));
                    }
                }
                Ok(())
            },
        )
    });
}

#[test]
fn the_kernel_answers_datagrams_of_every_size() {
    on_all_networks("the kernel answers UDP", |case| {
        let (report, reports) = channel();
        let kernel = std::cell::OnceCell::new();
        let role = |network: &Network| {
            let socket = kernel_socket(network, PORT).expect("a free port");
            kernel.set(socket).expect("once");
            UdpRole::Query { remote: SocketAddr::new(network.kernel, PORT), report }
        };
        with_node(case, role, |_| {
            let socket = kernel.get().expect("set by now");
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| echo(socket, &done));
                let result = answers(&reports);
                done.store(true, Ordering::Relaxed);
                result
            })
        })
    });
}

/// Echoes datagrams on the kernel's side until `done` is set.
fn echo(socket: &UdpSocket, done: &AtomicBool) {
    socket.set_read_timeout(Some(Duration::from_millis(20))).expect("a time-out");
    let mut buffer = vec![0; 1 << 16];
    while !done.load(Ordering::Relaxed) {
        if let Ok((got, from)) = socket.recv_from(&mut buffer) {
            socket.send_to(&buffer[..got], from).expect("the answer leaves");
        }
    }
}

/// Waits for an answer of each size.
fn answers(reports: &Receiver<Result<Vec<u8>, UdpError>>) -> Result<(), String> {
    let mut missing = SIZES.to_vec();
    while !missing.is_empty() {
        let answer = reports.recv_timeout(TIMEOUT).map_err(|_| format!("{missing:?} are missing"))?;
        let answer = answer.map_err(|e| e.to_string())?;
        if answer != Stream::Request.piece(0, answer.len() as u64)[..answer.len()] {
            return Err(format!("wrong bytes in the answer of {} bytes", answer.len()));
        }
        missing.retain(|size| *size != answer.len());
    }
    Ok(())
}

#[test]
fn kernel_gets_refusal_of_closed_port() {
    on_all_networks("Ginnel has no such port", |case| {
        with_node(
            case,
            |_| UdpRole::Echo,
            |network| {
                for size in [0, 100, 1472] {
                    // Each datagram has a socket of its own, because a link that duplicates may deliver the
                    // refusal of an earlier one again.
                    let socket = kernel_socket(network, 0)?;
                    context("connect", socket.connect(SocketAddr::new(network.ginnel, CLOSED_PORT)))?;
                    context("send", socket.send(Stream::Request.piece(0, size)))?;
                    match received(|| socket.recv(&mut [0; 10])) {
                        Err(e) if e.kind() == ErrorKind::ConnectionRefused => {}
                        other => return Err(format!("{other:?} instead of ECONNREFUSED for {size} bytes")),
                    }
                }
                Ok(())
            },
        )
    });
}

#[test]
fn ginnel_gets_refusal_of_closed_port() {
    on_all_networks("the kernel has no such port", |case| {
        let (report, reports) = channel();
        let role = |network: &Network| UdpRole::Query {
            remote: SocketAddr::new(network.kernel, CLOSED_PORT),
            report,
        };
        with_node(case, role, |_| match reports.recv_timeout(TIMEOUT) {
            Ok(Err(UdpError::ConnectionRefused)) => Ok(()),
            other => Err(format!("{other:?} instead of a refusal")),
        })
    });
}

/// Opens a ping socket of the kernel, which adds identifier and checksum to echo requests and receives the
/// replies.
fn ping_socket(network: &Network, family: Family) -> io::Result<OwnedFd> {
    let (family, protocol) = match family {
        Family::V4 => (AddressFamily::INET, ipproto::ICMP),
        Family::V6 => (AddressFamily::INET6, ipproto::ICMPV6),
    };
    network.host.run(|| {
        let socket =
            rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(protocol))?;
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(TIMEOUT),
        )?;
        rustix::net::connect(&socket, &SocketAddr::new(network.ginnel, 0))?;
        Ok(socket)
    })
}

#[test]
fn ginnel_answers_echo_requests_of_every_size() {
    on_all_networks("ping", |case| {
        with_node(
            case,
            |_| UdpRole::Echo,
            |network| {
                let socket = context("a ping socket", ping_socket(network, case.family))?;
                let (request, reply) = if case.family == Family::V4 { (8, 0) } else { (128, 129) };
                let mut buffer = vec![0; 1 << 16];
                for (sequence, size) in SIZES.into_iter().enumerate() {
                    let mut message = vec![request, 0, 0, 0, 0, 0, 0, sequence as u8];
                    message.extend_from_slice(Stream::Request.piece(0, size as u64));
                    message.truncate(8 + size);
                    let sent =
                        rustix::net::send(&socket, &message, SendFlags::empty()).map_err(io::Error::from);
                    context(format_args!("request with {size} bytes"), sent)?;
                    loop {
                        let got = received(|| {
                            Ok(rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty())?.0)
                        });
                        let got = context(format_args!("reply to {size} bytes"), got)?;
                        // A link that duplicates may deliver earlier replies again.
                        if got >= 8 && buffer[7] == sequence as u8 {
                            if buffer[0] != reply || buffer[8..got] != message[8..] {
                                return Err(format!("another reply to {size} bytes"));
                            }
                            break;
                        }
                    }
                }
                Ok(())
            },
        )
    });
}
