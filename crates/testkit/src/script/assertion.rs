//! Assertions on a connection's `tcp_info`: `%{ tcpi_unacked == 3, tcpi_snd_cwnd >= 2 * tcpi_reordering }%`.
//!
//! An assertion is a list of conditions separated by commas. A condition compares two sums with
//! `== != < <= > >=`; conditions combine with `||` and `&&`. Operands are integers, fields of `tcp_info` with
//! or without `tcpi_`, and constants such as `ESTABLISHED`; operators are `+ - * / % &` and parentheses.
//! `%{ 5: … }%` refers to descriptor 5; otherwise the assertion refers to the connection that the script
//! accepted or opened last.

use super::calls::Fd;
use super::names::INFO_CONSTANTS;
use super::scanner::{ParseResult, Scanner};
use std::collections::BTreeMap;

/// Values of a connection's fields by name, with the prefix `tcpi_`, and `MSS`, which the script runner adds.
pub type Info = BTreeMap<&'static str, i64>;

/// A parsed assertion.
#[derive(Clone, Debug)]
pub struct Assertion {
    /// The descriptor of the connection; `None` is the connection that was accepted or opened last.
    pub fd: Option<Fd>,
    /// The conditions, each with its source text.
    pub conditions: Vec<(Expr, String)>,
}

/// An arithmetic or logical expression.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// A constant.
    Number(i64),
    /// The name of a field, with the prefix `tcpi_`, or `MSS`.
    Field(String),
    /// An operator with two operands.
    Binary(Operator, Box<Expr>, Box<Expr>),
}

/// Binary operators, in order of increasing precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// `||`
    Or,
    /// `&&`
    And,
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
    /// `<=`
    LessOrEqual,
    /// `>=`
    GreaterOrEqual,
    /// `<`
    Less,
    /// `>`
    Greater,
    /// `&`
    Mask,
    /// `+`
    Add,
    /// `-`
    Subtract,
    /// `*`
    Multiply,
    /// `/`
    Divide,
    /// `%`
    Remainder,
}

/// Operators by level of precedence. Within a level an operator precedes each operator that is a prefix of
/// it.
const PRECEDENCE: [&[(&str, Operator)]; 6] = [
    &[("||", Operator::Or)],
    &[("&&", Operator::And)],
    &[
        ("==", Operator::Equal),
        ("!=", Operator::NotEqual),
        ("<=", Operator::LessOrEqual),
        (">=", Operator::GreaterOrEqual),
        ("<", Operator::Less),
        (">", Operator::Greater),
    ],
    &[("&", Operator::Mask)],
    &[("+", Operator::Add), ("-", Operator::Subtract)],
    &[("*", Operator::Multiply), ("/", Operator::Divide), ("%", Operator::Remainder)],
];

impl Assertion {
    /// Parses the text between `%{` and `}%`; the scanner is positioned after `%{`.
    pub fn parse(s: &mut Scanner<'_>) -> ParseResult<Self> {
        let line = s.line();
        let text = s.take_until("}%")?;
        let at_line = |mut e: super::scanner::ParseError| {
            e.line += line - 1;
            e
        };
        let mut inner = Scanner::new(text);
        let mut fd = None;
        if let Some((number, _)) = text.split_once(':') {
            fd = number.trim().parse().ok();
            if fd.is_some() {
                inner.take_until(":").map_err(at_line)?;
            }
        }
        let mut conditions = Vec::new();
        let mut texts =
            text.split_once(':').filter(|_| fd.is_some()).map_or(text, |(_, rest)| rest).split(',');
        loop {
            let expr = expression(&mut inner, 0).map_err(at_line)?;
            conditions.push((expr, texts.next().unwrap_or("").trim().to_string()));
            if !inner.take(",") {
                break;
            }
        }
        if !inner.at_end() {
            return inner.expected("`,` or `}%`").map_err(at_line);
        }
        Ok(Self { fd, conditions })
    }
}

fn expression(s: &mut Scanner<'_>, level: usize) -> ParseResult<Expr> {
    let Some(operators) = PRECEDENCE.get(level) else { return operand(s) };
    let mut left = expression(s, level + 1)?;
    'more: loop {
        for (text, operator) in *operators {
            // `&` must not consume half of `&&`.
            let half = *operator == Operator::Mask && s.looking_at("&&");
            if !half && s.take(text) {
                let right = expression(s, level + 1)?;
                left = Expr::Binary(*operator, Box::new(left), Box::new(right));
                continue 'more;
            }
        }
        return Ok(left);
    }
}

fn operand(s: &mut Scanner<'_>) -> ParseResult<Expr> {
    if s.take("(") {
        let inner = expression(s, 0)?;
        s.expect(")")?;
        return Ok(inner);
    }
    if s.take("-") {
        let inner = operand(s)?;
        return Ok(Expr::Binary(Operator::Subtract, Box::new(Expr::Number(0)), Box::new(inner)));
    }
    if s.at_digit() {
        return Ok(Expr::Number(s.number_as::<u32>()?.into()));
    }
    let name = s.identifier()?;
    let name = name.strip_prefix("TCP_").filter(|rest| !rest.starts_with("CA_")).unwrap_or(name);
    if let Some((_, value)) = INFO_CONSTANTS.iter().find(|(n, _)| *n == name) {
        return Ok(Expr::Number(*value));
    }
    if name == "MSS" {
        return Ok(Expr::Field("MSS".into()));
    }
    let field = if name.starts_with("tcpi_") { name.to_string() } else { format!("tcpi_{name}") };
    Ok(Expr::Field(field))
}

impl Expr {
    /// Evaluates the expression with these fields.
    ///
    /// # Errors
    /// A message about an unknown field, an overflow or a division by zero.
    pub fn evaluate(&self, info: &Info) -> Result<i64, String> {
        match self {
            Self::Number(value) => Ok(*value),
            Self::Field(name) => info.get(name.as_str()).copied().ok_or_else(|| format!("no field `{name}`")),
            Self::Binary(operator, left, right) => {
                let (l, r) = (left.evaluate(info)?, right.evaluate(info)?);
                operator.apply(l, r).ok_or_else(|| "arithmetic overflow or division by zero".into())
            }
        }
    }

    /// Appends the names of the fields in the expression to `into`.
    pub fn fields<'a>(&'a self, into: &mut Vec<&'a str>) {
        match self {
            Self::Number(_) => {}
            Self::Field(name) => into.push(name),
            Self::Binary(_, left, right) => {
                left.fields(into);
                right.fields(into);
            }
        }
    }
}

impl Operator {
    fn apply(self, l: i64, r: i64) -> Option<i64> {
        Some(match self {
            Self::Or => (l != 0 || r != 0).into(),
            Self::And => (l != 0 && r != 0).into(),
            Self::Equal => (l == r).into(),
            Self::NotEqual => (l != r).into(),
            Self::LessOrEqual => (l <= r).into(),
            Self::GreaterOrEqual => (l >= r).into(),
            Self::Less => (l < r).into(),
            Self::Greater => (l > r).into(),
            Self::Mask => l & r,
            Self::Add => l.checked_add(r)?,
            Self::Subtract => l.checked_sub(r)?,
            Self::Multiply => l.checked_mul(r)?,
            Self::Divide => l.checked_div(r)?,
            Self::Remainder => l.checked_rem(r)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(text: &str) -> bool {
        let assertion = Assertion::parse(&mut Scanner::new(&format!("{text} }}%"))).unwrap();
        let info = Info::from([("tcpi_unacked", 3), ("tcpi_state", 1), ("tcpi_options", 7)]);
        assertion.conditions.iter().all(|(c, _)| c.evaluate(&info).unwrap() != 0)
    }

    #[test]
    fn conditions_follow_usual_precedence() {
        assert!(holds("unacked == 1 + 2, state == ESTABLISHED"));
        assert!(holds("tcpi_unacked * 2 - 1 == 5"));
        assert!(holds("(unacked == 9 || unacked <= 3) && state == TCP_ESTABLISHED"));
        assert!(holds("(options & TCPI_OPT_SACK) != 0"));
        assert!(!holds("unacked == 3, unacked != 3"));
    }

    #[test]
    fn descriptor_prefix_is_parsed() {
        let assertion = Assertion::parse(&mut Scanner::new(" 5: unacked == 3 }%")).unwrap();
        assert_eq!(assertion.fd, Some(5));
        assert_eq!(assertion.conditions[0].1, "unacked == 3");
    }

    #[test]
    fn unknown_field_is_named_in_the_error() {
        let assertion = Assertion::parse(&mut Scanner::new("nonsense == 3 }%")).unwrap();
        let error = assertion.conditions[0].0.evaluate(&Info::new()).unwrap_err();
        assert!(error.contains("tcpi_nonsense"));
    }

    #[test]
    fn errors_name_the_line() {
        let error = Assertion::parse(&mut Scanner::new("\n\nunacked = 3 }%")).unwrap_err();
        assert_eq!(error.line, 3);
    }
}
