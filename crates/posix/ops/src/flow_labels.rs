//! Flow labels of IPv6 (`IPV6_FLOWLABEL_MGR`, RFC 6437).
//!
//! The kernel keeps the table of labels that programs reserve: who may share a label, and how long it stays
//! reserved, depends on processes and users, and on other sockets of the network namespace. A socket that
//! reserves labels has a kernel socket for that, which sends nothing. A descriptor of it survives `fork`.

use crate::Ops;
use crate::descriptor::HiddenFd;
use crate::fd_table::FileId;
use crate::file::{Socket, SocketRole};
use crate::kernel_socket;
use crate::options::OptionValue;
use crate::process::ProcessState;
use crate::sockaddr::{self, Family};
use crate::syscall;
use core::ffi::c_int;
use core::net::{Ipv4Addr, SocketAddr};
use ginnel::FlowLabel;
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Number of the option, for which libc has no name.
pub const FLOWLABEL_MGR: c_int = 32;
/// Its name in the table of options, by which the label of the peer is stored.
pub(crate) const MANAGER: &str = "IPV6_FLOWLABEL_MGR";

/// Bits of a label, and of a label and a traffic class.
pub(crate) const LABEL_MASK: u32 = 0x000f_ffff;
const FLOW_INFO_MASK: u32 = 0x0fff_ffff;
/// Bits of the ECN field in flow information, which TCP sets itself.
const ECN_BITS: u32 = 3 << 20;
/// Marks in the stored value that the socket reflects labels.
const REFLECTS: u32 = 1 << 30;

/// Bytes of `struct in6_flowlabel_req`, and the positions of its fields.
pub const REQUEST_BYTES: usize = 32;
/// Position of the label in a request.
pub const LABEL_AT: core::ops::Range<usize> = 16..20;
const ACTION_AT: usize = 20;
const FLAGS_AT: core::ops::Range<usize> = 22..24;
/// Values of the action (`IPV6_FL_A_GET`, `IPV6_FL_A_PUT`).
const ACTION_GET: u8 = 0;
const ACTION_PUT: u8 = 1;
/// Flags (`IPV6_FL_F_REFLECT`, `IPV6_FL_F_REMOTE`).
const FLAG_REFLECT: u16 = 4;
const FLAG_REMOTE: u16 = 8;

/// The labels that a socket has reserved.
pub(crate) struct FlowLabels {
    /// The kernel socket to which they belong: a TCP socket that is never connected.
    kernel: HiddenFd,
    /// The labels that this process has reserved, each as often as it was.
    reserved: Vec<u32>,
}

impl FlowLabels {
    fn new() -> Result<Self, Errno> {
        let socket = socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let on = 1_i32.to_ne_bytes();
        syscall::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &on)?;
        syscall::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IPV6, FLOWINFO_SEND, &on)?;
        Ok(Self { kernel: HiddenFd::new(socket)?, reserved: Vec::new() })
    }

    /// Returns the descriptor of the kernel socket.
    pub fn kernel(&self) -> &HiddenFd {
        &self.kernel
    }

    /// Makes this the label of the kernel socket, which checks whether the socket may send it.
    ///
    /// # Errors
    /// `EINVAL` if it may not.
    fn select(&self, flow_info: u32) -> Result<(), Errno> {
        // `tcp_v6_connect` checks and stores the label before it looks at the address, and an IPv6-only
        // socket cannot be connected to this one.
        let unreachable = SocketAddr::new(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(), 1);
        let mut address = sockaddr::encode(unreachable, Family::V6).bytes().to_vec();
        address[FLOW_INFO_AT].copy_from_slice(&flow_info.to_be_bytes());
        match syscall::connect(self.kernel.as_raw_fd(), &address) {
            Err(Errno::INVAL) => Err(Errno::INVAL),
            _ => Ok(()),
        }
    }
}

const FLOWINFO_SEND: c_int = 33;
/// Position of `sin6_flowinfo` in `struct sockaddr_in6`.
const FLOW_INFO_AT: core::ops::Range<usize> = 4..8;

/// Returns `sin6_flowinfo` of an address.
fn flow_info_of(address: &[u8]) -> u32 {
    let word = address.get(FLOW_INFO_AT).and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u32::from_be_bytes) & FLOW_INFO_MASK
}

impl Socket {
    /// Returns the flow information that the program gives with the address of an IPv6 destination
    /// (`IPV6_FLOWINFO_SEND`).
    pub fn named_flow_info(&self, address: &[u8]) -> u32 {
        if self.family == Family::V6 && self.options.is_on("IPV6_FLOWINFO_SEND") {
            flow_info_of(address)
        } else {
            0
        }
    }

    /// Returns the flow information of the connected peer, as the program has given it.
    pub fn peer_flow_info(&self) -> u32 {
        self.options.stored_flow_info() & FLOW_INFO_MASK
    }

    /// Returns the address of the peer, as `getpeername` reports it.
    pub fn peer_name(&self, peer: SocketAddr) -> sockaddr::SockaddrBytes {
        let name = sockaddr::encode(peer, self.family);
        match self.peer_flow_info() {
            0 => name,
            flow_info if self.options.is_on("IPV6_FLOWINFO_SEND") => name.with_flow_info(flow_info),
            _ => name,
        }
    }
}

/// Returns the value of `IPV6_FLOWINFO` in a control message of `sendmsg`. `before` is the flow information
/// without it (`ip6_datagram_send_ctl`).
///
/// # Errors
/// `EINVAL` if the value is too short, or has bits of the version although there is flow information.
pub(crate) fn flow_info_cmsg(value: &[u8], before: u32) -> Result<u32, Errno> {
    let word = u32::from_be_bytes(*value.first_chunk().ok_or(Errno::INVAL)?);
    if before != 0 && word & !FLOW_INFO_MASK != 0 {
        return Err(Errno::INVAL);
    }
    Ok(word & FLOW_INFO_MASK)
}

/// Returns the control message about the flow label of a datagram with this traffic class; `None` without
/// flow information.
pub(crate) fn received_flow_info(tclass: u8, label: u32) -> Option<[u8; 4]> {
    let flow_info = u32::from(tclass) << 20 | label;
    (flow_info != 0).then(|| flow_info.to_be_bytes())
}

impl Ops {
    /// Implements `setsockopt` of `IPV6_FLOWLABEL_MGR`. Where the program has asked for any label, the
    /// request has the label afterwards.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn manage_flow_label(&self, fd: RawFd, request: &mut [u8]) -> Result<(), Errno> {
        let mut state = self.lock()?;
        state.notice_announced_end();
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        if socket.family == Family::V4 {
            return Err(Errno::NOPROTOOPT);
        }
        if request.len() < REQUEST_BYTES {
            return Err(Errno::INVAL);
        }
        let flags = u16::from_ne_bytes([request[FLAGS_AT][0], request[FLAGS_AT][1]]);
        let (action, reflects) = (request[ACTION_AT], flags & FLAG_REFLECT != 0);
        if socket.is_udp && reflects && matches!(action, ACTION_GET | ACTION_PUT) {
            // Refused for datagrams, by the kernel's order of checks.
            let (level, name) = (libc::IPPROTO_IPV6, FLOWLABEL_MGR);
            return kernel_socket::try_datagram_option(Family::V6, &[], level, name, request);
        }
        let labels = socket.flow_labels()?;
        let kernel = labels.kernel.as_raw_fd();
        syscall::setsockopt_mut(kernel, libc::IPPROTO_IPV6, FLOWLABEL_MGR, request)?;
        let label = u32::from_be_bytes(request[LABEL_AT].try_into().expect("four bytes"));
        match action {
            ACTION_GET | ACTION_PUT if reflects => {
                let stored =
                    if action == ACTION_GET { socket.options.stored_flow_info() | REFLECTS } else { 0 };
                socket.options.store_flow_info(stored);
                return state.apply_flow_label(file);
            }
            ACTION_GET => labels.reserved.push(label),
            ACTION_PUT => {
                if let Some(at) = labels.reserved.iter().position(|of| *of == label) {
                    labels.reserved.swap_remove(at);
                }
                // The peer's label that is given back is not sent any more.
                if label == socket.peer_flow_info() & LABEL_MASK {
                    let stored = socket.options.stored_flow_info();
                    socket.options.store_flow_info(stored & !LABEL_MASK);
                    return state.apply_flow_label(file);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Implements `getsockopt` of `IPV6_FLOWLABEL_MGR`.
    ///
    /// # Errors
    /// `EINVAL` for a request that is too short or of another action; `ENOENT` if the label of the peer is
    /// not reserved by the socket.
    pub fn flow_label(&self, fd: RawFd, request: &[u8]) -> Result<OptionValue, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        if socket.family == Family::V4 {
            return Err(Errno::OPNOTSUPP);
        }
        let mut answer = [0; REQUEST_BYTES];
        answer.copy_from_slice(request.get(..REQUEST_BYTES).ok_or(Errno::INVAL)?);
        if answer[ACTION_AT] != ACTION_GET {
            return Err(Errno::INVAL);
        }
        let flags = u16::from_ne_bytes([answer[FLAGS_AT][0], answer[FLAGS_AT][1]]);
        let flow_info = socket.peer_flow_info();
        match &socket.flow_labels {
            Some(labels) if flags & FLAG_REMOTE == 0 => {
                // A label that the socket has given back is not found, as on Linux.
                let _ = labels.select(flow_info);
                let kernel = labels.kernel.as_raw_fd();
                syscall::getsockopt(kernel, libc::IPPROTO_IPV6, FLOWLABEL_MGR, &mut answer)?;
            }
            _ if flags & FLAG_REMOTE == 0 => return Err(Errno::NOENT),
            _ => answer = [0; REQUEST_BYTES],
        }
        Ok(OptionValue::truncatable(answer.to_vec()))
    }
}

impl Socket {
    fn flow_labels(&mut self) -> Result<&mut FlowLabels, Errno> {
        if self.flow_labels.is_none() {
            self.flow_labels = Some(Box::new(FlowLabels::new()?));
        }
        self.flow_labels.as_deref_mut().ok_or(Errno::INVAL)
    }

    /// Checks whether the socket may send this label (`fl6_sock_lookup`): it has reserved it, or nobody in
    /// the network namespace has reserved labels that are not shared with all.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn check_flow_label(&mut self, flow_info: u32) -> Result<(), Errno> {
        let label = flow_info & LABEL_MASK;
        if label == 0 || self.flow_labels.as_ref().is_some_and(|labels| labels.reserved.contains(&label)) {
            return Ok(());
        }
        match self.flow_labels() {
            Ok(labels) => labels.select(flow_info),
            // Without IPv6 in the kernel nobody reserves labels.
            Err(Errno::AFNOSUPPORT) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns the flow label of a datagram with this flow information; `None` is that of the socket.
    /// `is_named` tells that the call names the destination or the flow.
    pub fn datagram_flow_label(&self, flow_info: u32, is_named: bool) -> Option<FlowLabel> {
        match flow_info & LABEL_MASK {
            0 if !is_named || self.peer_flow_info() & LABEL_MASK == 0 => None,
            0 => Some(self.options.automatic_flow_label()),
            label => Some(FlowLabel::Fixed(label)),
        }
    }
}

impl ProcessState {
    /// Checks and stores the flow information of the address that a socket is about to be connected to.
    ///
    /// # Errors
    /// `EINVAL` if the socket may not send the label.
    pub(crate) fn take_peer_flow_info(&mut self, file: FileId, address: &[u8]) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let ecn_bits = if socket.is_udp { 0 } else { ECN_BITS };
        let flow_info = socket.named_flow_info(address) & !ecn_bits;
        socket.check_flow_label(flow_info)?;
        if flow_info != socket.peer_flow_info() {
            let reflects = socket.options.stored_flow_info() & REFLECTS;
            socket.options.store_flow_info(flow_info | reflects);
            self.apply_flow_label(file)?;
        }
        Ok(())
    }

    /// Stores flow information again that the socket had before.
    pub(crate) fn restore_flow_info(&mut self, file: FileId, stored: u32) {
        if let Ok(socket) = self.files.socket(file)
            && socket.options.stored_flow_info() != stored
        {
            socket.options.store_flow_info(stored);
            // A socket that is gone needs no label.
            let _ = self.apply_flow_label(file);
        }
    }

    /// Passes the flow label on to the stack.
    fn apply_flow_label(&mut self, file: FileId) -> Result<(), Errno> {
        let applied = match self.files.socket(file)?.role {
            SocketRole::Udp(_) => self.apply_datagram_options(file),
            SocketRole::Listening(listening) => self.renew_listener_options(file, listening.number),
            SocketRole::Stream(_) | SocketRole::Unconnected { .. } => self.apply_options(file),
        };
        self.publish_shared(file);
        applied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flow_info_needs_all_bytes_and_no_version() {
        assert_eq!(flow_info_cmsg(&[0, 1, 2, 3], 0), Ok(0x0001_0203));
        assert_eq!(flow_info_cmsg(&[0x60, 1, 2, 3], 0), Ok(0x0001_0203));
        assert_eq!(flow_info_cmsg(&[0x60, 1, 2, 3], 7), Err(Errno::INVAL));
        assert_eq!(flow_info_cmsg(&[0, 1, 2], 0), Err(Errno::INVAL));
        assert_eq!(received_flow_info(0, 0), None);
        assert_eq!(received_flow_info(0x12, 0x3_4567), Some([0x01, 0x23, 0x45, 0x67]));
    }
}
