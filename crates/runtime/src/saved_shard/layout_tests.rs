//! The types that belong to a format of the saved state.

use super::{STATE_FORMAT, StateFormat};
use crate::channel::ChannelServer;
use crate::shard_image;
use ginnel_stack::stack::StackImage;
use ginnel_testkit::layout::layout_hash;

/// The format that programs write, so that neither part changes alone.
const FORMAT: StateFormat = StateFormat { version: 4, layout: 0x4039_fee6_6bac_bdf8 };

#[test]
fn changed_types_have_a_new_version() {
    // The runtime's own state, the channel's server and the engine.
    let hashes = [shard_image::layout_hash(), ChannelServer::layout_hash(), layout_hash::<StackImage>()];
    let layout = hashes.iter().fold(0u64, |all, hash| all.rotate_left(7) ^ hash);
    assert_eq!(
        STATE_FORMAT.layout, layout,
        "a type of saved states has changed: raise the version of STATE_FORMAT, and write {layout:#018x} there and here"
    );
    assert_eq!(STATE_FORMAT, FORMAT);
}
