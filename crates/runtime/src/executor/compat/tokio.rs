//! `AsyncRead` and `AsyncWrite` of tokio.

use crate::net::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, TcpStream, WriteHalf};
use core::pin::Pin;
use core::task::{Context, Poll};
use std::io;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

macro_rules! reads {
    ($($type:ty),*) => { $(
        impl AsyncRead for $type {
            fn poll_read(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                buffer: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                let read = (*self).poll_read(cx, buffer.initialize_unfilled());
                read.map_ok(|n| buffer.advance(n))
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

            fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                (*self).poll_shutdown(cx)
            }
        }
    )* };
}

reads!(TcpStream, ReadHalf<'_>, OwnedReadHalf);
writes!(TcpStream, WriteHalf<'_>, OwnedWriteHalf);
