//! The object that `userdata` points to, from `packetdrill_interface_init` to `free`, and the start of its
//! stack.
//!
//! packetdrill loads the library before it runs the script's first command, which sets the sysctls that the
//! script tests. So settings are read when the clock is first queried, which packetdrill does directly after
//! that command and 100 ms before the script's first event, or at the first call or packet, whichever comes
//! first. The script may contain further commands before its first call; so settings are read again then, and
//! an unused stack is replaced if they differ.

use crate::clock::Clock;
use crate::hooks;
use crate::instance::Instance;
use crate::so_flags::SoFlags;
use crate::tunnel::Tunnel;
use rustix::io::Errno;
use std::sync::{Mutex, OnceLock, PoisonError};

/// One use of the interface by packetdrill, with the stack that it tests.
pub struct Session {
    flags: SoFlags,
    pub tunnel: Tunnel,
    pub clock: Clock,
    /// A started stack that was not used yet.
    unused: Mutex<Option<Instance>>,
    /// The stack in use; the inner `None` means that it could not start.
    used: OnceLock<Option<Instance>>,
}

impl Session {
    /// Creates a session for a stack with these flags.
    ///
    /// # Errors
    /// Describes invalid flags or a missing resource.
    pub fn new(flags: &str) -> Result<Box<Self>, String> {
        let flags = SoFlags::parse(flags)?;
        let tunnel = Tunnel::new(flags.mtu as usize).map_err(|error| error.to_string())?;
        let session =
            Self { flags, tunnel, clock: Clock::new(), unused: Mutex::default(), used: OnceLock::new() };
        let session = Box::new(session);
        hooks::register(&session);
        Ok(session)
    }

    /// Starts a stack, if none was started.
    pub fn start_if_unstarted(&self) {
        if self.used.get().is_none() {
            let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
            if unused.is_none() {
                *unused = self.start(true);
            }
        }
    }

    /// Returns the stack, if it is in use.
    pub fn used_instance(&self) -> Option<&Instance> {
        self.used.get()?.as_ref()
    }

    /// Returns the stack, and marks it as used.
    ///
    /// # Errors
    /// `ENODEV` if the stack could not start.
    pub fn instance(&self) -> Result<&Instance, Errno> {
        let started = self.used.get_or_init(|| {
            let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
            let unused = unused.take();
            // The warnings were printed when the unused stack started.
            let has_warned = unused.is_some();
            let has_current_settings = |old: &Instance| {
                self.flags.tcp_settings().is_ok_and(|(settings, _)| settings == old.settings)
            };
            // The old stack ends before the new one, which takes over its tunnel, starts.
            unused.filter(has_current_settings).or_else(|| self.start(!has_warned))
        });
        started.as_ref().ok_or(Errno::NODEV)
    }

    /// Starts a stack with the current settings of the kernel. Prints errors on standard error, and with
    /// `warn` also settings that are not supported.
    fn start(&self, warn: bool) -> Option<Instance> {
        let started = self.flags.tcp_settings().and_then(|(settings, unsupported)| {
            for setting in unsupported.iter().filter(|_| warn) {
                eprintln!("packetdrill_ginnel: unsupported kernel setting: {setting}");
            }
            Instance::start(&self.flags, settings, &self.tunnel, self.clock)
                .map_err(|error| error.to_string())
        });
        started.inspect_err(|problem| eprintln!("packetdrill_ginnel: {problem}")).ok()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        hooks::unregister(self);
    }
}
