// sendfile and splice between files, pipes and connections, without copying the bytes through the program.
#define _GNU_SOURCE
#include "common.h"

#include <sys/sendfile.h>
#include <sys/syscall.h>

static char buffer[65536];

static void from_file(int fd)
{
    int file = file_of(10000, 3);
    off_t offset = 0;
    // The peer's checksums are the same as for `send S N SEED`.
    result("sendfile-offset", sendfile(fd, file, &offset, 1000));
    say("sendfile-offset-moved", "%ld", (long)offset);
    result("sendfile-offset-file-stays", lseek(file, 0, SEEK_CUR));
    peer_says("sendfile-offset-peer", "recv 1 1000");
    result("sendfile-position", sendfile(fd, file, NULL, 500));
    result("sendfile-position-file-moves", lseek(file, 0, SEEK_CUR));
    peer_says("sendfile-position-peer", "recv 1 500");
    offset = 9990;
    result("sendfile-past-end", sendfile(fd, file, &offset, 1000));
    say("sendfile-past-end-offset", "%ld", (long)offset);
    peer_says("sendfile-past-end-peer", "recv 1 10");
    result("sendfile-at-end", sendfile(fd, file, &offset, 1000));
    say("sendfile-at-end-offset", "%ld", (long)offset);
    offset = 20000;
    result("sendfile-beyond", sendfile(fd, file, &offset, 10));
    offset = -1;
    result("sendfile-negative", sendfile(fd, file, &offset, 10));
    offset = 0;
    result("sendfile-none", sendfile(fd, file, &offset, 0));
    // Requests more bytes than the file has, at the file's own position.
    result("sendfile-rest", sendfile(fd, file, NULL, 100000));
    peer_says("sendfile-rest-peer", "recv 1 9500");
    result("sendfile-rest-position", lseek(file, 0, SEEK_CUR));

    if (ftruncate(file, 300))
        broken("ftruncate: %s", error_name(errno));
    offset = 100;
    result("sendfile-truncated", sendfile(fd, file, &offset, 1000));
    say("sendfile-truncated-offset", "%ld", (long)offset);
    peer_says("sendfile-truncated-peer", "recv 1 200");
    result("sendfile-truncated-position", sendfile(fd, file, NULL, 1000));
    close(file);
}

static void refused(int fd)
{
    int file = file_of(100, 3);
    int pipe_fds[2];
    if (pipe(pipe_fds))
        broken("pipe");
    off_t offset = 0;
    result("sendfile-bad-file", sendfile(fd, 199, &offset, 10));
    result("sendfile-bad-socket", sendfile(199, file, &offset, 10));
    result("sendfile-from-socket", sendfile(file, fd, NULL, 10));
    result("sendfile-from-pipe-with-offset", sendfile(fd, pipe_fds[0], &offset, 10));
    result("splice-no-pipe", splice(fd, NULL, fd, NULL, 10, 0));
    loff_t long_offset = 0;
    result("splice-socket-offset", splice(fd, &long_offset, pipe_fds[1], NULL, 10, 0));
    int unconnected = tcp(AF_INET);
    signal(SIGPIPE, SIG_IGN);
    result("sendfile-unconnected", sendfile(unconnected, file, &offset, 10));
    say("sendfile-unconnected-offset", "%ld", (long)offset);
    result("splice-unconnected", splice(unconnected, NULL, pipe_fds[1], NULL, 10, 0));
    close(unconnected);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    close(file);
}

static void large(void)
{
    int fd = opened(AF_INET, 2);
    int file = file_of(16000000, 9);
    off_t offset = 0;
    set_nonblocking(fd, true);
    amount("sendfile-nonblocking", sendfile(fd, file, &offset, 16000000), 16000000);
    say("sendfile-nonblocking-offset", "%s", offset > 0 && offset < 16000000 ? "between" : "?");
    // There may be room for some bytes although poll does not report it.
    for (int quiet = 0; quiet < 3; quiet++) {
        while (sendfile(fd, file, &offset, 16000000) > 0)
            quiet = 0;
        poll(NULL, 0, 50);
    }
    off_t before = offset;
    result("sendfile-full", sendfile(fd, file, &offset, 16000000));
    say("sendfile-full-offset", "%s", offset == before ? "stays" : "moves");
    set_nonblocking(fd, false);
    must("later 20 recv 2 16000000");
    amount("sendfile-blocking", sendfile(fd, file, &offset, 16000000), 16000000 - before);
    say("sendfile-blocking-offset", "%ld", (long)offset);
    close(fd);
    close(file);

    fd = opened(AF_INET, 3);
    file = file_of(300000, 9);
    offset = 0;
    amount("sendfile-all", sendfile(fd, file, &offset, 300000), 300000);
    result("sendfile-then-send", send(fd, "tail", 4, 0));
    close(fd);
    peer_says("sendfile-all-peer", "drain 3");
    close(file);
}

static void ended(void)
{
    int file = file_of(1000, 3);
    off_t offset = 0;
    signal(SIGPIPE, SIG_IGN);
    int fd = opened(AF_INET, 2);
    shutdown(fd, SHUT_WR);
    result("sendfile-after-shutdown", sendfile(fd, file, &offset, 100));
    say("sendfile-after-shutdown-offset", "%ld", (long)offset);
    close(fd);
    fd = opened(AF_INET, 2);
    must("rst 2");
    await(fd, POLLRDHUP);
    result("sendfile-after-reset", sendfile(fd, file, &offset, 100));
    result("sendfile-after-reset-again", sendfile(fd, file, &offset, 100));
    say("sendfile-after-reset-offset", "%ld", (long)offset);
    close(fd);
    close(file);
}

// A pipe with too little room: splice moves as many bytes as fit. Without room the call waits or fails, depending on
// the flag and the pipe's descriptor.
static void full_pipe(int fd, int *pipe_fds)
{
    int size = fcntl(pipe_fds[1], F_SETPIPE_SZ, 16384), there = 0;
    must("send 1 60000 4");
    must("settle 1");
    result("splice-in-blocking-fits", splice(fd, NULL, pipe_fds[1], NULL, 60000, 0) <= size);
    result("splice-in-empties", read_all(pipe_fds[0], buffer, 1));
    set_nonblocking(pipe_fds[1], true);
    while (write(pipe_fds[1], "x", 1) == 1)
        ;
    set_nonblocking(pipe_fds[1], false);
    result("splice-in-full-flag", splice(fd, NULL, pipe_fds[1], NULL, 1000, SPLICE_F_NONBLOCK));
    set_nonblocking(pipe_fds[1], true);
    result("splice-in-full-nonblocking", splice(fd, NULL, pipe_fds[1], NULL, 1000, 0));
    set_nonblocking(pipe_fds[1], false);
    result("splice-in-unknown-flag", splice(fd, NULL, pipe_fds[1], NULL, 1000, 64));
    int file = file_of(1, 1);
    result("splice-in-file", splice(fd, NULL, file, NULL, 1000, 0));
    result("splice-out-file", splice(file, NULL, fd, NULL, 1000, 0));
    result("splice-in-wrong-end", splice(fd, NULL, pipe_fds[0], NULL, 1000, SPLICE_F_NONBLOCK));
    close(file);
    while (!ioctl(pipe_fds[0], FIONREAD, &there) && there > 0 && read(pipe_fds[0], buffer, sizeof buffer) > 0)
        ;
    result("splice-by-number", syscall(SYS_splice, fd, NULL, pipe_fds[1], NULL, 1000, 0) > 0);
    while (!ioctl(pipe_fds[0], FIONREAD, &there) && there > 0 && read(pipe_fds[0], buffer, sizeof buffer) > 0)
        ;
    // Reads the rest, so that the next lines start with an empty pipe.
    while (recv(fd, buffer, sizeof buffer, MSG_DONTWAIT) > 0)
        ;
    set_nonblocking(pipe_fds[0], false);
    must("later 30 text 1 y");
    result("splice-in-waits-for-data", splice(fd, NULL, pipe_fds[1], NULL, 1000, SPLICE_F_NONBLOCK));
    read_all(pipe_fds[0], buffer, 1);
    set_nonblocking(pipe_fds[0], true);
    result("splice-out-nonblocking-pipe", splice(pipe_fds[0], NULL, fd, NULL, 100, 0));
}

static void splices(int fd)
{
    int pipe_fds[2];
    if (pipe(pipe_fds))
        broken("pipe");
    must("text 1 spliced");
    result("splice-in", splice(fd, NULL, pipe_fds[1], NULL, 100, 0));
    bytes("splice-in-pipe", read(pipe_fds[0], buffer, 100), buffer);
    // The flag applies only to the pipe. The descriptor's flags determine whether the socket blocks.
    must("later 30 text 1 flag");
    result("splice-in-flag-blocks", splice(fd, NULL, pipe_fds[1], NULL, 100, SPLICE_F_NONBLOCK));
    bytes("splice-in-flag-pipe", read(pipe_fds[0], buffer, 100), buffer);
    set_nonblocking(fd, true);
    result("splice-in-nonblocking", splice(fd, NULL, pipe_fds[1], NULL, 100, 0));
    set_nonblocking(fd, false);
    must("text 1 abcdef");
    result("splice-in-part", splice(fd, NULL, pipe_fds[1], NULL, 4, SPLICE_F_MOVE | SPLICE_F_MORE));
    bytes("splice-in-rest", recv(fd, buffer, 100, 0), buffer);
    bytes("splice-in-part-pipe", read(pipe_fds[0], buffer, 100), buffer);
    must("later 30 text 1 waited");
    result("splice-in-blocks", splice(fd, NULL, pipe_fds[1], NULL, 100, 0));
    read_all(pipe_fds[0], buffer, 6);

    if (write(pipe_fds[1], "to the socket", 13) != 13)
        broken("write");
    result("splice-out", splice(pipe_fds[0], NULL, fd, NULL, 100, 0));
    peer_says("splice-out-peer", "recv 1 13");
    set_nonblocking(pipe_fds[0], true);
    result("splice-out-empty", splice(pipe_fds[0], NULL, fd, NULL, 100, SPLICE_F_NONBLOCK));
    result("splice-none", splice(fd, NULL, pipe_fds[1], NULL, 0, 0));
    // sendfile also accepts a pipe as input.
    if (write(pipe_fds[1], "piped", 5) != 5)
        broken("write");
    int file = file_of(100, 3);
    loff_t offset = 0;
    result("splice-file-to-pipe", splice(file, &offset, pipe_fds[1], NULL, 20, 0));
    result("splice-file-out", splice(pipe_fds[0], NULL, fd, NULL, 100, 0));
    peer_says("splice-file-peer", "recv 1 25");
    close(file);

    full_pipe(fd, pipe_fds);
    must("text 1 last");
    must("shutdown 1");
    await(fd, POLLRDHUP);
    result("splice-before-eof", splice(fd, NULL, pipe_fds[1], NULL, 100, 0));
    result("splice-eof", splice(fd, NULL, pipe_fds[1], NULL, 100, 0));
    close(pipe_fds[1]);
    set_nonblocking(pipe_fds[0], false);
    read_all(pipe_fds[0], buffer, 100);
    result("splice-out-pipe-eof", splice(pipe_fds[0], NULL, fd, NULL, 100, 0));
    close(pipe_fds[0]);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    int fd = opened(AF_INET, 1);
    from_file(fd);
    refused(fd);
    splices(fd);
    close(fd);
    large();
    ended();
    end();
}
