//! Network namespaces of tests: as a value, for the sockets and programs that a test opens in it, or for a
//! whole test process.

use crate::script::kernel::sys;
use crate::skip;
use ginnel_devices::tap::{self, TapConfig};
use ginnel_stack::device::Device;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::time::Duration;

/// Environment variable of the process that [`rerun_in_namespace`] starts.
const INSIDE: &str = "GINNEL_IN_NAMESPACE";

/// All sysctls that tests depend on, so that the host's or distribution's settings do not matter. The
/// values are Linux's defaults, except for `tcp_no_metrics_save` (no memory of earlier runs),
/// `tcp_comp_sack_nr` (duplicate ACKs leave at once, RFC 5681 §4.2), `tcp_syn_linear_timeouts` (a SYN's
/// time-out doubles, RFC 6298 §5.5), `tcp_fastopen` (off) and `icmp_ratelimit` (no limit).
const SYSCTLS: &[(&str, &str)] = &[
    ("net.ipv4.tcp_timestamps", "1"),
    ("net.ipv4.tcp_sack", "1"),
    ("net.ipv4.tcp_dsack", "1"),
    ("net.ipv4.tcp_window_scaling", "1"),
    ("net.ipv4.tcp_ecn", "2"),
    ("net.ipv4.tcp_ecn_fallback", "1"),
    ("net.ipv4.tcp_fastopen", "0"),
    ("net.ipv4.tcp_rmem", "4096 131072 6291456"),
    ("net.ipv4.tcp_wmem", "4096 16384 4194304"),
    ("net.ipv4.tcp_moderate_rcvbuf", "1"),
    ("net.ipv4.tcp_adv_win_scale", "1"),
    ("net.ipv4.tcp_shrink_window", "0"),
    ("net.ipv4.tcp_no_metrics_save", "1"),
    ("net.ipv4.tcp_comp_sack_nr", "0"),
    ("net.ipv4.tcp_recovery", "1"),
    ("net.ipv4.tcp_early_retrans", "3"),
    ("net.ipv4.tcp_frto", "2"),
    ("net.ipv4.tcp_reordering", "3"),
    ("net.ipv4.tcp_slow_start_after_idle", "1"),
    ("net.ipv4.tcp_syn_retries", "6"),
    ("net.ipv4.tcp_synack_retries", "5"),
    ("net.ipv4.tcp_syncookies", "1"),
    ("net.ipv4.tcp_max_syn_backlog", "512"),
    ("net.ipv4.tcp_abort_on_overflow", "0"),
    ("net.ipv4.tcp_fin_timeout", "60"),
    ("net.ipv4.tcp_retries1", "3"),
    ("net.ipv4.tcp_retries2", "15"),
    ("net.ipv4.tcp_orphan_retries", "0"),
    ("net.ipv4.tcp_keepalive_time", "7200"),
    ("net.ipv4.tcp_keepalive_intvl", "75"),
    ("net.ipv4.tcp_keepalive_probes", "9"),
    ("net.ipv4.tcp_tw_reuse", "2"),
    ("net.ipv4.tcp_rfc1337", "0"),
    ("net.ipv4.tcp_stdurg", "0"),
    ("net.ipv4.tcp_mtu_probing", "0"),
    ("net.ipv4.tcp_base_mss", "1024"),
    ("net.ipv4.tcp_mtu_probe_floor", "48"),
    ("net.ipv4.tcp_min_snd_mss", "48"),
    ("net.ipv4.tcp_probe_threshold", "8"),
    ("net.ipv4.tcp_probe_interval", "600"),
    ("net.ipv4.tcp_invalid_ratelimit", "500"),
    ("net.ipv4.tcp_autocorking", "1"),
    ("net.ipv4.tcp_thin_linear_timeouts", "0"),
    ("net.ipv4.ip_no_pmtu_disc", "0"),
    ("net.ipv4.ip_default_ttl", "64"),
    ("net.ipv4.ip_local_port_range", "32768 60999"),
    ("net.ipv4.icmp_ratelimit", "0"),
    ("net.core.somaxconn", "4096"),
];

/// Sysctls that older kernels lack.
const OPTIONAL_SYSCTLS: &[(&str, &str)] =
    &[("net.ipv4.tcp_syn_linear_timeouts", "0"), ("net.ipv4.tcp_rto_min_us", "200000")];

/// Sets a sysctl in the calling thread's namespace, given by its dotted name.
pub(crate) fn set_sysctl(name: &str, value: &str) -> io::Result<()> {
    // Each dot separates two components, because no interface of a test has a dot in its name.
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    std::fs::write(&path, value).map_err(|e| io::Error::new(e.kind(), format!("{path} = {value}: {e}")))
}

/// Sets all sysctls that tests depend on in the calling thread's namespace.
fn apply_defaults() -> io::Result<()> {
    for (name, value) in SYSCTLS {
        set_sysctl(name, value)?;
    }
    for (name, value) in OPTIONAL_SYSCTLS {
        match set_sysctl(name, value) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// Moves the calling thread into a new namespace with the settings that tests depend on.
pub(crate) fn enter_new() -> io::Result<()> {
    sys::enter_new_network_namespace()?;
    apply_defaults()
}

/// Sysctls of interop tests in addition to [`SYSCTLS`]: compressed SACKs, which make the single packets of
/// scripts hard to predict, and ICMP echo sockets for all groups.
const INTEROP_SYSCTLS: &[(&str, &str)] =
    &[("net.ipv4.tcp_comp_sack_nr", "44"), ("net.ipv4.ping_group_range", "0 2147483647")];

/// Moves the calling thread into a new namespace, in which only the loopback interface is up. No process is
/// started for this: until it has executed its program, a new process keeps the descriptors of all tests of
/// its parent open.
///
/// # Errors
/// The kernel's error: `PermissionDenied` without CAP_SYS_ADMIN.
pub fn enter_new_loopback() -> io::Result<()> {
    enter_new()?;
    for (name, value) in INTEROP_SYSCTLS {
        set_sysctl(name, value)?;
    }
    let control = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sys::set_up(control.as_fd(), "lo")
}

/// A network namespace. The kernel removes it when this value, all its sockets and devices, and all threads
/// that entered it are gone.
pub struct Namespace {
    file: File,
}

/// One interface of a veth pair.
#[derive(Clone, Copy, Debug)]
pub struct VethEnd<'a> {
    /// Name of the interface.
    pub name: &'a str,
    /// Number of transmit queues, and number of receive queues.
    pub queues: u32,
}

impl Namespace {
    /// Creates a namespace whose loopback interface is up and whose TCP settings are Linux's defaults,
    /// independent of the host's settings.
    ///
    /// # Errors
    /// The kernel's error: `PermissionDenied` without CAP_SYS_ADMIN.
    pub fn new() -> io::Result<Self> {
        let create = || {
            enter_new_loopback()?;
            File::open("/proc/thread-self/ns/net")
        };
        Ok(Self { file: run_on_new_thread(create)? })
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
        self.run(|| set_sysctl(name, value))
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
        let (near, far) = (VethEnd { name, queues: 1 }, VethEnd { name: other_name, queues: 1 });
        self.connect_queues(near, other, far, mtu)
    }

    /// Connects two namespaces by a pair of veth interfaces, which are up and have this MTU. `near` is the
    /// interface in this namespace, `far` the one in `other`.
    ///
    /// # Errors
    /// The standard error of `ip` if it fails.
    pub fn connect_queues(
        &self,
        near: VethEnd<'_>,
        other: &Self,
        far: VethEnd<'_>,
        mtu: u32,
    ) -> io::Result<()> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.file.as_raw_fd());
        let arguments = |VethEnd { name, queues }: VethEnd<'_>| {
            format!("{name} mtu {mtu} numtxqueues {queues} numrxqueues {queues}")
        };
        let (near_arguments, far_arguments) = (arguments(near), arguments(far));
        self.ip(&format!("link add {near_arguments} type veth peer name {far_arguments} netns {path}"))?;
        self.ip(&format!("link set {} up", near.name))?;
        other.ip(&format!("link set {} up", far.name)).map(drop)
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

/// Runs `body` in a network namespace of its own; see [`rerun_in_namespace`].
///
/// # Panics
/// If the test fails in its namespace.
pub fn in_namespace(test: &str, body: impl FnOnce()) {
    if !rerun_in_namespace(test) {
        body();
    }
}

/// Runs the calling test again, in a process whose network namespace is new, and returns true: the caller has
/// nothing left to do. Returns false in that process. `test` is the full path of the test. Where namespaces
/// are not available, the test is recorded as skipped.
///
/// The whole process is in the namespace, unlike with [`Namespace`], and a user without privileges becomes
/// root of a user namespace.
///
/// # Panics
/// If the test fails in its namespace.
pub fn rerun_in_namespace(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return false;
    }
    if let Err(reason) = rerun(test) {
        skip(test, &reason);
    }
    true
}

fn rerun(test: &str) -> Result<(), String> {
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    tun.map_err(|e| format!("/dev/net/tun: {e}"))?;
    let flags: &[&str] = if rustix::process::geteuid().is_root() {
        &["--net"]
    } else {
        &["--net", "--user", "--map-root-user"]
    };
    let allowed = Command::new("unshare").args(flags).arg("true").output();
    let allowed = allowed.map_err(|e| format!("unshare: {e}"))?;
    if !allowed.status.success() {
        return Err(String::from_utf8_lossy(&allowed.stderr).trim().into());
    }
    let program = std::env::current_exe().map_err(|e| format!("path of the test binary: {e}"))?;
    let listed = Command::new(&program).args(["--exact", test, "--list"]).output();
    let listed = listed.map_err(|e| format!("{}: {e}", program.display()))?;
    let line = format!("{test}: test\n");
    assert!(String::from_utf8_lossy(&listed.stdout).contains(&line), "there is no test {test}");
    let mut command = Command::new("unshare");
    command.args(flags).arg("--").arg(program);
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(INSIDE, "1");
    let status = command.status().map_err(|e| format!("unshare: {e}"))?;
    assert!(status.success(), "{test} failed in its namespace");
    Ok(())
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
