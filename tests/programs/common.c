#define _GNU_SOURCE
#include "common.h"

#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>

char **extra;
char **all_arguments;

static const char *addresses[4];
static int control = -1;
static const char *volatile current = "begin";
static const char *before = "";
static char answer[512];

static void stuck(int signal)
{
    (void)signal;
    const char *text = current;
    // A failed write is detected by the comparison of outputs.
    if (write(STDOUT_FILENO, "stuck: ", 7) + write(STDOUT_FILENO, text, strlen(text)) + write(STDOUT_FILENO, "\n", 1))
        _exit(3);
    _exit(3);
}

void watchdog(void)
{
    signal(SIGALRM, stuck);
    alarm(30);
}

void begin(int argc, char **argv)
{
    all_arguments = argv;
    watchdog();
    if (argc < 6)
        broken("arguments: CONTROL HERE4 PEER4 HERE6 PEER6");
    for (int i = 0; i < 4; i++)
        addresses[i] = argv[2 + i];
    extra = argv + 6;
    // The peer identifies sockets by control connection, so a program that executes itself keeps using the same
    // connection.
    const char *inherited = getenv("CONTROL_FD");
    if (inherited) {
        control = atoi(inherited);
        return;
    }
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    snprintf(to.sun_path, sizeof to.sun_path, "%s", argv[1]);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    // A high number, because tests check which descriptor is the lowest free one.
    control = fcntl(fd, F_DUPFD, 200);
    close(fd);
    if (connect(control, (struct sockaddr *)&to, sizeof to))
        broken("cannot connect to %s: %s", argv[1], error_name(errno));
    char number[16];
    snprintf(number, sizeof number, "%d", control);
    setenv("CONTROL_FD", number, 1);
}

void end(void)
{
    if (write(STDOUT_FILENO, "end\n", 4) != 4)
        _exit(2);
    _exit(0);
}

void doing(const char *what)
{
    current = what;
}

static void print(const char *label, const char *text)
{
    char line[1024];
    int len = snprintf(line, sizeof line, "%s%s: %s\n", before, label, text);
    // Each line is one write, so that lines of several processes are not mixed.
    if (write(STDOUT_FILENO, line, (size_t)len) != len)
        _exit(2);
}

void prefix(const char *text)
{
    before = text;
}

void broken(const char *format, ...)
{
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    print("broken", text);
    print("was doing", current);
    _exit(2);
}

void say(const char *label, const char *format, ...)
{
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    int error = errno;
    print(label, text);
    doing(label);
    // The peer has no watchdog.
    if (alarm(0))
        watchdog();
    errno = error;
}

const char *error_name(int error)
{
    const char *name = strerrorname_np(error);
    return name ? name : "unknown";
}

long result(const char *label, long result)
{
    if (result == -1)
        say(label, "%s", error_name(errno));
    else
        say(label, "%ld", result);
    return result;
}

long bytes(const char *label, long result, const void *read)
{
    if (result < 0)
        say(label, "%s", error_name(errno));
    else
        say(label, "%ld \"%.*s\"", result, (int)result, (const char *)read);
    return result;
}

long amount(const char *label, long result, long wanted)
{
    if (result < 0)
        say(label, "%s", error_name(errno));
    else
        say(label, "%s", result == wanted ? "all" : result > wanted ? "more" : result ? "some" : "none");
    return result;
}

const char *bits(uint32_t events)
{
    static const struct {
        uint32_t bit;
        const char *name;
    } names[] = {{POLLIN, "IN"},   {POLLPRI, "PRI"},       {POLLOUT, "OUT"},   {POLLERR, "ERR"},
                 {POLLHUP, "HUP"}, {POLLRDHUP, "RDHUP"}, {POLLNVAL, "NVAL"},
                 {POLLRDNORM, "RDNORM"}, {POLLWRNORM, "WRNORM"}};
    static _Thread_local char text[96];
    text[0] = 0;
    for (size_t i = 0; i < LEN(names); i++)
        if (events & names[i].bit) {
            strcat(text, text[0] ? " " : "");
            strcat(text, names[i].name);
        }
    return text[0] ? text : "none";
}

void polled(const char *label, int fd, short events)
{
    struct pollfd poll_fd = {.fd = fd, .events = events};
    int ready = poll(&poll_fd, 1, 0);
    if (ready < 0)
        say(label, "%s", error_name(errno));
    else
        say(label, "%s", bits((uint32_t)(uint16_t)poll_fd.revents));
}

const char *place_name(const void *addr, socklen_t len, uint16_t port)
{
    static char text[80];
    const struct sockaddr_in *v4 = addr;
    const struct sockaddr_in6 *v6 = addr;
    char host[INET6_ADDRSTRLEN] = "?";
    uint16_t found;
    if (v4->sin_family == AF_INET && len >= sizeof *v4) {
        inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
        found = ntohs(v4->sin_port);
    } else if (v4->sin_family == AF_INET6 && len >= sizeof *v6) {
        inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
        found = ntohs(v6->sin6_port);
    } else {
        snprintf(text, sizeof text, "family %d length %u", v4->sin_family, len);
        return text;
    }
    const char *name = host;
    for (int i = 0; i < 4; i++)
        if (!strcmp(host, addresses[i]))
            name = i % 2 ? "peer" : "here";
    snprintf(text, sizeof text, "%s %s length %u", name, found == 0 ? "0" : found == port ? "port" : "other", len);
    return text;
}

static const char *exchange(const char *format, va_list list)
{
    static char line[512];
    int len = vsnprintf(line, sizeof line - 1, format, list);
    line[len++] = '\n';
    if (send(control, line, (size_t)len, MSG_NOSIGNAL) != len)
        broken("the peer is gone before: %s", line);
    size_t got = 0;
    for (;;) {
        ssize_t more = read(control, answer + got, sizeof answer - 1 - got);
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            broken("the peer is gone at: %s", line);
        got += (size_t)more;
        if (answer[got - 1] == '\n')
            break;
    }
    answer[got - 1] = 0;
    return answer;
}

const char *ask(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const char *text = exchange(format, list);
    va_end(list);
    return text;
}

long must(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const char *text = exchange(format, list);
    va_end(list);
    if (strncmp(text, "ok", 2))
        broken("peer: %s: %s", format, text);
    return strtol(text + 2, NULL, 10);
}

void peer_says(const char *label, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const char *text = exchange(format, list);
    va_end(list);
    say(label, "%s", text);
}

struct place address(const char *text, uint16_t port)
{
    struct place place = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&place.addr;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&place.addr;
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        place.len = sizeof *v4;
    } else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        place.len = sizeof *v6;
    } else {
        broken("not an address: %s", text);
    }
    return place;
}

const char *here_text(int family)
{
    return addresses[family == AF_INET ? 0 : 2];
}

struct place here(int family, uint16_t port)
{
    return address(here_text(family), port);
}

struct place peer(int family, uint16_t port)
{
    return address(addresses[family == AF_INET ? 1 : 3], port);
}

static int made(int fd)
{
    if (fd < 0)
        broken("no socket: %s", error_name(errno));
    return fd;
}

int tcp(int family)
{
    return made(socket(family, SOCK_STREAM, 0));
}

int udp(int family)
{
    return made(socket(family, SOCK_DGRAM, 0));
}

int join(int fd, struct place to)
{
    return connect(fd, (struct sockaddr *)&to.addr, to.len);
}

int bind_to(int fd, struct place to)
{
    return bind(fd, (struct sockaddr *)&to.addr, to.len);
}

uint16_t port_of(int fd)
{
    struct sockaddr_in6 own = {0};
    socklen_t len = sizeof own;
    if (getsockname(fd, (struct sockaddr *)&own, &len))
        broken("getsockname: %s", error_name(errno));
    // The port has the same offset in both families.
    return ntohs(own.sin6_port);
}

int opened(int family, int slot)
{
    static uint16_t ports[2];
    int index = family == AF_INET ? 0 : 1;
    if (!ports[index])
        ports[index] = (uint16_t)must("listen %d %s 64", 60 + index, addresses[index * 2 + 1]);
    int fd = tcp(family);
    if (join(fd, peer(family, ports[index])))
        broken("cannot connect: %s", error_name(errno));
    must("accept %d %d", 60 + index, slot);
    return fd;
}

int listener(int family, int backlog)
{
    int fd = tcp(family);
    set_int(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (bind_to(fd, here(family, 0)) || listen(fd, backlog))
        broken("cannot listen: %s", error_name(errno));
    return fd;
}

int accepted(int family, int slot)
{
    int from = listener(family, 4);
    must("connect %d %s %d", slot, here_text(family), port_of(from));
    int fd = accept(from, NULL, NULL);
    if (fd < 0)
        broken("cannot accept: %s", error_name(errno));
    close(from);
    return fd;
}

void await(int fd, short events)
{
    struct pollfd poll_fd = {.fd = fd, .events = events};
    while (poll(&poll_fd, 1, TIMEOUT) < 0 && errno == EINTR)
        ;
}

long read_all(int fd, void *to, size_t len)
{
    size_t got = 0;
    while (got < len) {
        ssize_t more = read(fd, (char *)to + got, len - got);
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            return got || !more ? (long)got : -1;
        got += (size_t)more;
    }
    return (long)got;
}

void fill(uint8_t *to, size_t len, unsigned seed, size_t from)
{
    for (size_t i = 0; i < len; i++) {
        uint32_t at = (uint32_t)(from + i) * 2654435761u + seed * 40503u;
        to[i] = (uint8_t)(at >> 24 ^ at >> 13);
    }
}

uint32_t checksum(uint32_t sum, const uint8_t *data, size_t len)
{
    for (size_t i = 0; i < len; i++)
        sum = (sum ^ data[i]) * 16777619u;
    return sum;
}

long fill_up(int fd, unsigned seed)
{
    static uint8_t part[60000];
    long sent = 0;
    for (int quiet = 0; quiet < 6; quiet++) {
        ssize_t done;
        do {
            fill(part, sizeof part, seed, (size_t)sent);
            done = send(fd, part, sizeof part, MSG_DONTWAIT);
            if (done > 0) {
                sent += done;
                quiet = 0;
            }
        } while (done > 0);
        // There may be room for some bytes although poll does not report it, and the peer may accept more at the next
        // retransmission.
        poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, 50);
    }
    return sent;
}

void set_nonblocking(int fd, bool on)
{
    int flags = fcntl(fd, F_GETFL);
    if (fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK))
        broken("F_SETFL: %s", error_name(errno));
}

int set_int(int fd, int level, int name, int value)
{
    return setsockopt(fd, level, name, &value, sizeof value);
}

int int_of(int fd, int level, int name)
{
    int value = 0;
    socklen_t len = sizeof value;
    return getsockopt(fd, level, name, &value, &len) ? -1 : value;
}

void set_timeout(int fd, int name, int milliseconds)
{
    struct timeval time = {.tv_sec = milliseconds / 1000, .tv_usec = milliseconds % 1000 * 1000};
    if (setsockopt(fd, SOL_SOCKET, name, &time, sizeof time))
        broken("timeout: %s", error_name(errno));
}

void await_sleep(pid_t process, pid_t thread)
{
    char path[64], stat[512];
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", process, thread);
    for (int i = 0; i < TIMEOUT; i++) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t len = fd < 0 ? -1 : read(fd, stat, sizeof stat - 1);
        close(fd);
        if (len <= 0)
            return;
        stat[len] = 0;
        // The state follows the name in parentheses.
        const char *state = strrchr(stat, ')');
        if (state && state[1] == ' ' && state[2] == 'S')
            return;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

pid_t interrupt(int signal)
{
    pid_t process = getpid();
    pid_t thread = (pid_t)syscall(SYS_gettid);
    pid_t child = fork();
    if (child)
        return child;
    await_sleep(process, thread);
    syscall(SYS_tgkill, process, thread, signal);
    _exit(0);
}

pid_t forked(void)
{
    pid_t child = fork();
    if (child < 0)
        broken("fork: %s", error_name(errno));
    if (!child)
        watchdog();
    return child;
}

void reap(const char *label, pid_t child)
{
    int status = 0;
    if (waitpid(child, &status, 0) != child)
        say(label, "%s", error_name(errno));
    else if (WIFSIGNALED(status))
        say(label, "signal %s", sigabbrev_np(WTERMSIG(status)));
    else
        say(label, "exit %d", WEXITSTATUS(status));
}

int file_of(size_t len, unsigned seed)
{
    int fd = made(memfd_create("file", MFD_CLOEXEC));
    uint8_t part[4096];
    for (size_t at = 0; at < len; at += sizeof part) {
        size_t now = len - at < sizeof part ? len - at : sizeof part;
        fill(part, now, seed, at);
        if (write(fd, part, now) != (ssize_t)now)
            broken("cannot write a file: %s", error_name(errno));
    }
    lseek(fd, 0, SEEK_SET);
    return fd;
}
