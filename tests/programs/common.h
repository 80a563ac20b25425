// What the programs share: their arguments, the peer on the other side of the link, and how an observation is printed.
//
// A program prints one line per observation, `label: what was seen`, and `end` last. A line holds nothing that differs
// from run to run: no ephemeral port, no time, no size of a buffer. So two runs can be compared line by line, one on
// the kernel's stack and one on another.
#ifndef COMMON_H
#define COMMON_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

// Milliseconds after which something that should happen has not.
#define TIMEOUT 5000

#define LEN(array) (sizeof(array) / sizeof(array)[0])

// An address with its length.
struct place {
    struct sockaddr_storage addr;
    socklen_t len;
};

// Reads `CONTROL HERE4 PEER4 HERE6 PEER6`, connects to the peer's control socket and starts the watchdog: after 30 s
// the program prints what it was doing and exits with 3. The arguments after these are in `extra`.
void begin(int argc, char **argv);
extern char **extra;
extern char **all_arguments;
// Prints `end` and exits.
_Noreturn void end(void);
// Starts the watchdog.
void watchdog(void);
// A child with a watchdog of its own: it inherits none.
pid_t forked(void);
// What the watchdog prints.
void doing(const char *what);
// Prints a line and exits with 2: the test itself could not go on.
_Noreturn __attribute__((format(printf, 1, 2))) void broken(const char *format, ...);

// What every label starts with from now on.
void prefix(const char *text);
// Prints `label: text`.
__attribute__((format(printf, 2, 3))) void say(const char *label, const char *format, ...);
// Prints `label: N`, or the error's name where the result is -1. Returns the result; errno is left alone.
long result(const char *label, long result);
// The same with the bytes that were read.
long bytes(const char *label, long result, const void *read);
// The same for large counts: `all` where the result is `wanted`, `some` where it is less.
long amount(const char *label, long result, long wanted);
// Prints the bits that poll reports now for these events.
void polled(const char *label, int fd, short events);
// Names of poll bits, which are those of epoll too.
const char *bits(uint32_t events);
// An errno's name; 0 is `0`.
const char *error_name(int error);
// An address as the test knows it: `here`, `peer`, `any`, `loopback` with a port as `port`, `0` or `other`.
const char *place_name(const void *addr, socklen_t len, uint16_t port);

// Sends the peer a line and returns its answer, which lives until the next call.
__attribute__((format(printf, 1, 2))) const char *ask(const char *format, ...);
// The same; anything but an answer that starts with `ok` ends the program. Returns the number after it, or 0.
__attribute__((format(printf, 1, 2))) long must(const char *format, ...);
// Prints the peer's answer.
__attribute__((format(printf, 2, 3))) void peer_says(const char *label, const char *format, ...);

// The tested side's and the peer's address with a port.
struct place here(int family, uint16_t port);
struct place peer(int family, uint16_t port);
struct place address(const char *text, uint16_t port);
const char *here_text(int family);
// The port a socket is bound to.
uint16_t port_of(int fd);
// A socket; the program ends where there is none.
int tcp(int family);
int udp(int family);
int join(int fd, struct place to);
int bind_to(int fd, struct place to);
// A connection that this side has opened; the peer's end is in `slot`.
int opened(int family, int slot);
// A connection that the peer has opened to a listener of this side; its end is in `slot`.
int accepted(int family, int slot);
// A listener of this side on a port of the kernel's choice.
int listener(int family, int backlog);

// Waits until the descriptor reports one of the events; the program goes on after TIMEOUT all the same, and what it
// prints next says so.
void await(int fd, short events);
// Reads exactly so many bytes, fewer at the end or an error.
long read_all(int fd, void *to, size_t len);
// The peer's bytes: those that `send SLOT N SEED` sends, and the checksum that it reports.
void fill(uint8_t *to, size_t len, unsigned seed, size_t from);
uint32_t checksum(uint32_t sum, const uint8_t *data, size_t len);
#define NO_BYTES 2166136261u
// Sends `fill`'s bytes until nothing fits for a while; returns how many. The peer's side is full too then.
long fill_up(int fd, unsigned seed);

void set_nonblocking(int fd, bool on);
int set_int(int fd, int level, int name, int value);
// The value of an option; -1 with errno on an error.
int int_of(int fd, int level, int name);
void set_timeout(int fd, int name, int milliseconds);
// Waits until a thread of this process, or another process, sleeps in a system call.
void await_sleep(pid_t process, pid_t thread);
// A child that sends this thread a signal as soon as it sleeps in a system call.
pid_t interrupt(int signal);
// Waits for a child; prints `label: exit N` or `label: signal NAME`.
void reap(const char *label, pid_t child);
// A file without a name that holds `fill`'s bytes.
int file_of(size_t len, unsigned seed);

#endif
