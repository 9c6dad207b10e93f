//! Reading and writing, for streams and their halves.

use super::stream::TcpStream;
use core::fmt;
use core::net::SocketAddr;
use core::task::{Context, Poll};
use std::io;
use std::rc::Rc;

/// The read half of a [`TcpStream`], borrowed.
#[derive(Debug)]
pub struct ReadHalf<'a>(pub(super) &'a TcpStream);

/// The write half of a [`TcpStream`], borrowed.
#[derive(Debug)]
pub struct WriteHalf<'a>(pub(super) &'a TcpStream);

/// The read half of a [`TcpStream`], which a task of its own may own.
#[derive(Debug)]
pub struct OwnedReadHalf(Rc<TcpStream>);

/// The write half of a [`TcpStream`], which a task of its own may own. Dropping it sends FIN after the
/// written data.
#[derive(Debug)]
pub struct OwnedWriteHalf {
    stream: Rc<TcpStream>,
    shutdown_on_drop: bool,
}

/// The halves belong to different streams.
#[derive(Debug)]
pub struct ReuniteError(pub OwnedReadHalf, pub OwnedWriteHalf);

impl fmt::Display for ReuniteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the halves belong to different streams")
    }
}

impl std::error::Error for ReuniteError {}

impl OwnedReadHalf {
    pub(super) fn halves(stream: TcpStream) -> (Self, OwnedWriteHalf) {
        let stream = Rc::new(stream);
        (Self(Rc::clone(&stream)), OwnedWriteHalf { stream, shutdown_on_drop: true })
    }

    /// Joins the halves of a stream.
    ///
    /// # Errors
    /// Returns the halves if they belong to different streams.
    pub fn reunite(self, mut other: OwnedWriteHalf) -> Result<TcpStream, ReuniteError> {
        if !Rc::ptr_eq(&self.0, &other.stream) {
            return Err(ReuniteError(self, other));
        }
        other.shutdown_on_drop = false;
        drop(other);
        match Rc::try_unwrap(self.0) {
            Ok(stream) => Ok(stream),
            Err(_) => unreachable!("a stream has two halves"),
        }
    }
}

impl OwnedWriteHalf {
    /// Drops the half without sending FIN, as long as the read half exists.
    pub fn forget(mut self) {
        self.shutdown_on_drop = false;
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        if self.shutdown_on_drop {
            // Fails only if the connection is over.
            let _ = self.stream.shutdown_write();
        }
    }
}

/// Access to the stream of a half.
trait AsTcpStream {
    fn stream(&self) -> &TcpStream;
}

impl AsTcpStream for TcpStream {
    fn stream(&self) -> &TcpStream {
        self
    }
}

impl AsTcpStream for ReadHalf<'_> {
    fn stream(&self) -> &TcpStream {
        self.0
    }
}

impl AsTcpStream for WriteHalf<'_> {
    fn stream(&self) -> &TcpStream {
        self.0
    }
}

impl AsTcpStream for OwnedReadHalf {
    fn stream(&self) -> &TcpStream {
        &self.0
    }
}

impl AsTcpStream for OwnedWriteHalf {
    fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

macro_rules! reads {
    ($($type:ty),*) => { $(
        impl $type {
            /// Reads data, waiting until there is some. `Ok(0)` is the end of the stream. Dropping the future
            /// loses no data.
            ///
            /// # Errors
            /// An error such as `ConnectionReset` is returned once, after all received data was read.
            pub fn read(&mut self, buffer: &mut [u8]) -> impl Future<Output = io::Result<usize>> {
                self.stream().recv(buffer)
            }

            /// Fills the buffer. If the future is dropped, the data that it has read is lost.
            ///
            /// # Errors
            /// `UnexpectedEof` if the stream ends early; otherwise as for [`read`](Self::read).
            pub async fn read_exact(&mut self, mut buffer: &mut [u8]) -> io::Result<()> {
                while !buffer.is_empty() {
                    match self.stream().recv(buffer).await? {
                        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                        n => buffer = &mut buffer[n..],
                    }
                }
                Ok(())
            }

            /// Appends all data up to the end of the stream to `bytes` and returns its length. If the future
            /// is dropped, the data that it has read is in `bytes`.
            ///
            /// # Errors
            /// As for [`read`](Self::read).
            pub async fn read_to_end(&mut self, bytes: &mut Vec<u8>) -> io::Result<usize> {
                let before = bytes.len();
                loop {
                    // While the task waits, `bytes` has exactly the data that was read.
                    self.stream().readable().await?;
                    let at = bytes.len();
                    bytes.resize(at + READ_STEP, 0);
                    let read = self.stream().try_read(&mut bytes[at..]);
                    bytes.truncate(at + read.as_ref().map_or(0, |n| *n));
                    match read {
                        Ok(0) => return Ok(at - before),
                        Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                        _ => {}
                    }
                }
            }

            /// As [`read`](Self::read), as a `poll` function: the last task that called it is woken.
            ///
            /// # Errors
            /// As for [`read`](Self::read).
            pub fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
                self.stream().poll_recv(cx, buffer)
            }
        }
    )* };
}

/// Bytes by which [`TcpStream::read_to_end`] extends its buffer.
const READ_STEP: usize = 4096;

macro_rules! writes {
    ($($type:ty),*) => { $(
        impl $type {
            /// Writes as much as fits into the send buffer, waiting until there is space, and returns how
            /// much. The data is copied: the stack sends and retransmits it independently of the caller.
            /// Dropping the future writes nothing.
            ///
            /// # Errors
            /// `BrokenPipe` after the end of the connection or after [`shutdown`](Self::shutdown); others,
            /// such as `ConnectionReset`, once.
            pub fn write(&mut self, bytes: &[u8]) -> impl Future<Output = io::Result<usize>> {
                self.stream().send(bytes)
            }

            /// Writes all of `bytes`. If the future is dropped, it is not known how much was written.
            ///
            /// # Errors
            /// As for [`write`](Self::write).
            pub async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
                while !bytes.is_empty() {
                    let n = self.stream().send(bytes).await?;
                    bytes = &bytes[n..];
                }
                Ok(())
            }

            /// Sends FIN after the written data; receiving continues.
            ///
            /// # Errors
            /// `NotConnected` if the connection is over, or its pending error.
            pub async fn shutdown(&mut self) -> io::Result<()> {
                self.stream().shutdown_write()
            }

            /// As [`write`](Self::write), as a `poll` function: the last task that called it is woken.
            ///
            /// # Errors
            /// As for [`write`](Self::write).
            pub fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
                self.stream().poll_send(cx, bytes)
            }

            /// As [`shutdown`](Self::shutdown), as a `poll` function. It is always ready.
            ///
            /// # Errors
            /// As for [`shutdown`](Self::shutdown).
            pub fn poll_shutdown(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(self.stream().shutdown_write())
            }
        }
    )* };
}

macro_rules! addresses {
    ($($type:ty),*) => { $(
        impl $type {
            /// As [`TcpStream::peer_addr`].
            ///
            /// # Errors
            /// As [`TcpStream::peer_addr`].
            pub fn peer_addr(&self) -> io::Result<SocketAddr> {
                self.stream().peer_addr()
            }

            /// As [`TcpStream::local_addr`].
            ///
            /// # Errors
            /// As [`TcpStream::local_addr`].
            pub fn local_addr(&self) -> io::Result<SocketAddr> {
                self.stream().local_addr()
            }

            /// Returns the stream, for options and addresses.
            pub fn as_stream(&self) -> &TcpStream {
                self.stream()
            }
        }
    )* };
}

reads!(TcpStream, ReadHalf<'_>, OwnedReadHalf);
writes!(TcpStream, WriteHalf<'_>, OwnedWriteHalf);
addresses!(ReadHalf<'_>, WriteHalf<'_>, OwnedReadHalf, OwnedWriteHalf);
