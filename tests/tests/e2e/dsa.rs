//! `offcore dsa` on a machine with or without a device.

use peers::{Offcore, TempDir};

#[test]
fn doctor_without_device_fails() {
    let dir = TempDir::new().unwrap();
    // A machine without any device.
    let root = dir.path().display().to_string();
    let run = Offcore::run(&["dsa", "doctor", "--root", &root]).unwrap();
    assert_eq!(run.status.code(), Some(1), "{}{}", run.stdout, run.stderr);
    for words in ["no DSA device", "Sapphire Rapids", "dsa-sim0:wq0.0"] {
        assert!(run.stdout.contains(words), "{words}: {}", run.stdout);
    }
}

#[test]
fn a_status_code_is_explained() {
    let run = Offcore::run(&["dsa", "explain", "0x83"]).unwrap();
    assert!(run.status.success() && run.stdout.contains("page fault"), "{}{}", run.stdout, run.stderr);
}

#[test]
fn a_layout_is_printed_as_commands() {
    let run = Offcore::run(&["dsa", "configure", "vhost", "--print"]).unwrap();
    assert!(run.status.success(), "{}", run.stderr);
    for words in ["accel-config config-wq dsa0/wq0.1", "--wq-size=64", "--priority=10"] {
        assert!(run.stdout.contains(words), "{words}: {}", run.stdout);
    }
}
