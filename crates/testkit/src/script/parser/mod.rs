//! Parses script files: directives, blocks and times. Submodules parse packets and calls.

mod call;
mod directives;
mod packet;

use super::assertion::Assertion;
use super::ast::{BackendKind, Condition, Event, EventKind, IpVersion, Item, Script, Time};
use super::scanner::{ParseResult, Scanner};
use core::time::Duration;
use std::path::Path;

/// Parses the text of a script; `path` is stored in the result and not opened.
pub fn parse(path: &Path, text: &str) -> ParseResult<Script> {
    let (summary, directives) = directives::parse(text)?;
    let mut scanner = Scanner::new(text);
    let items = items(&mut scanner, 0)?;
    Ok(Script { path: path.to_path_buf(), summary, directives, items })
}

fn items(s: &mut Scanner<'_>, depth: usize) -> ParseResult<Vec<Item>> {
    let mut items = Vec::new();
    loop {
        if depth > 0 && s.take("}") {
            return Ok(items);
        }
        if s.at_end() {
            return if depth == 0 { Ok(items) } else { s.error("a block is not closed") };
        }
        if s.take("@") {
            if depth >= 4 {
                return s.error("blocks are nested too deeply");
            }
            let condition = condition(s)?;
            s.expect("{")?;
            items.push(Item::Block(condition, self::items(s, depth + 1)?));
        } else {
            items.push(Item::Event(event(s)?));
        }
    }
}

fn condition(s: &mut Scanner<'_>) -> ParseResult<Condition> {
    Ok(match s.identifier()? {
        "kernel" => Condition::Backend(BackendKind::Kernel),
        "ginnel" => Condition::Backend(BackendKind::Ginnel),
        "v4" => Condition::Ip(IpVersion::V4),
        "v6" => Condition::Ip(IpVersion::V6),
        other => return s.error(format!("`@{other}`: expected @kernel, @ginnel, @v4 or @v6")),
    })
}

fn event(s: &mut Scanner<'_>) -> ParseResult<Event> {
    let line = {
        s.skip_space();
        s.line()
    };
    let (time, until) =
        if s.looking_at("%{") { (Time::Relative { from: Duration::ZERO, to: None }, None) } else { time(s)? };
    let kind = if s.take("%{") {
        EventKind::Assert(Assertion::parse(s)?)
    } else if s.take("<") {
        EventKind::Inbound(packet::parse(s, packet::Direction::Inbound)?)
    } else if s.take(">") {
        EventKind::Outbound(packet::parse(s, packet::Direction::Outbound)?)
    } else {
        EventKind::Call(call::parse(s)?)
    };
    let outbound = matches!(kind, EventKind::Outbound(_));
    let ranged =
        matches!(time, Time::Any | Time::Relative { to: Some(_), .. } | Time::Absolute { to: Some(_), .. });
    if ranged && !outbound {
        return s.error("`*` and `~` are for outbound packets; a call that blocks takes `start...end`");
    }
    if until.is_some() && !matches!(kind, EventKind::Call(_)) {
        return s.error("`...` is for calls that block; the time range of a packet is `from~to`");
    }
    Ok(Event { line, time, until, kind })
}

/// Parses `+0.1`, `0.1`, `+0.1~+0.2`, `+0...+0.3` or `*`.
fn time(s: &mut Scanner<'_>) -> ParseResult<(Time, Option<Duration>)> {
    if s.take("*") {
        return Ok((Time::Any, None));
    }
    let relative = s.take("+");
    let from = s.seconds()?;
    let end_of = |s: &mut Scanner<'_>| -> ParseResult<Duration> {
        // As in packetdrill, both ends are relative to one origin, whether or not the second has a `+`.
        s.take("+");
        let end = s.seconds()?;
        if end < from { s.error("the range ends before it starts") } else { Ok(end) }
    };
    let (mut to, mut until) = (None, None);
    if s.take_here("...") {
        until = Some(end_of(s)?);
    } else if s.take_here("~") {
        to = Some(end_of(s)?);
    }
    let time = if relative { Time::Relative { from, to } } else { Time::Absolute { from, to } };
    Ok((time, until))
}

#[cfg(test)]
mod tests;
