//! Transmit timestamps (`SO_TIMESTAMPING`, Linux's `Documentation/networking/timestamping.rst`): the stack
//! says when it began to send a message, when the device had it and, on a connection, when the peer has
//! acknowledged it. Each is an entry of the error queue. As for `MSG_ZEROCOPY`, each process that shares a
//! socket has the timestamps of its own messages.

use crate::datagram::ReceivedMessage;
use crate::fd_table::FileId;
use crate::file::{SocketRole, UdpSendState};
use crate::options::timestamps::{
    OPT_CMSG, OPT_ID, OPT_ID_TCP, OPT_TSONLY, SOFTWARE, TX_ACK, TX_COMPLETION, TX_HARDWARE, TX_SCHED,
    TX_SOFTWARE, time_of,
};
use crate::process::ProcessState;
use crate::sockaddr::{self, Family};
use crate::socket_cmsgs::SocketCmsgs;
use crate::user_memory::{UserSliceMut, efault};
use core::ffi::c_int;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel::Conn;
use ginnel::channel::scatter;
use rustix::io::Errno;
use std::collections::VecDeque;

/// `SO_EE_ORIGIN_TIMESTAMPING`.
const ORIGIN_TIMESTAMPING: u8 = 4;
/// `SO_EE_ORIGIN_TXTIME` and `SO_EE_CODE_TXTIME_INVALID_PARAM`.
const ORIGIN_TXTIME: u8 = 6;
const CODE_INVALID_PARAM: u8 = 1;
/// Flags that ask for timestamps of datagrams.
const DATAGRAM_FLAGS: u32 = TX_HARDWARE | TX_SOFTWARE | TX_SCHED | TX_COMPLETION;
/// Bytes that the kernel charges for an entry besides its packet (`struct sk_buff` and its smallest buffer).
const ENTRY_BYTES: usize = 768;

/// The event whose time a timestamp has (`SCM_TSTAMP_…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StampKind {
    Sent = 0,
    Scheduled = 1,
    Acked = 2,
    /// A datagram was dropped because its time had passed. It has no time, but that of the datagram.
    Late = 3,
}

/// A copy of a packet that was sent.
#[derive(Clone, Debug)]
pub(crate) struct SentPacket {
    pub source: IpAddr,
    pub destination: IpAddr,
    /// The packet with its headers.
    pub bytes: Vec<u8>,
}

/// A timestamp in the error queue.
#[derive(Clone, Debug)]
struct TxStamp {
    /// The time of the event, or of the datagram that was late.
    at: Duration,
    kind: StampKind,
    id: u32,
    packet: Option<SentPacket>,
}

impl TxStamp {
    /// Returns how many bytes of the receive buffer the entry takes.
    fn charge(&self) -> usize {
        ENTRY_BYTES + self.packet.as_ref().map_or(0, |packet| packet.bytes.len())
    }

    /// Returns `struct sock_extended_err`, and the address of the sender of the packet, if it is known.
    fn sock_extended_err(&self, family: Family, sender: Option<IpAddr>) -> Vec<u8> {
        if self.kind == StampKind::Late {
            return self.late_err(family, sender);
        }
        let mut out = Errno::NOMSG.raw_os_error().to_ne_bytes().to_vec();
        out.extend([ORIGIN_TIMESTAMPING, 0, 0, 0]);
        out.extend((self.kind as u32).to_ne_bytes());
        out.extend(self.id.to_ne_bytes());
        Self::with_sender(out, family, sender)
    }

    /// Returns `struct sock_extended_err` of a datagram that was late (`report_sock_error` of `sch_etf`).
    fn late_err(&self, family: Family, sender: Option<IpAddr>) -> Vec<u8> {
        // Cannot truncate: it was made of 64 bits.
        let at = self.at.as_nanos() as u64;
        let mut out = Errno::INVAL.raw_os_error().to_ne_bytes().to_vec();
        out.extend([ORIGIN_TXTIME, 0, CODE_INVALID_PARAM, 0]);
        out.extend((at as u32).to_ne_bytes());
        out.extend(((at >> 32) as u32).to_ne_bytes());
        Self::with_sender(out, family, sender)
    }

    fn with_sender(mut out: Vec<u8>, family: Family, sender: Option<IpAddr>) -> Vec<u8> {
        match sender {
            Some(sender) => out.extend(sockaddr::encode(SocketAddr::new(sender, 0), family).bytes()),
            None => {
                let address_len = sockaddr::encode(family.unspecified(), family).bytes().len();
                out.resize(out.len() + address_len, 0);
            }
        }
        out
    }
}

/// Which timestamps of one datagram the program wants, and its number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StampRequest {
    flags: u32,
    id: u32,
    /// The number was the next one of the socket.
    is_counted: bool,
}

/// Tells which timestamps the next datagram asks for.
#[derive(Clone, Copy, Debug, Default)]
enum NextDatagram {
    #[default]
    AsSocket,
    /// Control messages of the datagram.
    Cmsgs(SocketCmsgs),
    /// The request that was made when the datagram was begun (`MSG_MORE`).
    Corked(Option<StampRequest>),
}

/// Writes to a stream whose times are awaited. The stack limits their number.
#[derive(Clone, Debug, Default)]
struct StreamStamps {
    /// Positions after the last byte of each write, and its flags.
    awaited: VecDeque<(u64, u32)>,
    /// The position whose byte has the number 0.
    base: u64,
}

impl StreamStamps {
    /// Returns which of the times in `kinds` the oldest write up to `end` that waits for one of them asked
    /// for. They are not awaited any more.
    fn take_asked(&mut self, end: u64, kinds: u32) -> u32 {
        let awaited = self.awaited.iter_mut().find(|(of, flags)| *of == end && flags & kinds != 0);
        let Some((_, flags)) = awaited else { return 0 };
        let asked = *flags & kinds;
        *flags &= !kinds;
        asked
    }
}

/// The transmit timestamps of a socket.
#[derive(Clone, Debug, Default)]
pub(crate) struct TxStamps {
    /// The socket asks for timestamps of all its messages.
    pub is_on: bool,
    next_datagram: NextDatagram,
    /// The number of the next datagram (`sk_tskey`).
    next_id: u32,
    stream: StreamStamps,
    entries: VecDeque<TxStamp>,
    /// Bytes of the receive buffer that the entries take.
    charged: usize,
}

impl TxStamps {
    /// Returns whether the next datagram may have timestamps.
    pub fn concern_next(&self) -> bool {
        self.is_on || !matches!(self.next_datagram, NextDatagram::AsSocket)
    }

    /// Forgets the times that are awaited of a connection which is gone.
    pub fn forget_awaited(&mut self) {
        self.stream.awaited.clear();
    }

    /// Forgets what belongs to the parent, in a child: the times that it awaits, and those in its error
    /// queue.
    pub fn reset_in_child(&mut self) {
        self.stream.awaited.clear();
        self.entries.clear();
        self.charged = 0;
    }

    /// Queues a timestamp, unless `space` bytes of receive buffer are in use (`sock_queue_err_skb`).
    // limit: transmit timestamps of a socket
    fn push(&mut self, stamp: TxStamp, space: usize) {
        if self.charged + stamp.charge() < space {
            self.charged += stamp.charge();
            self.entries.push_back(stamp);
        }
    }

    fn pop(&mut self) -> Option<TxStamp> {
        let stamp = self.entries.pop_front()?;
        self.charged -= stamp.charge();
        Some(stamp)
    }
}

impl ProcessState {
    /// Numbers datagrams from 0 on, and bytes from the first one that is not acknowledged, or with
    /// `OPT_ID_TCP` not written.
    #[cold]
    pub(crate) fn restart_stamp_ids(&mut self, file: FileId) {
        let base = match self.files.stream(file).map(|stream| stream.conn) {
            Some(conn) if self.has_timestamping(file, OPT_ID_TCP) => self.client.written(conn).ok(),
            Some(conn) => self.acked(conn),
            None => Some(0),
        };
        let Ok(socket) = self.files.socket(file) else { return };
        let stamps = &mut socket.udp_send.get_or_insert_default().tx_stamps;
        (stamps.next_id, stamps.stream.base) = (0, base.unwrap_or(0));
    }

    fn has_timestamping(&mut self, file: FileId, flag: u32) -> bool {
        self.files.socket(file).is_ok_and(|socket| socket.options.timestamps().has(flag))
    }

    /// Records whether sends on a connection ask for timestamps.
    #[cold]
    pub(crate) fn update_end_work(&mut self, file: FileId) {
        let Ok(socket) = self.files.socket(file) else { return };
        let is_stamped = socket.options.timestamps().tx_flags() != 0;
        if let SocketRole::Stream(stream) = &mut socket.role {
            stream.has_end_work = stream.msg_more || is_stamped;
        }
    }

    /// Records the control messages of the next write to a connection.
    #[cold]
    pub(crate) fn set_stream_cmsgs(&mut self, file: FileId, cmsgs: SocketCmsgs) {
        let Ok(socket) = self.files.socket(file) else { return };
        if let SocketRole::Stream(stream) = &mut socket.role {
            stream.has_end_work = true;
            let stamps = &mut socket.udp_send.get_or_insert_default().tx_stamps;
            stamps.next_datagram = NextDatagram::Cmsgs(cmsgs);
        }
    }

    /// Forgets the control messages of a write that had no use for them.
    pub(crate) fn drop_stream_cmsgs(&mut self, file: FileId) {
        if let Ok(socket) = self.files.socket(file)
            && let Some(udp_send) = &mut socket.udp_send
        {
            udp_send.tx_stamps.next_datagram = NextDatagram::AsSocket;
        }
    }

    /// Asks for the timestamps of the last write to a connection, if the program wants them and bytes were
    /// written.
    #[cold]
    pub(crate) fn stamp_stream(&mut self, file: FileId, has_written: bool) {
        let Ok(socket) = self.files.socket(file) else { return };
        let socket_flags = socket.options.timestamps().tx_flags();
        let SocketRole::Stream(stream) = socket.role else { return };
        let cmsgs = match &mut socket.udp_send {
            Some(udp_send) => core::mem::take(&mut udp_send.tx_stamps.next_datagram),
            None => NextDatagram::AsSocket,
        };
        let flags = match cmsgs {
            NextDatagram::Cmsgs(SocketCmsgs { tx_flags: Some(flags), .. }) => flags,
            _ => socket_flags,
        };
        let (sent, acked) = (flags & (TX_SCHED | TX_SOFTWARE) != 0, flags & TX_ACK != 0);
        if !has_written || !(sent || acked) {
            return;
        }
        let Ok(end) = self.client.written(stream.conn) else { return };
        socket.udp_send.get_or_insert_default().tx_stamps.stream.awaited.push_back((end, flags));
        let mut answer = self.client.await_stamps(stream.conn, end, sent, acked);
        if answer == Ok(false) {
            // The times of earlier writes, which nobody has fetched yet, may take the space.
            self.take_stream_stamps(file, stream.conn);
            answer = self.client.await_stamps(stream.conn, end, sent, acked);
        }
        // Beyond the limit, and of a connection that is gone, there are no times.
        if answer != Ok(true)
            && let Ok(socket) = self.files.socket(file)
            && let Some(udp_send) = &mut socket.udp_send
        {
            udp_send.tx_stamps.stream.awaited.pop_back();
        }
    }

    /// Takes the times that the stack has taken of a connection, and queues them.
    #[cold]
    pub(crate) fn take_stream_stamps(&mut self, file: FileId, conn: Conn) {
        let Ok(socket) = self.files.socket(file) else { return };
        let (timestamps, space) = (socket.options.timestamps(), socket.options.recv_buffer_bytes());
        let Some(udp_send) = &mut socket.udp_send else { return };
        let stamps = &mut udp_send.tx_stamps;
        if stamps.stream.awaited.is_empty() {
            return;
        }
        for taken in self.client.take_stamps(conn).unwrap_or_default() {
            let number = (taken.end - 1).wrapping_sub(stamps.stream.base) as u32;
            let id = if timestamps.has(OPT_ID) { number } else { 0 };
            let all: &[_] = match taken.is_acked {
                true => &[(TX_ACK, StampKind::Acked)],
                false => &[(TX_SCHED, StampKind::Scheduled), (TX_SOFTWARE, StampKind::Sent)],
            };
            let asked =
                stamps.stream.take_asked(taken.end, all.iter().fold(0, |bits, (flag, _)| bits | flag));
            for (_, kind) in all.iter().filter(|(flag, _)| asked & flag != 0) {
                let (at, kind) = (time_of(Some(taken.at_us)), *kind);
                stamps.push(TxStamp { at, kind, id, packet: None }, space);
            }
        }
        let is_awaited = |(_, flags): &(u64, u32)| flags & (TX_SCHED | TX_SOFTWARE | TX_ACK) != 0;
        stamps.stream.awaited.retain(is_awaited);
        self.report_stamps(file);
    }
}

impl ProcessState {
    /// Records the control messages of the datagram that is sent next.
    #[cold]
    pub(crate) fn set_datagram_cmsgs(&mut self, file: FileId, cmsgs: SocketCmsgs) {
        self.set_next_datagram(file, NextDatagram::Cmsgs(cmsgs));
    }

    /// Records the request of a datagram that was begun earlier and is sent next.
    pub(crate) fn set_corked_stamp(&mut self, file: FileId, stamp: Option<StampRequest>) {
        self.set_next_datagram(file, NextDatagram::Corked(stamp));
    }

    fn set_next_datagram(&mut self, file: FileId, next: NextDatagram) {
        let Ok(socket) = self.files.socket(file) else { return };
        let udp_send = socket.udp_send.get_or_insert_default();
        udp_send.tx_stamps.next_datagram = next;
        udp_send.update_checks();
    }

    /// Takes what the next datagram asks for, and numbers it.
    pub(crate) fn take_stamp_request(&mut self, file: FileId) -> Option<StampRequest> {
        let socket = self.files.socket(file).ok()?;
        let timestamps = socket.options.timestamps();
        let udp_send = socket.udp_send.as_mut().filter(|udp_send| udp_send.checks_sends)?;
        let next = core::mem::take(&mut udp_send.tx_stamps.next_datagram);
        udp_send.update_checks();
        let cmsgs = match next {
            NextDatagram::AsSocket => SocketCmsgs::default(),
            NextDatagram::Cmsgs(cmsgs) => cmsgs,
            NextDatagram::Corked(stamp) => return stamp,
        };
        let flags = cmsgs.tx_flags.unwrap_or(timestamps.tx_flags());
        if flags & DATAGRAM_FLAGS == 0 {
            return None;
        }
        if !timestamps.has(OPT_ID) {
            return Some(StampRequest { flags, id: 0, is_counted: false });
        }
        let next_id = &mut udp_send.tx_stamps.next_id;
        let id = cmsgs.tx_id.unwrap_or(*next_id);
        let is_counted = cmsgs.tx_id.is_none();
        *next_id = next_id.wrapping_add(is_counted.into());
        Some(StampRequest { flags, id, is_counted })
    }

    /// Gives back the number of a datagram that was not sent.
    pub(crate) fn return_stamp_request(&mut self, file: FileId, stamp: StampRequest) {
        if stamp.is_counted
            && let Ok(socket) = self.files.socket(file)
            && let Some(udp_send) = &mut socket.udp_send
        {
            udp_send.tx_stamps.next_id = udp_send.tx_stamps.next_id.wrapping_sub(1);
        }
    }

    /// Queues the timestamps of a datagram. `times` has when the stack began to send it and when the device
    /// had it: the lowest 32 bits of the microseconds since 1970. `packet` returns a copy of the packet.
    pub(crate) fn queue_stamps(
        &mut self,
        file: FileId,
        stamp: StampRequest,
        (scheduled, sent): (u32, u32),
        packet: impl FnOnce() -> SentPacket,
    ) {
        let Ok(socket) = self.files.socket(file) else { return };
        let (timestamps, space) = (socket.options.timestamps(), socket.options.recv_buffer_bytes());
        let packet = if timestamps.has(OPT_TSONLY) { None } else { Some(packet()) };
        let stamps = &mut socket.udp_send.get_or_insert_default().tx_stamps;
        // As on Linux, the number is reported only if the socket still wants it.
        let id = if timestamps.has(OPT_ID) { stamp.id } else { 0 };
        for (flag, kind, at) in
            [(TX_SCHED, StampKind::Scheduled, scheduled), (TX_SOFTWARE, StampKind::Sent, sent)]
        {
            if stamp.flags & flag != 0 {
                stamps.push(TxStamp { at: time_of(Some(at)), kind, id, packet: packet.clone() }, space);
            }
        }
        self.report_stamps(file);
    }

    /// Queues the report that a datagram was dropped because its time `at`, in ns, had passed.
    #[cold]
    pub(crate) fn queue_late_datagram(&mut self, file: FileId, at: u64, packet: SentPacket) {
        let Ok(socket) = self.files.socket(file) else { return };
        let space = socket.options.recv_buffer_bytes();
        let stamps = &mut socket.udp_send.get_or_insert_default().tx_stamps;
        let (at, kind) = (Duration::from_nanos(at), StampKind::Late);
        stamps.push(TxStamp { at, kind, id: 0, packet: Some(packet) }, space);
        self.report_stamps(file);
    }

    /// Tells the program whether timestamps are in the error queue.
    fn report_stamps(&mut self, file: FileId) {
        let Ok(socket) = self.files.socket(file) else { return };
        let has_stamps = socket.udp_send.as_ref().is_some_and(|of| !of.tx_stamps.entries.is_empty());
        socket.options.zerocopy.set_has_stamps(has_stamps);
        if has_stamps {
            self.wake(file, libc::POLLERR);
        }
    }

    /// Takes the oldest entry that the process itself has put in the error queue of a socket: a transmit
    /// timestamp, or else the completion of calls with `MSG_ZEROCOPY`.
    ///
    /// # Errors
    /// `EAGAIN` if there is none.
    pub(crate) fn recv_local_error(
        &mut self,
        file: FileId,
        buffers: &mut [UserSliceMut<'_>],
        control_space: usize,
    ) -> Result<ReceivedMessage, Errno> {
        let socket = self.files.socket(file)?;
        let has_stream = |udp_send: &UdpSendState| !udp_send.tx_stamps.stream.awaited.is_empty();
        if socket.udp_send.as_deref().is_some_and(has_stream) {
            self.process_events();
        }
        let socket = self.files.socket(file)?;
        let (family, timestamps) = (socket.family, socket.options.timestamps());
        let stamps = socket.udp_send.as_mut().map(|udp_send| &mut udp_send.tx_stamps);
        let Some((stamp, has_more)) =
            stamps.and_then(|stamps| stamps.pop().map(|stamp| (stamp, !stamps.entries.is_empty())))
        else {
            return self.recv_completion(file, control_space);
        };
        socket.options.zerocopy.set_has_stamps(has_more);
        let reports_info = |name| socket.options.is_on(name);
        let reports_info = match stamp.packet.as_ref().map(|packet| packet.source.is_ipv4()) {
            Some(true) => reports_info("IP_PKTINFO"),
            Some(false) => reports_info("IPV6_RECVPKTINFO"),
            None => false,
        };
        let bytes = stamp.packet.as_ref().map_or(&[][..], |packet| &packet.bytes);
        let count = scatter(bytes, buffers).map_err(efault)?;
        let mut received = ReceivedMessage::from_stream(count);
        received.flags = libc::MSG_ERRQUEUE | if count < bytes.len() { libc::MSG_TRUNC } else { 0 };
        let control = received.control_with_room(control_space);
        let has_time = stamp.kind != StampKind::Late;
        if has_time && timestamps.has_variant() {
            let (name, value) = timestamps.timestamp_cmsg_at(stamp.at);
            control.put(libc::SOL_SOCKET, name, &value);
        }
        if has_time && timestamps.has(SOFTWARE) {
            let (name, value) = timestamps.timestamping_cmsg_at(stamp.at);
            control.put(libc::SOL_SOCKET, name, &value);
        }
        // Linux reports where a packet over IPv4 came from only if the program asks for it.
        let packet = stamp
            .packet
            .as_ref()
            .filter(|packet| family == Family::V6 || packet.source.is_ipv4() && timestamps.has(OPT_CMSG));
        if let Some(packet) = packet.filter(|_| reports_info) {
            control.put_sent_info(packet.source, packet.destination);
        }
        let (level, cmsg_type): (c_int, c_int) = match family {
            Family::V4 => (libc::IPPROTO_IP, libc::IP_RECVERR),
            Family::V6 => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
        };
        let sender = packet.map(|packet| packet.source);
        control.put(level, cmsg_type, &stamp.sock_extended_err(family, sender));
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_write_up_to_a_position_gets_its_time() {
        let awaited = [(10, TX_SOFTWARE), (10, TX_SCHED | TX_ACK), (20, TX_ACK)].into();
        let mut stamps = StreamStamps { awaited, base: 0 };
        let (sent, acked) = (TX_SCHED | TX_SOFTWARE, TX_ACK);
        let taken = [(10, sent), (10, acked), (10, sent), (10, sent), (20, acked)]
            .map(|(end, kinds)| stamps.take_asked(end, kinds));
        assert_eq!(taken, [TX_SOFTWARE, TX_ACK, TX_SCHED, 0, TX_ACK]);
        assert!(stamps.awaited.iter().all(|(_, flags)| *flags == 0));
    }

    // limit: transmit timestamps of a socket
    #[test]
    fn entries_are_limited_by_the_receive_buffer() {
        let stamp = || TxStamp { at: Duration::ZERO, kind: StampKind::Sent, id: 0, packet: None };
        let mut stamps = TxStamps::default();
        (0..1000).for_each(|_| stamps.push(stamp(), 10 * ENTRY_BYTES));
        assert_eq!(stamps.entries.len(), 9);
        while stamps.pop().is_some() {}
        assert_eq!(stamps.charged, 0);
    }
}
