// epoll on sockets: level, edge, one-shot, exclusive, nested, before connect, with other descriptors, interrupted.
#define _GNU_SOURCE
#include "common.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static char buffer[4096];

static void on_signal(int signal)
{
    (void)signal;
}

static int control(int set, int operation, int fd, uint32_t events, uint32_t number)
{
    struct epoll_event event = {.events = events, .data.u32 = number};
    return epoll_ctl(set, operation, fd, &event);
}

// Prints every event by number.
static void events_of(const char *label, int set, int timeout)
{
    struct epoll_event events[8];
    char text[256] = "";
    int count = epoll_wait(set, events, 8, timeout);
    if (count < 0) {
        say(label, "%s", error_name(errno));
        return;
    }
    for (uint32_t number = 0; number < 100; number++)
        for (int i = 0; i < count; i++)
            if (events[i].data.u32 == number) {
                size_t len = strlen(text);
                snprintf(text + len, sizeof text - len, "%s%u %s", len ? ", " : "", number, bits(events[i].events));
            }
    say(label, "%s", count ? text : "none");
}

static int set_of(int fd, uint32_t events)
{
    int set = epoll_create1(EPOLL_CLOEXEC);
    if (control(set, EPOLL_CTL_ADD, fd, events, 1))
        broken("epoll_ctl: %s", error_name(errno));
    return set;
}

static void level(void)
{
    int fd = opened(AF_INET, 1);
    int set = set_of(fd, EPOLLIN | EPOLLRDHUP);
    events_of("level-idle", set, 0);
    must("text 1 abcdef");
    events_of("level-data", set, TIMEOUT);
    recv(fd, buffer, 3, 0);
    events_of("level-rest", set, 0);
    recv(fd, buffer, 3, 0);
    events_of("level-drained", set, 0);
    result("level-mod", control(set, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP, 2));
    events_of("level-mod-events", set, 0);
    fill_up(fd, 7);
    events_of("level-full", set, 0);
    must("later 0 drain 1");
    events_of("level-room", set, TIMEOUT);
    result("level-add-twice", control(set, EPOLL_CTL_ADD, fd, EPOLLIN, 3));
    result("level-del", control(set, EPOLL_CTL_DEL, fd, 0, 0));
    result("level-del-twice", control(set, EPOLL_CTL_DEL, fd, 0, 0));
    result("level-mod-deleted", control(set, EPOLL_CTL_MOD, fd, EPOLLIN, 3));
    events_of("level-deleted", set, 0);
    result("add-itself", control(set, EPOLL_CTL_ADD, set, EPOLLIN, 1));
    result("add-bad-descriptor", control(set, EPOLL_CTL_ADD, 199, EPOLLIN, 1));
    int file = file_of(1, 1);
    result("add-file", control(set, EPOLL_CTL_ADD, file, EPOLLIN, 1));
    result("add-to-socket", control(fd, EPOLL_CTL_ADD, set, EPOLLIN, 1));
    result("wait-on-socket", epoll_wait(fd, (struct epoll_event[1]){0}, 1, 0));
    result("wait-for-none", epoll_wait(set, (struct epoll_event[1]){0}, 0, 0));
    close(file);
    close(fd);
    close(set);
}

// Sends data 50 times while older data is unread. Returns the number of edges that are reported.
static int edges_with_data_left(int fd, int set)
{
    int edges = 0;
    for (; edges < 50; edges++) {
        recv(fd, buffer, 1, 0);
        must("text 1 ab");
        if (epoll_wait(set, (struct epoll_event[1]){0}, 1, TIMEOUT) != 1)
            break;
    }
    return edges;
}

static void edge(void)
{
    int fd = opened(AF_INET, 1);
    int set = set_of(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    events_of("edge-added", set, 0);
    events_of("edge-idle", set, 0);
    must("text 1 abcdef");
    events_of("edge-data", set, TIMEOUT);
    events_of("edge-data-again", set, 0);
    recv(fd, buffer, 2, 0);
    events_of("edge-partial-read", set, 0);
    must("text 1 more");
    events_of("edge-new-data", set, TIMEOUT);
    result("edge-each-time-data-are-left", edges_with_data_left(fd, set));
    for (int i = 0; i < 10; i++) {
        pid_t child = fork();
        if (!child)
            _exit(0);
        waitpid(child, NULL, 0);
    }
    // A socket that is shared may be reported once more.
    while (epoll_wait(set, (struct epoll_event[1]){0}, 1, 20) > 0) {
    }
    result("edge-each-time-after-children", edges_with_data_left(fd, set));
    recv(fd, buffer, 99, 0);
    events_of("edge-drained", set, 0);
    result("edge-mod", control(set, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT | EPOLLET, 2));
    events_of("edge-mod-reports", set, 0);
    events_of("edge-mod-once", set, 0);
    must("text 1 abc");
    await(fd, POLLIN);
    events_of("edge-before-mod", set, TIMEOUT);
    control(set, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLET, 2);
    events_of("edge-mod-with-data", set, 0);
    recv(fd, buffer, 99, 0);
    control(set, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, 3);
    events_of("edge-mod-drained", set, 0);
    fill_up(fd, 7);
    // Room that appeared in the meantime may or may not have been an edge.
    epoll_wait(set, (struct epoll_event[1]){0}, 1, 0);
    events_of("edge-full", set, 0);
    must("later 0 drain 1");
    events_of("edge-room", set, TIMEOUT);
    close(fd);
    close(set);

    fd = opened(AF_INET, 1);
    set = set_of(fd, EPOLLIN | EPOLLRDHUP | EPOLLET);
    must("text 1 last");
    must("shutdown 1");
    await(fd, POLLRDHUP);
    events_of("edge-data-and-eof", set, 0);
    bytes("edge-eof-recv", recv(fd, buffer, 99, 0), buffer);
    events_of("edge-eof-after-recv", set, 0);
    result("edge-eof", recv(fd, buffer, 99, 0));
    must("rst 1");
    await(fd, POLLERR);
    events_of("edge-reset", set, 0);
    close(fd);
    close(set);
}

static void one_shot(void)
{
    int fd = opened(AF_INET, 1);
    int set = set_of(fd, EPOLLIN | EPOLLONESHOT);
    must("text 1 abc");
    events_of("oneshot", set, TIMEOUT);
    events_of("oneshot-disabled", set, 0);
    must("text 1 def");
    events_of("oneshot-new-data", set, 20);
    result("oneshot-rearm", control(set, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT, 2));
    events_of("oneshot-rearmed", set, 0);
    recv(fd, buffer, 99, 0);
    control(set, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT, 3);
    events_of("oneshot-rearmed-drained", set, 0);
    must("text 1 ghi");
    events_of("oneshot-fires", set, TIMEOUT);
    must("rst 1");
    await(fd, POLLERR);
    events_of("oneshot-reset", set, 0);
    close(fd);
    close(set);
}

static void several_sets(void)
{
    int fd = opened(AF_INET, 1);
    int a = set_of(fd, EPOLLIN), b = set_of(fd, EPOLLIN | EPOLLOUT | EPOLLET);
    events_of("two-sets-edge-added", b, 0);
    must("text 1 abc");
    events_of("two-sets-first", a, TIMEOUT);
    events_of("two-sets-second", b, 0);
    recv(fd, buffer, 99, 0);
    events_of("two-sets-first-drained", a, 0);
    events_of("two-sets-second-drained", b, 0);
    int outer = set_of(a, EPOLLIN);
    control(outer, EPOLL_CTL_ADD, b, EPOLLIN, 2);
    events_of("nested-idle", outer, 0);
    must("text 1 abc");
    events_of("nested-data", outer, TIMEOUT);
    polled("nested-inner-poll", a, POLLIN);
    events_of("nested-inner", a, 0);
    events_of("nested-inner-edge", b, 0);
    events_of("nested-after-inner", outer, 0);
    recv(fd, buffer, 99, 0);
    events_of("nested-drained", outer, 0);
    must("later 30 text 1 def");
    events_of("nested-blocks", outer, TIMEOUT);
    recv(fd, buffer, 99, 0);
    close(outer);
    close(a);
    close(b);
    close(fd);

    int from = listener(AF_INET, 4);
    a = set_of(from, EPOLLIN | EPOLLEXCLUSIVE);
    b = set_of(from, EPOLLIN | EPOLLEXCLUSIVE);
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    events_of("exclusive-first", a, TIMEOUT);
    events_of("exclusive-second", b, 0);
    close(accept(from, NULL, NULL));
    events_of("exclusive-first-taken", a, 0);
    events_of("exclusive-second-taken", b, 0);
    result("exclusive-mod", control(a, EPOLL_CTL_MOD, from, EPOLLIN | EPOLLEXCLUSIVE, 1));
    result("exclusive-mod-plain", control(a, EPOLL_CTL_MOD, from, EPOLLIN, 1));
    close(a);
    a = epoll_create1(0);
    result("exclusive-oneshot", control(a, EPOLL_CTL_ADD, from, EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT, 1));
    close(a);
    close(b);
    close(from);
}

static void closing(void)
{
    int fd = opened(AF_INET, 1);
    int set = set_of(fd, EPOLLIN);
    must("text 1 abc");
    events_of("close-before", set, TIMEOUT);
    int copy = dup(fd);
    close(fd);
    events_of("close-one-of-two", set, 0);
    result("close-del-by-copy", control(set, EPOLL_CTL_DEL, copy, 0, 0));
    close(copy);
    events_of("close-last", set, 0);
    fd = opened(AF_INET, 1);
    result("close-number-reused", control(set, EPOLL_CTL_ADD, fd, EPOLLIN, 7));
    copy = dup(fd);
    result("add-dup", control(set, EPOLL_CTL_ADD, copy, EPOLLIN, 8));
    must("text 1 abc");
    await(fd, POLLIN);
    events_of("dup-both-report", set, 0);
    close(copy);
    result("dup-del", control(set, EPOLL_CTL_DEL, fd, 0, 0));
    // The closed duplicate's registration exists as long as the socket.
    events_of("dup-closed-still-reports", set, 0);
    close(fd);
    events_of("dup-all-closed", set, 0);
    close(set);
}

static void before_connect(void)
{
    uint16_t port = (uint16_t)must("listen 2 %s 8", all_arguments[3]);
    int fd = tcp(AF_INET);
    set_nonblocking(fd, true);
    int set = set_of(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    events_of("unconnected-epoll", set, 0);
    events_of("unconnected-epoll-again", set, 0);
    result("add-first-connect", join(fd, peer(AF_INET, port)));
    await(fd, POLLOUT);
    events_of("add-first-connected", set, TIMEOUT);
    result("add-first-error", int_of(fd, SOL_SOCKET, SO_ERROR));
    must("accept 2 1");
    must("text 1 abc");
    events_of("add-first-data", set, TIMEOUT);
    close(fd);
    close(set);

    // As in nginx, nothing waits between the registration and connect.
    fd = tcp(AF_INET);
    set_nonblocking(fd, true);
    set = set_of(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    join(fd, peer(AF_INET, port));
    await(fd, POLLOUT);
    events_of("add-then-connect", set, TIMEOUT);
    must("accept 2 1");
    must("close 1");
    events_of("add-then-eof", set, TIMEOUT);
    close(fd);
    close(set);
    must("close 2");

    fd = tcp(AF_INET);
    set_nonblocking(fd, true);
    set = set_of(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
    events_of("unconnected-level", set, 0);
    join(fd, peer(AF_INET, port));
    await(fd, POLLIN);
    events_of("add-then-refused", set, TIMEOUT);
    say("add-then-refused-error", "%s", error_name(int_of(fd, SOL_SOCKET, SO_ERROR)));
    events_of("add-then-refused-cleared", set, 0);
    close(fd);
    close(set);
}

// A socket in two sets, in one of them by a duplicate, before its destination is known.
static void aliases_before_connect(void)
{
    uint16_t port = (uint16_t)must("listen 2 %s 8", all_arguments[3]);
    int fd = tcp(AF_INET);
    int copy = dup(fd);
    set_nonblocking(copy, true);
    int a = set_of(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
    int b = set_of(copy, EPOLLIN | EPOLLRDHUP | EPOLLET);
    int outer = set_of(a, EPOLLIN);
    result("alias-connect", join(fd, peer(AF_INET, port)));
    await(copy, POLLOUT);
    must("accept 2 1");
    // The hang-up of the unconnected socket was an edge.
    events_of("alias-first", a, TIMEOUT);
    epoll_wait(b, (struct epoll_event[1]){0}, 1, 0);
    events_of("alias-second", b, 0);
    events_of("alias-nested", outer, 0);
    must("text 1 abc");
    await(fd, POLLIN);
    events_of("alias-data-first", a, 0);
    events_of("alias-data-second", b, 0);
    bytes("alias-recv-by-copy", recv(copy, buffer, 99, 0), buffer);
    result("alias-mod", control(a, EPOLL_CTL_MOD, fd, EPOLLIN, 5));
    result("alias-del", control(b, EPOLL_CTL_DEL, copy, 0, 0));
    close(copy);
    must("text 1 more");
    events_of("alias-after-mod", a, TIMEOUT);
    events_of("alias-after-del", b, 0);
    close(fd);
    events_of("alias-closed", a, 0);
    close(a);
    close(b);
    close(outer);
    must("close 2");
}

// Many sockets in a set before they connect, one with a duplicate of a high number.
static void many_before_connect(void)
{
    enum { MANY = 1500, HIGH = 5000 };
    static int sockets[MANY];
    struct rlimit limit = {8192, 8192};
    setrlimit(RLIMIT_NOFILE, &limit);
    uint16_t port = (uint16_t)must("listen 2 %s 8", all_arguments[3]);
    int set = epoll_create1(0);
    for (int i = 0; i < MANY; i++) {
        sockets[i] = tcp(AF_INET);
        set_nonblocking(sockets[i], true);
        control(set, EPOLL_CTL_ADD, sockets[i], EPOLLIN | EPOLLET, (uint32_t)i);
    }
    int high = fcntl(sockets[3], F_DUPFD, HIGH);
    control(set, EPOLL_CTL_ADD, high, EPOLLIN | EPOLLET, HIGH);
    static const int some[] = {0, 3, 1023, 1024, 1025, MANY - 1};
    // The events of an unconnected socket are an edge.
    while (epoll_wait(set, (struct epoll_event[64]){0}, 64, 0) > 0)
        ;
    for (size_t i = 0; i < LEN(some); i++) {
        char label[64];
        snprintf(label, sizeof label, "many-connect-%d", some[i]);
        result(label, join(sockets[some[i]], peer(AF_INET, port)));
        await(sockets[some[i]], POLLOUT);
        must("accept 2 1");
        while (epoll_wait(set, (struct epoll_event[64]){0}, 64, 0) > 0)
            ;
        must("text 1 abc");
        await(sockets[some[i]], POLLIN);
        snprintf(label, sizeof label, "many-data-%d", some[i]);
        struct epoll_event events[4];
        int count = epoll_wait(set, events, LEN(events), 0);
        say(label, "%d events, the first of %u", count, count > 0 ? events[0].data.u32 : 0);
        must("close 1");
    }
    bytes("many-by-duplicate", recv(high, buffer, 99, 0), buffer);
    for (int i = 0; i < MANY; i++)
        close(sockets[i]);
    close(high);
    close(set);
    // A new set reuses the number of a closed one. It does not have the socket.
    int fd = tcp(AF_INET), old = set_of(fd, EPOLLIN | EPOLLOUT);
    close(old);
    set = epoll_create1(0);
    result("set-number-reused", set == old);
    join(fd, peer(AF_INET, port));
    events_of("set-reused", set, 0);
    close(fd);
    close(set);
    must("close 2");
}

static void listening(void)
{
    int from = listener(AF_INET, 8);
    int level = set_of(from, EPOLLIN), edge = set_of(from, EPOLLIN | EPOLLET);
    events_of("listener-idle", level, 0);
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    must("connect 2 %s %d", here_text(AF_INET), port_of(from));
    events_of("listener-level", level, TIMEOUT);
    events_of("listener-edge", edge, 0);
    close(accept(from, NULL, NULL));
    events_of("listener-level-one-left", level, 0);
    events_of("listener-edge-one-left", edge, 0);
    must("connect 3 %s %d", here_text(AF_INET), port_of(from));
    events_of("listener-edge-next", edge, TIMEOUT);
    close(accept(from, NULL, NULL));
    close(accept(from, NULL, NULL));
    events_of("listener-level-empty", level, 0);
    // Registered before it listens, when the socket could still become a client.
    int late = tcp(AF_INET);
    int set = set_of(late, EPOLLIN);
    bind_to(late, here(AF_INET, 0));
    events_of("late-listener-bound", set, 0);
    listen(late, 4);
    events_of("late-listener-idle", set, 0);
    must("connect 1 %s %d", here_text(AF_INET), port_of(late));
    events_of("late-listener", set, TIMEOUT);
    close(set);
    close(late);
    close(level);
    close(edge);
    close(from);
}

static void mixed(void)
{
    int fd = opened(AF_INET, 1);
    int pipe_fds[2];
    if (pipe(pipe_fds))
        broken("pipe");
    int event = eventfd(0, 0);
    int set = set_of(fd, EPOLLIN);
    control(set, EPOLL_CTL_ADD, pipe_fds[0], EPOLLIN, 2);
    control(set, EPOLL_CTL_ADD, event, EPOLLIN, 3);
    events_of("mixed-idle", set, 0);
    eventfd_write(event, 1);
    must("text 1 abc");
    await(fd, POLLIN);
    if (write(pipe_fds[1], "x", 1) != 1)
        broken("write");
    events_of("mixed-all", set, 0);
    signal(SIGUSR1, on_signal);
    recv(fd, buffer, 99, 0);
    control(set, EPOLL_CTL_DEL, pipe_fds[0], 0, 0);
    control(set, EPOLL_CTL_DEL, event, 0, 0);
    pid_t child = interrupt(SIGUSR1);
    events_of("epoll-interrupted", set, TIMEOUT);
    reap("epoll-interrupter", child);
    sigset_t none;
    sigemptyset(&none);
    child = interrupt(SIGUSR1);
    result("epoll-pwait-interrupted", epoll_pwait(set, (struct epoll_event[1]){0}, 1, TIMEOUT, &none));
    reap("epoll-pwait-interrupter", child);
    struct timespec time = {0, 20000000};
    result("epoll-pwait2-timeout", epoll_pwait2(set, (struct epoll_event[1]){0}, 1, &time, NULL));
    result("epoll-timeout", epoll_wait(set, (struct epoll_event[1]){0}, 1, 20));
    close(fd);
    close(set);
}

// A process with a system call filter that allows everything.
static void filtered(void)
{
    int fd = opened(AF_INET, 1);
    must("text 1 abcdef");
    pid_t child = fork();
    if (!child) {
        struct sock_filter pass = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
        struct sock_fprog filter = {1, &pass};
        fcntl(fd, F_SETFL, O_NONBLOCK);
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
            broken("prctl");
        int set = set_of(fd, EPOLLIN | EPOLLET);
        events_of("edge-filtered", set, TIMEOUT);
        result("edge-each-time-filtered", edges_with_data_left(fd, set));
        fflush(stdout);
        _exit(0);
    }
    reap("filtered", child);
    close(fd);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    level();
    edge();
    filtered();
    one_shot();
    several_sets();
    closing();
    before_connect();
    aliases_before_connect();
    many_before_connect();
    listening();
    mixed();
    end();
}
