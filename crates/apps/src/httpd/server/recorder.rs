//! A transport that records what the server does to one connection, for tests and fuzzing. It panics if
//! anything is sent after the end of the connection, or if the connection is ended twice in the same way.

use super::Transport;
use crate::httpd::site::{FileBody, FileId, Site};
use ginnel::Conn;

/// The calls for one connection.
#[derive(Debug, Default)]
pub struct Recorder {
    /// All bytes sent.
    pub output: Vec<u8>,
    /// Free send buffer in bytes.
    pub room: usize,
    /// Contents of the loaded files.
    pub files: Vec<Vec<u8>>,
    /// [`Transport::finish`] was called.
    pub finished: bool,
    /// [`Transport::close`] was called.
    pub closed: bool,
    /// [`Transport::abort`] was called.
    pub aborted: bool,
    /// [`Transport::resume_reading`] was called. The caller of [`Server::data`](super::Server::data) clears
    /// the flag.
    pub resumed: bool,
    /// Bytes that are not acknowledged.
    pub outstanding: Option<u32>,
}

impl Recorder {
    /// Returns the contents of a site's files; empty for files that are not loaded.
    pub fn files_of(site: &Site) -> Vec<Vec<u8>> {
        let bytes_of = |body: &FileBody| match body {
            FileBody::Loaded(source) => source.bytes().to_vec(),
            FileBody::Streamed(_) => Vec::new(),
        };
        site.entries().iter().map(|e| bytes_of(&e.body)).collect()
    }

    /// Returns true if nothing may be sent any more.
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
        // As in the engine, a source is queued as a whole and counts as queued bytes.
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
