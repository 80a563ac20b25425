//! A script: bytes that decide, one choice after another; zeroes when they are over.
#![allow(dead_code, reason = "each user needs its own part")]

pub(crate) struct Script<'a>(pub(crate) &'a [u8]);

impl Script<'_> {
    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| match self.0.split_first() {
            Some((&first, rest)) => {
                self.0 = rest;
                first
            }
            None => 0,
        })
    }

    pub(crate) fn u8(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        if n <= 256 { usize::from(self.u8()) % n } else { usize::from(self.u16()) % n }
    }
}
