//! Chooses the response to a request.

use super::conditional::{self, PreconditionResult, Validators};
use super::exchange::{FileStream, Payload};
use super::head::{Method, Request};
use super::path;
use super::range::Selection;
use super::response::{ALLOW, DateText, HeadWriter, Persistence, write_plain};
use super::server::{ResponsePlan, Server};
use super::site::{FileBody, FileId, FileMetadata, OpenFile, Resource, SiteEntry};
use super::status::Status;
use rustix::io::Errno;
use std::io;

impl Server {
    /// Chooses the response, and writes its head to `self.head` unless a prepared response can be sent.
    pub(super) fn plan_response(
        &mut self,
        request: &Request<'_, '_>,
        persistence: Persistence,
    ) -> ResponsePlan {
        self.head.clear();
        match request.method {
            Method::Get | Method::Head => {}
            Method::Options => {
                return self.plan_status(Status::Ok, Some(("Allow", ALLOW.as_bytes())), request, persistence);
            }
            Method::Other => return self.plan_status(Status::MethodNotAllowed, None, request, persistence),
        }
        let mut scratch = core::mem::take(&mut self.path);
        let plan = match path::normalise(request.path, &mut scratch) {
            Ok(path) => match self.site.find(path) {
                Some(Resource::File(file)) => self.plan_file(file, request, persistence),
                Some(Resource::Directory) => self.plan_redirect(path, request, persistence),
                None => self.plan_status(Status::NotFound, None, request, persistence),
            },
            Err(status) => self.plan_status(status, None, request, persistence),
        };
        self.path = scratch;
        plan
    }

    fn plan_status(
        &mut self,
        status: Status,
        field: Option<(&str, &[u8])>,
        request: &Request<'_, '_>,
        persistence: Persistence,
    ) -> ResponsePlan {
        let date = *self.date();
        let is_head = request.method == Method::Head;
        write_plain(&mut self.head, status, &date, field, persistence, is_head);
        ResponsePlan {
            prepared: None,
            payload: Payload::None,
            close: persistence == Persistence::Close,
            is_error: status.code() >= 400,
        }
    }

    /// Redirects a request for a directory without the slash at the end: relative links of its index would be
    /// resolved wrongly.
    fn plan_redirect(
        &mut self,
        path: &[u8],
        request: &Request<'_, '_>,
        persistence: Persistence,
    ) -> ResponsePlan {
        let mut location = Vec::with_capacity(path.len() + 16);
        path::encode(path, &mut location);
        location.push(b'/');
        if let Some(query) = request.query {
            location.push(b'?');
            location.extend_from_slice(query);
        }
        self.plan_status(Status::MovedPermanently, Some(("Location", &location)), request, persistence)
    }

    fn plan_file(
        &mut self,
        file: FileId,
        request: &Request<'_, '_>,
        persistence: Persistence,
    ) -> ResponsePlan {
        if let FileBody::Loaded(_) = &self.site.entry(file).body {
            if !request.is_conditional && persistence != Persistence::KeepExplicit {
                let is_head = request.method == Method::Head;
                return self.plan_prepared(file, is_head, persistence == Persistence::Close);
            }
            return self.plan_representation(file, None, request, persistence);
        }
        match self.site.open(file) {
            Ok(open) => self.plan_representation(file, Some(open), request, persistence),
            Err(error) => {
                let status = match error.raw_os_error().map(Errno::from_raw_os_error) {
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Status::Unavailable,
                    Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::ACCESS) => {
                        Status::NotFound
                    }
                    _ if error.kind() == io::ErrorKind::InvalidInput => Status::NotFound,
                    _ => Status::InternalError,
                };
                self.plan_status(status, None, request, persistence)
            }
        }
    }

    /// Returns the prepared response of a loaded file.
    pub(super) fn plan_prepared(&self, file: FileId, is_head: bool, close: bool) -> ResponsePlan {
        let entry = self.site.entry(file);
        let len = if is_head || entry.inline_body().is_some() { 0 } else { entry.meta.size };
        let payload = if len == 0 { Payload::None } else { Payload::File { file, offset: 0, len } };
        ResponsePlan { prepared: Some((file, is_head)), payload, close, is_error: false }
    }

    /// Responds with a representation of a file: the loaded one, or the opened one.
    fn plan_representation(
        &mut self,
        file: FileId,
        open: Option<OpenFile>,
        request: &Request<'_, '_>,
        persistence: Persistence,
    ) -> ResponsePlan {
        let date = *self.date();
        let entry = self.site.entry(file);
        let meta = open.as_ref().map_or(&entry.meta, |o| &o.meta);
        let outcome = if request.is_conditional {
            let validators = Validators { etag: &meta.etag, modified: meta.modified };
            conditional::evaluate(request, &validators, meta.size, date.second())
        } else {
            PreconditionResult::Send(Selection::Whole)
        };
        let part = match outcome {
            PreconditionResult::Send(Selection::Whole) => None,
            PreconditionResult::Send(Selection::Part { start, len }) => Some((start, len)),
            PreconditionResult::Send(Selection::Unsatisfiable) => {
                let range = format!("bytes */{}", meta.size);
                let field = Some(("Content-Range", range.as_bytes()));
                return self.plan_status(Status::RangeNotSatisfiable, field, request, persistence);
            }
            PreconditionResult::NotModified => {
                write_not_modified(&mut self.head, meta, &date, persistence);
                let close = persistence == Persistence::Close;
                return ResponsePlan { prepared: None, payload: Payload::None, close, is_error: false };
            }
            PreconditionResult::Failed => {
                return self.plan_status(Status::PreconditionFailed, None, request, persistence);
            }
        };
        meta.write_head(&mut self.head, entry.content_type, part, &date, persistence);
        let (offset, len) = part.unwrap_or((0, meta.size));
        let is_empty = request.method == Method::Head || len == 0;
        let payload =
            if is_empty { Payload::None } else { payload_of(&mut self.head, entry, file, open, offset, len) };
        ResponsePlan { prepared: None, payload, close: persistence == Persistence::Close, is_error: false }
    }
}

/// Returns the payload after `head`. A small body is appended to `head` instead.
fn payload_of(
    head: &mut Vec<u8>,
    entry: &SiteEntry,
    file: FileId,
    open: Option<OpenFile>,
    offset: u64,
    len: u64,
) -> Payload {
    match (open, entry.inline_body()) {
        (Some(open), _) => Payload::Stream(FileStream::new(open.fd, offset, len)),
        (None, Some(body)) => {
            head.extend_from_slice(&body[offset as usize..(offset + len) as usize]);
            Payload::None
        }
        (None, None) => Payload::File { file, offset, len },
    }
}

/// RFC 9110 §15.4.5: a 304 repeats the validators and has no body.
fn write_not_modified(out: &mut Vec<u8>, meta: &FileMetadata, date: &DateText, persistence: Persistence) {
    let mut head = HeadWriter::new(out, Status::NotModified, date);
    meta.write_validators(&mut head);
    head.end(persistence);
}
