//! Parses socket calls: `setsockopt(4, SOL_TCP, TCP_NODELAY, [1], 4) = 0`.

use crate::script::calls::{Call, ExpectedReturn, Fd, Op, OptionValue, PollEntry};
use crate::script::names::{Errno, MsgFlags, PollEvents, ShutdownHow, SockOpt, SocketIoctl};
use crate::script::scanner::{ParseResult, Scanner};

/// Parses a call and its expected result.
pub fn parse(s: &mut Scanner<'_>) -> ParseResult<Call> {
    let name = s.identifier()?;
    s.expect("(")?;
    let (op, arguments) = operation(s, name)?;
    s.expect(")")?;
    s.expect("=")?;
    Ok(Call { op, text: format!("{name}({arguments})"), expect: expect(s)? })
}

/// Parses `0`, `-1 EAGAIN (comment)` or `*`.
fn expect(s: &mut Scanner<'_>) -> ParseResult<ExpectedReturn> {
    if s.take("*") {
        return Ok(ExpectedReturn { value: None, errno: None });
    }
    let negative = s.take("-");
    let value = i64::from(s.number_as::<u32>()?);
    let value = Some(if negative { -value } else { value });
    let mut errno = None;
    if negative {
        let name = s.identifier()?;
        errno = Errno::from_name(name);
        if errno.is_none() {
            return s.error(format!("unknown error `{name}`"));
        }
        if s.take("(") {
            s.take_until(")")?;
        }
    }
    Ok(ExpectedReturn { value, errno })
}

/// Parses the arguments of `name`. Returns the call, and the arguments as normalized text.
fn operation(s: &mut Scanner<'_>, name: &str) -> ParseResult<(Op, String)> {
    if name == "socket" {
        skip_arguments(s)?;
        return Ok((Op::Socket, "...".into()));
    }
    if name == "poll" {
        return poll(s);
    }
    let fd: Fd = s.number_as()?;
    Ok(match name {
        "bind" => {
            s.expect(",")?;
            let port = port(s)?;
            skip_arguments(s)?;
            let text = port.map_or("...".into(), |p| format!("{{port={p}}}"));
            (Op::Bind { fd, port }, format!("{fd}, {text}, ..."))
        }
        "listen" => {
            s.expect(",")?;
            let backlog = s.number_as()?;
            (Op::Listen { fd, backlog }, format!("{fd}, {backlog}"))
        }
        "accept" | "connect" => {
            s.expect(",")?;
            if name == "connect" && s.take_word("AF_UNSPEC") {
                skip_arguments(s)?;
                return Ok((Op::Disconnect { fd }, format!("{fd}, AF_UNSPEC, ...")));
            }
            skip_arguments(s)?;
            let op = if name == "accept" { Op::Accept { fd } } else { Op::Connect { fd } };
            (op, format!("{fd}, ..., ..."))
        }
        "read" | "recv" | "write" | "send" | "sendto" => transfer(s, name, fd)?,
        "sendmsg" => send_message(s, fd)?,
        "close" => (Op::Close { fd }, fd.to_string()),
        "shutdown" => {
            s.expect(",")?;
            let (how, text) = match s.identifier()? {
                "SHUT_RD" => (ShutdownHow::Read, "SHUT_RD"),
                "SHUT_WR" => (ShutdownHow::Write, "SHUT_WR"),
                "SHUT_RDWR" => (ShutdownHow::Both, "SHUT_RDWR"),
                other => return s.error(format!("unknown direction `{other}`")),
            };
            (Op::Shutdown { fd, how }, format!("{fd}, {text}"))
        }
        "setsockopt" => set_option(s, fd)?,
        "getsockopt" => {
            let option = option_name(s)?;
            s.expect(",")?;
            let expected = bracketed(s)?;
            skip_arguments(s)?;
            (
                Op::GetOption { fd, option, expected: expected.into() },
                format!("{fd}, {}, {}", option.level, option.name),
            )
        }
        "fcntl" => {
            let arguments = skip_arguments(s)?;
            (Op::Fcntl { fd }, format!("{fd}{arguments}"))
        }
        "ioctl" => {
            s.expect(",")?;
            let request = s.identifier()?;
            let Some(query) = SocketIoctl::from_name(request) else {
                return s.error(format!("unknown request `{request}`"));
            };
            s.expect(",")?;
            let expected = bracketed(s)?;
            (Op::Ioctl { fd, query, expected: expected.into() }, format!("{fd}, {request}"))
        }
        _ => return s.error(format!("unknown call `{name}`")),
    })
}

/// Skips arguments that the runner provides, up to the closing parenthesis. Returns their text.
fn skip_arguments<'a>(s: &mut Scanner<'a>) -> ParseResult<&'a str> {
    Ok(s.take_while(|c| c != ')' && c != '\n').trim_end())
}

fn port(s: &mut Scanner<'_>) -> ParseResult<Option<u16>> {
    if !s.take("{") {
        return Ok(None);
    }
    s.expect("port")?;
    s.expect("=")?;
    let port = s.number_as()?;
    s.expect("}")?;
    Ok(Some(port))
}

fn transfer(s: &mut Scanner<'_>, name: &str, fd: Fd) -> ParseResult<(Op, String)> {
    s.expect(",")?;
    s.expect("...")?;
    s.expect(",")?;
    let len = s.number_as()?;
    let mut flags = MsgFlags::default();
    let mut text = format!("{fd}, ..., {len}");
    if matches!(name, "recv" | "send" | "sendto") {
        s.expect(",")?;
        let (value, names) = alternatives(s, |n| MsgFlags::from_name(n).map(i64::from))?;
        flags = MsgFlags(value as i32);
        text = format!("{text}, {names}");
    }
    let op = match name {
        "read" | "recv" => Op::Receive { fd, len, flags },
        "sendto" => {
            skip_arguments(s)?;
            text.push_str(", ..., ...");
            Op::SendTo { fd, len, flags }
        }
        _ => Op::Send { fd, len, flags },
    };
    Ok((op, text))
}

/// Parses `{msg_iov=[40, 20]}, flags`.
fn send_message(s: &mut Scanner<'_>, fd: Fd) -> ParseResult<(Op, String)> {
    for text in [",", "{", "msg_iov", "=", "["] {
        s.expect(text)?;
    }
    let mut parts = Vec::new();
    while s.at_digit() {
        parts.push(s.number_as()?);
        s.take(",");
    }
    for text in ["]", "}", ","] {
        s.expect(text)?;
    }
    let (flags, names) = alternatives(s, |n| MsgFlags::from_name(n).map(i64::from))?;
    let text = format!("{fd}, {{msg_iov={parts:?}}}, {names}");
    Ok((Op::SendMessage { fd, parts, flags: MsgFlags(flags as i32) }, text))
}

/// Parses `A|B` or a plain `0`. Returns the value and the text.
fn alternatives(s: &mut Scanner<'_>, lookup: impl Fn(&str) -> Option<i64>) -> ParseResult<(i64, String)> {
    if s.at_digit() {
        let value = s.number_as::<u16>()?;
        return if value == 0 { Ok((0, "0".into())) } else { s.error("write flags by name") };
    }
    let (mut value, mut text) = (0, String::new());
    loop {
        let name = s.identifier()?;
        let Some(bit) = lookup(name) else { return s.error(format!("unknown flag `{name}`")) };
        value |= bit;
        text.push_str(name);
        if !s.take("|") {
            return Ok((value, text));
        }
        text.push('|');
    }
}

fn option_name(s: &mut Scanner<'_>) -> ParseResult<SockOpt> {
    s.expect(",")?;
    let level = s.identifier()?;
    s.expect(",")?;
    let name = s.identifier()?;
    match SockOpt::from_names(level, name) {
        Some(option) => Ok(option),
        None => s.error(format!("unknown option {level}, {name}")),
    }
}

fn set_option(s: &mut Scanner<'_>, fd: Fd) -> ParseResult<(Op, String)> {
    let option = option_name(s)?;
    s.expect(",")?;
    let value = if s.take("{") {
        s.expect("onoff")?;
        s.expect("=")?;
        let on = s.number_as()?;
        s.expect(",")?;
        s.expect("linger")?;
        s.expect("=")?;
        let seconds = s.number_as()?;
        s.expect("}")?;
        OptionValue::Linger { on, seconds }
    } else if s.take("\"") {
        OptionValue::Text(s.take_until("\"")?.to_string())
    } else {
        OptionValue::Int(bracketed(s)?)
    };
    skip_arguments(s)?;
    let text = format!("{fd}, {}, {}, {value:?}", option.level, option.name);
    Ok((Op::SetOption { fd, option, value }, text))
}

/// Parses `[5]`, `[-1]` or `[ECONNRESET]`.
fn bracketed(s: &mut Scanner<'_>) -> ParseResult<i32> {
    s.expect("[")?;
    let negative = s.take("-");
    let value = if s.at_digit() {
        s.number_as::<i32>()?
    } else {
        let name = s.identifier()?;
        match Errno::from_name(name) {
            Some(errno) => errno.0,
            None => return s.error(format!("unknown constant `{name}`")),
        }
    };
    s.expect("]")?;
    Ok(if negative { -value } else { value })
}

/// Parses `[{fd=4, events=POLLIN, revents=0}], 1, 100`.
fn poll(s: &mut Scanner<'_>) -> ParseResult<(Op, String)> {
    s.expect("[")?;
    let mut entries = Vec::new();
    loop {
        s.expect("{")?;
        s.expect("fd")?;
        s.expect("=")?;
        let fd = s.number_as()?;
        let mut events = [PollEvents(0); 2];
        for (events, name) in events.iter_mut().zip(["events", "revents"]) {
            s.expect(",")?;
            s.expect(name)?;
            s.expect("=")?;
            events.0 = alternatives(s, |n| PollEvents::from_name(n).map(i64::from))?.0 as i16;
        }
        s.expect("}")?;
        entries.push(PollEntry { fd, events: events[0], revents: events[1] });
        if !s.take(",") {
            break;
        }
    }
    s.expect("]")?;
    s.expect(",")?;
    let count: usize = s.number_as()?;
    if count != entries.len() {
        return s.error("the number of entries differs from the list");
    }
    s.expect(",")?;
    let negative = s.take("-");
    let timeout: i32 = s.number_as()?;
    let timeout_ms = if negative { -timeout } else { timeout };
    let text = entries.iter().map(|e| format!("fd {} {}", e.fd, e.events)).collect::<Vec<_>>().join(", ");
    Ok((Op::Poll { entries, timeout_ms }, format!("{text}, {timeout_ms} ms")))
}
