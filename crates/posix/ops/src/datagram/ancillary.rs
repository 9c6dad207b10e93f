//! Data that come with a datagram besides its payload: the sender's address, and control messages
//! (`<bits/socket.h>`).

use crate::flow_labels::{flow_info_cmsg, received_flow_info};
use crate::options::timestamps::TimestampOptions;
use crate::options::{SocketOptionState, TCP_INQ};
use crate::sockaddr::{self, Family, SockaddrBytes};
use crate::socket_cmsgs::SocketCmsgs;
use crate::unordered::{GINNEL_STREAM_OFFSET, SOL_GINNEL};
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ginnel::channel::ReceivedDatagram;
use rustix::io::Errno;

/// Space for all control messages that one datagram can have.
const CONTROL_BYTES: usize = 256;
/// The option and control message `IPV6_FLOWINFO`, for which libc has no name.
const FLOWINFO: c_int = 11;
/// Bytes of `cmsg_len`, `cmsg_level` and `cmsg_type`.
const CMSG_HEADER_BYTES: usize = 16;
/// The protocol of an IP packet, for which libc has no name.
const IP_PROTOCOL: c_int = 52;

/// Control messages, as the program receives them.
#[derive(Clone, Copy, Debug)]
pub struct ControlMessages {
    bytes: [u8; CONTROL_BYTES],
    len: usize,
    space: usize,
    truncated: bool,
}

impl ControlMessages {
    pub(super) fn none() -> Self {
        Self { bytes: [0; CONTROL_BYTES], len: 0, space: 0, truncated: false }
    }

    /// Returns the control messages as bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the buffer, limited to the program's space, for the kernel to write to.
    pub(super) fn buffer(&mut self, space: usize) -> &mut [u8] {
        &mut self.bytes[..space.min(CONTROL_BYTES)]
    }

    pub(super) fn set_len(&mut self, len: usize) {
        self.len = len.min(CONTROL_BYTES);
    }

    /// Returns whether the space was too small for all control messages (`MSG_CTRUNC`).
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// Appends the addresses of a packet that was sent (`IP_PKTINFO`, `IPV6_PKTINFO`).
    pub(crate) fn put_sent_info(&mut self, source: IpAddr, destination: IpAddr) {
        let index = ifindex_of(destination);
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let info = [index, source.octets(), destination.octets()].concat();
                self.put(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
            }
            (_, IpAddr::V6(destination)) => {
                let info = [&destination.octets()[..], &index].concat();
                self.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
            }
            _ => {}
        }
    }

    /// Appends a control message (`put_cmsg`).
    pub(crate) fn put(&mut self, level: c_int, cmsg_type: c_int, value: &[u8]) {
        let total = CMSG_HEADER_BYTES + value.len();
        let space = self.space.min(CONTROL_BYTES).saturating_sub(self.len);
        if space < CMSG_HEADER_BYTES {
            self.truncated = true;
            return;
        }
        let len = total.min(space);
        self.truncated |= len < total;
        let dest = &mut self.bytes[self.len..];
        dest[..8].copy_from_slice(&len.to_ne_bytes());
        dest[8..12].copy_from_slice(&level.to_ne_bytes());
        dest[12..16].copy_from_slice(&cmsg_type.to_ne_bytes());
        dest[CMSG_HEADER_BYTES..len].copy_from_slice(&value[..len - CMSG_HEADER_BYTES]);
        // The next control message is aligned to 8 bytes.
        self.len += total.next_multiple_of(8).min(space);
    }
}

/// The result of `recvmsg`.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedMessage {
    /// How many bytes were copied, or with `MSG_TRUNC` the length of the datagram.
    pub count: usize,
    /// The sender's address; `None` for a stream.
    pub from: Option<SockaddrBytes>,
    /// The control messages.
    pub control: ControlMessages,
    /// The value of `msg_flags`.
    pub flags: c_int,
}

impl ReceivedMessage {
    pub(crate) fn from_stream(count: usize) -> Self {
        Self { count, from: None, control: ControlMessages::none(), flags: 0 }
    }

    pub(super) fn from_datagram(
        datagram: &ReceivedDatagram,
        space: usize,
        flags: c_int,
        family: Family,
    ) -> Self {
        let is_truncated = super::is_truncated(datagram, space);
        Self {
            count: if flags & libc::MSG_TRUNC != 0 { datagram.len } else { datagram.len.min(space) },
            from: Some(sockaddr::encode(datagram.from, family)),
            control: ControlMessages::none(),
            flags: if is_truncated { libc::MSG_TRUNC } else { 0 },
        }
    }

    /// Appends the number of bytes that are waiting (`TCP_INQ`).
    pub(super) fn put_inq(&mut self, bytes: c_int, space: usize) {
        self.control_with_room(space).put(libc::IPPROTO_TCP, TCP_INQ, &bytes.to_ne_bytes());
    }

    /// Appends the time at which the last byte arrived, if it is known (`tcp_recv_timestamp`).
    pub(super) fn put_arrival_time(
        &mut self,
        timestamps: TimestampOptions,
        arrived_us: Option<u32>,
        space: usize,
    ) {
        if arrived_us.is_none() {
            return;
        }
        let control = self.control_with_room(space);
        if let Some((name, value)) = timestamps.timestamp_cmsg(arrived_us) {
            control.put(libc::SOL_SOCKET, name, &value);
        }
        if let Some((name, value)) = timestamps.timestamping_cmsg(arrived_us) {
            control.put(libc::SOL_SOCKET, name, &value);
        }
    }

    /// Appends the offset of the first byte in the stream.
    pub(crate) fn put_stream_offset(&mut self, offset: u64, space: usize) {
        self.control_with_room(space).put(SOL_GINNEL, GINNEL_STREAM_OFFSET, &offset.to_ne_bytes());
    }

    /// Appends the address that a datagram was sent to (`IP_ORIGDSTADDR`, `IPV6_ORIGDSTADDR`).
    pub(super) fn put_original_destination(&mut self, to: SocketAddr) {
        let (level, kind, family) = match to {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_ORIGDSTADDR, Family::V4),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_ORIGDSTADDR, Family::V6),
        };
        self.control.put(level, kind, sockaddr::encode(to, family).bytes());
    }

    /// Returns the control messages, for which the program has `space` bytes.
    pub(crate) fn control_with_room(&mut self, space: usize) -> &mut ControlMessages {
        self.control.space = space;
        &mut self.control
    }
}

/// Returns the index of the interface at which a datagram for this address arrived: 1 for `lo`, which is the
/// first everywhere, and otherwise 0, because the kernel knows no index for links of the stack.
fn ifindex_of(to: IpAddr) -> [u8; 4] {
    c_int::from(to.is_loopback()).to_ne_bytes()
}

impl SocketOptionState {
    /// Returns whether the program wants to know the address that a datagram was sent to
    /// (`IP_RECVORIGDSTADDR`, `IPV6_RECVORIGDSTADDR`).
    #[inline]
    pub(super) fn reports_destination(&self, to: IpAddr, family: Family) -> bool {
        match to {
            IpAddr::V4(_) => self.is_on("IP_RECVORIGDSTADDR"),
            IpAddr::V6(_) => family == Family::V6 && self.is_on("IPV6_ORIGDSTADDR"),
        }
    }

    /// Appends the control messages that the program has enabled (`ip_cmsg_recv`, `ip6_datagram_recv_ctl`).
    pub(super) fn put_cmsgs(
        &self,
        datagram: &ReceivedDatagram,
        family: Family,
        control: &mut ControlMessages,
    ) {
        let is_enabled = |text| self.is_on(text);
        if let Some((name, value)) = self.timestamp_cmsg(datagram) {
            control.put(libc::SOL_SOCKET, name, &value);
        }
        if let Some((name, value)) = self.timestamping_cmsg(datagram) {
            control.put(libc::SOL_SOCKET, name, &value);
        }
        if datagram.gso_size != 0 {
            let bytes = c_int::from(datagram.gso_size).to_ne_bytes();
            control.put(libc::IPPROTO_UDP, libc::UDP_GRO, &bytes);
        }
        let tclass = c_int::from(datagram.tos);
        match (datagram.to, family) {
            (IpAddr::V4(to), _) => {
                if family == Family::V6 && is_enabled("IPV6_RECVPKTINFO") {
                    let info = [&to.to_ipv6_mapped().octets()[..], &ifindex_of(datagram.to)].concat();
                    control.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
                }
                if is_enabled("IP_PKTINFO") {
                    let info = [ifindex_of(datagram.to), to.octets(), to.octets()].concat();
                    control.put(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
                }
                if is_enabled("IP_RECVTTL") {
                    control.put(
                        libc::IPPROTO_IP,
                        libc::IP_TTL,
                        &c_int::from(datagram.hop_limit).to_ne_bytes(),
                    );
                }
                if is_enabled("IP_RECVTOS") {
                    control.put(libc::IPPROTO_IP, libc::IP_TOS, &[datagram.tos]);
                }
            }
            (IpAddr::V6(to), _) => {
                if is_enabled("IPV6_RECVPKTINFO") {
                    let info = [&to.octets()[..], &ifindex_of(datagram.to)].concat();
                    control.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
                }
                if is_enabled("IPV6_RECVHOPLIMIT") {
                    let hop_limit_bytes = c_int::from(datagram.hop_limit).to_ne_bytes();
                    control.put(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, &hop_limit_bytes);
                }
                if is_enabled("IPV6_RECVTCLASS") {
                    control.put(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &tclass.to_ne_bytes());
                }
                if is_enabled("IPV6_FLOWINFO")
                    && let Some(flow_info) = received_flow_info(datagram.tos, datagram.flow_label)
                {
                    control.put(libc::IPPROTO_IPV6, FLOWINFO, &flow_info);
                }
                // The options of RFC 2292.
                if is_enabled("IPV6_2292PKTINFO") {
                    let info = [&to.octets()[..], &ifindex_of(datagram.to)].concat();
                    control.put(libc::IPPROTO_IPV6, libc::IPV6_2292PKTINFO, &info);
                }
                if is_enabled("IPV6_2292HOPLIMIT") {
                    let hop_limit_bytes = c_int::from(datagram.hop_limit).to_ne_bytes();
                    control.put(libc::IPPROTO_IPV6, libc::IPV6_2292HOPLIMIT, &hop_limit_bytes);
                }
            }
        }
    }
}

/// Iterates over the control messages of `sendmsg`: level, type and value. Ends after `EINVAL`, which stands
/// for a control message that is shorter than its header or reaches beyond the end.
pub(crate) fn cmsgs_of(mut control: &[u8]) -> impl Iterator<Item = Result<(c_int, c_int, &[u8]), Errno>> {
    core::iter::from_fn(move || {
        if control.len() < CMSG_HEADER_BYTES {
            return None;
        }
        let word = |at: usize| c_int::from_ne_bytes(control[at..at + 4].try_into().expect("four bytes"));
        let len = usize::from_ne_bytes(control[..8].try_into().expect("eight bytes"));
        if len < CMSG_HEADER_BYTES || len > control.len() {
            control = &[];
            return Some(Err(Errno::INVAL));
        }
        let cmsg = (word(8), word(12), &control[CMSG_HEADER_BYTES..len]);
        control = control.get(len.next_multiple_of(8)..).unwrap_or_default();
        Some(Ok(cmsg))
    })
}

/// Control messages of `sendmsg`, for one datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SendCmsgs {
    /// The source address.
    pub source: Option<IpAddr>,
    /// Payload bytes of each datagram into which the write is cut.
    pub gso_size: Option<u16>,
    /// The hop limit and type of service, instead of the socket's.
    pub hop_limit: Option<u8>,
    pub tos: Option<u8>,
    /// Flow information, if the control messages have any.
    pub flow_info: Option<u32>,
    /// Control messages of the level `SOL_SOCKET`.
    pub socket: SocketCmsgs,
}

impl SendCmsgs {
    /// Parses control messages (`ip_cmsg_send`, `ip6_datagram_send_ctl`).
    ///
    /// # Errors
    /// `EINVAL` if a control message is malformed or unknown, `EPERM` for a priority or mark that the program
    /// may not send. Those of other levels and for the other version of IP are ignored, except for the source
    /// address. `socket` has the socket's family, and tells whether the transmit timestamps of its datagrams
    /// have numbers, and whether these may have times; `flow_info` is the flow information of the
    /// destination.
    pub fn read(
        control: &[u8],
        v4: bool,
        socket: (Family, bool, bool),
        flow_info: u32,
    ) -> Result<Self, Errno> {
        let mut cmsgs = Self::default();
        for cmsg in cmsgs_of(control) {
            let (level, kind, value) = cmsg?;
            match (level, kind) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info: [u8; 12] = value.try_into().map_err(|_| Errno::INVAL)?;
                    let source = Ipv4Addr::new(info[4], info[5], info[6], info[7]);
                    cmsgs.source = Some(source.into()).filter(|_| !source.is_unspecified());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO | libc::IPV6_2292PKTINFO) => {
                    let info: &[u8; 20] = value.first_chunk().ok_or(Errno::INVAL)?;
                    let octets: [u8; 16] = *info.first_chunk().expect("sixteen bytes");
                    let source = Ipv6Addr::from(octets).to_canonical();
                    cmsgs.source = Some(source).filter(|source| !source.is_unspecified());
                }
                (libc::IPPROTO_IP, libc::IP_TTL) if v4 => {
                    cmsgs.hop_limit = Some(byte_or_default(value, 1)?.ok_or(Errno::INVAL)?);
                }
                (libc::IPPROTO_IP, libc::IP_TOS) if v4 => {
                    cmsgs.tos = match value {
                        [byte] => Some(*byte),
                        _ => Some(byte_or_default(value, 0)?.ok_or(Errno::INVAL)?),
                    };
                }
                // No options, and a protocol that only raw sockets use (`ip_cmsg_send`).
                (libc::IPPROTO_IP, libc::IP_RETOPTS) if v4 && value.is_empty() => {}
                (libc::IPPROTO_IP, IP_PROTOCOL) if v4 => {
                    byte_or_default(value, 1)?.ok_or(Errno::INVAL)?;
                }
                // -1 stands for the socket's value.
                (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT | libc::IPV6_2292HOPLIMIT) if !v4 => {
                    cmsgs.hop_limit = byte_or_default(value, 0)?
                }
                // Here -1 stands for 255.
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) if !v4 => {
                    cmsgs.tos = Some(byte_or_default(value, 0)?.unwrap_or(u8::MAX));
                }
                (libc::IPPROTO_IPV6, FLOWINFO) if !v4 => {
                    let before = cmsgs.flow_info.unwrap_or(flow_info);
                    cmsgs.flow_info = Some(flow_info_cmsg(value, before)?);
                }
                (libc::IPPROTO_IP, _) if !v4 => {}
                (libc::IPPROTO_IPV6, _) if v4 => {}
                (libc::SOL_SOCKET, kind) => cmsgs.socket.read(kind, value, socket)?,
                (libc::IPPROTO_UDP, libc::UDP_SEGMENT) => {
                    let bytes: [u8; 2] = value.try_into().map_err(|_| Errno::INVAL)?;
                    cmsgs.gso_size = Some(u16::from_ne_bytes(bytes));
                }
                (libc::IPPROTO_IP | libc::IPPROTO_IPV6 | libc::IPPROTO_UDP, _) => return Err(Errno::INVAL),
                _ => {}
            }
        }
        Ok(cmsgs)
    }
}

/// Parses an `int` from `min` to 255; `None` stands for -1.
fn byte_or_default(value: &[u8], min: c_int) -> Result<Option<u8>, Errno> {
    let number = c_int::from_ne_bytes(value.try_into().map_err(|_| Errno::INVAL)?);
    match u8::try_from(number) {
        Ok(value) if number >= min => Ok(Some(value)),
        _ if number == -1 => Ok(None),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_are_truncated_at_buffer_end() {
        let mut control = ControlMessages { space: 40, ..ControlMessages::none() };
        control.put(0, 8, &[1; 12]);
        assert_eq!((control.bytes().len(), control.is_truncated()), (32, false));
        control.put(0, 2, &[2; 4]);
        assert_eq!((control.bytes().len(), control.is_truncated()), (32, true), "no space for a header");
        let mut control = ControlMessages { space: 20, ..ControlMessages::none() };
        control.put(0, 8, &[1; 12]);
        assert_eq!((control.bytes()[0], control.bytes().len(), control.is_truncated()), (20, 20, true));
    }

    #[test]
    fn written_control_messages_parse() {
        let read = |control: &[u8]| SendCmsgs::read(control, true, (Family::V4, false, false), 0);
        let mut control = ControlMessages { space: 100, ..ControlMessages::none() };
        control.put(libc::IPPROTO_IP, libc::IP_PKTINFO, &[0, 0, 0, 0, 10, 0, 0, 1, 10, 0, 0, 1]);
        let source = Some(Ipv4Addr::new(10, 0, 0, 1).into());
        assert_eq!(read(control.bytes()), Ok(SendCmsgs { source, ..SendCmsgs::default() }));
        assert_eq!(read(&[]), Ok(SendCmsgs::default()));
        assert_eq!(read(&[255; 32]), Err(Errno::INVAL));
        control.put(77, 1, &[]);
        assert_eq!(read(control.bytes()), Ok(SendCmsgs { source, ..SendCmsgs::default() }));
        control.put(1, 77, &[]);
        assert_eq!(read(control.bytes()), Err(Errno::INVAL));
    }
}
