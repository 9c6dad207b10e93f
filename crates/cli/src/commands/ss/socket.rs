//! A socket, parsed from a line of the stack's answer.

use core::net::SocketAddr;

/// Names of the fields, from the first line of the answer.
pub struct Columns(Vec<String>);

/// The fields that are shown for every socket; the others are looked up by name.
pub struct SocketLine<'a> {
    pub shard: &'a str,
    pub netid: &'a str,
    pub state: &'a str,
    pub recv_q: &'a str,
    pub send_q: &'a str,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    columns: &'a Columns,
    fields: Vec<&'a str>,
}

impl Columns {
    pub fn new(line: &str) -> Self {
        Self(line.split('\t').map(String::from).collect())
    }

    fn at(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|known| known == name)
    }

    /// Returns the names and values of a line. Fields that do not apply to the socket are left out.
    pub fn fields<'a>(&'a self, line: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let pairs = self.0.iter().map(String::as_str).zip(line.split('\t'));
        pairs.filter(|(_, value)| *value != "-")
    }

    /// Parses a line. Returns `None` if a mandatory field is missing, or if the line has control characters.
    pub fn socket<'a>(&'a self, line: &'a str) -> Option<SocketLine<'a>> {
        if line.bytes().any(|b| b != b'\t' && !b.is_ascii_graphic()) {
            return None;
        }
        let fields: Vec<&str> = line.split('\t').collect();
        let get = |name| self.at(name).and_then(|at| fields.get(at).copied());
        Some(SocketLine {
            shard: get("shard")?,
            netid: get("netid")?,
            state: get("state")?,
            recv_q: get("recv_q")?,
            send_q: get("send_q")?,
            local: get("local")?.parse().ok()?,
            peer: get("peer")?.parse().ok()?,
            columns: self,
            fields,
        })
    }
}

impl SocketLine<'_> {
    /// Returns the value of an optional field.
    pub fn text(&self, name: &str) -> Option<&str> {
        let at = self.columns.at(name)?;
        self.fields.get(at).copied().filter(|value| *value != "-")
    }

    /// Returns the value of an optional field as a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }
}
