//! Programs that `offcore exec` refuses before anything starts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::{Command, Output};

use peers::{Need, TempDir, offcore, require};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

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

/// Asserts exit code 126, for a program that exists but cannot be run, and a message that contains all of `words`.
fn refused(program: &str, words: &[&str]) {
    ends_with(126, program, words);
}

/// Asserts that no program is started and that the exit code is `code`.
fn ends_with(code: i32, program: &str, words: &[&str]) {
    let output = exec(program);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{program}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{program}: {words:?} in {said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(output.stdout.is_empty());
}

/// Compiles a C program with these options. It writes a file when it runs.
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
        &["static: statically linked, expected a program dynamically linked"],
    );
    refused(&compiled(&dir, "static-pie", &["-static-pie"]), &["statically linked"]);

    let mut narrow = unchanged.clone();
    narrow[4] = 1;
    refused(&executable(&dir, "narrow", &narrow), &["narrow: a 32-bit program", "64 bits"]);
    let mut other = unchanged.clone();
    other[18] = 183;
    refused(&executable(&dir, "other", &other), &["another processor"]);
    refused(&executable(&dir, "cut", &unchanged[..100]), &["an ELF file that cannot be read"]);
    refused(&executable(&dir, "data", b"echo\0it runs\n"), &["neither an ELF file nor a script"]);

    // The section that the Go linker adds to executables.
    let go = compiled(&dir, "go", &[]);
    let section = format!(".go.buildinfo={}", dir.file("program.c").display());
    let status = Command::new("objcopy").args(["--add-section", &section, &go]).status().unwrap();
    assert!(status.success());
    refused(&go, &["go: a Go program, which makes system calls without libc"]);

    // A script is refused if its interpreter is refused.
    let script = |interpreter: &str| format!("#!{interpreter}\necho it runs\n");
    for interpreter in [go.clone(), format!("{go} -x"), format!("/usr/bin/env {go}")] {
        let script = executable(&dir, "script", script(&interpreter).as_bytes());
        refused(&script, &["a Go program"]);
    }
    let own = dir.file("loop").display().to_string();
    refused(&executable(&dir, "loop", script(&own).as_bytes()), &["too many interpreters"]);
    refused(&executable(&dir, "none", b"#!\n"), &["#! without a name"]);
    ends_with(
        127,
        &executable(&dir, "gone", script("/nowhere/sh").as_bytes()),
        &["gone: its interpreter /nowhere/sh was not found"],
    );

    ends_with(127, "/nowhere/at/all", &["/nowhere/at/all: program not found"]);
    // Windows line ends are detected.
    for (line, seen) in [
        ("/bin/sh\r", "crlf: its interpreter /bin/sh\\r was not found: the script's lines end in CR LF"),
        ("/usr/bin/env sh\r", "sh\\r: program not found"),
    ] {
        ends_with(127, &executable(&dir, "crlf", script(line).as_bytes()), &[seen]);
    }
    ends_with(127, "", &["'': program not found"]);
    // A text file without an interpreter line would run, because a shell executes it.
    ends_with(1, &executable(&dir, "text", b"echo it runs\n"), &["no stack at /nowhere/at/all"]);

    ends_with(127, &dir.file("text/below").display().to_string(), &["program not found"]);
    ends_with(127, "no-such-program", &["no-such-program: program not found", "PATH"]);
    refused(&dir.path().display().to_string(), &["a directory, expected an executable file"]);
    let plain = dir.file("plain").display().to_string();
    fs::write(&plain, &unchanged).unwrap();
    refused(&plain, &["plain: a file without execute permission", "chmod +x"]);
}

#[test]
fn programs_with_invalid_elf_headers() {
    let Some(()) = require(&[Need::Cc]) else { return };
    let dir = TempDir::new().unwrap();
    let unchanged = fs::read(compiled(&dir, "linked", &[])).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = unchanged.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        executable(&dir, "broken", &changed)
    };
    // The kernel starts programs without a readable section table (e_shoff, e_shentsize, e_shnum, e_shstrndx), and so
    // does `offcore exec`.
    for (at, bytes) in [(0x28, &[0xff; 7][..]), (0x3a, &[7, 0]), (0x3c, &[0xff; 2]), (0x3e, &[0xff; 2])] {
        let program = with(at, bytes);
        assert_eq!(Command::new(&program).output().unwrap().status.code(), Some(7), "{at:#x}");
        ends_with(1, &program, &["no stack at /nowhere/at/all"]);
    }
    // The kernel does not start programs whose program headers are out of range or of another size, or whose type is
    // wrong.
    refused(&with(0x20, &[0xff; 7]), &["an ELF file that cannot be read"]);
    refused(&with(0x36, &[7, 0]), &["an ELF file that cannot be read"]);
    refused(&with(0x10, &[1, 0]), &["an ELF file that is not a program"]);
    // Truncated or changed bytes in the first KB never cause a panic.
    for len in (0..1024).step_by(7) {
        exec_does_not_panic(&executable(&dir, "broken", &unchanged[..len]));
        exec_does_not_panic(&with(len, &[!unchanged[len]]));
    }
}

/// Runs a program that may be refused or not. `offcore exec` must end as it does without a stack.
fn exec_does_not_panic(program: &str) {
    let output = exec(program);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(1 | 126 | 127)), "{}: {said}", output.status);
    assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
}

/// The message names the file type at the path, and the expected type.
#[test]
fn paths_without_a_stack_are_refused() {
    let dir = TempDir::new().unwrap();
    let file = dir.file("file");
    fs::write(&file, "").unwrap();
    let (stream, left) = (dir.file("stream"), dir.file("left"));
    let _listener = UnixListener::bind(&stream).unwrap();
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&left).unwrap()).unwrap();
    drop(socket);
    for (path, found, expected) in [
        (dir.file("none"), "no such file", "start `offcore tcp"),
        (dir.path().to_owned(), "found a directory", "expected the socket of `offcore tcp --serve`"),
        (file, "found a file that is not a socket", "expected the socket of `offcore tcp --serve`"),
        (stream, "found the socket of another program", "expected the socket of `offcore tcp --serve`"),
        (left, "no process listens there", "start `offcore tcp"),
        (dir.file(&"x".repeat(120)), "a path of 1", "expected 1 to 107"),
    ] {
        let mut command = Command::new(offcore::binary().unwrap());
        let output = command.args(["exec", "--stack"]).arg(&path).arg("true").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(found) && said.contains(expected), "{path:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        let mut command = Command::new(offcore::binary().unwrap());
        command.args(["exec", "--fallback", "kernel", "--stack"]).arg(&path);
        let output = command.args(["echo", "it runs"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && output.stdout == b"it runs\n", "{path:?}: {said}");
        assert!(said.contains(found) && said.contains("uses the kernel's network"), "{path:?}: {said}");
    }
}

#[test]
fn setuid_programs_are_refused() {
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
    // The program would run, but no stack exists.
    mode(0o755);
    ends_with(1, &program, &["/nowhere/at/all"]);
}
