//! The configuration file: any text is either accepted as a valid configuration or rejected with a line and a
//! reason.

use ginnel::config::Config;

/// Longer texts are truncated to this many bytes.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// Runs one input: the text of a file.
///
/// # Panics
/// If an accepted configuration is invalid, or an error lacks its line or its reason.
pub fn run(data: &[u8]) {
    let Ok(text) = core::str::from_utf8(&data[..data.len().min(TEXT_BYTES_MAX)]) else { return };
    match Config::from_toml("fuzz.toml", text) {
        Ok(config) => {
            assert_eq!(config.validate(), Ok(()), "{text}");
        }
        Err(error) => {
            let lines = text.lines().count().max(1);
            assert!((1..=lines + 1).contains(&error.line), "line {} of {lines}: {error}", error.line);
            assert!(!error.problem.is_empty(), "an error without a problem: {error}");
            assert_eq!(error.to_string().lines().count(), 1, "more than one line: {error}");
        }
    }
}

/// Returns the handwritten seed inputs.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let everything = "\
[shard]
cpu = 0
spin_us = 50

[network]
neighbours_max = 1024
icmp_echo = true

[tcp]
connections_max = 1000
congestion_control = \"newreno\"
syn_cookies = \"always\"
ecn = \"active\"
time_wait_seconds = 60

[[device]]
name = \"lan\"
kind = \"tap\"
mtu = 1500
mac = \"02:00:00:00:00:01\"
faults = \"delay=1ms loss=1%\"

[[link]]
name = \"lan0\"
device = \"lan\"
vlan = 5
addresses = [\"10.0.0.1/24\", \"fd00::1/64\"]

[[link.neighbour]]
address = \"10.0.0.9\"
mac = \"02:00:00:00:00:09\"

[[route]]
destination = \"0.0.0.0/0\"
gateway = \"10.0.0.254\"
link = \"lan0\"
";
    let texts = [
        ("empty", ""),
        ("everything", everything),
        ("unknown-key", "[tcp]\nsack = true\ncolour = 1\n"),
        ("out-of-range", "[tcp]\nretries = 200\n"),
        ("wrong-type", "[shard]\nspin_us = \"soon\"\n"),
        ("no-device", "[[link]]\nname = \"a\"\ndevice = \"b\"\naddresses = [\"1.2.3.4/33\"]\n"),
        ("duplicate-key", "[tcp]\nsack = true\nsack = true\n"),
        ("not-toml", "tcp: {sack: yes}"),
    ];
    texts.map(|(name, text)| (name, text.as_bytes().to_vec())).to_vec()
}

#[cfg(test)]
mod tests {
    use super::{Config, seeds};

    /// A seed that is rejected by mistake covers nothing.
    #[test]
    fn only_seeds_of_errors_are_rejected() {
        let is_accepted =
            |data: &[u8]| Config::from_toml("seed.toml", core::str::from_utf8(data).unwrap()).is_ok();
        let accepted: Vec<_> =
            seeds().into_iter().filter(|(_, data)| is_accepted(data)).map(|(name, _)| name).collect();
        assert_eq!(accepted, ["empty", "everything"]);
    }
}
