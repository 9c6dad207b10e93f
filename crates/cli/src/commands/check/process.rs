//! A process as /proc describes it.

use crate::failure::Failure;
use crate::programs::NO_STACK_VARIABLE;
use ginnel_posix_ops::{descriptor_report, not_attached};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File name of the preloaded library.
const LIBRARY: &str = "libginnel.so";
/// File name of the library of `--stack kernel --listen-spawn`.
const KERNEL_LIBRARY: &str = "libginnel_kernel.so";
/// Entry of the auxiliary vector that is nonzero for setuid programs and programs with file capabilities
/// (getauxval(3)).
const AT_SECURE: u64 = 23;
/// Type of the program header that names the dynamic loader (elf(5)).
const PT_INTERP: u32 = 3;

/// Used as the inode of epoll sets, which have no inode of their own.
pub const EPOLL_INODE: u64 = 0;

/// Describes the stack on which a process was started.
#[derive(Debug)]
pub enum StackFinding {
    /// The process names no stack.
    None,
    /// No process owns the stack's directory.
    Ended,
    /// The stack runs, and does not list the process.
    NotListed(String),
    /// The stack runs and does not answer, or its directory cannot be read, for this reason.
    NoAnswer(String),
}

impl StackFinding {
    /// Returns why a process with the library, started on the stack at `path`, is not attached to it.
    fn why_not_attached(&self, path: &str) -> String {
        match self {
            Self::None => format!("{path} names no stack"),
            Self::Ended => {
                let directory = Path::new(path).parent().unwrap_or(Path::new(path));
                let name = directory.file_name().unwrap_or(directory.as_os_str());
                format!("its stack \"{}\" ({}) has ended", name.display(), directory.display())
            }
            Self::NotListed(name) => format!(
                "the stack \"{name}\" runs and does not know it: it is a child that left the stack, or its connection was closed"
            ),
            Self::NoAnswer(cause) => cause.clone(),
        }
    }
}

pub struct InspectedProcess {
    pub pid: u32,
    pub name: String,
}

impl InspectedProcess {
    /// Finds the process with this id.
    ///
    /// # Errors
    /// No process has this id, or it has ended.
    pub fn find(pid: u32) -> Result<Self, Failure> {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"));
        let name = name.map_err(|_| Failure::running(format!("no process has the id {pid}")))?;
        let this = Self { pid, name: name.trim_end().into() };
        let field = |name: &str| this.status_field(name);
        if field("State:").is_some_and(|state| state.starts_with('Z')) {
            return Err(Failure::running(format!(
                "process {pid} ({}) has ended, and waits for its parent (process {}) to take its exit status",
                this.name,
                field("PPid:").unwrap_or_default()
            )));
        }
        Ok(this)
    }

    /// Returns the value of a field of `/proc/PID/status` (proc_pid_status(5)).
    fn status_field(&self, name: &str) -> Option<String> {
        let status = fs::read_to_string(self.proc_path("status")).ok()?;
        Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim().into())
    }

    fn proc_path(&self, file: &str) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join(file)
    }

    /// Lists the sockets and epoll sets of the process as descriptor and inode, sorted by descriptor.
    ///
    /// # Errors
    /// The process belongs to another user, or has ended.
    pub fn sockets(&self) -> Result<Vec<(i32, u64)>, Failure> {
        let failed = |e: io::Error| {
            let Self { pid, name, .. } = self;
            let owner = fs::metadata(format!("/proc/{pid}")).map(|of| of.uid());
            Failure::running(match (e.kind(), owner) {
                (ErrorKind::PermissionDenied, Ok(uid)) => format!(
                    "process {pid} ({name}) belongs to user {uid}: only that user and root may check it ({e})"
                ),
                _ => format!("descriptors of process {pid}: {e}"),
            })
        };
        let mut found = Vec::new();
        for entry in fs::read_dir(self.proc_path("fd")).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            // The descriptor may have been closed in the meantime.
            let Ok(target) = fs::read_link(&path) else { continue };
            let fd = path.file_name().and_then(|name| name.to_str()?.parse().ok());
            let target = target.to_string_lossy();
            let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')?.parse().ok());
            let inode = inode.or((target == "anon_inode:[eventpoll]").then_some(EPOLL_INODE));
            found.extend(fd.zip(inode));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Returns the value of a variable in the environment with which the process was started.
    fn variable(&self, name: &str) -> Option<String> {
        let environment = fs::read(self.proc_path("environ")).unwrap_or_default();
        let mut texts = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        texts.find_map(|text| Some(text.strip_prefix(name)?.strip_prefix('=')?.to_string()))
    }

    /// Returns true if the process started with an environment that names no variable any more.
    fn has_overwritten_environment(&self) -> bool {
        let environment = fs::read(self.proc_path("environ")).unwrap_or_default();
        !environment.is_empty() && !environment.contains(&b'=')
    }

    /// Returns the control socket of the stack on which the process was started. A process that has
    /// overwritten its environment, as servers do for their title, has it in its descriptor report.
    fn control_socket(&self) -> Option<String> {
        self.variable("GINNEL_STACK").or_else(|| descriptor_report::stack_of(self.pid))
    }

    /// Returns the directory of the stack on which the process was started.
    pub fn stack_directory(&self) -> Option<PathBuf> {
        let control = PathBuf::from(self.control_socket()?);
        if control.is_absolute() { control.parent().map(Path::to_owned) } else { None }
    }

    /// Returns the reason why the process is attached to no stack. `stack` describes the stack on which it
    /// was started.
    pub fn why_not_attached(&self, stack: &StackFinding) -> String {
        if self.is_secure_execution() {
            return "setuid program, or program with file capabilities".into();
        }
        if self.is_statically_linked() {
            return "statically linked".into();
        }
        let maps = fs::read_to_string(self.proc_path("maps")).unwrap_or_default();
        if let Some(reason) = not_attached::find(&maps) {
            return reason.into();
        }
        let has_library =
            |name: &str| maps.lines().any(|line| line.trim_end_matches(" (deleted)").ends_with(name));
        let loaded = has_library(LIBRARY);
        let preloaded = self.variable("LD_PRELOAD").is_some_and(|paths| paths.contains(LIBRARY));
        match (loaded, self.control_socket()) {
            (true, Some(path)) => stack.why_not_attached(&path),
            (true, None) => "it has the library, but no GINNEL_STACK in its environment".into(),
            (false, None) => {
                let cause = self.variable(NO_STACK_VARIABLE).or_else(|| {
                    has_library(KERNEL_LIBRARY)
                        .then(|| "started with --stack kernel --listen-spawn (see ginnel listeners)".into())
                });
                match cause {
                    Some(cause) => format!("ginnel run started it on the kernel's network: {cause}"),
                    None if self.has_overwritten_environment() => {
                        "not started with ginnel run, or with --stack kernel or --on-missing kernel: the program has overwritten its environment, which would tell".into()
                    }
                    None => "not started with ginnel run".into(),
                }
            }
            (false, Some(_)) if preloaded => format!("{LIBRARY} could not be loaded"),
            (false, Some(_)) => "LD_PRELOAD was removed from its environment".into(),
        }
    }

    fn is_secure_execution(&self) -> bool {
        let vector = fs::read(self.proc_path("auxv")).unwrap_or_default();
        let (words, _) = vector.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        words.chunks_exact(2).any(|pair| pair[0] == AT_SECURE && pair[1] != 0)
    }

    /// Returns true if the executable names no dynamic loader, so that no library can be preloaded.
    fn is_statically_linked(&self) -> bool {
        let Ok(program) = fs::read(self.proc_path("exe")) else { return false };
        has_interpreter(&program) == Some(false)
    }
}

/// Returns whether an executable names a dynamic loader, or `None` if it is no 64-bit little-endian ELF file.
fn has_interpreter(program: &[u8]) -> Option<bool> {
    let field = |at: usize, len: usize| -> Option<u64> {
        let bytes = program.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    (program.get(..6)? == b"\x7fELF\x02\x01").then_some(())?;
    let (headers, size, count) = (field(32, 8)? as usize, field(54, 2)? as usize, field(56, 2)? as usize);
    let kind = |number: usize| field(headers.checked_add(number * size)?, 4);
    Some((0..count).any(|number| kind(number) == Some(PT_INTERP.into())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel::broker::Refusal;
    use rustix::io::Errno;
    use std::process::Command;
    use std::time::{Duration, Instant};

    /// Returns whether the parts of a pattern, which "…", "NAME" and "N" separate, are in a text in their
    /// order.
    fn matches(pattern: &str, text: &str) -> bool {
        let pattern = pattern.replace("NAME", "…").replace(" N ", " … ").replace(" N", " …");
        let mut rest = Some(text);
        let mut parts = pattern.split('…');
        let first = parts.next().unwrap_or_default();
        rest = rest.and_then(|rest| rest.strip_prefix(first));
        for part in parts {
            rest = rest.and_then(|rest| Some(rest.split_once(part)?.1));
        }
        rest.is_some()
    }

    #[test]
    fn every_reason_has_a_remedy() {
        let page = include_str!("../../../../../docs/operations.md");
        let (_, table) = page.split_once("| Text after \"is not accelerated:\" |").unwrap();
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let patterns: Vec<&str> =
            rows.filter_map(|row| row.split('|').nth(1)).flat_map(|cell| cell.trim().split("; ")).collect();
        let refusals = [
            Refusal::Version(3),
            Refusal::User(7),
            Refusal::Clients(9),
            Refusal::Domains(9),
            Refusal::ShardEnded,
            Refusal::Restarting(2),
            Refusal::Resources(Errno::MFILE),
            Refusal::Resources(Errno::NFILE),
            Refusal::Resources(Errno::NOMEM),
            Refusal::Resources(Errno::PERM),
            Refusal::Unattached(9),
            Refusal::Pending(9),
        ];
        let unreachable = [
            "it belongs to user 7",
            "its process is dead, and has left its directory behind",
            "it has ended, or never ran",
            "this process may not connect to it",
            "its process is stopped or stuck, and accepts no connection",
            "the connection failed",
        ];
        let causes = refusals.iter().map(ToString::to_string).chain(unreachable.map(String::from));
        let findings = [
            StackFinding::None,
            StackFinding::Ended,
            StackFinding::NotListed("web".into()),
            StackFinding::NoAnswer("its stack \"web\" (process 7) does not answer: …".into()),
        ];
        let others = [
            "it has the library, but no GINNEL_STACK in its environment",
            "libginnel.so could not be loaded",
            "LD_PRELOAD was removed from its environment",
            "not started with ginnel run",
            "statically linked",
            "setuid program, or program with file capabilities",
            "ginnel run started it on the kernel's network: --stack kernel",
        ];
        let texts = causes
            .map(|cause| format!("cannot attach to /run/ginnel/web/control: {cause}"))
            .chain(findings.iter().map(|finding| finding.why_not_attached("/run/ginnel/web/control")))
            .chain(others.map(String::from));
        for text in texts {
            let known = patterns.iter().any(|pattern| matches(pattern, &text));
            assert!(known, "docs/operations.md has no row for {text:?}");
        }
        assert!(!patterns.iter().any(|pattern| matches(pattern, "cannot attach to x: another reason")));
    }

    #[test]
    fn programs_without_a_dynamic_loader_are_detected() {
        let this = fs::read("/proc/self/exe").unwrap();
        assert_eq!(has_interpreter(&this), Some(true));
        // An executable without program headers.
        let mut none = this[..4096].to_vec();
        none[56..58].fill(0);
        assert_eq!(has_interpreter(&none), Some(false));
        for broken in [&b"#!/bin/sh\n"[..], b"", &this[..40]] {
            assert_eq!(has_interpreter(broken), None);
        }
    }

    #[test]
    fn the_reason_for_no_stack_is_given() {
        let this = InspectedProcess::find(std::process::id()).unwrap();
        assert_eq!(this.why_not_attached(&StackFinding::None), "not started with ginnel run");
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
        assert!(this.sockets().unwrap().iter().any(|(known, inode)| *known == fd && *inode != 0));
        assert!(InspectedProcess::find(4_194_304).is_err());
    }

    #[test]
    fn a_process_that_has_ended_is_not_examined() {
        let mut child = Command::new("true").spawn().unwrap();
        let (pid, until) = (child.id(), Instant::now() + Duration::from_secs(10));
        let failure = loop {
            match InspectedProcess::find(pid) {
                Err(failure) => break failure.to_string(),
                Ok(_) => assert!(Instant::now() < until, "it is not found to have ended"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let parent = std::process::id();
        let ends_with =
            format!(") has ended, and waits for its parent (process {parent}) to take its exit status");
        assert!(
            failure.starts_with(&format!("process {pid} (")) && failure.ends_with(&ends_with),
            "{failure}"
        );
        child.wait().unwrap();
    }
}
