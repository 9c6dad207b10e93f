//! The Debian package: built of the binaries of this build, installed below a directory, used there, and
//! removed.

mod temp_folder;

use ginnel::Config;
use ginnel_testkit::interop::{build_c_library, build_kernel_library, build_preload_library};
use ginnel_testkit::skip;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use temp_folder::TempFolder;

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");

fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().into()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn succeed(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

/// Runs a command with the environment of a shell in the tree where the package is installed.
fn installed(root: &Path, folder: &TempFolder, program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    let path = format!("{}:{}", root.join("usr/bin").display(), std::env::var("PATH").unwrap_or_default());
    command.env("PATH", path).env("GINNEL_RUN_DIR", folder.0.join("run")).env_remove("GINNEL_LIBRARY");
    command.args(arguments).output().unwrap()
}

/// Returns all files below a directory.
fn files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => found.push(path.strip_prefix(folder).unwrap().display().to_string()),
            }
        }
    }
    found.sort();
    found
}

/// Calls dpkg for the system below `root`. The scripts of the package run outside of it.
fn dpkg(root: &Path, arguments: &[&str]) -> Output {
    let root = format!("--root={}", root.display());
    run("dpkg", &[&[root.as_str(), "--force-script-chrootless", "--force-depends"], arguments].concat())
}

#[test]
fn the_package_is_installed_used_and_removed() {
    let test = "the_package_is_installed_used_and_removed";
    let missing = ["dpkg-shlibdeps", "dpkg-deb", "objcopy"]
        .into_iter()
        .find(|program| Command::new(program).arg("--version").output().is_err());
    if let Some(program) = missing {
        return skip(test, &format!("no {program}"));
    }
    if !rustix::process::geteuid().is_root() {
        return skip(test, "dpkg installs as root only");
    }
    let folder = TempFolder::new("package");
    let library = build_preload_library(GINNEL);
    assert_eq!(build_c_library(GINNEL).parent(), library.parent());
    assert_eq!(build_kernel_library(GINNEL).parent(), library.parent());
    let binaries = library.parent().unwrap().display().to_string();
    let output = folder.0.join("deb").display().to_string();
    let built = Command::new(tree().join("scripts/deb"))
        .args(["--binaries", &binaries, "--output", &output])
        .output()
        .unwrap();
    succeed(&built);
    let package = folder.0.join("deb").join(files(&folder.0.join("deb")).remove(0)).display().to_string();
    let control = succeed(&run("dpkg-deb", &["--field", &package]));
    assert!(control.contains("Depends: libc6 (>= "), "{control}");

    let root = folder.0.join("root");
    for part in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "etc", "usr"] {
        fs::create_dir_all(root.join(part)).unwrap();
    }
    fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
    succeed(&dpkg(&root, &["--install", &package]));
    examine_documents(&root);
    examine_units(&root, &folder);
    use_programs(&root, &folder);
    use_completions(&root, &folder);
    use_c_api(&root, &folder);
    // A second installation is an upgrade.
    succeed(&dpkg(&root, &["--install", &package]));
    fs::write(root.join("etc/ginnel/web.toml"), "loopback = \"stack\"\n").unwrap();
    succeed(&dpkg(&root, &["--remove", "ginnel"]));
    let left: Vec<String> = files(&root).into_iter().filter(|file| !file.starts_with("var/")).collect();
    assert_eq!(left, ["etc/ginnel/web.toml"], "the operator's configuration stays");
}

/// Checks pages, examples and the unit.
fn examine_documents(root: &Path) {
    let share = root.join("usr/share");
    let pages = files(&share.join("man/man1"));
    for page in
        ["ginnel.1.gz", "ginnel-doctor.1.gz", "ginnel-top.1.gz", "ginnel-run.1.gz", "ginnel-load-http.1.gz"]
    {
        assert!(pages.iter().any(|known| known == page), "{page}: {pages:?}");
    }
    assert!(!pages.iter().any(|page| page.contains("with-parent")), "{pages:?}");
    for page in &pages {
        let page = share.join("man/man1").join(page).display().to_string();
        if let Ok(shown) = Command::new("man")
            .args(["--warnings", "--local-file", &page])
            .env("MANPAGER", "cat")
            .env("LC_ALL", "C.UTF-8")
            .output()
        {
            let shown_text = succeed(&shown);
            assert!(
                shown_text.contains("NAME") && shown.stderr.is_empty(),
                "{page}: {}",
                text(&shown.stderr)
            );
        }
    }
    let examples = share.join("doc/ginnel/examples");
    for example in ["loopback.toml", "tap.toml", "af_xdp.toml", "ecmp/web.toml"] {
        Config::from_file(&examples.join(example)).unwrap_or_else(|e| panic!("{e}"));
    }
    for example in [
        "nginx.service.d/ginnel.conf",
        "redis-server.service.d/ginnel.conf",
        "ginnel@redis.service.d/user.conf",
        "kubernetes/web.yaml",
        "c/levels.c",
    ] {
        assert!(examples.join(example).exists(), "{example}");
    }
    // Without arguments they say how they are called.
    for script in ["ecmp/announce-while", "ecmp/resilient-routes", "image"] {
        let usage = Command::new(examples.join(script)).output().unwrap();
        assert_eq!(usage.status.code(), Some(2), "{script}");
        assert!(text(&usage.stderr).contains(script.rsplit('/').next().unwrap()), "{}", text(&usage.stderr));
    }
    let documents = share.join("doc/ginnel");
    assert!(documents.join("operations.md").exists());
    for page in files(&documents).iter().filter(|file| file.ends_with(".md")) {
        let page = documents.join(page);
        let links = fs::read_to_string(&page).unwrap();
        for link in links.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let link = link.split('#').next().unwrap();
            let is_file = !link.is_empty() && !link.contains("://") && !link.contains(' ');
            let target = match link.strip_prefix('/') {
                Some(link) => root.join(link),
                None => page.parent().unwrap().join(link),
            };
            assert!(!is_file || target.exists(), "{}: {link}", page.display());
        }
    }
    let unit = fs::read_to_string(root.join("usr/lib/systemd/system/ginnel@.service")).unwrap();
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let program = command.split(' ').next().unwrap().trim_start_matches('/');
    assert!(root.join(program).exists(), "{command}");
}

/// Has systemd check the unit and the drop-ins, with the path of the installed command.
fn examine_units(root: &Path, folder: &TempFolder) {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return skip("examine_units", "no systemd-analyze");
    }
    let units = folder.0.join("units");
    let examples = root.join("usr/share/doc/ginnel/examples");
    let ginnel = root.join("usr/bin/ginnel").display().to_string();
    let copy = |from: &Path, to: &str| {
        let to = units.join(to);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::write(to, fs::read_to_string(from).unwrap().replace("/usr/bin/ginnel", &ginnel)).unwrap();
    };
    copy(&root.join("usr/lib/systemd/system/ginnel@.service"), "ginnel@.service");
    for drop_in in [
        "ginnel@redis.service.d/user.conf",
        "nginx.service.d/ginnel.conf",
        "redis-server.service.d/ginnel.conf",
    ] {
        copy(&examples.join(drop_in), drop_in);
    }
    // Stand for those of Debian's packages.
    for name in ["nginx.service", "redis-server.service"] {
        fs::write(units.join(name), "[Service]\nType=forking\nExecStart=/bin/true\n").unwrap();
    }
    for unit in ["ginnel@web.service", "ginnel@redis.service", "nginx.service", "redis-server.service"] {
        let verified = Command::new("systemd-analyze")
            .args(["verify", "--man=no", "--recursive-errors=one", unit])
            // The colon stands for the usual directories.
            .env("SYSTEMD_UNIT_PATH", format!("{}:", units.display()))
            .output()
            .unwrap();
        assert_eq!(succeed(&verified) + &text(&verified.stderr), "", "{unit}");
    }
}

/// Starts a stack with an example, and runs a program on it by the installed command.
fn use_programs(root: &Path, folder: &TempFolder) {
    let example = root.join("usr/share/doc/ginnel/examples/loopback.toml").display().to_string();
    let version = succeed(&installed(root, folder, "ginnel", &["--version"]));
    assert!(version.starts_with("ginnel "), "{version}");
    succeed(&installed(root, folder, "ginnel", &["up", "lab", "--config", &example, "--background"]));
    if Command::new("python3").arg("--version").output().is_ok() {
        let script = "import socket; l = socket.create_server(('127.0.0.1', 80)); c = socket.create_connection(('127.0.0.1', 80)); a, _ = l.accept(); c.sendall(b'here'); print(a.recv(9).decode())";
        let options = ["run", "--stack", "lab", "--kernel-listen", "off", "--", "python3", "-c", script];
        assert_eq!(succeed(&installed(root, folder, "ginnel", &options)), "here\n");
        let opened = succeed(&installed(
            root,
            folder,
            "ginnel",
            &["stat", "lab", "--filter", "passive_opens", "--json"],
        ));
        assert!(opened.contains("\"all\":{\"tcp.passive_opens\":1}"), "{opened}");
    }
    succeed(&installed(root, folder, "ginnel", &["down", "lab"]));
}

/// Builds an example in C with what is installed, and runs it until it is asked to end.
fn use_c_api(root: &Path, folder: &TempFolder) {
    let multiarch = succeed(&run("dpkg-architecture", &["-qDEB_HOST_MULTIARCH"]));
    let libraries = root.join("usr/lib").join(multiarch.trim());
    let flags = Command::new("pkg-config")
        .args(["--cflags", "--libs", "ginnel"])
        .env("PKG_CONFIG_LIBDIR", libraries.join("pkgconfig"))
        .env("PKG_CONFIG_SYSROOT_DIR", root)
        .env("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1")
        .env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1")
        .output();
    let Ok(flags) = flags else {
        return skip("use_c_api", "no pkg-config");
    };
    let examples = root.join("usr/share/doc/ginnel/examples");
    let program = folder.0.join("echo");
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&program).arg(examples.join("c/echo.c"));
    succeed(&cc.args(succeed(&flags).split_whitespace()).output().expect("cc, a C compiler, runs"));
    let mut example = Command::new(&program);
    example.arg(examples.join("loopback.toml")).arg("7").env("LD_LIBRARY_PATH", &libraries);
    example.env("GINNEL_RUN_DIR", folder.0.join("run")).stderr(Stdio::piped());
    let mut running = example.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(running.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "echo: shard 0 is ready\n");
    // Other commands see the stack of the program.
    let sockets = succeed(&installed(root, folder, "ginnel", &["ss", "-l"]));
    assert!(sockets.contains("0.0.0.0:7"), "{sockets}");
    kill_process(Pid::from_child(&running), Signal::TERM).unwrap();
    assert!(running.wait().unwrap().success());
}

/// Completes a word with each shell that is here.
fn use_completions(root: &Path, folder: &TempFolder) {
    let share = root.join("usr/share");
    let bash = share.join("bash-completion/completions/ginnel").display().to_string();
    let script = format!(
        "source {bash}; COMP_WORDS=(ginnel doct); COMP_CWORD=1; _ginnel ginnel doct ginnel; echo \"${{COMPREPLY[*]}}\"; \
         COMP_WORDS=(ginnel top --inter); COMP_CWORD=2; _ginnel ginnel --inter top; echo \"${{COMPREPLY[*]}}\""
    );
    assert_eq!(succeed(&installed(root, folder, "bash", &["-c", &script])), "doctor\n--interval\n");
    let zsh = share.join("zsh/vendor-completions/_ginnel").display().to_string();
    let fish = share.join("fish/vendor_completions.d/ginnel.fish").display().to_string();
    // Outside of its line editor zsh completes nothing: the lists of the functions are shown.
    let in_zsh = format!(
        "compdef() {{ print -- \"$@\" }}; _describe() {{ print -l -- $commands }}; source {zsh}; _ginnel_commands"
    );
    let in_fish = format!("source {fish}; complete -C 'ginnel doct'; complete -C 'ginnel top --inter'");
    for (shell, option, script, expected) in [
        ("zsh", "-f", &in_zsh, ["_ginnel ginnel\n", "\ndoctor:"]),
        ("fish", "--no-config", &in_fish, ["doctor\t", "\n--interval\t"]),
    ] {
        let Ok(completed) = Command::new(shell).args([option, "-c", script]).output() else {
            skip("use_completions", &format!("no {shell}"));
            continue;
        };
        let errors = text(&completed.stderr);
        let shown = succeed(&completed);
        assert!(errors.is_empty() && expected.iter().all(|part| shown.contains(part)), "{shown}{errors}");
    }
}
