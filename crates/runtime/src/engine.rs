//! The part of the engine that [`Context`](crate::context::Context) calls.

use core::net::SocketAddr;
use ginnel_stack::device::RxBurst;
use ginnel_stack::error::{ConnectError, ListenError, OptionError, RecvError, SendError, Stale};
use ginnel_stack::events::{Event, InlineData};
use ginnel_stack::handle::{Conn, Listener, PortId};
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use ginnel_stack::tcp::source::{Source, SourceId};
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;

pub(crate) trait Engine {
    fn receive(&mut self, now: Instant, port: PortId, burst: &RxBurst<'_>);
    fn next_event(&mut self) -> Option<Event>;
    fn inline_data<'b>(&self, burst: &RxBurst<'b>, data: &InlineData) -> &'b [u8];
    fn consume(&mut self, conn: Conn, data: InlineData, n: usize, burst: &RxBurst<'_>);
    fn finish_burst(&mut self, burst: &RxBurst<'_>);
    fn advance(&mut self, now: Instant);
    fn transmit(&mut self, now: Instant);
    fn next_deadline(&self) -> Option<Instant>;
    fn accept(&mut self, listener: Listener) -> Option<Conn>;
    fn peek(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError>;
    fn skip(&mut self, conn: Conn, n: usize) -> Result<(), RecvError>;
    fn listen(&mut self, local: SocketAddr, options: ListenOptions) -> Result<Listener, ListenError>;
    fn unlisten(&mut self, listener: Listener) -> Result<(), Stale>;
    fn connect(&mut self, now: Instant, to: SocketAddr, o: ConnectOptions) -> Result<Conn, ConnectError>;
    fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError>;
    fn send_source(&mut self, conn: Conn, id: SourceId, offset: u64, len: u64) -> Result<(), SendError>;
    fn add_source(&mut self, source: Box<dyn Source>) -> SourceId;
    fn release_source(&mut self, id: SourceId);
    fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale>;
    fn close(&mut self, conn: Conn) -> Result<(), Stale>;
    fn abort(&mut self, conn: Conn) -> Result<(), Stale>;
    fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError>;
    fn info(&self, conn: Conn) -> Result<TcpInfo, Stale>;
    fn state(&self, conn: Conn) -> Result<State, Stale>;
    fn set_token(&mut self, conn: Conn, token: u32) -> Result<(), Stale>;
    fn token(&self, conn: Conn) -> Result<u32, Stale>;
}
