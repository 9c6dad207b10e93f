//! The compiler of expressions: libpcap, loaded at run time, so that programs which use no expression do not
//! need it.
#![allow(unsafe_code)] // functions of C by name

use crate::bpf::RawInstruction;
use crate::expression::ExpressionError;
use core::error::Error;
use core::ffi::{CStr, c_char, c_int, c_void};
use libloading::Library;
use std::ffi::CString;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The names under which distributions have the library: Debian and its descendants, and others.
const LIBRARY_NAMES: [&str; 2] = ["libpcap.so.0.8", "libpcap.so.1"];
/// Ethernet.
const DLT_EN10MB: c_int = 1;
/// tcpdump's default. It only appears as the value that accepting programs return.
const SNAPLEN: c_int = 262_144;
/// Expressions with `ip broadcast` are errors, because the network mask is unknown.
const PCAP_NETMASK_UNKNOWN: u32 = u32::MAX;

/// `struct bpf_program`.
#[repr(C)]
struct BpfProgram {
    len: u32,
    instructions: *mut RawInstruction,
}

/// The functions that are used.
#[derive(Clone, Copy)]
struct Functions {
    open_dead: unsafe extern "C" fn(c_int, c_int) -> *mut c_void,
    compile: unsafe extern "C" fn(*mut c_void, *mut BpfProgram, *const c_char, c_int, u32) -> c_int,
    error: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    free_program: unsafe extern "C" fn(*mut BpfProgram),
    close: unsafe extern "C" fn(*mut c_void),
    #[cfg(test)]
    offline_filter: unsafe extern "C" fn(*const BpfProgram, *const PacketHeader, *const u8) -> c_int,
}

/// Loads the first library in `names` that exists. The library is never unloaded.
fn load(names: &[&str]) -> Result<Functions, ExpressionError> {
    let missing = |error: libloading::Error| {
        let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        ExpressionError::LibraryMissing(reason)
    };
    let mut opened = None;
    for name in names {
        // SAFETY: the initializers of libpcap have no requirements.
        match (unsafe { Library::new(*name) }, &opened) {
            (Ok(library), _) => {
                opened = Some(Ok(library));
                break;
            }
            // Keeps the error of the first name, because the message recommends Debian's package, which has
            // the library under that name.
            (Err(error), None) => opened = Some(Err(error)),
            (Err(_), Some(_)) => {}
        }
    }
    let Some(library) = opened else { return Err(ExpressionError::LibraryMissing("no name".into())) };
    let library: &'static Library = Box::leak(Box::new(library.map_err(missing)?));
    // SAFETY: these are the types of the functions in pcap.h, and the library is never unloaded.
    let functions = unsafe {
        Functions {
            open_dead: *library.get(c"pcap_open_dead").map_err(missing)?,
            compile: *library.get(c"pcap_compile").map_err(missing)?,
            error: *library.get(c"pcap_geterr").map_err(missing)?,
            free_program: *library.get(c"pcap_freecode").map_err(missing)?,
            close: *library.get(c"pcap_close").map_err(missing)?,
            #[cfg(test)]
            offline_filter: *library.get(c"pcap_offline_filter").map_err(missing)?,
        }
    };
    Ok(functions)
}

fn functions() -> Result<Functions, ExpressionError> {
    static FUNCTIONS: OnceLock<Result<Functions, ExpressionError>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| load(&LIBRARY_NAMES)).clone()
}

/// Compiles an expression for Ethernet frames.
///
/// # Errors
/// [`ExpressionError::LibraryMissing`]; [`ExpressionError::Syntax`] with the message of libpcap, or because
/// the text contains a NUL character or libpcap has no memory.
pub(crate) fn compile(text: &str) -> Result<Vec<RawInstruction>, ExpressionError> {
    with_program(text, |_, program| {
        if program.len == 0 || program.instructions.is_null() {
            return Vec::new();
        }
        // SAFETY: a compiled program has `len` instructions.
        unsafe { core::slice::from_raw_parts(program.instructions, program.len as usize) }.to_vec()
    })
}

/// Compiles an expression and calls `act` with the program.
fn with_program<T>(text: &str, act: impl FnOnce(&Functions, &BpfProgram) -> T) -> Result<T, ExpressionError> {
    // Old versions of libpcap have one parser per process.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let functions = functions()?;
    let text = CString::new(text).map_err(|_| ExpressionError::Syntax("contains a NUL character".into()))?;
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut program = BpfProgram { len: 0, instructions: core::ptr::null_mut() };
    // SAFETY: the handle is used until it is closed, and only here. The program is freed if it was compiled.
    // The message of an error belongs to the handle and is copied before that is closed.
    unsafe {
        let handle = (functions.open_dead)(DLT_EN10MB, SNAPLEN);
        if handle.is_null() {
            return Err(ExpressionError::Syntax("libpcap has no memory".into()));
        }
        let optimize = 1;
        let compiled =
            (functions.compile)(handle, &mut program, text.as_ptr(), optimize, PCAP_NETMASK_UNKNOWN);
        let result = if compiled == 0 {
            let result = act(&functions, &program);
            (functions.free_program)(&mut program);
            Ok(result)
        } else {
            Err(ExpressionError::Syntax(
                CStr::from_ptr((functions.error)(handle)).to_string_lossy().into_owned(),
            ))
        };
        (functions.close)(handle);
        result
    }
}

/// `struct pcap_pkthdr`.
#[cfg(test)]
#[repr(C)]
struct PacketHeader {
    time: [i64; 2],
    captured_len: u32,
    len: u32,
}

/// Compiles an expression and returns which of the frames libpcap itself accepts.
#[cfg(test)]
pub(crate) fn offline_filter(text: &str, frames: &[Vec<u8>]) -> Result<Vec<bool>, ExpressionError> {
    with_program(text, |functions, program| {
        frames.iter().map(|frame| accepts(functions, program, frame)).collect()
    })
}

/// Runs a program in libpcap's interpreter, and returns whether the program accepts the frame. The program
/// must be valid.
#[cfg(test)]
pub(crate) fn interpret(instructions: &mut [RawInstruction], frame: &[u8]) -> Result<bool, ExpressionError> {
    let len = u32::try_from(instructions.len()).unwrap();
    Ok(accepts(&functions()?, &BpfProgram { len, instructions: instructions.as_mut_ptr() }, frame))
}

#[cfg(test)]
fn accepts(functions: &Functions, program: &BpfProgram, frame: &[u8]) -> bool {
    let len = u32::try_from(frame.len()).unwrap();
    let header = PacketHeader { time: [0; 2], captured_len: len, len };
    // SAFETY: the program is valid, and the frame has as many bytes as the header says.
    unsafe { (functions.offline_filter)(program, &header, frame.as_ptr()) != 0 }
}

#[cfg(test)]
mod tests {
    use super::load;

    #[test]
    fn missing_library_names_the_package() {
        let Err(error) = load(&["libno-such-pcap.so.0.8", "libno-such-pcap.so.1"]) else {
            panic!("it exists")
        };
        let error = error.to_string();
        assert!(
            error.starts_with("expressions need libpcap (on Debian: apt-get install libpcap0.8): "),
            "{error}"
        );
        assert!(error.contains("libno-such-pcap.so.0.8"), "{error}");
    }
}
