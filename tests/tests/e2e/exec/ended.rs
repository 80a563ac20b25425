//! Sockets whose stack has ended: streams end as if they were reset, and datagram sockets move to the next stack.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use offcore_bench::peer::process::Process;
use peers::Need;
use peers::offcore::Signal;

use super::{KERNEL, STACK, Stage, TIMEOUT, until};

/// Uses six connections after their stack has ended. Two of them are in the middle of a call when it ends.
const STREAMS: &str = "
import errno, os, select, signal, socket, sys, threading, time
address, port, go = sys.argv[1:]
signals = []
signal.signal(signal.SIGPIPE, lambda *_: signals.append('SIGPIPE'))
def connect(kind):
    s = socket.create_connection((address, int(port)))
    s.send(kind)
    return s
def result(call, *arguments):
    try: return call(*arguments)
    except OSError as error: return errno.errorcode[error.errno]
def write():
    while type(sent := result(writing.send, bytes(1 << 20))) is int: pass
    results['write'] = sent, result(writing.send, b'more')
def read():
    results['read'] = result(reading.recv, 10), result(reading.recv, 10)
writing, reading, idle, quick, arrived, closed = (connect(kind) for kind in (b'-', b'-', b'-', b'-', b'd', b'c'))
results = {}
calls = [threading.Thread(target=call) for call in (write, read)]
for call in calls: call.start()
arrived.recv(1, socket.MSG_PEEK)
poll = select.poll()
poll.register(closed, select.POLLRDHUP)
poll.poll()
print('ready', flush=True)
while not os.path.exists(go): time.sleep(0.01)
for call in calls: call.join()
signals.clear()
results['idle'] = result(idle.send, bytes(20000)), result(idle.send, b'more', socket.MSG_NOSIGNAL)
results['quiet'] = list(signals)
results['loud'] = result(idle.send, b'more')
while not signals: time.sleep(0.01)
results['signals'] = list(signals)
quick.setblocking(False)
results['quick'] = result(quick.send, b'few'), result(quick.send, bytes(1 << 20))
results['arrived'] = [result(arrived.recv, 10) for _ in range(3)]
results['closed'] = [result(closed.recv, 10) for _ in range(2)], result(closed.send, b'few')
for name, found in sorted(results.items()): print(name, found)
";

const RESULTS: &str = "ready
arrived [b'data', 'ECONNRESET', b'']
closed ([b'data', b''], 'EPIPE')
idle ('ECONNRESET', 'EPIPE')
loud EPIPE
quick ('ECONNRESET', 'EPIPE')
quiet []
read ('ECONNRESET', b'')
signals ['SIGPIPE']
write ('ECONNRESET', 'EPIPE')
";

/// Accepts the program's connections. The first byte of each selects the data that it gets.
fn accept_all(listener: &TcpListener) -> Vec<TcpStream> {
    let accepted = (0..6).map(|_| {
        let (mut stream, _) = listener.accept().unwrap();
        let mut kind = [0];
        stream.read_exact(&mut kind).unwrap();
        match &kind {
            b"d" => stream.write_all(b"data").unwrap(),
            b"c" => {
                stream.write_all(b"data").unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            }
            _ => {}
        }
        stream
    });
    accepted.collect()
}

/// The program's results do not depend on the signal that ends the stack.
#[test]
fn stack_end_resets_streams() {
    for signal in [Signal::TERM, Signal::KILL] {
        let Some(mut stage) = Stage::new(&[Need::Python]) else { return };
        let (script, go) = (stage.write("streams.py", STREAMS), stage.path("go"));
        let listener = stage.netns.within(|| Ok(TcpListener::bind((KERNEL, 0))?)).unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let mut program = stage.start_apart(&["python3", &script, KERNEL, &port, &go]);
        let accepted = thread::spawn(move || accept_all(&listener));
        until("all connections", || program.stdout_from(0).contains("ready"), || program.tail());
        let accepted = accepted.join().unwrap();
        // The program most likely fills the send buffer in this time. If it does not, the results are the same.
        thread::sleep(Duration::from_millis(300));
        stage.end_stack(signal);
        fs::write(&go, "").unwrap();
        let status = program.wait_for_exit(TIMEOUT).unwrap();
        assert!(status.success(), "{status}: {}", program.tail());
        assert_eq!(program.stdout_from(0), RESULTS, "{signal:?}: {}", program.tail());
        drop(accepted);
    }
}

/// An echo server that answers with its own address. In mode `idle`, it makes no call until the stack runs again.
const ECHO_SERVER: &str = "
import os, select, socket, sys, time
mode, port, go = sys.argv[1:]
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('0.0.0.0' if mode == 'wildcard' else '10.77.0.2', int(port)))
s.setblocking(mode != 'poll')
poll = select.poll()
poll.register(s, select.POLLIN)
while True:
    if mode == 'idle' and not os.path.exists(go):
        time.sleep(0.01)
        continue
    if mode == 'poll': poll.poll()
    try: data, peer = s.recvfrom(100)
    except BlockingIOError: continue
    s.sendto(('%s %d' % s.getsockname()).encode(), peer)
";

/// Shuts down the stack cleanly, twice.
#[test]
fn datagram_sockets_survive_orderly_restart() {
    let Some(mut stage) = Stage::new(&[Need::Python]) else { return };
    let (script, go) = (stage.write("echoes.py", ECHO_SERVER), stage.path("go"));
    let socket = stage.netns.within(|| Ok(UdpSocket::bind("0.0.0.0:0")?)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let wanted = [
        ("blocks", 9001, "10.77.0.2 9001"),
        ("poll", 9002, "10.77.0.2 9002"),
        ("wildcard", 9003, "0.0.0.0 9003"),
        ("idle", 9004, "10.77.0.2 9004"),
    ];
    let servers = wanted.map(|(mode, port, _)| {
        let words = ["python3", &script, mode, &port.to_string(), &go];
        Process::spawn("python3", stage.on_stack(&stage.netns, &["tcp", "udp"], &words)).unwrap()
    });
    let answers = |at: usize| {
        let (_, port, answer) = wanted[at];
        let mut bytes = [0; 100];
        let all = || {
            socket.send_to(b"?", (STACK[0], port)).unwrap();
            socket.recv(&mut bytes).is_ok_and(|len| bytes[..len] == *answer.as_bytes())
        };
        until("an answer", all, || servers[at].tail());
    };
    fs::write(&go, "").unwrap();
    (0..wanted.len()).for_each(answers);
    for _ in 0..2 {
        fs::remove_file(&go).unwrap();
        // Makes the idle server return from its last call.
        socket.send_to(b"?", (STACK[0], 9004)).unwrap();
        thread::sleep(Duration::from_millis(300));
        stage.end_stack(Signal::TERM);
        thread::sleep(Duration::from_millis(300));
        stage.start_stack();
        fs::write(&go, "").unwrap();
        (0..wanted.len()).for_each(answers);
    }
}
