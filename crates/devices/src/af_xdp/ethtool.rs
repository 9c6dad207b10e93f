//! The number of receive queues of an interface, as `ethtool -l` shows it.
#![allow(unsafe_code)] // an ioctl's argument has the type that its number says

use rustix::io::Errno;
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::ffi::c_void;
use std::io;

const SIOCETHTOOL: Opcode = 0x8946;
const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// `struct ethtool_channels`.
#[derive(Default)]
#[repr(C)]
struct EthtoolChannels {
    command: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

/// `struct ifreq` as SIOCETHTOOL reads it.
#[repr(C)]
struct EthtoolRequest {
    name: [u8; 16],
    channels: *mut EthtoolChannels,
    padding: [u8; 16],
}

const _: () = assert!(size_of::<EthtoolRequest>() == size_of::<libc::ifreq>());

/// ETHTOOL_GCHANNELS of an interface.
struct GetChannels(EthtoolRequest);

// SAFETY: SIOCETHTOOL takes an `ifreq`, and with this command writes to the memory that `channels` points to,
// which outlives the call.
unsafe impl Ioctl for GetChannels {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        SIOCETHTOOL
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(&mut self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Returns the number of receive queues of an interface: one if the driver does not report it.
pub(super) fn rx_queue_count(interface: &str) -> io::Result<usize> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut channels = EthtoolChannels { command: ETHTOOL_GCHANNELS, ..EthtoolChannels::default() };
    let mut name = [0; 16];
    for (to, from) in name.iter_mut().zip(interface.bytes().take(15)) {
        *to = from;
    }
    let request = EthtoolRequest { name, channels: &raw mut channels, padding: [0; 16] };
    // SAFETY: as `GetChannels` says; `channels` outlives the call.
    match unsafe { ioctl::ioctl(&socket, GetChannels(request)) } {
        Ok(()) => Ok((channels.rx + channels.combined).max(1) as usize),
        Err(Errno::OPNOTSUPP | Errno::PERM) => Ok(1),
        Err(error) => Err(error.into()),
    }
}
