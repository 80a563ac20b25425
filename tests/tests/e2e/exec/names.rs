//! glibc's resolver uses the stack.

use peers::{Need, offcore};

use super::{KERNEL, STACK, Stage, finish, until};

/// A name server. It prints the protocol and address of each client. A name that begins with `many` has a hundred
/// addresses and needs TCP. Other names have one address.
const SERVER: &str = r"
import socket, struct, sys, threading
address = sys.argv[1]
def answer(question, tcp):
    end = 12
    while question[end]: end += question[end] + 1
    kind, = struct.unpack('!H', question[end + 1:end + 3])
    count = 0 if kind != 1 else 100 if question[13:].startswith(b'many') else 1
    cut = count > 1 and not tcp
    record = b'\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4' + socket.inet_aton(address)
    head = question[:2] + (b'\x87\x80' if cut else b'\x85\x80') + struct.pack('!HHHH', 1, 0 if cut else count, 0, 0)
    return head + question[12:end + 5] + (b'' if cut else count * record)
def streams():
    listener = socket.create_server((address, 53))
    while True:
        connection, peer = listener.accept(); print('tcp', peer[0], flush=True)
        file = connection.makefile('rb')
        while len(head := file.read(2)) == 2:
            reply = answer(file.read(struct.unpack('!H', head)[0]), True)
            connection.sendall(struct.pack('!H', len(reply)) + reply)
udp = socket.socket(type=socket.SOCK_DGRAM); udp.bind((address, 53))
threading.Thread(target=streams, daemon=True).start()
while True:
    question, peer = udp.recvfrom(4096); print('udp', peer[0], flush=True)
    udp.sendto(answer(question, False), peer)
";

const ASKS: &str = "
import signal, socket, threading
address = '10.77.0.1'
assert socket.gethostbyname('one.test') == address
found = socket.getaddrinfo('two.test', 80, type=socket.SOCK_STREAM)
assert [each[4] for each in found] == [(address, 80)], found
assert len(socket.getaddrinfo('many.test', 80, type=socket.SOCK_STREAM)) == 100
assert socket.getaddrinfo('localhost', 80, socket.AF_INET)[0][4][0] == '127.0.0.1'
def ask():
    for _ in range(20): assert socket.gethostbyname('thread.test') == address
threads = [threading.Thread(target=ask) for _ in range(10)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
# Handlers return in the middle of it.
count = 0
def handler(*_): global count; count += 1
signal.signal(signal.SIGALRM, handler); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while count < 50: assert socket.gethostbyname('signal.test') == address
signal.setitimer(signal.ITIMER_REAL, 0)
print('resolved')
";

#[test]
fn stack_resolves_names() {
    let Some(stage) = Stage::new(&[Need::Python, Need::Curl]) else { return };
    let server = stage.start_beside(&["python3", "-c", SERVER, KERNEL]);
    let http = stage.start_beside(&["python3", "-m", "http.server", "--bind", KERNEL, "80"]);
    let ready = || stage.connects(KERNEL, 53) && stage.connects(KERNEL, 80);
    until("servers", ready, || server.tail() + &http.tail());
    let resolv = stage.write("resolv.conf", format!("nameserver {KERNEL}\n"));
    let asks = stage.write("asks.py", ASKS);
    let run = |program: &[&str]| {
        let script = "mount --bind \"$1\" /etc/resolv.conf; shift; exec \"$@\"";
        let mut command = stage.apart.command("unshare");
        command.args(["--mount", "sh", "-ec", script, "sh", &resolv]).arg(offcore::binary().unwrap());
        command.args(["exec", "--stack", &stage.socket()]).args(program);
        finish(offcore_bench::peer::process::Process::spawn(program[0], command).unwrap())
    };
    assert_eq!(run(&["python3", &asks]), "resolved\n");
    let format = "%{http_code} %{local_ip}\n";
    let got = run(&["curl", "--silent", "--output", "/dev/null", "--write-out", format, "http://web.test/"]);
    assert_eq!(got, format!("200 {}\n", STACK[0]));
    let asked = server.stdout_from(0);
    for protocol in ["udp", "tcp"] {
        assert!(asked.contains(&format!("{protocol} {}\n", STACK[0])), "{asked}");
    }
}
