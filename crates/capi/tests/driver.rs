//! C programs on the library: `driver/`, whose cases have both ends of their connections, and the examples
//! of the package, which clients of the kernel reach through a TAP interface.
//!
//! These programs run in real time, with generous limits.

mod c_program;

use c_program::{CProgram, compile, library_folder};
use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

/// Time-out in seconds of a case that hangs.
const SECONDS_MAX: &str = "120";

static DRIVER: LazyLock<CProgram> = LazyLock::new(|| compile("tests/driver", &["-lginnel_c"]));

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn run_case(program: &CProgram, case: &str) {
    let mut driver = Command::new("timeout");
    driver.args(["--kill-after=5", SECONDS_MAX]).arg(program.path()).arg(case);
    let output = driver.env("LD_LIBRARY_PATH", library_folder()).output().expect("timeout of coreutils runs");
    assert!(output.status.success(), "{case}: {}: {}", output.status, text(&output));
}

macro_rules! cases {
    ($($name:ident)*) => { $(#[test] fn $name() { run_case(&DRIVER, stringify!($name)); })* };
}

cases! {
    loop_carries_bytes
    bytes_before_the_end_are_received
    large_transfer_needs_all_events
    bytes_are_lent_until_they_are_consumed
    lent_bytes_outlive_a_reset
    stream_ends_after_an_urgent_byte
    large_transfer_is_read_in_place
    urgent_events_are_in_their_own_list
    early_bytes_are_received_unordered
    messages_overtake_each_other
    urgent_bytes_are_received_out_of_band
    fast_open_carries_data_in_the_syn
    listener_options_are_applied
    connection_options_are_applied
    memory_is_sent_without_a_copy
    source_outlives_its_connection
    timers_descriptors_and_commands_wake_the_shard
    exact_timers_expire_in_order
    shard_answers_questions
    datagrams_are_carried
    udp_options_are_applied
    udp_segments_are_sent_and_joined
    errors_about_datagrams_are_queued
    members_receive_multicast_of_their_sources
    stop_flag_ends_the_wait_once
    events_without_room_are_kept
    wrong_arguments_are_errors
    a_stack_can_be_opened_again
    callbacks_carry_bytes
    urgent_byte_reaches_its_callback
    early_bytes_reach_their_callback
    callbacks_run_in_a_thread_of_their_own
    a_start_that_fails_ends_the_stack
}

#[test]
fn static_library_can_be_linked() {
    let library = library_folder().join("libginnel_c.a");
    let program = compile("tests/driver", &[library.to_str().unwrap(), "-lm", "-ldl", "-lgcc_s"]);
    run_case(&program, "loop_carries_bytes");
}

/// Returns the names in a text that begin with `ginnel_` and are followed by `follows`.
fn functions(text: &str, follows: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = text.match_indices("ginnel_").map(|(at, _)| at);
    let names = starts.filter(|&at| !text[..at].ends_with(is_name)).filter_map(|at| {
        let rest = &text[at..];
        let len = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        rest[len..].starts_with(follows).then(|| rest[..len].to_owned())
    });
    names.collect()
}

/// Returns the header without comments and inline functions.
fn declarations() -> String {
    let header =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/ginnel.h")).unwrap();
    let mut text = String::new();
    for (i, part) in header.split("/*").enumerate() {
        text += if i == 0 { part } else { part.split_once("*/").unwrap().1 };
    }
    let mut declared = String::new();
    let mut rest = text.as_str();
    while let Some((before, after)) = rest.split_once("static inline") {
        declared += before;
        rest = after.split_once("\n}").unwrap().1;
    }
    declared + rest
}

#[test]
fn header_declares_the_exported_functions() {
    let library = library_folder().join("libginnel_c.so");
    let output = Command::new("nm").args(["--dynamic", "--defined-only"]).arg(library).output();
    let output = output.expect("nm of binutils runs");
    let symbols = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<String> =
        symbols.lines().filter_map(|line| line.rsplit(' ').next()).map(String::from).collect();
    assert!(exported.len() > 50, "{exported:?}");
    assert_eq!(functions(&declarations(), "("), exported);
}

#[test]
fn header_is_valid_c99_and_cpp() {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    for (compiler, standard, language) in [("cc", "-std=c99", "c"), ("c++", "-std=c++17", "c++")] {
        let mut command = Command::new(compiler);
        command.args(["-D_POSIX_C_SOURCE=200809L", standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror"]);
        command.args(["-fsyntax-only", "-x", language, "-I"]).arg(&include);
        let Ok(output) = command.arg(include.join("ginnel.h")).output() else {
            skip("header_is_valid_c99_and_cpp", &format!("no {compiler}"));
            continue;
        };
        let problems: Vec<String> = text(&output).lines().map(String::from).collect();
        // A `#pragma once` would fail, too, because the header is the main file here.
        assert!(output.status.success(), "{compiler}: {problems:#?}");
    }
}

/// An example that runs in a namespace, where the kernel has the address 10.1.0.1 and the stack 10.1.0.2.
struct Example {
    child: std::process::Child,
    namespace: Namespace,
    _program: CProgram,
    _folder: tempfile::TempDir,
}

impl Example {
    fn start(source: &str, shards: usize) -> Self {
        let program = compile(source, &["-lginnel_c"]);
        let folder = tempfile::tempdir().unwrap();
        let configuration = folder.path().join("tap.toml");
        let tap = include_str!("../../../packaging/examples/tap.toml");
        let options = format!("shards.count = {shards}\nrun.directory = false\n");
        std::fs::write(&configuration, options + tap).unwrap();
        let namespace = Namespace::new().unwrap();
        let mut command = Command::new(program.path());
        command.arg(&configuration).arg("7").env("LD_LIBRARY_PATH", library_folder()).stderr(Stdio::piped());
        let mut child = namespace.run(|| command.spawn()).unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        for _ in 0..shards {
            let line = lines.next().expect("the example says that it is ready").unwrap();
            assert!(line.ends_with(" is ready"), "{line}");
        }
        namespace.wait_until_reachable("10.1.0.2".parse().unwrap()).unwrap();
        Self { child, namespace, _program: program, _folder: folder }
    }

    fn connect(&self) -> TcpStream {
        let address: SocketAddr = "10.1.0.2:7".parse().unwrap();
        let stream = self.namespace.run(|| TcpStream::connect(address)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Asks the example to end, and checks that it does.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        // It has ended, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn echo_example_serves_clients_of_the_kernel() {
    if let Some(reason) = unavailable() {
        return skip("echo_example_serves_clients_of_the_kernel", &reason);
    }
    for shards in [1, 2] {
        let example = Example::start("examples/echo.c", shards);
        let streams: Vec<TcpStream> = (0..20).map(|_| example.connect()).collect();
        for (i, stream) in streams.iter().enumerate() {
            let bytes: Vec<u8> = (0..200_000).map(|at| (at * (i + 3)) as u8).collect();
            let mut back = vec![0; bytes.len()];
            std::thread::scope(|scope| {
                scope.spawn(|| (&mut &*stream).write_all(&bytes).unwrap());
                (&mut &*stream).read_exact(&mut back).unwrap();
            });
            assert!(back == bytes, "connection {i} of {shards} shard(s)");
        }
        for mut stream in streams {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
        let socket = example.namespace.run(|| UdpSocket::bind("10.1.0.1:0")).unwrap();
        socket.connect("10.1.0.2:7").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.send(b"datagram").unwrap();
        let mut back = [0; 20];
        assert_eq!(socket.recv(&mut back).unwrap(), 8);
        assert_eq!(&back[..8], b"datagram");
        example.stop();
    }
}

#[test]
fn levels_example_answers_the_level_of_a_line() {
    if let Some(reason) = unavailable() {
        return skip("levels_example_answers_the_level_of_a_line", &reason);
    }
    for shards in [1, 2] {
        let example = Example::start("examples/levels.c", shards);
        for _ in 0..10 {
            let mut stream = example.connect();
            for (line, level) in [("usual\n", "low\n"), ("!urgent\n", "high\n"), ("usual\n", "low\n")] {
                stream.write_all(line.as_bytes()).unwrap();
                let mut answer = vec![0; level.len()];
                stream.read_exact(&mut answer).unwrap();
                assert_eq!(answer, level.as_bytes(), "{line}");
            }
        }
        example.stop();
    }
}

/// Writes each line to its stream while the example is stopped, so that it finds all of them at once. Returns
/// the streams in the order in which the answers arrive, as indices.
fn answered_at_once(example: &Example, lines: &[(&TcpStream, &[u8])]) -> Vec<u64> {
    let id = Pid::from_child(&example.child);
    let answers = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    for ((stream, _), index) in lines.iter().zip(0..) {
        epoll::add(&answers, stream, EventData::new_u64(index), EventFlags::IN | EventFlags::ET).unwrap();
    }
    kill_process(id, Signal::STOP).unwrap();
    waitpid(Some(id), WaitOptions::UNTRACED).unwrap();
    for (stream, line) in lines {
        let mut stream = *stream;
        stream.write_all(line).unwrap();
    }
    kill_process(id, Signal::CONT).unwrap();
    // The kernel lists streams in the order in which they became readable.
    let (mut order, mut events) = (Vec::new(), Vec::with_capacity(lines.len()));
    while order.len() < lines.len() {
        let time = Timespec { tv_sec: 60, tv_nsec: 0 };
        let count = epoll::wait(&answers, spare_capacity(&mut events), Some(&time)).unwrap();
        assert!(count > 0, "only {order:?} were answered");
        order.extend(events.drain(..).map(|event| event.data.u64()));
    }
    order
}

#[test]
fn urgent_line_overtakes_others_in_levels_example() {
    if let Some(reason) = unavailable() {
        return skip("urgent_line_overtakes_others_in_levels_example", &reason);
    }
    let example = Example::start("examples/levels.c", 1);
    let streams: [TcpStream; 3] = std::array::from_fn(|_| example.connect());
    let expect = |index: usize, level: &[u8]| {
        let mut answer = vec![0; level.len()];
        (&mut &streams[index]).read_exact(&mut answer).unwrap();
        assert_eq!(answer, level, "stream {index}");
    };
    for (index, mut stream) in streams.iter().enumerate() {
        stream.write_all(b"usual\n").unwrap();
        expect(index, b"low\n");
    }
    for round in 0..10 {
        let lines = [&b"usual\n"[..], b"usual\n", b"!urgent\n"];
        let lines: Vec<_> = streams.iter().zip(lines).collect();
        assert_eq!(answered_at_once(&example, &lines), [2, 0, 1], "round {round}");
        expect(0, b"low\n");
        expect(1, b"low\n");
        expect(2, b"high\n");
    }
    example.stop();
}
