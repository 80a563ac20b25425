//! Programs connect to each other through the stack's own addresses.
//!
//! The clients run in another namespace, where the kernel's loopback does not reach the servers.

use offcore_bench::peer::process::Process;
use peers::Need;

use super::python::CLIENTS;
use super::{STACK, Stage, TIMEOUT};

/// An echo server for streams and datagrams. Its argument is its address.
const SERVER: &str = "
import asyncio, sys
async def echo(reader, writer):
    assert writer.get_extra_info('peername')[0] == sys.argv[1]
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
class Datagrams(asyncio.DatagramProtocol):
    def connection_made(self, transport): self.transport = transport
    def datagram_received(self, data, peer): self.transport.sendto(data[::-1], peer)
async def main():
    await asyncio.get_running_loop().create_datagram_endpoint(Datagrams, (sys.argv[1], 7))
    server = await asyncio.start_server(echo, sys.argv[1], 7)
    print('ready', flush=True)
    await server.serve_forever()
asyncio.run(main())
";

const DATAGRAMS: &str = "
import os, socket, sys
address = sys.argv[1]
family = socket.AF_INET6 if ':' in address else socket.AF_INET
connected, bound = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(2)]
connected.connect((address, 7))
bound.bind((address, 0))
for u in connected, bound: u.settimeout(20)
for size in 1, 1472, 20000:
    data = os.urandom(size)
    connected.send(data)
    assert connected.recv(65536) == data[::-1]
    bound.sendto(data, (address, 7))
    answer, peer = bound.recvfrom(65536)
    assert answer == data[::-1] and peer[:2] == (address, 7)
# Neither a listener nor a socket has this port.
bound.connect((address, 9))
bound.send(b'x')
try:
    bound.recv(1)
    assert False
except ConnectionRefusedError:
    pass
print('all')
";

#[test]
fn servers_at_own_addresses() {
    let Some(stage) = Stage::new(&[Need::Python]) else { return };
    let scripts = [("server.py", SERVER), ("streams.py", CLIENTS), ("datagrams.py", DATAGRAMS)];
    let [server, streams, datagrams] = scripts.map(|(name, text)| stage.write(name, text));
    for address in STACK {
        let mut server: Process = stage.start(&["python3", &server, address]);
        server.wait_for(0, TIMEOUT, "the server", |text| text.contains("ready").then_some(())).unwrap();
        for client in [&streams, &datagrams] {
            assert_eq!(stage.run_apart(&["python3", client, address]), "all\n", "{}", server.tail());
        }
    }
}

/// A wildcard listener sees the client's real address.
#[test]
fn wildcard_listeners_see_the_address() {
    let Some(stage) = Stage::new(&[Need::Python]) else { return };
    let script = "import socket, sys
s = socket.create_server(('0.0.0.0', 9000)); print('ready', flush=True)
print(s.accept()[1][0], flush=True)";
    let mut server = stage.start(&["python3", "-c", script]);
    server.wait_for(0, TIMEOUT, "the server", |text| text.contains("ready").then_some(())).unwrap();
    let connect =
        format!("import socket; s = socket.create_connection(('{}', 9000), 20); s.recv(1)", STACK[0]);
    stage.run_apart(&["python3", "-c", &connect]);
    assert_eq!(super::finish(server), format!("ready\n{}\n", STACK[0]));
}
