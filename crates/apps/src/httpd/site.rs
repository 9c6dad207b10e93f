//! The catalogue of a site: all files below its root, read once at start.
//!
//! A request can only name files of the catalogue, so no path leads out of the root. When the catalogue is
//! built, symbolic links are followed if they stay inside the root. Files are opened by their real path
//! beneath the root without following links, at start and later, so replacing a directory by a link in
//! between gains an attacker nothing.

use super::response::{DateText, HeadWriter, Persistence, PreparedResponse};
use super::status::Status;
use super::types;
use crate::date;
use core::hash::{BuildHasherDefault, Hasher};
use core::sync::atomic::{AtomicBool, Ordering};
use ginnel::PreloadedSource;
use rustix::fs::{Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Largest body in bytes that is stored after its prepared head and sent by copying, which costs less than
/// the bookkeeping of a source.
pub const INLINE_BYTES_MAX: usize = 1024;
/// Directories nested deeper than this are not read.
const DEPTH_MAX: usize = 64;
/// Most files in a catalogue; further files are skipped and reported.
const FILES_MAX: usize = 1 << 22;

/// Options for reading a site.
#[derive(Clone, Debug)]
pub struct SiteOptions {
    /// Name of the file that is served for its directory.
    pub index: String,
    /// Most bytes of bodies in memory. The smallest files are loaded first; the others are read from disk.
    pub memory_bytes_max: u64,
    /// True if files and directories whose names begin with a dot are served. `.well-known` (RFC 8615) always
    /// is.
    pub dotfiles: bool,
}

impl Default for SiteOptions {
    fn default() -> Self {
        Self { index: "index.html".to_owned(), memory_bytes_max: 1 << 30, dotfiles: false }
    }
}

/// Index of a file in the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub u32);

/// The resource that a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// A file, or the index of a directory.
    File(FileId),
    /// A directory whose path lacks the slash at its end.
    Directory,
}

/// Metadata of one version of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileMetadata {
    /// Size in bytes.
    pub size: u64,
    /// Time of last modification in seconds since 1970.
    pub modified: u64,
    /// Entity tag with its quotation marks: modification time in nanoseconds and size.
    pub etag: Box<[u8]>,
}

impl FileMetadata {
    fn new(size: u64, modified: i64, nanos: i64) -> Self {
        let modified = u64::try_from(modified).unwrap_or(0);
        let etag =
            format!("\"{:x}-{size:x}\"", u128::from(modified) * 1_000_000_000 + nanos.unsigned_abs() as u128);
        Self { size, modified, etag: etag.into_bytes().into() }
    }

    /// Returns the metadata of an open file, with `size` as its size.
    fn from_stat(stat: &Stat, size: u64) -> Self {
        Self::new(size, stat.st_mtime, stat.st_mtime_nsec as i64)
    }

    /// Appends the head of a 200 response, or of a 206 response if `part` is (start, length).
    pub fn write_head(
        &self,
        out: &mut Vec<u8>,
        content_type: &str,
        part: Option<(u64, u64)>,
        date: &DateText,
        persistence: Persistence,
    ) {
        let status = if part.is_some() { Status::PartialContent } else { Status::Ok };
        let mut head = HeadWriter::new(out, status, date);
        head.field("Content-Type", content_type.as_bytes());
        match part {
            Some((start, len)) => head.content_range(start, len, self.size).length(len),
            None => head.length(self.size),
        };
        self.write_validators(&mut head);
        head.field("Accept-Ranges", b"bytes").end(persistence);
    }

    /// Appends Last-Modified and ETag.
    pub fn write_validators(&self, head: &mut HeadWriter<'_>) {
        head.field("Last-Modified", &date::format(self.modified)).field("ETag", &self.etag);
    }
}

/// Where the bytes of a file are stored.
#[derive(Clone, Debug)]
pub enum FileBody {
    /// In memory, since the start.
    Loaded(Arc<PreloadedSource>),
    /// On disk: the real path relative to the root.
    Streamed(PathBuf),
}

/// A file of the catalogue.
#[derive(Clone, Debug)]
pub struct SiteEntry {
    /// Metadata at start.
    pub meta: FileMetadata,
    /// Content type.
    pub content_type: &'static str,
    /// The contents.
    pub body: FileBody,
    /// Prepared responses to a plain GET or HEAD: (connection stays open, connection is closed). Only for a
    /// loaded file.
    pub prepared: Option<Box<(PreparedResponse, PreparedResponse)>>,
}

/// A file that was opened to be read from disk.
#[derive(Debug)]
pub struct OpenFile {
    /// Its descriptor.
    pub fd: OwnedFd,
    /// Its current metadata.
    pub meta: FileMetadata,
}

/// The catalogue.
#[derive(Debug)]
pub struct Site {
    root: SiteRoot,
    entries: Vec<SiteEntry>,
    paths: HashMap<Box<[u8]>, Resource, BuildHasherDefault<PathHasher>>,
    /// Files below the root that are not served, or could not be loaded, with the reason.
    pub skipped: Vec<(PathBuf, String)>,
}

/// The directory beneath which files are opened.
#[derive(Debug)]
struct SiteRoot {
    fd: OwnedFd,
    /// True once `openat2` was found missing: on kernels before 5.6, under older seccomp filters, and under
    /// valgrind.
    lacks_openat2: AtomicBool,
}

impl SiteRoot {
    /// Opens a file beneath the root without following links. Fails if it is missing or not a regular file.
    fn open(&self, path: &Path) -> io::Result<(OwnedFd, Stat)> {
        // With NONBLOCK the call does not wait if the file has been replaced by a FIFO.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let by_parts = self.lacks_openat2.load(Ordering::Relaxed);
        let opened = if by_parts { Err(Errno::NOSYS) } else { openat2(&self.fd, path, flags, resolve) };
        let fd = match opened {
            Err(Errno::NOSYS | Errno::PERM) => {
                let fd = self.open_by_component(path, flags)?;
                self.lacks_openat2.store(true, Ordering::Relaxed);
                fd
            }
            opened => opened?,
        };
        let stat = rustix::fs::fstat(&fd)?;
        if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        Ok((fd, stat))
    }

    /// Opens a file one path component at a time.
    #[cold]
    fn open_by_component(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let mut within: Option<OwnedFd> = None;
        let mut parts = path.components().peekable();
        while let Some(part) = parts.next() {
            // `..` and absolute paths are refused.
            let Component::Normal(name) = part else { return Err(Errno::XDEV) };
            let flags = match parts.peek() {
                Some(_) => OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                None => flags,
            };
            let directory = within.as_ref().unwrap_or(&self.fd);
            within = Some(rustix::fs::openat(directory, name, flags | OFlags::NOFOLLOW, Mode::empty())?);
        }
        within.ok_or(Errno::NOENT)
    }
}

fn openat2(root: &OwnedFd, path: &Path, flags: OFlags, resolve: ResolveFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)
}

/// Hashes paths of the catalogue. Requests only look up keys and never insert them, so hash flooding is not
/// possible.
#[derive(Debug, Default)]
pub struct PathHasher(u64);

impl Hasher for PathHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
}

/// A file found below the root, before it is loaded.
struct FoundFile {
    entry: usize,
    /// Real path relative to the root.
    real: PathBuf,
}

impl Site {
    /// Reads the files below `root`. `date` is written into the prepared responses and updated later.
    pub fn read(root: &Path, options: &SiteOptions, date: &DateText) -> io::Result<Self> {
        let root = root.canonicalize()?;
        let fd =
            rustix::fs::open(&root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let beneath = SiteRoot { fd, lacks_openat2: AtomicBool::new(false) };
        let mut site =
            Self { root: beneath, entries: Vec::new(), paths: HashMap::default(), skipped: Vec::new() };
        let mut found = Vec::new();
        site.read_directory(&root, &mut vec![root.clone()], b"/", options, &mut found)?;
        site.load(options, found, date);
        Ok(site)
    }

    /// Returns the resource of a normalised path.
    pub fn find(&self, path: &[u8]) -> Option<Resource> {
        self.paths.get(path).copied()
    }

    /// Returns a file's entry.
    pub fn entry(&self, file: FileId) -> &SiteEntry {
        &self.entries[file.0 as usize]
    }

    /// Returns a file's entry, to update the dates of its prepared responses.
    pub fn entry_mut(&mut self, file: FileId) -> &mut SiteEntry {
        &mut self.entries[file.0 as usize]
    }

    /// Returns all files, in the order of their ids.
    pub fn entries(&self) -> &[SiteEntry] {
        &self.entries
    }

    /// Returns (files in memory, their bytes, files to be read from disk).
    pub fn summary(&self) -> (usize, u64, usize) {
        let loaded = self.entries.iter().filter(|e| matches!(e.body, FileBody::Loaded(_)));
        let (files, bytes) = loaded.fold((0, 0), |(files, bytes), e| (files + 1, bytes + e.meta.size));
        (files, bytes, self.entries.len() - files)
    }

    /// Opens a file to be read from disk, beneath the root and without following links. Fails if it is
    /// missing or not a regular file any more.
    pub fn open(&self, file: FileId) -> io::Result<OpenFile> {
        let FileBody::Streamed(path) = &self.entry(file).body else {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        };
        let (fd, stat) = self.root.open(path)?;
        let meta = FileMetadata::from_stat(&stat, u64::try_from(stat.st_size).unwrap_or(0));
        Ok(OpenFile { fd, meta })
    }

    /// Reads a directory. `url` is its path with the slash at the end, and `chain` holds the real paths of
    /// its parent directories and its own.
    fn read_directory(
        &mut self,
        root: &Path,
        chain: &mut Vec<PathBuf>,
        url: &[u8],
        options: &SiteOptions,
        found: &mut Vec<FoundFile>,
    ) -> io::Result<()> {
        let directory = chain[chain.len() - 1].clone();
        let mut names: Vec<_> = fs::read_dir(&directory)?.collect::<io::Result<Vec<_>>>()?;
        names.sort_by_key(fs::DirEntry::file_name);
        for name in names {
            let (path, name) = (name.path(), name.file_name());
            let bytes = name.as_bytes();
            if bytes.starts_with(b".") && !options.dotfiles && bytes != b".well-known" {
                self.skipped.push((path, "its name begins with a dot".to_owned()));
                continue;
            }
            if let Err(reason) = self.read_entry(root, chain, url, &path, bytes, options, found) {
                self.skipped.push((path, reason));
            }
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "one step of a recursion")]
    fn read_entry(
        &mut self,
        root: &Path,
        chain: &mut Vec<PathBuf>,
        url: &[u8],
        path: &Path,
        name: &[u8],
        options: &SiteOptions,
        found: &mut Vec<FoundFile>,
    ) -> Result<(), String> {
        if name.iter().any(|b| matches!(b, b'\\' | 0..=0x1f | 0x7f)) {
            return Err("no request can name it".to_owned());
        }
        let real = path.canonicalize().map_err(|e| e.to_string())?;
        if !real.starts_with(root) {
            return Err("a link out of the root".to_owned());
        }
        let stat = fs::metadata(&real).map_err(|e| e.to_string())?;
        let key = [url, name].concat();
        if stat.is_dir() {
            if chain.contains(&real) {
                return Err("a link to a directory it is in".to_owned());
            }
            if chain.len() > DEPTH_MAX {
                return Err("nested too deeply".to_owned());
            }
            self.paths.insert(key.clone().into(), Resource::Directory);
            chain.push(real);
            let result = self.read_directory(root, chain, &[&key, &b"/"[..]].concat(), options, found);
            chain.pop();
            return result.map_err(|e| e.to_string());
        }
        if !stat.is_file() {
            return Err("neither a file nor a directory".to_owned());
        }
        let entry = self.entries.len();
        if entry == FILES_MAX {
            return Err("too many files".to_owned());
        }
        let target = Resource::File(FileId(entry as u32));
        if name == options.index.as_bytes() {
            self.paths.insert(url.into(), target);
        }
        self.paths.insert(key.into(), target);
        let relative = real.strip_prefix(root).map_err(|e| e.to_string())?.to_owned();
        self.entries.push(SiteEntry {
            meta: FileMetadata::new(stat.len(), stat.mtime(), stat.mtime_nsec()),
            content_type: types::content_type_of(name),
            body: FileBody::Streamed(relative.clone()),
            prepared: None,
        });
        found.push(FoundFile { entry, real: relative });
        Ok(())
    }

    /// Loads as many files as the memory budget permits, the smallest first.
    fn load(&mut self, options: &SiteOptions, mut found: Vec<FoundFile>, date: &DateText) {
        let mut left = options.memory_bytes_max;
        found.sort_by_key(|f| (self.entries[f.entry].meta.size, f.entry));
        for FoundFile { entry, real } in found {
            let entry = &mut self.entries[entry];
            if entry.meta.size > left {
                break;
            }
            match load_file(&self.root, &real, left) {
                Ok(Some((bytes, meta))) => {
                    left -= bytes.len() as u64;
                    entry.meta = meta;
                    entry.prepare(&bytes, date);
                    entry.body = FileBody::Loaded(Arc::new(PreloadedSource::new(bytes)));
                }
                Ok(None) => {} // the file has grown beyond the budget
                Err(error) => self.skipped.push((real, error.to_string())),
            }
        }
    }
}

/// Reads a whole file of at most `bytes_max` bytes.
fn load_file(root: &SiteRoot, path: &Path, bytes_max: u64) -> io::Result<Option<(Vec<u8>, FileMetadata)>> {
    let (fd, stat) = root.open(path)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let mut bytes = Vec::with_capacity(usize::try_from(size.min(bytes_max)).unwrap_or(0));
    fs::File::from(fd).take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Ok(None);
    }
    let meta = FileMetadata::from_stat(&stat, bytes.len() as u64);
    Ok(Some((bytes, meta)))
}

impl SiteEntry {
    fn prepare(&mut self, body: &[u8], date: &DateText) {
        let inline = if body.len() <= INLINE_BYTES_MAX { body } else { &[] };
        let response = |persistence| {
            let mut head = Vec::new();
            self.meta.write_head(&mut head, self.content_type, None, date, persistence);
            PreparedResponse::new(head, inline, date)
        };
        self.prepared = Some(Box::new((response(Persistence::Keep), response(Persistence::Close))));
    }

    /// Returns the body if it is small enough to be sent by copying.
    pub fn inline_body(&self) -> Option<&[u8]> {
        match &self.body {
            FileBody::Loaded(source) if source.bytes().len() <= INLINE_BYTES_MAX => Some(source.bytes()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn site(root: &Path, options: &SiteOptions) -> Site {
        Site::read(root, options, &DateText::new(0)).unwrap()
    }

    fn tree() -> tempfile::TempDir {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("root");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir(root.join(".git")).unwrap();
        fs::write(root.join("index.html"), "home").unwrap();
        fs::write(root.join("a/index.html"), "a").unwrap();
        fs::write(root.join("a/b/big.bin"), vec![7; 5000]).unwrap();
        fs::write(root.join(".git/config"), "secret").unwrap();
        fs::write(outer.path().join("outside.txt"), "secret").unwrap();
        symlink("../outside.txt", root.join("leak.txt")).unwrap();
        symlink(outer.path(), root.join("up")).unwrap();
        symlink("a", root.join("alias")).unwrap();
        symlink("..", root.join("a/loop")).unwrap();
        symlink("nowhere", root.join("dangling")).unwrap();
        outer
    }

    #[test]
    fn the_catalogue_has_only_files_below_the_root() {
        let outer = tree();
        let site = site(&outer.path().join("root"), &SiteOptions::default());
        let is_file = |path: &str| matches!(site.find(path.as_bytes()), Some(Resource::File(_)));
        for path in
            ["/", "/index.html", "/a/", "/a/index.html", "/a/b/big.bin", "/alias/", "/alias/b/big.bin"]
        {
            assert!(is_file(path), "{path}");
        }
        for path in ["/a", "/a/b", "/alias"] {
            assert_eq!(site.find(path.as_bytes()), Some(Resource::Directory), "{path}");
        }
        for path in [
            "",
            "/a/b/",
            "/leak.txt",
            "/up",
            "/up/outside.txt",
            "/a/loop",
            "/dangling",
            "/.git",
            "/.git/config",
            "/../outside.txt",
            "/a/../index.html",
            "/index.html/",
        ] {
            assert_eq!(site.find(path.as_bytes()), None, "{path}");
        }
        assert_eq!(site.skipped.len(), 6); // a/loop is met twice
    }

    #[test]
    fn dotfiles_are_served_on_request() {
        let outer = tree();
        let site =
            site(&outer.path().join("root"), &SiteOptions { dotfiles: true, ..SiteOptions::default() });
        assert!(site.find(b"/.git/config").is_some());
    }

    // limit: httpd --memory
    #[test]
    fn the_smallest_files_are_loaded_first() {
        let outer = tree();
        let root = outer.path().join("root");
        let site = site(&root, &SiteOptions { memory_bytes_max: 5000, ..SiteOptions::default() });
        let Some(Resource::File(big)) = site.find(b"/a/b/big.bin") else { panic!() };
        let Some(Resource::File(home)) = site.find(b"/") else { panic!() };
        assert!(
            matches!(&site.entry(big).body, FileBody::Streamed(path) if path == Path::new("a/b/big.bin"))
        );
        assert!(matches!(&site.entry(home).body, FileBody::Loaded(source) if source.bytes() == b"home"));
        assert_eq!(site.summary(), (3, 6, 2)); // /alias/ holds the same files once more
    }

    #[test]
    fn streamed_files_are_opened_beneath_the_root() {
        opened_beneath_the_root_only(false);
    }

    #[test]
    fn streamed_files_are_safe_without_openat2() {
        opened_beneath_the_root_only(true);
    }

    fn opened_beneath_the_root_only(by_parts: bool) {
        let outer = tree();
        let root = outer.path().join("root");
        let site = site(&root, &SiteOptions { memory_bytes_max: 0, ..SiteOptions::default() });
        site.root.lacks_openat2.store(by_parts, Ordering::Relaxed);
        for path in
            ["../outside.txt", "a/../../outside.txt", "/etc/passwd", "", "a", "leak.txt", "alias/index.html"]
        {
            assert!(site.root.open(Path::new(path)).is_err(), "{path}");
        }
        let Some(Resource::File(big)) = site.find(b"/a/b/big.bin") else { panic!() };
        assert_eq!(site.open(big).unwrap().meta, site.entry(big).meta);
        // The file, then its directory, is replaced by a link that leaves the root.
        fs::remove_file(root.join("a/b/big.bin")).unwrap();
        assert!(site.open(big).is_err());
        symlink(outer.path().join("outside.txt"), root.join("a/b/big.bin")).unwrap();
        assert!(site.open(big).is_err());
        fs::remove_dir_all(root.join("a/b")).unwrap();
        symlink(outer.path(), root.join("a/b")).unwrap();
        fs::write(outer.path().join("big.bin"), "secret").unwrap();
        assert!(site.open(big).is_err());
        // A FIFO in place of the file must not block the shard.
        fs::remove_file(root.join("a/b")).unwrap();
        fs::create_dir(root.join("a/b")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            root.join("a/b/big.bin"),
            rustix::fs::FileType::Fifo,
            Mode::RWXU,
            0,
        )
        .unwrap();
        assert!(site.open(big).is_err());
    }

    #[test]
    fn a_file_replaced_by_a_link_is_skipped() {
        for by_parts in [false, true] {
            let outer = tree();
            let root = outer.path().join("root");
            let (options, date) = (SiteOptions::default(), DateText::new(0));
            let mut site = site(&root, &SiteOptions { memory_bytes_max: 0, ..SiteOptions::default() });
            site.root.lacks_openat2.store(by_parts, Ordering::Relaxed);
            let Some(Resource::File(big)) = site.find(b"/a/b/big.bin") else { panic!() };
            let Some(Resource::File(home)) = site.find(b"/") else { panic!() };
            fs::remove_dir_all(root.join("a/b")).unwrap();
            symlink(outer.path(), root.join("a/b")).unwrap();
            fs::write(outer.path().join("big.bin"), "secret").unwrap();
            let found = |file: FileId, real: &str| FoundFile { entry: file.0 as usize, real: real.into() };
            site.load(&options, vec![found(big, "a/b/big.bin"), found(home, "index.html")], &date);
            assert!(matches!(&site.entry(big).body, FileBody::Streamed(_)));
            assert_eq!(site.skipped.last().unwrap().0, Path::new("a/b/big.bin"));
            assert!(matches!(&site.entry(home).body, FileBody::Loaded(source) if source.bytes() == b"home"));
        }
    }

    #[test]
    fn an_etag_changes_with_size_and_time() {
        assert_eq!(&*FileMetadata::new(16, 1, 0).etag, b"\"3b9aca00-10\"");
        assert_ne!(FileMetadata::new(16, 1, 0).etag, FileMetadata::new(17, 1, 0).etag);
        assert_ne!(FileMetadata::new(16, 1, 0).etag, FileMetadata::new(16, 1, 1).etag);
        assert_eq!(FileMetadata::new(16, -5, 0).modified, 0);
    }
}
