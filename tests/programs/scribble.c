// Applications that overwrite all memory that they share with the stack with nonsense, and write it to their sessions'
// descriptors.
//
//     scribble ... SECONDS
//
// Each application has sessions of all kinds. After that it makes system calls directly, without any library. Some
// exit, some are killed, and some crash because of their own writes. The output has the number of applications, and
// whether the objects to overwrite existed.
#define _GNU_SOURCE
#include "common.h"

#include <sys/syscall.h>
#include <time.h>

#define AREAS 64
#define SESSIONS 8
// Lifetime of each application in milliseconds.
#define LIFE 300

static struct {
    char *from;
    size_t len;
} areas[AREAS];
static size_t area_count;
static int sessions[SESSIONS];
static size_t session_count;
// The library's own descriptors: the stack's event, and the socket for requests to the stack.
static int event = -1, channel = -1;
static uint64_t state;

static void call(long number, long a, long b, long c, long d)
{
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = 0;
    register long r9 __asm__("r9") = 0;
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
}

static uint64_t any(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void find_areas(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], rights[8];
    unsigned long from, to;
    while (maps && area_count < AREAS && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) == 3 && !strcmp(rights, "rw-s")) {
            areas[area_count].from = (char *)from;
            areas[area_count++].len = to - from;
        }
    if (maps)
        fclose(maps);
}

static void find_own(void)
{
    char path[64], what[64];
    for (int fd = 3; fd < 1100; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t len = readlink(path, what, sizeof what - 1);
        if (len <= 0)
            continue;
        what[len] = 0;
        int type = 0;
        socklen_t size = sizeof type;
        if (strstr(what, "eventfd"))
            event = fd;
        else if (!getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_SEQPACKET)
            channel = fd;
    }
}

static void make_sessions(void)
{
    for (int i = 0; i < 3; i++)
        sessions[session_count++] = opened(AF_INET, 1 + i);
    sessions[session_count++] = accepted(AF_INET, 4);
    int from = listener(AF_INET, 4);
    must("connect 5 %s %d", here_text(AF_INET), port_of(from));
    sessions[session_count++] = from;
    int datagrams = udp(AF_INET);
    bind_to(datagrams, here(AF_INET, 0));
    sessions[session_count++] = datagrams;
    // Data arrives while it is being overwritten.
    must("later 0 send 1 100000 1");
}

// Returns values, some of which are meaningful.
static uint64_t value(void)
{
    switch (any() % 8) {
    case 0:
        return 0;
    case 1:
        return UINT64_MAX;
    case 2:
        return any() % 256;
    case 3:
        return any() % 65536 << 16;
    case 4:
        return 1ull << any() % 64;
    default:
        return any();
    }
}

// The beginnings of pages and slots contain the most data.
static void spoil_memory(void)
{
    for (int i = 0; i < 200; i++) {
        size_t area = any() % area_count;
        size_t words = areas[area].len / 8;
        size_t at = any() % 2 ? any() % words : any() % (words < 8192 ? words : 8192);
        ((volatile uint64_t *)areas[area].from)[at] = value();
    }
}

// Sends a message with descriptors, including its own sessions. One of these may be in its own queue.
static void pass(int to)
{
    union {
        char room[CMSG_SPACE(3 * sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    int passed[3] = {to, sessions[any() % session_count], STDIN_FILENO};
    struct iovec part = {"r", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.align = (struct cmsghdr){CMSG_LEN(sizeof passed), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.align), passed, sizeof passed);
    call(SYS_sendmsg, to, (long)&message, MSG_DONTWAIT | MSG_NOSIGNAL, 0);
}

static void spoil_descriptors(void)
{
    static char bytes[512];
    int fd = sessions[any() % session_count];
    switch (any() % 16) {
    case 0:
    case 1:
    case 2:
        call(SYS_sendto, fd, (long)bytes, (long)(any() % sizeof bytes), MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
    case 3:
    case 4:
        call(SYS_recvfrom, fd, (long)bytes, (long)(any() % sizeof bytes), MSG_DONTWAIT);
        break;
    case 5:
    case 6:
    case 7:
        pass(fd);
        break;
    case 8:
        if (any() % 8 == 0)
            call(SYS_shutdown, fd, (long)(any() % 3), 0, 0);
        break;
    case 9:
        call(SYS_write, event, (long)&(uint64_t){value() >> 1}, 8, 0);
        break;
    case 10:
        // After this the stack no longer listens to the socket.
        if (any() % 64 == 0)
            call(SYS_write, channel, (long)bytes, (long)(any() % 200), 0);
        break;
    default:
        call(SYS_write, event, (long)&(uint64_t){1}, 8, 0);
    }
}

static void live(unsigned seed, int report)
{
    state = seed * 0x9e3779b97f4a7c15u + 1;
    make_sessions();
    find_areas();
    find_own();
    bool is_there = area_count >= 2 && event >= 0 && channel >= 0;
    if (write(report, &is_there, 1) != 1 || !is_there)
        _exit(1);
    // Some applications close the socket that identifies them, and some first pass their sessions to themselves.
    struct timespec now, from;
    clock_gettime(CLOCK_MONOTONIC, &from);
    do {
        spoil_memory();
        spoil_descriptors();
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - from.tv_sec) * 1000 + (now.tv_nsec - from.tv_nsec) / 1000000 < LIFE);
    for (size_t i = 0; i < session_count; i++)
        pass(sessions[i]);
    if (seed % 2)
        kill(getpid(), SIGKILL);
    _exit(0);
}

int main(int argc, char **argv)
{
    begin(argc, argv);
    struct timespec now, from;
    int report[2], generations = 0, whole = 0;
    if (pipe(report))
        broken("pipe");
    clock_gettime(CLOCK_MONOTONIC, &from);
    do {
        watchdog();
        pid_t child = forked();
        if (!child) {
            unsetenv("CONTROL_FD");
            begin(argc, argv);
            live((unsigned)generations, report[1]);
        }
        bool is_there = false;
        generations++;
        struct pollfd told = {.fd = report[0], .events = POLLIN};
        if (poll(&told, 1, TIMEOUT) == 1 && read(report[0], &is_there, 1) == 1)
            whole += is_there;
        // Its own writes may keep the process from ending.
        for (int i = 0; i < LIFE * 4 && !waitpid(child, NULL, WNOHANG); i++)
            usleep(1000);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec - from.tv_sec < atoi(extra[0]));
    say("generations", "%d", generations);
    say("without what was to be spoiled", "%d", generations - whole);
    end();
}
