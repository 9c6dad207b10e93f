//! The mailbox of a shard, by which other threads send commands to it.

use crate::doorbell::Doorbell;
use crate::wait::EventFd;
use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

/// A message to the handler.
pub type Command = Box<dyn Any + Send>;

/// Sends commands to one shard, from any thread.
#[derive(Clone, Debug)]
pub struct Commander {
    queue: SyncSender<Command>,
    doorbell: Arc<Doorbell>,
    /// The shard has ended and does not read the mailbox any more.
    ended: Arc<AtomicBool>,
}

/// A command was not sent; it is returned to the caller.
pub enum CommandError {
    /// The mailbox is full (`shard.commands_max`).
    Full(Command),
    /// The shard is gone.
    Gone(Command),
}

impl fmt::Debug for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "the mailbox of the shard is full",
            Self::Gone(_) => "the shard is gone",
        })
    }
}

impl std::error::Error for CommandError {}

impl Commander {
    /// Sends a command, and wakes the shard if it sleeps. Never waits.
    pub fn send(&self, command: Command) -> Result<(), CommandError> {
        self.queue.try_send(command).map_err(|e| match e {
            TrySendError::Full(command) => CommandError::Full(command),
            TrySendError::Disconnected(command) => CommandError::Gone(command),
        })?;
        self.doorbell.ring();
        Ok(())
    }

    /// Returns whether the shard has ended: commands that are sent now are never read.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns the doorbell of the shard.
    pub(crate) fn doorbell(&self) -> &Arc<Doorbell> {
        &self.doorbell
    }
}

/// The receiving end of a mailbox.
#[derive(Debug)]
pub(crate) struct Mailbox {
    queue: Receiver<Command>,
    /// Commands that were taken out of the queue and wait for [`take`](Self::take).
    received: VecDeque<Command>,
    doorbell: Arc<Doorbell>,
    ended: Arc<AtomicBool>,
}

/// Creates a mailbox for `capacity` commands.
pub(crate) fn mailbox(capacity: usize) -> std::io::Result<(Commander, Mailbox)> {
    let (sender, receiver) = sync_channel(capacity);
    let doorbell = Arc::new(Doorbell::new()?);
    let ended = Arc::new(AtomicBool::new(false));
    let commander = Commander { queue: sender, doorbell: Arc::clone(&doorbell), ended: Arc::clone(&ended) };
    Ok((commander, Mailbox { queue: receiver, received: VecDeque::new(), doorbell, ended }))
}

impl Mailbox {
    /// Receives the commands that wait now, until `commands_max` are to be [taken](Self::take). Those that
    /// arrive later wait for the next call.
    pub(crate) fn receive(&mut self, commands_max: usize) {
        while self.received.len() < commands_max
            && let Ok(command) = self.queue.try_recv()
        {
            self.received.push_back(command);
        }
    }

    /// Returns the next received command.
    pub(crate) fn take(&mut self) -> Option<Command> {
        self.received.pop_front()
    }

    /// Arms the doorbell for new commands. Returns false if a command is waiting: the shard must not sleep
    /// then.
    pub(crate) fn before_sleep(&mut self) -> bool {
        self.doorbell.before_sleep();
        self.receive(1);
        self.received.is_empty()
    }

    /// Disarms the doorbell.
    pub(crate) fn after_sleep(&mut self, readable: bool) {
        self.doorbell.after_sleep(readable);
    }

    /// Records whether the shard runs.
    pub(crate) fn set_running(&self, runs: bool) {
        self.ended.store(!runs, Ordering::Release);
    }

    pub(crate) fn wake(&self) -> &EventFd {
        self.doorbell.wake()
    }
}

#[cfg(test)]
mod tests {
    use super::{CommandError, mailbox};
    use crate::wait::{EventFd, sleep};

    #[test]
    fn commands_arrive_in_order_and_full_mailbox_returns_command() {
        let (commander, mut mailbox) = mailbox(2).unwrap();
        commander.send(Box::new(1u8)).unwrap();
        commander.send(Box::new(2u8)).unwrap();
        let Err(CommandError::Full(back)) = commander.send(Box::new(3u8)) else { panic!("not full") };
        assert_eq!(back.downcast_ref::<u8>(), Some(&3));
        mailbox.receive(3);
        let taken: Vec<u8> =
            core::iter::from_fn(|| mailbox.take()).filter_map(|c| c.downcast_ref().copied()).collect();
        assert_eq!(taken, [1, 2]);
    }

    #[test]
    fn commands_that_arrive_later_wait() {
        let (commander, mut mailbox) = mailbox(3).unwrap();
        for number in 1u8..=3 {
            commander.send(Box::new(number)).unwrap();
        }
        mailbox.receive(2);
        commander.send(Box::new(4u8)).unwrap();
        assert_eq!(core::iter::from_fn(|| mailbox.take()).count(), 2);
        assert!(!mailbox.before_sleep());
        mailbox.after_sleep(false);
        mailbox.receive(9);
        assert_eq!(core::iter::from_fn(|| mailbox.take()).count(), 2);
    }

    #[test]
    fn command_to_a_gone_shard_is_returned() {
        let (commander, mailbox) = mailbox(1).unwrap();
        drop(mailbox);
        assert!(matches!(commander.send(Box::new(())), Err(CommandError::Gone(_))));
    }

    #[test]
    fn pending_command_prevents_sleep() {
        let (commander, mut mailbox) = mailbox(1).unwrap();
        commander.send(Box::new(())).unwrap();
        assert!(!mailbox.before_sleep());
        mailbox.after_sleep(false);
        assert!(mailbox.take().is_some());
        assert!(mailbox.before_sleep());
    }

    /// Hangs if a wake-up can be lost between the check of the queue and the sleep.
    #[test]
    fn no_wakeup_is_lost() {
        let (commander, mut mailbox) = mailbox(1).unwrap();
        let never = EventFd::new().unwrap();
        let sender = std::thread::spawn(move || {
            for i in 0..20_000u32 {
                let mut command: super::Command = Box::new(i);
                while let Err(CommandError::Full(back)) = commander.send(command) {
                    command = back;
                    std::thread::yield_now();
                }
            }
        });
        let mut expected = 0u32;
        while expected < 20_000 {
            mailbox.receive(1);
            while let Some(command) = mailbox.take() {
                assert_eq!(command.downcast_ref(), Some(&expected));
                expected += 1;
            }
            if expected < 20_000 && mailbox.before_sleep() {
                sleep([mailbox.wake().as_fd(), never.as_fd()], &[], None).unwrap();
            }
            mailbox.after_sleep(false);
        }
        sender.join().unwrap();
    }
}
