//! The status codes that the server sends.

/// A status code with its reason phrase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Status {
    /// 200
    Ok = 200,
    /// 206
    PartialContent = 206,
    /// 301
    MovedPermanently = 301,
    /// 304
    NotModified = 304,
    /// 400
    BadRequest = 400,
    /// 404
    NotFound = 404,
    /// 405
    MethodNotAllowed = 405,
    /// 408
    RequestTimeout = 408,
    /// 412
    PreconditionFailed = 412,
    /// 413
    ContentTooLarge = 413,
    /// 414
    UriTooLong = 414,
    /// 416
    RangeNotSatisfiable = 416,
    /// 417
    ExpectationFailed = 417,
    /// 431
    HeaderFieldsTooLarge = 431,
    /// 500
    InternalError = 500,
    /// 501
    NotImplemented = 501,
    /// 503
    Unavailable = 503,
    /// 505
    VersionNotSupported = 505,
}

impl Status {
    /// All statuses, for tests and counters.
    pub const ALL: [Self; 18] = [
        Self::Ok,
        Self::PartialContent,
        Self::MovedPermanently,
        Self::NotModified,
        Self::BadRequest,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestTimeout,
        Self::PreconditionFailed,
        Self::ContentTooLarge,
        Self::UriTooLong,
        Self::RangeNotSatisfiable,
        Self::ExpectationFailed,
        Self::HeaderFieldsTooLarge,
        Self::InternalError,
        Self::NotImplemented,
        Self::Unavailable,
        Self::VersionNotSupported,
    ];

    /// Returns the number.
    pub const fn code(self) -> u16 {
        self as u16
    }

    /// Returns number and reason phrase, for the status line and for the body of an error.
    pub const fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::PartialContent => "206 Partial Content",
            Self::MovedPermanently => "301 Moved Permanently",
            Self::NotModified => "304 Not Modified",
            Self::BadRequest => "400 Bad Request",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
            Self::RequestTimeout => "408 Request Timeout",
            Self::PreconditionFailed => "412 Precondition Failed",
            Self::ContentTooLarge => "413 Content Too Large",
            Self::UriTooLong => "414 URI Too Long",
            Self::RangeNotSatisfiable => "416 Range Not Satisfiable",
            Self::ExpectationFailed => "417 Expectation Failed",
            Self::HeaderFieldsTooLarge => "431 Request Header Fields Too Large",
            Self::InternalError => "500 Internal Server Error",
            Self::NotImplemented => "501 Not Implemented",
            Self::Unavailable => "503 Service Unavailable",
            Self::VersionNotSupported => "505 HTTP Version Not Supported",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_begins_with_its_code() {
        for status in Status::ALL {
            assert!(status.line().starts_with(&format!("{} ", status.code())));
        }
    }
}
