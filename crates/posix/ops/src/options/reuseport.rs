//! `SO_ATTACH_REUSEPORT_CBPF` and `SO_DETACH_REUSEPORT_BPF`: the program that selects the member of a group
//! of sockets which share an address (`SO_REUSEPORT`), as in `sock_reuseport.c`.
//!
//! The stack has the program of a group. The process that has set it keeps a copy, for a socket that is not
//! on the stack yet, and for a restart of the shards.

use super::filter::{attach_on_kernel, kernel_side, read_program};
use super::{BoolOption, SocketOptionState};
use crate::channels::Channels;
use crate::description::shared_key;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::process::ProcessState;
use crate::syscall;
use core::ffi::c_int;
use ginnel::channel::DescriptionKey;
use ginnel::socket_filter::FilterError;
use ginnel::{GroupError, errno};
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::sync::Arc;

/// Option number, for which libc has no name on all platforms.
pub(super) const DETACH_REUSEPORT_BPF: c_int = 68;

impl SocketOptionState {
    /// Returns the program with which the socket begins a group of its own; without instructions if the
    /// program was detached, which does not end that group.
    pub fn group_program(&self) -> Option<Arc<[u8]>> {
        self.ints.group_program().cloned()
    }

    /// Replaces the program for the group of the socket. Returns the program before.
    pub fn replace_group_program(&mut self, program: Option<Arc<[u8]>>) -> Option<Arc<[u8]>> {
        let before = self.group_program();
        self.ints.set_group_program(program);
        before
    }
}

/// Sets the program of the group of a kernel socket; `None` removes it.
///
/// # Errors
/// The kernel's.
pub(crate) fn set_group_program_on_kernel(kernel_fd: RawFd, code: Option<&[u8]>) -> Result<(), Errno> {
    match code {
        Some(code) => attach_on_kernel(kernel_fd, libc::SO_ATTACH_REUSEPORT_CBPF, code),
        None => syscall::setsockopt(kernel_fd, libc::SOL_SOCKET, DETACH_REUSEPORT_BPF, &[0; 4]),
    }
}

impl ProcessState {
    /// Implements `SO_ATTACH_REUSEPORT_CBPF` and `SO_DETACH_REUSEPORT_BPF`.
    ///
    /// # Errors
    /// `EINVAL`, `EFAULT`, `EPERM` if filters are locked, `ENOMEM`; `ENOENT` if there is no program to
    /// detach; `ENETDOWN` if the shard of a listener or UDP socket is gone.
    pub(crate) fn change_group_program(
        &mut self,
        file: FileId,
        attach: bool,
        value: &[u8],
    ) -> Result<(), Errno> {
        if value.len() < 4 {
            return Err(Errno::INVAL);
        }
        let is_locked = self.files.socket(file)?.options.is_on("SO_LOCK_FILTER");
        let program: Option<Arc<[u8]>> =
            if attach { Some(read_program(value, is_locked)?.into()) } else { None };
        let has_ended = self.socket_state(file).is_some_and(|(_, state)| state.is_closed());
        let socket = self.files.socket(file)?;
        let is_shared = socket.options.flag(BoolOption::ReusePort);
        let not_in_group = if attach || !is_shared { Errno::INVAL } else { Errno::NOENT };
        let kernel_fd = kernel_side(socket);
        match socket.role {
            SocketRole::Stream(_) if !has_ended => return Err(not_in_group),
            // A group of its own, as long as the socket has no address that others could have.
            SocketRole::Stream(_) | SocketRole::Unconnected { .. } => match (attach, is_shared) {
                (true, true) => {}
                (false, _) if socket.options.group_program().is_some() => {
                    let had_program = socket.options.group_program().is_some_and(|code| !code.is_empty());
                    socket.options.ints.set_group_program(Some(Arc::new([])));
                    return if had_program { Ok(()) } else { Err(Errno::NOENT) };
                }
                _ => return Err(not_in_group),
            },
            SocketRole::Listening(_) | SocketRole::Udp(_) => {
                let mut set = self.set_group_program_on_stack(file, program.as_deref(), false);
                if set == Err(FilterError::Stale) && self.has_restarted() {
                    set = self.set_group_program_on_stack(file, program.as_deref(), false);
                }
                match set.map_err(errno::filter)? {
                    Err(GroupError::NotInGroup) => return Err(not_in_group),
                    result => result.map_err(group_errno)?,
                }
            }
        }
        if let Some(kernel_fd) = kernel_fd {
            // The kernel socket is in a group if the stack's is.
            let _ = set_group_program_on_kernel(kernel_fd, program.as_deref());
        }
        self.files.socket(file)?.options.ints.set_group_program(program);
        Ok(())
    }

    fn set_group_program_on_stack(
        &mut self,
        file: FileId,
        program: Option<&[u8]>,
        is_first: bool,
    ) -> Result<Result<(), GroupError>, FilterError> {
        let key = self.files.socket(file).ok().and_then(|socket| shared_key(socket));
        self.client.set_group_program(key.ok_or(FilterError::Stale)?, program, is_first)
    }

    /// Gives the program of a socket that was opened on the stack a moment ago to its group, which has no
    /// other member if `is_first` is set.
    ///
    /// # Errors
    /// `EADDRINUSE` if there are other members, `ENOMEM`, `ENETDOWN`.
    pub(crate) fn begin_group(
        &mut self,
        key: DescriptionKey,
        program: &[u8],
        is_first: bool,
    ) -> Result<(), Errno> {
        let set = self.client.set_group_program(key, Some(program).filter(|code| !code.is_empty()), is_first);
        match set.map_err(errno::filter)? {
            Err(GroupError::NoProgram) => Ok(()),
            result => result.map_err(group_errno),
        }
    }

    /// Gives the program of a socket that was opened again, after a restart of the shards, to its group.
    pub(crate) fn restore_group_program(&mut self, file: FileId) {
        let program = self.files.socket(file).ok().and_then(|socket| socket.options.group_program());
        if let Some(program) = program.filter(|program| !program.is_empty()) {
            // Without memory for the program, the hash selects.
            let _ = self.set_group_program_on_stack(file, Some(&program), false);
        }
    }
}

fn group_errno(error: GroupError) -> Errno {
    match error {
        GroupError::Stale => Errno::NETDOWN,
        GroupError::NotInGroup => Errno::INVAL,
        GroupError::NoProgram => Errno::NOENT,
        GroupError::InUse => Errno::ADDRINUSE,
    }
}

impl Channels {
    /// Sets the program of the group of a socket or, on all shards, of a listener; `None` removes it. Shards
    /// have equal programs, so the first one refuses what others would refuse.
    ///
    /// # Errors
    /// The socket does not exist, or there is no memory. The inner error is that of the group.
    pub fn set_group_program(
        &mut self,
        of: DescriptionKey,
        code: Option<&[u8]>,
        is_first: bool,
    ) -> Result<Result<(), GroupError>, FilterError> {
        let sides = self.sides_of(of);
        if sides.is_empty() {
            return Err(FilterError::Stale);
        }
        for (shard, id) in sides {
            self.mark_dirty(shard);
            let set = self.client_of_shard(shard).set_group_program(id, code, is_first)?;
            if set.is_err() {
                return Ok(set);
            }
        }
        Ok(Ok(()))
    }
}
