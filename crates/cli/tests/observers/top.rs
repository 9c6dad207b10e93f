//! `ginnel top --protocol`: the times of responses.

use crate::web_stack::{interrupt, with_web_stack};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};

/// Lines until the requests must have been seen.
const LINES_MAX: usize = 200;

#[test]
fn response_times_are_observed() {
    with_web_stack("response_times_are_observed", |stack| {
        let options = ["top", "web", "--protocol", "http", "--interval", "0.1", "--json"];
        let mut top = stack.ginnel(&options).spawn().unwrap();
        let mut lines = BufReader::new(top.stdout.take().unwrap()).lines();
        let mut read = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
        assert_eq!(read()["response"]["count"], 0, "there were no requests");
        let observed = (0..LINES_MAX).map(|_| {
            stack.get_page();
            read()
        });
        let line = observed.into_iter().find(|line| line["response"]["count"].as_u64() > Some(0)).unwrap();
        let nanos = |name: &str| line["response"][name].as_u64().unwrap();
        assert!(nanos("p50_ns") > 0 && nanos("p50_ns") <= nanos("max_ns"), "{line}");
        assert!(line["all"]["rx_frames_per_second"].as_f64().unwrap() > 0.0, "{line}");

        let mut second = stack.ginnel(&options).spawn().unwrap();
        let mut error = String::new();
        second.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        assert!(!second.wait().unwrap().success());
        assert!(error.starts_with("ginnel: stack \"web\": ") && error.lines().count() == 1, "{error}");
        interrupt(&top);
        assert!(top.wait().unwrap().success());
    });
}
