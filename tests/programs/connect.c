// connect: all outcomes, the results of poll and SO_ERROR, and the addresses of both ends.
#define _GNU_SOURCE
#include "common.h"

#define ALL (POLLIN | POLLOUT | POLLRDHUP | POLLPRI)

static void unconnected(void)
{
    char byte;
    int fd = tcp(AF_INET);
    polled("unconnected-poll", fd, ALL);
    result("unconnected-recv", recv(fd, &byte, 1, 0));
    result("unconnected-send", send(fd, "x", 1, MSG_NOSIGNAL));
    result("unconnected-shutdown", shutdown(fd, SHUT_WR));
    struct place name = {.len = sizeof name.addr};
    result("unconnected-getpeername", getpeername(fd, (struct sockaddr *)&name.addr, &name.len));
    result("unconnected-getsockname", getsockname(fd, (struct sockaddr *)&name.addr, &name.len));
    say("unconnected-name", "%s", place_name(&name.addr, name.len, 0));
    result("unconnected-error", int_of(fd, SOL_SOCKET, SO_ERROR));
    result("unconnected-accept", accept(fd, NULL, NULL));
    close(fd);
}

static void bad_arguments(void)
{
    int fd = tcp(AF_INET);
    struct place to = peer(AF_INET, 9);
    result("connect-short-address", connect(fd, (struct sockaddr *)&to.addr, 8));
    result("connect-no-address", connect(fd, NULL, 16));
    struct place six = peer(AF_INET6, 9);
    result("connect-wrong-family", join(fd, six));
    result("connect-bad-descriptor", connect(199, (struct sockaddr *)&to.addr, to.len));
    int file = file_of(1, 1);
    result("connect-file", join(file, to));
    close(file);
    close(fd);
    result("socket-wrong-protocol", socket(AF_INET, SOCK_STREAM, IPPROTO_UDP));
    result("socket-wrong-type", socket(AF_INET, 77, 0));
    result("socket-wrong-family", socket(77, SOCK_STREAM, 0));
}

static void success(int family)
{
    prefix(family == AF_INET ? "v4-" : "v6-");
    uint16_t port = (uint16_t)must("listen 1 %s 4", family == AF_INET ? all_arguments[3] : all_arguments[5]);
    int fd = tcp(family);
    result("connect", join(fd, peer(family, port)));
    must("accept 1 2");
    struct place name = {.len = sizeof name.addr};
    getpeername(fd, (struct sockaddr *)&name.addr, &name.len);
    say("getpeername", "%s", place_name(&name.addr, name.len, port));
    name.len = sizeof name.addr;
    getsockname(fd, (struct sockaddr *)&name.addr, &name.len);
    say("getsockname", "%s", place_name(&name.addr, name.len, port_of(fd)));
    polled("poll", fd, ALL);
    result("again", join(fd, peer(family, port)));
    result("error", int_of(fd, SOL_SOCKET, SO_ERROR));
    result("listen-connected", listen(fd, 1));
    result("bind-connected", bind_to(fd, here(family, 0)));
    must("close 1");
    close(fd);
    prefix("");
}

// An address is truncated to the available room, and the returned length is the full length.
static void truncated_names(void)
{
    int fd = opened(AF_INET, 1);
    static const socklen_t rooms[] = {0, 1, 2, 4, 8, 15, 16, 17, 128};
    for (size_t i = 0; i < LEN(rooms); i++) {
        uint8_t raw[128];
        char label[64];
        memset(raw, 0xee, sizeof raw);
        socklen_t len = rooms[i];
        int done = getpeername(fd, (struct sockaddr *)raw, &len);
        size_t touched = sizeof raw;
        while (touched && raw[touched - 1] == 0xee)
            touched--;
        snprintf(label, sizeof label, "getpeername-room-%u", rooms[i]);
        say(label, "%d length %u touched %zu", done, len, touched);
    }
    socklen_t len = (socklen_t)-1;
    struct sockaddr_in name;
    result("getpeername-negative-room", getpeername(fd, (struct sockaddr *)&name, &len));
    len = 8;
    result("getsockname-room-8", getsockname(fd, (struct sockaddr *)&name, &len));
    say("getsockname-room-8-length", "%u", len);
    close(fd);
}

static void refused(void)
{
    // A port that was recently free and has no listener.
    uint16_t port = (uint16_t)must("listen 1 %s 1", all_arguments[3]);
    must("close 1");
    int fd = tcp(AF_INET);
    result("refused-connect", join(fd, peer(AF_INET, port)));
    polled("refused-poll", fd, ALL);
    result("refused-error", int_of(fd, SOL_SOCKET, SO_ERROR));
    result("refused-send", send(fd, "x", 1, MSG_NOSIGNAL));
    char byte;
    result("refused-recv", recv(fd, &byte, 1, 0));
    result("refused-connect-again", join(fd, peer(AF_INET, port)));
    close(fd);

    fd = tcp(AF_INET);
    set_nonblocking(fd, true);
    result("refused-later-connect", join(fd, peer(AF_INET, port)));
    await(fd, POLLOUT);
    polled("refused-later-poll", fd, ALL);
    polled("refused-later-poll-nothing", fd, 0);
    polled("refused-later-poll-again", fd, ALL);
    say("refused-later-error", "%s", error_name(int_of(fd, SOL_SOCKET, SO_ERROR)));
    say("refused-later-error-again", "%s", error_name(int_of(fd, SOL_SOCKET, SO_ERROR)));
    polled("refused-later-poll-cleared", fd, ALL);
    close(fd);

    fd = tcp(AF_INET);
    set_nonblocking(fd, true);
    join(fd, peer(AF_INET, port));
    await(fd, POLLOUT);
    result("refused-later-connect-again", join(fd, peer(AF_INET, port)));
    say("refused-later-error-after-connect", "%s", error_name(int_of(fd, SOL_SOCKET, SO_ERROR)));
    close(fd);

    fd = tcp(AF_INET);
    set_nonblocking(fd, true);
    join(fd, peer(AF_INET, port));
    await(fd, POLLOUT);
    result("refused-later-recv", recv(fd, &byte, 1, 0));
    result("refused-later-recv-again", recv(fd, &byte, 1, 0));
    result("refused-later-send", send(fd, "x", 1, MSG_NOSIGNAL));
    polled("refused-later-poll-after-recv", fd, ALL);
    close(fd);
}

// A listener with a full queue drops the request, so the connection stays in progress until the peer accepts another
// one.
static void in_progress(void)
{
    char byte;
    uint16_t port = (uint16_t)must("listen 1 %s 0", all_arguments[3]);
    int first = tcp(AF_INET);
    join(first, peer(AF_INET, port));
    int fd = tcp(AF_INET);
    set_nonblocking(fd, true);
    result("progress-connect", join(fd, peer(AF_INET, port)));
    polled("progress-poll", fd, ALL);
    result("progress-connect-again", join(fd, peer(AF_INET, port)));
    result("progress-error", int_of(fd, SOL_SOCKET, SO_ERROR));
    result("progress-recv", recv(fd, &byte, 1, 0));
    result("progress-send", send(fd, "x", 1, MSG_NOSIGNAL));
    struct place name = {.len = sizeof name.addr};
    result("progress-getpeername", getpeername(fd, (struct sockaddr *)&name.addr, &name.len));
    say("progress-getsockname", "%s", (getsockname(fd, (struct sockaddr *)&name.addr, &name.len),
                                       place_name(&name.addr, name.len, port_of(fd))));
    must("accept 1 2");
    await(fd, POLLOUT);
    polled("progress-done-poll", fd, ALL);
    result("progress-done-error", int_of(fd, SOL_SOCKET, SO_ERROR));
    result("progress-done-connect", join(fd, peer(AF_INET, port)));
    result("progress-done-connect-again", join(fd, peer(AF_INET, port)));
    must("accept 1 3");
    must("text 3 late");
    char text[8];
    await(fd, POLLIN);
    bytes("progress-done-recv", recv(fd, text, sizeof text, 0), text);
    close(fd);
    close(first);

    first = tcp(AF_INET);
    join(first, peer(AF_INET, port));
    fd = tcp(AF_INET);
    set_nonblocking(fd, true);
    join(fd, peer(AF_INET, port));
    result("progress-shutdown", shutdown(fd, SHUT_RDWR));
    polled("progress-shutdown-poll", fd, ALL);
    close(fd);

    fd = tcp(AF_INET);
    set_timeout(fd, SO_SNDTIMEO, 100);
    result("progress-timeout", join(fd, peer(AF_INET, port)));
    result("progress-timeout-again", join(fd, peer(AF_INET, port)));
    close(fd);
    close(first);
    must("close 1");
}

static void unreachable(void)
{
    // An unused address on the link.
    int fd = tcp(AF_INET);
    result("nobody-connect", join(fd, address("10.99.0.77", 9)));
    result("nobody-error", int_of(fd, SOL_SOCKET, SO_ERROR));
    close(fd);
}

static void bound(void)
{
    uint16_t port = (uint16_t)must("listen 1 %s 4", all_arguments[3]);
    int fd = tcp(AF_INET);
    result("bound-bind", bind_to(fd, here(AF_INET, 0)));
    uint16_t own = port_of(fd);
    result("bound-bind-again", bind_to(fd, here(AF_INET, 0)));
    polled("bound-poll", fd, ALL);
    result("bound-connect", join(fd, peer(AF_INET, port)));
    say("bound-keeps-port", "%s", own == port_of(fd) ? "yes" : "no");
    must("accept 1 2");
    close(fd);
    fd = tcp(AF_INET);
    result("bind-foreign", bind_to(fd, address("10.99.0.77", 0)));
    struct place at = here(AF_INET, 0);
    result("bind-short", bind(fd, (struct sockaddr *)&at.addr, 8));
    result("bind-wrong-family", bind_to(fd, here(AF_INET6, 0)));
    close(fd);

    // A connected socket forgets its peer and can be used again.
    fd = opened(AF_INET, 3);
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    result("unspec-connect", connect(fd, &none, sizeof none));
    polled("unspec-poll", fd, ALL);
    peer_says("unspec-peer", "recv 3 1");
    result("unspec-reconnect", join(fd, peer(AF_INET, port)));
    must("accept 1 2");
    result("unspec-send", send(fd, "again", 5, 0));
    peer_says("unspec-peer-recv", "recv 2 5");
    close(fd);
}

// Settings made before connect are kept, and the descriptor stays the same.
static void kept(void)
{
    uint16_t port = (uint16_t)must("listen 1 %s 4", all_arguments[3]);
    int fd = tcp(AF_INET);
    int copy = dup(fd);
    set_int(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_int(fd, IPPROTO_TCP, TCP_KEEPIDLE, 77);
    set_int(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_int(fd, SOL_SOCKET, SO_RCVBUF, 100000);
    set_timeout(fd, SO_RCVTIMEO, 50);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETOWN, getpid());
    set_nonblocking(fd, true);
    result("kept-connect", join(fd, peer(AF_INET, port)));
    await(fd, POLLOUT);
    must("accept 1 2");
    result("kept-nodelay", int_of(fd, IPPROTO_TCP, TCP_NODELAY));
    result("kept-keepidle", int_of(fd, IPPROTO_TCP, TCP_KEEPIDLE));
    result("kept-keepalive", int_of(fd, SOL_SOCKET, SO_KEEPALIVE));
    result("kept-rcvbuf", int_of(fd, SOL_SOCKET, SO_RCVBUF) >= 100000);
    result("kept-cloexec", fcntl(fd, F_GETFD));
    result("kept-copy-cloexec", fcntl(copy, F_GETFD));
    result("kept-nonblock", (fcntl(copy, F_GETFL) & O_NONBLOCK) != 0);
    say("kept-owner", "%s", fcntl(fd, F_GETOWN) == getpid() ? "this process" : "another");
    set_nonblocking(copy, false);
    char byte;
    result("kept-timeout", recv(fd, &byte, 1, 0));
    // The duplicate refers to the connection, although it was made before connect.
    result("kept-copy-send", send(copy, "copy", 4, 0));
    peer_says("kept-copy-peer", "recv 2 4");
    close(fd);
    must("text 2 x");
    result("kept-copy-recv", recv(copy, &byte, 1, 0));
    close(copy);
    peer_says("kept-peer-eof", "recv 2 1");
    must("close 1");
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    unconnected();
    bad_arguments();
    success(AF_INET);
    success(AF_INET6);
    truncated_names();
    refused();
    in_progress();
    bound();
    kept();
    unreachable();
    end();
}
