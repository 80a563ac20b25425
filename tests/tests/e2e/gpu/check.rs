//! `offcore gpu check` with threads that emulate a GPU.

use std::fs;

use peers::{Need, Offcore, TempDir, exclusive};
use serde_json::Value;

#[test]
fn gpu_check_steps_pass() {
    let Some(_cores) = exclusive(&[Need::HostDevice]) else { return };
    let dir = TempDir::new().unwrap();
    let out = dir.file("out").display().to_string();
    let run = Offcore::run(&["gpu", "check", "--device", "host", "--quick", "--out", &out]).unwrap();
    assert!(run.status.success(), "{}{}", run.stdout, run.stderr);
    let kept = fs::read_to_string(dir.file("out/check.json")).unwrap();
    let steps: Vec<Value> = kept.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(steps.iter().all(|step| step["ok"] == true), "{kept}");
    let named = |name: &str| {
        steps.iter().find(|step| step["step"] == name).unwrap_or_else(|| panic!("{name}: {kept}"))
    };
    for name in [
        "doctor",
        "kernel-host-4",
        "persistent-match",
        "graph-crc32c",
        "term",
        "kill",
        "two-at-once-b",
        "figures",
    ] {
        assert!(named(name)["command"].as_str().unwrap().starts_with("offcore "), "{kept}");
        assert!(dir.file(&format!("out/{name}.out")).exists(), "{name}");
    }
    assert!(run.stdout.contains(&format!("{} steps passed", steps.len())), "{}", run.stdout);
    assert!(run.stdout.contains("of threads in place of a GPU, whose times"), "{}", run.stdout);
    assert!(named("term")["result"].as_str().unwrap().contains("packets verified"), "{kept}");
    // Existing files are not overwritten.
    let run = Offcore::run(&["gpu", "check", "--device", "host", "--quick", "--out", &out]).unwrap();
    assert_eq!(run.status.code(), Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("the name of a new directory"), "{}", run.stderr);
    assert_eq!(fs::read_to_string(dir.file("out/check.json")).unwrap(), kept);
}

/// A device that does not exist.
#[test]
fn unusable_device_ends_gpu_check() {
    let dir = TempDir::new().unwrap();
    let out = dir.file("out").display().to_string();
    let run = Offcore::run(&["gpu", "check", "--device", "cuda:77", "--quick", "--out", &out]).unwrap();
    assert_eq!(run.status.code(), Some(1), "{}", run.stderr);
    assert!(run.stdout.contains("FAILED  costs: ") && !run.stdout.contains("kernel-host"), "{}", run.stdout);
    assert!(run.stderr.contains("cuda:77 cannot be used, so the check ends here"), "{}", run.stderr);
}
