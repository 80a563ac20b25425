//! Sockets use the stack or fail. They never fall back to the kernel's network.

use std::fs;
use std::net::UdpSocket;
use std::process::{Command, Output};
use std::time::Duration;

use peers::offcore::Signal;
use peers::{Need, Netns, offcore};

use super::super::tcp::TAP;
use super::{KERNEL, STACK, Stage, TIMEOUT, finish, until};

/// Connects to a neighbour without waiting, and listens at an address of the stack and at the wildcard address. Prints
/// the results. The kernel also has a route to the neighbour.
const ASKS: &str = "
import os, socket, sys
def tcp(): s = socket.socket(); s.setblocking(False); return s
def listen(address):
    s = tcp()
    try: s.bind((address, 9000)); s.listen()
    except OSError as error: return os.strerror(error.errno)
    return 'listens'
def ask(): print(os.strerror(tcp().connect_ex(('10.77.0.9', 80))), listen('10.77.0.2'), listen('0.0.0.0'), sep='; ', flush=True)
ask()
";
const UNDER_WAY: &str = "Operation now in progress";
const FAILS: &str = "Network is down; Network is down; Network is down\n";

/// System call numbers of x86-64 Linux, and errors.
const MADVISE: u32 = 28;
const SOCKET: u32 = 41;
const CONNECT: u32 = 42;
const SENDMSG: u32 = 46;
const EPERM: u32 = 1;
const EAFNOSUPPORT: u32 = 97;

fn script(stage: &Stage, netns: &Netns, flags: &[&str], script: &str) -> Command {
    let mut command = netns.command(offcore::binary().unwrap());
    command.args(["exec", "--stack", &stage.socket()]).args(flags).args(["python3", "-c", script]);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn printed(mut command: Command) -> (String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{status}: {}", text(&stderr));
    (text(&stdout), text(&stderr))
}

/// Returns a script that executes [`ASKS`] under a system call filter, as systemd does: call `number` fails with
/// `error`. With `first`, it fails only if its first argument is 1. The library writes nothing in a process that
/// installs a filter.
fn denied(number: u32, error: u32, first: bool) -> String {
    let compare = if first {
        format!("[(0x15, 0, 3, {number}), (0x20, 0, 0, 16), (0x15, 0, 1, 1)]")
    } else {
        format!("[(0x15, 0, 1, {number})]")
    };
    format!(
        "
import ctypes, struct
code = [(0x20, 0, 0, 0)] + {compare} + [(6, 0, 0, 0x50000 | {error}), (6, 0, 0, 0x7fff0000)]
code = b''.join(struct.pack('HBBI', *each) for each in code)
buffer = ctypes.create_string_buffer(code)
class Program(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('code', ctypes.c_void_p)]
libc = ctypes.CDLL(None)
assert libc.prctl(22, 2, ctypes.byref(Program(len(code) // 8, ctypes.addressof(buffer))), 0, 0) == 0
import os
os.execvp('python3', ['python3', '-c', {ASKS:?}])"
    )
}

#[test]
fn sockets_fail_without_the_stack() {
    let Some(mut stage) = Stage::new(&[Need::Python]) else { return };
    let ask = |flags: &[&str], script_text: &str| printed(script(&stage, &stage.netns, flags, script_text));
    assert_eq!(ask(&[], ASKS).0, format!("{UNDER_WAY}; listens; listens\n"));
    for (number, error, first, words) in [
        (SOCKET, EAFNOSUPPORT, true, "may not create Unix sockets (AF_UNIX)"),
        (SENDMSG, EPERM, false, "may not use sendmsg and recvmsg"),
        (CONNECT, EPERM, false, "may not connect Unix sockets"),
    ] {
        let (said, warned) = ask(&[], &denied(number, error, first));
        assert_eq!(said, FAILS, "{warned}");
        assert!(warned.contains(words) && warned.ends_with("sockets that need it fail\n"), "{warned}");
    }
    let (said, warned) = ask(&[], &denied(MADVISE, EPERM, false));
    assert_eq!(said, FAILS, "{warned}");
    assert!(warned.contains("may not use madvise"), "{warned}");
    let few = format!("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))\n{ASKS}");
    let (said, warned) = ask(&[], &few);
    assert_eq!(said, "Too many open files; Too many open files; Too many open files\n", "{warned}");
    assert!(warned.contains("raise its limit (ulimit -n)"), "{warned}");

    // The stack is killed while two programs use it.
    let (go, dead) = (stage.path("go"), stage.path("dead"));
    // They ask one after the other: both listen at the same port of the kernel.
    let (other_go, other_dead) = (stage.path("other-go"), stage.path("other-dead"));
    let waits = format!(
        "{ASKS}\nimport time; open('{go}', 'w').close()\nwhile not os.path.exists('{dead}'): time.sleep(0.01)\nask()"
    );
    let program =
        script(&stage, &stage.netns, &[], &waits).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let other_waits = waits.replace(&go, &other_go).replace(&dead, &other_dead);
    let kernel = script(&stage, &stage.netns, &["--fallback", "kernel"], &other_waits)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    until("two programs", || [&go, &other_go].iter().all(|path| fs::metadata(path).is_ok()), String::new);
    stage.end_stack(Signal::KILL);
    fs::write(&dead, "").unwrap();
    let said = text(&program.wait_with_output().unwrap().stdout);
    assert_eq!(said.split_once('\n').unwrap().1, FAILS);
    fs::write(&other_dead, "").unwrap();
    let said = text(&kernel.wait_with_output().unwrap().stdout);
    // The kernel's route to the neighbour vanished with the TAP interface. A dead stack would return ENETDOWN.
    let answers = said.split_once('\n').unwrap().1;
    let kernels = ["Network is unreachable", UNDER_WAY]
        .map(|asked| format!("{asked}; Cannot assign requested address; listens\n"));
    assert!(kernels.iter().any(|kernels| kernels == answers), "{answers}");
}

/// This also works if `bind` cannot tell: with `ip_nonlocal_bind` it accepts every address, and also if `lo` is down.
#[test]
fn own_addresses_are_found_by_route() {
    let Some(stage) = Stage::new(&[Need::Python]) else { return };
    let run = |command: &[&str]| {
        assert!(stage.netns.command(command[0]).args(&command[1..]).status().unwrap().success())
    };
    let goes = format!(
        "import socket
for kind, to in ((1, '{KERNEL}'), (1, '10.77.0.9'), (2, '10.77.0.255')):
    s = socket.socket(type=kind); s.setblocking(False); s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); s.connect_ex((to, 80))
s = socket.socket(); s.bind(('{}', 9000)); s.listen()",
        STACK[0]
    );
    let expected = format!(
        "connect tcp {KERNEL}:80: kernel (an address of the kernel)
connect tcp 10.77.0.9:80: stack
connect udp 10.77.0.255:80: kernel (an address of the kernel)
listen tcp {}:9000: stack
",
        STACK[0]
    );
    let said = || {
        let (_, said) = printed(script(&stage, &stage.netns, &["-v"], &goes));
        said.lines().map(|line| format!("{}\n", line.split_once("]: ").unwrap().1)).collect::<String>()
    };
    assert_eq!(said(), expected);
    run(&["sysctl", "-qw", "net.ipv4.ip_nonlocal_bind=1"]);
    assert_eq!(said(), expected);
    run(&["sysctl", "-qw", "net.ipv4.ip_nonlocal_bind=0"]);
    run(&["ip", "link", "set", "lo", "down"]);
    assert_eq!(said(), expected);
}

/// Executes `env` by each exec function, with an environment that preloads another library or none.
const EXECUTES: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
extern char **environ;
int main(int count, char **words) {
    const char *way = words[1], *program = "/usr/bin/env";
    char *arguments[] = {"env", NULL}, preload[4096] = "LD_PRELOAD=", *with[4000] = {NULL};
    if (count > 2) with[0] = strcat(preload, words[2]);
    if (!strcmp(way, "many")) for (int i = 0; i < 3998; i++) with[i] = i ? "A=b" : preload;
    if (count > 2) setenv("LD_PRELOAD", words[2], 1); else clearenv();
    pid_t pid = 0;
    if (!strcmp(way, "execve") || !strcmp(way, "many")) execve(program, arguments, with);
    if (!strcmp(way, "execv")) execv(program, arguments);
    if (!strcmp(way, "execvp")) execvp(program, arguments);
    if (!strcmp(way, "execvpe")) execvpe("env", arguments, with);
    if (!strcmp(way, "execl")) execl(program, "env", "-u", "1", "-u", "2", "-u", "3", "-u", "4", NULL);
    if (!strcmp(way, "execlp")) execlp(program, "env", NULL);
    if (!strcmp(way, "execle")) execle(program, "env", "-u", "1", "-u", "2", "-u", "3", NULL, with);
    if (!strcmp(way, "fexecve")) fexecve(open(program, O_RDONLY), arguments, with);
    if (!strcmp(way, "execveat")) execveat(AT_FDCWD, program, arguments, with, 0);
    if (!strcmp(way, "syscall")) syscall(SYS_execve, program, arguments, with);
    if (!strcmp(way, "vfork") && !(pid = vfork())) execve(program, arguments, with);
    if (!strcmp(way, "posix_spawn")) posix_spawn(&pid, program, NULL, NULL, arguments, with);
    if (!strcmp(way, "posix_spawnp")) posix_spawnp(&pid, "env", NULL, NULL, arguments, with);
    if (!strcmp(way, "system")) return system(program);
    if (!strcmp(way, "popen")) {
        FILE *from = popen(program, "r");
        for (int c; (c = getc(from)) != EOF;) putchar(c);
        return pclose(from);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}
"#;

#[test]
fn executed_programs_keep_the_library() {
    let Some(stage) = Stage::new(&[Need::Cc]) else { return };
    let compile = |text: &str, name: &str, options: &[&str]| {
        let source = stage.write(&format!("{name}.c"), text);
        let path = stage.path(name);
        let status = Command::new("cc").args(["-w", "-o", &path, &source]).args(options).status().unwrap();
        assert!(status.success());
        path
    };
    let program = compile(EXECUTES, "executes", &[]);
    let other = compile("int other;", "other.so", &["-shared", "-fPIC"]);
    let ways = "execve many execv execvp execvpe execl execlp execle fexecve execveat syscall vfork posix_spawn posix_spawnp system popen";
    for way in ways.split(' ') {
        for preload in [&[][..], &[other.as_str()]] {
            let words = [&[program.as_str(), way][..], preload].concat();
            let (said, warned) = printed(stage.on_stack(&stage.netns, &["tcp:80"], &words));
            let values = |name: &str| {
                let lines = said.lines().filter_map(|line| line.strip_prefix(name));
                lines.map(str::to_owned).collect::<Vec<_>>()
            };
            let libraries = values("OFFCORE_LIBRARY=");
            let [library] = &libraries[..] else { panic!("{way} {preload:?}: {said}{warned}") };
            let expected = [&[library.as_str()][..], preload].concat().join(":");
            assert_eq!(values("LD_PRELOAD="), [expected], "{way} {preload:?}");
            assert_eq!(values("OFFCORE_ONLY="), ["tcp:80"], "{way} {preload:?}");
            assert_eq!(values("OFFCORE_STACK="), [stage.socket()], "{way} {preload:?}");
        }
    }
}

/// Joins a group before it binds its socket. The kernel has no interface for the group here.
const EARLY_MEMBER: &str = "
import errno, socket, sys
joined = socket.inet_aton('239.1.2.3') + socket.inet_aton(sys.argv[1])
other = socket.inet_aton('239.1.2.4') + socket.inet_aton(sys.argv[1])
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
u.settimeout(20)
def change(name, group):
    try: u.setsockopt(socket.IPPROTO_IP, name, group)
    except OSError as error: return errno.errorcode[error.errno]
JOIN, LEAVE = socket.IP_ADD_MEMBERSHIP, socket.IP_DROP_MEMBERSHIP
print([change(*each) for each in [(JOIN, joined), (JOIN, joined), (JOIN, other), (LEAVE, other), (LEAVE, other)]])
u.bind(('', 9005))
print('ready', flush=True)
print(u.recv(9))
";

#[test]
fn member_binds_after_join() {
    let Some(stage) = Stage::new(&[Need::Python]) else { return };
    let mut member = stage.start_apart(&["python3", "-c", EARLY_MEMBER, STACK[0]]);
    member.wait_for(0, TIMEOUT, "the member", |text| text.contains("ready").then_some(())).unwrap();
    stage.netns.ip(&["route", "replace", "239.0.0.0/8", "dev", TAP]).unwrap();
    let socket = stage.netns.within(|| Ok(UdpSocket::bind((KERNEL, 0))?)).unwrap();
    let mut sends = || {
        socket.send_to(b"here", ("239.1.2.3", 9005)).unwrap();
        member.exit_status(Duration::from_millis(100)).is_some()
    };
    until("the member's end", &mut sends, String::new);
    let errors = "[None, 'EADDRINUSE', None, None, 'EADDRNOTAVAIL']";
    assert_eq!(finish(member), format!("{errors}\nready\nb'here'\n"));
}

/// Fills the stack's memory with datagrams that it does not read, and sends one from another socket. Then it reads and
/// sends again.
const FULL: &str = "
import errno, socket
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(100)]
for i, u in enumerate(sockets):
    u.bind(('10.77.0.2', 7000 + i))
    u.setblocking(False)
last = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
last.bind(('10.77.0.2', 8000))
print('ready', flush=True)
input()
def send():
    try: last.sendto(bytes(50_000), ('10.77.0.1', 9))
    except OSError as error: return errno.errorcode[error.errno]
    return 'sent'
full = send()
for u in sockets:
    try:
        while u.recv(2000): pass
    except BlockingIOError: pass
print(full, send())
";

#[test]
fn send_fails_without_memory() {
    let Some(stage) = Stage::with_options(&[Need::Python], &["--idle", "sleep", "--app-memory", "8"]) else {
        return;
    };
    let mut program = stage.start(&["python3", "-c", FULL]);
    program.wait_for(0, TIMEOUT, "the program", |text| text.contains("ready").then_some(())).unwrap();
    let socket = stage.netns.within(|| Ok(UdpSocket::bind((KERNEL, 0))?)).unwrap();
    // More than 200 KB for each socket, twice the size of the memory.
    for _ in 0..150 {
        for port in 7000..7100 {
            socket.send_to(&[0; 1400], (STACK[0], port)).unwrap();
        }
    }
    program.write_line("").unwrap();
    assert_eq!(finish(program), "ready\nENOBUFS sent\n");
}
