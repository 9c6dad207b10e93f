//! Programs in the namespaces of the machines, and the files of the examples.

use ginnel_measure::watched_group::WatchedGroup;
use ginnel_testkit::interop::Namespace;
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

pub const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");

/// A program with the processes that it starts. Dropping the value kills them and waits for their end. They
/// also end if this process is killed.
pub struct Process {
    child: Child,
    /// The group of the program and of the processes that it starts.
    group: WatchedGroup,
    log: PathBuf,
}

impl Process {
    /// Starts a program whose output goes to `NAME.log` in the folder, which is also its working directory
    /// and is removed if this process is killed.
    pub fn start(machine: &Namespace, folder: &Path, name: &str, mut command: Command) -> Self {
        let log = folder.join(name).with_extension("log");
        let file = File::create(&log).unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let group = WatchedGroup::start(Path::new(GINNEL), folder).unwrap();
        command.env("PATH", format!("{path}:/usr/sbin")).current_dir(folder);
        command.process_group(group.id().as_raw_pid());
        command.stdout(file.try_clone().unwrap()).stderr(file);
        let child = machine.run(|| command.spawn()).unwrap_or_else(|e| panic!("{name}: {e}"));
        Self { child, group, log }
    }

    /// Panics with the output of the program if it has ended.
    #[track_caller]
    pub fn assert_running(&mut self) {
        let status = self.child.try_wait().unwrap();
        assert_eq!(status, None, "{}", fs::read_to_string(&self.log).unwrap());
    }

    /// Returns the processes that the threads of the program have started, whatever their group is.
    fn children(&self) -> Vec<Pid> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).into_iter().flatten().flatten();
        let children = threads.flat_map(|thread| fs::read_to_string(thread.path().join("children")));
        let children: String = children.collect();
        children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
    }

    /// Sends a signal to the program.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Sends a signal to the processes that the program has started.
    pub fn signal_children(&self, signal: Signal) {
        for child in self.children() {
            let _ = kill_process(child, signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let children = self.children();
        // The group's number is not used again before its leader has been waited for.
        let _ = kill_process_group(self.group.id(), Signal::KILL);
        let _ = self.child.wait();
        // A child in a group of its own ends by itself; one that was stopped cannot.
        for child in children {
            let deadline = Instant::now() + Duration::from_secs(5);
            while test_kill_process(child).is_ok() && Instant::now() < deadline {
                let _ = kill_process(child, Signal::CONT);
                thread::sleep(Duration::from_millis(1));
            }
            let _ = kill_process_group(child, Signal::KILL);
        }
    }
}

/// Returns the path of a file in `packaging/ecmp`.
pub fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/ecmp").join(name)
}

/// Writes a copy of an example with another address in the folder and returns its path.
pub fn copy_example(name: &str, folder: &Path, from: &str, to: &str) -> PathBuf {
    let text = fs::read_to_string(example(name)).unwrap();
    let copy = folder.join(name);
    fs::write(&copy, text.replace(from, to)).unwrap();
    copy
}

/// Starts BIRD, whose control socket is `bird.ctl` in the folder.
pub fn start_bird(machine: &Namespace, folder: &Path, configuration: &Path) -> Process {
    let mut bird = Command::new("bird");
    bird.arg("-f").arg("-c").arg(configuration).args(["-s", "bird.ctl", "-P", "bird.pid"]);
    Process::start(machine, folder, "bird", bird)
}
