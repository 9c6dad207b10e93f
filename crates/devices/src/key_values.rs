//! The text form of a device's options: `key=value` pairs separated by commas.

use std::fmt::Display;
use std::str::FromStr;

/// Returns the pairs in their order. A part without `=` and a repeated key are errors, which name it.
pub(crate) fn pairs(text: &str) -> impl Iterator<Item = Result<(&str, &str), String>> {
    let mut seen = Vec::new();
    text.split(',').map(move |pair| {
        let (key, value) =
            pair.split_once('=').ok_or_else(|| format!("\"{pair}\" is not of the form key=value"))?;
        if seen.contains(&key) {
            return Err(format!("{key}: is repeated"));
        }
        seen.push(key);
        Ok((key, value))
    })
}

/// Returns the value that `all` lists for the word `value` of the option `key`.
///
/// # Errors
/// The word is not listed. The text names the key and the words that it takes.
pub(crate) fn one_of<T, const N: usize>(key: &str, value: &str, all: [(&str, T); N]) -> Result<T, String> {
    let names = all.each_ref().map(|(name, _)| *name).join(", ");
    let found = all.into_iter().find(|(name, _)| *name == value);
    found.map(|(_, listed)| listed).ok_or_else(|| format!("{key}: \"{value}\" is not one of {names}"))
}

/// Parses a number; every value of its type is valid.
///
/// # Errors
/// Names the key, the value, and `example`, a number that the key takes.
pub(crate) fn number<T: FromStr + Display>(key: &str, value: &str, example: T) -> Result<T, String> {
    let wrong = || format!("{key}: \"{value}\" is not a number, as in {key}={example}, or too large");
    value.parse().map_err(|_| wrong())
}

/// Parses a number in a range.
///
/// # Errors
/// Names the key, the value and the range.
pub(crate) fn number_in<T: FromStr + PartialOrd + Display>(
    key: &str,
    value: &str,
    range: core::ops::RangeInclusive<T>,
) -> Result<T, String> {
    let (least, most) = (range.start(), range.end());
    let parsed = value.parse().ok().filter(|number| range.contains(number));
    parsed.ok_or_else(|| format!("{key}: \"{value}\" is not a number from {least} to {most}"))
}
