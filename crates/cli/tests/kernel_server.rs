//! `ginnel load http --stack light` over TAP against a server on the kernel's TCP.

use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

/// Answers requests until the client closes, or a request asks for closing.
fn serve(mut stream: TcpStream, body: usize) -> std::io::Result<()> {
    let mut asked = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            return Ok(());
        }
        asked.extend_from_slice(&buffer[..n]);
        let mut answers = Vec::new();
        while let Some(end) = asked.windows(4).position(|w| w == b"\r\n\r\n") {
            let close = asked[..end].windows(17).any(|w| w == b"Connection: close");
            answers
                .extend_from_slice(format!("HTTP/1.1 200 OK\r\nContent-Length: {body}\r\n\r\n").as_bytes());
            answers.resize(answers.len() + body, b'x');
            asked.drain(..end + 4);
            if close {
                return stream.write_all(&answers);
            }
        }
        stream.write_all(&answers)?;
    }
}

/// Listens in the namespace, with a thread for each connection.
fn listen(namespace: &Namespace, address: &str, body: usize) {
    let listener = namespace.run(|| TcpListener::bind(address)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve(stream, body));
        }
    });
}

#[test]
fn the_light_generator_loads_a_kernel_server() {
    if let Some(reason) = unavailable() {
        return skip("the_light_generator_loads_a_kernel_server", &reason);
    }
    let namespace = Namespace::new().unwrap();
    listen(&namespace, "[::]:80", 64);
    listen(&namespace, "[::]:81", 700_000);
    let loads: [&[&str]; 8] = [
        &["-n", "2000", "-c", "20", "http://10.9.0.1/"],
        &["-n", "500", "-c", "20", "http://[fd09::1]/"],
        &["-n", "500", "-c", "20", "--close", "client", "http://10.9.0.1/"],
        &["-n", "500", "-c", "20", "--close", "reset", "http://10.9.0.1/"],
        &["-n", "1000", "-c", "40", "--source", "10.9.0.100-139", "http://10.9.0.1/"],
        &["-n", "5000", "-c", "5", "-k", "--pipeline", "32", "http://[fd09::1]/"],
        &["-n", "60", "-c", "6", "-k", "http://10.9.0.1:81/"],
        &["-n", "200", "-c", "20", "--link", "delay=1ms loss=1% reorder=1%", "http://10.9.0.1/"],
    ];
    for load in loads {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
        command.args(["load", "http", "--stack", "light", "--json", "--quiet", "--timeout", "60s"]);
        command.args([
            "--device",
            "tap:load0",
            "--address",
            "10.9.0.2/24",
            "--kernel-address",
            "10.9.0.1/24",
        ]);
        command.args(["--address", "fd09::2/64", "--kernel-address", "fd09::1/64"]).args(load);
        let output = namespace.run(|| command.output()).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{load:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("\"stack\":\"light\""), "{load:?}: {text}");
        assert!(text.contains("\"failures\":{}"), "{load:?}: {text}");
        assert!(text.contains(&format!("\"statuses\":{{\"2xx\":{}}}", load[1])), "{load:?}: {text}");
    }
}
