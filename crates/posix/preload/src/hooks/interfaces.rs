//! Lists of interfaces: the kernel's, and behind them the stack's links, on which programs bind that look for their addresses themselves.
#![allow(unsafe_code)] // functions that C calls

use super::ToC;
use crate::{attach, real};
use core::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use core::mem::{offset_of, size_of, zeroed};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ptr::null_mut;
use ginnel_posix_ops::Ops;
use ginnel_posix_ops::interfaces::{FIRST_INDEX, Interface, NAME_MAX, broadcast_v4, mask_v4};
use libc::{
    if_nameindex as NameIndex, ifaddrs, ifreq, in6_addr, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_ll,
};
use rustix::io::Errno;

/// Kind of an Ethernet device (`linux/if_arp.h`).
const ARPHRD_ETHER: u16 = 1;
/// There is a cable (`linux/if.h`); only where there is room for more than 16 bits.
const IFF_LOWER_UP: c_int = 1 << 16;

/// "ginnelif": stands in the first row of the stack's part of a list.
const MARK: u64 = 0x6669_6c65_6e6e_6967;

/// The stack's links. None where it is gone, or this is no place to ask.
fn stack_links(ops: &Ops) -> Vec<Interface> {
    let kernels = kernel_interface_names();
    let is_taken = |wanted: &str| kernels.iter().any(|name| **name == *wanted.as_bytes());
    ops.interfaces(is_taken).unwrap_or_default()
}

/// Names of the kernel's interfaces, from its list: asked about a name that it does not know, it looks for a module of this name to load, with root's rights if that is who asks.
fn kernel_interface_names() -> Vec<Box<[u8]>> {
    // SAFETY: as libc's.
    let list = unsafe { real::if_nameindex() };
    let mut names = Vec::new();
    if !list.is_null() {
        // SAFETY: libc's array, of names that end with a zero, ends with an entry of nothing, and is freed once.
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

/// Those that stand beside the kernel's: the loop is the kernel's `lo`.
fn non_loopback_links(ops: &Ops) -> impl Iterator<Item = Interface> {
    stack_links(ops).into_iter().filter(|link| !link.loopback)
}

/// Writes a name as C has it.
fn c_name(link: &Interface) -> [c_char; NAME_MAX + 1] {
    let mut name = [0; NAME_MAX + 1];
    for (place, byte) in name.iter_mut().zip(link.name.bytes().take(NAME_MAX)) {
        *place = byte.cast_signed();
    }
    name
}

fn flags_of(link: &Interface) -> c_int {
    // No groups of multicast: programs join those of the kernel's interfaces only.
    if link.loopback {
        libc::IFF_UP | libc::IFF_LOOPBACK | libc::IFF_RUNNING
    } else {
        libc::IFF_UP | libc::IFF_BROADCAST | libc::IFF_RUNNING
    }
}

fn in_sockaddr(address: Ipv4Addr) -> sockaddr_in {
    // SAFETY: all zero is an address.
    let mut name: sockaddr_in = unsafe { zeroed() };
    name.sin_family = libc::AF_INET as u16;
    name.sin_addr.s_addr = address.to_bits().to_be();
    name
}

/// The same by its other name.
fn as_sockaddr(name: sockaddr_in) -> sockaddr {
    // SAFETY: both have sixteen bytes, each of which may be anything.
    unsafe { core::mem::transmute::<sockaddr_in, sockaddr>(name) }
}

fn in6_sockaddr(address: Ipv6Addr, scope: u32) -> sockaddr_in6 {
    // SAFETY: as above.
    let mut name: sockaddr_in6 = unsafe { zeroed() };
    name.sin6_family = libc::AF_INET6 as u16;
    name.sin6_addr = in6_addr { s6_addr: address.octets() };
    name.sin6_scope_id = scope;
    name
}

/// Room for one address of whatever kind.
#[repr(C)]
union AnySockaddr {
    v4: sockaddr_in,
    v6: sockaddr_in6,
    link: sockaddr_ll,
}

/// An entry of a list, with all that it points to.
#[repr(C)]
struct IfaddrsBlock {
    // First, so that both have one address.
    entry: ifaddrs,
    /// Of the first row alone: the mark, and its own address.
    mark: [u64; 2],
    name: [c_char; NAME_MAX + 1],
    address: AnySockaddr,
    mask: AnySockaddr,
    broadcast: AnySockaddr,
}

/// What stands in a row.
struct IfaddrsEntry<'a> {
    link: &'a Interface,
    address: AnySockaddr,
    mask: Option<AnySockaddr>,
    broadcast: Option<AnySockaddr>,
}

fn link_entry(link: &Interface) -> IfaddrsEntry<'_> {
    let name = |mac: [u8; 6]| {
        // SAFETY: all zero is an address.
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

/// The entries as a list in one piece of libc's memory. Null if there is none, or no memory.
fn build_list(entries: Vec<IfaddrsEntry<'_>>) -> *mut ifaddrs {
    let count = entries.len();
    if count == 0 {
        return null_mut();
    }
    // SAFETY: asks for memory, which is zero.
    let rows = unsafe { libc::calloc(count, size_of::<IfaddrsBlock>()) }.cast::<IfaddrsBlock>();
    if rows.is_null() {
        return null_mut();
    }
    for (at, IfaddrsEntry { link, address, mask, broadcast }) in entries.into_iter().enumerate() {
        // SAFETY: there are so many rows, all zero, which each of their fields may be, and nobody else knows of them.
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
            // SAFETY: there is one more.
            row.entry.ifa_next = unsafe { rows.add(at + 1) }.cast();
        }
    }
    // SAFETY: there is one.
    unsafe { (*rows).mark = [MARK, rows.addr() as u64] };
    rows.cast()
}

/// # Safety
/// Null, or an address as its family says.
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
    // SAFETY: passed on as it came.
    let result = unsafe { real::getifaddrs(list) };
    if result != 0 {
        return result;
    }
    let Some(ops) = attach::ops_or_attach_quietly() else { return result };
    let (mut kernels, mut end) = (Vec::new(), list);
    // SAFETY: libc has made a list, which ends with null.
    unsafe {
        while let Some(entry) = (*end).as_mut() {
            kernels.extend(ip_of(entry.ifa_addr));
            end = &raw mut entry.ifa_next;
        }
    }
    let links = stack_links(ops);
    let own = links.iter().filter(|link| !link.loopback).map(link_entry);
    // What the kernel has, too, is there already: programs would bind it twice.
    let addresses = links.iter().flat_map(|link| link.addresses.iter().map(move |known| (link, known)));
    let addresses = addresses.filter(|(_, (address, _))| !kernels.contains(address));
    let addresses = addresses.map(|(link, (address, prefix))| address_entry(link, *address, *prefix));
    let ours = build_list(own.chain(addresses).collect());
    // SAFETY: the end of libc's list.
    unsafe { *end = ours };
    result
}

/// Whether the stack's part of a list begins with this entry. Nothing is known of others' but the entry itself: whoever has a name exactly there has one piece of memory up to the name, and the mark
/// is in front of it.
///
/// # Safety
/// It must be an entry of a list.
unsafe fn is_stack_part(entry: *const ifaddrs) -> bool {
    // SAFETY: the caller's promise.
    let name = unsafe { (*entry).ifa_name };
    name.addr() == entry.addr() + offset_of!(IfaddrsBlock, name)
        // SAFETY: see above.
        && unsafe { (&raw const (*entry.cast::<IfaddrsBlock>()).mark).read() } == [MARK, entry.addr() as u64]
}

#[unsafe(no_mangle)]
unsafe extern "C" fn freeifaddrs(list: *mut ifaddrs) {
    let mut list = list;
    // SAFETY: a list that `getifaddrs` has made, or libc's own, which ends with null.
    unsafe { free_stack_part(&raw mut list) };
    if !list.is_null() {
        // SAFETY: what libc has made.
        unsafe { real::freeifaddrs(list) };
    }
}

/// Cuts the stack's part from a list.
///
/// # Safety
/// It must be a list, and nobody else's.
unsafe fn free_stack_part(list: *mut *mut ifaddrs) {
    let mut place = list;
    // SAFETY: the caller's promise. The stack's part is in one piece, and libc's memory.
    unsafe {
        while let Some(entry) = (*place).as_mut() {
            let entry: *mut ifaddrs = entry;
            if is_stack_part(entry) {
                *place = null_mut();
                libc::free(entry.cast());
                return;
            }
            place = &raw mut (*entry).ifa_next;
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn if_nametoindex(name: *const c_char) -> c_uint {
    // SAFETY: the program's name ends with a zero.
    if let Some(link) = unsafe { link_by_name(CStr::from_ptr(name).to_bytes()) } {
        return link.index;
    }
    // SAFETY: passed on as it came.
    unsafe { real::if_nametoindex(name) }
}

/// The link of the stack's with this name, which none of the kernel's has. It comes first: see [`names_of_the_kernels`].
fn link_by_name(name: &[u8]) -> Option<Interface> {
    non_loopback_links(attach::ops_or_attach_quietly()?).find(|link| link.name.as_bytes() == name)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn if_indextoname(index: c_uint, name: *mut c_char) -> *mut c_char {
    if index >= FIRST_INDEX
        && let Some(ops) = attach::ops_or_attach_quietly()
        && let Some(link) = non_loopback_links(ops).find(|link| link.index == index)
    {
        // SAFETY: the program has room for `IF_NAMESIZE` bytes.
        unsafe { name.cast::<[c_char; NAME_MAX + 1]>().write_unaligned(c_name(&link)) };
        return name;
    }
    // SAFETY: passed on as it came.
    unsafe { real::if_indextoname(index, name) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn if_nameindex() -> *mut NameIndex {
    // SAFETY: as libc's.
    let kernels = unsafe { real::if_nameindex() };
    let Some(ops) = attach::ops_or_attach_quietly().filter(|_| !kernels.is_null()) else { return kernels };
    let links: Vec<_> = non_loopback_links(ops).collect();
    let mut count = 0;
    // SAFETY: libc's array ends with an entry of nothing.
    while unsafe { (*kernels.add(count)).if_index } != 0 {
        count += 1;
    }
    // `if_freenameindex` frees each name and the array: all of them are libc's memory.
    // SAFETY: libc has allocated it so.
    let all = unsafe { libc::realloc(kernels.cast(), (count + links.len() + 1) * size_of::<NameIndex>()) };
    let all = all.cast::<NameIndex>();
    if all.is_null() {
        // What there was is whole.
        return kernels;
    }
    let mut at = count;
    for link in &links {
        // SAFETY: a name that ends with a zero.
        let name = unsafe { libc::strdup(c_name(link).as_ptr()) };
        if !name.is_null() {
            // SAFETY: there is room for all of them.
            unsafe { all.add(at).write(NameIndex { if_index: link.index, if_name: name }) };
            at += 1;
        }
    }
    // SAFETY: as above, and for the end.
    unsafe { all.add(at).write(NameIndex { if_index: 0, if_name: null_mut() }) };
    all
}

/// Whether a request lists interfaces or tells of one: any socket may be asked.
pub fn is_interface_request(request: c_ulong) -> bool {
    request == SIOCGIFCONF || SINGLE_INTERFACE_REQUESTS.contains(&request)
}

/// The requests of `ioctl` that list interfaces and tell of them, on a socket. All others about the kernel's network are the kernel's.
///
/// # Safety
/// As `ioctl`'s.
pub unsafe fn ioctl(ops: &Ops, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    match ops.family_of(fd) {
        // The kernel does not know of a socket of the stack's that it is one of IPv6.
        Ok(family) if family != libc::AF_INET && IPV4_REQUESTS.contains(&request) => {
            return super::fail_with(Errno::NOTTY, -1);
        }
        Ok(_) => {}
        Err(Errno::AGAIN) => return super::fail_with(Errno::AGAIN, -1),
        // SAFETY: passed on as it came: the kernel says what is wrong with it.
        Err(_) => return unsafe { real::ioctl(fd, request, argument) },
    }
    if request == SIOCGIFCONF {
        // SAFETY: the caller's promise.
        return unsafe { siocgifconf(ops, fd, argument.cast()) };
    }
    if SINGLE_INTERFACE_REQUESTS.contains(&request)
        // SAFETY: the caller's promise; null is the kernel's to refuse.
        && let Some(asked) = unsafe { argument.cast::<ifreq>().as_mut() }
        && let Some(answer) = answer_request(ops, request, asked)
    {
        return answer.to_c();
    }
    // SAFETY: passed on as it came: placeholders are sockets, and any is as good to ask as another.
    unsafe { real::ioctl(fd, request, argument) }
}

/// What a request wants to know of one of the stack's links. `None`: it is about none.
fn answer_request(ops: &Ops, request: c_ulong, asked: &mut ifreq) -> Option<Result<(), Errno>> {
    // What is too long is cut, as by the kernel, and a request for the name need not hold one.
    let bytes = asked.ifr_name.map(c_char::cast_unsigned);
    let name = bytes[..NAME_MAX].split(|byte| *byte == 0).next()?;
    // SAFETY: a number, whatever stands there.
    let index = unsafe { asked.ifr_ifru.ifru_ifindex };
    let link = non_loopback_links(ops).find(|link| match request {
        SIOCGIFNAME => link.index.cast_signed() == index,
        _ => link.name.as_bytes() == name,
    })?;
    let of_v4 = |what: &dyn Fn(Ipv4Addr, u8) -> Ipv4Addr| {
        let (address, prefix) = link.ipv4().ok_or(Errno::ADDRNOTAVAIL)?;
        Ok(as_sockaddr(in_sockaddr(what(address, prefix))))
    };
    let answer = &mut asked.ifr_ifru;
    let told = match request {
        SIOCGIFNAME => {
            asked.ifr_name = c_name(&link);
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
            for (place, byte) in name.sa_data.iter_mut().zip(link.mac) {
                *place = byte.cast_signed();
            }
            Ok(name)
        }
        _ => return None,
    };
    Some(told.map(|name| answer.ifru_addr = name))
}

/// `SIOCGIFCONF`: the addresses of IPv4, each with the name of its interface.
///
/// # Safety
/// Null, or as netdevice(7) has it.
unsafe fn siocgifconf(ops: &Ops, fd: c_int, asked: *mut libc::ifconf) -> c_int {
    // SAFETY: the caller's promise.
    let Some(asked) = (unsafe { asked.as_mut() }) else { return super::fail_with(Errno::FAULT, -1) };
    let request = size_of::<ifreq>();
    // SAFETY: all zero asks how long it is.
    let mut kernels: libc::ifconf = unsafe { zeroed() };
    // SAFETY: the kernel writes a length there.
    if unsafe { real::ioctl(fd, SIOCGIFCONF, (&raw mut kernels).cast()) } != 0 {
        return -1;
    }
    // Some may have come since.
    let room = kernels.ifc_len.max(0).cast_unsigned() as usize / request + 16;
    // SAFETY: all zero is a request.
    let mut all = vec![unsafe { zeroed::<ifreq>() }; room];
    // Cannot truncate: the kernel said so much.
    kernels.ifc_len = (room * request) as c_int;
    kernels.ifc_ifcu.ifcu_req = all.as_mut_ptr();
    // SAFETY: there is room for so many.
    if unsafe { real::ioctl(fd, SIOCGIFCONF, (&raw mut kernels).cast()) } != 0 {
        return -1;
    }
    all.truncate(kernels.ifc_len.max(0).cast_unsigned() as usize / request);
    // SAFETY: the kernel wrote addresses.
    let known: Vec<_> =
        all.iter().filter_map(|one| unsafe { ip_of(&raw const one.ifr_ifru.ifru_addr) }).collect();
    for link in stack_links(ops) {
        for (address, _) in &link.addresses {
            let IpAddr::V4(v4) = address else { continue };
            if !known.contains(address) {
                // SAFETY: all zero is a request.
                let mut one = unsafe { zeroed::<ifreq>() };
                one.ifr_name = c_name(&link);
                one.ifr_ifru.ifru_addr = as_sockaddr(in_sockaddr(*v4));
                all.push(one);
            }
        }
    }
    // SAFETY: a pointer, whatever it points to.
    let place = unsafe { asked.ifc_ifcu.ifcu_req };
    let fits =
        if place.is_null() { all.len() } else { asked.ifc_len.max(0).cast_unsigned() as usize / request };
    let count = all.len().min(fits);
    if !place.is_null() {
        // SAFETY: the program has room for so many bytes.
        unsafe { core::ptr::copy_nonoverlapping(all.as_ptr().cast::<u8>(), place.cast(), count * request) };
    }
    // Cannot truncate: the program's own number, or one of a few interfaces.
    asked.ifc_len = (count * request) as c_int;
    0
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
/// Those that tell of one interface.
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
/// Those that are about an address of IPv4: on Linux sockets of IPv4 alone answer them.
const IPV4_REQUESTS: [c_ulong; 4] = [SIOCGIFADDR, SIOCGIFDSTADDR, SIOCGIFBRDADDR, SIOCGIFNETMASK];
