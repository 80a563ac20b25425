// Datagrams with control messages and options: header fields of sent datagrams, control messages of received ones,
// datagrams from several buffers and in segments, and sockets that share a port.
#define _GNU_SOURCE
#include "common.h"

#include <linux/net_tstamp.h>
#include <netinet/udp.h>
#include <time.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

static char buffer[70000], room[512];

// Returns a socket bound to this side's address, and sends a datagram to the peer's socket 1, which thereby learns the
// address.
static int met(int family, struct place *there)
{
    const char *text = family == AF_INET ? all_arguments[3] : all_arguments[5];
    *there = peer(family, (uint16_t)must("udp 1 %s", text));
    int fd = udp(family);
    if (bind_to(fd, here(family, 0)) || sendto(fd, "", 0, 0, (struct sockaddr *)&there->addr, there->len))
        broken("no socket: %s", error_name(errno));
    must("recvfrom 1");
    return fd;
}

// Sends with one control message.
static long with_control(int fd, struct place to, size_t len, int level, int type, const void *value, size_t size)
{
    struct iovec part = {buffer, len};
    struct msghdr message = {&to.addr, to.len, &part, 1, room, CMSG_SPACE(size), 0};
    memset(room, 0, sizeof room);
    struct cmsghdr *control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = level;
    control->cmsg_type = type;
    control->cmsg_len = CMSG_LEN(size);
    memcpy(CMSG_DATA(control), value, size);
    return sendmsg(fd, &message, 0);
}

static long with_int(int fd, struct place to, int level, int type, int value)
{
    return with_control(fd, to, 1, level, type, &value, sizeof value);
}

static void sent_v4(void)
{
    prefix("sent4-");
    struct place to;
    int fd = met(AF_INET, &to);
    result("plain", sendto(fd, "x", 1, 0, (struct sockaddr *)&to.addr, to.len));
    peer_says("plain-peer", "headers 1");
    result("ttl-option", set_int(fd, IPPROTO_IP, IP_TTL, 7));
    result("tos-option", set_int(fd, IPPROTO_IP, IP_TOS, 0x48));
    sendto(fd, "x", 1, 0, (struct sockaddr *)&to.addr, to.len);
    peer_says("options-peer", "headers 1");
    result("ttl-message", with_int(fd, to, IPPROTO_IP, IP_TTL, 9));
    peer_says("ttl-message-peer", "headers 1");
    result("tos-message", with_int(fd, to, IPPROTO_IP, IP_TOS, 0xb8));
    peer_says("tos-message-peer", "headers 1");
    uint8_t byte = 0x22;
    result("tos-byte", with_control(fd, to, 1, IPPROTO_IP, IP_TOS, &byte, 1));
    peer_says("tos-byte-peer", "headers 1");
    result("ttl-0", with_int(fd, to, IPPROTO_IP, IP_TTL, 0));
    result("ttl-256", with_int(fd, to, IPPROTO_IP, IP_TTL, 256));
    result("tos-256", with_int(fd, to, IPPROTO_IP, IP_TOS, 256));
    result("unknown", with_int(fd, to, IPPROTO_IP, 99, 1));
    result("unknown-udp", with_int(fd, to, IPPROTO_UDP, 99, 1));
    result("unknown-socket", with_int(fd, to, SOL_SOCKET, 99, 1));
    uint16_t half = 1;
    result("short", with_control(fd, to, 1, IPPROTO_IP, IP_TTL, &half, sizeof half));
    struct place own = here(AF_INET, 0);
    struct in_pktinfo info = {.ipi_spec_dst = ((struct sockaddr_in *)&own.addr)->sin_addr};
    result("pktinfo", with_control(fd, to, 3, IPPROTO_IP, IP_PKTINFO, &info, sizeof info));
    peer_says("pktinfo-peer", "headers 1");
    result("ttl-option-0", set_int(fd, IPPROTO_IP, IP_TTL, 0));
    result("ttl-option-usual", set_int(fd, IPPROTO_IP, IP_TTL, -1));
    say("ttl-option-is", "%d", int_of(fd, IPPROTO_IP, IP_TTL));
    close(fd);
    // Options set before the socket is bound are kept.
    fd = udp(AF_INET);
    set_int(fd, IPPROTO_IP, IP_TTL, 33);
    set_int(fd, IPPROTO_IP, IP_TOS, 0x10);
    join(fd, to);
    send(fd, "x", 1, 0);
    peer_says("before-peer", "headers 1");
    say("before-ttl", "%d", int_of(fd, IPPROTO_IP, IP_TTL));
    say("before-tos", "%d", int_of(fd, IPPROTO_IP, IP_TOS));
    say("mtu", "%d", int_of(fd, IPPROTO_IP, IP_MTU));
    close(fd);
    prefix("");
}

static void sent_v6(void)
{
    prefix("sent6-");
    struct place to;
    int fd = met(AF_INET6, &to);
    set_int(fd, IPPROTO_IPV6, IPV6_UNICAST_HOPS, 7);
    set_int(fd, IPPROTO_IPV6, IPV6_TCLASS, 0x48);
    sendto(fd, "x", 1, 0, (struct sockaddr *)&to.addr, to.len);
    peer_says("options-peer", "headers 1");
    result("hops-message", with_int(fd, to, IPPROTO_IPV6, IPV6_HOPLIMIT, 9));
    peer_says("hops-message-peer", "headers 1");
    result("class-message", with_int(fd, to, IPPROTO_IPV6, IPV6_TCLASS, 0xb8));
    peer_says("class-message-peer", "headers 1");
    result("hops-256", with_int(fd, to, IPPROTO_IPV6, IPV6_HOPLIMIT, 256));
    result("unknown", with_int(fd, to, IPPROTO_IPV6, 99, 1));
    struct place own = here(AF_INET6, 0);
    struct in6_pktinfo info = {.ipi6_addr = ((struct sockaddr_in6 *)&own.addr)->sin6_addr};
    result("pktinfo", with_control(fd, to, 3, IPPROTO_IPV6, IPV6_PKTINFO, &info, sizeof info));
    peer_says("pktinfo-peer", "headers 1");
    say("hops", "%d", int_of(fd, IPPROTO_IPV6, IPV6_UNICAST_HOPS));
    say("class", "%d", int_of(fd, IPPROTO_IPV6, IPV6_TCLASS));
    close(fd);
    prefix("");
}

// Receives a datagram and prints its control messages in order.
static void told(const char *label, int fd, size_t space)
{
    struct iovec part = {buffer, sizeof buffer};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = space};
    result(label, recvmsg(fd, &message, 0));
    char text[300] = "", now[60];
    for (struct cmsghdr *one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one)) {
        int value = 0;
        size_t len = one->cmsg_len - CMSG_LEN(0);
        memcpy(&value, CMSG_DATA(one), len < sizeof value ? len : sizeof value);
        if (one->cmsg_level == SOL_SOCKET) {
            // The first word of each timestamp is seconds.
            long seconds;
            memcpy(&seconds, CMSG_DATA(one), sizeof seconds);
            value = labs(seconds - (long)time(NULL)) <= 10;
        } else if (one->cmsg_type == IP_PKTINFO || one->cmsg_type == IPV6_PKTINFO)
            value = 0;
        snprintf(now, sizeof now, " %d/%d/%zu=%d", one->cmsg_level, one->cmsg_type, len, value);
        if (len > 8 && one->cmsg_level != SOL_SOCKET)
            snprintf(now, sizeof now, " %d/%d/%zu", one->cmsg_level, one->cmsg_type, len);
        strncat(text, now, sizeof text - strlen(text) - 1);
    }
    char name[80];
    snprintf(name, sizeof name, "%s-messages", label);
    say(name, "%s%s", text, message.msg_flags & MSG_CTRUNC ? " CTRUNC" : "");
}

static void received(int family)
{
    bool v4 = family == AF_INET;
    prefix(v4 ? "told4-" : "told6-");
    int level = v4 ? IPPROTO_IP : IPPROTO_IPV6;
    must("set 1 %d %d 88", level, v4 ? IP_TOS : IPV6_TCLASS);
    struct place to;
    int fd = met(family, &to);
    set_int(fd, level, v4 ? IP_PKTINFO : IPV6_RECVPKTINFO, 1);
    must("reply 1 5 1");
    told("pktinfo", fd, sizeof room);
    // Checks the destination address of the received datagram.
    struct place ours = here(family, 0);
    struct cmsghdr *control = (struct cmsghdr *)room;
    if (v4) {
        struct in_pktinfo *info = (struct in_pktinfo *)CMSG_DATA(control);
        struct in_addr own = ((struct sockaddr_in *)&ours.addr)->sin_addr;
        say("pktinfo-addresses", "%d %d", info->ipi_addr.s_addr == own.s_addr, info->ipi_spec_dst.s_addr == own.s_addr);
        say("pktinfo-interface", "%s", info->ipi_ifindex > 0 ? "one" : "none");
    } else {
        struct in6_pktinfo *info = (struct in6_pktinfo *)CMSG_DATA(control);
        struct in6_addr own = ((struct sockaddr_in6 *)&ours.addr)->sin6_addr;
        say("pktinfo-addresses", "%d", !memcmp(&info->ipi6_addr, &own, sizeof own));
        say("pktinfo-interface", "%s", info->ipi6_ifindex > 0 ? "one" : "none");
    }
    set_int(fd, level, v4 ? IP_RECVTTL : IPV6_RECVHOPLIMIT, 1);
    set_int(fd, level, v4 ? IP_RECVTOS : IPV6_RECVTCLASS, 1);
    set_int(fd, level, v4 ? IP_RECVORIGDSTADDR : 74, 1);
    set_int(fd, SOL_SOCKET, SO_RXQ_OVFL, 1);
    must("reply 1 5 1");
    told("all", fd, sizeof room);
    must("reply 1 5 1");
    told("little-room", fd, CMSG_SPACE(v4 ? sizeof(struct in_pktinfo) : sizeof(struct in6_pktinfo)) + 4);
    must("reply 1 5 1");
    told("no-room", fd, 0);
    set_int(fd, level, v4 ? IP_PKTINFO : IPV6_RECVPKTINFO, 0);
    result("timestamp", set_int(fd, SOL_SOCKET, SO_TIMESTAMP, 1));
    must("reply 1 5 1");
    told("with-timestamp", fd, sizeof room);
    result("timestampns", set_int(fd, SOL_SOCKET, SO_TIMESTAMPNS, 1));
    say("timestamp-is", "%d %d", int_of(fd, SOL_SOCKET, SO_TIMESTAMP), int_of(fd, SOL_SOCKET, SO_TIMESTAMPNS));
    must("reply 1 5 1");
    told("with-timestampns", fd, sizeof room);
    set_int(fd, SOL_SOCKET, SO_TIMESTAMPNS, 0);
    int software = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;
    result("timestamping", set_int(fd, SOL_SOCKET, SO_TIMESTAMPING, software));
    // The kernel starts to record timestamps a moment later.
    must("pause 50");
    must("reply 1 5 1");
    told("with-timestamping", fd, sizeof room);
    close(fd);
    prefix("");
}

static void parts(int family)
{
    prefix(family == AF_INET ? "parts4-" : "parts6-");
    struct place to;
    int fd = met(family, &to);
    struct sockaddr *addr = (struct sockaddr *)&to.addr;
    result("more", sendto(fd, "one", 3, MSG_MORE, addr, to.len));
    result("more-second", sendto(fd, "two", 3, MSG_MORE, addr, to.len));
    must("pause 30");
    peer_says("more-not-yet", "try 1");
    result("more-last", sendto(fd, "three", 5, 0, addr, to.len));
    peer_says("more-peer", "recvfrom 1");
    result("cork", set_int(fd, IPPROTO_UDP, UDP_CORK, 1));
    say("cork-is", "%d", int_of(fd, IPPROTO_UDP, UDP_CORK));
    for (int i = 0; i < 3; i++)
        sendto(fd, "part", 4, 0, addr, to.len);
    must("pause 30");
    peer_says("cork-not-yet", "try 1");
    result("uncork", set_int(fd, IPPROTO_UDP, UDP_CORK, 0));
    peer_says("cork-peer", "recvfrom 1");
    peer_says("cork-nothing-else", "try 1");
    result("more-long", sendto(fd, buffer, 60000, MSG_MORE, addr, to.len));
    result("more-too-long", sendto(fd, buffer, 6000, 0, addr, to.len));
    result("after", sendto(fd, "after", 5, 0, addr, to.len));
    peer_says("after-peer", "recvfrom 1");
    // Closing a socket drops its corked datagram.
    sendto(fd, "lost", 4, MSG_MORE, addr, to.len);
    close(fd);
    must("pause 30");
    peer_says("closed-peer", "try 1");
    prefix("");
}

static void segments(int family)
{
    prefix(family == AF_INET ? "segments4-" : "segments6-");
    struct place to;
    int fd = met(family, &to);
    uint16_t size = 1200;
    result("message", with_control(fd, to, 3000, IPPROTO_UDP, UDP_SEGMENT, &size, sizeof size));
    peer_says("message-first", "recvfrom 1");
    peer_says("message-second", "recvfrom 1");
    peer_says("message-third", "recvfrom 1");
    peer_says("message-none", "try 1");
    result("message-int", with_int(fd, to, IPPROTO_UDP, UDP_SEGMENT, 1200));
    result("option", set_int(fd, IPPROTO_UDP, UDP_SEGMENT, 500));
    say("option-is", "%d", int_of(fd, IPPROTO_UDP, UDP_SEGMENT));
    join(fd, to);
    result("send", send(fd, buffer, 1001, 0));
    peer_says("send-first", "recvfrom 1");
    peer_says("send-second", "recvfrom 1");
    peer_says("send-third", "recvfrom 1");
    result("short", send(fd, buffer, 400, 0));
    peer_says("short-peer", "recvfrom 1");
    result("empty", send(fd, buffer, 0, 0));
    peer_says("empty-peer", "recvfrom 1");
    result("parts", send(fd, buffer, 300, MSG_MORE));
    result("parts-last", send(fd, buffer, 300, 0));
    peer_says("parts-first", "recvfrom 1");
    peer_says("parts-second", "recvfrom 1");
    set_int(fd, IPPROTO_UDP, UDP_SEGMENT, 10);
    result("too-many", send(fd, buffer, 1281, 0));
    result("many", send(fd, buffer, 1280, 0));
    for (int i = 0; i < 128; i++)
        must("recvfrom 1");
    peer_says("many-none", "try 1");
    set_int(fd, IPPROTO_UDP, UDP_SEGMENT, 1473);
    result("too-long", send(fd, buffer, 3000, 0));
    result("too-long-one", send(fd, buffer, 1000, 0));
    result("option-negative", set_int(fd, IPPROTO_UDP, UDP_SEGMENT, -1));
    result("option-large", set_int(fd, IPPROTO_UDP, UDP_SEGMENT, 65536));
    result("option-off", set_int(fd, IPPROTO_UDP, UDP_SEGMENT, 0));
    close(fd);
    prefix("");
}

// Receives datagrams of 1000 bytes, coalesced or not.
static void joined(int family)
{
    prefix(family == AF_INET ? "joined4-" : "joined6-");
    struct place to;
    int fd = met(family, &to);
    result("option", set_int(fd, IPPROTO_UDP, UDP_GRO, 1));
    say("option-is", "%d", int_of(fd, IPPROTO_UDP, UDP_GRO));
    for (int i = 0; i < 10; i++)
        must("reply 1 1000 %d", i);
    int datagrams = 0, wrong = 0;
    while (datagrams < 10) {
        struct iovec part = {buffer, sizeof buffer};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
        long got = recvmsg(fd, &message, 0);
        if (got <= 0)
            break;
        struct cmsghdr *control = CMSG_FIRSTHDR(&message);
        int size = (int)got;
        if (control && control->cmsg_level == IPPROTO_UDP && control->cmsg_type == UDP_GRO)
            memcpy(&size, CMSG_DATA(control), sizeof size);
        wrong += size != 1000 || got % 1000;
        for (long at = 0; at < got; at += 1000, datagrams++) {
            uint8_t wanted[1000];
            fill(wanted, sizeof wanted, (unsigned)datagrams, 0);
            wrong += memcmp(wanted, buffer + at, sizeof wanted) != 0;
        }
    }
    say("received", "%d, %d wrong", datagrams, wrong);
    close(fd);
    prefix("");
}

static int sharing(int name, struct place at)
{
    int fd = udp(at.addr.ss_family);
    if (name)
        set_int(fd, SOL_SOCKET, name, 1);
    if (bind_to(fd, at)) {
        close(fd);
        return -1;
    }
    return fd;
}

// Names the socket that has a datagram.
static const char *which(int one, int two)
{
    struct pollfd both[] = {{one, POLLIN, 0}, {two, POLLIN, 0}};
    // poll may report a socket whose datagram was already read.
    while (poll(both, 2, TIMEOUT) > 0) {
        if (recv(one, buffer, sizeof buffer, MSG_DONTWAIT) >= 0)
            return "first";
        if (recv(two, buffer, sizeof buffer, MSG_DONTWAIT) >= 0)
            return "second";
    }
    return "none";
}

static void shared(void)
{
    prefix("shared-");
    struct place to;
    int first = met(AF_INET, &to);
    struct place at = here(AF_INET, port_of(first));
    result("plain", sharing(0, at));
    result("reuse-one", sharing(SO_REUSEADDR, at));
    close(first);
    first = sharing(SO_REUSEADDR, at);
    int second = sharing(SO_REUSEADDR, at);
    say("reuse-both", "%s", second >= 0 ? "bound" : error_name(errno));
    must("reply 1 5 1");
    say("newest", "%s", which(first, second));
    result("connect", join(first, to));
    must("reply 1 5 1");
    say("connected", "%s", which(first, second));
    must("udp 2 %s", all_arguments[3]);
    must("sendto 2 %s %d 3 1", here_text(AF_INET), port_of(first));
    say("another-peer", "%s", which(first, second));
    close(second);
    close(first);
    first = sharing(SO_REUSEPORT, at);
    second = sharing(SO_REUSEPORT, at);
    say("port-both", "%s", second >= 0 ? "bound" : error_name(errno));
    result("port-and-address", sharing(SO_REUSEADDR, at));
    close(first);
    const char *receiver = "none";
    // A stack in another process notices the close later, so a datagram may still reach the closed socket.
    for (int tries = 0; tries < 5 && !strcmp(receiver, "none"); tries++) {
        must("reply 1 5 1");
        receiver = which(second, second);
    }
    say("port-left", "%s", receiver);
    close(second);
    prefix("");
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    sent_v4();
    sent_v6();
    received(AF_INET);
    received(AF_INET6);
    parts(AF_INET);
    parts(AF_INET6);
    segments(AF_INET);
    segments(AF_INET6);
    joined(AF_INET);
    joined(AF_INET6);
    shared();
    end();
}
