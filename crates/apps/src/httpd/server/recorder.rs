//! A transport that writes down what the server does to one connection, for tests and fuzzing. It is strict: nothing may be sent after the
//! end, and each kind of end comes once.

use super::Transport;
use crate::httpd::site::{FileBody, FileId, Site};
use ginnel::Conn;

/// What happened to one connection.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Everything that was sent.
    pub output: Vec<u8>,
    /// Bytes there is room for.
    pub room: usize,
    /// Contents of the loaded files.
    pub files: Vec<Vec<u8>>,
    /// [`Transport::finish`] was called.
    pub finished: bool,
    /// [`Transport::close`] was called.
    pub closed: bool,
    /// [`Transport::abort`] was called.
    pub aborted: bool,
    /// [`Transport::resume_reading`] was called; whoever shows the server data clears it.
    pub resumed: bool,
    /// Bytes that are not acknowledged.
    pub outstanding: Option<u32>,
}

impl Recorder {
    /// The contents of a site's loaded files; nothing of those that are streamed.
    pub fn files_of(site: &Site) -> Vec<Vec<u8>> {
        let bytes_of = |body: &FileBody| match body {
            FileBody::Loaded(source) => source.bytes().to_vec(),
            FileBody::Streamed(_) => Vec::new(),
        };
        site.entries().iter().map(|e| bytes_of(&e.body)).collect()
    }

    /// Nothing may be sent any more.
    pub const fn has_ended(&self) -> bool {
        self.finished || self.closed || self.aborted
    }
}

impl Transport for Recorder {
    fn send(&mut self, _: Conn, bytes: &[u8]) -> usize {
        assert!(!self.has_ended(), "something is sent after the end");
        let n = bytes.len().min(self.room);
        self.output.extend_from_slice(&bytes[..n]);
        self.room -= n;
        n
    }

    fn send_file(&mut self, _: Conn, file: FileId, offset: u64, len: u64) -> bool {
        assert!(!self.has_ended(), "something is sent after the end");
        if self.room == 0 {
            return false;
        }
        // Like the engine: a source is taken as a whole, and uses up the room.
        let bytes = &self.files[file.0 as usize][offset as usize..(offset + len) as usize];
        self.output.extend_from_slice(bytes);
        self.room = self.room.saturating_sub(bytes.len());
        true
    }

    fn finish(&mut self, _: Conn) {
        assert!(!core::mem::replace(&mut self.finished, true), "finished twice");
    }

    fn close(&mut self, _: Conn) {
        assert!(!core::mem::replace(&mut self.closed, true), "closed twice");
    }

    fn abort(&mut self, _: Conn) {
        assert!(!core::mem::replace(&mut self.aborted, true), "aborted twice");
    }

    fn resume_reading(&mut self, _: Conn) {
        self.resumed = true;
    }

    fn outstanding(&mut self, _: Conn) -> Option<u32> {
        self.outstanding
    }
}
