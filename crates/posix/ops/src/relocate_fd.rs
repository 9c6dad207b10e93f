//! Relocation of internal descriptors. A program may replace any number (`dup2`), even that of an internal
//! descriptor, which must move to another number then.

use crate::Ops;
use crate::descriptor;
use crate::fd_passing::PassedKernelSocket;
use crate::file::FileKind;
use crate::process::ProcessState;
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// Must be called before the program replaces the descriptor of a number. If an internal descriptor has
    /// this number, it moves to another one.
    ///
    /// A thread that is about to sleep may still use the old number: a program that replaces unknown
    /// descriptors while other threads wait loses at most one wake-up, until the next one.
    ///
    /// # Errors
    /// `EBUSY` in a signal handler that interrupted a call, `EMFILE` if there is no other number.
    pub fn relocate_fd(&self, number: RawFd) -> Result<(), Errno> {
        if !descriptor::is_internal_in_use(number) {
            return Ok(());
        }
        let mut state = self.lock().map_err(|_| Errno::BUSY)?;
        if let Some(other) = state.relocate_fd(number)? {
            for file in state.files.ids() {
                if let Ok(set) = state.files.epoll(file) {
                    set.renumber_sentinel(number, other);
                }
            }
            descriptor::renumber_internal(number, other);
            self.note_internal_fds(&state);
            if let Some(report) = &state.report {
                report.clear(number);
                report.write(other, crate::descriptor_report::ReportEntry::Internal);
            }
        }
        Ok(())
    }
}

impl ProcessState {
    fn relocate_fd(&mut self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        let channel_fds = self.client.all().iter().flat_map(|client| client.internal_fds());
        for fd in channel_fds {
            if let Some(other) = fd.relocate_from(number)? {
                return Ok(Some(other));
            }
        }
        if let Some(attachment) = &self.attachment
            && let Some(other) = attachment.relocate_from(number)?
        {
            return Ok(Some(other));
        }
        if let Some(other) = self.proxy_fds.relocate(number)? {
            return Ok(Some(other));
        }
        let report = self.report.iter().map(|report| &report.file);
        let passed = self.passed_kernel_sockets.iter().map(PassedKernelSocket::owner);
        for fd in self.waiters.own_fds().chain(passed).chain(report) {
            if let Some(other) = fd.relocate(number)? {
                return Ok(Some(other));
            }
        }
        for id in self.files.ids() {
            let other = match &self.files.get(id).kind {
                FileKind::Epoll(set) => set.relocate(number)?,
                FileKind::Socket(socket) => match &socket.flow_labels {
                    Some(labels) => labels.kernel().relocate(number)?,
                    None => None,
                },
                FileKind::Free => None,
            };
            if other.is_some() {
                return Ok(other);
            }
        }
        Ok(None)
    }
}
