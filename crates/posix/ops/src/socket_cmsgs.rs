//! Control messages of `sendmsg` on the level `SOL_SOCKET` (`__sock_cmsg_send`).

use crate::kernel_socket;
use crate::options::PRIORITY_FREE_MAX;
use crate::options::timestamps::{TX_RECORD_MASK, TimestampOptions};
use crate::sockaddr::Family;
use core::ffi::c_int;
use rustix::io::Errno;

/// The number of the datagram in its transmit timestamps.
const SCM_TS_OPT_ID: c_int = 81;

/// Requests that control messages of the level make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SocketCmsgs {
    /// The priority (`SO_PRIORITY`, as Linux has it since 6.14).
    pub priority: Option<u8>,
    /// Which transmit timestamps, instead of those of the socket (`SO_TIMESTAMPING`).
    pub tx_flags: Option<u32>,
    /// The number that the timestamps carry (`SCM_TS_OPT_ID`).
    pub tx_id: Option<u32>,
    /// When the datagram is to be sent, in ns of the socket's clock (`SCM_TXTIME`).
    pub departs_at: Option<u64>,
}

impl SocketCmsgs {
    /// Reads a control message. `may_have_id` tells that the socket numbers its timestamps by datagrams, and
    /// `may_have_time` that its datagrams may have times.
    ///
    /// # Errors
    /// `EINVAL` for a message that is malformed or unknown, `EPERM` for a priority or mark that the program
    /// may not send.
    pub fn read(
        &mut self,
        kind: c_int,
        value: &[u8],
        (family, may_have_id, may_have_time): (Family, bool, bool),
    ) -> Result<(), Errno> {
        let word = || value.try_into().map(u32::from_ne_bytes).map_err(|_| Errno::INVAL);
        // The kernel decides whether this program may have such a mark or priority.
        let may_have =
            || kernel_socket::try_option(family, libc::SOL_SOCKET, kind, value).map_err(|_| Errno::PERM);
        match kind {
            libc::SO_PRIORITY => {
                let number = word()?;
                if number > PRIORITY_FREE_MAX.unsigned_abs() {
                    may_have()?;
                }
                // As for the socket option: larger values count as the highest, and so do negative ones.
                self.priority = Some(u8::try_from(number).unwrap_or(u8::MAX).min(7));
            }
            libc::SO_MARK => {
                word()?;
                may_have()?;
            }
            kind if TimestampOptions::is_timestamping(kind) => {
                self.tx_flags = Some(word()?).filter(|flags| flags & !TX_RECORD_MASK == 0);
                self.tx_flags.ok_or(Errno::INVAL)?;
            }
            libc::SCM_TXTIME if may_have_time => {
                let at = value.try_into().map(u64::from_ne_bytes).map_err(|_| Errno::INVAL)?;
                self.departs_at = Some(at).filter(|at| *at != 0);
            }
            SCM_TS_OPT_ID if may_have_id => self.tx_id = Some(word()?),
            // These two belong to Unix sockets.
            libc::SCM_RIGHTS | libc::SCM_CREDENTIALS => {}
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// Returns whether the messages concern transmit timestamps.
    pub fn has_tx(&self) -> bool {
        self.tx_flags.is_some() || self.tx_id.is_some()
    }
}
