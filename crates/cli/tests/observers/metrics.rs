//! `ginnel metrics` and `ginnel monitor --metrics`, scraped and parsed as Prometheus does.

use crate::web_stack::{WebStack, interrupt, with_web_stack};
use ginnel::run_dir::restarts;
use prometheus_parse::{Scrape, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Returns the body of an answer of an exporter.
fn scrape(address: &str) -> String {
    let mut client = TcpStream::connect(address).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    body.to_owned()
}

fn parse(text: &str) -> Scrape {
    Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).unwrap()
}

/// Returns the address in the line that an exporter prints.
fn address(line: &str) -> String {
    let address = line.strip_prefix("metrics at http://").and_then(|rest| rest.split('/').next());
    address.unwrap_or_else(|| panic!("{line}")).to_owned()
}

/// Returns the counters that `ginnel stat --json` shows of the only shard.
fn counters(stack: &WebStack<'_>) -> BTreeMap<String, u64> {
    let output = stack.ginnel(&["stat", "web", "--json"]).output().unwrap();
    let stat: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(stat["shards"].as_array().unwrap().len(), 1);
    let counters = stat["shards"][0]["counters"].as_object().unwrap();
    counters.iter().map(|(name, value)| (name.clone(), value.as_u64().unwrap())).collect()
}

/// Returns the name that `ginnel stat` has for a sample.
fn stat_name(sample: &prometheus_parse::Sample, kinds: &BTreeMap<String, &str>) -> String {
    let name = sample.metric.strip_prefix("ginnel_").unwrap();
    let is_counter = kinds[&sample.metric] == "counter";
    let name = if is_counter { name.strip_suffix("_total").unwrap() } else { name };
    let (group, item) = name.split_once('_').unwrap();
    match sample.labels.get("device").or(sample.labels.get("pool")) {
        Some(instance) => format!("{group}.{instance}.{item}"),
        None => format!("{group}.{item}"),
    }
}

fn value(sample: &prometheus_parse::Sample) -> u64 {
    match sample.value {
        Value::Counter(value) | Value::Gauge(value) => value as u64,
        ref other => panic!("{}: {other:?}", sample.metric),
    }
}

#[test]
fn a_scrape_equals_the_statistics() {
    with_web_stack("a_scrape_equals_the_statistics", |stack| {
        (0..5).for_each(|_| stack.get_page());
        let (mut exporter, _lines, first) = stack.start(&["metrics", "web", "--listen", "127.0.0.1:0"]);
        let address = address(&first);
        let before = counters(stack);
        let text = scrape(&address);
        let after = counters(stack);
        let kinds: BTreeMap<String, &str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
            .map(|(name, kind)| (name.to_owned(), kind))
            .collect();
        let mut seen = BTreeSet::new();
        for sample in parse(&text).samples.iter().filter(|sample| sample.labels.get("shard").is_some()) {
            let (name, value) = (stat_name(sample, &kinds), value(sample));
            assert_eq!((sample.labels.get("stack"), sample.labels.get("shard")), (Some("web"), Some("0")));
            // Requests of "ginnel stat" do not reach the shard; only its clock goes on, and what is left of
            // the last connection goes away: gauges may fall.
            let (first, last) = (before[&name].min(after[&name]), before[&name].max(after[&name]));
            assert!((first..=last).contains(&value), "{name}: {value}");
            assert!(seen.insert(name.clone()), "{name} has two samples");
            let help = format!("# HELP {} ", sample.metric);
            assert!(text.lines().any(|line| line.starts_with(&help) && line.len() > help.len()), "{name}");
        }
        assert_eq!(seen, before.keys().cloned().collect());
        assert!(before["httpd.responses"] >= 5 && before["tcp.segments_in"] > 20, "{before:?}");
        // Several scrapes at once.
        let texts: Vec<String> = std::thread::scope(|scope| {
            let scrapes: Vec<_> = (0..8).map(|_| scope.spawn(|| scrape(&address))).collect();
            scrapes.into_iter().map(|scrape| scrape.join().unwrap()).collect()
        });
        assert!(texts.iter().all(|text| text.contains("\nginnel_up{stack=\"web\"} 1\n")));
        assert!(texts.iter().all(|text| text.contains("\nginnel_restarts_total{stack=\"web\"} 0\n")));
        restarts::record(&stack.folder.join("run/web"), 3).unwrap();
        assert!(scrape(&address).contains("\nginnel_restarts_total{stack=\"web\"} 3\n"));
        restarts::record_failed(&stack.folder.join("run/web"), true).unwrap();
        let text = scrape(&address);
        assert!(text.contains("\nginnel_up{stack=\"web\"} 0\n") && !text.contains("ginnel_tcp_"), "{text}");
        assert!(text.contains("# the shards of the stack \"web\" could not be started again"), "{text}");
        restarts::record_failed(&stack.folder.join("run/web"), false).unwrap();
        assert!(scrape(&address).contains("\nginnel_up{stack=\"web\"} 1\n"));
        stack.kill();
        let begun = Instant::now();
        let text = scrape(&address);
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert!(text.contains("\nginnel_up{stack=\"web\"} 0\n"), "{text}");
        assert!(!text.contains("ginnel_tcp_"), "{text}");
        interrupt(&exporter);
        assert!(exporter.wait().unwrap().success());
    });
}

#[test]
fn a_monitor_exports_its_histogram() {
    with_web_stack("a_monitor_exports_its_histogram", |stack| {
        let arguments =
            ["monitor", "web", "--protocol", "http", "--metrics", "127.0.0.1:0", "--interval", "10ms"];
        let (mut monitor, mut lines, first) = stack.start(&arguments);
        assert!(first.starts_with("observing"), "{first}");
        let mut line = String::new();
        std::io::BufRead::read_line(&mut lines, &mut line).unwrap();
        let address = address(&line);
        (0..20).for_each(|_| stack.get_page());
        let begun = Instant::now();
        let scrape = loop {
            let text = scrape(&address);
            let is_complete =
                text.lines().any(|line| line.ends_with("} 20") && line.contains("responses_total"));
            if is_complete {
                break parse(&text);
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{text}");
            std::thread::sleep(Duration::from_millis(20));
        };
        let of = |name: &str| {
            let samples = scrape.samples.iter().filter(move |sample| sample.metric == name);
            samples
                .map(|sample| (sample.labels.get("priority").unwrap_or(""), sample))
                .collect::<BTreeMap<_, _>>()
        };
        assert_eq!(value(of("ginnel_monitor_requests_total")[""]), 20);
        let Value::Histogram(low) = &of("ginnel_monitor_latency_seconds")["low"].value else { panic!() };
        let counts: Vec<f64> = low.iter().map(|bucket| bucket.count).collect();
        assert!(counts.is_sorted() && counts.last() == Some(&20.0), "{low:?}");
        assert!(low.last().unwrap().less_than.is_infinite());
        interrupt(&monitor);
        assert!(monitor.wait().unwrap().success());
    });
}

#[test]
fn an_address_in_use_is_named() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ginnel"));
    let output = command.args(["metrics", "--listen", &address]).output().unwrap();
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(problem.contains(&format!("metrics: listen on {address}: Address already in use")), "{problem}");
}
