//! Check of an executable before an upgrade: it must be a version of this program that accepts the command
//! line of the stack and whose messages the supervisor and the programs on the stack understand.

use crate::failure::Failure;
use crate::served_stack::check_placement;
use crate::supervisor::same_command;
use core::fmt;
use core::time::Duration;
use ginnel::broker::PROTOCOL_VERSION;
use ginnel::config::DeviceKind;
use ginnel::{Config, STATE_FORMAT, Shards, StateConfig, StateFormat};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::Instant;

/// Longest time for the check.
pub const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// First word of what a version prints of itself.
const WORD: &str = "ginnel-shards";

/// Version of an executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(String);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An executable that can run the shards of this stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedExecutable {
    /// Its version.
    pub version: Version,
    /// Format of the saved states of shards that it writes and reads; `None` if it does neither.
    pub state_format: Option<StateFormat>,
    /// Layout of the stack that it would run; `None` if it does not tell.
    pub layout: Option<StackLayout>,
    /// On what the states depend that it reads; `None` if it does not tell.
    pub state_config: Option<StateConfig>,
}

/// Describes what must not change as long as a stack runs: programs know its shards, and the supervisor keeps
/// its TAP interfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackLayout {
    shards: u32,
    /// Names of the TAP interfaces, separated by commas.
    taps: String,
}

impl StackLayout {
    /// Returns the layout of a stack with this configuration.
    pub fn of(config: &Config) -> Self {
        let taps = config.devices.iter().filter(|device| device.kind == DeviceKind::Tap);
        let taps: Vec<&str> = taps.map(|device| device.interface()).collect();
        Self { shards: config.shards.count, taps: taps.join(",") }
    }

    fn parse(shards: &str, taps: &str) -> Option<Self> {
        let shards = shards.strip_prefix("shards=")?.parse().ok()?;
        Some(Self { shards, taps: taps.strip_prefix("taps=")?.to_owned() })
    }

    /// Returns how this layout differs from that of the running stack; `None` if it does not.
    pub fn difference(&self, running: &Self) -> Option<String> {
        let named = |taps: &str| if taps.is_empty() { "none".to_owned() } else { taps.to_owned() };
        match self {
            _ if self.shards != running.shards => {
                Some(format!("{} shards, and the running stack has {}", self.shards, running.shards))
            }
            _ if self.taps != running.taps => Some(format!(
                "other TAP interfaces ({}) than the running stack ({})",
                named(&self.taps),
                named(&running.taps)
            )),
            _ => None,
        }
    }
}

impl fmt::Display for StackLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shards={} taps={}", self.shards, self.taps)
    }
}

/// Checks that this program could run a stack with this configuration, as far as that is known before it
/// opens a device. Returns what it prints about itself for [`check`] in another process: the versions of the
/// broker protocol, of the program and of saved states, the layout of these, the layout of the stack, and on
/// what the states depend.
pub fn check_own(config: &Config) -> Result<String, Failure> {
    check_placement(config)?;
    Shards::new(config.clone()).check()?;
    Ok(describe_own(config))
}

fn describe_own(config: &Config) -> String {
    let StateFormat { version, layout } = STATE_FORMAT;
    let stack = StackLayout::of(config);
    let state = StateConfig::of(config);
    let program = env!("CARGO_PKG_VERSION");
    format!("{WORD} {PROTOCOL_VERSION} {program} {version} {layout:016x} {stack} {state}")
}

/// Has `executable` check the command line and the configuration of this process. Returns its versions, or
/// why it cannot run the shards.
pub fn check(executable: &File) -> Result<CheckedExecutable, String> {
    let mut command = same_command(executable, |command| _ = command.arg("--check-shards"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(|e| format!("the new executable cannot be started: {e}"))?;
    let is_finished = wait(&mut child).map_err(|e| format!("the new executable: {e}"))?;
    // Processes that it has left behind would keep the pipes open.
    if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
        // Fails if there are none.
        let _ = kill_process_group(group, Signal::KILL);
    }
    let (output, errors) = (text(child.stdout.take()), text(child.stderr.take()));
    if !is_finished {
        return Err(format!(
            "the new executable has not checked the options within {} s",
            CHECK_TIMEOUT.as_secs()
        ));
    }
    parse(&output).unwrap_or_else(|| {
        let reason =
            errors.lines().find(|line| !line.trim().is_empty()).unwrap_or("it is no version of ginnel");
        Err(format!("the new executable does not accept the stack's options: {reason}"))
    })
}

/// Waits until the child has ended. Returns false if it had to be killed.
fn wait(child: &mut Child) -> io::Result<bool> {
    let until = Instant::now() + CHECK_TIMEOUT;
    while child.try_wait()?.is_none() {
        if Instant::now() > until {
            child.kill()?;
            child.wait()?;
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(true)
}

/// Returns the first bytes that a child has written and that the pipe holds; the others are not needed.
fn text(pipe: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // What was read until an error is used.
        let _ = pipe.take(4096).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the versions in what an executable has printed, or why it does not fit; `None` if it has not
/// printed a version.
fn parse(output: &str) -> Option<Result<CheckedExecutable, String>> {
    let mut words = output.split_whitespace();
    let (WORD, protocol, version) = (words.next()?, words.next()?, words.next()?) else { return None };
    let protocol: u32 = protocol.parse().ok()?;
    if protocol == PROTOCOL_VERSION {
        let state_format = words.next().zip(words.next()).and_then(|(version, layout)| {
            let layout = u64::from_str_radix(layout, 16).ok()?;
            Some(StateFormat { version: version.parse().ok()?, layout })
        });
        let layout = words.next().zip(words.next());
        let layout = layout.and_then(|(shards, taps)| StackLayout::parse(shards, taps));
        let version = Version(version.to_owned());
        let state_config = words.collect::<Vec<_>>().join(" ").parse().ok();
        return Some(Ok(CheckedExecutable { version, state_format, layout, state_config }));
    }
    Some(Err(format!(
        "version {version} has version {protocol} of the broker protocol, and the programs on the stack have version {PROTOCOL_VERSION}: stop the stack, and start it again"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_version_fits() {
        let version = Version(env!("CARGO_PKG_VERSION").into());
        let state_format = Some(STATE_FORMAT);
        let config = Config::default();
        let layout = Some(StackLayout { shards: 1, taps: String::new() });
        let state_config = Some(StateConfig::of(&config));
        let own = CheckedExecutable { version, state_format, layout, state_config };
        assert_eq!(parse(&describe_own(&config)), Some(Ok(own)));
    }

    #[test]
    fn another_layout_is_named() {
        let layout = |shards: &str, taps: &str| StackLayout::parse(shards, taps).unwrap();
        let running = layout("shards=1", "taps=tap0");
        assert_eq!(running.difference(&running), None);
        let expected = "2 shards, and the running stack has 1";
        assert_eq!(layout("shards=2", "taps=tap0").difference(&running).unwrap(), expected);
        let expected = "other TAP interfaces (none) than the running stack (tap0)";
        assert_eq!(layout("shards=1", "taps=").difference(&running).unwrap(), expected);
    }

    #[test]
    fn version_without_saved_states_fits() {
        for words in ["", " ?", " 1", " -1 0", " 1 layout"] {
            let checked = parse(&format!("{WORD} {PROTOCOL_VERSION} 9.8.7{words}\n")).unwrap().unwrap();
            assert_eq!(checked.state_format, None, "{words}");
        }
    }

    #[test]
    fn other_output_is_no_version() {
        for output in ["", "nginx 1.22", "ginnel-shards", "ginnel-shards 15", "ginnel-shards x 1.0"] {
            assert_eq!(parse(output), None, "{output}");
        }
    }

    #[test]
    fn another_protocol_is_refused_by_name() {
        let reason = parse(&format!("ginnel-shards {} 9.8.7", PROTOCOL_VERSION + 1)).unwrap().unwrap_err();
        assert!(reason.contains("version 9.8.7") && reason.contains("start it again"), "{reason}");
    }
}
