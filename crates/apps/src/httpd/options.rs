//! Options of `ginnel httpd`.

use super::head::Limits;
use super::limits::{ServerOptions, Timeouts};
use super::site::SiteOptions;
use crate::units::{parse_bytes, parse_duration};
use core::net::SocketAddr;
use core::time::Duration;
use std::path::PathBuf;

/// Options of `ginnel httpd`.
#[derive(Clone, Debug, clap::Args)]
pub struct HttpdOptions {
    /// Directory with the files to serve. It is read once, at start. Symbolic links that lead out of it are
    /// not followed.
    #[arg(value_name = "ROOT")]
    pub root: PathBuf,

    /// Address and port to listen on. An unspecified address (`0.0.0.0` or `[::]`) stands for all addresses
    /// of the stack. May be given several times.
    #[arg(long, value_name = "ADDRESS:PORT", default_values = ["0.0.0.0:80", "[::]:80"])]
    pub listen: Vec<SocketAddr>,

    /// Name of the file that is served for its directory.
    #[arg(long, value_name = "NAME", default_value = "index.html")]
    pub index: String,

    /// Memory for files and their checksums, in bytes. The smallest files are loaded first; the other files
    /// are read from disk when they are requested.
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = parse_bytes)]
    pub memory: u64,

    /// Serve files and directories whose names begin with a dot, too. (.well-known is always served.)
    #[arg(long)]
    pub dotfiles: bool,

    /// Close every connection after one response.
    #[arg(long)]
    pub no_keep_alive: bool,

    /// Longest request line; a longer one is answered with 414.
    #[arg(long, value_name = "BYTES", default_value = "8KiB", value_parser = parse_limit)]
    pub line_max: u64,

    /// Longest head of a request, including the request line; a longer one is answered with 431.
    #[arg(long, value_name = "BYTES", default_value = "16KiB", value_parser = parse_limit)]
    pub head_max: u64,

    /// Longest body of a request, which is read and dropped; a longer one is answered with 413.
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_bytes)]
    pub body_max: u64,

    /// Time for a request's head to arrive, in whole seconds; then 408.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_seconds)]
    pub head_timeout: Seconds,

    /// Time that an open connection may wait for its next request, in whole seconds. A client that still
    /// receives a response is not waiting.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_seconds)]
    pub idle_timeout: Seconds,

    /// Time without receiving a byte of a request's body, in whole seconds; then 408.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_seconds)]
    pub body_timeout: Seconds,

    /// Time without free send buffer for a byte of a response, in whole seconds; then the connection is
    /// reset.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_seconds)]
    pub send_timeout: Seconds,

    /// Time for a client to close after the server closed, in whole seconds.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_seconds)]
    pub linger_timeout: Seconds,
}

/// A timeout in whole seconds, 1 … 86,400.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds(pub u32);

fn parse_seconds(text: &str) -> Result<Seconds, String> {
    let time = parse_duration(text)?;
    let range = Duration::from_secs(1)..=Duration::from_secs(86_400);
    if !range.contains(&time) || time.subsec_nanos() != 0 {
        return Err("must be a whole number of seconds, 1 to 86400".to_owned());
    }
    Ok(Seconds(time.as_secs() as u32))
}

fn parse_limit(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    if (64..=1 << 20).contains(&bytes) { Ok(bytes) } else { Err("must lie between 64 and 1MiB".to_owned()) }
}

impl HttpdOptions {
    /// Returns the options for reading the site.
    pub fn site(&self) -> SiteOptions {
        SiteOptions { index: self.index.clone(), memory_bytes_max: self.memory, dotfiles: self.dotfiles }
    }

    /// Returns the options for serving.
    pub fn server(&self) -> ServerOptions {
        ServerOptions {
            limits: Limits {
                line_bytes_max: self.line_max as usize,
                head_bytes_max: self.head_max as usize,
                body_bytes_max: self.body_max,
            },
            timeouts: Timeouts {
                head: self.head_timeout.0,
                idle: self.idle_timeout.0,
                body: self.body_timeout.0,
                send: self.send_timeout.0,
                linger: self.linger_timeout.0,
            },
            keep_alive: !self.no_keep_alive,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct HttpdCommand {
        #[command(flatten)]
        options: HttpdOptions,
    }

    fn parse(args: &[&str]) -> Result<HttpdOptions, String> {
        HttpdCommand::try_parse_from([&["httpd"], args].concat())
            .map(|c| c.options)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn option_defaults_equal_the_struct_defaults() {
        let options = parse(&["/srv"]).unwrap();
        assert_eq!(options.server().limits, ServerOptions::default().limits);
        assert_eq!(format!("{:?}", options.server()), format!("{:?}", ServerOptions::default()));
        assert_eq!(format!("{:?}", options.site()), format!("{:?}", SiteOptions::default()));
        assert_eq!(options.listen.len(), 2);
    }

    #[test]
    fn invalid_options_are_refused() {
        for args in [
            &["/srv", "--idle-timeout", "0"][..],
            &["/srv", "--idle-timeout", "1.5s"],
            &["/srv", "--head-max", "2MiB"],
            &["/srv", "--listen", "nowhere"],
            &[],
        ] {
            assert!(parse(args).is_err(), "{args:?}");
        }
    }
}
