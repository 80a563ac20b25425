// Datagrams that are not delivered: the error queue, and broadcast datagrams.
#define _GNU_SOURCE
#include "common.h"

#include <linux/errqueue.h>
#include <sys/epoll.h>
#include <sys/select.h>

#define ALL (POLLIN | POLLOUT | POLLRDHUP | POLLPRI)

static char buffer[4000];

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

// Waits for a datagram. poll returns immediately while an error is queued.
static void await_data(int fd)
{
    int there = 0;
    for (int i = 0; i < TIMEOUT && !there; i++) {
        ioctl(fd, FIONREAD, &there);
        usleep(there ? 0 : 1000);
    }
}

// Reads the error queue: the error, its source, and the datagram that caused it.
static void queued(const char *label, int fd, int family, uint16_t port, size_t space)
{
    char text[200], room[256];
    struct place to = {0};
    struct iovec part = {buffer, sizeof buffer};
    struct msghdr message = {&to.addr, sizeof to.addr, &part, 1, room, space, 0};
    memset(buffer, 0, 100);
    long len = recvmsg(fd, &message, MSG_ERRQUEUE);
    if (len < 0) {
        say(label, "%s", error_name(errno));
        return;
    }
    struct cmsghdr *control = CMSG_FIRSTHDR(&message);
    snprintf(text, sizeof text, "%ld '%.40s' to %s%s%s", len, buffer, place_name(&to.addr, message.msg_namelen, port),
             message.msg_flags & MSG_ERRQUEUE ? " queue" : "", message.msg_flags & MSG_CTRUNC ? " cut" : "");
    if (!control || message.msg_flags & MSG_CTRUNC) {
        say(label, "%s", text);
        return;
    }
    struct sock_extended_err ee;
    memcpy(&ee, CMSG_DATA(control), sizeof ee);
    struct sockaddr *offender = (struct sockaddr *)(CMSG_DATA(control) + sizeof ee);
    socklen_t size = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    const char *who = offender->sa_family ? place_name(offender, size, 0) : "nobody";
    say(label, "%s: level %d type %d len %zu: %s origin %d type %d code %d info %u by %s", text, control->cmsg_level,
        control->cmsg_type, (size_t)control->cmsg_len, error_name((int)ee.ee_errno), ee.ee_origin, ee.ee_type, ee.ee_code,
        ee.ee_info, who);
}

// Errors in the queue of a socket.
static void errors(int family)
{
    prefix(family == AF_INET ? "errors4-" : "errors6-");
    int level = family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6;
    int option = family == AF_INET ? IP_RECVERR : IPV6_RECVERR;
    const char *there = family == AF_INET ? all_arguments[3] : all_arguments[5];
    uint16_t open = (uint16_t)must("udp 2 %s", there), port = (uint16_t)must("udp 1 %s", there);
    must("close 1");
    int fd = bound(family);
    queued("none", fd, family, port, 256);
    result("option", set_int(fd, level, option, 1));
    say("option-value", "%d", int_of(fd, level, option));
    sent_to(fd, "to nobody", 9, peer(family, port));
    await(fd, POLLIN | POLLERR);
    polled("poll", fd, ALL);
    result("recv", recv(fd, buffer, 99, MSG_DONTWAIT));
    result("recv-again", recv(fd, buffer, 99, MSG_DONTWAIT));
    polled("poll-queued", fd, ALL);
    queued("queued", fd, family, port, 256);
    polled("poll-after", fd, ALL);
    queued("queued-again", fd, family, port, 256);
    // Two errors, and data.
    sent_to(fd, "one", 3, peer(family, port));
    await(fd, POLLIN | POLLERR);
    queued("first", fd, family, port, 256);
    sent_to(fd, "two", 3, peer(family, port));
    await(fd, POLLIN | POLLERR);
    must("sendto 2 %s %d 5 1", here_text(family), port_of(fd));
    await_data(fd);
    polled("poll-data", fd, ALL);
    result("send-error", sent_to(fd, "x", 1, peer(family, open)));
    result("recv-data", recv(fd, buffer, 99, MSG_DONTWAIT));
    queued("cut", fd, family, port, 20);
    result("error", int_of(fd, SOL_SOCKET, SO_ERROR));
    // A datagram that is longer than the path MTU.
    int discover = family == AF_INET ? IP_MTU_DISCOVER : IPV6_MTU_DISCOVER;
    set_int(fd, level, discover, IP_PMTUDISC_DO);
    result("too-long", sent_to(fd, buffer, 3000, peer(family, open)));
    queued("too-long-queued", fd, family, open, 256);
    polled("too-long-poll", fd, ALL);
    // A connected socket, and a socket that no longer requests errors.
    join(fd, peer(family, port));
    send(fd, "connected", 9, 0);
    await(fd, POLLIN | POLLERR);
    queued("connected", fd, family, port, 256);
    send(fd, "cleared", 7, 0);
    await(fd, POLLIN | POLLERR);
    result("option-off", set_int(fd, level, option, 0));
    queued("cleared", fd, family, port, 256);
    close(fd);
    // The option is set before the socket is bound or connected.
    fd = udp(family);
    set_int(fd, level, option, 1);
    join(fd, peer(family, port));
    send(fd, "early", 5, 0);
    await(fd, POLLIN | POLLERR);
    queued("early", fd, family, port, 256);
    close(fd);
    prefix("");
}

// Prints the events of an epoll set with one socket.
static void events_of(const char *label, int set, int timeout)
{
    struct epoll_event event;
    int count = epoll_wait(set, &event, 1, timeout);
    say(label, "%s", count == 1 ? bits(event.events) : count ? error_name(errno) : "none");
}

static int set_of(int fd, uint32_t events)
{
    int set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = events, .data.u64 = 7};
    if (epoll_ctl(set, EPOLL_CTL_ADD, fd, &event))
        broken("epoll_ctl: %s", error_name(errno));
    return set;
}

// Prints the result of select for a socket: readable, writable, exception.
static void selected(const char *label, int fd)
{
    fd_set sets[3];
    for (int i = 0; i < 3; i++) {
        FD_ZERO(&sets[i]);
        FD_SET(fd, &sets[i]);
    }
    struct timeval none = {0, 0};
    int count = select(fd + 1, &sets[0], &sets[1], &sets[2], &none);
    say(label, "%d%s%s%s", count, FD_ISSET(fd, &sets[0]) ? " read" : "", FD_ISSET(fd, &sets[1]) ? " write" : "",
        FD_ISSET(fd, &sets[2]) ? " exception" : "");
}

// Prints errors as epoll, select and poll report them. With `queue` the socket has an error queue, otherwise it is
// connected.
static void watched(int family, bool queue)
{
    prefix(queue ? "watched-queue-" : "watched-connected-");
    const char *there = family == AF_INET ? all_arguments[3] : all_arguments[5];
    uint16_t open = (uint16_t)must("udp 2 %s", there), port = (uint16_t)must("udp 1 %s", there);
    must("close 1");
    int fd = bound(family);
    // The first set contains the socket before the error and before the option. The others request few events.
    int level = set_of(fd, EPOLLIN | EPOLLOUT | EPOLLPRI), edge = set_of(fd, EPOLLIN | EPOLLET);
    int nothing = set_of(fd, 0), once = set_of(fd, EPOLLIN | EPOLLONESHOT);
    if (queue)
        set_int(fd, family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6, family == AF_INET ? IP_RECVERR : IPV6_RECVERR, 1);
    else
        join(fd, peer(family, port));
    events_of("idle", level, 0);
    events_of("idle-edge", edge, 0);
    selected("idle-select", fd);
    queue ? sent_to(fd, "one", 3, peer(family, port)) : send(fd, "one", 3, 0);
    events_of("nothing", nothing, TIMEOUT);
    events_of("level", level, TIMEOUT);
    events_of("level-again", level, 0);
    events_of("edge", edge, TIMEOUT);
    events_of("edge-again", edge, 0);
    events_of("once", once, TIMEOUT);
    events_of("once-again", once, 0);
    selected("select", fd);
    polled("poll", fd, ALL);
    polled("poll-nothing", fd, 0);
    result("error", int_of(fd, SOL_SOCKET, SO_ERROR));
    if (queue) {
        await(fd, POLLERR);
        events_of("error-told", level, TIMEOUT);
        queued("queued", fd, family, port, 256);
    }
    events_of("told", level, 0);
    events_of("told-edge", edge, 0);
    events_of("told-nothing", nothing, 0);
    selected("told-select", fd);
    // An error, followed by data.
    queue ? sent_to(fd, "two", 3, peer(family, port)) : send(fd, "two", 3, 0);
    events_of("second-edge", edge, TIMEOUT);
    if (!queue)
        join(fd, peer(family, open));
    must("sendto 2 %s %d 5 1", here_text(family), port_of(fd));
    await_data(fd);
    events_of("data", level, 0);
    selected("data-select", fd);
    result("data-error", recv(fd, buffer, 99, MSG_DONTWAIT));
    if (queue)
        queued("data-queued", fd, family, port, 256);
    events_of("data-left", level, 0);
    polled("data-left-poll", fd, ALL);
    result("recv", recv(fd, buffer, 99, MSG_DONTWAIT));
    events_of("empty", level, 0);
    // A call that waits for data is not interrupted by the error queue, and a later error wakes poll.
    if (queue) {
        sent_to(fd, "three", 5, peer(family, port));
        events_of("third", nothing, TIMEOUT);
        result("third-error", recv(fd, buffer, 99, MSG_DONTWAIT));
        must("later 30 sendto 2 %s %d 6 1", here_text(family), port_of(fd));
        result("waits", recv(fd, buffer, 99, 0));
        await(fd, POLLERR);
        events_of("after-wait", nothing, TIMEOUT);
        queued("third-queued", fd, family, port, 256);
        events_of("end", level, 0);
    }
    close(level);
    close(edge);
    close(nothing);
    close(once);
    close(fd);
    prefix("");
}

// Sending a broadcast datagram requires an option.
static void broadcast(void)
{
    prefix("broadcast-");
    uint16_t port = (uint16_t)must("udp 1 0.0.0.0");
    struct place to = here(AF_INET, port), limited = address("255.255.255.255", port);
    struct sockaddr_in *network = (struct sockaddr_in *)&to.addr;
    network->sin_addr.s_addr |= htonl(0xff);
    int fd = bound(AF_INET);
    result("sendto", sent_to(fd, "x", 1, to));
    result("sendto-limited", sent_to(fd, "x", 1, limited));
    result("connect", join(fd, to));
    struct place peer_name = {.len = sizeof peer_name.addr};
    result("connect-getpeername", getpeername(fd, (struct sockaddr *)&peer_name.addr, &peer_name.len));
    result("option", set_int(fd, SOL_SOCKET, SO_BROADCAST, 1));
    result("allowed-sendto", sent_to(fd, "to all", 6, to));
    peer_says("allowed-sendto-peer", "recvfrom 1");
    result("allowed-connect", join(fd, to));
    result("allowed-send", send(fd, "to all again", 12, 0));
    peer_says("allowed-send-peer", "recvfrom 1");
    close(fd);
    // A new, unused socket.
    fd = udp(AF_INET);
    result("new-sendto", sent_to(fd, "x", 1, to));
    result("new-connect", join(fd, to));
    result("new-option", set_int(fd, SOL_SOCKET, SO_BROADCAST, 1));
    result("new-allowed-connect", join(fd, to));
    result("new-allowed-send", send(fd, "new", 3, 0));
    peer_says("new-allowed-peer", "recvfrom 1");
    close(fd);
    prefix("");
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    errors(AF_INET);
    errors(AF_INET6);
    watched(AF_INET, true);
    watched(AF_INET6, true);
    watched(AF_INET, false);
    broadcast();
    end();
}
