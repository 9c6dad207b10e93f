//! A device with the layers of `ginnel monitor`.

use ginnel::clock;
use ginnel_devices::mirror::{self, ring};
use ginnel_stack::device::Device;
use std::io;

/// Size of a ring of copies, and of the largest copy of a frame, in bytes, as `ginnel monitor` sets them.
const MIRROR_BYTES: usize = 64 << 20;
const SNAPLEN: usize = 1 << 16;

/// Returns a device whose frames are copied as for `ginnel monitor`. Nobody reads the copies: the rings have
/// room for all of a run.
///
/// # Errors
/// There is no memory.
pub fn mirrored(device: Device) -> io::Result<Device> {
    let ring = || ring::create(MIRROR_BYTES, SNAPLEN, |_| clock::now()).map(|(writer, _)| writer);
    Ok(mirror::wrap(device, ring()?, ring()?))
}
