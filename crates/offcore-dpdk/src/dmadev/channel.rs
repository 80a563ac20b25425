//! A channel: a ring of requested operations, in addition to the device's own ring.
//!
//! ```text
//! reported        decided          given             written
//!    | finished, to  |  in the device |  refused: never  |
//!    | be reported   |                |  get there       |
//! ```
//! The device completes operations in order, so two positions determine which are finished, and a list of failures
//! determines which of them failed. Operations that are not given to the device (with length 0, or in memory that it
//! cannot access) also take a place in the ring. They are finished when all operations before them are.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use offcore_dma::channel::{
    Channel, ChannelCapabilities, ChannelInfo, ChannelStats, Completions, CopyOp, EngineError, Failed,
    Failure, Ledger, Reset,
};

use super::Inner;
use crate::ffi;

/// The largest ring: DPDK counts operations with 16 bits.
const MAX_RING: usize = 1 << 14;
/// Number of operations whose completion is polled in one call.
const AT_ONCE: u16 = 128;
/// Time that a reset waits for submitted operations before it stops the device.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Time that a dropped channel waits for a device that does not stop.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);

/// State of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In the device.
    Given,
    /// Not given to the device; its outcome is known.
    Apart(Option<Failure>),
    /// Finished with this outcome.
    Finished(Option<Failure>),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    copy: CopyOp,
    state: State,
}

/// The channel of a DMA device.
#[derive(Debug)]
pub struct DmaChannel {
    device: Arc<Inner>,
    info: ChannelInfo,
    entries: Box<[Entry]>,
    /// Numbers of operations reported, finished and written since the channel was opened.
    reported: usize,
    finished: usize,
    written: usize,
    /// Numbers of operations in the device: `lost` counts operations that were taken out of the channel but not
    /// completed.
    given: usize,
    lost: usize,
    /// The time at which an unfinished reset began.
    resetting: Option<Instant>,
    ledger: Ledger,
}

// SAFETY: an operation is a description; its submitter guarantees that an engine may access the memory.
unsafe impl Send for DmaChannel {}

impl DmaChannel {
    pub(super) fn open(name: &str, device: Arc<Inner>, ring_size: usize) -> Result<Self, EngineError> {
        let most = MAX_RING.min(usize::from(device.max_desc) / 2);
        if !ring_size.is_power_of_two() || ring_size > most {
            let device = name.to_owned();
            return Err(EngineError::RingSize { device, found: ring_size, min: 1, max: most });
        }
        // Some drivers keep one descriptor unused.
        let descriptors = (2 * ring_size).clamp(device.min_desc.into(), device.max_desc.into());
        let refused = |reason: String| EngineError::Thread { device: name.to_owned(), reason };
        // SAFETY: the device has no other channel and is stopped.
        let rc = unsafe { ffi::off_dma_start(device.number, descriptors as u16) };
        if rc < 0 {
            let why = format!("it does not start with {descriptors} descriptors: {}", ffi::errno(rc));
            return Err(refused(why));
        }
        let channel = Self {
            info: ChannelInfo {
                name: name.into(),
                ring_size,
                max_len: u32::MAX,
                capabilities: ChannelCapabilities::default(),
            },
            device,
            entries: vec![Entry { copy: CopyOp::NONE, state: State::Apart(None) }; ring_size].into(),
            reported: 0,
            finished: 0,
            written: 0,
            given: 0,
            lost: 0,
            resetting: None,
            ledger: Ledger::default(),
        };
        let capacity = channel.capacity();
        if capacity < ring_size {
            return Err(refused(format!("it holds {capacity} operations, {ring_size} were asked for")));
        }
        Ok(channel)
    }

    /// Returns how many operations the device accepts now.
    fn capacity(&self) -> usize {
        // SAFETY: the device is started, and this channel is its only user.
        usize::from(unsafe { ffi::off_dma_capacity(self.device.number) })
    }

    fn slot(&mut self, position: usize) -> &mut Entry {
        let mask = self.entries.len() - 1;
        &mut self.entries[position & mask]
    }

    /// Returns the operations that have not been reported.
    fn outstanding(&self) -> impl Iterator<Item = CopyOp> {
        let mask = self.entries.len() - 1;
        (self.reported..self.written).map(move |position| self.entries[position & mask].copy)
    }

    /// Returns whether the device can access all of the bytes.
    fn reaches(&self, address: usize, len: u32) -> bool {
        let Some(ranges) = &self.device.reach else { return true };
        ranges.iter().any(|&(base, all)| {
            address.checked_sub(base).is_some_and(|at| at <= all && len as usize <= all - at)
        })
    }

    /// Returns the outcome of a copy that is not given to the device; `None` for other copies.
    fn apart(&self, op: &CopyOp) -> Option<Option<Failure>> {
        if op.len == 0 {
            return Some(None);
        }
        let all = self.reaches(op.src.addr(), op.len) && self.reaches(op.dst.addr(), op.len);
        (!all).then_some(Some(Failure::PageFault))
    }

    fn write(&mut self, copy: CopyOp, state: State) {
        let written = self.written;
        *self.slot(written) = Entry { copy, state };
        self.written += 1;
        self.given += usize::from(state == State::Given);
        self.ledger.accept(1, copy.len.into());
    }

    /// Marks operations that the device has finished since the last call.
    fn collect(&mut self) {
        while self.given + self.lost > 0 {
            let mut failed: c_int = 0;
            // SAFETY: the device is started, and this channel is its only user.
            let done = unsafe { ffi::off_dma_completed(self.device.number, AT_ONCE, &mut failed) };
            (0..done).for_each(|_| self.finish(None));
            let more = if failed != 0 { self.collect_failed() > 0 } else { done == AT_ONCE };
            if !more {
                break;
            }
        }
        self.finish_apart();
    }

    /// Collects the following operations with their statuses. DPDK reports no further completions before that. Returns
    /// the number of statuses; 0 if the driver reports a failure that it cannot attribute yet, so that the next call
    /// has to repeat this.
    #[cold]
    fn collect_failed(&mut self) -> u16 {
        let mut statuses = [0; 16];
        let most = statuses.len() as u16;
        // SAFETY: as above; `statuses` has room for `most` entries.
        let done = unsafe { ffi::off_dma_statuses(self.device.number, most, statuses.as_mut_ptr()) };
        for &status in statuses.iter().take(done.into()) {
            self.finish(failure(status));
        }
        done
    }

    /// Marks the oldest operation in the device as finished.
    fn finish(&mut self, outcome: Option<Failure>) {
        if self.lost > 0 {
            self.lost -= 1;
            return;
        }
        self.finish_apart();
        if self.given == 0 {
            return;
        }
        let finished = self.finished;
        self.slot(finished).state = State::Finished(outcome);
        self.finished += 1;
        self.given -= 1;
    }

    /// Operations that are not given to the device are finished when all operations before them are.
    fn finish_apart(&mut self) {
        while self.finished < self.written {
            let finished = self.finished;
            let State::Apart(outcome) = self.slot(finished).state else { break };
            self.slot(finished).state = State::Finished(outcome);
            self.finished += 1;
        }
    }

    /// Stops and restarts the device, which ends the operations in it; returns whether that succeeded.
    fn restart(&mut self) -> bool {
        // DPDK's driver for idxd work queues of the kernel cannot stop them, but reports success.
        if self.device.device.starts_with("wq") {
            return false;
        }
        // SAFETY: the device is started, and this channel is its only user.
        let stopped = unsafe { ffi::off_dma_stop(self.device.number) } == 0;
        if stopped {
            let descriptors =
                (2 * self.entries.len()).clamp(self.device.min_desc.into(), self.device.max_desc.into());
            // SAFETY: as above, and stopped. If the device does not restart, its capacity is 0, so it gets no more
            // operations.
            unsafe { ffi::off_dma_start(self.device.number, descriptors as u16) };
            (self.given, self.lost) = (0, 0);
        }
        stopped
    }
}

/// Converts a DPDK status to a failure.
fn failure(status: u32) -> Option<Failure> {
    match status {
        0 => None,
        // USER_ABORT, NOT_ATTEMPTED
        1 | 2 => Some(Failure::Aborted),
        // INVALID_SRC_ADDR, INVALID_DST_ADDR, INVALID_ADDR, PAGE_FAULT
        3..=5 | 14 => Some(Failure::PageFault),
        // INVALID_LENGTH, INVALID_OPCODE
        6 | 7 => Some(Failure::Refused),
        _ => Some(Failure::Hardware),
    }
}

impl Channel for DmaChannel {
    fn info(&self) -> &ChannelInfo {
        &self.info
    }

    fn room(&self) -> usize {
        if self.resetting.is_some() {
            return 0;
        }
        (self.entries.len() - self.in_flight()).min(self.capacity())
    }

    fn in_flight(&self) -> usize {
        self.written - self.reported
    }

    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize {
        let ops = &ops[..ops.len().min(self.room())];
        let mut at = 0;
        while at < ops.len() {
            if let Some(outcome) = self.apart(&ops[at]) {
                self.write(ops[at], State::Apart(outcome));
                at += 1;
                continue;
            }
            let run = ops[at..].iter().take_while(|op| self.apart(op).is_none()).count();
            // SAFETY: the device is started, and this channel is its only user; the caller guarantees that the memory
            // is valid, and the device can access it. `CopyOp` has the layout of the shim's `off_copy`.
            let given = unsafe { ffi::off_dma_copy(self.device.number, ops[at..].as_ptr(), run as u32) };
            for op in &ops[at..at + given as usize] {
                self.write(*op, State::Given);
            }
            at += given as usize;
            if (given as usize) < run {
                break;
            }
        }
        at
    }

    fn submit(&mut self) {
        if self.given + self.lost > 0 {
            // SAFETY: the device is started, and this channel is its only user.
            unsafe { ffi::off_dma_submit(self.device.number) };
        }
    }

    fn poll(&mut self, completions: &mut Completions) {
        self.collect();
        while self.reported < self.finished && !completions.is_full() {
            let reported = self.reported;
            let Entry { copy, state } = *self.slot(reported);
            match state {
                State::Finished(Some(failure)) => {
                    self.ledger.fail([&copy]);
                    completions.failed.push(Failed { copy, failure, done: 0 });
                }
                _ => completions.tokens.push(copy.token),
            }
            self.reported += 1;
        }
    }

    fn reset(&mut self) -> Reset {
        // Accepted operations that were not submitted must not run later, so they run now.
        self.submit();
        self.collect();
        let since = *self.resetting.get_or_insert_with(Instant::now);
        if self.given + self.lost == 0 || since.elapsed() > TIMEOUT && self.restart() {
            self.resetting = None;
            return Reset::Done;
        }
        Reset::Pending
    }

    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>) {
        let first = outstanding.len();
        outstanding.extend(self.outstanding());
        self.ledger.fail(&outstanding[first..]);
        // Before a reset is complete, some operations are in the device: it finishes them, and they are not reported.
        self.lost += std::mem::take(&mut self.given);
        (self.reported, self.finished) = (self.written, self.written);
    }

    fn stats(&self) -> ChannelStats {
        self.ledger.stats(self.outstanding())
    }
}

impl Drop for DmaChannel {
    fn drop(&mut self) {
        let began = Instant::now();
        let mut dead = self.reset() == Reset::Done;
        while !dead && began.elapsed() < LAST_TIMEOUT {
            std::thread::yield_now();
            dead = self.reset() == Reset::Done;
        }
        // SAFETY: the channel is the device's only user.
        unsafe { ffi::off_dma_stop(self.device.number) };
        if dead {
            self.device.taken.store(false, Ordering::Release);
        } else {
            tracing::error!(
                "{}: {} copies were not answered, the device is left alone",
                self.info.name,
                self.given + self.lost
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreachable_copies_fail_in_turn() {
        crate::eal::start().unwrap();
        let number = crate::dmadev::find("dma_skeleton").unwrap();
        let (near, far) = (vec![7u8; 4096], vec![9u8; 4096]);
        let mut destination = vec![0u8; 4096];
        let ranges = vec![(near.as_ptr().addr(), 4096), (destination.as_ptr().addr(), 4096)];
        let device = Inner {
            device: "dma_skeleton".into(),
            number,
            min_desc: 32,
            max_desc: 8192,
            reach: Some(ranges),
            node: None,
            taken: true.into(),
        };
        let mut channel = DmaChannel::open("dmadev:near", Arc::new(device), 16).unwrap();
        let place = destination.as_mut_ptr();
        let op = |token: u32, src: *const u8, at: usize, len| CopyOp {
            src,
            dst: place.wrapping_add(at),
            len,
            token,
        };
        let past_the_end = near.as_ptr().wrapping_add(4000);
        let ops = [
            op(0, near.as_ptr(), 0, 64),
            op(1, far.as_ptr(), 64, 64),
            op(2, near.as_ptr(), 128, 0),
            op(3, past_the_end, 192, 97),
            op(4, past_the_end, 256, 96),
        ];
        // SAFETY: the copies given to the device are within the buffers, which outlive the channel.
        assert_eq!(unsafe { channel.copy(&ops) }, 5);
        channel.submit();
        let mut completions = Completions::default();
        let deadline = Instant::now() + Duration::from_secs(10);
        while channel.in_flight() > 0 {
            channel.poll(&mut completions);
            assert!(Instant::now() < deadline, "no progress for 10 s");
            std::thread::yield_now();
        }
        let failed: Vec<_> = completions.failed.iter().map(|f| (f.copy.token, f.failure, f.done)).collect();
        assert_eq!(failed, [(1, Failure::PageFault, 0), (3, Failure::PageFault, 0)]);
        assert_eq!(completions.tokens[..], [0, 2, 4]);
        let stats = channel.stats();
        assert_eq!((stats.submitted, stats.completed, stats.failed, stats.bytes), (5, 3, 2, 160));
        drop(channel);
        let written: usize = destination.iter().filter(|&&byte| byte == 7).count();
        assert_eq!((written, destination.contains(&9)), (160, false));
    }

    #[test]
    fn dpdk_statuses_map_to_failures() {
        let all = [0, 1, 3, 6, 8, 14, 0x100].map(failure);
        let [ok, aborted, address, length, bus, fault, unknown] = all;
        assert_eq!((ok, aborted), (None, Some(Failure::Aborted)));
        assert_eq!((address, fault), (Some(Failure::PageFault), Some(Failure::PageFault)));
        assert_eq!((length, bus), (Some(Failure::Refused), Some(Failure::Hardware)));
        assert_eq!(unknown, Some(Failure::Hardware));
    }
}
