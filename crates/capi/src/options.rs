//! Options of sockets, as C passes them.

use crate::failure::Failure;
use core::ffi::c_int;
use core::time::Duration;
use ginnel::{
    CongestionControl, ConnectOptions, ListenOptions, SaveSyn, SocketOptions, TcpOption,
    defer_accept_timeouts,
};
use rustix::io::Errno;

const UNKNOWN: Failure = Failure::new(Errno::NOPROTOOPT, "no such option");
const OUT_OF_RANGE: Failure = Failure::new(Errno::INVAL, "an option is out of range");

/// `GINNEL_REUSE_PORT`.
pub const REUSE_PORT: u32 = 1;
/// `GINNEL_V6_ONLY`.
pub const V6_ONLY: u32 = 1 << 1;
/// `GINNEL_NODELAY`.
pub const NODELAY: u32 = 1 << 2;
/// `GINNEL_KEEPALIVE`.
pub const KEEPALIVE: u32 = 1 << 3;
/// `GINNEL_ACK_EVENTS`.
pub const ACK_EVENTS: u32 = 1 << 4;
/// `GINNEL_UNORDERED`.
pub const UNORDERED: u32 = 1 << 5;
/// `GINNEL_FASTOPEN_NO_COOKIE`.
pub const FASTOPEN_NO_COOKIE: u32 = 1 << 6;
/// `GINNEL_MAY_FRAGMENT`.
pub const MAY_FRAGMENT: u32 = 1 << 7;
const ALL: u32 = (MAY_FRAGMENT << 1) - 1;

/// `GINNEL_SAVE_SYN_PACKET`.
pub const SAVE_SYN_PACKET: u8 = 1;
/// `GINNEL_SAVE_SYN_FRAME`.
pub const SAVE_SYN_FRAME: u8 = 2;

/// `struct ginnel_socket_options`. Numbers that are 0 leave the default.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CSocketOptions {
    pub flags: u32,
    pub backlog: u32,
    pub recv_buffer_bytes: u32,
    pub send_buffer_bytes: u32,
    pub mss: u16,
    pub priority: u8,
    pub tos: u8,
    pub hop_limit: u8,
    pub reserved: [u8; 3],
}

/// Returns a number, or `None` for 0.
pub fn nonzero<T: Copy + Default + PartialEq>(value: T) -> Option<T> {
    (value != T::default()).then_some(value)
}

impl CSocketOptions {
    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    fn check(&self) -> Result<(), Failure> {
        if self.flags & !ALL != 0 || self.reserved != [0; 3] { Err(OUT_OF_RANGE) } else { Ok(()) }
    }

    fn socket(&self) -> SocketOptions {
        SocketOptions {
            recv_buffer_bytes: nonzero(self.recv_buffer_bytes),
            send_buffer_bytes: nonzero(self.send_buffer_bytes),
            mss: nonzero(self.mss),
            nodelay: self.has(NODELAY),
            keepalive: self.has(KEEPALIVE),
            ack_events: self.has(ACK_EVENTS),
            tos: self.tos,
            hop_limit: nonzero(self.hop_limit),
            priority: self.priority,
            unordered: self.has(UNORDERED),
            fastopen_no_cookie: self.has(FASTOPEN_NO_COOKIE),
            may_fragment: self.has(MAY_FRAGMENT),
            ..SocketOptions::default()
        }
    }

    /// Returns the options of a listener; `EINVAL` if flags are unknown or reserved bytes are not 0.
    pub fn listen(&self) -> Result<ListenOptions, Failure> {
        self.check()?;
        let mut options = ListenOptions {
            v6_only: self.has(V6_ONLY),
            reuse_port: self.has(REUSE_PORT),
            socket: self.socket(),
            ..ListenOptions::default()
        };
        if self.backlog != 0 {
            options.backlog = self.backlog;
        }
        Ok(options)
    }

    /// Returns the options of a connection; `EINVAL` as for a listener, and for options that only listeners
    /// have.
    pub fn connect(&self) -> Result<ConnectOptions, Failure> {
        self.check()?;
        if self.has(REUSE_PORT | V6_ONLY) || self.backlog != 0 {
            return Err(OUT_OF_RANGE);
        }
        Ok(ConnectOptions { socket: self.socket(), ..ConnectOptions::default() })
    }
}

/// `struct ginnel_listen_options`. Numbers that are 0 leave the default.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CListenOptions {
    pub size: usize,
    pub socket: CSocketOptions,
    pub fastopen_queue: u32,
    pub defer_accept_s: u32,
    pub fastopen_key: [u8; 16],
    pub fastopen_backup_key: [u8; 16],
    pub rto_min_us: u32,
    pub rto_max_ms: u32,
    pub delayed_ack_max_us: u32,
    pub min_ttl: u8,
    pub min_hop_count: u8,
    pub save_syn: u8,
    pub reserved: u8,
}

/// Returns a key of fast open; `None` if it is 0.
fn fastopen_key(bytes: [u8; 16]) -> Option<(u64, u64)> {
    let key = u128::from_le_bytes(bytes);
    nonzero(key).map(|key| (key as u64, (key >> 64) as u64))
}

impl CListenOptions {
    /// Length in bytes of the structure in the first version that had it.
    pub const LEAST: usize = core::mem::offset_of!(Self, fastopen_queue);

    /// Returns the options of a listener; `EINVAL` as for [`CSocketOptions::listen`], and for a second key
    /// without a first one.
    pub fn listen(&self) -> Result<ListenOptions, Failure> {
        let mut options = self.socket.listen()?;
        let micros = |micros: u32| nonzero(micros).map(|micros| Duration::from_micros(micros.into()));
        let keys = (fastopen_key(self.fastopen_key), fastopen_key(self.fastopen_backup_key));
        if self.reserved != 0 || keys.0.is_none() && keys.1.is_some() {
            return Err(OUT_OF_RANGE);
        }
        options.socket = SocketOptions {
            fastopen_queue: self.fastopen_queue,
            fastopen_keys: keys,
            defer_accept: defer_accept_timeouts(self.defer_accept_s),
            rto_min: micros(self.rto_min_us),
            rto_max: nonzero(self.rto_max_ms).map(|millis| Duration::from_millis(millis.into())),
            delayed_ack_max: micros(self.delayed_ack_max_us),
            min_ttl: self.min_ttl,
            min_hop_count: self.min_hop_count,
            save_syn: match self.save_syn {
                0 => SaveSyn::Off,
                SAVE_SYN_PACKET => SaveSyn::Packet,
                SAVE_SYN_FRAME => SaveSyn::Frame,
                _ => return Err(OUT_OF_RANGE),
            },
            ..options.socket
        };
        Ok(options)
    }
}

/// Returns the algorithm with the number `GINNEL_CONGESTION_…` of `ginnel.h`.
///
/// # Errors
/// `EINVAL` if there is none.
pub fn congestion(number: i64) -> Result<CongestionControl, Failure> {
    Ok(match number {
        0 => CongestionControl::Cubic,
        1 => CongestionControl::NewReno,
        2 => CongestionControl::Bbr,
        _ => return Err(OUT_OF_RANGE),
    })
}

/// Returns the option with the number `GINNEL_OPT_…` of `ginnel.h`. `value` is in seconds for `KeepIdle`,
/// `KeepInterval` and `Linger2`, in milliseconds for `UserTimeout` and `RtoMax`, in microseconds for `RtoMin`
/// and `DelayedAckMax`, and otherwise in the unit of the [`TcpOption`].
///
/// # Errors
/// `ENOPROTOOPT` for an unknown number, `EINVAL` for a value that the option's type cannot have.
pub fn option(number: c_int, value: i64) -> Result<TcpOption, Failure> {
    let on = value != 0;
    let millis = || u64::try_from(value).map(Duration::from_millis).map_err(|_| OUT_OF_RANGE);
    let seconds = || u64::try_from(value).map(Duration::from_secs).map_err(|_| OUT_OF_RANGE);
    let micros = || u64::try_from(value).map(Duration::from_micros).map_err(|_| OUT_OF_RANGE);
    let byte = || u8::try_from(value).map_err(|_| OUT_OF_RANGE);
    let short = || u16::try_from(value).map_err(|_| OUT_OF_RANGE);
    let word = || u32::try_from(value).map_err(|_| OUT_OF_RANGE);
    Ok(match number {
        1 => TcpOption::NoDelay(on),
        2 => TcpOption::Cork(on),
        3 => TcpOption::More(on),
        4 => TcpOption::QuickAck(on),
        5 => TcpOption::KeepAlive(on),
        6 => TcpOption::KeepIdle(seconds()?),
        7 => TcpOption::KeepInterval(seconds()?),
        8 => TcpOption::KeepCount(byte()?),
        9 => TcpOption::UserTimeout(millis()?),
        10 => TcpOption::LingerZero(on),
        11 => TcpOption::OobInline(on),
        12 => TcpOption::AckEvents(on),
        13 => TcpOption::RecvBuffer(word()?),
        14 => TcpOption::SendBuffer(word()?),
        15 => TcpOption::NotSentLowat(word()?),
        16 => TcpOption::MaxSegment(short()?),
        17 => TcpOption::Tos(byte()?),
        18 => TcpOption::HopLimit(nonzero(byte()?)),
        19 => TcpOption::Priority(byte()?),
        20 => TcpOption::Unordered(on),
        21 => TcpOption::MinHopLimit(byte()?),
        22 => TcpOption::RtoMin(micros()?),
        23 => TcpOption::RtoMax(millis()?),
        24 => TcpOption::DelayedAckMax(micros()?),
        25 => TcpOption::SynRetries(byte()?),
        26 => TcpOption::Linger2(seconds()?),
        27 => TcpOption::MaxPacingRate(u64::try_from(value).map_err(|_| OUT_OF_RANGE)?),
        28 => TcpOption::MayFragment(on),
        29 => TcpOption::Congestion(congestion(value)?),
        _ => return Err(UNKNOWN),
    })
}
