//! Sockets for tasks, with the API of tokio's: [`TcpListener`], [`TcpStream`] and [`UdpSocket`].
//!
//! A socket belongs to the shard whose task created it, and stays on the shard's thread. Its methods return
//! an error if they are called on another shard.
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
pub use stream::{ReceivedBytes, TcpStream};
pub use udp::UdpSocket;
