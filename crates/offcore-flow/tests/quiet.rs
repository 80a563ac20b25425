//! Measures that a burst makes no allocation and no system call.
//!
//! A child process (this test binary again) puts its worker behind a seccomp filter that ends the process at the first
//! system call, and counts allocations with its own allocator.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use offcore_dma::core::CoreDevice;
use offcore_dma::{Binding, Device, Mode, Mover};
use offcore_flow::copy::{CopyRx, CopySetup};
use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::idle::{IDLE, Sleeper};
use offcore_flow::pipeline::{OnHit, QueuesSetup, work_queues};
use offcore_flow::worker::Worker;
use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::host::HostDevice;
use offcore_gpu::layout::Kind;
use offcore_gpu::patterns::Patterns;
use offcore_gpu::pipeline;
use offcore_mem::{Burst, HEADROOM, Hugepages, Pool};
use offcore_port::vhost::{rx_over, tx_over};
use offcore_port::{Context, RxCounters, RxQueue, TxCounters, TxQueue};
use offcore_ring::device::Direction;
use offcore_ring::driver;
use offcore_stats::StageClock;
use offcore_stats::page::{Block, StatsPage};
use offcore_vhost::testing::{FEATURES, Guest};
use offcore_vhost::{VringCell, VringConfig};
use offcore_wire::MacAddr;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: all calls are passed on to the system allocator, which fulfils the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: `layout` has a non-zero size, as the caller guarantees.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` was allocated by `System` with `layout`, as the caller guarantees.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CHILD: &str = "OFFCORE_QUIET_CHILD";
/// Exit code of a child that has allocated.
const ALLOCATED: i32 = 3;
/// Exit code of a child whose packets were lost.
const LOST: i32 = 4;

/// Kills the process at any system call other than exit_group.
fn forbid_system_calls() {
    let statement = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let give = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = [
        statement(load, 0),
        libc::sock_filter { code: equal, jt: 0, jf: 1, k: libc::SYS_exit_group as u32 },
        statement(give, libc::SECCOMP_RET_ALLOW),
        statement(give, libc::SECCOMP_RET_KILL_PROCESS),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the calls only read `program`, which outlives them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

fn exit(code: i32) -> ! {
    // SAFETY: the call takes an integer and ends the process; nothing runs after it.
    unsafe { libc::syscall(libc::SYS_exit_group, code) };
    unreachable!("exit_group does not return")
}

/// Moves packets through a worker behind the filter. Copies are made by the core, or by a helper core that is stepped
/// here. With `copied`, this applies to the copies of a copy stage, while the core makes the guest's copies.
fn child(offload: bool, copied: bool) -> ! {
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let guest = Guest::new(256);
    let mut mover = Mover::new();
    let mut stepper = None;
    if offload {
        let (device, steps) = CoreDevice::stepped();
        mover.add_channel(device.open_channel(256).unwrap());
        stepper = Some(steps);
    }
    let channels: Vec<_> = mover.channels().map(|(id, _)| id).collect();
    let mode = if offload { Mode::Offload } else { Mode::Cpu };
    let binding = Binding::new(mode, channels);
    let of_guest = if copied { Binding::core() } else { binding.clone() };
    let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
    for (cell, layout) in cells.iter().zip([&guest.layout, &guest.tx_layout]) {
        let config = VringConfig { layout: layout.clone(), ..guest.config(FEATURES) };
        cell.publish(|wanted| {
            wanted.vring = Some(Arc::new(config));
            wanted.binding = of_guest.clone();
        });
    }
    let mut rx = rx_over(&cells[1], &mut mover, RxCounters::private()).unwrap();
    if copied {
        let stats = StatsPage::new(1 << 14).unwrap();
        let setup = CopySetup {
            mover: &mut mover,
            binding,
            in_flight: 2048,
            max_frame: 1514,
            min_copy: 100,
            pool,
            stats: &stats,
            port: "port0",
            index: 0,
        };
        rx = Box::new(CopyRx::new(rx, setup).unwrap());
    }
    let tx = tx_over(&cells[0], &mut mover, TxCounters::private()).unwrap();
    let addresses = Addresses { source: MacAddr::local(0), destination: MacAddr::local(1) };
    let forwarding = Forwarding::new(rx, tx, Rules::new(Forward::Mac, addresses, 0));
    let mut worker = Worker::new(vec![Box::new(forwarding)], mover, pool.cache());
    let mut rx = driver::Queue::new(guest.layout.clone(), false);
    let mut tx = driver::Queue::new(guest.tx_layout.clone(), false);
    rx.set_notification(false);
    tx.set_notification(false);
    for i in 0..128 {
        rx.add(guest.buffer(i, 2048), 2048, Direction::Writable, i).unwrap();
        tx.add(guest.buffer(128 + i, 2048), 72 + 8 * i as u32, Direction::Readable, 128 + i).unwrap();
    }
    rx.publish();
    tx.publish();
    // Everything that is set up at first use (such as the copy loop for this CPU) is set up now.
    worker.round();
    stepper.as_mut().map(offcore_dma::core::Stepper::step);
    forbid_system_calls();
    let before = ALLOCATIONS.with(Cell::get);
    let mut received = 0;
    for _ in 0..20_000 {
        worker.round();
        if let Some(stepper) = &mut stepper {
            stepper.step();
        }
        // The guest returns buffers at once.
        let (Ok(_), Ok(_)) = (rx.used(), tx.used()) else { exit(LOST) };
        while let Ok(Some(used)) = rx.pop() {
            received += 1;
            let _ = rx.add(guest.buffer(used.token, 2048), 2048, Direction::Writable, used.token);
        }
        while let Ok(Some(used)) = tx.pop() {
            let _ = tx.add(guest.buffer(used.token, 2048), 72, Direction::Readable, used.token);
        }
        rx.publish();
        tx.publish();
    }
    if received < 100_000 {
        exit(LOST);
    }
    exit(if ALLOCATIONS.with(Cell::get) == before { 0 } else { ALLOCATED });
}

/// Moves packets through a pipeline behind the filter. Packets are split, and processed by the core or by threads that
/// run outside the filter.
fn piped(by_device: bool) -> ! {
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    let mut device = HostDevice::new();
    let worker = match &mut device {
        Ok(device) if by_device => {
            let (launch, memory) = (Launch::Persistent, Memory::Gpu);
            pipeline::Worker::Device { device, launch, blocks: 1, threads: 32, memory }
        }
        _ => pipeline::Worker::Cpu,
    };
    let patterns = Patterns::from_list(["pattern"]).unwrap();
    let (patterns, split_at) = (Some(&patterns), Some(60));
    let setup = pipeline::Setup {
        burst: 100,
        slots: 8,
        worker,
        work: pipeline::Work { kind: Kind::Match, swap: true, split_at, patterns, ..Default::default() },
        timeout: Duration::from_secs(3600),
        pool,
        hugepages: Hugepages::None,
    };
    let (burst_timeout, on_hit) = (Duration::from_micros(10), OnHit::Mark(46));
    let queues =
        QueuesSetup { burst_timeout, on_hit, elsewhere: None, stats: &stats, name: "pipeline0", index: 0 };
    let (mut tx, mut rx) = work_queues(setup, queues).unwrap();
    let (mut mover, mut cache, mut clock) = (Mover::new(), pool.cache(), StageClock::private());
    let mut ctx = Context { mover: &mut mover, cache: &mut cache, clock: &mut clock, burst: 32 };
    // Everything that is set up at first use is set up now.
    let _ = offcore_stats::tsc::hz();
    forbid_system_calls();
    let before = ALLOCATIONS.with(Cell::get);
    let (mut rounds, mut received) = (0u64, 0);
    let (mut burst, mut done) = (Burst::new(), Burst::new());
    while received < 100_000 && rounds < 1 << 32 {
        rounds += 1;
        while burst.len() < 32 {
            let Some(mut packet) = ctx.cache.take_sized(HEADROOM, 60 + rounds as usize % 300) else { break };
            packet.bytes_mut().fill(rounds as u8);
            burst.push(packet);
        }
        tx.tx(&mut ctx, &mut burst);
        tx.poll(&mut ctx);
        rx.rx(&mut ctx, &mut done);
        received += done.len();
        ctx.cache.free_all(done.drain(..));
    }
    if received < 100_000 {
        exit(LOST);
    }
    exit(if ALLOCATIONS.with(Cell::get) == before { 0 } else { ALLOCATED });
}

/// Returns the allocations of a worker that sleeps `sleeps` times and ends.
fn allocations(sleeps: u64) -> u64 {
    let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
    let guest = Guest::new(64);
    let mut mover = Mover::new();
    let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
    let config = VringConfig { layout: guest.tx_layout.clone(), ..guest.config(FEATURES) };
    cells[1].publish(|wanted| wanted.vring = Some(Arc::new(config)));
    let rx = rx_over(&cells[1], &mut mover, RxCounters::private()).unwrap();
    let tx = tx_over(&cells[0], &mut mover, TxCounters::private()).unwrap();
    let addresses = Addresses { source: MacAddr::local(0), destination: MacAddr::local(1) };
    let forwarding = Forwarding::new(rx, tx, Rules::new(Forward::Mac, addresses, 0));
    let worker = Worker::new(vec![Box::new(forwarding)], mover, pool.cache());
    let stats = Block::private(&IDLE);
    let sleeper = Sleeper::new(stats.clone());
    let stop = Arc::new(AtomicBool::new(false));
    let stopper = std::thread::spawn({
        let (stop, stats) = (Arc::clone(&stop), stats);
        move || {
            while stats.counter(0).value() < sleeps {
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
        }
    });
    let before = ALLOCATIONS.with(Cell::get);
    assert_eq!(worker.run(Some(sleeper), &stop), 0);
    let after = ALLOCATIONS.with(Cell::get);
    stopper.join().unwrap();
    after - before
}

#[test]
fn sleeping_allocates_nothing() {
    // Everything that is set up at first use is set up now.
    allocations(1);
    // Ending a worker makes some allocations.
    assert_eq!(allocations(250), allocations(10));
}

fn run_child(test: &str, mode: &str) {
    if std::env::var(CHILD).is_ok_and(|wanted| wanted == mode) {
        if mode.contains("piped") {
            piped(mode.contains("device"));
        }
        child(mode.contains("offload"), mode.contains("copied"));
    }
    let binary = std::env::current_exe().unwrap();
    let status =
        Command::new(binary).args(["--exact", test, "--test-threads=1"]).env(CHILD, mode).status().unwrap();
    assert_ne!(status.signal(), Some(libc::SIGSYS), "a burst made a system call");
    assert_ne!(status.code(), Some(ALLOCATED), "a burst allocated");
    assert_eq!(status.code(), Some(0), "{status}: the packets did not come through");
}

#[test]
fn cpu_vhost_copy_makes_no_syscall() {
    run_child("cpu_vhost_copy_makes_no_syscall", "cpu");
}

#[test]
fn offloaded_vhost_copy_makes_no_syscall() {
    run_child("offloaded_vhost_copy_makes_no_syscall", "offload");
}

#[test]
fn cpu_copy_stage_makes_no_syscall() {
    run_child("cpu_copy_stage_makes_no_syscall", "copied");
}

#[test]
fn offloaded_copy_stage_makes_no_syscall() {
    run_child("offloaded_copy_stage_makes_no_syscall", "copied-offload");
}

#[test]
fn cpu_pipeline_makes_no_syscall() {
    run_child("cpu_pipeline_makes_no_syscall", "piped");
}

/// If no stand-in for a device is available, the core does the work here, too.
#[test]
fn device_pipeline_makes_no_syscall() {
    run_child("device_pipeline_makes_no_syscall", "piped-device");
}
