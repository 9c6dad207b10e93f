//! Parses and formats sizes and durations.

use core::time::Duration;

/// Parses a number of bytes, as `64KiB`, `1.5MB` or `300`. The optional unit is B, KB, MB, GB, KiB, MiB or
/// GiB; K, M and G stand for the binary units.
///
/// # Errors
/// A text for the user: the number or the unit is malformed, or the result exceeds 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        other => return Err(format!("unknown unit \"{other}\": use B, KB, MB, GB, KiB, MiB or GiB")),
    };
    scale(number, factor)
}

/// Parses a duration, as `250us`, `10ms`, `1.5s`, `2m` or `1h`; a number without a unit is in seconds.
///
/// # Errors
/// A text for the user: the number or the unit is malformed, or the nanoseconds exceed 64 bits.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let nanos: u64 = match unit {
        "ns" => 1,
        "us" | "µs" => 1_000,
        "ms" => 1_000_000,
        "" | "s" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        other => return Err(format!("unknown unit \"{other}\": use ns, us, ms, s, m or h")),
    };
    scale(number, nanos).map(Duration::from_nanos)
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..end], text[end..].trim())
}

/// Returns `number * factor`: exact for integers, rounded for fractions.
fn scale(number: &str, factor: u64) -> Result<u64, String> {
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(|| "too large".to_owned());
    }
    let fraction: f64 = number.parse().map_err(|_| "must begin with a number".to_owned())?;
    let value = fraction * factor as f64;
    if value >= u64::MAX as f64 { Err("too large".to_owned()) } else { Ok(value.round() as u64) }
}

/// Formats a duration in the unit that suits its size, as `1.23 ms`.
pub fn show_nanos(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{:.2} µs", nanos as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", nanos as f64 / 1e6),
        _ => format!("{:.2} s", nanos as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        assert_eq!(parse_bytes("300"), Ok(300));
        assert_eq!(parse_bytes("64KiB"), Ok(65_536));
        assert_eq!(parse_bytes("1.5 MB"), Ok(1_500_000));
        assert_eq!(parse_bytes("2g"), Ok(2 << 30));
        for bad in ["", "x", "1QB", "-1", "1..2", "99999999999G"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_are_parsed() {
        assert_eq!(parse_duration("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(parse_duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1_500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "s", "1y", "1e9h"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_are_shown_in_a_fitting_unit() {
        assert_eq!(show_nanos(999), "999 ns");
        assert_eq!(show_nanos(1_230_000), "1.23 ms");
        assert_eq!(show_nanos(90_000_000_000), "90.00 s");
    }
}
