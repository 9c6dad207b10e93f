//! A scanner over the text of a script that tracks the line number for error messages.

use core::fmt;
use core::time::Duration;

/// A syntax error in a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line, from 1.
    pub line: u32,
    /// Description of the error.
    pub message: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for ParseError {}

/// Result of a parsing step.
pub type ParseResult<T> = Result<T, ParseError>;

/// A cursor over the text.
pub struct Scanner<'a> {
    rest: &'a str,
    line: u32,
}

impl<'a> Scanner<'a> {
    /// Creates a scanner at the beginning of `text`, which is line 1.
    pub fn new(text: &'a str) -> Self {
        Self { rest: text, line: 1 }
    }

    /// Returns the current line, from 1.
    pub fn line(&self) -> u32 {
        self.line
    }

    /// Returns an error at the current line.
    pub fn error<T>(&self, message: impl Into<String>) -> ParseResult<T> {
        Err(ParseError { line: self.line, message: message.into() })
    }

    /// Returns an error that names the expected and the found text.
    pub fn expected<T>(&self, what: &str) -> ParseResult<T> {
        let found: String = self.rest.chars().take_while(|c| *c != '\n').take(30).collect();
        let found = if self.rest.is_empty() { "the end of the file".into() } else { format!("`{found}`") };
        self.error(format!("expected {what}, found {found}"))
    }

    fn advance(&mut self, bytes: usize) {
        let (eaten, rest) = self.rest.split_at(bytes);
        self.line += eaten.bytes().filter(|b| *b == b'\n').count() as u32;
        self.rest = rest;
    }

    /// Skips white space and comments, including line breaks.
    pub fn skip_space(&mut self) {
        loop {
            let space = self.rest.len() - self.rest.trim_start().len();
            self.advance(space);
            if self.rest.starts_with("//") {
                self.advance(self.rest.find('\n').unwrap_or(self.rest.len()));
            } else if self.rest.starts_with("/*") {
                self.advance(self.rest.find("*/").map_or(self.rest.len(), |at| at + 2));
            } else {
                return;
            }
        }
    }

    /// Returns whether only white space and comments remain.
    pub fn at_end(&mut self) -> bool {
        self.skip_space();
        self.rest.is_empty()
    }

    /// Returns the next character after white space, without consuming it.
    pub fn peek(&mut self) -> Option<char> {
        self.skip_space();
        self.rest.chars().next()
    }

    /// Returns the next character without skipping white space.
    pub fn peek_here(&self) -> Option<char> {
        self.rest.chars().next()
    }

    /// Returns whether `text` follows after white space.
    pub fn looking_at(&mut self, text: &str) -> bool {
        self.skip_space();
        self.rest.starts_with(text)
    }

    /// Consumes `text` if it follows after white space.
    pub fn take(&mut self, text: &str) -> bool {
        self.skip_space();
        self.take_here(text)
    }

    /// Consumes `text` if it follows immediately.
    pub fn take_here(&mut self, text: &str) -> bool {
        let found = self.rest.starts_with(text);
        if found {
            self.advance(text.len());
        }
        found
    }

    /// Consumes `text`.
    ///
    /// # Errors
    /// If other text follows.
    pub fn expect(&mut self, text: &str) -> ParseResult<()> {
        if self.take(text) { Ok(()) } else { self.expected(&format!("`{text}`")) }
    }

    /// Consumes `word` if it follows as a whole word.
    pub fn take_word(&mut self, word: &str) -> bool {
        self.skip_space();
        let follows = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let found = self.rest.starts_with(word) && !self.rest[word.len()..].starts_with(follows);
        if found {
            self.advance(word.len());
        }
        found
    }

    /// Consumes the characters for which `wanted` holds, after white space. The result may be empty.
    pub fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        self.skip_space();
        let end = self.rest.find(|c| !wanted(c)).unwrap_or(self.rest.len());
        let text = &self.rest[..end];
        self.advance(end);
        text
    }

    /// Consumes and returns everything up to `end`, and consumes `end`.
    ///
    /// # Errors
    /// If `end` does not occur.
    pub fn take_until(&mut self, end: &str) -> ParseResult<&'a str> {
        let Some(at) = self.rest.find(end) else { return self.error(format!("`{end}` is missing")) };
        let text = &self.rest[..at];
        self.advance(at + end.len());
        Ok(text)
    }

    /// Consumes a name: letters, digits and underscores.
    ///
    /// # Errors
    /// If no name follows.
    pub fn identifier(&mut self) -> ParseResult<&'a str> {
        match self.peek() {
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                Ok(self.take_while(|c| c.is_ascii_alphanumeric() || c == '_'))
            }
            _ => self.expected("a name"),
        }
    }

    /// Returns whether a digit follows after white space.
    pub fn at_digit(&mut self) -> bool {
        self.peek().is_some_and(|c| c.is_ascii_digit())
    }

    /// Consumes an unsigned number, decimal or `0x…`.
    ///
    /// # Errors
    /// If no number follows.
    pub fn number(&mut self) -> ParseResult<u64> {
        if !self.at_digit() {
            return self.expected("a number");
        }
        let text = self.take_while(|c| c.is_ascii_alphanumeric());
        match parse_number(text) {
            Some(value) => Ok(value),
            None => self.error(format!("`{text}` is not a number")),
        }
    }

    /// Consumes an unsigned number that fits `T`.
    ///
    /// # Errors
    /// If no number follows or it is too large.
    pub fn number_as<T: TryFrom<u64>>(&mut self) -> ParseResult<T> {
        let value = self.number()?;
        T::try_from(value).or_else(|_| self.error(format!("{value} is too large")))
    }

    /// Consumes a time in seconds with up to nine decimal places.
    ///
    /// # Errors
    /// If no time follows, or it is out of range.
    pub fn seconds(&mut self) -> ParseResult<Duration> {
        self.skip_space();
        // `0...` is a range that starts at 0, so a dot belongs to the number only if a digit follows it.
        let bytes = self.rest.as_bytes();
        let digits = |from: usize| bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
        let whole = digits(0);
        let mut end = whole;
        if bytes.get(end) == Some(&b'.') && bytes.get(end + 1).is_some_and(u8::is_ascii_digit) {
            end += 1 + digits(end + 1);
        }
        if end == 0 {
            return self.expected("a time in seconds");
        }
        let text = &self.rest[..end];
        let fraction = text.get(whole + 1..).unwrap_or("");
        if fraction.len() > 9 {
            return self.error("more than nine decimal places");
        }
        let seconds = if whole == 0 { Some(0) } else { text[..whole].parse().ok() };
        let nanos = format!("{fraction:0<9}").parse().ok();
        let (Some(seconds), Some(nanos)) = (seconds, nanos) else { return self.error("time out of range") };
        self.advance(end);
        Ok(Duration::new(seconds, nanos))
    }
}

/// Parses a decimal or `0x` number.
pub fn parse_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}
