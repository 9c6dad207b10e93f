//! A terminal on which a command redraws its output in place, and which it restores.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use std::io::{self, IsTerminal, Stdin, Write};
use std::time::Duration;

/// Switches to the alternate screen and hides the cursor; and back (xterm's control sequences).
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[H";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The terminal of this process as an alternate screen, with keys that arrive at once. Dropping the value
/// restores the terminal.
pub struct Terminal {
    stdin: Stdin,
    /// The modes that dropping the value restores; `None` if standard input is no terminal.
    saved: Option<Termios>,
    /// Standard input can give keys.
    has_keys: bool,
}

impl Terminal {
    /// Takes over the terminal, or returns `None` if standard output is not a terminal.
    ///
    /// # Errors
    /// The terminal cannot be written.
    pub fn open() -> io::Result<Option<Self>> {
        if !io::stdout().is_terminal() {
            return Ok(None);
        }
        let stdin = io::stdin();
        let saved = stdin.is_terminal().then(|| tcgetattr(&stdin).ok()).flatten();
        if let Some(saved) = &saved {
            let mut modes = saved.clone();
            // Ctrl-C still sends SIGINT. Ctrl-Z and Ctrl-\ would leave the terminal as it is now.
            modes.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            modes.special_codes[SpecialCodeIndex::VSUSP] = 0;
            modes.special_codes[SpecialCodeIndex::VQUIT] = 0;
            let _ = tcsetattr(&stdin, OptionalActions::Flush, &modes);
        }
        // From here on the value restores the terminal, also after an error.
        let terminal = Self { stdin, has_keys: saved.is_some(), saved };
        let mut out = io::stdout().lock();
        out.write_all(ENTER.as_bytes())?;
        out.flush()?;
        Ok(Some(terminal))
    }

    /// Waits for a key, for `timeout` at most.
    pub fn key(&mut self, timeout: Duration) -> Option<u8> {
        if !self.has_keys {
            std::thread::sleep(timeout);
            return None;
        }
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut waiting = [PollFd::new(&self.stdin, PollFlags::IN)];
        match poll(&mut waiting, Some(&timeout)) {
            Ok(1..) => {}
            Ok(0) | Err(Errno::INTR) => return None,
            Err(_) => {
                self.has_keys = false;
                return None;
            }
        }
        let mut byte = [0];
        match read(&self.stdin, &mut byte) {
            Ok(1) => Some(byte[0]),
            Err(Errno::INTR | Errno::AGAIN) => None,
            // The terminal has gone, and the hang-up signal ends the command; or the terminal has another
            // process group in the foreground. Reading again would fail at once.
            _ => {
                self.has_keys = false;
                None
            }
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(saved) = &self.saved {
            let _ = tcsetattr(&self.stdin, OptionalActions::Flush, saved);
        }
        let mut out = io::stdout().lock();
        let _ = out.write_all(LEAVE.as_bytes()).and_then(|()| out.flush());
    }
}

/// Returns the rows and columns of the terminal at standard output, if it has a size.
pub fn size() -> Option<(usize, usize)> {
    let size = tcgetwinsize(io::stdout()).ok()?;
    Some((usize::from(size.ws_row), usize::from(size.ws_col)))
}

/// Returns the escape sequences that redraw the screen without flicker: each line overwrites the former one,
/// and the rest of the line is cleared. A line that fills the row has no rest: the cursor is still on the
/// last character, which clearing would remove. `hint` says how to see the rows that do not fit.
pub fn screen(lines: &[&str], hint: &str, size: Option<(usize, usize)>) -> String {
    let (rows, columns) = size.filter(|size| size.0 > 2 && size.1 > 0).unwrap_or((usize::MAX, usize::MAX));
    let mut out = String::from("\x1b[H");
    // The cursor ends on a line of its own.
    let fit = lines.len().min(rows - 1);
    for line in &lines[..fit] {
        out.extend(line.chars().take(columns));
        out.push_str(if line.chars().count() < columns { "\x1b[K\n" } else { "\n" });
    }
    out.push_str("\x1b[J");
    if fit < lines.len() {
        let hidden = format!("… {} more rows: {hint}", lines.len() - fit);
        out.extend(hidden.chars().take(columns));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::screen;

    #[test]
    fn the_screen_is_overwritten_without_scrolling() {
        let all = screen(&["title", "one", "two"], "use --filter", Some((10, 80)));
        assert_eq!(all, "\x1b[Htitle\x1b[K\none\x1b[K\ntwo\x1b[K\n\x1b[J");
        let cut = screen(&["title", "one", "two", "three"], "use --filter", Some((3, 12)));
        assert_eq!(cut, "\x1b[Htitle\x1b[K\none\x1b[K\n\x1b[J… 2 more row");
        assert!(!cut.ends_with('\n'), "that would scroll");
    }

    #[test]
    fn full_lines_keep_their_last_character() {
        let all = screen(&["12345678", "1234567", "123456789"], "", Some((10, 8)));
        assert_eq!(all, "\x1b[H12345678\n1234567\x1b[K\n12345678\n\x1b[J");
    }
}
