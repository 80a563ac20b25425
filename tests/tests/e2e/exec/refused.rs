//! Programs that `offcore exec` refuses before anything starts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use peers::{Need, TempDir, offcore, require};

fn exec(program: &str) -> Output {
    let mut command = Command::new(offcore::binary().unwrap());
    command.args(["exec", "--stack", "/nowhere/at/all", "--", program, "argument"]);
    command.output().unwrap()
}

fn executable(dir: &TempDir, name: &str, content: &[u8]) -> String {
    let path = dir.file(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// Refused with exit code 1; what it says has all of these.
fn refused(program: &str, words: &[&str]) {
    let output = exec(program);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{program}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{program}: {words:?} in {said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(output.stdout.is_empty());
}

/// A program in C that writes a file when it runs, compiled with these options.
fn compiled(dir: &TempDir, name: &str, options: &[&str]) -> String {
    let source = dir.file("program.c");
    let text = "#include <stdio.h>\nint main(void) { puts(\"it runs\"); return 7; }\n";
    fs::write(&source, text).unwrap();
    let path = dir.file(name);
    let status = Command::new("cc").arg(&source).arg("-o").arg(&path).args(options).status().unwrap();
    assert!(status.success());
    path.display().to_string()
}

#[test]
fn programs_that_cannot_be_preloaded() {
    let Some(()) = require(&[Need::Cc]) else { return };
    let dir = TempDir::new().unwrap();
    let linked = compiled(&dir, "linked", &[]);
    let unchanged = fs::read(&linked).unwrap();
    refused(
        &compiled(&dir, "static", &["-static"]),
        &["static: statically linked, expected a program that is linked"],
    );
    refused(&compiled(&dir, "static-pie", &["-static-pie"]), &["statically linked"]);

    let mut narrow = unchanged.clone();
    narrow[4] = 1;
    refused(&executable(&dir, "narrow", &narrow), &["narrow: a program of 32 bits", "64 bits"]);
    let mut other = unchanged.clone();
    other[18] = 183;
    refused(&executable(&dir, "other", &other), &["another processor"]);
    refused(&executable(&dir, "cut", &unchanged[..100]), &["an ELF file that cannot be read"]);
    refused(&executable(&dir, "text", b"echo it runs\n"), &["neither an ELF file nor a script"]);

    // What the Go linker leaves in what it makes.
    let go = compiled(&dir, "go", &[]);
    let section = format!(".go.buildinfo={}", dir.file("program.c").display());
    let status = Command::new("objcopy").args(["--add-section", &section, &go]).status().unwrap();
    assert!(status.success());
    refused(&go, &["go: a Go program, which makes system calls without libc"]);

    // A script is refused as its interpreter is.
    let script = |interpreter: &str| format!("#!{interpreter}\necho it runs\n");
    for interpreter in [go.clone(), format!("{go} -x"), format!("/usr/bin/env {go}")] {
        let script = executable(&dir, "script", script(&interpreter).as_bytes());
        refused(&script, &["a Go program"]);
    }
    let own = dir.file("loop").display().to_string();
    refused(&executable(&dir, "loop", script(&own).as_bytes()), &["too many interpreters"]);
    refused(&executable(&dir, "none", b"#!\n"), &["#! without a name"]);
    refused(&executable(&dir, "gone", script("/nowhere/sh").as_bytes()), &["/nowhere/sh"]);

    refused("/nowhere/at/all", &["/nowhere/at/all: no such program"]);
    refused(&dir.path().display().to_string(), &["no such program"]);
    refused("no-such-program", &["no-such-program: no such program", "PATH"]);
}

#[test]
fn programs_with_other_rights() {
    let Some(()) = require(&[Need::Cc, Need::Root]) else { return };
    let dir = TempDir::new().unwrap();
    let program = compiled(&dir, "other", &[]);
    let (user, group) = (12_345, 12_346);
    std::os::unix::fs::chown(&program, Some(user), Some(group)).unwrap();
    let mode = |mode| fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
    mode(0o4755);
    refused(&program, &["set-uid to user 12345", "preloads nothing"]);
    mode(0o2755);
    refused(&program, &["set-gid to group 12346"]);
    // It would run, but there is no stack.
    mode(0o755);
    refused(&program, &["/nowhere/at/all"]);
}
