//! A program may put whatever it likes under any number (`dup2`), also where one of the library's own descriptors stands: that one goes elsewhere.

use crate::Ops;
use crate::descriptor;
use crate::file::FileKind;
use crate::process::ProcessState;
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// To be called before something of the program's is put under a number. If one of the library's own descriptors has it, that has another from now on.
    ///
    /// A thread that is on its way to sleep may have the old number in its hand: who puts descriptors over unknown ones while other threads wait loses at most one wake-up, until the next.
    ///
    /// # Errors
    /// `EBUSY` in a handler of a signal that interrupted a call, `EMFILE` if there is no other number.
    pub fn relocate_fd(&self, number: RawFd) -> Result<(), Errno> {
        if !descriptor::is_internal_in_use(number) {
            return Ok(());
        }
        let mut lane = self.lock().map_err(|_| Errno::BUSY)?;
        if let Some(other) = lane.relocate_fd(number)? {
            descriptor::renumber_internal(number, other);
            self.note_connection_fd(&lane);
            if let Some(book) = &lane.report {
                book.clear(number);
                book.write(other, crate::descriptor_report::ReportEntry::Internal);
            }
        }
        Ok(())
    }
}

impl ProcessState {
    fn relocate_fd(&mut self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        let clients = self.client.all().iter().flat_map(|client| client.internal_fds());
        for own in clients {
            if let Some(other) = own.relocate_from(number)? {
                return Ok(Some(other));
            }
        }
        if let Some(process) = &self.attachment
            && let Some(other) = process.relocate_from(number)?
        {
            return Ok(Some(other));
        }
        if let Some(other) = self.proxy_fds.relocate(number)? {
            return Ok(Some(other));
        }
        let book = self.report.iter().map(|book| &book.file);
        for own in self.waiters.own_fds().chain(self.passed_listeners.iter().map(|(_, own)| own)).chain(book)
        {
            if let Some(other) = own.relocate(number)? {
                return Ok(Some(other));
            }
        }
        for id in self.files.ids() {
            if let FileKind::Epoll(set) = &self.files.get(id).kind
                && let Some(other) = set.relocate(number)?
            {
                return Ok(Some(other));
            }
        }
        Ok(None)
    }
}
