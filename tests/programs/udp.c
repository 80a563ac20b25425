// Datagrams: bound, connected, truncated, refused, in batches, over both families.
#define _GNU_SOURCE
#include "common.h"

#define ALL (POLLIN | POLLOUT | POLLRDHUP | POLLPRI)

static char buffer[70000];

static long sent_to(int fd, const void *data, size_t len, struct place to)
{
    return sendto(fd, data, len, 0, (struct sockaddr *)&to.addr, to.len);
}

// Returns a socket bound to this side's address.
static int bound(int family)
{
    int fd = udp(family);
    if (bind_to(fd, here(family, 0)))
        broken("bind: %s", error_name(errno));
    return fd;
}

// Waits for a datagram that the peer's first socket sends after all others.
static void fence(void)
{
    int fd = bound(AF_INET);
    must("sendto 1 %s %d 1 1", here_text(AF_INET), port_of(fd));
    recv(fd, buffer, 1, 0);
    close(fd);
}

static void unconnected(int family)
{
    prefix(family == AF_INET ? "v4-" : "v6-");
    uint16_t port = (uint16_t)must("udp 1 %s", family == AF_INET ? all_arguments[3] : all_arguments[5]);
    int fd = udp(family);
    polled("poll", fd, ALL);
    result("send-no-address", send(fd, "x", 1, 0));
    struct place name = {.len = sizeof name.addr};
    result("getpeername", getpeername(fd, (struct sockaddr *)&name.addr, &name.len));
    // The socket has a port nevertheless.
    say("send-no-address-port", "%s", port_of(fd) ? "chosen" : "0");
    close(fd);
    fd = udp(family);
    result("bind", bind_to(fd, here(family, 0)));
    getsockname(fd, (struct sockaddr *)&name.addr, &name.len);
    say("getsockname", "%s", place_name(&name.addr, name.len, port_of(fd)));
    result("bind-again", bind_to(fd, here(family, 0)));
    int other = udp(family);
    result("bind-in-use", bind_to(other, here(family, port_of(fd))));
    close(other);
    result("sendto", sent_to(fd, "datagram", 8, peer(family, port)));
    peer_says("sendto-peer", "recvfrom 1");
    say("sendto-peer-from", "%s", must("from 1") == port_of(fd) ? "our port" : "another");
    result("send-empty", sent_to(fd, "", 0, peer(family, port)));
    peer_says("send-empty-peer", "recvfrom 1");
    must("reply 1 5 1");
    await(fd, POLLIN);
    polled("poll-data", fd, ALL);
    int there = -1;
    result("fionread", ioctl(fd, FIONREAD, &there));
    say("fionread-count", "%d", there);
    name.len = sizeof name.addr;
    result("recvfrom", recvfrom(fd, buffer, sizeof buffer, 0, (struct sockaddr *)&name.addr, &name.len));
    say("recvfrom-address", "%s", place_name(&name.addr, name.len, port));
    polled("poll-drained", fd, ALL);
    must("reply 1 0 1");
    await(fd, POLLIN);
    polled("poll-empty-datagram", fd, ALL);
    ioctl(fd, FIONREAD, &there);
    say("fionread-empty-datagram", "%d", there);
    result("recv-empty-datagram", recv(fd, buffer, 99, 0));
    must("reply 1 5 1");
    must("reply 1 6 1");
    name.len = 4;
    result("recvfrom-short-address", recvfrom(fd, buffer, 99, 0, (struct sockaddr *)&name.addr, &name.len));
    say("recvfrom-short-address-length", "%u", name.len);
    // Each read call also takes one datagram.
    result("read", read(fd, buffer, 99));
    result("recv-dontwait", recv(fd, buffer, 99, MSG_DONTWAIT));
    set_timeout(fd, SO_RCVTIMEO, 50);
    result("recv-timeout", recv(fd, buffer, 99, 0));
    must("later 30 reply 1 7 1");
    set_timeout(fd, SO_RCVTIMEO, 0);
    result("recv-blocks", recv(fd, buffer, 99, 0));
    close(fd);
    prefix("");
}

static void cut(void)
{
    uint16_t port = (uint16_t)must("udp 1 %s", all_arguments[3]);
    int fd = bound(AF_INET);
    sent_to(fd, "", 0, peer(AF_INET, port));
    must("recvfrom 1");
    for (int i = 0; i < 5; i++)
        must("reply 1 10 1");
    result("cut", recv(fd, buffer, 4, 0));
    result("cut-trunc", recv(fd, buffer, 4, MSG_TRUNC));
    result("cut-peek", recv(fd, buffer, 4, MSG_PEEK));
    result("cut-peek-trunc", recv(fd, buffer, 4, MSG_PEEK | MSG_TRUNC));
    struct iovec rooms[] = {{buffer, 2}, {buffer + 2, 3}};
    struct msghdr message = {.msg_iov = rooms, .msg_iovlen = 2};
    result("cut-recvmsg", recvmsg(fd, &message, 0));
    say("cut-recvmsg-flags", "%s", message.msg_flags == MSG_TRUNC ? "TRUNC" : "other");
    result("cut-none", recv(fd, buffer, 0, 0));
    rooms[1].iov_len = 20;
    result("whole-recvmsg", recvmsg(fd, &message, 0));
    say("whole-recvmsg-flags", "%d", message.msg_flags);
    result("cut-left", recv(fd, buffer, 99, MSG_DONTWAIT));
    struct iovec parts[] = {{"one", 3}, {"", 0}, {"two", 3}};
    struct place to = peer(AF_INET, port);
    message = (struct msghdr){.msg_name = &to.addr, .msg_namelen = to.len, .msg_iov = parts, .msg_iovlen = 3};
    result("sendmsg-parts", sendmsg(fd, &message, 0));
    peer_says("sendmsg-parts-peer", "recvfrom 1");
    result("largest", sent_to(fd, buffer, 65507, to));
    peer_says("largest-peer", "recvfrom 1");
    result("too-large", sent_to(fd, buffer, 65508, to));
    result("mtu", sent_to(fd, buffer, 1472, to));
    peer_says("mtu-peer", "recvfrom 1");
    set_int(fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO);
    result("do-not-fragment", sent_to(fd, buffer, 1473, to));
    result("bad-address", sent_to(fd, "x", 1, (struct place){.len = 16}));
    to.len = 8;
    result("short-address", sent_to(fd, "x", 1, to));
    result("port-zero", sent_to(fd, "x", 1, peer(AF_INET, 0)));
    result("wrong-family", sent_to(fd, "x", 1, peer(AF_INET6, port)));
    result("broadcast-refused", sent_to(fd, "x", 1, address("255.255.255.255", port)));
    close(fd);
}

static void connected(int family)
{
    prefix(family == AF_INET ? "connected4-" : "connected6-");
    const char *there = family == AF_INET ? all_arguments[3] : all_arguments[5];
    uint16_t port = (uint16_t)must("udp 1 %s", there);
    must("udp 2 %s", there);
    int fd = udp(family);
    result("connect", join(fd, peer(family, port)));
    struct place name = {.len = sizeof name.addr};
    getpeername(fd, (struct sockaddr *)&name.addr, &name.len);
    say("getpeername", "%s", place_name(&name.addr, name.len, port));
    name.len = sizeof name.addr;
    getsockname(fd, (struct sockaddr *)&name.addr, &name.len);
    say("getsockname", "%s", place_name(&name.addr, name.len, port_of(fd)));
    result("send", send(fd, "hello", 5, 0));
    result("write", write(fd, "world", 5));
    peer_says("peer", "recvfrom 1");
    peer_says("peer-second", "recvfrom 1");
    // The socket is connected to one port of the peer, so datagrams from another port are not delivered.
    must("sendto 2 %s %d 9 1", here_text(family), port_of(fd));
    must("reply 1 4 1");
    await(fd, POLLIN);
    result("recv-only-from-peer", recv(fd, buffer, 99, MSG_DONTWAIT));
    result("recv-nothing-else", recv(fd, buffer, 99, MSG_DONTWAIT));
    uint16_t other = (uint16_t)must("udp 3 %s", there);
    result("sendto-other", sent_to(fd, "x", 1, peer(family, other)));
    peer_says("sendto-other-peer", "recvfrom 3");
    result("connect-other", join(fd, peer(family, other)));
    result("connect-other-send", send(fd, "moved", 5, 0));
    peer_says("connect-other-peer", "recvfrom 3");
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    result("disconnect", connect(fd, &none, sizeof none));
    result("disconnect-send", send(fd, "x", 1, 0));
    result("disconnect-getpeername", getpeername(fd, (struct sockaddr *)&name.addr, &name.len));
    result("disconnect-sendto", sent_to(fd, "free", 4, peer(family, port)));
    peer_says("disconnect-peer", "recvfrom 1");
    must("reply 1 4 1");
    await(fd, POLLIN);
    result("disconnect-recv", recv(fd, buffer, 99, MSG_DONTWAIT));
    result("shutdown-unconnected", shutdown(fd, SHUT_RD));
    join(fd, peer(family, port));
    result("shutdown-write", shutdown(fd, SHUT_WR));
    result("shutdown-write-send", send(fd, "x", 1, MSG_NOSIGNAL));
    result("shutdown-read", shutdown(fd, SHUT_RD));
    result("shutdown-read-recv", recv(fd, buffer, 99, 0));
    polled("shutdown-poll", fd, ALL);
    close(fd);
    prefix("");
}

static void refused(int family)
{
    prefix(family == AF_INET ? "refused4-" : "refused6-");
    const char *there = family == AF_INET ? all_arguments[3] : all_arguments[5];
    uint16_t port = (uint16_t)must("udp 1 %s", there);
    must("close 1");
    int fd = udp(family);
    join(fd, peer(family, port));
    result("send", send(fd, "x", 1, 0));
    await(fd, POLLIN | POLLERR);
    polled("poll", fd, ALL);
    result("recv", recv(fd, buffer, 99, MSG_DONTWAIT));
    polled("poll-after", fd, ALL);
    result("recv-again", recv(fd, buffer, 99, MSG_DONTWAIT));
    send(fd, "x", 1, 0);
    await(fd, POLLIN | POLLERR);
    result("send-again", send(fd, "x", 1, 0));
    send(fd, "x", 1, 0);
    await(fd, POLLIN | POLLERR);
    say("error", "%s", error_name(int_of(fd, SOL_SOCKET, SO_ERROR)));
    close(fd);
    // A blocked receiver gets the error, too.
    fd = udp(family);
    join(fd, peer(family, port));
    send(fd, "x", 1, 0);
    result("blocked-recv", recv(fd, buffer, 99, 0));
    close(fd);
    fd = bound(family);
    sent_to(fd, "x", 1, peer(family, port));
    must("pause 50");
    polled("unconnected-poll", fd, ALL);
    result("unconnected-recv", recv(fd, buffer, 99, MSG_DONTWAIT));
    close(fd);
    prefix("");
}

static void batches(void)
{
    uint16_t port = (uint16_t)must("udp 1 %s", all_arguments[3]);
    int fd = bound(AF_INET);
    struct place to = peer(AF_INET, port);
    struct iovec out[3] = {{"a", 1}, {"bb", 2}, {"ccc", 3}};
    struct mmsghdr many[3] = {0};
    struct place from[3] = {0};
    for (int i = 0; i < 3; i++)
        many[i].msg_hdr = (struct msghdr){&to.addr, to.len, &out[i], 1, NULL, 0, 0};
    result("sendmmsg", sendmmsg(fd, many, 3, 0));
    say("sendmmsg-lengths", "%u %u %u", many[0].msg_len, many[1].msg_len, many[2].msg_len);
    peer_says("sendmmsg-peer-1", "recvfrom 1");
    peer_says("sendmmsg-peer-2", "recvfrom 1");
    peer_says("sendmmsg-peer-3", "recvfrom 1");
    must("reply 1 5 1");
    must("reply 1 30 1");
    fence();
    char rooms[3][10];
    for (int i = 0; i < 3; i++) {
        out[i] = (struct iovec){rooms[i], sizeof rooms[i]};
        many[i].msg_hdr = (struct msghdr){&from[i].addr, sizeof from[i].addr, &out[i], 1, NULL, 0, 0};
    }
    result("recvmmsg", recvmmsg(fd, many, 3, MSG_WAITFORONE, NULL));
    say("recvmmsg-lengths", "%u %u", many[0].msg_len, many[1].msg_len);
    const char *cut = many[1].msg_hdr.msg_flags == MSG_TRUNC ? "TRUNC" : "other";
    say("recvmmsg-flags", "%d %s", many[0].msg_hdr.msg_flags, cut);
    say("recvmmsg-address", "%s", place_name(&from[1].addr, many[1].msg_hdr.msg_namelen, port));
    result("recvmmsg-none", recvmmsg(fd, many, 3, MSG_DONTWAIT, NULL));
    must("reply 1 5 1");
    fence();
    struct timespec time = {0, 50000000};
    result("recvmmsg-one-dontwait", recvmmsg(fd, many, 3, MSG_DONTWAIT, &time));
    close(fd);

    // Two sockets, each of which receives its own datagrams.
    int one = bound(AF_INET), two = bound(AF_INET);
    must("sendto 1 %s %d 11 1", here_text(AF_INET), port_of(one));
    must("sendto 1 %s %d 22 1", here_text(AF_INET), port_of(two));
    await(one, POLLIN);
    await(two, POLLIN);
    result("two-first", recv(one, buffer, 99, MSG_DONTWAIT));
    result("two-second", recv(two, buffer, 99, MSG_DONTWAIT));
    // Binding a used address again fails.
    close(two);
    two = udp(AF_INET);
    result("rebind-in-use", bind_to(two, here(AF_INET, port_of(one))));
    uint16_t again = port_of(one);
    close(one);
    result("rebind-free", bind_to(two, here(AF_INET, again)));
    close(two);
    fd = udp(AF_INET);
    sent_to(fd, "auto", 4, to);
    say("unbound-sendto-port", "%s", port_of(fd) ? "chosen" : "0");
    peer_says("unbound-sendto-peer", "recvfrom 1");
    must("reply 1 3 1");
    result("unbound-recv", recv(fd, buffer, 99, 0));
    close(fd);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    unconnected(AF_INET);
    unconnected(AF_INET6);
    cut();
    connected(AF_INET);
    connected(AF_INET6);
    refused(AF_INET);
    refused(AF_INET6);
    batches();
    end();
}
