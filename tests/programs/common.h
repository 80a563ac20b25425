// Common parts of the programs: arguments, the peer on the other side of the link, and the output format.
//
// A program prints one line per observation, `label: value`, and `end` as the last line. Lines contain nothing that
// differs between runs: no ephemeral port, no time, no buffer size. Therefore two runs can be compared line by line,
// one on the kernel's stack and one on another.
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

// Timeout in milliseconds for an event that should happen.
#define TIMEOUT 5000

#define LEN(array) (sizeof(array) / sizeof(array)[0])

// An address with its length.
struct place {
    struct sockaddr_storage addr;
    socklen_t len;
};

// Reads `CONTROL HERE4 PEER4 HERE6 PEER6`, connects to the peer's control socket and starts the watchdog: 30 s after the
// last line of output the program prints its current activity and exits with 3. Further arguments are in `extra`.
void begin(int argc, char **argv);
extern char **extra;
extern char **all_arguments;
// Prints `end` and exits.
_Noreturn void end(void);
// Starts or restarts the watchdog.
void watchdog(void);
// Forks a child with its own watchdog, because a child inherits none.
pid_t forked(void);
// Sets the activity that the watchdog prints.
void doing(const char *what);
// Prints a line and exits with 2: the test itself cannot continue.
_Noreturn __attribute__((format(printf, 1, 2))) void broken(const char *format, ...);

// Sets the prefix of all further labels.
void prefix(const char *text);
// Prints `label: text`.
__attribute__((format(printf, 2, 3))) void say(const char *label, const char *format, ...);
// Prints `label: N`, or the error's name if the result is -1. Returns the result and preserves errno.
long result(const char *label, long result);
// Like `result`, with the bytes that were read.
long bytes(const char *label, long result, const void *read);
// Like `result` for large counts: prints `all` if the result is `wanted`, and `some` if it is less.
long amount(const char *label, long result, long wanted);
// Prints the bits that poll currently reports for these events.
void polled(const char *label, int fd, short events);
// Returns the names of poll bits, which are the same for epoll.
const char *bits(uint32_t events);
// Returns an errno's name. 0 is `0`.
const char *error_name(int error);
// Returns a symbolic name for an address: `here`, `peer`, `any` or `loopback`, with a port as `port`, `0` or `other`.
const char *place_name(const void *addr, socklen_t len, uint16_t port);

// Sends a line to the peer and returns its answer, which is valid until the next call.
__attribute__((format(printf, 1, 2))) const char *ask(const char *format, ...);
// Like `ask`, but ends the program unless the answer starts with `ok`. Returns the number after it, or 0.
__attribute__((format(printf, 1, 2))) long must(const char *format, ...);
// Asks the peer and prints its answer.
__attribute__((format(printf, 2, 3))) void peer_says(const char *label, const char *format, ...);

// Returns the address of the tested side, or of the peer, with a port.
struct place here(int family, uint16_t port);
struct place peer(int family, uint16_t port);
struct place address(const char *text, uint16_t port);
const char *here_text(int family);
// Returns the port to which a socket is bound.
uint16_t port_of(int fd);
// Returns a socket. If it cannot be created, the program ends.
int tcp(int family);
int udp(int family);
int join(int fd, struct place to);
int bind_to(int fd, struct place to);
// Opens a connection to the peer, whose end is in `slot`.
int opened(int family, int slot);
// Accepts a connection that the peer opens to a local listener. The peer's end is in `slot`.
int accepted(int family, int slot);
// Creates a listener on a port that the kernel chooses.
int listener(int family, int backlog);

// Waits until the descriptor reports one of the events, for up to TIMEOUT. After a timeout the program continues, and
// its next line shows the difference.
void await(int fd, short events);
// Reads exactly `len` bytes, or fewer at the end of the stream or after an error.
long read_all(int fd, void *to, size_t len);
// The peer's bytes, as `send SLOT N SEED` sends them, and the checksum that it reports.
void fill(uint8_t *to, size_t len, unsigned seed, size_t from);
uint32_t checksum(uint32_t sum, const uint8_t *data, size_t len);
#define NO_BYTES 2166136261u
// Sends `fill`'s bytes until no room appears for a while. Returns their number. The peer's buffers are then full, too.
long fill_up(int fd, unsigned seed);

void set_nonblocking(int fd, bool on);
int set_int(int fd, int level, int name, int value);
// Returns the value of an option, or -1 with errno after an error.
int int_of(int fd, int level, int name);
void set_timeout(int fd, int name, int milliseconds);
// Waits until a thread of this process, or another process, sleeps in a system call.
void await_sleep(pid_t process, pid_t thread);
// Forks a child that sends this thread a signal once it sleeps in a system call.
pid_t interrupt(int signal);
// Waits for a child and prints `label: exit N` or `label: signal NAME`.
void reap(const char *label, pid_t child);
// Returns an unnamed file with `fill`'s bytes.
int file_of(size_t len, unsigned seed);

#endif
