//! Errors that end the command, with their exit codes.

use crate::executable::find_executable;
use core::fmt;
use ginnel_devices::resource_limit::resource_limit;
use rustix::io::Errno;
use rustix::process::Resource;
use std::process::ExitCode;

/// An error message of one line for standard error, and the exit code that belongs to it.
#[derive(Debug)]
pub struct Failure {
    text: String,
    code: u8,
    closed_pipe: bool,
}

impl Failure {
    /// An error in the arguments or the configuration: exit code 2.
    pub fn usage(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 2, closed_pipe: false }
    }

    /// An error while running: exit code 1.
    pub fn running(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 1, closed_pipe: false }
    }

    /// A program has no stack to run on: exit code 125, which the preloaded library uses in this case, too.
    pub fn no_stack(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 125, closed_pipe: false }
    }

    /// A program cannot be started: exit code 127 if there is no such file, otherwise 126, as from a shell,
    /// env(1) and nice(1).
    pub fn not_started(program: &str, error: &std::io::Error) -> Self {
        let (code, cause) = match error.kind() {
            std::io::ErrorKind::NotFound if find_executable(program.as_ref()).is_some() => {
                (127, "its interpreter was not found".into())
            }
            std::io::ErrorKind::NotFound => (127, "command not found".into()),
            _ => (126, error.to_string()),
        };
        Self { text: format!("{program}: {cause}"), code, closed_pipe: false }
    }

    /// Returns true for an error in the arguments or the configuration.
    pub fn is_usage(&self) -> bool {
        self.code == 2
    }

    /// Returns true if the output could not be written because its reader closed the pipe.
    pub fn is_closed_pipe(&self) -> bool {
        self.closed_pipe
    }

    /// A program that ran on a stack ended with exit code `code`. Nothing is printed: the program has
    /// reported its own errors.
    pub fn program(code: u8) -> Self {
        Self { text: String::new(), code, closed_pipe: false }
    }

    /// Returns 2 for a usage error, 125 without a stack, 126 or 127 for a program that cannot be started, the
    /// program's own code, or 1 for any other error.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }

    /// Returns the failure without its message, which is where it would be printed.
    pub fn silenced(self) -> Self {
        Self { text: String::new(), ..self }
    }

    /// Returns true if no message is to be printed.
    pub fn is_silent(&self) -> bool {
        self.text.is_empty()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<ginnel::Error> for Failure {
    fn from(e: ginnel::Error) -> Self {
        match e {
            ginnel::Error::Config(_) => Self::usage(e.to_string()),
            ginnel::Error::Io(_, ref io) if io.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
                Self::running(format!(
                    "{e}: raise the hard limit of descriptors (ulimit -Hn, or LimitNOFILE= of a unit)"
                ))
            }
            ginnel::Error::Io(_, ref io) if io.raw_os_error() == Some(Errno::NOMEM.raw_os_error()) => {
                let limit = match resource_limit(Resource::As).current {
                    Some(bytes) => format!("ulimit -v, now {}", bytes >> 10),
                    None => "ulimit -v".into(),
                };
                Self::running(format!(
                    "{e}: free memory, or raise the limit of the address space ({limit}, or LimitAS= of a unit)"
                ))
            }
            ginnel::Error::Io(_, ref io) if io.kind() == std::io::ErrorKind::FileTooLarge => Self::running(
                format!("{e}: raise the limit of file sizes (ulimit -f, or LimitFSIZE= of a unit)"),
            ),
            _ => Self::running(e.to_string()),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Self {
        let closed_pipe = e.kind() == std::io::ErrorKind::BrokenPipe;
        Self { closed_pipe, ..Self::running(e.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Errno, Failure};
    use std::io::ErrorKind;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn missing_interpreter_is_no_missing_command() {
        let script = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(script.path(), "#!/nonexistent/interpreter\n").unwrap();
        std::fs::set_permissions(script.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let text = |program: &str| Failure::not_started(program, &ErrorKind::NotFound.into()).to_string();
        assert!(text(script.path().to_str().unwrap()).ends_with(": its interpreter was not found"));
        assert_eq!(text("no-such-program"), "no-such-program: command not found");
    }

    #[test]
    fn shortage_of_descriptors_names_the_limit() {
        let io = |errno: Errno| ginnel::Error::Io("eventfd of the mailbox".into(), errno.into());
        let [short, other] = [Errno::MFILE, Errno::NOMEM].map(|errno| Failure::from(io(errno)).to_string());
        assert!(short.starts_with("eventfd of the mailbox: ") && short.contains("LimitNOFILE="), "{short}");
        assert!(!other.contains("LimitNOFILE=") && other.contains("LimitAS="), "{other}");
    }
}
