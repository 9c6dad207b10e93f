//! Tests of the runtime directory, each in a temporary directory.

use super::{
    NO_DIRECTORY, OF_ANOTHER_USER, RunDir, RunDirError, RunningStack, WRITABLE_BY_OTHERS, find_in,
    is_valid_name, running_in, stack_at,
};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A path that is removed at the end of the test.
struct TempPath(PathBuf);

impl TempPath {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("ginnel-run-dir-{}-{number}", std::process::id())))
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn mode(path: &std::path::Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn stack_has_a_directory_until_it_ends() {
    let temp_path = TempPath::new();
    assert_eq!(running_in(&temp_path.0).unwrap(), [], "a missing directory has no stacks");
    let web = RunDir::create_in(&temp_path.0, "web").unwrap();
    let echo = RunDir::create_in(&temp_path.0, "echo-2.b_c").unwrap();
    assert_eq!((mode(&temp_path.0), mode(web.path()), mode(&web.path().join("lock"))), (0o700, 0o700, 0o600));
    let pid = std::process::id();
    let of = |dir: &RunDir| RunningStack { name: dir.name().into(), path: dir.path().into(), pid };
    assert_eq!(running_in(&temp_path.0).unwrap(), [of(&echo), of(&web)]);
    assert_eq!(find_in(&temp_path.0, Some("web")).unwrap(), of(&web));
    fs::write(web.path().join("something"), "in it").unwrap();
    let path = web.path().to_owned();
    drop(web);
    assert!(!path.exists());
    assert_eq!(find_in(&temp_path.0, None).unwrap(), of(&echo));
}

#[test]
fn two_stacks_do_not_have_one_name() {
    let temp_path = TempPath::new();
    let first = RunDir::create_in(&temp_path.0, "web").unwrap();
    let second = RunDir::create_in(&temp_path.0, "web").unwrap_err();
    let expected = format!("a stack named \"web\" runs already, as process {}", std::process::id());
    assert_eq!(second.to_string(), expected);
    drop(first);
    RunDir::create_in(&temp_path.0, "web").unwrap();
}

#[test]
fn ambiguous_stack_is_an_error() {
    let temp_path = TempPath::new();
    let error = |name| find_in(&temp_path.0, name).unwrap_err().to_string();
    assert!(error(None).starts_with("no stack of this user runs ("), "{}", error(None));
    let none = error(Some("x"));
    assert!(none.starts_with("no stack named \"x\" runs, nor any other of this user ("), "{none}");
    let _both = ["b", "a"].map(|name| RunDir::create_in(&temp_path.0, name).unwrap());
    assert_eq!(error(None), "several stacks run, name one: a, b");
    let others = error(Some("x"));
    assert!(others.starts_with("no stack named \"x\" runs; there are: a, b"), "{others}");
}

#[test]
fn names_cannot_escape_the_directory() {
    for good in ["a", "httpd-123", "9.x_Y", &"n".repeat(48)] {
        assert!(is_valid_name(good), "{good}");
    }
    for bad in ["", ".", "..", "-x", "_x", ".lock", "a/b", "a b", "a\n", "ä", &"n".repeat(49)] {
        assert!(!is_valid_name(bad), "{bad}");
        let temp_path = TempPath::new();
        assert!(matches!(RunDir::create_in(&temp_path.0, bad), Err(RunDirError::Name(_))));
        assert!(!temp_path.0.exists());
    }
}

/// Starts a process that holds the lock `path/lock` until it is killed.
fn sleeping_process(path: &std::path::Path) -> std::process::Child {
    let mut child = Command::new("flock");
    child.arg("--exclusive").arg("--no-fork").arg(path.join("lock")).args(["sleep", "1000"]);
    child.stdin(Stdio::null()).spawn().expect("flock of util-linux")
}

#[test]
fn directory_of_a_killed_process_is_removed() {
    let temp_path = TempPath::new();
    drop(RunDir::create_in(&temp_path.0, "other").unwrap());
    for look in ["list", "find", "find the only one", "create"] {
        let path = temp_path.0.join("web");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("lock"), "4242\n").unwrap();
        fs::write(path.join("stats"), "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        let mut child = sleeping_process(&path);
        // The process needs a moment to take the lock; until then the directory is stale.
        while fs::File::open(path.join("lock")).unwrap().try_lock_shared().is_ok() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(running_in(&temp_path.0).unwrap().iter().map(|r| r.pid).collect::<Vec<_>>(), [4242]);
        assert!(matches!(RunDir::create_in(&temp_path.0, "web"), Err(RunDirError::NameInUse(_, 4242))));
        assert_eq!(stack_at(&path).unwrap().map(|running| running.pid), Some(4242));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(stack_at(&path).unwrap(), None);
        match look {
            "list" => assert_eq!(running_in(&temp_path.0).unwrap(), []),
            "find" | "find the only one" => {
                let name = (look == "find").then_some("web");
                let error = find_in(&temp_path.0, name).unwrap_err().to_string();
                assert!(error.starts_with("the stack \"web\" is dead: its process 4242 "), "{error}");
                assert!(!find_in(&temp_path.0, name).unwrap_err().to_string().contains("dead"));
            }
            _ => {
                let dir = RunDir::create_in(&temp_path.0, "web").unwrap();
                assert!(!dir.path().join("stats").exists(), "files of the killed process must be removed");
            }
        }
        assert!(!path.exists(), "{look}");
    }
}

#[test]
fn directory_writable_by_others_is_refused() {
    let temp_path = TempPath::new();
    let elsewhere = TempPath::new();
    fs::create_dir(&elsewhere.0).unwrap();
    symlink(&elsewhere.0, &temp_path.0).unwrap();
    let error = RunDir::create_in(&temp_path.0, "web").unwrap_err().to_string();
    assert!(error.ends_with(NO_DIRECTORY), "{error}");
    assert!(running_in(&temp_path.0).is_err());
    fs::remove_file(&temp_path.0).unwrap();

    fs::create_dir(&temp_path.0).unwrap();
    fs::set_permissions(&temp_path.0, fs::Permissions::from_mode(0o770)).unwrap();
    let error = RunDir::create_in(&temp_path.0, "web").unwrap_err().to_string();
    assert!(error.ends_with(WRITABLE_BY_OTHERS), "{error}");
    fs::set_permissions(&temp_path.0, fs::Permissions::from_mode(0o700)).unwrap();

    symlink(&elsewhere.0, temp_path.0.join("web")).unwrap();
    assert!(matches!(RunDir::create_in(&temp_path.0, "web"), Err(RunDirError::Unsafe(..))));
    assert_eq!(running_in(&temp_path.0).unwrap(), []);
    assert!(elsewhere.0.exists(), "the target of the link must stay");

    fs::write(temp_path.0.join("not-a-directory"), "").unwrap();
    assert!(matches!(RunDir::create_in(&temp_path.0, "not-a-directory"), Err(RunDirError::Unsafe(..))));
}

#[test]
fn a_runtime_directory_that_cannot_be_made_is_named() {
    let error = RunDir::create_in("/proc/self/ginnel".as_ref(), "web").unwrap_err().to_string();
    assert!(error.starts_with("the runtime directory /proc/self/ginnel cannot be made: "), "{error}");
    assert!(error.ends_with(": set GINNEL_RUN_DIR to a directory that this user may write"), "{error}");
}

#[test]
fn directory_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        let error = RunDir::create_in("/".as_ref(), "web").unwrap_err().to_string();
        assert_eq!(error, format!("/: {OF_ANOTHER_USER}"));
        return;
    }
    let temp_path = TempPath::new();
    let dir = RunDir::create_in(&temp_path.0, "web").unwrap();
    std::os::unix::fs::chown(&temp_path.0, Some(65534), None).unwrap();
    let error = RunDir::create_in(&temp_path.0, "more").unwrap_err().to_string();
    assert!(error.ends_with(OF_ANOTHER_USER), "{error}");
    // Root may list the stacks of any user.
    assert_eq!(running_in(&temp_path.0).unwrap().len(), 1);
    drop(dir);
}
