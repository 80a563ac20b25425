//! Tests of every routine and every length against a byte-by-byte oracle, with guard bytes on both sides.

use super::*;

const GUARD: usize = 64;

/// Returns a source of counting bytes, and a destination of guard bytes.
fn buffers(len: usize) -> (Vec<u8>, Vec<u8>) {
    ((0..len + 2 * GUARD).map(|i| (i * 7 + i / 251) as u8).collect(), vec![0xee; len + 2 * GUARD])
}

fn assert_only(destination: &[u8], range: std::ops::Range<usize>, expected: &[u8], what: &str) {
    assert!(destination[range.clone()] == *expected, "{what}: wrong content");
    let outside = destination[..range.start].iter().chain(&destination[range.end..]);
    assert!(outside.copied().all(|byte| byte == 0xee), "{what}: bytes outside were written");
}

fn available() -> impl Iterator<Item = Routine> {
    Routine::ALL.into_iter().filter(|routine| routine.is_available())
}

/// Makes a copy with every routine that this CPU supports.
fn assert_all_copy(len: usize, from: usize, to: usize, source: &[u8], destination: &mut [u8]) {
    let destination = &mut destination[..len + 2 * GUARD];
    for routine in available() {
        destination.fill(0xee);
        let op = CopyOp {
            src: source[from..].as_ptr(),
            dst: destination[to..].as_mut_ptr(),
            len: len as u32,
            token: 0,
        };
        // SAFETY: both buffers have `len` bytes after the offset, which is not more than two guards.
        unsafe { routine.run(&[op]) };
        let expected = &source[from..from + len];
        assert_only(destination, to..to + len, expected, &format!("{routine}, {len} B, {from}->{to}"));
    }
}

#[test]
fn routines_copy_every_length() {
    let (source, mut destination) = buffers(300_000);
    for len in (0..=4200).chain([9018, 65535, 65536, 65537, 300_000]) {
        // Odd offsets that differ for every length.
        let (from, to) = ((len * 14 + 1) % 127, (len * 22 + 13) % 127);
        assert_all_copy(len, from, to, &source, &mut destination);
    }
}

#[test]
fn routines_copy_every_alignment() {
    let (source, mut destination) = buffers(1526);
    for (from, to) in (0..64).flat_map(|from| (0..64).map(move |to| (from, to))) {
        // Lengths around the minimum for streaming, and a whole frame.
        for len in [60, 255, 256, 257, 383] {
            assert_all_copy(len, from, to, &source, &mut destination);
        }
    }
}

#[test]
fn routine_names_differ() {
    let mut names: Vec<_> = Routine::ALL.map(Routine::name).into();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Routine::ALL.len());
    for routine in [Routine::Plain, Routine::Ahead, Routine::NonTemporal] {
        assert!(routine(Width::Sse2).is_available());
    }
    println!("available: {:?}", available().map(Routine::name).collect::<Vec<_>>());
}

/// A deterministic test cannot show the necessity of a fence. It can show that the bytes are there after a burst of
/// every routine: the thread that waits for the flag finds them.
#[test]
fn copy_is_visible_before_publish() {
    use std::sync::atomic::{AtomicU32, Ordering};
    const COPIES: usize = 8;
    const LEN: usize = 1526;
    const ROUNDS: u32 = 200;
    let mut source = vec![0u8; COPIES * 2048];
    let mut destination = vec![0u8; COPIES * 2048];
    let (from, to) = (source.as_mut_ptr(), destination.as_mut_ptr().expose_provenance());
    for routine in available() {
        let (written, read) = (&AtomicU32::new(0), &AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for round in 1..=ROUNDS {
                    while written.load(Ordering::Acquire) != round {
                        std::thread::yield_now();
                    }
                    for at in (0..COPIES).flat_map(|i| (0..LEN).map(move |byte| i * 2048 + byte)) {
                        // SAFETY: the address is in the destination, which is written again only after `read` has been
                        // updated.
                        let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(to + at).read() };
                        assert_eq!(byte, round as u8, "{routine}, byte {at}");
                    }
                    read.store(round, Ordering::Release);
                }
            });
            for round in 1..=ROUNDS {
                // SAFETY: only this thread accesses the source.
                unsafe { from.write_bytes(round as u8, COPIES * 2048) };
                let list: [CopyOp; COPIES] = std::array::from_fn(|i| CopyOp {
                    src: from.wrapping_add(i * 2048),
                    dst: std::ptr::with_exposed_provenance_mut(to + i * 2048),
                    len: LEN as u32,
                    token: 0,
                });
                // SAFETY: each copy has its own 2048 bytes in both buffers; the other thread waits for the flag.
                unsafe { routine.run(&list) };
                written.store(round, Ordering::Release);
                while read.load(Ordering::Acquire) != round {
                    std::thread::yield_now();
                }
            }
        });
    }
}

#[test]
fn mixed_length_bursts_are_copied() {
    let mut copier = Copier::default();
    for round in 0..200usize {
        let lens: Vec<usize> = (0..1 + round % 64).map(|i| (i * 97 + round * 31) % 1600).collect();
        let (source, _) = buffers(1600);
        let mut destinations: Vec<Vec<u8>> = lens.iter().map(|_| vec![0xee; 1600]).collect();
        let ops: Vec<CopyOp> = destinations
            .iter_mut()
            .zip(&lens)
            .enumerate()
            .map(|(i, (to, &len))| CopyOp {
                src: source[i..].as_ptr(),
                dst: to.as_mut_ptr(),
                len: len as u32,
                token: 0,
            })
            .collect();
        // SAFETY: every source has 1600 bytes after an offset below 64, and every destination has 1600 bytes.
        unsafe { copier.copy_burst(&ops) };
        for (i, (to, &len)) in destinations.iter().zip(&lens).enumerate() {
            assert_only(to, 0..len, &source[i..i + len], &format!("round {round}, operation {i}"));
        }
    }
}

#[test]
fn rest_starts_at_the_missing_byte() {
    let (source, _) = buffers(200);
    for len in [0usize, 1, 7, 8, 9, 40, 200] {
        for done in 0..=len + 1 {
            let skipped = done.min(len);
            let mut destination = vec![0xee; len];
            let op =
                CopyOp { src: source.as_ptr(), dst: destination.as_mut_ptr(), len: len as u32, token: 0 };
            // SAFETY: source and destination have `len` bytes.
            unsafe { copy_one(&op, done as u32) };
            assert_eq!(destination[skipped..], source[skipped..len]);
            assert!(destination[..skipped].iter().all(|&byte| byte == 0xee));
        }
    }
}
