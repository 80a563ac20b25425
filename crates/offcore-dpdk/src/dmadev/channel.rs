//! A channel: a ring of what was asked for, beside the device's own.
//!
//! ```text
//! reported        decided          given             written
//!    | finished, to  |  in the device |  refused: never  |
//!    | be reported   |                |  get there       |
//! ```
//! The device completes in the order in which operations were given to it, so two positions say which are finished, and
//! a list of failures which of them failed. Operations that do not go to the device (of no bytes, or in memory that it
//! does not reach) take a place in the ring all the same, and are finished when all before them are.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use offcore_dma::channel::{
    Capabilities, Channel, ChannelInfo, ChannelStats, Completions, CopyOp, EngineError, Failed, Failure,
    Ledger, Reset,
};

use super::Inner;
use crate::ffi;

/// The largest ring: DPDK counts operations in 16 bits.
const MAX_RING: usize = 1 << 14;
/// Operations that are asked about in one call.
const AT_ONCE: u16 = 128;
/// How long a reset waits for what was submitted before it stops the device.
const TIMEOUT: Duration = Duration::from_millis(100);
/// How long a channel that is dropped waits for a device that does not stop.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);

/// What has become of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In the device.
    Given,
    /// Not for the device; its outcome is known.
    Apart(Option<Failure>),
    /// Finished, with this outcome.
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
    /// Operations reported, finished and written since the channel was opened.
    reported: usize,
    finished: usize,
    written: usize,
    /// Operations in the device, and those before them that were taken out and are in it all the same.
    given: usize,
    lost: usize,
    /// When a reset began that is not done.
    resetting: Option<Instant>,
    ledger: Ledger,
}

// SAFETY: an operation is a description; whoever submits it promises that the memory may be touched by an engine.
unsafe impl Send for DmaChannel {}

impl DmaChannel {
    pub(super) fn open(name: &str, device: Arc<Inner>, ring_size: usize) -> Result<Self, EngineError> {
        let most = MAX_RING.min(usize::from(device.max_desc) / 2);
        if !ring_size.is_power_of_two() || ring_size > most {
            let device = name.to_owned();
            return Err(EngineError::RingSize { device, found: ring_size, min: 1, max: most });
        }
        // Some drivers leave one of their descriptors free.
        let descriptors = (2 * ring_size).clamp(device.min_desc.into(), device.max_desc.into());
        let refused = |reason: String| EngineError::Thread { device: name.to_owned(), reason };
        // SAFETY: the device has no other channel, and is stopped.
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
                capabilities: Capabilities::default(),
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

    /// Operations that the device takes now.
    fn capacity(&self) -> usize {
        // SAFETY: the device is started, and this channel its only user.
        usize::from(unsafe { ffi::off_dma_capacity(self.device.number) })
    }

    fn slot(&mut self, position: usize) -> &mut Entry {
        let mask = self.entries.len() - 1;
        &mut self.entries[position & mask]
    }

    /// The operations that are not reported.
    fn outstanding(&self) -> impl Iterator<Item = CopyOp> {
        let mask = self.entries.len() - 1;
        (self.reported..self.written).map(move |position| self.entries[position & mask].copy)
    }

    /// Whether the device reaches all of the bytes.
    fn reaches(&self, address: usize, len: u32) -> bool {
        let Some(ranges) = &self.device.reach else { return true };
        ranges.iter().any(|&(base, all)| {
            address.checked_sub(base).is_some_and(|at| at <= all && len as usize <= all - at)
        })
    }

    /// The outcome of a copy that is not for the device; `None` when it is.
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

    /// Marks what the device has finished since.
    fn collect(&mut self) {
        while self.given + self.lost > 0 {
            let mut failed: c_int = 0;
            // SAFETY: the device is started, and this channel its only user.
            let done = unsafe { ffi::off_dma_completed(self.device.number, AT_ONCE, &mut failed) };
            (0..done).for_each(|_| self.finish(None));
            let more = if failed != 0 { self.collect_failed() > 0 } else { done == AT_ONCE };
            if !more {
                break;
            }
        }
        self.finish_apart();
    }

    /// Takes in what follows, with its status: DPDK says nothing more until that was asked for. Returns of how many it has
    /// one: none when the driver speaks of a failure that it cannot name yet, which the next call asks for again.
    #[cold]
    fn collect_failed(&mut self) -> u16 {
        let mut statuses = [0; 16];
        let most = statuses.len() as u16;
        // SAFETY: as above, and there is room for so many.
        let done = unsafe { ffi::off_dma_statuses(self.device.number, most, statuses.as_mut_ptr()) };
        for &status in statuses.iter().take(done.into()) {
            self.finish(failure(status));
        }
        done
    }

    /// The next operation that is in the device is finished.
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

    /// Those that are not for the device are finished when all before them are.
    fn finish_apart(&mut self) {
        while self.finished < self.written {
            let finished = self.finished;
            let State::Apart(outcome) = self.slot(finished).state else { break };
            self.slot(finished).state = State::Finished(outcome);
            self.finished += 1;
        }
    }

    /// Stops the device and starts it again, which ends what is in it; whether that is so.
    fn restart(&mut self) -> bool {
        // DPDK's driver for the queues of idxd in the kernel has nothing to stop them with, and says that it did.
        if self.device.device.starts_with("wq") {
            return false;
        }
        // SAFETY: the device is started, and this channel its only user.
        let stopped = unsafe { ffi::off_dma_stop(self.device.number) } == 0;
        if stopped {
            let descriptors =
                (2 * self.entries.len()).clamp(self.device.min_desc.into(), self.device.max_desc.into());
            // SAFETY: as above, and stopped. One that does not start again takes no more: its capacity is 0.
            unsafe { ffi::off_dma_start(self.device.number, descriptors as u16) };
            (self.given, self.lost) = (0, 0);
        }
        stopped
    }
}

/// The failure that a status of DPDK stands for.
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
            // SAFETY: the device is started, and this channel its only user; the caller vouches for the memory, which it
            // reaches. A copy is laid out as the shim has it.
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
            // SAFETY: the device is started, and this channel its only user.
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
        // What was accepted and not yet submitted must not run later either: it runs now.
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
        // Before a reset is done some are in the device: they are finished there, and reported by nobody.
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
        // SAFETY: the channel is its device's only user.
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
        // SAFETY: what the device is given is inside the buffers, which outlive the channel.
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
    fn statuses_of_dpdk_are_ours() {
        let all = [0, 1, 3, 6, 8, 14, 0x100].map(failure);
        let [ok, aborted, address, length, bus, fault, unknown] = all;
        assert_eq!((ok, aborted), (None, Some(Failure::Aborted)));
        assert_eq!((address, fault), (Some(Failure::PageFault), Some(Failure::PageFault)));
        assert_eq!((length, bus), (Some(Failure::Refused), Some(Failure::Hardware)));
        assert_eq!(unknown, Some(Failure::Hardware));
    }
}
