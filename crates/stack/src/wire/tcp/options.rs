//! TCP options: parsed as leniently as Linux parses them, and emitted in Linux's order and with its padding.

use super::SeqNumber;
use crate::wire::{array, be16, be32};
use arrayvec::ArrayVec;

/// Largest number of SACK blocks in a header (RFC 2018 §3), possible only without timestamps.
pub const SACK_BLOCKS_MAX: usize = 4;

/// Largest number of option bytes in a header.
pub const OPTIONS_LEN_MAX: usize = 40;

/// Largest shift of the window scale option (RFC 7323 §2.3).
const WINDOW_SCALE_MAX: u8 = 14;

const END_OF_LIST: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;
const USER_TIMEOUT: u8 = 28;
const FASTOPEN: u8 = 34;
const EXPERIMENTAL: u8 = 254;
/// Number of fast open among the experimental options (RFC 7413 §9).
const EXPERIMENTAL_FASTOPEN: [u8; 2] = [0xf9, 0x89];
/// Bytes of a fast open cookie (RFC 7413 §4.1.1).
const COOKIE_LEN: core::ops::RangeInclusive<usize> = 4..=16;

/// NOP, NOP, and kind and length of the timestamps option: the first bytes of the options of most segments.
const TIMESTAMPS_ALIGNED: [u8; 4] = [NOP, NOP, TIMESTAMPS, 10];

/// The timestamps option (RFC 7323 §3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Timestamps {
    /// The sender's clock.
    pub tsval: u32,
    /// The most recent TSval that the sender has received.
    pub tsecr: u32,
}

impl Timestamps {
    /// Returns the option as the words of a header, with two NOPs in front.
    #[inline(always)]
    pub(crate) const fn words(self) -> [u32; 3] {
        [u32::from_be_bytes(TIMESTAMPS_ALIGNED), self.tsval, self.tsecr]
    }
}

/// The fast open option (RFC 7413 §4.1.1).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FastOpenCookie {
    /// The cookie: 4 to 16 bytes, an even number. Empty in a request for a cookie.
    pub bytes: ArrayVec<u8, 16>,
    /// True if the option is the experimental one of before the RFC.
    pub is_experimental: bool,
}

impl FastOpenCookie {
    /// Creates an option with at most 16 bytes.
    pub fn new(bytes: &[u8], is_experimental: bool) -> Self {
        Self { bytes: bytes.iter().copied().take(16).collect(), is_experimental }
    }

    /// Returns the option with the padding after it.
    fn encoded(&self) -> ArrayVec<u8, 20> {
        let mut out = ArrayVec::new();
        let len = self.bytes.len() as u8;
        match self.is_experimental {
            true => out.extend([EXPERIMENTAL, 4 + len, EXPERIMENTAL_FASTOPEN[0], EXPERIMENTAL_FASTOPEN[1]]),
            false => out.extend([FASTOPEN, 2 + len]),
        }
        out.extend(self.bytes.iter().copied());
        while !out.len().is_multiple_of(4) {
            out.push(NOP);
        }
        out
    }
}

/// The options of a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TcpOptions {
    /// The largest segment that the sender accepts, in bytes (RFC 9293 §3.7.1). Valid on SYN only. Never 0
    /// when parsed.
    pub mss: Option<u16>,
    /// The shift of the windows that the sender will advertise (RFC 7323 §2). Valid on SYN only. At most 14
    /// when parsed.
    pub window_scale: Option<u8>,
    /// True if the sender supports SACK (RFC 2018 §2). Valid on SYN only.
    pub sack_permitted: bool,
    /// Timestamps.
    pub timestamps: Option<Timestamps>,
    /// Selectively acknowledged data, each block from its first byte to the byte after its last (RFC 2018
    /// §3). The parser does not validate the numbers.
    pub sack_blocks: ArrayVec<(SeqNumber, SeqNumber), SACK_BLOCKS_MAX>,
    /// The user timeout as encoded: the top bit selects minutes instead of seconds (RFC 5482 §3.1).
    pub user_timeout: Option<u16>,
    /// Fast open (RFC 7413). Valid on SYN only.
    pub fastopen: Option<FastOpenCookie>,
}

impl TcpOptions {
    /// Parses options as Linux does. A malformed option ends the parsing, and the options before it are
    /// valid; options with an unknown kind or an unexpected length are skipped. The last occurrence of an
    /// option wins.
    #[inline(always)]
    pub fn parse(options: &[u8]) -> Self {
        Self::parse_aligned(options).unwrap_or_else(|| Self::parse_slow(options))
    }

    /// Parses options that are padded to whole words, as common systems send SYN options and timestamps.
    /// Returns `None` if there are any others.
    #[inline(always)]
    pub(super) fn parse_aligned(options: &[u8]) -> Option<Self> {
        let mut parsed = Self::default();
        let (words, []) = options.as_chunks::<4>() else { return None };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                [MSS, 4, a, b] if [a, b] != [0, 0] => parsed.mss = Some(u16::from_be_bytes([a, b])),
                [NOP, WINDOW_SCALE, 3, shift] => parsed.window_scale = Some(shift.min(WINDOW_SCALE_MAX)),
                [NOP, NOP, SACK_PERMITTED, 2] => parsed.sack_permitted = true,
                [first, second, TIMESTAMPS, 10]
                    if matches!([first, second], [NOP, NOP] | [SACK_PERMITTED, 2]) =>
                {
                    parsed.sack_permitted |= first == SACK_PERMITTED;
                    let (tsval, tsecr) = (words.next()?, words.next()?);
                    let (tsval, tsecr) = (u32::from_be_bytes(*tsval), u32::from_be_bytes(*tsecr));
                    parsed.timestamps = Some(Timestamps { tsval, tsecr });
                }
                _ => return None,
            }
        }
        Some(parsed)
    }

    #[inline(never)]
    pub(super) fn parse_slow(options: &[u8]) -> Self {
        let mut parsed = Self::default();
        let mut rest = options;
        while let Some((&kind, after_kind)) = rest.split_first() {
            match kind {
                END_OF_LIST => break,
                NOP => rest = after_kind,
                _ => {
                    // RFC 9293 §3.2: the length includes the kind and length bytes; a length below 2 would
                    // not even advance.
                    let Some(&len) = after_kind.first() else { break };
                    let Some((option, after)) = rest.split_at_checked(usize::from(len)) else { break };
                    let Some(body) = option.get(2..) else { break };
                    parsed.read(kind, body);
                    rest = after;
                }
            }
        }
        parsed
    }

    /// Evaluates one option. An option with an unexpected length is ignored.
    fn read(&mut self, kind: u8, body: &[u8]) {
        match (kind, body) {
            // Linux ignores an MSS of 0.
            (MSS, &[a, b]) if [a, b] != [0, 0] => self.mss = Some(u16::from_be_bytes([a, b])),
            // RFC 7323 §2.3: a received shift above 14 is treated as 14.
            (WINDOW_SCALE, &[shift]) => self.window_scale = Some(shift.min(WINDOW_SCALE_MAX)),
            (SACK_PERMITTED, []) => self.sack_permitted = true,
            (TIMESTAMPS, body) => {
                if let Ok(body) = <&[u8; 8]>::try_from(body) {
                    self.timestamps = Some(Timestamps { tsval: be32(body, 0), tsecr: be32(body, 4) });
                }
            }
            (SACK, body) => {
                let (blocks, odd) = body.as_chunks::<8>();
                if odd.is_empty() && !blocks.is_empty() {
                    let block = |b: &[u8; 8]| (SeqNumber(be32(b, 0)), SeqNumber(be32(b, 4)));
                    self.sack_blocks = blocks.iter().take(SACK_BLOCKS_MAX).map(block).collect();
                }
            }
            (FASTOPEN, cookie) => self.read_fastopen(cookie, false),
            (EXPERIMENTAL, &[a, b, ref cookie @ ..]) if [a, b] == EXPERIMENTAL_FASTOPEN => {
                self.read_fastopen(cookie, true);
            }
            (USER_TIMEOUT, &[a, b]) => self.user_timeout = Some(be16(&[a, b], 0)),
            _ => {}
        }
    }

    /// Evaluates a fast open option (`tcp_parse_fastopen_option`). One of an invalid length counts as absent.
    fn read_fastopen(&mut self, cookie: &[u8], is_experimental: bool) {
        if cookie.len().is_multiple_of(2) {
            let is_valid = cookie.is_empty() || COOKIE_LEN.contains(&cookie.len());
            self.fastopen = is_valid.then(|| FastOpenCookie::new(cookie, is_experimental));
        }
    }

    /// Parses options that consist of NOP, NOP and timestamps, as on most segments of an established
    /// connection (the layout of RFC 7323 appendix A). Returns `None` for any other layout, which
    /// [`TcpOptions::parse`] handles.
    #[inline]
    pub fn parse_timestamps_only(options: &[u8]) -> Option<Timestamps> {
        let bytes: &[u8; 12] = options.try_into().ok()?;
        if array::<4, 12>(bytes, 0) != TIMESTAMPS_ALIGNED {
            return None;
        }
        Some(Timestamps { tsval: be32(bytes, 4), tsecr: be32(bytes, 8) })
    }

    /// Returns the length of the options without SACK blocks in bytes. Every option includes the padding to a
    /// multiple of 4.
    #[inline]
    fn len_without_sack(&self) -> usize {
        // SACK-permitted replaces the two NOPs in front of the timestamps.
        let sack_permitted = self.sack_permitted && self.timestamps.is_none();
        let others = 4
            * (usize::from(self.mss.is_some())
                + usize::from(self.window_scale.is_some())
                + usize::from(sack_permitted)
                + usize::from(self.user_timeout.is_some()))
            + 12 * usize::from(self.timestamps.is_some());
        others + self.fitting_cookie(others).map_or(0, |cookie| cookie.len())
    }

    /// Returns the encoded fast open option if it fits besides `others` bytes of options.
    #[inline]
    fn fitting_cookie(&self, others: usize) -> Option<ArrayVec<u8, 20>> {
        let encoded = self.fastopen.as_ref()?.encoded();
        (others + encoded.len() <= OPTIONS_LEN_MAX).then_some(encoded)
    }

    /// Returns how many SACK blocks fit besides the other options: up to 4, or 3 with timestamps (RFC 2018
    /// §3).
    #[inline]
    fn sack_blocks_fitting(&self) -> usize {
        ((OPTIONS_LEN_MAX - self.len_without_sack()).saturating_sub(4) / 8).min(self.sack_blocks.len())
    }

    /// Returns the length of the encoded options in bytes: a multiple of 4, at most 40. SACK blocks, and
    /// a fast open cookie, that do not fit are omitted.
    #[inline]
    pub fn encoded_len(&self) -> usize {
        let len = self.len_without_sack();
        if self.sack_blocks.is_empty() {
            return len;
        }
        match self.sack_blocks_fitting() {
            0 => len,
            fit => len + 4 + 8 * fit,
        }
    }

    /// Writes the options and returns their length.
    ///
    /// # Panics
    /// If `out` is shorter than [`TcpOptions::encoded_len`].
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let words = self.words();
        let out = &mut out[..4 * words.len()];
        for (slot, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *slot = word.to_be_bytes();
        }
        out.len()
    }

    /// Returns the options as words of a header. Their length is [`TcpOptions::encoded_len`].
    #[inline(always)]
    pub(crate) fn words(&self) -> ArrayVec<u32, { OPTIONS_LEN_MAX / 4 }> {
        let mut words = ArrayVec::new();
        if let Some(mss) = self.mss {
            words.push(u32::from_be_bytes([MSS, 4, 0, 0]) | u32::from(mss));
        }
        if let Some(timestamps) = self.timestamps {
            let [mut lead, tsval, tsecr] = timestamps.words();
            if self.sack_permitted {
                lead = u32::from_be_bytes([SACK_PERMITTED, 2, TIMESTAMPS, 10]);
            }
            words.push(lead);
            words.push(tsval);
            words.push(tsecr);
        } else if self.sack_permitted {
            words.push(u32::from_be_bytes([NOP, NOP, SACK_PERMITTED, 2]));
        }
        if let Some(shift) = self.window_scale {
            words.push(u32::from_be_bytes([NOP, WINDOW_SCALE, 3, shift]));
        }
        if let Some(timeout) = self.user_timeout {
            words.push(u32::from_be_bytes([USER_TIMEOUT, 4, 0, 0]) | u32::from(timeout));
        }
        if let Some(cookie) = self.fitting_cookie(4 * words.len()) {
            words.extend(cookie.as_chunks::<4>().0.iter().map(|word| u32::from_be_bytes(*word)));
        }
        if !self.sack_blocks.is_empty() {
            let fit = self.sack_blocks_fitting();
            if fit > 0 {
                words.push(u32::from_be_bytes([NOP, NOP, SACK, 2 + 8 * fit as u8]));
                words.extend(self.sack_blocks[..fit].iter().flat_map(|(start, end)| [start.0, end.0]));
            }
        }
        words
    }
}
