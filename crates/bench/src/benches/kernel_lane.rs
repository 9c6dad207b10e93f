//! nginx with a worker per CPU on the kernel, with a listener per worker against one that all workers share.

use crate::benches::client_programs::parse_wrk;
use crate::harness::pairs::{self, Arm, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use ginnel_measure::program::ginnel_path;
use ginnel_measure::servers;
use ginnel_measure::veth::run_setup_command;
use ginnel_measure::watched_group::WatchedGroup;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Concurrent connections of wrk, each with one request.
const CONNECTIONS: &str = "64";
/// Port of nginx in the namespace of the bench.
const PORT: u16 = 8000;
/// How long nginx may take to start and to end.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often the start of nginx is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Measures short connections over loopback, on which a connection is received on the CPU of its client.
/// Server and client share all CPUs.
pub fn run(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let ginnel = ginnel_path()?;
    run_setup_command("ip link set lo up")?;
    for program in ["wrk", "nginx"] {
        servers::find(program)?;
    }
    let folder = tempfile::tempdir()?;
    let group = WatchedGroup::start(&ginnel, folder.path())?;
    let server = server(folder.path())?;
    let lane: Vec<OsString> = [
        ginnel.as_os_str(),
        "run".as_ref(),
        "--stack".as_ref(),
        "kernel".as_ref(),
        "--listen-spawn".as_ref(),
    ]
    .into_iter()
    .chain(["auto".as_ref(), "--".as_ref()])
    .map(OsString::from)
    .chain(server.iter().cloned())
    .collect();
    let seconds = options.seconds(5.0).ceil() as u64;
    let ours = || measure("ours", &lane, &group, seconds);
    let theirs: Arm<'_> = Box::new(|| measure("theirs", &server, &group, seconds));
    let (unit, ours) = ("connections/s", Box::new(ours));
    Ok(vec![pairs::run("kernel-lane", unit, options, Bound::Machine, ours, Some(theirs))?])
}

/// Returns the number of CPUs that this process may use.
fn cpu_count() -> Result<u32, MeasureError> {
    Ok(rustix::thread::sched_getaffinity(None).map_err(std::io::Error::from)?.count())
}

/// Returns the command line of nginx with a worker per CPU.
fn server(folder: &Path) -> Result<Vec<OsString>, MeasureError> {
    let line = servers::nginx(folder, Ipv4Addr::LOCALHOST, PORT)?;
    let path = folder.join("nginx.conf");
    let workers = format!("worker_processes {};", cpu_count()?);
    let config = std::fs::read_to_string(&path)?.replace("master_process off;", &workers);
    std::fs::write(&path, config.replace("keepalive_requests 1000000000;", "keepalive_timeout 0;"))?;
    Ok(line)
}

/// nginx with its workers. Dropping the value ends them.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.0.wait();
    }
}

fn measure(
    arm: &str,
    line: &[OsString],
    group: &WatchedGroup,
    seconds: u64,
) -> Result<Measurement, MeasureError> {
    let start = |line: &[OsString]| {
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).process_group(group.id().as_raw_pid()).stdin(Stdio::null());
        command
    };
    let mut server = Server(start(line).stdout(Stdio::null()).spawn()?);
    let until = Instant::now() + TIMEOUT;
    while TcpStream::connect((Ipv4Addr::LOCALHOST, PORT)).is_err() {
        if let Some(status) = server.0.try_wait()? {
            return Err(MeasureError::Failed(format!("{arm}: nginx has ended: {status}")));
        }
        if Instant::now() > until {
            return Err(MeasureError::Failed(format!("{arm}: nginx does not answer")));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let threads = cpu_count()?.to_string();
    let (length, url) = (format!("{seconds}s"), format!("http://{}:{PORT}/", Ipv4Addr::LOCALHOST));
    let words = ["wrk", "-t", &threads, "-c", CONNECTIONS, "-d", &length, "-H", "Connection: close", &url];
    let output = start(&words.map(OsString::from)).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let Some((rate, failures)) = parse_wrk(&text).filter(|_| output.status.success()) else {
        return Err(MeasureError::Failed(format!("{arm}: wrk: {}: {text}", output.status)));
    };
    println!("    {arm}: {rate:.0} connections/s");
    let mut measured = Measurement::new(rate).with("failures", failures as f64);
    if failures > 0 {
        measured.problems.push(format!("{arm}: {failures} requests failed"));
    }
    Ok(measured)
}
