//! `IPV6_ADDR_PREFERENCES` (RFC 5014): which source addresses a program prefers.

use core::ffi::c_int;
use rustix::io::Errno;

/// The option's name in the table.
pub(super) const NAME: &str = "IPV6_ADDR_PREFERENCES";

const TMP: c_int = 1;
const PUBLIC: c_int = 2;
const COA: c_int = 4;
const CGA: c_int = 8;
const PUBTMP_DEFAULT: c_int = 0x100;
const HOME: c_int = 0x400;
const NONCGA: c_int = 0x800;

/// Reads the value of `setsockopt`, which replaces the preferences (`ip6_sock_set_addr_preferences`).
///
/// # Errors
/// `EINVAL` if the value has two bits of one group.
pub(super) fn read(value: c_int) -> Result<c_int, Errno> {
    let groups = [TMP | PUBLIC | PUBTMP_DEFAULT, COA | HOME, CGA | NONCGA];
    match groups.iter().all(|group| (value & group).count_ones() <= 1) {
        true => Ok(value & (TMP | PUBLIC | COA)),
        false => Err(Errno::INVAL),
    }
}

/// Returns the value of `getsockopt`, which has a bit of the first two groups.
pub(super) fn reported(preferences: Option<c_int>) -> c_int {
    let preferences = preferences.unwrap_or(0);
    let kind = match preferences & (TMP | PUBLIC) {
        0 => PUBTMP_DEFAULT,
        kind => kind,
    };
    kind | if preferences & COA != 0 { COA } else { HOME }
}
