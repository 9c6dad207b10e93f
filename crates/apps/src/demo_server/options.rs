//! Options of `ginnel demo-server`. The short ones are those of Fastsocket's demo server.

use core::net::SocketAddr;
use std::path::PathBuf;

/// Options of the server.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoServerOptions {
    /// Number of workers, 1 to 64. Each is a thread that serves a part of the connections: a shard of
    /// Ginnel's stack, or a thread with listeners of its own (SO_REUSEPORT) on the kernel. Default: 1, or
    /// shards.count of --config.
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: Option<u32>,

    /// Pin the workers to CPUs: the first one to this CPU, the others to the CPUs after it.
    #[arg(short = 'c', long, value_name = "CPU", value_parser = clap::value_parser!(u32).range(0..=1023))]
    pub first_core: Option<u32>,

    /// Address and port to listen on. May be given several times. Default: 0.0.0.0:80.
    #[arg(short = 'a', long, value_name = "ADDRESS:PORT")]
    pub listen: Vec<SocketAddr>,

    /// Relay requests to this server (a proxy). May be given several times: each worker distributes its
    /// clients over the backends in turn.
    #[arg(short = 'x', long, value_name = "ADDRESS:PORT")]
    pub backend: Vec<SocketAddr>,

    /// Write the lines of each second and of --debug to this file instead of standard output. An existing
    /// file is replaced.
    #[arg(short = 'o', long, value_name = "FILE")]
    pub log: Option<PathBuf>,

    /// Keep connections open after a response, to clients and to backends. Without it, every connection ends
    /// after one response.
    #[arg(short, long)]
    pub keepalive: bool,

    /// Add the requests of each worker, connections and errors to the line of each second.
    #[arg(short, long)]
    pub verbose: bool,

    /// Print a line for each connection that is accepted, opened, refused or closed.
    #[arg(short, long)]
    pub debug: bool,
}

impl DemoServerOptions {
    /// Returns the addresses to listen on.
    pub fn listen(&self) -> Vec<SocketAddr> {
        match &self.listen[..] {
            [] => vec![SocketAddr::new(core::net::Ipv4Addr::UNSPECIFIED.into(), 80)],
            given => given.to_vec(),
        }
    }

    /// Returns the CPU of a worker, if workers are pinned.
    pub fn cpu(&self, worker: usize) -> Option<u32> {
        self.first_core.map(|first| first + worker as u32)
    }

    /// Checks what the parser does not: no address to listen on is given twice or has port 0, and the
    /// backends can be connected to.
    ///
    /// # Errors
    /// Returns a sentence that names the option and the address.
    pub fn validate(&self) -> Result<(), String> {
        for (at, address) in self.listen.iter().enumerate() {
            if self.listen[..at].contains(address) {
                return Err(format!("--listen {address} is given twice: remove one of them"));
            }
            if address.port() == 0 {
                return Err(format!("--listen {address}: port 0 names no port, use 1 to 65535"));
            }
        }
        match self.backend.iter().find(|backend| backend.port() == 0 || backend.ip().is_unspecified()) {
            Some(backend) => Err(format!(
                "--backend {backend} is not the address of a server: use one that can be connected to"
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DemoServerOptions;
    use clap::Parser;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        options: DemoServerOptions,
    }

    fn parse(line: &str) -> Result<DemoServerOptions, String> {
        let words = core::iter::once("demo-server").chain(line.split_whitespace());
        let options = Arguments::try_parse_from(words).map_err(|e| e.to_string())?.options;
        options.validate().map(|()| options)
    }

    #[test]
    fn fastsocket_flags_are_accepted() {
        let line = "-w 4 -c 2 -a 10.0.0.1:80 -a [fd00::1]:81 -x 10.0.1.1:80 -x 10.0.1.2:80 -o log -k -v -d";
        let options = parse(line).unwrap();
        assert_eq!((options.workers, options.cpu(0), options.cpu(3)), (Some(4), Some(2), Some(5)));
        assert_eq!((options.listen().len(), options.backend.len()), (2, 2));
        assert!(options.keepalive && options.verbose && options.debug);
        assert_eq!(options.log.unwrap().to_str(), Some("log"));
        let default = parse("").unwrap();
        assert_eq!((default.workers, default.cpu(0)), (None, None));
        assert_eq!(default.listen(), ["0.0.0.0:80".parse().unwrap()]);
    }

    #[test]
    fn wrong_options_are_named() {
        for (line, problem) in [
            ("-w 0", "0 is not in 1..=64"),
            ("-w 65", "65 is not in 1..=64"),
            ("-c 1024", "1024 is not in 0..=1023"),
            ("-a 10.0.0.1", "'10.0.0.1' for '--listen <ADDRESS:PORT>'"),
            ("-a 10.0.0.1:80 -a 10.0.0.1:80", "--listen 10.0.0.1:80 is given twice"),
            ("-a 10.0.0.1:0", "--listen 10.0.0.1:0: port 0 names no port"),
            ("-x 0.0.0.0:80", "--backend 0.0.0.0:80 is not the address of a server"),
            ("-x [::1]:0", "--backend [::1]:0 is not the address of a server"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(problem), "{line}: {error}");
        }
    }
}
