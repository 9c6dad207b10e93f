//! Finds out whether a program can run with the preloaded library: it must load shared libraries and make its
//! socket calls through libc.

use ginnel_posix_ops::ffi;
use rustix::fs::{StatVfsMountFlags, fgetxattr, fstatvfs};
use rustix::process::{getgid, getuid};
use rustix::thread::no_new_privs;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Most program headers that are read; programs have fewer.
const PROGRAM_HEADERS_MAX: u16 = 256;
/// Most bytes of a note segment that are read; programs have shorter ones.
const NOTE_BYTES_MAX: u64 = 1 << 16;
/// Bytes of an ELF-64 header and of a program header (elf(5)).
const ELF_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
const SET_USER_ID: u32 = 0o4000;
/// The set-group-ID bit and the group's execute permission: the kernel ignores the first without the second.
const SET_GROUP_ID: u32 = 0o2010;
const EXECUTE_BITS: u32 = 0o111;
const SETUID: &str = "setuid program";
const SETGID: &str = "setgid program";
/// Bytes of the longest `struct vfs_ns_cap_data`.
const CAPABILITY_BYTES_MAX: usize = 24;

/// Bytes of an ELF header up to the class and the byte order of a file, and those of its machine (elf(5)).
const ELF_CLASS_END: usize = 6;
const ELF_MACHINE: core::ops::Range<usize> = 18..20;

/// Returns the reason why the dynamic loader ignores the library at `path` in `LD_PRELOAD`, or `None` if
/// nothing speaks against it.
pub fn why_not_loadable(path: &Path) -> Option<String> {
    let name = path.display();
    // ld.so(8): a list with two separators, in which "$" begins a token.
    let is_special = |byte: &u8| b" :$".contains(byte);
    if path.as_os_str().as_bytes().iter().any(is_special) {
        return Some(format!("{name} cannot be preloaded: its path has a space, a colon or \"$\""));
    }
    let cannot = |e: std::io::Error| format!("{name} cannot be preloaded: {e}");
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) => return Some(cannot(e)),
    };
    let header = |file: &File| {
        let mut header = [0; ELF_HEADER_BYTES];
        file.read_exact_at(&mut header, 0).map(|()| header)
    };
    let own = File::open("/proc/self/exe").and_then(|own| header(&own)).ok();
    let other_kind = || Some(format!("{name} cannot be preloaded: it is no library of this machine"));
    match header(&file) {
        Ok(head)
            if own.is_none_or(|own| {
                own[..ELF_CLASS_END] == head[..ELF_CLASS_END] && own[ELF_MACHINE] == head[ELF_MACHINE]
            }) => {}
        _ => return other_kind(),
    }
    ffi::map_executable(&file)
        .err()
        .map(|e| format!("{name} cannot be mapped: {e} (is its file system mounted with \"noexec\"?)"))
}

/// Returns the reason why `program` cannot use the preloaded library, or `None` if nothing speaks against it.
/// For a script the answer is that of its interpreter, which is not examined if it is a script itself.
pub fn why_not_preloadable(program: &OsStr) -> Option<String> {
    let path = find_executable(program)?;
    let name = path.display();
    let file = File::open(&path).ok()?;
    let mut head = [0; ELF_HEADER_BYTES];
    let length = (&file).read(&mut head).ok()?;
    if let Some(rest) = head[..length].strip_prefix(b"#!") {
        let line = rest.split(|byte| *byte == b'\n').next()?;
        let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let interpreter = std::str::from_utf8(words.next()?).ok()?;
        // Scripts could name each other as interpreters without end.
        return (interpreter.starts_with('/') && !is_script(interpreter))
            .then(|| why_not_preloadable(interpreter.as_ref()))?;
    }
    // Not for a script: the kernel ignores its bits.
    if let Some(kind) = privileged_kind(&file) {
        return Some(format!("{name} is a {kind}, for which the dynamic loader ignores LD_PRELOAD"));
    }
    // Only 64-bit little-endian ELF files are inspected.
    if length < ELF_HEADER_BYTES || head[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let number = |at: usize, bytes: usize| -> u64 {
        head[at..at + bytes].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    };
    let (at, count) = (number(32, 8), u16::try_from(number(56, 2)).ok()?.min(PROGRAM_HEADERS_MAX));
    let mut headers = vec![0; usize::from(count) * PROGRAM_HEADER_BYTES];
    file.read_exact_at(&mut headers, at).ok()?;
    let (mut has_interpreter, mut is_go) = (false, false);
    for header in headers.chunks_exact(PROGRAM_HEADER_BYTES) {
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        match word(0) as u32 {
            PT_INTERP => has_interpreter = true,
            PT_NOTE => {
                let mut notes = vec![0; word(32).min(NOTE_BYTES_MAX) as usize];
                file.read_exact_at(&mut notes, word(8)).ok()?;
                // A note consists of the lengths of its name and description, its type, and its name. That of
                // Go's build ID has type 4 and the name "Go".
                is_go |= notes.windows(8).any(|owner| owner == b"\x04\0\0\0Go\0\0");
            }
            _ => {}
        }
    }
    if is_go {
        return Some(format!(
            "{name} is a Go program, which makes system calls without libc, so the library cannot intercept them"
        ));
    }
    (!has_interpreter).then(|| format!("{name} is statically linked, so LD_PRELOAD has no effect"))
}

/// Returns [`SETUID`] or [`SETGID`] if execve(2) gives a program with this mode, user and group another user
/// or group than this process has. The dynamic loader then distrusts the environment.
fn set_id_kind(mode: u32, (uid, gid): (u32, u32), (own_uid, own_gid): (u32, u32)) -> Option<&'static str> {
    if mode & SET_USER_ID != 0 && uid != own_uid {
        return Some(SETUID);
    }
    (mode & SET_GROUP_ID == SET_GROUP_ID && gid != own_gid).then_some(SETGID)
}

/// Returns the kind of a program whose file gives it rights that this process does not have; `None` for a
/// usual program. The dynamic loader distrusts the environment of privileged programs.
fn privileged_kind(file: &File) -> Option<&'static str> {
    let about = file.metadata().ok()?;
    if fstatvfs(file).is_ok_and(|about| about.f_flag.contains(StatVfsMountFlags::NOSUID)) {
        return None;
    }
    let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
    let set_id = set_id_kind(about.mode(), (about.uid(), about.gid()), (uid, gid));
    // Without new privileges, as in many containers, the bits have no effect. Capabilities still count.
    if let Some(kind) = set_id.filter(|_| no_new_privs() != Ok(true)) {
        return Some(kind);
    }
    let mut capabilities = [0; CAPABILITY_BYTES_MAX];
    let len = fgetxattr(file, "security.capability", &mut capabilities).unwrap_or_default();
    (uid != 0 && gives_capabilities(&capabilities[..len])).then_some("program with file capabilities")
}

/// Returns whether an extended attribute `security.capability` (`struct vfs_cap_data`) gives a capability.
fn gives_capabilities(attribute: &[u8]) -> bool {
    let word = |number: usize| {
        let bytes = attribute.get(4 * number..4 * number + 4);
        bytes.and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
    };
    // The flag of the effective set, and the permitted set.
    word(0) & 1 != 0 || word(1) != 0 || word(3) != 0
}

fn is_script(path: &str) -> bool {
    let mut head = [0; 2];
    File::open(path).and_then(|mut file| file.read_exact(&mut head)).is_ok() && head == *b"#!"
}

/// Finds the executable file of a command, as `execvp` does.
pub fn find_executable(program: &OsStr) -> Option<PathBuf> {
    let is_executable = |path: &Path| {
        path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.mode() & EXECUTE_BITS != 0)
    };
    let path = Path::new(program);
    if path.components().count() > 1 || path.is_absolute() {
        return is_executable(path).then(|| path.into());
    }
    let directories = std::env::var_os("PATH")?;
    std::env::split_paths(&directories)
        .map(|directory| directory.join(program))
        .find(|path| is_executable(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::setxattr;
    use rustix::thread::set_thread_res_uid;
    use std::os::unix::fs::PermissionsExt;

    /// Program headers: their types and contents.
    type Headers<'a> = &'a [(u32, &'a [u8])];

    fn program(name: &str, headers: Headers<'_>) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ginnel-image-{name}-{}", std::process::id()));
        let mut bytes = vec![0; ELF_HEADER_BYTES + headers.len() * PROGRAM_HEADER_BYTES];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = ELF_HEADER_BYTES as u8;
        bytes[56] = headers.len() as u8;
        for (number, (kind, contents)) in headers.iter().enumerate() {
            let (at, end) = (ELF_HEADER_BYTES + number * PROGRAM_HEADER_BYTES, bytes.len() as u64);
            bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&end.to_le_bytes());
            bytes[at + 32..at + 40].copy_from_slice(&(contents.len() as u64).to_le_bytes());
            bytes.extend(*contents);
        }
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn programs_with_another_user_or_group_are_detected() {
        for (mode, file, expected) in [
            (0o755, (0, 0), None),
            (0o4755, (0, 0), Some(SETUID)),
            (0o4755, (7, 0), None),
            (0o2755, (7, 0), Some(SETGID)),
            (0o2755, (0, 8), None),
            (0o2745, (0, 0), None),
            (0o6755, (7, 0), Some(SETGID)),
        ] {
            assert_eq!(set_id_kind(mode, file, (7, 8)), expected, "{mode:o} {file:?}");
        }
    }

    /// Returns whether the kernel ignores all rights that the file gives.
    fn is_nosuid(path: &Path) -> bool {
        fstatvfs(File::open(path).unwrap()).unwrap().f_flag.contains(StatVfsMountFlags::NOSUID)
    }

    #[test]
    fn ignored_set_id_bits_do_not_count() {
        let path = program("set-id", &[(PT_INTERP, b"/lib/ld.so\0")]);
        // Only root may give files away.
        if std::os::unix::fs::chown(&path, Some(getuid().as_raw() + 1), None).is_ok() {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o4755)).unwrap();
            let reason = || why_not_preloadable(path.as_os_str());
            // The attribute is that of the thread.
            let restricted = || rustix::thread::set_no_new_privs(true).map(|()| reason()).unwrap();
            let restricted = std::thread::scope(|scope| scope.spawn(restricted).join().unwrap());
            assert_eq!(restricted, None);
            // Containers may have the attribute as a whole.
            let counts = !is_nosuid(&path) && no_new_privs() != Ok(true);
            let reason = reason();
            assert_eq!(reason.is_some(), counts);
            assert!(reason.is_none_or(|text| text.contains("is a setuid program, for which")));
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn file_capabilities_are_detected() {
        let bytes = |words: [u32; 5]| words.map(u32::to_le_bytes).concat();
        let revision = 0x0200_0000;
        assert!(!gives_capabilities(&[]));
        assert!(!gives_capabilities(&bytes([revision, 0, 1 << 10, 0, 0])), "inheritable alone");
        let permitted = bytes([revision, 1 << 10, 0, 0, 0]);
        for attribute in [&permitted, &bytes([revision | 1, 0, 0, 0, 0]), &bytes([revision, 0, 0, 1, 0])] {
            assert!(gives_capabilities(attribute), "{attribute:?}");
        }
        let path = program("capable", &[(PT_INTERP, b"/lib/ld.so\0")]);
        let flags = rustix::fs::XattrFlags::empty();
        // Only root may give capabilities, and root does not get them from a file.
        if getuid().is_root() && setxattr(&path, "security.capability", &permitted, flags).is_ok() {
            let reason = || why_not_preloadable(path.as_os_str());
            assert_eq!(reason(), None);
            let nobody = rustix::process::Uid::from_raw(65534);
            // The user is that of the thread.
            let by_nobody = || {
                set_thread_res_uid(nobody, nobody, nobody).unwrap();
                // The directory may be that of root alone.
                File::open(&path).ok().map(|_| reason())
            };
            let reason = std::thread::scope(|scope| scope.spawn(by_nobody).join().unwrap());
            if let Some(reason) = reason {
                let text = "is a program with file capabilities";
                assert_eq!(reason.is_some_and(|reason| reason.contains(text)), !is_nosuid(&path));
            }
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn static_and_go_programs_are_detected() {
        let go = b"\x04\0\0\0\x08\0\0\0\x04\0\0\0Go\0\0abcdefgh";
        let gnu = b"\x04\0\0\0\x08\0\0\0\x03\0\0\0GNU\0abcdefgh";
        let cases: [(&str, Headers<'_>, &str); 4] = [
            ("usual", &[(PT_INTERP, b"/lib/ld.so\0"), (PT_NOTE, gnu)], ""),
            ("static", &[(1, b""), (PT_NOTE, gnu)], "statically linked"),
            ("go", &[(PT_NOTE, go)], "Go program"),
            ("go-and-c", &[(PT_INTERP, b"/lib/ld.so\0"), (PT_NOTE, gnu), (PT_NOTE, go)], "Go program"),
        ];
        for (name, headers, expected) in cases {
            let path = program(name, headers);
            let reason = why_not_preloadable(path.as_os_str());
            std::fs::remove_file(&path).unwrap();
            assert_eq!(reason.is_some(), !expected.is_empty(), "{name}: {reason:?}");
            assert!(reason.is_none_or(|text| text.contains(expected)), "{name}");
        }
        let cut = program("cut", &[(PT_NOTE, go)]);
        std::fs::write(&cut, &std::fs::read(&cut).unwrap()[..70]).unwrap();
        assert_eq!(why_not_preloadable(cut.as_os_str()), None, "the kernel says what is wrong with it");
        std::fs::remove_file(cut).unwrap();
        assert_eq!(why_not_preloadable("sh".as_ref()), None);
        assert_eq!(why_not_preloadable("no-such-program-anywhere".as_ref()), None);
    }
}
