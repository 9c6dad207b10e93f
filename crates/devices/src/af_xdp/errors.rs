//! Explains errors of the kernel: their cause and the remedy.

use super::bpf::AttachMode;
use super::config::CopyMode;
use super::socket::SetupStep;
use rustix::io::Errno;
use std::io;

/// The capabilities that a process needs, and how to get them.
const CAPABILITIES: &str = "needs CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON (root, or AmbientCapabilities= of a systemd unit)";

fn with_context(error: impl Into<io::Error>, text: &str) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{text}: {error}"))
}

/// Returns whether another program or another socket occupies the interface or queue.
pub(super) fn is_busy(error: Errno) -> bool {
    matches!(error, Errno::BUSY | Errno::EXIST)
}

pub(super) fn map_error(error: Errno) -> io::Error {
    match error {
        Errno::PERM | Errno::ACCESS => with_context(error, CAPABILITIES),
        Errno::NOSYS | Errno::INVAL => {
            with_context(error, "the kernel does not support maps of AF_XDP sockets (CONFIG_XDP_SOCKETS)")
        }
        _ => with_context(error, "creating a BPF map"),
    }
}

pub(super) fn load_error(error: Errno, log: &str, multi_buffer: bool) -> io::Error {
    match error {
        Errno::PERM => with_context(error, CAPABILITIES),
        // Only to processes with CAP_PERFMON does the verifier permit arithmetic on pointers.
        Errno::ACCESS if log.contains("prohibited for !root") => with_context(error, CAPABILITIES),
        Errno::INVAL if multi_buffer && log.is_empty() => with_context(
            error,
            "an MTU above 3,822 needs multi-buffer frames, which need Linux 6.6: set a smaller MTU",
        ),
        _ => {
            // The last lines of the log give the verifier's reason.
            let lines: Vec<&str> = log.lines().rev().take(3).collect();
            let end: Vec<&str> = lines.into_iter().rev().collect();
            with_context(error, &format!("the kernel rejects the redirect program ({})", end.join("; ")))
        }
    }
}

/// Explains an error of attaching the redirect program in a mode.
pub(super) fn attach_error(error: Errno, mode: AttachMode) -> io::Error {
    match error {
        Errno::PERM => with_context(error, CAPABILITIES),
        error if is_busy(error) => with_context(
            error,
            "the interface has another XDP program: see \"ip link show\", detach it with \"ip link set dev … xdp off\" or end the program that owns it",
        ),
        Errno::INVAL if mode == AttachMode::Generic => {
            with_context(error, "the kernel does not support XDP links, which need Linux 5.9")
        }
        Errno::OPNOTSUPP | Errno::INVAL | Errno::RANGE if mode == AttachMode::Driver => with_context(
            error,
            "the driver does not accept the redirect program, or not with this MTU: attach=generic, without zero copy, works with every driver",
        ),
        _ => with_context(error, "attaching the redirect program"),
    }
}

/// Explains an error of a step in which the socket of a queue is set up. Its chunks take `chunk_bytes` bytes
/// of locked memory.
pub(super) fn socket_error(
    step: SetupStep,
    error: io::Error,
    queue: u16,
    mode: CopyMode,
    chunk_bytes: usize,
) -> io::Error {
    let Some(errno) = Errno::from_io_error(&error) else { return with_context(error, "AF_XDP socket") };
    let text = match (step, errno) {
        (_, Errno::PERM | Errno::ACCESS) => CAPABILITIES.into(),
        (SetupStep::Open, Errno::AFNOSUPPORT) => {
            "the kernel does not support AF_XDP sockets (CONFIG_XDP_SOCKETS)".into()
        }
        (SetupStep::Memory, Errno::NOBUFS) => format!(
            "{} MiB of locked memory exceed the limit: raise it (ulimit -l, LimitMEMLOCK= of a systemd unit), grant CAP_IPC_LOCK, or set a smaller ring=",
            chunk_bytes >> 20
        ),
        (SetupStep::BusyPoll, Errno::NOPROTOOPT) => {
            "the kernel does not support preferred busy polling, which needs Linux 5.11: set busy_poll=0".into()
        }
        (SetupStep::Bind, Errno::BUSY) => {
            format!(
                "queue {queue} has another AF_XDP socket: choose other queues, or end the program that owns it"
            )
        }
        (SetupStep::Bind, Errno::INVAL) => format!(
            "the kernel or the driver does not support the options of queue {queue} (an MTU above 3,822 needs Linux 6.6)"
        ),
        (SetupStep::Bind, Errno::OPNOTSUPP) if mode == CopyMode::ZeroCopy => {
            "the driver does not support zero copy for AF_XDP: set mode=copy or mode=auto".into()
        }
        (SetupStep::Bind, Errno::OPNOTSUPP) => {
            "the driver does not support this configuration of AF_XDP: try mode=copy, attach=generic or a smaller MTU".into()
        }
        (SetupStep::Bind, Errno::NETDOWN) => "the interface is down: set it up with \"ip link set … up\"".into(),
        (step, _) => format!("AF_XDP socket of queue {queue} ({step:?})"),
    };
    with_context(error, &text)
}

/// Explains why the filters for the ports of opened connections are not set.
pub(super) fn port_filter_error(error: io::Error) -> io::Error {
    let text = match error.kind() {
        io::ErrorKind::Unsupported => {
            "the driver has no filters for ports and masks, or they are off (\"ethtool -K … ntuple on\"): port_filters=off leaves them to you"
        }
        io::ErrorKind::PermissionDenied => CAPABILITIES,
        _ => "port_filters",
    };
    with_context(error, text)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_remedy_and_keep_the_kind() {
        let socket = |step, errno: Errno, mode| socket_error(step, errno.into(), 3, mode, 5 << 20);
        for (error, words) in [
            (map_error(Errno::PERM), "CAP_BPF"),
            (load_error(Errno::PERM, "", false), "CAP_NET_ADMIN"),
            (
                load_error(Errno::ACCESS, "R2 pointer arithmetic with it prohibited for !root", false),
                "CAP_PERFMON",
            ),
            (load_error(Errno::INVAL, "", true), "Linux 6.6"),
            (
                load_error(Errno::ACCESS, "1: r0 = 0\nR3 invalid\nprocessed 9", false),
                "(1: r0 = 0; R3 invalid; processed 9)",
            ),
            (attach_error(Errno::BUSY, AttachMode::Driver), "xdp off"),
            (attach_error(Errno::INVAL, AttachMode::Generic), "Linux 5.9"),
            (attach_error(Errno::OPNOTSUPP, AttachMode::Driver), "attach=generic"),
            (socket(SetupStep::Memory, Errno::NOBUFS, CopyMode::Auto), "5 MiB of locked memory"),
            (socket(SetupStep::Bind, Errno::BUSY, CopyMode::Auto), "queue 3 has another"),
            (socket(SetupStep::Bind, Errno::INVAL, CopyMode::Auto), "of queue 3"),
            (socket(SetupStep::Bind, Errno::OPNOTSUPP, CopyMode::ZeroCopy), "mode=copy"),
            (socket(SetupStep::Bind, Errno::NETDOWN, CopyMode::Copy), "ip link set"),
            (socket(SetupStep::Open, Errno::AFNOSUPPORT, CopyMode::Copy), "CONFIG_XDP_SOCKETS"),
            (port_filter_error(io::ErrorKind::Unsupported.into()), "ntuple on"),
            (port_filter_error(io::ErrorKind::StorageFull.into()), "port_filters: "),
            (socket(SetupStep::BusyPoll, Errno::NOPROTOOPT, CopyMode::Copy), "busy_poll=0"),
        ] {
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(attach_error(Errno::BUSY, AttachMode::Driver).kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(map_error(Errno::PERM).kind(), io::ErrorKind::PermissionDenied);
    }
}
