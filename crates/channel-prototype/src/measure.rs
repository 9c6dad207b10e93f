//! What the parts of the channel cost, for the record.

use crate::client::Client;
use crate::control;
use crate::sys;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::fcntl_dupfd_cloexec;
use std::io;
use std::time::Instant;

/// Descriptors of each kind whose memory is measured.
const DESCRIPTORS: usize = 3000;

fn per(count: u32, mut what: impl FnMut() -> io::Result<()>) -> io::Result<f64> {
    let begun = Instant::now();
    for _ in 0..count {
        what()?;
    }
    Ok(begun.elapsed().as_nanos() as f64 / f64::from(count))
}

/// The kernel's memory for its own objects, in bytes.
fn slab() -> io::Result<f64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Slab:"));
    let kb = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kb.map(|kb| kb * 1024.0).ok_or_else(|| io::Error::other("/proc/meminfo does not say"))
}

/// Bytes of the kernel and ns for each descriptor.
fn descriptors<T>(make: impl Fn() -> io::Result<T>) -> io::Result<(f64, f64)> {
    let before = slab()?;
    let begun = Instant::now();
    let all: Vec<T> = (0..DESCRIPTORS).map(|_| make()).collect::<io::Result<_>>()?;
    let ns = begun.elapsed().as_nanos() as f64 / DESCRIPTORS as f64;
    let bytes = (slab()? - before) / all.len() as f64;
    Ok((bytes, ns))
}

pub fn print(mut client: Client) -> io::Result<()> {
    let fd = client.open()?;
    let lock = per(100_000, || {
        client.lock_once(fd);
        Ok(())
    })?;
    let echo = per(2_000, || client.echo(fd, "ping"))?;
    let status = per(2_000, || client.status(0).map(|_| ()))?;
    let bare = per(50, || match sys::fork()? {
        Some(child) => sys::wait(child).map(|_| ()),
        None => sys::exit(0),
    })?;
    let fork = per(50, || match client.fork()? {
        Some(child) => sys::wait(child).map(|_| ()),
        None => sys::exit(0),
    })?;
    println!("\nrobust lock, not contended        {lock:>8.0} ns");
    println!("written, echoed by the stack, read {:>7.1} us, both sides sleep", echo / 1e3);
    println!("question and answer on the socket {:>8.1} us", status / 1e3);
    println!("fork and wait, bare               {:>8.1} us", bare / 1e3);
    println!("fork and wait, known to the stack {:>8.1} us", fork / 1e3);
    let pooled = eventfd(0, EventfdFlags::CLOEXEC)?;
    let copy = || Ok(fcntl_dupfd_cloexec(&pooled, 3)?);
    let own = || Ok(eventfd(0, EventfdFlags::CLOEXEC)?);
    let memfd = || Ok(memfd_create("ginnel", MemfdFlags::CLOEXEC)?);
    let kinds: [(&str, (f64, f64)); 4] = [
        ("a copy of one descriptor", descriptors::<OwnedFd>(copy)?),
        ("an event descriptor", descriptors::<OwnedFd>(own)?),
        ("a memory file", descriptors::<OwnedFd>(memfd)?),
        ("a pair of Unix sockets", descriptors(control::pair)?),
    ];
    for (name, (bytes, ns)) in kinds {
        println!("placeholder: {name:<26} {bytes:>6.0} B of the kernel, {ns:>6.0} ns");
    }
    Ok(())
}
