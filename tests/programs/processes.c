// Connections and listeners that several processes hold: fork, exec, kill, workers of one listener.
#define _GNU_SOURCE
#include "common.h"

#include <grp.h>
#include <spawn.h>

extern char **environ;

static char buffer[4096];

static pid_t forked(void)
{
    pid_t child = fork();
    if (child < 0)
        broken("fork: %s", error_name(errno));
    if (!child)
        watchdog();
    return child;
}

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

    // The parent closes and the child goes on: as a server does that forks for each connection.
    int gate[2];
    if (pipe(gate))
        broken("pipe");
    child = forked();
    if (!child) {
        close(gate[1]);
        read_all(gate[0], buffer, 1);
        long sent = send(fd, "alone", 5, 0);
        // The parent has printed its line when this returns.
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
    // Shutdown is of the connection, not of the descriptor.
    peer_says("child-shuts-down-peer", "recv 1 1");
    result("child-shuts-down-parent-send", send(fd, "x", 1, MSG_NOSIGNAL));
    close(fd);

    // Sockets that a child makes are its own.
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

// A parent and a child that write and read at the same time; nothing is lost or doubled.
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

static void run(const char *label, char **arguments, int in)
{
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    if (in >= 0) {
        posix_spawn_file_actions_adddup2(&actions, in, STDIN_FILENO);
        posix_spawn_file_actions_adddup2(&actions, in, STDOUT_FILENO);
        posix_spawn_file_actions_addclose(&actions, in);
    }
    pid_t child;
    int error = posix_spawnp(&child, arguments[0], &actions, NULL, arguments, environ);
    if (error)
        broken("cannot run %s: %s", arguments[0], error_name(error));
    posix_spawn_file_actions_destroy(&actions);
    if (in >= 0)
        close(in);
    reap(label, child);
}

static void other_programs(void)
{
    // As inetd does: the connection is the program's input and output.
    int fd = opened(AF_INET, 1);
    must("text 1 echoed");
    must("shutdown 1");
    run("spawn-cat", (char *[]){"cat", NULL}, fd);
    peer_says("spawn-cat-peer", "drain 1");
    fd = opened(AF_INET, 1);
    must("text 1 word");
    run("spawn-sh", (char *[]){"sh", "-c", "head -c 4; echo from a shell", NULL}, fd);
    peer_says("spawn-sh-peer", "drain 1");
    fd = opened(AF_INET, 1);
    pid_t child = vfork();
    if (!child) {
        execl("/bin/true", "true", NULL);
        _exit(9);
    }
    reap("vfork", child);
    result("vfork-parent-send", send(fd, "intact", 6, 0));
    peer_says("vfork-peer", "recv 1 6");
    result("system", system("exit 7") >> 8);
    result("system-parent-send", send(fd, "intact", 6, 0));
    peer_says("system-peer", "recv 1 6");
    close(fd);
    peer_says("system-peer-eof", "recv 1 1");
}

static void workers(bool polls)
{
    prefix(polls ? "polling-workers-" : "workers-");
    int from = listener(AF_INET, 16);
    uint16_t port = port_of(from);
    set_nonblocking(from, polls);
    pid_t children[2];
    for (int i = 0; i < 2; i++) {
        children[i] = forked();
        while (!children[i]) {
            if (polls)
                await(from, POLLIN);
            int fd = accept(from, NULL, NULL);
            ssize_t len = recv(fd, buffer, 99, 0);
            if (fd >= 0 && send(fd, buffer, (size_t)len, 0) != len)
                _exit(1);
            if (fd >= 0)
                close(fd);
        }
    }
    close(from);
    int good = 0;
    for (int i = 0; i < 10; i++) {
        must("connect %d %s %d", i + 1, here_text(AF_INET), port);
        must("text %d work", i + 1);
    }
    char wanted[64];
    snprintf(wanted, sizeof wanted, "eof 4 %08x", checksum(NO_BYTES, (const uint8_t *)"work", 4));
    for (int i = 0; i < 10; i++)
        good += !strcmp(ask("drain %d", i + 1), wanted);
    say("served", "%d of 10", good);
    kill(children[0], SIGKILL);
    reap("killed", children[0]);
    must("connect 1 %s %d", here_text(AF_INET), port);
    must("text 1 alone");
    peer_says("other-serves", "recv 1 5");
    kill(children[1], SIGTERM);
    reap("stopped", children[1]);
    must("start 1 %s %d", here_text(AF_INET), port);
    peer_says("nobody-serves", "up 1 2000");
    prefix("");
}

// As servers that put themselves into the background, change the user and the root.
static void servers_habits(void)
{
    int from = listener(AF_INET, 4);
    uint16_t port = port_of(from);
    pid_t child = forked();
    if (!child) {
        if (daemon(1, 1))
            _exit(1);
        watchdog();
        int fd = accept(from, NULL, NULL);
        bytes("daemon-recv", recv(fd, buffer, 99, 0), buffer);
        result("daemon-send", send(fd, "daemon", 6, 0));
        _exit(0);
    }
    reap("daemon-parent", child);
    close(from);
    must("connect 1 %s %d", here_text(AF_INET), port);
    must("text 1 hello");
    peer_says("daemon-peer", "drain 1");

    from = listener(AF_INET, 4);
    int fd = opened(AF_INET, 1);
    child = forked();
    if (!child) {
        if (chroot("/usr") || chdir("/") || setgroups(0, NULL) || setgid(65534) || setuid(65534))
            _exit(1);
        result("nobody-send", send(fd, "nobody", 6, 0));
        int other = opened(AF_INET, 2);
        result("nobody-connects", send(other, "nobody", 6, 0));
        peer_says("nobody-connects-peer", "recv 2 6");
        must("connect 3 %s %d", here_text(AF_INET), port_of(from));
        other = accept(from, NULL, NULL);
        must("text 3 hello");
        bytes("nobody-accepts", recv(other, buffer, 99, 0), buffer);
        _exit(0);
    }
    reap("nobody-child", child);
    peer_says("nobody-peer", "recv 1 6");
    result("nobody-parent-send", send(fd, "root", 4, 0));
    peer_says("nobody-parent-peer", "recv 1 4");
    close(fd);
    close(from);
}

// This program again, which finds its descriptors by the numbers in its arguments.
static void executes_itself(int fd, int from, int closed)
{
    char numbers[3][16];
    snprintf(numbers[0], 16, "%d", fd);
    snprintf(numbers[1], 16, "%d", from);
    snprintf(numbers[2], 16, "%d", closed);
    char *arguments[10];
    for (int i = 0; i < 6; i++)
        arguments[i] = all_arguments[i];
    for (int i = 0; i < 3; i++)
        arguments[6 + i] = numbers[i];
    arguments[9] = NULL;
    execv("/proc/self/exe", arguments);
    broken("exec: %s", error_name(errno));
}

static void executed(void)
{
    int fd = atoi(extra[0]), from = atoi(extra[1]), closed = atoi(extra[2]);
    bytes("exec-recv-before", recv(fd, buffer, 99, 0), buffer);
    must("text 1 after");
    bytes("exec-recv-after", recv(fd, buffer, 99, 0), buffer);
    result("exec-send", send(fd, "execed", 6, 0));
    peer_says("exec-peer", "recv 1 6");
    result("exec-nonblock-kept", (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
    result("exec-nodelay-kept", int_of(fd, IPPROTO_TCP, TCP_NODELAY));
    struct place name = {.len = sizeof name.addr};
    result("exec-getpeername", getpeername(fd, (struct sockaddr *)&name.addr, &name.len));
    result("exec-cloexec-gone", fcntl(closed, F_GETFD));
    peer_says("exec-cloexec-peer", "recv 3 1");
    int waiting = accept(from, NULL, NULL);
    must("text 2 waited");
    bytes("exec-accept-waiting", recv(waiting, buffer, 99, 0), buffer);
    close(waiting);
    must("connect 4 %s %d", here_text(AF_INET), port_of(from));
    int new = accept(from, NULL, NULL);
    must("text 4 fresh");
    bytes("exec-accept-new", recv(new, buffer, 99, 0), buffer);
    close(new);
    close(fd);
    peer_says("exec-peer-eof", "recv 1 1");
    fd = opened(AF_INET, 5);
    result("exec-connect", send(fd, "fresh", 5, 0));
    peer_says("exec-connect-peer", "recv 5 5");
    end();
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    if (extra[0])
        executed();
    shared();
    at_once();
    kill_in("kill-recv-", false, false);
    kill_in("kill-send-", true, false);
    kill_in("kill-accept-", false, true);
    last_holder_killed();
    other_programs();
    workers(false);
    workers(true);
    servers_habits();
    int fd = opened(AF_INET, 1), closed = opened(AF_INET, 3), from = listener(AF_INET, 4);
    set_int(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_nonblocking(fd, true);
    fcntl(closed, F_SETFD, FD_CLOEXEC);
    must("text 1 before");
    must("connect 2 %s %d", here_text(AF_INET), port_of(from));
    executes_itself(fd, from, closed);
}
