// Multicast groups of datagram sockets, as programs for mDNS and SSDP use them: memberships, copies for several
// sockets, the sender's own copy, and the options of sent datagrams.
#define _GNU_SOURCE
#include "common.h"

#include <net/if.h>

#ifndef IPV6_MULTICAST_ALL
#define IPV6_MULTICAST_ALL 29
#endif

static char buffer[2000], room[512];
static int family;

static const char *group(int number)
{
    static char text[32];
    snprintf(text, sizeof text, family == AF_INET ? "239.1.2.%d" : "ff15::%d", number);
    return text;
}

// Joins or leaves a group on this side's interface.
static int change(int fd, bool joins, const char *text)
{
    struct place at = address(text, 0);
    if (at.addr.ss_family == AF_INET) {
        struct ip_mreq asked = {((struct sockaddr_in *)&at.addr)->sin_addr, {0}};
        inet_pton(AF_INET, here_text(AF_INET), &asked.imr_interface);
        return setsockopt(fd, IPPROTO_IP, joins ? IP_ADD_MEMBERSHIP : IP_DROP_MEMBERSHIP, &asked, sizeof asked);
    }
    struct ipv6_mreq asked = {((struct sockaddr_in6 *)&at.addr)->sin6_addr, 0};
    return setsockopt(fd, IPPROTO_IPV6, joins ? IPV6_JOIN_GROUP : IPV6_LEAVE_GROUP, &asked, sizeof asked);
}

static int change_generic(int fd, bool joins, unsigned interface, const char *text)
{
    struct group_req asked = {.gr_interface = interface};
    struct place at = address(text, 0);
    memcpy(&asked.gr_group, &at.addr, at.len);
    int level = family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6;
    return setsockopt(fd, level, joins ? MCAST_JOIN_GROUP : MCAST_LEAVE_GROUP, &asked, sizeof asked);
}

// Returns a socket bound to a port of all addresses, which other sockets may share.
static int shared(uint16_t port)
{
    int fd = udp(family);
    set_int(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (bind_to(fd, address(family == AF_INET ? "0.0.0.0" : "::", port)))
        broken("bind: %s", error_name(errno));
    return fd;
}

static void peer_sends(const char *text, uint16_t port, int len)
{
    must("sendto 1 %s %d %d 1", text, port, len);
}

// Prints the lengths of a socket's datagrams, up to the final one with 99 bytes, which the peer sends to this socket
// alone.
static void received(const char *label, int fd)
{
    char text[200] = "";
    must("sendto 1 %s %d 99 1", here_text(family), port_of(fd));
    for (long len = 0; len != 99;) {
        struct pollfd ready = {fd, POLLIN, 0};
        if (poll(&ready, 1, TIMEOUT) < 1) {
            strcat(text, " nothing more");
            break;
        }
        len = recv(fd, buffer, sizeof buffer, 0);
        if (len != 99)
            snprintf(text + strlen(text), 20, " %ld", len);
    }
    say(label, "%s", text);
}

// Prints whether a group's datagrams stop arriving.
static void stops(const char *label, int fd, const char *text)
{
    bool comes = true;
    for (int i = 0; i < 100 && comes; i++) {
        peer_sends(text, port_of(fd), 5);
        must("sendto 1 %s %d 99 1", here_text(family), port_of(fd));
        long len = 5;
        for (comes = false; len == 5; comes |= len != 99) {
            struct pollfd ready = {fd, POLLIN, 0};
            len = poll(&ready, 1, 200) == 1 ? recv(fd, buffer, sizeof buffer, 0) : 0;
        }
    }
    say(label, "%s", comes ? "comes" : "has stopped");
}

static void errors(int fd)
{
    struct ip_mreqn asked = {0};
    result("leave-no-member", change(fd, false, group(1)));
    result("join-no-group", change(fd, true, family == AF_INET ? "10.1.2.3" : "fd01::1"));
    result("join-generic-no-group", change_generic(fd, true, 0, family == AF_INET ? "10.1.2.3" : "fd01::1"));
    result("join-generic-other-family", change_generic(fd, true, 0, family == AF_INET ? "ff15::1" : "239.1.2.3"));
    result("join-generic-unknown", change_generic(fd, true, 9999, group(1)));
    if (family == AF_INET) {
        inet_pton(AF_INET, group(1), &asked.imr_multiaddr);
        result("join-short", setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &asked, 7));
        inet_pton(AF_INET, "10.9.9.9", &asked.imr_address);
        result("join-unknown-address", setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &asked, 8));
        result("join-v6-option", setsockopt(fd, IPPROTO_IPV6, IPV6_JOIN_GROUP, room, 20));
    } else {
        result("join-short", setsockopt(fd, IPPROTO_IPV6, IPV6_JOIN_GROUP, &asked, 7));
    }
}

static void members(int fd)
{
    uint16_t port = port_of(fd);
    result("join", change(fd, true, group(1)));
    result("join-again", change(fd, true, group(1)));
    result("join-generic", change_generic(fd, true, if_nametoindex("t0"), group(2)));
    result("join-generic-again", change_generic(fd, true, if_nametoindex("t0"), group(2)));
    peer_sends(group(1), port, 11);
    peer_sends(group(2), port, 12);
    peer_sends(group(3), port, 13);
    received("member", fd);
    int other = shared(port);
    result("other-join", change(other, true, group(3)));
    peer_sends(group(1), port, 11);
    peer_sends(group(3), port, 13);
    received("two-sockets-newest", other);
    // A unicast datagram only reaches the newest socket.
    bool more = true;
    for (int i = 0; i < 2 && more; i++) {
        await(fd, POLLIN);
        more = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT) > 0;
    }
    say("two-sockets-oldest", "%s", more ? "both" : "less");
    int level = family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6;
    int all = family == AF_INET ? IP_MULTICAST_ALL : IPV6_MULTICAST_ALL;
    result("all", int_of(other, level, all));
    result("all-off", set_int(other, level, all, 0));
    peer_sends(group(2), port, 12);
    peer_sends(group(3), port, 13);
    received("only-its-own", other);
    close(other);
    while (recv(fd, buffer, sizeof buffer, MSG_DONTWAIT) > 0)
        ;
    stops("closed-member", fd, group(3));
    pid_t child = forked();
    if (!child) {
        int own = shared(port);
        change(own, true, group(4));
        raise(SIGKILL);
    }
    reap("child", child);
    stops("killed-member", fd, group(4));
    result("leave", change(fd, false, group(1)));
    result("leave-again", change(fd, false, group(1)));
    result("leave-generic", change_generic(fd, false, if_nametoindex("t0"), group(2)));
    result("leave-generic-again", change_generic(fd, false, if_nametoindex("t0"), group(2)));
    peer_sends(group(1), port, 11);
    received("left", fd);
}

static long send_to_group(int fd, const char *text, uint16_t port, size_t len)
{
    struct place to = address(text, port);
    return sendto(fd, buffer, len, 0, (struct sockaddr *)&to.addr, to.len);
}

// Tests the sender's own copy and the peer's copy.
static void sender(int fd)
{
    bool v4 = family == AF_INET;
    int level = v4 ? IPPROTO_IP : IPPROTO_IPV6;
    int loop = v4 ? IP_MULTICAST_LOOP : IPV6_MULTICAST_LOOP;
    int hops = v4 ? IP_MULTICAST_TTL : IPV6_MULTICAST_HOPS;
    int by = v4 ? IP_MULTICAST_IF : IPV6_MULTICAST_IF;
    struct in_addr own, found = {0};
    socklen_t len = sizeof found;
    inet_pton(AF_INET, here_text(AF_INET), &own);
    if (v4) {
        result("by-get", getsockopt(fd, level, by, &found, &len));
        say("by-none", "%s length %u", inet_ntoa(found), len);
        struct in_addr unknown = {htonl(0x0a090909)};
        result("by-unknown", setsockopt(fd, level, by, &unknown, sizeof unknown));
        result("by-short", setsockopt(fd, level, by, &unknown, 3));
        result("by-set", setsockopt(fd, level, by, &own, sizeof own));
        getsockopt(fd, level, by, &found, &len);
        say("by-own", "%s", inet_ntoa(found));
        struct ip_mreqn index = {.imr_ifindex = (int)if_nametoindex("t0")};
        result("by-index", setsockopt(fd, level, by, &index, sizeof index));
        getsockopt(fd, level, by, &found, &len);
        say("by-index-get", "%s", inet_ntoa(found));
    } else {
        result("by-none", int_of(fd, level, by));
        result("by-unknown", set_int(fd, level, by, 9999));
        result("by-set", set_int(fd, level, by, (int)if_nametoindex("t0")));
        say("by-get", "%s", int_of(fd, level, by) == (int)if_nametoindex("t0") ? "t0" : "another");
    }
    uint16_t port = port_of(fd);
    change(fd, true, group(1));
    result("loop", int_of(fd, level, loop));
    result("send", send_to_group(fd, group(1), port, 21));
    received("own-copy", fd);
    char byte = 0;
    result("loop-off", v4 ? setsockopt(fd, level, loop, &byte, 1) : set_int(fd, level, loop, 0));
    result("loop-get", int_of(fd, level, loop));
    result("send-without-loop", send_to_group(fd, group(1), port, 21));
    received("no-own-copy", fd);
    uint16_t there = (uint16_t)must("udp 2 %s", v4 ? "0.0.0.0" : "::");
    must("member 2 %s", group(7));
    result("hops", int_of(fd, level, hops));
    result("send-far", send_to_group(fd, group(7), there, 5));
    peer_says("far-headers", "headers 2");
    byte = 7;
    result("hops-set", v4 ? setsockopt(fd, level, hops, &byte, 1) : set_int(fd, level, hops, 7));
    result("send-farther", send_to_group(fd, group(7), there, 5));
    peer_says("farther-headers", "headers 2");
    must("close 2");
    change(fd, false, group(1));
}

// Tests the addresses that a responder gets with a query: the group, and its own address.
static void told(int fd)
{
    bool v4 = family == AF_INET;
    change(fd, true, group(1));
    set_int(fd, v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_PKTINFO : IPV6_RECVPKTINFO, 1);
    peer_sends(group(1), port_of(fd), 5);
    await(fd, POLLIN);
    struct place from;
    struct iovec part = {buffer, sizeof buffer};
    struct msghdr message = {&from.addr, sizeof from.addr, &part, 1, room, sizeof room, 0};
    result("told", recvmsg(fd, &message, 0));
    for (struct cmsghdr *one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one)) {
        char to[64] = "", own[64] = "";
        unsigned index = 0;
        if (v4) {
            struct in_pktinfo *info = (void *)CMSG_DATA(one);
            inet_ntop(AF_INET, &info->ipi_addr, to, sizeof to);
            inet_ntop(AF_INET, &info->ipi_spec_dst, own, sizeof own);
            index = (unsigned)info->ipi_ifindex;
        } else {
            struct in6_pktinfo *info = (void *)CMSG_DATA(one);
            inet_ntop(AF_INET6, &info->ipi6_addr, to, sizeof to);
            index = info->ipi6_ifindex;
        }
        say("told-of", "%s own %s by %s", to, own, index == if_nametoindex("t0") ? "t0" : "another");
        // The answer has the query's destination as source address, as mDNS responders send it.
        struct place answer = {.len = message.msg_namelen};
        memcpy(&answer.addr, &from.addr, sizeof from.addr);
        result("answer", sendto(fd, "answer", 6, 0, (struct sockaddr *)&answer.addr, answer.len));
        peer_says("answer-peer", "recvfrom 1");
    }
    change(fd, false, group(1));
}

static void limit(int fd)
{
    int count = 0;
    while (count < 200 && !change(fd, true, group(10 + count)))
        count++;
    say("most", "%d then %s", count, error_name(count < 200 ? errno : 0));
}

// A socket that joins a group before it has an address or a peer.
static void early(void)
{
    int fd = udp(family);
    result("early-join", change_generic(fd, true, if_nametoindex("t0"), group(5)));
    if (bind_to(fd, address(family == AF_INET ? "0.0.0.0" : "::", 0)))
        broken("bind: %s", error_name(errno));
    uint16_t port = (uint16_t)must("udp 2 %s", family == AF_INET ? all_arguments[3] : all_arguments[5]);
    struct place to = peer(family, port);
    result("early-send", sendto(fd, "x", 1, 0, (struct sockaddr *)&to.addr, to.len));
    peer_says("early-send-peer", "recvfrom 2");
    peer_sends(group(5), port_of(fd), 7);
    received("early-member", fd);
    close(fd);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    static const int families[] = {AF_INET, AF_INET6};
    for (size_t i = 0; i < LEN(families); i++) {
        family = families[i];
        prefix(family == AF_INET ? "v4-" : "v6-");
        must("udp 1 %s", family == AF_INET ? all_arguments[3] : all_arguments[5]);
        int fd = shared(0);
        errors(fd);
        members(fd);
        sender(fd);
        told(fd);
        early();
        if (family == AF_INET)
            limit(fd);
        close(fd);
    }
    // A stream socket cannot join groups.
    int fd = tcp(AF_INET);
    family = AF_INET;
    prefix("");
    result("stream-join", change(fd, true, "239.1.2.1"));
    result("stream-by", set_int(fd, IPPROTO_IP, IP_MULTICAST_IF, 0));
    close(fd);
    end();
}
