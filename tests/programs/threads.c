// Several threads on one socket, and signals that arrive while a call waits.
#define _GNU_SOURCE
#include "common.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>

static char buffer[4096];
static volatile sig_atomic_t signals;

static void on_signal(int signal)
{
    (void)signal;
    signals++;
}

static void handle(bool restart)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = restart ? SA_RESTART : 0};
    sigaction(SIGUSR1, &action, NULL);
    signals = 0;
}

// A call on its own thread.
struct call {
    pthread_t thread;
    long (*body)(struct call *);
    int fd;
    long result;
    int error;
    atomic_int id;
    char data[192];
};

static void *start_call(void *argument)
{
    struct call *call = argument;
    atomic_store(&call->id, (int)syscall(SYS_gettid));
    call->result = call->body(call);
    call->error = errno;
    return NULL;
}

// Starts the call and waits until it sleeps.
static void blocked(struct call *call, int fd, long (*body)(struct call *))
{
    *call = (struct call){.fd = fd, .body = body};
    if (pthread_create(&call->thread, NULL, start_call, call))
        broken("pthread_create");
    while (!atomic_load(&call->id))
        sched_yield();
    await_sleep(getpid(), atomic_load(&call->id));
}

static void finish(const char *label, struct call *call, bool shows)
{
    void *end;
    pthread_join(call->thread, &end);
    errno = call->error;
    if (end == PTHREAD_CANCELED)
        say(label, "cancelled");
    else if (shows)
        bytes(label, call->result, call->data);
    else
        result(label, call->result);
}

static long receives(struct call *call)
{
    return recv(call->fd, call->data, sizeof call->data, 0);
}

static long accepts(struct call *call)
{
    int fd = accept(call->fd, NULL, NULL);
    if (fd < 0)
        return -1;
    ssize_t got = recv(fd, call->data, sizeof call->data, 0);
    close(fd);
    return got;
}

static long sends(struct call *call)
{
    return send(call->fd, call->data, sizeof call->data, MSG_NOSIGNAL);
}

static long polls(struct call *call)
{
    return poll(&(struct pollfd){.fd = call->fd, .events = POLLIN}, 1, TIMEOUT);
}

static long writes_records(struct call *call)
{
    // The thread's letter is already in its data.
    for (int i = 0; i < 200; i++)
        if (write(call->fd, call->data, 100) != 100)
            return -1;
    return 200;
}

static void both_directions(void)
{
    struct call call;
    int fd = opened(AF_INET, 1);
    blocked(&call, fd, receives);
    result("send-beside-recv", send(fd, "out", 3, 0));
    peer_says("send-beside-recv-peer", "recv 1 3");
    must("text 1 in");
    finish("recv-thread", &call, true);

    blocked(&call, fd, polls);
    must("text 1 poll");
    finish("poll-thread", &call, false);
    bytes("poll-then-recv", recv(fd, buffer, 99, 0), buffer);

    fill_up(fd, 1);
    blocked(&call, fd, sends);
    must("text 1 in");
    bytes("recv-beside-full-send", recv(fd, buffer, 99, 0), buffer);
    must("later 0 drain 1");
    finish("send-thread", &call, false);
    close(fd);

    // Two threads wait on one connection; each message wakes one.
    struct call two[2];
    fd = opened(AF_INET, 1);
    blocked(&two[0], fd, receives);
    blocked(&two[1], fd, receives);
    must("text 1 first");
    must("shutdown 1");
    long sum = 0;
    for (int i = 0; i < 2; i++) {
        pthread_join(two[i].thread, NULL);
        sum += two[i].result;
    }
    result("two-receivers", sum);
    close(fd);

    int from = listener(AF_INET, 4);
    blocked(&call, from, accepts);
    fd = opened(AF_INET, 1);
    result("connect-beside-accept", send(fd, "out", 3, 0));
    peer_says("connect-beside-accept-peer", "recv 1 3");
    must("connect 2 %s %d", here_text(AF_INET), port_of(from));
    must("text 2 hello");
    finish("accept-thread", &call, true);
    blocked(&two[0], from, accepts);
    blocked(&two[1], from, accepts);
    for (int i = 0; i < 2; i++) {
        must("connect %d %s %d", i + 3, here_text(AF_INET), port_of(from));
        must("text %d same", i + 3);
    }
    finish("two-acceptors", &two[0], true);
    finish("two-acceptors", &two[1], true);
    close(from);
    close(fd);
}

static void records(void)
{
    struct call calls[4];
    int fd = opened(AF_INET, 1);
    for (int i = 0; i < 4; i++) {
        calls[i] = (struct call){.fd = fd, .body = writes_records};
        memset(calls[i].data, 'a' + i, 100);
        if (pthread_create(&calls[i].thread, NULL, start_call, &calls[i]))
            broken("pthread_create");
    }
    peer_says("records", "records 1 800 100");
    for (int i = 0; i < 4; i++)
        finish("records-thread", &calls[i], false);
    close(fd);
}

// Calls of other threads that end a wait.
static void ended_by_others(void)
{
    struct call call;
    int fd = opened(AF_INET, 1);
    blocked(&call, fd, receives);
    result("shutdown-beside-recv", shutdown(fd, SHUT_RDWR));
    finish("shutdown-recv-thread", &call, false);
    close(fd);
    int from = listener(AF_INET, 4);
    blocked(&call, from, accepts);
    result("shutdown-beside-accept", shutdown(from, SHUT_RD));
    finish("shutdown-accept-thread", &call, false);
    close(from);
    fd = opened(AF_INET, 1);
    fill_up(fd, 1);
    blocked(&call, fd, sends);
    result("shutdown-beside-send", shutdown(fd, SHUT_RDWR));
    finish("shutdown-send-thread", &call, false);
    close(fd);
    must("close 1");
    fd = opened(AF_INET, 1);
    fill_up(fd, 1);
    blocked(&call, fd, sends);
    must("rst 1");
    finish("reset-send-thread", &call, false);
    close(fd);
    fd = opened(AF_INET, 1);
    blocked(&call, fd, receives);
    pthread_cancel(call.thread);
    finish("cancel-recv-thread", &call, false);
    must("text 1 intact");
    bytes("cancel-then-recv", recv(fd, buffer, 99, 0), buffer);
    close(fd);
}

// A call keeps using its connection, although the descriptor is closed in the meantime.
static void closed_meanwhile(void)
{
    struct call call;
    int fd = opened(AF_INET, 1);
    blocked(&call, fd, receives);
    result("close-beside-recv", close(fd));
    must("text 1 late");
    finish("close-recv-thread", &call, true);
    peer_says("close-recv-peer", "recv 1 1");
    fd = opened(AF_INET, 1);
    blocked(&call, fd, polls);
    result("close-beside-poll", close(fd));
    must("text 1 late");
    finish("close-poll-thread", &call, false);
    peer_says("close-poll-peer", "recv 1 1");
}

// Sends this thread a signal when it sleeps, and then a line to the peer.
static pid_t interrupt_then(const char *line)
{
    pid_t process = getpid(), thread = (pid_t)syscall(SYS_gettid);
    pid_t child = fork();
    if (child)
        return child;
    await_sleep(process, thread);
    syscall(SYS_tgkill, process, thread, SIGUSR1);
    must("%s", line);
    _exit(0);
}

static void interrupted(void)
{
    handle(false);
    int fd = opened(AF_INET, 1);
    pid_t child = interrupt(SIGUSR1);
    result("eintr-recv", recv(fd, buffer, 99, 0));
    reap("eintr-child", child);
    child = interrupt(SIGUSR1);
    result("eintr-read", read(fd, buffer, 99));
    reap("eintr-child", child);
    child = interrupt(SIGUSR1);
    struct iovec one = {buffer, 99};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1};
    result("eintr-recvmsg", recvmsg(fd, &message, 0));
    reap("eintr-child", child);
    must("text 1 part");
    child = interrupt(SIGUSR1);
    // Bytes that were already read are not lost.
    bytes("eintr-waitall", recv(fd, buffer, 99, MSG_WAITALL), buffer);
    reap("eintr-child", child);
    set_timeout(fd, SO_RCVTIMEO, 5000);
    child = interrupt(SIGUSR1);
    result("eintr-recv-timeout", recv(fd, buffer, 99, 0));
    reap("eintr-child", child);
    set_timeout(fd, SO_RCVTIMEO, 0);
    int from = listener(AF_INET, 4);
    child = interrupt(SIGUSR1);
    result("eintr-accept", accept(from, NULL, NULL));
    reap("eintr-child", child);
    close(from);
    fill_up(fd, 1);
    child = interrupt(SIGUSR1);
    result("eintr-send", send(fd, "x", 1, 0));
    reap("eintr-child", child);
    result("eintr-signals", signals);
    close(fd);
    must("close 1");

    static uint8_t much[16000000];
    fd = opened(AF_INET, 1);
    child = interrupt(SIGUSR1);
    amount("eintr-large-send", send(fd, much, sizeof much, 0), sizeof much);
    reap("eintr-child", child);
    close(fd);
    must("close 1");

    // A connection waits while the listener's queue is full.
    uint16_t port = (uint16_t)must("listen 2 %s 0", all_arguments[3]);
    int first = tcp(AF_INET);
    join(first, peer(AF_INET, port));
    fd = tcp(AF_INET);
    child = interrupt(SIGUSR1);
    result("eintr-connect", join(fd, peer(AF_INET, port)));
    reap("eintr-child", child);
    set_nonblocking(fd, true);
    result("eintr-connect-again", join(fd, peer(AF_INET, port)));
    must("accept 2 3");
    await(fd, POLLOUT);
    result("eintr-connect-error", int_of(fd, SOL_SOCKET, SO_ERROR));
    result("eintr-connect-done", join(fd, peer(AF_INET, port)));
    close(fd);
    close(first);
    must("close 2");
}

static void restarted(void)
{
    handle(true);
    int fd = opened(AF_INET, 1);
    pid_t child = interrupt_then("text 1 recv");
    bytes("restart-recv", recv(fd, buffer, 99, 0), buffer);
    reap("restart-child", child);
    child = interrupt_then("text 1 read");
    bytes("restart-read", read(fd, buffer, 99), buffer);
    reap("restart-child", child);
    result("restart-signals", signals);
    // With a timeout, calls are not restarted.
    set_timeout(fd, SO_RCVTIMEO, 5000);
    child = interrupt(SIGUSR1);
    result("restart-recv-timeout", recv(fd, buffer, 99, 0));
    reap("restart-child", child);
    set_timeout(fd, SO_RCVTIMEO, 0);
    child = interrupt(SIGUSR1);
    result("restart-poll", poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, TIMEOUT));
    reap("restart-child", child);
    int from = listener(AF_INET, 4);
    char line[128];
    snprintf(line, sizeof line, "connect 2 %s %d", here_text(AF_INET), port_of(from));
    child = interrupt_then(line);
    int taken = accept(from, NULL, NULL);
    say("restart-accept", "%s", taken < 0 ? error_name(errno) : "ok");
    reap("restart-child", child);
    close(taken);
    close(from);
    fill_up(fd, 1);
    signals = 0;
    child = interrupt_then("later 0 drain 1");
    result("restart-send", send(fd, buffer, sizeof buffer, 0));
    reap("restart-child", child);
    result("restart-send-signals", signals);
    close(fd);

    uint16_t port = (uint16_t)must("listen 2 %s 0", all_arguments[3]);
    int first = tcp(AF_INET);
    join(first, peer(AF_INET, port));
    fd = tcp(AF_INET);
    child = interrupt_then("accept 2 3");
    result("restart-connect", join(fd, peer(AF_INET, port)));
    reap("restart-child", child);
    result("restart-connect-signals", signals);
    close(fd);
    close(first);
    must("close 2");
}

// A signal handler that uses a connection, possibly while it interrupts a call on it.
#define RECORDS 20000
#define HANDLED 2000
// A segment of 1,448 bytes holds 8 records, so the kernel waits for memory only between two records, and no signal
// splits a record.
#define RECORD 181

static int handled_fd;
static volatile sig_atomic_t handled;
static volatile unsigned handled_sum;

static void writes_in_handler(int signal)
{
    (void)signal;
    int error = errno;
    char record[RECORD];
    memset(record, 'h', sizeof record);
    // It may find no room if it interrupts a write.
    if (handled < HANDLED && write(handled_fd, record, sizeof record) == (ssize_t)sizeof record)
        handled++;
    errno = error;
}

static void reads_in_handler(int signal)
{
    (void)signal;
    int error = errno;
    uint8_t few[7];
    ssize_t got = recv(handled_fd, few, sizeof few, MSG_DONTWAIT);
    for (ssize_t i = 0; i < got; i++)
        handled_sum += few[i];
    handled += got > 0 ? (int)got : 0;
    errno = error;
}

static void closes_in_handler(int signal)
{
    (void)signal;
    int error = errno, fd = socket(AF_INET, SOCK_STREAM, 0);
    handled += fd >= 0 && !close(fd);
    errno = error;
}

static timer_t timer;
static void (*timer_handler)(int);

// The next signal comes 20 us after the end of the handler, so the program advances even if the handler takes longer.
static void arm_timer(void)
{
    struct itimerspec soon = {.it_value = {0, 20000}};
    timer_settime(timer, 0, &soon, NULL);
}

static void handle_and_rearm(int signal)
{
    timer_handler(signal);
    int error = errno;
    arm_timer();
    errno = error;
}

static void start_timer(void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handle_and_rearm, .sa_flags = SA_RESTART};
    timer_handler = handler;
    sigaction(SIGUSR2, &action, NULL);
    handled = 0;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer))
        broken("timer");
    arm_timer();
}

static void block(int signal, int how)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, signal);
    pthread_sigmask(how, &set, NULL);
}

// The thread that receives the signals.
static long writes_while_interrupted(struct call *call)
{
    block(SIGUSR2, SIG_UNBLOCK);
    start_timer(writes_in_handler);
    long mine = 0;
    while (mine < RECORDS && write(call->fd, call->data, RECORD) == RECORD)
        mine++;
    timer_delete(timer);
    while (handled < HANDLED)
        raise(SIGUSR2);
    return mine;
}

static void beside_handlers(void)
{
    struct call call = {.body = writes_while_interrupted};
    int fd = handled_fd = call.fd = opened(AF_INET, 1);
    memset(call.data, 'm', RECORD);
    block(SIGUSR2, SIG_BLOCK);
    if (pthread_create(&call.thread, NULL, start_call, &call))
        broken("pthread_create");
    peer_says("handler-writes", "records 1 %d %d", RECORDS + HANDLED, RECORD);
    finish("handler-writes-thread", &call, false);
    result("handler-writes-handler", handled);
    close(fd);
    must("close 1");

    static uint8_t much[400000];
    unsigned sum = 0, wanted = 0;
    fill(much, sizeof much, 3, 0);
    for (size_t i = 0; i < sizeof much; i++)
        wanted += much[i];
    fd = handled_fd = opened(AF_INET, 1);
    must("later 0 send 1 %zu 3", sizeof much);
    await(fd, POLLIN);
    start_timer(reads_in_handler);
    block(SIGUSR2, SIG_UNBLOCK);
    long mine = 0;
    while (mine + handled < (long)sizeof much) {
        ssize_t got = recv(fd, buffer, 60, MSG_DONTWAIT);
        if (!got || (got < 0 && errno != EAGAIN))
            break;
        for (ssize_t i = 0; i < got; i++)
            sum += (uint8_t)buffer[i];
        mine += got > 0 ? got : 0;
    }
    timer_delete(timer);
    amount("handler-reads", mine + handled, sizeof much);
    result("handler-reads-sum", sum + handled_sum == wanted);
    close(fd);
    must("close 1");

    // Sockets that are neither bound nor connected.
    start_timer(closes_in_handler);
    long failed = 0;
    for (int i = 0; i < 2000 || handled < 200; i++) {
        fd = socket(AF_INET, SOCK_STREAM, 0);
        failed += fd < 0 || close(fd);
    }
    timer_delete(timer);
    result("handler-closes", failed);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    both_directions();
    records();
    ended_by_others();
    closed_meanwhile();
    interrupted();
    restarted();
    beside_handlers();
    end();
}
