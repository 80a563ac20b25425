//! On the simulated device: the same results as on the core, with every fault, and who did it is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use offcore_dsa::ops::encode::DomainAddress;
use offcore_dsa::ops::software::dif::{DestinationFlags, DifFlags, SourceFlags, Tags, Update};
use offcore_dsa::ops::software::{Crc, Pattern};
use offcore_dsa::ops::{Done, DoneBy, Engine, Operation, OpsError, Options, Value, Why};
use offcore_dsa::sim::{SimDevice, SimEngine, SimOptions};
use offcore_dsa::{Opcode, Portal, Status, WqInfo};

/// A device that a thread steps as fast as it can, so that calls may wait for it.
struct Device {
    device: SimDevice,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    fn new(options: &str) -> Self {
        let (device, mut engine) = SimDevice::stepped("dsa-sim0", options.parse().unwrap()).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if engine.run_until_idle() == 0 {
                    std::thread::yield_now();
                }
            }
        });
        Self { device, stop, thread: Some(thread) }
    }

    fn queue(&self) -> WqInfo {
        self.device.work_queues().remove(0)
    }

    fn engine(&self, options: Options) -> Engine {
        let wq = self.queue();
        Engine::new(Portal::from(self.device.open(&wq.name).unwrap()), wq, options)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(seed) ^ (at >> 8) as u8).collect()
}

/// Every operation, with what it says and what it leaves in memory.
fn everything(engine: &mut Engine, len: usize) -> Vec<(Opcode, Done<String>, Vec<u8>)> {
    let mut all = Vec::new();
    let mut note = |opcode, done: Done<String>, memory: &[u8]| all.push((opcode, done, memory.to_vec()));
    fn said<T: std::fmt::Debug>(done: Result<Done<T>, OpsError>) -> Done<String> {
        done.unwrap().map(|value| format!("{value:?}"))
    }
    let len = len / 8 * 8;
    let src = bytes(len, 7);
    let mut other = src.clone();
    other.iter_mut().skip(len / 3).step_by(97).for_each(|byte| *byte ^= 0x40);
    let (mut dst, mut second) = (vec![0; len], vec![0; len]);
    let none = &[];

    note(Opcode::Noop, said(engine.noop()), none);
    note(Opcode::Drain, said(engine.drain()), none);
    note(Opcode::MemoryMove, said(engine.copy(&src, &mut dst)), &dst);
    note(Opcode::Fill, said(engine.fill(&mut dst, Pattern::of_8(0x0123_4567_89ab_cdef))), &dst);
    note(Opcode::ComparePattern, said(engine.compare_pattern(&dst, 0x0123_4567_89ab_cdef)), none);
    dst[len - 3] ^= 1;
    note(Opcode::ComparePattern, said(engine.compare_pattern(&dst, 0x0123_4567_89ab_cdef)), none);
    note(Opcode::Compare, said(engine.compare(&src, &other)), none);
    note(Opcode::Compare, said(engine.compare(&src, &src)), none);
    note(Opcode::CrcGeneration, said(engine.crc(&src, Crc::default(), 0)), none);
    let bypassed = Crc { bypass_inversion: true, bypass_reflection: true };
    note(Opcode::CrcGeneration, said(engine.crc(&src, bypassed, 5)), none);
    note(Opcode::CopyCrc, said(engine.copy_crc(&src, &mut dst, Crc::default(), 0)), &dst);
    let both = said(engine.dualcast(&src, &mut dst, &mut second));
    note(Opcode::Dualcast, both, &[dst.clone(), second.clone()].concat());
    note(Opcode::CacheFlush, said(engine.cache_flush(&mut dst)), &dst);

    let mut record = vec![0; len / 8 * 10];
    let delta = engine.create_delta(&src, &other, &mut record).unwrap();
    note(Opcode::CreateDelta, delta.map(|delta| format!("{delta:?}")), &record[..delta.value.size]);
    let mut applied = src.clone();
    note(Opcode::ApplyDelta, said(engine.apply_delta(&record[..delta.value.size], &mut applied)), &applied);
    assert_eq!(applied, other);

    let dif = DifFlags::INVERT_SEED;
    let (to, from) = (DestinationFlags::APPLICATION_INCREMENTS, SourceFlags::APPLICATION_INCREMENTS);
    let tags = Tags { reference: 3, mask: 0, application: 4 };
    let blocks = len / 512;
    let data = &src[..blocks * 512];
    let mut protected = vec![0; blocks * 520];
    note(Opcode::DifInsert, said(engine.dif_insert(data, &mut protected, dif, to, tags)), &protected);
    note(Opcode::DifCheck, said(engine.dif_check(&protected, dif, from, tags)), none);
    let stripped = &mut dst[..blocks * 512];
    note(Opcode::DifStrip, said(engine.dif_strip(&protected, stripped, dif, from, tags)), stripped);
    let update = Update { dif, source: from, destination: to };
    let new = Tags { reference: 100, ..tags };
    let mut updated = vec![0; protected.len()];
    note(Opcode::DifUpdate, said(engine.dif_update(&protected, &mut updated, update, tags, new)), &updated);
    let mut fields = vec![0; blocks * 8];
    note(Opcode::DixGenerate, said(engine.dix_generate(data, &mut fields, dif, to, tags)), &fields);
    all
}

/// The same as the core says; then who did it.
fn same_as_core(engine: &mut Engine, len: usize) -> Vec<(Opcode, Done<String>)> {
    let ours = everything(engine, len);
    let cores = everything(&mut Engine::core(), len);
    for ((opcode, done, memory), (_, by_core, expected)) in ours.iter().zip(&cores) {
        assert_eq!(done.value, by_core.value, "{opcode:?}");
        assert!(memory == expected, "{opcode:?} left something else in memory");
    }
    assert_eq!(ours.len(), cores.len());
    ours.into_iter().map(|(opcode, done, _)| (opcode, done)).collect()
}

#[test]
fn the_device_does_what_it_can_and_the_core_the_rest() {
    for options in ["gen=spr", "gen=dsa2", "gen=spr,ops=3f", "gen=dsa2,profile=app"] {
        let device = Device::new(options);
        let ops = device.queue().ops;
        for use_cache in [false, true] {
            let mut engine = device.engine(Options { to_cache: use_cache, ..Options::default() });
            for (opcode, done) in same_as_core(&mut engine, 5000) {
                let form = matches!(done.done_by, DoneBy::Core(Why::Form(_)));
                match ops.contains(opcode) {
                    // Two slices of the allocator rarely have the same place in their pages.
                    true if opcode == Opcode::Dualcast && form => {}
                    true => assert_eq!((done.done_by, done.descriptors), (DoneBy::Device, 1), "{opcode:?}"),
                    false => assert_eq!(done.done_by, DoneBy::Core(Why::Unsupported), "{opcode:?}"),
                }
            }
        }
    }
}

#[test]
fn a_dualcast_whose_destinations_have_the_same_place_in_their_pages_is_the_devices() {
    let device = Device::new("gen=spr");
    let mut engine = device.engine(Options::default());
    let src = bytes(1000, 3);
    let mut memory = vec![0; 8192];
    let (first, second) = memory.split_at_mut(4096);
    let done = engine.dualcast(&src, &mut first[..1000], &mut second[..1000]).unwrap();
    assert_eq!(done.done_by, DoneBy::Device);
    assert!(first[..1000] == src && second[..1000] == src);
    let done = engine.dualcast(&src, &mut first[..1000], &mut second[1..1001]).unwrap();
    assert!(matches!(done.done_by, DoneBy::Core(Why::Form(why)) if why.contains("11:0")), "{done:?}");
    assert!(second[1..1001] == src);
}

#[test]
fn what_is_larger_than_the_queues_maximum_is_done_in_pieces() {
    let device = Device::new("gen=dsa2,profile=net");
    let most = device.queue().max_transfer_size as usize;
    assert_eq!(most, 16 << 10);
    let mut engine = device.engine(Options::default());
    let (src, mut dst) = (bytes(100_000, 5), vec![0; 100_000]);
    let done = engine.copy(&src, &mut dst).unwrap();
    assert_eq!((done.done_by, done.descriptors), (DoneBy::Device, 7));
    assert_eq!(src, dst);
    for (opcode, done) in same_as_core(&mut engine, 100_000) {
        let control = matches!(opcode, Opcode::Noop | Opcode::Drain);
        let refused = matches!(done.done_by, DoneBy::Core(Why::Form(_)));
        assert!(
            control || refused || done.descriptors > 1 || done.value.contains("Some"),
            "{opcode:?} {done:?}"
        );
    }
}

#[test]
fn the_device_goes_on_after_page_faults_and_the_result_is_the_same() {
    for seed in 1..6 {
        let device = Device::new(&format!("gen=dsa2,profile=net,seed={seed},fault=page:0.6"));
        let mut engine = device.engine(Options { resumes: 1000, ..Options::default() });
        let done = same_as_core(&mut engine, 60_000);
        let resumed: u32 = done.iter().map(|(_, done)| done.resumed).sum();
        assert!(resumed > 10, "{done:?}");
        for (opcode, done) in done {
            // The core stands in where the device comes no further, and mends a piece that ran backwards.
            let faulted = matches!(done.done_by, DoneBy::Both(Why::PageFault { .. }));
            let form = matches!(done.done_by, DoneBy::Core(Why::Form(_)) | DoneBy::Both(Why::Form(_)));
            assert!(done.done_by == DoneBy::Device || faulted || form, "{opcode:?} {done:?}");
        }
    }
}

#[test]
fn the_core_finishes_after_a_page_fault_where_it_is_asked_to() {
    let device = Device::new("gen=dsa2,seed=3,fault=page:1");
    let mut engine = device.engine(Options { resumes: 0, ..Options::default() });
    let mut finished = 0;
    for (opcode, done) in same_as_core(&mut engine, 9000) {
        assert_eq!(done.resumed, 0);
        let by_core = matches!(done.done_by, DoneBy::Both(Why::PageFault { .. }));
        finished += u32::from(by_core);
        // The fault of a record that is applied may lie past its end.
        let control = matches!(opcode, Opcode::Noop | Opcode::Drain | Opcode::ApplyDelta);
        let other = control || matches!(done.done_by, DoneBy::Core(_)) || done.value.contains("Some");
        assert!(by_core || other, "{opcode:?} {done:?}");
    }
    assert!(finished >= 10);
}

#[test]
fn a_hardware_error_is_made_good_by_the_core_from_the_pieces_start() {
    let device = Device::new("gen=dsa2,profile=net,fault=hw:1");
    let mut engine = device.engine(Options::default());
    let (src, mut dst) = (bytes(50_000, 5), vec![0; 50_000]);
    let done = engine.copy(&src, &mut dst).unwrap();
    assert_eq!((done.done_by, done.descriptors), (DoneBy::Both(Why::Failed(Status::HARDWARE)), 1));
    assert_eq!(src, dst);
    assert_eq!(
        done.done_by.to_string(),
        "device, finished by the core: the device failed: hardware error (0x20)"
    );
    same_as_core(&mut engine, 9000);
}

#[test]
fn a_copy_onto_itself_that_failed_half_way_is_reported_and_not_made_up() {
    let device = Device::new("gen=spr,fault=hw:1");
    let mut engine = device.engine(Options::default());
    let mut memory = bytes(4096, 9);
    let src = offcore_dsa::ops::Source::new(memory.as_ptr(), 2048);
    let dst = offcore_dsa::ops::Destination::new(memory.as_mut_ptr().wrapping_add(100), 2048);
    // SAFETY: the memory is `memory`, which nobody else uses in the meantime.
    let failed = unsafe { engine.run(Operation::Copy { src, dst }) };
    assert_eq!(failed, Err(OpsError::Damaged { why: Why::Failed(Status::HARDWARE) }));
}

#[test]
fn a_device_that_does_not_answer_is_given_up_and_nothing_is_lost() {
    for fault in ["drop:1", "lost:1", "halt:1"] {
        let device = Device::new(&format!("gen=spr,fault={fault}"));
        let mut engine = device.engine(Options { patience: Duration::from_millis(50), ..Options::default() });
        let (src, mut dst) = (bytes(5000, 5), vec![0; 5000]);
        if fault == "halt:1" {
            engine.noop().unwrap();
        }
        let done = engine.copy(&src, &mut dst).unwrap();
        assert_eq!(done.done_by, DoneBy::Both(Why::Lost), "{fault}");
        assert_eq!(src, dst);
        assert!(!engine.has_device());
        dst.fill(0);
        assert_eq!(engine.copy(&src, &mut dst).unwrap().done_by, DoneBy::Core(Why::NoDevice));
        assert_eq!(src, dst);
    }
}

#[test]
fn a_record_is_used_again_only_after_a_fence() {
    let device = Device::new("gen=spr,fault=weak");
    let mut engine = device.engine(Options { patience: Duration::from_secs(2), ..Options::default() });
    let (src, mut dst) = (bytes(500, 5), vec![0; 500]);
    for _ in 0..100 {
        assert_eq!(engine.copy(&src, &mut dst).unwrap().done_by, DoneBy::Device);
    }
}

#[test]
fn a_shared_queue_that_stays_full_leaves_it_to_the_core() {
    let device = Device::new("gen=spr,profile=app,fault=retry:1:100000000");
    let mut engine = device.engine(Options::default());
    let (src, mut dst) = (bytes(5000, 5), vec![0; 5000]);
    assert_eq!(engine.copy(&src, &mut dst).unwrap().done_by, DoneBy::Core(Why::QueueFull));
    assert_eq!(src, dst);
}

fn stepped(options: &str) -> (Engine, SimEngine, WqInfo) {
    let (device, sim) = SimDevice::stepped("dsa-sim0", options.parse::<SimOptions>().unwrap()).unwrap();
    let wq = device.work_queues().remove(0);
    let portal = device.open(&wq.name).unwrap();
    (Engine::new(Portal::from(portal), wq.clone(), Options::default()), sim, wq)
}

#[test]
fn many_operations_are_in_flight_and_polled_when_the_device_has_done_them() {
    let (mut engine, mut sim, wq) = stepped("gen=spr,profile=vhost");
    let limit = wq.size as usize;
    let src = bytes(3000, 11);
    let mut dst = vec![vec![0; 3000]; limit + 1];
    let submit = |engine: &mut Engine, dst: &mut Vec<u8>| {
        let operation = Operation::Copy { src: (&src[..]).into(), dst: (&mut dst[..]).into() };
        // SAFETY: source and destinations are used by nobody else until all is polled.
        unsafe { engine.submit(operation) }
    };
    let (last, others) = dst.split_last_mut().unwrap();
    let mut tickets: Vec<_> = others.iter_mut().map(|dst| submit(&mut engine, dst).unwrap()).collect();
    let full = submit(&mut engine, last).unwrap_err();
    assert_eq!(full, OpsError::Full { device: "work queue wq0.0".into(), limit });
    assert!(full.to_string().contains("poll first"));
    assert_eq!(engine.poll(), None, "the device has not been stepped");
    assert!(others.iter().all(|dst| dst.iter().all(|&byte| byte == 0)), "nothing is copied at submission");
    assert_eq!(sim.run_until_idle(), limit);
    while let Some((ticket, result)) = engine.poll() {
        let done = result.unwrap();
        assert_eq!((done.value, done.done_by), (Value::Nothing, DoneBy::Device));
        let at = tickets.iter().position(|&waiting| waiting == ticket).expect("a ticket comes once");
        tickets.swap_remove(at);
    }
    assert!(tickets.is_empty() && engine.in_flight() == 0);
    assert!(others.iter().all(|dst| *dst == src));
    submit(&mut engine, last).unwrap();
    drop(engine);
    sim.run_until_idle();
    assert!(last.iter().all(|&byte| byte == 0), "a dropped engine's operations do not touch memory");
}

#[test]
fn a_drain_waits_for_what_was_submitted_before() {
    let device = Device::new("gen=spr,profile=vhost,fault=late:0.3:500");
    let mut engine = device.engine(Options::default());
    let src = bytes(3000, 11);
    let mut dst = vec![vec![0; 3000]; 16];
    for dst in &mut dst {
        // SAFETY: source and destinations are used by nobody else until all is polled.
        unsafe { engine.submit(Operation::Copy { src: (&src[..]).into(), dst: (&mut dst[..]).into() }) }
            .unwrap();
    }
    assert_eq!(engine.drain().unwrap().done_by, DoneBy::Device);
    assert!(dst.iter().all(|dst| *dst == src));
    assert_eq!((engine.in_flight(), std::iter::from_fn(|| engine.poll()).count()), (0, 16));
}

#[test]
fn inter_domain_operations_that_the_device_lacks_are_refused_by_name() {
    let (mut engine, _sim, _) = stepped("gen=spr");
    let (here, there) =
        (DomainAddress { address: 0, handle: None }, DomainAddress { address: 0, handle: Some(1) });
    // SAFETY: the device does not have the operation.
    let error = unsafe { engine.submit(Operation::InterDomainCopy { src: here, dst: there, len: 64 }) };
    assert_eq!(
        error.unwrap_err().to_string(),
        "inter-domain copy is not supported by work queue wq0.0: the work queue does not have the operation"
    );
}
