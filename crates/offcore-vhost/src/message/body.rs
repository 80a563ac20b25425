//! Layout of message payloads.

use super::{
    Code, FD_INDEX, FD_NONE, InflightArea, LogArea, MAX_REGIONS, MemoryRegion, MessageError, REGION, Request,
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

    pub(super) fn nothing(self, request: Request<F>) -> Result<Request<F>, MessageError> {
        self.words::<0>(0).map(|_| request)
    }

    pub(super) fn value(self) -> Result<u64, MessageError> {
        self.words(0).map(|([value], _)| value)
    }

    pub(super) fn state(self) -> Result<VringState, MessageError> {
        self.words(0).map(|([word], _)| {
            let (index, num) = halves(word);
            VringState { index, num }
        })
    }

    pub(super) fn addr(self) -> Result<VringAddr, MessageError> {
        self.words(0).map(|([word, desc, used, avail, log], _)| {
            let (index, flags) = halves(word);
            VringAddr { index, flags, desc, used, avail, log }
        })
    }

    pub(super) fn vring_fd(self) -> Result<VringFd<F>, MessageError> {
        let code = self.code;
        // The payload says how many file descriptors are expected. A payload of another length is rejected below.
        let none = self.payload.len() == 8 && word_at(self.payload, 0) & FD_NONE != 0;
        let ([value], fds) = self.words(usize::from(!none))?;
        if value & !(FD_INDEX | FD_NONE) != 0 {
            return Err(MessageError::FdPayload { code, found: value });
        }
        Ok(VringFd { index: (value & FD_INDEX) as u8, fd: fds.into_iter().next() })
    }

    pub(super) fn regions(self) -> Result<Vec<(MemoryRegion, F)>, MessageError> {
        let (code, found) = (self.code, self.payload.len());
        if found < 8 {
            return Err(MessageError::Payload { code, found, expected: 8 + REGION });
        }
        let (count, _padding) = halves(word_at(self.payload, 0));
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
        Ok(described.zip(self.fds).collect())
    }

    pub(super) fn log(self) -> Result<(LogArea, F), MessageError> {
        let code = self.code;
        let ([size, offset], fds) = self.words(1)?;
        let fd = fds.into_iter().next().ok_or(MessageError::Fds { code, found: 0, expected: 1 })?;
        Ok((LogArea { size, offset }, fd))
    }

    /// Decodes the request for a region for descriptors in flight.
    pub(super) fn inflight(self) -> Result<InflightArea, MessageError> {
        self.inflight_with(0).map(|(area, _)| area)
    }

    /// Decodes a region for descriptors in flight and its file.
    pub(super) fn inflight_fd(self) -> Result<(InflightArea, F), MessageError> {
        let code = self.code;
        let (area, fds) = self.inflight_with(1)?;
        let fd = fds.into_iter().next().ok_or(MessageError::Fds { code, found: 0, expected: 1 })?;
        Ok((area, fd))
    }

    fn inflight_with(self, fds: usize) -> Result<(InflightArea, Vec<F>), MessageError> {
        // The fields in the specification have 20 bytes. C pads them to 24, and front ends send the padding.
        let mut padded = [0; 24];
        let payload = match self.payload.len() {
            20 => {
                // copy-ok: a message
                padded[..20].copy_from_slice(self.payload);
                &padded
            }
            _ => self.payload,
        };
        let ([size, offset, word], fds) = Body { payload, ..self }.words(fds)?;
        let (counts, _padding) = halves(word);
        let [a, b, c, d] = counts.to_ne_bytes();
        let (queues, queue_size) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
        Ok((InflightArea { size, offset, queues, queue_size }, fds))
    }

    /// Decodes a message that has exactly one file descriptor and no payload.
    pub(super) fn fd(self) -> Result<F, MessageError> {
        let code = self.code;
        let (_, fds) = self.words::<0>(1)?;
        fds.into_iter().next().ok_or(MessageError::Fds { code, found: 0, expected: 1 })
    }

    /// Decodes a single region and its file.
    pub(super) fn region(self) -> Result<(MemoryRegion, F), MessageError> {
        let code = self.code;
        let (region, fds) = self.single_region(1)?;
        let fd = fds.into_iter().next().ok_or(MessageError::Fds { code, found: 0, expected: 1 })?;
        Ok((region, fd))
    }

    /// Decodes a single region with an optional file descriptor.
    pub(super) fn removed_region(self) -> Result<(MemoryRegion, Option<F>), MessageError> {
        let fds = self.fds.len().min(1);
        self.single_region(fds).map(|(region, fds)| (region, fds.into_iter().next()))
    }

    fn single_region(self, fds: usize) -> Result<(MemoryRegion, Vec<F>), MessageError> {
        let ([_padding, guest, size, user, mmap_offset], fds) = self.words(fds)?;
        Ok((MemoryRegion { guest, size, user, mmap_offset }, fds))
    }
}

impl VringState {
    pub(super) fn encode(self) -> Vec<u8> {
        [self.index.to_ne_bytes(), self.num.to_ne_bytes()].concat()
    }
}

impl VringAddr {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut payload = [self.index.to_ne_bytes(), self.flags.to_ne_bytes()].concat();
        for word in [self.desc, self.used, self.avail, self.log] {
            payload.extend(word.to_ne_bytes());
        }
        payload
    }
}

pub(super) fn encode_regions<F>(regions: Vec<(MemoryRegion, F)>) -> (Vec<u8>, Vec<F>) {
    let count = u32::try_from(regions.len()).unwrap_or(u32::MAX);
    let mut payload = [count.to_ne_bytes(), [0; 4]].concat();
    let mut fds = Vec::with_capacity(regions.len());
    for (region, fd) in regions {
        payload.extend(words_of(&region));
        fds.push(fd);
    }
    (payload, fds)
}

/// Encodes a single region, which follows eight bytes of padding.
pub(super) fn encode_region(region: &MemoryRegion) -> Vec<u8> {
    [0; 8].into_iter().chain(words_of(region)).collect()
}

pub(super) fn encode_inflight(area: &InflightArea) -> Vec<u8> {
    let counts = [area.queues.to_ne_bytes(), area.queue_size.to_ne_bytes(), [0; 2], [0; 2]].concat();
    [&area.size.to_ne_bytes()[..], &area.offset.to_ne_bytes(), &counts].concat()
}

fn words_of(region: &MemoryRegion) -> impl Iterator<Item = u8> + use<> {
    [region.guest, region.size, region.user, region.mmap_offset].into_iter().flat_map(u64::to_ne_bytes)
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
fn halves(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (half(0), half(4))
}
