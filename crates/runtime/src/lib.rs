//! Ginnel's runtime and native API: what an application depends on.
//!
//! An application implements [`Handler`]; a shard calls it when something happens, with a [`Context`] to act through.

mod bell;
mod board;
pub mod builder;
pub mod channel;
pub mod clock;
pub mod command;
pub mod config;
pub mod context;
mod departure;
pub mod devices;
mod dispatch;
pub mod door;
mod engine;
pub mod errno;
pub mod error;
pub mod executor;
pub mod handler;
pub mod huge_pages;
pub mod inspect;
mod mail;
mod mailbox;
pub mod own_fd;
mod pace;
mod peers;
mod pin;
mod placement;
pub mod presence;
pub mod raw;
mod realtime;
pub mod run_dir;
pub mod shard;
pub mod shards;
mod show;
pub mod stats;
pub mod stop;
pub mod timers;
mod wait;
mod yields;

pub use builder::ShardBuilder;
pub use command::{Command, CommandError, Commander};
pub use config::Config;
pub use context::{Context, WorkContext};
pub use error::Error;
pub use executor::{Executor, compat, net, signal, task, time};
pub use ginnel_devices::random::Random;
pub use ginnel_stack::error::{ConnectError, ListenError, OptionError, RecvError, SendError, Stale};
pub use ginnel_stack::events::CloseReason;
pub use ginnel_stack::handle::{Conn, Listener, UdpHandle};
pub use ginnel_stack::options::{
    CaState, ConnectOptions, ListenOptions, SaveSyn, SocketOptions, TcpInfo, TcpOption,
};
pub use ginnel_stack::priority;
pub use ginnel_stack::tcp::config::CongestionControl;
pub use ginnel_stack::tcp::source::{PreloadedSource, Source, SourceId};
pub use ginnel_stack::tcp::state::State;
pub use ginnel_stack::time::Instant;
pub use ginnel_stack::udp::{Datagram, PathMtu, UdpError, UdpOptions, UdpReport, UdpSending};
pub use ginnel_stack::wire::checksum::Sum;
pub use handler::{Handler, UrgentData};
pub use presence::Presence;
pub use shard::{Shard, Turn};
pub use shards::Shards;
pub use stats::{ShardStats, StatsReader};
pub use stop::StopFlag;
pub use timers::Timer;
