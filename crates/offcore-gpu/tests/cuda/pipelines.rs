//! Pipelines on a CUDA device.

use std::time::{Duration, Instant};

use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::devices;
use offcore_gpu::layout::Kind;

use crate::packets::{Case, Line, pool, run, run_one, ways};
use crate::rig::Fake;

const KINDS: [Kind; 4] = [Kind::Nothing, Kind::Crc32c, Kind::Checksum, Kind::Match];

#[test]
fn every_launch_memory_and_work_is_correct() {
    let _fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    for case in ways() {
        for kind in KINDS {
            // Bursts of one packet, of odd lengths, longer than a block, and over several laps.
            for (burst, bursts) in [(1, 60), (7, 30), (64, 12), (257, 6), (1024, 5)] {
                let case = Case { kind, burst, bursts, ..case };
                assert_eq!(run_one(&mut *device, case), Ok(None), "{case:?}");
            }
        }
        // The largest burst, and packets whose headers are in a separate buffer.
        for (split_at, burst, bursts, kind) in [
            (None, 4096, 2, Kind::Checksum),
            (Some(60), 1, 9, Kind::Crc32c),
            (Some(60), 257, 9, Kind::Crc32c),
            (Some(61), 64, 9, Kind::Crc32c),
        ] {
            let case = Case { split_at, burst, bursts, kind, ..case };
            assert_eq!(run_one(&mut *device, case), Ok(None), "{case:?}");
        }
    }
}

#[test]
fn pipelines_share_a_device_and_pool() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    let pool = pool(6, 64);
    // The lengths differ, so that some end long before others.
    let lines = ways().enumerate().map(|(i, case)| Case { bursts: 5 + 9 * i, kind: KINDS[i % 4], ..case });
    let lines = lines.map(|case| Line::new(&mut *device, pool, case).unwrap()).collect();
    let registered = fake.calls("cuMemHostRegister_v2");
    assert_eq!(registered, 1 + 6, "the pool once, and each ring");
    assert_eq!(run(lines), vec![None; 6]);
}

/// Waits until there are this many launch threads. A thread sets its own name, and exists for a moment after its end.
fn wait_for_launching_threads(wanted: usize) {
    let since = Instant::now();
    while launching_threads() != wanted {
        assert!(since.elapsed() < Duration::from_secs(10), "{} threads, not {wanted}", launching_threads());
        std::thread::yield_now();
    }
}

fn launching_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread that ends in the meantime has no name.
    let names =
        tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
    names.filter(|name| name.trim_end() == "offcore-launch").count()
}

/// Bursts queue up during a launch, because the launch takes longer than preparing a burst, even on a busy machine.
#[test]
fn bursts_behind_a_slow_launch_are_batched() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    for memory in Memory::ALL {
        for (burst, mixed) in [(1, false), (7, false), (64, false), (257, false), (1024, false), (1024, true)]
        {
            let (slots, bursts) = (16, 40);
            let case = Case { burst, mixed, slots, bursts, ..Case::new(Launch::Kernel, memory) };
            let together = [20_000, 100_000, 500_000].into_iter().any(|launch_us| {
                fake.set("launch_us", launch_us);
                let line = Line::new(&mut *device, pool(2, burst), case).unwrap();
                let before = fake.calls("cuLaunchKernel");
                assert_eq!(run(vec![line]), [None], "{case:?}");
                fake.calls("cuLaunchKernel") - before < bursts as u64
            });
            assert!(together, "{case:?}: a launch for each burst");
        }
    }
}

/// The kernels of the last graph have ended long before the next graph is launched. This is not a failure, and no lcore
/// waits.
#[test]
fn bursts_wait_for_slow_graph_launch() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    for memory in Memory::ALL {
        let case = Case { burst: 1, slots: 16, bursts: 80, ..Case::new(Launch::Graph, memory) };
        fake.set("launch_us", 30_000);
        let line = Line::new(&mut *device, pool(1, 1), case).unwrap();
        assert_eq!(run(vec![line]), [None], "{case:?}");
        fake.set("launch_us", 0);
    }
}

#[test]
fn reads_and_launches_are_timed() {
    let fake = Fake::new();
    let costs = devices::costs("cuda:0").unwrap();
    let times = [costs.read_ns, costs.launch_ns, costs.launch_and_wait_ns, costs.graph_launch_ns];
    assert!(times.iter().all(|ns| *ns > 0.0), "{costs:?}");
    let names: Vec<_> = costs.kernels.iter().map(|kernel| (kernel.name, kernel.registers)).collect();
    assert_eq!(names, [("og_burst", 40), ("og_persistent", 40), ("og_graph_node", 40)]);
    assert_eq!(fake.live(), "nothing");
    assert!(devices::costs("host").unwrap_err().to_string().contains("expected cuda:N"));
}

#[test]
fn pipelines_share_the_launch_thread() {
    let fake = Fake::new();
    fake.set("devices", 2);
    let mut devices = ["cuda:0", "cuda:1"].map(|name| devices::open(name).unwrap());
    let pool = pool(8, 257);
    for _ in 0..3 {
        wait_for_launching_threads(0);
        let mut lines = Vec::new();
        for (i, case) in
            (0..4).flat_map(|_| Memory::ALL).map(|memory| Case::new(Launch::Kernel, memory)).enumerate()
        {
            // Some pipelines end long before others.
            let case = Case { bursts: 5 + 9 * i, burst: 257, mixed: i % 3 == 0, kind: KINDS[i % 4], ..case };
            lines.push(Line::new(&mut *devices[i / 2 % 2], pool, case).unwrap());
            wait_for_launching_threads(1 + usize::from(i >= 2));
        }
        assert_eq!(run(lines), vec![None; 8]);
        wait_for_launching_threads(0);
    }
    let mut line = Line::new(&mut *devices[0], pool, Case::new(Launch::Persistent, Memory::Host)).unwrap();
    assert_eq!(launching_threads(), 0, "the submitting thread launches kernels that poll");
    line.run_to_the_end();
    assert_eq!(line.end(), None);
}

#[test]
fn drain_processes_submitted_bursts() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    fake.set("launch_us", 20_000);
    for memory in Memory::ALL {
        let case = Case { slots: 32, bursts: 100, ..Case::new(Launch::Kernel, memory) };
        let mut line = Line::new(&mut *device, pool(2, 64), case).unwrap();
        line.fill_and_stop();
        assert_eq!(run(vec![line]), [None], "{case:?}");
    }
}

#[test]
fn two_devices_see_the_same_pool() {
    let fake = Fake::new();
    fake.set("devices", 2);
    let mut devices = ["cuda:0", "cuda:1"].map(|name| devices::open(name).unwrap());
    let pool = pool(4, 64);
    let mut lines = Vec::new();
    for memory in Memory::ALL {
        for device in &mut devices {
            lines.push(Line::new(&mut **device, pool, Case::new(Launch::Persistent, memory)).unwrap());
        }
    }
    assert_eq!(run(lines), vec![None; 4]);
}

#[test]
fn only_memory_gpu_allocates_staging() {
    for case in ways() {
        let fake = Fake::new();
        let mut device = devices::open("cuda:0").unwrap();
        assert_eq!(run_one(&mut *device, case), Ok(None), "{case:?}");
        assert_eq!(fake.calls("staging") > 0, case.memory == Memory::Gpu, "{case:?}");
    }
}

/// A driver may delay the first launch on a stream and wait for all kernels, so none may poll at that time.
#[test]
fn streams_are_warmed_before_kernels_poll() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    let opened = fake.calls("cuLaunchKernel");
    let pool = pool(6, 64);
    let lines: Vec<_> = ways().map(|case| Line::new(&mut *device, pool, case).unwrap()).collect();
    assert_eq!(fake.calls("cuLaunchKernel") - opened, 3 * lines.len() as u64, "each kernel on each stream");
    assert!(run(lines).iter().all(Option::is_none));
}

#[test]
fn mapped_slots_are_in_device_memory() {
    let fake = Fake::new();
    for (exported, driver, mapped) in [(1, 13_030, true), (0, 13_030, false), (1, 13_020, false)] {
        fake.set("dma_buf", exported);
        fake.set("driver", driver);
        let asked = fake.calls("cuMemGetHandleForAddressRange");
        let mut device = devices::open("cuda:0").unwrap();
        for case in ways() {
            for (burst, bursts) in [(1, 60), (257, 9)] {
                let case = Case { burst, bursts, ..case };
                assert_eq!(run_one(&mut *device, case), Ok(None), "{case:?}");
            }
        }
        for note in device.notes() {
            assert_eq!(note.contains("bursts in GPU memory"), mapped, "{note}");
            assert_eq!(note.contains("bursts in pinned host memory"), !mapped, "{note}");
        }
        assert_eq!(
            fake.calls("cuMemGetHandleForAddressRange") > asked,
            mapped,
            "an earlier driver logs an error"
        );
        drop(device);
        assert_eq!(fake.live(), "nothing");
    }
    fake.set("driver", 13_030);
    // A driver that claims support but fails.
    fake.set("dma_buf", 1);
    fake.set("cuMemGetHandleForAddressRange", 801);
    let mut device = devices::open("cuda:0").unwrap();
    assert_eq!(run_one(&mut *device, Case::new(Launch::Persistent, Memory::Host)), Ok(None));
    let notes = device.notes().join("\n");
    assert!(notes.contains("pinned host memory (cuMemGetHandleForAddressRange"), "{notes}");
}

/// Memory is unregistered only when no kernel polls: a driver would block the caller.
#[test]
fn host_pointers_are_used_if_supported() {
    let fake = Fake::new();
    fake.set("host_pointers", 1);
    let mut device = devices::open("cuda:0").unwrap();
    for case in ways() {
        assert_eq!(run_one(&mut *device, case), Ok(None), "{case:?}");
    }
}

#[test]
fn profiler_is_started_and_stopped() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    device.profile(true).unwrap();
    device.profile(false).unwrap();
    assert_eq!((fake.calls("cuProfilerStart"), fake.calls("cuProfilerStop")), (1, 1));
}
