//! HTTP dates (RFC 9110 §5.6.7): conversion between seconds since 1970-01-01 and text.

/// Length in bytes of an IMF-fixdate, the format in which HTTP dates are written.
pub const DATE_BYTES: usize = 29;

// 1970-01-01 was a Thursday
const WEEKDAYS: [&[u8; 3]; 7] = [b"Thu", b"Fri", b"Sat", b"Sun", b"Mon", b"Tue", b"Wed"];
const MONTHS: [&[u8; 3]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];
/// 9999-12-31 23:59:59, the last second whose year has four digits.
const SECONDS_MAX: u64 = 253_402_300_799;

/// Formats seconds since 1970 as `Sun, 06 Nov 1994 08:49:37 GMT`. A time after the year 9999 gives the last
/// second of 9999.
pub fn format(unix_seconds: u64) -> [u8; DATE_BYTES] {
    let seconds = unix_seconds.min(SECONDS_MAX);
    let (days, in_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_from_days(days);
    let mut out = *b"Thu, 01 Jan 1970 00:00:00 GMT";
    out[0..3].copy_from_slice(WEEKDAYS[(days % 7) as usize]);
    two_digits(&mut out[5..7], day);
    out[8..11].copy_from_slice(MONTHS[month as usize - 1]);
    two_digits(&mut out[12..14], year / 100);
    two_digits(&mut out[14..16], year % 100);
    two_digits(&mut out[17..19], (in_day / 3600) as u32);
    two_digits(&mut out[20..22], (in_day / 60 % 60) as u32);
    two_digits(&mut out[23..25], (in_day % 60) as u32);
    out
}

fn two_digits(out: &mut [u8], value: u32) {
    out[0] = b'0' + (value / 10) as u8;
    out[1] = b'0' + (value % 10) as u8;
}

/// Parses a date in one of the three formats that a recipient must accept: IMF-fixdate, RFC 850 and asctime.
/// Returns `None` for other formats, for dates that do not exist, and for dates before 1970. The weekday is
/// not checked against the date. `now` (seconds since 1970) decides the century of a two-digit year: the year
/// is at most 50 years ahead.
pub fn parse(text: &[u8], now: u64) -> Option<u64> {
    let text = core::str::from_utf8(text).ok()?;
    if let Some((weekday, rest)) = text.split_once(", ") {
        let rest = rest.strip_suffix(" GMT")?.as_bytes();
        return match rest.len() {
            // 06 Nov 1994 08:49:37
            20 if weekday.len() == 3 && rest[2] == b' ' && rest[6] == b' ' && rest[11] == b' ' => {
                seconds_from(number(&rest[7..11])?, month(&rest[3..6])?, number(&rest[0..2])?, &rest[12..20])
            }
            // 06-Nov-94 08:49:37
            18 if weekday.ends_with("day") && rest[2] == b'-' && rest[6] == b'-' && rest[9] == b' ' => {
                seconds_from(
                    full_year(number(&rest[7..9])?, now),
                    month(&rest[3..6])?,
                    number(&rest[0..2])?,
                    &rest[10..18],
                )
            }
            _ => None,
        };
    }
    // Sun Nov  6 08:49:37 1994
    let t = text.as_bytes();
    if t.len() != 24 || [t[3], t[7], t[10], t[19]] != [b' '; 4] {
        return None;
    }
    let day = if t[8] == b' ' { number(&t[9..10])? } else { number(&t[8..10])? };
    seconds_from(number(&t[20..24])?, month(&t[4..7])?, day, &t[11..19])
}

/// RFC 9110 §5.6.7: a two-digit year that appears to be more than 50 years ahead is the last past year with
/// these digits.
fn full_year(two: u32, now: u64) -> u32 {
    let (this_year, ..) = civil_from_days(now.min(SECONDS_MAX) / 86_400);
    let year = this_year / 100 * 100 + two;
    if year > this_year + 50 { year - 100 } else { year }
}

fn number(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0u32, |value, d| d.is_ascii_digit().then(|| value * 10 + u32::from(d - b'0')))
}

fn month(name: &[u8]) -> Option<u32> {
    MONTHS.iter().position(|m| name == *m).map(|i| i as u32 + 1)
}

fn seconds_from(year: u32, month: u32, day: u32, clock: &[u8]) -> Option<u64> {
    if clock[2] != b':' || clock[5] != b':' {
        return None;
    }
    let (hour, minute, second) = (number(&clock[0..2])?, number(&clock[3..5])?, number(&clock[6..8])?);
    // 60 is a leap second.
    if year < 1970 || day == 0 || day > days_in(year, month) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    Some(days_from_civil(year, month, day) * 86_400 + u64::from(hour * 3600 + minute * 60 + second))
}

const fn is_leap(year: u32) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

const fn days_in(year: u32, month: u32) -> u32 {
    match month {
        2 => 28 + is_leap(year) as u32,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Returns the days from 1970-01-01 to a later date. Years are counted from March, so that a leap day is the
/// last day of its year.
const fn days_from_civil(year: u32, month: u32, day: u32) -> u64 {
    let from_march = (month + 9) % 12;
    let year = (year - (month <= 2) as u32) as u64;
    let day_of_year = ((153 * from_march + 2) / 5 + day - 1) as u64;
    // 719,468 days lie between 0000-03-01 and 1970-01-01.
    year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468
}

/// Converts days since 1970-01-01 to year, month 1 … 12 and day 1 … 31.
const fn civil_from_days(days: u64) -> (u32, u32, u32) {
    let shifted = days + 719_468;
    let (era, in_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (in_era - in_era / 1_460 + in_era / 36_524 - in_era / 146_096) / 365;
    let day_of_year = in_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + (month <= 2) as u64;
    (year as u32, month as u32, (day_of_year - (153 * from_march + 2) / 5 + 1) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: u64 = 1_790_000_000; // 2026

    #[test]
    fn the_three_date_formats_are_equivalent() {
        for text in
            ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
        {
            assert_eq!(parse(text.as_bytes(), NOW), Some(784_111_777), "{text}");
        }
        assert_eq!(&format(784_111_777), b"Sun, 06 Nov 1994 08:49:37 GMT");
    }

    #[test]
    fn known_dates_are_formatted() {
        assert_eq!(&format(0), b"Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(&format(951_782_400), b"Tue, 29 Feb 2000 00:00:00 GMT");
        assert_eq!(&format(u64::MAX), b"Fri, 31 Dec 9999 23:59:59 GMT");
    }

    #[test]
    fn two_digit_years_are_within_50_years() {
        assert_eq!(
            parse(b"Sunday, 06-Nov-76 08:49:37 GMT", NOW),
            parse(b"Fri, 06 Nov 2076 08:49:37 GMT", NOW)
        );
        assert_eq!(
            parse(b"Sunday, 06-Nov-77 08:49:37 GMT", NOW),
            parse(b"Sun, 06 Nov 1977 08:49:37 GMT", NOW)
        );
    }

    #[test]
    fn malformed_dates_are_rejected() {
        for text in [
            "",
            "yesterday",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sun, 32 Nov 1994 08:49:37 GMT",
            "Wed, 29 Feb 2023 08:49:37 GMT",
            "Sun, 06 Nov 1969 08:49:37 GMT",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 06 nov 1994 08:49:37 GMT",
            "Sun, +6 Nov 1994 08:49:37 GMT",
            "Sun Nov  6 08:49:37 19944",
        ] {
            assert_eq!(parse(text.as_bytes(), NOW), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn format_and_parse_are_inverse(seconds in 0..=SECONDS_MAX) {
            prop_assert_eq!(parse(&format(seconds), NOW), Some(seconds));
        }

        #[test]
        fn any_date_parses_without_panic(text in proptest::collection::vec(any::<u8>(), 0..40), now: u64) {
            let _ = parse(&text, now);
        }
    }
}
