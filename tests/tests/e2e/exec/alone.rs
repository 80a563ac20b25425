//! `offcore exec --port` runs a program with its own stack.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use offcore_bench::peer::process::Process;
use peers::offcore::Signal;
use peers::{Need, Netns, TempDir, offcore, one_core, require};

use super::super::http::curl;
use super::super::tcp::{KERNEL, TAP};
use super::{Guard, NEEDS, STACK, TIMEOUT, children, lives, until};

/// Starts a shell script with a stack.
fn start(netns: &Netns, script: &str) -> Process {
    start_behind(netns, &[], script)
}

/// Starts a shell script with a stack, behind a command that executes its arguments.
fn start_behind(netns: &Netns, prefix: &[&str], script: &str) -> Process {
    let port = format!("tap:{TAP},addr={}/24", STACK[0]);
    let binary = offcore::binary().unwrap();
    let words = [prefix, &[binary.to_str().unwrap(), "exec", "--port", &port, "sh", "-c", script]].concat();
    let mut command = netns.command(words[0]);
    command.args(&words[1..]);
    Process::spawn("offcore", command).unwrap()
}

/// Such scripts run in a shell, as with execvp(3), which env and shells use.
#[test]
fn script_without_shebang_runs_in_shell() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let (netns, dir) = (Netns::new().unwrap(), TempDir::new().unwrap());
    let script = dir.file("script");
    std::fs::write(&script, "echo \"$0 has $1\"\nexit 5\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = script.display().to_string();
    let port = format!("tap:{TAP},addr={}/24", STACK[0]);
    let mut command = netns.command(offcore::binary().unwrap());
    command.args(["exec", "--port", &port, &script, "a word"]);
    let mut program = Process::spawn("offcore", command).unwrap();
    assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(5), "{}", program.tail());
    assert_eq!(program.stdout_from(0), format!("{script} has a word\n"));
}

/// A statically linked program runs on the kernel's network. A message names it once, and not with `--fallback kernel`.
#[test]
fn a_static_program_is_named() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Cc]].concat()) else { return };
    let (netns, dir) = (Netns::new().unwrap(), TempDir::new().unwrap());
    let (source, program) = (dir.file("program.c"), dir.file("program"));
    std::fs::write(&source, "#include <stdio.h>\nint main(void) { return puts(\"it runs\") < 0; }\n")
        .unwrap();
    let mut cc = std::process::Command::new("cc");
    assert!(cc.arg("-static").arg(&source).arg("-o").arg(&program).status().unwrap().success());
    let (path, directory) = (program.display().to_string(), dir.path().display().to_string());
    let port = format!("tap:{TAP},addr={}/24", STACK[0]);
    let run = |words: &[&str]| {
        let mut command = netns.command(offcore::binary().unwrap());
        command.args(["exec", "--port", &port]).args(words);
        let mut process = Process::spawn("offcore", command).unwrap();
        assert_eq!(process.wait_for_exit(TIMEOUT).unwrap().code(), Some(0), "{}", process.tail());
        (process.stdout_from(0), process.stderr())
    };
    let named = format!("offcore: {path} is statically linked: ");
    // Started by its path, through PATH, as a script's interpreter, and by posix_spawn.
    std::fs::write(dir.file("script"), format!("#!{path}\n")).unwrap();
    std::fs::set_permissions(dir.file("script"), std::fs::Permissions::from_mode(0o755)).unwrap();
    for script in [
        format!("{path}; {path}; true"),
        format!("PATH=$PATH:{directory}; export PATH; program; true"),
        format!("{directory}/script; true"),
        format!("python3 -c 'import os; os.waitpid(os.posix_spawn(\"{path}\", [\"p\"], {{}}), 0)'"),
        format!("cd {directory}; env ./program; true"),
    ] {
        let (stdout, stderr) = run(&["sh", "-c", &script]);
        assert!(stdout.starts_with("it runs\n"), "{script}: {stderr}");
        let named = if script.contains("env ./") { named.replace(&directory, ".") } else { named.clone() };
        assert_eq!(stderr.matches(&named).count(), 1, "{script}: {stderr}");
    }
    let (stdout, stderr) = run(&["--fallback", "kernel", "sh", "-c", &format!("{path}; true")]);
    assert!(stdout == "it runs\n" && !stderr.contains(&named), "{stderr}");
    let (stdout, stderr) = run(&["--fallback", "kernel", &path]);
    assert_eq!(stdout, "it runs\n", "{stderr}");
    assert!(
        stderr.contains("statically linked") && stderr.contains("it uses the kernel's network"),
        "{stderr}"
    );
}

#[test]
fn exec_returns_program_exit_status() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    for (script, code) in [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137), ("kill -TERM $$", 143)] {
        let mut program = start(&netns, script);
        let status = program.wait_for_exit(TIMEOUT).unwrap();
        assert_eq!(status.code(), Some(code), "{script}: {}", program.tail());
        assert!(!program.stderr().contains("has ended"), "{}", program.tail());
    }
    // This also works if the parent ignores the ends of its children.
    let ignoring = [
        "python3",
        "-c",
        "import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])",
    ];
    if require(&[Need::Python]).is_some() {
        let mut program = start_behind(&netns, &ignoring, "exit 5");
        assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(5), "{}", program.tail());
    }
}

/// A socket that explicitly selects the kernel's default algorithm gets it. A socket that selects none gets the stack's
/// default.
#[test]
fn sockets_choose_their_congestion_control() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Python]].concat()) else { return };
    let netns = Netns::new().unwrap();
    let script = format!(
        "import socket
def listens(name):
    s = socket.socket()
    if name: s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    s.bind(('{}', 0))
    s.listen()
    print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())
for name in b'', b'cubic', b'reno': listens(name)",
        STACK[0]
    );
    let port = format!("tap:{TAP},addr={}/24", STACK[0]);
    netns.run("sysctl", &["-qw", "net.ipv4.tcp_congestion_control=reno"]).unwrap();
    let mut command = netns.command(offcore::binary().unwrap());
    command.args(["exec", "--port", &port, "--congestion", "bbr", "python3", "-c", &script]);
    let mut program = Process::spawn("offcore", command).unwrap();
    assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(0), "{}", program.tail());
    assert_eq!(program.stdout_from(0), "bbr\ncubic\nreno\n");
}

/// A server that daemonizes keeps its stack until it ends or `offcore` is told to end.
#[test]
fn daemonized_child_keeps_the_stack() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Python, Need::Curl]].concat()) else { return };
    let (netns, dir) = (Netns::new().unwrap(), TempDir::new().unwrap());
    let _guard = Guard::new(&netns);
    std::fs::write(dir.file("page"), "it is served").unwrap();
    let dir = dir.path().display();
    let server = format!(
        "(setsid python3 -m http.server 8080 --directory {dir} </dev/null >/dev/null 2>&1 &) & exit 3"
    );
    for stopped in [true, false] {
        let mut program = start(&netns, &server);
        let said = |program: &Process| program.stderr().contains("the program has ended and left process");
        until("the program's end", || said(&program), || program.tail());
        netns.ip(&["addr", "replace", KERNEL[0], "dev", TAP]).unwrap();
        let page = format!("http://{}:8080/page", STACK[0]);
        let serves = || netns.run("curl", &["--silent", "--fail", "--max-time", "1", &page]).is_ok();
        until("a page", serves, || program.tail());
        assert_eq!(curl(&netns, &[&page]), b"it is served");
        assert_eq!(program.exit_status(Duration::ZERO), None, "{}", program.tail());
        let all = children(program.id());
        let [stack, server] = all.as_slice() else { panic!("{all:?}") };
        if stopped {
            program.signal(Signal::TERM).unwrap();
        } else {
            let server = rustix::process::Pid::from_raw(server.cast_signed()).unwrap();
            rustix::process::kill_process(server, Signal::KILL).unwrap();
        }
        assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(3), "{}", program.tail());
        assert!(!lives(*stack) && !lives(*server), "{}", program.tail());
        assert_eq!(program.stderr().matches("has ended and left").count(), 1, "{}", program.tail());
    }
}

/// Runs a command on its own terminal, sends Ctrl-C once it has printed `ready`, and exits with the command's status.
/// With NOFLSH, Ctrl-C does not discard output that has not been read.
const TERMINAL: &str = r"
import os, pty, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    mode = termios.tcgetattr(0)
    mode[3] |= termios.NOFLSH
    termios.tcsetattr(0, termios.TCSANOW, mode)
    os.execvp(sys.argv[1], sys.argv[1:])
said, pressed = b'', False
while True:
    try:
        more = os.read(terminal, 4096)
    except OSError:
        break
    said += more
    sys.stdout.buffer.write(more)
    sys.stdout.flush()
    if b'ready' in said and not pressed:
        pressed = os.write(terminal, b'\x03')
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

/// A program that needs a second to end after Ctrl-C. It sleeps for short times, because Python does not notice a
/// signal that arrives immediately before a sleep until that sleep ends.
const SAVES: &str = r"
import time
try:
    print('ready', flush=True)
    for _ in range(600):
        time.sleep(0.1)
except KeyboardInterrupt:
    time.sleep(1)
    print('saved', flush=True)
";

#[test]
fn ctrl_c_ends_the_program_and_its_children() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Python]].concat()) else { return };
    let (netns, dir) = (Netns::new().unwrap(), TempDir::new().unwrap());
    let scripts = [("terminal.py", TERMINAL), ("saves.py", SAVES)].map(|(name, text)| {
        std::fs::write(dir.file(name), text).unwrap();
        dir.file(name).display().to_string()
    });
    let [terminal, saves] = scripts.each_ref().map(String::as_str);
    let mut program = start_behind(&netns, &["python3", terminal], &format!("exec python3 {saves}"));
    assert_eq!(program.wait_for_exit(TIMEOUT).unwrap().code(), Some(0), "{}", program.tail());
    assert!(program.stdout_from(0).contains("saved"), "{}", program.tail());
    // The file exists once the process has left the terminal's process group.
    let started = dir.file("started").display().to_string();
    let leaves = format!(
        "(setsid sh -c 'echo >{started}; exec sleep 600' </dev/null >/dev/null 2>&1 &)
        while ! test -e {started}; do sleep 0.1; done; echo ready"
    );
    let mut program = start_behind(&netns, &["python3", terminal], &leaves);
    let left = |program: &Process| {
        let said = program.stdout_from(0);
        let (_, behind) = said.split_once("left process ")?;
        behind.split(' ').next()?.parse::<u32>().ok()
    };
    // The shell may still have been running.
    let code = program.wait_for_exit(TIMEOUT).unwrap().code();
    assert!(matches!(code, Some(0 | 130)), "{code:?}: {}", program.tail());
    let left = left(&program).unwrap_or_else(|| panic!("{}", program.tail()));
    assert!(!lives(left), "{}", program.tail());
}
