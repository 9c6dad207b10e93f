//! Frame devices for Ginnel. Each device is a [`ginnel_stack::device::Device`]: a receiving half and a
//! sending half that work independently.

pub mod af_xdp;
pub mod backlog_limit;
pub mod capture;
pub mod conformance;
pub mod dpdk;
pub mod ethtool;
pub mod faults;
pub mod interface;
mod interface_state;
mod joined;
mod key_values;
pub mod memif;
pub mod memory;
pub mod memory_file;
pub mod mirror;
mod netlink;
pub mod network_namespace;
pub mod offload;
mod partial_checksums;
pub mod peer_credentials;
mod port_filters;
pub mod random;
pub mod relabel;
pub mod resource_limit;
pub mod rss;
mod shared_region;
mod staged;
pub mod switch;
pub mod tap;
