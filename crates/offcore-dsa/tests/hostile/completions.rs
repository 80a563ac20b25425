//! A scripted device: it takes descriptors and completes them in any order, completely, in part, with an error, or
//! never. In half of the scripts the device reports correctly; then every byte is checked. In the others the records
//! are arbitrary. In both cases each copy is reported once, only requested copies are submitted, and no entry of the
//! queue is lost.

use std::cell::RefCell;
use std::time::Duration;

use offcore_dma::channel::{Channel, Completions, CopyOp, Reset};
use offcore_dsa::completion::{Completed, Status};
use offcore_dsa::descriptor::{Descriptor, Flags, Opcode};
use offcore_dsa::driver::{DsaChannel, DsaDevice, Options};

use crate::fixture::{DeviceEnd, Tree, complete, copy, members, record};
use crate::script::Script;

/// Number and size of the slots for copies. A slot has twice the maximum size of a descriptor.
const SLOTS: usize = 128;
const SLOT: usize = 1024;
const RING: usize = 64;
const MAX_STEPS: usize = 200;
/// The contents of unwritten slots.
const IDLE: u8 = 0x5a;

thread_local! {
    static KEPT: RefCell<Option<(Tree, Vec<u8>)>> = const { RefCell::new(None) };
}

/// The results of a script.
#[derive(Clone, Copy, Debug, Default)]
#[allow(dead_code, reason = "a fuzz target looks at none of it")]
pub(crate) struct Outcome {
    pub(crate) done: usize,
    pub(crate) failed: usize,
    /// Number of copies taken out after a reset.
    pub(crate) taken_out: usize,
    pub(crate) batches: usize,
    /// Number of descriptors for the rest of a copy.
    pub(crate) resumed: usize,
}

/// Runs a script and adds its results to `outcome`.
///
/// # Panics
/// If the driver handles the device's behaviour incorrectly.
pub(crate) fn play(script: &[u8], outcome: &mut Outcome) {
    let (tree, source) = KEPT.take().unwrap_or_else(|| {
        let tree = Tree::new();
        tree.set("wq0.0/max_transfer_size", "512");
        tree.set("wq0.1/max_transfer_size", "512");
        (tree, (0..SLOTS * SLOT).map(|i| (i * 7 + i / 256 * 3) as u8).collect())
    });
    let mut script = Script(script);
    let kind = script.u8();
    tree.set("version", if kind & 1 == 0 { "0x100" } else { "0x200" });
    let wq = if kind & 2 == 0 { "wq0.0" } else { "wq0.1" };
    let mut device = tree.device_end(wq);
    // The device ends a drain, never the time limit.
    let hour = Duration::from_secs(3600);
    let options = Options {
        batch: kind & 4 == 0,
        drain_limit: hour,
        reopen_every: Duration::ZERO,
        ..Options::default()
    };
    let opened = DsaDevice::open(&tree.roots(), wq, options).unwrap();
    let channel = opened.open_dsa_channel(RING).unwrap();
    // Discards descriptors of an earlier script's channel, and the probe.
    device.submitted();
    let mut rig = Rig {
        device,
        channel,
        source,
        target: vec![IDLE; SLOTS * SLOT],
        live: [None; SLOTS],
        next: 0,
        pending: Vec::new(),
        lies: kind & 8 != 0,
        outcome: *outcome,
    };
    for _ in 0..MAX_STEPS {
        if script.0.is_empty() {
            break;
        }
        rig.step(&mut script);
    }
    rig.finish();
    *outcome = rig.outcome;
    KEPT.set(Some((tree, rig.source)));
}

struct Rig {
    device: DeviceEnd,
    channel: DsaChannel,
    source: Vec<u8>,
    target: Vec<u8>,
    /// The copy in progress in each slot.
    live: [Option<CopyOp>; SLOTS],
    /// Number of copies so far.
    next: u32,
    /// The descriptors that the device has not completed.
    pending: Vec<Descriptor>,
    lies: bool,
    outcome: Outcome,
}

impl Rig {
    fn step(&mut self, script: &mut Script<'_>) {
        match script.below(16) {
            0..4 => self.copy(script),
            4..10 => {
                self.take_submitted();
                if !self.pending.is_empty() {
                    let descriptor = self.pending.swap_remove(script.below(self.pending.len()));
                    self.complete(&descriptor, script);
                }
            }
            10..15 => self.poll(),
            _ => self.reset(script),
        }
    }

    /// Submits some copies, each to its own slot.
    fn copy(&mut self, script: &mut Script<'_>) {
        let free = (0..SLOTS).filter(|&slot| self.live[slot].is_none());
        let slots: Vec<usize> = free.take(1 + script.below(40)).collect();
        let mut ops = Vec::new();
        for slot in slots {
            // Some copies are longer than the queue's maximum transfer size.
            let len = 1 + script.u8() as u32 * 2 + if script.u8() == 255 { 300 } else { 0 };
            self.target[slot * SLOT..][..SLOT].fill(IDLE);
            let token = self.next * SLOTS as u32 + slot as u32;
            let (src, dst) = (self.source[slot * SLOT..].as_ptr(), self.target[slot * SLOT..].as_mut_ptr());
            ops.push(CopyOp { src, dst, len, token });
            self.next = (self.next + 1) % (1 << 20);
        }
        // SAFETY: source and target live as long as the channel, whose device is simulated here. A slot is reused only
        // when its copy has been reported.
        let taken = unsafe { self.channel.copy(&ops) };
        for op in &ops[..taken] {
            self.live[op.token as usize % SLOTS] = Some(*op);
        }
        if script.u8() < 200 {
            self.channel.submit();
        }
        self.look_at_credits();
    }

    fn look_at_credits(&self) {
        let credits = self.channel.credits();
        assert!(credits.used <= credits.limit, "{credits:?}");
        assert_eq!(self.channel.in_flight(), self.live.iter().flatten().count());
    }

    /// Lets the device take the submitted descriptors.
    fn take_submitted(&mut self) {
        for descriptor in self.device.submitted() {
            match descriptor.opcode().unwrap() {
                Opcode::MemoryMove => self.check(&descriptor),
                Opcode::Batch => {
                    self.outcome.batches += 1;
                    assert!((2..=32).contains(&descriptor.size), "{descriptor:?}");
                    members(&descriptor).iter().for_each(|member| self.check(member));
                }
                Opcode::Drain => {}
                // The probe of a reopened queue; it has no record.
                Opcode::Noop => continue,
                other => panic!("{other:?} was not asked for"),
            }
            if !self.lies {
                assert!(record(&descriptor).read().is_none(), "a record is zero when its descriptor arrives");
            }
            self.pending.push(descriptor);
        }
    }

    /// Checks that a descriptor is a copy in progress, or a part of it.
    fn check(&mut self, descriptor: &Descriptor) {
        let (dst, src, size) = (descriptor.dst as usize, descriptor.src as usize, descriptor.size as usize);
        let at = dst.wrapping_sub(self.target.as_ptr() as usize);
        let op = self.live.get(at / SLOT).copied().flatten().expect("to where a copy is under way");
        assert!(size > 0 && at % SLOT + size <= op.len as usize, "{descriptor:?} of {op:?}");
        assert_eq!(src.wrapping_sub(op.src as usize), at % SLOT, "{descriptor:?} of {op:?}");
        assert_eq!(descriptor.completion % 32, 0);
        self.outcome.resumed += usize::from(size < op.len as usize);
    }

    /// Lets the device handle a descriptor.
    fn complete(&mut self, descriptor: &Descriptor, script: &mut Script<'_>) {
        match descriptor.opcode().unwrap() {
            Opcode::Drain => {
                let status = if script.u8() < 200 { Status::SUCCESS } else { Status::HARDWARE };
                record(descriptor).write(&Completed::of(status));
                if status == Status::SUCCESS {
                    // Older descriptors access memory no more.
                    self.pending.clear();
                }
            }
            Opcode::Batch => self.complete_batch(descriptor, script),
            _ => {
                if let Some(completed) = self.execute(descriptor, script)
                    && (completed.status != Status::SUCCESS || descriptor.flags().contains(Flags::RCR))
                {
                    record(descriptor).write(&completed);
                }
            }
        }
    }

    /// Copies as many bytes as the script selects. Returns the contents of the record, if one is written.
    fn execute(&self, descriptor: &Descriptor, script: &mut Script<'_>) -> Option<Completed> {
        let size = descriptor.size as usize;
        match script.below(16) {
            0 if self.lies => Some(any(script)),
            1 => None,
            2 => Some(Completed::of(Status(0x10 + script.below(0x13) as u8))),
            3..5 => {
                let bytes = script.u16() as usize % size;
                let backwards = script.u8() & 1;
                copy(descriptor, if backwards == 1 { size - bytes..size } else { 0..bytes });
                let completed = Completed {
                    completed: bytes as u32,
                    result: backwards,
                    ..Completed::of(Status::PAGE_FAULT)
                };
                Some(completed)
            }
            _ => {
                copy(descriptor, 0..size);
                Some(Completed::of(Status::SUCCESS))
            }
        }
    }

    fn complete_batch(&mut self, batch: &Descriptor, script: &mut Script<'_>) {
        let list = members(batch);
        if script.u8() < 16 {
            // The batch is refused as a whole, or lost.
            if script.u8() < 128 {
                record(batch).write(&Completed::of(Status(0x10 + script.below(0x13) as u8)));
            }
            return;
        }
        // The number of members that the device reads.
        let read = if script.u8() < 32 { script.below(list.len()) } else { list.len() };
        let mut failed = false;
        for member in &list[..read] {
            let ended = match self.execute(member, script) {
                Some(completed) => completed,
                // The device did not process this member. Only the batch's record reports that, the member has no
                // record.
                None if self.lies => continue,
                None => Completed::of(Status::HARDWARE),
            };
            if !ended.status.is_success() {
                failed = true;
                record(member).write(&ended);
            }
        }
        let status = match () {
            () if read < list.len() => Status::BATCH_LIST_FAULT,
            () if failed => Status::BATCH_FAILED,
            () => Status::SUCCESS,
        };
        let told = Completed { completed: read as u32, ..Completed::of(status) };
        record(batch).write(&if self.lies && script.u8() < 64 { any(script) } else { told });
    }

    fn poll(&mut self) {
        let mut seen = Completions::default();
        self.channel.poll(&mut seen);
        for token in seen.tokens {
            let op = self.report(token);
            self.outcome.done += 1;
            self.check_bytes(op, op.len);
        }
        for failed in seen.failed {
            let op = self.report(failed.copy.token);
            self.outcome.failed += 1;
            assert_eq!((failed.copy.src, failed.copy.dst, failed.copy.len), (op.src, op.dst, op.len));
            assert!(failed.done <= op.len);
            self.check_bytes(op, failed.done);
        }
        self.look_at_credits();
    }

    fn report(&mut self, token: u32) -> CopyOp {
        let op = self.live[token as usize % SLOTS].take().expect("a copy is reported once");
        assert_eq!(op.token, token, "a copy is reported once");
        op
    }

    /// Checks that the first `done` bytes of the copy have arrived, and that no bytes after its end were written.
    fn check_bytes(&self, op: CopyOp, done: u32) {
        if self.lies {
            return;
        }
        let (at, done) = (op.token as usize % SLOTS * SLOT, done as usize);
        assert!(self.target[at..at + done] == self.source[at..at + done], "{op:?}: {done} bytes");
        assert!(self.target[at + op.len as usize..at + SLOT].iter().all(|&byte| byte == IDLE), "{op:?}");
    }

    /// Gives up everything in progress, as the mover does with a channel that does not answer.
    fn reset(&mut self, script: &mut Script<'_>) {
        while self.channel.reset() == Reset::Pending {
            if script.u8() & 1 == 0 {
                self.poll();
            }
            self.take_submitted();
            // The drain, or an older descriptor.
            let at = match script.0.is_empty() {
                true => self.pending.iter().rposition(|d| d.opcode() == Some(Opcode::Drain)),
                false => (!self.pending.is_empty()).then(|| script.below(self.pending.len())),
            };
            if let Some(at) = at {
                let descriptor = self.pending.swap_remove(at);
                self.complete(&descriptor, script);
            }
            assert!(at.is_some() || !script.0.is_empty(), "a reset waits for nothing");
        }
        // The drain, or closing the queue, has proved to the driver that memory is no longer accessed.
        self.take_submitted();
        self.pending.clear();
        let mut outstanding = Vec::new();
        self.channel.take_outstanding(&mut outstanding);
        self.outcome.taken_out += outstanding.len();
        for op in outstanding {
            self.report(op.token);
        }
        assert!(self.live.iter().all(Option::is_none), "a copy is lost");
        let credits = self.channel.credits();
        assert_eq!((credits.used, self.channel.in_flight(), self.channel.room()), (0, 0, RING));
    }

    /// Lets the device complete its descriptors. Then the queue must work like a new one.
    fn finish(&mut self) {
        self.channel.submit();
        for _ in 0..RING {
            self.take_submitted();
            let mut none = Script(&[]);
            for descriptor in std::mem::take(&mut self.pending) {
                self.complete(&descriptor, &mut none);
            }
            self.poll();
        }
        self.reset(&mut Script(&[]));
        let stats = self.channel.stats();
        assert_eq!(stats.submitted, stats.completed + stats.failed, "{stats:?}");
        let lies = std::mem::replace(&mut self.lies, false);
        let before = self.outcome.done;
        // Stale contents of records must do no harm.
        self.copy(&mut Script(&[0, 40]));
        for _ in 0..4 {
            self.channel.submit();
            self.take_submitted();
            for descriptor in std::mem::take(&mut self.pending) {
                complete(&descriptor);
            }
            self.poll();
        }
        assert!(lies || self.outcome.done > before, "copies go on");
    }
}

/// Returns a record with arbitrary contents.
fn any(script: &mut Script<'_>) -> Completed {
    let status = Status(1 + script.below(0x3f) as u8);
    let completed =
        if script.u8() < 128 { u32::from(script.u8()) } else { u32::from_le_bytes(script.bytes()) };
    let (fault_was_write, result) = (script.u8() & 1 != 0, script.u8() & 3);
    Completed { completed, result, fault_was_write, ..Completed::of(status) }
}
