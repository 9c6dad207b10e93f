//! Specification of the faults of a link, with the text form `delay=20ms loss=1% rate=1gbit`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A share of frames, in billionths, so that printing gives back the text that was parsed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Probability(u32);

impl Probability {
    /// Never.
    pub const NEVER: Self = Self(0);
    /// Always.
    pub const ALWAYS: Self = Self(Self::ONE);
    const ONE: u32 = 1_000_000_000;

    /// Creates a share of `billionths` · 10⁻⁹; more than 10⁹ give [`Probability::ALWAYS`].
    #[must_use]
    pub const fn from_billionths(billionths: u32) -> Self {
        Self(if billionths > Self::ONE { Self::ONE } else { billionths })
    }

    /// Returns the share in billionths.
    #[must_use]
    pub const fn billionths(self) -> u32 {
        self.0
    }

    /// Returns the share as a number between 0 and 1.
    #[must_use]
    pub fn share(self) -> f64 {
        f64::from(self.0) / f64::from(Self::ONE)
    }
}

/// Faults of frames in one direction.
///
/// Each wire frame passes in this order: loss, corruption, duplication; then the queue in front of the link,
/// which drops frames that it cannot hold; then the link at its rate; then the delay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Impairment {
    /// `delay`: time from the end of transmission to arrival, one way.
    pub delay: Duration,
    /// `jitter`: maximum difference of a frame's delay from `delay`, uniformly distributed. At most `delay`.
    /// Jitter does not reorder frames: a frame waits for earlier ones.
    pub jitter: Duration,
    /// `rate`: bits per second; `None` is unlimited. A frame counts from its destination MAC address to its
    /// last byte, without FCS, preamble and gap.
    pub rate: Option<u64>,
    /// `gap`: shortest time from the beginning of a frame's transmission to that of the next one; zero is no
    /// limit. A link with frames in front of it sends them at this distance, or at the distance of `rate` if
    /// that is longer.
    pub gap: Duration,
    /// `loss`: share of frames that are lost.
    pub loss: Probability,
    /// `loss-burst`: mean number of consecutive losses, in thousandths (Gilbert's model); `None` gives
    /// independent losses.
    pub loss_burst: Option<u32>,
    /// `duplicate`: share of frames that arrive twice.
    pub duplicate: Probability,
    /// `reorder`: share of frames that are delayed by `reorder_delay`, so that other frames overtake them.
    pub reorder: Probability,
    /// `reorder-delay`: additional delay of reordered frames.
    pub reorder_delay: Duration,
    /// `corrupt`: share of frames in which one bit is flipped.
    pub corrupt: Probability,
    /// `corrupt-from`: first byte of a frame that may be corrupted. 14 spares the Ethernet header.
    pub corrupt_from: u32,
    /// `limit`: maximum number of frames in front of the link, including the one in transmission. Without
    /// `rate` and `gap`, no frame waits.
    // limit: frames in front of a slow link
    pub limit: u32,
    /// `limit-bytes`: maximum number of bytes in front of the link.
    pub limit_bytes: u64,
    /// `memory`: maximum number of bytes of all frames, queued and in flight. Frames beyond it are dropped
    /// and counted separately, because this is no property of the link: no frame is lost for this reason with
    /// at least `rate` / 8 × (`delay` + `jitter` + `reorder_delay`) bytes more than the queue may hold.
    // limit: bytes of delayed frames
    pub memory: u64,
}

impl Default for Impairment {
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate: None,
            gap: Duration::ZERO,
            loss: Probability::NEVER,
            loss_burst: None,
            duplicate: Probability::NEVER,
            reorder: Probability::NEVER,
            reorder_delay: Duration::from_millis(1),
            corrupt: Probability::NEVER,
            corrupt_from: 14,
            limit: 1000,
            limit_bytes: u64::MAX,
            memory: 256 << 20,
        }
    }
}

/// Faults of both directions. The default is a perfect link.
///
/// The text form consists of words `key=value`; `up.key=value` and `down.key=value` apply to one direction.
/// Times have the units `ns`, `us`, `ms`, `s`; rates `bit`, `kbit`, `mbit`, `gbit` per second (decimal);
/// shares `%`; sizes `B`, `kB`, `MB`, `GB`, `KiB`, `MiB`, `GiB`. Parsing a printed specification gives an
/// equal specification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkSpec {
    /// Faults of frames that the device sends.
    pub up: Impairment,
    /// Faults of frames that the device receives.
    pub down: Impairment,
}

/// Error in a specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkSpecError {
    /// The key is unknown.
    UnknownKey(String),
    /// A word has no `=`.
    NoValue(String),
    /// A key is repeated for one direction.
    Repeated(String),
    /// The value is not a number, or has more digits than can be stored.
    BadNumber {
        /// The key.
        key: String,
        /// The value as it was written.
        value: String,
        /// A value that the key takes.
        example: String,
    },
    /// The unit is missing or unknown.
    BadUnit {
        /// The key.
        key: String,
        /// The value as it was written.
        value: String,
        /// The valid units of this key.
        units: String,
    },
    /// The value is outside its range.
    OutOfRange {
        /// The key.
        key: String,
        /// The value as it was written.
        value: String,
        /// The valid range.
        range: String,
    },
}

impl fmt::Display for LinkSpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey(key) => write!(f, "unknown key {key:?}; known keys: ")
                .and_then(|()| f.write_str(&KEYS.map(|key| key.name).join(", "))),
            Self::NoValue(word) => write!(f, "{word:?} has no value; write key=value"),
            Self::Repeated(key) => write!(f, "{key} is given twice"),
            Self::BadNumber { key, value, example } => {
                write!(f, "{key}={value}: not a number, as in {key}={example}, or too many digits")
            }
            Self::BadUnit { key, value, units } => write!(f, "{key}={value}: the unit must be {units}"),
            Self::OutOfRange { key, value, range } => {
                write!(f, "{key}={value}: out of range, must be {range}")
            }
        }
    }
}

impl std::error::Error for LinkSpecError {}

/// Units with their factors to the unit that is stored.
type Units = &'static [(&'static str, u64)];

const TIME: Units = &[("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1)];
const RATE: Units = &[("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000), ("bit", 1)];
const SHARE: Units = &[("%", 10_000_000)];
const SIZE: Units = &[
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];
const COUNT: Units = &[("", 1)];
const THOUSANDTHS: Units = &[("", 1000)];

/// A key: its name, its units, its range (in the unit that is stored), and accessors of the field that stores
/// it.
struct SpecKey {
    name: &'static str,
    units: Units,
    range: (u64, u64),
    get: fn(&Impairment) -> u64,
    set: fn(&mut Impairment, u64),
}

const HOUR: u64 = 3_600_000_000_000;
/// Stored value that stands for `None` of an optional key; outside the range of the key.
const ABSENT: u64 = 0;

const fn key(
    name: &'static str,
    units: Units,
    range: (u64, u64),
    get: fn(&Impairment) -> u64,
    set: fn(&mut Impairment, u64),
) -> SpecKey {
    SpecKey { name, units, range, get, set }
}

/// The keys, in the order in which they are printed.
#[rustfmt::skip] // a table
const KEYS: [SpecKey; 14] = [
    key("delay",         TIME,        (0, HOUR),               |i| nanos(i.delay),                         |i, v| i.delay = Duration::from_nanos(v)),
    key("jitter",        TIME,        (0, HOUR),               |i| nanos(i.jitter),                        |i, v| i.jitter = Duration::from_nanos(v)),
    key("rate",          RATE,        (1, 10_000_000_000_000), |i| i.rate.unwrap_or(ABSENT),               |i, v| i.rate = Some(v)),
    key("gap",           TIME,        (0, HOUR),               |i| nanos(i.gap),                           |i, v| i.gap = Duration::from_nanos(v)),
    key("loss",          SHARE,       SHARES,                  |i| i.loss.0.into(),                        |i, v| i.loss = Probability(v as u32)),
    key("loss-burst",    THOUSANDTHS, (1000, 1_000_000_000),   |i| i.loss_burst.map_or(ABSENT, u64::from), |i, v| i.loss_burst = Some(v as u32)),
    key("duplicate",     SHARE,       SHARES,                  |i| i.duplicate.0.into(),                   |i, v| i.duplicate = Probability(v as u32)),
    key("reorder",       SHARE,       SHARES,                  |i| i.reorder.0.into(),                     |i, v| i.reorder = Probability(v as u32)),
    key("reorder-delay", TIME,        (1, HOUR),               |i| nanos(i.reorder_delay),                 |i, v| i.reorder_delay = Duration::from_nanos(v)),
    key("corrupt",       SHARE,       SHARES,                  |i| i.corrupt.0.into(),                     |i, v| i.corrupt = Probability(v as u32)),
    key("corrupt-from",  COUNT,       (0, 65_535),             |i| i.corrupt_from.into(),                  |i, v| i.corrupt_from = v as u32),
    key("limit",         COUNT,       (1, 100_000_000),        |i| i.limit.into(),                         |i, v| i.limit = v as u32),
    key("limit-bytes",   SIZE,        (1, u64::MAX),           |i| i.limit_bytes,                          |i, v| i.limit_bytes = v),
    key("memory",        SIZE,        (1 << 16, 1 << 40),      |i| i.memory,                               |i, v| i.memory = v),
];

const SHARES: (u64, u64) = (0, Probability::ONE as u64);

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl LinkSpec {
    /// Returns equal faults for both directions.
    #[must_use]
    pub fn both(impairment: Impairment) -> Self {
        Self { up: impairment.clone(), down: impairment }
    }

    /// Parses a specification: words `key=value`, separated by blanks or commas. An empty text is a perfect
    /// link.
    ///
    /// # Errors
    /// Names the key and the error.
    pub fn parse(text: &str) -> Result<Self, LinkSpecError> {
        let mut spec = Self::default();
        let mut seen = Vec::new();
        for word in text.split([' ', ',', '\t', '\n']).filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=').ok_or_else(|| LinkSpecError::NoValue(word.into()))?;
            let (up, down, short) = match name.split_once('.') {
                Some(("up", short)) => (true, false, short),
                Some(("down", short)) => (false, true, short),
                _ => (true, true, name),
            };
            let key = KEYS.iter().find(|key| key.name == short);
            let key = key.ok_or_else(|| LinkSpecError::UnknownKey(name.into()))?;
            let number = parse_value(key, name, value)?;
            // `loss=1% up.loss=2%` is valid: the word for one direction overrides the word for both.
            let scope = (short, up, down);
            if seen.contains(&scope) {
                return Err(LinkSpecError::Repeated(name.into()));
            }
            seen.push(scope);
            let is_overridden = |up, down| seen.contains(&(short, up, down));
            if up && (!down || !is_overridden(true, false)) {
                (key.set)(&mut spec.up, number);
            }
            if down && (!up || !is_overridden(false, true)) {
                (key.set)(&mut spec.down, number);
            }
        }
        spec.up.check("up")?;
        spec.down.check("down")?;
        Ok(spec)
    }
}

impl FromStr for LinkSpec {
    type Err = LinkSpecError;

    fn from_str(text: &str) -> Result<Self, LinkSpecError> {
        Self::parse(text)
    }
}

impl Impairment {
    /// Checks conditions that involve two keys.
    fn check(&self, direction: &str) -> Result<(), LinkSpecError> {
        let error = |key: &str, value: String, range: String| {
            Err(LinkSpecError::OutOfRange { key: format!("{direction}.{key}"), value, range })
        };
        if self.jitter > self.delay {
            return error("jitter", format_value(nanos(self.jitter), TIME), "at most the delay".into());
        }
        if let Some(burst) = self.loss_burst {
            let least = loss_burst_min(self.loss);
            if u64::from(burst) < least {
                let range = format!("at least {} for this loss, or absent", format_value(least, THOUSANDTHS));
                return error("loss-burst", format_value(burst.into(), THOUSANDTHS), range);
            }
        }
        Ok(())
    }
}

/// Returns the shortest mean burst of losses in thousandths: there is at least one frame between two bursts,
/// so bursts must be long enough to reach the share.
fn loss_burst_min(loss: Probability) -> u64 {
    let (lost, kept) = (u64::from(loss.0), u64::from(Probability::ONE - loss.0));
    if kept == 0 { 0 } else { (lost * 1000).div_ceil(kept) }
}

/// Prints only values that differ from the default; a key that differs between the directions is printed for
/// each.
impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Impairment::default();
        let mut separator = "";
        for key in &KEYS {
            let (up, down) = ((key.get)(&self.up), (key.get)(&self.down));
            let default_value = (key.get)(&default);
            let words = if up == down {
                [("", up, default_value), ("", default_value, default_value)]
            } else {
                [("up.", up, default_value), ("down.", down, default_value)]
            };
            for (direction, value, default_value) in words {
                if value != default_value {
                    write!(f, "{separator}{direction}{}={}", key.name, format_value(value, key.units))?;
                    separator = " ";
                }
            }
        }
        Ok(())
    }
}

/// Formats a value in the largest unit in which it is a whole number, otherwise as a decimal fraction of the
/// smallest.
fn format_value(value: u64, units: Units) -> String {
    let divisor = units.iter().find(|(_, scale)| value.is_multiple_of(*scale) && value > 0);
    let (unit, scale) = divisor.or(units.last()).copied().unwrap_or(("", 1));
    let mut text = (value / scale).to_string();
    let mut rest = value % scale;
    if rest > 0 {
        text.push('.');
        while rest > 0 {
            rest *= 10;
            text.push(char::from(b'0' + (rest / scale) as u8));
            rest %= scale;
        }
    }
    text + unit
}

/// Returns a value that the key takes: 1 of its largest unit that is in its range.
fn example(key: &SpecKey) -> String {
    let (least, most) = key.range;
    let units = key.units.iter().copied().chain([("", 1)]);
    let one = units.map(|(_, scale)| scale).find(|scale| (least..=most).contains(scale));
    format_value(one.unwrap_or(least), key.units)
}

fn parse_value(key: &SpecKey, name: &str, value: &str) -> Result<u64, LinkSpecError> {
    let digits_end = value.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(value.len());
    let (number, unit) = value.split_at(digits_end);
    let bad_number =
        || LinkSpecError::BadNumber { key: name.into(), value: value.into(), example: example(key) };
    if number.is_empty() {
        return Err(bad_number());
    }
    let scale = key.units.iter().find(|(known, _)| *known == unit).map(|(_, scale)| *scale);
    let scale = scale.ok_or_else(|| {
        let names = key.units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let units = if names.is_empty() { "left out".into() } else { names };
        LinkSpecError::BadUnit { key: name.into(), value: value.into(), units }
    })?;
    let stored = parse_scaled(number, scale).ok_or_else(bad_number)?;
    let (least, most) = key.range;
    if !(least..=most).contains(&stored) {
        let range = format!("{}..={}", format_value(least, key.units), format_value(most, key.units));
        return Err(LinkSpecError::OutOfRange { key: name.into(), value: value.into(), range });
    }
    Ok(stored)
}

/// Multiplies a decimal number by `scale`. Returns `None` if the product is not a whole number or too large.
fn parse_scaled(number: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if fraction.is_empty() || fraction.len() > 18 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let denominator = 10u128.pow(fraction.len() as u32);
    let numerator = u128::from(fraction.parse::<u64>().ok()?) * u128::from(scale);
    let fraction = u64::try_from(numerator / denominator).ok()?;
    let exact = numerator.is_multiple_of(denominator);
    exact.then_some(whole.checked_mul(scale)?.checked_add(fraction)?)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn documented_example_is_parsed() {
        let text = "delay=20ms loss=1% rate=1gbit jitter=2ms duplicate=0.1% reorder=1% corrupt=0.01% limit=1000 loss-burst=2.5";
        let spec = LinkSpec::parse(text).expect("valid");
        assert_eq!(spec.up, spec.down);
        assert_eq!(spec.up.delay, Duration::from_millis(20));
        assert_eq!(spec.up.jitter, Duration::from_millis(2));
        assert_eq!(spec.up.rate, Some(1_000_000_000));
        assert_eq!(spec.up.loss.billionths(), 10_000_000);
        assert_eq!(spec.up.duplicate.billionths(), 1_000_000);
        assert_eq!(spec.up.corrupt.billionths(), 100_000);
        assert_eq!(spec.up.loss_burst, Some(2500));
        assert_eq!(
            spec.to_string(),
            "delay=20ms jitter=2ms rate=1gbit loss=1% loss-burst=2.5 duplicate=0.1% reorder=1% corrupt=0.01%"
        );
    }

    #[test]
    fn directions_may_differ() {
        let spec = LinkSpec::parse("loss=1%, up.loss=2% down.rate=10.5mbit").expect("valid");
        assert_eq!((spec.up.loss.billionths(), spec.down.loss.billionths()), (20_000_000, 10_000_000));
        assert_eq!((spec.up.rate, spec.down.rate), (None, Some(10_500_000)));
        assert_eq!(
            LinkSpec::parse("up.loss=2% loss=1% down.rate=10.5mbit"),
            Ok(spec.clone()),
            "in any order"
        );
        assert_eq!(spec.to_string(), "down.rate=10500kbit up.loss=2% down.loss=1%");
    }

    #[test]
    fn empty_text_is_a_perfect_link() {
        assert_eq!(LinkSpec::parse("  "), Ok(LinkSpec::default()));
        assert_eq!(LinkSpec::default().to_string(), "");
        assert_eq!(LinkSpec::parse("delay=0ns loss=0%"), Ok(LinkSpec::default()));
    }

    #[test]
    fn errors_name_the_invalid_value() {
        let message = |text| LinkSpec::parse(text).expect_err(text).to_string();
        assert!(message("latency=2ms").contains("unknown key \"latency\"; known keys: delay, jitter"));
        assert!(message("sideways.delay=2ms").contains("unknown key"));
        assert!(message("delay").contains("write key=value"));
        assert_eq!(message("delay=20"), "delay=20: the unit must be s, ms, us, ns");
        assert_eq!(message("loss=0.01"), "loss=0.01: the unit must be %");
        assert_eq!(message("limit=10k"), "limit=10k: the unit must be left out");
        assert_eq!(message("delay=ms"), "delay=ms: not a number, as in delay=1s, or too many digits");
        assert_eq!(message("delay=-2ms"), "delay=-2ms: not a number, as in delay=1s, or too many digits");
        assert_eq!(message("delay=0.5ns"), "delay=0.5ns: not a number, as in delay=1s, or too many digits");
        assert_eq!(message("delay=1.ms"), "delay=1.ms: not a number, as in delay=1s, or too many digits");
        assert_eq!(
            message("delay=99999999999999999999s"),
            "delay=99999999999999999999s: not a number, as in delay=1s, or too many digits"
        );
        assert_eq!(message("loss=101%"), "loss=101%: out of range, must be 0%..=100%");
        assert_eq!(message("rate=0gbit"), "rate=0gbit: out of range, must be 1bit..=10000gbit");
        assert_eq!(message("up.limit=0"), "up.limit=0: out of range, must be 1..=100000000");
        assert_eq!(message("loss=1% loss=2%"), "loss is given twice");
        assert_eq!(message("delay=1ms jitter=2ms"), "up.jitter=2ms: out of range, must be at most the delay");
        assert_eq!(
            message("down.loss=75% loss-burst=2"),
            "down.loss-burst=2: out of range, must be at least 3 for this loss, or absent"
        );
    }

    fn impairment() -> impl Strategy<Value = Impairment> {
        prop::collection::vec((any::<bool>(), any::<u64>()), KEYS.len()).prop_map(|choices| {
            let mut impairment = Impairment::default();
            for (key, (chosen, number)) in KEYS.iter().zip(choices) {
                if chosen {
                    let (least, most) = key.range;
                    (key.set)(&mut impairment, least + number % (most - least).saturating_add(1).max(1));
                }
            }
            impairment.jitter = impairment.jitter.min(impairment.delay);
            impairment.loss_burst =
                impairment.loss_burst.filter(|&burst| u64::from(burst) >= loss_burst_min(impairment.loss));
            impairment
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
        #[test]
        fn printed_text_is_parsed_again(up in impairment(), down in impairment()) {
            // No word unsets `rate` or `loss-burst`. If one direction has none, the printed text sets the key
            // for the other direction only.
            let spec = LinkSpec { up, down };
            prop_assert_eq!(LinkSpec::parse(&spec.to_string()), Ok(spec));
        }

        #[test]
        fn random_text_does_not_panic(text in "[a-z=.,% 0-9-]{0,60}") {
            let _ = LinkSpec::parse(&text);
        }
    }
}
