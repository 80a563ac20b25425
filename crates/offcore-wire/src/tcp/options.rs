//! TCP options (RFC 9293, 3.1; RFC 7323; RFC 2018) as values: parsed from a segment, and written in the layout of
//! Linux.

use arrayvec::ArrayVec;

/// Maximum length of the options in bytes.
pub const MAX_OPTIONS_LEN: usize = 40;

/// Maximum number of SACK blocks in a segment, limited by the data offset.
pub const MAX_SACK_BLOCKS: usize = 4;

/// The maximum window scale (RFC 7323, 2.3).
pub const MAX_WINDOW_SCALE: u8 = 14;

mod kind {
    pub(super) const END: u8 = 0;
    pub(super) const NOP: u8 = 1;
    pub(super) const MSS: u8 = 2;
    pub(super) const WINDOW_SCALE: u8 = 3;
    pub(super) const SACK_PERMITTED: u8 = 4;
    pub(super) const SACK: u8 = 5;
    pub(super) const TIMESTAMPS: u8 = 8;
}

/// The supported options. By default, all are absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TcpOptions {
    /// Maximum segment size in bytes; only on a SYN.
    pub mss: Option<u16>,
    /// Shift count in bits for later windows; only on a SYN.
    pub window_scale: Option<u8>,
    /// Whether the sender supports [`TcpOptions::sack`]; only on a SYN.
    pub sack_permitted: bool,
    pub timestamps: Option<Timestamps>,
    /// Selective acknowledgements, the newest first.
    pub sack: ArrayVec<SackBlock, MAX_SACK_BLOCKS>,
}

/// The timestamps option (RFC 7323, 3).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timestamps {
    /// The sender's clock.
    pub value: u32,
    /// The receiver's timestamp that the sender received last. Only valid with [`super::TcpFlags::ACK`].
    pub echo: u32,
}

/// A block of received data (RFC 2018, 3).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SackBlock {
    /// Its first sequence number.
    pub start: u32,
    /// The sequence number behind its last byte.
    pub end: u32,
}

impl TcpOptions {
    /// No options.
    pub const NONE: Self = Self {
        mss: None,
        window_scale: None,
        sack_permitted: false,
        timestamps: None,
        sack: ArrayVec::new_const(),
    };

    /// Adds the options of a segment. Parsing cannot fail (RFC 9293, MUST-6 and MUST-7): unknown options, and known
    /// options with a wrong length, are skipped by their length. An option with a length below 2 or beyond the end of
    /// the bytes ends the options. If an option occurs twice, the last one is used. A window scale above
    /// [`MAX_WINDOW_SCALE`] is replaced by this value (RFC 7323, 2.3).
    #[inline]
    pub fn read(&mut self, options: &[u8]) {
        // NOP, NOP and timestamps only: nearly every segment of a connection with timestamps.
        if let &[kind::NOP, kind::NOP, kind::TIMESTAMPS, 10, v0, v1, v2, v3, e0, e1, e2, e3] = options {
            let value = u32::from_be_bytes([v0, v1, v2, v3]);
            let echo = u32::from_be_bytes([e0, e1, e2, e3]);
            self.timestamps = Some(Timestamps { value, echo });
        } else {
            self.walk(options);
        }
    }

    fn walk(&mut self, options: &[u8]) {
        let mut rest = options;
        loop {
            rest = match *rest {
                [] | [kind::END, ..] => return,
                [kind::NOP, ref rest @ ..] => rest,
                [kind, len, ..] => match rest.split_at_checked(len.into()) {
                    Some(([_, _, value @ ..], rest)) => {
                        self.take(kind, value);
                        rest
                    }
                    _ => return,
                },
                [_] => return,
            };
        }
    }

    /// Stores a known option. `value` is the part behind its length.
    fn take(&mut self, kind: u8, value: &[u8]) {
        match (kind, value) {
            (kind::MSS, &[high, low]) => self.mss = Some(u16::from_be_bytes([high, low])),
            (kind::WINDOW_SCALE, &[shift]) => self.window_scale = Some(shift.min(MAX_WINDOW_SCALE)),
            (kind::SACK_PERMITTED, []) => self.sack_permitted = true,
            (kind::TIMESTAMPS, _) => {
                if let Some((value, echo)) = pair(value) {
                    self.timestamps = Some(Timestamps { value, echo });
                }
            }
            (kind::SACK, _) => {
                let (blocks, tail) = value.as_chunks::<8>();
                if tail.is_empty() && !blocks.is_empty() {
                    let blocks = blocks.iter().filter_map(|block| pair(block));
                    let blocks = blocks.map(|(start, end)| SackBlock { start, end });
                    self.sack = blocks.take(MAX_SACK_BLOCKS).collect();
                }
            }
            _ => {}
        }
    }

    /// Returns the length of the options as [`write`](Self::write) writes them, in bytes: a multiple of 4
    /// up to [`MAX_OPTIONS_LEN`].
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "no collection, but what a header has room for")]
    pub fn len(&self) -> usize {
        let blocks = match self.sack_blocks() {
            0 => 0,
            blocks => 4 + 8 * blocks,
        };
        self.len_without_sack() + blocks
    }

    #[inline]
    fn len_without_sack(&self) -> usize {
        // With timestamps, "SACK permitted" replaces the two NOPs before them.
        let sack_permitted = self.sack_permitted && self.timestamps.is_none();
        4 * usize::from(self.mss.is_some())
            + 12 * usize::from(self.timestamps.is_some())
            + 4 * usize::from(sack_permitted)
            + 4 * usize::from(self.window_scale.is_some())
    }

    /// Returns the number of SACK blocks that fit.
    #[inline]
    fn sack_blocks(&self) -> usize {
        // The other options have at most 20 bytes.
        self.sack.len().min((MAX_OPTIONS_LEN - self.len_without_sack() - 4) / 8)
    }

    /// Writes the options and returns their length in bytes, [`len`](Self::len). Each option is padded with leading
    /// NOPs to whole 32-bit words. The order is that in which Linux writes them: MSS; timestamps, with "SACK permitted"
    /// instead of the NOPs; window scale; SACK blocks. SACK blocks that exceed [`MAX_OPTIONS_LEN`] are omitted,
    /// beginning with the last. If `to` is shorter than [`len`](Self::len), nothing is written and 0 is returned.
    #[inline]
    pub fn write(&self, to: &mut [u8]) -> usize {
        let len = self.len();
        let Some(to) = to.get_mut(..len) else { return 0 };
        let (words, _) = to.as_chunks_mut::<4>();
        let mut words = words.iter_mut();
        let mut put = |word: [u8; 4]| {
            if let Some(to) = words.next() {
                *to = word;
            }
        };
        if let Some(mss) = self.mss {
            let [high, low] = mss.to_be_bytes();
            put([kind::MSS, 4, high, low]);
        }
        let front = if self.sack_permitted { [kind::SACK_PERMITTED, 2] } else { [kind::NOP; 2] };
        if let Some(Timestamps { value, echo }) = self.timestamps {
            put([front[0], front[1], kind::TIMESTAMPS, 10]);
            put(value.to_be_bytes());
            put(echo.to_be_bytes());
        } else if self.sack_permitted {
            put([kind::NOP, kind::NOP, front[0], front[1]]);
        }
        if let Some(shift) = self.window_scale {
            put([kind::NOP, kind::WINDOW_SCALE, 3, shift]);
        }
        let blocks = self.sack_blocks();
        if blocks > 0 {
            #[allow(clippy::cast_possible_truncation, reason = "34 at most")]
            let len = (2 + 8 * blocks) as u8;
            put([kind::NOP, kind::NOP, kind::SACK, len]);
            for block in self.sack.iter().take(blocks) {
                put(block.start.to_be_bytes());
                put(block.end.to_be_bytes());
            }
        }
        len
    }
}

/// Parses exactly two 32-bit numbers.
fn pair(value: &[u8]) -> Option<(u32, u32)> {
    let ([first, second], []) = value.as_chunks::<4>() else { return None };
    Some((u32::from_be_bytes(*first), u32::from_be_bytes(*second)))
}

#[cfg(test)]
mod tests;
