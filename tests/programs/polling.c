// select and poll on sockets: reported events, other descriptors, interruptions.
#define _GNU_SOURCE
#include "common.h"

#include <sys/eventfd.h>
#include <sys/select.h>

#define ALL (POLLIN | POLLOUT | POLLRDHUP | POLLPRI)

static char buffer[4096];

static void on_signal(int signal)
{
    (void)signal;
}

static void selected(const char *label, int fd)
{
    fd_set in, out, except;
    fd_set *sets[] = {&in, &out, &except};
    for (int i = 0; i < 3; i++) {
        FD_ZERO(sets[i]);
        FD_SET(fd, sets[i]);
    }
    int count = select(fd + 1, &in, &out, &except, &(struct timeval){0});
    say(label, "%d in %d out %d except %d", count, !!FD_ISSET(fd, &in), !!FD_ISSET(fd, &out), !!FD_ISSET(fd, &except));
}

static void selects(void)
{
    int fd = opened(AF_INET, 1);
    struct timeval time;
    fd_set in;
    selected("select-idle", fd);
    must("text 1 data");
    await(fd, POLLIN);
    selected("select-data", fd);
    recv(fd, buffer, 99, 0);
    must("rst 1");
    await(fd, POLLRDHUP);
    selected("select-reset", fd);
    close(fd);
    fd = tcp(AF_INET);
    selected("select-unconnected", fd);
    close(fd);
    fd = opened(AF_INET, 1);
    must("later 50 text 1 data");
    FD_ZERO(&in);
    FD_SET(fd, &in);
    time = (struct timeval){5, 0};
    result("select-blocks", select(fd + 1, &in, NULL, NULL, &time));
    recv(fd, buffer, 99, 0);
    time = (struct timeval){0, 50000};
    result("select-timeout", select(fd + 1, &in, NULL, NULL, &time));
    say("select-timeout-left", "%ld", (long)(time.tv_sec + time.tv_usec));
    close(fd);
    FD_ZERO(&in);
    FD_SET(199, &in);
    result("select-bad-descriptor", select(200, &in, NULL, NULL, &time));
}

static void polls(void)
{
    int fd = opened(AF_INET, 1);
    int pipe_fds[2];
    if (pipe(pipe_fds))
        broken("pipe");
    int event = eventfd(0, 0);
    struct pollfd many[] = {{.fd = fd, .events = POLLIN},
                            {.fd = pipe_fds[0], .events = POLLIN},
                            {.fd = event, .events = POLLIN},
                            {.fd = -1, .events = POLLIN},
                            {.fd = 199, .events = POLLIN}};
    result("poll-mixed", poll(many, 5, 0));
    say("poll-mixed-bad", "%s", bits((uint32_t)many[4].revents));
    result("poll-mixed-idle", poll(many, 4, 20));
    must("later 30 text 1 data");
    result("poll-mixed-socket", poll(many, 4, TIMEOUT));
    say("poll-mixed-socket-bits", "%s", bits((uint32_t)many[0].revents));
    eventfd_write(event, 1);
    if (write(pipe_fds[1], "x", 1) != 1)
        broken("write");
    result("poll-mixed-all", poll(many, 4, TIMEOUT));
    polled("poll-rdnorm", fd, POLLRDNORM);
    recv(fd, buffer, 99, 0);
    polled("poll-after-recv", fd, ALL);
    set_int(fd, SOL_SOCKET, SO_RCVLOWAT, 5);
    must("text 1 abc");
    polled("poll-lowat-less", fd, POLLIN);
    must("text 1 def");
    await(fd, POLLIN);
    polled("poll-lowat-more", fd, POLLIN);
    set_int(fd, SOL_SOCKET, SO_RCVLOWAT, 1);
    recv(fd, buffer, 99, 0);

    signal(SIGUSR1, on_signal);
    pid_t child = interrupt(SIGUSR1);
    result("poll-interrupted", poll(many, 1, TIMEOUT));
    reap("poll-interrupter", child);
    sigset_t blocked, none;
    sigemptyset(&none);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    raise(SIGUSR1);
    result("poll-signal-blocked", poll(many, 1, 20));
    result("ppoll-signal-unblocked", ppoll(many, 1, &(struct timespec){5, 0}, &none));
    sigprocmask(SIG_UNBLOCK, &blocked, NULL);
    result("ppoll-timeout", ppoll(many, 1, &(struct timespec){0, 20000000}, NULL));
    close(fd);
    close(event);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    selects();
    polls();
    end();
}
