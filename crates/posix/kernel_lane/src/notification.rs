//! A socket that becomes readable in all epoll sets which wait for it.
//!
//! The program may close its number, and another descriptor may get it. A socket has a cookie by which it is
//! recognised; an eventfd has none.

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, getsockname,
    recv, send, socket_with,
};

/// Creates a datagram socket that is connected to itself: it receives what it sends, and nothing else.
///
/// # Errors
/// The kernel's error.
pub fn create() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    // Without a name the kernel chooses one.
    bind(&socket, &SocketAddrUnix::new_unnamed())?;
    connect(&socket, &getsockname(&socket)?)?;
    Ok(socket)
}

/// Makes the socket readable once more, which edge-triggered epoll sets report. Safe in a signal handler.
pub fn notify(socket: BorrowedFd<'_>) {
    // Nobody else reads, and the queue of the socket is finite.
    let mut byte = [0u8; 1];
    while recv(socket, &mut byte, RecvFlags::DONTWAIT).is_ok() {}
    let _ = send(socket, &byte, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
    use rustix::fd::AsFd;
    use rustix::time::Timespec;

    #[test]
    fn each_notification_wakes_all_sets() {
        let socket = create().unwrap();
        let sets = [(); 2].map(|()| epoll::create(CreateFlags::CLOEXEC).unwrap());
        for set in &sets {
            epoll::add(set, &socket, EventData::new_u64(7), EventFlags::IN | EventFlags::ET).unwrap();
        }
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = |set: &OwnedFd| {
            let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 4];
            epoll::wait(set, &mut events, Some(&at_once)).unwrap()
        };
        // Many more than the kernel would queue.
        for _ in 0..1000 {
            assert_eq!(sets.each_ref().map(ready), [0, 0]);
            notify(socket.as_fd());
            assert_eq!(sets.each_ref().map(ready), [1, 1]);
        }
    }
}
