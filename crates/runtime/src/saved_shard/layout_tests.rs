//! The types that belong to a version of the saved state.

use super::STATE_VERSION;
use crate::channel::ChannelServer;
use crate::shard_image;
use ginnel_stack::stack::StackImage;
use ginnel_testkit::layout::layout_hash;

/// Contains the version, and hashes of the layouts of the runtime's own state, the channel's server and the
/// engine.
const VERSION_AND_HASHES: (u32, [u64; 3]) =
    (1, [0x5209_e079_1afe_97ae, 0xfe65_9f1d_ce5e_fb8b, 0xa16c_7abf_c9f8_a117]);

#[test]
fn changed_types_have_a_new_version() {
    let hashes = [shard_image::layout_hash(), ChannelServer::layout_hash(), layout_hash::<StackImage>()];
    assert_eq!(
        (STATE_VERSION, hashes),
        VERSION_AND_HASHES,
        "a type of saved states has changed: raise STATE_VERSION, and write the hashes {hashes:#018x?} here"
    );
}
