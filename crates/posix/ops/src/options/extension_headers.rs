//! Options for the IPv6 extension headers of all packets of a socket (RFC 3542 §4). A socket of the stack has
//! none.

use core::ffi::c_int;
use libc::{IPV6_DSTOPTS, IPV6_HOPOPTS, IPV6_RTHDR, IPV6_RTHDRDSTOPTS};
use rustix::io::Errno;

/// Returns whether an option of the level `IPPROTO_IPV6` is one of them.
pub(super) fn is_option(name: c_int) -> bool {
    matches!(name, IPV6_HOPOPTS | IPV6_RTHDRDSTOPTS | IPV6_RTHDR | IPV6_DSTOPTS)
}

/// Checks a value of `setsockopt`. An empty one removes the header.
///
/// # Errors
/// `EINVAL` for a value that is not a header, in whole units of 8 bytes (`ipv6_set_opt_hdr`); `ENOPROTOOPT`
/// for a header.
pub(super) fn check(value: &[u8]) -> Result<(), Errno> {
    match value {
        [] => Ok(()),
        [_, units, ..] if value.len().is_multiple_of(8) && (usize::from(*units) + 1) * 8 <= value.len() => {
            Err(Errno::NOPROTOOPT)
        }
        _ => Err(Errno::INVAL),
    }
}
