// Connections and listeners that several processes share: fork, and processes that are killed.
#define _GNU_SOURCE
#include "common.h"

#include <sys/epoll.h>

static char buffer[4096];

static void shared(void)
{
    int fd = opened(AF_INET, 1);
    must("text 1 childparent");
    pid_t child = forked();
    if (!child) {
        bytes("shared-child-recv", recv(fd, buffer, 5, 0), buffer);
        result("shared-child-send", send(fd, "child", 5, 0));
        _exit(0);
    }
    reap("shared-child", child);
    bytes("shared-parent-recv", recv(fd, buffer, 99, 0), buffer);
    result("shared-parent-send", send(fd, "parent", 6, 0));
    peer_says("shared-peer", "recv 1 11");
    must("text 1 again");
    bytes("shared-parent-again", recv(fd, buffer, 99, 0), buffer);

    child = forked();
    if (!child) {
        close(fd);
        _exit(0);
    }
    reap("child-closes", child);
    result("child-closes-parent-send", send(fd, "open", 4, 0));
    peer_says("child-closes-peer", "recv 1 4");

    // The parent closes the connection and the child continues, as in a server that forks for each connection.
    int gate[2];
    if (pipe(gate))
        broken("pipe");
    child = forked();
    if (!child) {
        close(gate[1]);
        read_all(gate[0], buffer, 1);
        long sent = send(fd, "alone", 5, 0);
        // When this returns, the parent has printed its line.
        long got = recv(fd, buffer, 99, 0);
        result("parent-closes-child-send", sent);
        bytes("parent-closes-child-recv", got, buffer);
        _exit(0);
    }
    close(fd);
    close(gate[0]);
    close(gate[1]);
    must("wait 1 5");
    peer_says("parent-closes-peer", "recv 1 5");
    must("text 1 answer");
    reap("parent-closes-child", child);
    peer_says("parent-closes-peer-eof", "recv 1 1");

    fd = opened(AF_INET, 1);
    child = forked();
    if (!child) {
        shutdown(fd, SHUT_WR);
        _exit(0);
    }
    reap("child-shuts-down", child);
    // shutdown applies to the connection, not to the descriptor.
    peer_says("child-shuts-down-peer", "recv 1 1");
    result("child-shuts-down-parent-send", send(fd, "x", 1, MSG_NOSIGNAL));
    close(fd);

    // A child's sockets belong only to the child.
    child = forked();
    if (!child) {
        fd = opened(AF_INET, 2);
        result("child-makes-send", send(fd, "new", 3, 0));
        peer_says("child-makes-peer", "recv 2 3");
        _exit(0);
    }
    reap("child-makes", child);
    peer_says("child-makes-peer-eof", "recv 2 1");
}

// Parent and child write and read at the same time. No bytes are lost or duplicated.
static void at_once(void)
{
    int fd = opened(AF_INET, 1);
    static uint8_t record[100];
    pid_t children[3];
    for (int i = 0; i < 3; i++) {
        children[i] = forked();
        if (!children[i]) {
            memset(record, 'a' + i, sizeof record);
            for (int j = 0; j < 100; j++)
                if (send(fd, record, sizeof record, 0) != sizeof record)
                    _exit(1);
            _exit(0);
        }
    }
    peer_says("at-once-records", "records 1 300 100");
    for (int i = 0; i < 3; i++)
        reap("at-once-writer", children[i]);
    int counts[2];
    if (pipe(counts))
        broken("pipe");
    for (int i = 0; i < 3; i++) {
        children[i] = forked();
        if (!children[i]) {
            int got = 0;
            ssize_t more;
            while ((more = recv(fd, buffer, 100, 0)) > 0)
                got += (int)more;
            _exit(write(counts[1], &got, sizeof got) == sizeof got ? 0 : 1);
        }
    }
    must("send 1 100000 5");
    must("shutdown 1");
    int sum = 0, got;
    for (int i = 0; i < 3; i++) {
        reap("at-once-reader", children[i]);
        read_all(counts[0], &got, sizeof got);
        sum += got;
    }
    result("at-once-read", sum);
    close(counts[0]);
    close(counts[1]);
    close(fd);
}

static void kill_in(const char *name, bool sends, bool listens)
{
    prefix(name);
    int from = listens ? listener(AF_INET, 4) : -1;
    int fd = opened(AF_INET, 1);
    if (sends)
        fill_up(fd, 1);
    pid_t child = forked();
    if (!child) {
        if (listens)
            accept(from, NULL, NULL);
        else if (sends)
            send(fd, buffer, sizeof buffer, 0);
        else
            recv(fd, buffer, sizeof buffer, 0);
        _exit(0);
    }
    await_sleep(child, child);
    kill(child, SIGKILL);
    reap("child", child);
    if (listens) {
        must("connect 2 %s %d", here_text(AF_INET), port_of(from));
        int next = accept(from, NULL, NULL);
        must("text 2 taken");
        bytes("accept", recv(next, buffer, 99, 0), buffer);
        close(next);
        close(from);
    }
    must("text 1 survives");
    bytes("recv", recv(fd, buffer, 99, 0), buffer);
    if (!sends) {
        result("send", send(fd, "too", 3, 0));
        peer_says("peer", "recv 1 3");
    }
    close(fd);
    prefix("");
}

static void last_holder_killed(void)
{
    for (int unread = 0; unread < 2; unread++) {
        prefix(unread ? "killed-unread-" : "killed-");
        int fd = opened(AF_INET, 1);
        pid_t child = forked();
        if (!child) {
            pause();
            _exit(0);
        }
        close(fd);
        if (unread)
            must("text 1 unread");
        kill(child, SIGKILL);
        reap("child", child);
        peer_says("peer", "recv 1 1");
    }
    prefix("killed-listener-");
    int from = listener(AF_INET, 4);
    uint16_t port = port_of(from);
    must("connect 1 %s %d", here_text(AF_INET), port);
    pid_t child = forked();
    if (!child) {
        pause();
        _exit(0);
    }
    close(from);
    kill(child, SIGKILL);
    reap("child", child);
    peer_says("waiting-peer", "recv 1 1");
    peer_says("new-peer", "connect 2 %s %d", here_text(AF_INET), port);
    prefix("");
}

// A socket is shared by both processes, whichever of them connects it or makes it listen.
static void before_it_is_decided(void)
{
    uint16_t port = (uint16_t)must("listen 2 %s 8", all_arguments[3]);
    int fd = tcp(AF_INET);
    pid_t child = forked();
    if (!child) {
        result("child-connects", join(fd, peer(AF_INET, port)));
        _exit(0);
    }
    reap("child-connects-exit", child);
    must("accept 2 1");
    struct place name = {.len = sizeof name.addr};
    result("child-connects-getpeername", getpeername(fd, (struct sockaddr *)&name.addr, &name.len));
    result("child-connects-parent-send", send(fd, "parent", 6, MSG_NOSIGNAL));
    close(fd);
    peer_says("child-connects-peer", "drain 1");

    fd = tcp(AF_INET);
    bind_to(fd, here(AF_INET, 0));
    port = port_of(fd);
    child = forked();
    if (!child) {
        result("child-listens", listen(fd, 4));
        _exit(0);
    }
    reap("child-listens-exit", child);
    must("start 1 %s %d", here_text(AF_INET), port);
    peer_says("child-listens-peer", "up 1 2000");
    result("child-listens-acceptconn", int_of(fd, SOL_SOCKET, SO_ACCEPTCONN));
    close(fd);

    fd = tcp(AF_INET);
    child = forked();
    if (!child) {
        set_int(fd, IPPROTO_TCP, TCP_NODELAY, 1);
        set_nonblocking(fd, true);
        _exit(0);
    }
    reap("child-sets-exit", child);
    result("child-sets-option", int_of(fd, IPPROTO_TCP, TCP_NODELAY));
    result("child-sets-nonblock", (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
    close(fd);
}

// A set that was created before the child, and sockets that were created afterwards.
static void sets(void)
{
    int fd = opened(AF_INET, 1);
    int set = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = 7};
    epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
    pid_t child = forked();
    if (!child) {
        struct epoll_event found = {0};
        int count = epoll_wait(set, &found, 1, TIMEOUT);
        say("set-child", "%d number %u %s", count, found.data.u32, bits(found.events));
        bytes("set-child-recv", recv(fd, buffer, 99, MSG_DONTWAIT), buffer);
        _exit(0);
    }
    must("text 1 abc");
    reap("set-child-exit", child);
    result("set-parent", epoll_wait(set, &event, 1, 0));
    must("text 1 def");
    result("set-parent-data", epoll_wait(set, &event, 1, TIMEOUT));
    bytes("set-parent-recv", recv(fd, buffer, 99, MSG_DONTWAIT), buffer);
    // A socket stays registered while any process holds it.
    child = forked();
    if (!child) {
        must("text 1 ghi");
        _exit(0);
    }
    close(fd);
    reap("set-closed-exit", child);
    result("set-closed-by-all", epoll_wait(set, &event, 1, 50));
    close(set);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    shared();
    at_once();
    kill_in("kill-recv-", false, false);
    kill_in("kill-send-", true, false);
    kill_in("kill-accept-", false, true);
    last_holder_killed();
    before_it_is_decided();
    sets();
    end();
}
