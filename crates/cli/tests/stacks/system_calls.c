// System calls by number, `vfork`, and calls whose results depend on more than one descriptor. The output must
// be the same on a stack and on the kernel.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int a, b;

static void say(const char *call, long result)
{
    printf("%s: %ld %s\n", call, result, result < 0 ? strerrorname_np(errno) : "");
}

static struct sockaddr_in loopback(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
}

// Connects `b` to `a`.
static void connect_pair(void)
{
    struct sockaddr_in at = loopback(0);
    socklen_t len = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (void *)&at, sizeof at);
    listen(listener, 1);
    getsockname(listener, (void *)&at, &len);
    b = socket(AF_INET, SOCK_STREAM, 0);
    connect(b, (void *)&at, sizeof at);
    a = accept(listener, NULL, NULL);
    close(listener);
}

static void waits(void)
{
    const struct timespec limit = {0, 30000000};
    struct timespec left = limit;
    unsigned long mask = 0;
    struct pollfd fd = {a, POLLPRI, 0};
    say("ppoll", syscall(SYS_ppoll, &fd, 1, &left, NULL, 8));
    printf("left %ld %ld\n", (long)left.tv_sec, left.tv_nsec);
    fd.events = POLLOUT;
    left = (struct timespec){100, 0};
    say("ppoll, ready", syscall(SYS_ppoll, &fd, 1, &left, NULL, 8));
    printf("less is left: %d\n", left.tv_sec == 99);
    left = (struct timespec){0, 0};
    say("ppoll, no time", syscall(SYS_ppoll, &fd, 1, &left, &mask, 8));
    say("ppoll, length of mask", syscall(SYS_ppoll, &fd, 1, &left, &mask, 4));
    say("ppoll, length without mask", syscall(SYS_ppoll, &fd, 1, &left, NULL, 4));
    left = (struct timespec){0, -1};
    say("ppoll, time", syscall(SYS_ppoll, &fd, 1, &left, NULL, 8));
    left = (struct timespec){0, 0};
    // The kernel takes 32 bits.
    say("ppoll, count", syscall(SYS_ppoll, &fd, 0x100000001ul, &left, NULL, 8));
    say("poll, count", syscall(SYS_poll, &fd, 0x100000001ul, 0));

    struct {
        const void *mask;
        size_t len;
    } pair = {NULL, 8};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(b, &set);
    left = limit;
    say("pselect6", syscall(SYS_pselect6, b + 1, &set, NULL, NULL, &left, &pair));
    printf("left %ld %ld\n", (long)left.tv_sec, left.tv_nsec);
    FD_SET(b, &set);
    left = (struct timespec){100, 0};
    say("pselect6, ready", syscall(SYS_pselect6, b + 1, NULL, &set, NULL, &left, NULL));
    printf("less is left: %d\n", left.tv_sec == 99);
    pair.mask = &mask;
    pair.len = 4;
    say("pselect6, length of mask", syscall(SYS_pselect6, b + 1, &set, NULL, NULL, &left, &pair));

    say("epoll_create 0", syscall(SYS_epoll_create, 0));
    say("epoll_create -1", syscall(SYS_epoll_create, -1));
    say("epoll_create1", syscall(SYS_epoll_create1, 77));
    int epoll = syscall(SYS_epoll_create, 5);
    struct epoll_event event = {EPOLLPRI, {.fd = a}};
    epoll_ctl(epoll, EPOLL_CTL_ADD, a, &event);
    say("epoll_pwait, length of mask", syscall(SYS_epoll_pwait, epoll, &event, 1, 0, &mask, 4));
    say("epoll_pwait", syscall(SYS_epoll_pwait, epoll, &event, 1, 0, &mask, 8));
    left = (struct timespec){0, 0};
    say("epoll_pwait2, length of mask", syscall(SYS_epoll_pwait2, epoll, &event, 1, &left, &mask, 4));
    say("epoll_pwait2", syscall(SYS_epoll_pwait2, epoll, &event, 1, &left, &mask, 8));

    // More descriptors of the kernel than are taken without an allocation.
    enum { MANY = 200 };
    for (int i = 0; i < MANY; i++) {
        int ends[2];
        pipe(ends);
        write(ends[1], "x", 1);
        event = (struct epoll_event){EPOLLIN, {.u32 = i}};
        epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &event);
    }
    static struct epoll_event events[2 * MANY];
    long count = epoll_wait(epoll, events, 2 * MANY, 1000);
    int seen[MANY] = {0}, twice = 0;
    for (long i = 0; i < count; i++)
        twice += seen[events[i].data.u32]++;
    say("descriptors of the kernel", count);
    printf("reported twice: %d\n", twice);
}

static void splices(void)
{
    int ends[2], epoll = epoll_create1(0), udp = socket(AF_INET, SOCK_DGRAM, 0);
    pipe(ends);
    write(ends[1], "abc", 3);
    say("splice into epoll", splice(ends[0], NULL, epoll, NULL, 3, 0));
    say("splice from epoll", splice(epoll, NULL, ends[1], NULL, 3, 0));
    say("splice into udp", splice(ends[0], NULL, udp, NULL, 3, SPLICE_F_NONBLOCK));
    struct sockaddr_in at = loopback(0);
    socklen_t len = sizeof at;
    int peer = socket(AF_INET, SOCK_DGRAM, 0);
    bind(peer, (void *)&at, sizeof at);
    getsockname(peer, (void *)&at, &len);
    connect(udp, (void *)&at, sizeof at);
    say("splice into connected udp", splice(ends[0], NULL, udp, NULL, 3, SPLICE_F_NONBLOCK));
    char bytes[8];
    say("recv", recv(peer, bytes, sizeof bytes, 0));

    // The time of the datagram that was received last.
    struct timeval time = {0};
    struct timespec nanos = {0};
    say("SIOCGSTAMP", ioctl(peer, SIOCGSTAMP_OLD, &time));
    printf("a time: %d\n", time.tv_sec > 1000000000);
    say("SIOCGSTAMPNS", ioctl(peer, SIOCGSTAMPNS_OLD, &nanos));
    printf("the same time: %d\n", nanos.tv_sec == time.tv_sec && nanos.tv_nsec / 1000 == time.tv_usec);
    say("SIOCGSTAMP of a stream", ioctl(a, SIOCGSTAMP_OLD, &time));
}

static void vforks(const char *self)
{
    struct timespec before, after, time = {0, 100000000};
    for (int executes = 0; executes < 2; executes++) {
        clock_gettime(CLOCK_MONOTONIC, &before);
        pid_t child = vfork();
        if (child == 0) {
            nanosleep(&time, NULL);
            if (executes)
                execl(self, self, "sleep", NULL);
            _exit(3);
        }
        clock_gettime(CLOCK_MONOTONIC, &after);
        long ms = (after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000;
        printf("parent waited: %d\n", ms >= 100);
        int status = 0;
        printf("child runs: %d\n", waitpid(child, &status, WNOHANG) == 0 && executes);
        if (executes) {
            kill(child, SIGTERM);
            waitpid(child, &status, 0);
            printf("signal %d\n", WTERMSIG(status));
        }
    }
    // The sockets work as before.
    say("send", send(b, "x", 1, 0));
    char byte;
    say("recv", recv(a, &byte, 1, 0));
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        sleep(60);
        return 0;
    }
    connect_pair();
    waits();
    splices();
    fflush(stdout);
    vforks(argv[0]);
    printf("end\n");
    return 0;
}
