//! Tests of the channel. The test itself acts as the device: see [`crate::driver::fixture`].

use std::time::Duration;

use super::*;
use crate::completion::{Completed, Status};
use crate::descriptor::{Descriptor, Opcode};
use crate::driver::fixture::{DeviceEnd, Tree, complete, copy, members, record};
use crate::driver::{DsaDevice, Options};
use crate::sim::{Faults, SimDevice, SimOptions};
use offcore_dma::channel::{CopyDevice, Failure};

const LEN: usize = 64;

struct Rig {
    tree: Tree,
    device: DeviceEnd,
    channel: DsaChannel,
    source: Vec<u8>,
    target: Vec<u8>,
    seen: Completions,
}

fn batches() -> Rig {
    rig("0x200", 64, Options::default())
}

fn direct() -> Rig {
    rig("0x100", 64, Options::default())
}

fn rig(version: &str, ring: usize, options: Options) -> Rig {
    let tree = Tree::new();
    tree.set("version", version);
    let mut device = tree.device_end("wq0.0");
    let opened = DsaDevice::open(&tree.roots(), "wq0.0", options).unwrap();
    assert_eq!(opened.name(), "dsa:wq0.0");
    let channel = opened.open_dsa_channel(ring).unwrap();
    let refused = opened.open_dsa_channel(ring).unwrap_err().to_string();
    assert!(refused.contains("all 1 channels are in use"), "{refused}");
    assert_eq!(device.submitted().len(), 1, "the probe");
    let source = (0..1 << 16).map(|i| (i * 7 + i / 256) as u8).collect();
    Rig { tree, device, channel, source, target: vec![0; 1 << 16], seen: Completions::default() }
}

impl Rig {
    /// Submits copies of `LEN` bytes with the tokens of `range`, each to its own place in the buffers.
    fn submit(&mut self, range: std::ops::Range<u32>) -> usize {
        let ops: Vec<CopyOp> =
            range.map(|token| self.op(token as usize % 512 * 128, LEN as u32, token)).collect();
        // SAFETY: the rig's buffers live as long as its channel, and the functions below act as its device.
        let n = unsafe { self.channel.copy(&ops) };
        self.channel.submit();
        n
    }

    fn op(&mut self, at: usize, len: u32, token: u32) -> CopyOp {
        CopyOp {
            src: self.source.as_ptr().wrapping_add(at),
            dst: self.target.as_mut_ptr().wrapping_add(at),
            len,
            token,
        }
    }

    fn poll(&mut self) -> Vec<u32> {
        self.seen.clear();
        self.channel.poll(&mut self.seen);
        self.seen.tokens.to_vec()
    }

    /// Takes out the outstanding copies. Returns their tokens.
    fn take(&mut self) -> Vec<u32> {
        let mut outstanding = Vec::new();
        self.channel.take_outstanding(&mut outstanding);
        outstanding.iter().map(|op| op.token).collect()
    }

    fn used(&self) -> usize {
        self.channel.credits().used
    }
}

/// Executes a descriptor, whose record is zero, as the device.
fn run(descriptor: &Descriptor) {
    assert!(record(descriptor).read().is_none(), "a record is zero when its descriptor arrives");
    complete(descriptor);
}

fn fault(completed: u32, backwards: bool) -> Completed {
    Completed { completed, result: backwards.into(), ..Completed::of(Status::PAGE_FAULT) }
}

#[test]
fn direct_descriptors_have_records_without_fence() {
    let mut rig = direct();
    rig.submit(0..5);
    let descriptors = rig.device.submitted();
    assert_eq!(descriptors.len(), 5);
    for descriptor in &descriptors {
        let flags = Flags::CRAV | Flags::RCR | Flags::CACHE_CONTROL_1;
        assert_eq!((descriptor.opcode(), descriptor.flags()), (Some(Opcode::MemoryMove), flags));
        assert_eq!((descriptor.pasid, descriptor.interrupt, descriptor.reserved), (0, 0, 0));
    }
    assert_eq!(rig.used(), 5);
    // The device completes them in another order.
    for (finished, (expected, still)) in [(3, (3, 4)), (1, (1, 3)), (0, (0, 2)), (4, (4, 1)), (2, (2, 0))] {
        run(&descriptors[finished]);
        assert_eq!(rig.poll(), [expected]);
        assert_eq!((rig.used(), rig.channel.in_flight()), (still, still));
    }
    assert_eq!(rig.channel.room(), 64);
    assert_eq!(rig.target[..LEN], rig.source[..LEN]);
}

#[test]
fn burst_becomes_one_batch() {
    let mut rig = batches();
    rig.submit(0..20);
    let batch = rig.device.submitted();
    assert_eq!((batch.len(), batch[0].opcode(), batch[0].size), (1, Some(Opcode::Batch), 20));
    assert_eq!(batch[0].flags(), Flags::CRAV | Flags::RCR);
    for member in members(&batch[0]) {
        assert_eq!(member.flags(), Flags::CRAV | Flags::CACHE_CONTROL_1, "a record on failure only");
    }
    rig.submit(20..21);
    let single = rig.device.submitted();
    assert_eq!((single.len(), single[0].opcode()), (1, Some(Opcode::MemoryMove)));
    assert_eq!(single[0].flags(), Flags::CRAV | Flags::RCR | Flags::CACHE_CONTROL_1);
    assert_eq!(rig.used(), 2, "a batch takes one place");
    run(&single[0]);
    assert_eq!(rig.poll(), [20], "before the older batch");
    assert_eq!(rig.channel.room(), 64 - 21, "places behind the batch are not free yet");
    run(&batch[0]);
    assert_eq!(rig.poll(), (0..20).collect::<Vec<_>>());
    assert_eq!((rig.channel.room(), rig.used()), (64, 0));
}

#[test]
fn batches_split_at_maximum_and_ring_end() {
    let mut rig = batches();
    rig.submit(0..50);
    let batches = rig.device.submitted();
    assert_eq!(batches.iter().map(|b| b.size).collect::<Vec<_>>(), [32, 18], "max_batch_size is 32");
    batches.iter().for_each(run);
    assert_eq!(rig.poll().len(), 50);
    rig.submit(50..70);
    let batches = rig.device.submitted();
    assert_eq!(batches.iter().map(|b| b.size).collect::<Vec<_>>(), [14, 6], "the ring has 64 places");
    batches.iter().for_each(run);
    assert_eq!(rig.poll(), (50..70).collect::<Vec<_>>());
}

#[test]
fn a_dedicated_queue_is_never_overfilled() {
    let mut rig = direct();
    assert_eq!(rig.submit(0..60), 60);
    let mut with_device = rig.device.submitted();
    // The 16th entry is reserved for a drain.
    assert_eq!((with_device.len(), rig.channel.credits()), (15, Credits { limit: 15, used: 15 }));
    let mut tokens = Vec::new();
    while rig.channel.in_flight() > 0 {
        for descriptor in with_device.drain(..4.min(with_device.len())) {
            run(&descriptor);
        }
        tokens.extend(rig.poll());
        with_device.extend(rig.device.submitted());
        assert!(with_device.len() <= 15 && with_device.len() == rig.used());
    }
    assert_eq!(tokens, (0..60).collect::<Vec<_>>());
    assert_eq!(rig.channel.credits(), Credits { limit: 15, used: 0 });
}

#[test]
fn copy_resumes_after_faults_both_ways() {
    for rig in [direct, batches] {
        let mut rig = rig();
        rig.submit(0..1);
        let first = rig.device.submitted()[0];
        copy(&first, 0..20);
        record(&first).write(&fault(20, false));
        assert!(rig.poll().is_empty());
        let second = rig.device.submitted()[0];
        assert_eq!((second.src - first.src, second.dst - first.dst, second.size), (20, 20, 44));
        copy(&second, 34..44);
        record(&second).write(&fault(10, true));
        rig.poll();
        let third = rig.device.submitted()[0];
        assert_eq!((third.src, third.dst, third.size), (second.src, second.dst, 34), "only the size shrinks");
        assert_eq!((rig.used(), rig.channel.in_flight()), (1, 1));
        run(&third);
        assert_eq!(rig.poll(), [0]);
        assert_eq!(rig.target[..LEN], rig.source[..LEN]);
        assert_eq!((rig.used(), rig.channel.room(), rig.channel.stats().bytes), (0, 64, LEN as u64));
    }
}

#[test]
fn endless_faults_go_to_the_core() {
    let mut rig = batches();
    rig.submit(0..3);
    let batch = rig.device.submitted()[0];
    let list = members(&batch);
    run(&list[0]);
    run(&list[2]);
    record(&list[1]).write(&fault(8, false));
    record(&batch).write(&Completed { completed: 3, ..Completed::of(Status::BATCH_FAILED) });
    assert_eq!(rig.poll().len(), 2);
    for done in [4, 0] {
        let rest = rig.device.submitted()[0];
        record(&rest).write(&fault(done, false));
        rig.poll();
    }
    let failed = rig.seen.failed[0];
    assert_eq!((failed.copy.token, failed.failure, failed.done), (1, Failure::PageFault, 12));
    assert_eq!(failed.copy.len, LEN as u32);
    assert_eq!((rig.channel.in_flight(), rig.used(), rig.channel.room()), (0, 0, 64));
    // The written records are zero again.
    rig.submit(3..64);
    rig.device.submitted().iter().for_each(run);
    assert_eq!(rig.poll().len(), 61);
}

#[test]
fn failed_batch_accounts_for_every_member() {
    let mut rig = batches();
    rig.submit(0..6);
    let batch = rig.device.submitted()[0];
    let list = members(&batch);
    run(&list[0]);
    record(&list[1]).write(&Completed::of(Status::HARDWARE));
    record(&list[2]).write(&Completed::of(Status::INVALID_FLAGS));
    run(&list[3]);
    // The list could not be read beyond the fourth descriptor.
    record(&batch).write(&Completed { completed: 4, ..Completed::of(Status::BATCH_LIST_FAULT) });
    let mut tokens = rig.poll();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 3]);
    let mut failed: Vec<_> = rig.seen.failed.iter().map(|f| (f.copy.token, f.failure, f.done)).collect();
    failed.sort_unstable_by_key(|f| f.0);
    let expected = [
        (1, Failure::Hardware, 0),
        (2, Failure::Refused, 0),
        (4, Failure::Aborted, 0),
        (5, Failure::Aborted, 0),
    ];
    assert_eq!(failed, expected);
    assert_eq!((rig.channel.in_flight(), rig.used()), (0, 0));
    assert_eq!(rig.channel.stats(), ChannelStats { submitted: 6, completed: 2, failed: 4, bytes: 128 });
}

#[test]
fn batch_failure_without_member_aborts_all() {
    let mut rig = batches();
    rig.submit(0..3);
    let batch = rig.device.submitted()[0];
    // The failed member's record could not be written.
    members(&batch)[1..].iter().for_each(run);
    record(&batch).write(&Completed { completed: 3, ..Completed::of(Status::BATCH_FAILED) });
    assert!(rig.poll().is_empty());
    assert!(rig.seen.failed.iter().all(|f| f.failure == Failure::Aborted && f.done == 0));
    assert_eq!((rig.seen.failed.len(), rig.channel.in_flight(), rig.used()), (3, 0, 0));
}

#[test]
fn refused_batches_go_singly() {
    let mut rig = batches();
    rig.submit(0..4);
    let batch = rig.device.submitted()[0];
    record(&batch).write(&Completed::of(Status::BAD_OPCODE));
    rig.poll();
    assert!(rig.seen.failed.iter().all(|f| f.failure == Failure::Refused && f.done == 0));
    assert_eq!(rig.seen.failed.len(), 4);
    rig.submit(4..8);
    let single = rig.device.submitted();
    assert!(single.len() == 4 && single.iter().all(|d| d.opcode() == Some(Opcode::MemoryMove)));
    single.iter().for_each(run);
    assert_eq!(rig.poll(), [4, 5, 6, 7]);
}

#[test]
fn drain_completes_the_reset() {
    for rig in [direct, batches] {
        let mut rig = rig();
        rig.submit(0..1);
        rig.submit(1..2);
        let two = rig.device.submitted();
        run(&two[1]);
        assert_eq!(rig.channel.reset(), Reset::Pending);
        let drain = rig.device.submitted()[0];
        assert_eq!((drain.opcode(), drain.flags()), (Some(Opcode::Drain), Flags::CRAV | Flags::RCR));
        assert_eq!(rig.channel.reset(), Reset::Pending, "until the drain completes");
        assert_eq!(rig.submit(2..3), 1);
        assert!(rig.device.submitted().is_empty(), "nothing is handed over meanwhile");
        run(&drain);
        assert_eq!(rig.channel.reset(), Reset::Done);
        assert_eq!(rig.poll(), [1]);
        assert_eq!(rig.take(), [0, 2]);
        assert_eq!((rig.channel.in_flight(), rig.used(), rig.channel.room()), (0, 0, 64));
        rig.submit(3..9);
        rig.device.submitted().iter().for_each(run);
        assert_eq!(rig.poll(), (3..9).collect::<Vec<_>>());
    }
}

#[test]
fn earlier_drain_does_not_complete_reset() {
    let mut rig = direct();
    rig.submit(0..1);
    assert_eq!(rig.channel.reset(), Reset::Pending);
    let late = rig.device.submitted();
    run(&late[0]);
    assert_eq!((rig.poll(), rig.used()), (vec![0], 0));
    assert_eq!(rig.channel.reset(), Reset::Pending, "the drain is still on its way");
    run(&late[1]);
    assert_eq!(rig.channel.reset(), Reset::Done);
}

#[test]
fn reset_returns_only_drained_copies() {
    let mut rig = batches();
    rig.submit(0..2);
    let batch = rig.device.submitted()[0];
    assert_eq!(rig.channel.reset(), Reset::Pending);
    let drain = rig.device.submitted()[0];
    // One member has a rest to resume, but it completes too late for that.
    run(&members(&batch)[0]);
    record(&members(&batch)[1]).write(&fault(8, false));
    record(&batch).write(&Completed { completed: 2, ..Completed::of(Status::BATCH_FAILED) });
    run(&drain);
    assert_eq!(rig.channel.reset(), Reset::Done);
    assert_eq!(rig.poll(), [0]);
    assert_eq!((rig.channel.reset(), rig.poll().len()), (Reset::Done, 0));
    assert!(rig.device.submitted().is_empty(), "it would land after it was made by the core");
    assert_eq!(rig.take(), [1]);
    rig.submit(2..4);
    rig.device.submitted().iter().for_each(run);
    assert_eq!(rig.poll(), [2, 3]);
}

#[test]
fn gone_device_is_closed_and_probed() {
    let pause = Duration::from_millis(100);
    let mut rig = rig("0x100", 64, Options { reopen_every: pause, ..Options::default() });
    rig.submit(0..20);
    assert_eq!(rig.device.submitted().len(), 15);
    rig.tree.set("wq0.0/state", "disabled");
    assert_eq!(rig.channel.reset(), Reset::Done, "closing proves that nothing lands any more");
    assert_eq!((rig.channel.room(), rig.channel.submit_by()), (0, None));
    assert_eq!(rig.take().len(), 20);
    assert_eq!((rig.channel.in_flight(), rig.used()), (0, 0));
    std::thread::sleep(pause);
    assert_eq!(rig.channel.room(), 64, "time to try");
    assert_eq!((rig.submit(0..1), rig.channel.room()), (0, 0), "still gone");
    std::thread::sleep(pause);
    rig.tree.set("wq0.0/state", "enabled");
    rig.poll();
    assert_eq!((rig.channel.room(), rig.channel.submit_by()), (64, Some(SubmitBy::Write)));
    assert_eq!(rig.device.submitted().len(), 1, "the probe");
    rig.submit(0..20);
    while rig.channel.in_flight() > 0 {
        rig.device.submitted().iter().for_each(run);
        rig.poll();
    }
}

#[test]
fn slow_drain_times_out() {
    let mut rig = rig("0x200", 64, Options { drain_limit: Duration::from_millis(1), ..Options::default() });
    rig.submit(0..20);
    assert_eq!(rig.channel.reset(), Reset::Pending);
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(rig.channel.reset(), Reset::Done);
    assert_eq!(rig.channel.room(), 64 - 20, "open again at once");
    assert_eq!((rig.take().len(), rig.used()), (20, 0));
}

#[test]
fn zero_length_copy_skips_device() {
    let mut rig = batches();
    let op = rig.op(0, 0, 9);
    // SAFETY: the copy has no bytes.
    assert_eq!(unsafe { rig.channel.copy(&[op]) }, 1);
    rig.channel.submit();
    assert_eq!(rig.poll(), [9]);
    assert!(rig.device.submitted().is_empty());
}

#[test]
fn long_copy_in_parts_is_reported_once() {
    let mut rig = batches();
    let op = rig.op(0, 40_000, 9);
    // SAFETY: the rig's buffers live as long as its channel, and the test acts as its device.
    assert_eq!(unsafe { rig.channel.copy(&[op]) }, 1);
    rig.channel.submit();
    let parts = rig.device.submitted();
    assert_eq!(parts.iter().map(|d| d.size).collect::<Vec<_>>(), [16384, 16384, 40_000 - 2 * 16384]);
    for part in parts.iter().rev() {
        assert!(rig.poll().is_empty());
        run(part);
    }
    assert_eq!(rig.poll(), [9]);
    assert_eq!(rig.target[..40_000], rig.source[..40_000]);
    assert_eq!((rig.used(), rig.channel.in_flight(), rig.channel.room()), (0, 0, 64));
}

#[test]
fn unsupported_options_are_disabled() {
    let options = Options { block_on_fault: true, cache_control: false, batch: false, ..Options::default() };
    let mut rig = rig("0x200", 64, options);
    rig.submit(0..2);
    let flags: Vec<Flags> = rig.device.submitted().iter().map(Descriptor::flags).collect();
    assert_eq!(flags, [Flags::CRAV | Flags::RCR; 2], "the queue does not allow blocking");

    let tree = Tree::new();
    tree.set("wq0.0/block_on_fault", "1");
    // The device has no cache control for memory.
    tree.set("gen_cap", "0x1");
    let mut device = tree.device_end("wq0.0");
    let options = Options { block_on_fault: true, ..Options::default() };
    let mut channel = DsaDevice::open(&tree.roots(), "wq0.0", options).unwrap().open_dsa_channel(8).unwrap();
    device.submitted();
    let op = CopyOp { src: rig.source.as_ptr(), dst: rig.target.as_mut_ptr(), len: 1, token: 0 };
    // SAFETY: the rig's buffers live longer than the channel, and no device executes the copy.
    unsafe { channel.copy(&[op]) };
    channel.submit();
    assert_eq!(device.submitted()[0].flags(), Flags::CRAV | Flags::RCR | Flags::BLOCK_ON_FAULT);
}

#[test]
fn channels_share_queue_entries() {
    let tree = Tree::new();
    let _end = tree.device_end("wq0.1");
    let device = DsaDevice::open(&tree.roots(), "wq0.1", Options::default()).unwrap();
    let first = device.open_dsa_channel(8).unwrap();
    assert_eq!(first.credits().limit, 11, "the threshold is 12, one place is kept for a drain");
    let second = device.open_dsa_channel(8).unwrap();
    assert_eq!((first.credits().limit, second.credits().limit), (5, 5));
    drop(second);
    assert_eq!(first.credits().limit, 11);
}

/// Runs copies through a simulated device whose CPU lets stores pass submissions. Returns the number of completions.
fn completed_with_fences(fences: bool, batch: bool) -> usize {
    let faults = Faults { weak_ordering: true, ..Faults::default() };
    let (device, mut engine) =
        SimDevice::stepped("dsa-sim0", SimOptions { faults, ..SimOptions::default() }).unwrap();
    let opened = DsaDevice::simulated(&device, "wq0.0", Options { batch, ..Options::default() }).unwrap();
    let mut channel = opened.open_dsa_channel(4).unwrap();
    channel.fences = fences;
    let (source, mut target) = ([7; LEN], [0; 4 * LEN]);
    let mut seen = Completions::default();
    for _ in 0..8 {
        let ops: Vec<CopyOp> = (0..4)
            .map(|token| CopyOp {
                src: source.as_ptr(),
                dst: target.as_mut_ptr().wrapping_add(token as usize * LEN),
                len: LEN as u32,
                token,
            })
            .collect();
        // SAFETY: the buffers outlive the channel's copies: all accesses have happened when the engine is idle.
        unsafe { channel.copy(&ops) };
        channel.submit();
        engine.run_until_idle();
        channel.poll(&mut seen);
    }
    assert_eq!(device.stats().injected_overwritten > 0, !fences);
    seen.tokens.len()
}

#[test]
fn without_the_fence_completions_are_lost() {
    for batch in [false, true] {
        assert_eq!(completed_with_fences(true, batch), 32);
        // The first use of a record cannot fail, because the record was zeroed long before.
        assert!(completed_with_fences(false, batch) < 32);
    }
}
