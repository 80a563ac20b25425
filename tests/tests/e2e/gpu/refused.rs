//! Invalid uses of `offcore gpu`: errors name the invalid value, the expected value, and the remedy.

use std::fs;

use peers::{Offcore, TempDir};

/// Runs `offcore gpu` with a port of a few packets and checks that it fails with this status and an error that contains
/// all of `words`.
fn assert_refused(args: &[&str], status: i32, words: &[&str]) {
    let port = ["gpu", "--port", "gen:size=64,count=10", "--until-idle"];
    let finished = Offcore::run(&[&port[..], args].concat()).unwrap();
    let text = &finished.stderr;
    assert_eq!(finished.status.code(), Some(status), "{args:?}: {text}");
    assert!(!text.contains("panicked"), "{args:?}: {text}");
    let error = text.find("error: ").unwrap_or_else(|| panic!("{args:?}: no error in {text}"));
    // The usage follows the error.
    let error = text[error..].split("\n\n").next().unwrap_or_default();
    assert!(error.lines().count() <= 2, "{args:?}: {error}");
    for word in words {
        assert!(error.contains(word), "{args:?}: no {word:?} in: {error}");
    }
}

#[test]
fn numbers_out_of_range() {
    for (flag, value, expected) in [
        ("--burst", "0", "1 to 4096"),
        ("--burst", "4097", "1 to 4096"),
        ("--burst", "-1", "1 to 4096"),
        ("--pipelines", "0", "1 to 128"),
        ("--pipelines", "129", "1 to 128"),
        ("--packet-time", "20000001", "0 to 20000000"),
        ("--data-room", "0", "1 to 32512"),
        ("--data-room", "32513", "1 to 32512"),
        ("--slots", "3", "power of two"),
        ("--slots", "1", "2 to 4096"),
        ("--blocks", "65", "1 to 64"),
        ("--threads", "1025", "1 to 1024"),
        ("--threads", "0", "1 to 1024"),
        ("--mark", "64", "0 to 63"),
    ] {
        let wants = [flag, value, expected];
        assert_refused(&["-w", "kernel", "--device", "host", &format!("{flag}={value}")], 2, &wants);
    }
}

#[test]
fn unknown_value_names_are_refused() {
    for (flag, value, expected) in [
        ("--workload", "5", "persistent"),
        ("--workload", "fast", "persistent"),
        ("--memory", "3", "host"),
        ("--work", "md5", "crc32c"),
        ("--on-match", "shout", "steer"),
        ("--device", "hots", "host"),
    ] {
        assert_refused(&[&format!("{flag}={value}")], 2, &[flag, value, expected]);
    }
}

/// The machine has no driver, or the driver has no GPU 77.
#[test]
fn a_gpu_that_is_not_there() {
    for args in [["-w", "kernel", "--device", "cuda:77"], ["-w", "persistent", "-g", "77"]] {
        assert_refused(&args, 1, &["cuda:77", "the device host"]);
    }
}

#[test]
fn files_that_hold_no_patterns() {
    let dir = TempDir::new().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.file(name).display().to_string();
        fs::write(&path, bytes).unwrap();
        path
    };
    let huge = dir.file("huge").display().to_string();
    fs::File::create(&huge).unwrap().set_len(1 << 30).unwrap();
    let many: String = (0..65_537).map(|n| format!("pattern {n}\n")).collect();
    for (path, words) in [
        (file("empty", b""), &["no pattern", "one pattern per line"][..]),
        (file("comments", b"# nothing\n\n"), &["no pattern", "2 empty lines and comments"]),
        (file("binary", b"good\n\x7fELF\x02\x01\x01\0\0"), &["line 2", "NUL byte", "\\x00"]),
        (file("escape", b"good\nC:\\windows"), &["line 2", "\\w", "\\xNN"]),
        (file("long", &[b'x'; 1025]), &["line 1", "1025 bytes", "1 to 1024"]),
        (file("many", many.as_bytes()), &["line 65537", "at most 65536"]),
        (huge, &["more than", "right file"]),
        (dir.file("missing").display().to_string(), &["No such file", "one pattern per line"]),
        (dir.file(".").display().to_string(), &["directory"]),
    ] {
        let args = ["--device", "host", "-w", "kernel", "--work", "match", "--patterns", &path];
        assert_refused(&args, 1, &[words, &["--patterns", path.as_str()]].concat());
    }
}

#[test]
fn flags_that_do_not_go_together() {
    for (flags, words) in [
        ("--work match", ["--work match", "--patterns"]),
        ("--on-match drop", ["--on-match", "--work match"]),
        ("--on-match steer --work match --patterns /dev/null", ["--on-match steer", "--steer"]),
        ("--device host -w cpu", ["--device", "--workload kernel"]),
        ("-w none --work crc32c", ["--work", "none"]),
        ("--split --skip 14", ["--split", "--skip"]),
    ] {
        assert_refused(&flags.split(' ').collect::<Vec<_>>(), 2, &words);
    }
}

/// Works on any machine: prints findings as text and as JSON, and sets the exit status.
#[test]
fn gpu_doctor_prints_findings() {
    let run = |format: &str| Offcore::run(&["gpu", "doctor", "--all", "--format", format]).unwrap();
    let (table, json) = (run("table"), run("json"));
    let [facts, findings @ ..] = &json.lines[..] else { panic!("{json:?}") };
    assert!(facts.json.as_ref().is_some_and(|facts| facts["facts"].is_object()), "{facts:?}");
    let mut problem = false;
    for finding in findings.iter().map(|line| line.json.as_ref().unwrap()) {
        let [check, verdict, found] =
            ["check", "verdict", "found"].map(|name| finding[name].as_str().unwrap_or_default());
        assert!(!check.is_empty() && !found.is_empty(), "{finding}");
        assert!(table.stdout.contains(check), "{check:?} is not in {}", table.stdout);
        problem |= verdict == "problem";
    }
    assert!(findings.len() >= 3, "{json:?}");
    for finished in [&table, &json] {
        assert_eq!(finished.status.code(), Some(problem.into()), "{finished:?}");
        assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
    }
}
