//! Layout of message payloads.

use super::{
    Code, FD_INDEX, FD_NONE, InflightArea, LogArea, MAX_REGIONS, MemoryRegion, MessageError, REGION,
    VringAddr, VringFd, VringState,
};

/// Payload and file descriptors of a message. Every method consumes all of them.
pub(super) struct Body<'a, F> {
    pub(super) code: Code,
    pub(super) payload: &'a [u8],
    pub(super) fds: Vec<F>,
}

impl<F> Body<'_, F> {
    /// Returns the payload as 8-byte words, and the file descriptors. Fails unless the numbers of both match exactly.
    fn words<const N: usize>(self, fds: usize) -> Result<([u64; N], Vec<F>), MessageError> {
        let (code, found) = (self.code, self.payload.len());
        if found != N * 8 {
            return Err(MessageError::Payload { code, found, expected: N * 8 });
        }
        if self.fds.len() != fds {
            return Err(MessageError::Fds { code, found: self.fds.len(), expected: fds });
        }
        let mut words = [0; N];
        for (word, bytes) in words.iter_mut().zip(self.payload.chunks_exact(8)) {
            *word = word_at(bytes, 0);
        }
        Ok((words, self.fds))
    }

    /// Like [`words`](Self::words), for a message with exactly one file descriptor.
    fn words_and_fd<const N: usize>(self) -> Result<([u64; N], F), MessageError> {
        let code = self.code;
        let (words, fds) = self.words(1)?;
        let fd = fds.into_iter().next().ok_or(MessageError::Fds { code, found: 0, expected: 1 })?;
        Ok((words, fd))
    }

    pub(super) fn empty(self) -> Result<(), MessageError> {
        self.words::<0>(0).map(|_| ())
    }

    pub(super) fn value(self) -> Result<(u64,), MessageError> {
        self.words(0).map(|([value], _)| (value,))
    }

    pub(super) fn state(self) -> Result<(VringState,), MessageError> {
        let ([word], _) = self.words(0)?;
        let (index, num) = fields_of_word(word);
        Ok((VringState { index, num },))
    }

    pub(super) fn addr(self) -> Result<(VringAddr,), MessageError> {
        let ([word, desc, used, avail, log], _) = self.words(0)?;
        let (index, flags) = fields_of_word(word);
        Ok((VringAddr { index, flags, desc, used, avail, log },))
    }

    pub(super) fn vring_fd(self) -> Result<(VringFd<F>,), MessageError> {
        let code = self.code;
        // The payload says how many file descriptors are expected. A payload of another length is rejected below.
        let none = self.payload.len() == 8 && word_at(self.payload, 0) & FD_NONE != 0;
        let ([value], fds) = self.words(usize::from(!none))?;
        if value & !(FD_INDEX | FD_NONE) != 0 {
            return Err(MessageError::FdPayload { code, found: value });
        }
        Ok((VringFd { index: (value & FD_INDEX) as u8, fd: fds.into_iter().next() },))
    }

    pub(super) fn regions(self) -> Result<(Vec<(MemoryRegion, F)>,), MessageError> {
        let (code, found) = (self.code, self.payload.len());
        if found < 8 {
            return Err(MessageError::Payload { code, found, expected: 8 + REGION });
        }
        let (count, _padding) = fields_of_word(word_at(self.payload, 0));
        let regions = usize::try_from(count).unwrap_or(usize::MAX);
        if regions == 0 || regions > MAX_REGIONS {
            return Err(MessageError::Regions { found: count });
        }
        let expected = 8 + regions * REGION;
        if found != expected {
            return Err(MessageError::Payload { code, found, expected });
        }
        if self.fds.len() != regions {
            return Err(MessageError::Fds { code, found: self.fds.len(), expected: regions });
        }
        let described = self.payload[8..].chunks_exact(REGION).map(region_at);
        Ok((described.zip(self.fds).collect(),))
    }

    pub(super) fn log(self) -> Result<(LogArea, F), MessageError> {
        let ([size, offset], fd) = self.words_and_fd()?;
        Ok((LogArea { size, offset }, fd))
    }

    /// Decodes the request for a region for descriptors in flight.
    pub(super) fn inflight(self) -> Result<(InflightArea,), MessageError> {
        Body { payload: &self.padded(), ..self }.words(0).map(|(words, _)| (area_of(words),))
    }

    /// Decodes a region for descriptors in flight and its file.
    pub(super) fn inflight_fd(self) -> Result<(InflightArea, F), MessageError> {
        Body { payload: &self.padded(), ..self }.words_and_fd().map(|(words, fd)| (area_of(words), fd))
    }

    /// Returns the payload, padded to 24 bytes if it has 20. The specified fields have 20 bytes, but front ends send a
    /// C struct, which has 4 bytes of padding.
    fn padded(&self) -> Vec<u8> {
        let mut payload = self.payload.to_vec(); // copy-ok: a message
        payload.extend([0; 4].iter().filter(|_| self.payload.len() == 20));
        payload
    }

    /// Decodes a message that has exactly one file descriptor and no payload.
    pub(super) fn fd(self) -> Result<(F,), MessageError> {
        self.words_and_fd::<0>().map(|(_, fd)| (fd,))
    }

    /// Decodes a single region and its file.
    pub(super) fn region(self) -> Result<(MemoryRegion, F), MessageError> {
        let ([_padding, guest, size, user, mmap_offset], fd) = self.words_and_fd()?;
        Ok((MemoryRegion { guest, size, user, mmap_offset }, fd))
    }

    /// Decodes a single region with an optional file descriptor.
    pub(super) fn removed_region(self) -> Result<(MemoryRegion, Option<F>), MessageError> {
        let fds = self.fds.len().min(1);
        let ([_padding, guest, size, user, mmap_offset], fds) = self.words(fds)?;
        Ok((MemoryRegion { guest, size, user, mmap_offset }, fds.into_iter().next()))
    }
}

/// The counterparts of [`Body`]'s methods: they return the payload and the file descriptors of a message.
pub(super) mod encode {
    use super::*;

    type Encoded<F> = (Vec<u8>, Vec<F>);

    fn words<F, const N: usize>(words: [u64; N], fds: impl IntoIterator<Item = F>) -> Encoded<F> {
        (words.map(u64::to_ne_bytes).concat(), fds.into_iter().collect())
    }

    pub(in super::super) fn empty<F>() -> Encoded<F> {
        words([], [])
    }

    pub(in super::super) fn value<F>(value: u64) -> Encoded<F> {
        words([value], [])
    }

    pub(in super::super) fn fd<F>(fd: F) -> Encoded<F> {
        words([], [fd])
    }

    pub(in super::super) fn state<F>(state: VringState) -> Encoded<F> {
        words([word_of_fields(state.index, state.num)], [])
    }

    pub(in super::super) fn addr<F>(addr: VringAddr) -> Encoded<F> {
        words([word_of_fields(addr.index, addr.flags), addr.desc, addr.used, addr.avail, addr.log], [])
    }

    pub(in super::super) fn vring_fd<F>(event: VringFd<F>) -> Encoded<F> {
        let none = if event.fd.is_none() { FD_NONE } else { 0 };
        words([u64::from(event.index) | none], event.fd)
    }

    pub(in super::super) fn log<F>(log: LogArea, fd: F) -> Encoded<F> {
        words([log.size, log.offset], [fd])
    }

    pub(in super::super) fn inflight<F>(area: InflightArea) -> Encoded<F> {
        words(words_of(area), [])
    }

    pub(in super::super) fn inflight_fd<F>(area: InflightArea, fd: F) -> Encoded<F> {
        words(words_of(area), [fd])
    }

    fn words_of(area: InflightArea) -> [u64; 3] {
        let ([a, b], [c, d]) = (area.queues.to_ne_bytes(), area.queue_size.to_ne_bytes());
        [area.size, area.offset, word_of_fields(u32::from_ne_bytes([a, b, c, d]), 0)]
    }

    pub(in super::super) fn region<F>(region: MemoryRegion, fd: F) -> Encoded<F> {
        removed_region(region, Some(fd))
    }

    /// Eight bytes of padding precede a single region.
    pub(in super::super) fn removed_region<F>(region: MemoryRegion, fd: Option<F>) -> Encoded<F> {
        words([0, region.guest, region.size, region.user, region.mmap_offset], fd)
    }

    pub(in super::super) fn regions<F>(regions: Vec<(MemoryRegion, F)>) -> Encoded<F> {
        let count = u32::try_from(regions.len()).unwrap_or(u32::MAX);
        let words = |region: MemoryRegion| [region.guest, region.size, region.user, region.mmap_offset];
        let (regions, fds): (Vec<_>, _) = regions.into_iter().map(|(region, fd)| (words(region), fd)).unzip();
        let words = std::iter::once(word_of_fields(count, 0)).chain(regions.into_iter().flatten());
        (words.flat_map(u64::to_ne_bytes).collect(), fds)
    }
}

fn area_of([size, offset, word]: [u64; 3]) -> InflightArea {
    let (counts, _padding) = fields_of_word(word);
    let [a, b, c, d] = counts.to_ne_bytes();
    let (queues, queue_size) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
    InflightArea { size, offset, queues, queue_size }
}

/// Decodes the region in these [`REGION`] bytes.
fn region_at(bytes: &[u8]) -> MemoryRegion {
    let [guest, size, user, mmap_offset] = [0, 8, 16, 24].map(|at| word_at(bytes, at));
    MemoryRegion { guest, size, user, mmap_offset }
}

/// Returns the eight bytes at `at`. The caller has checked that they exist.
fn word_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    // copy-ok: a field of a message
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(word)
}

/// Splits a word of eight bytes into two fields of four bytes.
fn fields_of_word(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (half(0), half(4))
}

/// Joins two fields of four bytes into a word of eight bytes.
fn word_of_fields(first: u32, second: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}
