//! The ioctls of `/dev/net/tun`, from `linux/if_tun.h`.
#![allow(unsafe_code)] // an ioctl's argument has the type that its number says

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, Result};
use rustix::ioctl::{IntegerSetter, Opcode, Setter, Updater, ioctl, opcode};
use std::ffi::c_int;
use std::os::fd::RawFd;

const IFF_TAP: u16 = 0x0002;
const IFF_MULTI_QUEUE: u16 = 0x0100;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;

const TUNSETIFF: Opcode = opcode::write::<c_int>(b'T', 202);
const TUNSETOFFLOAD: Opcode = opcode::write::<u32>(b'T', 208);
const TUNSETSTEERINGEBPF: Opcode = opcode::read::<c_int>(b'T', 224);
const TUNSETVNETHDRSZ: Opcode = opcode::write::<c_int>(b'T', 216);

/// The other side may leave checksums to this side.
pub(super) const TUN_F_CSUM: u32 = 0x01;
/// The other side may send TCP super-frames: of IPv4, of IPv6, and with CWR.
pub(super) const TUN_F_TSO: u32 = 0x02 | 0x04 | 0x08;
/// The other side may send UDP super-frames of IPv4 and IPv6 (Linux 6.2).
pub(super) const TUN_F_USO: u32 = 0x20 | 0x40;

/// `struct ifreq` as TUNSETIFF reads and writes it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: u16,
    padding: [u8; 22],
}

const _: () = assert!(size_of::<InterfaceRequest>() == size_of::<libc::ifreq>());

/// Opens one queue of the TAP device `name`, which is created if it does not exist. The kernel replaces `%d`
/// in the name by a free number. Returns the nonblocking descriptor of the queue, and the name of the device.
/// `name` has at most 15 bytes.
pub(super) fn open_queue(name: &str, multi_queue: bool) -> Result<(OwnedFd, String)> {
    match open_queue_as(name, multi_queue) {
        // A persistent device accepts only queues of the kind (single or multi-queue) that it was created
        // for.
        Err(Errno::INVAL) if !multi_queue => open_queue_as(name, true),
        result => result,
    }
}

fn open_queue_as(name: &str, multi_queue: bool) -> Result<(OwnedFd, String)> {
    let fd = open("/dev/net/tun", OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    let flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | if multi_queue { IFF_MULTI_QUEUE } else { 0 };
    let mut request = InterfaceRequest { name: [0; 16], flags, padding: [0; 22] };
    request.name[..name.len().min(15)].copy_from_slice(&name.as_bytes()[..name.len().min(15)]);
    // SAFETY: TUNSETIFF reads a `struct ifreq` and writes one back (although the macro of its number says
    // int).
    unsafe { ioctl(&fd, Updater::<TUNSETIFF, _>::new(&mut request)) }?;
    let end = request.name.iter().position(|&byte| byte == 0).unwrap_or(16);
    Ok((fd, String::from_utf8_lossy(&request.name[..end]).into_owned()))
}

/// Sets the length in bytes of the header in front of each frame.
pub(super) fn set_header_len(fd: &OwnedFd, bytes: usize) -> Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads an int.
    unsafe { ioctl(fd, Setter::<TUNSETVNETHDRSZ, c_int>::new(bytes as c_int)) }
}

/// Tells the kernel which offloads this side supports in the frames that it reads.
pub(super) fn set_offloads(fd: &OwnedFd, flags: u32) -> Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its flags as the argument itself.
    unsafe { ioctl(fd, IntegerSetter::<TUNSETOFFLOAD>::new_usize(flags as usize)) }
}

/// Makes the kernel choose the queue of each frame by a BPF program, whose descriptor may be closed then.
pub(super) fn set_steering(fd: &OwnedFd, program: RawFd) -> Result<()> {
    // SAFETY: TUNSETSTEERINGEBPF reads an int (although its number says that it writes one).
    unsafe { ioctl(fd, Setter::<TUNSETSTEERINGEBPF, c_int>::new(program)) }
}

/// Makes the device outlive its queues.
#[cfg(all(test, not(loom)))]
pub(super) fn set_persistent(fd: &OwnedFd) -> Result<()> {
    const TUNSETPERSIST: Opcode = opcode::write::<c_int>(b'T', 203);
    // SAFETY: TUNSETPERSIST takes its argument as an integer.
    unsafe { ioctl(fd, IntegerSetter::<TUNSETPERSIST>::new_usize(1)) }
}
