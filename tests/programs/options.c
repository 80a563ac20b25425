// Socket options that servers, clients and interpreters set or read: values before and after, and errors.
#define _GNU_SOURCE
#include "common.h"

#include <linux/filter.h>
#include <linux/sockios.h>

static char buffer[4096], big[100000];

struct option {
    const char *name;
    int level, number, value;
};

#define OPTION(level, name, value) {#name, level, name, value}

// Options that read back as they were set, or as the kernel changes them.
static const struct option plain[] = {
    OPTION(SOL_SOCKET, SO_REUSEADDR, 1),
    OPTION(SOL_SOCKET, SO_REUSEPORT, 1),
    OPTION(SOL_SOCKET, SO_KEEPALIVE, 1),
    OPTION(SOL_SOCKET, SO_KEEPALIVE, 7),
    OPTION(SOL_SOCKET, SO_OOBINLINE, 1),
    OPTION(SOL_SOCKET, SO_BROADCAST, 1),
    OPTION(SOL_SOCKET, SO_DONTROUTE, 1),
    OPTION(SOL_SOCKET, SO_TIMESTAMP, 1),
    OPTION(SOL_SOCKET, SO_PRIORITY, 5),
    OPTION(SOL_SOCKET, SO_MARK, 3),
    OPTION(SOL_SOCKET, SO_RCVLOWAT, 10),
    OPTION(SOL_SOCKET, SO_RCVLOWAT, 0),
    OPTION(SOL_SOCKET, SO_SNDLOWAT, 10),
    OPTION(SOL_SOCKET, SO_ZEROCOPY, 1),
    OPTION(SOL_SOCKET, SO_MAX_PACING_RATE, 1 << 30),
    OPTION(SOL_SOCKET, SO_MAX_PACING_RATE, -1),
    OPTION(SOL_SOCKET, SO_ACCEPTCONN, 1),
    OPTION(SOL_SOCKET, SO_ERROR, 1),
    OPTION(SOL_SOCKET, SO_TYPE, 1),
    OPTION(SOL_SOCKET, SO_DOMAIN, 2),
    OPTION(SOL_SOCKET, SO_PROTOCOL, 6),
    OPTION(IPPROTO_TCP, TCP_NODELAY, 1),
    OPTION(IPPROTO_TCP, TCP_NODELAY, 0),
    OPTION(IPPROTO_TCP, TCP_CORK, 1),
    OPTION(IPPROTO_TCP, TCP_CORK, 0),
    OPTION(IPPROTO_TCP, TCP_KEEPIDLE, 60),
    OPTION(IPPROTO_TCP, TCP_KEEPIDLE, 0),
    OPTION(IPPROTO_TCP, TCP_KEEPIDLE, 32768),
    OPTION(IPPROTO_TCP, TCP_KEEPINTVL, 10),
    OPTION(IPPROTO_TCP, TCP_KEEPINTVL, -1),
    OPTION(IPPROTO_TCP, TCP_KEEPCNT, 5),
    OPTION(IPPROTO_TCP, TCP_KEEPCNT, 128),
    OPTION(IPPROTO_TCP, TCP_DEFER_ACCEPT, 1),
    OPTION(IPPROTO_TCP, TCP_DEFER_ACCEPT, 0),
    OPTION(IPPROTO_TCP, TCP_QUICKACK, 1),
    OPTION(IPPROTO_TCP, TCP_USER_TIMEOUT, 30000),
    OPTION(IPPROTO_TCP, TCP_USER_TIMEOUT, -1),
    OPTION(IPPROTO_TCP, TCP_SYNCNT, 4),
    OPTION(IPPROTO_TCP, TCP_SYNCNT, 0),
    OPTION(IPPROTO_TCP, TCP_LINGER2, 10),
    OPTION(IPPROTO_TCP, TCP_NOTSENT_LOWAT, 16384),
    OPTION(IPPROTO_TCP, TCP_NOTSENT_LOWAT, -1),
    OPTION(IPPROTO_TCP, TCP_WINDOW_CLAMP, 20000),
    OPTION(IPPROTO_TCP, TCP_WINDOW_CLAMP, 1),
    OPTION(IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 0),
    OPTION(IPPROTO_IP, IP_TOS, 0x10),
    OPTION(IPPROTO_IP, IP_TOS, 0x48),
    OPTION(IPPROTO_IP, IP_TTL, 33),
    OPTION(IPPROTO_IP, IP_TTL, 256),
    OPTION(IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO),
    OPTION(IPPROTO_IP, IP_FREEBIND, 1),
    OPTION(IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1),
    OPTION(IPPROTO_IP, IP_TRANSPARENT, 0),
    OPTION(IPPROTO_IP, IP_RECVTOS, 1),
    OPTION(IPPROTO_IP, IP_PKTINFO, 1),
};

// The value that a connection reads depends on the path.
static const struct option before[] = {
    OPTION(IPPROTO_TCP, TCP_MAXSEG, 1000),
    OPTION(IPPROTO_TCP, TCP_MAXSEG, 1),
    OPTION(IPPROTO_TCP, TCP_WINDOW_CLAMP, 0),
};

static const struct option plain6[] = {
    OPTION(IPPROTO_IPV6, IPV6_V6ONLY, 1),
    OPTION(IPPROTO_IPV6, IPV6_V6ONLY, 0),
    OPTION(IPPROTO_IPV6, IPV6_TCLASS, 0x48),
    OPTION(IPPROTO_IPV6, IPV6_UNICAST_HOPS, 33),
    OPTION(IPPROTO_IPV6, IPV6_RECVPKTINFO, 1),
    OPTION(IPPROTO_IP, IP_TOS, 0x10),
    OPTION(IPPROTO_TCP, TCP_NODELAY, 1),
};

static void set_and_read(const char *when, int fd, const struct option *options, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct option *option = &options[i];
        char label[80], set[32];
        snprintf(label, sizeof label, "%s %s=%d", when, option->name, option->value);
        bool good = !set_int(fd, option->level, option->number, option->value);
        snprintf(set, sizeof set, "%s", good ? "set" : error_name(errno));
        errno = 0;
        int value = int_of(fd, option->level, option->number);
        if (value == -1 && errno)
            say(label, "%s, read %s", set, error_name(errno));
        else
            say(label, "%s, read %d", set, value);
    }
}

static void reads(const char *when, int fd)
{
    static const struct option facts[] = {
        OPTION(SOL_SOCKET, SO_TYPE, 0),     OPTION(SOL_SOCKET, SO_DOMAIN, 0),     OPTION(SOL_SOCKET, SO_PROTOCOL, 0),
        OPTION(SOL_SOCKET, SO_ERROR, 0),    OPTION(SOL_SOCKET, SO_ACCEPTCONN, 0), OPTION(SOL_SOCKET, SO_RCVLOWAT, 0),
        OPTION(SOL_SOCKET, SO_SNDLOWAT, 0), OPTION(SOL_SOCKET, SO_KEEPALIVE, 0),  OPTION(IPPROTO_TCP, TCP_NODELAY, 0),
        OPTION(IPPROTO_TCP, TCP_CORK, 0),   OPTION(IPPROTO_TCP, TCP_KEEPIDLE, 0), OPTION(IPPROTO_TCP, TCP_KEEPINTVL, 0),
        OPTION(IPPROTO_TCP, TCP_KEEPCNT, 0), OPTION(IPPROTO_TCP, TCP_USER_TIMEOUT, 0), OPTION(IPPROTO_IP, IP_TOS, 0),
        OPTION(IPPROTO_IP, IP_TTL, 0),
    };
    char label[80];
    for (size_t i = 0; i < LEN(facts); i++) {
        snprintf(label, sizeof label, "%s %s", when, facts[i].name);
        result(label, int_of(fd, facts[i].level, facts[i].number));
    }
    static const struct option signs[] = {
        OPTION(SOL_SOCKET, SO_SNDBUF, 0),
        OPTION(SOL_SOCKET, SO_RCVBUF, 0),
        OPTION(IPPROTO_TCP, TCP_MAXSEG, 0),
    };
    for (size_t i = 0; i < LEN(signs); i++) {
        int value = int_of(fd, signs[i].level, signs[i].number);
        snprintf(label, sizeof label, "%s %s", when, signs[i].name);
        say(label, "%s", value > 0 ? "positive" : value < 0 ? error_name(errno) : "0");
    }
    uint8_t info[512];
    socklen_t len = sizeof info;
    int done = getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len);
    snprintf(label, sizeof label, "%s TCP_INFO", when);
    // Its first byte is the state.
    say(label, "%d length %s state %d", done, len > 100 && len < sizeof info ? "some" : "?", info[0]);
    char name[16] = "";
    len = sizeof name;
    done = getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len);
    snprintf(label, sizeof label, "%s TCP_CONGESTION", when);
    say(label, "%d length %u %s", done, len, name[0] ? "named" : "no name");
}

static void buffers(int fd)
{
    result("sndbuf-set", set_int(fd, SOL_SOCKET, SO_SNDBUF, 50000));
    result("sndbuf-at-least", int_of(fd, SOL_SOCKET, SO_SNDBUF) >= 50000);
    result("rcvbuf-set", set_int(fd, SOL_SOCKET, SO_RCVBUF, 50000));
    result("rcvbuf-at-least", int_of(fd, SOL_SOCKET, SO_RCVBUF) >= 50000);
    result("sndbuf-tiny", set_int(fd, SOL_SOCKET, SO_SNDBUF, 1));
    result("sndbuf-tiny-positive", int_of(fd, SOL_SOCKET, SO_SNDBUF) > 0);
    result("sndbuf-huge", set_int(fd, SOL_SOCKET, SO_SNDBUF, 2000000000));
    result("sndbuf-negative", set_int(fd, SOL_SOCKET, SO_SNDBUF, -1));
}

static void structures(int fd)
{
    struct linger linger = {1, 10};
    socklen_t len = sizeof linger;
    result("linger-set", setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, len));
    linger = (struct linger){0};
    result("linger-get", getsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, &len));
    say("linger-value", "%d %d length %u", linger.l_onoff, linger.l_linger, len);
    result("linger-short", setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, 4));
    linger = (struct linger){0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    struct timeval time = {1, 1000000};
    result("rcvtimeo-microseconds", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time));
    time = (struct timeval){-1, 0};
    result("rcvtimeo-negative", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time));
    result("rcvtimeo-short", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, 4));
    time = (struct timeval){7, 0};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
    time = (struct timeval){0};
    len = sizeof time;
    getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, &len);
    say("sndtimeo-value", "%ld %ld", (long)time.tv_sec, (long)time.tv_usec);
    result("congestion-unknown", setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "nonesuch", 8));
    result("congestion-reno", setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4));
    char name[16] = "";
    len = sizeof name;
    getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len);
    say("congestion-name", "%s", name);
    // A rate has 32 or 64 bits.
    unsigned long rate = 123456789012;
    result("pacing-set-64", setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate));
    rate = 0;
    len = sizeof rate;
    getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, &len);
    say("pacing-get-64", "%lu length %u", rate, len);
    say("pacing-get-32", "%u", (unsigned)int_of(fd, SOL_SOCKET, SO_MAX_PACING_RATE));
    result("pacing-short", setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, 2));
    result("pacing-none", set_int(fd, SOL_SOCKET, SO_MAX_PACING_RATE, -1));
    len = sizeof rate;
    getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, &len);
    say("pacing-get-none", "%lx length %u", rate, len);
    result("clamp-none-connected", set_int(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, 0));
    result("lowat-none", set_int(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 0));
    result("bindtodevice-unknown", setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "nonesuch0", 9));
}

static void lengths(int fd)
{
    int value = 1;
    uint8_t raw[16];
    socklen_t len;
    static const socklen_t rooms[] = {0, 1, 2, 4, 8};
    for (size_t i = 0; i < LEN(rooms); i++) {
        char label[64];
        snprintf(label, sizeof label, "set-keepalive-length-%u", rooms[i]);
        result(label, setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, raw, rooms[i]));
        snprintf(label, sizeof label, "set-nodelay-length-%u", rooms[i]);
        result(label, setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, raw, rooms[i]));
        for (int level = 0; level < 2; level++) {
            memset(raw, 0xee, sizeof raw);
            len = rooms[i];
            int done = level ? getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, raw, &len)
                             : getsockopt(fd, SOL_SOCKET, SO_TYPE, raw, &len);
            size_t touched = 0;
            while (touched < sizeof raw && raw[touched] != 0xee)
                touched++;
            snprintf(label, sizeof label, "get-%s-length-%u", level ? "nodelay" : "type", rooms[i]);
            say(label, "%s length %u touched %zu", done ? error_name(errno) : "0", len, touched);
        }
    }
    result("set-wrong-level", setsockopt(fd, 77, 1, &value, sizeof value));
    result("set-wrong-name", setsockopt(fd, SOL_SOCKET, 7777, &value, sizeof value));
    result("set-wrong-tcp-name", setsockopt(fd, IPPROTO_TCP, 7777, &value, sizeof value));
    result("set-ipv6-on-ipv4", setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &value, sizeof value));
    result("set-no-value", setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, NULL, sizeof value));
    len = sizeof value;
    result("get-wrong-level", getsockopt(fd, 77, 1, &value, &len));
    result("get-wrong-name", getsockopt(fd, SOL_SOCKET, 7777, &value, &len));
    result("get-wrong-tcp-name", getsockopt(fd, IPPROTO_TCP, 7777, &value, &len));
    len = (socklen_t)-1;
    result("get-negative-length", getsockopt(fd, SOL_SOCKET, SO_TYPE, &value, &len));
    result("get-bad-descriptor", int_of(199, SOL_SOCKET, SO_TYPE));
    int file = file_of(1, 1);
    result("get-file", int_of(file, SOL_SOCKET, SO_TYPE));
    close(file);
}

// Returns whether a connection succeeds within a time in milliseconds.
static bool connects(int fd, struct place to, int milliseconds)
{
    set_nonblocking(fd, true);
    if (join(fd, to) && errno != EINPROGRESS)
        return false;
    struct pollfd ready = {fd, POLLOUT, 0};
    return poll(&ready, 1, milliseconds) == 1 && !int_of(fd, SOL_SOCKET, SO_ERROR);
}

// A connection keeps options that were set before connect, or on a listener.
static void kept(void)
{
    uint16_t port = (uint16_t)must("listen 2 %s 64", all_arguments[3]);
    for (size_t i = 0; i < LEN(plain); i++) {
        const struct option *option = &plain[i];
        // The effect of these during the handshake differs from run to run.
        if (option->number == TCP_DEFER_ACCEPT && option->level == IPPROTO_TCP)
            continue;
        char label[80];
        int fd = tcp(AF_INET);
        bool set = !set_int(fd, option->level, option->number, option->value);
        if (!connects(fd, peer(AF_INET, port), TIMEOUT))
            broken("no connection with %s", option->name);
        must("accept 2 1");
        snprintf(label, sizeof label, "kept-connect %s=%d", option->name, option->value);
        say(label, "%s, read %d", set ? "set" : "not set", int_of(fd, option->level, option->number));
        close(fd);
        must("close 1");
        int from = listener(AF_INET, 4);
        set = !set_int(from, option->level, option->number, option->value);
        must("connect 1 %s %d", here_text(AF_INET), port_of(from));
        fd = accept(from, NULL, NULL);
        snprintf(label, sizeof label, "kept-accept %s=%d", option->name, option->value);
        say(label, "%s, read %d", set ? "set" : "not set", int_of(fd, option->level, option->number));
        close(fd);
        close(from);
        must("close 1");
    }
    int fd = tcp(AF_INET);
    struct linger linger = {1, 10};
    socklen_t len = sizeof linger;
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, len);
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    set_int(fd, SOL_SOCKET, SO_SNDBUF, 65536);
    set_int(fd, SOL_SOCKET, SO_RCVBUF, 4096);
    connects(fd, peer(AF_INET, port), TIMEOUT);
    must("accept 2 1");
    memset(&linger, 0, sizeof linger);
    getsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, &len);
    say("kept-connect SO_LINGER", "%d %d", linger.l_onoff, linger.l_linger);
    char name[16] = "";
    len = sizeof name;
    getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len);
    say("kept-connect TCP_CONGESTION", "%s", name);
    result("kept-connect SO_SNDBUF", int_of(fd, SOL_SOCKET, SO_SNDBUF));
    result("kept-connect SO_RCVBUF", int_of(fd, SOL_SOCKET, SO_RCVBUF));
    close(fd);
    // After a refused connection, the socket keeps its options.
    must("close 2");
    fd = tcp(AF_INET);
    set_int(fd, IPPROTO_TCP, TCP_KEEPIDLE, 77);
    set_int(fd, IPPROTO_IP, IP_TOS, 0x48);
    set_int(fd, SOL_SOCKET, SO_RCVBUF, 4096);
    result("refused", join(fd, peer(AF_INET, port)));
    result("refused-keepidle", int_of(fd, IPPROTO_TCP, TCP_KEEPIDLE));
    result("refused-tos", int_of(fd, IPPROTO_IP, IP_TOS));
    result("refused-rcvbuf", int_of(fd, SOL_SOCKET, SO_RCVBUF));
    close(fd);
}

// Effects of options, seen by the peer and by this side.
static void effects(void)
{
    uint16_t port = (uint16_t)must("listen 2 %s 64", all_arguments[3]);
    int fd = tcp(AF_INET);
    set_int(fd, IPPROTO_IP, IP_TOS, 0x48);
    set_int(fd, IPPROTO_IP, IP_TTL, 33);
    set_int(fd, IPPROTO_TCP, TCP_MAXSEG, 1000);
    join(fd, peer(AF_INET, port));
    must("accept 2 1");
    peer_says("effect-marks", "marks 1");
    // Data wakes this side when it reaches the low-water mark.
    set_int(fd, SOL_SOCKET, SO_RCVLOWAT, 10);
    must("text 1 abcde");
    must("settle 1");
    must("pause 50");
    polled("effect-lowat-few", fd, POLLIN);
    must("text 1 fghij");
    await(fd, POLLIN);
    polled("effect-lowat-enough", fd, POLLIN);
    bytes("effect-lowat-recv", recv(fd, buffer, 99, 0), buffer);
    must("text 1 abcde");
    must("settle 1");
    must("pause 50");
    result("effect-lowat-dontwait", recv(fd, buffer, 99, MSG_DONTWAIT));
    must("text 1 end");
    must("shutdown 1");
    await(fd, POLLIN);
    polled("effect-lowat-end", fd, POLLIN);
    result("effect-lowat-end-recv", recv(fd, buffer, 99, 0));
    close(fd);
    must("close 2");
}

// Returns the number of bytes that a connection accepts while the peer does not read, with a limit for unsent bytes.
static long takes(int limit, const char *label)
{
    int fd = opened(AF_INET, 1);
    set_int(fd, SOL_SOCKET, SO_SNDBUF, 200000);
    if (limit)
        result(label, set_int(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, limit));
    long all = fill_up(fd, 1);
    polled(label, fd, POLLOUT);
    must("later 1 recv 1 %ld", all);
    await(fd, POLLOUT);
    polled(label, fd, POLLOUT);
    close(fd);
    must("close 1");
    return all;
}

static void limits(void)
{
    long all = takes(0, "effect-unlimited"), few = takes(4096, "effect-notsent");
    say("effect-notsent-less", "%s", all - few > 50000 ? "much" : all > few ? "little" : "no");
    // The limit is set while the connection is full.
    int fd = opened(AF_INET, 1);
    fill_up(fd, 1);
    set_int(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 4096);
    result("effect-notsent-late", send(fd, "x", 1, MSG_DONTWAIT));
    close(fd);
    must("close 1");
    for (int accepts = 0; accepts < 2; accepts++) {
        uint16_t port = accepts ? 0 : (uint16_t)must("listen 2 %s 64", all_arguments[3]);
        int from = accepts ? listener(AF_INET, 4) : -1;
        fd = accepts ? from : tcp(AF_INET);
        set_int(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, 10000);
        if (accepts) {
            must("connect 1 %s %d", here_text(AF_INET), port_of(from));
            fd = accept(from, NULL, NULL);
            close(from);
        } else {
            join(fd, peer(AF_INET, port));
            must("accept 2 1");
        }
        must("later 1 send 1 100000 5");
        // Waits until no data has arrived for half a second.
        int unread = 0;
        for (int i = 0, quiet = 0; i < 100 && quiet < 5; i++) {
            int before = unread;
            poll(NULL, 0, 100);
            ioctl(fd, FIONREAD, &unread);
            quiet = unread && unread == before ? quiet + 1 : 0;
        }
        say(accepts ? "effect-clamp-accept" : "effect-clamp-connect", "%s",
            unread > 10000 ? "beyond the clamp" : unread > 4000 ? "within the clamp" : "little");
        result("effect-clamp-all", read_all(fd, big, 100000));
        close(fd);
        must("close 1");
    }
    // A small buffer fills up before it is read.
    int from = listener(AF_INET, 4);
    set_int(from, SOL_SOCKET, SO_RCVBUF, 4096);
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    fd = accept(from, NULL, NULL);
    close(from);
    must("later 1 send 1 100000 5");
    poll(NULL, 0, 300);
    result("effect-small-buffer-all", read_all(fd, big, 100000));
    close(fd);
    must("close 1");
}

// A security option is either refused, or it prevents the connection.
static void protects(const char *label, int level, int name, const void *value, socklen_t len)
{
    uint16_t port = (uint16_t)must("listen 2 %s 64", all_arguments[3]);
    int fd = tcp(AF_INET);
    bool set = !setsockopt(fd, level, name, value, len);
    say(label, "%s", set && connects(fd, peer(AF_INET, port), 300) ? "not protected" : "protected");
    close(fd);
    must("close 2");
}

static void protected(void)
{
    protects("protect SO_BINDTODEVICE", SOL_SOCKET, SO_BINDTODEVICE, "lo", 3);
    struct sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog program = {1, &drop};
    protects("protect SO_ATTACH_FILTER", SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
    struct tcp_md5sig key = {.tcpm_keylen = 3, .tcpm_key = "key"};
    struct place to = peer(AF_INET, 0);
    memcpy(&key.tcpm_addr, &to.addr, to.len);
    protects("protect TCP_MD5SIG", IPPROTO_TCP, TCP_MD5SIG, &key, sizeof key);
    int hops = 255;
    protects("protect IP_MINTTL", IPPROTO_IP, 21, &hops, sizeof hops);
}

// An MPTCP socket falls back to TCP.
static void multipath(void)
{
    uint16_t port = (uint16_t)must("listen 2 %s 64", all_arguments[3]);
    int fd = socket(AF_INET, SOCK_STREAM, 262);
    if (fd < 0)
        fd = tcp(AF_INET);
    result("mptcp-connect", join(fd, peer(AF_INET, port)));
    must("accept 2 1");
    result("mptcp-send", send(fd, "several paths", 13, 0));
    peer_says("mptcp-peer", "recv 1 13");
    struct place from = here(AF_INET, 0);
    close(fd);
    must("close 1");
    // Binds to an address without a port.
    fd = tcp(AF_INET);
    set_int(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
    result("no-port-bind", bind_to(fd, from));
    result("no-port-connect", join(fd, peer(AF_INET, port)));
    must("accept 2 1");
    result("no-port-send", send(fd, "x", 1, 0));
    close(fd);
    must("close 2");
}

// Removing a cork sends the data that it held back.
static void cork(void)
{
    int fd = opened(AF_INET, 1);
    set_int(fd, IPPROTO_TCP, TCP_CORK, 1);
    send(fd, "held", 4, 0);
    send(fd, "back", 4, 0);
    set_int(fd, IPPROTO_TCP, TCP_CORK, 0);
    peer_says("uncorked", "recv 1 8");
    int queued = -1;
    must("settle 1");
    result("siocoutqnsd", ioctl(fd, SIOCOUTQNSD, &queued));
    say("siocoutqnsd-count", "%d", queued);
    close(fd);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    int fd = tcp(AF_INET);
    reads("new", fd);
    set_and_read("new", fd, plain, LEN(plain));
    set_and_read("new", fd, before, LEN(before));
    close(fd);
    fd = tcp(AF_INET6);
    set_and_read("new6", fd, plain6, LEN(plain6));
    close(fd);
    fd = opened(AF_INET, 1);
    reads("connected", fd);
    lengths(fd);
    structures(fd);
    buffers(fd);
    set_and_read("connected", fd, plain, LEN(plain));
    close(fd);
    fd = opened(AF_INET6, 1);
    set_and_read("connected6", fd, plain6, LEN(plain6));
    close(fd);
    fd = listener(AF_INET, 4);
    reads("listening", fd);
    result("listening-fastopen", set_int(fd, IPPROTO_TCP, TCP_FASTOPEN, 5));
    result("listening-defer", set_int(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, 1));
    close(fd);
    fd = udp(AF_INET);
    result("udp-nodelay", set_int(fd, IPPROTO_TCP, TCP_NODELAY, 1));
    result("udp-type", int_of(fd, SOL_SOCKET, SO_TYPE));
    result("udp-protocol", int_of(fd, SOL_SOCKET, SO_PROTOCOL));
    close(fd);
    cork();
    kept();
    effects();
    limits();
    protected();
    multipath();
    end();
}
