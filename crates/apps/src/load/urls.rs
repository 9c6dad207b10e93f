//! URLs of servers; requests, written once at start; and a weighted choice among requests.

use super::response::Protocol;
use core::net::SocketAddr;
use ginnel::Random;
use std::net::ToSocketAddrs;

/// A parsed absolute HTTP URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// Host and port for the Host field.
    pub authority: String,
    /// Host for the resolver, without brackets.
    host: String,
    port: u16,
    /// Path and query.
    pub path: String,
}

impl core::str::FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = match split_scheme(text) {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) => return Err(format!("the scheme \"{scheme}\" is not supported: use http")),
            None => text,
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                let number = port.parse().ok().filter(|number| *number != 0);
                (host, number.ok_or_else(|| format!("\"{port}\" is not a port"))?)
            }
            _ => (authority, 80),
        };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() || !authority.bytes().all(|b| b.is_ascii_graphic() && b != b'@') {
            return Err("has no host: write it as http://10.0.0.1:8080/".to_owned());
        }
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        check_path(&path)?;
        Ok(Self { authority: authority.to_owned(), host: host.to_owned(), port, path })
    }
}

impl Url {
    /// Resolves the host and returns its first address. An IP address needs no resolver.
    ///
    /// # Errors
    /// The resolver fails or knows no address. The text names the host.
    pub fn resolve(&self) -> Result<SocketAddr, String> {
        if let Ok(address) = self.host.parse() {
            return Ok(SocketAddr::new(address, self.port));
        }
        let mut found =
            (self.host.as_str(), self.port).to_socket_addrs().map_err(|e| format!("{}: {e}", self.host))?;
        found.next().ok_or_else(|| format!("{}: no address", self.host))
    }
}

/// Protocols of the generator that a URL's scheme names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UrlScheme {
    /// `http://`, or no scheme.
    Http,
    /// `redis://`.
    Redis,
    /// `memcached://`.
    Memcached,
}

impl UrlScheme {
    /// Returns the scheme as it is written in a URL.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Redis => "redis",
            Self::Memcached => "memcached",
        }
    }

    /// Splits a URL into its protocol and the argument that `ginnel load` takes for it: an HTTP URL, or the
    /// host and port of another server.
    ///
    /// # Errors
    /// The scheme is not known, the host is missing, or a server that has no paths is given one.
    pub fn split(text: &str) -> Result<(Self, &str), String> {
        let scheme_and_rest = split_scheme(text).and_then(|(scheme, rest)| {
            let known = [Self::Redis, Self::Memcached];
            Some((known.into_iter().find(|known| scheme.eq_ignore_ascii_case(known.name()))?, rest))
        });
        let Some((scheme, rest)) = scheme_and_rest else {
            return text.parse::<Url>().map(|_| (Self::Http, text));
        };
        let server = rest.strip_suffix('/').unwrap_or(rest);
        if server.contains(['/', '?']) {
            let (host, _) = server.split_once(['/', '?']).unwrap_or_default();
            return Err(format!("a {0} server has no paths: write it as {0}://{host}", scheme.name()));
        }
        // Host and port have the form that they have in an HTTP URL.
        let example = format!("{}://10.0.0.1", scheme.name());
        server.parse::<Url>().map_err(|problem| problem.replace("http://10.0.0.1:8080/", &example))?;
        Ok((scheme, server))
    }

    /// Returns the host and port of a server with this protocol, which is given as a URL or as HOST or
    /// HOST:PORT.
    ///
    /// # Errors
    /// The errors of [`UrlScheme::split`]; or the URL has another scheme.
    pub fn server(self, text: &str) -> Result<String, String> {
        match split_scheme(text) {
            None => Ok(text.into()),
            Some((scheme, _)) if !scheme.eq_ignore_ascii_case(self.name()) => {
                Err(format!("the scheme \"{scheme}\" is not supported: use {}", self.name()))
            }
            Some(_) => Self::split(text).map(|(_, server)| server.into()),
        }
    }
}

/// Splits a URL into its scheme and the rest. Without a scheme, a path or query may contain `://`, too.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    text.split_once("://").filter(|(scheme, _)| !scheme.contains(['/', '?']))
}

fn check_path(path: &str) -> Result<(), String> {
    if path.starts_with('/') && path.bytes().all(|b| b.is_ascii_graphic() && b != b'#') {
        return Ok(());
    }
    Err(format!(
        "\"{path}\" is not a path: it must begin with a slash and have no spaces, fragments or non-ASCII characters"
    ))
}

/// Parses a list of paths: one per line, optionally followed by a weight (default 1). Empty lines and lines
/// that begin with # are skipped.
///
/// # Errors
/// A line is malformed (the text names its number), or all weights are 0.
pub fn parse_list(text: &str) -> Result<Vec<(String, u32)>, String> {
    let mut list = Vec::new();
    for (number, line) in
        text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#'))
    {
        let problem = |problem: String| format!("line {}: {problem}", number + 1);
        let mut words = line.split_whitespace();
        let path = words.next().unwrap_or_default();
        check_path(path).map_err(problem)?;
        let weight = match words.next() {
            Some(word) => word.parse().map_err(|_| problem(format!("\"{word}\" is not a weight")))?,
            None => 1,
        };
        if words.next().is_some() {
            return Err(problem("has more fields than a path and a weight".to_owned()));
        }
        list.push((path.to_owned(), weight));
    }
    if list.iter().all(|(_, weight)| *weight == 0) {
        return Err("has no path with a weight above 0".to_owned());
    }
    Ok(list)
}

/// Options for writing requests.
#[derive(Clone, Debug, Default)]
pub struct RequestStyle {
    /// HEAD instead of GET.
    pub head: bool,
    /// Ask the server to close the connection after the response.
    pub close: bool,
    /// Additional header fields, each as `Name: value`.
    pub fields: Vec<String>,
}

/// All requests of a run, ready to be sent.
#[derive(Clone, Debug)]
pub struct Requests {
    bytes: Vec<u8>,
    /// Offset at which each request begins; the last entry is the end of the last request.
    starts: Vec<u32>,
    alias: Alias,
    protocol: Protocol,
    /// Index of the request that each connection begins with, if there is one.
    opening: Option<u32>,
}

impl Requests {
    /// Writes the requests for `paths` (with weights) to the server `authority`.
    ///
    /// # Errors
    /// A header field is malformed, or the requests take more than 4 GiB.
    pub fn new(authority: &str, paths: &[(String, u32)], style: &RequestStyle) -> Result<Self, String> {
        let mut fields = String::new();
        let mut host = format!("Host: {authority}\r\n");
        for field in &style.fields {
            let (name, _) =
                field.split_once(':').ok_or_else(|| format!("\"{field}\" is not a header field"))?;
            if name.is_empty() || !field.bytes().all(|b| matches!(b, b'\t' | b' '..=b'~' | 0x80..)) {
                return Err(format!("\"{field}\" is not a header field"));
            }
            if name.eq_ignore_ascii_case("host") {
                host.clear();
            }
            fields += field;
            fields += "\r\n";
        }
        let connection = if style.close { "Connection: close\r\n" } else { "" };
        let method = if style.head { "HEAD" } else { "GET" };
        let (mut bytes, mut starts) = (Vec::new(), vec![0]);
        for (path, _) in paths {
            bytes.extend_from_slice(
                format!("{method} {path} HTTP/1.1\r\n{host}User-Agent: ginnel\r\n{connection}{fields}\r\n")
                    .as_bytes(),
            );
            starts.push(
                u32::try_from(bytes.len()).map_err(|_| "the requests take more than 4 GiB".to_owned())?,
            );
        }
        let weights: Vec<u32> = paths.iter().map(|(_, weight)| *weight).collect();
        let protocol = Protocol::Http { head: style.head };
        Ok(Self { bytes, starts, alias: Alias::new(&weights), protocol, opening: None })
    }

    /// Creates the requests for a value: `opening` is sent once per connection, before the repeated request.
    pub fn of_values(protocol: Protocol, get: &[u8], opening: Option<&[u8]>) -> Self {
        let mut bytes = get.to_vec();
        let mut starts = vec![0, get.len() as u32];
        if let Some(opening) = opening {
            bytes.extend_from_slice(opening);
            // Values are limited to one megabyte.
            starts.push(bytes.len() as u32);
        }
        let opening = opening.map(|_| 1);
        Self { bytes, starts, alias: Alias::new(&[1]), protocol, opening }
    }

    /// Returns the index of the request that each connection begins with, if there is one. It is never chosen
    /// and not counted.
    pub const fn opening(&self) -> Option<u32> {
        self.opening
    }

    /// Chooses a request.
    pub fn choose(&self, rng: &mut Random) -> u32 {
        self.alias.choose(rng)
    }

    /// Returns the bytes of a request.
    pub fn get(&self, request: u32) -> &[u8] {
        let i = request as usize;
        &self.bytes[self.starts[i] as usize..self.starts[i + 1] as usize]
    }

    /// Returns the protocol of the responses.
    pub const fn protocol(&self) -> Protocol {
        self.protocol
    }
}

/// A weighted choice in constant time (Walker's alias method, in Vose's construction): each column is split
/// between at most two items.
#[derive(Clone, Debug)]
struct Alias {
    /// (Share of the column that belongs to its own item, in units of 2^-32; the other item.)
    columns: Vec<(u32, u32)>,
}

impl Alias {
    /// Creates the table. At least one of `weights` must be above 0.
    fn new(weights: &[u32]) -> Self {
        let total: u64 = weights.iter().map(|w| u64::from(*w)).sum();
        let count = weights.len();
        // The weights are scaled so that their mean is `total`. The arithmetic is exact, so no rounding
        // errors accumulate.
        let mut scaled: Vec<u128> = weights.iter().map(|w| u128::from(*w) * count as u128).collect();
        let mut columns: Vec<(u32, u32)> = (0..count as u32).map(|i| (u32::MAX, i)).collect();
        let is_small = |scaled: &[u128], i: &usize| scaled[*i] < u128::from(total);
        let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..count).partition(|i| is_small(&scaled, i));
        while let (Some(s), Some(&l)) = (small.pop(), large.last()) {
            let share = (scaled[s] << 32) / u128::from(total);
            columns[s] = (share as u32, l as u32);
            scaled[l] -= u128::from(total) - scaled[s];
            if is_small(&scaled, &l) {
                large.pop();
                small.push(l);
            }
        }
        Self { columns }
    }

    fn choose(&self, rng: &mut Random) -> u32 {
        if self.columns.len() == 1 {
            return 0;
        }
        let random = rng.next_u64();
        let column = (((random >> 32) * self.columns.len() as u64) >> 32) as usize;
        let (share, other) = self.columns[column];
        if (random as u32) < share { column as u32 } else { other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed() {
        let table = [
            ("http://10.0.0.1", "10.0.0.1", "10.0.0.1:80", "/"),
            ("HTTP://10.0.0.1:8080/a?b", "10.0.0.1:8080", "10.0.0.1:8080", "/a?b"),
            ("10.0.0.1:8080/a", "10.0.0.1:8080", "10.0.0.1:8080", "/a"),
            ("http://[fd00::1]/x", "[fd00::1]", "[fd00::1]:80", "/x"),
            ("http://[fd00::1]:81?q", "[fd00::1]:81", "[fd00::1]:81", "/?q"),
            ("10.0.0.1:81/a?u=http://b/", "10.0.0.1:81", "10.0.0.1:81", "/a?u=http://b/"),
            ("10.0.0.1?ftp://b", "10.0.0.1", "10.0.0.1:80", "/?ftp://b"),
        ];
        for (text, authority, address, path) in table {
            let url: Url = text.parse().unwrap();
            assert_eq!((url.authority.as_str(), url.path.as_str()), (authority, path));
            assert_eq!(url.resolve().unwrap(), address.parse().unwrap());
        }
        for bad in [
            "",
            "http://",
            "https://a/",
            "http://a:x/",
            "http://a:0/",
            "http://u@a/",
            "http://a/#f",
            "http://a/ b",
        ] {
            assert!(bad.parse::<Url>().is_err(), "{bad}");
        }
        for port in ["0", "x", "65536", ""] {
            let problem = format!("http://a:{port}/").parse::<Url>();
            assert_eq!(problem, Err(format!("\"{port}\" is not a port")));
        }
    }

    #[test]
    fn schemes_name_the_protocol() {
        for (text, scheme, argument) in [
            ("http://10.0.0.1/a", UrlScheme::Http, "http://10.0.0.1/a"),
            ("10.0.0.1:81", UrlScheme::Http, "10.0.0.1:81"),
            ("a/?u=redis://b", UrlScheme::Http, "a/?u=redis://b"),
            ("redis://10.0.0.1", UrlScheme::Redis, "10.0.0.1"),
            ("REDIS://10.0.0.1:99/", UrlScheme::Redis, "10.0.0.1:99"),
            ("memcached://[fd00::1]:99", UrlScheme::Memcached, "[fd00::1]:99"),
        ] {
            assert_eq!(UrlScheme::split(text), Ok((scheme, argument)), "{text}");
            if scheme != UrlScheme::Http {
                assert_eq!(scheme.server(text), Ok(argument.into()));
                assert_eq!(scheme.server(argument), Ok(argument.into()));
            }
        }
        for (text, expected) in [
            ("redis://", "has no host: write it as redis://10.0.0.1"),
            ("redis://10.0.0.1/0", "a redis server has no paths: write it as redis://10.0.0.1"),
            ("redis://10.0.0.1:x", "\"x\" is not a port"),
            ("redis://10.0.0.1:0", "\"0\" is not a port"),
            ("memcached://10.0.0.1", "the scheme \"memcached\" is not supported: use redis"),
            ("http://10.0.0.1", "the scheme \"http\" is not supported: use redis"),
        ] {
            assert_eq!(UrlScheme::Redis.server(text), Err(expected.into()), "{text}");
        }
        let missing = "has no host: write it as memcached://10.0.0.1";
        assert_eq!(UrlScheme::Memcached.server("memcached://"), Err(missing.into()));
    }

    #[test]
    fn url_lists_are_parsed() {
        let list = parse_list("# c\n/a 3\n\n/b\n/c?d 0\n").unwrap();
        assert_eq!(list, [("/a".to_owned(), 3), ("/b".to_owned(), 1), ("/c?d".to_owned(), 0)]);
        for (bad, line) in
            [("/a\nb", "line 2"), ("/a x", "line 1"), ("/a 1 2", "line 1"), ("/a 0", ""), ("", "")]
        {
            assert!(parse_list(bad).unwrap_err().contains(line), "{bad:?}");
        }
    }

    #[test]
    fn requests_have_the_requested_form() {
        let paths = [("/a".to_owned(), 1), ("/b".to_owned(), 1)];
        let style = RequestStyle { head: false, close: true, fields: vec!["X: y".to_owned()] };
        let requests = Requests::new("h:1", &paths, &style).unwrap();
        assert_eq!(
            requests.get(1),
            b"GET /b HTTP/1.1\r\nHost: h:1\r\nUser-Agent: ginnel\r\nConnection: close\r\nX: y\r\n\r\n"
        );
        let style = RequestStyle { head: true, close: false, fields: vec!["hOst: z".to_owned()] };
        let requests = Requests::new("h:1", &paths, &style).unwrap();
        assert_eq!(requests.get(0), b"HEAD /a HTTP/1.1\r\nUser-Agent: ginnel\r\nhOst: z\r\n\r\n");
        for bad in ["X", ": y", "X: a\r\nY: b"] {
            let style = RequestStyle { fields: vec![bad.to_owned()], ..RequestStyle::default() };
            assert!(Requests::new("h", &paths, &style).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn requests_are_chosen_by_weight() {
        let weights = [0, 1, 2, 3, 94, 0, 400];
        let alias = Alias::new(&weights);
        let (mut rng, mut counts) = (Random::new(1), [0u32; 7]);
        for _ in 0..500_000 {
            counts[alias.choose(&mut rng) as usize] += 1;
        }
        for (weight, count) in weights.iter().zip(counts) {
            let expected = f64::from(weight * 1000);
            assert!(
                (f64::from(count) - expected).abs() <= expected * 0.05 + 100.0 * f64::from(*weight.min(&1)),
                "{counts:?}"
            );
        }
    }
}
