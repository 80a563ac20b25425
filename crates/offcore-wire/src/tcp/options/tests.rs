use etherparse::{TcpOptionElement, TcpOptionsIterator};
use proptest::prelude::*;

use super::*;

fn options() -> impl Strategy<Value = TcpOptions> {
    let timestamps = any::<(u32, u32)>().prop_map(|(value, echo)| Timestamps { value, echo });
    let block = any::<(u32, u32)>().prop_map(|(start, end)| SackBlock { start, end });
    (
        any::<Option<u16>>(),
        prop::option::of(0..=MAX_WINDOW_SCALE),
        any::<bool>(),
        prop::option::of(timestamps),
        prop::collection::vec(block, 0..=MAX_SACK_BLOCKS),
    )
        .prop_map(|(mss, window_scale, sack_permitted, timestamps, sack)| TcpOptions {
            mss,
            window_scale,
            sack_permitted,
            timestamps,
            sack: sack.into_iter().collect(),
        })
}

fn parse(bytes: &[u8]) -> TcpOptions {
    let mut options = TcpOptions::NONE;
    options.read(bytes);
    options
}

fn written(options: &TcpOptions) -> Vec<u8> {
    let mut to = [0xee; MAX_OPTIONS_LEN];
    let len = options.write(&mut to);
    assert!(to[len..].iter().all(|byte| *byte == 0xee));
    to[..len].to_vec()
}

const TS: Timestamps = Timestamps { value: 0x0102_0304, echo: 0x0506_0708 };

/// The bytes that `tcpdump -x` shows for a connection between two Linux hosts.
#[test]
fn option_layouts_match_linux() {
    let syn = TcpOptions {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some(Timestamps { value: 0x8a2e_c8d1, echo: 0 }),
        ..TcpOptions::default()
    };
    let bytes = [
        0x02, 0x04, 0x05, 0xb4, 0x04, 0x02, 0x08, 0x0a, 0x8a, 0x2e, 0xc8, 0xd1, 0, 0, 0, 0, 0x01, 0x03, 0x03,
        0x07,
    ];
    assert_eq!(written(&syn), bytes);
    assert_eq!(parse(&bytes), syn);

    // With `net.ipv4.tcp_timestamps=0`.
    let syn = TcpOptions { timestamps: None, ..syn };
    let bytes = [0x02, 0x04, 0x05, 0xb4, 0x01, 0x01, 0x04, 0x02, 0x01, 0x03, 0x03, 0x07];
    assert_eq!(written(&syn), bytes);
    assert_eq!(parse(&bytes), syn);

    let ack = TcpOptions { timestamps: Some(TS), ..TcpOptions::default() };
    let bytes = [1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(written(&ack), bytes);
    assert_eq!(parse(&bytes), ack);

    let sack = [SackBlock { start: 0x1122_3344, end: 0x1122_38ec }].into_iter().collect();
    let duplicate = TcpOptions { sack, ..ack };
    let bytes = [&bytes[..], &[1, 1, 5, 10, 0x11, 0x22, 0x33, 0x44, 0x11, 0x22, 0x38, 0xec]].concat();
    assert_eq!(written(&duplicate), bytes);
    assert_eq!(parse(&bytes), duplicate);
    assert!(written(&TcpOptions::default()).is_empty());
}

/// macOS and Windows use other orders.
#[test]
fn other_option_orders_are_parsed() {
    let macos = [2, 4, 5, 0xb4, 1, 3, 3, 6, 1, 1, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 4, 2, 0, 0];
    let expected = TcpOptions {
        mss: Some(1460),
        window_scale: Some(6),
        sack_permitted: true,
        timestamps: Some(Timestamps { echo: 0, ..TS }),
        ..TcpOptions::default()
    };
    assert_eq!(parse(&macos), expected);
    let windows = [2, 4, 5, 0xb4, 1, 3, 3, 8, 1, 1, 4, 2];
    let expected = TcpOptions { window_scale: Some(8), timestamps: None, ..expected };
    assert_eq!(parse(&windows), expected);
}

#[test]
fn invalid_option_length_ends_parsing() {
    let mss = TcpOptions { mss: Some(536), ..TcpOptions::default() };
    for lie in [
        &[8, 0, 3, 3, 7][..],
        &[8, 1, 3, 3, 7],
        &[8, 255, 3, 3, 7],
        &[8],
        &[254, 0],
        &[3, 4, 7],
        &[0, 3, 3, 7],
    ] {
        assert_eq!(parse(&[&[2, 4, 2, 24], lie].concat()), mss, "{lie:?}");
    }
}

#[test]
fn unknown_options_are_skipped() {
    let expected = TcpOptions { window_scale: Some(7), ..TcpOptions::default() };
    // Fast Open, an option without a value, MD5, and known options with wrong lengths: MSS, SACK permitted, SACK,
    // timestamps.
    for skipped in [
        &[34, 6, 1, 2, 3, 4][..],
        &[253, 2],
        &[[19, 18].to_vec(), vec![9; 16]].concat(),
        &[2, 3, 5],
        &[2, 2],
        &[4, 3, 1],
        &[5, 2],
        &[5, 9, 1, 2, 3, 4, 5, 6, 7],
        &[8, 9, 1, 2, 3, 4, 5, 6, 7],
        &[8, 11, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ] {
        assert_eq!(parse(&[skipped, &[3, 3, 7]].concat()), expected, "{skipped:?}");
    }
    let steep = parse(&[3, 3, 255]);
    assert_eq!(steep.window_scale, Some(14), "RFC 7323, 2.3");
    assert_eq!(parse(&[2, 4, 0, 1, 2, 4, 0, 2]).mss, Some(2));
}

#[test]
fn excess_sack_blocks_are_omitted() {
    let sack: ArrayVec<_, 4> = (0..4).map(|n| SackBlock { start: n * 10, end: n * 10 + 5 }).collect();
    let mut options = TcpOptions { sack, ..TcpOptions::default() };
    assert_eq!(written(&options).len(), 36);
    options.timestamps = Some(TS);
    assert_eq!(written(&options).len(), 40);
    assert_eq!(parse(&written(&options)).sack[..], options.sack[..3]);
    (options.mss, options.window_scale, options.sack_permitted) = (Some(1460), Some(1), true);
    assert_eq!(written(&options).len(), 40);
    assert_eq!(parse(&written(&options)).sack[..], options.sack[..2]);
    // This slice has one block more than fits into a header.
    let many = [&[5, 42][..], &[7; 40]].concat();
    assert_eq!(parse(&many).sack.len(), 4);
}

proptest! {
    #[test]
    fn written_form_round_trips(options in options()) {
        let bytes = written(&options);
        prop_assert_eq!(bytes.len(), options.len());
        prop_assert!(bytes.len().is_multiple_of(4) && bytes.len() <= MAX_OPTIONS_LEN);
        let read = parse(&bytes);
        let mut expected = options.clone();
        expected.sack.truncate(read.sack.len());
        prop_assert_eq!(&read, &expected);
        // An omitted block would not have fitted.
        let all_there = read.sack.len() == options.sack.len();
        prop_assert!(all_there || bytes.len() + 8 > MAX_OPTIONS_LEN);
        for len in 0..bytes.len() {
            let mut to = vec![0xee; len];
            prop_assert_eq!(options.write(&mut to), 0);
            prop_assert!(to.iter().all(|byte| *byte == 0xee));
        }
    }

    #[test]
    fn etherparse_parses_same_options(options in options()) {
        let mut expected = TcpOptions::default();
        for element in TcpOptionsIterator::from_slice(&written(&options)) {
            match element.unwrap() {
                TcpOptionElement::Noop => {}
                TcpOptionElement::MaximumSegmentSize(mss) => expected.mss = Some(mss),
                TcpOptionElement::WindowScale(shift) => expected.window_scale = Some(shift),
                TcpOptionElement::SelectiveAcknowledgementPermitted => expected.sack_permitted = true,
                TcpOptionElement::SelectiveAcknowledgement(first, more) => {
                    let blocks = [Some(first)].into_iter().chain(more).flatten();
                    expected.sack = blocks.map(|(start, end)| SackBlock { start, end }).collect();
                }
                TcpOptionElement::Timestamp(value, echo) => {
                    expected.timestamps = Some(Timestamps { value, echo });
                }
            }
        }
        prop_assert_eq!(parse(&written(&options)), expected);
    }

    #[test]
    fn fast_path_matches_option_walk(bytes: [u8; 8], fast: bool, other in prop::collection::vec(any::<u8>(), 0..60)) {
        let bytes = if fast { [&[1, 1, 8, 10][..], &bytes].concat() } else { other };
        let mut walked = TcpOptions::NONE;
        walked.walk(&bytes);
        prop_assert_eq!(parse(&bytes), walked);
    }

    #[test]
    fn truncated_options_parse_as_prefix(options in options()) {
        let bytes = written(&options);
        let whole = parse(&bytes);
        for len in 0..bytes.len() {
            let cut = parse(&bytes[..len]);
            prop_assert!(cut.mss.is_none() || cut.mss == whole.mss);
            prop_assert!(cut.window_scale.is_none() || cut.window_scale == whole.window_scale);
            prop_assert!(!cut.sack_permitted || whole.sack_permitted);
            prop_assert!(cut.timestamps.is_none() || cut.timestamps == whole.timestamps);
            prop_assert!(cut.sack.is_empty() || cut.sack == whole.sack);
        }
    }
}
