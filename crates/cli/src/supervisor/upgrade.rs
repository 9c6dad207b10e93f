//! Upgrade of the shards to another executable: with their state if possible
//! (docs/adr/0026-connections-at-an-upgrade.md), otherwise by a restart.

use super::{Executable, NotStarted, POLL_INTERVAL, START_TIMEOUT, ShardProcess, lock};
use crate::executable_check::{self, CHECK_TIMEOUT, CheckedExecutable, Version};
use core::sync::atomic::Ordering;
use ginnel::broker::{
    ChildLink, ConnectionPolicy, HAND_OVER_TIMEOUT, HandOver, HandOverInProgress, SavedState, Upgraded,
};
use ginnel::{StateConfig, StateFormat};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant};

/// Longest time for a child to open its devices and to restore the state of the shards. The broker answers
/// nobody meanwhile.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest time for a restart of the shards.
const RESTART_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the ends of children, which have no limit.
const ENDS_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time for an upgrade, from the check of the new executable until its child runs: both executables
/// may fail to restore the state.
pub const UPGRADE_TIMEOUT: Duration = CHECK_TIMEOUT
    .saturating_add(HAND_OVER_TIMEOUT)
    .saturating_add(RESTORE_TIMEOUT)
    .saturating_add(RESTORE_TIMEOUT)
    .saturating_add(RESTART_TIMEOUT)
    .saturating_add(ENDS_TIMEOUT);

/// An executable that is about to run the shards without their state.
#[derive(Debug)]
pub(super) struct Upgrade {
    executable: Arc<Executable>,
    version: Version,
    /// Why connections are reset.
    reset: String,
    started: Sender<Result<Upgraded, String>>,
    /// When the former child was ended.
    ended: Instant,
}

/// Result of an attempt to pass the state of the shards on.
enum Attempt {
    /// The new executable continues with the connections.
    Upgraded(Upgraded),
    /// The former executable runs the shards, for this reason.
    TakenBack(String),
    /// No process has the state any more, for this reason. The former executable is started without it once
    /// the second value is dropped.
    Lost(String, HandOverInProgress),
    /// The shards have to be restarted by the new executable, for this reason. Shards that were stopped are
    /// restarted once the second value is dropped.
    NotKept(String, Option<HandOverInProgress>),
}

impl ShardProcess {
    /// Has another executable run the shards from now on. See [`ginnel::broker::UpgradeShards`].
    pub(super) fn upgrade(
        &self,
        executable: OwnedFd,
        policy: ConnectionPolicy,
        broker: &HandOver,
    ) -> Result<Upgraded, String> {
        let upgraded = self.try_upgrade(executable, policy, broker);
        upgraded.inspect_err(|reason| tracing::warn!("the shards were not upgraded: {reason}"))
    }

    fn try_upgrade(
        &self,
        executable: OwnedFd,
        policy: ConnectionPolicy,
        broker: &HandOver,
    ) -> Result<Upgraded, String> {
        let _upgrading = match self.upgrading.try_lock() {
            Ok(upgrading) => upgrading,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err("another upgrade is in progress".into()),
        };
        let file = File::from(executable);
        let CheckedExecutable { version, state_format, layout, state_config } =
            executable_check::check(&file)?;
        // A version that does not tell its layout finds out itself, after the former shards have ended.
        if let Some(difference) = layout.and_then(|layout| layout.difference(&self.layout)) {
            return Err(format!("the configuration has {difference}: stop the stack, and start it again"));
        }
        let executable = Arc::new(Executable { file, state_format });
        let ended = Instant::now();
        let (reset, stopped) = match self.reason_for_reset((&executable, state_config), policy) {
            Some(reason) if policy == ConnectionPolicy::Keep => {
                return Err(format!("connections cannot be kept: {reason}"));
            }
            Some(reason) => (reason, None),
            None => match self.hand_over(&executable, &version, policy, broker) {
                Attempt::Upgraded(upgraded) => return Ok(upgraded),
                Attempt::TakenBack(reason) => return Err(reason),
                Attempt::Lost(reason, stopped) => {
                    self.is_end_wanted.store(true, Ordering::Release);
                    // The former executable is started without the state.
                    drop(stopped);
                    tracing::error!("connections were reset by an upgrade that failed");
                    return Err(format!("{reason}: connections were reset"));
                }
                Attempt::NotKept(..) if self.is_stopping() => {
                    return Err("the stack is being stopped".into());
                }
                Attempt::NotKept(reason, stopped) => (reason, stopped),
            },
        };
        let (started, result) = channel();
        *lock(&self.upgrade) = Some(Upgrade { executable, version, reset, started, ended });
        drop(stopped);
        self.await_restart(&result)
    }

    /// Ends the child, and waits until another thread has upgraded the shards.
    fn await_restart(&self, result: &Receiver<Result<Upgraded, String>>) -> Result<Upgraded, String> {
        let began = Instant::now();
        loop {
            {
                // While this is locked and the upgrade is set, the child is not the upgraded one. The kill is
                // repeated: a child that died by itself may have been replaced by the former executable.
                let upgrade = lock(&self.upgrade);
                if upgrade.is_some() && !self.is_stopping() {
                    // Fails only if it has ended.
                    let _ = self.child().kill();
                }
            }
            match result.recv_timeout(POLL_INTERVAL) {
                Ok(result) => return result,
                Err(_) if self.is_stopping() => return Err("the stack is being stopped".into()),
                Err(RecvTimeoutError::Disconnected) => return Err("the stack has ended".into()),
                Err(RecvTimeoutError::Timeout) if began.elapsed() > RESTART_TIMEOUT => {
                    *lock(&self.upgrade) = None;
                    let seconds = RESTART_TIMEOUT.as_secs();
                    return Err(format!("the next shards have not started within {seconds} s"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Starts the child of an upgrade without the state of the shards, and tells the result to the thread
    /// that waits for it. Returns `None` if the child does not run the shards.
    pub(super) fn start_upgraded(&self, upgrade: Upgrade) -> Option<ChildLink> {
        let Upgrade { executable, version, reset, started, ended } = upgrade;
        let result = self.start_next(&executable.file, None, START_TIMEOUT).map_or_else(
            |NotStarted { failure: error, .. }| {
                // A child that hangs must not keep its devices, which the next one opens.
                self.end_child();
                (None, Err(format!("version {version} cannot start the shards (its log says why): {error}")))
            },
            |link| {
                *lock(&self.executable) = executable;
                let away = ended.elapsed();
                self.count_restart();
                tracing::warn!(
                    "the shards were upgraded to version {version}, in {} ms; connections were reset: {reset}",
                    away.as_millis()
                );
                (Some(link), Ok(Upgraded { away, connections: Err(reset) }))
            },
        );
        // Fails if nobody waits any more.
        let _ = started.send(result.1);
        result.0
    }

    /// Starts a child that continues with the state of the shards, and ends it if it cannot.
    fn continue_with(&self, executable: &Executable, state: &SavedState) -> Result<ChildLink, NotStarted> {
        let started = self.start_next(&executable.file, Some(state), RESTORE_TIMEOUT);
        if started.is_err() {
            self.end_child();
        }
        started
    }

    /// Returns why connections are not kept, as far as that is known before the shards are stopped.
    fn reason_for_reset(
        &self,
        (next, next_config): (&Executable, Option<StateConfig>),
        policy: ConnectionPolicy,
    ) -> Option<String> {
        // Shards that were started again have read the configuration again, so they say themselves what it
        // is. A version that does not tell finds out itself, after the former shards have ended.
        let other_config = || {
            let running = StateConfig::recorded(&self.directory)?;
            next_config?.difference(&running).map(String::from)
        };
        let former = self.executable().state_format;
        match (next.state_format, former) {
            _ if policy == ConnectionPolicy::Reset => Some("--reset-connections demands it".into()),
            (Some(next), Some(former)) => difference(next, former).or_else(other_config),
            (None, _) => Some("the new version reads no saved states".into()),
            (_, None) => Some("the running version saves no states".into()),
        }
    }

    /// Passes the state of the shards to a child of `next`, or if that fails, to a child of the former
    /// executable.
    fn hand_over(
        &self,
        next: &Arc<Executable>,
        version: &Version,
        policy: ConnectionPolicy,
        broker: &HandOver,
    ) -> Attempt {
        let began = Instant::now();
        let stopped = match broker.begin() {
            Ok(stopped) => stopped,
            Err(not_saved) if policy == ConnectionPolicy::Keep => {
                let reason = format!("connections cannot be kept: {}", not_saved.reason);
                if !not_saved.hangs {
                    return Attempt::TakenBack(reason);
                }
                // Shards that do not answer any more are started again, as after their death.
                self.is_end_wanted.store(true, Ordering::Release);
                let _ = self.child().kill();
                return Attempt::TakenBack(format!("{reason}, and do not answer: they are started again"));
            }
            Err(not_saved) => return Attempt::NotKept(not_saved.reason, None),
        };
        let _exchange = lock(&self.exchange);
        if self.is_stopping() {
            return Attempt::TakenBack("the stack is being stopped".into());
        }
        tracing::info!(
            "the shards are passed to version {version}; connections: {}",
            stopped.state().connections()
        );
        self.end_child();
        let NotStarted { failure, has_used_state } = match self.continue_with(next, stopped.state()) {
            Ok(link) => {
                let (away, connections) = (began.elapsed(), stopped.state().connections());
                // Before the next restart may begin.
                *lock(&self.executable) = next.clone();
                stopped.finish(link);
                tracing::info!(
                    "the shards were upgraded to version {version}, in {} ms; connections kept: {connections}",
                    away.as_millis()
                );
                return Attempt::Upgraded(Upgraded { away, connections: Ok(connections) });
            }
            Err(not_started) => not_started,
        };
        let reason =
            format!("version {version} cannot continue with the connections (its log says why): {failure}");
        if has_used_state {
            return Attempt::Lost(reason, stopped);
        }
        let former = self.continue_with(&self.executable(), stopped.state());
        match former {
            Ok(link) => {
                stopped.finish(link);
                Attempt::TakenBack(format!(
                    "{reason}; the former version does, and no connection was lost. --reset-connections upgrades by a restart of the shards"
                ))
            }
            Err(NotStarted { failure, .. }) => {
                let reason = format!("{reason}; the former version cannot either: {failure}");
                match policy {
                    ConnectionPolicy::Keep => Attempt::Lost(reason, stopped),
                    ConnectionPolicy::KeepIfPossible | ConnectionPolicy::Reset => {
                        Attempt::NotKept(reason, Some(stopped))
                    }
                }
            }
        }
    }
}

/// Returns why a version with the format `next` of saved states cannot read states of the format `former`, or
/// `None` if it can.
fn difference(next: StateFormat, former: StateFormat) -> Option<String> {
    match (next.version, former.version) {
        _ if next == former => None,
        (next, former) if next == former => Some(format!(
            "the new version reads other saved states of version {next} than the running one writes"
        )),
        (next, former) => Some(format!(
            "the new version reads saved states of version {next}, and the running one writes version {former}"
        )),
    }
}
