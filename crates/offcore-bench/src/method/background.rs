//! A copier beside the measured core: copies as many bytes as the core does, at the same rate, between buffers of its
//! own.
//!
//! A core that copies while an engine rests has the caches and the memory to itself; a core that hands its copies over
//! has not. With this copier beside it, it has not either.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use offcore_stats::tsc;

use crate::method::lockstep::{Beside, OtherCore, lock};
use crate::method::temperature::BUFFER;

/// Bytes that are copied from, and as many that are copied to: more than a core's own caches hold, as with an engine,
/// which has none.
const BYTES: usize = 16 << 20;
/// TSC ticks between two copies, until the core's rate is known.
const AT_FIRST: u64 = 1000;

/// The copier.
#[derive(Debug)]
pub(crate) struct Background {
    buffers: Arc<Mutex<Buffers>>,
    /// TSC ticks between the beginnings of two copies.
    every: u64,
    made: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Buffers {
    from: Vec<u8>,
    to: Vec<u8>,
    at: usize,
    len: usize,
}

impl Background {
    /// A copier of `len` bytes at a time, at most a guest's buffer.
    pub(crate) fn new(len: usize) -> Self {
        let buffers = Buffers { from: vec![1; BYTES], to: vec![0; BYTES], at: 0, len: len.min(BUFFER) };
        Self { buffers: Arc::new(Mutex::new(buffers)), every: AT_FIRST, made: Arc::new(AtomicU64::new(0)) }
    }

    /// Copies on the other core until that is ended.
    pub(crate) fn begin<'a>(&self, other: &'a OtherCore) -> Result<Beside<'a>> {
        let (buffers, made, every) = (Arc::clone(&self.buffers), Arc::clone(&self.made), self.every);
        other.beside(move |end| {
            let mut buffers = lock(&buffers);
            made.fetch_add(buffers.copy_until(end, every), Ordering::Relaxed);
            Ok(())
        })
    }

    /// From now on as fast as somebody who makes `copies` copies in `ticks`.
    pub(crate) fn follow(&mut self, ticks: u64, copies: u64) {
        self.every = ticks / copies.max(1);
    }

    /// Copies made so far.
    pub(crate) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }
}

impl Buffers {
    /// A copy every so many ticks, as far as the core is fast enough; their number.
    fn copy_until(&mut self, end: &AtomicBool, every: u64) -> u64 {
        let (mut due, mut made) = (tsc::now(), 0);
        while !end.load(Ordering::Acquire) {
            if tsc::now() < due {
                std::hint::spin_loop();
                continue;
            }
            let range = self.at..self.at + self.len;
            // copy-ok: stands for an engine, and moves nobody's payload.
            self.to[range.clone()].copy_from_slice(&self.from[range]);
            self.at = (self.at + BUFFER) % BYTES;
            (due, made) = (due + every, made + 1);
        }
        std::hint::black_box(&self.to);
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn background_keeps_its_rate() {
        let other = OtherCore::start(None).unwrap();
        let mut background = Background::new(1526);
        background.follow(1000 * 1000, 10);
        let (start, beside) = (tsc::now(), background.begin(&other).unwrap());
        while background.buffers.try_lock().is_ok() && tsc::now() - start < tsc::hz() {
            std::hint::spin_loop();
        }
        beside.end().unwrap();
        let made = background.made();
        assert!((1..=(tsc::now() - start) / 100_000 + 1).contains(&made), "{made} copies");
        let buffers = background.buffers.lock().unwrap();
        assert_eq!(buffers.to[..1526], [1; 1526]);
        assert_eq!(buffers.to[1526..BUFFER], [0; BUFFER - 1526]);
    }
}
