// A handler that libc does not know interrupts calls of this program and forks. Such a child must share no memory with
// the stack: nothing that the call does when it continues may reach the parent.
//
// fork_in_call FILE   makes calls on a connection to itself while a timer forks, until FILE is gone. Prints in which
//                     kinds of children the memory of the stack was private, and whether any had it both ways.
// fork_in_call FILE continue|limited
//                     lets the children return from the handler, continue the call, and go on without the stack.
//                     Another thread makes calls, too. With `limited` the kernel refuses the children memory.
//                     Prints how many went on, and how many ended or hung.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { OUTSIDE = 1, ISOLATED = 2, PARTLY = 3 };

static int seen[4];
// Number of calls that sent something, now and when a child was last isolated only in part.
static volatile unsigned sends, sends_then;

static long raw(long number, long a, long b, long c, long d)
{
    register long r10 __asm__("r10") = d;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

__asm__(".text\nrestorer:\nmov $15, %rax\nsyscall\n");
extern void restorer(void);

// Looks at the mappings of channels and clients, without the library, and exits with what they are.
static void inspect_child(void)
{
    static char maps[1 << 20];
    int at = 0, got, shared = 0, own = 0;
    long fd = raw(SYS_open, (long)"/proc/self/maps", O_RDONLY, 0, 0);
    while ((got = raw(SYS_read, fd, (long)maps + at, sizeof maps - 1 - at, 0)) > 0) at += got;
    maps[at] = 0;
    for (char *line = maps, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        if (!strstr(line, "memfd:ginnel-c")) continue;
        shared += strstr(line, " rw-s ") != 0, own += strstr(line, " rw-p ") != 0;
    }
    raw(SYS_exit_group, own && shared ? PARTLY : own ? ISOLATED : OUTSIDE, 0, 0, 0);
}

static void handler(int signal)
{
    (void)signal;
    int error = errno, status;
    pid_t child = fork();
    if (child == 0) inspect_child();
    while (waitpid(child, &status, 0) < 0 && errno == EINTR);
    int found = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    // The call that exchanges the channels after a restart counts once: its child cannot use the new ones.
    if (found != PARTLY || sends != sends_then) seen[found & 3]++;
    if (found == PARTLY) sends_then = sends;
    errno = error;
}

// Exit status of children that have gone on.
enum { WENT_ON = 42 };

// Expires once. The handler starts it again, so that long handlers do not keep the calls from progress.
static const struct itimerval once = {{0, 0}, {0, 2000}};

static volatile int is_child, in_child_of_call, is_limited;
static int went_on, went_on_in_call, ended_or_hung;

// Forks, and lets the child return into the call that was interrupted.
static void continue_handler(int signal)
{
    (void)signal;
    int error = errno, status = 0;
    struct rlimit limit, low;
    getrlimit(RLIMIT_DATA, &limit);
    low = limit, low.rlim_cur = 4096; // 0 would not limit anything (`may_expand_vm`).
    if (is_limited) setrlimit(RLIMIT_DATA, &low);
    pid_t child = fork();
    setrlimit(RLIMIT_DATA, &limit);
    if (child == 0) {
        is_child = 1;
        static char maps[1 << 20];
        int at = 0, got;
        long fd = raw(SYS_open, (long)"/proc/self/maps", O_RDONLY, 0, 0);
        while ((got = raw(SYS_read, fd, (long)maps + at, sizeof maps - 1 - at, 0)) > 0) at += got;
        raw(SYS_close, fd, 0, 0, 0);
        maps[at] = 0;
        // The report of the parent is not mapped in children of calls, and has a mapping of its own in others.
        in_child_of_call = !strstr(maps, "ginnel-descriptors");
        int refused = 0;
        for (char *line = maps, *end; (end = strchr(line, '\n')); line = end + 1) {
            *end = 0;
            refused += strstr(line, "memfd:ginnel-c") && strstr(line, " r--p ");
        }
        if (in_child_of_call && is_limited && !refused) raw(SYS_exit_group, 4, 0, 0, 0);
        errno = error;
        return;
    }
    int found = 0;
    for (int i = 0; i < 10000 && (found = waitpid(child, &status, WNOHANG)) == 0; i++) {
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, 0);
    }
    if (found == 0) kill(child, SIGKILL), waitpid(child, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == WENT_ON) went_on++;
    else if (code == WENT_ON + 1) went_on_in_call++;
    else fprintf(stderr, "a child: status %x\n", status), ended_or_hung++;
    setitimer(ITIMER_REAL, &once, 0);
    errno = error;
}

// In a child whose call has ended: everything but the stack works.
static void go_on(void)
{
    int pair[2];
    char byte = 'x', *memory = malloc(1 << 20);
    if (!memory || socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) _exit(1);
    memset(memory, 1, 1 << 20);
    if (write(pair[0], &byte, 1) != 1 || read(pair[1], &byte, 1) != 1 || byte != 'x') _exit(2);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) _exit(3);
    close(fd);
    exit(in_child_of_call ? WENT_ON + 1 : WENT_ON);
}

// Accepts a connection. A child that goes on may take the connection of its parent.
static int accept_one(int listener)
{
    int to = accept(listener, 0, 0);
    for (int i = 0; i < 50 && to < 0 && errno == EAGAIN && !is_child; i++) {
        struct pollfd at = {listener, POLLIN, 0};
        poll(&at, 1, 10);
        to = accept(listener, 0, 0);
    }
    return to;
}

static void *other_thread(void *at)
{
    for (;;) {
        int from = socket(AF_INET, SOCK_STREAM, 0);
        char bytes[64];
        bind(from, at, 0);
        for (int i = 0; i < 100; i++) recv(from, bytes, sizeof bytes, MSG_DONTWAIT);
        close(from);
    }
    return 0;
}

// Returns whether to make further calls: FILE is there, or children of one kind are missing and 20 seconds have not
// passed since it was removed. On a busy machine few signals arrive outside of calls.
static int makes_calls(const char *file, int lets_continue)
{
    static time_t until;
    if (access(file, F_OK) == 0) return 1;
    if (!until) until = time(0) + 20;
    return lets_continue && !is_child && (went_on == 0 || went_on_in_call <= 5) && time(0) < until;
}

// Spends time outside of calls.
static void compute(void)
{
    for (volatile int i = 0; i < 10000; i++);
}

static void install(void (*handler)(int))
{
    struct { void (*handler)(int); unsigned long flags; void (*restorer)(void); unsigned long mask; } action =
        {handler, 0x04000000ul | SA_RESTART, restorer, 0};
    if (raw(SYS_rt_sigaction, SIGALRM, (long)&action, 0, 8)) exit(3);
}

int main(int count, char **arguments)
{
    if (count < 2) return 2;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7300), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 8)) return 1;
    install(count > 2 ? continue_handler : handler);
    if (count > 2) {
        is_limited = !strcmp(arguments[2], "limited");
        sigset_t set;
        pthread_t thread;
        fcntl(listener, F_SETFL, O_NONBLOCK);
        sigfillset(&set);
        pthread_sigmask(SIG_SETMASK, &set, 0);
        pthread_create(&thread, 0, other_thread, &at);
        sigemptyset(&set);
        pthread_sigmask(SIG_SETMASK, &set, 0);
    }
    struct itimerval every = {{0, 2000}, {0, 2000}};
    setitimer(ITIMER_REAL, count > 2 ? &once : &every, 0);
    fclose(fopen(arguments[1], "w"));
    while (makes_calls(arguments[1], count > 2)) {
        int from = socket(AF_INET, SOCK_STREAM, 0), to = -1;
        char bytes[4096] = {0};
        if (connect(from, (void *)&at, sizeof at) == 0 && (to = accept_one(listener)) >= 0) {
            // Until the connection is reset.
            for (; makes_calls(arguments[1], count > 2) && send(from, bytes, sizeof bytes, MSG_NOSIGNAL) > 0; sends++) {
                for (int i = 0; i < 50; i++) {
                    recv(to, bytes, sizeof bytes, MSG_DONTWAIT);
                    if (is_child) go_on();
                }
                if (count > 2) compute();
                if (is_child) go_on();
            }
        }
        if (is_child) go_on();
        close(from), close(to);
        if (is_child) go_on();
    }
    if (is_child) go_on();
    every.it_value.tv_usec = every.it_interval.tv_usec = 0;
    setitimer(ITIMER_REAL, &every, 0);
    if (count > 2) {
        printf("went on: %s, in calls: %s, ended or hung: %d\n", went_on > 0 ? "some" : "none",
               went_on_in_call > 5 ? "many" : "few", ended_or_hung);
        return 0;
    }
    printf("isolated: %s, partly: %d\n", seen[ISOLATED] > 5 ? "many" : "few", seen[PARTLY]);
    return 0;
}
