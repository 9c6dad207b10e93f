//! A client of Redis that waits for each reply.

use crate::iot::RedisAddress;
use crate::resp::encode_command;
use core::time::Duration;
use ginnel::Error;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

/// Longest wait for a TCP connection, for the next bytes of a reply, and until further bytes of a command are
/// accepted.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest value that is accepted, in bytes: the results of an agent take some ten kilobytes.
const VALUE_BYTES_MAX: usize = 16 << 20;
/// Longest line of a reply in bytes.
const LINE_BYTES_MAX: u64 = 4 << 10;

/// A connection to Redis.
trait Stream: Read + Write + Send {}

impl Stream for TcpStream {}
impl Stream for UnixStream {}

/// A reply of Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// No value.
    Null,
    /// A status or a value.
    Text(String),
    /// A number.
    Number(i64),
    /// Several values.
    Array(Vec<Value>),
}

/// A client of Redis.
pub struct RedisClient {
    name: String,
    stream: BufReader<Box<dyn Stream>>,
}

impl RedisClient {
    /// Connects to a server.
    ///
    /// # Errors
    /// The server's name cannot be resolved, or the server does not accept the connection.
    pub fn connect(address: &RedisAddress) -> Result<Self, Error> {
        let open = || -> io::Result<Box<dyn Stream>> {
            match address.resolve()? {
                RedisAddress::Unix(path) => {
                    let stream = UnixStream::connect(path)?;
                    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
                    stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
                    Ok(Box::new(stream))
                }
                RedisAddress::Tcp(address) => {
                    let stream = TcpStream::connect_timeout(&address, REPLY_TIMEOUT)?;
                    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
                    stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
                    stream.set_nodelay(true)?;
                    Ok(Box::new(stream))
                }
                RedisAddress::Name(name) => Err(io::Error::other(format!("{name} has no address"))),
            }
        };
        let name = address.to_string();
        let stream = open().map_err(|e| Error::application(format!("--redis {name}: {e}")))?;
        Ok(Self { name, stream: BufReader::new(stream) })
    }

    /// Executes a command.
    ///
    /// # Errors
    /// The connection fails, or Redis replies with an error.
    pub fn command(&mut self, words: &[&str]) -> Result<Value, Error> {
        let mut bytes = Vec::new();
        encode_command(&mut bytes, &words.iter().map(|word| word.as_bytes()).collect::<Vec<_>>());
        let reply = self.stream.get_mut().write_all(&bytes).and_then(|()| read_value(&mut self.stream, 0));
        reply.map_err(|e| Error::application(format!("--redis {}: {}: {e}", self.name, words[0])))
    }
}

/// Reads a reply at this depth of nesting.
fn read_value(stream: &mut impl BufRead, depth: u32) -> io::Result<Value> {
    let wrong = || io::Error::other("the server is not a Redis");
    let mut line = Vec::new();
    stream.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
    let line = String::from_utf8(line).map_err(|_| wrong())?;
    if line.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let line = line.strip_suffix("\r\n").ok_or_else(wrong)?;
    let kind = line.chars().next().ok_or_else(wrong)?;
    let text = &line[kind.len_utf8()..];
    let number = || text.parse::<i64>().map_err(|_| wrong());
    match kind {
        '+' => Ok(Value::Text(text.to_owned())),
        '-' => Err(io::Error::other(text.to_owned())),
        ':' => Ok(Value::Number(number()?)),
        '$' => match number()? {
            -1 => Ok(Value::Null),
            len => {
                let len =
                    usize::try_from(len).ok().filter(|len| *len <= VALUE_BYTES_MAX).ok_or_else(wrong)?;
                let mut value = vec![0; len + 2];
                stream.read_exact(&mut value)?;
                value.truncate(len);
                String::from_utf8(value).map(Value::Text).map_err(|_| wrong())
            }
        },
        '*' if depth == 0 => {
            (0..number()?).map(|_| read_value(stream, depth + 1)).collect::<io::Result<_>>().map(Value::Array)
        }
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read() {
        let text = |text: &str| Value::Text(text.into());
        for (bytes, expected) in [
            ("+OK\r\n", text("OK")),
            (":-7\r\n", Value::Number(-7)),
            ("$-1\r\n", Value::Null),
            ("$5\r\na\r\nbc\r\n", text("a\r\nbc")),
            ("*2\r\n$1\r\n1\r\n$2\r\n22\r\n", Value::Array(vec![text("1"), text("22")])),
        ] {
            assert_eq!(read_value(&mut bytes.as_bytes(), 0).unwrap(), expected);
        }
    }

    #[test]
    fn other_bytes_are_errors() {
        for (bytes, expected) in [
            ("", "unexpected end of file"),
            ("-ERR no\r\n", "ERR no"),
            ("HTTP/1.1 400 Bad Request\r\n", "not a Redis"),
            ("$99999999999\r\n", "not a Redis"),
            ("$5\r\nab", "fill whole buffer"),
            ("*1\r\n*1\r\n:1\r\n", "not a Redis"),
            (":1", "not a Redis"),
            ("é\r\n", "not a Redis"),
        ] {
            let error = read_value(&mut bytes.as_bytes(), 0).unwrap_err().to_string();
            assert!(error.contains(expected), "{bytes}: {error}");
        }
    }
}
