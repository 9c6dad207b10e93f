//! A program may put whatever it likes under any number (`dup2`), also where one of the library's own descriptors stands: that one goes elsewhere.

use crate::Ops;
use crate::descriptor;
use crate::file::Kind;
use crate::lane::Lane;
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// To be called before something of the program's is put under a number. If one of the library's own descriptors has it, that has another from now on.
    ///
    /// A thread that is on its way to sleep may have the old number in its hand: who puts descriptors over unknown ones while other threads wait loses at most one wake-up, until the next.
    ///
    /// # Errors
    /// `EBUSY` in a handler of a signal that interrupted a call, `EMFILE` if there is no other number.
    pub fn make_way(&self, number: RawFd) -> Result<(), Errno> {
        if !descriptor::is_needed(number) {
            return Ok(());
        }
        let mut lane = self.lock().map_err(|_| Errno::BUSY)?;
        if let Some(other) = lane.make_way(number)? {
            descriptor::moved(number, other);
            self.note_line(&lane);
            if let Some(book) = &lane.book {
                book.clear(number);
                book.write(other, crate::book::Entry::Internal);
            }
        }
        Ok(())
    }
}

impl Lane {
    fn make_way(&mut self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        let clients = self.client.all().iter().flat_map(|client| client.own_fds());
        for own in clients {
            if let Some(other) = own.make_way(number)? {
                return Ok(Some(other));
            }
        }
        if let Some(process) = &self.process
            && let Some(other) = process.make_way(number)?
        {
            return Ok(Some(other));
        }
        if let Some(other) = self.placeholders.make_way(number)? {
            return Ok(Some(other));
        }
        let book = self.book.iter().map(|book| &book.file);
        for own in self.sleepers.own_fds().chain(self.sent.iter().map(|(_, own)| own)).chain(book) {
            if let Some(other) = own.make_way(number)? {
                return Ok(Some(other));
            }
        }
        for id in self.files.ids() {
            if let Kind::Epoll(set) = &self.files.get(id).kind
                && let Some(other) = set.make_way(number)?
            {
                return Ok(Some(other));
            }
        }
        Ok(None)
    }
}
