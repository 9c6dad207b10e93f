//! The system call bpf(2): maps, programs and links. All of them are descriptors, and the kernel frees them
//! when the last copy is closed, also if the process is killed.
#![allow(unsafe_code)] // the call has no safe wrapper

use super::assembler::Instruction;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use std::ffi::CStr;

const BPF_MAP_CREATE: i32 = 0;
const BPF_MAP_UPDATE_ELEM: i32 = 2;
const BPF_MAP_DELETE_ELEM: i32 = 3;
const BPF_PROG_LOAD: i32 = 5;
const BPF_LINK_CREATE: i32 = 28;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_TYPE_XDP: u32 = 6;
/// `BPF_XDP` of `enum bpf_attach_type`.
const ATTACH_XDP: u32 = 37;
/// The program accepts frames that span several buffers.
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;
/// Bytes of the buffer for the verifier's log of a rejected program.
const LOG_BYTES: usize = 64 << 10;

/// Type of a map.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MapKind {
    Hash = 1,
    Array = 2,
    XskMap = 17,
}

/// Where a program is attached to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttachMode {
    /// Before the network stack of the kernel, if necessary on a copy of the frame: `XDP_FLAGS_SKB_MODE`.
    Generic = 2,
    /// In the driver: `XDP_FLAGS_DRV_MODE`.
    Driver = 4,
}

#[repr(C)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map: u32,
    numa_node: u32,
    name: [u8; 16],
}

#[repr(C)]
struct MapElement {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
}

/// Calls bpf(2) with an attribute.
///
/// # Safety
/// `attribute` is the one that `command` takes, and every pointer in it points to as much memory as the
/// command reads or writes.
unsafe fn bpf<T>(command: i32, attribute: &mut T) -> Result<i32, Errno> {
    // SAFETY: the kernel reads and writes only `size_of::<T>()` bytes of the attribute, and the memory that
    // the caller vouches for.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attribute), size_of::<T>()) };
    if result < 0 {
        let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        return Err(Errno::from_raw_os_error(error));
    }
    // Results are descriptors and zero.
    Ok(result as i32)
}

/// Calls bpf(2) with a command that returns a descriptor.
///
/// # Safety
/// As for [`bpf`].
unsafe fn bpf_fd<T>(command: i32, attribute: &mut T) -> Result<OwnedFd, Errno> {
    // SAFETY: as the caller vouches for; a returned descriptor is new, so nothing else owns it.
    unsafe { bpf(command, attribute).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

/// Creates a map.
pub(crate) fn create_map(
    kind: MapKind,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    name: &str,
) -> Result<OwnedFd, Errno> {
    let mut attribute = MapCreate {
        kind: kind as u32,
        key_size,
        value_size,
        max_entries,
        flags: 0,
        inner_map: 0,
        numa_node: 0,
        name: object_name(name),
    };
    // SAFETY: this is the attribute of BPF_MAP_CREATE; it has no pointers.
    unsafe { bpf_fd(BPF_MAP_CREATE, &mut attribute) }
}

/// Sets an element. `K` and `V` must be the key and value types that the map was created for.
pub(crate) fn update_element<K: Copy, V: Copy>(map: BorrowedFd<'_>, key: &K, value: &V) -> Result<(), Errno> {
    let mut attribute = MapElement {
        map: map.as_raw_fd() as u32,
        padding: 0,
        key: address_of(key),
        value: address_of(value),
        flags: 0,
    };
    // SAFETY: the kernel reads the key and value sizes of the map; callers use each map with one type of key
    // and one type of value.
    unsafe { bpf(BPF_MAP_UPDATE_ELEM, &mut attribute) }.map(drop)
}

/// Removes an element. Succeeds if the element does not exist.
pub(crate) fn delete_element<K: Copy>(map: BorrowedFd<'_>, key: &K) -> Result<(), Errno> {
    let mut attribute =
        MapElement { map: map.as_raw_fd() as u32, padding: 0, key: address_of(key), value: 0, flags: 0 };
    // SAFETY: as in `update_element`.
    match unsafe { bpf(BPF_MAP_DELETE_ELEM, &mut attribute) } {
        Err(Errno::NOENT) => Ok(()),
        result => result.map(drop),
    }
}

/// Reads an element.
pub(crate) fn lookup_element<K: Copy, V: Copy + Default>(map: BorrowedFd<'_>, key: &K) -> Result<V, Errno> {
    const BPF_MAP_LOOKUP_ELEM: i32 = 1;
    let mut value = V::default();
    let mut attribute = MapElement {
        map: map.as_raw_fd() as u32,
        padding: 0,
        key: address_of(key),
        value: std::ptr::from_mut(&mut value) as u64,
        flags: 0,
    };
    // SAFETY: as in `update_element`; `V` consists of integers, for which all bytes are valid.
    unsafe { bpf(BPF_MAP_LOOKUP_ELEM, &mut attribute) }?;
    Ok(value)
}

/// Loads an XDP program. `multi_buffer`: the program accepts frames that span several buffers, of which it
/// reads the first.
///
/// The error has the log of the verifier, which may be empty.
pub(crate) fn load(code: &[Instruction], multi_buffer: bool, name: &str) -> Result<OwnedFd, (Errno, String)> {
    let flags = if multi_buffer { BPF_F_XDP_HAS_FRAGS } else { 0 };
    load_program(BPF_PROG_TYPE_XDP, ATTACH_XDP, flags, code, name)
}

/// Loads a program on socket buffers. The error is as for [`load`].
pub(crate) fn load_socket_filter(code: &[Instruction], name: &str) -> Result<OwnedFd, (Errno, String)> {
    load_program(BPF_PROG_TYPE_SOCKET_FILTER, 0, 0, code, name)
}

fn load_program(
    kind: u32,
    attach_type: u32,
    flags: u32,
    code: &[Instruction],
    name: &str,
) -> Result<OwnedFd, (Errno, String)> {
    let attempt = |log: &mut [u8]| {
        let mut attribute = ProgramLoad {
            kind,
            instructions: code.len() as u32,
            code: code.as_ptr() as u64,
            license: c"MIT".as_ptr() as u64,
            log_level: u32::from(!log.is_empty()),
            log_size: log.len() as u32,
            log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
            kernel_version: 0,
            flags,
            name: object_name(name),
            interface: 0,
            attach_type,
        };
        // SAFETY: this is the attribute of BPF_PROG_LOAD: instructions, a C string and a log buffer, with
        // their lengths.
        unsafe { bpf_fd(BPF_PROG_LOAD, &mut attribute) }
    };
    let error = match attempt(&mut []) {
        Ok(program) => return Ok(program),
        Err(error) => error,
    };
    let mut log = vec![0; LOG_BYTES];
    match attempt(&mut log) {
        Ok(program) => Ok(program),
        Err(_) => {
            let text = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy().into_owned();
            Err((error, text))
        }
    }
}

/// Attaches an XDP program to an interface until the returned descriptor is closed.
pub(crate) fn attach(program: BorrowedFd<'_>, interface: u32, mode: AttachMode) -> Result<OwnedFd, Errno> {
    let mut attribute = LinkCreate {
        program: program.as_raw_fd() as u32,
        interface,
        attach_type: ATTACH_XDP,
        flags: mode as u32,
    };
    // SAFETY: this is the attribute of BPF_LINK_CREATE; it has no pointers.
    unsafe { bpf_fd(BPF_LINK_CREATE, &mut attribute) }
}

fn address_of<T>(value: &T) -> u64 {
    std::ptr::from_ref(value) as u64
}

/// Returns an object name as tools show it: up to 15 letters, digits, dots and underscores.
fn object_name(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (to, from) in bytes.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    bytes
}

/// Runs a program on a frame received on queue 0, without an interface. Returns the result of the program.
#[cfg(all(test, not(loom)))]
pub(crate) fn test_run(program: BorrowedFd<'_>, frame: &[u8]) -> Result<u32, Errno> {
    #[repr(C)]
    struct TestRun {
        program: u32,
        result: u32,
        size_in: u32,
        size_out: u32,
        data_in: u64,
        data_out: u64,
        repeat: u32,
        duration: u32,
        context_in_size: u32,
        context_out_size: u32,
        context_in: u64,
        context_out: u64,
    }
    const BPF_PROG_TEST_RUN: i32 = 10;
    let mut attribute = TestRun {
        program: program.as_raw_fd() as u32,
        result: 0,
        size_in: frame.len() as u32,
        size_out: 0,
        data_in: frame.as_ptr() as u64,
        data_out: 0,
        repeat: 1,
        duration: 0,
        context_in_size: 0,
        context_out_size: 0,
        context_in: 0,
        context_out: 0,
    };
    // SAFETY: this is the attribute of BPF_PROG_TEST_RUN; the kernel only reads the frame, and gets no buffer
    // for output.
    unsafe { bpf(BPF_PROG_TEST_RUN, &mut attribute) }?;
    Ok(attribute.result)
}
