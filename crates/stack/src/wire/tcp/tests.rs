use super::*;
use arrayvec::ArrayVec;

fn emitted(options: &TcpOptions) -> Vec<u8> {
    let mut out = [0xee; 64];
    let len = emit(&TcpHeader::default(), options, &mut out);
    assert_eq!(len, TcpHeader::LEN + options.encoded_len());
    assert!(len <= TcpHeader::LEN_MAX && len.is_multiple_of(4));
    assert!(out[len..].iter().all(|&b| b == 0xee), "written beyond the returned length");
    out[TcpHeader::LEN..len].to_vec()
}

const TS: Timestamps = Timestamps { tsval: 0x0102_0304, tsecr: 0x0506_0708 };

fn blocks(n: u32) -> ArrayVec<(SeqNumber, SeqNumber), 4> {
    (0..n).map(|i| (SeqNumber(i * 16), SeqNumber(i * 16 + 8))).collect()
}

#[test]
fn sequence_numbers_wrap() {
    let top = SeqNumber(u32::MAX);
    assert_eq!(top + 2, SeqNumber(1));
    assert_eq!(SeqNumber(1) - 2, top);
    assert_eq!((SeqNumber(1) - top, top - SeqNumber(1)), (2, -2));
    assert!(top.lt(SeqNumber(0)) && SeqNumber(0).gt(top) && top.le(top) && top.ge(top));
    assert!(!SeqNumber(0).lt(top) && !top.lt(top) && !top.gt(top) && !SeqNumber(0).le(top));
    assert_eq!(top.max(SeqNumber(5)), SeqNumber(5));
    assert_eq!(top.min(SeqNumber(5)), top);
}

#[test]
fn numbers_2_31_apart_precede_each_other() {
    let (a, b) = (SeqNumber(0), SeqNumber(1 << 31));
    assert!(a.lt(b) && b.lt(a) && a.gt(b) && b.gt(a));
}

#[test]
fn flags_print_as_tcpdump_prints_them() {
    assert_eq!(format!("{:?}", TcpFlags::SYN | TcpFlags::ACK), "S.");
    assert_eq!(format!("{:?}", TcpFlags(0xff)), "FSRP.UEW");
    assert_eq!(format!("{:?}", TcpFlags::NONE), "none");
    assert!(TcpFlags(0x12).contains(TcpFlags::SYN) && !TcpFlags::SYN.contains(TcpFlags(0x12)));
    assert!(TcpFlags::SYN.intersects(TcpFlags(0x12)));
    assert_eq!(TcpFlags(0x12).without(TcpFlags::SYN), TcpFlags::ACK);
}

#[test]
fn syn_options_are_laid_out_as_linux_does() {
    let mut options = TcpOptions {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some(TS),
        ..Default::default()
    };
    assert_eq!(
        emitted(&options),
        [2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 3, 7],
        "mss, sackOK, timestamps, nop, wscale"
    );
    options.timestamps = None;
    assert_eq!(
        emitted(&options),
        [2, 4, 5, 0xb4, 1, 1, 4, 2, 1, 3, 3, 7],
        "mss, nop, nop, sackOK, nop, wscale"
    );
    options.sack_permitted = false;
    assert_eq!(emitted(&options), [2, 4, 5, 0xb4, 1, 3, 3, 7], "mss, nop, wscale");
    options.timestamps = Some(TS);
    assert_eq!(
        emitted(&options),
        [2, 4, 5, 0xb4, 1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 3, 7],
        "mss, nop, nop, timestamps, nop, wscale"
    );
}

#[test]
fn later_options_are_laid_out_as_linux_does() {
    let mut options = TcpOptions { timestamps: Some(TS), ..Default::default() };
    assert_eq!(emitted(&options), [1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8]);
    options.sack_blocks = blocks(1);
    assert_eq!(emitted(&options), [1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 5, 10, 0, 0, 0, 0, 0, 0, 0, 8]);
    options.timestamps = None;
    assert_eq!(emitted(&options), [1, 1, 5, 10, 0, 0, 0, 0, 0, 0, 0, 8]);
    assert_eq!(emitted(&TcpOptions::default()), []);
    let options = TcpOptions { user_timeout: Some(0x801e), ..Default::default() };
    assert_eq!(emitted(&options), [28, 4, 0x80, 0x1e]);
}

#[test]
fn sack_blocks_that_do_not_fit_are_omitted() {
    let mut options = TcpOptions { sack_blocks: blocks(4), ..Default::default() };
    assert_eq!(emitted(&options).len(), 36);
    options.timestamps = Some(TS);
    assert_eq!(emitted(&options).len(), 40);
    assert_eq!(TcpOptions::parse(&emitted(&options)).sack_blocks, blocks(3));
    options.user_timeout = Some(30);
    assert_eq!(TcpOptions::parse(&emitted(&options)).sack_blocks, blocks(2));
    options.mss = Some(536);
    options.window_scale = Some(0);
    assert_eq!(TcpOptions::parse(&emitted(&options)).sack_blocks, blocks(1));
}

#[test]
fn malformed_option_ends_parsing() {
    let good = TcpOptions { mss: Some(1460), ..Default::default() };
    for bad in [&[3u8][..], &[3, 0, 7], &[3, 1, 7], &[3, 4, 7], &[8, 10, 0, 0], &[99, 255]] {
        let options = [&[2, 4, 5, 0xb4], bad].concat();
        assert_eq!(TcpOptions::parse(&options), good, "{bad:?}");
    }
    assert_eq!(
        TcpOptions::parse(&[0, 2, 4, 5, 0xb4]),
        TcpOptions::default(),
        "options after end-of-list are ignored"
    );
}

#[test]
fn unknown_and_malformed_options_are_skipped() {
    let good = TcpOptions { mss: Some(1460), ..Default::default() };
    for odd in [
        &[254u8, 4, 0, 0][..],
        &[99, 2],
        &[3, 4, 7, 7],
        &[8, 9, 0, 0, 0, 0, 0, 0, 0],
        &[5, 2],
        &[5, 9, 1, 2, 3, 4, 5, 6, 7],
        &[5, 11, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        &[4, 3, 0],
        &[2, 4, 0, 0],
    ] {
        let options = [&[1], odd, &[2, 4, 5, 0xb4]].concat();
        assert_eq!(TcpOptions::parse(&options), good, "{odd:?}");
    }
}

#[test]
fn window_scale_above_14_is_clamped() {
    assert_eq!(TcpOptions::parse(&[3, 3, 14]).window_scale, Some(14));
    assert_eq!(TcpOptions::parse(&[3, 3, 15]).window_scale, Some(14));
    assert_eq!(TcpOptions::parse(&[3, 3, 255]).window_scale, Some(14));
}

#[test]
fn timestamps_only_rejects_other_layouts() {
    let options = emitted(&TcpOptions { timestamps: Some(TS), ..Default::default() });
    assert_eq!(TcpOptions::parse_timestamps_only(&options), Some(TS));
    assert_eq!(TcpOptions::parse_timestamps_only(&options[..11]), None);
    let swapped = [&options[2..], &[1, 1]].concat();
    assert_eq!(TcpOptions::parse_timestamps_only(&swapped), None);
    assert_eq!(TcpOptions::parse(&swapped).timestamps, Some(TS));
}

#[test]
fn segment_round_trips() {
    let header = TcpHeader {
        src_port: 0x1234,
        dst_port: 80,
        seq: SeqNumber(0xdead_beef),
        ack: SeqNumber(0x0bad_cafe),
        flags: TcpFlags::ACK | TcpFlags::PSH | TcpFlags::FIN,
        window: 0xfff0,
        urg_ptr: 9,
        header_len: 32,
    };
    let options = TcpOptions { timestamps: Some(TS), ..Default::default() };
    let mut out = [0xee; 40];
    assert_eq!(emit(&header, &options, &mut out), 32);
    assert_eq!(out[16..18], [0, 0]);
    let segment = TcpSegment::parse(&out).unwrap();
    assert_eq!(segment.header, header);
    assert_eq!((segment.options.len(), segment.payload, segment.seq_len()), (12, &[0xee; 8][..], 9));
    assert_eq!(TcpOptions::parse(segment.options), options);
}

#[test]
fn impossible_data_offsets_are_rejected() {
    let mut bytes = [0; 32];
    for offset in 0..16u8 {
        bytes[12] = offset << 4;
        let expected = match offset {
            0..5 => Err(WireError::BadLength),
            5..=8 => Ok(32 - usize::from(offset) * 4),
            _ => Err(WireError::Truncated),
        };
        assert_eq!(TcpSegment::parse(&bytes).map(|s| s.payload.len()), expected, "{offset}");
    }
    assert_eq!(TcpSegment::parse(&bytes[..19]), Err(WireError::Truncated));
}

#[test]
fn aligned_parser_matches_the_general_parser() {
    // All sequences of up to four words that occur in practice, and similar ones.
    let words: [[u8; 4]; 12] = [
        [2, 4, 5, 0xb4],
        [2, 4, 0, 0],
        [1, 3, 3, 7],
        [1, 3, 3, 99],
        [1, 1, 4, 2],
        [4, 2, 8, 10],
        [1, 1, 8, 10],
        [4, 2, 1, 1],
        [1, 1, 5, 10],
        [0, 0, 0, 0],
        [1, 2, 3, 4],
        [8, 10, 1, 1],
    ];
    let (mut aligned, mut others) = (0, 0);
    let mut options = Vec::new();
    for number in 0..12_usize.pow(4) * 5 {
        let (mut rest, len) = (number / 5, number % 5);
        options.clear();
        for _ in 0..len {
            options.extend(words[rest % 12]);
            rest /= 12;
        }
        match TcpOptions::parse_aligned(&options) {
            Some(parsed) => {
                aligned += 1;
                assert_eq!(parsed, TcpOptions::parse_slow(&options), "{options:?}");
            }
            None => others += 1,
        }
    }
    assert!(aligned > 1000 && others > 1000, "{aligned} and {others}");
    assert_eq!(TcpOptions::parse_aligned(&[2, 4, 5, 0xb4, 1]), None, "an odd byte");
}

#[test]
fn fast_open_cookies_round_trip() {
    for (len, experimental) in [(0, false), (0, true), (4, false), (8, false), (8, true), (16, false)] {
        let cookie = FastOpenCookie::new(&[7; 16][..len], experimental);
        let options = TcpOptions { mss: Some(1460), fastopen: Some(cookie), ..Default::default() };
        let bytes = emitted(&options);
        assert_eq!((bytes.len(), TcpOptions::parse(&bytes)), (options.encoded_len(), options), "{len}");
    }
    for (len, body) in [(3, 1), (4, 2), (20, 18)] {
        let option = [&[34, len][..], &vec![7; body]].concat();
        assert_eq!(TcpOptions::parse(&option).fastopen, None, "a cookie of {body} bytes");
    }
}
