// A signal handler leaves blocking calls by siglongjmp, and the program keeps using the same sockets.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static sigjmp_buf out;
static struct sockaddr_in at;
static int listener, ours, theirs, set, idle[2];
static timer_t inner;
static char bytes[1 << 20];

static void jump(int number)
{
    siglongjmp(out, 1);
}

static void alarm_in(int ms)
{
    struct itimerval in = {.it_value = {.tv_usec = ms * 1000}};
    setitimer(ITIMER_REAL, &in, 0);
}

static int deep(int (*call)(void), int depth)
{
    volatile char room[512];
    room[0] = depth;
    return depth ? deep(call, depth - 1) + room[0] * 0 : call();
}

static void leave(const char *name, int (*call)(void), int depth)
{
    if (!sigsetjmp(out, 1)) {
        alarm_in(30);
        int result = deep(call, depth);
        alarm_in(0);
        printf("%s: returned %d\n", name, result);
    } else {
        printf("%s: left\n", name);
    }
    fflush(stdout);
}

static int by_recv(void) { return recv(ours, bytes, 1, 0); }
static int by_send(void) { for (;;) if (send(ours, bytes, sizeof bytes, 0) < 0) return -1; }
static int by_accept(void) { return accept(listener, 0, 0); }
static int by_poll(void) { struct pollfd p = {ours, POLLIN, 0}; return poll(&p, 1, -1); }
static int by_select(void) { fd_set r; FD_ZERO(&r); FD_SET(ours, &r); return select(ours + 1, &r, 0, 0, 0); }
static int by_epoll(void) { struct epoll_event e; return epoll_wait(set, &e, 1, -1); }
static int by_connect(void)
{
    // Once the backlog is full, connect gets no answer and blocks.
    for (;;)
        if (connect(socket(AF_INET, SOCK_STREAM, 0), (void *)&at, sizeof at)) return -1;
}

// Waits for a socket of the stack and a descriptor of the kernel, and also in a handler that interrupted such a wait.
static int by_poll_of_both(void)
{
    struct pollfd p[] = {{ours, POLLIN, 0}, {idle[0], POLLIN, 0}};
    return poll(p, 2, -1);
}
static int by_select_of_both(void)
{
    fd_set r;
    FD_ZERO(&r);
    FD_SET(ours, &r);
    FD_SET(idle[0], &r);
    return select((ours > idle[0] ? ours : idle[0]) + 1, &r, 0, 0, 0);
}
static void wait_too(int number) { alarm_in(2), by_poll_of_both(); }
static int by_both(void)
{
    timer_settime(inner, 0, &(struct itimerspec){.it_value = {.tv_nsec = 1000000}}, 0);
    alarm_in(20);
    return by_poll_of_both();
}

static size_t used(void)
{
    struct mallinfo2 now = mallinfo2();
    return now.uordblks + now.hblkhd;
}

// Memory that an abandoned call had allocated is not leaked.
static void leave_often(void)
{
    int (*calls[])(void) = {by_poll, by_select, by_epoll, by_recv, by_poll_of_both, by_select_of_both, by_both};
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = wait_too}, 0);
    timer_create(CLOCK_MONOTONIC, &(struct sigevent){.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1}, &inner);
    if (pipe(idle)) perror("pipe");
    for (int i = 0; i < 7; i++) {
        size_t before = 0;
        for (volatile int round = -10; round < 100; round++) {
            if (!round) before = used();
            if (!sigsetjmp(out, 1)) {
                alarm_in(2);
                printf("returned %d\n", calls[i]());
            }
        }
        // Other threads may have allocated or freed some memory, but a leak in each call would exceed this limit.
        size_t after = used();
        printf("call %d: memory is lost: %d\n", i, after > before + 2000);
    }
    signal(SIGUSR1, SIG_IGN);
    alarm_in(0);
}

static void pair(void)
{
    ours = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ours, (void *)&at, sizeof at)) perror("connect");
    theirs = accept(listener, 0, 0);
}

static void *beside(void *unused)
{
    char c;
    long got = recv(theirs, &c, 1, 0);
    printf("thread: %ld\n", got);
    return 0;
}

int main(void)
{
    struct sigaction action = {.sa_handler = jump, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, 0);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = inet_addr("127.0.0.1");
    bind(listener, (void *)&at, sizeof at);
    socklen_t n = sizeof at;
    getsockname(listener, (void *)&at, &n);
    listen(listener, 5);
    pair();
    set = epoll_create1(0);
    struct epoll_event e = {EPOLLIN, {.fd = 7}};
    epoll_ctl(set, EPOLL_CTL_ADD, ours, &e);

    struct { const char *name; int (*call)(void); } calls[] = {
        {"recv", by_recv}, {"accept", by_accept}, {"poll", by_poll}, {"select", by_select}, {"epoll_wait", by_epoll},
    };
    // From different call depths.
    for (int round = 0; round < 20; round++)
        for (int i = 0; i < 5; i++) leave(calls[i].name, calls[i].call, round % 3 * 5);
    leave_often();
    // All calls still work on these sockets.
    send(theirs, "abc", 3, 0);
    alarm_in(0);
    printf("epoll_wait %d, poll %d, select %d\n", by_epoll(), by_poll(), by_select());
    printf("recv %d %c\n", by_recv(), bytes[0]);
    recv(ours, bytes, 2, MSG_WAITALL);
    // Another thread blocks in recv while this one abandons a call; it still receives its byte.
    pthread_t thread;
    sigset_t alarms;
    sigemptyset(&alarms), sigaddset(&alarms, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarms, 0), pthread_create(&thread, 0, beside, 0), pthread_sigmask(SIG_UNBLOCK, &alarms, 0);
    usleep(20000);
    leave("recv beside it", by_recv, 3);
    send(ours, "x", 1, 0);
    pthread_join(thread, 0);
    leave("send", by_send, 0);
    // The sent bytes arrive, then end of file: the abandoned call does not keep the closed socket open.
    close(ours);
    long total = 0, got;
    while ((got = recv(theirs, bytes, sizeof bytes, 0)) > 0) total += got;
    printf("then %s, %ld\n", total > 0 ? "bytes" : "nothing", got);
    close(theirs);
    // A socket on which a call was abandoned is closed by close.
    pair();
    leave("recv", by_recv, 8);
    close(ours);
    printf("end %zd\n", recv(theirs, bytes, 1, 0));
    close(theirs);
    leave("connect", by_connect, 2);
    // No descriptor is leaked.
    int before = dup(0);
    close(before);
    for (int i = 0; i < 50; i++) {
        listener = socket(AF_INET, SOCK_STREAM, 0);
        listen(listener, 1);
        if (!sigsetjmp(out, 1)) {
            alarm_in(5);
            by_accept();
        }
        close(listener);
    }
    int after = dup(0);
    printf("numbers lost: %d\n", after > before + 3);
    return 0;
}
