//! The libc functions that the library intercepts: all that take descriptors which may be sockets, except the
//! functions that are listed here with a reason.

use crate::fixture::built_library;
use ginnel_testkit::skip;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Functions that take or create descriptors which may be sockets, that start programs which inherit them, or
/// that install signal handlers or block signals. The names are without the underscores and the suffixes
/// `_chk` and `64` of their variants.
const FAMILIES: &[&str] = &[
    "accept",
    "accept4",
    "bind",
    "bindresvport",
    "bsd_signal",
    "close",
    "close_nocancel",
    "close_range",
    "closefrom",
    "connect",
    "copy_file_range",
    "daemon",
    "dprintf",
    "dup",
    "dup2",
    "dup3",
    "epoll_create",
    "epoll_create1",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_pwait2",
    "epoll_wait",
    "execl",
    "execle",
    "execlp",
    "execv",
    "execve",
    "execveat",
    "execvp",
    "execvpe",
    "fcntl",
    "fdopen",
    "fexecve",
    "fork",
    "forkpty",
    "getpeername",
    "getsockname",
    "getsockopt",
    "ioctl",
    "isfdtype",
    "listen",
    "poll",
    "popen",
    "posix_spawn",
    "posix_spawnp",
    "posix_spawn_file_actions_addclose",
    "posix_spawn_file_actions_addclosefrom_np",
    "posix_spawn_file_actions_adddup2",
    "posix_spawn_file_actions_addopen",
    "posix_spawn_file_actions_destroy",
    "posix_spawn_file_actions_init",
    "ppoll",
    "pread",
    "preadv",
    "preadv2",
    "preadv64v2",
    "pselect",
    "pthread_sigmask",
    "pwrite",
    "pwritev",
    "pwritev2",
    "pwritev64v2",
    "read",
    "read_nocancel",
    "readv",
    "recv",
    "recvfrom",
    "recvmmsg",
    "recvmsg",
    "select",
    "send",
    "sendfile",
    "sendmmsg",
    "sendmsg",
    "sendto",
    "setsockopt",
    "shutdown",
    "sigaction",
    "sigblock",
    "sighold",
    "siginterrupt",
    "signal",
    "sigprocmask",
    "sigset",
    "sigsetmask",
    "sigvec",
    "sockatmark",
    "socket",
    "socketpair",
    "splice",
    "ssignal",
    "syscall",
    "system",
    "sysv_signal",
    "tee",
    "vdprintf",
    "vfork",
    "vmsplice",
    "write",
    "write_nocancel",
    "writev",
];

/// Functions that are not intercepted, with the reason.
const LIBCS: &[(&str, &str)] = &[
    ("__close_nocancel", "internal to libc: programs cannot link it"),
    ("__read_nocancel", "internal to libc: programs cannot link it"),
    ("__write_nocancel", "internal to libc: programs cannot link it"),
    ("__libc_sigaction", "internal to libc: programs cannot link it"),
    ("sigvec", "of programs that were linked before 2016: their handlers are not deferred"),
    ("__fork", "libc runs the functions around forks, which the library has registered"),
    ("fork", "libc runs the functions around forks, which the library has registered"),
    ("forkpty", "libc runs the functions around forks, which the library has registered"),
    ("daemon", "libc runs the functions around forks, which the library has registered"),
    ("copy_file_range", "EINVAL of any socket, so of the proxy descriptor"),
    ("tee", "EINVAL of any socket, so of the proxy descriptor"),
    ("vmsplice", "EBADF of any socket, so of the proxy descriptor"),
    ("pread", "ESPIPE of any socket, so of the proxy descriptor"),
    ("pread64", "ESPIPE of any socket, so of the proxy descriptor"),
    ("__pread64", "ESPIPE of any socket, so of the proxy descriptor"),
    ("__pread_chk", "ESPIPE of any socket, so of the proxy descriptor"),
    ("__pread64_chk", "ESPIPE of any socket, so of the proxy descriptor"),
    ("pwrite", "ESPIPE of any socket, so of the proxy descriptor"),
    ("pwrite64", "ESPIPE of any socket, so of the proxy descriptor"),
    ("__pwrite64", "ESPIPE of any socket, so of the proxy descriptor"),
    ("preadv", "ESPIPE of any socket, so of the proxy descriptor"),
    ("preadv64", "ESPIPE of any socket, so of the proxy descriptor"),
    ("pwritev", "ESPIPE of any socket, so of the proxy descriptor"),
    ("pwritev64", "ESPIPE of any socket, so of the proxy descriptor"),
    ("isfdtype", "the proxy descriptor is a socket"),
    ("socketpair", "there are no pairs of internet sockets"),
    ("fdopen", "streams of stdio on sockets are the kernel's: docs/posix.md"),
    ("dprintf", "streams of stdio on sockets are the kernel's: docs/posix.md"),
    ("__dprintf_chk", "streams of stdio on sockets are the kernel's: docs/posix.md"),
    ("vdprintf", "streams of stdio on sockets are the kernel's: docs/posix.md"),
    ("__vdprintf_chk", "streams of stdio on sockets are the kernel's: docs/posix.md"),
    ("popen", "what it starts finds the stack by the environment, and none of the sockets: docs/posix.md"),
    ("system", "what it starts finds the stack by the environment, and none of the sockets: docs/posix.md"),
];

/// Returns the symbols that a library exports, or `None` if they cannot be listed.
fn names(library: &Path) -> Option<BTreeSet<String>> {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output().ok()?;
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let name = |line: &str| Some(line.split_whitespace().nth(2)?.split('@').next()?.to_string());
    Some(text.lines().filter_map(name).collect())
}

/// Returns a name without the prefixes and suffixes of its variants.
fn base(name: &str) -> &str {
    let name = name.trim_start_matches('_');
    let name = name.strip_suffix("_chk").unwrap_or(name);
    name.strip_suffix("64").unwrap_or(name)
}

#[test]
fn every_libc_function_is_intercepted_or_excused() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libc.so"));
    let all = libc.and_then(|libc| names(Path::new(libc)));
    let (Some(all), Some(ours)) = (all, names(built_library())) else {
        skip("every_libc_function_is_intercepted_or_excused", "no nm, or no libc.so");
        return;
    };
    let excused = |name: &str| LIBCS.iter().any(|(known, _)| *known == name);
    let of_families: Vec<&String> = all.iter().filter(|name| FAMILIES.contains(&base(name))).collect();
    assert!(of_families.len() > 100, "only {} names are known: {of_families:?}", of_families.len());
    let missing: Vec<_> =
        of_families.iter().filter(|name| !ours.contains(**name) && !excused(name)).collect();
    assert!(missing.is_empty(), "neither answered nor excused: {missing:?}");
    let both: Vec<_> = LIBCS.iter().filter(|(name, _)| ours.contains(*name)).collect();
    assert!(both.is_empty(), "answered, so no excuse is needed: {both:?}");
    // A function that only the library exports would never be called, or be called by mistake.
    let strangers: Vec<_> = ours.iter().filter(|name| !all.contains(*name)).collect();
    assert!(strangers.is_empty(), "not libc's: {strangers:?}");
}
