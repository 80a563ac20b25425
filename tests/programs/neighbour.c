// An application that runs beside others. It sends and receives continuously and checks each byte. It runs until its
// standard input has data or ends.
#define _GNU_SOURCE
#include "common.h"

#define AMOUNT 20000
// Rounds after which it prints a line.
#define EVERY 20

int main(int argc, char **argv)
{
    static uint8_t wanted[AMOUNT], got[AMOUNT];
    begin(argc, argv);
    int fd = opened(AF_INET, 1);
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    for (unsigned round = 0; !poll(&input, 1, 2); round++) {
        watchdog();
        fill(wanted, sizeof wanted, round, 0);
        if (send(fd, wanted, sizeof wanted, 0) != sizeof wanted)
            broken("send: %s", error_name(errno));
        char answer[32];
        snprintf(answer, sizeof answer, "ok %d %08x", AMOUNT, checksum(NO_BYTES, wanted, sizeof wanted));
        const char *peer_has = ask("recv 1 %d", AMOUNT);
        if (strcmp(peer_has, answer))
            broken("round %u: the peer has %s, not %s", round, peer_has, answer);
        must("send 1 %d %u", AMOUNT, round);
        if (read_all(fd, got, sizeof got) != sizeof got || memcmp(got, wanted, sizeof got))
            broken("round %u: other bytes came", round);
        if (round % EVERY == 0)
            say("rounds", "%u", round);
    }
    close(fd);
    end();
}
