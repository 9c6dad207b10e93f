//! Parses comment directives: the `// key: value` lines at the head of a script.

use crate::script::ast::{BackendKind, Difference, Directives, IpVersion};
use crate::script::scanner::{ParseError, ParseResult, parse_number};
use core::time::Duration;

const KEYS: &[&str] =
    &["ip", "sysctl", "differs", "only", "tolerance", "mtu", "isn", "payload", "push", "rest", "gso"];

/// Parses all comments before the first event. Returns the summary line and the directives.
pub fn parse(text: &str) -> ParseResult<(String, Directives)> {
    let mut directives = Directives::default();
    let mut summary = String::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        let Some(comment) = line.strip_prefix("//") else {
            if line.is_empty() {
                continue;
            }
            break;
        };
        let comment = comment.trim();
        let directive = comment.split_once(':').map(|(key, value)| (key.trim(), value.trim()));
        match directive {
            Some((key, value)) if KEYS.contains(&key) => {
                directives
                    .set(key, value)
                    .map_err(|message| ParseError { line: index as u32 + 1, message })?;
            }
            _ if summary.is_empty() => summary = comment.to_string(),
            _ => {}
        }
    }
    Ok((summary, directives))
}

impl Directives {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "ip" => {
                self.ip = match value {
                    "v4" => vec![IpVersion::V4],
                    "v6" => vec![IpVersion::V6],
                    "both" => vec![IpVersion::V4, IpVersion::V6],
                    _ => return Err(format!("ip: `{value}` is none of v4, v6, both")),
                }
            }
            "sysctl" => {
                let Some((name, value)) = value.split_once('=') else {
                    return Err("sysctl: expected name=value".into());
                };
                self.sysctls.push((name.trim().into(), value.trim().into()));
            }
            "differs" => self.differs.push(difference(value)?),
            "only" => self.only = Some(difference(value)?),
            "tolerance" => self.tolerance = duration(value)?,
            "mtu" => self.mtu = number(value)?,
            "isn" => self.remote_isn = number(value)?,
            "payload" if value == "any" => self.check_payload = false,
            "payload" => return Err(format!("payload: `{value}` is not `any`")),
            "push" if value == "any" => self.check_push = false,
            "push" => return Err(format!("push: `{value}` is not `any`")),
            "rest" if value == "any" => self.check_rest = false,
            "rest" => return Err(format!("rest: `{value}` is not `any`")),
            "gso" => match u16::try_from(number(value)?) {
                Ok(bytes @ 1..) => self.gso = Some(bytes),
                _ => return Err(format!("gso: `{value}` is not 1 to 65535 bytes")),
            },
            _ => return Err(format!("unknown key `{key}`")),
        }
        Ok(())
    }
}

fn difference(text: &str) -> Result<Difference, String> {
    let (backend, reason) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let backend = match backend {
        "kernel" => BackendKind::Kernel,
        "ginnel" => BackendKind::Ginnel,
        _ => return Err(format!("`{backend}` is neither kernel nor ginnel")),
    };
    let reason = reason.trim();
    if !reason.contains("RFC") {
        return Err("the reason must name the RFC and section that decides".into());
    }
    Ok(Difference { backend, reason: reason.into() })
}

fn duration(text: &str) -> Result<Duration, String> {
    let error = || format!("`{text}` is not a time like 4ms, 500us or 1s");
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(error)?;
    let amount: u64 = text[..split].parse().map_err(|_| error())?;
    match text[split..].trim() {
        "us" => Ok(Duration::from_micros(amount)),
        "ms" => Ok(Duration::from_millis(amount)),
        "s" => Ok(Duration::from_secs(amount)),
        _ => Err(error()),
    }
}

fn number(text: &str) -> Result<u32, String> {
    let value = parse_number(text).and_then(|v| u32::try_from(v).ok());
    value.ok_or_else(|| format!("`{text}` is not a 32-bit number"))
}
