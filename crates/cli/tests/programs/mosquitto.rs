//! A message broker and its clients.

use crate::{assert_same, distinct_bytes, fixture};

#[test]
fn mosquitto_forwards_messages() {
    let programs = ["mosquitto", "mosquitto_sub", "mosquitto_pub"];
    let Some(fixture) = fixture("mosquitto_forwards_messages", &programs) else { return };
    let config = fixture.write("mosquitto.conf", "listener 1883 10.9.0.2\nallow_anonymous true\nuser root\n");
    let mut mosquitto = fixture.start_on_stack(&["mosquitto", "-c", &config]);
    mosquitto.wait_until_listening("10.9.0.2:1883");
    let long: Vec<u8> = distinct_bytes(3_000_000);
    let file = fixture.write("long", &long);
    let send = |topic: &str, more: &[&str]| {
        fixture.client_output(
            "mosquitto_pub",
            &[&["-h", "10.9.0.2", "-q", "2", "-r", "-t", topic], more].concat(),
        );
    };
    for number in 0..10 {
        send(&format!("short/{number}"), &["-m", &number.to_string()]);
    }
    send("long", &["-f", &file]);
    let hear = |topic: &str, count: &str| {
        fixture
            .client_output("mosquitto_sub", &["-h", "10.9.0.2", "-N", "-W", "30", "-t", topic, "-C", count])
    };
    let mut short = hear("short/+", "10");
    short.sort_unstable();
    assert_eq!(short, b"0123456789");
    assert_same("a long message", &hear("long", "1"), &long);
    assert_eq!(mosquitto.stop(), 0, "{}", mosquitto.read_stderr());
}
