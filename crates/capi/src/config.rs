//! Configurations, and the function that gives frames their priorities.
#![allow(unsafe_code)] // functions that C calls, and a function of C

use crate::failure::{Failure, call};
use crate::memory;
use core::ffi::{c_char, c_int, c_void};
use ginnel::config::FileError;
use ginnel::{Config, Error, FrameDirection, Packet, PublishedStack, Shards};
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;

/// `ginnel_classifier`: returns the priority of a frame. The arguments are `arg`, the frame, and the priority
/// that the rules of the configuration, or the device, give the frame.
pub type Classifier = unsafe extern "C" fn(*mut c_void, *const PacketView, u8) -> u8;

/// `struct ginnel_packet`.
#[repr(C)]
pub struct PacketView {
    pub frame: *const u8,
    pub frame_len: usize,
    pub payload: *const u8,
    pub payload_len: usize,
    pub transmits: c_int,
}

/// `struct ginnel_config`.
pub struct CConfig {
    config: Config,
    classifier: Option<ClassifierCall>,
}

/// A function of C with its argument.
#[derive(Clone, Copy)]
struct ClassifierCall {
    function: Classifier,
    argument: *mut c_void,
}

// SAFETY: the header says that the function is called on the threads of all shards.
unsafe impl Send for ClassifierCall {}
// SAFETY: as above.
unsafe impl Sync for ClassifierCall {}

impl ClassifierCall {
    fn priority(self, packet: &Packet<'_>, transmits: bool, usual: u8) -> u8 {
        let payload = packet.payload();
        let view = PacketView {
            frame: packet.bytes().as_ptr(),
            frame_len: packet.bytes().len(),
            payload: payload.map_or(core::ptr::null(), <[u8]>::as_ptr),
            payload_len: payload.map_or(0, <[u8]>::len),
            transmits: transmits.into(),
        };
        // SAFETY: `ginnel_config_classifier` got the function, and the view's pointers are valid during the
        // call.
        unsafe { (self.function)(self.argument, &raw const view, usual) }
    }
}

impl CConfig {
    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the builder of the shards. The stack gets a run directory, by which `ginnel ss` and
    /// `ginnel stat` find it.
    ///
    /// # Errors
    /// The configuration names the stack, and its directory cannot be created.
    pub fn shards(&self) -> Result<Shards, Error> {
        let program = std::env::current_exe().ok();
        let program = program.as_deref().and_then(Path::file_stem).unwrap_or("program".as_ref());
        let published = match PublishedStack::new(&self.config.run, &program.to_string_lossy()) {
            // A stack without a name in the configuration can do without a directory.
            Err(_) if self.config.run.name.is_none() => None::<Arc<PublishedStack>>,
            published => published?,
        };
        let mut shards = Shards::new(self.config.clone()).published(published);
        if let Some(classifier) = self.classifier {
            shards = shards.priority_function(move |direction| {
                let transmits = direction == FrameDirection::Transmit;
                move |packet: &Packet<'_>, usual: u8| classifier.priority(packet, transmits, usual)
            });
        }
        Ok(shards)
    }
}

/// Gives C the configuration that was read, through `out`, and returns 0. An error of reading becomes
/// `EINVAL`.
///
/// # Safety
/// `out` is null or points to a writable variable.
unsafe fn finish(config: Result<Config, FileError>, out: *mut *mut CConfig) -> Result<c_int, Failure> {
    let config = config.map_err(|e| Failure::about(Errno::INVAL, e))?;
    // SAFETY: as the caller says.
    unsafe { memory::give(out, CConfig { config, classifier: None }) }?;
    Ok(0)
}

/// Reads a configuration file.
///
/// # Safety
/// `path` is null or a C string; `out` is null or points to a writable variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_config_file(path: *const c_char, out: *mut *mut CConfig) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let path = unsafe { memory::text(path) }?;
        // SAFETY: as the caller says.
        unsafe { finish(Config::from_file(path.as_ref()), out) }
    })
}

/// Parses the text of a configuration file.
///
/// # Safety
/// `text` is null or a C string; `out` is null or points to a writable variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_config_text(text: *const c_char, out: *mut *mut CConfig) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let text = unsafe { memory::text(text) }?;
        // SAFETY: as the caller says.
        unsafe { finish(Config::from_toml("configuration", text), out) }
    })
}

/// Sets the function that gives frames their priorities.
///
/// # Safety
/// `config` is null or a configuration of this library; `function` is null or can be called on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_config_classifier(
    config: *mut CConfig,
    function: Option<Classifier>,
    argument: *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let config = unsafe { memory::object_mut(config) }?;
        config.classifier = function.map(|function| ClassifierCall { function, argument });
        Ok(0)
    })
}

/// Frees a configuration. Stacks that were opened with it go on.
///
/// # Safety
/// `config` is null or a configuration of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_config_free(config: *mut CConfig) {
    // SAFETY: as the caller says.
    unsafe { memory::free(config) };
}
