//! Replaces functions of other libraries that the program calls, by changing its global offset table (generic
//! ELF ABI, "Dynamic Linking"). Each word of the table is found by the relocation that filled it. A
//! statically linked program has no table of this kind, and nothing is replaced.
#![allow(unsafe_code)] // the loader's tables

use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use libc::{Elf64_Phdr, Elf64_Sym, dl_phdr_info};

/// `Elf64_Dyn`.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// `Elf64_Rela`.
#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;
/// Relocation types whose word is a function's address: `GLOB_DAT` and `JUMP_SLOT`.
#[cfg(target_arch = "x86_64")]
const FUNCTION_RELOCATIONS: [u64; 2] = [6, 7];
#[cfg(target_arch = "aarch64")]
const FUNCTION_RELOCATIONS: [u64; 2] = [1025, 1026];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const FUNCTION_RELOCATIONS: [u64; 2] = [u64::MAX; 2];

/// Returns the replacement of a function, by its name.
type Replacement<'a> = &'a dyn Fn(&CStr) -> Option<*mut c_void>;

/// Makes the program call the replacements instead of the functions of other libraries.
pub fn replace(replacement: Replacement<'_>) {
    let mut replacement = replacement;
    // SAFETY: `visit` gets the pointer that it casts to.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut replacement).cast()) };
}

/// Replaces functions in the program, which the loader reports first.
unsafe extern "C" fn visit(object: *mut dl_phdr_info, _: libc::size_t, replacement: *mut c_void) -> c_int {
    // SAFETY: the loader's promises, and those of `replace`.
    unsafe {
        let (object, replacement) = (&*object, &*replacement.cast::<Replacement<'_>>());
        let headers = core::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into());
        replace_in(object.dlpi_addr, headers, replacement);
    }
    // A result other than 0 ends the iteration, so that no other object is changed.
    1
}

/// Replaces functions in the table of one object.
///
/// # Safety
/// The headers belong to an object that is loaded `base` bytes above its own addresses, and stays loaded.
unsafe fn replace_in(base: u64, headers: &[Elf64_Phdr], replacement: Replacement<'_>) {
    let segment = |kind| headers.iter().find(|header| header.p_type == kind);
    let Some(dynamic) = segment(libc::PT_DYNAMIC) else { return };
    let relro = segment(libc::PT_GNU_RELRO).map_or(0..0, |header| {
        let start = base + header.p_vaddr;
        start..start + header.p_memsz
    });
    let first = (base + dynamic.p_vaddr) as *const Dynamic;
    let value = |tag: i64| {
        // SAFETY: the list ends with a tag of 0.
        let entries = (0..).map(|at| unsafe { &*first.add(at) }).take_while(|entry| entry.tag != 0);
        entries.into_iter().find(|entry| entry.tag == tag).map(|entry| entry.value)
    };
    // Some loaders replace the addresses of the file by absolute ones.
    let address = |tag| value(tag).map(|value| if value < base { value + base } else { value });
    let (Some(names), Some(symbols)) = (address(DT_STRTAB), address(DT_SYMTAB)) else { return };
    for (table, bytes) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
        let (Some(table), Some(bytes)) = (address(table), value(bytes)) else { continue };
        let count = bytes as usize / size_of::<Relocation>();
        // SAFETY: the table has the length that the list states.
        let relocations = unsafe { core::slice::from_raw_parts(table as *const Relocation, count) };
        for relocation in
            relocations.iter().filter(|r| FUNCTION_RELOCATIONS.contains(&(r.info & 0xffff_ffff)))
        {
            // SAFETY: relocations refer to symbols by index, and symbols have C strings as names.
            let name = unsafe {
                let symbol = &*(symbols as *const Elf64_Sym).add((relocation.info >> 32) as usize);
                CStr::from_ptr((names + u64::from(symbol.st_name)) as *const _)
            };
            if let Some(function) = replacement(name) {
                let slot = base + relocation.offset;
                // SAFETY: the loader filled this word with a function's address.
                unsafe { write_slot(slot, relro.contains(&slot), function) };
            }
        }
    }
}

/// Stores the address of a function in a slot of the table. Does nothing if the page cannot be made writable.
///
/// # Safety
/// The slot is a word of the program's table; `relro` states that the loader has made it read-only.
unsafe fn write_slot(slot: u64, relro: bool, function: *mut c_void) {
    let page_bytes = rustix::param::page_size();
    let page = slot as usize & !(page_bytes - 1);
    let protect = |flags| {
        // SAFETY: the page belongs to the program and contains data.
        !relro || unsafe { libc::mprotect(page as *mut c_void, page_bytes, flags) } == 0
    };
    if protect(libc::PROT_READ | libc::PROT_WRITE) {
        // SAFETY: aligned and mapped; other threads that read the word concurrently see one function or the
        // other.
        unsafe { &*(slot as *const AtomicPtr<c_void>) }.store(function, Ordering::Release);
        // The page was read-only before.
        let _ = protect(libc::PROT_READ);
    }
}
