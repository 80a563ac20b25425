//! Every kernel and every length against a byte-by-byte oracle, with guard bytes on both sides.

use super::*;

const GUARD: usize = 64;

/// A source of counting bytes, and a destination of guard bytes.
fn buffers(len: usize) -> (Vec<u8>, Vec<u8>) {
    ((0..len + 2 * GUARD).map(|i| (i * 7 + i / 251) as u8).collect(), vec![0xee; len + 2 * GUARD])
}

fn lengths() -> impl Iterator<Item = usize> {
    (0..1100).chain([1514, 1526, 2047, 2048, 2049, 4095, 9018, 65535, 65536, 65537, 300_000])
}

fn assert_only(destination: &[u8], range: std::ops::Range<usize>, expected: &[u8], what: &str) {
    assert!(destination[range.clone()] == *expected, "{what}: wrong content");
    let outside = destination[..range.start].iter().chain(&destination[range.end..]);
    assert!(outside.copied().all(|byte| byte == 0xee), "{what}: bytes outside were written");
}

#[test]
fn every_kernel_copies_every_length_and_nothing_else() {
    for len in lengths() {
        for (from, to) in [(0, 0), (1, 0), (0, 13), (52, 12), (63, 1)] {
            let (source, mut destination) = buffers(len);
            for (k, burst) in kernel::runnable().into_iter().enumerate() {
                destination.fill(0xee);
                let op = Copy {
                    src: source[from..].as_ptr(),
                    dst: destination[to..].as_mut_ptr(),
                    len: len as u32,
                    token: 0,
                };
                // SAFETY: both buffers have `len` bytes after the offset, which is at most two guards.
                unsafe { burst(&[op]) };
                assert_only(
                    &destination,
                    to..to + len,
                    &source[from..from + len],
                    &format!("kernel {k}, {len} B, {from}->{to}"),
                );
            }
        }
    }
}

#[test]
fn bursts_of_mixed_lengths_land_where_they_should() {
    let mut copier = Copier::default();
    for round in 0..200usize {
        let lens: Vec<usize> = (0..1 + round % 64).map(|i| (i * 97 + round * 31) % 1600).collect();
        let (source, _) = buffers(1600);
        let mut destinations: Vec<Vec<u8>> = lens.iter().map(|_| vec![0xee; 1600]).collect();
        let ops: Vec<Copy> = destinations
            .iter_mut()
            .zip(&lens)
            .enumerate()
            .map(|(i, (to, &len))| Copy {
                src: source[i..].as_ptr(),
                dst: to.as_mut_ptr(),
                len: len as u32,
                token: 0,
            })
            .collect();
        // SAFETY: every source has 1600 bytes after an offset below 64, every destination has 1600.
        unsafe { copier.copy_burst(&ops) };
        for (i, (to, &len)) in destinations.iter().zip(&lens).enumerate() {
            assert_only(to, 0..len, &source[i..i + len], &format!("round {round}, operation {i}"));
        }
    }
}

#[test]
fn the_rest_of_a_copy_and_of_a_fill_starts_at_the_byte_that_is_missing() {
    let (source, _) = buffers(200);
    for len in [0usize, 1, 7, 8, 9, 40, 200] {
        for done in 0..=len + 1 {
            let skipped = done.min(len);
            let mut destination = vec![0xee; len];
            let op = Copy { src: source.as_ptr(), dst: destination.as_mut_ptr(), len: len as u32, token: 0 };
            // SAFETY: source and destination have `len` bytes.
            unsafe { copy_one(&op, done as u32) };
            assert_eq!(destination[skipped..], source[skipped..len]);
            assert!(destination[..skipped].iter().all(|&byte| byte == 0xee));

            let pattern = 0x8877_6655_4433_2211u64;
            let mut destination = vec![0xee; len];
            let op = Fill { dst: destination.as_mut_ptr(), pattern, len: len as u32, token: 0 };
            // SAFETY: the destination has `len` bytes.
            unsafe { fill_one(&op, done as u32) };
            let expected: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(len).collect();
            assert_eq!(destination[skipped..], expected[skipped..]);
            assert!(destination[..skipped].iter().all(|&byte| byte == 0xee));
        }
    }
}
