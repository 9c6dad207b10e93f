//! UDP: the application's sockets, datagrams of remote hosts, and ICMP errors about datagrams of the stack.

use super::build;
use super::word::{Op, Word, syn_options};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ginnel_stack::handle::{LinkId, UdpHandle};
use ginnel_stack::ip::FlowLabel;
use ginnel_stack::ip::NetworkConfig;
use ginnel_stack::multicast::{FilterMode, MulticastOptions, SourceFilter};
use ginnel_stack::stack::Stack;
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{PmtuDiscovery, UdpError, UdpOptions, UdpSendParams};
use ginnel_stack::wire::checksum::Sum;
use ginnel_stack::wire::{protocol, udp};

/// First of the ports that sockets bind to and datagrams are sent to.
const PORT: u16 = 53;
/// Number of ports in use.
const PORTS: u8 = 5;
/// Path MTU modes of sockets.
const PATH_MTU_MODES: [PmtuDiscovery; 6] = [
    PmtuDiscovery::Want,
    PmtuDiscovery::Dont,
    PmtuDiscovery::Do,
    PmtuDiscovery::Probe,
    PmtuDiscovery::Interface,
    PmtuDiscovery::Omit,
];
/// Maximum number of closed handles on which operations are tried.
const CLOSED_MAX: usize = 8;

/// Bits of operand `b` of datagram operations, besides [`syn_options::V6`] and [`syn_options::REMOTE`].
pub mod udp_bits {
    /// The checksum is wrong.
    pub const BAD_CHECKSUM: u8 = 1;
    /// The datagram has no checksum.
    pub const NO_CHECKSUM: u8 = 2;
    /// The destination is a broadcast or multicast address.
    pub const TO_ALL: u8 = 4;
    /// The call has no destination, so that the socket's connected address is used.
    pub const CONNECTED: u8 = 8;
}

/// Returns the byte at offset `at` of every datagram that `port` sends.
pub fn datagram_byte(port: u16, at: usize) -> u8 {
    (port as u8).wrapping_mul(31).wrapping_add((at as u8).wrapping_mul(7)).wrapping_add((at >> 8) as u8)
}

/// The UDP sockets of the application.
#[derive(Default)]
pub struct UdpSockets {
    open: Vec<UdpHandle>,
    closed: Vec<UdpHandle>,
    /// True if datagrams with uncertain content were delivered.
    tainted: bool,
    /// The last datagram that the stack sent, from its IP header on.
    last_sent: Vec<u8>,
    /// Datagrams read.
    pub received: u64,
    /// Errors that calls returned.
    pub errors: u64,
}

impl UdpSockets {
    /// Marks the content of further datagrams as uncertain.
    pub fn taint(&mut self) {
        self.tainted = true;
    }

    /// Returns the socket that a number selects; `None` if there is none.
    fn pick(&self, number: u8) -> Option<UdpHandle> {
        // Closed sockets are rarely of interest.
        let sockets = if number >= 0xf0 || self.open.is_empty() { &self.closed } else { &self.open };
        usize::from(number).checked_rem(sockets.len()).map(|at| sockets[at])
    }

    /// Checks that a call reports a stale handle exactly if the socket is closed.
    fn check_result<T>(&mut self, socket: UdpHandle, result: &Result<T, UdpError>) {
        let stale = matches!(result, Err(UdpError::Stale));
        assert_eq!(stale, !self.open.contains(&socket), "{socket:?}: {:?}", result.as_ref().err());
        self.errors += u64::from(result.as_ref().is_err_and(|error| *error != UdpError::WouldBlock));
    }

    /// Performs an operation. If it is a packet of a remote host, returns the packet with its source address.
    pub fn apply(
        &mut self,
        stack: &mut Stack,
        now: Instant,
        limits: &NetworkConfig,
        word: &Word,
    ) -> Option<(IpAddr, Vec<u8>)> {
        let remote = SocketAddr::new(host(word), word.y as u16);
        match word.operation() {
            Op::UdpBind => self.bind(stack, limits, word),
            Op::UdpConnect => {
                let socket = self.pick(word.a)?;
                let result = stack.udp_connect(now, socket, remote);
                self.check_result(socket, &result);
            }
            Op::UdpSend => {
                let socket = self.pick(word.a)?;
                let port = stack.udp_local(socket).map_or(0, |local| local.port());
                // Each datagram of a segmented send starts over.
                let gso_size = if word.c & 16 == 0 { 0 } else { word.z as u16 };
                let period = if gso_size == 0 { usize::MAX } else { gso_size.into() };
                let bytes: Vec<u8> =
                    (0..word.x as usize % 70_000).map(|at| datagram_byte(port, at % period)).collect();
                let to = (word.b & udp_bits::CONNECTED == 0).then_some(remote);
                let result = match word.c & 16 {
                    0 => stack.udp_send_to(now, socket, to, &bytes),
                    _ => stack.udp_send_with(
                        now,
                        socket,
                        &UdpSendParams { to, gso_size, ..UdpSendParams::default() },
                        &bytes,
                    ),
                };
                self.check_result(socket, &result);
                // Sockets that have requested reports of errors may have some now.
                let mut buffer = [0; 100];
                while let Ok(report) = stack.udp_take_report(socket, &mut buffer) {
                    assert!(report.has_more || report.next_error.is_none(), "{report:?}");
                }
            }
            Op::UdpRecv => {
                let socket = self.pick(word.a)?;
                self.read(stack, socket, word.x as usize % 70_000);
            }
            Op::UdpClose => {
                let socket = self.pick(word.a)?;
                let result = stack.udp_close(socket);
                self.check_result(socket, &result);
                self.open.retain(|other| *other != socket);
                if self.closed.len() < CLOSED_MAX && !self.closed.contains(&socket) {
                    self.closed.push(socket);
                }
            }
            Op::UdpError => {
                let packet = build::icmp_error(word.b, word.x, &self.last_sent)?;
                return Some((build::on_link(build::GATEWAY).0.into(), packet));
            }
            _ => return Some(self.build_datagram(stack, word)),
        }
        None
    }

    fn bind(&mut self, stack: &mut Stack, limits: &NetworkConfig, word: &Word) {
        let ip: IpAddr = match word.a % 6 {
            0 => Ipv4Addr::UNSPECIFIED.into(),
            1 | 2 => Ipv6Addr::UNSPECIFIED.into(),
            3 => build::LOCAL_V4.into(),
            4 => build::LOCAL_V6.into(),
            _ => Ipv4Addr::BROADCAST.into(),
        };
        let port = if word.b & 0x80 != 0 { 0 } else { PORT + u16::from(word.b % PORTS) };
        let options = UdpOptions {
            reuse_address: word.c & 1 != 0,
            reuse_port: word.c & 2 != 0,
            uid: u32::from(word.c >> 7),
            broadcast: word.c & 4 != 0,
            v6only: word.a % 6 == 2,
            rcvbuf: (word.x != 0).then_some(word.x % 100_000),
            hop_limit: (word.c & 8 != 0).then_some(word.c),
            tos: word.z as u8,
            flow_label: FlowLabel::from_bits(word.z & 0xf_ffff),
            priority: (word.z >> 16) as u8,
            gro: word.c & 16 != 0,
            recverr_v4: word.c & 32 != 0,
            recverr_v6: word.c & 64 != 0,
            pmtu_discovery: PATH_MTU_MODES[word.z as usize / 256 % PATH_MTU_MODES.len()],
            multicast_v4: multicast_options(word.y),
            multicast_v6: multicast_options(word.y >> 8),
        };
        match stack.udp_bind(SocketAddr::new(ip, port), options) {
            Ok(socket) => {
                assert!(!self.open.contains(&socket), "{socket:?} was returned twice");
                change_membership(stack, socket, word);
                self.closed.retain(|other| *other != socket);
                self.open.push(socket);
                assert!(self.open.len() <= limits.udp_sockets_max as usize, "too many sockets");
                let local = stack.udp_local(socket).expect("an open socket");
                let ephemeral = limits.udp_port_first..=limits.udp_port_last;
                assert!(local.port() == port || port == 0 && ephemeral.contains(&local.port()), "{local}");
            }
            Err(error) => {
                assert_ne!(error, UdpError::Stale);
                self.errors += 1;
            }
        }
    }

    /// Builds a datagram of a remote host. Returns its source address and packet.
    fn build_datagram(&self, stack: &mut Stack, word: &Word) -> (IpAddr, Vec<u8>) {
        let from = SocketAddr::new(host(&Word { b: word.b & !udp_bits::TO_ALL, ..*word }), word.y as u16);
        let v6 = word.b & syn_options::V6 != 0;
        let to: IpAddr = match (v6, word.b & udp_bits::TO_ALL != 0) {
            (false, false) => build::LOCAL_V4.into(),
            (true, false) => build::LOCAL_V6.into(),
            (false, true) if word.z & 0x100 == 0 => Ipv4Addr::new(10, 0, 0, 255).into(),
            (false, true) => Ipv4Addr::new(224, 0, 0, 251).into(),
            (true, true) if word.z & 0x100 == 0 => Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).into(),
            (true, true) => Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb).into(),
        };
        let bound = self.pick(word.a & 0x7f).and_then(|socket| stack.udp_local(socket).ok());
        let port = match bound {
            Some(local) if word.a & 0x80 != 0 => local.port(),
            _ => PORT + u16::from(word.a % PORTS),
        };
        let len = word.x as usize % 20_000;
        let total = udp::Header::LEN + len;
        let header = udp::Header { src_port: from.port(), dst_port: port, len: total as u16, checksum: 0 };
        let mut l4 = vec![0; udp::Header::LEN];
        header.emit(&mut l4);
        l4.extend((0..len).map(|at| datagram_byte(from.port(), at)));
        if word.b & udp_bits::NO_CHECKSUM == 0 {
            let sum = build::pseudo(from.ip(), to, protocol::UDP, total).add(Sum::of(&l4)).finish();
            // 0 means that there is no checksum.
            let sum = if sum == 0 { 0xffff } else { sum };
            l4[6..8].copy_from_slice(&sum.to_be_bytes());
        }
        if word.b & udp_bits::BAD_CHECKSUM != 0 {
            l4[7] ^= 1;
        }
        (from.ip(), build::ip(from.ip(), to, protocol::UDP, word.z as u8 & 3, word.z as u16 | 1, &l4))
    }

    /// Reads one datagram into a buffer of `len` bytes and checks it. Returns whether a datagram or an error
    /// was read.
    fn read(&mut self, stack: &mut Stack, socket: UdpHandle, len: usize) -> bool {
        let mut buffer = vec![0x5a; len];
        let result = stack.udp_recv_from(socket, &mut buffer);
        self.check_result(socket, &result);
        let Ok(datagram) = result else {
            return !matches!(result, Err(UdpError::WouldBlock | UdpError::Stale));
        };
        self.received += 1;
        let copied = datagram.len.min(len);
        let port = datagram.from.port();
        // Each datagram of a coalesced receive starts over.
        let period = if datagram.gso_size == 0 { usize::MAX } else { datagram.gso_size.into() };
        let matches = (0..copied).all(|at| buffer[at] == datagram_byte(port, at % period));
        assert!(
            matches || self.tainted,
            "wrong bytes in a datagram of {} from {}",
            datagram.len,
            datagram.from
        );
        assert!(
            buffer[copied..].iter().all(|byte| *byte == 0x5a),
            "bytes written after the end of a datagram"
        );
        true
    }

    /// Handles the event that a socket is readable.
    pub fn on_readable(&mut self, stack: &mut Stack, socket: UdpHandle, read_all: bool) {
        assert!(self.open.contains(&socket), "{socket:?} is readable but not open");
        if read_all {
            assert!(self.read(stack, socket, 2000), "no datagram on readable {socket:?}");
            while self.read(stack, socket, 2000) {}
        }
    }

    /// Records a packet that the stack sent.
    pub fn on_sent(&mut self, packet: &[u8]) {
        let is_udp = match packet.first().map(|byte| byte >> 4) {
            Some(4) => packet.get(9) == Some(&protocol::UDP),
            Some(6) => packet.get(6) == Some(&protocol::UDP),
            _ => false,
        };
        if is_udp {
            self.last_sent = packet.to_vec();
        }
    }

    /// Closes all sockets and checks that their handles are stale.
    pub fn finish(&mut self, stack: &mut Stack) {
        for socket in core::mem::take(&mut self.open) {
            assert_eq!(stack.udp_close(socket), Ok(()));
            assert_eq!(stack.udp_close(socket), Err(UdpError::Stale));
        }
    }
}

/// Returns the multicast options that bits select; 0 gives the defaults.
fn multicast_options(bits: u32) -> MulticastOptions {
    MulticastOptions {
        link: (bits & 1 != 0).then_some(LinkId((bits >> 1 & 1) as u16)),
        source: None,
        hop_limit: (bits & 4 != 0).then_some((bits & 3) as u8),
        no_loop: bits & 8 != 0,
        members_only: bits & 16 != 0,
    }
}

/// Joins a multicast group, changes its source filter, or leaves the group, three times.
fn change_membership(stack: &mut Stack, socket: UdpHandle, word: &Word) {
    let group: IpAddr = match word.y >> 16 & 1 {
        0 => Ipv4Addr::new(224, 0, 0, 251).into(),
        _ => Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb).into(),
    };
    let mode = if word.y >> 17 & 1 == 0 { FilterMode::Exclude } else { FilterMode::Include };
    for bits in [word.y >> 18, word.y >> 21, word.y >> 24] {
        let sources = (0..bits & 3).map(|number| build::address(number as u8, group.is_ipv6(), false));
        let filter = (bits & 4 == 0).then(|| SourceFilter::new(mode, sources.collect()));
        let _ = stack.udp_set_membership(socket, LinkId((word.y >> 27 & 1) as u16), group, filter);
    }
}

/// Returns the remote host that a word selects.
fn host(word: &Word) -> IpAddr {
    let v6 = word.b & syn_options::V6 != 0;
    match (word.b & udp_bits::TO_ALL != 0, v6) {
        (true, false) if word.c & 1 == 0 => Ipv4Addr::new(10, 0, 0, 255).into(),
        (true, false) => Ipv4Addr::new(224, 0, 0, 251).into(),
        (true, true) => Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb).into(),
        _ => build::address(word.c, v6, word.b & syn_options::REMOTE != 0),
    }
}
