//! Routes of a running stack (`ginnel route`): requests to the shards, and the lines that name a route.

use super::{send_request, wait_for_reply};
use crate::command::Commander;
use crate::config::{self, Prefix};
use crate::context::ShardCore;
use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;
use ginnel_stack::handle::LinkId;
use ginnel_stack::ip::{Network, RouteConfig, RouteFilter, RouteOrigin, RouteView};
use ginnel_stack::stack::Stack;
use std::io;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};

/// File in the stack's directory with the static routes, if they have been changed.
const FILE: &str = "routes";
/// Stands for a value that is not given.
const NONE: &str = "-";

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteAction {
    /// Adds a route. The network has no route with an equal metric.
    Add,
    /// Adds a route, and removes the network's static route with an equal metric.
    Replace,
    /// Removes a static route.
    Delete,
}

impl RouteAction {
    const ALL: [(Self, &str); 3] = [(Self::Add, "add"), (Self::Replace, "replace"), (Self::Delete, "del")];
}

/// A change of the routes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteChange {
    /// Kind of the change.
    pub action: RouteAction,
    /// Destination network.
    pub destination: Prefix,
    /// The router. `None` adds a route to hosts on the link, and removes a route through any router.
    pub gateway: Option<IpAddr>,
    /// Name of the link. `None` is the link of the router, or any one.
    pub link: Option<String>,
    /// The metric; `None` is 0, or any one.
    pub metric: Option<u32>,
}

impl fmt::Display for RouteChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            RouteAction::ALL.iter().find(|(action, _)| *action == self.action).map_or("", |(_, name)| name);
        let gateway = self.gateway.map_or_else(|| NONE.to_owned(), |gateway| gateway.to_string());
        let metric = self.metric.map_or_else(|| NONE.to_owned(), |metric| metric.to_string());
        let link = self.link.as_deref().unwrap_or(NONE);
        write!(f, "{name}\t{}\t{gateway}\t{link}\t{metric}", self.destination)
    }
}

/// Parses a value that may be missing.
fn parse_optional<T: FromStr>(cell: &str) -> Option<Option<T>> {
    if cell == NONE { Some(None) } else { cell.parse().ok().map(Some) }
}

impl FromStr for RouteChange {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let parse = || {
            let mut cells = line.split('\t');
            let name = cells.next()?;
            let (action, _) = *RouteAction::ALL.iter().find(|(_, known)| *known == name)?;
            let destination = cells.next()?.parse().ok()?;
            let gateway = parse_optional(cells.next()?)?;
            let link = parse_optional(cells.next()?)?;
            let metric = parse_optional(cells.next()?)?;
            let change = Self { action, destination, gateway, link, metric };
            cells.next().is_none().then_some(change)
        };
        parse().ok_or(())
    }
}

/// A route of a running stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedRoute {
    /// Destination network.
    pub destination: Prefix,
    /// The router; `None` if the destinations are on the link.
    pub gateway: Option<IpAddr>,
    /// Name of the link.
    pub link: String,
    /// The metric.
    pub metric: u32,
    /// Where the route comes from, in the words of `ip route`: `kernel` for the network of an address,
    /// `static` for the configuration and `ginnel route`, `ra` for a router advertisement.
    pub origin: &'static str,
}

const ORIGINS: [(RouteOrigin, &str); 3] =
    [(RouteOrigin::Connected, "kernel"), (RouteOrigin::Static, "static"), (RouteOrigin::Advertised, "ra")];

impl ListedRoute {
    fn new(network: &Network, route: &RouteView) -> Self {
        let link = network.link_views().nth(usize::from(route.link.0));
        let origin = ORIGINS.iter().find(|(origin, _)| *origin == route.origin);
        Self {
            destination: Prefix { address: route.destination, len: route.prefix },
            gateway: route.gateway,
            link: link.map_or_else(String::new, |link| link.name.to_owned()),
            metric: route.metric,
            origin: origin.map_or("", |(_, name)| name),
        }
    }

    fn is_static(&self) -> bool {
        self.origin == "static"
    }
}

impl fmt::Display for ListedRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gateway = self.gateway.map_or_else(|| NONE.to_owned(), |gateway| gateway.to_string());
        write!(f, "{}\t{gateway}\t{}\t{}\t{}", self.destination, self.link, self.metric, self.origin)
    }
}

impl FromStr for ListedRoute {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let parse = || {
            let mut cells = line.split('\t');
            let destination = cells.next()?.parse().ok()?;
            let gateway = parse_optional(cells.next()?)?;
            let (link, metric) = (cells.next()?.to_owned(), cells.next()?.parse().ok()?);
            let origin = cells.next()?;
            let (_, origin) = *ORIGINS.iter().find(|(_, known)| *known == origin)?;
            cells.next().is_none().then_some(Self { destination, gateway, link, metric, origin })
        };
        parse().ok_or(())
    }
}

/// Answer of a shard: its routes, or why it refuses a change. `None` from a shard without an engine.
type RouteReply = Option<Result<Vec<ListedRoute>, String>>;

/// A request in the shard's mailbox: changes the routes, if there is a change, and lists them.
pub(crate) struct RouteRequest {
    change: Option<RouteChange>,
    reply: SyncSender<RouteReply>,
}

impl RouteRequest {
    /// Changes the routes of the shard. Connections look up their routes again.
    pub(crate) fn answer(self, core: &mut ShardCore) {
        let Self { change, reply } = self;
        let answer = core.stack.local_mut().map(|stack| {
            change.map_or(Ok(()), |change| apply(stack, &change))?;
            let network = stack.network();
            Ok(network.routes().map(|route| ListedRoute::new(network, &route)).collect::<Vec<_>>())
        });
        // Fails only if the requester is gone.
        let _ = reply.try_send(answer);
    }
}

/// Changes the routes of a stack. The error says what is wrong with the change.
fn apply(stack: &mut Stack, change: &RouteChange) -> Result<(), String> {
    let link = match &change.link {
        Some(name) => Some(link_named(stack, name)?),
        None => None,
    };
    let Prefix { address: destination, len: prefix } = change.destination;
    let filter = RouteFilter { destination, prefix, gateway: change.gateway, link, metric: change.metric };
    if change.action == RouteAction::Delete {
        return match stack.network_mut().remove_route(&filter) {
            true => Ok(()),
            false if stack.network().find_route_entry(&filter).is_some() => {
                Err("the route belongs to an address or a router, and only their removal ends it".to_owned())
            }
            false => Err("there is no such route".to_owned()),
        };
    }
    let link = match (link, change.gateway) {
        (Some(link), _) => link,
        (None, Some(gateway)) => {
            let link = stack.network().link_of_neighbour(gateway);
            link.ok_or_else(|| format!("the gateway {gateway} is on no link: name its link with \"dev\""))?
        }
        (None, None) => return Err("neither a gateway (\"via\") nor a link (\"dev\") is given".to_owned()),
    };
    let metric = change.metric.unwrap_or(0);
    let equal = RouteFilter { gateway: None, link: None, metric: Some(metric), ..filter };
    let present = stack.network().find_route_entry(&equal);
    if change.action == RouteAction::Add && present.is_some() {
        return Err(format!("there is a route with metric {metric}: use \"replace\" or another metric"));
    }
    // The table has one route per network, gateway and link.
    let is_same_way = |view: &RouteView| {
        let network = Prefix { address: view.destination, len: view.prefix };
        view.prefix == prefix
            && network.contains(destination)
            && (view.gateway, view.link) == (change.gateway, link)
    };
    if let Some(other) = stack.network().routes().find(is_same_way) {
        if other.origin != RouteOrigin::Static {
            return Err("the same route belongs to an address or a router, and stays as it is".to_owned());
        }
        if change.action == RouteAction::Add {
            let metric = other.metric;
            return Err(format!("the same route exists with metric {metric}: use \"replace\""));
        }
    }
    let route = RouteConfig { destination, prefix, gateway: change.gateway, link, metric };
    stack.add_route(route).map_err(|error| error.problem)?;
    // After the new route, without which connections had none for a moment.
    let is_new = |view: &RouteView| (view.gateway, view.link) == (route.gateway, route.link);
    if let Some(old) = present.filter(|old| !is_new(old)) {
        stack.network_mut().remove_route(&RouteFilter {
            gateway: old.gateway,
            link: Some(old.link),
            ..equal
        });
    }
    Ok(())
}

fn link_named(stack: &Stack, name: &str) -> Result<LinkId, String> {
    let at = stack.network().link_views().position(|link| link.name == name && !link.loopback);
    let id = at.and_then(|at| u16::try_from(at).ok()).map(LinkId);
    id.ok_or_else(|| {
        let links = stack.network().link_views().filter(|link| !link.loopback).map(|link| link.name);
        format!("there is no link \"{name}\": the stack has {}", links.collect::<Vec<_>>().join(", "))
    })
}

/// The routes of the first shard, and the shards that were not changed with it.
pub(super) struct RouteAnswer {
    pub routes: Vec<ListedRoute>,
    /// Why some shards were not changed; empty if all were.
    pub unchanged: Vec<String>,
}

/// Changes the routes of all shards, if there is a change, and returns those of the first one.
///
/// # Errors
/// The first shard does not answer, or what is wrong with the change. The shards have equal routes and links,
/// so the first one refuses what the others would.
pub(super) fn request(
    shards: &[(String, Commander)],
    change: Option<&RouteChange>,
) -> Result<RouteAnswer, String> {
    let mut first = None;
    let mut unchanged = Vec::new();
    for (label, shard) in shards {
        if change.is_none() && first.is_some() {
            break;
        }
        let (reply, replies) = sync_channel(1);
        let answer = send_request(shard, Box::new(RouteRequest { change: change.cloned(), reply }))
            .and_then(|()| wait_for_reply(shard, &replies))
            .map_err(|problem| format!("shard {label} {problem}"));
        match answer {
            Ok(None) => {}
            Ok(Some(Ok(routes))) => _ = first.get_or_insert(routes),
            Ok(Some(Err(problem))) | Err(problem) if first.is_none() => return Err(problem),
            // The others are changed nevertheless.
            Ok(Some(Err(problem))) => unchanged.push(format!("shard {label}: {problem}")),
            Err(problem) => unchanged.push(problem),
        }
    }
    let routes = first.ok_or_else(|| "the stack has no shard with an engine".to_owned())?;
    Ok(RouteAnswer { routes, unchanged })
}

/// Writes the static routes to the stack's directory, where the next process of the shards finds them.
pub(super) fn save(directory: &Path, routes: &[ListedRoute]) -> io::Result<()> {
    let text: String =
        routes.iter().filter(|route| route.is_static()).map(|route| format!("{route}\n")).collect();
    let new = directory.join(format!(".{FILE}.new"));
    std::fs::write(&new, text)?;
    std::fs::rename(new, directory.join(FILE))
}

/// Replaces the routes of a configuration by those that an earlier process of the shards has saved in the
/// stack's directory, if their routes were changed while it ran. Returns those routes that the configuration
/// does not allow; they are left out.
///
/// # Errors
/// The file cannot be read.
pub fn restore_routes(directory: &Path, config: &mut config::Config) -> io::Result<Vec<String>> {
    let text = match std::fs::read_to_string(directory.join(FILE)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut refused = Vec::new();
    config.routes.clear();
    let parsed = text.lines().map(|line| (line, line.parse::<ListedRoute>()));
    let (mut direct, mut others) = (Vec::new(), Vec::new());
    for (line, route) in parsed {
        match route {
            // Routes to hosts on a link come first: gateways may be such hosts.
            Ok(route) if route.gateway.is_none() => direct.push(route),
            Ok(route) => others.push(route),
            Err(()) => refused.push(line.to_owned()),
        }
    }
    for route in direct.into_iter().chain(others) {
        let text = route.destination.to_string();
        let ListedRoute { destination, gateway, link, metric, .. } = route;
        config.routes.push(config::RouteConfig { destination, gateway, link, metric });
        if let Err(error) = config.validate() {
            config.routes.pop();
            refused.push(format!("{text}: {error}"));
        }
    }
    Ok(refused)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::config::{Config, DeviceConfig, DeviceKind};

    fn route(text: &str) -> ListedRoute {
        text.replace(' ', "\t").parse().unwrap()
    }

    #[test]
    fn lines_survive_a_round_trip() {
        for line in ["add 10.0.0.0/8 10.1.0.1 lan 5", "del ::/0 - - -", "replace 0.0.0.0/0 10.1.0.1 - -"] {
            let line = line.replace(' ', "\t");
            assert_eq!(line.parse::<RouteChange>().unwrap().to_string(), line);
        }
        for line in ["", "add", "add 10.0.0.0/8 x - -", "add 10.0.0.0/8 - - - -", "move 10.0.0.0/8 - - -"] {
            assert!(line.replace(' ', "\t").parse::<RouteChange>().is_err(), "{line}");
        }
        let text = "10.0.0.0/8 10.1.0.1 lan 5 static";
        assert_eq!(route(text).to_string(), text.replace(' ', "\t"));
    }

    #[test]
    fn saved_routes_replace_those_of_the_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let device = DeviceConfig::new("dev0", DeviceKind::Memory);
        let addresses = ["10.1.0.5/24".parse().unwrap()];
        let mut config = Config::single(device, &addresses, &["10.1.0.1".parse().unwrap()]);
        let before = config.routes.clone();
        assert!(restore_routes(folder.path(), &mut config).unwrap().is_empty());
        assert_eq!(config.routes, before);
        let saved = [
            route("0.0.0.0/0 10.2.0.9 link0 7 static"),
            route("10.2.0.0/16 - link0 0 static"),
            route("10.1.0.0/24 - link0 0 kernel"),
            route("10.3.0.0/16 192.0.2.1 link0 0 static"),
        ];
        save(folder.path(), &saved).unwrap();
        let refused = restore_routes(folder.path(), &mut config).unwrap();
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(refused[0].contains("10.3.0.0/16") && refused[0].contains("192.0.2.1"), "{refused:?}");
        let restored: Vec<String> = config.routes.iter().map(|route| route.destination.to_string()).collect();
        assert_eq!(restored, ["10.2.0.0/16", "0.0.0.0/0"]);
        assert_eq!(config.routes[1].metric, 7);
        save(folder.path(), &[]).unwrap();
        restore_routes(folder.path(), &mut config).unwrap();
        assert!(config.routes.is_empty(), "all routes were removed");
    }
}
