//! The number of receive queues of an interface, as `ethtool -l` shows it, and its driver (`ethtool -i`).
#![allow(unsafe_code)] // an ioctl's argument has the type that its number says

use rustix::io::Errno;
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::ffi::c_void;
use std::io;

const SIOCETHTOOL: Opcode = 0x8946;
const ETHTOOL_GDRVINFO: u32 = 0x03;
const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// `struct ethtool_drvinfo`. Only the driver's name is used.
#[repr(C)]
struct EthtoolDriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

const _: () = assert!(size_of::<EthtoolDriverInfo>() == 196);

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
    data: *mut c_void,
    padding: [u8; 16],
}

const _: () = assert!(size_of::<EthtoolRequest>() == size_of::<libc::ifreq>());

/// A query of an interface.
struct EthtoolQuery(EthtoolRequest);

// SAFETY: SIOCETHTOOL takes an `ifreq`, and with the commands of this module writes to the structure that
// `data` points to, which outlives the call.
unsafe impl Ioctl for EthtoolQuery {
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

/// Fills in the structure of a command.
///
/// # Safety
/// `T` is the structure of the command at its start.
unsafe fn query<T>(interface: &str, structure: &mut T) -> io::Result<Result<(), Errno>> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut name = [0; 16];
    for (to, from) in name.iter_mut().zip(interface.bytes().take(15)) {
        *to = from;
    }
    let request = EthtoolRequest { name, data: std::ptr::from_mut(structure).cast(), padding: [0; 16] };
    // SAFETY: as `EthtoolQuery` says; `structure` outlives the call.
    Ok(unsafe { ioctl::ioctl(&socket, EthtoolQuery(request)) })
}

/// Returns the number of receive queues of an interface: one if the driver does not report it.
pub(super) fn rx_queue_count(interface: &str) -> io::Result<usize> {
    let mut channels = EthtoolChannels { command: ETHTOOL_GCHANNELS, ..EthtoolChannels::default() };
    // SAFETY: the structure of this command.
    match unsafe { query(interface, &mut channels)? } {
        Ok(()) => Ok((channels.rx + channels.combined).max(1) as usize),
        Err(Errno::OPNOTSUPP | Errno::PERM) => Ok(1),
        Err(error) => Err(error.into()),
    }
}

/// Returns the name of an interface's driver, if the kernel tells.
pub(super) fn driver(interface: &str) -> Option<String> {
    let mut info = EthtoolDriverInfo { command: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
    // SAFETY: the structure of this command.
    unsafe { query(interface, &mut info) }.ok()?.ok()?;
    let name = info.driver.split(|byte| *byte == 0).next().unwrap_or_default();
    (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
}
