//! Profiles: values of socket options that few connections change. A connection stores a two-byte id of its
//! profile; equal profiles share one entry.

pub(super) mod image;

use super::config::{CongestionControl, TcpConfig};
use super::fastopen_client::FastOpenState;
use super::filter_table::{FilterId, FilterTable};
use super::port_use::PortSharing;
use super::rate::UNLIMITED;
use crate::device::Label;
use crate::ip::FlowLabel;
use crate::options::SocketOptions;
use core::ops::RangeInclusive;
use core::time::Duration;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Identifies a profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProfileId(u16);

impl ProfileId {
    /// The profile with the values of the configuration.
    pub const DEFAULT: Self = Self(0);

    /// Returns whether the profile has the values of the configuration, except perhaps for
    /// [`Profile::port_sharing`]. Most connections have such a profile, which need not be looked up.
    #[inline(always)]
    pub const fn is_usual(self) -> bool {
        self.0 < USUAL
    }
}

/// Profiles that always exist: the default one, and the one that differs from it in the other value of
/// `SO_REUSEADDR`.
const USUAL: u16 = 2;

/// Largest initial receive window in bytes: the maximum without scaling.
const INITIAL_WINDOW_MAX: u32 = 65_535;

/// Bytes that a receive buffer of the default size takes whether or not the application reads, as Linux's
/// `tcp_rmem` says.
pub const USUAL_RECV_WINDOW_MIN: u32 = 131_072;

/// Values of the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Profile {
    pub recv_buffer_bytes: u32,
    /// Size of the initial receive window in bytes.
    pub recv_window_first: u32,
    /// The size in bytes that the receive window doubles from: that of the initial window, within the 65,535
    /// that a SYN can announce.
    pub recv_window_step: u32,
    /// Smallest shift of a window that can express the receive buffer (RFC 7323 §2.3: at most 14).
    pub recv_window_shift: u8,
    /// Largest size of the send buffer in bytes.
    pub send_buffer_bytes: u32,
    /// Size of the send buffer in bytes before it grows; its largest size if that was requested.
    pub send_buffer_first: u32,
    /// `TCP_NOTSENT_LOWAT` in bytes: the application is notified when fewer than half of it are unsent; 0 if
    /// not set.
    pub notsent_lowat: u32,
    /// `TCP_MAXSEG` in bytes; 0 if not set.
    pub mss: u16,
    pub keep_idle_seconds: u16,
    pub keep_interval_seconds: u16,
    pub keep_count: u8,
    /// `TCP_USER_TIMEOUT` in ms; 0 if not set.
    pub user_timeout_ms: u32,
    pub fin_timeout_seconds: u16,
    pub congestion: CongestionControl,
    /// Type of service without the ECN bits.
    pub tos: u8,
    pub hop_limit: u8,
    /// Flow label of packets over IPv6.
    pub flow_label: FlowLabel,
    /// Priority, 0 … 7, see [`crate::priority`].
    pub priority: u8,
    /// Retransmissions of a SYN that opens a connection.
    pub syn_retries: u8,
    /// Minimum hop limits of segments that are accepted, over IPv4 and over IPv6.
    pub min_hop_limits: [u8; 2],
    /// Options by which the local port is shared with other sockets that are bound, as in
    /// [`SocketOptions`].
    pub port_sharing: PortSharing,
    /// True if high-priority data are delivered before a gap in front of them fills.
    pub unordered: bool,
    /// True if packets over IPv4 have no DF, whatever the route says.
    pub may_fragment: bool,
    /// Records of TCP Fast Open: no option, but rare.
    pub fastopen: FastOpenState,
    /// The filter of the socket: no option, but rare.
    pub filter: FilterId,
    /// Largest pacing rate in bytes per second; unlimited by default.
    pub max_pacing_rate: u64,
    /// True if a value above asks for a flag of the slow path; set by [`ProfileTable`].
    pub has_slow_path: bool,
    /// Retransmission time-out before the first sample.
    rto_initial_ms: u32,
    rto_min_us: u32,
    rto_max_ms: u32,
    /// Longest delay of an acknowledgement that was requested.
    delayed_ack_max_us: u32,
    /// Delay of acknowledgements in effect.
    pub delayed_ack_ms: u32,
}

/// Range of the minimum time-out and of the maximum delay of an acknowledgement (`TCP_RTO_MIN`,
/// `TCP_DELACK_MAX`).
pub(crate) const RTO_MIN_RANGE: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_millis(200);

/// Range of the maximum time-out (`TCP_RTO_MAX_SEC`).
pub(crate) const RTO_MAX_RANGE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(120);

impl Profile {
    pub fn from_config(config: &TcpConfig) -> Self {
        let recv_window_first = config.recv_window_first_bytes.min(config.recv_buffer_bytes);
        Self {
            recv_buffer_bytes: config.recv_buffer_bytes,
            recv_window_first,
            recv_window_step: recv_window_first.min(INITIAL_WINDOW_MAX),
            recv_window_shift: window_shift(config.recv_buffer_bytes),
            send_buffer_bytes: config.send_buffer_bytes,
            send_buffer_first: config.send_buffer_first_bytes.min(config.send_buffer_bytes),
            notsent_lowat: 0,
            mss: 0,
            keep_idle_seconds: config.keepalive_time_seconds as u16,
            keep_interval_seconds: config.keepalive_interval_seconds as u16,
            keep_count: config.keepalive_probes,
            user_timeout_ms: 0,
            fin_timeout_seconds: config.fin_timeout_seconds as u16,
            congestion: config.congestion_control,
            tos: 0,
            hop_limit: config.hop_limit,
            flow_label: FlowLabel::Auto,
            priority: 0,
            syn_retries: config.syn_retries,
            min_hop_limits: [0; 2],
            port_sharing: PortSharing::default(),
            unordered: false,
            may_fragment: false,
            fastopen: FastOpenState::default(),
            filter: FilterId::NONE,
            max_pacing_rate: UNLIMITED,
            has_slow_path: false,
            rto_initial_ms: config.rto_initial_ms,
            rto_min_us: config.rto_min_ms * 1000,
            rto_max_ms: config.rto_max_seconds * 1000,
            delayed_ack_max_us: config.delayed_ack_ms * 1000,
            delayed_ack_ms: config.delayed_ack_ms,
        }
    }

    /// Returns the profile with [`Profile::has_slow_path`] as its other values require.
    fn completed(self) -> Self {
        let has_slow_path = self.notsent_lowat != 0
            || self.max_pacing_rate != UNLIMITED
            || self.congestion == CongestionControl::Bbr;
        Self { has_slow_path, ..self }
    }

    /// Returns the time-out of a first SYN+ACK, in µs.
    #[inline]
    pub fn syn_ack_rto_us(&self) -> u64 {
        u64::from(self.rto_initial_ms.min(self.rto_max_ms)) * 1000
    }

    /// Returns the profile with another filter.
    pub fn with_filter(self, filter: FilterId) -> Self {
        Self { filter, ..self }
    }

    /// Returns the profile with another flow label.
    pub fn with_flow_label(self, flow_label: FlowLabel) -> Self {
        Self { flow_label, ..self }
    }

    /// Returns the time-out before the first sample, in µs.
    #[inline]
    pub fn rto_initial_us(&self) -> u64 {
        u64::from(self.rto_initial_ms) * 1000
    }

    /// Returns the minimum by which the time-out exceeds the round-trip time, in µs.
    #[inline]
    pub fn rto_min_us(&self) -> u32 {
        self.rto_min_us
    }

    /// Returns the maximum time-out, in µs.
    #[inline]
    pub fn rto_max_us(&self) -> u64 {
        u64::from(self.rto_max_ms) * 1000
    }

    /// Sets the size of the receive buffer, which was validated. The initial window is that large, too: after
    /// an explicit size, the window need not be found out by growth.
    pub fn set_recv_buffer(&mut self, bytes: u32) {
        self.recv_buffer_bytes = bytes;
        self.recv_window_first = bytes;
        self.recv_window_step = bytes.min(INITIAL_WINDOW_MAX);
        self.recv_window_shift = window_shift(bytes);
    }

    /// Sets the size of the send buffer, which was validated. The buffer does not grow.
    pub fn set_send_buffer(&mut self, bytes: u32) {
        self.send_buffer_bytes = bytes;
        self.send_buffer_first = bytes;
    }

    /// Returns the size in bytes up to which the receive window grows whether or not the application reads:
    /// twice the initial one, as Linux's `tcp_rmem` has room for twice the initial window by default, and at
    /// least as large as its default, so that an application may wait for a message that long.
    pub fn usual_recv_window(&self) -> u32 {
        self.recv_window_first.saturating_mul(2).max(USUAL_RECV_WINDOW_MIN).min(self.recv_buffer_bytes)
    }

    /// Sets the minimum time-out; `time` is within [`RTO_MIN_RANGE`].
    pub fn set_rto_min(&mut self, time: Duration) {
        self.rto_min_us = time.as_micros() as u32;
        self.update_delayed_ack();
    }

    /// Sets the maximum time-out; `time` is within [`RTO_MAX_RANGE`].
    pub fn set_rto_max(&mut self, time: Duration) {
        self.rto_max_ms = time.as_millis() as u32;
    }

    /// Sets the maximum delay of an acknowledgement; `time` is within [`RTO_MIN_RANGE`]. A delay above that
    /// of the configuration has no effect.
    pub fn set_delayed_ack_max(&mut self, config: &TcpConfig, time: Duration) {
        self.delayed_ack_max_us = (time.as_micros() as u32).min(config.delayed_ack_ms * 1000);
        self.update_delayed_ack();
    }

    /// Updates the delay in effect: a peer with equal options must not mistake a delay for a loss
    /// (`tcp_delack_max`).
    fn update_delayed_ack(&mut self) {
        let ms = self.delayed_ack_max_us.min(self.rto_min_us.max(2000) - 1000) / 1000;
        self.delayed_ack_ms = ms.max(1);
    }

    /// Returns whether [`Profile::with_options`] changes nothing of the default profile, as for most sockets.
    #[inline(always)]
    fn is_default_for(options: &SocketOptions) -> bool {
        // Each option is listed, so that none is forgotten.
        let SocketOptions {
            recv_buffer_bytes,
            send_buffer_bytes,
            mss,
            nodelay: _,
            keepalive: _,
            ack_events: _,
            tos,
            hop_limit,
            min_ttl,
            min_hop_count,
            rto_min,
            rto_max,
            delayed_ack_max,
            save_syn: _,
            priority,
            unordered,
            port_sharing,
            defer_accept: _,
            may_fragment,
            fastopen_queue: _,
            fastopen_keys: _,
            fastopen_no_cookie: _,
            flow_label,
            fastopen_connect: _,
        } = options;
        let numbers = tos | min_ttl | min_hop_count | priority | port_sharing.bits();
        let has_value = recv_buffer_bytes.is_some()
            | send_buffer_bytes.is_some()
            | mss.is_some()
            | hop_limit.is_some()
            | rto_min.is_some()
            | rto_max.is_some()
            | delayed_ack_max.is_some();
        !(has_value | unordered | may_fragment | (numbers != 0) | (*flow_label != FlowLabel::Auto))
    }

    /// Applies the options of a socket; returns `None` if a value is out of range.
    pub fn with_options(mut self, config: &TcpConfig, options: &SocketOptions) -> Option<Self> {
        if let Some(bytes) = options.recv_buffer_bytes {
            self.set_recv_buffer(checked_buffer(bytes)?);
        }
        if let Some(bytes) = options.send_buffer_bytes {
            self.set_send_buffer(checked_buffer(bytes)?);
        }
        if let Some(mss) = options.mss {
            self.mss = checked_mss(mss)?;
        }
        if options.tos & 3 != 0 || options.hop_limit == Some(0) || options.priority > Label::PRIORITY_MAX {
            return None;
        }
        if !options.flow_label.is_valid() {
            return None;
        }
        self.flow_label = options.flow_label;
        self.tos = options.tos;
        self.priority = options.priority;
        self.hop_limit = options.hop_limit.unwrap_or(self.hop_limit);
        self.min_hop_limits = [options.min_ttl, options.min_hop_count];
        self.port_sharing = options.port_sharing;
        self.unordered = options.unordered;
        self.may_fragment = options.may_fragment;
        if let Some(time) = options.rto_min {
            self.set_rto_min(within(RTO_MIN_RANGE, time)?);
        }
        if let Some(time) = options.rto_max {
            self.set_rto_max(within(RTO_MAX_RANGE, time)?);
        }
        if let Some(time) = options.delayed_ack_max {
            self.set_delayed_ack_max(config, within(RTO_MIN_RANGE, time)?);
        }
        Some(self)
    }
}

fn within(range: RangeInclusive<Duration>, time: Duration) -> Option<Duration> {
    range.contains(&time).then_some(time)
}

/// Returns the smallest shift with which a window of 65,535 covers a buffer, at most 14.
fn window_shift(buffer_bytes: u32) -> u8 {
    let shift = 32 - (buffer_bytes.saturating_sub(1) / 65_535).leading_zeros();
    shift.min(14) as u8
}

/// Checks that a buffer size is within the range of the configuration keys.
pub(crate) fn checked_buffer(bytes: u32) -> Option<u32> {
    (2048..=1 << 30).contains(&bytes).then_some(bytes)
}

/// Checks that a segment size is within the range of Linux.
pub(crate) fn checked_mss(mss: u16) -> Option<u16> {
    (88..=32_767).contains(&mss).then_some(mss)
}

/// The profiles in use, with their numbers of users.
pub(crate) struct ProfileTable {
    entries: Vec<(Profile, u32)>,
    by_value: BTreeMap<Profile, u16>,
    free: Vec<u16>,
    /// The profile that was found last: connections often have equal ones.
    last: u16,
    /// The filters of profiles.
    pub filters: FilterTable,
}

impl ProfileTable {
    pub fn new(default: Profile) -> Self {
        // See `port_sharing`.
        let usual: [Profile; USUAL as usize] = [false, true].map(|reuse_address| Profile {
            port_sharing: PortSharing { reuse_address, reuse_port: false },
            ..default.completed()
        });
        Self {
            entries: usual.map(|profile| (profile, 1)).into(),
            by_value: usual.into_iter().zip(0..).collect(),
            free: Vec::new(),
            last: 0,
            filters: FilterTable::default(),
        }
    }

    #[inline]
    pub fn get(&self, id: ProfileId) -> &Profile {
        &self.entries[usize::from(id.0)].0
    }

    /// Returns the options by which a connection with this profile shares its local port. `is_active` tells
    /// that the connection was opened from here.
    #[inline(always)]
    pub fn port_sharing(&self, id: ProfileId, is_active: bool) -> PortSharing {
        let options = if id.is_usual() {
            PortSharing { reuse_address: id != ProfileId::DEFAULT, reuse_port: false }
        } else {
            self.get(id).port_sharing
        };
        if is_active { options } else { options.of_listener() }
    }

    /// Adds a user of `id`.
    #[inline]
    pub fn share(&mut self, id: ProfileId) -> ProfileId {
        if !id.is_usual() {
            self.entries[usize::from(id.0)].1 += 1;
        }
        id
    }

    /// Removes a user of `id`.
    #[inline]
    pub fn release(&mut self, id: ProfileId) {
        if !id.is_usual() {
            self.release_other(id);
        }
    }

    #[inline(never)]
    fn release_other(&mut self, id: ProfileId) {
        let entry = &mut self.entries[usize::from(id.0)];
        entry.1 -= 1;
        if entry.1 == 0 {
            let filter = entry.0.filter;
            self.by_value.remove(&entry.0);
            self.free.push(id.0);
            self.filters.release(filter);
        }
    }

    /// Returns the profile of a socket with these options, with one more user; `None` if a value is out of
    /// range, or if 65,535 different profiles are in use.
    #[inline(always)]
    pub fn intern_options(&mut self, config: &TcpConfig, options: &SocketOptions) -> Option<ProfileId> {
        if Profile::is_default_for(options) {
            return Some(ProfileId::DEFAULT);
        }
        self.intern_unusual_options(config, options)
    }

    #[inline(never)]
    fn intern_unusual_options(&mut self, config: &TcpConfig, options: &SocketOptions) -> Option<ProfileId> {
        let profile = self.get(ProfileId::DEFAULT).with_options(config, options)?;
        self.intern(profile)
    }

    /// Returns the profile with these values, with one more user; `None` if 65,535 different ones are in use.
    pub fn intern(&mut self, profile: Profile) -> Option<ProfileId> {
        let profile = profile.completed();
        let (last, users) = &self.entries[usize::from(self.last)];
        if *users > 0 && *last == profile {
            return Some(self.share(ProfileId(self.last)));
        }
        if let Some(&id) = self.by_value.get(&profile) {
            self.last = id;
            return Some(self.share(ProfileId(id)));
        }
        let id = match self.free.pop() {
            Some(id) => {
                self.entries[usize::from(id)] = (profile, 1);
                id
            }
            None => {
                let id = u16::try_from(self.entries.len()).ok().filter(|id| *id != u16::MAX)?;
                self.entries.push((profile, 1));
                id
            }
        };
        self.by_value.insert(profile, id);
        self.filters.share(profile.filter);
        Some(ProfileId(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::SaveSyn;

    fn table() -> ProfileTable {
        ProfileTable::new(Profile::from_config(&TcpConfig::default()))
    }

    #[test]
    fn equal_profiles_share_a_reference_counted_entry() {
        let mut table = table();
        let other = Profile { keep_count: 3, ..*table.get(ProfileId::DEFAULT) };
        let a = table.intern(other).unwrap();
        let b = table.intern(other).unwrap();
        assert_eq!(a, b);
        table.release(a);
        assert_eq!(table.get(b).keep_count, 3);
        table.release(b);
        assert_eq!(table.by_value.len(), usize::from(USUAL));
        let anew = table.intern(other).unwrap();
        assert_eq!(table.by_value.len(), usize::from(USUAL) + 1, "a freed entry is not found");
        table.release(anew);
        let again = table.intern(Profile { keep_count: 4, ..other }).unwrap();
        assert_eq!(again, a, "the freed entry is reused");
    }

    #[test]
    fn only_options_of_the_default_profile_skip_the_table() {
        let config = TcpConfig::default();
        let none = SocketOptions::default();
        let second = Some(Duration::from_secs(1));
        let of_the_profile = [
            SocketOptions { recv_buffer_bytes: Some(1 << 20), ..none },
            SocketOptions { send_buffer_bytes: Some(1 << 20), ..none },
            SocketOptions { mss: Some(1000), ..none },
            SocketOptions { tos: 4, ..none },
            SocketOptions { tos: 1, ..none },
            SocketOptions { hop_limit: Some(1), ..none },
            SocketOptions { hop_limit: Some(0), ..none },
            SocketOptions { min_ttl: 1, ..none },
            SocketOptions { min_hop_count: 1, ..none },
            SocketOptions { rto_min: Some(Duration::from_millis(1)), ..none },
            SocketOptions { rto_max: second, ..none },
            SocketOptions { delayed_ack_max: Some(Duration::from_millis(1)), ..none },
            SocketOptions { priority: 1, ..none },
            SocketOptions { unordered: true, ..none },
            SocketOptions { port_sharing: PortSharing { reuse_address: true, reuse_port: false }, ..none },
            SocketOptions { port_sharing: PortSharing { reuse_address: false, reuse_port: true }, ..none },
            SocketOptions { may_fragment: true, ..none },
            SocketOptions { flow_label: FlowLabel::Fixed(0), ..none },
            SocketOptions { flow_label: FlowLabel::Fixed(1 << 20), ..none },
        ];
        let mut table = table();
        let default = *table.get(ProfileId::DEFAULT);
        for options in of_the_profile {
            assert!(!Profile::is_default_for(&options), "{options:?}");
            assert_ne!(default.with_options(&config, &options), Some(default), "{options:?}");
            assert_ne!(table.intern_options(&config, &options), Some(ProfileId::DEFAULT), "{options:?}");
        }
        for options in [
            none,
            SocketOptions { nodelay: true, keepalive: true, ack_events: true, ..none },
            SocketOptions { save_syn: SaveSyn::Frame, defer_accept: 1, fastopen_queue: 1, ..none },
            SocketOptions { fastopen_no_cookie: true, fastopen_connect: true, ..none },
        ] {
            assert!(Profile::is_default_for(&options), "{options:?}");
            assert_eq!(default.with_options(&config, &options), Some(default), "{options:?}");
            assert_eq!(table.intern_options(&config, &options), Some(ProfileId::DEFAULT), "{options:?}");
        }
    }

    #[test]
    fn the_65536th_different_profile_is_refused() {
        let mut table = table();
        let base = *table.get(ProfileId::DEFAULT);
        for i in u32::from(USUAL)..u32::from(u16::MAX) {
            assert!(table.intern(Profile { user_timeout_ms: i, ..base }).is_some());
        }
        assert!(table.intern(Profile { user_timeout_ms: 1 << 20, ..base }).is_none());
    }
}
