use offcore_mem::{HEADROOM, Hugepages, PoolCache};
use proptest::prelude::*;

use super::*;

const SIZE: usize = 2048;

/// Returns a packet for each of `contents`, in one buffer per part.
fn packets(cache: &mut PoolCache, contents: &[Vec<Vec<u8>>]) -> Vec<Packet> {
    let packet = |parts: &Vec<Vec<u8>>| {
        let mut chain: Option<Packet> = None;
        for part in parts.iter().rev() {
            let mut buffer = cache.take_chain(HEADROOM, part.len()).unwrap();
            assert!(!buffer.is_segmented());
            buffer.bytes_mut().copy_from_slice(part);
            chain = Some(match chain {
                Some(rest) => cache.pool().link(buffer, rest),
                None => buffer,
            });
        }
        chain.unwrap()
    };
    contents.iter().map(packet).collect()
}

fn pool() -> &'static Pool {
    static POOL: std::sync::OnceLock<&Pool> = std::sync::OnceLock::new();
    POOL.get_or_init(|| Pool::new(4096, SIZE, Hugepages::None).unwrap())
}

/// Runs `work`. Returns results, and the packets' bytes.
fn run(work: &CpuWork, contents: &[Vec<Vec<u8>>]) -> (Vec<u32>, Vec<Vec<u8>>) {
    let mut cache = pool().cache();
    let mut burst = packets(&mut cache, contents);
    let mut results = vec![0xdead_beef; burst.len() + 1];
    let hits = work.run(pool(), &mut burst, &mut results);
    assert_eq!(results.pop(), Some(0xdead_beef), "what is behind the burst's results is left alone");
    assert_eq!(hits as usize, results.iter().filter(|result| **result != 0).count());
    let bytes = burst.iter().map(|packet| pool().segments(packet).flatten().copied().collect()).collect();
    cache.free_all(burst);
    (results, bytes)
}

/// Computes the CRC-32C bit by bit (RFC 3720, B.4; reflected polynomial).
fn crc32c_by_bits(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}

/// Computes the checksum by a literal implementation of RFC 1071.
fn checksum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum = words.fold(0, |sum, word| {
        let sum = sum + word;
        (sum & 0xffff) + (sum >> 16)
    });
    !sum & 0xffff
}

/// Returns the lowest of `patterns` that is a window of the bytes, plus one.
fn lowest(patterns: &Patterns, bytes: &[u8]) -> u32 {
    let occurs = |pattern: &[u8]| bytes.windows(pattern.len()).any(|window| window == pattern);
    patterns.iter().position(occurs).map_or(0, |number| number as u32 + 1)
}

/// Returns the expected result and bytes of a packet.
fn model(kind: Kind, swap: bool, skip: usize, patterns: &Patterns, packet: &[u8]) -> (u32, Vec<u8>) {
    let mut bytes = packet.to_vec();
    if swap && bytes.len() >= 12 {
        for i in 0..6 {
            bytes.swap(i, i + 6);
        }
    }
    let payload = bytes.get(skip..).unwrap_or(&[]);
    let result = match kind {
        _ if bytes.is_empty() => 0,
        Kind::Nothing => 0,
        Kind::Crc32c => crc32c_by_bits(payload),
        Kind::Checksum => checksum(payload),
        Kind::Match => lowest(patterns, payload),
    };
    (result, bytes)
}

#[test]
fn results_match_published_vectors() {
    let sum = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
    let ascending: Vec<u8> = (0..32).collect();
    for (kind, source, content, expected) in [
        (Kind::Crc32c, "RFC 3720", &[0; 32][..], 0x8a91_36aa),
        (Kind::Crc32c, "RFC 3720", &[0xff; 32], 0x62a8_ab43),
        (Kind::Crc32c, "RFC 3720", &ascending, 0x46dd_794e),
        (Kind::Crc32c, "the catalogue of CRCs", b"123456789", 0xe306_9283),
        (Kind::Checksum, "RFC 1071", &sum, 0x220d),
    ] {
        let work = CpuWork::new(kind, false, 0, 0, None).unwrap();
        assert_eq!(run(&work, &[vec![content.to_vec()]]).0, [expected], "{source}: {content:?}");
    }
}

#[test]
fn empty_payload_differs_from_empty_packet() {
    let patterns = Patterns::from_list(["a"]).unwrap();
    for (kind, of_nothing) in
        [(Kind::Nothing, 0), (Kind::Crc32c, 0), (Kind::Checksum, 0xffff), (Kind::Match, 0)]
    {
        let work = CpuWork::new(kind, true, 20, 0, Some(&patterns)).unwrap();
        let contents = [vec![vec![]], vec![vec![b'a'; 20]], vec![vec![b'a'; 3]], vec![vec![], vec![]]];
        assert_eq!(run(&work, &contents).0, [0, of_nothing, of_nothing, 0], "{kind:?}");
    }
}

#[test]
fn swap_precedes_work_from_12_bytes_on() {
    let patterns = Patterns::from_list(["ghijklabcdef"]).unwrap();
    let work = CpuWork::new(Kind::Match, true, 0, 0, Some(&patterns)).unwrap();
    let contents = [
        vec![b"abcdefghijkl".to_vec()],
        vec![b"abcdefghijk".to_vec()],
        vec![b"abcdefghijklm".to_vec()],
        vec![b"ab".to_vec(), b"cdefghi".to_vec(), b"jklm".to_vec()],
        vec![b"ab".to_vec(), b"cdefghijk".to_vec()],
    ];
    let (results, bytes) = run(&work, &contents);
    assert_eq!(results, [1, 0, 1, 1, 0]);
    let expected = ["ghijklabcdef", "abcdefghijk", "ghijklabcdefm", "ghijklabcdefm", "abcdefghijk"];
    assert_eq!(bytes, expected.map(|bytes| bytes.as_bytes().to_vec()));
}

#[test]
fn match_spans_buffers_but_not_the_header() {
    let patterns = Patterns::from_list(["needle"]).unwrap();
    for forced_ns in [0, 1] {
        let work = CpuWork::new(Kind::Match, false, 4, forced_ns, Some(&patterns)).unwrap();
        let parts = |parts: &[&str]| parts.iter().map(|part| part.as_bytes().to_vec()).collect::<Vec<_>>();
        let contents = [
            parts(&["headnee", "dle"]),
            parts(&["headn", "e", "", "e", "d", "le"]),
            parts(&["he", "adneedle"]),
            parts(&["heaneedle"]),
            parts(&["hea", "needle"]),
            parts(&["headneed", "xle"]),
        ];
        assert_eq!(run(&work, &contents).0, [1, 1, 1, 0, 0, 0]);
    }
}

#[test]
fn forced_times_add_up() {
    let contents = vec![vec![vec![1; 64]]; 50];
    for kind in [Kind::Nothing, Kind::Crc32c] {
        let work = CpuWork::new(kind, true, 0, 20_000, None).unwrap();
        let start = tsc::now();
        let (results, _) = run(&work, &contents);
        assert!(tsc::now() - start >= tsc::ticks(Duration::from_micros(50 * 20)), "less than 50 times 20 us");
        assert_eq!(results, run(&CpuWork::new(kind, true, 0, 0, None).unwrap(), &contents).0);
    }
}

#[test]
fn match_needs_patterns() {
    let error = CpuWork::new(Kind::Match, false, 0, 0, None).unwrap_err();
    assert!(error.to_string().contains("give a pattern file"), "{error}");
    assert_eq!(CpuWork::new(Kind::Crc32c, false, 0, 0, None).unwrap().memory(), 0);
    let work = CpuWork::new(Kind::Match, false, 0, 0, Some(&Patterns::from_list(["a"]).unwrap())).unwrap();
    assert!(work.memory() > 0);
    assert_eq!(run(&work, &[]), (vec![], vec![]));
}

#[test]
#[should_panic(expected = "range end index 1 out of range")]
fn fewer_results_than_packets_are_refused() {
    let work = CpuWork::new(Kind::Nothing, false, 0, 0, None).unwrap();
    let mut burst = packets(&mut pool().cache(), &[vec![vec![1]]]);
    work.run(pool(), &mut burst, &mut []);
}

fn byte() -> impl Strategy<Value = u8> {
    prop::sample::select(vec![0x00, b'a', b'b', b'c', 0xff])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn results_and_bytes_match_model(
        kind in prop::sample::select(vec![Kind::Nothing, Kind::Crc32c, Kind::Checksum, Kind::Match]),
        swap: bool,
        skip in 0..20u32,
        forced_ns in 0..2u32,
        patterns in prop::collection::vec(prop::collection::vec(byte(), 1..6), 1..10),
        contents in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(byte(), 0..30), 1..4),
            0..20,
        ),
    ) {
        let patterns = Patterns::from_list(&patterns).unwrap();
        let work = CpuWork::new(kind, swap, skip, forced_ns, Some(&patterns)).unwrap();
        let (results, bytes) = run(&work, &contents);
        for ((parts, result), bytes) in contents.iter().zip(results).zip(bytes) {
            let expected = model(kind, swap, skip as usize, &patterns, &parts.concat());
            prop_assert_eq!((result, bytes), expected);
        }
    }

    #[test]
    fn results_match_for_uneven_segments(
        content in prop::collection::vec(any::<u8>(), 1..9000),
        part in 1..1700usize,
        skip in 0..100u32,
    ) {
        let parts: Vec<Vec<u8>> = content.chunks(part).map(<[u8]>::to_vec).collect();
        prop_assume!(parts.len() <= 200);
        let at = content.len() / 2;
        let patterns = Patterns::from_list([&b"nowhere in there"[..], &content[at..content.len().min(at + 32)]]).unwrap();
        for kind in [Kind::Crc32c, Kind::Checksum, Kind::Match] {
            let work = CpuWork::new(kind, true, skip, 0, Some(&patterns)).unwrap();
            let (results, bytes) = run(&work, std::slice::from_ref(&parts));
            let expected = model(kind, true, skip as usize, &patterns, &content);
            prop_assert_eq!((results[0], &bytes[0]), (expected.0, &expected.1));
        }
    }
}
