// Unusual arguments: addresses, offsets, batches, numbers of descriptors. The output must be the same on
// a stack and on the kernel.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

// A TCP connection, and a UDP socket with its address.
static int ours, theirs, receiver;
static struct sockaddr_in to;

static void say(const char *call, long result)
{
    printf("%s: %ld %s\n", call, result, result < 0 ? strerrorname_np(errno) : "");
}

static void open_sockets(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    to = at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (void *)&at, sizeof at);
    listen(listener, 1);
    getsockname(listener, (void *)&at, &len);
    ours = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ours, (void *)&at, sizeof at)) perror("connect"), exit(1);
    theirs = accept(listener, NULL, NULL);
    close(listener);
    receiver = socket(AF_INET, SOCK_DGRAM, 0);
    bind(receiver, (void *)&to, sizeof to);
    getsockname(receiver, (void *)&to, &len);
}

// An address of length 0 is an invalid one, unless the socket needs none.
static void empty_addresses(void)
{
    int udp = socket(AF_INET, SOCK_DGRAM, 0), udp6 = socket(AF_INET6, SOCK_DGRAM, 0);
    char *low = (char *)8;
    say("sendto, empty address", sendto(udp, "x", 1, 0, (void *)&to, 0));
    say("sendto, empty low address", sendto(udp, "x", 1, 0, (void *)low, 0));
    say("sendto, null address", sendto(udp, "x", 1, 0, NULL, 16));
    say("sendto, empty address of IPv6", sendto(udp6, "x", 1, 0, (void *)&to, 0));
    connect(udp, (void *)&to, sizeof to);
    say("connected sendto, empty address", sendto(udp, "x", 1, 0, (void *)&to, 0));
    say("connected sendto, null address", sendto(udp, "x", 1, 0, NULL, 0));
    shutdown(udp, SHUT_WR);
    say("shut sendto, empty address", sendto(udp, "x", 1, MSG_NOSIGNAL, (void *)&to, 0));
    say("stream sendto, empty address", sendto(ours, "x", 1, 0, (void *)&to, 0));
    say("stream sendto, long address", sendto(ours, "x", 1, 0, (void *)&to, 129));
    close(udp);
    close(udp6);
}

// The length of a message's address is cut to that of the longest address.
static void long_addresses(void)
{
    static const int lengths[] = {0, 16, 128, 129, 4096, 0x7fffffff, -1};
    static char name[8192];
    memcpy(name, &to, sizeof to);
    int udp = socket(AF_INET, SOCK_DGRAM, 0);
    struct iovec byte = {"x", 1};
    for (int connected = 0; connected < 2; connected++) {
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            struct msghdr message = {.msg_iov = &byte, .msg_iovlen = 1, .msg_namelen = lengths[i]};
            printf("length %d\n", lengths[i]);
            say("sendmsg without an address", sendmsg(udp, &message, 0));
            message.msg_name = (void *)8;
            say("sendmsg to a low address", sendmsg(udp, &message, 0));
            message.msg_name = name;
            say("sendmsg", sendmsg(udp, &message, 0));
            say("stream sendmsg", sendmsg(ours, &message, 0));
        }
        connect(udp, (void *)&to, sizeof to);
    }
    close(udp);
}

// Sockets have no positions; a negative one is invalid on every descriptor.
static void positions(void)
{
    static const off_t offsets[] = {-1, -2, -3, 0, 5, INT64_MIN, INT64_MAX};
    char byte;
    struct iovec space = {&byte, 1}, data = {"x", 1};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        send(theirs, "y", 1, 0);
        poll(&(struct pollfd){ours, POLLIN, 0}, 1, 5000);
        printf("offset %ld\n", (long)offsets[i]);
        say("preadv2", preadv2(ours, &space, 1, offsets[i], 0));
        say("pwritev2", pwritev2(ours, &data, 1, offsets[i], 0));
        say("preadv2, unknown flag", preadv2(ours, &space, 1, offsets[i], 0x1000));
        say("pwritev2, unknown flag", pwritev2(ours, &data, 1, offsets[i], 0x1000));
    }
}

// Neither pipes nor sockets have offsets.
static void splice_offsets(void)
{
    int ends[2];
    off_t zero = 0, negative = -1, *low = (void *)8;
    pipe(ends);
    write(ends[1], "abc", 3);
    send(theirs, "y", 1, 0);
    poll(&(struct pollfd){ours, POLLIN, 0}, 1, 5000);
    say("from socket, offset of the socket", splice(ours, &zero, ends[1], NULL, 1, 0));
    say("from socket, negative offset", splice(ours, &negative, ends[1], NULL, 1, 0));
    say("from socket, bad offset", splice(ours, low, ends[1], NULL, 1, 0));
    say("from socket, offset of the pipe", splice(ours, NULL, ends[1], &zero, 1, 0));
    say("from socket, both", splice(ours, low, ends[1], low, 1, 0));
    say("from socket, no bytes", splice(ours, low, ends[1], low, 0, 0));
    say("into socket, offset of the socket", splice(ends[0], NULL, ours, &zero, 1, 0));
    say("into socket, bad offset", splice(ends[0], NULL, ours, low, 1, 0));
    say("into socket, offset of the pipe", splice(ends[0], &zero, ours, NULL, 1, 0));
    say("into socket, both", splice(ends[0], low, ours, low, 1, 0));
    say("into socket, no bytes", splice(ends[0], low, ours, low, 0, 0));
    say("into no descriptor", splice(ours, &zero, -1, &zero, 1, 0));
    say("from no descriptor", splice(-1, &zero, ours, &zero, 1, 0));
    int file = open("/dev/null", O_RDWR);
    say("into a file", splice(ours, &zero, file, &zero, 1, 0));
    say("from a file", splice(file, &zero, ours, &zero, 1, 0));
    say("between sockets", splice(ours, &zero, theirs, &zero, 1, 0));
    say("between sockets, no bytes", splice(ours, NULL, theirs, NULL, 0, 0));
    say("from socket", splice(ours, NULL, ends[1], NULL, 1, 0));
    say("into socket", splice(ends[0], NULL, ours, NULL, 1, 0));
}

enum { MANY = 1100 };

static void *drain(void *socket)
{
    long got = 0;
    char bytes[4096];
    for (long more; (more = recv(*(int *)socket, bytes, sizeof bytes, 0)) > 0;)
        got += more;
    return (void *)got;
}

// Batches of messages on a socket of the kernel, of which one has a control message.
static void batches(void)
{
    int ends[2];
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {.header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    *(int *)CMSG_DATA(&control.header) = 1;
    struct iovec byte = {"x", 1}, bad = {(void *)8, 1};
    static struct mmsghdr messages[MANY];
    for (int i = 0; i < MANY; i++)
        messages[i] = (struct mmsghdr){{.msg_iov = &byte, .msg_iovlen = 1}, 77};
    messages[0].msg_hdr.msg_control = &control;
    messages[0].msg_hdr.msg_controllen = sizeof control;

    // The third message fails, and the first one of a batch.
    socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
    messages[2].msg_hdr.msg_iov = &bad;
    say("sendmmsg, third fails", sendmmsg(ends[0], messages, 5, 0));
    say("sendmmsg, first fails", sendmmsg(ends[0], messages + 2, 2, 0));
    messages[0].msg_hdr.msg_iov = &bad;
    say("sendmmsg, first of all fails", sendmmsg(ends[0], messages, 5, 0));
    for (int i = 0; i < 5; i++)
        printf("length %d: %u\n", i, messages[i].msg_len);
    messages[0].msg_hdr.msg_iov = messages[2].msg_hdr.msg_iov = &byte;
    static const size_t lengths[] = {0, sizeof control.header - 1, sizeof control + 1, 1 << 30, -1};
    for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        control.header.cmsg_len = lengths[i];
        say("sendmsg, control message of a wrong length", sendmsg(ends[0], &messages[0].msg_hdr, 0));
    }
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    close(ends[0]);
    close(ends[1]);

    // A message that is sent in part is the last one.
    static char large[1 << 20];
    struct iovec much = {large, sizeof large};
    socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends);
    messages[1].msg_hdr.msg_iov = &much;
    say("sendmmsg, second in part", sendmmsg(ends[0], messages, 4, 0));
    printf("in part: %d\n", messages[1].msg_len > 0 && messages[1].msg_len < sizeof large);
    messages[1].msg_hdr.msg_iov = &byte;
    printf("length of the third: %u\n", messages[2].msg_len);
    close(ends[0]);
    close(ends[1]);

    // One call sends 1024 messages at most.
    socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
    pthread_t reader;
    void *got;
    pthread_create(&reader, NULL, drain, &ends[1]);
    say("sendmmsg, many", sendmmsg(ends[0], messages, MANY, 0));
    close(ends[0]);
    pthread_join(reader, &got);
    say("bytes", (long)got);
    say("length of the last", messages[1023].msg_len);
    say("length beyond", messages[1024].msg_len);
    close(ends[1]);
}

// Sets of 1024, 2048 and 8192 bits for a descriptor table of this size. The bytes after them belong to other
// data.
static void select_numbers(void)
{
    enum { ANY = 1000000 };
    static const struct {
        int high, number;
    } tables[] = {{0, FD_SETSIZE}, {1500, 1501}, {5000, 6000}};
    static unsigned char set_bytes[ANY / 8];
    fd_set *set = (fd_set *)set_bytes;
    struct timeval none = {0};
    struct timespec no_time = {0};
    struct rlimit limit, before;
    getrlimit(RLIMIT_NOFILE, &before);
    limit = before;
    limit.rlim_cur = limit.rlim_max < 8192 ? limit.rlim_max : 8192;
    setrlimit(RLIMIT_NOFILE, &limit);
    send(theirs, "y", 1, 0);
    poll(&(struct pollfd){ours, POLLIN, 0}, 1, 5000);
    for (size_t table = 0, bytes = FD_SETSIZE / 8; table < 3; table++) {
        int high = tables[table].high;
        if (high) say("dup2", dup2(ours, high));
        for (; bytes * 8 <= (size_t)high; bytes *= 2) {}
        // The last call has a closed descriptor in its set.
        for (int call = 0; call < 4 + !!high; call++) {
            memset(set_bytes, 0, bytes);
            memset(set_bytes + bytes, 0xa5, sizeof set_bytes - bytes);
            set_bytes[ours / 8] |= 1 << ours % 8;
            if (high) set_bytes[high / 8] |= 1 << high % 8;
            if (call == 4) set_bytes[(high - 1) / 8] |= 1 << (high - 1) % 8;
            int number = call == 2 ? tables[table].number : ANY;
            printf("%zu bytes, number %d\n", bytes, number);
            if (call == 1)
                say("pselect", pselect(number, set, NULL, NULL, &no_time, NULL));
            else if (call == 3)
                say("select for writing", select(number, NULL, set, NULL, &none));
            else
                say("select", select(number, set, NULL, NULL, &none));
            int changed = 0, left = 0;
            for (size_t i = 0; i < sizeof set_bytes; i++)
                i < bytes ? (left += __builtin_popcount(set_bytes[i])) : (changed += set_bytes[i] != 0xa5);
            printf("%d bits are set, %d bytes after the set have changed\n", left, changed);
        }
        if (high) close(high);
    }
    setrlimit(RLIMIT_NOFILE, &before);
}

// `poll` refuses more elements than the limit of descriptors.
static void poll_numbers(void)
{
    enum { LIMIT = 100 };
    static struct pollfd elements[LIMIT + 1];
    struct pollfd *volatile list = elements;
    struct timespec no_time = {0};
    for (int i = 0; i <= LIMIT; i++)
        elements[i] = (struct pollfd){i ? -1 : ours, POLLIN, 0};
    struct rlimit limit, before;
    getrlimit(RLIMIT_NOFILE, &before);
    limit = before;
    limit.rlim_cur = LIMIT;
    say("poll", poll(list, LIMIT + 1, 0));
    setrlimit(RLIMIT_NOFILE, &limit);
    say("poll, limit", poll(list, LIMIT, 0));
    say("poll, above the limit", poll(list, LIMIT + 1, 0));
    say("poll, above all limits", poll(list, UINT32_MAX, 0));
    say("ppoll, above the limit", ppoll(list, LIMIT + 1, &no_time, NULL));
    setrlimit(RLIMIT_NOFILE, &before);
    say("poll, limit raised", poll(list, LIMIT + 1, 0));
}

int main(void)
{
    open_sockets();
    empty_addresses();
    long_addresses();
    positions();
    splice_offsets();
    batches();
    select_numbers();
    poll_numbers();
    printf("end\n");
    return 0;
}
