// Sending and receiving on a connection: every call and flag, blocking and non-blocking calls, timeouts, full buffers.
#define _GNU_SOURCE
#include "common.h"

#include <sys/epoll.h>
#include <sys/select.h>

#include <sys/syscall.h>

static char buffer[65536];
// Volatile, so that the compiler does not warn about intentionally wrong values.
static volatile int too_many = 1025, negative = -1;

static void calls(int family, int fd)
{
    prefix(family == AF_INET ? "v4-" : "v6-");
    result("send", send(fd, "send", 4, 0));
    peer_says("send-peer", "recv 1 4");
    result("write", write(fd, "write", 5));
    peer_says("write-peer", "recv 1 5");
    struct iovec parts[] = {{"one", 3}, {"", 0}, {"three", 5}};
    result("writev", writev(fd, parts, 3));
    peer_says("writev-peer", "recv 1 8");
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    result("sendmsg", sendmsg(fd, &message, 0));
    peer_says("sendmsg-peer", "recv 1 8");
    struct place to = peer(family, 9);
    // The address of a connected stream does not matter.
    result("sendto", sendto(fd, "sendto", 6, 0, (struct sockaddr *)&to.addr, to.len));
    peer_says("sendto-peer", "recv 1 6");

    must("text 1 recv");
    bytes("recv", recv(fd, buffer, sizeof buffer, 0), buffer);
    must("text 1 read");
    bytes("read", read(fd, buffer, sizeof buffer), buffer);
    must("text 1 readvreadv");
    char a[3], b[20];
    struct iovec rooms[] = {{a, 3}, {NULL, 0}, {b, 20}};
    long got = result("readv", readv(fd, rooms, 3));
    say("readv-parts", "\"%.3s\" \"%.*s\"", a, (int)(got - 3), b);
    must("text 1 recvmsg");
    struct sockaddr_storage from;
    memset(&from, 0xee, sizeof from);
    char control[64];
    message = (struct msghdr){.msg_name = &from, .msg_namelen = sizeof from, .msg_iov = rooms, .msg_iovlen = 3,
                              .msg_control = control, .msg_controllen = sizeof control, .msg_flags = -1};
    result("recvmsg", recvmsg(fd, &message, 0));
    say("recvmsg-header", "namelen %u controllen %zu flags %d", message.msg_namelen, message.msg_controllen,
        message.msg_flags);
    must("text 1 recvfrom");
    socklen_t len = sizeof from;
    bytes("recvfrom", recvfrom(fd, buffer, sizeof buffer, 0, (struct sockaddr *)&from, &len), buffer);
    say("recvfrom-length", "%u", len);
    prefix("");
}

static void flags(int fd)
{
    must("text 1 helloworld");
    bytes("peek", recv(fd, buffer, 5, MSG_PEEK), buffer);
    bytes("peek-more", recv(fd, buffer, 100, MSG_PEEK), buffer);
    int there = -1;
    result("fionread", ioctl(fd, FIONREAD, &there));
    say("fionread-count", "%d", there);
    bytes("part", recv(fd, buffer, 5, 0), buffer);
    ioctl(fd, FIONREAD, &there);
    say("fionread-part", "%d", there);
    memset(buffer, '-', 8);
    // TCP counts the dropped bytes and copies nothing.
    result("trunc", recv(fd, buffer, 3, MSG_TRUNC));
    say("trunc-untouched", "%.3s", buffer);
    bytes("trunc-rest", recv(fd, buffer, 100, 0), buffer);
    result("dontwait", recv(fd, buffer, 100, MSG_DONTWAIT));
    say("dontwait-still-blocking", "%d", (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
    result("peek-dontwait", recv(fd, buffer, 100, MSG_PEEK | MSG_DONTWAIT));
    result("recv-zero-dontwait", recv(fd, buffer, 0, MSG_DONTWAIT));
    result("send-zero", send(fd, buffer, 0, 0));
    result("recv-oob", recv(fd, buffer, 1, MSG_OOB));
    result("recv-errqueue", recv(fd, buffer, 1, MSG_ERRQUEUE | MSG_DONTWAIT));

    must("text 1 abc");
    must("later 50 text 1 defgh");
    bytes("waitall", recv(fd, buffer, 8, MSG_WAITALL), buffer);
    must("text 1 xy");
    bytes("waitall-dontwait", recv(fd, buffer, 8, MSG_WAITALL | MSG_DONTWAIT), buffer);
    must("text 1 xyz");
    set_timeout(fd, SO_RCVTIMEO, 100);
    bytes("waitall-timeout", recv(fd, buffer, 8, MSG_WAITALL), buffer);
    set_timeout(fd, SO_RCVTIMEO, 0);
    must("text 1 peekall");
    bytes("peek-waitall", recv(fd, buffer, 7, MSG_PEEK | MSG_WAITALL), buffer);
    bytes("peek-waitall-rest", recv(fd, buffer, 7, 0), buffer);
    must("text 1 zero");
    result("recv-zero-with-data", recv(fd, buffer, 0, 0));
    bytes("recv-zero-after", recv(fd, buffer, 9, 0), buffer);
    result("send-more", send(fd, "more", 4, MSG_MORE));
    result("send-more-end", send(fd, "end", 3, 0));
    peer_says("send-more-peer", "recv 1 7");
}

// An urgent byte between other bytes.
static void urgent(int fd, bool inlined)
{
    prefix(inlined ? "inline-" : "urgent-");
    result("set", set_int(fd, SOL_SOCKET, SO_OOBINLINE, inlined));
    must("text 1 abc");
    must("urgent 1");
    must("text 1 def");
    result("before", sockatmark(fd));
    bytes("recv", recv(fd, buffer, 100, 0), buffer);
    result("mark", sockatmark(fd));
    bytes("rest", recv(fd, buffer, 100, 0), buffer);
    result("behind", sockatmark(fd));
    result("empty", recv(fd, buffer, 100, MSG_DONTWAIT));
    prefix("");
}

static volatile int urgent_signals;

static void on_urgent(int signal)
{
    (void)signal;
    urgent_signals++;
}

// Prints the results of poll, epoll and select.
static void all_show(const char *name, int fd, int set)
{
    char label[40];
    polled(name, fd, POLLIN | POLLOUT | POLLPRI | POLLRDHUP);
    struct epoll_event event;
    snprintf(label, sizeof label, "%s-epoll", name);
    say(label, "%s", epoll_wait(set, &event, 1, 0) == 1 ? bits(event.events) : "none");
    fd_set sets[2];
    for (int i = 0; i < 2; i++) {
        FD_ZERO(&sets[i]);
        FD_SET(fd, &sets[i]);
    }
    select(fd + 1, &sets[0], NULL, &sets[1], &(struct timeval){0, 0});
    snprintf(label, sizeof label, "%s-select", name);
    say(label, "%s%s", FD_ISSET(fd, &sets[0]) ? "read" : "-", FD_ISSET(fd, &sets[1]) ? " exception" : "");
}

// An urgent byte is received out of band.
static void out_of_band(void)
{
    prefix("oob-");
    int fd = opened(AF_INET, 7), set = epoll_create1(EPOLL_CLOEXEC), there = -1;
    struct epoll_event event = {.events = EPOLLPRI};
    epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
    signal(SIGURG, on_urgent);
    result("own", fcntl(fd, F_SETOWN, getpid()));
    result("none", recv(fd, buffer, 1, MSG_OOB));
    all_show("idle", fd, set);
    must("text 7 abc");
    must("urgent 7");
    await(fd, POLLPRI);
    all_show("there", fd, set);
    say("signals", "%d", urgent_signals);
    ioctl(fd, FIONREAD, &there);
    say("fionread", "%d", there);
    bytes("peek", recv(fd, buffer, 1, MSG_OOB | MSG_PEEK), buffer);
    result("no-room", recv(fd, buffer, 0, MSG_OOB | MSG_PEEK));
    all_show("peeked", fd, set);
    struct iovec part = {buffer, 10};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    bytes("byte", recvmsg(fd, &message, MSG_OOB), buffer);
    say("flags", "%s", message.msg_flags & MSG_OOB ? "OOB" : "-");
    result("again", recv(fd, buffer, 1, MSG_OOB));
    all_show("taken", fd, set);
    result("before", sockatmark(fd));
    bytes("recv", recv(fd, buffer, 100, 0), buffer);
    result("mark", sockatmark(fd));
    all_show("marked", fd, set);
    ioctl(fd, FIONREAD, &there);
    say("mark-fionread", "%d", there);
    must("text 7 def");
    await(fd, POLLIN);
    all_show("more", fd, set);
    bytes("rest-peek", recv(fd, buffer, 100, MSG_PEEK), buffer);
    result("peeked-mark", sockatmark(fd));
    bytes("rest", recv(fd, buffer, 100, 0), buffer);
    result("behind", sockatmark(fd));
    // An urgent byte without data, which a read skips.
    must("urgent 7");
    await(fd, POLLPRI);
    all_show("alone", fd, set);
    result("alone-mark", sockatmark(fd));
    result("alone-recv", recv(fd, buffer, 100, MSG_DONTWAIT));
    all_show("alone-passed", fd, set);
    result("alone-byte", recv(fd, buffer, 1, MSG_OOB));
    // A call waits for data behind the byte.
    must("urgent 7");
    await(fd, POLLPRI);
    must("later 50 text 7 ghi");
    bytes("waits", recv(fd, buffer, 100, 0), buffer);
    // All bytes are part of the stream.
    set_int(fd, SOL_SOCKET, SO_OOBINLINE, 1);
    must("urgent 7");
    await(fd, POLLPRI);
    all_show("inline", fd, set);
    result("inline-byte", recv(fd, buffer, 1, MSG_OOB));
    bytes("inline-recv", recv(fd, buffer, 100, 0), buffer);
    all_show("inline-passed", fd, set);
    set_int(fd, SOL_SOCKET, SO_OOBINLINE, 0);
    // Two bytes: the newer one is urgent.
    must("text 7 m");
    must("urgent 7");
    must("urgent 7");
    must("text 7 jkl");
    result("two-urgent", recv(fd, buffer, 1, MSG_OOB));
    bytes("two-first", recv(fd, buffer, 100, 0), buffer);
    bytes("two-rest", recv(fd, buffer, 100, 0), buffer);
    // The urgent byte remains after the peer's FIN.
    must("urgent 7");
    must("shutdown 7");
    await(fd, POLLRDHUP);
    all_show("ended", fd, set);
    bytes("ended-byte", recv(fd, buffer, 1, MSG_OOB), buffer);
    result("ended-again", recv(fd, buffer, 1, MSG_OOB));
    result("ended-recv", recv(fd, buffer, 100, 0));
    close(fd);
    close(set);
    prefix("");
}

// Sends urgent bytes.
static void sends_urgent(void)
{
    prefix("urgent-send-");
    int fd = opened(AF_INET, 7);
    result("three", send(fd, "xyz", 3, MSG_OOB));
    peer_says("three-recv", "recv 7 2");
    peer_says("three-byte", "oob 7");
    result("none", send(fd, "", 0, MSG_OOB));
    result("more", send(fd, "more", 4, 0));
    peer_says("more-recv", "recv 7 4");
    // Nothing delays the data.
    set_int(fd, IPPROTO_TCP, TCP_NODELAY, 0);
    result("first", send(fd, "first", 5, 0));
    result("one", send(fd, "A", 1, MSG_OOB));
    peer_says("one-byte", "oob 7");
    peer_says("one-recv", "recv 7 5");
    memset(buffer, 'b', 5000);
    result("long", send(fd, buffer, 5000, MSG_OOB));
    peer_says("long-recv", "recv 7 4999");
    peer_says("long-byte", "oob 7");
    result("datagram", send(udp(AF_INET), "x", 1, MSG_OOB));
    close(fd);
    prefix("");
}

static void vectors(int fd)
{
    struct iovec one = {"pwritev2", 8};
    result("pwritev2", pwritev2(fd, &one, 1, -1, 0));
    peer_says("pwritev2-peer", "recv 1 8");
    result("pwritev2-offset", pwritev2(fd, &one, 1, 0, 0));
    result("pwrite", pwrite(fd, "x", 1, 0));
    must("text 1 preadv2");
    one = (struct iovec){buffer, 100};
    result("pread", pread(fd, buffer, 1, 0));
    result("lseek", lseek(fd, 0, SEEK_CUR));
    bytes("preadv2", preadv2(fd, &one, 1, -1, 0), buffer);
    result("preadv2-nowait", preadv2(fd, &one, 1, -1, RWF_NOWAIT));
    result("readv-none", readv(fd, &one, 0));
    result("readv-negative", readv(fd, &one, negative));
    result("writev-too-many", writev(fd, &one, too_many));
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = (size_t)too_many};
    result("sendmsg-too-many", sendmsg(fd, &message, 0));

    struct iovec out[3] = {{"first", 5}, {"second", 6}, {"third", 5}};
    struct mmsghdr many[3] = {0};
    for (int i = 0; i < 3; i++)
        many[i].msg_hdr = (struct msghdr){.msg_iov = &out[i], .msg_iovlen = 1};
    result("sendmmsg", sendmmsg(fd, many, 3, 0));
    say("sendmmsg-lengths", "%u %u %u", many[0].msg_len, many[1].msg_len, many[2].msg_len);
    peer_says("sendmmsg-peer", "recv 1 16");
    must("text 1 abcdefgh");
    char rooms[3][3];
    for (int i = 0; i < 3; i++) {
        out[i] = (struct iovec){rooms[i], 3};
        many[i].msg_len = 77;
    }
    result("recvmmsg", recvmmsg(fd, many, 3, 0, NULL));
    say("recvmmsg-lengths", "%u %u %u", many[0].msg_len, many[1].msg_len, many[2].msg_len);
    say("recvmmsg-bytes", "%.3s %.3s %.2s", rooms[0], rooms[1], rooms[2]);
    must("text 1 abcd");
    result("recvmmsg-waitforone", recvmmsg(fd, many, 3, MSG_WAITFORONE, NULL));
    result("recvmmsg-dontwait", recvmmsg(fd, many, 3, MSG_DONTWAIT, NULL));
}

// Prints the error of sending one more byte. A buffer that was full may grow, so bytes that it accepts are added to
// `sent`.
static void refused(const char *label, int fd, long *sent, int flags)
{
    ssize_t done;
    do {
        uint8_t one;
        fill(&one, 1, 7, (size_t)*sent);
        done = flags ? send(fd, &one, 1, flags) : write(fd, &one, 1);
        if (done > 0)
            *sent += done;
    } while (done > 0);
    result(label, done);
}

static void pressure(void)
{
    int fd = opened(AF_INET, 2);
    must("send 2 1 1");
    await(fd, POLLIN);
    polled("room-poll", fd, POLLIN | POLLOUT);
    long sent = fill_up(fd, 7);
    say("full-took-some", "%s", sent > 60000 ? "yes" : "no");
    refused("full-dontwait", fd, &sent, MSG_DONTWAIT);
    polled("full-poll", fd, POLLIN | POLLOUT);
    set_timeout(fd, SO_SNDTIMEO, 100);
    refused("full-timeout", fd, &sent, 0);
    set_timeout(fd, SO_SNDTIMEO, 0);
    set_nonblocking(fd, true);
    refused("full-nonblocking", fd, &sent, 0);
    set_nonblocking(fd, false);
    uint32_t sum = NO_BYTES;
    for (long at = 0; at < sent; at += 60000) {
        static uint8_t part[60000];
        size_t now = (size_t)(sent - at < 60000 ? sent - at : 60000);
        fill(part, now, 7, (size_t)at);
        sum = checksum(sum, part, now);
    }
    char wanted[64];
    snprintf(wanted, sizeof wanted, "ok %ld %08x", sent, sum);
    say("full-peer-gets-all", "%s", strcmp(ask("recv 2 %ld", sent), wanted) ? "no" : "yes");
    await(fd, POLLOUT);
    polled("drained-poll", fd, POLLOUT);
    result("drained-send", send(fd, "room", 4, MSG_DONTWAIT));
    peer_says("drained-peer", "recv 2 4");

    // A blocking write of more than fits sends everything once the peer reads.
    static uint8_t much[16000000];
    fill(much, sizeof much, 3, 0);
    must("later 20 recv 2 16000000");
    amount("large-write", write(fd, much, sizeof much), sizeof much);
    set_timeout(fd, SO_SNDTIMEO, 200);
    amount("large-write-timeout", write(fd, much, sizeof much), sizeof much);
    close(fd);

    fd = opened(AF_INET, 3);
    set_nonblocking(fd, true);
    amount("large-write-nonblocking", write(fd, much, sizeof much), sizeof much);
    close(fd);
    must("close 3");

    fd = opened(AF_INET, 3);
    must("later 0 send 3 16000000 5");
    memset(much, 0, sizeof much);
    amount("large-read", recv(fd, much, sizeof much, MSG_WAITALL), sizeof much);
    say("large-read-sum", "%08x", checksum(NO_BYTES, much, sizeof much));
    close(fd);
}

static void timeouts(int fd)
{
    set_timeout(fd, SO_RCVTIMEO, 50);
    result("recv-timeout", recv(fd, buffer, 9, 0));
    result("read-timeout", read(fd, buffer, 9));
    struct timeval time = {0};
    socklen_t len = sizeof time;
    result("timeout-get", getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, &len));
    // The kernel rounds to clock ticks of up to 10 ms.
    bool near = time.tv_sec == 0 && time.tv_usec >= 50000 && time.tv_usec <= 60000;
    say("timeout-value", "%s length %u", near ? "50 ms" : "?", len);
    set_timeout(fd, SO_RCVTIMEO, 0);
    must("later 50 text 1 intime");
    bytes("recv-blocks", recv(fd, buffer, 9, 0), buffer);
    set_timeout(fd, SO_RCVTIMEO, 5000);
    must("later 50 text 1 intime");
    bytes("recv-before-timeout", recv(fd, buffer, 9, 0), buffer);
    set_timeout(fd, SO_RCVTIMEO, 0);
    set_nonblocking(fd, true);
    result("nonblocking-recv", recv(fd, buffer, 9, 0));
    result("nonblocking-read", read(fd, buffer, 9));
    result("nonblocking-waitall", recv(fd, buffer, 9, MSG_WAITALL));
    set_nonblocking(fd, false);
}

static void bad_arguments(int fd)
{
    result("recv-bad-descriptor", recv(199, buffer, 1, 0));
    result("read-bad-descriptor", read(199, buffer, 1));
    int file = file_of(1, 1);
    result("recv-file", recv(file, buffer, 1, 0));
    result("send-file", send(file, buffer, 1, 0));
    result("shutdown-file", shutdown(file, SHUT_RD));
    result("shutdown-wrong", shutdown(fd, 7));
    result("getpeername-file", getpeername(file, (struct sockaddr *)buffer, &(socklen_t){16}));
    close(file);
    result("ioctl-unknown", ioctl(fd, 0x12345, buffer));
    int mark = sockatmark(fd);
    result("sockatmark", mark);
    must("text 1 still");
    bytes("still-works", recv(fd, buffer, 9, 0), buffer);
}

// The same calls by system call number, as language runtimes make them.
static void by_number(void)
{
    int fd = opened(AF_INET, 1);
    result("number-write", syscall(SYS_write, fd, "write", 5));
    result("number-sendto", syscall(SYS_sendto, fd, "sendto", 6, 0, NULL, 0));
    peer_says("number-peer", "recv 1 11");
    must("text 1 readrecvfrom");
    bytes("number-read", syscall(SYS_read, fd, buffer, 4), buffer);
    bytes("number-recvfrom", syscall(SYS_recvfrom, fd, buffer, 99, MSG_DONTWAIT, NULL, NULL), buffer);
    result("number-recvfrom-empty", syscall(SYS_recvfrom, fd, buffer, 99, MSG_DONTWAIT, NULL, NULL));
    result("number-shutdown", syscall(SYS_shutdown, fd, SHUT_WR));
    peer_says("number-peer-eof", "recv 1 1");
    result("number-close", syscall(SYS_close, fd));
    result("number-close-again", syscall(SYS_close, fd));
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    int six = accepted(AF_INET6, 1);
    calls(AF_INET6, six);
    close(six);
    int fd = opened(AF_INET, 1);
    calls(AF_INET, fd);
    flags(fd);
    urgent(fd, false);
    urgent(fd, true);
    out_of_band();
    sends_urgent();
    vectors(fd);
    timeouts(fd);
    bad_arguments(fd);
    pressure();
    by_number();
    end();
}
