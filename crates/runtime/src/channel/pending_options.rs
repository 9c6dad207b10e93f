//! Options that clients set on a connection. The region has a word for the value of each option, and a bit
//! that is set while the value is new. There is no request to the stack, because programs set some options on
//! every connection.
//!
//! The client stores the value before it sets the bit, and the stack clears the bit before it reads the
//! value. So the last value that a client wrote is the last one that the stack applies.

use super::region::SocketArea;
use super::sync::Ordering;
use core::time::Duration;
use ginnel_stack::ip::FlowLabel;
use ginnel_stack::options::TcpOption;
use ginnel_stack::tcp::config::CongestionControl;

/// Number of option kinds, each of which has a bit.
pub(super) const OPTION_KINDS: usize = 31;
/// The kind of [`TcpOption::NotSentLowat`], whose value clients read, too.
pub(super) const NOTSENT_LOWAT: usize = 25;

/// Value for a connection that has no hop limit of its own.
const DEFAULT_HOP_LIMIT: u32 = u32::MAX;

/// Bit of a rate's word: the other bits are MiB per second. Without it, the word is bytes per second.
const MEBIBYTES: u32 = 1 << 31;

/// Encodes a rate in bytes per second as a word. Rates from 2 GiB/s on are rounded down to whole MiB/s. The
/// largest rate, which means no limit, is the largest word.
fn rate_to_word(rate: u64) -> u32 {
    match u32::try_from(rate) {
        Ok(bytes) if bytes < MEBIBYTES => bytes,
        _ if rate == u64::MAX => u32::MAX,
        _ => MEBIBYTES | ((rate >> 20).min(u64::from(MEBIBYTES) - 2) as u32),
    }
}

fn rate_from_word(word: u32) -> u64 {
    match word {
        u32::MAX => u64::MAX,
        bytes if bytes < MEBIBYTES => bytes.into(),
        _ => u64::from(word & !MEBIBYTES) << 20,
    }
}

/// Returns the kind of an option, and its value as a word. A time that exceeds a word in the unit of its kind
/// (seconds, milliseconds or microseconds) becomes the largest word.
fn to_word(option: TcpOption) -> (usize, u32) {
    let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    let micros = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    match option {
        TcpOption::NoDelay(on) => (0, on.into()),
        TcpOption::Cork(on) => (1, on.into()),
        TcpOption::QuickAck(on) => (2, on.into()),
        TcpOption::KeepAlive(on) => (3, on.into()),
        TcpOption::KeepIdle(time) => (4, seconds(time)),
        TcpOption::KeepInterval(time) => (5, seconds(time)),
        TcpOption::KeepCount(count) => (6, count.into()),
        TcpOption::UserTimeout(time) => (7, millis(time)),
        TcpOption::LingerZero(on) => (8, on.into()),
        TcpOption::Linger2(time) => (9, seconds(time)),
        TcpOption::OobInline(on) => (10, on.into()),
        TcpOption::AckEvents(on) => (11, on.into()),
        TcpOption::RecvBuffer(bytes) => (12, bytes),
        TcpOption::SendBuffer(bytes) => (13, bytes),
        TcpOption::MaxSegment(bytes) => (14, bytes.into()),
        TcpOption::Congestion(CongestionControl::Cubic) => (15, 0),
        TcpOption::Congestion(CongestionControl::NewReno) => (15, 1),
        TcpOption::Congestion(CongestionControl::Bbr) => (15, 2),
        TcpOption::Tos(tos) => (16, tos.into()),
        TcpOption::SynRetries(count) => (18, count.into()),
        TcpOption::MinHopLimit(hops) => (19, hops.into()),
        TcpOption::RtoMin(time) => (20, micros(time)),
        TcpOption::RtoMax(time) => (21, millis(time)),
        TcpOption::DelayedAckMax(time) => (22, micros(time)),
        TcpOption::Priority(priority) => (23, priority.into()),
        TcpOption::More(on) => (24, on.into()),
        TcpOption::NotSentLowat(bytes) => (NOTSENT_LOWAT, bytes),
        TcpOption::Unordered(on) => (26, on.into()),
        TcpOption::MayFragment(on) => (27, on.into()),
        TcpOption::ArrivalTimes(on) => (28, on.into()),
        TcpOption::MaxPacingRate(rate) => (29, rate_to_word(rate)),
        TcpOption::FlowLabel(choice) => (30, choice.bits()),
        TcpOption::HopLimit(hops) => (17, hops.map_or(DEFAULT_HOP_LIMIT, u32::from)),
    }
}

/// Returns the option of a kind with this value. An invalid value that a client wrote becomes one that the
/// engine refuses.
fn from_word(kind: usize, word: u32) -> Option<TcpOption> {
    let (on, time) = (word != 0, Duration::from_secs(word.into()));
    Some(match kind {
        0 => TcpOption::NoDelay(on),
        1 => TcpOption::Cork(on),
        2 => TcpOption::QuickAck(on),
        3 => TcpOption::KeepAlive(on),
        4 => TcpOption::KeepIdle(time),
        5 => TcpOption::KeepInterval(time),
        6 => TcpOption::KeepCount(u8::try_from(word).unwrap_or(u8::MAX)),
        7 => TcpOption::UserTimeout(Duration::from_millis(word.into())),
        8 => TcpOption::LingerZero(on),
        9 => TcpOption::Linger2(time),
        10 => TcpOption::OobInline(on),
        11 => TcpOption::AckEvents(on),
        12 => TcpOption::RecvBuffer(word),
        13 => TcpOption::SendBuffer(word),
        14 => TcpOption::MaxSegment(u16::try_from(word).unwrap_or(u16::MAX)),
        15 => TcpOption::Congestion(match word {
            1 => CongestionControl::NewReno,
            2 => CongestionControl::Bbr,
            _ => CongestionControl::Cubic,
        }),
        16 => TcpOption::Tos(u8::try_from(word).unwrap_or(u8::MAX)),
        18 => TcpOption::SynRetries(u8::try_from(word).unwrap_or(u8::MAX)),
        17 => TcpOption::HopLimit(u8::try_from(word).ok()),
        19 => TcpOption::MinHopLimit(u8::try_from(word).unwrap_or(u8::MAX)),
        20 => TcpOption::RtoMin(Duration::from_micros(word.into())),
        21 => TcpOption::RtoMax(Duration::from_millis(word.into())),
        22 => TcpOption::DelayedAckMax(Duration::from_micros(word.into())),
        23 => TcpOption::Priority(u8::try_from(word).unwrap_or(u8::MAX)),
        24 => TcpOption::More(on),
        NOTSENT_LOWAT => TcpOption::NotSentLowat(word),
        26 => TcpOption::Unordered(on),
        27 => TcpOption::MayFragment(on),
        28 => TcpOption::ArrivalTimes(on),
        29 => TcpOption::MaxPacingRate(rate_from_word(word)),
        30 => TcpOption::FlowLabel(FlowLabel::from_bits(word)),
        _ => return None,
    })
}

/// Returns whether an option releases data that the connection holds back. The option is then applied after
/// the bytes that were written before it.
fn releases_held_data(option: TcpOption) -> bool {
    matches!(option, TcpOption::NoDelay(true) | TcpOption::Cork(false) | TcpOption::More(false))
}

/// The time at which the stack applies an option, relative to the written bytes that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OptionOrder {
    /// Before written bytes are taken.
    BeforeData,
    /// After written bytes are taken.
    AfterData,
}

/// Sets an option; called by a client, which has to notify the stack afterwards.
pub(super) fn set(area: &SocketArea, option: TcpOption) {
    let (kind, value) = to_word(option);
    area.option_values[kind].store(value, Ordering::Relaxed);
    area.pending_options.fetch_or(1 << kind, Ordering::Release);
}

/// Takes the next option that is new; called by the stack.
pub(super) fn take_next(area: &SocketArea, when: OptionOrder) -> Option<TcpOption> {
    let mut new = area.pending_options.load(Ordering::Acquire);
    while new != 0 {
        let kind = new.trailing_zeros() as usize;
        new &= new - 1;
        let read =
            || area.option_values.get(kind).and_then(|word| from_word(kind, word.load(Ordering::Relaxed)));
        if read().is_some_and(|option| releases_held_data(option) != (when == OptionOrder::AfterData)) {
            continue;
        }
        area.pending_options.fetch_and(!(1 << kind), Ordering::AcqRel);
        // Read again, as the value may have changed before the bit was cleared.
        if let Some(option) = read() {
            return Some(option);
        }
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::ChannelConfig;
    use super::super::region::Region;
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    const ALL: [TcpOption; OPTION_KINDS] = [
        TcpOption::NoDelay(true),
        TcpOption::Cork(true),
        TcpOption::QuickAck(false),
        TcpOption::KeepAlive(true),
        TcpOption::KeepIdle(SECOND),
        TcpOption::KeepInterval(SECOND),
        TcpOption::KeepCount(9),
        TcpOption::UserTimeout(Duration::from_millis(77)),
        TcpOption::LingerZero(true),
        TcpOption::Linger2(SECOND),
        TcpOption::OobInline(true),
        TcpOption::AckEvents(true),
        TcpOption::RecvBuffer(1 << 20),
        TcpOption::SendBuffer(4096),
        TcpOption::MaxSegment(1000),
        TcpOption::Congestion(CongestionControl::NewReno),
        TcpOption::Tos(0x20),
        TcpOption::HopLimit(Some(7)),
        TcpOption::SynRetries(3),
        TcpOption::MinHopLimit(255),
        TcpOption::RtoMin(Duration::from_millis(8)),
        TcpOption::RtoMax(SECOND),
        TcpOption::DelayedAckMax(Duration::from_millis(40)),
        TcpOption::Priority(6),
        TcpOption::More(true),
        TcpOption::NotSentLowat(16_384),
        TcpOption::Unordered(true),
        TcpOption::MayFragment(true),
        TcpOption::ArrivalTimes(true),
        TcpOption::MaxPacingRate(1_250_000),
        TcpOption::FlowLabel(FlowLabel::Fixed(0xf_ffff)),
    ];

    #[test]
    fn options_round_trip_through_words() {
        for (kind, option) in ALL.into_iter().enumerate() {
            let (index, value) = to_word(option);
            assert_eq!((index, from_word(index, value)), (kind, Some(option)));
        }
        assert_eq!(from_word(OPTION_KINDS, 1), None);
    }

    #[test]
    fn rates_round_trip_within_a_mebibyte() {
        for rate in [0, 1, 125_000, (1 << 31) - 1, 1 << 31, 5 << 30, 100 << 30, u64::MAX] {
            assert_eq!(rate_from_word(rate_to_word(rate)), rate);
        }
        assert_eq!(rate_from_word(rate_to_word(0xffff_ffff)), 0xfff0_0000);
        assert!(rate_from_word(rate_to_word(u64::MAX - 1)) > 1 << 50);
    }

    #[test]
    fn releasing_options_come_last_and_last_value_wins() {
        let region = Region::create(&ChannelConfig { sockets_max: 1, ..ChannelConfig::default() }).unwrap();
        let area = region.socket(0);
        set(area, TcpOption::Cork(true));
        set(area, TcpOption::NoDelay(true));
        set(area, TcpOption::Cork(false));
        set(area, TcpOption::KeepCount(3));
        assert_eq!(take_next(area, OptionOrder::BeforeData), Some(TcpOption::KeepCount(3)));
        assert_eq!(take_next(area, OptionOrder::BeforeData), None);
        assert_eq!(take_next(area, OptionOrder::AfterData), Some(TcpOption::NoDelay(true)));
        assert_eq!(take_next(area, OptionOrder::AfterData), Some(TcpOption::Cork(false)));
        assert_eq!(take_next(area, OptionOrder::AfterData), None);
        // Another process of the domain may write any value.
        area.pending_options.store(u32::MAX, Ordering::Relaxed);
        while take_next(area, OptionOrder::BeforeData).is_some()
            || take_next(area, OptionOrder::AfterData).is_some()
        {}
        assert_eq!(area.pending_options.load(Ordering::Relaxed), 0);
    }
}
