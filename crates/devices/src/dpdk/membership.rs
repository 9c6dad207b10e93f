//! Makes the adapter of a kernel interface receive the frames that a DPDK port over the interface needs. The
//! kernel counts the memberships of sockets and drops those of a process that ends, so the interface is left
//! as it was, even if the process is killed.
#![allow(unsafe_code)] // an option of a socket

use core::ffi::c_int;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;

/// The memberships of a packet socket (`PACKET_ADD_MEMBERSHIP`), which end when this value is dropped.
#[derive(Debug)]
pub(super) struct Membership {
    _socket: OwnedFd,
}

impl Membership {
    /// Makes the interface with this index receive all multicast frames, and with `promiscuous` the frames to
    /// all addresses.
    ///
    /// # Errors
    /// The kernel refuses the socket (`EPERM` without `CAP_NET_RAW`), or has no such interface (`ENODEV`).
    pub fn join(interface: u32, promiscuous: bool) -> io::Result<Self> {
        // Without a protocol the socket itself receives nothing.
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        let all_addresses = promiscuous.then_some(libc::PACKET_MR_PROMISC);
        for group in all_addresses.into_iter().chain([libc::PACKET_MR_ALLMULTI]) {
            let group = libc::packet_mreq {
                mr_ifindex: interface as c_int,
                mr_type: group as u16,
                mr_alen: 0,
                mr_address: [0; 8],
            };
            // SAFETY: the kernel reads a `packet_mreq` of this length, which outlives the call.
            let result = unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_PACKET,
                    libc::PACKET_ADD_MEMBERSHIP,
                    core::ptr::from_ref(&group).cast(),
                    size_of::<libc::packet_mreq>() as libc::socklen_t,
                )
            };
            if result != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self { _socket: socket })
    }
}
