// How servers use processes: workers with one listener, programs on a connection, daemons, another user, and exec with
// open connections and listeners.
#define _GNU_SOURCE
#include "common.h"

#include <grp.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/syscall.h>

extern char **environ;

static char buffer[4096];

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
    // As in inetd, the connection is the program's input and output.
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

// A process without the C library, with the connection as its standard streams and no free descriptors. Only its own
// bytes may enter the stream.
static void limited(void)
{
    int fd = opened(AF_INET, 1);
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (!child) {
        struct rlimit none = {0, 0};
        for (int to = 0; to < 3; to++)
            dup2(fd, to);
        if (setrlimit(RLIMIT_NOFILE, &none))
            _exit(2);
        for (int i = 0; i < 3; i++)
            if (write(1, "answer", 6) != 6)
                _exit(1);
        _exit(0);
    }
    reap("limited-child", child);
    close(fd);
    peer_says("limited-peer", "drain 1");
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
    peer_says("nobody-serves", "up 1 8000");
    prefix("");
}

// A server that daemonizes and changes its user and root directory.
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

// Executes this program again. It finds its descriptors by the numbers in its arguments.
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
    other_programs();
    limited();
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
