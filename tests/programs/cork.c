// Corked data: TCP_CORK, MSG_MORE and SPLICE_F_MORE. The peer counts segments.
#define _GNU_SOURCE
#include "common.h"

#include <sys/sendfile.h>

static char buffer[4096];

// Waits, so that data sent too early would be noticed.
static void pause_a_little(void)
{
    must("pause 5");
}

// Prints the received bytes and the number of segments.
static void came(const char *label, int bytes)
{
    prefix(label);
    peer_says("-bytes", "recv 1 %d", bytes);
    peer_says("-segments", "segments 1");
    prefix("");
}

static void corks(int fd)
{
    result("cork", set_int(fd, IPPROTO_TCP, TCP_CORK, 1));
    result("cork-head", write(fd, buffer, 100));
    pause_a_little();
    result("cork-body", write(fd, buffer, 200));
    pause_a_little();
    result("uncork", set_int(fd, IPPROTO_TCP, TCP_CORK, 0));
    came("corked", 300);

    // Headers and a file, as nginx sends an answer.
    int file = file_of(1000, 3);
    off_t offset = 0;
    set_int(fd, IPPROTO_TCP, TCP_CORK, 1);
    result("answer-head", write(fd, buffer, 238));
    pause_a_little();
    result("answer-file", sendfile(fd, file, &offset, 1000));
    set_int(fd, IPPROTO_TCP, TCP_CORK, 0);
    came("answer", 1238);

    // The corked header of the next answer does not delay the end of the previous answer.
    set_int(fd, IPPROTO_TCP, TCP_CORK, 1);
    result("first", write(fd, buffer, 100));
    set_int(fd, IPPROTO_TCP, TCP_CORK, 0);
    set_int(fd, IPPROTO_TCP, TCP_CORK, 1);
    peer_says("first-comes", "recv 1 100");
    result("second", write(fd, buffer, 100));
    pause_a_little();
    set_int(fd, IPPROTO_TCP, TCP_CORK, 0);
    came("second", 100);

    // Without an uncork the data is sent after 200 ms.
    set_int(fd, IPPROTO_TCP, TCP_CORK, 1);
    result("ceiling", write(fd, buffer, 100));
    pause_a_little();
    result("ceiling-more", write(fd, buffer, 100));
    came("ceiling", 200);

    result("full", write(fd, buffer, 4000));
    pause_a_little();
    result("full-rest", write(fd, buffer, 96));
    set_int(fd, IPPROTO_TCP, TCP_CORK, 0);
    came("full", 4096);
    close(file);
}

static void more(int fd)
{
    result("more", send(fd, buffer, 100, MSG_MORE));
    pause_a_little();
    result("more-end", send(fd, buffer, 100, 0));
    came("more", 200);

    struct iovec part = {buffer, 50};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    struct mmsghdr many[2] = {{.msg_hdr = message}, {.msg_hdr = message}};
    result("sendto-more", sendto(fd, buffer, 10, MSG_MORE, NULL, 0));
    pause_a_little();
    result("sendmsg-more", sendmsg(fd, &message, MSG_MORE));
    pause_a_little();
    result("sendmmsg-more", sendmmsg(fd, many, 2, MSG_MORE));
    pause_a_little();
    result("writev-end", writev(fd, &part, 1));
    came("calls", 210);

    int file = file_of(100, 3), pipe_fds[2];
    off_t offset = 0;
    result("more-file", send(fd, buffer, 100, MSG_MORE));
    pause_a_little();
    result("file-end", sendfile(fd, file, &offset, 100));
    came("file", 200);
    if (pipe(pipe_fds) || write(pipe_fds[1], buffer, 100) != 100)
        broken("pipe: %s", error_name(errno));
    result("splice-more", splice(pipe_fds[0], NULL, fd, NULL, 100, SPLICE_F_MORE));
    pause_a_little();
    result("splice-end", write(fd, buffer, 100));
    came("splice", 200);
    result("shutdown-more", send(fd, buffer, 100, MSG_MORE));
    pause_a_little();
    result("shutdown", shutdown(fd, SHUT_WR));
    came("shutdown", 100);
    peer_says("shutdown-end", "drain 1");
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    close(file);
}

static void values(void)
{
    int before = tcp(AF_INET);
    result("set-before", set_int(before, IPPROTO_TCP, TCP_CORK, 1));
    result("get-before", int_of(before, IPPROTO_TCP, TCP_CORK));
    close(before);
    int fd = opened(AF_INET, 2);
    result("get-unset", int_of(fd, IPPROTO_TCP, TCP_CORK));
    set_int(fd, IPPROTO_TCP, TCP_CORK, 5);
    result("get-set", int_of(fd, IPPROTO_TCP, TCP_CORK));
    // TCP_NODELAY pushes once, and keeps the cork.
    result("push-head", write(fd, buffer, 100));
    result("push", set_int(fd, IPPROTO_TCP, TCP_NODELAY, 1));
    peer_says("push-comes", "recv 2 100");
    result("get-still", int_of(fd, IPPROTO_TCP, TCP_CORK));
    must("segments 2");
    result("held-head", write(fd, buffer, 100));
    pause_a_little();
    result("held-body", write(fd, buffer, 100));
    set_int(fd, IPPROTO_TCP, TCP_CORK, 0);
    peer_says("held-comes", "recv 2 200");
    peer_says("held-segments", "segments 2");
    close(fd);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    int fd = opened(AF_INET, 1);
    corks(fd);
    more(fd);
    close(fd);
    values();
    end();
}
