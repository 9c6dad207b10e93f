//! sshd, which confines the part of itself that talks to strangers: another user, an empty root, one descriptor, a filter of system calls.

use crate::{assert_same, distinct_bytes, fixture};

#[test]
fn sshd_runs_commands_and_carries_files() {
    let programs = ["sshd", "ssh", "scp", "ssh-keygen"];
    let Some(place) = fixture("sshd_runs_commands_and_carries_files", &programs) else { return };
    for key in ["host", "key"] {
        place.client_output("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", key]);
    }
    let at = place.folder().display();
    let config = place.write(
        "sshd.conf",
        format!(
            "Port 2222\nListenAddress 10.9.0.2\nHostKey {at}/host\nAuthorizedKeysFile {at}/key.pub\nStrictModes no
UsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\nSubsystem sftp internal-sftp\n"
        ),
    );
    // Its unprivileged part lives there.
    std::fs::create_dir_all("/run/sshd").unwrap();
    let mut sshd = place.start_on_stack(&["/usr/sbin/sshd", "-D", "-e", "-f", &config]);
    sshd.wait_until_listening("10.9.0.2:2222");
    let known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=known", "-i", "key"];
    let ssh = |command: &str| {
        place.client_output("ssh", &[&known[..], &["-p", "2222", "root@10.9.0.2", command]].concat())
    };
    assert_eq!(ssh("echo hello; echo $((6 * 7))"), b"hello\n42\n");
    let long = distinct_bytes(50_000_000);
    place.write("long", &long);
    for (from, to) in [("long", "root@10.9.0.2:up"), ("root@10.9.0.2:long", "down")] {
        let absolute = |name: &str| name.replace(':', &format!(":{at}/"));
        place.client_output(
            "scp",
            &[&known[..], &["-q", "-P", "2222", &absolute(from), &absolute(to)]].concat(),
        );
    }
    assert_same("up", &place.read("up"), &long);
    assert_same("down", &place.read("down"), &long);
    // Both directions at once, and what the command writes to its standard error.
    let both = place.client_text(
        "sh",
        &[
            "-c",
            &format!(
                "ssh {} -p 2222 root@10.9.0.2 'cat; echo end >&2' < long 2> error | sha256sum; cat error",
                known.join(" ")
            ),
        ],
    );
    let sum = place.client_text("sh", &["-c", "sha256sum < long"]);
    assert!(both.starts_with(&sum) && both.ends_with("end\n"), "{both}");
    sshd.stop();
}
