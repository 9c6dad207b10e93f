//! `SO_ATTACH_FILTER`, `SO_DETACH_FILTER` and `SO_GET_FILTER`.
//!
//! The stack holds the filters of its sockets. Each process keeps a copy for sockets that are not on the
//! stack yet, and for a restart of the shards. Of a description that processes share, only a tag of the
//! program is published, since programs are longer than what is published. A process that sees another tag
//! asks the stack for the program. A process that cannot learn the program opens its socket again with a
//! filter that drops everything.

use super::SocketOptionState;
use super::get::OptionValue;
use crate::channels::Channels;
use crate::description::{shared_filter, shared_key};
use crate::fd_table::FileId;
use crate::file::{Socket, SocketRole};
use crate::process::ProcessState;
use crate::{syscall, user_memory};
use core::ffi::c_int;
use ginnel::broker::codec::Codec;
use ginnel::channel::DescriptionKey;
use ginnel::errno;
use ginnel::socket_filter::{FilterError, UNKNOWN_PROGRAM, check_program};
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::sync::Arc;

/// Longest program in instructions (`BPF_MAXINSNS`), and the bytes of one (`struct sock_filter`).
const INSTRUCTIONS_MAX: usize = 4096;
const INSTRUCTION_BYTES: usize = 8;
/// Bytes of `struct sock_fprog`.
const PROGRAM_BYTES: usize = 16;

/// How often, once a millisecond, a process tries to read what another one is publishing, before it takes
/// that one for dead.
const READ_ATTEMPTS: usize = 20;

/// The filter of a socket as a process knows it.
#[derive(Clone, Debug, Default)]
pub(crate) struct FilterCopy {
    /// A hash of the program; 0 without a filter.
    tag: u64,
    /// The program; `None` if it is not known.
    code: Option<Arc<[u8]>>,
}

impl FilterCopy {
    fn new(code: &[u8]) -> Self {
        if code.is_empty() { Self::default() } else { Self { tag: tag_of(code), code: Some(code.into()) } }
    }

    /// Returns the filter without the program.
    pub fn tag_only(&self) -> Self {
        Self { tag: self.tag, code: None }
    }

    /// Returns the filter that another process has published, with the program if it is the known one.
    pub fn updated_by(&self, published: &Self) -> Self {
        if published.tag == self.tag { self.clone() } else { published.clone() }
    }

    /// Returns a filter of which nothing is known.
    fn unknown() -> Self {
        Self { tag: u64::MAX, code: None }
    }

    /// Returns whether there is a filter whose program is not known.
    fn is_unknown(&self) -> bool {
        self.tag != 0 && self.code.is_none()
    }

    /// Returns the program, or one that drops everything if the program is not known; `None` without a
    /// filter.
    fn code_or_drop_all(&self) -> Option<Arc<[u8]>> {
        if self.is_unknown() { Some(Arc::new(UNKNOWN_PROGRAM)) } else { self.code.clone() }
    }

    /// Returns whether there is no filter.
    pub fn is_none(&self) -> bool {
        self.tag == 0
    }
}

impl Codec for FilterCopy {
    fn encode(&self, out: &mut Vec<u8>) {
        (self.tag, self.code.as_deref().unwrap_or_default().to_vec()).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let (tag, code) = <(u64, Vec<u8>)>::decode(from)?;
        let is_program = tag != 0 && tag_of(&code) == tag && check_program(&code).is_ok();
        Some(Self { tag, code: is_program.then(|| code.into()) })
    }
}

/// Returns a hash of a program, which is not 0 (FNV-1a).
fn tag_of(code: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    code.iter().fold(0xcbf2_9ce4_8422_2325, step).max(1)
}

impl SocketOptionState {
    /// Returns the program with which the socket is opened on the stack.
    pub fn filter_code(&self) -> Option<Arc<[u8]>> {
        self.ints.filter()?.code_or_drop_all()
    }

    /// Forgets the program of the filter, whose tag is kept, and that for the group of the socket.
    pub fn drop_programs(&mut self) {
        self.ints.set_group_program(None);
        if let Some(filter) = self.ints.filter().filter(|filter| filter.code.is_some()) {
            let filter = filter.tag_only();
            self.ints.set_filter(filter);
        }
    }

    /// Returns whether the socket has a filter whose program is known.
    pub fn knows_filter(&self) -> bool {
        self.ints.filter().is_some_and(|filter| filter.code.is_some())
    }

    /// Returns whether the socket has a program, or must not get a filter.
    pub fn has_program_or_lock(&self) -> bool {
        !self.filter().is_none() || self.is_on("SO_LOCK_FILTER") || self.ints.group_program().is_some()
    }

    /// Returns the options that are published.
    pub fn published(&self) -> Self {
        let mut options = self.shared();
        options.drop_programs();
        options
    }

    /// Returns the filter that the options of a published description have.
    pub fn published_filter(&self) -> FilterCopy {
        self.filter()
    }

    fn filter(&self) -> FilterCopy {
        self.ints.filter().cloned().unwrap_or_default()
    }
}

/// Reads the program of `struct sock_fprog` (`copy_bpf_fprog_from_user`, `__get_filter`).
pub(super) fn read_program(value: &[u8], is_locked: bool) -> Result<Vec<u8>, Errno> {
    if value.len() != PROGRAM_BYTES {
        return Err(Errno::INVAL);
    }
    if is_locked {
        return Err(Errno::PERM);
    }
    let len = usize::from(u16::from_ne_bytes([value[0], value[1]]));
    let address = usize::from_ne_bytes(value[8..].try_into().expect("eight bytes"));
    if address == 0 || !(1..=INSTRUCTIONS_MAX).contains(&len) {
        return Err(Errno::INVAL);
    }
    let mut code = vec![0; len * INSTRUCTION_BYTES];
    user_memory::read_bytes(core::ptr::with_exposed_provenance(address), &mut code)?;
    check_program(&code).map_err(errno::filter)?;
    Ok(code)
}

/// Sets the filter of a kernel socket.
///
/// # Errors
/// The kernel's.
pub(crate) fn set_on_kernel(kernel_fd: RawFd, code: &[u8]) -> Result<(), Errno> {
    if code.is_empty() {
        return syscall::setsockopt(kernel_fd, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &[0; 4]);
    }
    attach_on_kernel(kernel_fd, libc::SO_ATTACH_FILTER, code)
}

/// Sets an option of a kernel socket to a program.
///
/// # Errors
/// The kernel's.
pub(super) fn attach_on_kernel(kernel_fd: RawFd, name: c_int, code: &[u8]) -> Result<(), Errno> {
    let mut value = [0; PROGRAM_BYTES];
    // Cannot truncate: a program has at most 4,096 instructions.
    value[..2].copy_from_slice(&((code.len() / INSTRUCTION_BYTES) as u16).to_ne_bytes());
    value[8..].copy_from_slice(&code.as_ptr().expose_provenance().to_ne_bytes());
    syscall::setsockopt(kernel_fd, libc::SOL_SOCKET, name, &value)
}

/// Returns the kernel socket that serves a socket, too.
pub(super) fn kernel_side(socket: &Socket) -> Option<RawFd> {
    match socket.role {
        SocketRole::Udp(udp) => udp.kernel_fd,
        SocketRole::Listening(listening) => listening.kernel_fd,
        SocketRole::Unconnected { .. } | SocketRole::Stream(_) => {
            socket.bound().and_then(|bound| bound.kernel_fd)
        }
    }
}

impl ProcessState {
    /// Implements `SO_ATTACH_FILTER` and `SO_DETACH_FILTER`.
    ///
    /// # Errors
    /// `EINVAL`, `EFAULT`, `EPERM` if the filter is locked, `ENOMEM`; `ENOENT` if there is no filter to
    /// detach; `ENETDOWN` if the shard of a listener or UDP socket is gone. The socket then has the filter
    /// that it had before.
    pub(crate) fn change_filter(&mut self, file: FileId, attach: bool, value: &[u8]) -> Result<(), Errno> {
        if value.len() < 4 {
            return Err(Errno::INVAL);
        }
        let is_locked = self.files.socket(file)?.options.is_on("SO_LOCK_FILTER");
        let code = if attach {
            read_program(value, is_locked)?
        } else if is_locked {
            return Err(Errno::PERM);
        } else {
            Vec::new()
        };
        let old = self.known_filter(file)?;
        if !attach && old.is_none() {
            return Err(Errno::NOENT);
        }
        let socket = self.files.socket(file)?;
        let (kernel_fd, role) = (kernel_side(socket), socket.role);
        if let Some(kernel_fd) = kernel_fd {
            set_on_kernel(kernel_fd, &code)?;
        }
        // The copy and its tag come first: if the shards end now, no process opens the socket again without
        // the new filter.
        let before = self.files.socket(file)?.options.filter();
        self.publish_filter(file, FilterCopy::new(&code))?;
        let mut set = self.set_on_stack(file, role, &code, &old);
        if set == Err(FilterError::Stale) && self.has_restarted() {
            set = self.set_on_stack(file, role, &code, &old);
        }
        if let Err(error) = set {
            self.publish_filter(file, before)?;
            if let Some(kernel_fd) = kernel_fd {
                // The kernel had this filter a moment ago.
                let _ = set_on_kernel(kernel_fd, old.code_or_drop_all().as_deref().unwrap_or_default());
            }
            return Err(errno::filter(error));
        }
        // Processes that have seen the tag before the stack had the program learn the program now.
        self.publish_shared(file);
        Ok(())
    }

    /// Sets the filter of a socket if it is on the stack.
    fn set_on_stack(
        &mut self,
        file: FileId,
        role: SocketRole,
        code: &[u8],
        old: &FilterCopy,
    ) -> Result<(), FilterError> {
        let Some(key) = self.files.socket(file).ok().and_then(|socket| shared_key(socket)) else {
            return Ok(());
        };
        match self.client.set_filter(key, code, old.code.as_deref()) {
            // A connection that is over receives nothing.
            Err(FilterError::Stale) if matches!(role, SocketRole::Stream(_)) => Ok(()),
            result => result,
        }
    }

    /// Sets the copy of a socket's filter, and publishes its tag.
    fn publish_filter(&mut self, file: FileId, filter: FilterCopy) -> Result<(), Errno> {
        self.files.socket(file)?.options.ints.set_filter(filter);
        self.publish_shared(file);
        Ok(())
    }

    /// Returns the filter of a socket: what the stack has or, without a socket there, what the program has
    /// set.
    fn known_filter(&mut self, file: FileId) -> Result<FilterCopy, Errno> {
        let Some(key) = shared_key(self.files.socket(file)?) else {
            return Ok(self.files.socket(file)?.options.filter());
        };
        let mut code = self.client.filter(key);
        if code.is_err()
            && self.has_restarted()
            && let Some(key) = shared_key(self.files.socket(file)?)
        {
            code = self.client.filter(key);
        }
        let copy = self.files.socket(file)?.options.filter();
        Ok(code.map_or(copy, |code| FilterCopy::new(&code)))
    }

    /// Implements `SO_GET_FILTER` with room for `space` instructions.
    ///
    /// # Errors
    /// `EINVAL` if that is too little (`sk_get_filter`).
    pub(crate) fn get_filter(&mut self, file: FileId, space: usize) -> Result<OptionValue, Errno> {
        let code = self.known_filter(file)?.code.unwrap_or_else(|| Arc::new([]));
        let instructions = code.len() / INSTRUCTION_BYTES;
        match space {
            0 => Ok(OptionValue::counted(Vec::new(), instructions)),
            space if space < instructions => Err(Errno::INVAL),
            _ => Ok(OptionValue::counted(code.to_vec(), instructions)),
        }
    }

    /// Asks the stack for the program of a filter that another process has set.
    pub(crate) fn learn_filter(&mut self, file: FileId) {
        let Ok(socket) = self.files.socket(file) else { return };
        let copy = socket.options.filter();
        let Some(key) = shared_key(socket).filter(|_| copy.is_unknown()) else { return };
        let Ok(code) = self.client.filter(key) else { return };
        let learned = FilterCopy::new(&code);
        if learned.tag == copy.tag
            && let Ok(socket) = self.files.socket(file)
        {
            socket.options.ints.set_filter(learned);
        }
    }

    /// Takes over the filter that another process has set before the shards ended, as far as it is known:
    /// see [`SocketOptionState::filter_code`].
    pub(crate) fn update_filter_from(&mut self, before: &Channels, file: FileId) {
        if self.files.get(file).shared_version.is_none() {
            return;
        }
        let Ok(socket) = self.files.socket(file) else { return };
        let Some(key) = shared_key(socket) else { return };
        let attempt = |_| {
            shared_filter(before, key).or_else(|| {
                std::thread::sleep(core::time::Duration::from_millis(1));
                None
            })
        };
        // If the process that was publishing has died, it may have attached a filter.
        let published = (0..READ_ATTEMPTS).find_map(attempt).unwrap_or(FilterCopy::unknown());
        let filter = socket.options.filter().updated_by(&published);
        socket.options.ints.set_filter(filter);
    }
}

impl Channels {
    /// Sets the filter of a socket or, on all shards, of a listener; a program without bytes removes it. If
    /// a shard refuses the filter, the shards before it get the `old` one again.
    ///
    /// # Errors
    /// The socket does not exist, or there is no memory.
    pub fn set_filter(
        &mut self,
        of: DescriptionKey,
        code: &[u8],
        old: Option<&[u8]>,
    ) -> Result<(), FilterError> {
        let sides = self.sides_of(of);
        if sides.is_empty() {
            return Err(FilterError::Stale);
        }
        for (done, &(shard, id)) in sides.iter().enumerate() {
            self.mark_dirty(shard);
            let set = self.client_of_shard(shard).set_filter(id, Some(code).filter(|code| !code.is_empty()));
            if let Err(error) = set {
                for &(shard, id) in &sides[..done] {
                    // The memory of the old filter was released a moment ago.
                    let _ = self.client_of_shard(shard).set_filter(id, old);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns the program of a socket's filter, without bytes if it has none.
    ///
    /// # Errors
    /// The socket does not exist.
    pub fn filter(&mut self, of: DescriptionKey) -> Result<Vec<u8>, FilterError> {
        let (shard, id) = self.sides_of(of).first().copied().ok_or(FilterError::Stale)?;
        self.client_of_shard(shard).filter(id).map_err(|_| FilterError::Stale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_programs_drop_everything() {
        let keep_all = [6, 0, 0, 0, 255, 255, 255, 255];
        let known = FilterCopy::new(&keep_all);
        assert_eq!(known.code_or_drop_all().as_deref(), Some(&keep_all[..]));
        let drops_everything =
            |filter: FilterCopy| filter.code_or_drop_all().as_deref() == Some(&UNKNOWN_PROGRAM);
        assert!(drops_everything(known.tag_only()) && drops_everything(FilterCopy::unknown()));
        assert_eq!(check_program(&UNKNOWN_PROGRAM), Ok(()));
        assert_eq!(FilterCopy::default().code_or_drop_all(), None);
    }
}
