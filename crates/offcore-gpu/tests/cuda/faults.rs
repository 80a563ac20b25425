//! Devices that fail, or cannot be used: a clear error, or the CPU goes on and no packet is lost.

use std::time::{Duration, Instant};

use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::layout::Kind;
use offcore_gpu::{cuda, devices};

use crate::packets::{Case, Line, pool, run, run_one, ways};
use crate::processes::{in_a_process, start_process};
use crate::rig::{Fake, is_child};

const ILLEGAL_INSTRUCTION: i64 = 715;
const OUT_OF_MEMORY: i64 = 2;

/// Words of why `cuda:0` is refused.
fn refusal() -> String {
    devices::open("cuda:0").unwrap_err().to_string()
}

#[test]
fn the_cpu_goes_on_where_a_device_is_lost() {
    let fake = Fake::new();
    for (case, mapped) in ways().flat_map(|case| [(case, 0), (case, 1)]) {
        fake.set("dma_buf", mapped);
        // Before it has worked on a burst, and when it has worked on all of its packets but has not said so.
        for fault in ["lost_after", "lost_before_answer"] {
            for (burst, at) in [(1, 5), (64, 5), (300, 0), (64, 19)] {
                let case = Case { burst, ..case };
                let mut device = devices::open("cuda:0").unwrap();
                let line = Line::new(&mut *device, pool(1, burst), case).unwrap();
                fake.set(fault, at);
                let failure =
                    run(vec![line]).remove(0).unwrap_or_else(|| panic!("{case:?}: {fault}: it lives"));
                assert!(failure.contains("CUDA_ERROR_LAUNCH_FAILED"), "{failure}");
                fake.set(fault, -1);
                drop(device);
                assert_eq!(fake.live(), "nothing", "{case:?}: {fault}");
            }
        }
    }
}

#[test]
fn the_other_pipelines_of_a_lost_device_go_on_too() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    let pool = pool(6, 64);
    let lines = ways().map(|case| Line::new(&mut *device, pool, case).unwrap()).collect();
    fake.set("lost_after", 30);
    let failures = run(lines);
    assert!(failures.iter().all(Option::is_some), "{failures:?}");
    drop(device);
    assert_eq!(fake.live(), "nothing");
    // The next context is sound.
    fake.set("lost_after", -1);
    let mut device = devices::open("cuda:0").unwrap();
    assert_eq!(run_one(&mut *device, Case::new(Launch::Graph, Memory::Gpu)), Ok(None));
}

#[test]
fn the_cpu_goes_on_where_launches_are_refused() {
    let fake = Fake::new();
    for case in ways() {
        let mut device = devices::open("cuda:0").unwrap();
        let line = Line::new(&mut *device, pool(1, case.burst), case).unwrap();
        for entry in ["cuLaunchKernel", "cuGraphLaunch"] {
            fake.set(entry, ILLEGAL_INSTRUCTION);
        }
        let failure = run(vec![line]).remove(0).unwrap();
        assert!(failure.contains("Launch"), "{failure}");
        for entry in ["cuLaunchKernel", "cuGraphLaunch"] {
            fake.set(entry, 0);
        }
        drop(device);
        assert_eq!(fake.live(), "nothing", "{case:?}");
    }
}

/// Bursts are queued when it happens, and several are in one launch.
#[test]
fn the_cpu_goes_on_where_bursts_wait_for_a_launch_of_a_device_that_fails() {
    let fake = Fake::new();
    for memory in Memory::ALL {
        for (fault, value, words) in [
            ("lost_after", 0, "context is lost"),
            ("lost_after", 9, "context is lost"),
            ("lost_before_answer", 30, "context is lost"),
            ("cuLaunchKernel", ILLEGAL_INSTRUCTION, "takes no more launches: cuLaunchKernel"),
        ] {
            let case =
                Case { slots: 32, burst: 300, mixed: true, bursts: 80, ..Case::new(Launch::Kernel, memory) };
            let mut device = devices::open("cuda:0").unwrap();
            let mut line = Line::new(&mut *device, pool(2, 300), case).unwrap();
            fake.set("launch_us", 5000);
            line.run_until(1);
            fake.set(fault, value);
            let failure = run(vec![line]).remove(0).unwrap_or_else(|| panic!("{fault} {value}: it lives"));
            assert!(failure.contains(words), "{fault} {value}: {failure}");
            drop(device);
            assert_eq!(fake.live(), "nothing", "{fault} {value}");
            fake.set("reset", 0);
        }
    }
}

/// Given up while a launch is under way or others are queued, it must not launch them when their packets are somebody
/// else's: those would be swapped again.
#[test]
fn a_device_that_was_given_up_launches_nothing_of_what_is_queued() {
    let fake = Fake::new();
    for patience in [1, 15, 25] {
        let case = Case {
            slots: 16,
            bursts: 100,
            patience: Duration::from_millis(patience),
            ..Case::new(Launch::Kernel, Memory::Host)
        };
        let mut device = devices::open("cuda:0").unwrap();
        let mut line = Line::new(&mut *device, pool(2, 64), case).unwrap();
        fake.set("launch_us", 20_000);
        line.run_to_the_end();
        let failure = line.end();
        assert!(patience > 1 || failure.unwrap().contains("has not answered"), "{patience} ms");
        fake.set("launch_us", 0);
        drop(device);
        assert_eq!(fake.live(), "nothing", "{patience} ms");
    }
}

/// A kernel that hangs cannot be made to end, so it is in a process of its own. It takes 5 s, which a launcher that ends
/// waits for its kernels.
#[test]
fn the_cpu_goes_on_where_a_kernel_hangs() {
    const NAME: &str = "faults::the_cpu_goes_on_where_a_kernel_hangs";
    if !is_child() {
        let start = |(way, mapped): (usize, &'static str)| {
            start_process(NAME, &[("OFFCORE_TEST_WAY", &way.to_string()), ("OFFCORE_FAKE_DMA_BUF", mapped)])
        };
        let ways = (0..ways().count()).flat_map(|way| [(way, "0"), (way, "1")]);
        let children: Vec<_> = ways.map(start).collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            let said = [output.stdout, output.stderr].concat();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
        }
        return;
    }
    let fake = Fake::new();
    let way: usize = std::env::var("OFFCORE_TEST_WAY").unwrap().parse().unwrap();
    let case = Case { patience: Duration::from_millis(50), slots: 16, ..ways().nth(way).unwrap() };
    let mut device = devices::open("cuda:0").unwrap();
    let mut line = Line::new(&mut *device, pool(1, case.burst), case).unwrap();
    fake.set("hang_after", 7);
    if case.launch == Launch::Kernel {
        // So that others are in the launch of the burst that hangs.
        fake.set("launch_us", 5000);
    }
    line.run_to_the_end();
    let failure = line.failure().unwrap();
    assert!(failure.contains("has not answered"), "{case:?}: {failure}");
}

/// A pipeline that ends gives memory back, and a driver has it wait for every kernel. The one that hangs never ends.
#[test]
fn a_pipeline_ends_beside_one_whose_kernel_hangs() {
    const NAME: &str = "faults::a_pipeline_ends_beside_one_whose_kernel_hangs";
    if !is_child() {
        let children = Launch::ALL.map(|launch| start_process(NAME, &[("OFFCORE_TEST_WAY", launch.name())]));
        for child in children {
            let output = child.wait_with_output().unwrap();
            let said = [output.stdout, output.stderr].concat();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
        }
        return;
    }
    let fake = Fake::new();
    let launch: Launch = std::env::var("OFFCORE_TEST_WAY").unwrap().parse().unwrap();
    let mut device = devices::open("cuda:0").unwrap();
    let pool = pool(2, 64);
    let hangs = Case { patience: Duration::from_millis(50), ..Case::new(launch, Memory::Host) };
    let mut hangs = Line::new(&mut *device, pool, hangs).unwrap();
    let mut works = Line::new(&mut *device, pool, Case::new(Launch::Kernel, Memory::Gpu)).unwrap();
    fake.set("hang_after", 2);
    fake.set("hang_count", 1);
    // Nobody looks at its bursts before one hangs: late bursts of a busy machine would be given up, and the one that hangs
    // would be another pipeline's.
    hangs.fill();
    let start = Instant::now();
    while fake.calls("hung") == 0 {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{launch}: no kernel has come to the burst that hangs"
        );
        std::thread::yield_now();
    }
    hangs.run_to_the_end();
    works.run_to_the_end();
    assert!(hangs.failure().unwrap().contains("has not answered"), "{launch}");
    assert_eq!(works.failure(), None, "{launch}");
    works.end();
    hangs.end();
}

#[test]
fn a_device_without_memory_is_refused_by_what_it_has_and_gives_everything_back() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    let open = fake.live();
    // Of the pool's copy, and of the words of a ring.
    for (memory, bytes) in [(Memory::Gpu, 1 << 20), (Memory::Host, 16)] {
        fake.set("memory", bytes);
        for launch in [Launch::Kernel, Launch::Graph] {
            let case = Case { kind: Kind::Match, ..Case::new(launch, memory) };
            let refused = run_one(&mut *device, case).unwrap_err();
            assert!(refused.contains("CUDA_ERROR_OUT_OF_MEMORY") && refused.contains("free"), "{refused}");
            assert_eq!(fake.live(), open, "{case:?}");
        }
    }
    fake.set("memory", 1 << 30);
    fake.set("registrable", 4096);
    for case in ways() {
        let refused = run_one(&mut *device, case).unwrap_err();
        assert!(refused.contains("registering") && refused.contains("ulimit -l"), "{refused}");
        assert_eq!(fake.live(), open, "{case:?}");
    }
    fake.set("registrable", 1 << 40);
    for case in ways() {
        assert_eq!(run_one(&mut *device, case), Ok(None));
    }
}

/// Whatever is refused while a pipeline is made, it is said, and nothing is left.
#[test]
fn every_call_may_fail_while_a_pipeline_is_made() {
    let fake = Fake::new();
    for entry in [
        "cuMemHostRegister_v2",
        "cuMemHostGetDevicePointer_v2",
        "cuMemAlloc_v2",
        "cuMemsetD8_v2",
        "cuStreamCreateWithPriority",
        "cuGraphCreate",
        "cuGraphAddKernelNode_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphUpload",
    ] {
        let mut device = devices::open("cuda:0").unwrap();
        let open = fake.live();
        fake.set(entry, OUT_OF_MEMORY);
        let refused = run_one(&mut *device, Case::new(Launch::Graph, Memory::Gpu)).unwrap_err();
        assert!(refused.contains(entry) && refused.contains("cuda:0"), "{entry}: {refused}");
        assert_eq!(fake.live(), open, "{entry}");
        fake.set(entry, 0);
        drop(device);
        assert_eq!(fake.live(), "nothing", "{entry}");
    }
}

#[test]
fn every_call_may_fail_while_a_device_is_opened() {
    let fake = Fake::new();
    for entry in [
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuModuleLoadDataEx",
        "cuModuleGetFunction",
        "cuFuncGetAttribute",
        "cuMemAlloc_v2",
        "cuMemcpyHtoD_v2",
        "cuStreamCreateWithPriority",
        "cuLaunchKernel",
        "cuStreamSynchronize",
    ] {
        fake.set(entry, OUT_OF_MEMORY);
        let refused = refusal();
        assert!(refused.contains("cuda:0") && refused.contains("OUT_OF_MEMORY"), "{entry}: {refused}");
        fake.set(entry, 0);
        assert_eq!(fake.live(), "nothing", "{entry}");
    }
    devices::open("cuda:0").unwrap();
}

#[test]
fn what_is_too_old_is_refused_by_name() {
    let fake = Fake::new();
    fake.set("capability", 70);
    let refused = refusal();
    assert!(refused.contains("7.0") && refused.contains("7.5"), "{refused}");
    fake.set("capability", 90);
    fake.set("refuse_ptx", 1);
    let refused = refusal();
    assert!(
        refused.contains("CUDA_ERROR_INVALID_PTX") && refused.contains("refused by the stand-in"),
        "{refused}"
    );
    fake.set("refuse_ptx", 0);
    let refused = devices::open("cuda:1").unwrap_err().to_string();
    assert!(refused.contains("cuda:1") && refused.contains("one GPU"), "{refused}");
    assert_eq!(fake.live(), "nothing");
}

/// The driver is asked for its version once in a process.
#[test]
fn an_old_driver_is_refused_by_its_version() {
    const NAME: &str = "faults::an_old_driver_is_refused_by_its_version";
    if !is_child() {
        let output = in_a_process(NAME, &[("OFFCORE_FAKE_DRIVER", "11080")]);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat())
        );
        return;
    }
    let fake = Fake::new();
    let refused = refusal();
    assert!(refused.contains("11.8") && refused.contains("12.0"), "{refused}");
    assert_eq!((fake.live().as_str(), fake.calls("cuDevicePrimaryCtxRetain")), ("nothing", 0));
    // The doctor is told all the same.
    assert_eq!(cuda::facts().unwrap().driver_version, 11_080);
}

#[test]
fn a_machine_without_a_gpu_is_told_so() {
    const NAME: &str = "faults::a_machine_without_a_gpu_is_told_so";
    if !is_child() {
        let output = in_a_process(NAME, &[("OFFCORE_FAKE_DEVICES", "0")]);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat())
        );
        return;
    }
    let _fake = Fake::new();
    for refused in [refusal(), cuda::list().unwrap_err().to_string(), cuda::facts().unwrap_err()] {
        assert!(refused.contains("no GPU") && refused.contains("nvidia-smi"), "{refused}");
    }
}
