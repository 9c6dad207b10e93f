//! Which protocol is spoken on which ports, from the command line or from a TOML file.

use crate::framing::Protocol;
use ginnel_apps::iot::message::HEAD_BYTES;
use serde::Deserialize;

/// Most rules: a connection has a byte for the number of its rule.
pub const RULES_MAX: usize = 255;
/// Length of a message of `ginnel iot` unless stated otherwise, in bytes.
pub const IOT_MESSAGE_BYTES: u32 = 200;
/// Furthest place of a length or a label in a message, in bytes.
const OFFSET_BYTES_MAX: u32 = 4096;

/// A rule: the protocol of some server ports.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct PortRule {
    /// Ports of the servers.
    pub ports: Vec<u16>,
    /// The protocol.
    pub protocol: ProtocolName,
    /// Length of the messages of `iot` in bytes.
    #[serde(default = "default_message_bytes")]
    pub message_bytes: u32,
    /// Form of the requests of `length-prefixed`.
    pub request: Option<LengthPrefix>,
    /// Form of the responses of `length-prefixed`; the form of the requests if absent.
    pub response: Option<LengthPrefix>,
}

fn default_message_bytes() -> u32 {
    IOT_MESSAGE_BYTES
}

/// Names of the protocols.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum ProtocolName {
    /// The wire format of `ginnel iot`.
    Iot,
    /// HTTP/1.1.
    Http,
    /// RESP.
    Redis,
    /// Messages that begin with their length.
    LengthPrefixed,
}

/// Place and meaning of the length in a message.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct LengthPrefix {
    /// Bytes before the length.
    #[serde(default)]
    pub offset_bytes: u32,
    /// Bytes of the length: 1 to 8.
    pub width_bytes: u8,
    /// Order of the bytes of the length.
    #[serde(default)]
    pub endianness: Endianness,
    /// The length of the message is the number plus this many bytes: those of the prefix, if the number does
    /// not include them.
    #[serde(default)]
    pub added_bytes: i64,
    /// A longer message is a sign that the framing was lost.
    #[serde(default = "default_message_bytes_max")]
    pub message_bytes_max: u64,
    /// A message with this byte has high priority.
    pub high: Option<ByteTest>,
    /// A message with this byte is not answered, or is not an answer.
    pub one_way: Option<ByteTest>,
}

fn default_message_bytes_max() -> u64 {
    16 << 20
}

/// Order of the bytes of a number.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Endianness {
    /// Most significant byte first.
    #[default]
    Big,
    /// Least significant byte first.
    Little,
}

/// A byte of a message.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ByteTest {
    /// Bytes before it.
    pub offset_bytes: u32,
    /// Its value.
    pub value: u8,
}

/// The forms of length-prefixed requests and responses.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LengthPrefixRule {
    pub(crate) request: LengthPrefix,
    pub(crate) response: LengthPrefix,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    rules: Vec<PortRule>,
}

impl PortRule {
    /// Creates a rule for a protocol without parameters, or with the usual ones.
    #[must_use]
    pub fn new(protocol: ProtocolName, ports: Vec<u16>) -> Self {
        Self { ports, protocol, message_bytes: IOT_MESSAGE_BYTES, request: None, response: None }
    }

    /// Parses a file with tables `[[rules]]`.
    ///
    /// # Errors
    /// Names the line and the key.
    pub fn parse_file(text: &str) -> Result<Vec<Self>, String> {
        toml::from_str::<RuleFile>(text)
            .map(|file| file.rules)
            .map_err(|e| e.to_string().trim_end().to_owned())
    }

    fn protocol(&self) -> Result<Protocol, String> {
        let has_prefix = self.request.is_some() || self.response.is_some();
        if has_prefix && self.protocol != ProtocolName::LengthPrefixed {
            return Err("\"request\" and \"response\" need protocol = \"length-prefixed\"".into());
        }
        match self.protocol {
            ProtocolName::Iot if (self.message_bytes as usize) < HEAD_BYTES => Err(format!(
                "message_bytes is {}, but messages have at least {HEAD_BYTES} bytes",
                self.message_bytes
            )),
            ProtocolName::Iot => Ok(Protocol::Iot { message_bytes: self.message_bytes }),
            ProtocolName::Http => Ok(Protocol::Http),
            ProtocolName::Redis => Ok(Protocol::Redis),
            ProtocolName::LengthPrefixed => {
                let request = self.request.ok_or("protocol = \"length-prefixed\" needs \"request\"")?;
                let response = self.response.unwrap_or(request);
                for prefix in [request, response] {
                    prefix.check()?;
                }
                Ok(Protocol::LengthPrefixed(Box::new(LengthPrefixRule { request, response })))
            }
        }
    }
}

impl LengthPrefix {
    fn check(&self) -> Result<(), String> {
        if !(1..=8).contains(&self.width_bytes) {
            return Err(format!("width_bytes is {}, but must be 1 to 8", self.width_bytes));
        }
        let tests = [self.high, self.one_way].into_iter().flatten();
        let furthest = tests.map(|test| test.offset_bytes).fold(self.offset_bytes, u32::max);
        if furthest > OFFSET_BYTES_MAX {
            return Err(format!("offset_bytes is {furthest}, but must be at most {OFFSET_BYTES_MAX}"));
        }
        Ok(())
    }
}

/// The rules, by port.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) protocols: Vec<Protocol>,
    /// For each port the number of its rule plus 1, or 0.
    by_port: Box<[u8]>,
}

impl Rules {
    /// Compiles rules.
    ///
    /// # Errors
    /// Names the rule and its problem.
    pub(crate) fn new(rules: &[PortRule]) -> Result<Self, String> {
        if rules.is_empty() || rules.len() > RULES_MAX {
            return Err(format!("there are {} rules, but must be 1 to {RULES_MAX}", rules.len()));
        }
        let mut by_port = vec![0; 1 << 16].into_boxed_slice();
        let mut protocols = Vec::new();
        for (number, rule) in (1u8..).zip(rules) {
            let name = |problem: String| format!("rule {number}: {problem}");
            protocols.push(rule.protocol().map_err(name)?);
            if rule.ports.is_empty() {
                return Err(name("\"ports\" is empty".into()));
            }
            for port in &rule.ports {
                let known = core::mem::replace(&mut by_port[usize::from(*port)], number);
                if known != 0 && known != number {
                    return Err(name(format!("port {port} belongs to rule {known}, too")));
                }
            }
        }
        Ok(Self { protocols, by_port })
    }

    /// Returns the number of the rule for a port.
    #[inline(always)]
    pub(crate) fn of_port(&self, port: u16) -> Option<u8> {
        self.by_port[usize::from(port)].checked_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_name_ports_and_lengths() {
        let text = r#"
            [[rules]]
            ports = [80, 81]
            protocol = "iot"
            message_bytes = 100

            [[rules]]
            ports = [9000]
            protocol = "length-prefixed"
            request = { width_bytes = 4, endianness = "little", added_bytes = 4, high = { offset_bytes = 4, value = 2 } }
        "#;
        let rules = Rules::new(&PortRule::parse_file(text).unwrap()).unwrap();
        assert_eq!(
            rules.of_port(81).map(|n| &rules.protocols[usize::from(n)]),
            Some(&Protocol::Iot { message_bytes: 100 })
        );
        assert_eq!((rules.of_port(9000), rules.of_port(9001)), (Some(1), None));
        let Protocol::LengthPrefixed(rule) = &rules.protocols[1] else { panic!("{:?}", rules.protocols) };
        assert_eq!(rule.request, rule.response);
    }

    #[test]
    fn unusable_rules_are_named() {
        let problem = |text: &str| match PortRule::parse_file(&format!("[[rules]]\n{text}")) {
            Ok(rules) => Rules::new(&rules).unwrap_err(),
            Err(problem) => problem,
        };
        for (text, expected) in [
            ("ports = []\nprotocol = \"http\"", "rule 1: \"ports\" is empty"),
            ("ports = [1]\nprotocol = \"smtp\"", "unknown variant"),
            ("ports = [70000]\nprotocol = \"http\"", "70000"),
            ("ports = [1]\nprotocol = \"http\"\nport = 1", "unknown field"),
            ("ports = [1]\nprotocol = \"iot\"\nmessage_bytes = 6", "at least 7 bytes"),
            ("ports = [1]\nprotocol = \"length-prefixed\"", "needs \"request\""),
            (
                "ports = [1]\nprotocol = \"length-prefixed\"\nrequest = { width_bytes = 9 }",
                "width_bytes is 9",
            ),
            ("ports = [1]\nprotocol = \"http\"\nrequest = { width_bytes = 1 }", "need protocol"),
            (
                "ports = [1]\nprotocol = \"http\"\n[[rules]]\nports = [1]\nprotocol = \"iot\"",
                "rule 2: port 1 belongs to rule 1",
            ),
        ] {
            let problem = problem(text);
            assert!(problem.contains(expected), "{problem}");
        }
        assert!(Rules::new(&[]).is_err());
    }
}
