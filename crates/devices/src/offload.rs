//! What devices without offloads lack, done in software: segmentation and checksums.

/// Largest super-frame in bytes that devices here take: the largest IP packet behind an Ethernet header.
pub const GSO_BYTES_MAX: usize = 65_535 + ginnel_stack::device::ETHERNET_HEADER_BYTES;
