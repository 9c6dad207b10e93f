//! Calls with buffers that cannot be written.
#![allow(unsafe_code)] // passes addresses at which nothing is

use super::unordered::{PART, receiver};
use super::*;

/// Bytes that were taken early and could not be written to the program's buffers stay readable.
#[test]
fn early_bytes_stay_readable_after_efault() {
    let mut hosts = receiver();
    hosts.send_part(b'a', 0, false);
    hosts.send_part(b'b', 0, true);
    hosts.send_part(b'c', HIGH, false);
    hosts.wait(1);
    let mut start = [0; 8];
    let bad = |len| {
        // SAFETY: nothing is at the address, and the test reads nothing from there.
        unsafe { UserSliceMut::from_raw(core::ptr::without_provenance_mut(64), len) }.unwrap()
    };
    let mut buffers = [UserSliceMut::new(&mut start), bad(100)];
    let fault = hosts.ops.recv_from(hosts.fds[0], &mut buffers, 0, 64);
    assert_eq!(fault.map(|received| received.count), Err(Errno::FAULT));
    assert_eq!(hosts.wait(1), [0], "still readable");
    assert_eq!(hosts.recv_at(10), Ok((vec![b'c'; 10], Some(64))));
    let fault = hosts.ops.recv_from(hosts.fds[0], &mut [bad(5)], 0, 64);
    assert_eq!(fault.map(|received| received.count), Err(Errno::FAULT));
    hosts.run(Duration::from_millis(500));
    assert_eq!(hosts.recv_at(100), Ok((vec![b'c'; 22], Some(74))));
    let before = [[b'a'; PART], [b'b'; PART]].concat();
    assert_eq!(hosts.recv_at(100), Ok((before, Some(0))));
    assert_eq!((hosts.recv_at(100), hosts.wait(1)), (Err(Errno::AGAIN), vec![]));
}
