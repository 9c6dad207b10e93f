//! Upgrade of the shards: the supervisor exchanges their process. Programs notice nothing if the state of the
//! shards passes to the next process (docs/adr/0026-connections-at-an-upgrade.md), and continue otherwise as
//! after a death (docs/adr/0021-restart-of-the-shards.md).

use super::super::upgrade::{ConnectionPolicy, Upgraded};
use super::{
    BrokerThread, ControlReply, HandOver, Hello, Opener, PROTOCOL_VERSION, Refusal, encode, seqpacket,
};
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::geteuid;
use rustix::thread::capabilities;

/// Has the supervisor run the shards with another executable: checks it, ends the process of the shards, and
/// waits until the next one runs. [`HandOver`] passes the state of the shards on. Returns the result, or the
/// reason why the shards run their former executable. Any thread may call it.
pub type UpgradeShards =
    dyn Fn(OwnedFd, ConnectionPolicy, &HandOver) -> Result<Upgraded, String> + Send + Sync;

impl BrokerThread {
    /// Starts an upgrade in a thread of its own, which also replies: the broker is needed for the restart.
    pub(super) fn start_upgrade(
        &mut self,
        id: u64,
        request_id: u32,
        hello: &Hello,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        if hello.version != PROTOCOL_VERSION {
            return Err(Refusal::Version(PROTOCOL_VERSION));
        }
        let policy = ConnectionPolicy::from_word(&hello.domain).ok_or(Refusal::Malformed)?;
        let executable = descriptors.pop().ok_or(Refusal::Malformed)?;
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        // A process that inherited a connection may have dropped its privileges since it was opened.
        if !entry.is_privileged || entry.opener != Opener::Peer || entry.attachment.is_some() {
            return Err(Refusal::User(geteuid().as_raw()));
        }
        // The executable gets the capabilities of this process, which others of its user may not have.
        let has_capabilities = || !capabilities(None).is_ok_and(|own| own.permitted.is_empty());
        if entry.uid != 0 && has_capabilities() {
            return Err(Refusal::Capabilities);
        }
        let upgrade = self.supervised.as_ref().ok_or(Refusal::Unsupervised)?.upgrade.clone();
        let entry = self.processes.remove(&id).ok_or(Refusal::Unknown)?;
        self.pending.remove(&id);
        // Nothing more is read from it. Fails only for a descriptor that is not watched.
        let _ = epoll::delete(&self.epoll, &entry.connection.fd);
        let hand_over = self.hand_over_handle();
        let thread = std::thread::Builder::new().name("upgrade".into()).spawn(move || {
            let reply = match upgrade(executable, policy, &hand_over) {
                Ok(Upgraded { away, connections }) => {
                    ControlReply::Upgraded(u32::try_from(away.as_millis()).unwrap_or(u32::MAX), connections)
                }
                Err(reason) => ControlReply::NotUpgraded(reason),
            };
            // Fails if the process that asked has ended. The log has the result, too.
            let _ = seqpacket::send(entry.connection.fd.as_fd(), &encode(request_id, &reply), &[]);
        });
        // The connection is closed: the process that asked finds no reply.
        if let Err(error) = thread {
            tracing::error!("the upgrade cannot begin: no thread: {error}");
        }
        Ok(())
    }
}
