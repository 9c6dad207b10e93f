//! vsftpd, which uses an empty root, a seccomp filter and a limit of 200 MB of address space for each
//! session, and opens data connections.

use crate::{assert_same, distinct_bytes, fixture};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

#[test]
fn vsftpd_sends_and_takes_files() {
    let Some(fixture) = fixture("vsftpd_sends_and_takes_files", &["vsftpd", "curl"]) else { return };
    // The user "ftp" must be able to enter, and the directories above its root must belong to root.
    let root = std::env::temp_dir().join(format!("ginnel-ftp-{}", std::process::id()));
    let mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    std::fs::create_dir_all(root.join("in")).unwrap();
    mode(&root, 0o755);
    mode(&root.join("in"), 0o777);
    std::fs::create_dir_all("/run/vsftpd/empty").unwrap();
    let long = distinct_bytes(20_000_000);
    std::fs::write(root.join("long"), &long).unwrap();
    fixture.write("long", &long);
    let config = fixture.write(
        "vsftpd.conf",
        format!(
            "listen=YES\nlisten_address=10.9.0.2\nlisten_port=2121\nbackground=NO\nanonymous_enable=YES\nno_anon_password=YES
anon_root={}\nwrite_enable=YES\nanon_upload_enable=YES\nconnect_from_port_20=YES\nxferlog_enable=NO\nsecure_chroot_dir=/run/vsftpd/empty\n",
            root.display()
        ),
    );
    let mut vsftpd = fixture.start_on_stack(&["/usr/sbin/vsftpd", &config]);
    vsftpd.wait_until_listening("10.9.0.2:2121");
    let url = "ftp://10.9.0.2:2121";
    // Data connections to the client, and to the server.
    for (way, options) in [("passive", &["-sS"][..]), ("active", &["-sS", "-P", "-"])] {
        fixture.client_output("curl", &[options, &["-o", way, &format!("{url}/long")]].concat());
        assert_same(way, &fixture.read(way), &long);
        fixture.client_output("curl", &[options, &["-T", "long", &format!("{url}/in/{way}")]].concat());
        assert_same(way, &std::fs::read(root.join("in").join(way)).unwrap(), &long);
        let list =
            String::from_utf8(fixture.client_output("curl", &[options, &[&format!("{url}/")]].concat()))
                .unwrap();
        assert!(list.contains(" 20000000 ") && list.lines().count() == 2, "{way}: {list}");
    }
    vsftpd.stop();
    std::fs::remove_dir_all(root).unwrap();
}
