// Arguments of getsockopt and setsockopt, control messages, and names of sockets. The output must be the same
// on a stack and on the kernel.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

// Names that libc does not have.
enum {
    OPTION_IP_PROTOCOL = 52,
    OPTION_ADDR_PREFERENCES = 72,
    OPTION_2292PKTINFO = 2,
    OPTION_2292HOPLIMIT = 8,
    OPTION_BUSY_POLL_BUDGET = 70,
    OPTION_TXREHASH = 74,
    OPTION_UDP_CORK = 1,
};

// A negative length, and a length that the compiler does not know.
static volatile socklen_t negative = -1, of_int = sizeof(int);

static void say(const char *call, long result)
{
    printf("%s: %ld %s\n", call, result, result < 0 ? strerrorname_np(errno) : "");
}

static struct sockaddr_in6 address(int family, const char *text)
{
    struct sockaddr_in6 to = {.sin6_family = family};
    void *place = family == AF_INET ? (void *)&((struct sockaddr_in *)&to)->sin_addr : (void *)&to.sin6_addr;
    if (inet_pton(family, text, place) != 1) perror(text), exit(1);
    return to;
}

static socklen_t bytes_of(int family)
{
    return family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

static int bound(int family, int type, const char *text)
{
    struct sockaddr_in6 at = address(family, text);
    int fd = socket(family, type, 0);
    if (bind(fd, (void *)&at, bytes_of(family))) perror(text), exit(1);
    return fd;
}

static struct sockaddr_in6 name_of(int fd)
{
    struct sockaddr_in6 name = {0};
    socklen_t len = sizeof name;
    getsockname(fd, (void *)&name, &len);
    return name;
}

static void get(const char *label, int fd, int level, int name, socklen_t len)
{
    int value[16] = {0};
    say(label, getsockopt(fd, level, name, value, &len));
    printf("  length %d, value %d\n", (int)len, value[0]);
}

// Linux checks a length after the level, and before the option. The level of IPv6 has no negative lengths.
static void negative_lengths(int fd)
{
    static const int levels[] = {SOL_SOCKET, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPPROTO_UDP, 136, 99};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        printf("level %d\n", levels[i]);
        get("unknown option", fd, levels[i], 999, negative);
        get("low option", fd, levels[i], 1, negative);
    }
    get("TTL", fd, IPPROTO_IP, IP_TTL, negative);
    get("hops", fd, IPPROTO_IPV6, IPV6_UNICAST_HOPS, negative);
    get("error", fd, SOL_SOCKET, SO_ERROR, negative);
    int one = 1;
    say("set", setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, negative));
}

static void null_values(int fd)
{
    int *volatile null = NULL;
    int *volatile low = (int *)8;
    for (int i = 0; i < 2; i++) {
        int *value = i ? low : null;
        say("socket", setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, value, of_int));
        say("socket, unknown", setsockopt(fd, SOL_SOCKET, 999, value, of_int));
        say("IP", setsockopt(fd, IPPROTO_IP, IP_TTL, value, of_int));
        say("IP, unknown", setsockopt(fd, IPPROTO_IP, 999, value, of_int));
        say("IPv6", setsockopt(fd, IPPROTO_IPV6, IPV6_RECVHOPLIMIT, value, of_int));
        say("IPv6, unknown", setsockopt(fd, IPPROTO_IPV6, 999, value, of_int));
        say("TCP", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, value, of_int));
        say("UDP", setsockopt(fd, IPPROTO_UDP, OPTION_UDP_CORK, value, of_int));
        say("other level", setsockopt(fd, 99, 1, value, of_int));
    }
}

static void values(int fd)
{
    // UDP-Lite's level is UDP's.
    int one = 1;
    get("cork on the level of UDP-Lite", fd, 136, OPTION_UDP_CORK, sizeof one);
    say("set", setsockopt(fd, 136, OPTION_UDP_CORK, &one, sizeof one));
    get("cork", fd, IPPROTO_UDP, OPTION_UDP_CORK, sizeof one);
    say("set of TCP, one byte", setsockopt(fd, IPPROTO_TCP, TCP_CORK, &one, 1));
    get("rehash", fd, SOL_SOCKET, OPTION_TXREHASH, sizeof one);
    say("set", setsockopt(fd, SOL_SOCKET, OPTION_TXREHASH, &one, sizeof one));
    say("set, one byte", setsockopt(fd, SOL_SOCKET, OPTION_TXREHASH, &one, 1));
    for (int budget = -1; budget < 3; budget++) {
        int value = budget == 2 ? 70000 : budget;
        say("budget", setsockopt(fd, SOL_SOCKET, OPTION_BUSY_POLL_BUDGET, &value, sizeof value));
    }
    get("original destination", fd, IPPROTO_IPV6, 80, 64);
    int port = 0;
    for (socklen_t space = 1; space <= 4; space++) {
        socklen_t len = space;
        say("protocol", getsockopt(fd, IPPROTO_IP, OPTION_IP_PROTOCOL, &port, &len));
        printf("  length %d, own port %d\n", (int)len, port == ntohs(name_of(fd).sin6_port));
    }
    struct ip_mreqn membership = {.imr_multiaddr.s_addr = htonl(0x0a090807), .imr_ifindex = 1};
    say("leave no group", setsockopt(fd, IPPROTO_IP, IP_DROP_MEMBERSHIP, &membership, sizeof membership));
    say("join no group", setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &membership, sizeof membership));
}

static void options_of_ipv6(int fd)
{
    static const int headers[] = {IPV6_HOPOPTS, IPV6_RTHDRDSTOPTS, IPV6_RTHDR, IPV6_DSTOPTS};
    char bytes[24] = {0};
    for (int i = 0; i < 4; i++) {
        get("header", fd, IPPROTO_IPV6, headers[i], 16);
        say("remove", setsockopt(fd, IPPROTO_IPV6, headers[i], bytes, 0));
        say("short", setsockopt(fd, IPPROTO_IPV6, headers[i], bytes, 4));
        say("in no units", setsockopt(fd, IPPROTO_IPV6, headers[i], bytes, 12));
    }
    for (socklen_t len = 0; len <= sizeof bytes; len += 4)
        say("packet information", setsockopt(fd, IPPROTO_IPV6, IPV6_PKTINFO, bytes, len));
    get("packet information", fd, IPPROTO_IPV6, IPV6_PKTINFO, 20);
    static const int preferences[] = {0,    1,     2,     0x100, 3,     4, 0,     8,
                                      0x400, 0x404, 0x800, 0x808, 0x102, 6, 0x1000, -1};
    for (size_t i = 0; i < sizeof preferences / sizeof *preferences; i++) {
        printf("preferences %d\n", preferences[i]);
        say("set", setsockopt(fd, IPPROTO_IPV6, OPTION_ADDR_PREFERENCES, &preferences[i], sizeof(int)));
        get("get", fd, IPPROTO_IPV6, OPTION_ADDR_PREFERENCES, sizeof(int));
    }
    say("set, short", setsockopt(fd, IPPROTO_IPV6, OPTION_ADDR_PREFERENCES, &preferences[1], 3));
}

// A socket that is bound to an IPv6 address has no IPv4.
static void bound_addresses(int type)
{
    static const char *texts[] = {"::", "::1", "::ffff:127.0.0.1", "::ffff:0.0.0.0"};
    for (int i = 0; i < 4; i++) {
        int fd = bound(AF_INET6, type, texts[i]);
        char text[64];
        struct sockaddr_in6 name = name_of(fd);
        printf("%s", texts[i]);
        if (type == SOCK_STREAM)
            printf(" is %s", inet_ntop(AF_INET6, &name.sin6_addr, text, sizeof text));
        get("", fd, IPPROTO_IPV6, IPV6_V6ONLY, sizeof(int));
        int peer = socket(AF_INET6, type, 0);
        if (type == SOCK_STREAM) {
            listen(fd, 1);
            struct sockaddr_in6 to = address(AF_INET6, i < 2 ? "::1" : "::ffff:127.0.0.1");
            to.sin6_port = name.sin6_port;
            say("connect", connect(peer, (void *)&to, sizeof to));
            int accepted = accept(fd, NULL, NULL);
            get("accepted", accepted, IPPROTO_IPV6, IPV6_V6ONLY, sizeof(int));
            close(accepted);
        }
        close(peer);
        close(fd);
    }
}

static void send_control(const char *label, int family, int level, int type, const void *value, size_t len)
{
    const char *loopback = family == AF_INET ? "127.0.0.1" : "::1";
    int receiver = bound(family, SOCK_DGRAM, loopback), sender = socket(family, SOCK_DGRAM, 0), one = 1;
    struct sockaddr_in6 to = name_of(receiver);
    union {
        struct cmsghdr header;
        char bytes[128];
    } control = {0};
    char byte = 'x';
    struct iovec buffer = {&byte, 1};
    struct msghdr message = {&to, bytes_of(family), &buffer, 1, &control, CMSG_SPACE(len), 0};
    control.header = (struct cmsghdr){CMSG_LEN(len), level, type};
    memcpy(CMSG_DATA(&control.header), value, len);
    say(label, sendmsg(sender, &message, 0));
    if (family == AF_INET6) {
        setsockopt(receiver, IPPROTO_IPV6, OPTION_2292PKTINFO, &one, sizeof one);
        setsockopt(receiver, IPPROTO_IPV6, OPTION_2292HOPLIMIT, &one, sizeof one);
        setsockopt(receiver, IPPROTO_IPV6, IPV6_RECVPKTINFO, &one, sizeof one);
        setsockopt(receiver, IPPROTO_IPV6, IPV6_RECVHOPLIMIT, &one, sizeof one);
    } else {
        setsockopt(receiver, IPPROTO_IP, IP_RECVTTL, &one, sizeof one);
    }
    say("send again", sendmsg(sender, &message, 0));
    for (int i = 0; i < 2; i++) {
        message = (struct msghdr){NULL, 0, &buffer, 1, &control, sizeof control, 0};
        long count = recvmsg(receiver, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        say("receive", count);
        if (count < 0) break;
        printf("  flags %x\n", message.msg_flags);
        for (struct cmsghdr *at = CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at)) {
            printf("  %d:%d", at->cmsg_level, at->cmsg_type);
            for (size_t byte = 0; byte < at->cmsg_len - CMSG_LEN(0); byte++)
                printf(" %02x", CMSG_DATA(at)[byte]);
            puts("");
        }
    }
    close(receiver);
    close(sender);
}

static void control_messages(void)
{
    int numbers[5] = {7};
    struct in6_pktinfo info = {0};
    send_control("no options", AF_INET, IPPROTO_IP, IP_RETOPTS, numbers, 0);
    send_control("protocol", AF_INET, IPPROTO_IP, OPTION_IP_PROTOCOL, numbers, sizeof(int));
    send_control("no protocol", AF_INET, IPPROTO_IP, OPTION_IP_PROTOCOL, &numbers[1], sizeof(int));
    send_control("short protocol", AF_INET, IPPROTO_IP, OPTION_IP_PROTOCOL, numbers, 1);
    send_control("packet information", AF_INET6, IPPROTO_IPV6, IPV6_PKTINFO, &info, 20);
    send_control("short packet information", AF_INET6, IPPROTO_IPV6, IPV6_PKTINFO, &info, 19);
    send_control("old packet information", AF_INET6, IPPROTO_IPV6, OPTION_2292PKTINFO, &info, 20);
    send_control("old hop limit", AF_INET6, IPPROTO_IPV6, OPTION_2292HOPLIMIT, numbers, sizeof(int));
    send_control("short old hop limit", AF_INET6, IPPROTO_IPV6, OPTION_2292HOPLIMIT, numbers, 1);
}

// `sendfile` to a pipe is a splice, so it reads sockets, too.
static void sendfile_to_a_pipe(void)
{
    int listener = bound(AF_INET, SOCK_STREAM, "127.0.0.1"), ours = socket(AF_INET, SOCK_STREAM, 0), ends[2];
    listen(listener, 1);
    struct sockaddr_in6 to = name_of(listener);
    if (connect(ours, (void *)&to, bytes_of(AF_INET)) || pipe(ends)) perror("connect"), exit(1);
    int theirs = accept(listener, NULL, NULL);
    off_t offset = 0;
    char bytes[16] = {0};
    say("send", send(theirs, "hello", 5, 0));
    recv(ours, bytes, 5, MSG_PEEK | MSG_WAITALL);
    say("with an offset", sendfile(ends[1], ours, &offset, 3));
    say("part", sendfile(ends[1], ours, NULL, 3));
    say("rest", sendfile(ends[1], ours, NULL, 30));
    memset(bytes, 0, sizeof bytes);
    say("read", read(ends[0], bytes, sizeof bytes));
    puts(bytes);
    fcntl(ours, F_SETFL, O_NONBLOCK);
    say("nothing", sendfile(ends[1], ours, NULL, 3));
    say("of no length", sendfile(ends[1], ours, NULL, 0));
    say("to the reading end", sendfile(ends[0], ours, NULL, 3));
    shutdown(theirs, SHUT_WR);
    recv(ours, bytes, 1, MSG_WAITALL);
    fcntl(ours, F_SETFL, 0);
    say("at the end", sendfile(ends[1], ours, NULL, 3));
}

// A datagram over IPv4 for a socket of IPv6 has the control messages of both.
static void mapped_datagram(void)
{
    int receiver = bound(AF_INET6, SOCK_DGRAM, "::"), sender = socket(AF_INET, SOCK_DGRAM, 0), one = 1;
    struct sockaddr_in6 to = address(AF_INET, "127.0.0.1");
    to.sin6_port = name_of(receiver).sin6_port;
    setsockopt(receiver, IPPROTO_IP, IP_PKTINFO, &one, sizeof one);
    setsockopt(receiver, IPPROTO_IP, IP_RECVTTL, &one, sizeof one);
    setsockopt(receiver, IPPROTO_IP, IP_RECVTOS, &one, sizeof one);
    setsockopt(receiver, IPPROTO_IPV6, IPV6_RECVPKTINFO, &one, sizeof one);
    setsockopt(receiver, IPPROTO_IPV6, IPV6_RECVHOPLIMIT, &one, sizeof one);
    setsockopt(receiver, IPPROTO_IPV6, OPTION_2292PKTINFO, &one, sizeof one);
    say("send", sendto(sender, "x", 1, 0, (void *)&to, bytes_of(AF_INET)));
    union {
        struct cmsghdr header;
        char bytes[256];
    } control = {0};
    char byte;
    struct iovec buffer = {&byte, 1};
    struct msghdr message = {NULL, 0, &buffer, 1, &control, sizeof control, 0};
    say("receive", recvmsg(receiver, &message, 0));
    for (struct cmsghdr *at = CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at))
        printf("  %d:%d, %zu bytes\n", at->cmsg_level, at->cmsg_type, at->cmsg_len);
    close(receiver);
    close(sender);
}

// Only addresses of a link have a scope.
static void scopes(void)
{
    int receiver = bound(AF_INET6, SOCK_DGRAM, "::1"), sender = socket(AF_INET6, SOCK_DGRAM, 0);
    struct sockaddr_in6 to = name_of(receiver);
    socklen_t len = sizeof to;
    to.sin6_scope_id = 1;
    say("connect with a scope", connect(sender, (void *)&to, sizeof to));
    say("peer", getpeername(sender, (void *)&to, &len));
    printf("  scope %u\n", to.sin6_scope_id);
    close(sender);
    close(receiver);
}

// Permission to send to a broadcast address is checked for each datagram.
static void broadcast(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in6 to = address(AF_INET, "127.255.255.255");
    to.sin6_port = htons(9);
    say("not permitted", sendto(fd, "x", 1, 0, (void *)&to, bytes_of(AF_INET)));
    for (int i = 0; i < 4; i++) {
        int on = i % 2 == 0;
        say("set", setsockopt(fd, SOL_SOCKET, SO_BROADCAST, &on, sizeof on));
        say("send", sendto(fd, "x", 1, 0, (void *)&to, bytes_of(AF_INET)));
    }
    close(fd);
}

static void *reset_soon(void *fd)
{
    struct linger linger = {1, 0};
    usleep(200000);
    setsockopt(*(int *)fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    close(*(int *)fd);
    return NULL;
}

// A call that has sent a part when the connection is reset returns its length; the next one fails.
static void reset_while_sending(void)
{
    enum { BYTES = 32 << 20 };
    int listener = bound(AF_INET, SOCK_STREAM, "127.0.0.1"), ours = socket(AF_INET, SOCK_STREAM, 0);
    listen(listener, 1);
    struct sockaddr_in6 to = name_of(listener);
    if (connect(ours, (void *)&to, bytes_of(AF_INET))) perror("connect"), exit(1);
    int theirs = accept(listener, NULL, NULL);
    pthread_t thread;
    pthread_create(&thread, NULL, reset_soon, &theirs);
    char *bytes = calloc(1, BYTES);
    long sent = send(ours, bytes, BYTES, MSG_NOSIGNAL);
    printf("a part: %d\n", sent > 0 && sent < BYTES);
    pthread_join(thread, NULL);
    say("next", send(ours, bytes, 1, MSG_NOSIGNAL));
    say("after that", send(ours, bytes, 1, MSG_NOSIGNAL));
    say("recv", recv(ours, bytes, 1, 0));
    free(bytes);
    close(ours);
    close(listener);
}

int main(void)
{
    static const struct {
        int family, type;
        const char *text;
    } sockets[] = {
        {AF_INET, SOCK_STREAM, "127.0.0.1"},
        {AF_INET, SOCK_DGRAM, "127.0.0.1"},
        {AF_INET6, SOCK_STREAM, "::1"},
        {AF_INET6, SOCK_DGRAM, "::1"},
    };
    for (int i = 0; i < 4; i++) {
        printf("family %d, type %d\n", sockets[i].family, sockets[i].type);
        int fd = bound(sockets[i].family, sockets[i].type, sockets[i].text);
        negative_lengths(fd);
        null_values(fd);
        if (sockets[i].type == SOCK_DGRAM) values(fd);
        if (sockets[i].family == AF_INET6) options_of_ipv6(fd);
        close(fd);
    }
    bound_addresses(SOCK_STREAM);
    bound_addresses(SOCK_DGRAM);
    control_messages();
    sendfile_to_a_pipe();
    mapped_datagram();
    scopes();
    broadcast();
    reset_while_sending();
    puts("end");
}
