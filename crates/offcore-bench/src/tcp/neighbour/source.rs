//! Python programs of the attacks.
//!
//! A program prints `ready` when its attack is complete. Several times a second it prints a report of two numbers: its
//! attempts so far, and its open sockets.

/// Opens connections, sends a request on each, and reads nothing. Later it replaces connections that end, and those
/// without an answer for 2 s. Arguments: address, first port, number of ports, number of connections, size of the
/// receive buffers, connections per second at first and later, request, and source addresses.
pub(super) const PEERS: &str = "
import collections, resource, select, socket, struct, sys, time
to, first, ports, count, buffer, *rates = sys.argv[1], *map(int, sys.argv[2:8])
request, sources = bytes.fromhex(sys.argv[8]), sys.argv[9:]
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
ends = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
poll, kept, sent, number, said = select.epoll(), {}, set(), 0, False
waiting = collections.deque()
since = last = printed = time.monotonic()
credit = 0
while True:
    now = time.monotonic()
    rate = rates[said]
    credit = min(credit + (now - last) * rate, rate / 10)
    last = now
    while credit >= 1 and len(kept) < count:
        credit -= 1
        s = socket.socket()
        s.setblocking(False)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        s.bind((sources[number % len(sources)], 0))
        s.connect_ex((to, first + number % ports))
        kept[s.fileno()] = s
        waiting.append((now, s))
        poll.register(s, select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        number += 1
    if now > printed + 0.1 or not said:
        print(number, len(kept), flush=True)
        printed = now
    if not said and (number >= count or now > since + 20):
        print('ready', flush=True)
        said = True
    for fd, events in poll.poll(0):
        try:
            if events & ends:
                raise OSError
            if fd not in sent:
                kept[fd].send(request)
                sent.add(fd)
        except OSError:
            sent.discard(fd)
            kept.pop(fd).close()
    while waiting and waiting[0][0] < now - 2:
        s = waiting.popleft()[1]
        if s.fileno() >= 0 and s.fileno() not in sent:
            kept.pop(s.fileno()).close()
    time.sleep(0.005)
";

/// Has listeners and accepts nothing. Arguments: first port, number of listeners.
pub(super) const FULL_QUEUES: &str = "
import socket, sys, time
kept = []
for port in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
    s = socket.socket()
    s.bind(('0.0.0.0', port))
    s.listen(64)
    kept.append(s)
print('ready', flush=True)
time.sleep(10000)
";

/// Sets all bits of the summary of marks every millisecond. The summary follows three cache lines of the page that an
/// application shares with the stack.
pub(super) const CLAIMED_MARKS: &str = "
import ctypes, re, socket, time
for _ in range(10):
    try:
        s = socket.socket()
        s.bind(('0.0.0.0', 0))
        s.listen(1)
        break
    except OSError:
        pass
maps = open('/proc/self/maps').read()
areas = re.findall(r'^(\\w+)-\\w+ rw-s .*offcore-control', maps, re.M)
assert areas, maps
print('ready', flush=True)
number, printed = 0, time.monotonic()
while True:
    for area in areas:
        ctypes.memset(int(area, 16) + 192, 255, 128)
    number += 1
    if time.monotonic() > printed + 0.25:
        print(number, 1, flush=True)
        printed = time.monotonic()
    time.sleep(0.001)
";

/// Opens listeners until it fails. Then it closes the oldest listener and opens another one, without a pause. It
/// chooses the ports itself, because a port that the kernel chooses may be in use on the stack.
pub(super) const DESCRIPTORS: &str = "
import collections, errno, resource, socket, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept, number, port = collections.deque(), 0, 10000
def add():
    global number, port
    number += 1
    s = socket.socket()
    while True:
        port = port + 1 if port < 60000 else 10000
        try:
            s.bind(('0.0.0.0', port))
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    s.listen(1)
    kept.append(s)
try:
    while len(kept) < 30000:
        add()
except OSError:
    pass
most = len(kept)
print(number, most, flush=True)
print('ready', flush=True)
printed = time.monotonic()
while True:
    if kept:
        kept.popleft().close()
    for _ in range(2):
        try:
            if len(kept) < most:
                add()
        except OSError:
            break
    if time.monotonic() > printed + 0.1:
        print(number, len(kept), flush=True)
        printed = time.monotonic()
";

/// Sends or receives as much data as it can. It connects to an address from three source addresses, or accepts
/// connections if it gets no addresses. The receiver reports the received MB as attempts. Arguments: `send` or
/// `receive`, port, number of connections, and optionally the address and the source addresses.
pub(super) const BULK: &str = "
import select, socket, sys, time
sends, port, count, peer = sys.argv[1] == 'send', int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
if peer:
    sockets = [socket.create_connection((peer[0], port), 10, (peer[1 + n % 3], 0)) for n in range(count)]
else:
    listener = socket.create_server(('0.0.0.0', port), backlog=count)
print('ready', flush=True)
if not peer:
    sockets = [listener.accept()[0] for _ in range(count)]
poll, moved, data, printed = select.epoll(), 0, bytearray(1 << 18), time.monotonic()
by_descriptor = {s.fileno(): s for s in sockets}
for s in sockets:
    s.setblocking(False)
    poll.register(s, select.EPOLLOUT if sends else select.EPOLLIN)
while True:
    for descriptor, _ in poll.poll():
        s = by_descriptor[descriptor]
        try:
            moved += s.send(data) if sends else s.recv_into(data)
        except BlockingIOError:
            pass
    if time.monotonic() > printed + 0.1:
        print(0 if sends else moved // 1000000, count, flush=True)
        printed = time.monotonic()
";

/// Uses CPU time without a pause, and makes system calls only for its reports.
pub(super) const SPINNING: &str = "
import time
print('ready', flush=True)
number, printed = 0, time.monotonic()
while True:
    number += 1
    if time.monotonic() > printed + 0.1:
        print(number, 1, flush=True)
        printed = time.monotonic()
";
