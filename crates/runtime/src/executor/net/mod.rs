//! Sockets for tasks. They read like tokio's: [`TcpListener`], [`TcpStream`] and [`UdpSocket`].
//!
//! A socket belongs to the shard whose task made it and stays on its thread. Used elsewhere, its functions give an error that says so.
//!
//! ```compile_fail,E0277
//! fn to_another_thread<T: Send>() {}
//! to_another_thread::<ginnel::net::TcpStream>();
//! ```

mod addr;
mod errors;
mod listener;
mod split;
pub(super) mod state;
mod stream;
mod udp;

pub use addr::ToSocketAddr;
pub use listener::{Incoming, TcpListener};
pub use split::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, ReuniteError, WriteHalf};
pub use stream::TcpStream;
pub use udp::UdpSocket;
