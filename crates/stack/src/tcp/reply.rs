//! Segments that are sent at once and outside of a connection's transmit path: answers without a connection,
//! RST, probes, TIME-WAIT, cookies.

use super::Tcp;
use super::conn::{Flags, NONE};
use super::cookies::{self, CookieOptions};
use super::demux::FlowKey;
use super::emit::{TxSegment, scaled_window};
use super::input::Segment;
use super::time_wait::TimeWait;
use crate::device::Label;
use crate::ip::{FlowLabel, IpHeader, Network, NextHop, Route};
use crate::tcp::config::EcnMode;
use crate::wire::checksum::Sum;
use crate::wire::protocol;
use crate::wire::tcp::{self, SeqNumber, TcpFlags, TcpHeader, TcpOptions, Timestamps};

/// Contents of a SYN+ACK with a cookie: the connection that is created from it begins with these values.
pub(crate) struct CookieSynAck {
    pub sequence: SeqNumber,
    pub mss: u16,
    pub window: u16,
    pub scale: u8,
}

/// Fields of the IP header, and the label, that depend on the socket of a segment.
struct IpFields {
    tos: u8,
    hop_limit: u8,
    flow_label: FlowLabel,
    label: Label,
}

impl Tcp {
    /// Sends a segment without payload. If the device has no room the segment is lost like any other packet:
    /// all of these segments are sent again when they are needed again.
    fn send_control(
        &mut self,
        net: &mut Network,
        hop: &NextHop,
        key: &FlowKey,
        header: &TcpHeader,
        options: &TcpOptions,
        fields: &IpFields,
    ) {
        let ip = IpHeader {
            src: key.local.ip(),
            dst: key.remote.ip(),
            protocol: protocol::TCP,
            tos: fields.tos,
            hop_limit: fields.hop_limit,
            dont_fragment: true,
            flow_label: 0,
            label: fields.label,
        };
        let ip = net.with_flow_label(ip, fields.flow_label, (key.local_port, key.remote_port));
        let len = TcpHeader::LEN + options.encoded_len();
        let write = |l4: &mut [u8], _| (tcp::emit(header, options, l4), Sum::ZERO);
        if net.send_tcp(self.now, hop, &ip, len, None, write).is_err() {
            self.stats.device_full += 1;
            return;
        }
        self.stats.segments_out += 1;
        if header.flags.contains(TcpFlags::RST) {
            self.stats.resets_out += 1;
        }
    }

    /// Sends a segment without payload over the route to the peer; nothing if there is no route.
    fn send_routed(
        &mut self,
        net: &mut Network,
        key: &FlowKey,
        header: &TcpHeader,
        options: &TcpOptions,
        fields: &IpFields,
    ) {
        if let Ok(route) = net.route(self.now, key.remote.ip(), Some(key.local.ip())) {
            self.send_control(net, &route.hop, key, header, options, fields);
        }
    }

    /// Returns the fields of a segment that does not follow the options of a socket.
    fn fields_without_socket(&self, label: Label) -> IpFields {
        IpFields { tos: 0, hop_limit: self.config.hop_limit, flow_label: FlowLabel::Auto, label }
    }

    fn header(key: &FlowKey, seq: SeqNumber, ack: SeqNumber, flags: TcpFlags, window: u16) -> TcpHeader {
        TcpHeader {
            src_port: key.local_port,
            dst_port: key.remote_port,
            seq,
            ack,
            flags,
            window,
            urg_ptr: 0,
            header_len: 0,
        }
    }

    /// Answers a segment that belongs to no connection with RST (RFC 9293 §3.10.7.1). RST is never answered.
    pub fn send_reset(&mut self, net: &mut Network, seg: &Segment<'_>) {
        if seg.header.flags.contains(TcpFlags::RST) {
            return;
        }
        let header = if seg.header.flags.contains(TcpFlags::ACK) {
            Self::header(&seg.key, seg.header.ack, SeqNumber(0), TcpFlags::RST, 0)
        } else {
            Self::header(&seg.key, SeqNumber(0), seg.end(), TcpFlags::RST | TcpFlags::ACK, 0)
        };
        let fields = self.fields_without_socket(Label::NONE);
        self.send_routed(net, &seg.key, &header, &TcpOptions::default(), &fields);
    }

    /// Sends a segment without payload for a connection, at sequence number `seq`.
    fn send_conn_control(&mut self, net: &mut Network, idx: u32, seq: SeqNumber, flags: TcpFlags) {
        let key = self.key(idx);
        let options = self.options_for(idx, &TxSegment { seq, len: 0, flags, gso_size: None, ect: false });
        let (window, edge) = if flags.contains(TcpFlags::RST) {
            // What was advertised last, as on Linux.
            let c = &self.conns[idx];
            (scaled_window(c, c.rcv_wnd()).0, c.rcv_edge)
        } else {
            self.window_field(idx, false)
        };
        let c = &mut self.conns[idx];
        if c.active != NONE {
            // The options have reported the duplicate.
            self.active[c.active].dsack = None;
        }
        c.rcv_edge = edge;
        let header = Self::header(&key, seq, c.rcv_nxt, flags, window);
        let hop = c.hop;
        let label = self.label_if_carried(net, idx);
        let (tos, hop_limit) = self.tos_and_hop_limit(&self.conns[idx]);
        let flow_label = self.flow_label(&self.conns[idx]);
        let fields = IpFields { tos, hop_limit, flow_label, label };
        if net.hop_is_current(&hop) {
            self.send_control(net, &hop, &key, &header, &options, &fields);
        } else {
            self.send_routed(net, &key, &header, &options, &fields);
        }
    }

    /// Sends RST for a connection that is given up.
    pub fn send_active_reset(&mut self, net: &mut Network, idx: u32) {
        let seq = self.conns[idx].snd_nxt;
        self.send_conn_control(net, idx, seq, TcpFlags::RST | TcpFlags::ACK);
    }

    /// Sends an acknowledgement that cannot wait for the end of the turn, because the connection may end
    /// before that.
    pub fn send_ack_at_once(&mut self, net: &mut Network, idx: u32) {
        if self.conns[idx].state.is_synchronized() && self.send_ack(net, idx).is_ok() {
            return;
        }
        let seq = self.conns[idx].snd_nxt;
        self.send_conn_control(net, idx, seq, TcpFlags::ACK);
        let c = &mut self.conns[idx];
        c.rcv_wup = c.rcv_nxt;
        c.flags.clear(Flags::ACK_NOW | Flags::ACK_DELAYED);
    }

    /// Sends a segment below the window, which the peer must answer: keepalive and zero window probe (RFC
    /// 1122 §4.2.3.6 and §4.2.2.17, both as Linux sends them).
    pub fn xmit_probe(&mut self, net: &mut Network, idx: u32) {
        let seq = self.conns[idx].snd_una - 1;
        self.send_conn_control(net, idx, seq, TcpFlags::ACK);
    }

    /// Sends an acknowledgement from TIME-WAIT.
    pub fn send_time_wait_ack(&mut self, net: &mut Network, entry: &TimeWait, seg: &Segment<'_>) {
        let value = self.now_ms().wrapping_add(entry.ts_offset);
        let options = TcpOptions {
            timestamps: entry.timestamps().then_some(Timestamps { tsval: value, tsecr: entry.ts_recent }),
            ..TcpOptions::default()
        };
        let header = Self::header(&seg.key, entry.snd_nxt, entry.rcv_nxt, TcpFlags::ACK, entry.window);
        // As on Linux (`tw_tos`), where the hop limit is the default one.
        let label = Label::new(None, entry.priority());
        let fields = IpFields { tos: entry.tos(), ..self.fields_without_socket(label) };
        self.send_routed(net, &seg.key, &header, &options, &fields);
    }

    /// Sends a SYN+ACK without keeping state: the cookie and the timestamp encode the connection.
    pub fn send_cookie_synack(
        &mut self,
        net: &mut Network,
        route: &Route,
        seg: &Segment<'_>,
        peer: &TcpOptions,
        offer: &CookieSynAck,
    ) {
        let config = &self.config;
        let timestamps = peer.timestamps.filter(|_| config.timestamps);
        let ecn_setup = TcpFlags::SYN | TcpFlags::ECE | TcpFlags::CWR;
        // Without timestamps there is no place to encode these options.
        let cookie_options = CookieOptions {
            mss: offer.mss,
            window_scale: peer.window_scale.filter(|_| config.window_scaling && timestamps.is_some()),
            sack: peer.sack_permitted && config.sack && timestamps.is_some(),
            ecn: config.ecn != EcnMode::Off && seg.header.flags.contains(ecn_setup) && timestamps.is_some(),
        };
        let offset = self.secrets.timestamp_offset(seg.key.local, seg.key.remote);
        let value = cookies::encode_timestamp(self.now_ms(), &cookie_options).wrapping_add(offset);
        let options = TcpOptions {
            mss: Some(offer.mss),
            window_scale: cookie_options.window_scale.map(|_| offer.scale),
            sack_permitted: cookie_options.sack,
            timestamps: timestamps.map(|ts| Timestamps { tsval: value, tsecr: ts.tsval }),
            ..TcpOptions::default()
        };
        let mut flags = TcpFlags::SYN | TcpFlags::ACK;
        if cookie_options.ecn {
            flags |= TcpFlags::ECE;
        }
        let header = Self::header(&seg.key, offer.sequence, seg.header.seq + 1, flags, offer.window);
        let fields = self.fields_without_socket(Label::NONE);
        self.send_control(net, &route.hop, &seg.key, &header, &options, &fields);
    }
}
