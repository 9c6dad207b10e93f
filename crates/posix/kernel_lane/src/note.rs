//! Messages for the operator.

use crate::slot_socket::{borrow, cookie};
use core::fmt;

/// Longest line in bytes; the rest is cut off.
const LINE_BYTES: usize = 256;

/// A line of limited length, without heap memory.
struct Line {
    bytes: [u8; LINE_BYTES],
    len: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let space = &mut self.bytes[self.len..LINE_BYTES - 1];
        let len = text.len().min(space.len());
        space[..len].copy_from_slice(&text.as_bytes()[..len]);
        self.len += len;
        Ok(())
    }
}

fn line(text: fmt::Arguments<'_>) -> Line {
    let mut line = Line { bytes: [0; LINE_BYTES], len: 0 };
    let _ = fmt::write(&mut line, format_args!("ginnel: {text}"));
    line.bytes[line.len] = b'\n';
    line.len += 1;
    line
}

/// Writes a line to standard error, unless that is a socket: the program may have closed standard error, and
/// the number 2 may now belong to a connection of a client. Async-signal-safe.
pub fn note(text: fmt::Arguments<'_>) {
    if let Some(output) = borrow(2).filter(|output| cookie(*output) == 0) {
        let line = line(text);
        let _ = rustix::io::write(output, &line.bytes[..line.len]);
    }
}

#[cfg(test)]
mod tests {
    use super::{LINE_BYTES, line};

    #[test]
    fn a_long_line_is_cut_off() {
        let short = line(format_args!("{} workers", 7));
        assert_eq!(&short.bytes[..short.len], b"ginnel: 7 workers\n");
        let long = line(format_args!("{}{}", "a".repeat(200), "b".repeat(100)));
        assert_eq!((long.len, long.bytes[LINE_BYTES - 1]), (LINE_BYTES, b'\n'));
        assert_eq!(long.bytes[LINE_BYTES - 2], b'b');
    }
}
