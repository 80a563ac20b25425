// The peer: a program on the kernel's stack that executes a test's commands, received over a Unix socket, on its side
// of the link.
//
// It answers each line with one line. Each control connection has its own process with 64 numbered sockets, which are
// closed with the connection. An answer is `ok`, possibly with a number, or an error's name. A wait ends after 10 s.
//
//     listen S ADDRESS BACKLOG   ok PORT             connect S ADDRESS PORT
//     accept L S                                     start S ADDRESS PORT      does not wait
//     send S N SEED              N bytes of `fill`   text S WORD               and waits until it is acknowledged
//     newline S                  sends one             urgent S                 sends `!` out of band
//     oob S                      ok CODE of an urgent byte
//     recv S N                   ok|eof|ERROR N SUM  drain S                   the same to the end
//     records S N LEN            ok N torn T: number of records that are not LEN times the same byte
//     line S                     ok TEXT             error S                   SO_ERROR
//     segments S                 ok N: segments with data since the last call
//     wait S N                   N bytes arrived     settle S                  all sent bytes are acknowledged
//     shutdown S                 close S             rst S                     close with linger 0
//     set S LEVEL NAME VALUE     before listen, connect: of the next socket
//     up S MS                    ok yes|no: whether the connection from `start` is established within this time
//     udp S ADDRESS              ok PORT             sendto S ADDRESS PORT N SEED
//     recvfrom S                 ok N SUM            reply S N SEED            to the sender of the last datagram
//     from S                     ok PORT of it       try S                     ok N, or EAGAIN: a datagram now
//     headers S                  ok N hops H class C: a datagram, and fields of its IP header
//     pause MS                                       later MS COMMAND          answers first, then runs the command
#define _GNU_SOURCE
#include "common.h"

#include <net/if.h>

#include <linux/sockios.h>
#include <sys/un.h>
#include <time.h>

#define SLOTS 64
#define WORDS 8

static int slots[SLOTS];
static struct place last[SLOTS];
static char out[512];
static int pending[3] = {-1, 0, 0};

static void reply(const char *text)
{
    snprintf(out, sizeof out, "%s", text);
}

static void outcome(bool good)
{
    reply(good ? "ok" : error_name(errno));
}

static void number(long value)
{
    snprintf(out, sizeof out, "ok %ld", value);
}

static void take(int slot, int fd)
{
    if (slots[slot] >= 0)
        close(slots[slot]);
    slots[slot] = fd;
    if (fd < 0)
        return;
    set_timeout(fd, SO_RCVTIMEO, 10000);
    set_timeout(fd, SO_SNDTIMEO, 10000);
    int one = 1, room = 262144;
    // A fixed buffer size, so that a few megabytes never fit into the buffers.
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    // Fails for UDP, which does not have this option.
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (pending[0] >= 0)
        setsockopt(fd, pending[0], pending[1], &pending[2], sizeof pending[2]);
    pending[0] = -1;
}

static void pause_for(long milliseconds)
{
    nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000}, NULL);
}

// Checks the condition every millisecond until it holds.
static void until(bool (*holds)(int fd, long wanted), int fd, long wanted)
{
    for (int i = 0; i < 10000; i++) {
        if (holds(fd, wanted))
            return reply("ok");
        pause_for(1);
    }
    reply("ETIMEDOUT");
}

static bool readable(int fd, long wanted)
{
    int there = 0;
    return ioctl(fd, FIONREAD, &there) || there >= wanted;
}

static bool settled(int fd, long wanted)
{
    int unsent = 0;
    struct pollfd poll_fd = {.fd = fd};
    (void)wanted;
    // A FIN uses a sequence number. After a reset nothing is acknowledged any more.
    return ioctl(fd, SIOCOUTQ, &unsent) || !unsent || (poll(&poll_fd, 1, 0) == 1 && poll_fd.revents & POLLERR);
}

static void do_listen(int slot, char **word)
{
    struct place at = address(word[2], 0);
    take(slot, socket(at.addr.ss_family, SOCK_STREAM, 0));
    int fd = slots[slot];
    if (bind_to(fd, at) || listen(fd, atoi(word[3])))
        return outcome(false);
    number(port_of(fd));
}

static void do_connect(int slot, char **word, int flags)
{
    struct place to = address(word[2], (uint16_t)atoi(word[3]));
    int type = !strcmp(word[0], "join") ? SOCK_DGRAM : SOCK_STREAM;
    take(slot, socket(to.addr.ss_family, type | flags, 0));
    outcome(!join(slots[slot], to) || errno == EINPROGRESS);
}

static void do_send(int fd, long len, unsigned seed)
{
    uint8_t part[16384];
    long sent = 0;
    while (sent < len) {
        size_t now = (size_t)(len - sent < (long)sizeof part ? len - sent : (long)sizeof part);
        fill(part, now, seed, (size_t)sent);
        ssize_t done = send(fd, part, now, MSG_NOSIGNAL);
        if (done < 0)
            return outcome(false);
        sent += done;
    }
    number(sent);
}

static void do_recv(int fd, long len)
{
    static uint8_t part[65536];
    uint32_t sum = NO_BYTES;
    long got = 0;
    const char *how = "ok";
    while (got < len) {
        size_t now = (size_t)(len - got < (long)sizeof part ? len - got : (long)sizeof part);
        ssize_t more = recv(fd, part, now, 0);
        if (more <= 0) {
            how = more ? error_name(errno) : "eof";
            break;
        }
        sum = checksum(sum, part, (size_t)more);
        got += more;
    }
    snprintf(out, sizeof out, "%s %ld %08x", how, got, sum);
}

static void do_records(int fd, long count, size_t len)
{
    uint8_t record[1000];
    long torn = 0, got = 0;
    while (got < count && recv(fd, record, len, MSG_WAITALL) == (ssize_t)len) {
        got++;
        torn += !!memcmp(record, record + 1, len - 1);
    }
    snprintf(out, sizeof out, "ok %ld torn %ld", got, torn);
}

static void do_segments(int slot)
{
    static uint32_t before[SLOTS];
    // libc's structure ends before `tcpi_data_segs_in`. This is its offset in the kernel's structure.
    enum { DATA_SEGS_IN = 152 };
    uint8_t info[DATA_SEGS_IN + 4];
    uint32_t count = 0;
    socklen_t len = sizeof info;
    if (getsockopt(slots[slot], IPPROTO_TCP, TCP_INFO, info, &len) || len < sizeof info)
        return outcome(false);
    memcpy(&count, info + DATA_SEGS_IN, sizeof count);
    number(count - before[slot]);
    before[slot] = count;
}

static void do_line(int fd)
{
    char text[256];
    size_t len = 0;
    ssize_t more = 0;
    while (len < sizeof text - 1 && (more = recv(fd, text + len, 1, 0)) == 1 && text[len] != '\n')
        len++;
    text[len] = 0;
    snprintf(out, sizeof out, "%s %s", more == 1 ? "ok" : more ? error_name(errno) : "eof", text);
}

static void do_sendto(int fd, struct place to, long len, unsigned seed)
{
    static uint8_t data[65536];
    fill(data, (size_t)len, seed, 0);
    struct sockaddr *addr = to.len ? (struct sockaddr *)&to.addr : NULL;
    outcome(sendto(fd, data, (size_t)len, 0, addr, to.len) == len);
}

static void do_recvfrom(int slot, int flags)
{
    static uint8_t data[65536];
    last[slot].len = sizeof last[slot].addr;
    ssize_t len =
        recvfrom(slots[slot], data, sizeof data, flags, (struct sockaddr *)&last[slot].addr, &last[slot].len);
    if (len < 0)
        return outcome(false);
    snprintf(out, sizeof out, "ok %zd %08x", len, checksum(NO_BYTES, data, (size_t)len));
}

// Returns header fields of an accepted connection's packets, and the peer's segment size.
static void do_marks(int fd)
{
    int on = 1, mss = 0, tos = -1, ttl = -1;
    char room[256];
    struct msghdr header = {.msg_control = room, .msg_controllen = sizeof room};
    socklen_t len = sizeof room;
    setsockopt(fd, IPPROTO_IP, IP_RECVTOS, &on, sizeof on);
    setsockopt(fd, IPPROTO_IP, IP_RECVTTL, &on, sizeof on);
    if (getsockopt(fd, IPPROTO_IP, IP_PKTOPTIONS, room, &len))
        return outcome(false);
    header.msg_controllen = len;
    for (struct cmsghdr *found = CMSG_FIRSTHDR(&header); found; found = CMSG_NXTHDR(&header, found)) {
        if (found->cmsg_type == IP_TOS)
            tos = *CMSG_DATA(found);
        else if (found->cmsg_type == IP_TTL)
            memcpy(&ttl, CMSG_DATA(found), sizeof ttl);
    }
    len = sizeof mss;
    getsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &mss, &len);
    snprintf(out, sizeof out, "ok tos %x ttl %d segment %d", tos, ttl, mss);
}

static void do_up(int fd, int milliseconds)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLOUT};
    poll(&poll_fd, 1, milliseconds);
    // A reset sets the error and wakes pollers before the hang-up is set.
    bool refused = poll_fd.revents & (POLLHUP | POLLERR);
    reply(refused ? "ok refused" : poll_fd.revents & POLLOUT ? "ok yes" : "ok no");
}

static void do_close(int slot, bool abort)
{
    struct linger linger = {.l_onoff = 1};
    if (abort)
        setsockopt(slots[slot], SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    outcome(!close(slots[slot]));
    slots[slot] = -1;
}

static void do_headers(int slot)
{
    static uint8_t data[65536];
    int fd = slots[slot];
    set_int(fd, IPPROTO_IP, IP_RECVTTL, 1);
    set_int(fd, IPPROTO_IP, IP_RECVTOS, 1);
    set_int(fd, IPPROTO_IPV6, IPV6_RECVHOPLIMIT, 1);
    set_int(fd, IPPROTO_IPV6, IPV6_RECVTCLASS, 1);
    char room[256];
    struct iovec part = {data, sizeof data};
    struct msghdr message = {&last[slot].addr, sizeof last[slot].addr, &part, 1, room, sizeof room, 0};
    long got = recvmsg(fd, &message, 0);
    last[slot].len = message.msg_namelen;
    if (got < 0)
        return outcome(false);
    int hops = -1, class = -1;
    for (struct cmsghdr *one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one)) {
        bool v4 = one->cmsg_level == IPPROTO_IP;
        if (one->cmsg_type == (v4 ? IP_TTL : IPV6_HOPLIMIT))
            memcpy(&hops, CMSG_DATA(one), sizeof hops);
        if (one->cmsg_type == (v4 ? IP_TOS : IPV6_TCLASS))
            class = *CMSG_DATA(one);
    }
    snprintf(out, sizeof out, "ok %ld hops %d class %d", got, hops, class);
}

static void do_udp(int slot, char **word)
{
    struct place at = address(word[2], 0);
    take(slot, socket(at.addr.ss_family, SOCK_DGRAM, 0));
    if (bind_to(slots[slot], at))
        return outcome(false);
    number(port_of(slots[slot]));
}

// Joins a group on the first interface.
static void do_member(int fd, struct place group)
{
    struct group_req asked = {.gr_interface = if_nametoindex("k0")};
    memcpy(&asked.gr_group, &group.addr, group.len);
    int level = group.addr.ss_family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6;
    outcome(!setsockopt(fd, level, MCAST_JOIN_GROUP, &asked, sizeof asked));
}

static void do_udp_verb(int slot, char **word)
{
    const char *verb = word[0];
    int fd = slots[slot];
    if (!strcmp(verb, "udp"))
        do_udp(slot, word);
    else if (!strcmp(verb, "join"))
        do_connect(slot, word, 0);
    else if (!strcmp(verb, "member"))
        do_member(fd, address(word[2], 0));
    else if (!strcmp(verb, "sendto"))
        do_sendto(fd, address(word[2], (uint16_t)atoi(word[3])), atol(word[4]), (unsigned)atoi(word[5]));
    else if (!strcmp(verb, "reply"))
        do_sendto(fd, last[slot], atol(word[2]), (unsigned)atoi(word[3]));
    else if (!strcmp(verb, "recvfrom"))
        do_recvfrom(slot, 0);
    else if (!strcmp(verb, "headers"))
        do_headers(slot);
    else if (!strcmp(verb, "try"))
        do_recvfrom(slot, MSG_DONTWAIT);
    else if (!strcmp(verb, "from"))
        number(ntohs(((struct sockaddr_in *)&last[slot].addr)->sin_port));
    else
        reply("what?");
}

static void do_verb(char **word)
{
    const char *verb = word[0];
    int slot = atoi(word[1]) % SLOTS;
    int fd = slots[slot];
    if (!strcmp(verb, "listen"))
        do_listen(slot, word);
    else if (!strcmp(verb, "accept")) {
        int new = accept(fd, NULL, NULL);
        outcome(new >= 0);
        take(atoi(word[2]) % SLOTS, new);
    } else if (!strcmp(verb, "connect"))
        do_connect(slot, word, 0);
    else if (!strcmp(verb, "start"))
        do_connect(slot, word, SOCK_NONBLOCK);
    else if (!strcmp(verb, "send"))
        do_send(fd, atol(word[2]), (unsigned)atoi(word[3]));
    else if (!strcmp(verb, "text")) {
        if (send(fd, word[2], strlen(word[2]), MSG_NOSIGNAL) < 0)
            outcome(false);
        else
            until(settled, fd, 0);
    } else if (!strcmp(verb, "oob")) {
        unsigned char byte = 0;
        await(fd, POLLPRI);
        if (recv(fd, &byte, 1, MSG_OOB) == 1)
            number(byte);
        else
            reply(error_name(errno));
    } else if (!strcmp(verb, "urgent")) {
        if (send(fd, "!", 1, MSG_OOB | MSG_NOSIGNAL) < 0)
            outcome(false);
        else
            until(settled, fd, 0);
    } else if (!strcmp(verb, "newline"))
        outcome(send(fd, "\n", 1, MSG_NOSIGNAL) == 1);
    else if (!strcmp(verb, "recv"))
        do_recv(fd, atol(word[2]));
    else if (!strcmp(verb, "drain"))
        do_recv(fd, 1L << 40);
    else if (!strcmp(verb, "records"))
        do_records(fd, atol(word[2]), (size_t)atol(word[3]));
    else if (!strcmp(verb, "segments"))
        do_segments(slot);
    else if (!strcmp(verb, "line"))
        do_line(fd);
    else if (!strcmp(verb, "marks"))
        do_marks(fd);
    else if (!strcmp(verb, "up"))
        do_up(fd, atoi(word[2]));
    else if (!strcmp(verb, "error"))
        reply(error_name(int_of(fd, SOL_SOCKET, SO_ERROR)));
    else if (!strcmp(verb, "wait"))
        until(readable, fd, atol(word[2]));
    else if (!strcmp(verb, "settle"))
        until(settled, fd, 0);
    else if (!strcmp(verb, "shutdown")) {
        if (shutdown(fd, SHUT_WR))
            outcome(false);
        else
            until(settled, fd, 0);
    } else if (!strcmp(verb, "close") || !strcmp(verb, "rst"))
        do_close(slot, !strcmp(verb, "rst"));
    else if (!strcmp(verb, "set")) {
        for (int i = 0; i < 3; i++)
            pending[i] = atoi(word[2 + i]);
        reply("ok");
    } else if (!strcmp(verb, "pause")) {
        pause_for(atol(word[1]));
        reply("ok");
    } else
        do_udp_verb(slot, word);
}

static void obey(char *line, int client)
{
    char *words[WORDS + 1] = {NULL}, *rest = NULL;
    int count = 0;
    for (char *word = strtok_r(line, " ", &rest); word && count < WORDS; word = strtok_r(NULL, " ", &rest))
        words[count++] = word;
    for (int i = count; i < WORDS; i++)
        words[i] = "0";
    bool later = !strcmp(words[0], "later");
    if (!later)
        do_verb(words);
    else
        reply("ok");
    strcat(out, "\n");
    if (send(client, out, strlen(out), MSG_NOSIGNAL) < 0)
        _exit(0);
    if (later) {
        pause_for(atol(words[1]));
        do_verb(words + 2);
    }
}

static void serve(int client)
{
    char line[256];
    size_t len = 0;
    for (int i = 0; i < SLOTS; i++)
        slots[i] = -1;
    ssize_t more;
    while ((more = read(client, line + len, 1)) == 1) {
        if (line[len] != '\n') {
            len += len < sizeof line - 1;
            continue;
        }
        line[len] = 0;
        len = 0;
        obey(line, client);
    }
    _exit(0);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        broken("arguments: SOCKET");
    signal(SIGCHLD, SIG_IGN);
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s", argv[1]);
    int from = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(from, (struct sockaddr *)&at, sizeof at) || listen(from, 8))
        broken("cannot listen on %s: %s", argv[1], error_name(errno));
    say("peer", "ready");
    for (;;) {
        int client = accept(from, NULL, NULL);
        if (client >= 0 && !fork())
            serve(client);
        close(client);
    }
}
