//! No thread of a placement calls futex in steady state: what the threads share is neither locked nor waited
//! for. A filter of system calls traps the calls of these threads and of the threads that they start, and the
//! handler of its signal counts them.
#![allow(unsafe_code)] // a filter of system calls, and a handler of a signal

use crate::fixture::{CLIENT_ADDRESS, SERVER_ADDRESS, config};
use crate::placement_suite::PLACEMENTS;
use core::ffi::{c_int, c_void};
use core::time::Duration;
use ginnel::{Conn, ConnectOptions, Context, Error, Handler, ListenOptions, Shards, StopFlag};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
use std::process::Command;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

const PATIENCE: Duration = Duration::from_secs(60);
/// Round trips before the calls are counted, and those during which they are.
const WARM_UP: u64 = 2_000;
const COUNTED: u64 = 20_000;
const CONNECTIONS: usize = 8;
/// Environment variable of a process that runs this test only.
const ALONE: &str = "GINNEL_TEST_ALONE";

/// Calls of threads with a filter.
static CALLS: AtomicU64 = AtomicU64::new(0);
/// The thread that only waits for the end of the others, whose calls do not count.
static WAITING: AtomicI32 = AtomicI32::new(0);

/// Second address of the calls that the handler makes. The filter lets them pass; the operations of libc have
/// no second address.
const OWN_CALL: libc::c_ulong = 0x6769_6e6e;

/// Counts a call, and makes it.
extern "C" fn count_call(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the call has no preconditions.
    if unsafe { libc::gettid() } != WAITING.load(Ordering::Relaxed) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
    let context: *mut libc::ucontext_t = context.cast();
    // SAFETY: the kernel passes the context of the interrupted thread, which nothing else accesses.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    let [at, operation, value, timeout, last] =
        [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R9]
            .map(|register| registers[register as usize]);
    // SAFETY: the call that the thread has made, but for an argument that its operation does not look at.
    let result = unsafe { libc::syscall(libc::SYS_futex, at, operation, value, timeout, OWN_CALL, last) };
    // SAFETY: the call has no preconditions.
    let error = unsafe { *libc::__errno_location() };
    registers[libc::REG_RAX as usize] = if result < 0 { i64::from(-error) } else { result };
}

/// Counts the futex calls of this thread, and of those that it starts.
fn trap_futex() {
    // SAFETY: zeros are a valid value; the fields that matter follow.
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = count_call as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler only calls what is async-signal-safe.
    assert_eq!(unsafe { libc::sigaction(libc::SIGSYS, &action, core::ptr::null_mut()) }, 0);
    let op = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        // The number of the system call is the first field.
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 3, libc::SYS_futex as u32),
        // The lower half of the fifth argument.
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 16 + 4 * 8),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, OWN_CALL as u32),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_TRAP),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let filter = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
    // SAFETY: the program outlives the calls, which only affect this thread and those that it starts.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, filter, &program),
            0,
            "{}",
            std::io::Error::last_os_error()
        );
    }
}

/// Returns what it receives.
struct Echo;

impl Handler for Echo {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:7".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        cx.send(conn, data).unwrap_or(0)
    }
}

/// Sends a message on each connection, and again what returns.
struct Players {
    round_trips: Arc<AtomicU64>,
}

impl Handler for Players {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        for _ in 0..CONNECTIONS {
            cx.connect("10.0.0.1:7".parse().unwrap(), ConnectOptions::default())?;
        }
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        assert_eq!(cx.send(conn, b"ball"), Ok(4));
    }

    fn closed(&mut self, cx: &mut Context<'_>, _: Conn, _: ginnel::CloseReason) {
        // The server does not listen yet.
        let again = cx.connect("10.0.0.1:7".parse().unwrap(), ConnectOptions::default());
        again.expect("a connection is possible");
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        self.round_trips.fetch_add(1, Ordering::Relaxed);
        cx.send(conn, data).unwrap_or(0)
    }
}

fn wait_for(round_trips: &AtomicU64, count: u64) {
    let begin = Instant::now();
    while round_trips.load(Ordering::Relaxed) < count {
        assert!(begin.elapsed() < PATIENCE, "{} of {count}", round_trips.load(Ordering::Relaxed));
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the calls during the counted round trips between a server in this placement and its client.
fn calls_in(placement: crate::placement_suite::TestPlacement) -> u64 {
    let (near, far) = pair(MemoryConfig::default());
    let round_trips = Arc::<AtomicU64>::default();
    let stops = [StopFlag::new().unwrap(), StopFlag::new().unwrap()];
    let [server_stop, client_stop] = stops.clone();
    // Without a scope, whose end a thread with a filter could not report.
    let server = thread::spawn(move || {
        trap_futex();
        let mut config = config(&[SERVER_ADDRESS]);
        placement.set(&mut config);
        if placement.workers > 0 {
            // Shards and workers have threads of their own.
            // SAFETY: the call has no preconditions.
            WAITING.store(unsafe { libc::gettid() }, Ordering::Relaxed);
        }
        let shards = Shards::new(config).device("cable", vec![near]);
        shards.open().unwrap().run(&server_stop, |_| Ok(Echo), |_, _| ()).unwrap();
    });
    let counter = round_trips.clone();
    let client = thread::spawn(move || {
        trap_futex();
        run_client(far, counter, &client_stop);
    });
    wait_for(&round_trips, WARM_UP);
    let before = CALLS.load(Ordering::Relaxed);
    wait_for(&round_trips, WARM_UP + COUNTED);
    let calls = CALLS.load(Ordering::Relaxed) - before;
    stops.iter().for_each(StopFlag::stop);
    server.join().unwrap();
    client.join().unwrap();
    calls
}

fn run_client(device: Device, round_trips: Arc<AtomicU64>, stop: &StopFlag) {
    let shards = Shards::new(config(&[CLIENT_ADDRESS])).device("cable", vec![device]);
    shards
        .open()
        .unwrap()
        .run(stop, |_| Ok(Players { round_trips: round_trips.clone() }), |_, _| ())
        .unwrap();
}

/// Returns the calls of a thread that waits for a mutex.
fn calls_of_a_mutex() -> u64 {
    let mutex = Arc::new(Mutex::new(()));
    let before = CALLS.load(Ordering::Relaxed);
    let guard = mutex.lock().unwrap();
    let of_waiter = Arc::clone(&mutex);
    let waiter = thread::spawn(move || {
        trap_futex();
        drop(of_waiter.lock().unwrap());
    });
    let begin = Instant::now();
    while CALLS.load(Ordering::Relaxed) == before && begin.elapsed() < PATIENCE {
        thread::yield_now();
    }
    drop(guard);
    waiter.join().unwrap();
    CALLS.load(Ordering::Relaxed) - before
}

/// Runs the test again, in a process in which no other test uses locks, and returns true. Returns false in
/// that process.
fn rerun_alone() -> bool {
    if std::env::var_os(ALONE).is_some() {
        return false;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "futex::steady_state_calls_no_futex", "--nocapture"]).env(ALONE, "1");
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("1 passed"), "{output:?}");
    true
}

#[test]
fn steady_state_calls_no_futex() {
    if rerun_alone() {
        return;
    }
    assert!(calls_of_a_mutex() > 0, "the filter counts");
    for placement in PLACEMENTS {
        assert_eq!(calls_in(placement), 0, "{placement:?}");
    }
}
