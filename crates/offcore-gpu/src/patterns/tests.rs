use offcore_mem::testing::TempDir;
use proptest::prelude::*;

use super::*;

fn parse(text: &[u8]) -> Result<Patterns, PatternsError> {
    Patterns::parse("p.txt", text)
}

fn list(text: &[u8]) -> Vec<Vec<u8>> {
    parse(text).unwrap().iter().map(<[u8]>::to_vec).collect()
}

fn error(text: &[u8]) -> PatternsError {
    parse(text).unwrap_err()
}

#[test]
fn lines_are_patterns_in_order() {
    let mixed = b"# a comment\r\nGET /evil\r\n\r\n\n caf\xe9 \n#\nlast";
    let escapes = b"\\x00\\xfF\\x23#\n\\\\x41\\n\\r\\t\n\\x5cn\n";
    for (name, text, expected) in [
        ("comments and empty lines", &mixed[..], &[&b"GET /evil"[..], b" caf\xe9 ", b"last"][..]),
        ("both ends of lines", b"one\r\ntwo\n", &[b"one", b"two"]),
        ("one carriage return ends the line", b"a\r\r\n", &[b"a\r"]),
        ("a comment begins a line", b"a # b\n", &[b"a # b"]),
        ("escapes", escapes, &[b"\x00\xff##", b"\\x41\n\r\t", b"\\n"]),
        ("byte order mark", b"\xef\xbb\xbfone\n\xef\xbb\xbf\n", &[b"one", b"\xef\xbb\xbf"]),
        ("byte order mark and comment", b"\xef\xbb\xbf# comment\ntwo\n", &[b"two"]),
    ] {
        assert_eq!(list(text), expected, "{name}");
        let dir = TempDir::new();
        let read = Patterns::read(&dir.set("read", text)).unwrap();
        assert_eq!(read.iter().collect::<Vec<_>>(), expected, "{name}, from a file");
    }
}

#[test]
fn equal_patterns_are_kept() {
    let patterns = parse(b"abc\nab\nabc\nabd\nx\n").unwrap();
    assert_eq!((patterns.len(), patterns.longest(), patterns.total_len()), (5, 3, 12));
    assert_eq!(patterns.states(), 1 + 4 + 1, "root, a, ab, abc, abd, x");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let path = Path::new("/nonexistent/patterns");
    let error = Patterns::read(path).unwrap_err();
    assert!(matches!(&error, PatternsError::Unreadable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("/nonexistent/patterns") && text.contains("No such file"), "{text}");
    let directory = Patterns::read(&std::env::temp_dir()).unwrap_err();
    assert!(matches!(directory, PatternsError::Unreadable { .. }), "{directory:?}");
}

#[test]
fn a_file_without_a_pattern_is_refused() {
    for (text, count) in [(&b""[..], 0), (b"\n\r\n", 2), (b"# only\n#comments\n\n", 3)] {
        assert!(matches!(error(text), PatternsError::NoPattern { lines, .. } if lines == count));
    }
    let dir = TempDir::new();
    let path = dir.set("empty", "");
    let text = Patterns::read(&path).unwrap_err().to_string();
    assert!(text.contains(&*path.to_string_lossy()) && text.contains("one pattern per line"), "{text}");
}

#[test]
fn unescaped_nul_is_refused() {
    let error = error(b"fine\nab\0c\n");
    assert!(matches!(error, PatternsError::Binary { line: 2, column: 3, .. }), "{error:?}");
    assert!(error.to_string().contains("p.txt, line 2") && error.to_string().contains("\\x00"), "{error}");
    assert!(matches!(parse(b"\x7fELF\x02\x01\x01\0\0\0"), Err(PatternsError::Binary { line: 1, .. })));
}

#[test]
fn bad_escape_is_located() {
    let bad: [(&[u8], usize, &str); 7] = [
        (b"ab\\q", 3, "\\q"),
        (b"\\x4", 1, "\\x4"),
        (b"\\x4g1", 1, "\\x4g"),
        (b"\\xg4", 1, "\\xg4"),
        (b"\\X41", 1, "\\X"),
        (b"end\\", 4, "\\"),
        (b"\\\xe9", 1, "\\\\xe9"),
    ];
    for (line, place, shown) in bad {
        let text = [&b"fine\n"[..], line, b"\n"].concat();
        match error(&text) {
            PatternsError::Escape { line: 2, column, found, .. } => {
                assert_eq!((column, found.as_str()), (place, shown));
            }
            other => panic!("{other:?}"),
        }
    }
    let text = error(b"\\q").to_string();
    assert!(text.starts_with("p.txt, line 1: '\\q' at byte 1 is no escape: expected \\xNN"), "{text}");
}

#[test]
fn lengths_and_numbers_have_limits() {
    let longest = vec![b'a'; MAX_PATTERN_LEN];
    assert_eq!(parse(&longest).unwrap().longest(), MAX_PATTERN_LEN);
    assert_eq!(list(&b"\\x00".repeat(MAX_PATTERN_LEN))[0].len(), MAX_PATTERN_LEN, "escapes count once");
    let too_long = [b"x\n\n", &longest[..], b"a"].concat();
    assert!(matches!(error(&too_long), PatternsError::Length { line: 3, found: 1025, .. }));
    let empty: Result<_, _> = Patterns::from_list(["a", ""]);
    assert!(matches!(empty, Err(PatternsError::Length { line: 2, found: 0, .. })));

    let most = b"a\n".repeat(MAX_PATTERNS);
    assert_eq!(parse(&most).unwrap().len(), MAX_PATTERNS);
    let error = error(&[&most[..], b"b\n"].concat());
    assert!(matches!(error, PatternsError::TooMany { line: 65_537, .. }), "{error:?}");
}

#[test]
fn too_many_states_are_refused() {
    // 16,384 patterns whose first two bytes differ, with 1022 more bytes each: more than 2^24 states.
    let pattern = |n: usize| {
        let mut pattern = vec![b'z'; MAX_PATTERN_LEN];
        pattern[..2].copy_from_slice(&(n as u16).to_be_bytes());
        pattern
    };
    let error = Patterns::from_list((0..16_500).map(pattern)).unwrap_err();
    let expected = 1 + 16_500usize.div_ceil(256) + 16_500 * 1023;
    assert!(matches!(error, PatternsError::TooManyStates { found, .. } if found == expected), "{error:?}");
    let patterns = Patterns::from_list((0..1000).map(pattern)).unwrap();
    assert_eq!(patterns.states(), 1 + 4 + 1000 * 1023);
}

#[test]
fn random_patterns_depend_on_the_seed() {
    let patterns = Patterns::random(7, 5000, 8..=32).unwrap();
    assert_eq!(patterns, Patterns::random(7, 5000, 8..=32).unwrap());
    assert_ne!(patterns, Patterns::random(8, 5000, 8..=32).unwrap());
    assert_eq!((patterns.len(), patterns.longest()), (5000, 32));
    let lengths: std::collections::BTreeSet<usize> = patterns.iter().map(<[u8]>::len).collect();
    assert_eq!(lengths.into_iter().collect::<Vec<_>>(), (8..=32).collect::<Vec<_>>());
    assert!(patterns.states() > patterns.total_len() / 2, "random patterns have little in common");
    assert!(matches!(Patterns::random(1, 0, 8..=32), Err(PatternsError::NoPattern { .. })));
    assert!(matches!(Patterns::random(1, 1, 0..=0), Err(PatternsError::Length { found: 0, .. })));
    assert!(matches!(Patterns::random(1, 1, 2000..=2000), Err(PatternsError::Length { found: 2000, .. })));
    assert!(matches!(Patterns::random(1, 9, 2000..=usize::MAX), Err(PatternsError::Length { line: 1, .. })));
    #[allow(clippy::reversed_empty_ranges)]
    let none = Patterns::random(1, 1, 9..=8);
    assert!(matches!(none, Err(PatternsError::Length { .. })));
}

/// Returns any pattern as a line of a file. Bytes are escaped if necessary, and all bytes if `all` is set.
fn escaped(pattern: &[u8], all: bool) -> Vec<u8> {
    let mut line = Vec::new();
    for &byte in pattern {
        match byte {
            b'\\' if !all => line.extend(b"\\\\"),
            b'\t' if !all => line.extend(b"\\t"),
            0 | b'\n' | b'\r' | b'#' => line.extend(format!("\\x{byte:02x}").bytes()),
            _ if all => line.extend(format!("\\x{byte:02X}").bytes()),
            _ => line.push(byte),
        }
    }
    line
}

proptest! {
    #[test]
    fn patterns_round_trip(
        patterns in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..20), 1..20),
        all: bool,
        crlf: bool,
    ) {
        let lines: Vec<Vec<u8>> = patterns.iter().map(|pattern| escaped(pattern, all)).collect();
        let text = lines.join(if crlf { &b"\r\n"[..] } else { b"\n" });
        prop_assert_eq!(list(&text), patterns);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&text);
    }

    #[test]
    fn states_are_the_distinct_prefixes(
        patterns in prop::collection::vec(prop::collection::vec(0u8..3, 1..8), 1..30),
    ) {
        let prefixes: std::collections::HashSet<&[u8]> =
            patterns.iter().flat_map(|pattern| (0..=pattern.len()).map(|len| &pattern[..len])).collect();
        prop_assert_eq!(Patterns::from_list(&patterns).unwrap().states(), prefixes.len());
    }
}
