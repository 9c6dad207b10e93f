//! What `userdata` points to, from `packetdrill_interface_init` to `free`, and when its stack starts.
//!
//! packetdrill loads the library before it runs the script's first command, which sets what the script tests. So settings are read when the clock is asked for the first time, which
//! packetdrill does right behind that command and a tenth of a second before the script's first event, or at the first call or packet, whichever comes first. Commands of the
//! script itself may stand before its first call; so they are read once more then, and a stack that nobody has used yet makes room for another.

use crate::clock::Clock;
use crate::hooks;
use crate::instance::Instance;
use crate::so_flags::SoFlags;
use crate::tunnel::Tunnel;
use rustix::io::Errno;
use std::sync::{Mutex, OnceLock, PoisonError};

/// An instance of the interface.
pub struct Session {
    flags: SoFlags,
    pub tunnel: Tunnel,
    pub clock: Clock,
    /// A stack that has been asked for nothing.
    unused: Mutex<Option<Instance>>,
    /// The stack, for good; none if it could not start.
    used: OnceLock<Option<Instance>>,
}

impl Session {
    /// A place for a stack as the flags say it.
    ///
    /// # Errors
    /// What is wrong with the flags, or missing.
    pub fn new(flags: &str) -> Result<Box<Self>, String> {
        let flags = SoFlags::parse(flags)?;
        let tunnel = Tunnel::new(flags.mtu as usize).map_err(|error| error.to_string())?;
        let place =
            Self { flags, tunnel, clock: Clock::new(), unused: Mutex::default(), used: OnceLock::new() };
        let place = Box::new(place);
        hooks::register(&place);
        Ok(place)
    }

    /// Has a stack started, if there was none.
    pub fn start_if_unstarted(&self) {
        if self.used.get().is_none() {
            let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
            if unused.is_none() {
                *unused = self.start(true);
            }
        }
    }

    /// The stack, once somebody has used it.
    pub fn used_instance(&self) -> Option<&Instance> {
        self.used.get()?.as_ref()
    }

    /// The stack, to use it.
    ///
    /// # Errors
    /// `ENODEV` if there can be none.
    pub fn instance(&self) -> Result<&Instance, Errno> {
        let started = self.used.get_or_init(|| {
            let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
            let unused = unused.take();
            // What was told once need not be told again.
            let told = unused.is_some();
            let fits = |old: &Instance| {
                self.flags.tcp_settings().is_ok_and(|(settings, _)| settings == old.settings)
            };
            // The old one ends before the new one begins, which has its tunnel.
            unused.filter(fits).or_else(|| self.start(!told))
        });
        started.as_ref().ok_or(Errno::NODEV)
    }

    /// Starts one with what the kernel is set to now. Says on standard error what is wrong with that.
    fn start(&self, tell: bool) -> Option<Instance> {
        let started = self.flags.tcp_settings().and_then(|(settings, refused)| {
            for refused in refused.iter().filter(|_| tell) {
                eprintln!("packetdrill_ginnel: not as the kernel is set: {refused}");
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
