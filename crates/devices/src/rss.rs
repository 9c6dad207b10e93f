//! How an interface distributes received frames to its queues (receive-side scaling), as its driver tells.
//! A stack that knows key and table chooses the shards of connections, and the ports of those that it opens,
//! so that the interface delivers each packet to its shard.

use crate::ethtool::{self, RssSettings};
use std::io;

/// Bytes of a key that the hash of addresses and ports uses. Some adapters have longer keys.
const KEY_BYTES: usize = 40;
/// The bit of the Toeplitz function: `ETH_RSS_HASH_TOP`.
const TOEPLITZ: u8 = 1;
/// Addresses and ports of both ends: `RXH_IP_SRC`, `RXH_IP_DST`, `RXH_L4_B_0_1` and `RXH_L4_B_2_3`.
const ADDRESSES_AND_PORTS: u64 = 0xf0;
/// Flow types whose hashed fields are asked for: `TCP_V4_FLOW` and `TCP_V6_FLOW`.
const FLOW_TYPES: [(u32, &str); 2] = [(1, "IPv4"), (5, "IPv6")];

/// The distribution of an interface that hashes addresses and ports of TCP with the Toeplitz function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rss {
    /// Key of the function.
    pub key: [u8; KEY_BYTES],
    /// Queue of each entry of the indirection table. The low bits of the hash select the entry.
    pub queues: Vec<u32>,
}

/// Reads the distribution of an interface.
///
/// # Errors
/// Says why the shard of a packet cannot be known from its addresses and ports.
pub fn read(interface: &str) -> Result<Rss, String> {
    let failed = |error: io::Error| format!("its driver does not tell: {error}");
    let settings = ethtool::rss(interface).map_err(failed)?;
    let mut fields = [None; FLOW_TYPES.len()];
    for (fields, (flow_type, _)) in fields.iter_mut().zip(FLOW_TYPES) {
        *fields = ethtool::hashed_fields(interface, flow_type).map_err(failed)?;
    }
    evaluate(settings, fields)
}

/// Returns the distribution that a driver's answers describe.
fn evaluate(settings: Option<RssSettings>, fields: [Option<u64>; FLOW_TYPES.len()]) -> Result<Rss, String> {
    let Some(RssSettings { functions, transform, key, queues }) = settings else {
        return Err("its driver does not tell the key of its hash".into());
    };
    if functions != TOEPLITZ {
        return Err("its hash is not the Toeplitz function (ethtool -X … hfunc toeplitz)".into());
    }
    if transform != 0 {
        return Err("its hash does not distinguish the directions of a flow (ethtool -X … xfrm none)".into());
    }
    let Some(&key) = key.first_chunk() else {
        return Err(format!("the key of its hash has {} instead of {KEY_BYTES} bytes", key.len()));
    };
    if !queues.len().is_power_of_two() {
        return Err(format!("its indirection table has {} entries, no power of two", queues.len()));
    }
    for (fields, (_, family)) in fields.iter().zip(FLOW_TYPES) {
        if *fields != Some(ADDRESSES_AND_PORTS) {
            return Err(format!(
                "its hash of TCP over {family} does not have addresses and ports (ethtool -N … rx-flow-hash)"
            ));
        }
    }
    Ok(Rss { key, queues })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const FIELDS: [Option<u64>; 2] = [Some(0xf0); 2];

    fn settings() -> RssSettings {
        RssSettings { functions: TOEPLITZ, transform: 0, key: (0..52).collect(), queues: vec![0, 1, 2, 0] }
    }

    #[test]
    fn longer_keys_are_cut() {
        let rss = evaluate(Some(settings()), FIELDS).unwrap();
        assert_eq!((rss.key.to_vec(), rss.queues), ((0..40).collect(), vec![0, 1, 2, 0]));
    }

    #[test]
    fn unknown_distributions_are_named() {
        let problem = |settings: RssSettings, fields| evaluate(Some(settings), fields).unwrap_err();
        let key = (0..39).collect();
        for (settings, expected) in [
            (RssSettings { functions: 2, ..settings() }, "not the Toeplitz function"),
            (RssSettings { functions: 0, ..settings() }, "not the Toeplitz function"),
            (RssSettings { transform: 1, ..settings() }, "directions of a flow"),
            (RssSettings { key, ..settings() }, "39 instead of 40 bytes"),
            (RssSettings { queues: vec![0, 1, 2], ..settings() }, "3 entries"),
            (RssSettings { queues: Vec::new(), ..settings() }, "0 entries"),
        ] {
            let problem = problem(settings, FIELDS);
            assert!(problem.contains(expected), "{problem}");
        }
        assert!(evaluate(None, FIELDS).unwrap_err().contains("does not tell the key"));
        for (fields, family) in
            [([Some(0x30), Some(0xf0)], "IPv4"), ([Some(0xf0), Some(0x30)], "IPv6"), ([None; 2], "IPv4")]
        {
            let problem = problem(settings(), fields);
            assert!(problem.contains(family) && problem.contains("rx-flow-hash"), "{problem}");
        }
    }

    #[test]
    fn an_interface_without_hash_is_named() {
        assert!(read("lo").unwrap_err().contains("does not tell"));
        assert!(read("nonesuch").unwrap_err().contains("does not tell"));
    }
}
