// A slow application.
//
//     slow ... never    reads nothing, and sends to a peer that reads nothing, until all buffers are full. It prints
//                       `full`, waits for a line on its standard input, then reads and sends the rest.
//     slow ... little   reads and sends a little at a time, with pauses between.
#define _GNU_SOURCE
#include "common.h"

// More than the buffers on the path can hold.
#define MUCH (24l << 20)
#define LITTLE 40000
#define SEED 5

static uint8_t bytes_of[65536], wanted[65536];

// Reads `len` bytes from the peer, `most` bytes per call, with a pause after each call.
static void read_slowly(int fd, long len, size_t most, unsigned pause)
{
    for (long got = 0; got < len;) {
        ssize_t more = recv(fd, bytes_of, most, 0);
        if (more <= 0)
            broken("recv after %ld: %s", got, more ? error_name(errno) : "end");
        fill(wanted, (size_t)more, SEED, (size_t)got);
        if (memcmp(bytes_of, wanted, (size_t)more))
            broken("other bytes after %ld", got);
        got += more;
        if (pause)
            usleep(pause);
    }
}

// Waits until no more data arrives. Returns its amount.
static long full(int fd)
{
    int there = 0, last = -1;
    while (there != last) {
        last = there;
        usleep(300000);
        if (ioctl(fd, FIONREAD, &there))
            broken("FIONREAD: %s", error_name(errno));
    }
    return there;
}

static void never(int fd, int other)
{
    must("later 0 send 1 %ld %d", MUCH, SEED);
    long there = full(fd), sent = fill_up(other, SEED);
    say("is all there", "%s", there < MUCH ? "no" : "yes");
    say("is something there", "%s", there > 0 && sent > 0 ? "yes" : "no");
    polled("full", other, POLLOUT);
    if (read(STDIN_FILENO, bytes_of, 1) < 0)
        broken("standard input");
    watchdog();
    read_slowly(fd, MUCH, sizeof bytes_of, 0);
    fill(bytes_of, 1, SEED, (size_t)sent);
    must("later 0 wait 2 1");
    char answer[32];
    snprintf(answer, sizeof answer, "ok %ld", sent);
    say("the peer has all", "%s", strncmp(ask("recv 2 %ld", sent), answer, strlen(answer)) ? "no" : "yes");
    await(other, POLLOUT);
    polled("empty", other, POLLOUT);
}

static void little(int fd, int other)
{
    must("later 0 send 1 %d %d", LITTLE, SEED);
    for (int sent = 0; sent < LITTLE; sent += 200) {
        fill(bytes_of, 200, SEED, (size_t)sent);
        if (send(other, bytes_of, 200, 0) != 200)
            broken("send: %s", error_name(errno));
        usleep(10000);
    }
    read_slowly(fd, LITTLE, 200, 10000);
    fill(bytes_of, LITTLE, SEED, 0);
    char answer[32];
    snprintf(answer, sizeof answer, "ok %d %08x", LITTLE, checksum(NO_BYTES, bytes_of, LITTLE));
    const char *found = ask("recv 2 %d", LITTLE);
    if (strcmp(found, answer))
        broken("the peer has %s, not %s", found, answer);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    int fd = opened(AF_INET, 1), other = opened(AF_INET, 2);
    if (!strcmp(extra[0], "never"))
        never(fd, other);
    else
        little(fd, other);
    end();
}
