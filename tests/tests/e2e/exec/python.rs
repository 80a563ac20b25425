//! Python and curl on the stack.

use std::net::UdpSocket;

use offcore_bench::peer::process::Process;
use peers::Need;

use super::super::http::curl;
use super::super::tcp::{content, echo};
use super::{KERNEL, STACK, Stage, TIMEOUT};

const SIZES: [usize; 4] = [1, 4096, 100_000, 1_000_000];

fn file(len: usize) -> Vec<u8> {
    content(len as u64, len)
}

fn site(stage: &Stage) -> String {
    for len in SIZES {
        stage.write(&format!("site/{len}"), file(len));
    }
    stage.path("site")
}

#[test]
fn curl_on_the_stack() {
    let Some(stage) = Stage::new(&[Need::Python, Need::Curl]) else { return };
    let site = site(&stage);
    let server = stage.start_beside(&["python3", "-u", "-m", "http.server", "9000", "--directory", &site]);
    stage.wait_listening(KERNEL, 9000, &server);
    let got = stage.path("got");
    for len in SIZES {
        let url = format!("http://{KERNEL}:9000/{len}");
        let curl = ["curl", "--silent", "--show-error", "--max-time", "30", "--output", &got, &url];
        stage.run_apart(&curl);
        assert!(std::fs::read(&got).unwrap() == file(len), "{url}");
        // On the kernel's stack, the kernel's address and loopback are local.
        stage.run(&curl);
    }
    // The server logs the client's address for each request.
    let text = server.stderr();
    assert_eq!(text.lines().filter(|line| line.starts_with(STACK[0])).count(), SIZES.len(), "{text}");
    // No program listens at this port.
    let refused = format!("http://{KERNEL}:9001/");
    let mut command = stage.on_stack(&stage.apart, &[], &["curl", "--silent", "--max-time", "30", &refused]);
    assert_eq!(command.status().unwrap().code(), Some(7));
}

#[test]
fn server_of_files() {
    let Some(stage) = Stage::new(&[Need::Python, Need::Curl]) else { return };
    let site = site(&stage);
    let server = stage.start(&["python3", "-m", "http.server", "8080", "--directory", &site]);
    stage.wait_listening(STACK[0], 8080, &server);
    for address in [STACK[0], "127.0.0.1"] {
        let urls: Vec<String> = SIZES.iter().map(|len| format!("http://{address}:8080/{len}")).collect();
        let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
        assert!(curl(&stage.netns, &urls) == SIZES.map(file).concat(), "{address}");
    }
}

const THREADS: &str = "
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
Server(('', 7), Echo).serve_forever()
";

const ASYNCIO: &str = "
import asyncio
async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(echo, ['0.0.0.0', '::'], 7)
    await server.serve_forever()
asyncio.run(main())
";

const DATAGRAMS: &str = "
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(('', 7))
print('ready', flush=True)
while True:
    data, peer = server.recvfrom(65536)
    server.sendto(data[::-1], peer)
";

/// Ten streams at once. Each is compared.
pub(super) const CLIENTS: &str = "
import asyncio, os, sys
async def one(size):
    reader, writer = await asyncio.open_connection(sys.argv[1], 7)
    data = os.urandom(size)
    async def send():
        writer.write(data)
        await writer.drain()
        writer.write_eof()
    sending = asyncio.create_task(send())
    assert await reader.read(-1) == data
    await sending
    writer.close()
async def main():
    await asyncio.gather(*(one(100000 * n) for n in range(10)))
asyncio.run(main())
print('all')
";

/// Runs ten clients at once on the kernel's stack.
fn echoed(stage: &Stage, address: &str, server: &Process) {
    stage.wait_listening(address, 7, server);
    let all = stage.netns.within(|| {
        std::thread::scope(|scope| {
            for seed in 0..10 {
                scope.spawn(move || echo(address, 7, seed, 50_000 * seed as usize));
            }
        });
        Ok(())
    });
    all.unwrap_or_else(|error| panic!("{error}: {}", server.tail()));
}

#[test]
fn servers_of_threads_and_tasks() {
    let Some(stage) = Stage::new(&[Need::Python, Need::Curl]) else { return };
    let clients = stage.write("clients.py", CLIENTS);
    for (name, text) in [("threads.py", THREADS), ("tasks.py", ASYNCIO)] {
        let script = stage.write(name, text);
        stage.wait_free(STACK[0], 7);
        let server = stage.start(&["python3", &script]);
        echoed(&stage, STACK[0], &server);
        echoed(&stage, "127.0.0.1", &server);
        if name == "tasks.py" {
            echoed(&stage, STACK[1], &server);
        }
        drop(server);
        // The reverse case: a server on the kernel's stack.
        let server = stage.start_beside(&["python3", &script]);
        stage.wait_listening(KERNEL, 7, &server);
        assert_eq!(stage.run_apart(&["python3", &clients, KERNEL]), "all\n");
    }
}

#[test]
fn server_of_datagrams() {
    let Some(stage) = Stage::new(&[Need::Python, Need::Curl]) else { return };
    let script = stage.write("datagrams.py", DATAGRAMS);
    let command = stage.on_stack(&stage.netns, &["udp:7"], &["python3", &script]);
    let mut server = Process::spawn("python3", command).unwrap();
    server.wait_for(0, TIMEOUT, "the server", |text| text.contains("ready").then_some(())).unwrap();
    let answered = stage.netns.within(|| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect((STACK[0], 7))?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        for len in [0, 1, 100, 1472, 20_000] {
            let (mut bytes, mut answer) = (file(len), vec![0; 65_536]);
            socket.send(&bytes)?;
            let read = socket.recv(&mut answer)?;
            bytes.reverse();
            assert!(answer[..read] == bytes, "{read} of {len} bytes");
        }
        Ok(())
    });
    answered.unwrap_or_else(|error| panic!("{error}: {}", server.tail()));
}

/// The parent passes accepted connections to a child that it started before its first use of the stack.
const CLUSTER: &str = "
import os, socket, subprocess, sys
if sys.argv[1:] == ['child']:
    channel = socket.socket(fileno=0)
    while True:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        with socket.socket(fileno=descriptors[0]) as connection:
            connection.sendall(b'child of ' + connection.recv(100))
ours, theirs = socket.socketpair()
child = subprocess.Popen([sys.executable, __file__, 'child'], stdin=theirs)
listener = socket.create_server(('0.0.0.0', 8300))
while True:
    connection, _ = listener.accept()
    socket.send_fds(ours, [b'x'], [connection.fileno()])
    connection.close()
";

#[test]
fn earlier_child_gets_accepted_connections() {
    let Some(stage) = Stage::new(&[Need::Python, Need::Curl]) else { return };
    let script = stage.write("cluster.py", CLUSTER);
    let server = stage.start(&["python3", &script]);
    stage.wait_listening(STACK[0], 8300, &server);
    let ask = format!(
        "import socket; s = socket.create_connection(('{}', 8300), 20); s.sendall(b'it'); print(s.recv(100))",
        STACK[0]
    );
    // The first connection was used to wait for the server.
    for _ in 0..3 {
        assert_eq!(stage.run_beside(&["python3", "-c", &ask]).trim(), "b'child of it'");
    }
}

#[test]
fn many_programs_start_concurrently() {
    let Some(stage) = Stage::new(&[Need::Python, Need::Curl]) else { return };
    let script = "import socket; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1] > 0)";
    let programs: Vec<_> = (0..60).map(|_| stage.start(&["python3", "-c", script])).collect();
    for program in programs {
        assert_eq!(super::finish(program).trim(), "True");
    }
}
