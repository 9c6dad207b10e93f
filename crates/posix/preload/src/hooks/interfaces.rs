//! Hooks that list interfaces: the stack's links follow the kernel's interfaces, for programs that bind to
//! each address that they find.
#![allow(unsafe_code)] // functions that C calls

use crate::{attach, real};
use core::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use core::mem::{offset_of, size_of, zeroed};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ptr::null_mut;
use ginnel_posix_ops::ffi::{self, IntoC};
use ginnel_posix_ops::interfaces::{FIRST_INDEX, Interface, NAME_MAX, broadcast_v4, mask_v4};
use ginnel_posix_ops::{Ops, user_memory};
use libc::{
    if_nameindex as NameIndex, ifaddrs, ifreq, in6_addr, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_ll,
};
use rustix::io::Errno;

/// Hardware type of an Ethernet device (`linux/if_arp.h`).
const ARPHRD_ETHER: u16 = 1;
/// The link has a carrier (`linux/if.h`); does not fit in the 16-bit flags of `ioctl`.
const IFF_LOWER_UP: c_int = 1 << 16;

/// "ginnelif": marks the first element of the stack's part of a list.
const MARK: u64 = 0x6669_6c65_6e6e_6967;

/// Returns the stack's links; none if the stack is gone, or in a handler that interrupted a call.
fn stack_links(ops: &Ops) -> Vec<Interface> {
    let kernels = kernel_interface_names();
    let is_taken = |wanted: &str| kernels.iter().any(|name| **name == *wanted.as_bytes());
    ops.interfaces(is_taken).unwrap_or_default()
}

/// Returns the names of the kernel's interfaces, by listing them all: asked about an unknown name, the kernel
/// tries to load a module of that name if the program is privileged.
fn kernel_interface_names() -> Vec<Box<[u8]>> {
    // SAFETY: libc's function has no requirements.
    let list = unsafe { real::if_nameindex() };
    let mut names = Vec::new();
    if !list.is_null() {
        // SAFETY: libc's array consists of C strings, ends with an entry of zeros, and is freed once.
        unsafe {
            let mut at = list;
            while !(*at).if_name.is_null() {
                names.push(CStr::from_ptr((*at).if_name).to_bytes().into());
                at = at.add(1);
            }
            libc::if_freenameindex(list);
        }
    }
    names
}

/// Returns the links that are listed besides the kernel's interfaces: loopback is the kernel's `lo`.
fn non_loopback_links(ops: &Ops) -> impl Iterator<Item = Interface> {
    stack_links(ops).into_iter().filter(|link| !link.loopback)
}

/// Returns the name as a C string.
fn c_name(link: &Interface) -> [c_char; NAME_MAX + 1] {
    let mut name = [0; NAME_MAX + 1];
    for (dest, byte) in name.iter_mut().zip(link.name.bytes().take(NAME_MAX)) {
        *dest = byte.cast_signed();
    }
    name
}

fn flags_of(link: &Interface) -> c_int {
    let multicast = if link.multicast { libc::IFF_MULTICAST } else { 0 };
    if link.loopback {
        libc::IFF_UP | libc::IFF_LOOPBACK | libc::IFF_RUNNING
    } else {
        libc::IFF_UP | libc::IFF_BROADCAST | libc::IFF_RUNNING | multicast
    }
}

fn in_sockaddr(address: Ipv4Addr) -> sockaddr_in {
    // SAFETY: an all-zero address is valid.
    let mut name: sockaddr_in = unsafe { zeroed() };
    name.sin_family = libc::AF_INET as u16;
    name.sin_addr.s_addr = address.to_bits().to_be();
    name
}

/// Converts an address to the generic type.
fn as_sockaddr(name: sockaddr_in) -> sockaddr {
    // SAFETY: both types have 16 bytes, and any bits are valid.
    unsafe { core::mem::transmute::<sockaddr_in, sockaddr>(name) }
}

fn in6_sockaddr(address: Ipv6Addr, scope: u32) -> sockaddr_in6 {
    // SAFETY: an all-zero address is valid.
    let mut name: sockaddr_in6 = unsafe { zeroed() };
    name.sin6_family = libc::AF_INET6 as u16;
    name.sin6_addr = in6_addr { s6_addr: address.octets() };
    name.sin6_scope_id = scope;
    name
}

/// An address of any family in the list.
#[repr(C)]
union AnySockaddr {
    v4: sockaddr_in,
    v6: sockaddr_in6,
    link: sockaddr_ll,
}

/// An element of a list, with everything that it points to.
#[repr(C)]
struct IfaddrsBlock {
    // First, so that the element and its `ifaddrs` have the same address.
    entry: ifaddrs,
    /// The mark and the element's own address; only in the first element.
    mark: [u64; 2],
    name: [c_char; NAME_MAX + 1],
    address: AnySockaddr,
    mask: AnySockaddr,
    broadcast: AnySockaddr,
}

/// The contents of an element.
struct IfaddrsEntry<'a> {
    link: &'a Interface,
    address: AnySockaddr,
    mask: Option<AnySockaddr>,
    broadcast: Option<AnySockaddr>,
}

fn link_entry(link: &Interface) -> IfaddrsEntry<'_> {
    let name = |mac: [u8; 6]| {
        // SAFETY: an all-zero address is valid.
        let mut name: sockaddr_ll = unsafe { zeroed() };
        name.sll_family = libc::AF_PACKET as u16;
        name.sll_ifindex = link.index.cast_signed();
        name.sll_hatype = ARPHRD_ETHER;
        name.sll_halen = 6;
        name.sll_addr[..6].copy_from_slice(&mac);
        AnySockaddr { link: name }
    };
    IfaddrsEntry { link, address: name(link.mac), mask: None, broadcast: Some(name([0xff; 6])) }
}

fn address_entry(link: &Interface, address: IpAddr, prefix: u8) -> IfaddrsEntry<'_> {
    match address {
        IpAddr::V4(v4) => {
            let broadcast = broadcast_v4(v4, prefix).filter(|_| !link.loopback);
            IfaddrsEntry {
                link,
                address: AnySockaddr { v4: in_sockaddr(v4) },
                mask: Some(AnySockaddr { v4: in_sockaddr(mask_v4(prefix)) }),
                broadcast: broadcast.map(|address| AnySockaddr { v4: in_sockaddr(address) }),
            }
        }
        IpAddr::V6(v6) => {
            let scope = if v6.is_unicast_link_local() { link.index } else { 0 };
            let mask = Ipv6Addr::from_bits(u128::MAX.unbounded_shl(128 - u32::from(prefix.min(128))));
            IfaddrsEntry {
                link,
                address: AnySockaddr { v6: in6_sockaddr(v6, scope) },
                mask: Some(AnySockaddr { v6: in6_sockaddr(mask, 0) }),
                broadcast: None,
            }
        }
    }
}

/// Builds a list in one allocation of libc. Returns null if there are no entries, or no memory.
fn build_list(entries: Vec<IfaddrsEntry<'_>>) -> *mut ifaddrs {
    let count = entries.len();
    if count == 0 {
        return null_mut();
    }
    // SAFETY: allocates zeroed memory.
    let rows = unsafe { libc::calloc(count, size_of::<IfaddrsBlock>()) }.cast::<IfaddrsBlock>();
    if rows.is_null() {
        return null_mut();
    }
    for (at, IfaddrsEntry { link, address, mask, broadcast }) in entries.into_iter().enumerate() {
        // SAFETY: the array has that many elements, for which zeros are valid, and no other reference to it
        // exists.
        let row = unsafe { &mut *rows.add(at) };
        let flags = flags_of(link) | IFF_LOWER_UP;
        (row.name, row.address) = (c_name(link), address);
        row.entry.ifa_name = row.name.as_mut_ptr();
        row.entry.ifa_flags = flags.cast_unsigned();
        row.entry.ifa_addr = (&raw mut row.address).cast();
        if let Some(mask) = mask {
            row.mask = mask;
            row.entry.ifa_netmask = (&raw mut row.mask).cast();
        }
        if let Some(broadcast) = broadcast {
            row.broadcast = broadcast;
            row.entry.ifa_ifu = (&raw mut row.broadcast).cast();
        }
        if at + 1 < count {
            // SAFETY: there is one more element.
            row.entry.ifa_next = unsafe { rows.add(at + 1) }.cast();
        }
    }
    // SAFETY: there is at least one element.
    unsafe { (*rows).mark = [MARK, rows.addr() as u64] };
    rows.cast()
}

/// Returns the IP address that `address` holds, if its family is IPv4 or IPv6.
///
/// # Safety
/// `address` must be null or point to an address of the length of its family.
unsafe fn ip_of(address: *const sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe {
        match c_int::from((*address).sa_family) {
            libc::AF_INET => {
                let v4 = &*address.cast::<sockaddr_in>();
                Some(Ipv4Addr::from_bits(u32::from_be(v4.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                Some(Ipv6Addr::from((*address.cast::<sockaddr_in6>()).sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getifaddrs(list: *mut *mut ifaddrs) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    let result = unsafe { real::getifaddrs(list) };
    if result != 0 {
        return result;
    }
    let Some(ops) = attach::ops_or_attach_quietly() else { return result };
    let (mut kernels, mut end) = (Vec::new(), list);
    // SAFETY: the list is libc's and null-terminated.
    unsafe {
        while let Some(entry) = (*end).as_mut() {
            kernels.extend(ip_of(entry.ifa_addr));
            end = &raw mut entry.ifa_next;
        }
    }
    let links = stack_links(ops);
    let own = links.iter().filter(|link| !link.loopback).map(link_entry);
    // Addresses that the kernel also has are listed already: programs would bind them twice.
    let addresses = links.iter().flat_map(|link| link.addresses.iter().map(move |known| (link, known)));
    let addresses = addresses.filter(|(_, (address, _))| !kernels.contains(address));
    let addresses = addresses.map(|(link, (address, prefix))| address_entry(link, *address, *prefix));
    let ours = build_list(own.chain(addresses).collect());
    // SAFETY: the end of libc's list.
    unsafe { *end = ours };
    result
}

/// Returns whether the stack's part of a list begins with this element. Of other elements only the `ifaddrs`
/// may be read. If the name is where an [`IfaddrsBlock`] has it, all bytes up to the name belong to one
/// allocation, so the mark can be read.
///
/// # Safety
/// `entry` must be an element of a list.
unsafe fn is_stack_part(entry: *const ifaddrs) -> bool {
    // SAFETY: the caller's promise.
    let name = unsafe { (*entry).ifa_name };
    name.addr() == entry.addr() + offset_of!(IfaddrsBlock, name)
        // SAFETY: the element is one allocation that includes the mark.
        && unsafe { (&raw const (*entry.cast::<IfaddrsBlock>()).mark).read() } == [MARK, entry.addr() as u64]
}

#[unsafe(no_mangle)]
unsafe extern "C" fn freeifaddrs(list: *mut ifaddrs) {
    let mut list = list;
    // SAFETY: a null-terminated list of `getifaddrs`.
    unsafe { free_stack_part(&raw mut list) };
    if !list.is_null() {
        // SAFETY: the rest of the list is libc's.
        unsafe { real::freeifaddrs(list) };
    }
}

/// Removes and frees the stack's part of a list.
///
/// # Safety
/// No other reference to the list may exist.
unsafe fn free_stack_part(list: *mut *mut ifaddrs) {
    let mut dest = list;
    // SAFETY: the caller's promise. The stack's part is one allocation of libc.
    unsafe {
        while let Some(entry) = (*dest).as_mut() {
            let entry: *mut ifaddrs = entry;
            if is_stack_part(entry) {
                *dest = null_mut();
                libc::free(entry.cast());
                return;
            }
            dest = &raw mut (*entry).ifa_next;
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn if_nametoindex(name: *const c_char) -> c_uint {
    // SAFETY: the program passes a C string.
    if let Some(link) = unsafe { link_by_name(CStr::from_ptr(name).to_bytes()) } {
        return link.index;
    }
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::if_nametoindex(name) }
}

/// Returns the stack's link of this name, which no kernel interface has. Must be called before the kernel is
/// asked (see [`kernel_interface_names`]).
fn link_by_name(name: &[u8]) -> Option<Interface> {
    non_loopback_links(attach::ops_or_attach_quietly()?).find(|link| link.name.as_bytes() == name)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn if_indextoname(index: c_uint, name: *mut c_char) -> *mut c_char {
    if index >= FIRST_INDEX
        && let Some(ops) = attach::ops_or_attach_quietly()
        && let Some(link) = non_loopback_links(ops).find(|link| link.index == index)
    {
        // SAFETY: the program's buffer has `IF_NAMESIZE` bytes.
        unsafe { name.cast::<[c_char; NAME_MAX + 1]>().write_unaligned(c_name(&link)) };
        return name;
    }
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::if_indextoname(index, name) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn if_nameindex() -> *mut NameIndex {
    // SAFETY: libc's function has no requirements.
    let kernels = unsafe { real::if_nameindex() };
    let Some(ops) = attach::ops_or_attach_quietly().filter(|_| !kernels.is_null()) else { return kernels };
    let links: Vec<_> = non_loopback_links(ops).collect();
    let mut count = 0;
    // SAFETY: libc's array ends with an entry of zeros.
    while unsafe { (*kernels.add(count)).if_index } != 0 {
        count += 1;
    }
    // `if_freenameindex` frees each name and the array, so all of them must be allocated by libc.
    // SAFETY: libc has allocated the array.
    let all = unsafe { libc::realloc(kernels.cast(), (count + links.len() + 1) * size_of::<NameIndex>()) };
    let all = all.cast::<NameIndex>();
    if all.is_null() {
        // The array is unchanged.
        return kernels;
    }
    let mut at = count;
    for link in &links {
        // SAFETY: the name is a C string.
        let name = unsafe { libc::strdup(c_name(link).as_ptr()) };
        if !name.is_null() {
            // SAFETY: the array has space for all links.
            unsafe { all.add(at).write(NameIndex { if_index: link.index, if_name: name }) };
            at += 1;
        }
    }
    // SAFETY: the array has space for the terminator, too.
    unsafe { all.add(at).write(NameIndex { if_index: 0, if_name: null_mut() }) };
    all
}

/// Returns whether a request is about interfaces. Any socket answers such requests.
pub fn is_interface_request(request: c_ulong) -> bool {
    request == SIOCGIFCONF || SINGLE_INTERFACE_REQUESTS.contains(&request)
}

/// Handles `ioctl` requests about interfaces. Other requests about the network are passed on to the kernel.
///
/// # Safety
/// As for `ioctl`.
pub unsafe fn ioctl(ops: &Ops, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    match ops.family_of(fd) {
        // The kernel does not know that a stack socket is an IPv6 socket.
        Ok(family) if family != libc::AF_INET && IPV4_REQUESTS.contains(&request) => {
            return ffi::fail_with(Errno::NOTTY, -1);
        }
        Ok(_) => {}
        Err(Errno::AGAIN) => return ffi::fail_with(Errno::AGAIN, -1),
        // SAFETY: the program's arguments, unchanged; the kernel reports what is wrong with them.
        Err(_) => return unsafe { real::ioctl(fd, request, argument) },
    }
    if request == SIOCGIFCONF {
        // SAFETY: the caller's promise.
        return unsafe { siocgifconf(ops, fd, argument.cast()) };
    }
    if SINGLE_INTERFACE_REQUESTS.contains(&request)
        // SAFETY: any bytes are a request. The kernel reports one that cannot be read.
        && let Ok(mut ifreq) = unsafe { user_memory::read(argument.cast::<ifreq>()) }
        && let Some(answer) = answer_request(ops, request, &mut ifreq)
    {
        // SAFETY: the program's request.
        return answer.and_then(|()| unsafe { user_memory::write(argument.cast(), &ifreq) }).into_c();
    }
    // SAFETY: the program's arguments, unchanged; proxy descriptors are sockets, and all sockets answer
    // alike.
    unsafe { real::ioctl(fd, request, argument) }
}

/// Answers a request about one of the stack's links. Returns `None` if it is about another interface.
fn answer_request(ops: &Ops, request: c_ulong, ifreq: &mut ifreq) -> Option<Result<(), Errno>> {
    // As in the kernel, names that are too long are truncated; a request for the name need not contain one.
    let bytes = ifreq.ifr_name.map(c_char::cast_unsigned);
    let name = bytes[..NAME_MAX].split(|byte| *byte == 0).next()?;
    // SAFETY: an integer, for which any bits are valid.
    let index = unsafe { ifreq.ifr_ifru.ifru_ifindex };
    let link = non_loopback_links(ops).find(|link| match request {
        SIOCGIFNAME => link.index.cast_signed() == index,
        _ => link.name.as_bytes() == name,
    })?;
    let of_v4 = |select_address: &dyn Fn(Ipv4Addr, u8) -> Ipv4Addr| {
        let (address, prefix) = link.ipv4().ok_or(Errno::ADDRNOTAVAIL)?;
        Ok(as_sockaddr(in_sockaddr(select_address(address, prefix))))
    };
    let answer = &mut ifreq.ifr_ifru;
    let address = match request {
        SIOCGIFNAME => {
            ifreq.ifr_name = c_name(&link);
            return Some(Ok(()));
        }
        SIOCGIFADDR | SIOCGIFDSTADDR => of_v4(&|address, _| address),
        SIOCGIFNETMASK => of_v4(&|_, prefix| mask_v4(prefix)),
        SIOCGIFBRDADDR => {
            of_v4(&|address, prefix| broadcast_v4(address, prefix).unwrap_or(Ipv4Addr::UNSPECIFIED))
        }
        SIOCGIFFLAGS => {
            answer.ifru_flags = flags_of(&link) as i16;
            return Some(Ok(()));
        }
        SIOCGIFMTU => {
            answer.ifru_mtu = link.mtu.into();
            return Some(Ok(()));
        }
        SIOCGIFINDEX => {
            answer.ifru_ifindex = link.index.cast_signed();
            return Some(Ok(()));
        }
        SIOCGIFMETRIC => {
            answer.ifru_metric = 0;
            return Some(Ok(()));
        }
        SIOCGIFHWADDR => {
            let mut name = sockaddr { sa_family: ARPHRD_ETHER, sa_data: [0; 14] };
            for (dest, byte) in name.sa_data.iter_mut().zip(link.mac) {
                *dest = byte.cast_signed();
            }
            Ok(name)
        }
        _ => return None,
    };
    Some(address.map(|name| answer.ifru_addr = name))
}

/// Handles `SIOCGIFCONF`: lists the IPv4 addresses with the names of their interfaces.
///
/// # Safety
/// The pointer must be the argument of a request that writes to it.
unsafe fn siocgifconf(ops: &Ops, fd: c_int, argument: *mut libc::ifconf) -> c_int {
    // SAFETY: any bytes are a request.
    let mut ifconf = match unsafe { user_memory::read(argument) } {
        Ok(ifconf) => ifconf,
        Err(error) => return ffi::fail_with(error, -1),
    };
    let request = size_of::<ifreq>();
    // SAFETY: an all-zero request is valid and asks for the length.
    let mut kernels: libc::ifconf = unsafe { zeroed() };
    // SAFETY: the kernel writes the length.
    if unsafe { real::ioctl(fd, SIOCGIFCONF, (&raw mut kernels).cast()) } != 0 {
        return -1;
    }
    // Leaves room for interfaces that appear meanwhile.
    let capacity = kernels.ifc_len.max(0).cast_unsigned() as usize / request + 16;
    // SAFETY: an all-zero request is valid.
    let mut all = vec![unsafe { zeroed::<ifreq>() }; capacity];
    // Cannot truncate: the kernel has returned this number as an `int`.
    kernels.ifc_len = (capacity * request) as c_int;
    kernels.ifc_ifcu.ifcu_req = all.as_mut_ptr();
    // SAFETY: the array has the length that the request says.
    if unsafe { real::ioctl(fd, SIOCGIFCONF, (&raw mut kernels).cast()) } != 0 {
        return -1;
    }
    all.truncate(kernels.ifc_len.max(0).cast_unsigned() as usize / request);
    // SAFETY: the kernel has written addresses.
    let known: Vec<_> =
        all.iter().filter_map(|entry| unsafe { ip_of(&raw const entry.ifr_ifru.ifru_addr) }).collect();
    for link in stack_links(ops) {
        for (address, _) in &link.addresses {
            let IpAddr::V4(v4) = address else { continue };
            if !known.contains(address) {
                // SAFETY: an all-zero request is valid.
                let mut entry = unsafe { zeroed::<ifreq>() };
                entry.ifr_name = c_name(&link);
                entry.ifr_ifru.ifru_addr = as_sockaddr(in_sockaddr(*v4));
                all.push(entry);
            }
        }
    }
    // SAFETY: a pointer, for which any bits are valid.
    let dest = unsafe { ifconf.ifc_ifcu.ifcu_req };
    let fits =
        if dest.is_null() { all.len() } else { ifconf.ifc_len.max(0).cast_unsigned() as usize / request };
    let count = all.len().min(fits);
    // Cannot truncate: the length is the program's, or that of a few interfaces.
    ifconf.ifc_len = (count * request) as c_int;
    let entries = if dest.is_null() { &[] } else { &all[..count] };
    // SAFETY: the program's buffer and its request.
    unsafe { user_memory::write_list(dest, entries).and_then(|()| user_memory::write(argument, &ifconf)) }
        .into_c()
}

// From `linux/sockios.h`.
const SIOCGIFNAME: c_ulong = 0x8910;
const SIOCGIFCONF: c_ulong = 0x8912;
const SIOCGIFFLAGS: c_ulong = 0x8913;
const SIOCGIFADDR: c_ulong = 0x8915;
const SIOCGIFDSTADDR: c_ulong = 0x8917;
const SIOCGIFBRDADDR: c_ulong = 0x8919;
const SIOCGIFNETMASK: c_ulong = 0x891b;
const SIOCGIFMETRIC: c_ulong = 0x891d;
const SIOCGIFMTU: c_ulong = 0x8921;
const SIOCGIFHWADDR: c_ulong = 0x8927;
const SIOCGIFINDEX: c_ulong = 0x8933;
/// Requests about a single interface.
const SINGLE_INTERFACE_REQUESTS: [c_ulong; 10] = [
    SIOCGIFNAME,
    SIOCGIFFLAGS,
    SIOCGIFADDR,
    SIOCGIFDSTADDR,
    SIOCGIFBRDADDR,
    SIOCGIFNETMASK,
    SIOCGIFMETRIC,
    SIOCGIFMTU,
    SIOCGIFHWADDR,
    SIOCGIFINDEX,
];
/// Requests about an IPv4 address. In Linux only IPv4 sockets answer them.
const IPV4_REQUESTS: [c_ulong; 4] = [SIOCGIFADDR, SIOCGIFDSTADDR, SIOCGIFBRDADDR, SIOCGIFNETMASK];
