// Listeners: results of accept and inherited options, a full queue, connections that end while they wait, and shared or
// used addresses.
#define _GNU_SOURCE
#include "common.h"

#define ALL (POLLIN | POLLOUT | POLLRDHUP | POLLPRI)

static char buffer[4096];

static void unconnected_calls(void)
{
    int fd = tcp(AF_INET);
    result("before-acceptconn", int_of(fd, SOL_SOCKET, SO_ACCEPTCONN));
    result("before-accept", accept(fd, NULL, NULL));
    result("bind", bind_to(fd, here(AF_INET, 0)));
    say("bind-port", "%s", port_of(fd) ? "chosen" : "0");
    must("start 1 %s %d", here_text(AF_INET), port_of(fd));
    // A bound socket does not listen yet.
    peer_says("bound-only-peer", "up 1 8000");
    result("listen", listen(fd, 4));
    result("listen-again", listen(fd, 8));
    result("acceptconn", int_of(fd, SOL_SOCKET, SO_ACCEPTCONN));
    polled("poll", fd, ALL);
    result("recv", recv(fd, buffer, 1, 0));
    result("send", send(fd, buffer, 1, MSG_NOSIGNAL));
    result("getpeername", getpeername(fd, (struct sockaddr *)buffer, &(socklen_t){16}));
    result("connect", join(fd, peer(AF_INET, 9)));
    int there;
    result("fionread", ioctl(fd, FIONREAD, &there));
    struct place name = {.len = sizeof name.addr};
    getsockname(fd, (struct sockaddr *)&name.addr, &name.len);
    say("getsockname", "%s", place_name(&name.addr, name.len, port_of(fd)));
    set_nonblocking(fd, true);
    result("accept-nonblocking", accept(fd, NULL, NULL));
    set_nonblocking(fd, false);
    set_timeout(fd, SO_RCVTIMEO, 50);
    result("accept-timeout", accept(fd, NULL, NULL));
    result("shutdown-write", shutdown(fd, SHUT_WR));
    polled("shutdown-write-poll", fd, ALL);
    peer_says("shutdown-write-peer", "connect 1 %s %d", here_text(AF_INET), port_of(fd));
    result("shutdown-read", shutdown(fd, SHUT_RD));
    polled("shutdown-read-poll", fd, ALL);
    result("shutdown-read-accept", accept(fd, NULL, NULL));
    result("shutdown-read-listen", listen(fd, 4));
    polled("shutdown-read-listen-poll", fd, ALL);
    close(fd);
    fd = udp(AF_INET);
    result("udp-listen", listen(fd, 1));
    result("udp-accept", accept(fd, NULL, NULL));
    close(fd);
    fd = tcp(AF_INET);
    result("unbound-listen", listen(fd, 4));
    peer_says("unbound-peer", "connect 1 %s %d", here_text(AF_INET), port_of(fd));
    close(fd);
}

static void show_flags(const char *label, int fd)
{
    say(label, "nonblock %d cloexec %d", (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0, fcntl(fd, F_GETFD) & FD_CLOEXEC);
}

static int next(int from, int flags)
{
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    await(from, POLLIN);
    return accept4(from, NULL, NULL, flags);
}

static void flags(void)
{
    int from = listener(AF_INET, 8);
    int fd = next(from, 0);
    show_flags("accept4-none", fd);
    close(fd);
    fd = next(from, SOCK_CLOEXEC);
    show_flags("accept4-cloexec", fd);
    close(fd);
    fd = next(from, SOCK_NONBLOCK | SOCK_CLOEXEC);
    show_flags("accept4-both", fd);
    result("accept4-nonblock-recv", recv(fd, buffer, 1, 0));
    close(fd);
    result("accept4-wrong", accept4(from, NULL, NULL, 1));
    fcntl(from, F_SETFL, O_NONBLOCK);
    fcntl(from, F_SETFD, FD_CLOEXEC);
    fd = next(from, 0);
    show_flags("accept-not-inherited", fd);
    close(fd);

    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    await(from, POLLIN);
    polled("waiting-poll", from, ALL);
    struct place name = {.len = sizeof name.addr};
    fd = accept(from, (struct sockaddr *)&name.addr, &name.len);
    polled("taken-poll", from, ALL);
    struct place same = {.len = sizeof same.addr};
    getpeername(fd, (struct sockaddr *)&same.addr, &same.len);
    say("accept-address", "%s", place_name(&name.addr, name.len, 0));
    say("accept-address-is-getpeername", "%s", memcmp(&name.addr, &same.addr, name.len) ? "no" : "yes");
    close(fd);
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    await(from, POLLIN);
    name.len = 4;
    fd = accept(from, (struct sockaddr *)&name.addr, &name.len);
    say("accept-short-address", "%s length %u", fd < 0 ? "error" : "ok", name.len);
    close(fd);
    close(from);
}

static void inherited(void)
{
    int from = listener(AF_INET, 8);
    set_int(from, IPPROTO_TCP, TCP_NODELAY, 1);
    set_int(from, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_int(from, IPPROTO_TCP, TCP_KEEPIDLE, 77);
    set_int(from, IPPROTO_IP, IP_TOS, 0x10);
    set_timeout(from, SO_RCVTIMEO, 40);
    struct linger linger = {1, 7};
    setsockopt(from, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    int fd = next(from, 0);
    result("inherit-nodelay", int_of(fd, IPPROTO_TCP, TCP_NODELAY));
    result("inherit-keepalive", int_of(fd, SOL_SOCKET, SO_KEEPALIVE));
    result("inherit-keepidle", int_of(fd, IPPROTO_TCP, TCP_KEEPIDLE));
    result("inherit-tos", int_of(fd, IPPROTO_IP, IP_TOS));
    result("inherit-rcvtimeo", recv(fd, buffer, 1, 0));
    result("inherit-acceptconn", int_of(fd, SOL_SOCKET, SO_ACCEPTCONN));
    socklen_t len = sizeof linger;
    getsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, &len);
    say("inherit-linger", "%d %d", linger.l_onoff, linger.l_linger);
    close(fd);
    close(from);

    from = listener(AF_INET, 8);
    result("defer-set", set_int(from, IPPROTO_TCP, TCP_DEFER_ACCEPT, 5));
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    polled("defer-poll", from, ALL);
    must("text 1 request");
    await(from, POLLIN);
    polled("defer-poll-data", from, ALL);
    fd = accept(from, NULL, NULL);
    bytes("defer-recv", recv(fd, buffer, 99, MSG_DONTWAIT), buffer);
    close(fd);
    close(from);
}

static void overflow(void)
{
    int from = listener(AF_INET, 1);
    // A queue of N holds N + 1 connections.
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    must("connect 2 %s %d", here_text(AF_INET), port_of(from));
    must("start 3 %s %d", here_text(AF_INET), port_of(from));
    peer_says("overflow-third", "up 3 200");
    must("text 1 one");
    must("text 2 two");
    static const char *labels[] = {"overflow-accept-1", "overflow-accept-2", "overflow-accept-3"};
    for (int i = 0; i < 3; i++) {
        if (i == 2) {
            // The peer retransmits its request after a second.
            peer_says("overflow-third-later", "up 3 5000");
            must("text 3 three");
        }
        int fd = accept(from, NULL, NULL);
        bytes(labels[i], recv(fd, buffer, 99, 0), buffer);
        close(fd);
    }
    close(from);
}

// Connections that end before they are accepted.
static void ended_while_waiting(void)
{
    int from = listener(AF_INET, 8);
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    must("text 1 bytes");
    must("rst 1");
    must("connect 2 %s %d", here_text(AF_INET), port_of(from));
    must("text 2 whole");
    must("close 2");
    must("connect 3 %s %d", here_text(AF_INET), port_of(from));
    struct place name = {.len = sizeof name.addr};
    int fd = accept(from, (struct sockaddr *)&name.addr, &name.len);
    say("reset-accept", "%s", fd < 0 ? error_name(errno) : place_name(&name.addr, name.len, 0));
    polled("reset-poll", fd, ALL);
    bytes("reset-recv", recv(fd, buffer, 99, MSG_DONTWAIT), buffer);
    result("reset-recv-again", recv(fd, buffer, 99, MSG_DONTWAIT));
    result("reset-recv-third", recv(fd, buffer, 99, MSG_DONTWAIT));
    close(fd);
    fd = accept(from, NULL, NULL);
    await(fd, POLLRDHUP);
    polled("closed-poll", fd, ALL);
    bytes("closed-recv", recv(fd, buffer, 99, 0), buffer);
    result("closed-eof", recv(fd, buffer, 99, 0));
    close(fd);
    // The third connection still waits when the listener is closed.
    result("close-listener", close(from));
    peer_says("close-listener-peer", "recv 3 1");

    from = listener(AF_INET, 8);
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    fd = accept(from, NULL, NULL);
    close(from);
    must("text 1 goeson");
    bytes("accepted-outlives-listener", recv(fd, buffer, 99, 0), buffer);
    close(fd);
}

// Returns a port that is free in both families and on every address, because an old connection may use a port on one
// address only.
static uint16_t free_port(void)
{
    int fd = tcp(AF_INET6);
    if (bind_to(fd, address("::", 0)))
        broken("bind: %s", error_name(errno));
    uint16_t port = port_of(fd);
    close(fd);
    return port;
}

static void shared_addresses(void)
{
    int one = tcp(AF_INET), two = tcp(AF_INET);
    uint16_t port = free_port();
    bind_to(one, here(AF_INET, port));
    result("in-use-bind", bind_to(two, here(AF_INET, port)));
    result("in-use-wildcard", bind_to(two, address("0.0.0.0", port)));
    result("in-use-loopback", bind_to(two, address("127.0.0.1", port)));
    close(two);
    two = tcp(AF_INET);
    set_int(one, SOL_SOCKET, SO_REUSEADDR, 1);
    set_int(two, SOL_SOCKET, SO_REUSEADDR, 1);
    result("reuseaddr-bind", bind_to(two, here(AF_INET, port)));
    result("reuseaddr-listen-first", listen(one, 4));
    result("reuseaddr-listen-second", listen(two, 4));
    close(two);
    two = tcp(AF_INET);
    set_int(two, SOL_SOCKET, SO_REUSEADDR, 1);
    result("reuseaddr-bind-listening", bind_to(two, here(AF_INET, port)));
    close(one);
    close(two);

    one = tcp(AF_INET);
    two = tcp(AF_INET);
    int three = tcp(AF_INET);
    result("reuseport-set", set_int(one, SOL_SOCKET, SO_REUSEPORT, 1));
    set_int(two, SOL_SOCKET, SO_REUSEPORT, 1);
    bind_to(one, here(AF_INET, 0));
    port = port_of(one);
    result("reuseport-bind", bind_to(two, here(AF_INET, port)));
    result("reuseport-without", bind_to(three, here(AF_INET, port)));
    result("reuseport-listen-first", listen(one, 16));
    result("reuseport-listen-second", listen(two, 16));
    int taken = 0;
    for (int i = 0; i < 8; i++) {
        must("connect %d %s %d", i + 1, here_text(AF_INET), port);
        struct pollfd both[] = {{.fd = one, .events = POLLIN}, {.fd = two, .events = POLLIN}};
        poll(both, 2, TIMEOUT);
        // Exactly one of the two receives each connection.
        taken += !!both[0].revents + !!both[1].revents;
        close(accept(both[0].revents ? one : two, NULL, NULL));
    }
    say("reuseport-accepted", "%d of 8", taken);
    close(one);
    close(two);
    close(three);
}

// A server restarts while its old connections are in TIME_WAIT.
static void restart(void)
{
    int from = listener(AF_INET, 4);
    uint16_t port = port_of(from);
    must("connect 1 %s %d", here_text(AF_INET), port);
    int fd = accept(from, NULL, NULL);
    close(fd);
    ask("drain 1");
    must("close 1");
    close(from);
    from = tcp(AF_INET);
    set_int(from, SOL_SOCKET, SO_REUSEADDR, 1);
    result("restart-bind", bind_to(from, here(AF_INET, port)));
    result("restart-listen", listen(from, 4));
    peer_says("restart-peer", "connect 1 %s %d", here_text(AF_INET), port);
    fd = accept(from, NULL, NULL);
    must("text 1 anew");
    bytes("restart-recv", recv(fd, buffer, 99, 0), buffer);
    close(fd);
    close(from);
}

static void one_way(const char *label, int from, int client)
{
    struct place name = {.len = sizeof name.addr};
    int fd = accept(from, NULL, NULL);
    getsockname(fd, (struct sockaddr *)&name.addr, &name.len);
    say(label, "%s", place_name(&name.addr, name.len, port_of(from)));
    close(fd);
    if (client >= 0)
        close(client);
}

static void wildcard(int family)
{
    prefix(family == AF_INET ? "any4-" : "any6-");
    int from = tcp(family);
    result("bind", bind_to(from, address(family == AF_INET ? "0.0.0.0" : "::", 0)));
    uint16_t port = port_of(from);
    result("listen", listen(from, 8));
    must("connect 1 %s %d", here_text(AF_INET), port);
    one_way("from-peer", from, -1);
    int client = tcp(AF_INET);
    result("loopback-connect", join(client, address("127.0.0.1", port)));
    one_way("from-loopback", from, client);
    client = tcp(AF_INET);
    result("own-connect", join(client, here(AF_INET, port)));
    one_way("from-own-address", from, client);
    must("start 2 %s %d", here_text(AF_INET6), port);
    peer_says("peer-by-ipv6", "up 2 8000");
    if (family == AF_INET6) {
        one_way("from-peer-by-ipv6", from, -1);
        must("connect 1 %s %d", here_text(AF_INET), port);
        struct place name = {.len = sizeof name.addr};
        close(accept(from, (struct sockaddr *)&name.addr, &name.len));
        say("accept-address", "%s", place_name(&name.addr, name.len, 0));
        int other = tcp(AF_INET);
        result("ipv4-bind-too", bind_to(other, address("0.0.0.0", port)));
        close(other);
    }
    close(from);
    prefix("");
}

static void ipv6_only(void)
{
    int from = tcp(AF_INET6);
    result("only6-set", set_int(from, IPPROTO_IPV6, IPV6_V6ONLY, 1));
    uint16_t port = free_port();
    bind_to(from, address("::", port));
    listen(from, 4);
    must("start 1 %s %d", here_text(AF_INET), port);
    peer_says("only6-by-ipv4", "up 1 8000");
    peer_says("only6-by-ipv6", "connect 2 %s %d", here_text(AF_INET6), port);
    int four = tcp(AF_INET);
    result("only6-ipv4-bind-too", bind_to(four, address("0.0.0.0", port)));
    result("only6-set-bound", set_int(from, IPPROTO_IPV6, IPV6_V6ONLY, 0));
    close(four);
    close(from);
}

// A port is free once the call that closes its listener returns. iperf3 relies on this.
static void again(void)
{
    int first = tcp(AF_INET);
    bind_to(first, address("0.0.0.0", 0));
    listen(first, 4);
    struct place at = address("0.0.0.0", port_of(first));
    close(first);
    int done = 0;
    for (int round = 0; round < 100; round++) {
        int fd = tcp(AF_INET);
        done += bind_to(fd, at) == 0 && listen(fd, 4) == 0;
        close(fd);
    }
    say("again", "%d", done);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    unconnected_calls();
    flags();
    inherited();
    overflow();
    ended_while_waiting();
    shared_addresses();
    restart();
    again();
    wildcard(AF_INET);
    wildcard(AF_INET6);
    ipv6_only();
    end();
}
