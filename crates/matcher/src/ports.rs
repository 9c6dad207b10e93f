//! Sets of ports.

use core::fmt;
use core::str::FromStr;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// A set of ports: `80`, `8000-8010`, or several of these separated by commas. A configuration file may also
/// have a number, or a list of numbers and texts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ports(Vec<(u16, u16)>);

impl Ports {
    /// Returns whether the set has the port.
    #[must_use]
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }

    /// Adds the ports of a text.
    fn add(&mut self, text: &str) -> Result<(), String> {
        for part in text.split(',').map(str::trim) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.trim().parse(), last.trim().parse()) {
                (Ok(first), Ok(last)) if first <= last => self.0.push((first, last)),
                _ => {
                    return Err(format!(
                        "\"{part}\" is not a port or an ascending range of ports, as in 80 or 8000-8010"
                    ));
                }
            }
        }
        Ok(())
    }
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut ports = Self(Vec::new());
        ports.add(text)?;
        Ok(ports)
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (first, last)) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "," })?;
            write!(f, "{first}")?;
            if first != last {
                write!(f, "-{last}")?;
            }
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PortsVisitor)
    }
}

struct PortsVisitor;

impl<'de> Visitor<'de> for PortsVisitor {
    type Value = Ports;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a port, a text such as \"80,8000-8010\", or a list of these")
    }

    fn visit_i64<E: de::Error>(self, port: i64) -> Result<Ports, E> {
        match u16::try_from(port) {
            Ok(port) => Ok(Ports(vec![(port, port)])),
            Err(_) => Err(E::custom(format!("{port} is outside 0 to 65535"))),
        }
    }

    fn visit_u64<E: de::Error>(self, port: u64) -> Result<Ports, E> {
        self.visit_i64(i64::try_from(port).unwrap_or(i64::MAX))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Ports, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Ports, A::Error> {
        let mut ports = Ports(Vec::new());
        while let Some(Ports(item)) = items.next_element()? {
            ports.0.extend(item);
        }
        if ports.0.is_empty() {
            return Err(de::Error::custom("is empty"));
        }
        Ok(ports)
    }
}

#[cfg(test)]
mod tests {
    use super::Ports;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct File {
        ports: Ports,
    }

    fn file(value: &str) -> Result<String, String> {
        let file: Result<File, _> = toml::from_str(&format!("ports = {value}"));
        file.map(|file| file.ports.to_string()).map_err(|e| e.message().to_string())
    }

    #[test]
    fn number_text_and_list_are_sets_of_ports() {
        for (value, set) in [
            ("80", "80"),
            ("\"80\"", "80"),
            ("\"80, 8000-8010\"", "80,8000-8010"),
            ("[80, \"443\", \"1-3,5\"]", "80,443,1-3,5"),
            ("\"0-65535\"", "0-65535"),
        ] {
            assert_eq!(file(value).as_deref(), Ok(set));
        }
        let ports: Ports = "80,8000-8010".parse().unwrap();
        let members = [79, 80, 81, 7999, 8000, 8005, 8010, 8011].map(|port| ports.contains(port));
        assert_eq!(members, [false, true, false, false, true, true, true, false]);
    }

    #[test]
    fn anything_else_is_refused() {
        let malformed =
            |text| format!("\"{text}\" is not a port or an ascending range of ports, as in 80 or 8000-8010");
        for (value, problem) in [
            ("65536", "65536 is outside 0 to 65535".to_string()),
            ("-1", "-1 is outside 0 to 65535".to_string()),
            ("[]", "is empty".to_string()),
            ("\"\"", malformed("")),
            ("\"80,\"", malformed("")),
            ("\"http\"", malformed("http")),
            ("\"9-8\"", malformed("9-8")),
            ("\"65536\"", malformed("65536")),
            ("[80, \"x\"]", malformed("x")),
        ] {
            assert_eq!(file(value), Err(problem));
        }
        assert!(file("true").unwrap_err().contains("expected a port, a text such as"));
    }
}
