//! Content types by file name extension.

/// Returns the content type for a file name, by the extension after the last dot, in upper or lower
/// case. The type of an unknown extension is `application/octet-stream`.
pub fn content_type_of(name: &[u8]) -> &'static str {
    let extension = match name.iter().rposition(|b| *b == b'.') {
        Some(dot) if dot > 0 && name.len() - dot <= EXTENSION_BYTES_MAX + 1 => &name[dot + 1..],
        _ => return DEFAULT,
    };
    TYPES
        .iter()
        .find(|(known, _)| known.as_bytes().eq_ignore_ascii_case(extension))
        .map_or(DEFAULT, |(_, t)| t)
}

const DEFAULT: &str = "application/octet-stream";
/// Length of the longest known extension in bytes.
const EXTENSION_BYTES_MAX: usize = 11;

/// Extensions are looked up once per file at start, so a linear search suffices.
const TYPES: [(&str, &str); 51] = [
    ("html", "text/html; charset=utf-8"),
    ("htm", "text/html; charset=utf-8"),
    ("xhtml", "application/xhtml+xml"),
    ("css", "text/css; charset=utf-8"),
    ("js", "text/javascript; charset=utf-8"),
    ("mjs", "text/javascript; charset=utf-8"),
    ("json", "application/json"),
    ("map", "application/json"),
    ("webmanifest", "application/manifest+json"),
    ("xml", "text/xml; charset=utf-8"),
    ("rss", "application/rss+xml"),
    ("atom", "application/atom+xml"),
    ("txt", "text/plain; charset=utf-8"),
    ("md", "text/markdown; charset=utf-8"),
    ("csv", "text/csv; charset=utf-8"),
    ("vtt", "text/vtt; charset=utf-8"),
    ("ics", "text/calendar; charset=utf-8"),
    ("svg", "image/svg+xml"),
    ("png", "image/png"),
    ("apng", "image/apng"),
    ("jpg", "image/jpeg"),
    ("jpeg", "image/jpeg"),
    ("gif", "image/gif"),
    ("webp", "image/webp"),
    ("avif", "image/avif"),
    ("jxl", "image/jxl"),
    ("bmp", "image/bmp"),
    ("ico", "image/vnd.microsoft.icon"),
    ("tif", "image/tiff"),
    ("tiff", "image/tiff"),
    ("woff", "font/woff"),
    ("woff2", "font/woff2"),
    ("ttf", "font/ttf"),
    ("otf", "font/otf"),
    ("mp3", "audio/mpeg"),
    ("m4a", "audio/mp4"),
    ("ogg", "audio/ogg"),
    ("opus", "audio/ogg"),
    ("wav", "audio/wav"),
    ("flac", "audio/flac"),
    ("mp4", "video/mp4"),
    ("webm", "video/webm"),
    ("ogv", "video/ogg"),
    ("mov", "video/quicktime"),
    ("pdf", "application/pdf"),
    ("wasm", "application/wasm"),
    ("zip", "application/zip"),
    ("gz", "application/gzip"),
    ("tar", "application/x-tar"),
    ("zst", "application/zstd"),
    ("epub", "application/epub+zip"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_extension_decides_the_type() {
        let table = [
            ("index.html", "text/html; charset=utf-8"),
            ("A.HTML", "text/html; charset=utf-8"),
            ("a.tar.gz", "application/gzip"),
            ("a.webmanifest", "application/manifest+json"),
            ("a.b", DEFAULT),
            ("a.", DEFAULT),
            ("a", DEFAULT),
            ("", DEFAULT),
            (".html", DEFAULT),
        ];
        for (name, expected) in table {
            assert_eq!(content_type_of(name.as_bytes()), expected, "{name}");
        }
    }

    #[test]
    fn every_extension_is_reachable_and_listed_once() {
        for (i, (extension, mime)) in TYPES.iter().enumerate() {
            assert_eq!(content_type_of(format!("x.{extension}").as_bytes()), *mime);
            assert!(TYPES[..i].iter().all(|(other, _)| other != extension));
        }
    }
}
