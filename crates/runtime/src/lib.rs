//! Ginnel's runtime and native API, which applications depend on.
//!
//! An application implements [`Handler`]. A shard calls its methods when events occur, with a [`Context`] to
//! act through.

#[cfg(all(test, not(loom)))]
extern crate self as ginnel; // for `fixture`, which test suites outside the library include, too

pub mod broker;
pub mod builder;
pub mod channel;
mod classifier;
pub mod clock;
pub mod coalescing;
pub mod command;
pub mod config;
pub mod context;
pub mod cpu_list;
mod cpu_share;
mod cross_shard;
mod cross_shard_rx;
mod device_rss;
pub mod devices;
mod dispatch;
mod doorbell;
mod engine;
pub mod errno;
pub mod error;
pub mod executor;
#[cfg(all(test, not(loom)))]
mod fixture;
pub mod handler;
pub mod inspect;
pub mod internal_fd;
pub mod kernel_fds;
mod listener_registry;
pub mod own_proc;
mod pending_queues;
mod pin;
mod placement;
mod prioritized_rx;
mod publish;
pub mod published_stack;
pub mod raised_limit;
pub mod raw;
mod realtime;
mod relay;
pub mod run_dir;
mod saved_shard;
pub mod shard;
mod shard_image;
mod shard_router;
mod shard_saver;
pub mod shards;
mod shutdown;
pub mod socket_filter;
mod stages;
pub mod stats;
mod steering_rules;
pub mod stop;
pub mod table_memory;
pub mod timers;
mod wait;
mod yield_policy;

pub use builder::ShardBuilder;
pub use classifier::{FrameDirection, PriorityFunction};
pub use command::{Command, CommandError, Commander};
pub use config::Config;
pub use context::{Context, WorkContext};
pub use devices::{KeptTaps, open_taps};
pub use error::Error;
pub use executor::{Executor, async_fd, compat, net, signal, task, time};
pub use ginnel_devices::random::Random;
pub use ginnel_devices::{memory_file, resource_limit};
pub use ginnel_matcher::Packet;
pub use ginnel_stack::error::{
    ConnectError, GroupError, ListenError, OptionError, RecvError, SendError, Stale,
};
pub use ginnel_stack::events::CloseReason;
pub use ginnel_stack::handle::{Conn, LinkId, Listener, UdpHandle};
pub use ginnel_stack::ip::FlowLabel;
pub use ginnel_stack::multicast::{FilterMode, MulticastOptions, SourceFilter};
pub use ginnel_stack::options::{
    BbrInfo, CaState, ConnectOptions, FastOpenFailure, FastOpenKeys, ListenOptions, PortSharing, SaveSyn,
    SocketOptions, TcpInfo, TcpOption, defer_accept_timeouts,
};
pub use ginnel_stack::priority;
pub use ginnel_stack::stream_position::StreamPosition;
pub use ginnel_stack::tcp::UnorderedBytes;
pub use ginnel_stack::tcp::config::CongestionControl;
pub use ginnel_stack::tcp::source::{PreloadedSource, Source, SourceId};
pub use ginnel_stack::tcp::state::State;
pub use ginnel_stack::time::Instant;
pub use ginnel_stack::udp::{
    Datagram, MembershipLimits, PmtuDiscovery, UdpError, UdpExtendedError, UdpOptions, UdpSendParams,
};
pub use ginnel_stack::wire::checksum::Sum;
pub use handler::{Handler, UrgentData};
pub use kernel_fds::{Interest, KernelFd, Readiness};
pub use published_stack::PublishedStack;
pub use saved_shard::{DescriptorTable, STATE_FORMAT, SavedShard, StateConfig, StateFormat};
pub use shard::{Shard, Turn};
pub use shard_saver::{ShardSaver, StoppedShards};
pub use shards::Shards;
pub use stats::{ShardStats, StatsReader};
pub use steering_rules::{SteerConnection, SteeredFlow};
pub use stop::StopFlag;
pub use timers::Timer;
