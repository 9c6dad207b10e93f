//! Pointers that cannot be read or written: calls fail with `EFAULT`, and the program's own faults arrive as
//! without the library. Python passes no such pointers, so the program is in C.

use crate::fixture::{Fixture, skipped};
use ginnel_testkit::skip;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs a part of the program on the kernel and on a stack, and compares the output.
#[track_caller]
fn assert_like_kernel(test: &str, part: &str) {
    if skipped(test) {
        return;
    }
    Fixture::new(&format!("pointers-{part}")).compare_c_program("bad_pointers", &[part]);
}

#[test]
fn bad_pointers_of_stream_calls_are_efault() {
    assert_like_kernel("bad_pointers_of_stream_calls_are_efault", "streams");
}

#[test]
fn bad_pointers_of_datagram_calls_are_efault() {
    assert_like_kernel("bad_pointers_of_datagram_calls_are_efault", "datagrams");
}

#[test]
fn bad_pointers_of_other_socket_calls_are_efault() {
    assert_like_kernel("bad_pointers_of_other_socket_calls_are_efault", "others");
}

#[test]
fn bad_pointers_of_waiting_calls_are_efault() {
    assert_like_kernel("bad_pointers_of_waiting_calls_are_efault", "waits");
}

#[test]
fn faults_of_the_program_arrive_unchanged() {
    assert_like_kernel("faults_of_the_program_arrive_unchanged", "program");
}

#[test]
fn bad_pointers_are_efault_with_blocked_signals() {
    assert_like_kernel("bad_pointers_are_efault_with_blocked_signals", "blocked");
}

/// Compiles the program with a sanitizer, and returns its path. Returns `None` if the compiler has none.
fn compile_sanitized(fixture: &Fixture, options: &[&str]) -> Option<String> {
    let program = fixture.path().join("sanitized");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stacks/bad_pointers.c");
    let mut cc = Command::new("cc");
    cc.args(["-w", "-g", "-pthread"]).args(options).arg("-o").arg(&program).arg(source);
    let compiled = cc.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    compiled.then(|| program.to_str().unwrap().to_string())
}

#[test]
fn sanitizers_report_faults_of_the_program() {
    const NAME: &str = "sanitizers_report_faults_of_the_program";
    for (options, report) in [
        (&["-fsanitize=address", "-static-libasan"][..], "AddressSanitizer: SEGV"),
        (&["-fsanitize=thread"], "ThreadSanitizer: SEGV"),
    ] {
        let fixture = Fixture::new("sanitized");
        let Some(program) = compile_sanitized(&fixture, options) else {
            skip(NAME, "no sanitizers");
            return;
        };
        let output = fixture.run(&["run", "--loopback", "stack", "--", &program, "sanitized"]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "send bad: -1 EFAULT\n", "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(report), "{output:?}");
    }
}

/// Runs a program whose runtime handles faults of its own, on the kernel and on a stack.
#[track_caller]
fn assert_same_output(test: &str, runtime: &str, file: &str, text: &str, expected: &str) {
    if Command::new(runtime).arg("-version").output().is_err() {
        skip(test, &format!("no {runtime}"));
        return;
    }
    let fixture = Fixture::new(runtime);
    std::fs::write(fixture.path().join(file), text).unwrap();
    for options in [["--stack", "kernel"], ["--loopback", "stack"]] {
        let arguments = [&["run"][..], &options, &["--", runtime, file]].concat();
        assert_eq!(fixture.run_ok(&arguments), expected, "{options:?}");
    }
}

/// The virtual machine finds null references and the end of a thread's stack by faults.
#[test]
fn java_handles_its_own_faults() {
    let text = r#"
import java.net.*;
public class Faults {
    int value;
    static Faults none = null, some = new Faults();
    static int sum;
    static int read(Faults from) { return from.value; }
    static void deeper(int depth) { deeper(depth + 1); sum++; }
    static int nulls() {
        int count = 0;
        for (int i = 0; i < 20000; i++)
            try { sum += read(none); } catch (NullPointerException e) { count++; }
        return count;
    }
    public static void main(String[] arguments) throws Exception {
        for (int i = 0; i < 200000; i++) sum += read(some);
        ServerSocket listener = new ServerSocket(0, 50, InetAddress.getByName("127.0.0.1"));
        int[] counts = new int[2];
        Thread thread = new Thread(() -> counts[0] = nulls());
        thread.start();
        int bytes = 0, overflows = 0;
        for (int i = 0; i < 200; i++) {
            Socket ours = new Socket("127.0.0.1", listener.getLocalPort()), theirs = listener.accept();
            ours.getOutputStream().write(new byte[5000]);
            bytes += theirs.getInputStream().readNBytes(5000).length;
            ours.close(); theirs.close();
        }
        counts[1] = nulls();
        try { deeper(0); } catch (StackOverflowError e) { overflows++; }
        thread.join();
        System.out.println(counts[0] + " " + counts[1] + " " + overflows + " " + bytes);
    }
}
"#;
    assert_same_output("java_handles_its_own_faults", "java", "Faults.java", text, "20000 20000 1 1000000\n");
}

/// V8 finds accesses beyond the memory of a WebAssembly module by faults.
#[test]
fn node_handles_its_own_faults() {
    let text = r#"
// A module that exports `read(address)`, which loads 4 bytes.
const bytes = Uint8Array.from([0, 97, 115, 109, 1, 0, 0, 0, 1, 6, 1, 96, 1, 127, 1, 127, 3, 2, 1, 0,
    5, 3, 1, 0, 1, 7, 8, 1, 4, 114, 101, 97, 100, 0, 0, 10, 9, 1, 7, 0, 32, 0, 40, 2, 0, 11]);
const wasm = new WebAssembly.Instance(new WebAssembly.Module(bytes));
let traps = 0, length = 0;
function trap() {
    for (let i = 0; i < 1000; i++) try { wasm.exports.read(0x7fff0000 - i); } catch (e) { traps++; }
}
const http = require('http');
const server = http.createServer((request, response) => response.end('x'.repeat(10000)));
server.listen(0, '127.0.0.1', async () => {
    for (let i = 0; i < 100; i++) {
        trap();
        await new Promise(done => http.get({ port: server.address().port, host: '127.0.0.1' }, response => {
            response.on('data', data => length += data.length);
            response.on('end', done);
        }));
    }
    console.log(wasm.exports.read(0), traps, length);
    process.exit(0);
});
"#;
    assert_same_output("node_handles_its_own_faults", "node", "faults.js", text, "0 100000 1000000\n");
}
