// A process is killed after a number of instructions of a call. The number starts at 0 and increases up to the end of
// the call. Another process that shares its sessions continues, and soon the stack holds nothing of the dead process.
//
//     steps ... STACK NAME STRIDE FROM POINTS
//
// STACK is the stack's process, NAME the call, STRIDE the number of instructions between two points, and FROM the
// number for the first of POINTS. The only line is `NAME: N points, end at K` or, if the call has more points, `NAME: N
// points, more`.
#define _GNU_SOURCE
#include "common.h"

#include <dirent.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ptrace.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/user.h>

#define RECORD 100
#define PORT 7777

static pid_t stack;
static const char *call_name;
static char *self;
// The number of instructions after which the process was killed, and whether the call had ended by then.
static long killed_at;
static bool had_ended;

// The sessions of the calls: a lasting one with the lifetime of this program, one for each point, and others.
static int lasting = -1, fd = -1, other = -1;
static uint16_t port;
static long filled;
// The number of the stack's descriptors while it only serves this process and its neighbour.
static int before;
// The data that the killed process sends, and the data that the surviving process sends.
static char theirs[RECORD], ours[RECORD], buffer[1 << 16];

static _Noreturn void wrong(const char *what, const char *more)
{
    broken("%s, killed after %ld instructions%s: %s %s", call_name, killed_at, had_ended ? ", the last" : "", what, more);
}

static void demand(bool holds, const char *what)
{
    if (!holds)
        wrong(what, error_name(errno));
}

// Checks the beginning of the peer's answer.
static void demand_answer(const char *answer, const char *wanted)
{
    if (strncmp(answer, wanted, strlen(wanted)))
        wrong("the peer says", answer);
}

// Checks that the peer's connection has ended.
static void demand_end(int slot)
{
    const char *answer = ask("drain %d", slot);
    if (strncmp(answer, "eof", 3) && strncmp(answer, "ECONNRESET", 10))
        wrong("the connection goes on:", answer);
}

static int descriptors_of_stack(void)
{
    char path[64];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", stack);
    DIR *dir = opendir(path);
    if (!dir)
        broken("the stack is gone");
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

// Each session and each process has a descriptor in the stack. Descriptors of earlier processes may be closed late.
static void demand_descriptors(void)
{
    int found = 0;
    for (int i = 0; i < TIMEOUT; i++) {
        found = descriptors_of_stack();
        if (found <= before) {
            before = found;
            return;
        }
        usleep(1000);
    }
    snprintf(buffer, sizeof buffer, "%d descriptors, not %d", found, before);
    wrong("the stack has", buffer);
}

// Checks that both directions of the lasting session work.
static void demand_lasting(void)
{
    demand(send(lasting, "lasting", 7, MSG_NOSIGNAL) == 7, "send");
    char wanted[32];
    snprintf(wanted, sizeof wanted, "ok 7 %08x", checksum(NO_BYTES, (const uint8_t *)"lasting", 7));
    demand_answer(ask("recv 1 7"), wanted);
    must("send 1 4 9");
    uint8_t back[4];
    fill(back, sizeof back, 9, 0);
    demand(read_all(lasting, buffer, 4) == 4 && !memcmp(buffer, back, sizeof back), "recv");
}

static void nothing(void)
{
}

static void open_one(void)
{
    fd = opened(AF_INET, 2);
}

static void close_one(void)
{
    close(fd);
    demand_answer(ask("drain 2"), "eof");
}

// Checks that the point's session still works, although one of its processes is dead.
static void use_and_close_one(void)
{
    demand(send(fd, "x", 1, MSG_NOSIGNAL) == 1, "send");
    demand_answer(ask("recv 2 1"), "ok 1");
    close_one();
}

static void call_send(void)
{
    send(lasting, theirs, sizeof theirs, 0);
}

static void call_sendfile(void)
{
    off_t from = 0;
    sendfile(lasting, other, &from, sizeof theirs);
}

static void before_sendfile(void)
{
    other = file_of(0, 0);
    if (write(other, theirs, sizeof theirs) != sizeof theirs)
        broken("write");
}

static const char *sum_of(const char *record)
{
    static char text[32];
    snprintf(text, sizeof text, "ok %d %08x", RECORD, checksum(NO_BYTES, (const uint8_t *)record, RECORD));
    return text;
}

// The FIFO's content is sent, although no other process notifies the stack.
static void demand_all_sent(void)
{
    int left = 1;
    for (int i = 0; i < TIMEOUT && left; i++) {
        demand(!ioctl(lasting, SIOCOUTQ, &left), "SIOCOUTQ");
        usleep(left ? 1000 : 0);
    }
    demand(!left, "what was written is not sent");
}

// The dead process's record was sent completely or not at all, and this process's record follows it.
static void after_send(void)
{
    demand_all_sent();
    demand(send(lasting, ours, sizeof ours, MSG_NOSIGNAL) == sizeof ours, "send");
    const char *answer = ask("recv 1 %d", RECORD);
    bool there = !strcmp(answer, sum_of(theirs));
    demand(!had_ended || there, "what was sent is lost");
    if (there)
        answer = ask("recv 1 %d", RECORD);
    demand_answer(answer, sum_of(ours));
}

static void before_recv(void)
{
    must("send 1 10 1");
    await(lasting, POLLIN);
}

static void call_recv(void)
{
    recv(lasting, buffer, 10, 0);
}

static void call_read_part(void)
{
    if (read(lasting, buffer, 4) == 4)
        return;
}

static void call_recvmsg(void)
{
    struct iovec parts[2] = {{buffer, 3}, {buffer + 100, 7}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    recvmsg(lasting, &message, 0);
}

// The data that the dead process was reading is consumed, or still completely available.
static void after_reading(size_t taken)
{
    // The data arrives while this process already waits for it.
    must("later 5 send 1 10 2");
    uint8_t sent[20];
    fill(sent, 10, 1, 0);
    fill(sent + 10, 10, 2, 0);
    demand(read_all(lasting, buffer, 1) == 1, "recv");
    bool there = buffer[0] == (char)sent[0];
    demand(!there || !had_ended, "bytes are read twice");
    ssize_t left = there ? 20 : 20 - (ssize_t)taken;
    demand(read_all(lasting, buffer + 1, (size_t)left - 1) == left - 1, "recv");
    demand(!memcmp(buffer, sent + 20 - left, (size_t)left), "other bytes");
}

// Data that arrives after the stack has noticed the death is also reported.
static void after_recv(void)
{
    demand_descriptors();
    after_reading(10);
}

static void after_read_part(void)
{
    after_reading(4);
}

static void open_full(void)
{
    open_one();
    filled = fill_up(fd, 3);
}

static void call_send_more(void)
{
    send(fd, theirs, sizeof theirs, MSG_DONTWAIT);
}

// A process that waits for room gets it.
static void after_send_more(void)
{
    char wanted[32];
    snprintf(wanted, sizeof wanted, "ok %ld", filled);
    demand_answer(ask("recv 2 %ld", filled), wanted);
    await(fd, POLLOUT);
    demand(send(fd, "x", 1, MSG_DONTWAIT) == 1, "no room after all was read");
    close_one();
}

static void call_shutdown(void)
{
    shutdown(fd, SHUT_WR);
}

static void call_shutdown_both(void)
{
    shutdown(fd, SHUT_RDWR);
}

static void call_close(void)
{
    close(fd);
}

static void after_last_close(void)
{
    demand_end(2);
}

static void call_dup2(void)
{
    dup2(lasting, fd);
}

static void call_fork(void)
{
    if (!fork())
        _exit(0);
}

// The child is killed after the library has registered it as a separate process.
static void call_forked(void)
{
    if (fork())
        pause();
    raise(SIGSTOP);
    _exit(0);
}

static void call_info(void)
{
    struct tcp_info info;
    socklen_t len = sizeof info;
    getsockopt(lasting, IPPROTO_TCP, TCP_INFO, &info, &len);
}

static void call_setsockopt(void)
{
    set_int(lasting, IPPROTO_TCP, TCP_NODELAY, 1);
}

static void peer_listens(void)
{
    port = (uint16_t)must("listen 5 %s 4", extra[5]);
}

// The connected session is in the queue, half closed.
static void peer_closes(void)
{
    must("close 5");
}

static void call_connect(void)
{
    join(socket(AF_INET, SOCK_STREAM, 0), peer(AF_INET, port));
}

static void call_connect_in_set(void)
{
    int made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct epoll_event event = {.events = EPOLLOUT};
    epoll_ctl(other, EPOLL_CTL_ADD, made, &event);
    join(made, peer(AF_INET, port));
}

static void peer_listens_to_set(void)
{
    peer_listens();
    other = epoll_create1(EPOLL_CLOEXEC);
}

static void peer_and_set_close(void)
{
    peer_closes();
    close(other);
}

static int listening(void)
{
    int made = socket(AF_INET, SOCK_STREAM, 0);
    set_int(made, SOL_SOCKET, SO_REUSEADDR, 1);
    return bind_to(made, here(AF_INET, PORT)) || listen(made, 4) ? -1 : made;
}

static void call_listen(void)
{
    listening();
}

// The port is free.
static void after_listen(void)
{
    int made = listening();
    demand(made >= 0, "the port is not free:");
    must("connect 2 %s %d", here_text(AF_INET), PORT);
    fd = accept(made, NULL, NULL);
    demand(fd >= 0, "accept");
    close(made);
    use_and_close_one();
}

static void connected_listener(void)
{
    other = listener(AF_INET, 4);
    must("connect 2 %s %d", here_text(AF_INET), port_of(other));
    await(other, POLLIN);
}

static void call_accept(void)
{
    accept(other, NULL, NULL);
}

// The connection is in the queue, or has ended with the process that accepted it.
static void after_accept(void)
{
    set_nonblocking(other, true);
    fd = accept(other, NULL, NULL);
    demand(fd < 0 || !had_ended, "one that was accepted is still in the queue");
    if (fd < 0)
        demand_end(2);
    else
        use_and_close_one();
    close(other);
}

static void pass_one(void)
{
    int over[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, over))
        broken("socketpair");
    open_one();
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec part = {"f", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.align = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
    if (sendmsg(over[0], &message, 0) != 1)
        broken("sendmsg");
    close(over[0]);
    other = over[1];
}

static void call_receive_passed(void)
{
    char control[64];
    struct iovec part = {buffer, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    recvmsg(other, &message, 0);
}

static void after_passed(void)
{
    close(other);
    use_and_close_one();
}

static void call_execute(void)
{
    char *arguments[] = {self, "executed", NULL};
    execv(self, arguments);
}

static void bind_datagrams(void)
{
    other = udp(AF_INET);
    if (bind_to(other, here(AF_INET, 0)))
        broken("bind");
    port = (uint16_t)must("udp 3 %s", extra[5]);
}

static void call_sendto(void)
{
    struct place to = peer(AF_INET, port);
    sendto(other, theirs, sizeof theirs, 0, (struct sockaddr *)&to.addr, to.len);
}

static void after_sendto(void)
{
    struct place to = peer(AF_INET, port);
    demand(sendto(other, ours, sizeof ours, 0, (struct sockaddr *)&to.addr, to.len) == sizeof ours, "sendto");
    const char *answer = ask("recvfrom 3");
    bool there = !strcmp(answer, sum_of(theirs));
    demand(!had_ended || there, "a datagram is lost");
    demand_answer(there ? ask("recvfrom 3") : answer, sum_of(ours));
    close(other);
}

static void send_datagram(void)
{
    bind_datagrams();
    must("sendto 3 %s %d 10 1", here_text(AF_INET), port_of(other));
    await(other, POLLIN);
}

static void call_recvfrom(void)
{
    recvfrom(other, buffer, 99, 0, NULL, NULL);
}

static void after_recvfrom(void)
{
    must("sendto 3 %s %d 20 2", here_text(AF_INET), port_of(other));
    set_timeout(other, SO_RCVTIMEO, TIMEOUT);
    ssize_t got = recv(other, buffer, 99, 0);
    demand(got != 10 || !had_ended, "a datagram that was received is still there");
    if (got == 10)
        got = recv(other, buffer, 99, 0);
    demand(got == 20, "recv");
    close(other);
}

static void peer_has_datagrams(void)
{
    port = (uint16_t)must("udp 3 %s", extra[5]);
}

static void call_first_sendto(void)
{
    struct place to = peer(AF_INET, port);
    sendto(socket(AF_INET, SOCK_DGRAM, 0), theirs, sizeof theirs, 0, (struct sockaddr *)&to.addr, to.len);
}

// A call: preparation in the surviving process, preparation in the process that is killed, the call itself, and the
// conditions after the death.
static const struct call {
    const char *name;
    void (*prepare)(void), (*before)(void), (*call)(void), (*after)(void);
} calls[] = {
    {"send", nothing, nothing, call_send, after_send},
    {"sendfile", nothing, before_sendfile, call_sendfile, after_send},
    {"send_to_full", open_full, nothing, call_send_more, after_send_more},
    {"recv", before_recv, nothing, call_recv, after_recv},
    {"read_part", before_recv, nothing, call_read_part, after_read_part},
    {"recvmsg", before_recv, nothing, call_recvmsg, after_recv},
    {"shutdown", open_one, nothing, call_shutdown, close_one},
    {"shutdown_both", open_one, nothing, call_shutdown_both, close_one},
    {"close", open_one, nothing, call_close, use_and_close_one},
    {"last_close", nothing, open_one, call_close, after_last_close},
    {"dup2", open_one, nothing, call_dup2, use_and_close_one},
    {"fork", open_one, nothing, call_fork, use_and_close_one},
    {"forked", open_one, nothing, call_forked, use_and_close_one},
    {"execute", open_one, nothing, call_execute, use_and_close_one},
    {"receive_passed", pass_one, nothing, call_receive_passed, after_passed},
    {"tcp_info", nothing, nothing, call_info, nothing},
    {"setsockopt", nothing, nothing, call_setsockopt, nothing},
    {"connect", peer_listens, nothing, call_connect, peer_closes},
    {"connect_in_set", peer_listens_to_set, nothing, call_connect_in_set, peer_and_set_close},
    {"attach", peer_listens, nothing, call_connect, peer_closes},
    {"listen", nothing, nothing, call_listen, after_listen},
    {"accept", connected_listener, nothing, call_accept, after_accept},
    {"sendto", bind_datagrams, nothing, call_sendto, after_sendto},
    {"recvfrom", send_datagram, nothing, call_recvfrom, after_recvfrom},
    {"first_sendto", peer_has_datagrams, nothing, call_first_sendto, nothing},
};

// Resumes a stopped process for one instruction or (`PTRACE_SYSCALL`) until the next system call. Returns `false` if it
// has stopped itself at the end of the call.
static bool go_on(pid_t child, enum __ptrace_request how)
{
    static int signal;
    int status;
    if (ptrace(how, child, NULL, (void *)(long)signal) || waitpid(child, &status, __WALL) != child)
        wrong("ptrace", error_name(errno));
    if (!WIFSTOPPED(status))
        wrong("the process has ended", "");
    signal = WSTOPSIG(status) == SIGTRAP || WSTOPSIG(status) == SIGSTOP ? 0 : WSTOPSIG(status);
    return WSTOPSIG(status) != SIGSTOP;
}

// Resumes until the executed program is loaded and its library starts, which creates a socket.
static void go_on_to_library(pid_t child)
{
    struct user_regs_struct registers;
    do {
        if (!go_on(child, PTRACE_SYSCALL))
            wrong("the program that is executed makes no socket", "");
        ptrace(PTRACE_GETREGS, child, NULL, &registers);
    } while (registers.orig_rax != SYS_socket && registers.orig_rax != SYS_getsockopt);
}

// Returns the child of a process that is stopped before it forks.
static pid_t go_on_to_child(pid_t parent)
{
    unsigned long child = 0;
    int status;
    if (ptrace(PTRACE_SETOPTIONS, parent, NULL, (void *)PTRACE_O_TRACEFORK) || ptrace(PTRACE_CONT, parent, NULL, NULL))
        wrong("ptrace", error_name(errno));
    waitpid(parent, &status, 0);
    if (status >> 8 != (SIGTRAP | PTRACE_EVENT_FORK << 8) || ptrace(PTRACE_GETEVENTMSG, parent, NULL, &child))
        wrong("the process has not forked", "");
    waitpid((pid_t)child, &status, __WALL);
    return (pid_t)child;
}

// Runs and kills one process. Returns whether its call has ended.
static bool kill_one(const struct call *call, long instructions)
{
    pid_t child = forked();
    if (!child) {
        call->before();
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGSTOP);
        call->call();
        raise(SIGSTOP);
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
        wrong("the process has not stopped", "");
    pid_t parent = child;
    if (call->call == call_execute)
        go_on_to_library(child);
    else if (call->call == call_forked)
        child = go_on_to_child(parent);
    bool goes_on = true;
    long made = 0;
    for (; made < instructions && goes_on; made++)
        goes_on = go_on(child, PTRACE_SINGLESTEP);
    killed_at = made;
    had_ended = !goes_on;
    kill(child, SIGKILL);
    waitpid(child, &status, __WALL);
    if (parent != child) {
        kill(parent, SIGKILL);
        waitpid(parent, &status, 0);
    }
    return had_ended;
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "executed")) {
        raise(SIGSTOP);
        _exit(0);
    }
    begin(argc, argv);
    self = argv[0];
    // The peer's address is repeated behind the other arguments.
    char *arguments[] = {extra[0], extra[1], extra[2], extra[3], extra[4], argv[3]};
    extra = arguments;
    stack = atoi(extra[0]);
    call_name = extra[1];
    long stride = atol(extra[2]), from = atol(extra[3]), points = atol(extra[4]), made = 0;
    memset(theirs, 't', sizeof theirs);
    memset(ours, 'o', sizeof ours);
    const struct call *call = calls;
    while (call < calls + LEN(calls) && strcmp(call->name, call_name))
        call++;
    if (call == calls + LEN(calls))
        broken("no call %s", call_name);
    // The stack must not know a process that attaches, so this process has not used the stack yet.
    bool attaches = !strcmp(call_name, "attach");
    if (!attaches) {
        lasting = opened(AF_INET, 1);
        // After its first listener, an application has a thread in the stack, which uses descriptors.
        close(listening());
    }
    // Recently closed descriptors are gone when the number no longer changes.
    for (int now; (now = descriptors_of_stack()) != before; before = now)
        usleep(500000);
    while (made < points) {
        watchdog();
        static char text[64];
        snprintf(text, sizeof text, "%s, about %ld instructions", call_name, from + made * stride);
        doing(text);
        call->prepare();
        bool ended = kill_one(call, from + made++ * stride);
        call->after();
        if (!attaches)
            demand_lasting();
        demand_descriptors();
        if (ended) {
            say(call_name, "%ld points, end at %ld", made, killed_at);
            end();
        }
    }
    say(call_name, "%ld points, more", made);
    end();
}
