//! `ginnel ss --stages`: where the time of a request goes, for an unmodified program.

use crate::fixture::{Fixture, RunningProgram, skipped, wait_until};
use serde_json::Value;

/// A server that reads at once and answers after 20 ms, and a client that asks it again and again.
const SCRIPT: &str = "
listener = server('127.0.0.1', 7801)
client = socket.create_connection(('127.0.0.1', 7801)); a, _ = listener.accept()
def ask():
    while True:
        client.sendall(b'question')
        if not client.recv(100): return
threading.Thread(target=ask, daemon=True).start()
while True:
    a.recv(100)
    time.sleep(0.02)
    a.sendall(b'answer')
";

fn stage(conn: &Value, name: &str, field: &str) -> f64 {
    conn["stages"][name][field].as_f64().unwrap_or_else(|| panic!("{name}.{field}: {conn}"))
}

#[test]
fn slow_program_is_slow_in_its_own_stage() {
    if skipped("slow_program_is_slow_in_its_own_stage") {
        return;
    }
    let fixture = Fixture::new("latency-stages");
    let _stack = fixture.start_stack("lab", &["--loopback", "stack"]);
    let _program = RunningProgram::new(fixture.script(&["--stack", "lab"], SCRIPT));
    let filter = ["state", "established", "sport", "=", ":7801"];
    wait_until("it is connected", || {
        !fixture.run_ok(&[&["ss", "lab", "-H"], &filter[..]].concat()).is_empty()
    });
    let json = fixture.run_ok(&[&["ss", "lab", "--stages", "1s", "--json"], &filter[..]].concat());
    let server: Value = serde_json::from_str(json.trim_end()).unwrap();
    for name in ["receive", "read", "answer", "send"] {
        assert!(stage(&server, name, "samples") >= 1.0, "{server}");
        assert!(stage(&server, name, "max_us") >= stage(&server, name, "mean_us"), "{server}");
    }
    // A shard that gets no CPU may notice a read and its answer in one turn, which makes the mean shorter.
    assert!(stage(&server, "answer", "max_us") >= 15_000.0, "{server}");
    wait_until("an answer is among the details", || {
        let text = fixture.run_ok(&[&["ss", "lab", "-i", "--stages", "200ms"], &filter[..]].concat());
        let details = text.lines().nth(2).unwrap();
        assert!(details.starts_with('\t') && details.contains(" cwnd:"), "{text}");
        details.contains(" answer:")
    });
    assert!(!fixture.run_ok(&["ss", "lab", "-i"]).contains("samples:"), "it is not measured any more");
    // A listener has no stages, and a stack without connections answers at once.
    assert!(!fixture.run_ok(&["ss", "lab", "-l", "--stages", "200ms"]).contains("samples:"));
}
