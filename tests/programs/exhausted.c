// A process with a low limit of descriptors. It creates sockets, connects and accepts until it has none left, closes
// some, and continues. An additional argument is for a run with a stack that itself runs out of descriptors.
//
//     exhausted ... [hold]
#define _GNU_SOURCE
#include "common.h"

#include <sys/resource.h>

// The control socket has number 200.
#define MOST 40

static int made[MOST * 4];
static int count;

// Creates and connects sockets until `most` exist or an error occurs. Returns the error, or 0.
static int make_all(uint16_t port, int most)
{
    while (count < most) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0)
            return errno;
        made[count++] = fd;
        if (join(fd, peer(AF_INET, port)))
            return errno;
    }
    return 0;
}

static void close_some(int some)
{
    while (some-- > 0 && count > 0)
        close(made[--count]);
}


// Creates as many sessions as possible and holds them until its standard input ends.
static void hold(void)
{
    uint16_t port = (uint16_t)must("listen 5 %s 256", extra[-3]);
    int error = make_all(port, MOST * 4);
    say("ended by", "%s", error_name(error));
    say("some were made", "%s", count > 4 ? "yes" : "no");
    char byte;
    if (read(STDIN_FILENO, &byte, 1) < 0)
        broken("standard input");
    // Sockets can be created again after others were closed.
    close_some(4);
    usleep(100000);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    result("later", join(fd, peer(AF_INET, port)));
    end();
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    if (argc > 6)
        hold();
    struct rlimit few;
    getrlimit(RLIMIT_NOFILE, &few);
    few.rlim_cur = MOST;
    if (setrlimit(RLIMIT_NOFILE, &few))
        broken("setrlimit");
    uint16_t port = (uint16_t)must("listen 5 %s 64", argv[3]);
    say("all-made", "%s", error_name(make_all(port, MOST * 4)));
    say("all-made-some", "%s", count > MOST / 2 ? "yes" : "no");
    result("all-made-dup", dup(made[0]));
    must("accept 5 1");
    must("text 1 hello");
    char buffer[16];
    bytes("all-made-recv", recv(made[0], buffer, sizeof buffer, 0), buffer);
    result("all-made-send", send(made[0], "x", 1, 0));
    close_some(1);
    int before = count;
    say("one-closed", "%s", error_name(make_all(port, MOST * 4)));
    say("one-closed-made", "%d", count - before);

    close_some(4);
    int from = listener(AF_INET, 8);
    for (int i = 10; i < 14; i++)
        must("connect %d %s %d", i, here_text(AF_INET), port_of(from));
    int taken = 0, fd;
    set_nonblocking(from, true);
    while (await(from, POLLIN), (fd = accept(from, NULL, NULL)) >= 0)
        made[count++] = fd, taken++;
    say("accept", "%s after %d", error_name(errno), taken);
    polled("accept-poll", from, POLLIN);
    close_some(1);
    fd = accept(from, NULL, NULL);
    say("accept-later", "%s", fd < 0 ? error_name(errno) : "done");
    must("text 13 last");
    bytes("accept-later-recv", recv(fd, buffer, sizeof buffer, 0), buffer);
    close(fd);
    close_some(MOST * 4);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    result("afterwards", join(fd, peer(AF_INET, port)));
    end();
}
