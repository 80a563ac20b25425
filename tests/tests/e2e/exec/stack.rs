//! The stack is killed while programs use it.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use offcore_bench::peer::process::Process;
use peers::Need;
use peers::offcore::Signal;

use super::super::http::{curl, url};
use super::super::tcp::{TAP, connect};
use super::nginx::{self, PLAIN, Wanted};
use super::{KERNEL, STACK, Stage, children, until};

/// Time limit for programs to notice that a stack is stopped.
const STOPPED: Duration = Duration::from_secs(90);

/// Returns the CPU time of a process.
fn busy(process: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks = |at: usize| fields[at].parse::<u64>().unwrap();
    // Fields 14 and 15, in hundredths of a second.
    Duration::from_millis(10 * (ticks(11) + ticks(12)))
}

/// Returns whether all threads of a process have stopped. On a busy machine this takes longer than sending the signal.
fn has_stopped(process: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let stats = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("stat")).unwrap());
    stats.into_iter().all(|stat| stat.rsplit_once(')').unwrap().1.trim_start().starts_with('T'))
}

#[test]
fn stack_is_killed() {
    let Some(mut stage) = Stage::new(&[Need::Nginx, Need::Curl]) else { return };
    let got = stage.path("got");
    let slow = format!("location /slow/ {{ alias {}/; limit_rate 100k; }}", stage.path("site"));
    let mut server = Wanted { workers: 2, server: &slow, ..PLAIN }.start(&stage);
    let workers = children(server.process.id());
    // One connection waits for a request, another is in the middle of an answer.
    let mut idle = stage.netns.within(|| Ok(connect(STACK[0], 8080))).unwrap();
    let slow = url(STACK[0], "slow/1000000");
    let mut download = stage.start_beside(&["curl", "--silent", "--max-time", "60", "--output", &got, &slow]);
    until("a part of an answer", || fs::metadata(&got).is_ok_and(|got| got.len() > 0), || download.tail());
    assert_eq!(curl(&stage.netns, &[&url(STACK[0], "memory")]), b"from memory");

    stage.end_stack(Signal::KILL);
    // The workers use little CPU time, although their listeners have ended.
    let log = || fs::read_to_string(&server.log).unwrap();
    let before = workers.iter().map(|&worker| busy(worker)).sum::<Duration>();
    let start = Instant::now();
    thread::sleep(Duration::from_secs(1));
    let spent = workers.iter().map(|&worker| busy(worker)).sum::<Duration>() - before;
    assert!(spent < start.elapsed() / 4, "{spent:?} of {:?}: {}", start.elapsed(), log());

    // The workers have changed their user and may not listen again. nginx starts new workers, which share its
    // listeners.
    stage.start_stack();
    download.kill();
    // The new stack does not know the connections of the previous one.
    idle.write_all(b"GET").unwrap();
    assert_eq!(idle.read(&mut [0]).map_err(|error| error.kind()), Err(ErrorKind::ConnectionReset));
    let page = [&url(STACK[0], "1000000")[..]];
    let fetches = || stage.connects(STACK[0], 8080) && curl(&stage.netns, &page) == nginx::file(1_000_000);
    until("the server at the new stack", fetches, log);
    server.quit();
}

/// Python servers that wait for connections in different ways. Each answers with its name.
const SERVERS: &str = "
import asyncio, os, select, socket, sys
name, address, port = sys.argv[1:]
def listen(): return socket.create_server((address, int(port)), backlog=7)
def serve(listener):
    connection, _ = listener.accept(); connection.sendall(name.encode()); connection.close()
def serve_all(listener):
    try:
        while True: serve(listener)
    except BlockingIOError: pass
if name == 'accept':
    listener = listen()
    while True: serve(listener)
if name == 'forked':
    listener = listen()
    [os.fork() for _ in range(2)]
    while True: serve(listener)
if name == 'edges':
    listener = listen(); listener.setblocking(False)
    epoll = select.epoll(); epoll.register(listener, select.EPOLLIN | select.EPOLLET)
    while True: epoll.poll(); serve_all(listener)
if name == 'poll':
    listener = listen(); listener.setblocking(False)
    poll = select.poll(); poll.register(listener, select.POLLIN)
    while True: poll.poll(); serve_all(listener)
async def answer(_, writer): writer.write(name.encode()); await writer.drain(); writer.close()
async def run(): await (await asyncio.start_server(answer, address, int(port))).serve_forever()
asyncio.run(run())
";

/// The stack is restarted twice, because a listener can move more than once.
#[test]
fn listeners_outlive_their_stack() {
    let Some(mut stage) = Stage::new(&[Need::Python]) else { return };
    let script = stage.write("servers.py", SERVERS);
    let wanted = [
        ("accept", STACK[0], 9001),
        ("accept", "0.0.0.0", 9002),
        ("forked", "0.0.0.0", 9003),
        ("edges", "0.0.0.0", 9004),
        ("poll", STACK[0], 9005),
        ("asyncio", "0.0.0.0", 9006),
    ];
    let servers = wanted.map(|(name, address, port)| {
        let server = stage.start(&["python3", &script, name, address, &port.to_string()]);
        stage.wait_listening(STACK[0], port, &server);
        server
    });
    for _ in 0..2 {
        stage.end_stack(Signal::KILL);
        // All servers notice the stack's end before a new stack starts.
        thread::sleep(Duration::from_millis(300));
        stage.start_stack();
        for ((name, _, port), server) in wanted.iter().zip(&servers) {
            let answers = || {
                let mut answer = String::new();
                let to = SocketAddr::new(STACK[0].parse().unwrap(), *port);
                let connected =
                    stage.netns.within(|| Ok(TcpStream::connect_timeout(&to, Duration::from_secs(2))));
                let read = connected.unwrap().and_then(|mut stream| stream.read_to_string(&mut answer));
                read.is_ok() && answer == *name
            };
            until("a server at the new stack", answers, || format!("{name}: {}", server.tail()));
        }
    }
}

/// UDP servers that wait in several ways, a client that sends and waits, and the socket options that they set.
const ECHOES: &str = "
import os, select, socket, sys, time
name, address, port = sys.argv[1:]
s = socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 50000)
s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x48)
def told(): return '%d %d' % (s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF), s.getsockopt(socket.IPPROTO_IP, socket.IP_TOS))
first = told()
def answer(flags=0):
    data, peer = s.recvfrom(2000, flags)
    s.sendto(name.encode() if told() == first else told().encode(), peer)
if name == 'connected':
    s.bind((address, int(port)))
    s.connect(('10.77.0.1', 9200)); s.settimeout(0.5)
    while True:
        try: s.send(name.encode()); s.recv(2000); time.sleep(0.1)
        except OSError: pass
s.bind((address, int(port)))
if name == 'group': s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, bytes((239, 1, 2, 3, 10, 77, 0, 2)))
if name == 'blocks':
    while True: answer()
if name == 'epoll':
    s.setblocking(False)
    epoll = select.epoll(); epoll.register(s, select.EPOLLIN)
    while True:
        epoll.poll()
        try: answer()
        except BlockingIOError: pass
poll = select.poll(); poll.register(s, select.POLLIN)
while True:
    poll.poll()
    try: answer(socket.MSG_DONTWAIT)
    except BlockingIOError: pass
";

/// The stack is restarted twice.
#[test]
fn datagram_sockets_outlive_their_stack() {
    let Some(mut stage) = Stage::new(&[Need::Python]) else { return };
    let script = stage.write("echoes.py", ECHOES);
    let wanted = [
        ("blocks", STACK[0], 9001),
        ("epoll", STACK[0], 9002),
        ("polls", "0.0.0.0", 9003),
        ("blocks", "::", 9004),
    ];
    let socket = stage.netns.within(|| Ok(UdpSocket::bind("0.0.0.0:0")?)).unwrap();
    let peer = stage.netns.within(|| Ok(UdpSocket::bind("10.77.0.1:9200")?)).unwrap();
    for socket in [&socket, &peer] {
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    }
    let start = |name: &str, address: &str, port: u16| {
        let words = ["python3", &script, name, address, &port.to_string()];
        Process::spawn("python3", stage.on_stack(&stage.netns, &["tcp", "udp"], &words)).unwrap()
    };
    let servers = wanted.map(|(name, address, port)| start(name, address, port));
    let client = start("connected", STACK[0], 9101);
    for round in 0..3 {
        if round > 0 {
            stage.end_stack(Signal::KILL);
            thread::sleep(Duration::from_millis(300));
            stage.start_stack();
        }
        for ((name, _, port), server) in wanted.iter().zip(&servers) {
            let mut bytes = [0; 100];
            let mut answers = || {
                socket.send_to(b"?", (STACK[0], *port)).unwrap();
                socket.recv(&mut bytes).is_ok_and(|len| bytes[..len] == *name.as_bytes())
            };
            until("a server at the new stack", &mut answers, || format!("{name}: {}", server.tail()));
        }
        let mut bytes = [0; 100];
        while peer.recv(&mut bytes).is_ok() {}
        let comes = || match peer.recv_from(&mut bytes) {
            Ok((_, from)) => peer.send_to(b"!", from).is_ok() && from.port() == 9101,
            Err(_) => false,
        };
        until("the client at the new stack", comes, || client.tail());
    }
}

#[test]
fn groups_are_rejoined_after_restart() {
    let Some(mut stage) = Stage::new(&[Need::Python]) else { return };
    let script = stage.write("echoes.py", ECHOES);
    let socket = stage.netns.within(|| Ok(UdpSocket::bind((KERNEL, 0))?)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let words = ["python3", &script, "group", "0.0.0.0", "9005"];
    let server = stage.on_stack(&stage.netns, &["tcp", "udp"], &words);
    let server = Process::spawn("python3", server).unwrap();
    for round in 0..2 {
        if round > 0 {
            stage.end_stack(Signal::KILL);
            stage.start_stack();
        }
        stage.netns.ip(&["route", "replace", "239.0.0.0/8", "dev", TAP]).unwrap();
        let mut bytes = [0; 100];
        let mut answers = || {
            socket.send_to(b"?", ("239.1.2.3", 9005)).unwrap();
            socket.recv(&mut bytes).is_ok_and(|len| bytes[..len] == *b"group")
        };
        until("an answer of the group", &mut answers, || format!("round {round}: {}", server.tail()));
    }
}

#[test]
fn programs_end_with_their_stack() {
    let Some(mut stage) = Stage::new(&[Need::Python]) else { return };
    let script = stage.write("servers.py", SERVERS);
    let mut command = stage.netns.command(peers::offcore::binary().unwrap());
    command.args(["exec", "--stack", &stage.socket(), "--on-loss", "exit", "python3", &script]);
    command.args(["poll", "0.0.0.0", "9001"]);
    let mut server = Process::spawn("python3", command).unwrap();
    stage.wait_listening(STACK[0], 9001, &server);
    let script = stage.write("echoes.py", ECHOES);
    let mut command = stage.netns.command(peers::offcore::binary().unwrap());
    command.args(["exec", "--stack", &stage.socket(), "--on-loss", "exit", "python3", &script]);
    command.args(["epoll", STACK[0], "9002"]);
    let mut echoes = Process::spawn("python3", command).unwrap();
    let socket = stage.netns.within(|| Ok(UdpSocket::bind("0.0.0.0:0")?)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let answers = || socket.send_to(b"?", (STACK[0], 9002)).is_ok() && socket.recv(&mut [0; 9]).is_ok();
    until("an answer", answers, || echoes.tail());
    stage.end_stack(Signal::KILL);
    for server in [&mut server, &mut echoes] {
        let status = server.wait_for_exit(super::TIMEOUT).unwrap();
        assert_eq!(status.code(), Some(1), "{}", server.tail());
        assert!(server.tail().contains("the program exits (--on-loss exit)"), "{}", server.tail());
    }
}

/// Listens twice, and waits for a file in between.
const ASKS: &str = "
import os, socket, sys, time
address, ready, go = sys.argv[1:]
first = socket.create_server((address, 8081))
open(ready, 'w').close()
while not os.path.exists(go): time.sleep(0.01)
second = socket.create_server((address, 8082))
";

#[test]
fn stack_is_stopped() {
    let Some(mut stage) = Stage::new(&[Need::Nginx, Need::Curl, Need::Python]) else { return };
    // A program that starts before the stack ends and uses it afterwards.
    let [ready, go] = ["ready", "go"].map(|name| stage.path(name));
    let script = stage.write("asks.py", ASKS);
    let mut asks = stage.start(&["python3", &script, STACK[0], &ready, &go]);
    until("a listener", || fs::metadata(&ready).is_ok(), || asks.tail());
    let stack = stage.stack.as_mut().unwrap();
    stack.signal(Signal::STOP).unwrap();
    until("a stopped stack", || has_stopped(stack.id()), String::new);
    fs::write(&go, "").unwrap();
    let to = format!("http://{}:9/", KERNEL);
    let mut attaches = stage.start_apart(&["curl", "--silent", "--max-time", "2", &to]);
    for program in [&mut asks, &mut attaches] {
        let status = program.wait_for_exit(STOPPED).unwrap();
        assert!(!status.success(), "{status}: {}", program.tail());
    }
    stage.stack.as_mut().unwrap().signal(Signal::CONT).unwrap();
    let server = PLAIN.start(&stage);
    assert!(curl(&stage.netns, &[&url(STACK[0], "1000000")]) == nginx::file(1_000_000));
    server.stop();
}
