//! CRC as defined for CRC Generation and Copy with CRC: section 8.3.12 and appendix A.
//!
//! Appendix A pads the data with zeros to a multiple of the CRC's size. This module does not pad: a CRC that is
//! continued after a page fault at an arbitrary byte cannot be padded, and unpadded results match the well-known CRC32C
//! check values.

use crate::descriptor::Flags;

/// The bit order of a 32-bit CRC with the polynomial of iSCSI (CRC32C).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crc {
    /// Seed and result are not inverted and not bit-reversed: bit 31 is the coefficient of x³¹.
    pub bypass_inversion: bool,
    /// Bit 7 of each data byte is its most significant bit, instead of bit 0.
    pub bypass_reflection: bool,
}

impl Crc {
    /// Returns the variant that a descriptor's flags select (Table 8-19).
    pub(crate) fn from_flags(flags: Flags) -> Self {
        Self { bypass_inversion: flags.contains(Flags::OP_1), bypass_reflection: flags.contains(Flags::OP_2) }
    }

    /// Returns the descriptor flags that select this variant.
    pub(crate) fn flags(self) -> Flags {
        let mut flags = Flags::empty();
        flags.set(Flags::OP_1, self.bypass_inversion);
        flags.set(Flags::OP_2, self.bypass_reflection);
        flags
    }

    /// Returns the CRC of `data`, continued from `seed`: 0 at the start, then the previous result.
    pub fn of(self, data: &[u8], seed: u32) -> u32 {
        // The crc32c crate inverts its seed and its result and counts from bit 0. Undo the steps that are bypassed.
        let seed = if self.bypass_inversion { !seed.reverse_bits() } else { seed };
        let crc =
            if self.bypass_reflection { reflected(data, seed) } else { crc32c::crc32c_append(seed, data) };
        if self.bypass_inversion { (!crc).reverse_bits() } else { crc }
    }
}

/// Returns the CRC of `data` with the bits of every byte reversed.
fn reflected(data: &[u8], seed: u32) -> u32 {
    let mut turned = [0; 512];
    data.chunks(turned.len()).fold(seed, |crc, chunk| {
        for (turned, byte) in turned.iter_mut().zip(chunk) {
            *turned = byte.reverse_bits();
        }
        crc32c::crc32c_append(crc, &turned[..chunk.len()])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHECK: &[u8] = b"123456789";

    /// Long division, bit by bit, as described in appendix A.
    fn by_hand(crc: Crc, data: &[u8], seed: u32) -> u32 {
        let mut register = if crc.bypass_inversion { seed } else { !seed.reverse_bits() };
        for byte in data {
            for bit in 0..8 {
                let bit = byte >> if crc.bypass_reflection { 7 - bit } else { bit } & 1;
                let carry = (register >> 31) as u8 ^ bit;
                register = register << 1 ^ if carry == 1 { 0x1edc_6f41 } else { 0 };
            }
        }
        if crc.bypass_inversion { register } else { !register.reverse_bits() }
    }

    #[test]
    fn known_answers() {
        let crc = Crc::default();
        assert_eq!(crc.of(CHECK, 0), 0xe306_9283);
        // RFC 3720, section B.4; the RFC prints the bytes as they are sent.
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc.of(&[0; 32], 0).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(crc.of(&[0xff; 32], 0).to_le_bytes(), [0x43, 0xab, 0xa8, 0x62]);
        assert_eq!(crc.of(&ascending, 0).to_le_bytes(), [0x4e, 0x79, 0xdd, 0x46]);
        assert_eq!(crc.of(&descending, 0).to_le_bytes(), [0x5c, 0xdb, 0x3f, 0x11]);
        let read: Vec<u8> = [
            [0x01, 0xc0, 0, 0, 0, 0, 0, 0],
            [0; 8],
            [0x14, 0, 0, 0, 0, 0, 4, 0],
            [0, 0, 0, 0x14, 0, 0, 0, 0x18],
            [0x28, 0, 0, 0, 0, 0, 0, 0],
            [2, 0, 0, 0, 0, 0, 0, 0],
        ]
        .concat();
        assert_eq!(crc.of(&read, 0).to_le_bytes(), [0x56, 0x3a, 0x96, 0xd9]);
    }

    #[test]
    fn bypassed_crc_is_plain_division() {
        let plain = Crc { bypass_inversion: true, bypass_reflection: true };
        assert_eq!(plain.of(&[1], 0), 0x1edc_6f41);
        assert_eq!(plain.of(&[0x80], 0), by_hand(plain, &[0x80], 0));
        assert_eq!(plain.of(&[0; 100], 0), 0);
        assert_eq!(plain.of(&[], 0x1234_5678), 0x1234_5678);
    }

    proptest! {
        #[test]
        fn crc_matches_long_division(
            data in prop::collection::vec(any::<u8>(), 0..700), cut: prop::sample::Index, seed: u32,
            bypass_inversion: bool, bypass_reflection: bool,
        ) {
            let crc = Crc { bypass_inversion, bypass_reflection };
            let whole = crc.of(&data, seed);
            prop_assert_eq!(whole, by_hand(crc, &data, seed));
            let (head, tail) = data.split_at(cut.index(data.len() + 1));
            prop_assert_eq!(crc.of(tail, crc.of(head, seed)), whole);
            prop_assert_eq!(Crc::from_flags(crc.flags() | Flags::OP_0), crc);
        }
    }
}
