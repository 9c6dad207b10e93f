//! A network namespace that the kernel removes after its last user.

use crate::script::kernel::{namespace as settings, sys};
use ginnel_devices::tap::{self, TapConfig};
use ginnel_stack::device::Device;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::time::Duration;

/// Settings that differ from those of packet scripts: scripts switch these mechanisms off because they make
/// single packets hard to predict; interop tests want them on.
const INTEROP_SYSCTLS: &[(&str, &str)] =
    &[("net.ipv4.tcp_comp_sack_nr", "44"), ("net.ipv4.ping_group_range", "0 2147483647")];

/// A network namespace. The kernel removes it when this value, all its sockets and devices, and all threads
/// that entered it are gone.
pub struct Namespace {
    file: File,
}

impl Namespace {
    /// Creates a namespace whose loopback interface is up and whose TCP settings are Linux's defaults,
    /// independent of the host's settings.
    ///
    /// # Errors
    /// The kernel's error: `PermissionDenied` without CAP_SYS_ADMIN.
    pub fn new() -> io::Result<Self> {
        let create = || {
            sys::enter_new_network_namespace()?;
            settings::apply_defaults()?;
            for (name, value) in INTEROP_SYSCTLS {
                settings::set_sysctl(name, value)?;
            }
            File::open("/proc/thread-self/ns/net")
        };
        let namespace = Self { file: run_on_new_thread(create)? };
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Moves the calling thread into the namespace for the rest of its life. Sockets that the thread opens
    /// afterwards belong to the namespace.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn enter(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Runs `work` in the namespace, on a new thread. A socket that `work` opens belongs to the namespace on
    /// whichever thread it is used.
    ///
    /// # Errors
    /// The kernel's error, or the error of `work`.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> io::Result<R> + Send) -> io::Result<R> {
        run_on_new_thread(|| {
            self.enter()?;
            work()
        })
    }

    /// Sets a sysctl, given by its dotted name. A dot within a component of the name (`eth0.1`) cannot be
    /// expressed.
    ///
    /// # Errors
    /// The kernel's error with name and value.
    pub fn sysctl(&self, name: &str, value: &str) -> io::Result<()> {
        self.run(|| settings::set_sysctl(name, value))
    }

    /// Runs `ip` with these arguments, separated by spaces, in the namespace. Returns its standard output.
    ///
    /// # Errors
    /// The standard error of `ip` if it fails.
    pub fn ip(&self, arguments: &str) -> io::Result<String> {
        self.run(|| {
            let output = Command::new("ip").args(arguments.split_whitespace()).output()?;
            if output.status.success() {
                return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
            }
            let problem = String::from_utf8_lossy(&output.stderr);
            Err(io::Error::other(format!("ip {arguments}: {}", problem.trim())))
        })
    }

    /// Opens a TAP device whose kernel side is in the namespace and ready for traffic. The kernel's
    /// connections over the device start with this congestion control, independent of the host's default: the
    /// sysctl cannot name all algorithms in a namespace, and a later change of the algorithm leaves state in
    /// a socket (pacing).
    ///
    /// # Errors
    /// The kernel's error, or `TimedOut` if an address stays unusable.
    pub fn open_tap(&self, config: &TapConfig, congestion_control: &str) -> io::Result<Device> {
        let mut tap = self.run(|| tap::open_queues(config, 1))?;
        for (address, prefix) in &config.kernel_addresses {
            self.wait_until_local(*address)?;
            let network = network(*address, *prefix);
            // The kernel's own route has metric 256 for IPv6.
            let metric = if address.is_ipv4() { 0 } else { 256 };
            self.ip(&format!(
                "route replace {network}/{prefix} dev {} proto kernel metric {metric} src {address} congctl {congestion_control}",
                tap.name
            ))?;
        }
        tap.queues.pop().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Waits until an address is usable. The kernel enables IPv6 addresses asynchronously and drops packets
    /// that arrive before.
    ///
    /// # Errors
    /// `TimedOut` if the address is still unusable after 5,000 attempts.
    pub fn wait_until_local(&self, address: IpAddr) -> io::Result<()> {
        for _ in 0..5_000 {
            if self.ip(&format!("route get {address}"))?.contains("local") {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("{address} stays unusable")))
    }

    /// Waits until a packet reaches `address` and its answer returns: then the addresses, routes and
    /// neighbour entries of all hosts on the path are ready, which takes a busy kernel about a second.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] with the error of the last attempt.
    pub fn wait_until_reachable(&self, address: IpAddr) -> io::Result<()> {
        // No socket listens on the discard port, so a reset is the answer.
        let discard = SocketAddr::new(address, 9);
        let mut last = None;
        for _ in 0..500 {
            let attempt =
                self.run(|| Ok(TcpStream::connect_timeout(&discard, Duration::from_secs(1)).err()))?;
            match attempt {
                None => return Ok(()),
                Some(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(()),
                Some(error) => last = Some(error),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let text = format!("{address} is unreachable: {last:?}");
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    }

    /// Connects two namespaces by a pair of veth interfaces, which are up and have this MTU.
    ///
    /// # Errors
    /// The standard error of `ip` if it fails.
    pub fn connect(&self, name: &str, other: &Self, other_name: &str, mtu: u32) -> io::Result<()> {
        self.connect_queues((name, 1), other, (other_name, 1), mtu)
    }

    /// The same, with so many queues each way at either end.
    ///
    /// # Errors
    /// With what `ip` printed.
    pub fn connect_queues(
        &self,
        (name, queues): (&str, u32),
        other: &Self,
        (other_name, other_queues): (&str, u32),
        mtu: u32,
    ) -> io::Result<()> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.file.as_raw_fd());
        let end = |name, queues| format!("{name} mtu {mtu} numtxqueues {queues} numrxqueues {queues}");
        let (near, far) = (end(name, queues), end(other_name, other_queues));
        self.ip(&format!("link add {near} type veth peer name {far} netns {path}"))?;
        self.ip(&format!("link set {name} up"))?;
        other.ip(&format!("link set {other_name} up")).map(drop)
    }
}

/// Returns the first address of a network.
fn network(address: IpAddr, prefix: u8) -> IpAddr {
    let host_bits = |all: u8| u32::from(all.saturating_sub(prefix));
    match address {
        IpAddr::V4(v4) => {
            IpAddr::V4((v4.to_bits() & u32::MAX.checked_shl(host_bits(32)).unwrap_or(0)).into())
        }
        IpAddr::V6(v6) => {
            IpAddr::V6((v6.to_bits() & u128::MAX.checked_shl(host_bits(128)).unwrap_or(0)).into())
        }
    }
}

/// Returns why namespaces with TAP devices are unavailable here, or `None` if they are available.
pub fn unavailable() -> Option<String> {
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    if let Err(e) = tun {
        return Some(format!("/dev/net/tun: {e}"));
    }
    Namespace::new().err().map(|e| format!("no network namespace: {e}"))
}

/// Runs `work` on a new thread and returns its result. A namespace is a property of a thread, so this thread
/// ends with the work.
fn run_on_new_thread<R: Send>(work: impl FnOnce() -> io::Result<R> + Send) -> io::Result<R> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(256 * 1024).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::{Namespace, unavailable};
    use crate::skip;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn sockets_of_a_namespace_are_unknown_outside() {
        if let Some(reason) = unavailable() {
            return skip("sockets_of_a_namespace_are_unknown_outside", &reason);
        }
        let (one, other) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        let listener = one.run(|| TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(one.run(|| TcpStream::connect(address)).is_ok());
        assert!(other.run(|| TcpStream::connect(address)).is_err());
    }

    #[test]
    fn namespaces_are_connected_by_veth() {
        if let Some(reason) = unavailable() {
            return skip("namespaces_are_connected_by_veth", &reason);
        }
        let (one, other) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        one.connect("left", &other, "right", 1400).unwrap();
        one.ip("addr add 10.7.0.1/24 dev left").unwrap();
        other.ip("addr add 10.7.0.2/24 dev right").unwrap();
        let listener = one.run(|| TcpListener::bind("10.7.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(other.run(|| TcpStream::connect(address)).is_ok());
        assert!(one.ip("link show left").unwrap().contains("mtu 1400"));
    }
}
