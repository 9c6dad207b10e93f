//! Routes of running stacks (`ginnel route`).

use crate::fixture::{Fixture, run_to_end, skipped, wait_until};
use crate::restart::{kill_shards, supervisor_of};

const MEMORY: [&str; 6] = ["--device", "memory", "--address", "10.5.0.1/24", "--gateway", "10.5.0.254"];
const CONNECTED: &str = "10.5.0.0/24 dev link0 proto kernel scope link\n";

/// Runs `ginnel route` with these words.
fn route(fixture: &Fixture, words: &str) -> String {
    fixture.run_ok(&[&["route", "lab"], &words.split_whitespace().collect::<Vec<_>>()[..]].concat())
}

/// Runs `ginnel route`, which fails, and returns its exit code and its standard error.
fn refused(fixture: &Fixture, words: &str) -> (Option<i32>, String) {
    let words = words.split_whitespace().collect::<Vec<_>>();
    let output = run_to_end(fixture.ginnel(&[&["route", "lab"], &words[..]].concat()));
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn routes_are_changed_and_survive_a_restart() {
    if skipped("routes_are_changed_and_survive_a_restart") {
        return;
    }
    let fixture = Fixture::new("routes");
    let _stack = fixture.start_stack("lab", &MEMORY);
    let default = "default via 10.5.0.254 dev link0 proto static\n";
    assert_eq!(route(&fixture, ""), format!("{CONNECTED}{default}"));
    route(&fixture, "add 192.0.2.0/24 via 10.5.0.7 metric 3");
    let added = "192.0.2.0/24 via 10.5.0.7 dev link0 proto static metric 3\n";
    let (code, error) = refused(&fixture, "add 192.0.2.0/24 via 10.5.0.8 metric 3");
    assert_eq!(code, Some(1));
    assert!(error.contains("stack \"lab\": add 192.0.2.0/24") && error.contains("with metric 3"), "{error}");
    route(&fixture, "add 192.0.2.7 via 10.5.0.8 dev link0");
    let host = "192.0.2.7/32 via 10.5.0.8 dev link0 proto static\n";
    assert_eq!(route(&fixture, "show"), format!("{host}{CONNECTED}{added}{default}"));
    route(&fixture, "replace default via 10.5.0.9");
    route(&fixture, "del 192.0.2.7");
    let default = "default via 10.5.0.9 dev link0 proto static\n";
    assert_eq!(route(&fixture, "show"), format!("{CONNECTED}{added}{default}"));
    kill_shards(supervisor_of(&fixture, "lab"));
    wait_until("the stack answers", || run_to_end(fixture.ginnel(&["route", "lab"])).status.success());
    assert_eq!(route(&fixture, "list"), format!("{CONNECTED}{added}{default}"));
    let json = fixture.run_ok(&["route", "lab", "--json"]);
    let first: serde_json::Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!((&first["destination"], &first["origin"]), (&"10.5.0.0/24".into(), &"kernel".into()));
    assert_eq!((&first["gateway"], &first["metric"]), (&serde_json::Value::Null, &0.into()));
}

#[test]
fn refused_routes_change_nothing() {
    if skipped("refused_routes_change_nothing") {
        return;
    }
    let fixture = Fixture::new("refused-routes");
    let _stack = fixture.start_stack("lab", &MEMORY);
    let before = route(&fixture, "");
    for (words, code, cause) in [
        ("add 10.5.0.0/24 dev link0 metric 7", 1, "belongs to an address"),
        ("replace 10.5.0.0/24 dev link0", 1, "belongs to an address"),
        ("add default via 10.5.0.254 metric 9", 1, "exists with metric 0"),
        ("del 192.0.2.0/24", 1, "there is no such route"),
        ("del default via 10.5.0.9", 1, "there is no such route"),
        ("del 10.5.0.0/24", 1, "belongs to an address"),
        ("add 192.0.2.0/24 via 10.6.0.1", 1, "10.6.0.1 is on no link"),
        ("add 192.0.2.0/24 via 10.5.0.1", 1, "not another host"),
        ("add 192.0.2.0/24 dev eth9", 1, "there is no link \"eth9\": the stack has link0"),
        ("add 192.0.2.0/24", 1, "neither a gateway"),
        ("add 192.0.2.1/24 via 10.5.0.7", 2, "192.0.2.1/24"),
        ("add 192.0.2.0/24 by 10.5.0.7", 2, "by:"),
    ] {
        let (found, error) = refused(&fixture, words);
        assert_eq!(found, Some(code), "{words}: {error}");
        assert!(error.contains(cause), "{words}: {error}");
    }
    assert_eq!(route(&fixture, ""), before);
}
