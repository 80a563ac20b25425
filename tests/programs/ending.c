// Ends of connections: half-close in both directions, EOF, resets, SIGPIPE, lingering.
#define _GNU_SOURCE
#include "common.h"

#define ALL (POLLIN | POLLOUT | POLLRDHUP | POLLPRI)

static char buffer[4096];
static volatile sig_atomic_t pipes;

static void on_pipe(int signal)
{
    (void)signal;
    pipes++;
}

static void half_close_ours(void)
{
    int fd = opened(AF_INET, 1);
    result("half-shutdown", shutdown(fd, SHUT_WR));
    polled("half-poll", fd, ALL);
    peer_says("half-peer-eof", "recv 1 1");
    result("half-send", send(fd, "x", 1, MSG_NOSIGNAL));
    result("half-shutdown-again", shutdown(fd, SHUT_WR));
    must("text 1 onemore");
    bytes("half-recv", recv(fd, buffer, 99, 0), buffer);
    must("close 1");
    await(fd, POLLIN);
    result("half-eof", recv(fd, buffer, 99, 0));
    result("half-eof-again", recv(fd, buffer, 99, 0));
    polled("half-both-poll", fd, ALL);
    result("half-both-error", int_of(fd, SOL_SOCKET, SO_ERROR));
    result("half-both-getpeername", getpeername(fd, (struct sockaddr *)buffer, &(socklen_t){16}));
    result("half-both-shutdown", shutdown(fd, SHUT_RDWR));
    close(fd);
}

static void half_close_theirs(void)
{
    int fd = opened(AF_INET, 1);
    must("text 1 last");
    must("shutdown 1");
    await(fd, POLLRDHUP);
    polled("theirs-poll", fd, ALL);
    polled("theirs-poll-without-rdhup", fd, POLLIN | POLLOUT);
    polled("theirs-poll-nothing", fd, 0);
    bytes("theirs-recv", recv(fd, buffer, 99, 0), buffer);
    polled("theirs-poll-drained", fd, ALL);
    result("theirs-eof", recv(fd, buffer, 99, 0));
    result("theirs-eof-peek", recv(fd, buffer, 99, MSG_PEEK));
    result("theirs-eof-dontwait", recv(fd, buffer, 99, MSG_DONTWAIT));
    result("theirs-eof-read", read(fd, buffer, 99));
    int there = -1;
    ioctl(fd, FIONREAD, &there);
    say("theirs-eof-fionread", "%d", there);
    result("theirs-send", send(fd, "goes on", 7, 0));
    peer_says("theirs-peer-recv", "recv 1 7");
    result("theirs-shutdown", shutdown(fd, SHUT_WR));
    peer_says("theirs-peer-eof", "recv 1 1");
    polled("theirs-both-poll", fd, ALL);
    must("close 1");
    close(fd);

    fd = opened(AF_INET, 1);
    must("text 1 abc");
    must("shutdown 1");
    await(fd, POLLRDHUP);
    bytes("waitall-eof", recv(fd, buffer, 8, MSG_WAITALL), buffer);
    result("waitall-eof-again", recv(fd, buffer, 8, MSG_WAITALL));
    close(fd);
}

static void shutdown_read(void)
{
    int fd = opened(AF_INET, 1);
    result("rd-shutdown", shutdown(fd, SHUT_RD));
    polled("rd-poll", fd, ALL);
    result("rd-recv", recv(fd, buffer, 9, 0));
    must("text 1 after");
    // Linux delivers data that arrives after SHUT_RD.
    bytes("rd-recv-later", recv(fd, buffer, 9, 0), buffer);
    result("rd-send", send(fd, "out", 3, 0));
    peer_says("rd-peer", "recv 1 3");
    result("rdwr-shutdown", shutdown(fd, SHUT_RDWR));
    polled("rdwr-poll", fd, ALL);
    result("rdwr-recv", recv(fd, buffer, 9, 0));
    result("rdwr-send", send(fd, "x", 1, MSG_NOSIGNAL));
    peer_says("rdwr-peer", "recv 1 1");
    close(fd);
}

// The peer closes with unread data, or with linger 0.
static void reset(const char *name, bool unread, bool data)
{
    prefix(name);
    int fd = opened(AF_INET, 1);
    if (data) {
        must("text 1 data");
        await(fd, POLLIN);
    }
    if (unread) {
        result("send", send(fd, "unread", 6, 0));
        must("wait 1 6");
    }
    must(unread ? "close 1" : "rst 1");
    await(fd, POLLRDHUP);
    polled("poll", fd, ALL);
    polled("poll-nothing", fd, 0);
    int there = -1;
    result("fionread", ioctl(fd, FIONREAD, &there));
    say("fionread-count", "%d", there);
    long got = recv(fd, buffer, 99, 0);
    bytes("recv", got, buffer);
    result("recv-again", recv(fd, buffer, 99, 0));
    polled("poll-after", fd, ALL);
    result("error-after", int_of(fd, SOL_SOCKET, SO_ERROR));
    result("send-after", send(fd, "x", 1, MSG_NOSIGNAL));
    result("getpeername", getpeername(fd, (struct sockaddr *)buffer, &(socklen_t){16}));
    result("shutdown", shutdown(fd, SHUT_WR));
    result("connect", join(fd, peer(AF_INET, 1)));
    close(fd);
    prefix("");
}

// The first call after a reset returns and clears the error, whichever call it is.
static void reset_found_by(void)
{
    int fd = opened(AF_INET, 1);
    must("rst 1");
    await(fd, POLLRDHUP);
    pipes = 0;
    result("reset-first-send", send(fd, "x", 1, 0));
    say("reset-first-send-signals", "%d", (int)pipes);
    result("reset-second-send", send(fd, "x", 1, 0));
    say("reset-second-send-signals", "%d", (int)pipes);
    result("reset-send-recv", recv(fd, buffer, 9, 0));
    close(fd);

    fd = opened(AF_INET, 1);
    must("rst 1");
    await(fd, POLLRDHUP);
    say("reset-first-error", "%s", error_name(int_of(fd, SOL_SOCKET, SO_ERROR)));
    polled("reset-error-poll", fd, ALL);
    result("reset-error-recv", recv(fd, buffer, 9, 0));
    result("reset-error-send", send(fd, "x", 1, MSG_NOSIGNAL));
    close(fd);

    fd = opened(AF_INET, 1);
    must("later 50 rst 1");
    result("reset-while-blocked", recv(fd, buffer, 9, 0));
    result("reset-while-blocked-again", recv(fd, buffer, 9, 0));
    close(fd);

    fd = opened(AF_INET, 1);
    must("later 50 rst 1");
    result("reset-peek", recv(fd, buffer, 9, MSG_PEEK));
    result("reset-peek-recv", recv(fd, buffer, 9, 0));
    close(fd);
}

static void broken_pipe(void)
{
    int fd = opened(AF_INET, 1);
    shutdown(fd, SHUT_WR);
    pipes = 0;
    result("pipe-send", send(fd, "x", 1, 0));
    say("pipe-send-signals", "%d", (int)pipes);
    result("pipe-nosignal", send(fd, "x", 1, MSG_NOSIGNAL));
    say("pipe-nosignal-signals", "%d", (int)pipes);
    result("pipe-write", write(fd, "x", 1));
    say("pipe-write-signals", "%d", (int)pipes);
    struct iovec one = {"x", 1};
    result("pipe-writev", writev(fd, &one, 1));
    say("pipe-writev-signals", "%d", (int)pipes);
    result("pipe-send-zero", send(fd, "", 0, MSG_NOSIGNAL));
    signal(SIGPIPE, SIG_IGN);
    result("pipe-ignored", write(fd, "x", 1));
    signal(SIGPIPE, on_pipe);
    close(fd);

    // The peer has closed: the first write succeeds, and the peer answers with a reset.
    fd = opened(AF_INET, 1);
    must("close 1");
    await(fd, POLLRDHUP);
    result("closed-first-write", send(fd, "x", 1, MSG_NOSIGNAL));
    await(fd, POLLERR);
    polled("closed-poll", fd, ALL);
    result("closed-recv", recv(fd, buffer, 9, 0));
    result("closed-second-write", send(fd, "x", 1, MSG_NOSIGNAL));
    close(fd);

    fd = opened(AF_INET, 1);
    must("close 1");
    await(fd, POLLRDHUP);
    send(fd, "x", 1, MSG_NOSIGNAL);
    await(fd, POLLERR);
    result("closed-write-first", send(fd, "x", 1, MSG_NOSIGNAL));
    result("closed-write-recv", recv(fd, buffer, 9, 0));
    close(fd);
}

static void ours(void)
{
    int fd = opened(AF_INET, 1);
    must("text 1 unread");
    await(fd, POLLIN);
    result("close-unread", close(fd));
    peer_says("close-unread-peer", "recv 1 1");

    // Data that a server sends before it closes arrives before the reset, although the server has not read its input.
    static uint8_t answer[900];
    for (int lingers = 0; lingers < 2; lingers++) {
        fd = opened(AF_INET, 1);
        must("text 1 unread");
        await(fd, POLLIN);
        struct linger zero = {.l_onoff = 1};
        if (lingers)
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &zero, sizeof zero);
        fill(answer, sizeof answer, 5, 0);
        result("answered-unread-send", send(fd, answer, sizeof answer, 0));
        result("answered-unread-close", close(fd));
        peer_says("answered-unread-peer", "recv 1 900");
        peer_says("answered-unread-reset", "recv 1 1");
    }

    fd = opened(AF_INET, 1);
    result("close-read", close(fd));
    peer_says("close-read-peer", "recv 1 1");
    must("text 1 toolate");
    peer_says("close-read-peer-later", "recv 1 1");
    peer_says("close-read-peer-send", "text 1 again");

    fd = opened(AF_INET, 1);
    struct linger linger = {.l_onoff = 1};
    result("linger-zero-set", setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    result("linger-zero-close", close(fd));
    peer_says("linger-zero-peer", "recv 1 1");

    fd = opened(AF_INET, 1);
    linger.l_linger = 5;
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    send(fd, "lingers", 7, 0);
    result("linger-close", close(fd));
    peer_says("linger-peer", "drain 1");

    fd = opened(AF_INET, 1);
    static uint8_t much[300000];
    fill(much, sizeof much, 4, 0);
    amount("close-after-write", write(fd, much, sizeof much), sizeof much);
    result("close-after-write-close", close(fd));
    // All written data arrives, although the socket is closed.
    peer_says("close-after-write-peer", "drain 1");

    fd = opened(AF_INET, 1);
    must("text 1 unread");
    await(fd, POLLIN);
    shutdown(fd, SHUT_WR);
    peer_says("shutdown-unread-peer", "recv 1 1");
    result("shutdown-unread-close", close(fd));
}

static void abort_by_unspec(void)
{
    int fd = opened(AF_INET, 1);
    must("text 1 lost");
    await(fd, POLLIN);
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    result("unspec-connect", connect(fd, &none, sizeof none));
    result("unspec-recv", recv(fd, buffer, 9, 0));
    peer_says("unspec-peer", "recv 1 1");
    close(fd);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    signal(SIGPIPE, on_pipe);
    half_close_ours();
    half_close_theirs();
    shutdown_read();
    reset("reset-", false, false);
    reset("reset-data-", false, true);
    reset("reset-unread-", true, false);
    reset("reset-unread-data-", true, true);
    reset_found_by();
    broken_pipe();
    ours();
    abort_by_unspec();
    end();
}
