//! `offcore exec -v` reports which stack sockets use.

use std::fs;
use std::io::Read;
use std::process::{Command, Output, Stdio};

use peers::{Need, Netns, TempDir, offcore};

use super::{KERNEL, STACK, Stage};

const BEGIN: &str = "import os, signal, socket
def tcp(): s = socket.socket(); s.setblocking(False); return s
def go(to): s = tcp(); s.connect_ex(to); return s
def listen(at): s = tcp(); s.bind(at); s.listen(); return s
def udp(): return socket.socket(type=socket.SOCK_DGRAM)
";

/// Returns a Python script on the stack with reporting enabled.
fn told(stage: &Stage, netns: &Netns, rules: &[&str], script: &str) -> Command {
    let mut command = netns.command(offcore::binary().unwrap());
    command.args(["exec", "-v", "--stack", &stage.socket()]);
    command.args(rules.iter().flat_map(|rule| ["--only", rule]));
    command.args(["python3", "-c", &format!("{BEGIN}{script}")]);
    command
}

/// Returns the reported lines of a program that must succeed.
fn lines(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    let line = |line: &str| {
        let rest = line.strip_prefix("offcore[").unwrap_or_else(|| panic!("{line}"));
        rest.split_once("]: ").unwrap().1.to_owned()
    };
    said.lines().map(line).collect()
}

#[test]
fn explain_gives_reasons() {
    let Some(stage) = Stage::new(&[Need::Python]) else { return };
    let [ours, _] = STACK;
    let script = format!(
        "a = listen(('0.0.0.0', 9000)); b = listen(('127.0.0.1', 9001)); c = listen(('{ours}', 9002))
d = listen(('{KERNEL}', 9003))
go(('127.0.0.1', 9001)); go(('{KERNEL}', 9003)); go(('{ours}', 9000)); go(('{ours}', 9009)); go(('10.77.0.9', 80)); go(('192.0.2.1', 80))
u = udp(); u.bind(('0.0.0.0', 5300)); v = udp(); v.sendto(b'x', ('10.77.0.9', 53))
w = udp(); w.bind(('{ours}', 5301))"
    );
    let output = told(&stage, &stage.netns, &[], &script).output().unwrap();
    let expected = [
        "listen tcp 0.0.0.0:9000: stack, and kernel (all addresses)",
        "bind tcp 127.0.0.1:9001: kernel (loopback, multicast or broadcast)",
        &format!("listen tcp {ours}:9002: stack"),
        &format!("bind tcp {KERNEL}:9003: kernel (an address of the kernel)"),
        "connect tcp 127.0.0.1:9001: kernel (loopback, multicast or broadcast)",
        &format!("connect tcp {KERNEL}:9003: kernel (an address of the kernel)"),
        &format!("connect tcp {ours}:9000: stack"),
        &format!("connect tcp {ours}:9009: kernel (by loopback: an address of the stack)"),
        "connect tcp 10.77.0.9:80: stack",
        "connect tcp 192.0.2.1:80: kernel (the stack has no route)",
        "bind udp 0.0.0.0:5300: kernel (until it sends to a destination of the stack)",
        "send udp 10.77.0.9:53: stack",
        &format!("bind udp {ours}:5301: stack"),
    ];
    assert_eq!(lines(&output), expected);

    let script = format!(
        "a = listen(('0.0.0.0', 9000)); b = listen(('0.0.0.0', 9001)); go(('10.77.0.9', 80))
u = udp(); u.bind(('0.0.0.0', 53)); u.close()
g = udp(); g.bind(('239.1.2.3', 53)); h = udp(); h.sendto(b'x', ('239.1.2.3', 53))
v = udp(); v.bind(('{ours}', 0)); w = udp()
try: w.bind(('{ours}', 5301))
except OSError: pass"
    );
    let output = told(&stage, &stage.netns, &["tcp:9000", "udp:53"], &script).output().unwrap();
    let expected = [
        "listen tcp 0.0.0.0:9000: stack, and kernel (all addresses)",
        "listen tcp 0.0.0.0:9001: kernel (no --only rule matches)",
        "connect tcp 10.77.0.9:80: kernel (no --only rule matches)",
        "bind udp 0.0.0.0:53: stack",
        "bind udp 239.1.2.3:53: stack",
        "send udp 239.1.2.3:53: stack",
        &format!("bind udp {ours}:0: stack"),
        &format!("bind udp {ours}:5301: kernel (no --only rule matches)"),
    ];
    assert_eq!(lines(&output), expected);

    // Without `-v` nothing is reported, whatever the environment inherited.
    let script = format!("{BEGIN}go(('10.77.0.9', 80))");
    let mut command = stage.on_stack(&stage.netns, &[], &["python3", "-c", &script]);
    let output = command.env("OFFCORE_EXPLAIN", "1").output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// The kernel permits the port, but the stack does not.
#[test]
fn reserved_port_is_explained() {
    let Some(stage) = Stage::with_options(&[Need::Python], &["--idle", "sleep", "--allow-uid", "1234"])
    else {
        return;
    };
    stage.netns.run("sysctl", &["-qw", "net.ipv4.ip_unprivileged_port_start=0"]).unwrap();
    let script = "os.setresuid(1234, 1234, 1234)
for address in ('0.0.0.0', 80), ('0.0.0.0', 8000):
    try: kept = listen(address)
    except PermissionError: pass";
    let output = told(&stage, &stage.netns, &[], script).output().unwrap();
    let expected = [
        "listen tcp 0.0.0.0:80: fails (ports below 1024 need root or the stack's user)",
        "listen tcp 0.0.0.0:8000: stack, and kernel (all addresses)",
    ];
    assert_eq!(lines(&output), expected);
}

/// The library does not write to a program's own file or connection that has the number of standard error. Programs
/// that it starts are reported normally.
#[test]
fn explain_writes_only_to_stderr() {
    let Some(stage) = Stage::new(&[Need::Python]) else { return };
    let dir = TempDir::new().unwrap();
    let own = dir.file("own");
    let script = format!(
        "go(('10.77.0.9', 1)); saved = os.dup(2); os.close(2)
assert os.open('{own}', os.O_WRONLY | os.O_CREAT) == 2
go(('10.77.0.9', 2)); os.close(2)
x = go(('10.77.0.9', 3)); assert x.fileno() == 2; go(('10.77.0.9', 4)); os.dup2(saved, 2)
go(('10.77.0.9', 5))
os.execvp('sh', ['sh', '-c', '''python3 -c \"import socket; socket.socket().bind((\\\\\"127.0.0.1\\\\\", 6))\" 2>>{own}
python3 -c \"import socket; socket.socket().bind((\\\\\"127.0.0.1\\\\\", 7))\"'''])",
        own = own.display()
    );
    let output = told(&stage, &stage.netns, &[], &script).output().unwrap();
    let ports: Vec<String> = lines(&output)
        .iter()
        .map(|line| line.split(": ").next().unwrap().rsplit(':').next().unwrap().to_owned())
        .collect();
    assert_eq!(ports, ["1", "5", "7"], "{output:?}");
    assert_eq!(fs::read_to_string(own).unwrap(), "");
}

/// A reader that is slow or has closed the pipe does not block the program.
#[test]
fn unread_stderr_does_not_block() {
    let Some(stage) = Stage::new(&[Need::Python]) else { return };
    let script = "os.set_blocking(2, False); signal.signal(signal.SIGPIPE, signal.SIG_DFL); signal.alarm(20)
try:
    while True: os.write(2, b'x' * 4096)
except BlockingIOError: os.set_blocking(2, True)
a = listen(('0.0.0.0', 9000)); os.write(1, b'full')
os.read(0, 1)
go(('127.0.0.1', 80)); os.write(1, b'gone')";
    let mut command = told(&stage, &stage.netns, &[], script);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = [0; 4];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"full");
    drop(child.stderr.take());
    drop(child.stdin.take());
    stdout.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"gone");
    assert!(child.wait().unwrap().success());
}
