//! TCP options: compares the engine's parser with a reference parser, and checks that emitted options parse
//! to themselves.

use ginnel_stack::wire::tcp::{FastOpenCookie, SeqNumber, TcpOptions, Timestamps};

/// Maximum length of the options in a TCP header in bytes.
const AREA_BYTES_MAX: usize = 40;

/// Runs one input: the options of a header. Longer inputs are truncated.
///
/// # Panics
/// If the two parsers differ, or emitted options parse to others.
pub fn run(data: &[u8]) {
    let area = &data[..data.len().min(AREA_BYTES_MAX)];
    let parsed = TcpOptions::parse(area);
    assert_eq!(parsed, reference(area), "{area:02x?}");
    if let Some(timestamps) = TcpOptions::parse_timestamps_only(area) {
        assert_eq!(parsed.timestamps, Some(timestamps), "{area:02x?}");
    }
    check_round_trip(&parsed);
}

fn check_round_trip(options: &TcpOptions) {
    let len = options.encoded_len();
    assert!(len <= AREA_BYTES_MAX && len.is_multiple_of(4), "{len} bytes for {options:?}");
    let mut buffer = [0xa5; AREA_BYTES_MAX];
    assert_eq!(options.emit(&mut buffer), len);
    assert!(buffer[len..].iter().all(|b| *b == 0xa5), "written beyond the end");
    let read = TcpOptions::parse(&buffer[..len]);
    // SACK blocks and a cookie that do not fit are omitted; everything else is kept.
    let kept = read.sack_blocks.len();
    let mut expected = options.clone();
    if let (Some(cookie), None) = (&options.fastopen, &read.fastopen) {
        let bare = TcpOptions { fastopen: None, sack_blocks: Default::default(), ..options.clone() };
        assert!(bare.encoded_len() + 2 + cookie.bytes.len() > AREA_BYTES_MAX - 4, "the cookie was omitted");
        expected.fastopen = None;
    }
    expected.sack_blocks.truncate(kept);
    assert_eq!(read, expected);
    let free_bytes = AREA_BYTES_MAX - len;
    assert!(
        kept == options.sack_blocks.len() || free_bytes < 12,
        "blocks were omitted with {free_bytes} free bytes"
    );
}

/// Parses options by RFC 9293 §3.1 and §3.2, with Linux's treatment of malformed ones.
fn reference(area: &[u8]) -> TcpOptions {
    let mut options = TcpOptions::default();
    let mut at = 0;
    while at < area.len() {
        let kind = area[at];
        if kind == 0 {
            break;
        }
        if kind == 1 {
            at += 1;
            continue;
        }
        let Some(&len) = area.get(at + 1) else { break };
        let len = usize::from(len);
        if len < 2 || at + len > area.len() {
            break;
        }
        option(&mut options, kind, &area[at + 2..at + len]);
        at += len;
    }
    options
}

fn option(options: &mut TcpOptions, kind: u8, value: &[u8]) {
    let long = |at: usize| value[at..at + 4].iter().fold(0, |n, b| n << 8 | u32::from(*b));
    match (kind, value.len()) {
        (2, 2) if value != [0, 0] => options.mss = Some(u16::from_be_bytes([value[0], value[1]])),
        (3, 1) => options.window_scale = Some(value[0].min(14)),
        (4, 0) => options.sack_permitted = true,
        (5, 8 | 16 | 24 | 32) => {
            options.sack_blocks =
                (0..value.len() / 8).map(|i| (SeqNumber(long(i * 8)), SeqNumber(long(i * 8 + 4)))).collect();
        }
        (8, 8) => options.timestamps = Some(Timestamps { tsval: long(0), tsecr: long(4) }),
        (34, 0 | 4 | 6 | 8 | 10 | 12 | 14 | 16) => {
            options.fastopen = Some(FastOpenCookie::new(value, false));
        }
        // As in Linux, an option of an even length that no cookie has cancels an earlier cookie.
        (34, 2 | 18..) if value.len().is_multiple_of(2) => options.fastopen = None,
        (254, 2..) if value[..2] == [0xf9, 0x89] => option_experimental(options, &value[2..]),
        (28, 2) => options.user_timeout = Some(u16::from_be_bytes([value[0], value[1]])),
        _ => {}
    }
}

fn option_experimental(options: &mut TcpOptions, cookie: &[u8]) {
    match cookie.len() {
        0 | 4 | 6 | 8 | 10 | 12 | 14 | 16 => options.fastopen = Some(FastOpenCookie::new(cookie, true)),
        odd if odd % 2 == 1 => {}
        _ => options.fastopen = None,
    }
}

/// Returns the handwritten seed inputs.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let timestamps = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];
    vec![
        ("syn", vec![2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7]),
        ("timestamps", timestamps.to_vec()),
        ("sack", [&timestamps[..], &[1, 1, 5, 18, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 1, 0, 0, 0, 2, 0]].concat()),
        ("four-blocks", [&[1, 1, 5, 34][..], &[7; 32]].concat()),
        ("user-timeout", vec![28, 4, 0x80, 3, 0, 0, 0, 0]),
        ("length-0", vec![2, 0, 5, 180]),
        ("beyond-the-end", vec![1, 8, 10, 1, 2]),
        ("unknown", vec![254, 4, 1, 2, 253, 2, 30, 3, 1, 1]),
    ]
}
