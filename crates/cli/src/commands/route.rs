//! `ginnel route`: shows and changes the routes of a running stack, in the words of `ip route`.

use super::ss;
use crate::failure::Failure;
use crate::output;
use clap::Args;
use ginnel::config::Prefix;
use ginnel::inspect::{ListedRoute, RouteAction, RouteChange, RouteClient};
use ginnel::run_dir;
use serde_json::json;
use std::net::IpAddr;

/// Options of `ginnel route`.
#[derive(Clone, Debug, Args)]
pub struct RouteOptions {
    /// Name of the stack, if several run (see ginnel stat --list), then "show", the default, or "add",
    /// "replace" or "del" with a route: DESTINATION [via GATEWAY] [dev LINK] [metric N]. DESTINATION is a
    /// network such as 10.0.0.0/8, an address, or "default".
    #[arg(value_name = "NAME|ROUTE")]
    words: Vec<String>,

    /// Print a JSON object per line for each route.
    #[arg(long)]
    json: bool,
}

/// A request that the words name.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Show,
    Change(RouteChange),
}

/// Shows or changes the routes.
pub fn run(options: &RouteOptions) -> Result<(), Failure> {
    let (name, words) = match options.words.split_first() {
        Some((first, rest)) if action(first).is_none() => (Some(first.as_str()), rest),
        _ => (None, &options.words[..]),
    };
    let request = parse(words).map_err(Failure::usage)?;
    let running = run_dir::find(name).map_err(|e| Failure::running(e.to_string()))?;
    let failed = |e: std::io::Error| Failure::running(format!("stack \"{}\": {e}", running.name));
    let client = RouteClient::connect(&running.path).map_err(|e| ss::unreachable_shards(&running, &e))?;
    match request {
        Request::Show => {
            let routes = client.list().map_err(failed)?;
            let line = |route: &ListedRoute| if options.json { as_json(route) } else { as_text(route) };
            output::print(routes.iter().map(|route| line(route) + "\n").collect::<String>())
        }
        Request::Change(change) => client
            .change(&change)
            .map_err(|e| failed(std::io::Error::other(format!("{}: {e}", words.join(" "))))),
    }
}

/// Returns the meaning of a verb: `Some(None)` shows the routes. `None` if the word is no verb.
fn action(word: &str) -> Option<Option<RouteAction>> {
    match word {
        "show" | "list" | "ls" => Some(None),
        "add" => Some(Some(RouteAction::Add)),
        "replace" | "change" => Some(Some(RouteAction::Replace)),
        "del" | "delete" => Some(Some(RouteAction::Delete)),
        _ => None,
    }
}

fn parse(words: &[String]) -> Result<Request, String> {
    let Some((verb, words)) = words.split_first() else { return Ok(Request::Show) };
    let Some(verb_action) = action(verb) else {
        return Err(format!("{verb}: the verbs are show, add, replace and del"));
    };
    let Some(action) = verb_action else {
        return words
            .first()
            .map_or(Ok(Request::Show), |word| Err(format!("{verb} {word}: all routes are shown")));
    };
    let Some((destination, rest)) = words.split_first() else {
        return Err(format!("{verb}: the destination is missing, such as 10.0.0.0/8 or default"));
    };
    let (mut gateway, mut link, mut metric) = (None, None, None);
    for pair in rest.chunks(2) {
        let [key, value] = pair else { return Err(format!("{}: the value is missing", pair[0])) };
        match key.as_str() {
            "via" => gateway = Some(value.parse().map_err(|_| format!("via {value}: not an IP address"))?),
            "dev" => link = Some(value.clone()),
            "metric" => metric = Some(value.parse().map_err(|_| format!("metric {value}: not a number"))?),
            _ => return Err(format!("{key}: a route has via, dev and metric")),
        }
    }
    let destination = parse_destination(destination, gateway)?;
    Ok(Request::Change(RouteChange { action, destination, gateway, link, metric }))
}

fn parse_destination(text: &str, gateway: Option<IpAddr>) -> Result<Prefix, String> {
    if text == "default" {
        return Ok(Prefix::everything(gateway.is_none_or(|gateway| gateway.is_ipv4())));
    }
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(Prefix { address, len: if address.is_ipv4() { 32 } else { 128 } });
    }
    let prefix: Prefix = text.parse()?;
    let host_bits = match prefix.address {
        IpAddr::V4(address) => address.to_bits().checked_shl(prefix.len.into()).unwrap_or(0) != 0,
        IpAddr::V6(address) => address.to_bits().checked_shl(prefix.len.into()).unwrap_or(0) != 0,
    };
    if host_bits {
        return Err(format!("{text}: the address has bits beyond the prefix"));
    }
    Ok(prefix)
}

fn is_default(destination: &Prefix) -> bool {
    destination.len == 0
}

/// Returns a route as `ip route` prints it.
fn as_text(route: &ListedRoute) -> String {
    let mut text =
        if is_default(&route.destination) { "default".to_owned() } else { route.destination.to_string() };
    if let Some(gateway) = route.gateway {
        text += &format!(" via {gateway}");
    }
    text += &format!(" dev {} proto {}", route.link, route.origin);
    if route.gateway.is_none() && route.destination.address.is_ipv4() {
        text += " scope link";
    }
    if route.metric != 0 {
        text += &format!(" metric {}", route.metric);
    }
    text
}

fn as_json(route: &ListedRoute) -> String {
    let value = json!({
        "destination": route.destination.to_string(),
        "gateway": route.gateway.map(|gateway| gateway.to_string()),
        "link": route.link,
        "metric": route.metric,
        "origin": route.origin,
    });
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Request, String> {
        parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    fn change(text: &str) -> RouteChange {
        match parsed(text) {
            Ok(Request::Change(change)) => change,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn routes_are_written_as_for_ip() {
        assert_eq!(parsed(""), Ok(Request::Show));
        assert_eq!(parsed("list"), Ok(Request::Show));
        let full = change("add 10.0.0.0/8 via 10.1.0.1 dev lan metric 5");
        assert_eq!((full.action, full.metric), (RouteAction::Add, Some(5)));
        assert_eq!((full.gateway, full.link.as_deref()), (Some("10.1.0.1".parse().unwrap()), Some("lan")));
        assert_eq!(change("del default").destination.to_string(), "0.0.0.0/0");
        assert_eq!(change("replace default via fe80::1").destination.to_string(), "::/0");
        assert_eq!(change("add 192.0.2.7 dev lan").destination.to_string(), "192.0.2.7/32");
    }

    #[test]
    fn errors_name_the_word() {
        for (text, word) in [
            ("move x", "move"),
            ("show 10.0.0.0/8", "show 10.0.0.0/8"),
            ("add", "add"),
            ("add 10.0.0.1/8", "10.0.0.1/8"),
            ("add ten/8", "ten"),
            ("add 10.0.0.0/8 via", "via"),
            ("add 10.0.0.0/8 via x", "via x"),
            ("add 10.0.0.0/8 metric -1", "metric -1"),
            ("add 10.0.0.0/8 src 10.0.0.1", "src"),
        ] {
            assert!(parsed(text).unwrap_err().contains(word), "{text}");
        }
    }
}
