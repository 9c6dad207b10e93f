//! Errors of datagrams to hosts of the same stack, which the next call reports as on Linux.

use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::process::ProcessState;

impl ProcessState {
    /// Gives a host of this stack time to answer the first datagram that a socket has sent to it, if the
    /// socket reports errors. A host on the loopback of Linux has answered by the time that `send` returns.
    pub(super) fn await_local_error(&mut self, file: FileId) {
        let Ok(socket) = self.files.socket(file) else { return };
        let SocketRole::Udp(udp) = socket.role else { return };
        let is_on = |option| socket.options.is_on(option);
        if udp.peer.is_none() && !is_on("IP_RECVERR") && !is_on("IPV6_RECVERR") {
            return;
        }
        self.client.settle();
    }
}
