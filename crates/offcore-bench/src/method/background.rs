//! A background copier on the other core: it copies as many bytes as the measured core, at the same rate, between its
//! own buffers.
//!
//! A core that copies while the engine is idle has the caches and the memory bandwidth to itself. A core that offloads
//! its copies competes with the engine. The background copier gives the copying core the same competition.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use offcore_stats::tsc;

use crate::method::lockstep::{BackgroundJob, OtherCore, lock};
use crate::method::temperature::BUFFER;

/// Size of the source buffer and of the destination buffer in bytes. Both exceed a core's private caches, because an
/// engine has no caches either.
const BYTES: usize = 16 << 20;
/// TSC ticks between two copies until the core's rate is known.
const AT_FIRST: u64 = 1000;

/// The background copier.
#[derive(Debug)]
pub(crate) struct Background {
    buffers: Arc<Mutex<Buffers>>,
    /// TSC ticks between the starts of two copies.
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
    /// Creates a copier that copies `len` bytes at a time, limited to the size of a guest's buffer.
    pub(crate) fn new(len: usize) -> Self {
        let buffers = Buffers { from: vec![1; BYTES], to: vec![0; BYTES], at: 0, len: len.min(BUFFER) };
        Self { buffers: Arc::new(Mutex::new(buffers)), every: AT_FIRST, made: Arc::new(AtomicU64::new(0)) }
    }

    /// Starts copying on the other core. Copying continues until the returned [`BackgroundJob`] ends.
    pub(crate) fn begin<'a>(&self, other: &'a OtherCore) -> Result<BackgroundJob<'a>> {
        let (buffers, made, every) = (Arc::clone(&self.buffers), Arc::clone(&self.made), self.every);
        other.beside(move |end| {
            let mut buffers = lock(&buffers);
            made.fetch_add(buffers.copy_until(end, every), Ordering::Relaxed);
            Ok(())
        })
    }

    /// Sets the rate to `copies` copies per `ticks` ticks.
    pub(crate) fn follow(&mut self, ticks: u64, copies: u64) {
        self.every = ticks / copies.max(1);
    }

    /// Returns the number of copies made so far.
    pub(crate) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }
}

impl Buffers {
    /// Makes one copy every `every` ticks, or as fast as the core can. Returns the number of copies.
    fn copy_until(&mut self, end: &AtomicBool, every: u64) -> u64 {
        let (mut due, mut made) = (tsc::now(), 0);
        while !end.load(Ordering::Acquire) {
            if tsc::now() < due {
                std::hint::spin_loop();
                continue;
            }
            let range = self.at..self.at + self.len;
            // copy-ok: imitates an engine; the bytes are no packet's payload.
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
