// Streams of the C library on a connection. They read and write by system calls that a library cannot intercept.
#define _GNU_SOURCE
#include "common.h"

static char buffer[100000];

static void lines(void)
{
    int fd = opened(AF_INET, 1);
    FILE *file = fdopen(fd, "r+");
    say("fdopen", "%s", file ? "ok" : error_name(errno));
    result("fileno", fileno(file) == fd);
    result("fprintf", fprintf(file, "line %d\n", 1));
    result("fflush", fflush(file));
    peer_says("fprintf-peer", "line 1");
    must("text 1 wordmore");
    setvbuf(file, NULL, _IOLBF, 0);
    fprintf(file, "by line\n");
    peer_says("line-buffered-peer", "line 1");
    fputs("held", file);
    result("fseek", fseek(file, 0, SEEK_CUR));
    fflush(file);
    peer_says("fputs-peer", "recv 1 4");
    result("fread", (long)fread(buffer, 1, 8, file));
    say("fread-word", "%.4s", buffer);
    must("shutdown 1");
    say("fgetc-eof", "%s", fgetc(file) == EOF ? "EOF" : "a byte");
    say("eof", "%d error %d", !!feof(file), !!ferror(file));
    result("fclose", fclose(file));
    peer_says("fclose-peer", "recv 1 1");
    result("fclose-fd", fcntl(fd, F_GETFD));
}

static void reading(void)
{
    int fd = opened(AF_INET, 1);
    FILE *in = fdopen(dup(fd), "r"), *out = fdopen(fd, "w");
    must("later 20 text 1 first");
    must("later 0 newline 1");
    say("fgets", "%.5s", fgets(buffer, 100, in) ? buffer : "nothing");
    must("text 1 12345");
    must("newline 1");
    int number = 0;
    result("fscanf", fscanf(in, "%d", &number));
    say("fscanf-number", "%d", number);
    must("text 1 a:b");
    must("newline 1");
    char *line = NULL;
    size_t room = 0;
    fgetc(in);
    result("getline", getline(&line, &room, in));
    free(line);
    memset(buffer, 'x', sizeof buffer);
    must("later 0 recv 1 100000");
    result("fwrite-large", (long)fwrite(buffer, 1, sizeof buffer, out));
    result("fwrite-large-flush", fflush(out));
    fprintf(out, "unflushed");
    result("fclose-out", fclose(out));
    peer_says("fclose-flushes", "recv 1 9");
    // The duplicate keeps the connection open.
    must("text 1 still");
    must("newline 1");
    say("fgets-after-fclose", "%.5s", fgets(buffer, 100, in) ? buffer : "nothing");
    must("rst 1");
    await(fileno(in), POLLRDHUP);
    say("fgets-reset", "%s", fgets(buffer, 100, in) ? "something" : error_name(errno));
    say("fgets-reset-state", "eof %d error %d", !!feof(in), !!ferror(in));
    fclose(in);
}

static void direct(void)
{
    int fd = opened(AF_INET, 1);
    result("dprintf", dprintf(fd, "number %d\n", 7));
    peer_says("dprintf-peer", "line 1");
    must("text 1 before");
    char text[3];
    result("recv-before-fdopen", recv(fd, text, 3, 0));
    // The stream continues after the bytes that recv has read.
    FILE *in = fdopen(fd, "r");
    result("fread-after-recv", (long)fread(buffer, 1, 3, in));
    say("fread-after-recv-bytes", "%.3s", buffer);
    result("send-beside-stream", send(fd, "sent", 4, 0));
    peer_says("send-beside-stream-peer", "recv 1 4");
    must("text 1 plain");
    result("recv-beside-stream", recv(fd, buffer, 99, 0));
    fclose(in);
    fd = opened(AF_INET, 1);
    shutdown(fd, SHUT_WR);
    signal(SIGPIPE, SIG_IGN);
    result("dprintf-shutdown", dprintf(fd, "x"));
    FILE *out = fdopen(fd, "w");
    fprintf(out, "x");
    result("fflush-shutdown", fflush(out));
    fclose(out);
    result("fdopen-closed", fdopen(fd, "r") ? 0 : -1);
    fd = opened(AF_INET, 1);
    result("fdopen-wrong-mode", fdopen(fd, "z") ? 0 : -1);
    set_nonblocking(fd, true);
    in = fdopen(fd, "r");
    say("fgetc-nonblocking", "%s", fgetc(in) == EOF ? error_name(errno) : "a byte");
    fclose(in);
}

static void standard_output(void)
{
    int fd = opened(AF_INET, 1);
    pid_t child = fork();
    if (!child) {
        dup2(fd, STDIN_FILENO);
        dup2(fd, STDOUT_FILENO);
        close(fd);
        // As in a program that inetd starts.
        int number = 0;
        if (scanf("%d", &number) != 1)
            _exit(1);
        printf("got %d\n", number);
        puts("bye");
        exit(0);
    }
    close(fd);
    must("text 1 42");
    must("newline 1");
    reap("inetd-child", child);
    peer_says("inetd-peer", "line 1");
    peer_says("inetd-peer-second", "line 1");
    peer_says("inetd-peer-eof", "recv 1 1");
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    lines();
    reading();
    direct();
    standard_output();
    end();
}
