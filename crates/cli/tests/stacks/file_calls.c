// Calls that exist for all files, on sockets, epoll sets and numbers of closed sockets. The output must be
// the same on a stack and on the kernel.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int ours, theirs, sender, receiver, unix_ends[2];

static void say(const char *call, long result)
{
    printf("%s: %ld %s\n", call, result, result < 0 ? strerrorname_np(errno) : "");
}

static void open_connection(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (void *)&at, sizeof at);
    listen(listener, 1);
    getsockname(listener, (void *)&at, &len);
    ours = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ours, (void *)&at, sizeof at)) perror("connect"), exit(1);
    theirs = accept(listener, NULL, NULL);
    close(listener);
}

static void open_datagrams(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    receiver = socket(AF_INET, SOCK_DGRAM, 0);
    bind(receiver, (void *)&at, sizeof at);
    getsockname(receiver, (void *)&at, &len);
    sender = socket(AF_INET, SOCK_DGRAM, 0);
    connect(sender, (void *)&at, sizeof at);
}

static int poll_one(int fd, int events)
{
    struct pollfd one = {fd, events, 0};
    int ready = poll(&one, 1, 0);
    return ready < 0 ? ready : one.revents;
}

// Sends a descriptor over a Unix socket.
static long pass(int fd)
{
    char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec byte = {"x", 1};
    struct msghdr message = {.msg_iov = &byte, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    return sendmsg(unix_ends[0], &message, 0);
}

static void closed_numbers(void)
{
    int files[2], closed = ours, in_use = theirs;
    pipe(files);
    socketpair(AF_UNIX, SOCK_DGRAM, 0, unix_ends);
    close(closed);
    say("poll", poll_one(closed, POLLIN));
    struct pollfd both[] = {{closed, POLLIN, 0}, {in_use, POLLOUT, 0}, {files[1], POLLOUT, 0}};
    say("poll of three", poll(both, 3, 1000));
    printf("%x %x %x\n", both[0].revents, both[1].revents & POLLOUT, both[2].revents);
    struct timespec no_wait = {0, 0};
    struct pollfd one = {closed, 0, 0};
    say("ppoll", ppoll(&one, 1, &no_wait, NULL));
    printf("%x\n", one.revents);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(closed, &set);
    say("select", select(closed + 1, &set, NULL, NULL, &(struct timeval){0, 0}));
    FD_ZERO(&set);
    FD_SET(closed, &set);
    FD_SET(in_use, &set);
    say("select of two", select(FD_SETSIZE, NULL, &set, NULL, &(struct timeval){1, 0}));
    int value = 0;
    say("FIONREAD", ioctl(closed, FIONREAD, &value));
    say("FIOCLEX", ioctl(closed, FIOCLEX));
    say("unknown request", ioctl(closed, 0x12345678, &value));
    say("F_GETFL", fcntl(closed, F_GETFL));
    say("pass", pass(closed));
    say("pass a socket", pass(in_use));
    say("sendfile to it", sendfile(closed, files[0], NULL, 1));
    say("sendfile from it", sendfile(in_use, closed, NULL, 1));
    say("dup", dup(closed));
    say("close", close(closed));
    close(in_use), close(files[0]), close(files[1]), close(unix_ends[0]), close(unix_ends[1]);
}

static void empty_buffers(void)
{
    struct iovec empty[2] = {{"x", 0}, {"y", 0}};
    char bytes[8];
    int fresh = socket(AF_INET, SOCK_STREAM, 0);
    say("writev", writev(ours, empty, 2));
    say("writev without a connection", writev(fresh, empty, 2));
    say("readv without a connection", readv(fresh, empty, 0));
    say("write without a connection", write(fresh, "", 0));
    say("writev of a datagram", writev(sender, empty, 1));
    say("nothing was sent", recv(receiver, bytes, 8, MSG_DONTWAIT));
    say("write of a datagram", write(sender, "", 0));
    say("empty datagram", recv(receiver, bytes, 8, 0));
    send(sender, "datagram", 8, 0);
    poll(&(struct pollfd){receiver, POLLIN, 0}, 1, 10000);
    say("readv", readv(receiver, empty, 2));
    say("still there", recv(receiver, bytes, 8, MSG_DONTWAIT));
    close(fresh);
    say("writev to a closed number", writev(fresh, empty, 2));
}

static void flags_of_preadv2(void)
{
    char bytes[8];
    struct iovec buffer = {bytes, 3};
    int ends[2];
    socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
    // Sockets of Linux before 6.5 do not have the flag.
    int has_nowait = preadv2(ends[0], &buffer, 1, -1, RWF_NOWAIT) < 0 && errno != EOPNOTSUPP;
    close(ends[0]), close(ends[1]);
    if (!has_nowait) return;
    say("pwritev2", pwritev2(ours, &buffer, 1, -1, RWF_NOWAIT));
    say("other flags", pwritev2(ours, &buffer, 1, -1, RWF_SYNC | RWF_DSYNC | RWF_HIPRI | RWF_APPEND));
    for (int i = 0; i < 2; i++) {
        poll(&(struct pollfd){theirs, POLLIN, 0}, 1, 10000);
        say("preadv2", preadv2(theirs, &buffer, 1, -1, RWF_NOWAIT));
    }
    say("nothing left", preadv2(theirs, &buffer, 1, -1, RWF_NOWAIT));
    say("unknown flag", preadv2(theirs, &buffer, 1, -1, 0x1000));
    say("offset", preadv2(theirs, &buffer, 1, 0, RWF_NOWAIT));
}

static void epoll_sets(void)
{
    struct epoll_event event = {EPOLLOUT, {0}};
    char bytes[8];
    int set = epoll_create1(0);
    volatile int most = 0x7fffffff;
    epoll_ctl(set, EPOLL_CTL_ADD, ours, &event);
    say("read", read(set, bytes, 8));
    say("write", write(set, bytes, 8));
    say("read nothing", read(set, bytes, 0));
    say("write nothing", write(set, bytes, 0));
    say("readv of nothing", readv(set, &(struct iovec){bytes, 0}, 1));
    say("writev of nothing", writev(set, NULL, 0));
    say("recv", recv(set, bytes, 8, 0));
    say("O_NONBLOCK", fcntl(set, F_SETFL, O_NONBLOCK));
    say("flags", fcntl(set, F_GETFL) & (O_NONBLOCK | O_ACCMODE));
    say("FIONBIO", ioctl(set, FIONBIO, &(int){0}));
    say("flags", fcntl(set, F_GETFL) & (O_NONBLOCK | O_ACCMODE));
    say("too many events", epoll_wait(set, &event, most, 0));
    say("one event", epoll_wait(set, &event, 1, 0));
    say("O_DIRECT of a socket", fcntl(ours, F_SETFL, O_DIRECT));
    close(set);
}

static void sources_of_sendfile(void)
{
    int event = eventfd(1, 0), ends[2];
    pipe(ends);
    write(ends[1], "p", 1);
    say("unknown flag of splice", splice(ends[0], NULL, ours, NULL, 1, 0x100));
    say("eventfd", sendfile(ours, event, NULL, 8));
    say("pipe", sendfile(ours, ends[0], NULL, 8));
    close(event), close(ends[0]), close(ends[1]);
}

// `close` with `SO_LINGER` waits while the peer does not read, also for data that the peer has no space for.
static void lingering_close(void)
{
    static char data[65536];
    struct linger one_second = {1, 1};
    struct timespec before, after;
    setsockopt(ours, SOL_SOCKET, SO_LINGER, &one_second, sizeof one_second);
    for (int idle = 0; idle < 4;) {
        if (send(ours, data, sizeof data, MSG_DONTWAIT) < 0) usleep(10000), idle++;
    }
    clock_gettime(CLOCK_MONOTONIC, &before);
    say("close", close(ours));
    clock_gettime(CLOCK_MONOTONIC, &after);
    double seconds = after.tv_sec - before.tv_sec + (after.tv_nsec - before.tv_nsec) / 1e9;
    printf("waited: %d\n", seconds > 0.5);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IONBF, 0);
    open_connection();
    closed_numbers();
    open_connection();
    open_datagrams();
    empty_buffers();
    flags_of_preadv2();
    epoll_sets();
    sources_of_sendfile();
    lingering_close();
    puts("end");
}
