//! `AsyncRead`, `AsyncWrite` and `Stream` of the futures crate.

use crate::net::{Incoming, OwnedReadHalf, OwnedWriteHalf, ReadHalf, TcpStream, WriteHalf};
use crate::time::{Instant, Interval};
use core::pin::Pin;
use core::task::{Context, Poll};
use futures_core::Stream;
use futures_io::{AsyncRead, AsyncWrite};
use std::io;

macro_rules! reads {
    ($($type:ty),*) => { $(
        impl AsyncRead for $type {
            fn poll_read(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                buffer: &mut [u8],
            ) -> Poll<io::Result<usize>> {
                (*self).poll_read(cx, buffer)
            }
        }
    )* };
}

macro_rules! writes {
    ($($type:ty),*) => { $(
        impl AsyncWrite for $type {
            fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
                (*self).poll_write(cx, bytes)
            }

            fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(Ok(()))
            }

            /// Sends FIN.
            fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                (*self).poll_shutdown(cx)
            }
        }
    )* };
}

reads!(TcpStream, &TcpStream, ReadHalf<'_>, OwnedReadHalf);
writes!(TcpStream, &TcpStream, WriteHalf<'_>, OwnedWriteHalf);

/// Never ends.
impl Stream for Incoming<'_> {
    type Item = io::Result<TcpStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        (*self).poll_next(cx)
    }
}

/// Never ends.
impl Stream for Interval {
    type Item = Instant;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Instant>> {
        self.poll_tick(cx).map(Some)
    }
}
