//! Devices that fail or cannot be used: the error is clear, or the CPU takes over without losing packets.

use std::time::{Duration, Instant};

use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::layout::Kind;
use offcore_gpu::{cuda, devices};

use crate::packets::{Case, Line, pool, run, run_one, ways};
use crate::processes::passes_in_processes;
use crate::rig::{Fake, is_child};

const ILLEGAL_INSTRUCTION: i64 = 715;
const OUT_OF_MEMORY: i64 = 2;

/// Returns the error of opening `cuda:0`.
fn refusal() -> String {
    devices::open("cuda:0").unwrap_err().to_string()
}

#[test]
fn cpu_takes_over_from_a_lost_device() {
    let fake = Fake::new();
    for (case, mapped) in ways().flat_map(|case| [(case, 0), (case, 1)]) {
        fake.set("dma_buf", mapped);
        // Before it starts a burst, and after all packets of a burst but before the answer.
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
fn all_pipelines_of_a_lost_device_continue() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    let pool = pool(6, 64);
    let lines = ways().map(|case| Line::new(&mut *device, pool, case).unwrap()).collect();
    fake.set("lost_after", 30);
    let failures = run(lines);
    assert!(failures.iter().all(Option::is_some), "{failures:?}");
    drop(device);
    assert_eq!(fake.live(), "nothing");
    // The next context works.
    fake.set("lost_after", -1);
    let mut device = devices::open("cuda:0").unwrap();
    assert_eq!(run_one(&mut *device, Case::new(Launch::Graph, Memory::Gpu)), Ok(None));
}

#[test]
fn cpu_takes_over_when_launches_fail() {
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

/// The failure hits while bursts are queued, and several share a launch.
#[test]
fn cpu_takes_over_bursts_not_yet_launched() {
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

/// A device that has given up during a launch, or with bursts queued, must not launch them later: their packets have
/// been reused and would be swapped again.
#[test]
fn abandoned_device_launches_nothing() {
    let fake = Fake::new();
    for timeout in [1, 15, 25] {
        let case = Case {
            slots: 16,
            bursts: 100,
            timeout: Duration::from_millis(timeout),
            ..Case::new(Launch::Kernel, Memory::Host)
        };
        let mut device = devices::open("cuda:0").unwrap();
        let mut line = Line::new(&mut *device, pool(2, 64), case).unwrap();
        fake.set("launch_us", 20_000);
        line.run_to_the_end();
        let failure = line.end();
        assert!(timeout > 1 || failure.unwrap().contains("has not answered"), "{timeout} ms");
        fake.set("launch_us", 0);
        drop(device);
        assert_eq!(fake.live(), "nothing", "{timeout} ms");
    }
}

/// A hung kernel cannot be stopped, so it runs in a separate process. The test takes 5 s, the launcher's timeout for
/// its kernels.
#[test]
fn cpu_takes_over_from_a_hung_kernel() {
    const NAME: &str = "faults::cpu_takes_over_from_a_hung_kernel";
    if !is_child() {
        let ways: Vec<String> = (0..ways().count()).map(|way| way.to_string()).collect();
        let environments = ways.iter().flat_map(|way| {
            ["0", "1"].map(|mapped| [("OFFCORE_TEST_WAY", &**way), ("OFFCORE_FAKE_DMA_BUF", mapped)])
        });
        return passes_in_processes(NAME, environments);
    }
    let fake = Fake::new();
    let way: usize = std::env::var("OFFCORE_TEST_WAY").unwrap().parse().unwrap();
    let case = Case { timeout: Duration::from_millis(50), slots: 16, ..ways().nth(way).unwrap() };
    let mut device = devices::open("cuda:0").unwrap();
    let mut line = Line::new(&mut *device, pool(1, case.burst), case).unwrap();
    fake.set("hang_after", 7);
    if case.launch == Launch::Kernel {
        // Makes other bursts share the launch of the burst that hangs.
        fake.set("launch_us", 5000);
    }
    line.run_to_the_end();
    let failure = line.failure().unwrap();
    assert!(failure.contains("has not answered"), "{case:?}: {failure}");
}

/// A pipeline that ends frees memory. A driver would block this until every kernel has ended, which the hung one never
/// does.
#[test]
fn pipeline_ends_beside_a_hung_kernel() {
    const NAME: &str = "faults::pipeline_ends_beside_a_hung_kernel";
    if !is_child() {
        return passes_in_processes(NAME, Launch::ALL.map(|launch| [("OFFCORE_TEST_WAY", launch.name())]));
    }
    let fake = Fake::new();
    let launch = Launch::find(&std::env::var("OFFCORE_TEST_WAY").unwrap()).unwrap();
    let mut device = devices::open("cuda:0").unwrap();
    let pool = pool(2, 64);
    let hangs = Case { timeout: Duration::from_millis(50), ..Case::new(launch, Memory::Host) };
    let mut hangs = Line::new(&mut *device, pool, hangs).unwrap();
    let mut works = Line::new(&mut *device, pool, Case::new(Launch::Kernel, Memory::Gpu)).unwrap();
    fake.set("hang_after", 2);
    fake.set("hang_count", 1);
    // Its bursts are not polled before one hangs. On a busy machine a late burst would count as a failure, and the hang
    // would affect another pipeline.
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
fn out_of_memory_is_refused_without_leaks() {
    let fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    let open = fake.live();
    // Too little memory for the pool's copy, and for the words of a ring.
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

/// Any failing call during setup is reported, and nothing leaks.
#[test]
fn any_call_may_fail_during_setup() {
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
fn any_call_may_fail_during_open() {
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
fn unsupported_capability_is_refused_by_name() {
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
}

#[test]
fn display_gpu_refuses_persistent_kernels() {
    let fake = Fake::new();
    fake.set("display", 1);
    let mut device = devices::open("cuda:0").unwrap();
    for case in ways() {
        let started = run_one(&mut *device, case);
        match case.launch {
            Launch::Kernel => assert_eq!(started, Ok(None)),
            _ => {
                let refused = started.unwrap_err();
                assert!(refused.contains("display") && refused.contains("workload type kernel"), "{refused}");
            }
        }
    }
}

/// The driver's version is queried once per process.
#[test]
fn old_driver_is_refused() {
    const NAME: &str = "faults::old_driver_is_refused";
    if !is_child() {
        return passes_in_processes(NAME, [[("OFFCORE_FAKE_DRIVER", "11080")]]);
    }
    let fake = Fake::new();
    let refused = refusal();
    assert!(refused.contains("11.8") && refused.contains("12.0"), "{refused}");
    assert_eq!((fake.live().as_str(), fake.calls("cuDevicePrimaryCtxRetain")), ("nothing", 0));
    // The doctor still gets the facts.
    assert_eq!(cuda::facts().unwrap().driver_version, 11_080);
}

#[test]
fn machine_without_gpu_is_reported() {
    const NAME: &str = "faults::machine_without_gpu_is_reported";
    if !is_child() {
        return passes_in_processes(NAME, [[("OFFCORE_FAKE_DEVICES", "0")]]);
    }
    let _fake = Fake::new();
    for refused in [refusal(), cuda::list().unwrap_err().to_string(), cuda::facts().unwrap_err()] {
        assert!(refused.contains("no GPU") && refused.contains("nvidia-smi"), "{refused}");
    }
}
