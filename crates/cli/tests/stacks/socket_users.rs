//! `ginnel ss -p`: the processes of each socket.

use crate::fixture::{Fixture, RunningProgram, signal, skipped, wait_until};

#[test]
fn sockets_show_their_processes() {
    if skipped("sockets_show_their_processes") {
        return;
    }
    let fixture = Fixture::new("users");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    // The child inherits the listener; the connection is its own, and the datagram socket its parent's.
    let script = "
s = server('127.0.0.1', 7501); u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('127.0.0.1', 7502))
child = os.fork()
if not child:
    u.close(); c = socket.create_connection(('127.0.0.1', 7501))
    open('connection', 'w').write(f'{c.getsockname()[1]} {s.fileno()} {c.fileno()}')
    os.rename('connection', 'connected'); time.sleep(50)
a, _ = s.accept()
while not os.path.exists('connected'): time.sleep(0.01)
open('facts', 'w').write(f'{child} {u.fileno()} {a.fileno()} ' + open('connected').read() + ' .'); time.sleep(50)";
    let parent = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    let facts = || std::fs::read_to_string(fixture.path().join("facts")).unwrap_or_default();
    wait_until("all is open", || facts().ends_with('.'));
    let facts = facts();
    let [child, udp, accepted, port, listener, connected, _] = facts.split(' ').collect::<Vec<_>>()[..]
    else {
        panic!("{facts}")
    };
    let parent = parent.pid();
    let name = std::fs::read_to_string(format!("/proc/{parent}/comm")).unwrap();
    let name = name.trim_end();
    let user = |pid: &dyn core::fmt::Display, fd: &str| format!("(\"{name}\",pid={pid},fd={fd})");
    let expected = [
        ("127.0.0.1:7501", "0.0.0.0:*", [user(&parent, listener), user(&child, listener)].join(",")),
        ("127.0.0.1:7501", &format!("127.0.0.1:{port}"), user(&parent, accepted)),
        (&format!("127.0.0.1:{port}"), "127.0.0.1:7501", user(&child, connected)),
        ("127.0.0.1:7502", "0.0.0.0:*", user(&parent, udp)),
    ];
    let shown = fixture.run_ok(&["ss", "lab", "-ap"]);
    let head = shown.lines().next().unwrap();
    assert!(head.ends_with(" Shard Process"), "{shown}");
    let users: Vec<usize> = shown.lines().filter_map(|line| line.find("users:")).collect();
    assert!(!users.is_empty() && users.iter().all(|at| Some(*at) == head.find("Process")), "{shown}");
    for (local, peer, users) in &expected {
        let line = shown.lines().find(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words[4..6] == [*local, *peer]
        });
        let line = line.unwrap_or_else(|| panic!("{local} {peer}: {shown}"));
        // The order of processes is that of their ids, which may wrap.
        let mut column: Vec<String> =
            line.split_whitespace().last().unwrap().split("),(").map(String::from).collect();
        let mut wanted: Vec<String> = format!("users:({users})").split("),(").map(String::from).collect();
        for words in [&mut column, &mut wanted] {
            for word in words.iter_mut() {
                *word = word.trim_start_matches("users:").trim_matches(['(', ')']).into();
            }
            words.sort();
        }
        assert_eq!(column, wanted, "{line}");
    }
    // Without -p nothing is searched, and a program that has ended is not shown.
    assert!(!fixture.run_ok(&["ss", "lab", "-a"]).contains("users:"));
    let json = fixture.run_ok(&["ss", "lab", "-p", "--json", "dport", "=", ":7501"]);
    let value: serde_json::Value = serde_json::from_str(json.trim_end()).unwrap();
    let user = &value["users"][0];
    assert_eq!((user["pid"].to_string(), user["fd"].to_string()), (child.to_string(), connected.to_string()));
    signal(child, "KILL");
    wait_until("the child is gone", || {
        !fixture.run_ok(&["ss", "lab", "-ap"]).contains(&format!("pid={child},"))
    });
}
