//! Defects of l2fwd-nv with a device that must not occur here: each test is named for one.

use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::devices;

use crate::packets::{Case, run_one, ways};
use crate::rig::Fake;

/// l2fwd-nv: one block of 256 threads, so packets from the 257th on are sent unswapped.
#[test]
fn pitfall_1_last_packet_of_a_large_burst() {
    let _fake = Fake::new();
    let mut device = devices::open("cuda:0").unwrap();
    for case in ways() {
        for burst in [257, 1025] {
            let case = Case { burst, bursts: 2, ..case };
            assert_eq!(run_one(&mut *device, case), Ok(None), "{case:?}");
        }
    }
}

/// l2fwd-nv: silently falls back to polling over the bus if a library is missing.
#[test]
fn pitfall_8_notes_name_the_polled_memory() {
    let _fake = Fake::new();
    for (memory, words) in [(Memory::Host, "in host memory"), (Memory::Gpu, "GPU memory")] {
        for launch in Launch::ALL {
            let mut device = devices::open("cuda:0").unwrap();
            let before = device.notes().join("\n");
            assert!(before.contains("Offcore stand-in 1"), "{before}");
            assert_eq!(run_one(&mut *device, Case::new(launch, memory)), Ok(None));
            let notes = device.notes().join("\n");
            for word in ["pool of", words, "polled memory", "answers in"] {
                assert!(notes.contains(word), "{word}: {notes}");
            }
            assert_eq!(notes.contains("an unbound thread launches"), launch != Launch::Persistent, "{notes}");
        }
    }
}

/// l2fwd-nv: neither graphs nor pipelines are destroyed.
#[test]
fn pitfall_9_no_leaks_at_the_driver() {
    let fake = Fake::new();
    for case in ways() {
        let mut device = devices::open("cuda:0").unwrap();
        let open = fake.live();
        for _ in 0..3 {
            assert_eq!(run_one(&mut *device, case), Ok(None));
            assert_eq!(fake.live(), open, "{case:?}: an open device and nothing else");
        }
        drop(device);
        assert_eq!(fake.live(), "nothing", "{case:?}");
    }
    assert!(fake.calls("cuGraphInstantiateWithFlags") > 0);
}

/// DPDK's gpudev: a table of PCI IDs, which lacks newer GPUs.
#[test]
fn pitfall_10_unknown_devices_are_used() {
    let fake = Fake::new();
    for (name, capability) in
        [("NVIDIA H200", 90), ("NVIDIA B300 SXM6 AC", 103), ("Übermorgen\t9000", 199), ("", 75)]
    {
        fake.name(name);
        fake.set("capability", capability);
        let mut device = devices::open("cuda:0").unwrap();
        let notes = device.notes().join("\n");
        assert!(notes.contains(name) && notes.contains(&format!("sm_{capability}")), "{notes}");
        assert_eq!(run_one(&mut *device, Case::new(Launch::Kernel, Memory::Host)), Ok(None));
    }
}
