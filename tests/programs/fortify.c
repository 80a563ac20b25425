// Alternative names of the calls: the checked variants of read, recv, recvfrom, poll and fd_set that a compiler uses
// with _FORTIFY_SOURCE=2, and the names with two underscores that the C library keeps for old programs.
#define _GNU_SOURCE
#include "common.h"

#include <sys/prctl.h>

// The compiler only uses the checked variant for a length that it does not know.
static volatile size_t some = 8;

// No header declares these functions.
int __connect(int fd, const struct sockaddr *addr, socklen_t len);
ssize_t __read(int fd, void *to, size_t len);
ssize_t __write(int fd, const void *from, size_t len);
ssize_t __send(int fd, const void *from, size_t len, int flags);
int __dup2(int from, int to);
int __fcntl(int fd, int command, ...);
int __close(int fd);

static void old_names(void)
{
    uint16_t port = (uint16_t)must("listen 2 %s 4", all_arguments[3]);
    struct place to = peer(AF_INET, port);
    char text[16];
    int fd = tcp(AF_INET);
    result("old-connect", __connect(fd, (struct sockaddr *)&to.addr, to.len));
    must("accept 2 1");
    result("old-write", __write(fd, "write", 5));
    result("old-send", __send(fd, "send", 4, 0));
    peer_says("old-peer", "recv 1 9");
    must("text 1 read");
    bytes("old-read", __read(fd, text, some), text);
    result("old-fcntl", __fcntl(fd, F_SETFL, O_RDWR | O_NONBLOCK));
    result("old-read-nonblocking", __read(fd, text, some));
    result("old-dup2", __dup2(fd, 100));
    result("old-close", __close(fd));
    result("old-dup2-send", send(100, "kept", 4, 0));
    peer_says("old-dup2-peer", "recv 1 4");
    result("old-dup2-close", __close(100));
    peer_says("old-close-peer", "recv 1 1");
}

int main(int argc, char **argv)
{
    begin(argc, argv);
#if !defined _FORTIFY_SOURCE || _FORTIFY_SOURCE < 2
    broken("compiled without _FORTIFY_SOURCE=2");
#endif
    int fd = opened(AF_INET, 1);
    char text[16];
    struct sockaddr_in from;
    socklen_t len = sizeof from;
    must("text 1 readcheckedthrice");
    bytes("read", read(fd, text, some), text);
    bytes("recv", recv(fd, text, some, 0), text);
    bytes("recvfrom", recvfrom(fd, text, some, 0, (struct sockaddr *)&from, &len), text);
    result("recv-empty", recv(fd, text, some, MSG_DONTWAIT));
    struct pollfd poll_fd[2] = {{.fd = fd, .events = POLLIN | POLLOUT}, {.fd = -1}};
    result("poll", poll(poll_fd, some / 8, 0));
    say("poll-bits", "%s", bits((uint32_t)poll_fd[0].revents));
    result("ppoll", ppoll(poll_fd, some / 4, &(struct timespec){0}, NULL));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    result("select", select(fd + 1, NULL, &set, NULL, &(struct timeval){0}));
    must("rst 1");
    await(fd, POLLRDHUP);
    result("read-reset", read(fd, text, some));
    result("read-reset-again", read(fd, text, some));
    close(fd);
    result("read-closed", read(fd, text, some));
    result("recv-closed", recv(fd, text, some, 0));

    old_names();
    // A read into a buffer that is too small ends the program. The child's message is discarded.
    some = 64;
    pid_t child = fork();
    if (!child) {
        int nowhere = open("/dev/null", O_WRONLY);
        dup2(nowhere, STDERR_FILENO);
        // No core file.
        prctl(PR_SET_DUMPABLE, 0);
        bytes("overflow", read(fd, text, some), text);
        _exit(0);
    }
    reap("overflow", child);
    end();
}
