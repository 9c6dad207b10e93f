//! Programs that are reloaded and replaced under load: listeners pass from process to process, and no client
//! notices.

use crate::processes::{children, is_alive, pid, pid_in_time, request_until, signal, wait_until};
use crate::{distinct_bytes, fixture};
use ginnel_testkit::interop::ProgramFixture;
use std::io::{Read, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Number of concurrent clients.
const CLIENTS: usize = 4;

/// Requests a page over a new connection. The error describes the failure.
fn request(fixture: &ProgramFixture, at: &str) -> Result<(), String> {
    let mut stream = fixture.connect(at).map_err(|e| format!("connect: {e}"))?;
    let asked = stream.write_all(b"GET /ok HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n");
    asked.map_err(|e| format!("write: {e}"))?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).map_err(|e| format!("read: {e}"))?;
    let text = String::from_utf8_lossy(&answer);
    if text.starts_with("HTTP/1.1 200") && text.ends_with("ok") {
        Ok(())
    } else {
        Err(format!("answer: {text:?}"))
    }
}

/// Runs `act` while the kernel's clients send requests continuously, none of which may be refused or lost.
#[track_caller]
fn assert_none_lost(fixture: &ProgramFixture, at: &[&str], act: impl FnOnce()) {
    let (stop, answers, lost) = (AtomicBool::new(false), AtomicU32::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (stop, answers, lost) = (&stop, &answers, &lost);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    match request(fixture, at[client % at.len()]) {
                        Ok(()) => drop(answers.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => lost.lock().unwrap().push(error),
                    }
                }
            });
        }
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
    let (lost, answers) = (lost.into_inner().unwrap(), answers.into_inner());
    assert!(lost.is_empty(), "{} of {answers}: {lost:?}", lost.len());
    assert!(answers > 50, "there was load: {answers}");
}

#[test]
fn an_nginx_reload_loses_no_client() {
    let Some(fixture) = fixture("an_nginx_reload_loses_no_client", &["nginx", "pgrep"]) else {
        return;
    };
    for listen in ["listen 8001;", "listen 8001 reuseport;"] {
        let conf = fixture.nginx("worker_processes 2;");
        let text = String::from_utf8(fixture.read("nginx.conf")).unwrap();
        // With `reuseport` each worker has a listener of its own.
        fixture.write("nginx.conf", text.replace("listen 8000;", listen));
        let mut nginx = fixture.start_on_stack(&["nginx", "-c", &conf]);
        nginx.wait_until_listening("10.9.0.2:8001");
        let master = pid_in_time(&fixture, "pid");
        assert_none_lost(&fixture, &["10.9.0.2:8001", "127.0.0.1:8001"], || {
            for _ in 0..4 {
                let old = children(&master);
                signal(&master, "HUP");
                wait_until("new workers serve alone", || {
                    let now = children(&master);
                    now.len() >= 2 && now.iter().all(|worker| !old.contains(worker))
                });
            }
        });
        assert_eq!(nginx.stop(), 0, "{listen} {}", nginx.read_stderr());
        let log = String::from_utf8(fixture.read("error.log")).unwrap();
        assert!(
            !["[emerg]", "[alert]", "[crit]", "[error]", "[warn]"].iter().any(|bad| log.contains(bad)),
            "{log}"
        );
    }
}

#[test]
fn an_nginx_upgrade_loses_no_client() {
    let Some(fixture) = fixture("an_nginx_upgrade_loses_no_client", &["nginx", "pgrep"]) else {
        return;
    };
    let conf = fixture.nginx("worker_processes 2;");
    // nginx in the foreground ignores this signal.
    let text = String::from_utf8(fixture.read("nginx.conf")).unwrap();
    fixture.write("nginx.conf", text.replace("daemon off;", "daemon on;"));
    let mut nginx = fixture.start_on_stack(&["/usr/sbin/nginx", "-c", &conf]);
    nginx.wait_until_listening("10.9.0.2:8000");
    let mut master = pid_in_time(&fixture, "pid");
    assert_none_lost(&fixture, &["10.9.0.2:8000", "127.0.0.1:8000"], || {
        for _ in 0..2 {
            let old = master.clone();
            request_until(&old, "USR2", "there is a new master with workers", || {
                let now = pid(&fixture, "pid").filter(|now| *now != old);
                now.is_some_and(|now| {
                    master = now;
                    children(&master).len() == 2
                })
            });
            signal(&old, "WINCH");
            wait_until("the old workers are gone", || {
                children(&old).len() <= usize::from(children(&old).contains(&master))
            });
            signal(&old, "QUIT");
            wait_until("the old master is gone", || !is_alive(&old));
        }
    });
    // The stack runs until the last of its processes ends.
    assert_eq!(fixture.client_text("curl", &["-sS", "-m", "30", "http://10.9.0.2:8000/ok"]), "ok");
    signal(&master, "QUIT");
    assert_eq!(nginx.wait_for_exit(), 0, "{}", nginx.read_stderr());
}

#[test]
fn a_haproxy_reload_loses_no_client() {
    let Some(fixture) = fixture("a_haproxy_reload_loses_no_client", &["haproxy", "nginx", "pgrep"]) else {
        return;
    };
    fixture.start_on_kernel("nginx", &["-c", &fixture.nginx("master_process off;")]);
    fixture.wait_until_listening("127.0.0.1:8000");
    let at = fixture.folder().display();
    let conf = |number: u32| {
        format!(
            "global\n stats socket {at}/stats mode 600 level admin expose-fd listeners\n nbthread 2\n description number{number}\n\
             defaults\n mode http\n timeout connect 10s\n timeout client 30s\n timeout server 30s\n\
             listen own\n bind 10.9.0.2:8001\n server nginx 10.9.0.1:8000\n\
             listen all\n bind *:8002\n server nginx 127.0.0.1:8000\n"
        )
    };
    let path = fixture.write("haproxy.cfg", conf(0));
    let pid_file = format!("{at}/haproxy.pid");
    let mut haproxy = fixture.start_on_stack(&["haproxy", "-W", "-p", &pid_file, "-f", &path]);
    for address in ["10.9.0.2:8001", "10.9.0.2:8002", "127.0.0.1:8002"] {
        haproxy.wait_until_listening(address);
    }
    let master = pid_in_time(&fixture, "haproxy.pid");
    let page = distinct_bytes(1_000_000);
    fixture.write("site/page", &page);
    assert_none_lost(&fixture, &["10.9.0.2:8001", "10.9.0.2:8002", "127.0.0.1:8002"], || {
        for number in 1..=3 {
            let old = children(&master);
            fixture.write("haproxy.cfg", conf(number));
            // The master execs itself, and the new worker requests the listeners from the old one.
            request_until(&master, "USR2", "there is a new worker", || {
                children(&master).iter().any(|worker| !old.contains(worker))
            });
            wait_until("the old worker is gone", || !old.iter().any(|worker| is_alive(worker)));
            assert!(is_alive(&master));
        }
    });
    for address in ["10.9.0.2:8001", "127.0.0.1:8002"] {
        let fetched = fixture.client_output("curl", &["-sS", "-m", "30", &format!("http://{address}/page")]);
        crate::assert_same(address, &fetched, &page);
    }
    assert_eq!(haproxy.stop(), 0, "{}", haproxy.read_stderr());
}
