//! sshd, which sandboxes its network process: another user, an empty root, one descriptor, a seccomp filter.

use crate::{assert_same, distinct_bytes, fixture};

#[test]
fn sshd_runs_commands_and_carries_files() {
    let programs = ["sshd", "ssh", "scp", "ssh-keygen"];
    let Some(fixture) = fixture("sshd_runs_commands_and_carries_files", &programs) else { return };
    for key in ["host", "key"] {
        fixture.client_output("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", key]);
    }
    let at = fixture.folder().display();
    let config = fixture.write(
        "sshd.conf",
        format!(
            "Port 2222\nListenAddress 10.9.0.2\nHostKey {at}/host\nAuthorizedKeysFile {at}/key.pub\nStrictModes no
UsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\nSubsystem sftp internal-sftp\n"
        ),
    );
    // The directory of its unprivileged process.
    std::fs::create_dir_all("/run/sshd").unwrap();
    let mut sshd = fixture.start_on_stack(&["/usr/sbin/sshd", "-D", "-e", "-f", &config]);
    sshd.wait_until_listening("10.9.0.2:2222");
    let known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=known", "-i", "key"];
    let ssh = |command: &str| {
        fixture.client_output("ssh", &[&known[..], &["-p", "2222", "root@10.9.0.2", command]].concat())
    };
    assert_eq!(ssh("echo hello; echo $((6 * 7))"), b"hello\n42\n");
    let long = distinct_bytes(50_000_000);
    fixture.write("long", &long);
    for (from, to) in [("long", "root@10.9.0.2:up"), ("root@10.9.0.2:long", "down")] {
        let absolute = |name: &str| name.replace(':', &format!(":{at}/"));
        fixture.client_output(
            "scp",
            &[&known[..], &["-q", "-P", "2222", &absolute(from), &absolute(to)]].concat(),
        );
    }
    assert_same("up", &fixture.read("up"), &long);
    assert_same("down", &fixture.read("down"), &long);
    // Both directions at the same time, and the standard error of the command.
    let both = fixture.client_text(
        "sh",
        &[
            "-c",
            &format!(
                "ssh {} -p 2222 root@10.9.0.2 'cat; echo end >&2' < long 2> error | sha256sum; cat error",
                known.join(" ")
            ),
        ],
    );
    let sum = fixture.client_text("sh", &["-c", "sha256sum < long"]);
    assert!(both.starts_with(&sum) && both.ends_with("end\n"), "{both}");
    sshd.stop();
}
