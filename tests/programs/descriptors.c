// Descriptors of connections: duplicates, flags, descriptor numbers, how other system calls describe them, and passing
// them to other processes.
#define _GNU_SOURCE
#include "common.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

static char buffer[4096];
static volatile sig_atomic_t signals;

static void on_signal(int signal)
{
    (void)signal;
    signals++;
}

static void lowest(void)
{
    // The library of a stack keeps its own descriptors at other numbers.
    int a = tcp(AF_INET), b = tcp(AF_INET), c = tcp(AF_INET);
    say("lowest", "%d %d %d", a, b, c);
    close(a);
    result("lowest-socket", tcp(AF_INET) - a);
    close(b);
    int file = open("/dev/null", O_RDONLY);
    result("lowest-file", file - b);
    close(file);
    int made = opened(AF_INET, 1);
    result("lowest-connected", made - b);
    close(c);
    int from = listener(AF_INET, 4);
    result("lowest-listener", from - c);
    must("connect 2 %s %d", here_text(AF_INET), port_of(from));
    int pipe_fds[2];
    if (pipe(pipe_fds))
        broken("pipe");
    close(pipe_fds[0]);
    int fd = accept(from, NULL, NULL);
    result("lowest-accepted", fd - pipe_fds[0]);
    close(pipe_fds[1]);
    result("lowest-dup", dup(fd) - pipe_fds[1]);
    close(pipe_fds[1]);
    close(fd);
    close(from);
    close(made);
    close(a);
}

static void duplicates(void)
{
    int fd = opened(AF_INET, 1);
    int copy = dup(fd);
    must("text 1 abcdef");
    bytes("dup-recv", recv(copy, buffer, 3, 0), buffer);
    bytes("dup-recv-original", recv(fd, buffer, 3, 0), buffer);
    result("dup-nonblock-before", (fcntl(copy, F_GETFL) & O_NONBLOCK) != 0);
    set_nonblocking(fd, true);
    result("dup-nonblock-shared", (fcntl(copy, F_GETFL) & O_NONBLOCK) != 0);
    result("dup-nonblock-recv", recv(copy, buffer, 3, 0));
    int off = 0;
    result("dup-fionbio", ioctl(copy, FIONBIO, &off));
    result("dup-fionbio-shared", (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
    result("access-mode", fcntl(fd, F_GETFL) & O_ACCMODE);
    result("dup-close-one", close(fd));
    result("dup-send-other", send(copy, "still", 5, 0));
    peer_says("dup-peer", "recv 1 5");
    result("dup-close-both", close(copy));
    peer_says("dup-peer-eof", "recv 1 1");
    result("close-again", close(copy));
    result("recv-closed", recv(copy, buffer, 1, 0));
    result("poll-closed", poll(&(struct pollfd){.fd = copy, .events = POLLIN}, 1, 0));

    int one = opened(AF_INET, 1), two = opened(AF_INET, 2);
    say("dup2-over", "%s", dup2(one, two) == two ? "ok" : error_name(errno));
    // The overwritten descriptor is closed.
    peer_says("dup2-over-peer", "recv 2 1");
    must("text 1 byboth");
    bytes("dup2-recv", recv(two, buffer, 99, 0), buffer);
    say("dup2-same", "%s", dup2(one, one) == one ? "ok" : error_name(errno));
    result("dup2-bad", dup2(199, two));
    result("dup2-bad-keeps", send(two, "kept", 4, 0));
    peer_says("dup2-bad-keeps-peer", "recv 1 4");
    int null = open("/dev/null", O_RDWR);
    say("dup2-file-over", "%s", dup2(null, two) == two ? "ok" : error_name(errno));
    result("dup2-file-over-send", send(two, "x", 1, 0));
    result("dup2-file-over-write", write(two, "x", 1));
    say("dup2-over-file", "%s", dup2(one, null) == null ? "ok" : error_name(errno));
    result("dup2-over-file-send", send(null, "now", 3, 0));
    peer_says("dup2-over-file-peer", "recv 1 3");
    say("dup3", "%s", dup3(one, two, O_CLOEXEC) == two ? "ok" : error_name(errno));
    result("dup3-cloexec", fcntl(two, F_GETFD));
    result("dup3-original-cloexec", fcntl(one, F_GETFD));
    result("dup3-same", dup3(one, one, 0));
    result("dup3-flags", dup3(one, two, O_APPEND));
    close(null);
    close(two);
    result("dupfd", fcntl(one, F_DUPFD, 150));
    result("dupfd-next", fcntl(one, F_DUPFD, 150));
    result("dupfd-cloexec", fcntl(one, F_DUPFD_CLOEXEC, 160));
    result("dupfd-cloexec-flag", fcntl(160, F_GETFD));
    close(one);
    result("dupfd-send", send(151, "high", 4, 0));
    peer_says("dupfd-peer", "recv 1 4");
    result("close-range", syscall(SYS_close_range, 150, 169, 0));
    peer_says("close-range-peer", "recv 1 1");
}

static void ranges(void)
{
    int fd = opened(AF_INET, 1);
    int high = fcntl(fd, F_DUPFD, 170);
    result("close-range-cloexec", close_range(170, 180, CLOSE_RANGE_CLOEXEC));
    result("close-range-cloexec-flag", fcntl(high, F_GETFD));
    result("close-range-cloexec-send", send(high, "open", 4, 0));
    peer_says("close-range-cloexec-peer", "recv 1 4");
    close(fd);
    result("close-range-glibc", close_range(170, 180, 0));
    peer_says("close-range-glibc-peer", "recv 1 1");
    fd = opened(AF_INET, 1);
    pid_t child = fork();
    if (!child) {
        closefrom(3);
        result("closefrom-child", send(fd, "x", 1, 0));
        _exit(0);
    }
    reap("closefrom", child);
    result("closefrom-parent", send(fd, "here", 4, 0));
    peer_says("closefrom-peer", "recv 1 4");
    close(fd);
}

static void nature(void)
{
    int fd = opened(AF_INET, 1);
    struct stat stat;
    result("fstat", fstat(fd, &stat));
    say("fstat-mode", "socket %d permissions %o size %ld", S_ISSOCK(stat.st_mode), stat.st_mode & 0777,
        (long)stat.st_size);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(path, buffer, sizeof buffer);
    say("proc-self-fd", "%.8s", len > 8 ? buffer : "?");
    result("proc-open", open(path, O_RDWR));
    result("isatty", isatty(fd) ? 1 : -1);
    result("lseek", lseek(fd, 0, SEEK_SET));
    result("fsync", fsync(fd));
    result("ftruncate", ftruncate(fd, 0));
    result("fchmod", fchmod(fd, 0600));
    int out = -1;
    result("siocoutq", ioctl(fd, TIOCOUTQ, &out));
    say("siocoutq-count", "%d", out);
    result("cloexec-default", fcntl(fd, F_GETFD));
    result("fioclex", ioctl(fd, FIOCLEX));
    result("fioclex-flag", fcntl(fd, F_GETFD));
    result("setfl-append", fcntl(fd, F_SETFL, O_RDWR | O_APPEND));
    result("getpid-owner", fcntl(fd, F_GETOWN));
    close(fd);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
    say("socket-flags", "nonblock %d cloexec %d", (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0, fcntl(fd, F_GETFD));
    close(fd);

    fd = opened(AF_INET, 1);
    signal(SIGIO, on_signal);
    result("setown", fcntl(fd, F_SETOWN, getpid()));
    result("async", fcntl(fd, F_SETFL, O_RDWR | O_ASYNC));
    must("text 1 signal");
    await(fd, POLLIN);
    say("async-signals", "%s", signals ? "some" : "none");
    close(fd);
}

static void no_more(void)
{
    int from = listener(AF_INET, 4);
    must("connect 1 %s %d", here_text(AF_INET), port_of(from));
    await(from, POLLIN);
    struct rlimit before, few;
    getrlimit(RLIMIT_NOFILE, &before);
    few = before;
    few.rlim_cur = (rlim_t)from + 1;
    setrlimit(RLIMIT_NOFILE, &few);
    result("emfile-socket", socket(AF_INET, SOCK_STREAM, 0));
    result("emfile-accept", accept(from, NULL, NULL));
    result("emfile-dup", dup(from));
    polled("emfile-poll", from, POLLIN);
    setrlimit(RLIMIT_NOFILE, &before);
    // The connection still waits in the queue.
    int fd = accept(from, NULL, NULL);
    must("text 1 waited");
    bytes("emfile-later", recv(fd, buffer, 99, 0), buffer);
    close(fd);
    close(from);
}

static long pass(int over, int fd)
{
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec one = {"f", 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1};
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    control.align = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
    return sendmsg(over, &message, 0);
}

static int receive(int over)
{
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec one = {buffer, 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1};
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    result("received", recvmsg(over, &message, MSG_CMSG_CLOEXEC));
    int fd = -1;
    if (message.msg_controllen)
        memcpy(&fd, CMSG_DATA(&control.align), sizeof fd);
    return fd;
}

static void passing(void)
{
    int over[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, over))
        broken("socketpair");
    int fd = opened(AF_INET, 1);
    prefix("self-");
    result("passed", pass(over[0], fd));
    close(fd);
    must("text 1 onitsway");
    fd = receive(over[1]);
    result("cloexec", fcntl(fd, F_GETFD));
    bytes("recv", recv(fd, buffer, 99, 0), buffer);
    result("send", send(fd, "back", 4, 0));
    peer_says("peer", "recv 1 4");
    close(fd);
    peer_says("peer-eof", "recv 1 1");

    prefix("child-");
    pid_t child = fork();
    if (!child) {
        watchdog();
        close(over[0]);
        // The connection was opened after the child was forked.
        fd = receive(over[1]);
        bytes("recv", recv(fd, buffer, 99, 0), buffer);
        result("send", send(fd, "child", 5, 0));
        _exit(0);
    }
    fd = opened(AF_INET, 1);
    must("text 1 forchild");
    long passed = pass(over[0], fd);
    close(fd);
    reap("exit", child);
    result("passed", passed);
    peer_says("peer", "recv 1 5");
    peer_says("peer-eof", "recv 1 1");

    prefix("listener-");
    int from = listener(AF_INET, 4);
    uint16_t port = port_of(from);
    result("passed", pass(over[0], from));
    close(from);
    must("connect 1 %s %d", here_text(AF_INET), port);
    from = receive(over[1]);
    fd = accept(from, NULL, NULL);
    must("text 1 accepted");
    bytes("recv", recv(fd, buffer, 99, 0), buffer);
    close(fd);
    close(from);

    // A connection in a message that is never received is closed with the message.
    prefix("lost-");
    fd = opened(AF_INET, 1);
    result("passed", pass(over[0], fd));
    close(fd);
    close(over[0]);
    close(over[1]);
    peer_says("peer", "recv 1 1");
    prefix("");
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    lowest();
    duplicates();
    ranges();
    nature();
    no_more();
    passing();
    end();
}
