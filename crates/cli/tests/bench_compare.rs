//! `ginnel bench compare` runs a program on the kernel and on Ginnel. The figures mean nothing here.

use ginnel_testkit::interop::{build_preload_library, unavailable};
use ginnel_testkit::skip;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");

/// Returns true if this machine permits the measurement.
fn can_run(test: &str, programs: &[&str]) -> bool {
    let missing = |program: &&&str| Command::new(program).arg("-v").output().is_err();
    let needed = ["ethtool", "ip", "unshare"].iter().chain(programs).find(missing);
    let reason = unavailable()
        .or_else(|| (!rustix::process::geteuid().is_root()).then(|| "BPF programs need root".into()))
        .or(needed.map(|program| format!("no {program}")));
    if let Some(reason) = &reason {
        skip(test, reason);
    }
    reason.is_none()
}

fn compare(options: &[&str], program: &[&str]) -> Output {
    let mut command = Command::new(GINNEL);
    command
        .args(["bench", "compare", "--pairs", "1", "--seconds", "1"])
        .args(options)
        .arg("--")
        .args(program);
    command.env("GINNEL_LIBRARY", build_preload_library(GINNEL)).output().unwrap()
}

fn failure_text(options: &[&str], program: &[&str]) -> String {
    let output = compare(options, program);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    text
}

/// nginx in the foreground with a page of a few bytes.
struct Nginx {
    folder: PathBuf,
}

impl Nginx {
    fn new(name: &str) -> Self {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("compare-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = folder.display();
        let config = format!(
            "daemon off; master_process off; error_log stderr crit; pid {at}/pid;\n\
             events {{ worker_connections 1024; }}\n\
             http {{ access_log off; client_body_temp_path {at}/1; proxy_temp_path {at}/2; fastcgi_temp_path {at}/3;\n\
             uwsgi_temp_path {at}/4; scgi_temp_path {at}/5;\n\
             server {{ listen 8080; location / {{ return 200 hello; }} location /no {{ return 503; }} }} }}\n"
        );
        std::fs::write(folder.join("conf"), config).unwrap();
        Self { folder }
    }

    fn words(&self) -> [String; 5] {
        let at = self.folder.display();
        ["nginx".into(), "-c".into(), format!("{at}/conf"), "-p".into(), at.to_string()]
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn nginx_is_compared_over_each_device() {
    if !can_run("nginx_is_compared_over_each_device", &["nginx"]) {
        return;
    }
    let nginx = Nginx::new("nginx");
    let words = nginx.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let url = ["--url", "http://10.99.1.1:8080/", "--connections", "8"];

    let output = compare(&url, &words);
    let (text, progress) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{progress}");
    for part in [
        "| requests/s, median ",
        "| requests per CPU second ",
        "| bottleneck ",
        "Ginnel / kernel, ",
        "fast as",
    ] {
        assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
    }
    for part in ["1/1 on the kernel: ", "1/1 on Ginnel: ", "stack "] {
        assert!(progress.contains(part), "{part}: {progress}");
    }

    let output = compare(&[&url[..], &["--device", "memif", "--keep-alive", "--json"]].concat(), &words);
    let progress = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{progress}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["device"], "memif");
    for arm in ["kernel", "ginnel"] {
        assert!(json["requests_per_second"][arm].as_f64().unwrap() > 0.0, "{json}");
        assert_eq!(json["runs"][arm][0]["errors"], 0, "{json}");
    }
    assert!(json["ratio"]["median"].as_f64().unwrap() > 0.0);

    // No option that needs root.
    let loopback = ["--device", "memif", "--kernel-device", "loopback", "--json"];
    let output = compare(&[&url[..], &loopback].concat(), &words);
    let progress = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{progress}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["device"], &json["kernel_device"]), (&"memif".into(), &"loopback".into()));
    for arm in ["kernel", "ginnel"] {
        assert!(json["runs"][arm][0]["requests_per_cpu_second"].as_f64().unwrap() > 0.0, "{json}");
        assert_eq!(json["runs"][arm][0]["errors"], 0, "{json}");
    }

    // Error responses do not count as success, and the result says so.
    let output = compare(&["--url", "http://10.99.1.1:8080/no", "--connections", "8"], &words);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("warning: on the kernel") && text.contains("no answer of success"), "{text}");
}

#[test]
fn problems_of_a_program_are_reported() {
    if !can_run("problems_of_a_program_are_reported", &["sh", "sleep"]) {
        return;
    }
    let text = failure_text(&[], &["sh", "-c", "echo bad configuration >&2; exit 3"]);
    assert!(text.contains("the program has ended: exit status 3; it output: bad configuration"), "{text}");
    let text = failure_text(&["--start-timeout", "1"], &["sleep", "60"]);
    assert!(text.contains("nothing listens at 10.77.0.1: the program has to listen on 10.77.0.1"), "{text}");
    let text = failure_text(&[], &["no-such-program-anywhere"]);
    assert!(text.contains("no-such-program-anywhere: "), "{text}");
}

#[test]
fn arguments_are_checked_first() {
    for (arguments, part) in [
        (&["--url", "http://127.0.0.1/", "--", "true"][..], "cannot be the program's address"),
        (&["--url", "http://[fd00::1]/", "--", "true"], "not an IPv4 address"),
        (&["--seconds", "0", "--", "true"], "from 0.1 to 3600"),
        (&[], "PROGRAM"),
    ] {
        let output = Command::new(GINNEL).args(["bench", "compare"]).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(part) && text.lines().count() == 1, "{arguments:?}: {text}");
    }
}
